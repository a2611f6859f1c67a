"""DFlash2 drafters: DFlash with convolutions over the rows of a block, and a selector that walks through candidates.

A convolution of a few taps stands before and after attention and MLP of each layer; its kernel depends on the row, and it
reads no row of another block and no key of the target's states. Each row has its likeliest tokens as candidates, which the
selector scores by the token before: no other token is drafted. Sources: z-lab/dflash (model.py), vLLM 0.33
(models/qwen3_dflash2.py), SGLang 0.5.23 (models/dflash.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from alphaprof.profiling.heads.dflash import Walked
from alphaprof.profiling.scoring.statistics import ABSENT


class DFlash2(Walked):
    """A DFlash2 drafter. `taps`, `group`: rows that a convolution reads, and channels that share a kernel; `rank`, `top`: of
    the selector, and how many candidates a row has; `multiplier`, `cap`: of logits (0: no cap).
    """

    picks = True
    looked_up = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")

    def __init__(
        self, *given: Any, taps: int, group: int, rank: int, top: int, multiplier: float, cap: float, **options: Any
    ) -> None:
        super().__init__(*given, **options)
        hidden = self.config.hidden_size
        self.candidate_selector = Selector(self.vocabulary, rank, hidden)
        self.top, self.multiplier, self.cap = top, multiplier, cap
        for layer in list[Any](self.blocks):
            layer.attention_conv, layer.mlp_conv = (Convolution(hidden, taps, group) for _ in range(2))

    def through(self, layer: Any, hidden_states: torch.Tensor, rows: int, **given: Any) -> torch.Tensor:
        """See `DFlash`."""
        attention = (layer.input_layernorm, layer.attention_conv, lambda normed: layer.self_attn(normed, **given)[0])
        for norm, convolution, part in (attention, (layer.post_attention_layernorm, layer.mlp_conv, layer.mlp)):
            normed = norm(hidden_states).unflatten(1, (rows, -1))
            entering, leaving = convolution(normed)
            inner = part(convolved(normed, entering).flatten(1, 2)).unflatten(1, (rows, -1))
            hidden_states = hidden_states + convolved(inner, leaving).flatten(1, 2)
        return hidden_states

    def joined(self, rows: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """See `Walked`."""
        return torch.cat([rows, self.candidate_selector(rows, tokens)], -1)

    def row_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """See `HeadNetwork`."""
        logits = self.head(rows).float() * self.multiplier
        return (logits / self.cap).tanh() * self.cap if self.cap else logits

    def after(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `HeadNetwork`. What is no candidate is ABSENT."""
        best, ids = logits.topk(self.top)
        wanted = states[:, None, self.config.hidden_size :]
        scores = best + (self.candidate_selector.successor_codebook[ids] * wanted).sum(-1)
        return torch.full_like(logits, ABSENT).scatter(1, ids, scores)


class Convolution(nn.Module):
    """Kernels of each row: a fixed one, and what the row adds to it by group of channels."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * hidden // group, bias=False)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the kernels [..., taps, hidden] before and after what rows [..., hidden] enter."""
        added = self.kernel_projection(rows).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        kernels: torch.Tensor = self.base_kernel + added.repeat_interleave(self.group, -1)
        return kernels.unbind(-3)


def convolved(rows: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Return rows [batch, rows, n, hidden] convolved by the kernel of each [batch, rows, n, taps, hidden]: tap t reads the
    row t before it in its block, or zeros.
    """
    taps = (pad(rows, (0, 0, 0, 0, tap, 0))[:, : rows.shape[1]] * kernel[..., tap, :] for tap in range(kernel.shape[-2]))
    return torch.stack(list(taps)).sum(0)


class Selector(nn.Module):
    """What a row and the token before it want of the token to come, and what each token offers."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.predecessor_codebook, self.successor_codebook = (nn.Parameter(torch.empty(vocabulary, rank)) for _ in range(2))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return [..., rank] of rows [..., hidden] and the tokens before them [...]."""
        wanted: torch.Tensor = self.predecessor_codebook[tokens] * self.hidden_projection(rows)
        return wanted
