"""What a baseline compares: alpha; or acceptance length at the gamma that was served, of runs that tell no alpha."""

from __future__ import annotations

from typing import Any

import numpy as np

from alphaprof.analysis.estimate import Estimate, by_cluster
from alphaprof.analysis.paired import inverse_difference, share_difference
from alphaprof.report.compare import summed
from alphaprof.report.pool import Pool

Array = np.ndarray[Any, Any]
Sums = tuple[Array, Array]


def accepted_of(pool: Pool, gamma: int | None) -> tuple[Array, Array]:
    """Accepted positions and those with a proposal; at a gamma, accepted drafts and rounds that had any."""
    if gamma is None:
        return pool["accepted"], pool["proposals"]
    return pool[f"accepted_depths_{gamma}"].sum(1), pool[f"drafted_depths_{gamma}"][:, 0]


def compared(pool: Pool, gamma: int | None) -> tuple[Array, Array]:
    """By independent unit, what a difference is taken of: accepted and proposed positions; or at a gamma the rounds that had
    a proposal, and the tokens that make them acceptance length.
    """
    if gamma is None:
        return summed(pool)
    accepted, rounds = by_cluster(pool.cluster, *accepted_of(pool, gamma))
    return rounds, rounds + accepted


def difference(old: Sums, new: Sums, confidence: float, gamma: int | None) -> Estimate:
    """The new side's alpha less the old one's; at a gamma, acceptance length. With an interval over independent units."""
    if gamma is None:
        return share_difference(old, new, confidence)
    return inverse_difference(old, new, confidence, gamma)


def difference_bounds(old: Sums, new: Sums, gamma: int | None, tail: float) -> tuple[float, float]:
    """One-sided bounds of the difference, each wrong with probability `tail`."""
    found = difference(old, new, 1 - 2 * tail, gamma)
    return found.low, found.high
