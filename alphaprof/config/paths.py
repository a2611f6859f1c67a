"""Paths in a profile: what is in an object store, what is local, and the formats of data files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from alphaprof.errors import require_utf8

KEPT = "kept:"  # how the path of a file begins whose content a run holds: it is read from there
SCHEMES = ("s3", "gs", "abfs")  # of object stores
FORMATS = {  # of data files, by suffix
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "txt",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


def data_format(path: str) -> tuple[str, str | None] | None:
    """Return the format of a data file and its compression by the suffixes of its name, in any case; None: none is known."""
    stem, last = os.path.splitext(path.lower())
    compression = COMPRESSED.get(last)
    form = FORMATS.get(os.path.splitext(stem)[1] if compression else last)
    return None if form is None or (form in ("parquet", "arrow") and compression) else (form, compression)


def resolve(reference: str, folder: Path) -> str:
    """Return a model or dataset reference, with a local path made absolute (from `folder`). A hub id, or a file in an
    object store, is returned unchanged. Raises `OptionInvalid` for a path that is not UTF-8.
    """
    if is_remote(reference):
        return reference
    path = Path(os.path.expanduser(reference))
    local = folder / path
    explicit = reference.startswith((".", "/", "~")) or path.suffix.lower() == ".gguf" or data_format(reference)
    if not explicit and not os.path.exists(local):
        return reference
    # Keep the last name: the hub's cache links model.gguf to a file whose name is a hash, without a suffix.
    absolute = str(local.parent.resolve() / local.name)
    require_utf8(absolute)
    return absolute


def addressed(place: Any) -> Any:
    """Return the address of a server, with http:// before HOST:PORT; anything else, and a file that is here, as it is."""
    bare = isinstance(place, str) and re.fullmatch(r"[\w.-]+:\d+(/\S*)?", place) and not os.path.exists(place)
    return f"http://{place}" if bare else place


def is_remote(where: str) -> bool:
    """Return whether an address names something in an object store."""
    return where.lower().startswith(tuple(f"{scheme}://" for scheme in SCHEMES))
