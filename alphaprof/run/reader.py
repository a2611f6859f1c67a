"""A run as readers see it: its documents, position log, totals and step times, checked against the manifest and the records
that name them. `run.writer` writes it.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from alphaprof.errors import NoPositionLog, OptionInvalid, RunDamaged, RunMismatch, RunUnreadable, shown
from alphaprof.run.journal import Journal
from alphaprof.run.manifest import (
    DOCUMENTS,
    ENGINES,
    LATENCY,
    File,
    Manifest,
    Shard,
    part_name,
    read_manifest,
)
from alphaprof.run.schema import (
    CONTINUATION_COLUMNS,
    DOCUMENT_COLUMNS,
    ENGINE_COLUMNS,
    LATENCY_COLUMNS,
    PROMPT_COLUMNS,
    Column,
    LogRules,
    arrow_schema,
    imported_totals_columns,
    totals_columns,
)
from alphaprof.run.storage import LocalStorage, Storage, reading, storage_of

AGAIN_BY_RESUME = "measure it again with alphaprof profile --resume"
AGAIN = "import the requests again into a new directory"
AFRESH = "profile again into a new directory"
COPY = "write it again with alphaprof profile --resume, or copy it again from the run that it comes from"
TIMED_AGAIN = "time the steps again with alphaprof profile --resume; without this file, reports have no step times"


class Run:
    """A run directory, or the same in an object store. Readers see complete shards only; a missing or foreign directory
    raises `RunUnreadable`, and so does a file that is not as it was written.
    """

    def __init__(self, where: Storage | Path | str, manifest: Manifest) -> None:
        self.storage = storage_of(where) if isinstance(where, (Path, str)) else where
        self.manifest = manifest
        self._kept: dict[str, pa.Buffer] | None = None

    @classmethod
    def open(cls, where: Storage | Path | str) -> Self:
        """Return the run in storage, with the shards that are recorded by now."""
        storage = storage_of(where) if isinstance(where, (Path, str)) else where
        run = cls(storage, read_manifest(storage))
        run.refresh()
        return run

    @property
    def path(self) -> Path | str:
        """Where it lies: a directory, or a URI without credentials."""
        return self.storage.path if isinstance(self.storage, LocalStorage) else self.storage.shown

    def view(self, manifest: Manifest, keep: bool = False) -> Run:
        """Return the same run seen through another manifest: with some of its shards, or another decision. `keep`: what was
        read of its log stays in memory, so that every file is fetched once.
        """
        other = Run(self.storage, manifest)
        other._kept = {} if keep else None
        return other

    def refresh(self) -> None:
        """Take in what was recorded meanwhile, of a run that is running: the longest prefix of shards without a gap."""
        if self.manifest.status == "complete":
            return
        journal, shards = Journal.of(self.storage), list[Shard]()
        while (record := journal["rows"].get(len(shards))) is not None:
            shards.append(record.shard)
        times = {name: file for name, file in self.manifest.files.items() if name in (LATENCY, ENGINES)}
        self.manifest = dataclasses.replace(self.manifest, shards=tuple(shards), files=journal.files | times)

    @property
    def rules(self) -> list[str]:
        """Ids of the rules whose acceptance the log holds."""
        return list(self.manifest.profile.rules)

    @property
    def log_rules(self) -> LogRules:
        """What the log holds of which rules."""
        return LogRules(tuple(self.rules), self.manifest.certified)

    def log_of(self, draft: str) -> LogRules:
        """Return what the log of a draft holds of them."""
        return self.log_rules.of(self.manifest.drafts[draft])

    @property
    def gammas(self) -> list[int]:
        """The speculation lengths that the totals hold."""
        return list(self.manifest.profile.gammas)

    @property
    def totals_columns(self) -> tuple[Column, ...]:
        """The columns of the totals."""
        return totals_columns(self.gammas) if self.scored else imported_totals_columns(self.gammas)

    @property
    def imported(self) -> bool:
        """Whether the run comes from an engine's metrics: documents and totals at one gamma, no position log, no text."""
        return self.manifest.imported is not None

    @property
    def scored(self) -> bool:
        """Whether the target scored every position: not in a run that was imported, from metrics or from texts alone."""
        return self.manifest.target.noise is not None

    @property
    def has_log(self) -> bool:
        """Whether there is a position log: not in an imported run, nor if a copy of the run left it out."""
        first = next((name for name in self.manifest.files if name.startswith("positions/")), "")
        with reading(f"{self.path}/positions", "give read access to it"):  # to list a folder of many shards takes long
            return bool(first) and (self.storage.has(first) or bool(self.storage.names("positions")))

    def require_complete(self) -> None:
        """Raise `RunMismatch` for a run that is not complete."""
        if self.manifest.status != "complete":
            raise RunMismatch(f"{self.path} is not complete", "finish it with alphaprof profile --resume first")

    def require_positions(self) -> None:
        """Raise `NoPositionLog` for an imported run."""
        if not self.scored:
            known = f"rounds of {', '.join(self.rules)} at gamma {', '.join(map(str, self.gammas))}"
            source = "an engine's metrics" if self.imported else "texts"
            raise NoPositionLog(
                f"{self.path} was imported from {source}: it has {known}, and no position log",
                "use only these, or run alphaprof profile on the same prompts for a position log",
            )

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Complete shards, in order."""
        return self.manifest.shards

    def positions(self, draft: str, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one shard of a draft's position log: all of its columns, or some of them."""
        self.require_positions()
        name = f"positions/draft={draft}/{part_name(index)}"
        return self._table(name, AGAIN_BY_RESUME, self.log_of(draft).columns, columns)

    def continuations(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one shard of the documents with their token ids."""
        self.require_positions()
        return self._table(f"continuations/{part_name(index)}", AGAIN_BY_RESUME, CONTINUATION_COLUMNS, columns)

    def prompts(self, index: int) -> pa.Table:
        """Return the documents of one shard as they are to be measured."""
        return self._table(f"prompts/{part_name(index)}", AFRESH, PROMPT_COLUMNS)

    def documents(self) -> pa.Table:
        """Return all documents of complete shards; of a run that is running they are collected from the shards."""
        if self.manifest.status == "complete":
            return self._table(DOCUMENTS, COPY if self.scored else AGAIN, DOCUMENT_COLUMNS)
        return self.collected()

    def collected(self) -> pa.Table:
        """Return the documents of complete shards, from their continuations."""
        schema = arrow_schema(DOCUMENT_COLUMNS)
        texts = self.storage.each(lambda shard: self.continuations(shard.index, schema.names), self.shards)
        tables = [table.cast(schema) for table in texts]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def has_totals(self, draft: str) -> bool:
        """Return whether the totals of a draft are stored, as those of a complete run are."""
        name = f"totals/draft={draft}/{part_name(0)}"
        return name in self.manifest.files and self.storage.has(name)

    def totals(self, draft: str) -> pq.ParquetFile:
        """Return the file of a draft's totals, for `parquet.blocks_of`."""
        name, hint = f"totals/draft={draft}/{part_name(0)}", COPY if self.scored else AGAIN
        content = self.content(name, hint)
        with reading(f"{self.path}/{name}", hint):
            return pq.ParquetFile(pa.BufferReader(content))

    def latency(self) -> pa.Table | None:
        """Return the step times, or None if none were measured."""
        if LATENCY not in self.manifest.files or not self.storage.has(LATENCY):
            return None
        return self._table(LATENCY, TIMED_AGAIN, LATENCY_COLUMNS)

    def engine_rounds(self) -> list[dict[str, Any]]:
        """Return the rounds of engines that were timed; none if none were, or they are lost."""
        if ENGINES not in self.manifest.files or self.failure(ENGINES):
            return []
        rows: list[dict[str, Any]] = self._table(ENGINES, TIMED_AGAIN, ENGINE_COLUMNS).to_pylist()
        return rows

    def verify(self) -> None:
        """Compare every byte of every file with what was written. Raises `RunUnreadable`, which names those that differ.

        Folders that a copy of the run left out, and step times that somebody deleted, are not looked for.
        """
        there = {name.partition("/")[0] for name in self.storage.names("")}
        left = set() if not self.scored else {"positions", "continuations", "prompts", LATENCY, ENGINES} - there
        names = [name for name in self.manifest.files if name.partition("/")[0] not in left]
        failures = {name: why for name, why in zip(names, self.storage.each(self.failure, names), strict=True) if why}
        if failures:
            several = f" (and {len(failures) - 1} more of {len(self.manifest.files)} files)" if len(failures) > 1 else ""
            hint = AGAIN if not self.scored else "write it again with alphaprof profile --resume" if self.has_log else COPY
            raise RunUnreadable(
                f"{next(iter(failures.values()))}{several}",
                AFRESH if any(name.startswith("prompts/") for name in failures) else hint,
            )

    def failure(self, name: str) -> str:
        """Return what is wrong with a file; empty if it is as it was written. Raises `RunUnreadable` for what cannot be read
        now, and may be whole.
        """
        try:
            self.content(name, AGAIN_BY_RESUME)
        except RunDamaged as error:
            return error.message
        return ""

    def content(self, name: str, hint: str) -> pa.Buffer:
        """Return a file that the manifest names, whole and as it was written. Raises `RunDamaged` and `RunUnreadable`."""
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        file, where = self.file(name), f"{self.path}/{name}"
        if file is None:
            raise RunUnreadable(f"{where} is not in the run's manifest", hint)
        try:
            content = pa.py_buffer(self.storage.read(name))
        except FileNotFoundError as error:
            raise RunDamaged(f"{where} cannot be read: {error.strerror}", hint) from None
        if content.size != file.size:
            raise RunDamaged(f"{where} is damaged: it has {content.size} bytes, and {file.size} were written", hint)
        if File.of(content) != file:
            raise RunDamaged(f"{where} is damaged: its content has changed", hint)
        if self._kept is not None:
            self._kept[name] = content
        return content

    def file(self, name: str) -> File | None:
        """Return what was written under a name; None: nothing."""
        return self.manifest.files.get(name)

    def _table(self, name: str, hint: str, columns: Sequence[Column], names: Sequence[str] | None = None) -> pa.Table:
        """Return columns of a file: all, or those with some names."""
        wanted = [column.name for column in columns if names is None or column.name in names]
        content = self.content(name, hint)
        with reading(f"{self.path}/{name}", hint):  # other threads, for its columns, cost more than they save
            return pq.ParquetFile(pa.BufferReader(content)).read(wanted, use_threads=False)


@dataclass(frozen=True)
class RunDraft:
    """A run and one of its drafts, as commands name them: RUN or RUN:DRAFT."""

    run: Run
    draft: str

    @property
    def gammas(self) -> list[int]:
        """The γ that the draft has rounds of."""
        return self.run.manifest.drafts[self.draft].lengths(self.run.gammas)

    @property
    def label(self) -> str:
        """How it is named on the command line."""
        return f"{self.run.path}:{self.draft}"

    def asked(self, config: dict[str, Any]) -> RunDraft:
        """Return the same with another decision or other costs than the run's own; nothing is written."""
        return RunDraft(self.run.view(dataclasses.replace(self.run.manifest, config=config)), self.draft)


def path_and_draft(text: str) -> tuple[str, str | None]:
    """Return the path and the draft of RUN:DRAFT; of RUN the path alone and None. A path that exists is never divided."""
    if os.path.exists(text) or ":" not in text:
        return text, None
    path, _, draft = text.rpartition(":")
    return path, draft


def side_of(text: str) -> RunDraft:
    """Read RUN or RUN:DRAFT. Raises `RunUnreadable`, and `OptionInvalid` if a draft is missing or not named."""
    path, draft = path_and_draft(text)
    run = Run.open(Path(path))
    names = list(run.manifest.drafts)
    if draft is None and len(names) == 1:
        draft = names[0]
    if hybrid := run.manifest.profile.hybrids.get(draft or ""):
        parts = " and ".join(f"{path}:{part}" for part in (hybrid.first, hybrid.then))
        problem = f"{path}:{draft} is a hybrid of two drafts, without a log of its own: only reports and thresholds know it"
        command = f"alphaprof report {shlex.quote(path)} --show gammas"
        raise OptionInvalid(problem, f"give its drafts, {parts}; {command} has the hybrid")
    if draft not in names:
        raise OptionInvalid(
            f"{path} has {len(names)} drafts" if draft is None else f"{path} has no draft {shown(draft)}",
            "name one of them: " + ", ".join(f"{path}:{name}" for name in names),
        )
    return RunDraft(run, draft)
