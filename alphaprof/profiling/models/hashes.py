"""SHA-256 of weight files: the hub's own where its cache has it, else computed once on all cores and kept for other runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from alphaprof.config.model_files import ADAPTER, ModelFiles
from alphaprof.config.options import ModelOptions
from alphaprof.profiling.models.hub import ADAPTER_FILES, files_in, folder_of, is_local
from alphaprof.run.manifest import FILES, PARTIAL

# A file of the hub's cache that git-lfs or Xet stores is named by its SHA-256; one that git stores by 40 digits of SHA-1.
BLOB = re.compile(r"/models--[^/]+/blobs/[0-9a-f]{64}$")
LINKS = 8  # that are followed to such a file
SETTLED = 2.0  # seconds after which a file is changed no more within the resolution of its time
Key = tuple[str, int, int, int]  # path, size, time of the last change in ns as the system keeps it, inode


def weight_files(options: ModelOptions, files: ModelFiles | None = None) -> tuple[Path, ...]:
    """Return the files that a model's weights are loaded from; none if that is not certain: an adapter on the hub names a
    base model that is elsewhere. `files`: its files, if they are read already.
    """
    if options.adapter is not None:
        adapter = folder_of(options.model_copy(update={"model": options.adapter, "revision": None}))
        base = weight_files(options.model_copy(update={"adapter": None}), files)
        own = [] if adapter is None else [adapter / name for name in ADAPTER_FILES]
        return (*base, *own) if base and own and all(file.is_file() for file in own) else ()
    if options.is_gguf:
        return (Path(options.model),)
    files = files or files_in(options)
    if files is None or ((files.folder / ADAPTER).is_file() and not is_local(options.model)):
        return ()
    beside = [file for name in ADAPTER_FILES if (file := files.folder / name).is_file()]  # which peft adds at loading
    found = (*files.named, *beside)
    return found if all(file.is_file() for file in found) else ()


def fingerprint_by_files(settings: Any, files: Iterable[Path]) -> str:
    """SHA-256 over settings, as JSON, and over the SHA-256 of files, whose names and order do not matter. Without files it
    begins with `PARTIAL`: the weights are not known.
    """
    found = sorted(sha256_of(list(files)))
    content = [settings, found]
    return (FILES if found else PARTIAL) + hashlib.sha256(
        json.dumps(content, sort_keys=True, default=str).encode()
    ).hexdigest()


def sha256_of(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of files, in hexadecimal. What neither the hub's cache nor an earlier run tells is read, each file
    by one core.
    """
    found = {file: known for file in files if (known := hub_sha256(file)) is not None}
    keys = {file: _key(file) for file in files if file not in found}
    kept = _kept() if keys else {}
    found |= {file: kept[key] for file, key in keys.items() if key in kept}
    if left := [file for file in files if file not in found]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            new = dict(zip(left, pool.map(_hashed, left), strict=True))
        found |= new
        _keep({keys[file]: digest for file, digest in new.items()})
    return [found[file] for file in files]


def hub_sha256(path: Path) -> str | None:
    """Return the SHA-256 that names a file in the hub's cache; None: it is not there, or git stores it. Links are followed
    one by one: where the cache shares blobs between repositories, a blob is a link to a file with a name of another hash.
    """
    for _ in range(LINKS):
        if not path.is_symlink():
            return None
        path = Path(os.path.normpath(Path(os.path.realpath(path.parent), os.readlink(path))))
        if BLOB.search(path.as_posix()):
            return path.name
    return None


def _hashed(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _key(file: Path) -> Key:
    state = file.stat()
    # Not the time of modification, which anybody may set: archives and images give all files the same.
    return str(file.resolve()), state.st_size, state.st_ctime_ns, state.st_ino


def _place() -> Path:
    """Return the path of the hash cache. Raises `RuntimeError` if the user has no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "alphaprof" / "hashes.json"


def _kept() -> dict[Key, str]:
    """Return the hashes that are kept; none if they cannot be read."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError):
        return {(path, size, time, inode): digest for path, size, time, inode, digest in json.loads(_place().read_bytes())}
    return {}


def _keep(new: Mapping[Key, str]) -> None:
    """Keep hashes, beside those of files that are still there, if that can be written: whole, since another process may
    read or write it now. What one of two loses is hashed once more.
    """
    last = (time.time() - SETTLED) * 1e9
    new = {key: digest for key, digest in new.items() if key[2] < last}
    if not new:
        return
    with contextlib.suppress(OSError, RuntimeError):
        place = _place()
        place.parent.mkdir(parents=True, exist_ok=True)
        every = {key: digest for key, digest in (_kept() | dict(new)).items() if os.path.exists(key[0])}
        handle, written = tempfile.mkstemp(dir=place.parent, prefix="hashes-")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump([[*key, digest] for key, digest in sorted(every.items())], file)
            os.replace(written, place)
        except BaseException:
            os.unlink(written)
            raise
