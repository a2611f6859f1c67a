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
from threading import Event, Thread
from typing import Any

from alphaprof.errors import AlphaprofError, RunExists, cut
from alphaprof.log.manifest import MANIFEST, PROFILE
from alphaprof.log.place import Place, require_put_if_absent
from alphaprof.log.store import require_new

SIGN = ".beginning"  # what the process that begins a run writes again and again, until there is a manifest
BEAT = 60.0  # seconds between two of these
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


@contextlib.contextmanager
def alive(place: Place) -> Iterator[None]:
    """Has a thread write who this process is, and when, for others that wait for the block to end; however long it takes."""
    me, ended = f"process {os.getpid()} on {platform.node()}", Event()

    def beat() -> None:
        going = True
        while going:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            with contextlib.suppress(AlphaprofError):  # what this process writes next will tell
                place.put(SIGN, f"{me}, at {now}".encode())
            going = not ended.wait(BEAT)

    thread = Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(AlphaprofError):
            place.remove(SIGN)


def last_seen(place: Place) -> str:
    """Who begins the run in a place, and when it last said so; empty where nobody has."""
    with contextlib.suppress(FileNotFoundError):
        return cut(place.read(SIGN).decode(errors="replace"))
    return ""


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
