"""Second implementations in float64 NumPy, as plain as possible: every column of the position log from full logits, and
the small-sample correction of a ratio from explicit matrices.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np

from alphaprof.theory.certificates import Divergence

Array = np.ndarray[Any, Any]
LOGGED_RULES = (
    *("strict", "lossless", "one_hot", "additive_0p1", "multiplicative_0p3", "top_m_3"),
    *("typical_0p09_0p3", "trtllm_10_0p6"),
)
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


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


def support(logits: Array, settings: Any) -> Array:
    """Which ids temperature, top_k, top_p and min_p of `settings` leave, one filter after the other; ties at a cut stay."""
    scores = logits.astype(np.float64) / settings.temperature
    alive = np.isfinite(scores)
    if 0 < settings.top_k < len(scores):
        alive &= scores >= np.sort(scores)[-settings.top_k]
    if settings.top_p < 1:
        p = softmax(np.where(alive, scores, -np.inf))
        mass = least = 0.0
        for value in np.sort(p)[::-1]:
            if mass >= settings.top_p:
                break
            mass, least = mass + value, value
        alive &= p >= least
    if settings.min_p > 0:
        p = softmax(np.where(alive, scores, -np.inf))
        alive &= p >= settings.min_p * p.max()
    return alive


def processed(logits: Array, settings: Any) -> Array:
    """Probabilities of one row of logits after temperature and truncation; None: plain."""
    if settings is None:
        return softmax(logits)
    return softmax(np.where(support(logits, settings), logits.astype(np.float64) / settings.temperature, -np.inf))


def columns(
    target_logits: Array, draft_logits: Array, token: int, settings: Any = None, draft_settings: Any = None
) -> dict[str, float]:
    """All statistics of one position; the narrower row is padded with probability 0.

    `settings`, `draft_settings`: how p and q are processed; None: not at all.
    """
    width = max(len(target_logits), len(draft_logits))
    z, y = (
        np.pad(row.astype(np.float64), (0, width - len(row)), constant_values=-np.inf)
        for row in (target_logits, draft_logits)
    )
    return compared(z, y, processed(z, settings), processed(y, draft_settings), token)


def compared(z: Array, y: Array, p: Array, q: Array, token: int) -> dict[str, float]:
    """All statistics of one position from logits z, y and distributions p, q of target and draft, all of one width."""
    width = len(z)
    top, draft_top = int(np.argmax(z)), int(np.argmax(y))
    first, second = np.sort(p)[::-1][:2]
    draft_first, draft_second = np.sort(q)[::-1][:2]
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
    }


def accepted(p: Array, q: Array, target_top: int, draft_top: int, better: int) -> dict[str, float]:
    """What each default rule keeps of a draft's proposal, from whole distributions p and q; `better`: how many ids come
    before the draft's top token in the target's order.
    """
    kept, top = p[draft_top], p.max()
    entropy = -kl(p, np.ones(len(p)))
    return {
        "strict": float(draft_top == target_top),
        "lossless": sum(q[token] * min(1.0, p[token] / q[token]) for token in np.flatnonzero(q)),
        "one_hot": kept,
        "additive_0p1": float(kept >= top - 0.1),
        "multiplicative_0p3": float(kept >= 0.3 * top),
        "top_m_3": float(better < 3),
        "typical_0p09_0p3": float(kept >= min(0.09, 0.3 * np.exp(-entropy), top)),
        "trtllm_10_0p6": float(better < 10 and kept >= top - 0.6),
    }


def small_sample(sizes: Array) -> tuple[float, float]:
    """Correction and degrees of freedom of a ratio over documents of these sizes, from the matrix of its squares."""
    h = sizes / sizes.sum()
    residual = np.eye(len(h)) - np.outer(np.ones(len(h)), h)  # of each document's own ratio from that of all of them
    matrix = residual.T @ np.diag(h**2) @ residual
    return float(np.sum(h**2) / np.trace(matrix)), float(np.trace(matrix) ** 2 / np.trace(matrix @ matrix))


def accepted_lengths(rounds: Any) -> Array:
    """How many rounds accepted exactly 0, 1, ..., depth drafts, [documents, depth + 1]."""
    return -np.diff(np.column_stack([rounds.rounds, rounds.accepted]), axis=1, append=0)


def threshold(p: Array, accepted: int, width: int = 1, divergence: Divergence = "kl") -> float:
    """D* of one whole distribution p [V], in any order, whose `accepted` most probable tokens are accepted: `thresholds`
    token by token. 0 where nothing is accepted, infinite where fewer than `width` tokens are rejected.
    """
    ranked = np.sort(np.asarray(p, dtype=np.float64))[::-1]
    if accepted == 0 or accepted + width > len(ranked):
        return math.inf if accepted else 0.0
    high, low = list(ranked[:accepted]), list(ranked[accepted : accepted + width])
    block, high, low = [high[0], low[-1]], high[1:], low[:-1]
    while True:
        level = sum(block) / len(block)
        if high and high[0] > level:
            block.append(high.pop(0))
        elif low and low[-1] < level:
            block.append(low.pop())
        else:
            break
    costs = {"kl": (x * math.log(x / level) for x in block if x > 0), "tv": (max(x - level, 0.0) for x in block)}
    return float(sum(costs[divergence]))
