"""Tokens per round, break-even and speedup from a few numbers: no model, no log, no interval.

The text is taken for a stationary chain of two states: at each position the draft is right or wrong. `alpha` is the share of
right positions, `burstiness` the correlation between one position and the next (lag-1 autocorrelation): 0 if positions
are independent, which is the textbook formula, above 0 if right ones come in runs, below 0 if they alternate. `cost`
means units of one plain decode step of the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]
ROUNDING = 1e-9  # how far a number may lie beyond its bound: users type decimals
HALVINGS = 60  # of an interval that lies in [0, 1]: below the spacing of floats


class CostOfRound(Protocol):
    """What a round costs in decode steps of the target."""

    def verification(self, gamma: int) -> float:
        """Return one target step over gamma + 1 tokens."""

    def of_round(self, gamma: int) -> float:
        """Return a round of gamma drafts."""


@dataclass(frozen=True)
class RoundCost:
    """What a round of gamma drafts costs, in decode steps of the target: gamma c + v + o."""

    draft: float  # c, one draft step
    verify: float = 1.0  # v without its slope
    verify_slope: float = 0.0  # added to it for every drafted token
    overhead: float = 0.0  # o, everything else in a round

    def verification(self, gamma: int) -> float:
        """v: one target step over gamma + 1 tokens."""
        return self.verify + gamma * self.verify_slope

    def of_round(self, gamma: int) -> float:
        """Return the cost of a round, gamma c + v + o: the tokens per round at which a draft starts to pay."""
        return gamma * self.draft + self.verification(gamma) + self.overhead


def least_burstiness(alpha: float) -> float:
    """Return the lowest burstiness that a text with this share of right positions can have, in [-1, 0]: that at which the
    rarer state never follows itself, max(-alpha / (1 - alpha), -(1 - alpha) / alpha).
    """
    odds = (alpha / (1 - alpha), (1 - alpha) / alpha) if 0 < alpha < 1 else (0.0, math.inf)
    return 0.0 - min(odds)


def feasible_alphas(burstiness: float) -> tuple[float, float]:
    """Return the lowest and the highest alpha that a text of this burstiness, in [-1, 1], can have."""
    return (0.0, 1.0) if burstiness >= 0 else (burstiness / (burstiness - 1), 1 / (1 - burstiness))


def check_chain(alpha: float, burstiness: float) -> None:
    """Raise `ValueError` for values that no text has."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is a probability, and {alpha:g} is not between 0 and 1")
    least = least_burstiness(alpha)
    if not least - ROUNDING <= burstiness <= 1:
        raise ValueError(f"at alpha {alpha:g} burstiness must be between {least:.4g} and 1, not {burstiness:g}")


def tokens_per_round(alpha: ArrayLike, gamma: int, burstiness: ArrayLike = 0.0) -> Array:
    """Return mean tokens that a round of gamma drafts emits, the target's own included: 1 to gamma + 1. Inputs of any shape.

    1 + alpha G / (1 + burstiness (1 - alpha) G), with r = alpha + burstiness (1 - alpha) the chance that right follows
    right and G = 1 + r + ... + r^(gamma - 1). For burstiness 0 that is 1 + alpha + ... + alpha^gamma (Leviathan et al.
    2023, arXiv:2211.17192). It is 1 + alpha / (1 - alpha) * (1 - r^gamma) / (1 - burstiness r^gamma) without its
    singularities: rounds renew the chain, and the first draft of a round is right with probability
    alpha (1 - burstiness) / (1 - burstiness r^gamma), not alpha. Burstiness 1 is the limit: all right or all wrong for ever.
    """
    share, follows = np.asarray(alpha, dtype=np.float64), np.asarray(burstiness, dtype=np.float64)
    again = np.clip(share + follows * (1 - share), 0.0, 1.0)
    runs = np.zeros_like(again)
    for _ in range(gamma):
        runs = 1 + again * runs
    return np.asarray(1 + share * runs / (1 + follows * (1 - share) * runs))


def accepted_per_drafted(tokens: ArrayLike, gamma: int) -> Array:
    """Return what engines call acceptance rate where every round drafts gamma tokens: (tokens per round - 1) / gamma."""
    return np.asarray((np.asarray(tokens, dtype=np.float64) - 1) / gamma)


def alpha_for(tokens: float, gamma: int, burstiness: float = 0.0) -> float | None:
    """Return the lowest alpha that a text of this burstiness can have whose rounds emit at least `tokens`; None if none
    does. Inverse of `tokens_per_round`.
    """
    low, high = feasible_alphas(burstiness)
    if tokens > tokens_per_round(high, gamma, burstiness) + ROUNDING:
        return None
    if tokens <= tokens_per_round(low, gamma, burstiness):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = tokens <= tokens_per_round(middle, gamma, burstiness)
        low, high = (low, middle) if enough else (middle, high)
    return high


def alpha_of_rate(rate: float, gamma: int, burstiness: float = 0.0) -> float:
    """Return the alpha of a text on which rounds of gamma drafts have accepted / drafted = rate. Raises `ValueError` if
    no text of this burstiness has such a rate.
    """
    tokens = 1 + gamma * rate
    alpha = alpha_for(tokens, gamma, burstiness)
    if alpha is None or abs(float(tokens_per_round(alpha, gamma, burstiness)) - tokens) > ROUNDING:
        raise ValueError(f"no text of burstiness {burstiness:g} has {rate:g} accepted per drafted token at gamma {gamma}")
    return alpha


def break_even_alpha(gamma: int, cost: CostOfRound, burstiness: float = 0.0) -> float | None:
    """Return the alpha from which a draft pays at gamma (speedup 1); None if it never does, not even when always right."""
    return alpha_for(cost.of_round(gamma), gamma, burstiness)


def speedup(alpha: ArrayLike, gamma: int, cost: CostOfRound, burstiness: ArrayLike = 0.0) -> Array:
    """Decode time without the draft / with it: tokens per round / (gamma c + v + o)."""
    return np.asarray(tokens_per_round(alpha, gamma, burstiness) / cost.of_round(gamma))
