"""What every draft head computes, given texts at every depth at once, or a text that grows.

Tokens are x_0, x_1, ...; the target's state at token i predicts x_(i+1). A round that proposes x_s first begins after the
target has read x_0 .. x_(s-2): it is the round after token b = s - 2, and its k-th draft, of depth k, is x_(b+k+1). Every
depth reads the token x_(b+k), and what fixes a round is that these are the text's tokens as long as its drafts are accepted.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.nn.functional import pad

from alphaprof.costs.layers import EXPERTS
from alphaprof.costs.shapes import ModelShape
from alphaprof.profiling.heads.attention import Rounds, StepKeys
from alphaprof.profiling.models.private import CACHE
from alphaprof.profiling.models.teacher_forced import FINAL, States


@dataclass(frozen=True)
class MaskRows:
    """How a head drafts all tokens of a round in its first step: from rows of mask `token`, for as many `drafts`."""

    token: int
    drafts: int


class HeadCache(Protocol):
    """A head at work on `batch` texts that grow alike. `copy.copy` returns one that goes on from the same bases while the
    other waits: both write what is new into the same tensors, behind the bases that they share.
    """

    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Take in verified tokens that follow those so far: for token i the next one, x_(i+1) [batch, n], and the features
        at i [batch, n, features]. What drafts of the round before left is dropped first. Returns the state [batch, hidden]
        of depth 1 after the last one.
        """

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the state [batch, hidden] at `depth`, 2 or more, from the token drafted before it [batch] and the state at
        the depth before it. Called for each depth in turn, left to right, even where one pass has computed all rows.
        """


class HeadNetwork(nn.Module, ABC):
    """A draft head, whose parameters are its own tensors: none of the target's. `layers`: the target's states that are its
    features, in this order, as `teacher_forced.recorded` names them; `most`: how many depths it has (None: any number);
    `ids` [logits]: the target's ids of its logits, ascending (None: 0, 1, ...); `vocabulary`: how many ids the target has;
    `config`: of its decoder layers, as transformers has it (None: it has none); `masks`: its mask rows, if it drafts from
    such (None: each depth is a step of its own); `picks`: each row has a few candidates, and the logits of other ids are
    absent; `own_path`: whether its pass over a text can follow what each round drafts; `of_logits`: weights with a row for
    each of its logits; `confident`: what its `confidence` reads, in a word ("": it has none).
    """

    layers: tuple[int, ...] = (FINAL,)
    most: int | None = None
    masks: MaskRows | None = None
    picks = False
    config: Any = None
    own_path = True
    of_logits: tuple[str, ...] = ()
    confident: str = ""
    ids: torch.Tensor | None
    vocabulary: int

    def changed(self, **attributes: Any) -> Self:
        """Return the same tensors with other attributes."""
        twin = copy.copy(self)
        vars(twin).update(attributes)
        return twin

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return next(self.parameters()).dtype

    @abstractmethod
    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        """Yield for depth 1, 2, ... `depths` the states [batch, length - first, hidden] of the rounds after the tokens from
        `first` on, in texts of right-padded `ids` [batch, length] with `features` [batch, length, features]. Where token +
        depth lies beyond the text they mean nothing, and are finite. What is sent for a depth, the tokens [batch, length -
        first] that these rounds draft there, the next depth reads; if nothing is, it reads the text's. What a draft reads of
        them, beside its depth's row, is part of its state.
        """

    @abstractmethod
    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Return logits [n, logits] of states [n, hidden] at a depth, which hold all that a draft depends on."""

    def at_once(self, cache: Any) -> torch.Tensor | None:
        """Return the rows [batch, depths, hidden] of a round that `cache.extend` has begun, if one pass computes those of
        all depths. None: each depth is a step of its own.
        """
        return None if self.masks is None else cache.drafted

    def row_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, logits] of rows [n, hidden] of `at_once`, as far as no token of the round decides."""
        return self.logits(rows, 1)

    def after(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return what the logits [n, logits] of rows become by the tokens before them, which their states [n, hidden] hold:
        nothing else, unless a head reads these.
        """
        return logits

    def confidence(self, states: torch.Tensor) -> torch.Tensor:
        """Return how probably the drafts of states [n, hidden] of a depth are accepted [n], as a `confident` head says."""
        raise NotImplementedError

    @abstractmethod
    def shape(self) -> ModelShape | None:
        """Return what decides the bytes and FLOPs of its steps, see `head_shape`; None: they are not known."""

    @abstractmethod
    def cache(self, first: torch.Tensor | None = None) -> HeadCache:
        """Return an empty cache, for texts that begin with the tokens `first` [batch], which only drafters that are models
        by themselves read.
        """


class RoundHead(HeadNetwork):
    """A head of decoder layers that run one more row of a round for each depth. `ahead`: 1 if the first token of a text is a
    row of its own, before that of the round after it; else 0.
    """

    ahead = 0

    @abstractmethod
    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """Return what depth 1 reads [batch, n, hidden] in place of a state of its own, of features [batch, n, features]."""

    def deeper(self, tokens: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what depths beyond the first read, of the tokens drafted before them [batch, n] and the states [batch, n,
        hidden] at the depth before: these, or mask rows, whatever was drafted.
        """
        return tokens if self.masks is None else torch.full_like(tokens, self.masks.token), hidden_states

    @abstractmethod
    def step(
        self, tokens: torch.Tensor, hidden_states: torch.Tensor, position_ids: torch.Tensor, **keys: Any
    ) -> torch.Tensor:
        """Return states [batch, n, hidden] at a depth, of tokens [batch, n], the states before [batch, n, hidden] and
        position_ids [n]. `keys`: the `rounds` or the CACHE of `attention`, for the layers.
        """

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        """See `HeadNetwork`. Keys of the verified tokens are computed once, at depth 1."""
        length, begin = ids.shape[1], first + self.ahead
        tokens = pad(ids, (0, depths))
        position_ids = torch.arange(length + self.ahead, device=ids.device)
        rounds = Rounds(length - first)
        rows = tokens[:, 1 - self.ahead : length + 1], self.entry(features)
        del features  # they may be several times as large as all that follows
        hidden_states = self.step(*rows, position_ids, rounds=rounds)[:, begin:]
        for depth in range(2, depths + 1):
            drafted = yield hidden_states
            rows = self.deeper(tokens[:, first + depth : length + depth] if drafted is None else drafted, hidden_states)
            hidden_states = self.step(*rows, position_ids[begin:] + depth - 1, rounds=rounds)
        yield hidden_states

    def cache(self, first: torch.Tensor | None = None) -> HeadCache:
        """Return an empty cache."""
        return RoundCache(self, first if self.ahead else None)


class RoundCache:
    """Such a head at work, a `HeadCache`: rows of a round's drafts come after those of verified tokens, and the next round
    writes over them. `length`: how many rows of verified tokens there are; `drafted` [batch, depths, hidden]: the states of
    the round that began last, where mask rows draft it.
    """

    drafted: torch.Tensor

    def __init__(self, head: RoundHead, first: torch.Tensor | None) -> None:
        self._head, self._first, self.keys, self.length = head, first, StepKeys(), 0

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        if self._first is not None and not self.length:
            tokens = torch.cat([self._first[:, None], tokens], 1)
        count, rows, head = tokens.shape[1], (tokens, self._head.entry(features)), self._head
        if head.masks is not None:
            masks = head.deeper(*(row[:, :1].expand(-1, head.masks.drafts - 1, *row.shape[2:]) for row in rows))
            rows = torch.cat([rows[0], masks[0]], 1), torch.cat([rows[1], masks[1]], 1)
        self.drafted = self._step(*rows, self.length)[:, count - 1 :]
        self.length += count
        return self.drafted[:, 0]

    @torch.inference_mode()
    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        if self._head.masks is not None:
            return self.drafted[:, depth - 1]
        return self._step(token[:, None], state[:, None], self.length + depth - 2)[:, 0]

    def _step(self, tokens: torch.Tensor, hidden_states: torch.Tensor, start: int) -> torch.Tensor:
        self.keys.start = start
        position_ids = torch.arange(start, start + tokens.shape[1], device=hidden_states.device)
        return self._head.step(tokens, hidden_states, position_ids, **{CACHE: self.keys})


def head_shape(
    module: nn.Module, config: Any, logits: torch.Tensor, entering: Sequence[str] = (), elsewhere: Sequence[str] = ()
) -> ModelShape | None:
    """Return the shape of a head whose steps run decoder layers as `config` describes them; None for a latent KV cache.

    `module`: its own parameters, all of which a step uses for every token, but for those whose names begin as `elsewhere`
    (embeddings, and those of the logits) and the modules that later steps of a round leave out, `entering`. `logits` [rows,
    hidden]: the weight that its logits are computed by, even if it belongs to the target. As of models, norms and biases do
    not count.
    """
    config = config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        return None
    matrices = {name: weight.numel() for name, weight in module.named_parameters() if weight.dim() > 1}
    used = {name: count for name, count in matrices.items() if not name.startswith(tuple(elsewhere))}
    heads = config.num_attention_heads
    experts = next((number for key in EXPERTS if (number := getattr(config, key, None))), 0)
    mixed = sum(count for name, count in used.items() if ".experts." in name)
    size = float(next(module.parameters()).element_size())
    return ModelShape(
        parameters=sum(used.values()) + logits.numel(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=len(logits),
        weight_bytes=size,
        kv_bytes=size,
        experts=experts if mixed else 0,
        experts_per_token=config.num_experts_per_tok if mixed else 0,
        expert_parameters=mixed / experts if mixed else 0.0,
        tied=True,
        first_parameters=sum(count for name, count in used.items() if name.partition(".")[0] in entering),
        last_parameters=logits.numel(),
        stored_parameters=sum(weight.numel() for weight in module.parameters()),
    )
