"""Which blocks of documents a run has, if jobs of an array share the work: part I of N, every N-th block from the I-th."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from alphaprof.errors import OptionInvalid

# What schedulers tell each of their jobs: its number, how many there are, and the first number.
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

    def has(self, block: int) -> bool:
        """Return whether a block of documents is one of this part's."""
        return block % self.count == self.index


WHOLE = Part(0, 1)


def part_of(text: str, environment: Mapping[str, str] = os.environ) -> Part:
    """Return the part that an option names: I/N, or `auto` for what a scheduler says. Raises `OptionInvalid`."""
    if text == "auto":
        for number, count, first in SCHEDULERS:
            if number in environment and count in environment:
                index = int(environment[number]) - int(environment.get(first) or 0)
                return part_of(f"{index}/{environment[count]}")
        known = ", ".join(f"{number} and {count}" for number, count, _ in SCHEDULERS)
        raise OptionInvalid(f"--part auto finds no scheduler variables in the environment ({known})", "give --part I/N")
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise OptionInvalid(f"invalid --part {text[:40]!r}", "use I/N with 0 <= I < N, such as 0/4, or auto")
    return Part(int(found[1]), int(found[2]))
