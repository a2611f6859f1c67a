"""Where the files of a run lie: a local folder, or an object store. Files are written whole and are never half there."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from alphaprof.errors import DiskFull, OptionInvalid
from alphaprof.log.place.local import LocalPlace, reading, writing
from alphaprof.log.place.objects import KEYS, ObjectPlace
from alphaprof.log.place.protocol import Content, Place

__all__ = [
    "Content",
    "LocalPlace",
    "ObjectPlace",
    "Place",
    "address_of",
    "is_remote",
    "place_of",
    "reading",
    "require_put_if_absent",
    "writing",
]
SCHEMES = tuple(KEYS)  # az://CONTAINER/..., in the account that the environment names
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")  # what pathlib makes of a URI
BUCKET, FOLDERS = r"[A-Za-z0-9][A-Za-z0-9._-]*", r"[\w.=+@!()'-]+(?:/[\w.=+@!()'-]+)*"
REMOTE = re.compile(rf"(?!.*/\.\.?(?:/|$))(?i:({'|'.join(SCHEMES)}))://({BUCKET})(?:/({FOLDERS}))?/*", re.ASCII)


def place_of(where: str | Path) -> Place:
    """Returns the place that a path or a URI names; nothing is looked for yet.

    Raises `OptionInvalid` for a URI, or a variable of the environment, that cannot be used, and `ExtraMissing`.
    """
    text = str(where)
    if isinstance(where, Path):
        text = COLLAPSED.sub(r"\1://", text, count=1)
    if URI.match(text) is None:
        return LocalPlace(Path(where))
    match = REMOTE.fullmatch(text)
    if match is None:  # it may hold a key: nothing of it is repeated
        raise OptionInvalid(
            "the address is not that of a place for a run: a folder, or s3://BUCKET/FOLDER (gs://, az://), nothing more",
            "use letters, digits and _.=+-@!()' in the names of folders; credentials come from the environment alone",
        )
    return ObjectPlace(match[1].lower(), match[2], match[3] or "")


def address_of(place: Place) -> str:
    """How a process in another directory names a place."""
    return str(place.path.absolute()) if isinstance(place, LocalPlace) else place.shown


def is_remote(where: str) -> bool:
    """Whether an address names something in an object store."""
    return where.lower().startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def require_put_if_absent(place: Place) -> None:
    """Write a hidden file twice, and raise `DiskFull` where the second took the place of the first: commits of several
    processes would not be safe there.
    """
    name = f".probe-{secrets.token_hex(8)}"
    try:
        heeded = place.put_new(name, b"first") and not place.put_new(name, b"second")
    finally:
        place.remove(name)
    if not heeded:
        raise DiskFull(
            f"{place.shown} ignores put-if-absent: two processes could commit the same shard",
            "write it by one process, or use a store that heeds If-None-Match, as Amazon S3, Google's and Azure's do",
        )
