"""Files of a run: written beside and renamed, known again by size and digests; and which shards each part of the totals
covers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphaprof.errors import DiskFull, RunUnreadable
from alphaprof.log.manifest import File, Shard

DRAFT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,199}")  # a draft's name is part of a folder's: draft=NAME
SMALL = 2**24  # bytes; a larger file is known by its footer, and page checksums guard the values that are read
WRITTEN = re.compile(r"\.[\w.-]+\.(parquet|json)\.\d+\.tmp")  # what `replacing` calls a file while it is written
NAME = re.compile(r"part-(\d{5,})(?:-(\d{5,}))?\.parquet")
ENOUGH = 32_768  # documents that a file has at least, where there are as many
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space; a profile goes on with --resume"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "correct the permissions, or choose another --out; a profile goes on with --resume",
    ),
    errno.ENAMETOOLONG: "choose a shorter --out, and shorter names of drafts",
    errno.EFBIG: "lower shard_documents, or choose an --out on a file system that takes larger files",
}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error.

    Its name begins with a dot, so that readers of the directory never see a half-written file. File and folder are on the
    disk when the block has ended. Raises `DiskFull` for whatever the system says against it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield temporary
            synced(temporary)
            temporary.replace(path)
            synced(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def synced(path: Path) -> None:
    """Have the system write a file or a folder to the disk, where it can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not for folders, say some file systems
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `DiskFull`, with the step that mends its cause, where the system refuses to write a path of a run or to read it
    back.
    """
    try:
        yield
    except OSError as error:
        hint = REMEDIES.get(error.errno or 0, "check that disk or mount; a profile goes on with --resume")
        raise DiskFull(f"cannot write {path}: {error.strerror or error}", hint) from None


@contextlib.contextmanager
def reading(path: Path, hint: str) -> Iterator[None]:
    """Raise `RunUnreadable`, which names the path, where it cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException, KeyError) as error:
        reason = next(iter(str(getattr(error, "strerror", None) or error).splitlines()), type(error).__name__)
        raise RunUnreadable(f"{path} cannot be read: {reason}", hint) from None


def file_of(path: Path) -> File:
    """What identifies a file that was just written. Raises `DiskFull` where it cannot be read back."""
    with writing(path), path.open("rb") as stream:
        return File(stream.seek(0, os.SEEK_END), _footer(stream.fileno()), _whole(stream))


def require_same(path: Path, file: File, hint: str, whole: bool | None = None) -> None:
    """Raise `RunUnreadable`, with a hint, unless a file is what was written. `whole`: compare all of it, or the size and the
    footer alone; None: all of it where it is small.
    """
    with reading(path, hint), path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size != file.size:
            raise RunUnreadable(f"{path} is damaged: it has {size} bytes, and {file.size} were written", hint)
        everything = size <= SMALL if whole is None else whole
        same = _whole(stream) == file.whole if everything else _footer(stream.fileno()) == file.footer
    if not same:
        raise RunUnreadable(f"{path} is damaged: its content is not what was written", hint)


def _whole(stream: BufferedReader) -> str:
    """SHA-256 of a file, the first 128 bits."""
    stream.seek(0)
    return hashlib.file_digest(stream, "sha256").hexdigest()[:32]


def _footer(descriptor: int) -> str:
    """SHA-256 of the footer of a Parquet file, the first 128 bits: where every column lies, as its last 8 bytes say."""
    size = os.fstat(descriptor).st_size
    (length,) = struct.unpack("<I", os.pread(descriptor, 4, max(0, size - 8)).rjust(4, b"\0"))
    length = min(length + 8, size)
    return hashlib.sha256(os.pread(descriptor, length, size - length)).hexdigest()[:32]


@dataclass(frozen=True)
class TotalsPart:
    """One file, and the first and the last shard that it covers."""

    path: Path
    first: int
    last: int

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The footer, which tells of hundreds of columns and takes longer to read than a few of them."""
        return pq.read_metadata(self.path)

    def read(self, rules: Collection[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of some rules and some columns (None: all). Each row group is of one rule, as its statistics say."""
        place = self.metadata.schema.names.index("rule")
        held = [self.metadata.row_group(index).column(place).statistics for index in range(self.metadata.num_row_groups)]
        if not all(rule and rule.has_min_max and rule.min == rule.max for rule in held):
            raise RunUnreadable(f"{self.path} is not what alphaprof writes", "delete totals/, and make it again by --resume")
        groups = [index for index, rule in enumerate(held) if rules is None or rule.min in rules]
        file = pq.ParquetFile(self.path, metadata=self.metadata, page_checksum_verification=True)
        table = file.read_row_groups(groups, columns=columns)
        return table if columns is None else table.select(columns)


def part_name(first: int, last: int) -> str:
    """The name of a file that covers shards from `first` to `last`; names sort as shards do."""
    return f"part-{first:05d}.parquet" if first == last else f"part-{first:05d}-{last:05d}.parquet"


def parts_in(folder: Path) -> list[TotalsPart]:
    """All parts in a folder, in the order of their shards; of those that start together the widest first."""
    names = [(path, NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ())]
    parts = [TotalsPart(path, int(name[1]), int(name[2] or name[1])) for path, name in names if name]
    return sorted(parts, key=lambda part: (part.first, -part.last))


def readable(parts: Sequence[TotalsPart], shards: int) -> list[TotalsPart]:
    """Of parts in order those to read: nothing beyond the first `shards`, and no shard twice.

    A process that was killed just after it had joined several files leaves them beside the one that covers them all.
    """
    chosen: list[TotalsPart] = []
    for part in parts:
        if part.last < shards and not (chosen and part.first <= chosen[-1].last):
            chosen.append(part)
    return chosen


def ranges(shards: Sequence[Shard], complete: bool) -> Iterator[tuple[int, int]]:
    """The shards that files should cover, (first, last) each: those of `ENOUGH` documents together, whether the run goes on
    or not; the last ones together once it is complete, and one by one before.
    """
    first = documents = 0
    for shard in shards:
        documents += shard.documents
        if documents >= ENOUGH or (complete and shard.index == len(shards) - 1):
            yield first, shard.index
            first, documents = shard.index + 1, 0
    yield from ((index, index) for index in range(first, len(shards)))


def write_part(path: Path, table: pa.Table) -> None:
    """Write rows that are sorted by rule, a row group a rule; no rows, no row group."""
    split = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    options = {
        "compression": "lz4",  # a third larger than zstd, and read in two thirds of the time
        "use_dictionary": [field.name for field in table.schema if field.name not in ("document", *split)],
        "write_statistics": ["rule"],  # of hundreds of columns they are half of what is read first
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") | {"document": "DELTA_BINARY_PACKED"},
        "write_page_checksum": True,
    }
    sizes = pc.run_end_encode(table["rule"].cast(pa.string()).combine_chunks()).run_ends.to_pylist()
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for start, stop in itertools.pairwise([0, *sizes]):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def of_rule(table: pa.Table, rule: str) -> pa.Table:
    """The rows of one rule: often all of them, as dictionaries tell without a look at the rows."""
    if all(chunk.dictionary.to_pylist() == [rule] for chunk in table["rule"].chunks):
        return table
    return table.filter(pc.equal(table["rule"].cast(pa.string()), rule))
