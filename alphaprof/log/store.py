"""The run directory: shards written under a temporary name and renamed, and read back as Arrow tables."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from alphaprof.errors import DiskFull, NoPositionLog, RunExists, RunUnreadable
from alphaprof.log.manifest import Manifest, Shard, read_manifest
from alphaprof.log.parts import Part, part_name, parts_in, readable, remove_parts, write_part
from alphaprof.log.schema import (
    CONTINUATION_COLUMNS,
    DOCUMENT_COLUMNS,
    LATENCY_COLUMNS,
    Column,
    LogRules,
    arrow_schema,
    imported_totals_columns,
    totals_columns,
)
from alphaprof.log.violations import violations

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
ANEW = "profile again into a new directory"
AGAIN = "delete it: totals are worked out again from the position log"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error.

    Its name begins with a dot, so that readers of the directory never see a half-written file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise DiskFull(f"cannot write {path}: {error.strerror}", "free space or mend permissions, then --resume") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def require_writable(folder: Path) -> None:
    """Raise `DiskFull` where a directory cannot be made or written: known before any work."""
    parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        reason = "is no directory" if not parent.is_dir() else "is not writable"
        raise DiskFull(f"cannot write {folder}: {parent} {reason}", "choose another --out, or mend permissions")


def require_new(folder: Path, hint: str = "add --resume to finish it, or choose another --out") -> None:
    """Raise `RunExists` rather than overwrite anything, and `DiskFull` where a directory cannot be made.

    `hint`: what to do where it holds a run already.
    """
    if (folder / "manifest.json").exists():
        raise RunExists(f"{folder} holds a run already", hint)
    # A process that is killed at once may leave a directory with a half-written manifest: a hidden file.
    if folder.exists() and not (folder.is_dir() and all(item.name.startswith(".") for item in folder.iterdir())):
        raise RunExists(f"{folder} exists and is not empty", "choose a new directory for --out")
    require_writable(folder)


@contextlib.contextmanager
def run_directory(out: Path | None) -> Iterator[Path]:
    """A directory for a new run: `out`, or where there is none one that is removed in the end."""
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
    """The size of the Parquet file that `write_table` would write; nothing is written."""
    buffer = io.BytesIO()
    _write(buffer, table, columns)
    return buffer.tell()


def _write(where: Path | io.BytesIO, table: pa.Table, columns: Sequence[Column]) -> None:
    floats = [column.name for column in columns if pa.types.is_float32(column.type) and not _binary(column)]
    others = [column.name for column in columns if column.name not in floats and not pa.types.is_nested(column.type)]
    pq.write_table(
        table,
        where,
        compression="zstd",
        use_dictionary=others,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
    )


def _binary(column: Column) -> bool:
    """Acceptance columns are mostly 0 and 1: a dictionary is smaller than split bytes."""
    return column.name.startswith("accept_")


def _completed(table: pa.Table, columns: Sequence[Column], path: Path) -> pa.Table:
    """The table with nulls for nullable columns that the version which wrote it did not have yet.

    Raises `RunUnreadable` where a column is missing that must have values.
    """
    missing = [column for column in columns if column.name not in table.column_names]
    if needed := [column.name for column in missing if not column.nullable]:
        raise RunUnreadable(f"{path} lacks the columns {', '.join(needed)}", ANEW)
    for column in missing:
        table = table.append_column(column.field(), pa.nulls(len(table), column.type))
    return table


class Run:
    """A run directory. Reading methods see complete shards only; a missing or foreign directory raises `RunUnreadable`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> Run:
        """The run in a directory."""
        return cls(path, read_manifest(path))

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace manifest.json atomically."""
        self.manifest = manifest
        with replacing(self.path / "manifest.json") as temporary:
            temporary.write_text(manifest.to_json() + "\n", encoding="utf-8")

    def remove_leftovers(self) -> None:
        """Remove half-written files and shards of a process that was killed. Only for a run that nobody is writing."""
        for leftover in self.path.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        if self.manifest.status == "running":
            remove_parts([self.path / "continuations", *self.path.glob("positions/draft=*")], len(self.shards))

    def part(self, table: str, index: int, draft: str | None = None) -> Path:
        """The path of one shard of a table (positions, continuations)."""
        folder = self.path / table if draft is None else self.path / table / f"draft={draft}"
        return folder / part_name(index, index)

    def write_positions(self, table: pa.Table, index: int, draft: str) -> None:
        """Write one shard of a draft's position log."""
        write_table(self.part("positions", index, draft), table, self.log_rules.columns)

    def write_totals(self, table: pa.Table, shards: tuple[int, int], draft: str) -> None:
        """Write a draft's totals of shards, from the first to the last, in the place of parts that overlap them."""
        path = self._totals(draft) / part_name(*shards)
        _require_declared(path, table, self.totals_columns)
        with replacing(path) as temporary:
            write_part(temporary, table)
        self.remove_covered(shards, draft)

    def remove_covered(self, shards: tuple[int, int], draft: str) -> None:
        """Remove a draft's totals that overlap the file of these shards: a kill may have left some that it joins."""
        remove_parts([self._totals(draft)], *shards, keep=part_name(*shards))

    def _totals(self, draft: str) -> Path:
        return self.path / "totals" / f"draft={draft}"

    def write_continuations(self, table: pa.Table, index: int) -> None:
        """Write the documents and token ids of one shard."""
        write_table(self.part("continuations", index), table, CONTINUATION_COLUMNS)

    def write_documents(self, table: pa.Table | None = None) -> None:
        """Collect documents.parquet from the shards; or write it as it is, for a run without continuations."""
        write_table(self.path / "documents.parquet", self.documents() if table is None else table, DOCUMENT_COLUMNS)

    def write_latency(self, table: pa.Table) -> None:
        """Write the step times."""
        write_table(self.path / "latency.parquet", table, LATENCY_COLUMNS)

    @property
    def rules(self) -> list[str]:
        """Ids of the rules whose acceptance the log holds."""
        return list(self.manifest.config["rules"])

    @property
    def log_rules(self) -> LogRules:
        """What the log holds of which rules."""
        return LogRules(tuple(self.rules), self.manifest.emitted, self.manifest.certified)

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
        """Whether there is a position log: not in an imported run, nor where a copy of the run left it behind."""
        return not self.imported and (self.path / "positions").is_dir()

    def require_positions(self) -> None:
        """Raise `NoPositionLog` for an imported run."""
        if self.imported:
            known = f"rounds of {', '.join(self.rules)} at gamma {', '.join(map(str, self.gammas))}"
            raise NoPositionLog(
                f"{self.path} was imported from an engine's metrics: it has {known}, and no position log",
                "ask for these only; alphaprof profile on the same prompts writes a position log",
            )

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Complete shards, in order."""
        return self.manifest.shards

    def positions(self, draft: str, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """One shard of a draft's position log: all of its columns, or some of them."""
        self.require_positions()
        wanted = [column for column in self.log_rules.columns if columns is None or column.name in columns]
        path = self.part("positions", index, draft)
        return _completed(self._read(path, columns), wanted, path)

    def continuations(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """One shard of the documents with their token ids."""
        self.require_positions()
        wanted = [column for column in CONTINUATION_COLUMNS if columns is None or column.name in columns]
        path = self.part("continuations", index)
        return _completed(self._read(path, columns), wanted, path).select([column.name for column in wanted])

    def documents(self) -> pa.Table:
        """All documents of complete shards: the rows of documents.parquet, which a complete run has."""
        schema = arrow_schema(DOCUMENT_COLUMNS)
        path = self.path / "documents.parquet"
        if self.imported or (self.manifest.status == "complete" and path.exists()):
            return _completed(self._read(path), DOCUMENT_COLUMNS, path).select(schema.names).cast(schema)
        tables = [self.continuations(shard.index, schema.names) for shard in self.shards]
        return pa.concat_tables([table.cast(schema) for table in tables]) if tables else schema.empty_table()

    def totals_parts(self, draft: str) -> list[Part]:
        """The files that hold a draft's totals, of complete shards only, in their order; see `log.parts`."""
        return readable(parts_in(self._totals(draft)), len(self.shards))

    def totals_names(self, part: Part) -> list[str]:
        """The columns of one of them, which another version of alphaprof may have written."""
        with _naming(part.path, AGAIN if self.has_log else ANEW):
            return part.names

    def totals(self, part: Part, rules: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """One of them: all of its rules and columns, or some."""
        with _naming(part.path, AGAIN if self.has_log else ANEW):
            return part.read(rules, columns)

    def latency(self) -> pa.Table | None:
        """The step times, or None where none were measured."""
        path = self.path / "latency.parquet"
        return self._read(path) if path.exists() else None

    def _read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        with _naming(path):
            return pq.ParquetFile(path).read(columns=list(columns) if columns else None)


@contextlib.contextmanager
def _naming(path: Path, hint: str = ANEW) -> Iterator[None]:
    """Raise `RunUnreadable`, which names the file, where it cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0]
        raise RunUnreadable(f"{path} cannot be read: {reason}", hint) from None
