"""Certificates of acceptance: how far must a draft be from its target before its proposals can be rejected?

p is the target's distribution over V tokens, q the draft's, which proposes its `width` most probable tokens: one, or one
level of a tree. A greedy or relaxed rule accepts the a most probable tokens of p. The threshold

    D* = inf { D(p, q): the `width` most probable tokens of q are all rejected }

certifies: where D(p, q) < D*, at least one proposal is accepted, however ties in q are broken; no larger number does.
arXiv:2606.30265 studies these thresholds; the formulas here were derived independently, by a pooling argument. Cheapest to
reject is T, the `width` most probable rejected tokens (a larger q on a larger p never costs more). The nearest q with T
above all accepted tokens gives a block of tokens one common value and keeps the proportions of all others. The block starts
as the largest accepted token and the smallest of T; the next one of either side joins while it lies beyond the block's mean,
and none ever leaves.

Divergences: kl = KL(p||q) in nats; tv = total variation, half the L1 distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.special import rel_entr, xlog1py

from alphaprof.rules import BoundRule
from alphaprof.stats.estimate import Array

Divergence = Literal["kl", "tv"]
CHUNK = 8192  # positions at a time: temporaries that stay in cache
TAIL_SLACK = 1e-6  # float32 probabilities may add up to this much too much
SMALL, LARGE = 1e-4, 6.0  # nats between which the curve of `beta_bound` is solved for; beyond, its limits are as precise
SLACK = 1e-5  # nats that rounding of float32 sums over a vocabulary can take from a divergence
LONGEST = 400.0  # its parameter at LARGE is 202


@dataclass(frozen=True)
class Target:
    """What is known of the target at n positions.

    `top` [n, K]: its K largest probabilities, largest first; `vocabulary`: V >= K; `entropy` [n]: of the whole
    distribution, nats.
    """

    top: Array
    vocabulary: int
    entropy: Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "top", np.asarray(self.top, dtype=np.float64))


@dataclass(frozen=True)
class Accepted:
    """The accepted tokens of n positions, always the most probable ones. `count` [n]: how many; `known` [n]: false where the
    K largest probabilities do not tell, and `count` is a lower bound; `ceiling` [n]: no rejected token has more than this.
    """

    count: Array
    known: Array
    ceiling: Array


@dataclass(frozen=True)
class Thresholds:
    """`value` [n]: D*, infinite if nothing can be rejected; where `exact` [n] is false, a lower bound of it."""

    value: Array
    exact: Array


def additive(target: Target, epsilon: float) -> Accepted:
    """Return those with p >= p_(1) - epsilon; with 0, all that tie at the top: strict decoding that compares values."""
    return _at_least(target, target.top[:, 0] - epsilon)


def top_m(target: Target, m: int) -> Accepted:
    """Return the m most probable tokens, of equal ones the first; with 1, strict decoding that compares indices."""
    n = len(target.top)
    return Accepted(np.full(n, min(m, target.vocabulary)), np.ones(n, dtype=bool), np.full(n, np.inf))


def typical(target: Target, epsilon: float, delta: float) -> Accepted:
    """Return those with p >= min(epsilon, delta exp(-H)). Raises `ValueError` without the target's entropy."""
    if target.entropy is None:
        raise ValueError("the typical rule needs the target's entropy")
    return _at_least(target, np.minimum(epsilon, delta * np.exp(-np.asarray(target.entropy, dtype=np.float64))))


def trtllm(target: Target, k: int, delta: float) -> Accepted:
    """Return those of the k most probable tokens that have p >= p_(1) - delta."""
    near = additive(target, delta)
    fits = near.known & (near.count <= k)
    return Accepted(np.minimum(near.count, k), near.known | (near.count >= k), np.where(fits, near.ceiling, np.inf))


def _at_least(target: Target, floor: Array) -> Accepted:
    """Return those with p >= floor, the top token itself always included: rounding must not reject what cannot be beaten."""
    logged, floor = target.top.shape[1], np.minimum(floor, target.top[:, 0])
    count, everything = (target.top >= floor[:, None]).sum(1), floor <= 0
    known = (count < logged) | everything | (logged == target.vocabulary)
    return Accepted(np.where(everything, target.vocabulary, count), known, floor)


ACCEPTED: dict[str, Callable[..., Accepted]] = {
    "strict": lambda target: top_m(target, 1),
    "additive": additive,
    "multiplicative": lambda target, factor: _at_least(target, factor * target.top[:, 0]),
    "top_m": top_m,
    "typical": typical,
    "trtllm": trtllm,
    "tree": lambda target, width: top_m(target, 1),
}


def certify(rule: BoundRule, target: Target, divergence: Divergence = "kl") -> Thresholds:
    """Return D* of a rule of `ACCEPTED`; for `tree`, of the target's top token being among the draft's `width` most
    probable. Raises `ValueError` for a rule or a divergence whose threshold is not known.
    """
    if rule.name not in ACCEPTED:
        raise ValueError(f"no threshold is known for rule {rule.name}, only for {', '.join(ACCEPTED)}")
    return thresholds(target, ACCEPTED[rule.name](target, **rule.arguments), draft_width(rule), divergence)


def draft_width(rule: BoundRule) -> int:
    """Return how many of the draft's most probable tokens a rule looks at."""
    return int(rule.arguments.get("width", 1))


def thresholds(target: Target, accepted: Accepted, width: int = 1, divergence: Divergence = "kl") -> Thresholds:
    """D* at all positions, from the K largest probabilities: exact where they hold the accepted tokens and T.

    Elsewhere the missing tokens of T are given the most that they can have (p_(K), the ceiling, an equal share of what the
    logged ones leave: D* is convex and symmetric in them) and missing accepted tokens are let go. Both make rejection
    cheaper, so that the value is a lower bound. Raises `ValueError` for an unknown divergence.
    """
    top, counts = target.top, accepted.count
    impossible = (counts > 0) & (counts + width > target.vocabulary)
    complete = accepted.known & ((counts + width <= top.shape[1]) | (top[:, -1] == 0))
    value = np.where(impossible, np.inf, 0.0)
    possible = np.flatnonzero((counts > 0) & ~impossible)
    for rows in np.split(possible, range(CHUNK, len(possible), CHUNK)):
        value[rows] = pooled(*_parts(top[rows], counts[rows], width, accepted.ceiling[rows]), divergence)
    return Thresholds(value, complete | impossible | (counts == 0))


def _parts(top: Array, count: Array, width: int, ceiling: Array) -> tuple[Array, Array]:
    """`high` and `low` as `pooled` takes them; a token of T that is not logged has an upper bound of its probability."""
    logged = top.shape[1]
    most = min(int(count.max(initial=1)), logged)
    high = np.where(np.arange(most)[:, None] < count, top[:, :most].T, 0.0)
    rank = count + np.arange(width, 0, -1)[:, None]
    share = (np.maximum(0.0, 1.0 - top.sum(1)) + TAIL_SLACK) / np.maximum(1, (rank > logged).sum(0))
    bound = np.minimum(np.minimum(top[:, -1], ceiling), share)
    return high, np.where(rank <= logged, np.take_along_axis(top.T, np.minimum(rank, logged) - 1, 0), bound)


def pooled(high: Array, low: Array, divergence: Divergence) -> Array:
    """Return the least divergence [n] at which no token of `high` is ahead of a token of `low`.

    `high` [h, n]: accepted tokens, largest first, padded with 0; `low` [w, n]: T, smallest first. What they leave of 1
    belongs to tokens that are no more probable than any of T. Raises `ValueError` for an unknown divergence.
    """
    if divergence not in get_args(Divergence):
        raise ValueError(f"no threshold is known for divergence {divergence}, only for {', '.join(get_args(Divergence))}")
    high, low = np.asarray(high, dtype=np.float64), np.asarray(low, dtype=np.float64)
    level, used = _pool(high, low)
    if divergence == "tv":
        return np.asarray(np.maximum(0.0, high[:used] - level).sum(0))
    block = np.vstack([np.maximum(high[:used], level), np.minimum(low, level)])  # the level itself in place of all others
    return np.asarray(_excess(block, level).sum(0))


def _pool(high: Array, low: Array) -> tuple[Array, int]:
    """Return the mean of each position's block [n], and the most tokens of `high` that a block holds."""
    above, below = np.ones((2, high.shape[1]), dtype=np.int64)
    total, rows = high[0] + low[0], np.arange(high.shape[1])
    while len(rows):
        u, v = above[rows], below[rows]
        mean = total[rows] / (u + v)
        upper, lower = high[np.minimum(u, len(high) - 1), rows], low[np.minimum(v, len(low) - 1), rows]
        rise, fall = (u < len(high)) & (upper > mean), (v < len(low)) & (lower < mean)
        total[rows] += np.where(rise, upper, 0.0) + np.where(fall, lower, 0.0)
        above[rows] += rise
        below[rows] += fall
        rows = rows[rise | fall]
    return total / (above + below), int(above.max(initial=1))


def _excess(x: Array, y: Array) -> Array:
    """At least 0: x log(x/y) - x + y, precise where x is near y and where y is next to nothing; y where x = 0, infinite
    where only y = 0.
    """
    step = y - x
    near = step - xlog1py(x, np.divide(step, x, out=np.zeros_like(step), where=x > 0))
    return np.asarray(np.where(2 * y < x, step + rel_entr(x, y), near))  # y/x - 1 would lose a small y


def strict_thresholds(largest: Array, second: Array) -> Array:
    """D* of strict greedy decoding by index for KL(p||q), exact, from the two largest probabilities s and t; V > 1.

    (s + t) d(x) with x = (s - t) / (s + t) and d(x) = ((1 + x) log(1 + x) + (1 - x) log(1 - x)) / 2.
    """
    largest, second = np.asarray(largest, dtype=np.float64), np.asarray(second, dtype=np.float64)
    both = largest + second
    x = (largest - second) / both
    return np.asarray(both * (xlog1py(1 + x, x) + xlog1py(1 - x, -x)) / 2)


def margin_thresholds(margin: Array, width: int = 1) -> Array:
    """Return the least KL(p||q) at which all of the draft's `width` most probable tokens can miss the target's top token, by
    the margin g of its two largest probabilities alone: no p with that margin has a smaller threshold. Sharp.

    ((1 + w g) log(1 + w g) + w (1 - g) log(1 - g)) / (w + 1), attained where the top token has 1/(w + 1) + w g/(w + 1) and w
    others share the rest evenly.
    """
    g = np.asarray(margin, dtype=np.float64)
    return np.asarray((xlog1py(1 + width * g, width * g) + width * xlog1py(1 - g, -g)) / (width + 1))


def beta_bound(kl: Array) -> Array:
    """Return the least beta at a KL divergence of either direction; sharp. It is convex: the bound at a mean of KL bounds a
    mean.

    The curve of Fedotov, Harremoes and Topsoe, s > 0: tv = (s/2)(1 - (coth s - 1/s)^2) and
    KL = log(s / sinh s) + s coth s - (s / sinh s)^2. Near 0, with h = KL/2, tv^2 = h - 2/9 h^2 - 8/405 h^3; far out,
    beta = exp(-KL).
    """
    kl = np.maximum(0.0, np.asarray(kl, dtype=np.float64))  # below 0 it can only be by rounding
    half = np.minimum(kl, SMALL) / 2
    target = np.clip(kl, SMALL, LARGE)
    low, s = np.zeros_like(target), np.full_like(target, LONGEST)
    for _ in range(60):
        middle = (low + s) / 2
        over = _curve(middle)[1] > target
        low, s = np.where(over, low, middle), np.where(over, middle, s)
    near = 1 - np.sqrt(half * (1 - half * (2 / 9 + half * 8 / 405)))
    return np.where(kl < SMALL, near, np.where(kl > LARGE, np.exp(-kl), 1 - _curve(s)[0]))


def _curve(s: Array) -> tuple[Array, Array]:
    """Total variation and KL at the parameter s > 0."""
    ratio, slope = s / np.sinh(s), 1 / np.tanh(s)
    return s / 2 * (1 - (slope - 1 / s) ** 2), np.log(ratio) + s * slope - ratio**2


def budget(thresholds: Array, mean: float) -> float:
    """Return the largest share of positions at which drafts with a `mean` divergence can be rejected: a rejection costs at
    least the position's threshold (exact or a lower bound), so the cheapest ones come first. Sharp for exact thresholds.
    """
    spent = np.cumsum(np.sort(thresholds[np.isfinite(thresholds)]), dtype=np.float64)  # float32 sums would drift
    affordable = mean * len(thresholds) * (1 + 1e-9)  # sums may be off by rounding
    return int(np.searchsorted(spent, affordable, side="right")) / len(thresholds)
