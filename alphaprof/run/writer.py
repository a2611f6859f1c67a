"""How a run is written: by one process at a time, in six steps (docs/decisions/046 says why).

1. `opened` reserves the directory. A second writer is refused; a killed one's lock is free at once.
2. Every step goes over the shards that it has not recorded yet (`lacking`), writes their files, and then the record that
   names them: at most one shard of work is lost.
3. `finish` collects documents, has the totals written, and writes the manifest of everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from alphaprof.errors import RunDamaged, RunMismatch
from alphaprof.run.journal import STEPS, Journal, Record
from alphaprof.run.manifest import DOCUMENTS, MANIFEST, UNFINISHED, File, Manifest, Shard, part_name, read_manifest
from alphaprof.run.parquet import table_content, totals_content
from alphaprof.run.place import clear, require_free
from alphaprof.run.reader import AFRESH, AGAIN_BY_RESUME, Run
from alphaprof.run.schema import CONTINUATION_COLUMNS, DOCUMENT_COLUMNS, PROMPT_COLUMNS, Column, arrow_schema
from alphaprof.run.storage import Check, Storage, storage_of

FREE = ("decision", "execution")  # parts of the profile that may change when a run is resumed


class RunWriter(Run):
    """A run that this process writes. `begun`: it has a manifest; `journal`: records of each step by number of the shard."""

    def __init__(self, where: Storage | Path | str, manifest: Manifest | None = None, check: Check | None = None) -> None:
        if manifest is not None:
            super().__init__(where, manifest)
        self.begun, self._check, self._kept = manifest is not None, check, None
        self.storage = storage_of(where) if isinstance(where, (Path, str)) else where
        self.journal = Journal()
        self.files = dict(manifest.files) if manifest is not None else {}
        self._forgotten = list[tuple[str, int]]()  # segments, by step and first shard, that hold more than the journal

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, where: Storage | Path | str, resume: bool = False, hint: str = "", take_over: bool = False
    ) -> Iterator[Self]:
        """Reserve the directory of a run for this process: a new one, or with `resume` one that is there. What ends before
        the run has a manifest leaves nothing. `hint`: what to do if a run is there, without `resume`; `take_over`: as of
        `Storage.owned`. Raises `RunExists`, `RunUnreadable` and `DiskFull`.
        """
        storage = storage_of(where) if isinstance(where, (Path, str)) else where
        made = storage.make()
        try:
            with storage.owned(take_over) as check:
                storage.remove_temporary()
                require_free(storage, hint, resume)
                going = storage.has(MANIFEST)
                if not going:
                    clear(storage)
                run = cls(storage, read_manifest(storage) if going else None, check)
                if going:  # what cannot be read counts as not recorded: it is done again
                    run.journal = Journal.of(storage, damaged=True)
                    run.files |= run.journal.files
                try:
                    yield run
                finally:
                    if not run.begun:
                        with contextlib.suppress(Exception):  # nothing may hide what ended the block
                            clear(storage)
        finally:
            if made:
                with contextlib.suppress(Exception):
                    storage.discard()  # if it is empty

    def file(self, name: str) -> File | None:
        """Return what was written under a name; None: nothing."""
        return self.files.get(name)

    def lacking(self, step: str) -> list[int]:
        """Return the shards that a step has not recorded."""
        return [index for index in range(self.manifest.staged) if index not in self.journal[step]]

    def forget_damaged(self) -> list[int]:
        """Forget the records of texts and rows that are not as they were written, and return their shards; storage has them
        until something is written. Raises `RunDamaged` for prompts, and `RunUnreadable` for what cannot be read now.
        """
        if lost := self.lacking("prompts"):
            raise RunDamaged(f"{self.path} has lost the records of {len(lost)} shards of prompts", AFRESH)
        found = set(self.journal["rows"]) - set(self.journal["texts"])  # whose records of texts are lost
        found |= {*self.lacking("texts"), *self.lacking("rows")} if self.manifest.status == "complete" else set()
        for step in STEPS:
            names = {name: index for index, record in self.journal[step].items() for name in record.files}
            reasons = zip(names.values(), self.storage.each(self.failure, list(names)), strict=True)
            damaged = {index: why for index, why in reasons if why}
            if damaged and step == "prompts":
                raise RunDamaged(next(iter(damaged.values())), AFRESH)
            found |= damaged.keys()
            self._forgotten += self.journal.forget(step, found) if step != "prompts" else []
        if found:
            self.manifest = dataclasses.replace(self.manifest, status="running")
        return sorted(found)

    def stage(self, prompts: pa.Table, digest: str) -> None:
        """Write the documents of the next shard as they are to be measured."""
        index = len(self.journal["prompts"])
        self._record("prompts", Shard(index, len(prompts), 0, digest), {"prompts": (prompts, PROMPT_COLUMNS)})

    def begin(self, manifest: Manifest) -> None:
        """Write the manifest of a run whose prompts are staged."""
        self.begun = True
        self.write_manifest(dataclasses.replace(manifest, staged=len(self.journal["prompts"])))

    def write_texts(self, shard: Shard, texts: pa.Table, seconds: float = 0.0) -> None:
        """Write the continuations of a shard."""
        self._record("texts", shard, {"continuations": (texts, CONTINUATION_COLUMNS)}, seconds)

    @property
    def writes_texts(self) -> bool:
        """Whether some of the texts are written, and some are not."""
        return (bool(self.journal["texts"]) or UNFINISHED in self.files) and bool(self.lacking("texts"))

    def keep_texts(self, texts: pa.Table) -> None:
        """Write the texts of a shard that is not complete."""
        self.write_table(UNFINISHED, texts, CONTINUATION_COLUMNS)
        self.update()

    def kept_texts(self) -> pa.Table:
        """Return the texts that were kept of a shard; damaged ones are lost."""
        if UNFINISHED not in self.files or self.failure(UNFINISHED):
            return arrow_schema(CONTINUATION_COLUMNS).empty_table()
        return self._table(UNFINISHED, AGAIN_BY_RESUME, CONTINUATION_COLUMNS)

    def write_rows(self, shard: Shard, positions: Mapping[str, pa.Table], seconds: float = 0.0) -> None:
        """Write the position logs of a shard, by draft."""
        tables = {f"positions/draft={draft}": (table, self.log_of(draft).columns) for draft, table in positions.items()}
        self._record("rows", shard, tables, seconds)

    def write_totals(self, draft: str, blocks: Iterable[Sequence[pa.Table]]) -> None:
        """Write the totals of a draft, see `parquet.totals_content`. The next manifest names them."""
        name = f"totals/draft={draft}/{part_name(0)}"
        self.write(name, totals_content(blocks, self.totals_columns, name))

    def finish(self, write_totals: Callable[[RunWriter], None]) -> None:
        """Collect the documents, have the totals written, and write the manifest of everything. Raises `RunMismatch` if some
        shards are not measured yet, or not on the documents that were staged for them.
        """
        rows, prompts = self.journal["rows"], self.journal["prompts"]
        odd = [at for at, one in rows.items() if at not in prompts or one.shard.digest != prompts[at].shard.digest]
        if missing := sorted({*self.lacking("texts"), *self.lacking("rows"), *odd}):
            first = ", ".join([*map(str, missing[:5]), *["..."] * (len(missing) > 5)])
            raise RunMismatch(
                f"{self.path} lacks {len(missing)} of {self.manifest.staged} shards ({first})",
                "measure them with alphaprof profile --resume",
            )
        shards = tuple(rows[index].shard for index in range(self.manifest.staged))
        self.manifest = dataclasses.replace(self.manifest, shards=shards)
        self.write_table(DOCUMENTS, self.collected(), DOCUMENT_COLUMNS)
        write_totals(self)
        if self.files.pop(UNFINISHED, None):
            self.storage.remove(UNFINISHED)
        self.write_manifest(dataclasses.replace(self.manifest, status="complete"))

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest."""
        self.write_manifest(dataclasses.replace(self.manifest, **changes))

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace manifest.json; it names all files that are written by then."""
        self.manifest = dataclasses.replace(manifest, files=dict(sorted(self.files.items())))
        self._put(MANIFEST, (self.manifest.to_json() + "\n").encode())

    def _record(
        self, step: str, shard: Shard, tables: Mapping[str, tuple[pa.Table, Sequence[Column]]], seconds: float = 0.0
    ) -> None:
        """Write the files of a shard, tables by folder, and then the record that names them."""
        names = {f"{folder}/{part_name(shard.index)}": table for folder, table in tables.items()}
        for name, (table, columns) in names.items():
            self.write_table(name, table, columns)
        self._journalize(step, Record(shard, {name: self.files[name] for name in names}, round(seconds, 3)))

    def copy(self, step: str, index: int, record: Record, source: Run) -> None:
        """Write what a step of another run has recorded as that of a shard of this run."""
        names = {name: f"{name.rpartition('/')[0]}/{part_name(index)}" for name in record.files}
        for theirs, name in names.items():
            self.write(name, source.content(theirs, AGAIN_BY_RESUME))
        files = {name: self.files[name] for name in names.values()}
        self._journalize(step, Record(dataclasses.replace(record.shard, index=index), files, record.seconds))

    def _journalize(self, step: str, record: Record) -> None:
        self.journal[step][record.shard.index] = record
        self._put(*self.journal.segment(step, record.shard.index))

    def write_table(self, name: str, table: pa.Table, columns: Sequence[Column]) -> None:
        """Write a table. The next record or manifest names it."""
        self.write(name, table_content(table, columns, name))

    def write(self, name: str, content: pa.Buffer) -> None:
        """Write a file. The next record or manifest names it."""
        if self._forgotten:  # taken out of storage first: this process may end before it is written again
            forgotten, self._forgotten = self._forgotten, []
            self.write_manifest(self.manifest)
            for each in forgotten:
                self._put(*self.journal.segment(*each))
        self.storage.put(name, content)
        self.files[name] = File.of(content)

    def _put(self, name: str, content: bytes) -> None:
        """Write what names other files, unless somebody else writes this run by now."""
        if self._check is not None:
            self._check()
        self.storage.put(name, content)
