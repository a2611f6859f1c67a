"""Tokens per round, break-even and speedup from a few numbers: no model, no log, no interval.

Every drafted token is taken to be kept with the same probability `alpha`, whatever happened before. `cost` means units of
one plain decode step of the target. A draft that proposes at some positions only, such as prompt lookup, has a `coverage`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from alphaprof.errors import OptionInvalid, cut

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
    """What a round of gamma drafts costs, in decode steps of the target: gamma c + v + o + p."""

    draft: float  # c, one draft step
    verify: float = 1.0  # v, one target step over gamma + 1 tokens, the same at every gamma
    overhead: float = 0.0  # o, everything else in a round
    path_overhead: float = 0.0  # p, of the path that speculation forces: in rounds without a draft as well

    def verification(self, gamma: int) -> float:
        """Return v."""
        return self.verify

    def of_round(self, gamma: int) -> float:
        """Return the cost of a round, gamma c + v + o + p: the tokens per round at which a draft starts to pay."""
        return gamma * self.draft + self.verify + self.overhead + self.path_overhead


def tokens_per_round(alpha: ArrayLike, gamma: int) -> Array:
    """Return mean tokens that a round of gamma drafts emits, the target's own included: 1 to gamma + 1. Inputs of any shape.

    1 + alpha + ... + alpha^gamma (Leviathan et al. 2023, arXiv:2211.17192).
    """
    share = np.asarray(alpha, dtype=np.float64)
    tokens = np.ones_like(share)
    for _ in range(gamma):
        tokens = 1 + share * tokens
    return tokens


def over_all_rounds(with_proposal: ArrayLike, coverage: ArrayLike) -> Array:
    """Return the mean over all rounds of what a round with a proposal emits, in tokens, or costs, in decode steps. Inputs of
    any shape.

    `coverage`: the share of rounds that begin where the draft proposes anything, in [0, 1]. Every other round is one decode
    step that emits one token, so the mean is coverage x + (1 - coverage) = 1 + coverage (x - 1). The share of positions with
    a proposal stands for that of rounds if positions have one independently of each other and of what was accepted: a
    position that begins a round is then as good as any. A proposal is taken to reach gamma tokens.
    """
    return 1 + np.asarray(coverage, dtype=np.float64) * (np.asarray(with_proposal, dtype=np.float64) - 1)


def accepted_per_drafted(tokens: ArrayLike, gamma: int) -> Array:
    """Return what engines call acceptance rate where every round drafts gamma tokens: (tokens per round - 1) / gamma."""
    return np.asarray((np.asarray(tokens, dtype=np.float64) - 1) / gamma)


def alpha_for(tokens: float, gamma: int) -> float | None:
    """Return the lowest alpha whose rounds emit at least `tokens`; None if none does. Inverse of `tokens_per_round`."""
    if tokens > gamma + 1 + ROUNDING:
        return None
    if tokens <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if tokens <= tokens_per_round(middle, gamma) else (middle, high)
    return high


def alpha_of_rate(rate: float, gamma: int) -> float:
    """Return the alpha at which rounds of gamma drafts have accepted / drafted = rate. Raises `ValueError` for a rate that
    is not between 0 and 1.
    """
    if not 0 <= rate <= 1 + ROUNDING / gamma or (alpha := alpha_for(1 + gamma * rate, gamma)) is None:
        raise ValueError(f"accepted / drafted tokens is a share, and {rate:g} is not between 0 and 1")
    return alpha


def break_even_alpha(gamma: int, cost: CostOfRound) -> float | None:
    """Return the alpha from which a draft pays at gamma (speedup 1); None if it never does, not even when always right."""
    return alpha_for(cost.of_round(gamma), gamma)


def speedup(alpha: ArrayLike, gamma: int, cost: CostOfRound) -> Array:
    """Decode time without the draft / with it: tokens per round / (gamma c + v + o)."""
    return np.asarray(tokens_per_round(alpha, gamma) / cost.of_round(gamma))


def shares_by_depth(option: str, text: str) -> tuple[float, ...]:
    """Return shares of rounds that accepted at least 1, 2, ... drafts, as an option gives them. Raises `OptionInvalid`."""
    with contextlib.suppress(ValueError):
        shares = tuple(map(float, text.split(",")))
        if all(1 >= earlier >= later >= 0 for earlier, later in pairwise([1.0, *shares])):
            return shares
    raise OptionInvalid(
        f"{option} {cut(text)} does not fall from 1 to 0",
        f"give shares of rounds that accepted at least 1, 2, ... drafts: {option} 0.6,0.4,0.2",
    )
