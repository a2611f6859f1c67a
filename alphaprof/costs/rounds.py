"""What single timing rounds say about the cost of a round of drafting: whether their two halves agree, and whether a few of
them are far slower than the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from alphaprof.costs.speedup import StepTime, StepTimes, Timing, round_costs
from alphaprof.costs.timing import median_error
from alphaprof.stats.estimate import Array, quantile

AGREE = 0.99  # confidence with which two halves disagree before anybody is told


@dataclass(frozen=True)
class HalvesDisagree:
    """What a round of one draft costs in decode steps by the two halves of the timing rounds, which differ by more than
    their errors allow.
    """

    draft: str
    gamma: int
    costs: tuple[float, float]
    rounds: int  # in both halves


def halves_disagree(timing: Timing, draft: str, gamma: int) -> HalvesDisagree | None:
    """Return how the halves of the timing rounds disagree about a round of `gamma` drafts; None if they do not, if either
    has fewer than 3 rounds, or if the times were not taken in rounds.

    The logarithms of both costs are compared by the errors of their medians, added up as independent ones.
    """
    if timing.halves is None or not all(draft in half and half[draft].covers(gamma) for half in timing.halves):
        return None
    costs, errors, freedoms, rounds = [], [], [], 0
    for times in (half[draft] for half in timing.halves):
        by_round = costs_by_round(times, gamma)
        cost = float(round_costs(times, gamma)[gamma])
        error, freedom = median_error(np.log(by_round / cost), times.decode.autocorrelation)
        if not math.isfinite(error):
            return None
        costs.append(cost)
        errors.append(error)
        freedoms.append(freedom)
        rounds += len(by_round)
    allowed = quantile((1 + AGREE) / 2, sum(freedoms)) * math.hypot(*errors)
    if abs(math.log(costs[0] / costs[1])) <= allowed:
        return None
    return HalvesDisagree(draft, gamma, (costs[0], costs[1]), rounds)


def costs_by_round(times: StepTimes, gamma: int) -> Array:
    """Return the cost of a round of `gamma` drafts in each timing round, in that round's decode step, [rounds]; as many as
    all steps have.
    """
    steps = _steps(times, gamma)
    rounds = min(len(times.decode.rounds), *(len(step.rounds) for _, step in steps))
    spent = sum(count * np.array(step.rounds[:rounds]) for count, step in steps)
    return np.asarray(spent / np.array(times.decode.rounds[:rounds]))


def _steps(times: StepTimes, gamma: int) -> list[tuple[int, StepTime]]:
    """Return the steps of a round after one of which nothing was accepted, and how often it runs each."""
    first = times.draft_first.get(1)
    drafting = [(gamma, times.draft)] if first is None else [(1, first), (gamma - 1, times.draft)]
    steps = [(1, times.target[gamma + 1]), *drafting, (1, times.lookup), (1, times.bookkeeping)]
    return [(count, step) for count, step in steps if count * step.ms > 0]
