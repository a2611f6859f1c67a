"""Second implementations in float64 NumPy, as plain as possible: every column of the position log from full logits, and
the small-sample correction of a ratio from explicit matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def softmax(logits: Array) -> Array:
    """Probabilities of one row of logits."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def kl(p: Array, q: Array) -> float:
    """KL(p || q) in nats; 0 log 0 = 0, infinite where q is 0 and p is not."""
    kept = p > 0
    with np.errstate(divide="ignore"):
        return float(np.sum(p[kept] * (np.log(p[kept]) - np.log(q[kept]))))


def rank(values: Array, index: int) -> int:
    """1 + number of larger + number of equal with a lower id."""
    return 1 + int(np.sum(values > values[index])) + int(np.sum(values[:index] == values[index]))


def columns(target_logits: Array, draft_logits: Array, token: int) -> dict[str, float]:
    """All statistics of one position; the narrower row is padded with probability 0."""
    width = max(len(target_logits), len(draft_logits))
    z, y = (
        np.pad(row.astype(np.float64), (0, width - len(row)), constant_values=-np.inf)
        for row in (target_logits, draft_logits)
    )
    p, q = softmax(z), softmax(y)
    top, draft_top = int(np.argmax(z)), int(np.argmax(y))
    first, second = np.sort(p)[::-1][:2]
    draft_first, draft_second = np.sort(q)[::-1][:2]
    mixture = (p + q) / 2
    return {
        "target_top": top,
        "draft_top": draft_top,
        "target_top_prob": first,
        "target_second_prob": second,
        "target_margin": first - second,
        "target_entropy": -kl(p, np.ones(width)),
        "target_token_prob": p[token],
        "draft_top_prob": draft_first,
        "draft_margin": draft_first - draft_second,
        "draft_entropy": -kl(q, np.ones(width)),
        "draft_token_prob": q[token],
        "target_prob_of_draft_top": p[draft_top],
        "target_rank_of_draft_top": rank(z, draft_top),
        "draft_rank_of_token": rank(y, token),
        "overlap": float(np.minimum(p, q).sum()),
        "kl_target_draft": kl(p, q),
        "kl_draft_target": kl(q, p),
        "js": (kl(p, mixture) + kl(q, mixture)) / 2,
    }


def small_sample(sizes: Array) -> tuple[float, float]:
    """Correction and degrees of freedom of a ratio over documents of these sizes, from the matrix of its squares."""
    h = sizes / sizes.sum()
    residual = np.eye(len(h)) - np.outer(np.ones(len(h)), h)  # of each document's own ratio from that of all of them
    matrix = residual.T @ np.diag(h**2) @ residual
    return float(np.sum(h**2) / np.trace(matrix)), float(np.trace(matrix) ** 2 / np.trace(matrix @ matrix))
