"""How sure step times are that were taken in interleaved rounds: every kind of step once in each round.

The unit is a round, and what counts is a ratio of times within it: what slows the whole machine down falls on all steps of a
round alike, and cancels. Rounds are few, some are disturbed, and neighbours are alike; an interval of a median has to hold
the truth all the same. `docs/research/coverage.md` has the simulations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from alphaprof.stats.estimate import Array
from alphaprof.stats.student import quantile

LEVEL = 0.95
LEAST_ROUNDS = 3  # no bound with fewer
GO_ROUNDS = 6  # no GO with fewer: half of them, where draft or gamma was chosen, still have a bound
FREE_STEPS = ("lookup", "bookkeeping")  # run no model, and may take no time at all
ORDERED_ROUNDS = 6  # from here on order statistics: the least and the largest of 5 hold a median in 94% of all cases
BUSY = 0.1  # waiting for a processor takes hardly any time on an idle machine, and half of it beside a busy process a core
ALL = 0.999  # of a logarithm that is finite
SURE = 0.02  # error of a round's cost at which more rounds are no longer worth their time
STRONGEST = 0.9  # the strongest autocorrelation that is allowed for
ROUNDING = 1e-12  # of logarithms of times


def is_busy(waiting: float) -> bool:
    """Return whether a machine has other work, by the share of its time that a thread, ready to run, waited for a
    processor.
    """
    return waiting > BUSY


def unheld(waiting: float) -> float:
    """Return how far off, as a logarithm, a step's time may be that waited for a CPU for this share of it: on a busy machine
    no bound may be nearer, since rounds that were all disturbed alike differ little. 0 if the machine was not busy.
    """
    return -math.log1p(-min(waiting, ALL)) if is_busy(waiting) else 0.0


def reach(logs: Array, r: float) -> float:
    """Return how far from 0 the 95% interval of the median of `logs` [rounds] reaches: the farther end counts, so that an
    estimate at 0 that is not their median is covered as well. Infinite for fewer than 3 rounds.

    From 6 rounds on the ends are order statistics, interpolated between the last two whose coverages enclose 95%
    (Hettmansperger and Sheather 1986, "Confidence intervals based on interpolated order statistics"); with fewer it is a t
    interval. Both are for independent rounds, and widened by sqrt((1 + r) / (1 - r)) for the `autocorrelation` r.
    """
    if len(logs) < LEAST_ROUNDS:
        return math.inf
    if len(logs) >= ORDERED_ROUNDS:
        place, share = _order_statistics(len(logs))
        ordered = np.sort(logs)
        low = (1 - share) * ordered[place - 1] + share * ordered[place]
        high = (1 - share) * ordered[-place] + share * ordered[-place - 1]
    else:
        half = quantile((1 + LEVEL) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
        low, high = logs.mean() - half, logs.mean() + half
    return max(-float(low), float(high), 0.0) * math.sqrt((1 + r) / (1 - r))


def median_error(logs: Array, r: float) -> tuple[float, float]:
    """Return a standard error and its degrees of freedom: its 95% t interval around 0 has the `reach` of `logs` [rounds]."""
    if len(logs) < LEAST_ROUNDS:
        return math.inf, 0.0
    freedom = len(logs) - 1.0
    return reach(logs, r) / quantile((1 + LEVEL) / 2, freedom), freedom


def mean_error(base: Array, spent: Array, r: float) -> tuple[float, float]:
    """Return by what share of itself the ratio of two sums over rounds, `spent` over `base`, [rounds] each in units of their
    medians, lies above 1, and its relative standard error, for rounds with the `autocorrelation` r.

    A server pays sums: slow rounds count as often as they happen, which a median does not show.
    """
    ratio = float(spent.mean() / base.mean())
    if len(base) < LEAST_ROUNDS:
        return ratio - 1, math.inf
    error = float((spent - ratio * base).std(ddof=1) / spent.mean()) / math.sqrt(len(base))
    return ratio - 1, error * math.sqrt((1 + r) / (1 - r))


def autocorrelation(steps: Iterable[tuple[str, Sequence[float]]]) -> float:
    """Lag-1 autocorrelation of steps that take turns in rounds, from 0 to 0.9: one for all of them. `steps`: kind and times
    by round, of which those that run a model count.

    What a step's time has of its own is its logarithm less what the round and the step have on average. The rank
    autocorrelations of all steps are averaged: that of one step, or of one cost, is mostly noise with few rounds. Ranks,
    since a disturbed round would hide it. Estimated from n rounds it is too low by (1 + 4 r) / n on average (Kendall 1954),
    which is corrected for; with fewer than 6 rounds only in part, or noise would be all that is left.
    """
    times = [each for step, each in steps if step not in FREE_STEPS]
    rounds = min(map(len, times), default=0)
    if rounds < LEAST_ROUNDS:
        return 0.0
    logs = np.log([each[:rounds] for each in times])
    own = logs - logs.mean(0) - logs.mean(1, keepdims=True)
    if np.ptp(own) < ROUNDING:
        return 0.0
    plain = float(np.mean([_rank_autocorrelation(each) for each in own]))
    return min(max((rounds * plain + 1) / max(rounds - 4, 2), 0.0), STRONGEST)


def _rank_autocorrelation(values: Array) -> float:
    """Lag-1 autocorrelation of the ranks of `values` [rounds]; 0 if all are equal, up to rounding."""
    ordered = np.sort(values)
    if ordered[-1] - ordered[0] < ROUNDING:
        return 0.0
    ranks = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    centered = ranks - ranks.mean()
    return float((centered[1:] * centered[:-1]).sum() / (centered**2).sum())


@lru_cache(maxsize=256)
def _order_statistics(rounds: int) -> tuple[int, float]:
    """Return the last k for which the k-th values from both ends enclose a median with 95%, and the share of the next
    one.
    """
    covered = 1 - 2 * np.cumsum([math.comb(rounds, k) / 2**rounds for k in range(rounds // 2)])
    place = int((covered >= LEVEL).sum())
    over = (covered[place - 1] - LEVEL) / (covered[place - 1] - covered[place])
    return place, float((rounds - place) * over / (place + (rounds - 2 * place) * over))


def step_times(rounds: Array) -> Array:
    """Return the time of each step, [steps]: the median of its ratio to the decode step of the same round, times the median
    of the decode step. `rounds` [rounds, steps], the decode step first.
    """
    decode = rounds[:, :1]
    return np.asarray(np.median(decode) * np.median(rounds / decode, axis=0))


def round_mixes(steps: Sequence[tuple[str, str, int]], gamma: int) -> Array:
    """Return how often rounds of m = 1..gamma drafts by each draft run each step, [mixes, steps]; half of them follow a
    round that was accepted in full, and half one of which nothing was. `steps`: model, kind and tokens of each. Without
    drafts, the verifications alone.
    """
    place = {step: index for index, step in enumerate(steps)}
    drafts = list(dict.fromkeys(model for model, _, _ in steps if model != "target")) or ["none"]
    mixes = np.zeros((len(drafts) * gamma, len(steps)))
    for row, (draft, m) in zip(mixes, itertools.product(drafts, range(1, gamma + 1)), strict=True):
        own_first = (draft, "draft_first", 1) in place
        counts = {
            ("target", "verify", m + 1): 1.0,
            ("target", "bookkeeping", 1): 1.0,
            (draft, "draft", 1): m - 1.0 if own_first else m - 0.5,
            (draft, "draft", 2): 0.5,
            (draft, "draft_first", 1): 0.5,
            (draft, "draft_first", m + 1): 0.5,
            (draft, "lookup", 1): 1.0,
            (draft, "bookkeeping", 1): 1.0,
        }
        for step in counts.keys() & place.keys():
            row[place[step]] = counts[step]
    return mixes


def largest_error(rounds: Array, mixes: Array, r: float) -> float:
    """Return the largest 95% error of the logarithm of what rounds cost in decode steps. `rounds` [rounds, steps], the
    decode step first; `mixes` as `round_mixes` gives them; `r`: their `autocorrelation`.
    """
    times = step_times(rounds)
    costs = (rounds[:, None] * mixes).sum(-1) / rounds[:, :1]
    logs = np.log(costs) - np.log((times * mixes).sum(-1) / times[0])
    return max(reach(column, r) for column in logs.T)
