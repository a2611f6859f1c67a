"""Who writes a run directory: one process at a time, and nobody writes into a directory that is no longer its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from alphaprof.errors import DiskFull, RunExists
from alphaprof.log.files import NAME as PART
from alphaprof.log.files import WRITTEN, replacing, writing

NAME = ".owner-{:06d}.json"
NOTHING = ""  # the digest of no profile
HELD: set[str] = set()  # tokens of the claims of this process
TAKING = Lock()


@dataclass(frozen=True)
class Owner:
    """A process that writes a run: where it runs, since when, and the digest of its profile. `machine` tells apart what has
    processes of its own (a host since it started, a container); `ticks`: when the process began, since numbers of
    processes come again; None where the system does not say; `token`: what no other claim has; `begun`: what lies in the
    directory is of a run, its own or that of a process whose directory it took over.
    """

    host: str
    machine: str
    process: int
    ticks: int | None
    since: str
    profile: str
    token: str
    begun: bool = False

    @classmethod
    def this(cls, profile: str) -> Owner:
        """The owner that this process is."""
        since, process = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), os.getpid()
        return cls(platform.node(), _machine(), process, _ticks(process), since, profile, secrets.token_hex(8))

    @property
    def alive(self) -> bool | None:
        """Whether the process is there; None where that cannot be seen from here."""
        if self.machine != _machine():
            return None
        if self.process == os.getpid() and self.ticks == _ticks(self.process):
            return self.token in HELD  # else this process could not give its directory back
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # the process of another user
            pass
        began = _ticks(self.process)
        return self.ticks is None or began is None or began == self.ticks

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


@dataclass
class Claim:
    """The right to write a run directory: a file in it that this process alone could make. The one with the highest number
    counts, so that a directory whose owner was killed is taken over by making the next one.
    """

    folder: Path
    number: int
    owner: Owner

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / NAME.format(self.number)

    def begin(self) -> None:
        """Note that a run begins in the directory, which was empty. Raises `DiskFull`."""
        self.owner = dataclasses.replace(self.owner, begun=True)
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self.owner)), encoding="utf-8")

    def clear(self) -> None:
        """Remove what an import wrote before it had a manifest, which nobody can read; and a manifest that is half written.

        Other runs have their manifest before anything else. Files of a user's own stay, whatever they are called.
        """
        if not self.owner.begun or {"manifest.json", "positions", "continuations"} & set(os.listdir(self.folder)):
            return
        totals = sorted(self.folder.glob("totals/draft=*"))
        tables = [path for folder in totals for path in folder.iterdir() if PART.fullmatch(path.name)]
        halves = [path for folder in (self.folder, *totals) for path in folder.iterdir() if WRITTEN.fullmatch(path.name)]
        for path in (*tables, *halves, self.folder / "documents.parquet"):
            path.unlink(missing_ok=True)
        for folder in (*totals, self.folder / "totals"):
            with contextlib.suppress(OSError):  # it may hold something else
                folder.rmdir()

    def require(self) -> None:
        """Raise `DiskFull` where the directory is gone, and `RunExists` where another process has taken it over."""
        owner = None
        with writing(self.folder), contextlib.suppress(FileNotFoundError):
            owner = _owner(self.folder, _latest(self.folder))
        if owner is None:
            raise DiskFull(
                f"{self.folder} was deleted or renamed while it was written",
                "shards are complete where it is now: a profile goes on there with --resume, or begins again",
            )
        if owner.token != self.owner.token:
            raise RunExists(
                f"another process writes {self.folder} now ({owner})",
                "what this one measured last is lost; let the other one finish",
            )


@contextlib.contextmanager
def claimed(
    folder: Path, config: dict[str, Any] | None, resume: bool = False, say: Callable[[str], None] = lambda _: None
) -> Iterator[Claim]:
    """Yields the claim of a run directory, which is made where it is missing; it is given back when the block ends.

    `config`: the profile, by which messages describe the owner; None: there is none, and nothing to resume; `resume`: take
    it over from a process that may be gone, on another machine for example. Raises `RunExists`, which names the owner, and
    `DiskFull`.
    """
    text = json.dumps(config, sort_keys=True).encode()
    profile = NOTHING if config is None else hashlib.sha256(text).hexdigest()
    with writing(folder):
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with TAKING:
            claim = _take(folder, Owner.this(profile), resume, say)
            HELD.add(claim.owner.token)
    try:
        yield claim
    finally:
        with contextlib.suppress(OSError):  # where it cannot be given back, the next process takes it over
            owner = _owner(folder, _latest(folder))
            if owner is not None and owner.token == claim.owner.token:  # else another process took it over
                claim.clear()
                claim.path.unlink()
            if made:
                folder.rmdir()  # empty: nothing came of it
        HELD.discard(claim.owner.token)


def _take(folder: Path, owner: Owner, resume: bool, say: Callable[[str], None]) -> Claim:
    while True:
        if number := _latest(folder):
            before = _owner(folder, number)
            _require_gone(folder / NAME.format(number), before, owner, resume, say)
            owner = dataclasses.replace(owner, begun=before is not None and before.begun)
        claim = Claim(folder, number + 1, owner)
        try:
            with claim.path.open("x", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(owner), file)
        except FileExistsError:  # another process was faster: who is it?
            continue
        except OSError:
            with contextlib.suppress(OSError):
                claim.path.unlink()
            raise
        earlier = [folder / NAME.format(place) for place in range(1, number + 1)]
        for path in (*earlier, *folder.glob("..owner-*.json.*.tmp")):  # the latter of a process killed while it began
            path.unlink(missing_ok=True)
        return claim


def _require_gone(path: Path, before: Owner | None, owner: Owner, resume: bool, say: Callable[[str], None]) -> None:
    """Raise `RunExists` unless the owner of a directory is gone, as far as can be seen, or it is taken over."""
    alive = before.alive if before else None
    if alive is False:
        return
    who = before or "an unidentified process"
    if alive is None and resume:
        say(f"taking {path.parent} over from {who}")
        return
    profile = resuming = ""
    if owner.profile != NOTHING:
        profile = f" with {'another' if before and before.profile != owner.profile else 'this'} profile"
        resuming = "add --resume, or "
    verb = "is being written" if alive else "may still be written"
    until = ", or wait" if alive else f"; if that process has ended, {resuming}delete {path}"
    raise RunExists(f"{path.parent} {verb}{profile} ({who})", f"choose another --out{until}")


def _owner(folder: Path, number: int) -> Owner | None:
    """The owner that a claim names; None where it was killed before it could write its name."""
    try:
        return Owner(**json.loads((folder / NAME.format(number)).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _latest(folder: Path) -> int:
    """The number of the claim that counts; 0: there is none. Raises `OSError`, also where a folder cannot be listed."""
    # Not by Path.glob, which hides that a folder may not be listed.
    names = (re.fullmatch(r"\.owner-(\d+)\.json", name) for name in os.listdir(folder))
    return max((int(name[1]) for name in names if name), default=0)


def _machine() -> str:
    """What tells apart machines that started at different times, and containers."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _ticks(process: int) -> int | None:
    """When a process began, in ticks since the machine started; -1 where it is dead, None where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return -1 if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
