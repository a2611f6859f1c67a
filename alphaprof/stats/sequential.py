"""Is a speedup above a threshold, asked after every document: a verdict that may stop as soon as it is sure.

An interval of fixed size is right for one look. A reader who looks every few documents and stops at the first good news is
wrong several times as often as it says. Here evidence is the wealth of a player who bets against a threshold: where the
threshold holds, no way of betting gains on average, so the wealth ever reaches 1 / error with a probability of at most
`error` (Ville), whenever one stops. The bets are those of Waudby-Smith and Ramdas (2024, "Estimating means of bounded random
variables by betting", arXiv:2010.09686, aGRAPA).

S, the speedup of the traffic, is a ratio of means over documents: E[weight * base] / E[weight * spent]. S <= threshold
says that Z = weight * (base - threshold * spent) has a mean of at most 0: no ratio is ever estimated, so there is no bias of
ratios. Documents must be independent (sum up clusters beforehand) and come in random order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from alphaprof.stats.estimate import Array, quantile

PRIOR_MEAN, PRIOR_VARIANCE = 0.5, 0.25  # of outcomes in [0, 1]; they count as one document
BOLDEST = 0.9  # the share of the wealth that one document can lose at most
POINTS = 200  # thresholds of a confidence sequence, besides the one that is asked about
TIMING_SHARE = 0.1  # of the error that is allowed, spent on step times where they are uncertain
SLACK = 1e-9  # rounding of documents that lie on their bounds


@dataclass(frozen=True)
class Bounds:
    """What is known of every document before any is seen: `best` and `worst`, the least and the most time spent per token
    (min cost_m / (m + 1) and max cost_m over rounds that draft m tokens), and `reach`, the largest weight * base
    that a document of this traffic can have (its weight times max_new_tokens - 1).
    """

    best: float
    worst: float
    reach: float

    def of_gains(self, thresholds: Array) -> tuple[Array, Array]:
        """Return the least and the largest weight * (base - threshold * spent) of a document; [thresholds]."""
        least = self.reach * np.minimum(0.0, 1 - thresholds * self.worst)
        return least, self.reach * np.maximum(0.0, 1 - thresholds * self.best)


@dataclass(frozen=True)
class Sequential:
    """A verdict, after how many documents it stood (all of them where it does not), and the confidence sequence of the
    speedup up to that document, 0 and infinity where nothing was ruled out.
    """

    verdict: Literal["GO", "NO-GO", "UNDECIDED"]
    documents: int
    low: float
    high: float


def decide_sequentially(
    base: Array,
    spent: Array,
    weight: Array | float,
    bounds: Bounds,
    threshold: float,
    confidence: float,
    timing_error: float = 0.0,
    timing_freedom: float = math.inf,
    waited: float = 0.0,
) -> Sequential:
    """GO once the speedup is surely above `threshold`, NO-GO once it is surely below; documents in the order they came in.

    `base` [documents] is decode time without the draft and `spent` with it, in decode steps, without control variates
    (those may leave the bounds); `weight` is what a document of its domain stands for. Each of `low` and `high` is wrong
    with a probability of at most 1 - confidence, at all documents together; GO means that `low` has reached the threshold,
    NO-GO that `high` has, both the first time that happens. A bound passes a threshold when the bets against it and against
    all that lie before it on a fixed grid have won: `low` can exceed S only if the first threshold above S was rejected.

    `timing_error` is the relative standard error that step times give the speedup, and `timing_freedom` its degrees of
    freedom. More documents do not lessen it, so it is not part of the betting: a tenth of 1 - confidence pays for t bounds
    on it, by which thresholds move away (up for GO, down for NO-GO; at least by `waited`, a logarithm), and nine tenths are
    left for the documents. If it is infinite, every question stays open. Raises `ValueError` for documents outside their
    bounds.
    """
    base, spent = (np.asarray(values, dtype=np.float64) for values in (base, spent))
    weight = np.broadcast_to(np.asarray(weight, dtype=np.float64), base.shape)
    _check(base, spent, weight, bounds)
    if math.isinf(timing_error):
        return Sequential("UNDECIDED", len(base), 0.0, math.inf)
    error, shift = 1 - confidence, 1.0
    if timing_error > 0:
        shift = math.exp(quantile(1 - TIMING_SHARE * error, timing_freedom) * timing_error)
        error *= 1 - TIMING_SHARE
    shift = max(shift, math.exp(waited))
    grid = thresholds_between(bounds, threshold)
    above = rejections(weight * base, weight * spent, bounds, grid * shift, error, "above")
    below = rejections(weight * base, weight * spent, bounds, grid / shift, error, "below")
    above, below = np.maximum.accumulate(above), np.maximum.accumulate(below[::-1])[::-1]
    asked = int(np.searchsorted(grid, threshold))
    go, no_go = int(above[asked]), int(below[asked])
    stop = min(go, no_go, len(base))
    lows, highs = grid[above <= stop], grid[below <= stop]
    return Sequential(
        verdict="GO" if go <= stop else "NO-GO" if no_go <= stop else "UNDECIDED",
        documents=stop,
        low=float(lows[-1]) if len(lows) else 0.0,
        high=float(highs[0]) if len(highs) else math.inf,
    )


def _check(base: Array, spent: Array, weight: Array, bounds: Bounds) -> None:
    """Bets are fair only if no document can lie outside its bounds."""
    inside = (weight >= 0) & (base >= 0) & (weight * base <= bounds.reach * (1 + SLACK))
    inside &= (spent >= bounds.best * base * (1 - SLACK)) & (spent <= bounds.worst * base * (1 + SLACK))
    if not inside.all():
        raise ValueError(f"document {int(np.argmin(inside))} lies outside of {bounds}: bets on it would not be fair")


def thresholds_between(bounds: Bounds, threshold: float) -> Array:
    """Return the thresholds of a confidence sequence, ascending: `threshold` and evenly spaced ones, on the log scale,
    between the least and the largest speedup that bounds allow. Documents have no say in them.
    """
    spaced = np.geomspace(1 / bounds.worst, 1 / bounds.best, POINTS + 2)[1:-1]
    return np.unique(np.append(spaced[(spaced > 1 / bounds.worst) & (spaced < 1 / bounds.best)], threshold))


def rejections(
    base: Array, spent: Array, bounds: Bounds, thresholds: Array, error: float, side: Literal["above", "below"]
) -> Array:
    """For each threshold the number of documents after which the speedup is known to lie on one side of it, [thresholds]: 0
    where bounds alone say so, one more than there are where it stays open. `base` and `spent` [documents] are weighted.
    """
    gains = base - thresholds[:, None] * spent
    least, largest = bounds.of_gains(thresholds)
    if side == "below":
        gains, least, largest = -gains, -largest, -least
    documents, certain = np.zeros(len(thresholds), dtype=np.int64), least >= 0
    won = log_wealth(gains[~certain], least[~certain], largest[~certain]) >= -math.log(error)
    documents[~certain] = np.where(won.any(1), won.argmax(1) + 1, len(base) + 1) if len(base) else 1
    return documents


def log_wealth(gains: Array, least: Array, largest: Array) -> Array:
    """Logarithm of the wealth after each document of bets that `gains` have a mean above 0; [thresholds, documents].

    `gains` [thresholds, documents] lie between `least`, below 0, and `largest`, at least 0, both [thresholds]. With
    X = (gain - least) / (largest - least) and m = -least / (largest - least), a document multiplies the wealth by
    1 + bet * (X - m), bet = (mean - m) / (variance + (mean - m)^2), cut to [0, BOLDEST / m], with mean and variance of
    the documents before it alone. Where gains have a mean of at most 0 the wealth is a supermartingale that begins at 1.
    """
    width = (largest - least)[:, None]
    fair = -least[:, None] / width
    outcomes = gains / width + fair
    seen = np.arange(1, gains.shape[1] + 1)
    means = (PRIOR_MEAN + np.cumsum(outcomes, axis=1)) / (seen + 1)
    variances = (PRIOR_VARIANCE + np.cumsum((outcomes - means) ** 2, axis=1)) / (seen + 1)
    lead = _before(means, PRIOR_MEAN) - fair
    bets = np.clip(lead / (_before(variances, PRIOR_VARIANCE) + lead**2), 0.0, BOLDEST / fair)
    return np.asarray(np.cumsum(np.log1p(bets * gains / width), axis=1))


def _before(values: Array, first: float) -> Array:
    """Return what was known before each document: values of the documents up to the last one, `first` ahead of them."""
    return np.column_stack([np.full(len(values), first), values])[:, : values.shape[1]]
