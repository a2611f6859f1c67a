"""A run as readers see it: its documents, position log, totals and step times, checked against the manifest and commits that
name them. `log.writer` writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from alphaprof.errors import NoPositionLog, OptionInvalid, RunDamaged, RunMismatch, RunUnreadable, shown
from alphaprof.log.files import SMALL, TotalsPart, readable, require_same, shards_of
from alphaprof.log.manifest import (
    LOGGED,
    Commit,
    File,
    Manifest,
    Shard,
    Worker,
    read_commit,
    read_manifest,
    read_status,
    read_worker,
)
from alphaprof.log.schema import (
    CONTINUATION_COLUMNS,
    DOCUMENT_COLUMNS,
    LATENCY_COLUMNS,
    PROMPT_COLUMNS,
    Column,
    LogRules,
    arrow_schema,
    imported_totals_columns,
    totals_columns,
)
from alphaprof.log.storage import LocalStorage, Storage, reading, storage_of
from alphaprof.log.tables import rows_of

COMMITTED = re.compile(r"commits/(\d{5,})\.json")
AGAIN_BY_RESUME = "measure it again with alphaprof profile --resume"
ACCESS = "give read access to it"
AGAIN = "import the requests again into a new directory"
COPY = "copy it again from the run that has the position log"
TIMED_AGAIN = "time the steps again with alphaprof profile --resume; without this file, reports have no step times"

Item = TypeVar("Item")
Made = TypeVar("Made")
AT_ONCE = 32  # files that are asked of an object store at the same time: each answer takes long, and little work


class Run:
    """A run directory, or the same in an object store. Readers see complete shards only; a missing or foreign directory
    raises `RunUnreadable`, and so does a file that is not as it was written.

    `damaged`: files whose content was worked out again, since they could not be read; `torn`: shards whose commits cannot
    be read, which are none for readers.
    """

    def __init__(self, where: Storage | Path | str, manifest: Manifest) -> None:
        self.storage = storage_of(where) if isinstance(where, (Path, str)) else where
        self.manifest = manifest
        self.damaged: set[str] = set()
        self.torn: set[int] = set()
        self._commits: dict[str, Commit] = {}
        self._footers: dict[str, pq.FileMetaData] = {}
        self._kept: dict[str, tuple[pq.FileMetaData, dict[str, pa.ChunkedArray]]] | None = None
        self._index: tuple[dict[str, File], dict[tuple[str, int], str]] = {}, {}

    @classmethod
    def open(cls, where: Storage | Path | str) -> Self:
        """Return the run in storage, with the shards that are committed by now."""
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
        read of its log stays in memory, so that every column is fetched once.
        """
        other = Run(self.storage, manifest)
        other._footers = self._footers
        other._kept = {} if keep else None
        return other

    def refresh(self, afresh: bool = False) -> None:
        """Take in the shards that were committed meanwhile, of a run that is running: the longest prefix without a gap.
        `afresh`: see `commits`.
        """
        if self.manifest.status == "complete":
            return
        commits = self.commits(afresh)
        shards, files = list[Shard](), {name: file for name, file in self.manifest.files.items() if not _is_logged(name)}
        while (commit := commits.get(len(shards))) is not None:
            shards.append(commit.shard)
            files |= commit.files
        self.manifest = dataclasses.replace(self.manifest, shards=tuple(shards), files=files)

    def committed(self) -> set[int]:
        """Return the shards that have a commit; none of them is read."""
        return {int(found[1]) for name in self.storage.names("commits") if (found := COMMITTED.fullmatch(name))}

    def commits(self, afresh: bool = False) -> dict[int, Commit]:
        """Return all commits by the number of their shard, in order; gaps among them are shards that are not measured yet.

        A commit is read once, since nothing changes it. `afresh`: all are read again, since a damaged shard's may have been
        withdrawn and replaced.
        """
        names = [name for name in self.storage.names("commits") if COMMITTED.fullmatch(name)]
        self.torn, self._commits = set(), {} if afresh else self._commits
        new = [name for name in names if name not in self._commits]
        for name, commit in zip(new, self._each(self._commit_of, new), strict=True):
            if isinstance(commit, RunDamaged):
                self.torn.add(int(Path(name).stem))
            elif commit is not None:
                self._commits[name] = commit
        found = {commit.shard.index: commit for name in names if (commit := self._commits.get(name)) is not None}
        return dict(sorted(found.items()))

    def _commit_of(self, name: str) -> Commit | RunDamaged | None:
        """Return a commit, or the failure if it is damaged: the others are read all the same."""
        try:
            return read_commit(self.storage, name)
        except RunDamaged as error:
            return error

    def _each(self, read: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Made]:
        """Yield what `read` makes of each item, in their order; of several at once if each takes requests."""
        if self._near or len(items) < 2:
            yield from map(read, items)
            return
        with ThreadPoolExecutor(AT_ONCE) as threads:
            try:
                yield from threads.map(read, items)
            finally:
                threads.shutdown(cancel_futures=True)

    def workers(self) -> dict[str, Worker]:
        """Who works on a run or did, by the name that commits give them."""
        files = [file for file in self.storage.names("workers") if file.endswith(".json")]
        read = self._each(partial(read_worker, self.storage), files)
        return {Path(file).stem: it for file, it in zip(files, read, strict=True) if it is not None}

    def is_finished(self) -> bool:
        """Return whether some process has finished the run meanwhile."""
        return self.manifest.status == "complete" or read_status(self.storage) == "complete"

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
        return imported_totals_columns(self.gammas) if self.imported else totals_columns(self.gammas)

    @property
    def imported(self) -> bool:
        """Whether the run comes from an engine's metrics: documents and totals at one gamma, no position log, no text."""
        return self.manifest.imported is not None

    @property
    def has_log(self) -> bool:
        """Whether there is a position log: not in an imported run, nor if a copy of the run left it out."""
        return not self.imported and self._has("positions")

    def require_complete(self) -> None:
        """Raise `RunMismatch` for a run that is not complete."""
        if self.manifest.status != "complete":
            raise RunMismatch(f"{self.path} is not complete", "finish it with alphaprof profile --resume first")

    def require_positions(self) -> None:
        """Raise `NoPositionLog` for an imported run."""
        if self.imported:
            known = f"rounds of {', '.join(self.rules)} at gamma {', '.join(map(str, self.gammas))}"
            raise NoPositionLog(
                f"{self.path} was imported from an engine's metrics: it has {known}, and no position log",
                "use only these, or run alphaprof profile on the same prompts for a position log",
            )

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Complete shards, in order."""
        return self.manifest.shards

    def name_of(self, folder: str, index: int) -> str:
        """Return the file of a shard in a folder of the run (continuations, positions/draft=NAME), below the run's
        directory.
        """
        files, names = self._index
        if files is not self.manifest.files:
            files, names = self.manifest.files, {}
            for name in files:
                if (shards := shards_of(name)) is not None and shards[0] == shards[1]:
                    names[name.rpartition("/")[0], shards[0]] = name
            self._index = files, names  # in one step: other threads ask meanwhile
        return names.get((folder, index), f"{folder}/part-{index:05d}")

    def positions(self, draft: str, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one shard of a draft's position log: all of its columns, or some of them."""
        self.require_positions()
        name = self.name_of(f"positions/draft={draft}", index)
        return self._read(name, AGAIN_BY_RESUME, self.log_of(draft).columns, columns)

    def logged(self, draft: str, index: int) -> str:
        """Return the name of the file of one shard of a draft's position log, for other readers. Raises `RunUnreadable` if
        its size or its footer is not what was written; what it holds is compared as it is read.
        """
        name = self.name_of(f"positions/draft={draft}", index)
        with self._opened(name, AGAIN_BY_RESUME, whole=False):
            return name

    def continuations(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one shard of the documents with their token ids."""
        self.require_positions()
        return self._read(self.name_of("continuations", index), AGAIN_BY_RESUME, CONTINUATION_COLUMNS, columns)

    def prompts(self, index: int) -> pa.Table:
        """Return the documents of one shard as they are to be measured."""
        return self._read(self.name_of("prompts", index), "profile again into a new directory", PROMPT_COLUMNS)

    def documents(self) -> pa.Table:
        """Return all documents of complete shards: those that a complete run has by themselves; collected from the shards
        if these files are damaged or missing.
        """
        names = self._parts("documents")
        if names:
            try:
                return pa.concat_tables(
                    self._read(name, AGAIN if self.imported else COPY, DOCUMENT_COLUMNS) for name in names
                )
            except RunUnreadable:
                if self.imported or not self._has("continuations"):
                    raise
                self.damaged.update(names)
        return self.collected(self.shards)

    def collected(self, shards: Sequence[Shard]) -> pa.Table:
        """Return the documents of some shards, from their continuations."""
        schema = arrow_schema(DOCUMENT_COLUMNS)
        tables = [
            texts.cast(schema) for texts in self._each(lambda shard: self.continuations(shard.index, schema.names), shards)
        ]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def _parts(self, folder: str) -> list[str]:
        """Return the files in a folder that the manifest names, in the order of their shards."""
        names = (name for name in self.manifest.files if name.rpartition("/")[0] == folder)
        return sorted(names, key=lambda name: (shards_of(name) or (-1, -1), name))

    def totals_parts(self, draft: str) -> list[TotalsPart]:
        """Return the files that hold a draft's totals, of complete shards only, in their order; see `log.files`. One that is
        damaged is left out if the position log can tell what it held.
        """
        folder = f"totals/draft={draft}"
        there = self.storage.names(folder)
        named = [name for name in self._parts(folder) if name in there]
        parts = [TotalsPart(name, *shards) for name in named if (shards := shards_of(name)) is not None]
        parts = readable(parts, len(self.shards))
        whole = self._each(lambda part: self._is_whole(part.name), parts)
        return [part for part, there in zip(parts, whole, strict=True) if there]

    def _is_whole(self, name: str) -> bool:
        try:
            with self._opened(name, AGAIN if self.imported else COPY) as (_, footer):
                if not self._near:
                    self._footers[name] = _metadata(footer)
                return True
        except RunUnreadable:
            if not self.has_log:
                raise
            self.damaged.add(name)
            return False

    def totals(self, part: TotalsPart, rules: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one of them: all of its rules and columns, or some."""
        hint = AGAIN if self.imported else COPY
        with reading(f"{self.path}/{part.name}", hint), self.storage.open(part.name) as stream:
            # A footer tells of hundreds of columns and takes longer to read than a few of them.
            file = self._parquet(stream, self._footers.get(part.name))
            self._footers[part.name] = file.metadata
            return rows_of(file, rules, columns)

    def latency(self) -> pa.Table | None:
        """Return the step times, or None if none were measured."""
        name = next(iter(self.manifest.times), None)
        if name is None or not self.storage.has(name):
            return None
        return self._read(name, TIMED_AGAIN, LATENCY_COLUMNS)

    def damaged_shards(self, mine: Callable[[int], bool] = lambda _: True, by: Collection[str] | None = None) -> list[int]:
        """Return those of some committed shards whose texts or positions are not what was written, or not of the documents
        that were staged: small files are compared whole, others by their size and footer. Raises `RunUnreadable` for what
        cannot be read now, and may be whole.

        Folders that a copy of the run left out are not looked for. `by`: workers whose shards to compare (None: all).
        """
        commits = {index: commit for index, commit in self.commits().items() if mine(index)}
        odd = {index for index in self.torn if mine(index)}
        odd |= {index for index, commit in commits.items() if not self.manifest.is_of_staged(commit.shard)}
        others = set() if by is None else {index for index, commit in commits.items() if commit.worker not in by}
        files = dict(self.manifest.files)
        for commit in commits.values() if self.manifest.status == "running" else ():  # behind a gap as well
            files |= commit.files
        everything = self.view(dataclasses.replace(self.manifest, files=files))
        there = {folder for folder in ("positions", "continuations") if self._has(folder)}
        logged = [(name, shards[0]) for name in files if name.partition("/")[0] in there and (shards := shards_of(name))]
        compared = [(name, index) for name, index in logged if mine(index) and index not in others]

        def is_damaged(item: tuple[str, int]) -> bool:
            try:
                with everything._opened(item[0], AGAIN_BY_RESUME):
                    return False
            except RunDamaged:
                return True

        flags = zip(compared, self._each(is_damaged, compared), strict=True)
        return sorted(odd | {index for (_, index), damaged in flags if damaged})

    def verify(self) -> None:
        """Compare every byte of every file with what was written. Raises `RunUnreadable`, which names those that differ.

        Folders that a copy of the run left out, and step times that somebody deleted, are not looked for.
        """
        there = {name.partition("/")[0] for name in self.storage.names("")}
        optional = {"positions", "continuations", "prompts", *self.manifest.times}
        left = set() if self.imported else optional - there
        names = [name for name in self.manifest.files if name.partition("/")[0] not in left]

        def failure(name: str) -> str:
            try:
                with self._opened(name, "", whole=True):
                    return ""
            except RunUnreadable as error:
                return error.message

        failures = {name: why for name, why in zip(names, self._each(failure, names), strict=True) if why}
        if failures:
            several = f" (and {len(failures) - 1} more of {len(self.manifest.files)} files)" if len(failures) > 1 else ""
            raise RunUnreadable(f"{next(iter(failures.values()))}{several}", self._remedy(failures))

    def _remedy(self, damaged: Iterable[str]) -> str:
        """Return what to do about some damaged files."""
        if self.imported:
            return AGAIN
        return "write it again with alphaprof profile --resume" if self.has_log else COPY

    def _has(self, folder: str) -> bool:
        """Return whether a folder holds anything. Raises `RunUnreadable` if the system does not say."""
        first = next((name for name in self.manifest.files if name.startswith(f"{folder}/")), "")
        with reading(f"{self.path}/{folder}", ACCESS):  # to list a folder of many shards takes as long as to read them
            return bool(first and self.storage.has(first)) or bool(self.storage.names(folder))

    @property
    def _near(self) -> bool:
        """Whether bytes cost no requests."""
        return isinstance(self.storage, LocalStorage)

    def _parquet(self, stream: pa.NativeFile, footer: pq.FileMetaData | None) -> pq.ParquetFile:
        """Return a Parquet file to read columns of; from afar those that lie side by side are one request."""
        return pq.ParquetFile(stream, metadata=footer, pre_buffer=not self._near, page_checksum_verification=True)

    @contextlib.contextmanager
    def _opened(self, name: str, hint: str, whole: bool | None = None) -> Iterator[tuple[pa.NativeFile, bytes]]:
        """Yield a file that the manifest names, with its footer; it is as it was written. `whole`: all of it is compared, or
        its size and footer; None: all of it if that is little, and near.
        """
        file = self.manifest.files.get(name)
        if file is None:
            raise RunUnreadable(f"{self.path}/{name} is not in the run's manifest", hint)
        with reading(f"{self.path}/{name}", hint), self._stream(name, hint) as stream:
            near = self._near and file.size <= SMALL
            yield stream, require_same(stream, file, f"{self.path}/{name}", hint, near if whole is None else whole)

    def _stream(self, name: str, hint: str) -> pa.NativeFile:
        try:
            return self.storage.open(name)
        except FileNotFoundError as error:
            raise RunDamaged(f"{self.path}/{name} cannot be read: {error.strerror}", hint) from None

    def _read(self, name: str, hint: str, columns: Sequence[Column], names: Sequence[str] | None = None) -> pa.Table:
        """Return columns of a file: all, or those with some names."""
        wanted = [column.name for column in columns if names is None or column.name in names]
        if self._kept is None:
            with self._opened(name, hint) as (stream, footer):
                return self._columns(stream, _metadata(footer), wanted)
        if name not in self._kept:
            with self._opened(name, hint) as (stream, footer):
                known, kept = self._kept.setdefault(name, (_metadata(footer), {}))
                kept |= dict(zip(wanted, self._columns(stream, known, wanted).columns, strict=True))
        known, kept = self._kept[name]
        if lacking := [column for column in wanted if column not in kept]:
            with reading(f"{self.path}/{name}", hint), self._stream(name, hint) as stream:
                kept |= dict(zip(lacking, self._columns(stream, known, lacking).columns, strict=True))
        return pa.table({column: kept[column] for column in wanted})

    def _columns(self, stream: pa.NativeFile, footer: pq.FileMetaData, names: Sequence[str]) -> pa.Table:
        """Return columns of a file; it is small: other threads, for its columns, cost more than they save."""
        return self._parquet(stream, footer).read(names, use_threads=False)


def _metadata(footer: bytes) -> pq.FileMetaData:
    """Return what a footer says, which was read to compare it with what was written."""
    return pq.read_metadata(pa.BufferReader(footer))


def _is_logged(name: str) -> bool:
    return name.partition("/")[0] in LOGGED


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
    require_drafts(run)
    if draft is None and len(names) == 1:
        draft = names[0]
    if hybrid := run.manifest.profile.hybrids.get(draft or ""):
        parts = " and ".join(f"{path}:{part}" for part in (hybrid.first, hybrid.then))
        problem = f"{path}:{draft} is a hybrid of two drafts, without a log of its own: only reports and thresholds know it"
        command = f"alphaprof report {shlex.quote(path)} --show gammas"
        raise OptionInvalid(problem, f"give its drafts, {parts}; {command} has the hybrid")
    if draft not in names:
        what = f"{path} has {len(names)} drafts" if draft is None else f"{path} has no draft {shown(draft)}"
        raise OptionInvalid(what, "name one of them: " + ", ".join(f"{path}:{name}" for name in names))
    return RunDraft(run, draft)


def require_drafts(run: Run) -> None:
    """Raise `OptionInvalid` for a run without any draft."""
    if not run.manifest.drafts:
        raise OptionInvalid(f"{run.path} has no draft", "name a draft in the profile's drafts, and profile again")
