"""What a directory must be for a new run: empty, or left by a run that was killed before it had a manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alphaprof.errors import RunExists
from alphaprof.run.manifest import MANIFEST

if TYPE_CHECKING:
    from alphaprof.run.storage import Storage  # it imports pyarrow, which the refusal of an existing --out does not need

TRAINING = "training.json"  # the record in the folder of a head

# What a run leaves that was killed before it had a manifest.
BEGUN = re.compile(
    r"records/(prompts|texts|rows)-\d{4,}\.json|(prompts|totals/draft=[a-z0-9_-]+)/part-\d{5,}\.parquet|documents\.parquet"
)


GO_ON = "add --resume to finish it, or choose another --out"


def require_no_run(out: str) -> None:
    """Raise `RunExists` if a local directory holds a run: what `require_free` finds later, for a hundredth of its time."""
    if Path(out, MANIFEST).exists():
        raise RunExists(f"{out} already holds a run", GO_ON)


def require_new(storage: Storage, hint: str = "") -> None:
    """Raise `RunExists` as `require_free` does, and `DiskFull` if the directory cannot be made or written."""
    storage.require_writable()
    require_free(storage, hint)


def require_free(storage: Storage, hint: str = "", resume: bool = False) -> None:
    """Raise `RunExists` if a run is there, unless it is resumed, or other files are. `hint`: what to do about a run."""
    names = storage.names("")
    if MANIFEST in names and not resume:
        raise RunExists(f"{storage.shown} already holds a run", hint or GO_ON)
    if MANIFEST not in names and not _is_abandoned(storage, list(names)):
        raise RunExists(f"{storage.shown} exists and is not empty", "choose a new directory for --out")


def _is_abandoned(storage: Storage, names: Sequence[str]) -> bool:
    """Return whether a run left all files of a directory that was killed before it had a manifest. One of each folder tells
    whose they are: schemas and records name the program.
    """
    one = {name.partition("/")[0]: name for name in names}
    return all(map(BEGUN.fullmatch, names)) and all(b"alphaprof" in storage.read(name) for name in one.values())


def clear(storage: Storage) -> None:
    """Remove what a run left that has no manifest."""
    for name in filter(BEGUN.fullmatch, storage.names("")):
        storage.remove(name)
