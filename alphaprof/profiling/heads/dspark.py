"""DSpark drafters: DFlash with a Markov head, by which the token before corrects the logits of a row, and a confidence.

The correction is of low rank: an embedding of the token before, as it is (vanilla), gated by the row, or the output of a
recurrent cell that has read all tokens of the round. Sources: deepseek-ai/DeepSpec (modeling/dspark/markov_head.py), vLLM
0.33 (models/qwen3_dspark.py), SGLang 0.5.23 (models/dspark.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from alphaprof.profiling.heads.dflash import Walked
from alphaprof.profiling.heads.eagle import LM_HEAD

MARKOV = VANILLA, GATED, RNN = "vanilla", "gated", "rnn"


class DSpark(Walked):
    """A DSpark drafter. `markov`: which of MARKOV; `rank`: of its correction (0: there is none); `confident`: what the
    confidence reads, "row", "both" (the row and the embedding of the token before it), or "" where there is none.
    """

    looked_up = ("markov_head.markov_w1", "confidence_head")
    of_logits = (LM_HEAD, "markov_head.markov_w2.weight")

    def __init__(self, *given: Any, markov: str, rank: int, confident: str, **options: Any) -> None:
        super().__init__(*given, **options)
        hidden, count = self.config.hidden_size, self.vocabulary if self.ids is None else len(self.ids)
        self.rank, self.confident = rank, confident
        self.markov_head = Markov(markov, hidden, self.vocabulary, count, rank) if rank else None
        if confident:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank * (confident == "both"), 1)})

    def joined(self, rows: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """See `Walked`: the row, the embedding of the token before it, what corrects its logits, and a memory of the round.
        Of a vanilla head the correction is the embedding.
        """
        if self.markov_head is None:
            return rows
        memory = None if before is None else before[..., -self.rank :]
        return torch.cat([rows, *self.markov_head(rows, tokens, memory)], -1)

    def after(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `HeadNetwork`."""
        if self.markov_head is None:
            return logits
        parts = torch.split(states[..., self.config.hidden_size :], self.rank, -1)
        corrected: torch.Tensor = logits + self.markov_head.markov_w2(parts[min(1, len(parts) - 1)]).to(logits)
        return corrected

    def confidence(self, states: torch.Tensor) -> torch.Tensor:
        """Return the confidence [n] that the drafts of states [n, ...] are accepted, in float32."""
        proj: Any = self.confidence_head["proj"]
        read = states[..., : proj.in_features].float()
        return linear(read, proj.weight.float(), proj.bias.float()).sigmoid()[..., 0]


class Markov(nn.Module):
    """A Markov head. The tokens before are ids of the target; what it corrects are the drafter's own logits."""

    def __init__(self, kind: str, hidden: int, vocabulary: int, count: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocabulary, rank), nn.Linear(rank, count, bias=False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if kind == GATED else None
        self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank) if kind == RNN else None

    def forward(self, rows: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return the embedding of tokens [...], unless it is the same what corrects the logits of rows [..., hidden], and
        the memory after them, [..., rank] each. `memory`: the one before (None: of the first row).
        """
        embedded = self.markov_w1(tokens)
        if self.gate_proj is not None:
            return embedded, self.gate_proj(torch.cat([rows, embedded], -1)).sigmoid() * embedded
        if self.joint_proj is None:
            return (embedded,)
        memory = torch.zeros_like(embedded) if memory is None else memory
        kept, new, out = self.joint_proj(torch.cat([memory, embedded, rows], -1)).chunk(3, -1)
        return embedded, out.tanh(), kept.sigmoid() * memory + (1 - kept.sigmoid()) * new.tanh()
