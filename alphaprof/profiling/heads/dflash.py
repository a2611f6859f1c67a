"""DFlash drafters: a block of mask rows that read the target's states and each other, all tokens of a round in one pass.

A round's block is its anchor, the last token that was emitted, and mask rows. Its rows read keys that are made of the
target's states before the anchor, and each other: in a causal layer the earlier rows, else all of them. Where a layer is not
causal, what a row proposes depends on how many rows there are; nowhere on what was drafted. Engines run 1 + γ rows, of which
each mask row proposes the token at its own position; or γ rows, of which each proposes the token behind it
(sample_from_anchor). Sources: z-lab/dflash (model.py), speculators 0.9.0 (models/dflash), vLLM 0.33
(models/qwen3_dflash.py), SGLang 0.5.23 (models/dflash.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from alphaprof.profiling.heads.attention import Pair, Reach, Rounds, StepKeys
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, SharingHead, decoder_layers
from alphaprof.profiling.heads.network import MaskRows
from alphaprof.profiling.models.private import CACHE
from alphaprof.profiling.models.teacher_forced import States

AT_ONCE, GPU_AT_ONCE = 64, 512  # blocks that are run together, with all of their rows


class DFlash(SharingHead):
    """A DFlash drafter. `layers`: see `HeadNetwork`; `anchored`: 1 if each row proposes the token behind it, so that the
    anchor's row proposes one; 0 if each proposes the token at its own position; `reach`: which keys the rows see, by layer;
    `scale`: of the weights of the target's embedding (None: as the target's module scales them).
    """

    masks: MaskRows

    def __init__(
        self,
        config: Any,
        layers: tuple[int, ...],
        *,
        masks: MaskRows,
        reach: tuple[Reach, ...],
        anchored: int = 0,
        scale: float | None = None,
        ids: torch.Tensor | None = None,
        target: Mapping[str, Any],
    ) -> None:
        super().__init__(config, ids, target)
        self.layers, self.masks, self.reach, self.anchored, self.scale = layers, masks, reach, anchored, scale
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (LlamaRMSNorm(hidden, eps) for _ in range(2))
        self.blocks = decoder_layers(config)
        count = config.vocab_size if ids is None else len(ids)
        self.lm_head = nn.Linear(hidden, count, bias=False) if LM_HEAD not in target else None

    @property
    def by_length(self) -> bool:
        """Whether what a row proposes depends on how many rows there are."""
        return not all(each.causal for each in self.reach)

    @property
    def most(self) -> int | None:  # type: ignore[override]
        """See `HeadNetwork`."""
        return self.masks.drafts if self.by_length else None

    def embedded(self, tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `SharingHead`."""
        if self.scale is None:
            return super().embedded(tokens, like)
        weight = self._target[EMBEDDING].weight if self.embed_tokens is None else self.embed_tokens.weight
        return functional.embedding(tokens.to(weight.device), weight).to(like) * self.scale

    def context(self, features: torch.Tensor, start: int) -> list[Pair]:
        """Return keys and values of every layer [batch, kv heads, n, head_dim] of target states [batch, n, features] at
        positions from `start` on.
        """
        hidden_states = self.hidden_norm(self.fc(features.to(self.dtype)))
        position_ids = torch.arange(start, start + features.shape[1], device=features.device)
        cos, sin = self.rotary(hidden_states, position_ids[None])
        pairs: list[Pair] = []
        for attention in (layer.self_attn for layer in list[Any](self.blocks)):
            shape = (*hidden_states.shape[:2], -1, attention.head_dim)
            key = attention.k_norm(attention.k_proj(hidden_states).view(shape)).transpose(1, 2)
            value = attention.v_proj(hidden_states).view(shape).transpose(1, 2)
            pairs.append((apply_rotary_pos_emb(key, key, cos, sin)[1], value))
        return pairs

    def block(self, anchors: torch.Tensor, position_ids: torch.Tensor, drafts: int, **keys: Any) -> torch.Tensor:
        """Return states [batch, drafts, n, hidden] of blocks with `anchors` [batch, n] at `position_ids` [n]. `keys`: for
        the layers, see `attention`.
        """
        batch, count = anchors.shape
        size = drafts + 1 - self.anchored
        tokens = anchors.new_full((batch, size, count), self.masks.token)
        tokens[:, 0] = anchors
        rows = position_ids + torch.arange(size, device=anchors.device)[:, None]  # positions [rows, n]
        hidden_states = self.embedded(tokens.flatten(1), self.norm.weight)
        turns = self.rotary(hidden_states, rows.flatten()[None])
        for layer, reach in zip(self.blocks, self.reach, strict=True):
            given = {"attention_mask": None, "position_embeddings": turns, "reach": reach, **keys}
            hidden_states = self.through(layer, hidden_states, size, **given)
        states: torch.Tensor = self.norm(hidden_states).view(batch, size, count, -1)[:, 1 - self.anchored :]
        return states

    def through(self, layer: Any, hidden_states: torch.Tensor, rows: int, **given: Any) -> torch.Tensor:
        """Return states [batch, rows * n, hidden] after a decoder layer. `rows`: of a block; `given`: to the layer."""
        after: torch.Tensor = layer(hidden_states, **given)
        return after

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        """See `HeadNetwork`."""
        length, known = ids.shape[1], self.context(features, 0)
        anchors, position_ids = functional.pad(ids[:, 1:], (0, 1)), torch.arange(1, length + 1, device=ids.device)
        span, parts = AT_ONCE if ids.device.type == "cpu" else GPU_AT_ONCE, []
        drafts = self.masks.drafts if self.by_length else depths
        for start in range(first, length, span):
            end = min(start + span, length)
            rounds = Rounds(end - start, ((keys[:, :, :end], values[:, :, :end]) for keys, values in known))
            parts.append(self.block(anchors[:, start:end], position_ids[start:end], drafts, rounds=rounds))
        whole = torch.cat(parts, 2)
        for depth in range(depths):
            yield whole[:, depth]  # whatever is sent: its rows read nothing that is drafted

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadNetwork`."""
        return self.head(states)

    def cache(self, first: torch.Tensor | None = None) -> DFlashCache:
        """Return an empty cache."""
        return DFlashCache(self)


class DFlashCache:
    """A DFlash drafter at work, a `HeadCache`: all that it keeps are keys of the target's states. `drafted`: as in
    `RoundCache`.
    """

    drafted: torch.Tensor

    def __init__(self, network: DFlash) -> None:
        self._network, self.keys, self.length = network, StepKeys(), 0

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        self.keys.start = self.length
        for layer, pair in enumerate(self._network.context(features, self.length)):
            self.keys.update(*pair, layer)
        self.length += tokens.shape[1]
        self.keys.start = self.length
        position_ids = torch.tensor([self.length], device=tokens.device)
        drafts = self._network.masks.drafts
        self.drafted = self._network.block(tokens[:, -1:], position_ids, drafts, **{CACHE: self.keys})[:, :, 0]
        return self.drafted[:, 0]

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self.drafted[:, depth - 1]


class Walked(DFlash):
    """A drafter of whose tokens each depends on the one before it, too: they are chosen left to right, in the rows of one
    pass. A state is a row with what it reads of the tokens before, `hidden` and more numbers.
    """

    @abstractmethod
    def joined(self, rows: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Return states [..., hidden + some] of rows [..., hidden] of a depth, the tokens before them [...], and the states
        at the depth before (None: of depth 1).
        """

    @abstractmethod
    def after(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `HeadNetwork`."""

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        """See `HeadNetwork`."""
        tokens, state, drafted = functional.pad(ids, (0, depths)), None, None
        for depth, rows in enumerate(super().states(ids, features, depths, first)):
            text = tokens[:, first + 1 + depth : ids.shape[1] + 1 + depth]
            state = self.joined(rows, text if drafted is None else drafted, state)
            drafted = yield state

    def row_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """See `HeadNetwork`."""
        return self.head(rows)

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadNetwork`."""
        return self.after(self.row_logits(states[:, : self.config.hidden_size]), states)

    def cache(self, first: torch.Tensor | None = None) -> WalkedCache:
        """Return an empty cache."""
        return WalkedCache(self)


class WalkedCache(DFlashCache):
    """Such a drafter at work, a `HeadCache`."""

    def __init__(self, network: Walked) -> None:
        super().__init__(network)
        self._joined = network.joined

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        return self._joined(super().extend(tokens, features), tokens[:, -1], None)

    @torch.inference_mode()
    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self._joined(self.drafted[:, depth - 1], token, state)
