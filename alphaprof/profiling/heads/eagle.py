"""EAGLE heads: decoder layers on an embedding and states of the target, which later depths replace by their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from alphaprof.costs.shapes import ModelShape
from alphaprof.profiling.heads.attention import use_rounds
from alphaprof.profiling.heads.network import HeadNetwork, RoundHead, head_shape
from alphaprof.profiling.models.teacher_forced import FINAL

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
LAYERS = {"llama": LlamaDecoderLayer, "qwen2": Qwen2DecoderLayer, "qwen3": Qwen3DecoderLayer}


@dataclass(frozen=True)
class Wiring:
    """How the tensors of a head are connected. `layers`: see `HeadNetwork`; `norm_before_residual`: the first layer adds its
    attention to the normalised state, not to the state itself; `norm_output`: the next depth reads the state after the final
    norm, not before it; `norm_before_fc`: a norm over all states together comes before `fc`.
    """

    layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False


def decoder_layers(config: Any) -> nn.ModuleList:
    """Return layers of transformers as their config describes them, which attend as `attention` has it."""
    layers = nn.ModuleList(LAYERS[config.model_type](config, layer) for layer in range(config.num_hidden_layers))
    use_rounds(layers, config)
    return layers


class SharingHead(HeadNetwork):
    """A head with an embedding and an LM head of its own, or the target's. `config`: of transformers, with the shape of its
    layers; `ids`: see `HeadNetwork`; `target`: the target's embedding and LM head, by the names of their weights, where the
    head has none of its own. A subclass makes `blocks` and `lm_head`.
    """

    entering: tuple[str, ...] = ()  # the modules that only depth 1 runs
    looked_up: tuple[str, ...] = ()  # how the names of parameters begin of which a step reads a few rows
    of_logits: tuple[str, ...] = (LM_HEAD,)
    blocks: nn.ModuleList
    lm_head: nn.Linear | None

    def __init__(self, config: Any, ids: torch.Tensor | None, target: Mapping[str, Any]) -> None:
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
        """Embeddings [..., hidden] of tokens [...], with the device and dtype of `like`: the target's come out of its own
        module, which may scale its weights.
        """
        if self.embed_tokens is not None:
            own: torch.Tensor = self.embed_tokens(tokens)
            return own
        module = self._target[EMBEDDING]
        embedded: torch.Tensor = module(tokens.to(module.weight.device))
        return embedded.to(like)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, logits] of rows [n, hidden], by the own LM head or the target's."""
        if self.lm_head is not None:
            own: torch.Tensor = self.lm_head(rows)
            return own
        weight = self._target[LM_HEAD].weight
        return functional.linear(rows.to(weight), weight).to(rows)

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`."""
        logits = self._target[LM_HEAD].weight if self.lm_head is None else self.lm_head.weight
        shape = head_shape(self, self.config, logits, self.entering, ("embed_tokens", "lm_head", *self.looked_up))
        return shape.at_once() if shape is not None and self.masks is not None else shape


class EagleHead(RoundHead, SharingHead):
    """What EAGLE heads share. A subclass says what enters the layers and what becomes of their output."""

    def __init__(self, config: Any, wiring: Wiring, ids: torch.Tensor | None, target: Mapping[str, Any]) -> None:
        super().__init__(config, ids, target)
        self.wiring, self.layers = wiring, wiring.layers

    def with_wiring(self, wiring: Wiring) -> Self:
        """Return the same tensors, connected in another way."""
        return self.changed(wiring=wiring, layers=wiring.layers)

    @abstractmethod
    def passed(self, inputs_embeds: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return states [batch, n, hidden] at a depth, of embedded tokens [batch, n, hidden] and the states at the depth
        before it. `kwargs`: what the decoder layers take beside their input.
        """

    def step(
        self, tokens: torch.Tensor, hidden_states: torch.Tensor, position_ids: torch.Tensor, **keys: Any
    ) -> torch.Tensor:
        """See `RoundHead`."""
        turns = self.rotary(hidden_states, position_ids[None])
        inputs_embeds = self.embedded(tokens, hidden_states)
        return self.passed(inputs_embeds, hidden_states, attention_mask=None, position_embeddings=turns, **keys)


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
        wiring: Wiring,
        *,
        width: int | None,
        ids: torch.Tensor | None = None,
        target: Mapping[str, Any] = MappingProxyType({}),
        fc_bias: bool = False,
        input_norm: bool = False,
        fc_norm: bool = False,
    ) -> None:
        super().__init__(config, wiring, ids, target)
        hidden, eps, count = config.hidden_size, config.rms_norm_eps, len(wiring.layers)
        self.fc = nn.Linear(count * width, hidden, bias=fc_bias) if width else nn.Identity()
        self.input_norm = LlamaRMSNorm(count * width, eps) if width and input_norm else nn.Identity()
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in range(count)) if width and fc_norm else None
        self.blocks = decoder_layers(config)
        first: Any = self.blocks[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(first, name).out_features
            setattr(first, name, nn.Linear(2 * hidden, rows, bias=config.attention_bias))
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.norm = LlamaRMSNorm(hidden, eps)
        count = config.vocab_size if ids is None else len(ids)
        self.lm_head = nn.Linear(hidden, count, bias=False) if LM_HEAD not in target else None

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """See `EagleHead`."""
        features = features.to(self.dtype)
        if self.wiring.norm_before_fc:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        entered: torch.Tensor = self.fc(features)
        return entered

    def passed(self, inputs_embeds: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """See `EagleHead`."""
        first, *others = list[Any](self.blocks)
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.wiring.norm_before_residual else hidden_states
        inputs = torch.cat([first.input_layernorm(inputs_embeds), normed], -1)  # [batch, n, 2 * hidden]
        hidden_states = residual + first.self_attn(inputs, **kwargs)[0]
        hidden_states = hidden_states + first.mlp(first.post_attention_layernorm(hidden_states))
        for layer in others:
            hidden_states = layer(hidden_states, **kwargs)
        return self.norm(hidden_states) if self.wiring.norm_output else hidden_states

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `EagleHead`."""
        return self.head(states if self.wiring.norm_output else self.norm(states))


class Eagle1(EagleHead):
    """An EAGLE-1, EAGLE-2 or HASS head: every depth joins the embedding and a state by `fc`, the target's after its final
    norm or its own; the first layer has no norm before attention, and logits come from the target's LM head, with no norm.
    """

    def __init__(self, config: Any, *, target: Mapping[str, Any], fc_bias: bool = False) -> None:
        super().__init__(config, Wiring((FINAL,)), None, target)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=fc_bias)
        self.blocks = decoder_layers(config)
        self.blocks[0].input_layernorm = nn.Identity()
        self.lm_head = None

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """See `EagleHead`."""
        return features.to(self.dtype)

    def passed(self, inputs_embeds: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """See `EagleHead`."""
        hidden_states = self.fc(torch.cat([inputs_embeds, hidden_states], -1))
        for layer in self.blocks:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `EagleHead`."""
        return self.head(states)
