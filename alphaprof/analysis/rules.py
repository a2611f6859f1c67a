"""Acceptance rules: when is a drafted token kept? One small function a rule, over columns of the position log.

Each rule gives two things, and they are not the same: `accept`, the probability that it keeps the draft's proposal
before the emitted token is known (what alpha averages, stored as `accept_<rule>`), and `emitted`, what happened to the
token that was emitted (what replay propagates).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Rule:
    """A rule of acceptance. Both functions map columns of n positions to n values in [0, 1]."""

    about: str
    accept: Callable[[Columns], np.ndarray[Any, Any]]
    emitted: Callable[[Columns], np.ndarray[Any, Any]]


def strict_accept(columns: Columns) -> np.ndarray[Any, Any]:
    """1[draft_top = x_t] on greedy text, 1[draft_top = target_top] elsewhere (`greedy` tells them apart)."""
    reference = np.where(columns["greedy"], columns["token"], columns["target_top"])
    return np.asarray(columns["draft_top"] == reference, dtype=np.float32)


def strict_emitted(columns: Columns) -> np.ndarray[Any, Any]:
    """1[draft_top = x_t]: the emitted token is the one that the draft proposed."""
    return np.asarray(columns["draft_top"] == columns["token"], dtype=np.float32)


RULES = {
    "strict": Rule("keep the draft's top token when it is the target's top token", strict_accept, strict_emitted),
}


def rule_id(specification: str) -> str | None:
    """The id of a rule as it stands in columns, options and JSON; None for a rule that does not exist."""
    return specification if specification in RULES else None
