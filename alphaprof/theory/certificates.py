"""Certificates of acceptance: how far must a draft be from its target before its proposals can be rejected?

p is the target's distribution over V tokens, q the draft's, which proposes its `width` most probable tokens: one, or one
level of a tree. A greedy or relaxed rule accepts the a most probable tokens of p. The threshold

    D* = inf { D(p, q): the `width` most probable tokens of q are all rejected }

certifies: where D(p, q) < D*, at least one proposal is accepted, however ties in q are broken; no larger number does.
arXiv:2606.30265 studies these thresholds; the formulas here were derived independently, by a pooling argument. Cheapest to
reject is T, the `width` most probable rejected tokens (a larger q on a larger p never costs more). The nearest q with T
above all accepted tokens gives a block of tokens one common value and keeps the proportions of all others. The block starts
as the largest accepted token and the smallest of T; the next one of either side joins while it lies beyond the block's mean,
and none ever leaves. The mean is arithmetic for KL(p||q) and total variation, geometric for KL(q||p); Jensen-Shannon's
level is a root between these two.

Divergences: kl = KL(p||q), rkl = KL(q||p), js = Jensen-Shannon (weights 1/2), all in nats; tv = half the L1 distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.special import rel_entr, xlog1py

from alphaprof.rules import BoundRule
from alphaprof.stats.estimate import Array

Divergence = Literal["kl", "rkl", "tv", "js"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
CHUNK = 8192  # positions at a time: temporaries that stay in cache
TAIL_SLACK = 1e-6  # float32 probabilities may add up to this much too much
CLOSE = 1e-8  # relative precision of the place of a minimum: its value is then right to about 1e-16


@dataclass(frozen=True)
class Target:
    """What is known of the target at n positions.

    `top` [n, K]: its K largest probabilities, largest first; `vocabulary`: V >= K; `entropy` [n]: of the whole
    distribution, nats. Raises `ValueError` for values that no distribution has.
    """

    top: Array
    vocabulary: int
    entropy: Array | None = None

    def __post_init__(self) -> None:
        top = np.asarray(self.top, dtype=np.float64)
        if top.ndim != 2 or not 1 <= top.shape[1] <= self.vocabulary:
            raise ValueError(f"top must be [positions, 1 to {self.vocabulary}], not {list(top.shape)}")
        if not ((np.diff(top) <= 0).all(1) & (top[:, -1] >= 0) & (top[:, 0] > 0) & (top.sum(1) <= 1 + 1e-3)).all():
            raise ValueError("top must hold probabilities, the largest first")
        object.__setattr__(self, "top", top)


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
    """`value` [n]: D*, infinite where nothing can be rejected; where `exact` [n] is false, a lower bound of it."""

    value: Array
    exact: Array


def additive(target: Target, epsilon: float) -> Accepted:
    """Those with p >= p_(1) - epsilon; with 0, all that tie at the top: strict decoding that compares values."""
    return _at_least(target, target.top[:, 0] - epsilon)


def top_m(target: Target, m: int) -> Accepted:
    """The m most probable tokens, of equal ones the first; with 1, strict decoding that compares indices."""
    n = len(target.top)
    return Accepted(np.full(n, min(m, target.vocabulary)), np.ones(n, dtype=bool), np.full(n, np.inf))


def typical(target: Target, epsilon: float, delta: float) -> Accepted:
    """Those with p >= min(epsilon, delta exp(-H)). Raises `ValueError` without entropies."""
    if target.entropy is None:
        raise ValueError("the typical rule needs the target's entropy")
    return _at_least(target, np.minimum(epsilon, delta * np.exp(-np.asarray(target.entropy, dtype=np.float64))))


def trtllm(target: Target, k: int, delta: float) -> Accepted:
    """Those of the k most probable tokens that have p >= p_(1) - delta."""
    near = additive(target, delta)
    fits = near.known & (near.count <= k)
    return Accepted(np.minimum(near.count, k), near.known | (near.count >= k), np.where(fits, near.ceiling, np.inf))


def _at_least(target: Target, floor: Array) -> Accepted:
    """Those with p >= floor, the top token itself always included: rounding must not reject what cannot be beaten."""
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
    """D* of a rule; for `tree`, of the target's top token being among the draft's `width` most probable. Raises `ValueError`
    for a rule that keeps drafts by chance.
    """
    if rule.name not in ACCEPTED:
        raise ValueError(f"{rule.name} has no accepted set; those that have one: {', '.join(ACCEPTED)}")
    return thresholds(target, ACCEPTED[rule.name](target, **rule.arguments), draft_width(rule), divergence)


def draft_width(rule: BoundRule) -> int:
    """How many of the draft's most probable tokens a rule looks at."""
    return int(rule.arguments.get("width", 1))


def thresholds(target: Target, accepted: Accepted, width: int = 1, divergence: Divergence = "kl") -> Thresholds:
    """D* at all positions, from the K largest probabilities: exact where they hold the accepted tokens and T.

    Elsewhere the missing tokens of T are given the most that they can have (p_(K), the ceiling, an equal share of what the
    logged ones leave: D* is convex and symmetric in them) and missing accepted tokens are let go. Both make rejection
    cheaper, so that the value is a lower bound. Raises `ValueError` for a width below 1 or an unknown divergence.
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


def pooled(high: Array, low: Array, divergence: Divergence, rest: Array | None = None) -> Array:
    """The least divergence [n] at which no token of `high` is ahead of a token of `low`.

    `high` [h, n]: accepted tokens, largest first, padded with 0; `low` [w, n]: T, smallest first. What they leave of 1
    belongs to tokens that are no more probable than any of T; `rest` [n] is this remainder where it is known more
    precisely than 1 less their sum: KL(q||p) depends on its logarithm near a point mass. Raises `ValueError` for an empty
    `low` or another divergence.
    """
    if not len(low):
        raise ValueError("a draft proposes at least 1 token, not 0")
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}; known: {', '.join(DIVERGENCES)}")
    high, low = np.asarray(high, dtype=np.float64), np.asarray(low, dtype=np.float64)
    if divergence == "rkl":
        with np.errstate(divide="ignore"):  # log 0: tokens that p does not have; if T has no others, q cannot have them
            logs, used = _pool(np.log(high), np.log(low))
            level = np.exp(logs)
            moved = _excess(level, _members(high[:used], low, level)).sum(0)
            left = np.minimum(high, level).sum(0) + np.maximum(low, level).sum(0)  # 1 - moved, without a difference
            listed = high.sum(0) + low.sum(0)
            whole = np.maximum(1.0, listed)  # float32 probabilities may add up to more
            left = (left + (whole - listed if rest is None else rest)) / whole
            value = np.where(left < 0.5, -np.log(left), -np.log1p(-np.minimum(0.5, moved / whole)))
            return np.where(low[-1] > 0, value, np.inf)
    level, used = _pool(high, low)
    if divergence == "js":
        return _jensen_shannon(high, low, level)
    if divergence == "tv":
        return np.asarray(np.maximum(0.0, high[:used] - level).sum(0))
    return np.asarray(_excess(_members(high[:used], low, level), level).sum(0))


def _pool(high: Array, low: Array) -> tuple[Array, int]:
    """The mean of each position's block [n], and the most tokens of `high` that a block holds."""
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


def _members(high: Array, low: Array, level: Array) -> Array:
    """The block [h + w, n], and in place of every token outside it the level itself, which costs nothing."""
    return np.vstack([np.maximum(high, level), np.minimum(low, level)])


def _excess(x: Array, y: Array) -> Array:
    """At least 0: x log(x/y) - x + y, precise where x is near y and where y is next to nothing; y where x = 0, infinite
    where only y = 0.
    """
    step = y - x
    near = step - xlog1py(x, np.divide(step, x, out=np.zeros_like(step), where=x > 0))
    return np.asarray(np.where(2 * y < x, step + rel_entr(x, y), near))  # y/x - 1 would lose a small y


def _jensen_shannon(high: Array, low: Array, mean: Array) -> Array:
    """The least js [n], by halving: with q = c p outside the block and c u in it, u is the mean of the block under
    log(p + cu). That bends more than p and less than log p, so that u lies between the geometric and the arithmetic `mean`.
    """
    with np.errstate(divide="ignore"):
        level, used = _pool(np.log(high), np.log(low))
    bottom, top, high = np.exp(level), mean, high[:used]
    while (top - bottom > CLOSE * top).any():
        u = (bottom + top) / 2
        step = _members(high, low, u) - u
        c = 1 / (1 - step.sum(0))
        with np.errstate(over="ignore"):  # far too low a level may give an infinite product
            below = (1 + step / (u + c * u)).prod(0) > 1
        bottom, top = np.where(below, u, bottom), np.where(below, top, u)
    members = _members(high, low, top)
    c = 1 / (1 - (members - top).sum(0))
    rest = js_term(np.ones_like(c), c)
    return np.asarray(rest + (js_term(members, c * top) - members * rest).sum(0))


def js_term(p: Array, q: Array) -> Array:
    """What tokens with p and q add to Jensen-Shannon divergence."""
    middle = (p + q) / 2
    return np.asarray((rel_entr(p, middle) + rel_entr(q, middle)) / 2)
