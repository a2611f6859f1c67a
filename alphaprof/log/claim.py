"""Who writes a run directory: one process at a time, and nobody writes into a directory that is no longer its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaprof.errors import DiskFull, RunExists
from alphaprof.log.files import replacing, unwritable

NAME = ".owner-{:06d}.json"
HELD: set[Path] = set()  # the claims of this process


@dataclass(frozen=True)
class Owner:
    """A process that writes a run: where it runs, since when, and the digest of its profile. `machine` tells apart what has
    processes of its own (a host since it started, a container); `ticks`: when the process began, since numbers of
    processes come again; None where the system does not say; `begun`: what lies in the directory is of a run, its own or
    that of a process whose directory it took over.
    """

    host: str
    machine: str
    process: int
    ticks: int | None
    since: str
    profile: str
    begun: bool = False

    @classmethod
    def this(cls, profile: str) -> Owner:
        """The owner that this process is."""
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(platform.node(), _machine(), os.getpid(), _ticks(os.getpid()), since, profile)

    @property
    def alive(self) -> bool | None:
        """Whether the process is there; None where that cannot be seen from here."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.ticks is None or self.ticks == _ticks(self.process)

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
        """Remove what lies in the directory if it is of a run that has no manifest: nobody can read or finish it."""
        if self.owner.begun and not (self.folder / "manifest.json").exists():
            for path in (*self.folder.glob("*.parquet"), *self.folder.glob(".*.tmp")):
                path.unlink(missing_ok=True)
            for name in ("positions", "continuations", "totals"):
                if (self.folder / name).exists():
                    shutil.rmtree(self.folder / name)

    def require(self) -> None:
        """Raise `DiskFull` where the directory is gone, and `RunExists` where another process has taken it over."""
        try:
            number, there = _latest(self.folder), self.path.exists()
        except OSError as error:
            raise unwritable(self.folder, error) from None
        if number > self.number:
            raise RunExists(
                f"another process has taken {self.folder} over ({_owner(self.folder, number)})",
                "what this one measured last is lost; let the other one finish",
            )
        if not there:
            raise DiskFull(
                f"{self.folder} was deleted or renamed while it was written",
                "shards are complete where it is now: go on there with --resume, or profile again",
            )


@contextlib.contextmanager
def claimed(
    folder: Path, config: dict[str, Any], resume: bool = False, say: Callable[[str], None] = lambda _: None
) -> Iterator[Claim]:
    """The claim of a run directory, which is made where it is missing; given back when the block ends, and with it what has
    no manifest.

    `config`: the profile, for what is said of the owner; `resume`: take it over from a process that may be gone, on another
    machine for example. Raises `RunExists`, which names the owner, and `DiskFull`.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        claim = _take(folder, Owner.this(_digest(config)), resume, say)
    except OSError as error:
        raise unwritable(folder, error) from None
    HELD.add(claim.path)
    try:
        yield claim
    finally:
        HELD.discard(claim.path)
        with contextlib.suppress(OSError):  # where it cannot be given back, the next process takes it over
            claim.clear()
            claim.path.unlink()
            if made:
                folder.rmdir()  # empty: nothing came of it


def _take(folder: Path, owner: Owner, resume: bool, say: Callable[[str], None]) -> Claim:
    while True:
        if number := _latest(folder):
            before = _owner(folder, number)
            if folder / NAME.format(number) in HELD or before is None or not _is_this(before):
                _require_gone(folder, before, owner, resume, say)
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
        for path in folder.glob(".owner-*.json"):
            if _number(path) <= number:
                path.unlink(missing_ok=True)
        return claim


def _is_this(owner: Owner) -> bool:
    """Whether an owner is this process, which then could not give its directory back."""
    return (owner.machine, owner.process, owner.ticks) == (_machine(), os.getpid(), _ticks(os.getpid()))


def _require_gone(folder: Path, before: Owner | None, owner: Owner, resume: bool, say: Callable[[str], None]) -> None:
    """Raise `RunExists` unless the owner of a directory is gone, as far as can be seen, or it is taken over."""
    alive = before.alive if before else None
    if alive is False:
        return
    if alive is None and resume:
        say(f"taking {folder} over from {before or 'a process that did not say who it is'}")
        return
    profile = "another profile" if before and before.profile != owner.profile else "this profile"
    raise RunExists(
        f"{folder} is being written with {profile} ({before or 'by a process that did not say who it is'})",
        "choose another --out, or wait" if alive else "choose another --out; if that process has ended, add --resume",
    )


def _owner(folder: Path, number: int) -> Owner | None:
    """The owner that a claim names; None where it was killed before it could write its name."""
    try:
        return Owner(**json.loads((folder / NAME.format(number)).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _latest(folder: Path) -> int:
    """The number of the claim that counts; 0: there is none."""
    return max(map(_number, folder.glob(".owner-*.json")), default=0)


def _number(path: Path) -> int:
    digits = path.name.removeprefix(".owner-").removesuffix(".json")
    return int(digits) if digits.isdecimal() else 0


def _digest(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _machine() -> str:
    """What tells apart machines that started at different times, and containers."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _ticks(process: int) -> int | None:
    """When a process began, in ticks since the machine started; None where it is dead or the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
