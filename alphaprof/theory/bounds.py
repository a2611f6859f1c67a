"""What a few numbers promise about acceptance: the two largest probabilities, a margin, one divergence, a mean.

Bounds from margins hold for every p that has the margin: each is the threshold of the p that is easiest to leave. Moving
probability to T, the draft's rejected proposals, from any other token never raises a threshold; at the end T is flat and as
probable as the rule and the margin allow, which is also the p at which the bound is attained.

Bounds on beta = sum min(p, q) = 1 - tv, the acceptance of lossless sampling, use a divergence alone. Derivations without a
name were made independently. Notation and units as in `certificates`; arguments are arrays [n] unless a type says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import xlog1py

from alphaprof.rules import BoundRule
from alphaprof.stats.estimate import Array
from alphaprof.theory.certificates import Divergence, pooled
from alphaprof.totals.replay import Ints, run_lengths

SMALL, LARGE = 1e-4, 6.0  # nats between which the curve of `beta_bound` is solved for; beyond, its limits are as precise
LONGEST = 400.0  # its parameter at LARGE is 202


def strict_thresholds(largest: Array, second: Array, divergence: Divergence = "kl") -> Array:
    """D* of strict greedy decoding by index, exact, from the two largest probabilities; V > 1."""
    largest, second = np.asarray(largest, dtype=np.float64), np.asarray(second, dtype=np.float64)
    both, gap = largest + second, largest - second
    if divergence == "kl":
        return np.asarray(both * least_js(gap / both))
    return np.asarray(gap / 2) if divergence == "tv" else pooled(largest[None], second[None], divergence)


def margin_bound(rule: BoundRule, margin: Array, width: int, divergence: Divergence = "kl") -> Array:
    """The least D* of a rule over all p whose top token leads the best rejected one by `margin`; a rule's own `width` is its
    `draft_width`. For `typical` at small margins only a lower bound: exp(-H) is replaced by its bound p_(1).

    Raises `ValueError` for a rule without an accepted set.
    """
    if rule.name not in BEST_REJECTED:
        raise ValueError(f"no margin bound for {rule.name}; there is one for: {', '.join(BEST_REJECTED)}")
    best = BEST_REJECTED[rule.name](margin, width, *rule.values)
    rest = np.maximum(0.0, (1 - margin) - (width + 1) * best)  # 1 - margin is exact from 1/2 on; 1 - (best + margin) is not
    largest = best + margin
    bound = pooled(np.where(largest > 0, largest, 1.0)[None], np.tile(best, (width, 1)), divergence, rest)
    return np.where(largest > 0, bound, 0.0)


def _multiplicative(margin: Array, width: int, factor: float) -> Array:
    """Rejected: x < factor (x + margin)."""
    return np.minimum((1 - margin) / (width + 1), factor * margin / (1 - factor) if factor < 1 else np.inf)


def _typical(margin: Array, width: int, epsilon: float, delta: float) -> Array:
    """Rejected: x < epsilon and x < delta exp(-H) <= delta (x + margin)."""
    return np.minimum(_multiplicative(margin, width, delta), epsilon)


def _trtllm(margin: Array, width: int, k: int, delta: float) -> Array:
    """The best rejected token is outside the top k, or more than delta below the top one."""
    return np.asarray((1 - margin) / (np.where(margin > delta, 1, k) + width))


# The most that the best rejected token can have beside a margin: `width` rejected ones are alike, accepted ones no smaller.
BEST_REJECTED: dict[str, Callable[..., Array]] = {
    "strict": lambda margin, width: (1 - margin) / (width + 1),
    "additive": lambda margin, width, epsilon: (1 - margin) / (width + 1),
    "multiplicative": _multiplicative,
    "top_m": lambda margin, width, m: (1 - margin) / (width + m),
    "typical": _typical,
    "trtllm": _trtllm,
    "tree": lambda margin, width, tree_width: (1 - margin) / (width + 1),
}


def coverage_bound(margin: Array, width: int, divergence: Divergence = "kl") -> Array:
    """The least D* of the top token being among the draft's `width` most probable, over all p with p_(1) - p_(width + 1) =
    `margin`; for js only a lower bound.

    By convexity and symmetry the tokens between have one probability y, and all others none: y^2 = p_(1) p_(width + 1) gives
    the largest entropy (kl), y as their harmonic mean the largest geometric mean (rkl).
    """
    tv = np.maximum(margin / 2, margin - 1 / (width + 1))
    if divergence in ("tv", "js"):
        return tv if divergence == "tv" else least_js(tv)
    between, rest = width - 1, 1 - margin**2
    if divergence == "kl":
        root = between + np.sqrt(between**2 * margin**2 + 4 * rest)
        y = np.divide(rest, root, out=np.zeros_like(rest), where=root > 0)
        last = np.maximum(0.0, (1 - between * y - margin) / 2)
    else:
        root = np.sqrt(1 + (width**2 - 1) * margin**2)
        gap = (1 - margin) * (1 + root - between * margin) / (root + width)  # p_(1) + p_(w + 1) - margin
        last = gap / 2
        y = gap * (gap + 2 * margin) / (2 * (gap + margin))
    low = np.vstack([last, np.tile(y, (between, 1))])
    return pooled((last + margin)[None], low, divergence, np.zeros_like(last))


def least_js(tv: Array) -> Array:
    """The least Jensen-Shannon divergence at a total variation, about tv^2/2 near 0 and log 2 at 1.

    Merging tokens to {p > q} and the rest, exchanging p with q and averaging (js is jointly convex) leave the coin
    (1 + tv)/2, (1 - tv)/2 against its mirror image, whose js is its KL from a fair one.
    """
    return np.asarray((xlog1py(1 + tv, tv) + xlog1py(1 - tv, -tv)) / 2)


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
