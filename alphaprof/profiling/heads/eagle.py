"""EAGLE heads: decoder layers on an embedding and states of the target, which later depths replace by their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from alphaprof.costs.roofline import ModelShape
from alphaprof.profiling.heads.network import HeadNetwork, head_shape
from alphaprof.profiling.models.teacher_forced import FINAL

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
SCORE_BYTES = 64 << 20  # attention scores of a chunk of rows, in float32
ROOM = 64  # tokens that the tensors of a cache have room for at least
# Attention of a layer, by its number: given its queries, keys and values [batch, heads or groups, n, size].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """How the tensors of a head are read. `layers`: see `HeadNetwork`; `norm_before_residual`: the first layer adds its
    attention to the normalised state, not to the state itself; `norm_output`: the next depth reads the state after the final
    norm, not before it; `norm_before_fc`: a norm over all states together comes before `fc`.
    """

    layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False


class HeadAttention(nn.Module):
    """The projections around attention, whose input may be wider than the states that it is added to."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        rows, groups = (count * self.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, rows, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, groups, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, groups, bias=config.attention_bias)
        self.o_proj = nn.Linear(rows, config.hidden_size, bias=getattr(config, "output_bias", config.attention_bias))
        normed = config.model_type == "qwen3"
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if normed else nn.Identity() for _ in range(2)
        )

    def projected(self, inputs: torch.Tensor, rotation: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [batch, heads or groups, n, size]; `rotation`: cosine and sine of the n positions."""
        shape = (*inputs.shape[:2], -1, self.head_dim)
        query = self.q_norm(self.q_proj(inputs).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(inputs).view(shape)).transpose(1, 2)
        value = self.v_proj(inputs).view(shape).transpose(1, 2)
        return *apply_rotary_pos_emb(query, key, *rotation), value

    def forward(self, inputs: torch.Tensor, rotation: Any, index: int, attend: Attend) -> torch.Tensor:
        """Return what attention adds to the states [batch, n, hidden]."""
        return self.added(attend(index, *self.projected(inputs, rotation)))

    def added(self, attended: torch.Tensor) -> torch.Tensor:
        """Return what attention [batch, heads, n, size] adds to the states [batch, n, hidden]."""
        added: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return added


class HeadLayer(nn.Module):
    """A decoder layer, whose norm before attention is left to the head where `normed` is false."""

    def __init__(self, config: Any, width: int, normed: bool) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, width)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if normed else nn.Identity()
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, inputs: torch.Tensor, residual: torch.Tensor, rotation: Any, index: int, attend: Attend
    ) -> torch.Tensor:
        """Return states [batch, n, hidden] after the layer."""
        states = residual + self.self_attn(inputs, rotation, index, attend)
        after: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return after


class SharingHead(HeadNetwork):
    """A head with an embedding and an LM head of its own, or the target's. `config`: of transformers, with the shape of its
    layers; `ids`: see `HeadNetwork`; `target`: weights [ids, hidden] of the target, by name, that the head has none of its
    own for. A subclass makes `lm_head`.
    """

    entering: tuple[str, ...] = ()  # the modules that only depth 1 runs
    lm_head: nn.Linear | None

    def __init__(self, config: Any, ids: torch.Tensor | None, target: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: int = config.vocab_size
        self.register_buffer("ids", ids)
        self._target = target  # in a mapping they are no parameters of this module
        own = EMBEDDING not in target
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own else None
        with torch.device("cpu"):
            self.rotary = LlamaRotaryEmbedding(config)

    def embedded(self, tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., hidden] of tokens [...], with the device and dtype of `like`."""
        if self.embed_tokens is not None:
            own: torch.Tensor = self.embed_tokens(tokens)
            return own
        weight = self._target[EMBEDDING]
        return functional.embedding(tokens.to(weight.device), weight).to(like)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, logits] of rows [n, hidden], by the own LM head or the target's."""
        if self.lm_head is not None:
            own: torch.Tensor = self.lm_head(rows)
            return own
        weight = self._target[LM_HEAD]
        return functional.linear(rows.to(weight), weight).to(rows)

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`."""
        logits = self._target[LM_HEAD] if self.lm_head is None else self.lm_head.weight
        return head_shape(self, self.config, logits, self.entering, ("embed_tokens", "lm_head"))


class EagleHead(SharingHead):
    """What EAGLE heads share: all depths in one pass, and a cache. A subclass says what enters the layers and what becomes
    of their output. `ahead`: 1 if the first token of a text is a row of its own, before that of base 0, which base i then
    reads with the tokens up to i + 1; else 0.
    """

    ahead = 0
    blocks: nn.ModuleList

    def __init__(self, config: Any, reading: Reading, ids: torch.Tensor | None, target: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, ids, target)
        self.reading, self.layers = reading, reading.layers

    def with_reading(self, reading: Reading) -> Self:
        """Return the same tensors, read in another way."""
        return self.changed(reading=reading, layers=reading.layers)

    @abstractmethod
    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """Return what depth 1 reads [batch, n, hidden] in place of an own state, of features [batch, n, features]."""

    @abstractmethod
    def passed(self, embedded: torch.Tensor, states: torch.Tensor, rotation: Any, attend: Attend) -> torch.Tensor:
        """Return states [batch, n, hidden] at a depth, of embedded tokens and the states at the depth before it."""

    def deeper(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what depths beyond the first read, of the tokens drafted before them [batch, n] and the states [batch, n,
        hidden] at the depth before.
        """
        return tokens, states

    def step(self, tokens: torch.Tensor, states: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return states [batch, n, hidden] at a depth, of tokens [batch, n], the states before and positions [n]."""
        return self.passed(self.embedded(tokens, states), states, self.rotary(states, places[None]), attend)

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """See `HeadNetwork`. Keys of the verified tokens are computed once, at depth 1, for all bases."""
        length, begin = ids.shape[1], first + self.ahead
        tokens = functional.pad(ids, (0, depths))
        places = torch.arange(length + self.ahead, device=ids.device)
        true: list[tuple[torch.Tensor, torch.Tensor]] = []
        own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.blocks]

        def attend_true(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            true.append((key, value))
            return causal(query, key, value)

        def attend_round(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            own[index].append((key, value))
            return by_round(query, *true[index], own[index], begin)

        states = self.step(tokens[:, 1 - self.ahead : length + 1], self.entry(features), places, attend_true)[:, begin:]
        yield states
        for depth in range(2, depths + 1):
            read = self.deeper(tokens[:, first + depth : length + depth], states)
            states = self.step(*read, places[begin:] + depth - 1, attend_round)
            yield states

    def cache(self, first: torch.Tensor | None = None) -> EagleCache:
        """Return an empty cache."""
        return EagleCache(self)


class Eagle3(EagleHead):
    """An EAGLE-3 head: several states of the target enter through `fc`, the first layer reads them beside the embedding, and
    logits come from an LM head, which belongs to it unless `target` has one.

    `width`: of a state of the target; None: there is no `fc`, and a single state enters as it is. `fc_norm`: each state has
    a norm of its own before `fc`; `input_norm`: there is one over all together.
    """

    entering = ("fc", "input_norm", "fc_norm")

    def __init__(
        self,
        config: Any,
        reading: Reading,
        *,
        width: int | None,
        ids: torch.Tensor | None = None,
        target: Mapping[str, torch.Tensor] = MappingProxyType({}),
        fc_bias: bool = False,
        input_norm: bool = False,
        fc_norm: bool = False,
    ) -> None:
        super().__init__(config, reading, ids, target)
        hidden, eps, count = config.hidden_size, config.rms_norm_eps, len(reading.layers)
        self.fc = nn.Linear(count * width, hidden, bias=fc_bias) if width else nn.Identity()
        self.input_norm = LlamaRMSNorm(count * width, eps) if width and input_norm else nn.Identity()
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in range(count)) if width and fc_norm else None
        blocks = range(config.num_hidden_layers)
        self.blocks = nn.ModuleList(HeadLayer(config, hidden if index else 2 * hidden, True) for index in blocks)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.norm = LlamaRMSNorm(hidden, eps)
        count = config.vocab_size if ids is None else len(ids)
        self.lm_head = nn.Linear(hidden, count, bias=False) if LM_HEAD not in target else None

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """See `EagleHead`."""
        features = features.to(self.dtype)
        if self.reading.norm_before_fc:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        entered: torch.Tensor = self.fc(features)
        return entered

    def passed(self, embedded: torch.Tensor, states: torch.Tensor, rotation: Any, attend: Attend) -> torch.Tensor:
        """See `EagleHead`."""
        block: Any
        for index, block in enumerate(self.blocks):
            if index == 0:
                normed = self.hidden_norm(states)
                inputs = torch.cat([block.input_layernorm(embedded), normed], -1)
                residual = normed if self.reading.norm_before_residual else states
            else:
                inputs, residual = block.input_layernorm(states), states
            states = block(inputs, residual, rotation, index, attend)
        return self.norm(states) if self.reading.norm_output else states

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `EagleHead`."""
        return self.head(states if self.reading.norm_output else self.norm(states))


class Eagle1(EagleHead):
    """An EAGLE-1, EAGLE-2 or HASS head: every depth joins the embedding and a state by `fc`, the target's after its final
    norm or its own; the first layer has no norm before attention, and logits come from the target's LM head, with no norm.
    """

    def __init__(self, config: Any, *, target: Mapping[str, torch.Tensor], fc_bias: bool = False) -> None:
        super().__init__(config, Reading((FINAL,)), None, target)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=fc_bias)
        self.blocks = nn.ModuleList(HeadLayer(config, hidden, index > 0) for index in range(config.num_hidden_layers))
        self.lm_head = None

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """See `EagleHead`."""
        return features.to(self.dtype)

    def passed(self, embedded: torch.Tensor, states: torch.Tensor, rotation: Any, attend: Attend) -> torch.Tensor:
        """See `EagleHead`."""
        states = self.fc(torch.cat([embedded, states], -1))
        block: Any
        for index, block in enumerate(self.blocks):
            states = block(block.input_layernorm(states), states, rotation, index, attend)
        return states

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `EagleHead`."""
        return self.head(states)


class EagleCache:
    """An EAGLE head at work, a `HeadCache`: in every layer the keys of verified bases, and after them those of the round, of
    which each stands where the base of its position comes to stand.
    """

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self._keys = [Keys() for _ in head.blocks]
        self._bases = 0

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        states = self._step(tokens, self._head.entry(features), self._bases)
        self._bases += tokens.shape[1]
        return states[:, -1]

    @torch.inference_mode()
    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self._step(token[:, None], state[:, None], self._bases + depth - 2)[:, 0]

    def _step(self, tokens: torch.Tensor, states: torch.Tensor, start: int) -> torch.Tensor:
        places = torch.arange(start, start + tokens.shape[1], device=states.device)

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return causal(query, *self._keys[index].put(start, key, value))

        return self._head.step(tokens, states, places, attend)


class Keys:
    """Keys and values of one layer, in tensors that double when they are full."""

    def __init__(self) -> None:
        self._full: list[torch.Tensor] = []

    def put(self, start: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write those of tokens from `start` on [batch, groups, n, size]; returns all up to them."""
        end = start + key.shape[2]
        if not self._full or end > self._full[0].shape[2]:
            grown = [each.new_empty((*each.shape[:2], max(ROOM, 2 * end), each.shape[3])) for each in (key, value)]
            for new, old in zip(grown, self._full, strict=False):
                new[:, :, :start] = old[:, :, :start]
            self._full = grown
        for full, each in zip(self._full, (key, value), strict=True):
            full[:, :, start:end] = each
        keys, values = (full[:, :, :end] for full in self._full)
        return keys, values


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return attention [batch, heads, n, size] of the last n tokens, over themselves and the tokens before them. Keys and
    values are [batch, groups, tokens, size]: each is read by heads / groups heads that follow each other.
    """
    rows, tokens = query.shape[2], key.shape[2]
    mask = None
    if 1 < rows < tokens:
        mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)
    return attention(query, key, value, attn_mask=mask, is_causal=1 < rows == tokens)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **mask: Any) -> torch.Tensor:
    """Return attention as `causal`, of every row over all keys unless a mask says otherwise."""
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **mask)


def by_round(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
    first: int,
) -> torch.Tensor:
    """Return attention [batch, heads, n, size] of rounds that begin at the bases from `first` on, at one depth: each over
    `key` and `value` [batch, groups, bases, size] of the bases up to its own, which are of verified tokens, and over what it
    drafted itself: of every depth from 2 on the keys and values [batch, groups, n, size] in `own`. This is the mask of
    training-time test (EAGLE-3, arXiv:2503.01840): causal, with a diagonal for every depth.

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
    """Return the softmax over the bases, of which the last ones are those of the rows, and over the rows' own keys, in
    float32.
    """
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
