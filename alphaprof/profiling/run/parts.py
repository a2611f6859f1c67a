"""Which shards of a run a process measures, where several share the work: part I of N, every N-th shard from the I-th."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from alphaprof.errors import OptionInvalid, RunUnreadable
from alphaprof.log.manifest import MANIFEST
from alphaprof.log.storage import Storage
from alphaprof.log.writer import last_seen

PATIENCE = 1800.0  # seconds that a part waits for a sign of the one that stages the prompts
LOOK = 2.0  # seconds between two looks
# What schedulers tell each of their processes: its number, how many there are, and the first number.
SCHEDULERS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "ALPHAPROF_PARTS", ""),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", ""),
)


@dataclass(frozen=True)
class Part:
    """Part `index` of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, shard: int) -> bool:
        """Return whether a shard is one of this part's."""
        return shard % self.count == self.index


WHOLE = Part(0, 1)


def part_of(text: str, environment: Mapping[str, str] = os.environ) -> Part:
    """Return the part that an option names: I/N, or `auto` for what a scheduler says. Raises `OptionInvalid`."""
    if text == "auto":
        return _scheduled(environment)
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise OptionInvalid(f"invalid --part {text[:40]!r}", "use I/N with 0 <= I < N, such as 0/4, or auto")
    return Part(int(found[1]), int(found[2]))


def _scheduled(environment: Mapping[str, str]) -> Part:
    for number, count, first in SCHEDULERS:
        if number in environment and count in environment:
            index = int(environment[number]) - int(environment.get(first) or 0)
            return part_of(f"{index}/{environment[count]}")
    known = ", ".join(f"{number} and {count}" for number, count, _ in SCHEDULERS)
    raise OptionInvalid(f"--part auto finds no scheduler variables in the environment ({known})", "give --part I/N")


def wait_until_begun(storage: Storage, part: Part, say: Callable[[str], None]) -> None:
    """Wait until part 0 has staged the run in storage, however long that takes, as long as there are signs of its life.
    Raises `RunUnreadable` if there is none for `PATIENCE`.
    """
    if storage.has(MANIFEST):
        return
    say(f"part {part} waits until part 0 has read the prompts and timed the steps")
    signs, since = None, time.monotonic()
    while not storage.has(MANIFEST):
        seen = last_seen(storage)
        if (now := (seen, storage.names(""))) != signs:
            signs, since = now, time.monotonic()
        if time.monotonic() - since > PATIENCE:
            raise RunUnreadable(
                f"part 0 of {storage.shown} has been silent for {PATIENCE / 60:.0f} minutes (last seen: {seen or 'never'})",
                f"find out why it ended, restart it (--part 0/{part.count}), then restart this part",
            )
        time.sleep(LOOK)
