"""GO, NO-GO or UNDECIDED: a one-sided bound against the least speedup that is worth it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from alphaprof.analysis.estimate import quantile
from alphaprof.analysis.speedup import Speedup

VerdictName = Literal["GO", "NO-GO", "UNDECIDED"]
MANY = 1_000_000


@dataclass(frozen=True)
class Decision:
    """A verdict with the speedup and one-sided bounds that it rests on.

    `documents_needed`: about how many documents in all would settle it; None where it is settled or where documents alone
    cannot settle it.
    """

    verdict: VerdictName
    reason: str
    speedup: Speedup | None
    low: float
    high: float
    documents_needed: int | None


def decide(found: Speedup | None, min_speedup: float, confidence: float, held_out: bool) -> Decision:
    """GO when the lower bound at `confidence` is at or above `min_speedup`, NO-GO when the upper bound is below it.

    `held_out`: the speedup rests on half of the documents, because the other half chose draft or gamma.
    """
    if found is None or not math.isfinite(found.relative_error):
        reason = "an interval needs at least two documents of every domain"
        if held_out:
            reason += " on the held-out half: profile four or more, or fix decision.draft and decision.gamma"
        return Decision("UNDECIDED", reason, found, 0.0, math.inf, None)
    low, high = found.bounds(1 - confidence)
    on = f"on {found.documents} {'held-out ' if held_out else ''}documents"
    level = f"{100 * confidence:g} %"
    if low >= min_speedup:
        reason = f"speedup {found.value:.2f}x {on}, and its {level} lower bound {low:.3f} reaches {min_speedup:g}"
        return Decision("GO", reason, found, low, high, None)
    if high < min_speedup:
        reason = f"speedup {found.value:.2f}x {on}, and its {level} upper bound {high:.3f} is below {min_speedup:g}"
        return Decision("NO-GO", reason, found, low, high, None)
    needed = documents_needed(found, min_speedup, confidence)
    bounds = f"speedup {found.value:.2f}x {on}, {level} bounds {low:.3f} and {high:.3f} enclose {min_speedup:g}"
    if needed is None:
        remedy = "more documents alone would not settle it: it is too close to the threshold for these step times"
        return Decision("UNDECIDED", f"{bounds}; {remedy}", found, low, high, None)
    total = 2 * needed if held_out else needed
    return Decision("UNDECIDED", f"{bounds}; about {total} documents would settle it", found, low, high, total)


def documents_needed(found: Speedup, min_speedup: float, confidence: float) -> int | None:
    """The smallest number of documents like these whose bound would clear the threshold, if the point estimate holds.

    The step-time error stays, sampling variance falls as 1 / documents. None beyond a million.
    """
    distance = abs(math.log(found.value / min_speedup))

    def settles(documents: int) -> bool:
        share = found.documents / documents
        error = math.sqrt(found.sampling_error**2 * share + found.timing_error**2)
        return quantile(confidence, found.freedom / share) * error <= distance

    if not settles(MANY):
        return None
    low, high = found.documents, MANY
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if settles(middle) else (middle + 1, high)
    return low


def held_out(clusters: Iterable[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which documents are held out to test what the others chose; [documents].

    Clusters in the order of their hash fall alternately on the two halves: every second one is held out, whatever order
    the data had, and a cluster is never divided.
    """
    clusters = list(clusters)
    ordered = sorted(set(clusters), key=lambda cluster: hashlib.sha256(cluster.encode()).digest())
    kept_back = set(ordered[1::2])
    return np.array([cluster in kept_back for cluster in clusters], dtype=bool)
