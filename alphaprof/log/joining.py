"""Who may write a run directory: every process with the profile that it was begun with, and no other."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from alphaprof.errors import RunExists
from alphaprof.log.manifest import MANIFEST, PROFILE
from alphaprof.log.place import Place, require_put_if_absent
from alphaprof.log.store import require_new

FREE = ("decision", "route", "execution")  # what a run may go on with otherwise than it began


@dataclass(frozen=True)
class Beginning:
    """The content of profile.json, the first file of a run: the `digest` of its profile, and the process that began it."""

    digest: str
    host: str
    process: int
    since: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Beginning:
        """That this process makes."""
        text = json.dumps({name: value for name, value in config.items() if name not in FREE}, sort_keys=True)
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(hashlib.sha256(text.encode()).hexdigest(), platform.node(), os.getpid(), since)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


@contextlib.contextmanager
def joined(
    place: Place, config: Mapping[str, Any], resume: bool = False, hint: str | None = None, several: bool = False
) -> Iterator[None]:
    """Makes the place of a run where it is missing, and takes it for runs with this profile; processes that have the same
    one share it. Where the block ends before there is a manifest, the next process may have any profile.

    `resume`: go on with a run that has a manifest; `hint`: what to do about one, without; `several`: processes share the
    work, so that the place must heed put-if-absent. Raises `RunExists` and `DiskFull`.
    """
    mine, begun = Beginning.of(config), False
    made = False
    if not (resume and place.has(MANIFEST)):
        require_new(place, *([hint] if hint else []))
        made = place.make()
        if several:
            require_put_if_absent(place)
        begun = place.put_new(PROFILE, (json.dumps(dataclasses.asdict(mine), indent=2) + "\n").encode())
        if not begun:
            _require_same(place, mine)
    elif several:
        require_put_if_absent(place)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # nothing may hide what ended the block
            if begun and set(place.names("")) == {PROFILE}:
                place.remove(PROFILE)
                if made:
                    place.discard()


def _require_same(place: Place, mine: Beginning) -> None:
    """Raise `RunExists` unless a run was begun with the same profile."""
    try:
        theirs = Beginning(**json.loads(place.read(PROFILE)))
    except FileNotFoundError:  # the other process has failed meanwhile, and taken it back
        return
    except (OSError, ValueError, TypeError):
        theirs = None
    if theirs is None:  # somebody's own file of that name
        raise RunExists(f"{place.shown} exists and is not empty", "choose a new directory for --out")
    if theirs.digest != mine.digest:
        raise RunExists(
            f"{place.shown} was begun with another profile ({theirs})",
            f"choose another --out; if that process has ended, delete {place.shown}",
        )
