"""Where the files of a run lie: a local folder, or an object store. Files are written whole and are never half there."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from alphaprof.errors import DiskFull, OptionInvalid, shown
from alphaprof.log.place.local import LocalPlace
from alphaprof.log.place.objects import KEYS, ObjectPlace
from alphaprof.log.place.protocol import Content, Place

__all__ = ["Content", "LocalPlace", "ObjectPlace", "Place", "address_of", "is_remote", "place_of", "require_put_if_absent"]
SCHEMES = tuple(KEYS)  # az://CONTAINER/..., in the account that the environment names
URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")  # what pathlib makes of a URI
PREFIX = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[\w.=+@!()'-]+(?:/[\w.=+@!()'-]+)*", re.ASCII)
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def place_of(where: str | Path) -> Place:
    """Returns the place that a path or a URI names; nothing is looked for yet.

    Raises `OptionInvalid` for a URI, or a variable of the environment, that cannot be used, and `ExtraMissing`.
    """
    text = str(where)
    if isinstance(where, Path):
        text = COLLAPSED.sub(r"\1://", text, count=1)
    match = URI.fullmatch(text)
    if match is None:
        return LocalPlace(Path(where))
    scheme, rest = match[1].lower(), match[2]
    if "@" in rest.split("/")[0] or "?" in rest or "#" in rest:
        raise OptionInvalid(
            f"a {scheme}:// address is a bucket and folders in it, nothing more",
            f"credentials come from the environment alone: {KEYS.get(scheme, 'as its library says')}",
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if scheme not in SCHEMES:
        raise OptionInvalid(f"{scheme}:// is no place for a run", "give a folder, s3://BUCKET/FOLDER, or gs:// or az://")
    if not BUCKET.fullmatch(bucket) or (prefix and not PREFIX.fullmatch(prefix)):
        raise OptionInvalid(
            f"{shown(text)} is not {scheme}://BUCKET/FOLDER", "use letters, digits and _.=+-@!()' in the names of folders"
        )
    return ObjectPlace(scheme, bucket, prefix)


def address_of(place: Place) -> str:
    """How a process in another directory names a place."""
    return str(place.path.absolute()) if isinstance(place, LocalPlace) else place.shown


def is_remote(where: str) -> bool:
    """Whether an address names something in an object store."""
    match = URI.match(where)
    return match is not None and match[1].lower() in SCHEMES


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
