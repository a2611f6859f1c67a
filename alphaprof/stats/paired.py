"""Differences of two drafts on the same documents: what the documents share cancels out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alphaprof.stats.estimate import NO_SPREAD, Array, Interval, Ratio, by_cluster, distinct, influences, ratio
from alphaprof.stats.student import quantile

FAR = 0.225  # share of the possible range by which a unit that differs is taken to differ: decisions/019


def share_difference(first: tuple[Array, Array], second: tuple[Array, Array], confidence: float) -> Interval:
    """Second share less the first, each sum(totals) / sum(counts) over the same units, [units] in the same order.

    Raises `ValueError` if a side has no count.
    """
    one, two = ratio(*first), ratio(*second)
    possible, documents = Interval(two.value - one.value, -one.value, 1 - one.value), min(one.documents, two.documents)
    if documents < 2:
        return possible
    stderr = math.sqrt(float(((_errors(second, two) - _errors(first, one)) ** 2).sum()))
    tail = (1 - confidence) / 2
    return _bounded(possible, stderr, min(one.freedom, two.freedom), differing(documents, tail), tail)


def inverse_difference(first: tuple[Array, Array], second: tuple[Array, Array], confidence: float, gamma: int) -> Interval:
    """Second quotient less the first, each sum(counts) / sum(totals): tokens per round from (rounds, tokens), of which a
    round emits 1 to gamma + 1.
    """
    return weighted_inverse_difference([first], [second], [np.arange(len(first[0]))], [1.0], confidence, gamma)[-1]


def weighted_inverse_difference(
    first: Sequence[tuple[Array, Array]],
    second: Sequence[tuple[Array, Array]],
    units: Sequence[Array],
    weights: Sequence[float],
    confidence: float,
    gamma: int,
    ends: tuple[float, float] | None = None,
    relative: bool = False,
) -> tuple[float, float, Interval]:
    """Return the quotients of both sides over several domains, and second less first: 1 / sum(w_d r_d), r_d = sum(totals) /
    sum(counts) of a domain, as in `costs.speedup`. `units`: the number of each unit of a domain, [units], since one may lie
    in several; `weights` add up to 1; `ends`: the least and the most that a quotient can be, default 1 and gamma + 1;
    `relative`: the error is that of second / first, times first: what is divided by first has the error of a share.
    """
    ones, twos = [ratio(*each) for each in first], [ratio(*each) for each in second]
    before, after = (
        1 / sum(weight * each.value for weight, each in zip(weights, side, strict=True)) for side in (ones, twos)
    )
    least, most = ends or (1, gamma + 1)
    possible, sides = Interval(after - before, least - before, most - before), list(zip(ones, twos, strict=True))
    documents, tail = [min(each.documents for each in side) for side in sides], (1 - confidence) / 2
    if min(documents) < 2:
        return before, after, possible
    errors = [  # d(1/r) = -dr / r^2
        weight
        * (_errors(first[place], one) * before * (after if relative else before) - _errors(second[place], two) * after**2)
        for place, (weight, (one, two)) in enumerate(zip(weights, sides, strict=True))
    ]
    joint, variances = by_cluster(np.concatenate(units), np.concatenate(errors))[0], [float((e**2).sum()) for e in errors]
    variance = max(float((joint**2).sum()), sum(variances))  # that errors of domains cancel is too much to conclude
    different = distinct(np.concatenate(units))
    freedoms = [min(side.freedom for side in pair) for pair in sides]
    moments = sum(each**2 / freedom for each, freedom in zip(variances, freedoms, strict=True) if each > 0)
    freedom = (different - 1) / sum(len(each) - 1 for each in units) * sum(freedoms)  # a unit in two domains counts once
    freedom = min(sum(variances) ** 2 / moments, freedom) if moments > 0 else freedom  # Welch and Satterthwaite
    shares = [weight * differing(number, tail) for weight, number in zip(weights, documents, strict=True)]
    together = math.hypot(*shares) if different == sum(map(len, units)) else sum(shares)
    return before, after, _bounded(possible, math.sqrt(variance), freedom, together, tail)


def mean_difference(first: tuple[Array, Array], second: tuple[Array, Array], confidence: float) -> Interval:
    """Second mean less the first, each sum(totals) / sum(counts), of quantities that are 0 or above and have no upper end:
    beyond what the sample can tell, the least that is possible, and infinity.
    """
    one, two = ratio(*first), ratio(*second)
    value, least, documents = two.value - one.value, 0.0 - one.value, min(one.documents, two.documents)
    errors = _errors(second, two) - _errors(first, one)
    stderr = math.sqrt(float((errors**2).sum()))
    spread = documents > 1 and stderr > NO_SPREAD * max(one.value, two.value)
    half = quantile((1 + confidence) / 2, min(one.freedom, two.freedom)) * stderr if spread else math.inf
    return Interval(value, max(least, value - half), value + half)


def _errors(side: tuple[Array, Array], estimate: Ratio) -> Array:
    """Return what each unit contributes to the error of a side; 0 with fewer than two."""
    return influences(*side) if estimate.documents > 1 else np.zeros(len(side[0]))


def _bounded(possible: Interval, stderr: float, freedom: float, most: float, tail: float) -> Interval:
    """Return the t interval within what is possible given the first side, and never narrower than a floor.

    Units that agree leave no spread to estimate from, and those that hardly differ almost none. The floor is what other
    units could make of the difference, at the most of them that the number of units allows (`most`), each off by FAR of the
    range. It does not depend on the spread: with the same value, units that differ never make a bound easier to reach.
    """
    value, low, high = possible.value, possible.low, possible.high
    half = quantile(1 - tail, freedom) * stderr if stderr else 0.0
    far = FAR * (high - low)
    below, above = (max(half, most * min(far, room)) for room in (value - low, high - value))
    return Interval(value, max(low, value - below), min(high, value + above))


def differing(units: int, tail: float) -> float:
    """Return the largest share that can differ where none of `units` does, wrong with probability `tail`
    (Clopper-Pearson).
    """
    return float(1 - tail ** (1 / units))
