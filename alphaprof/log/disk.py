"""What a disk does to files of a run: written for good, and failures in our words."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from alphaprof.errors import DiskFull, RunUnreadable

# What a file is called while it is written.
WRITTEN = re.compile(r"\.([\w.=-]+\.(parquet|json|safetensors|md|yaml)|\.beginning|\.probe-[0-9a-f]+)\.\d+\.tmp")
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space, then go on with --resume"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "correct the permissions, or choose another --out; then go on with --resume",
    ),
    errno.ENAMETOOLONG: "choose a shorter --out, and shorter names of drafts",
    errno.EFBIG: "lower shard_documents, or choose an --out on a file system that takes larger files",
}


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
        hint = REMEDIES.get(error.errno or 0, "check that disk or mount, then go on with --resume")
        raise DiskFull(f"cannot write {path}: {error.strerror or error}", hint) from None


@contextlib.contextmanager
def reading(path: Path | str, hint: str) -> Iterator[None]:
    """Raise `RunUnreadable`, which names the path, where it cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException, KeyError) as error:
        reason = next(iter(str(getattr(error, "strerror", None) or error).splitlines()), type(error).__name__)
        raise RunUnreadable(f"{path} cannot be read: {reason}", hint) from None
