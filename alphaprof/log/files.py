"""Files of a run: written beside and renamed, and known again by their size and digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from alphaprof.errors import DiskFull, RunUnreadable
from alphaprof.log.manifest import File

DRAFT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,199}")  # a draft's name is part of a folder's: draft=NAME
SMALL = 2**24  # bytes; a larger file is known by its footer, and page checksums guard the values that are read
WRITTEN = re.compile(r"\.[\w.-]+\.(parquet|json)\.\d+\.tmp")  # what `replacing` calls a file while it is written
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error.

    Its name begins with a dot, so that readers of the directory never see a half-written file. File and folder are on the
    disk when the block has ended. Raises `DiskFull` for whatever the system says against it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        synced(temporary)
        temporary.replace(path)
        synced(path.parent)
    except OSError as error:
        raise unwritable(path, error) from None
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


def unwritable(path: Path, error: OSError) -> DiskFull:
    """The failure to write a file of a run, with the step that mends its cause."""
    if error.errno in NO_SPACE:
        hint = "free space; a profile goes on with --resume"
    elif error.errno in NOT_ALLOWED:
        hint = "mend permissions, or choose another --out; a profile goes on with --resume"
    elif error.errno == errno.ENAMETOOLONG:
        hint = "choose a shorter --out, and shorter names of drafts"
    elif error.errno == errno.EFBIG:
        hint = "lower shard_documents, or choose an --out on a file system that takes larger files"
    else:
        hint = "look after that disk or mount; a profile goes on with --resume"
    return DiskFull(f"cannot write {path}: {error.strerror or error}", hint)


def file_of(path: Path) -> File:
    """What identifies a file that was just written. Raises `DiskFull` where it cannot be read back."""
    try:
        with path.open("rb") as stream:
            return File(stream.seek(0, os.SEEK_END), _footer(stream.fileno()), _whole(stream))
    except OSError as error:
        raise unwritable(path, error) from None


def require_same(path: Path, file: File, hint: str, whole: bool | None = None) -> None:
    """Raise `RunUnreadable`, with a hint, unless a file is what was written. `whole`: compare all of it, or the size and the
    footer alone; None: all of it where it is small.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            if size != file.size:
                raise RunUnreadable(f"{path} is damaged: it has {size} bytes, and {file.size} were written", hint)
            everything = size <= SMALL if whole is None else whole
            same = _whole(stream) == file.whole if everything else _footer(stream.fileno()) == file.footer
    except OSError as error:
        raise RunUnreadable(f"{path} cannot be read: {error.strerror or error}", hint) from None
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
