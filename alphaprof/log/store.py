"""The run directory: shards written under a temporary name and renamed, and read back as Arrow tables."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphaprof.errors import DiskFull, NoPositionLog, RunExists, RunUnreadable
from alphaprof.log.claim import Claim
from alphaprof.log.files import (
    WRITTEN,
    TotalsPart,
    file_of,
    part_name,
    parts_in,
    readable,
    reading,
    replacing,
    require_same,
    write_part,
    writing,
)
from alphaprof.log.manifest import File, Manifest, Shard, read_manifest
from alphaprof.log.schema import (
    CONTINUATION_COLUMNS,
    DOCUMENT_COLUMNS,
    LATENCY_COLUMNS,
    Column,
    LogRules,
    arrow_schema,
    imported_totals_columns,
    totals_columns,
    violations,
)

ANEW = "profile again into a new directory"
TEXT_KEPT = "profile again into a new directory; --reuse-continuations keeps the text of this one"
ACCESS = "give read access to it"
AGAIN = "import the requests again into a new directory"
COPY = "copy it again from the run that has the position log"
TIMED_AGAIN = "alphaprof profile with --resume times the steps again; without this file reports have no step times"


def require_writable(folder: Path) -> None:
    """Raise `DiskFull` where a directory cannot be made or written: known before any work."""
    with writing(folder):
        parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        reason = "is not a directory" if not parent.is_dir() else "is not writable"
        raise DiskFull(f"cannot write {folder}: {parent} {reason}", "choose another --out, or correct its permissions")


def require_new(folder: Path, hint: str = "add --resume to finish it, or choose another --out") -> None:
    """Raise `RunExists` rather than overwrite anything, and `DiskFull` where a directory cannot be made.

    `hint`: what to do where it holds a run already.
    """
    with writing(folder):
        if (folder / "manifest.json").exists():
            raise RunExists(f"{folder} holds a run already", hint)
        # Hidden files are the owner's name, and what a killed process left of a half-written manifest.
        if folder.exists() and not (folder.is_dir() and all(file.name.startswith(".") for file in folder.iterdir())):
            raise RunExists(f"{folder} exists and is not empty", "choose a new directory for --out")
    require_writable(folder)


def begin(claim: Claim, hint: str = "add --resume to finish it, or choose another --out") -> None:
    """Raise `RunExists` where a claimed directory is not empty. What a killed process wrote before it had a manifest, as an
    import does, is removed.
    """
    with writing(claim.folder):
        claim.clear()
    require_new(claim.folder, hint)
    claim.begin()


@contextlib.contextmanager
def run_directory(out: Path | None) -> Iterator[Path]:
    """Yields a directory for a new run: `out`, or where that is None one that is removed in the end."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="alphaprof-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "run"


def write_table(path: Path, table: pa.Table, columns: Sequence[Column]) -> None:
    """Write one Parquet file atomically, after a check of the table against the declaration of its columns."""
    _require_declared(path, table, columns)
    with replacing(path) as temporary:
        _write(temporary, table, columns)


def _require_declared(path: Path, table: pa.Table, columns: Sequence[Column]) -> None:
    if problems := violations(table, columns):
        raise ValueError(f"{path.name} contradicts the schema: {'; '.join(problems)}")  # a bug, not the user's fault


def table_bytes(table: pa.Table, columns: Sequence[Column]) -> int:
    """Returns the size of the Parquet file that `write_table` would write; nothing is written."""
    buffer = io.BytesIO()
    _write(buffer, table, columns)
    return buffer.tell()


def _write(where: Path | io.BytesIO, table: pa.Table, columns: Sequence[Column]) -> None:
    # Acceptance columns are mostly 0 and 1: a dictionary is smaller than split bytes.
    split = (column for column in columns if not column.name.startswith("accept_"))
    floats = [column.name for column in split if pa.types.is_float32(column.type)]
    others = [column.name for column in columns if column.name not in floats and not pa.types.is_nested(column.type)]
    pq.write_table(
        table,
        where,
        compression="zstd",
        use_dictionary=others,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
    )


class Run:
    """A run directory. Reading methods see complete shards only; a missing or foreign directory raises `RunUnreadable`, and
    so does a file that is not as it was written.

    `claim`: the right to write it, where this process has it; every write makes sure that it still has. `damaged`: files
    whose content was worked out again, since they could not be read.
    """

    def __init__(self, path: Path, manifest: Manifest, claim: Claim | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.claim = claim
        self.damaged: set[str] = set()
        self._recording = Lock()

    @classmethod
    def open(cls, path: Path, claim: Claim | None = None) -> Run:
        """The run in a directory."""
        return cls(path, read_manifest(path), claim)

    def require_claim(self) -> None:
        """Raise `DiskFull` or `RunExists` where the directory is no longer this process's to write."""
        if self.claim is not None:
            self.claim.require()

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace manifest.json atomically."""
        self._make(self.path)
        self.manifest = manifest
        with replacing(self.path / "manifest.json") as temporary:
            temporary.write_text(manifest.to_json() + "\n", encoding="utf-8")

    def remove_leftovers(self) -> None:
        """Remove half-written files and shards of a process that was killed. Only for a run that nobody is writing."""
        with writing(self.path):
            for leftover in self.path.rglob(".*.tmp"):
                if WRITTEN.fullmatch(leftover.name):
                    leftover.unlink(missing_ok=True)
            if self.manifest.status != "running":
                return
            folders = [self.path / "continuations", *self.path.glob("positions/draft=*")]
            for part in [part for folder in folders for part in parts_in(folder)]:
                if part.last >= len(self.shards):
                    part.path.unlink(missing_ok=True)

    def part(self, table: str, index: int, draft: str | None = None) -> Path:
        """The path of one shard of a table (positions, continuations)."""
        folder = self.path / table if draft is None else self.path / table / f"draft={draft}"
        return folder / part_name(index, index)

    def write_positions(self, table: pa.Table, index: int, draft: str) -> None:
        """Write one shard of a draft's position log; the next manifest names it."""
        self._put(self.part("positions", index, draft), table, self.log_of(draft).columns)

    def write_totals(self, table: pa.Table, shards: tuple[int, int], draft: str) -> None:
        """Write a draft's totals of shards, from the first to the last; the next manifest names them in the place of parts
        that overlap them.
        """
        path = self._totals(draft) / part_name(*shards)
        _require_declared(path, table, self.totals_columns)
        self._make(path.parent)
        with replacing(path) as temporary:
            write_part(temporary, table)
        with writing(path.parent):
            covered = [part.path for part in parts_in(path.parent) if part.last >= shards[0] and part.first <= shards[1]]
        self._record(path, covered)

    def remove_covered(self) -> None:
        """Remove totals that the manifest does not name: others cover their shards, or a process was killed."""
        with writing(self.path):
            for part in [part for draft in self.manifest.drafts for part in parts_in(self._totals(draft))]:
                if self._name(part.path) not in self.manifest.files:
                    part.path.unlink(missing_ok=True)

    def _totals(self, draft: str) -> Path:
        return self.path / "totals" / f"draft={draft}"

    def write_continuations(self, table: pa.Table, index: int) -> None:
        """Write the documents and token ids of one shard; the next manifest names them."""
        self._put(self.part("continuations", index), table, CONTINUATION_COLUMNS)

    def write_documents(self, table: pa.Table | None = None) -> None:
        """Collect documents.parquet from the shards; or write it as it is, for a run without continuations. The next
        manifest names it.
        """
        self.require_claim()
        self._put(self.path / "documents.parquet", self._collected() if table is None else table, DOCUMENT_COLUMNS)

    def write_latency(self, table: pa.Table) -> None:
        """Write the step times; the next manifest names them."""
        self._put(self.path / "latency.parquet", table, LATENCY_COLUMNS)

    def _put(self, path: Path, table: pa.Table, columns: Sequence[Column]) -> None:
        self._make(path.parent)
        write_table(path, table, columns)
        self._record(path)

    def _make(self, folder: Path) -> None:
        """Make a folder of the run where it is missing. The run's own folder is the claim's to make: one that was removed
        meanwhile is not made again.
        """
        self.require_claim()
        with writing(folder):
            if self.claim is None:
                self.path.mkdir(parents=True, exist_ok=True)
            for place in reversed([folder, *folder.parents]):
                if place.is_relative_to(self.path) and place != self.path:
                    place.mkdir(exist_ok=True)

    def _record(self, path: Path, instead_of: Iterable[Path] = ()) -> None:
        """Take a file that was written into the manifest, which is not written yet, and take others out of it."""
        gone, written = set(map(self._name, instead_of)), file_of(path)
        with self._recording:  # files may be written by several threads
            files = {name: file for name, file in self.manifest.files.items() if name not in gone}
            self.damaged -= {self._name(path), *gone}
            self.manifest = dataclasses.replace(self.manifest, files=files | {self._name(path): written})

    def _name(self, path: Path) -> str:
        """How the manifest calls a file."""
        return path.relative_to(self.path).as_posix()

    @property
    def rules(self) -> list[str]:
        """Ids of the rules whose acceptance the log holds."""
        return list(self.manifest.config["rules"])

    @property
    def log_rules(self) -> LogRules:
        """What the log holds of which rules."""
        return LogRules(tuple(self.rules), self.manifest.emitted, self.manifest.certified)

    def log_of(self, draft: str) -> LogRules:
        """What the log of a draft holds of them."""
        return self.log_rules.of(self.manifest.drafts[draft])

    @property
    def gammas(self) -> list[int]:
        """The speculation lengths that the totals hold."""
        return list(self.manifest.config["gammas"])

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
        """Whether there is a position log: not in an imported run, nor where a copy of the run left it out."""
        return not self.imported and _is_there(self.path / "positions")

    def require_positions(self) -> None:
        """Raise `NoPositionLog` for an imported run."""
        if self.imported:
            known = f"rounds of {', '.join(self.rules)} at gamma {', '.join(map(str, self.gammas))}"
            raise NoPositionLog(
                f"{self.path} was imported from an engine's metrics: it has {known}, and no position log",
                "use these only; alphaprof profile on the same prompts writes a position log",
            )

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Complete shards, in order."""
        return self.manifest.shards

    def positions(self, draft: str, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """One shard of a draft's position log: all of its columns, or some of them."""
        self.require_positions()
        path = self.part("positions", index, draft)
        table = self._read(path, self._anew, self.log_of(draft).columns, columns)
        return self._rows(table, self._shard(index).positions, path)

    def logged(self, draft: str, index: int) -> Path:
        """The file of one shard of a draft's position log, for other readers. Raises `RunUnreadable` where its size or its
        footer is not what was written; what it holds is compared as it is read.
        """
        path = self.part("positions", index, draft)
        require_same(path, self._file(path, self._anew), self._anew, whole=False)
        return path

    def continuations(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """One shard of the documents with their token ids."""
        self.require_positions()
        path = self.part("continuations", index)
        return self._rows(self._read(path, ANEW, CONTINUATION_COLUMNS, columns), self._shard(index).documents, path)

    def documents(self) -> pa.Table:
        """All documents of complete shards: the rows of documents.parquet, which a complete run has; collected from the
        shards where that file is damaged or missing.
        """
        path = self.path / "documents.parquet"
        if self.imported or (self.manifest.status == "complete" and self._name(path) in self.manifest.files):
            try:
                return self._counted(self._read(path, AGAIN if self.imported else ANEW, DOCUMENT_COLUMNS), path)
            except RunUnreadable:
                if self.imported or not _is_there(self.path / "continuations"):
                    raise
                self.damaged.add(path.name)
        return self._counted(self._collected(), path)

    def mend_documents(self) -> None:
        """Write documents.parquet of a complete run again where it is damaged or missing."""
        path = self.path / "documents.parquet"
        try:
            require_same(path, self.manifest.files[self._name(path)], ANEW)
        except (RunUnreadable, KeyError):
            self.write_documents()
            self.write_manifest(self.manifest)

    def _collected(self) -> pa.Table:
        """The rows of documents.parquet, from the shards."""
        schema = arrow_schema(DOCUMENT_COLUMNS)
        tables = [self.continuations(shard.index, schema.names) for shard in self.shards]
        return pa.concat_tables([table.cast(schema) for table in tables]) if tables else schema.empty_table()

    def totals_parts(self, draft: str) -> list[TotalsPart]:
        """The files that hold a draft's totals, of complete shards only, in their order; see `log.files`. One that is
        damaged is left out where the position log can tell what it held.
        """
        with reading(self._totals(draft), ACCESS):
            named = [part for part in parts_in(self._totals(draft)) if self._name(part.path) in self.manifest.files]
        return [part for part in readable(named, len(self.shards)) if self._is_whole(part)]

    def _is_whole(self, part: TotalsPart) -> bool:
        name, hint = self._name(part.path), AGAIN if self.imported else COPY
        try:
            require_same(part.path, self.manifest.files[name], hint)
        except RunUnreadable:
            if not self.has_log:
                raise
            self.damaged.add(name)
            return False
        return True

    def totals(self, part: TotalsPart, rules: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """One of them: all of its rules and columns, or some."""
        with reading(part.path, AGAIN if self.imported else COPY):
            return part.read(rules, columns)

    def latency(self) -> pa.Table | None:
        """The step times, or None where none were measured."""
        path = self.path / "latency.parquet"
        there = self._name(path) in self.manifest.files and _is_there(path)
        return self._read(path, TIMED_AGAIN, LATENCY_COLUMNS) if there else None

    def verify(self) -> None:
        """Compare every byte of every file with what was written. Raises `RunUnreadable`, which names those that differ.

        Folders that a copy of the run left out, and step times that somebody deleted, are not looked for.
        """
        failures, optional = {}, ("positions", "continuations", "latency.parquet")
        left = {name for name in optional if not self.imported and not _is_there(self.path / name)}
        for name, file in self.manifest.files.items():
            if name.partition("/")[0] not in left:
                try:
                    require_same(self.path / name, file, "", whole=True)
                except RunUnreadable as error:
                    failures[name] = error.message
        if failures:
            several = f" (and {len(failures) - 1} more of {len(self.manifest.files)} files)" if len(failures) > 1 else ""
            raise RunUnreadable(f"{next(iter(failures.values()))}{several}", self._remedy(failures))

    def _remedy(self, damaged: Iterable[str]) -> str:
        """What to do about some damaged files."""
        folders = {name.partition("/")[0] for name in damaged}
        if self.imported:
            return AGAIN
        if "continuations" in folders:
            return ANEW
        if "positions" in folders:
            return self._anew
        return "alphaprof profile with --resume makes it again" if self.has_log else COPY

    @property
    def _anew(self) -> str:
        """What to do about a damaged position log: only of a complete run can the text be kept."""
        return TEXT_KEPT if self.manifest.status == "complete" else ANEW

    def require_log(self) -> None:
        """Raise `RunUnreadable` where a file of complete shards has not the size and the footer that were written: better
        known before the other shards are measured.
        """
        for name, file in self.manifest.files.items():
            if name.partition("/")[0] in ("positions", "continuations"):
                require_same(self.path / name, file, ANEW, whole=False)

    def _shard(self, index: int) -> Shard:
        return self.shards[bisect_left(self.shards, index, key=lambda shard: shard.index)]

    def _read(self, path: Path, hint: str, columns: Sequence[Column], names: Sequence[str] | None = None) -> pa.Table:
        """Columns of a file that the manifest names and that is as it was written: all, or those with some names."""
        require_same(path, self._file(path, hint), hint)
        wanted = [column.name for column in columns if names is None or column.name in names]
        with reading(path, hint):
            return pq.ParquetFile(path, page_checksum_verification=True).read(wanted)

    def _file(self, path: Path, hint: str) -> File:
        """What the manifest says of a file."""
        file = self.manifest.files.get(self._name(path))
        if file is None:
            raise RunUnreadable(f"{path} is not one of the files that the run's manifest names", hint)
        return file

    @staticmethod
    def _rows(table: pa.Table, rows: int, path: Path) -> pa.Table:
        """The table. Raises `RunUnreadable` where it has another number of rows than the manifest says."""
        if len(table) != rows:
            raise RunUnreadable(f"{path} has {len(table)} rows, and the manifest says {rows}", ANEW)
        return table

    def _counted(self, documents: pa.Table, path: Path) -> pa.Table:
        """The documents of a run. Raises `RunUnreadable` where they are not as many as the manifest says."""
        tokens = int(pc.sum(documents["continuation_tokens"]).as_py() or 0)
        if tokens != self.manifest.positions:
            raise RunUnreadable(f"{path} has {tokens} positions, and the manifest says {self.manifest.positions}", ANEW)
        return self._rows(documents, self.manifest.documents, path)


def _is_there(path: Path) -> bool:
    """Whether a file or folder exists. Raises `RunUnreadable` where the system does not say."""
    with reading(path, ACCESS):
        return path.exists()
