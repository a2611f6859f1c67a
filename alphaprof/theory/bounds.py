"""What a few numbers promise about acceptance: the two largest probabilities, one divergence, a mean.

Bounds on beta = sum min(p, q) = 1 - tv, the acceptance of lossless sampling, use a divergence alone. Notation and units as
in `certificates`; arguments are arrays [n] unless a type says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import xlog1py

from alphaprof.stats.estimate import Array
from alphaprof.totals.replay import Ints, run_lengths

SMALL, LARGE = 1e-4, 6.0  # nats between which the curve of `beta_bound` is solved for; beyond, its limits are as precise
LONGEST = 400.0  # its parameter at LARGE is 202


def strict_thresholds(largest: Array, second: Array) -> Array:
    """D* of strict greedy decoding by index for KL(p||q), exact, from the two largest probabilities s and t; V > 1.

    (s + t) d(x) with x = (s - t) / (s + t) and d(x) = ((1 + x) log(1 + x) + (1 - x) log(1 - x)) / 2.
    """
    largest, second = np.asarray(largest, dtype=np.float64), np.asarray(second, dtype=np.float64)
    both = largest + second
    x = (largest - second) / both
    return np.asarray(both * (xlog1py(1 + x, x) + xlog1py(1 - x, -x)) / 2)


def beta_bound(kl: Array) -> Array:
    """The least beta at a KL divergence of either direction; sharp.

    The curve of Fedotov, Harremoes and Topsoe, s > 0: tv = (s/2)(1 - (coth s - 1/s)^2) and
    KL = log(s / sinh s) + s coth s - (s / sinh s)^2. Near 0, with h = KL/2, tv^2 = h - 2/9 h^2 - 8/405 h^3; far out,
    beta = exp(-KL).
    """
    kl = np.maximum(0.0, np.asarray(kl, dtype=np.float64))  # below 0 it can only be by rounding
    half = np.minimum(kl, SMALL) / 2
    target = np.clip(kl, SMALL, LARGE)
    s = _crossing(lambda s: _curve(s)[1], target, np.zeros_like(target), np.full_like(target, LONGEST))
    near = 1 - np.sqrt(half * (1 - half * (2 / 9 + half * 8 / 405)))
    return np.where(kl < SMALL, near, np.where(kl > LARGE, np.exp(-kl), 1 - _curve(s)[0]))


def _curve(s: Array) -> tuple[Array, Array]:
    """Total variation and KL at the parameter s > 0."""
    ratio, slope = s / np.sinh(s), 1 / np.tanh(s)
    return s / 2 * (1 - (slope - 1 / s) ** 2), np.log(ratio) + s * slope - ratio**2


def _crossing(rising: Callable[[Array], Array], target: Array, low: Array, high: Array) -> Array:
    """Where a function that rises from `low` to `high` exceeds its target, from above; `high` where it does not."""
    for _ in range(60):
        middle = (low + high) / 2
        over = rising(middle) > target
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return high


def mean_beta_bound(kl: Array) -> float:
    """The least mean beta at the mean of `kl` over positions: beta_bound is convex (Jensen). Sharp where only that mean is
    known; the mean of `beta_bound` over positions is better.
    """
    return float(beta_bound(np.mean(kl, keepdims=True))[0])


def budget(thresholds: Array, mean: float) -> float:
    """The largest share of positions at which drafts with a `mean` divergence can be rejected: a rejection costs at least
    the position's threshold (exact or a lower bound), so the cheapest ones come first. Sharp for exact thresholds.

    Raises `ValueError` without positions, and for positions without a threshold.
    """
    if not len(thresholds) or np.isnan(thresholds).any():
        raise ValueError("a budget needs positions, and a threshold for each")
    spent = np.cumsum(np.sort(thresholds[np.isfinite(thresholds)]), dtype=np.float64)  # float32 sums would drift
    affordable = mean * len(thresholds) * (1 + 1e-9)  # sums may be off by rounding
    return int(np.searchsorted(spent, affordable, side="right")) / len(thresholds)


def certified_runs(thresholds: Array, epsilon: float, start: Ints, stop: Ints) -> Ints:
    """For each position the number of drafts from it on that are certainly accepted, if every divergence is at most
    `epsilon`; [positions]. Documents as in `run_lengths`.
    """
    return run_lengths(thresholds > epsilon, start, stop)
