"""Attention of heads: over verified tokens alone, and over these with what a round has drafted so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

SCORE_BYTES = 64 << 20  # attention scores of a chunk of rows, in float32


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention [batch, heads, n, size] of the last n tokens, over themselves and the tokens before them. Keys and
    values are [batch, groups, tokens, size]: each is read by heads / groups heads that follow each other.
    """
    rows, tokens = query.shape[2], key.shape[2]
    mask = None
    if 1 < rows < tokens:
        mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=1 < rows == tokens, enable_gqa=query.shape[1] != key.shape[1]
    )


def by_round(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
    first: int,
) -> torch.Tensor:
    """Attention [batch, heads, n, size] of rounds that begin at the bases from `first` on, at one depth: each over `key` and
    `value` [batch, groups, bases, size] of the bases up to its own, which are of verified tokens, and over what it drafted
    itself: of every depth from 2 on the keys and values [batch, groups, n, size] in `own`. This is the mask of training-time
    test (EAGLE-3, arXiv:2503.01840): causal, with a diagonal for every depth.

    A few rows at a time, so that their scores stay below `SCORE_BYTES`.
    """
    batch, heads, rows, size = query.shape
    groups = key.shape[1]
    query = query.reshape(batch, groups, heads // groups, rows, size)
    mixed = torch.empty_like(query)
    span = max(1, SCORE_BYTES // (batch * heads * key.shape[2] * 4))
    for start in range(0, rows, span):
        end = min(start + span, rows)
        chunk = slice(start, end)
        seen = slice(0, first + end)
        mine = [(keys[:, :, None, chunk], values[:, :, None, chunk]) for keys, values in own]
        mixed[..., chunk, :] = _mixed(query[..., chunk, :], key[:, :, seen], value[:, :, seen], mine)
    return mixed.view(batch, heads, rows, size)


def _mixed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """The softmax over the bases, of which the last ones are those of the rows, and over the rows' own keys, in float32."""
    shape, rows, scale = query.shape[:4], query.shape[3], query.shape[4] ** -0.5
    scores = (query.flatten(2, 3) @ key.transpose(2, 3)).float().mul_(scale).view(*shape, -1)
    later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores[..., scores.shape[-1] - rows :].masked_fill_(later, float("-inf"))
    drafted = torch.stack([(query * keys).sum(-1) for keys, _ in own], -1).float() * scale
    top = torch.maximum(scores.detach().amax(-1), drafted.detach().amax(-1))[..., None]  # any number would do
    scores, drafted = scores.sub_(top).exp_(), (drafted - top).exp()
    total = scores.sum(-1, keepdim=True) + drafted.sum(-1, keepdim=True)
    mixed = (scores.to(value.dtype).flatten(2, 3) @ value).float().view(query.shape)
    for depth, (_, values) in enumerate(own):
        mixed = mixed + drafted[..., depth, None] * values
    answer: torch.Tensor = (mixed / total).to(query.dtype)
    return answer
