"""The parts of the `Report` value that time enters: step times, memory, concurrency, single documents. See `model.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alphaprof.stats.estimate import Interval


@dataclass(frozen=True)
class DocumentSpeedups:
    """Speedups of single documents: tenth percentile, median, ninetieth percentile, and the share that gets slower."""

    p10: float  # tenth percentile
    p50: float  # median
    p90: float  # ninetieth percentile
    slower: float  # share of documents that the draft slows down


@dataclass(frozen=True)
class AtConcurrency:
    """Speedups with so many sequences decoded at a time, by gamma; `best_gamma` has the largest."""

    concurrency: int  # sequences decoded at a time
    gammas: tuple[int, ...]  # of the speedups, in their order
    speedups: tuple[Interval | None, ...]  # of decoding
    request_speedups: tuple[Interval | None, ...]  # empty for the whole traffic
    best_gamma: int | None  # of the largest speedup
