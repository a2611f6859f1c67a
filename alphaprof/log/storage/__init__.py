"""Where the files of a run lie: a local folder, or an object store. Files are written whole and are never half there."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from alphaprof.errors import DiskFull, OptionInvalid, require_utf8
from alphaprof.log.storage.local import LocalStorage, reading, writing
from alphaprof.log.storage.objects import KEYS, ObjectStorage
from alphaprof.log.storage.protocol import Content, Storage

__all__ = [
    "Content",
    "LocalStorage",
    "ObjectStorage",
    "Storage",
    "address_of",
    "is_remote",
    "reading",
    "require_put_if_absent",
    "storage_of",
    "writing",
]
SCHEMES = tuple(KEYS)  # az://CONTAINER/..., in the account that the environment names
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")  # what pathlib makes of a URI
BUCKET, FOLDERS = r"[A-Za-z0-9][A-Za-z0-9._-]*", r"[\w.=+@!()'-]+(?:/[\w.=+@!()'-]+)*"
REMOTE = re.compile(rf"(?!.*/\.\.?(?:/|$))(?i:({'|'.join(SCHEMES)}))://({BUCKET})(?:/({FOLDERS}))?/*", re.ASCII)


def storage_of(where: str | Path) -> Storage:
    """Return the storage that a path or a URI names; nothing is looked for yet.

    Raises `OptionInvalid` for a path, a URI, or a variable of the environment, that cannot be used, and `ExtraMissing`.
    """
    text = str(where)
    require_utf8(text)
    if isinstance(where, Path):
        text = COLLAPSED.sub(r"\1://", text, count=1)
    if URI.match(text) is None:
        return LocalStorage(Path(where))
    match = REMOTE.fullmatch(text)
    if match is None:  # it may hold a key: nothing of it is repeated
        raise OptionInvalid(
            "unsupported address: give only a folder, or s3://BUCKET/FOLDER (gs://, az://)",
            "name folders with letters, digits and _.=+-@!()'; set credentials only in the environment",
        )
    return ObjectStorage(match[1].lower(), match[2], match[3] or "")


def address_of(storage: Storage) -> str:
    """Return how a process in another directory names the run's storage."""
    return str(storage.path.absolute()) if isinstance(storage, LocalStorage) else storage.shown


def is_remote(where: str) -> bool:
    """Return whether an address names something in an object store."""
    return where.lower().startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def require_put_if_absent(storage: Storage) -> None:
    """Write a hidden file twice, and raise `DiskFull` if the second took the place of the first: commits of several
    processes would not be safe there.
    """
    name = f".probe-{secrets.token_hex(8)}"
    try:
        heeded = storage.put_new(name, b"first") and not storage.put_new(name, b"second")
    finally:
        storage.remove(name)
    if not heeded:
        raise DiskFull(
            f"{storage.shown} ignores put-if-absent: two processes could commit the same shard",
            "write it with one process, or use a store that honors If-None-Match: Amazon S3, Google's or Azure's",
        )
