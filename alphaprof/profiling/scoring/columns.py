"""The columns that a scoring pass makes of logits: their names, once for all back ends. Imports neither torch nor numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Of a target; of a draft beside it; of a target at the proposals of a draft that has no distribution.
TARGET = ("target_top", "target_top_prob", "target_second_prob", "target_margin", "target_entropy", "target_token_prob")
PROPOSAL = ("target_prob_of_draft_top", "target_rank_of_draft_top")
DRAFT = (
    *("draft_top", "draft_top_prob", "draft_margin", "draft_entropy", "draft_token_prob"),
    *PROPOSAL,
    "draft_rank_of_token",
    *("overlap", "kl_target_draft", "kl_draft_target"),
)
IDS = {"target_top", "draft_top", "target_rank_of_draft_top", "draft_rank_of_token"}  # the others are float32


def record(names: Sequence[str]) -> np.dtype[Any]:
    """Return the dtype of a row of these columns in compiled loops, which write its fields by name: code that was compiled
    for other names or another order has another signature, and is not used.
    """
    return np.dtype([(name, np.float64) for name in names])
