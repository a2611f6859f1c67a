"""Files of a run: how their names say which shards they cover, and how size and digests tell whether one is as it was
written.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from alphaprof.errors import RunDamaged
from alphaprof.log.manifest import File, Shard

DRAFT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,199}")  # a draft's name is part of a folder's: draft=NAME
SMALL = 2**24  # bytes; a larger file is known by its footer, and page checksums guard the values that are read
NAME = re.compile(r"part-(\d{5,})(?:-(\d{5,}))?\.[0-9a-f]{8}\.parquet")
SHORT = 11  # characters of the digest of a footer, 64 bits
ENOUGH = 32_768  # documents that a file has at least, if there are as many


def file_of(content: bytes | pa.Buffer) -> File:
    """Return what identifies a file with this content."""
    view = memoryview(content)
    footer = _digest(view[-_footer_bytes(view[-8:], len(view)) :])
    return File(len(view), footer[:SHORT], _digest(view))


def require_same(stream: pa.NativeFile, file: File, shown: str, hint: str, whole: bool) -> bytes:
    """Return the footer of an open file. Raises `RunDamaged`, with a hint, unless the file is what was written. `whole`:
    compare all of it, or the size and the footer alone; `shown`: how messages name it.
    """
    size = stream.size()
    if size != file.size:
        raise RunDamaged(f"{shown} is damaged: it has {size} bytes, and {file.size} were written", hint)
    if whole:
        content = stream.read_at(size, 0)
        footer = content[-_footer_bytes(content[-8:], size) :]
        same = _digest(content) == file.whole
    else:
        length = _footer_bytes(stream.read_at(min(size, 8), max(0, size - 8)), size)
        footer = stream.read_at(length, size - length)
        same = _digest(footer)[:SHORT] == file.footer
    if not same:
        raise RunDamaged(f"{shown} is damaged: its content has changed", hint)
    return bytes(footer)


def _digest(content: bytes | memoryview) -> str:
    """SHA-256, the first 128 bits, in base64: there are thousands of them."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()[:16]).decode().rstrip("=")


def _footer_bytes(end: bytes | memoryview, size: int) -> int:
    """Return the length of a Parquet file's footer, which locates every column, from the last 8 bytes of the file."""
    (length,) = struct.unpack("<I", bytes(end[:4]).rjust(4, b"\0"))
    return int(min(length + 8, size))


@dataclass(frozen=True)
class TotalsPart:
    """One file of totals, and the first and the last shard that it covers."""

    name: str
    first: int
    last: int


def shards_of(name: str) -> tuple[int, int] | None:
    """Return the first and the last shard that the file of a name covers; None if it is not such a name."""
    found = NAME.fullmatch(name.rpartition("/")[2])
    return (int(found[1]), int(found[2] or found[1])) if found else None


def readable(parts: Sequence[TotalsPart], shards: int) -> list[TotalsPart]:
    """Of parts those to read, in the order of their shards: nothing beyond the first `shards`, and no shard twice; of those
    that start together the widest.
    """
    chosen: list[TotalsPart] = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
        if part.last < shards and not (chosen and part.first <= chosen[-1].last):
            chosen.append(part)
    return chosen


def ranges(shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """Yield the shards that files of a complete run should cover, (first, last) each: those of `ENOUGH` documents together,
    and the last ones.
    """
    first = documents = 0
    for shard in shards:
        documents += shard.documents
        if documents >= ENOUGH or shard.index == shards[-1].index:
            yield first, shard.index
            first, documents = shard.index + 1, 0


def attempt_of(content: bytes | pa.Buffer) -> str:
    """Return the part of a file's name that identifies its content: equal content has equal names."""
    return hashlib.sha256(content).hexdigest()[:8]
