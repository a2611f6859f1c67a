"""What single timing rounds say about the cost of a round of drafting: whether their two halves agree, and whether a few of
them are far slower than the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from alphaprof.costs.speedup import NOTHING, StepTime, StepTimes, Timing, round_costs
from alphaprof.costs.timing import SLOW_TAIL, median_error
from alphaprof.stats.estimate import Array, quantile

AGREE = 0.99  # confidence with which two halves disagree before a note says so


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


@dataclass(frozen=True)
class SlowTail:
    """A step that is far slower in a few timing rounds than in the others: its mean and median in ms; and by what share of
    itself a round of drafting costs more by means than by medians.
    """

    step: str
    mean_ms: float
    median_ms: float
    more: float


def slow_tail(times: StepTimes, gamma: int) -> SlowTail | None:
    """Return the step that makes a round of `gamma` drafts dearer by the means of the timing rounds than by their medians;
    None if that is at most `SLOW_TAIL`, or the times were not taken in rounds.

    What a server spends is a sum of times, tails included; in decode steps, whose own tails both ways of decoding have.
    """
    rounds = len(costs_by_round(times, gamma))
    if not rounds:
        return None
    steps, decode = _steps(times, gamma), float(np.mean(times.decode.rounds[:rounds]))
    means = {name: (count, step, float(np.mean(step.rounds[:rounds]))) for name, (count, step) in steps.items()}
    by_means = sum(count * mean for count, _, mean in means.values()) / decode
    more = by_means / float(round_costs(times, gamma)[gamma]) - 1
    if more <= SLOW_TAIL:
        return None
    usual = decode / times.decode.ms
    name = max(means, key=lambda each: means[each][0] * (means[each][2] - usual * means[each][1].ms))
    return SlowTail(name, means[name][2], means[name][1].ms, more)


def costs_by_round(times: StepTimes, gamma: int) -> Array:
    """Return the cost of a round of `gamma` drafts in each timing round, in that round's decode step, [rounds]; as many as
    all steps have.
    """
    steps = _steps(times, gamma).values()
    rounds = min(len(times.decode.rounds), *(len(step.rounds) for _, step in steps))
    spent = sum(count * np.array(step.rounds[:rounds]) for count, step in steps)
    return np.asarray(spent / np.array(times.decode.rounds[:rounds]))


def _steps(times: StepTimes, gamma: int) -> dict[str, tuple[int, StepTime]]:
    """Return the steps of a round after one of which nothing was accepted, by name, and how often it runs each."""
    first = times.draft_first.get(1)
    steps = {
        f"verification of {gamma + 1} tokens": (1, times.target[gamma + 1]),
        "first step": (0, NOTHING) if first is None else (1, first),
        "draft step": (gamma - (first is not None), times.draft),
        "search": (1, times.lookup),
        "bookkeeping": (1, times.bookkeeping),
    }
    return {name: (count, step) for name, (count, step) in steps.items() if count * step.ms > 0}
