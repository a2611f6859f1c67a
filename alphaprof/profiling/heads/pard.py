"""PARD draft models: causal language models that draft all tokens of a round in one pass, from mask tokens.

They read tokens alone, none of the target's states. Depth d of a round reads the text and d - 1 mask tokens behind it, and
nothing that was drafted or that depends on γ. Sources: arXiv:2504.18583, vLLM 0.32 (v1/spec_decode/llm_base_proposer.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from alphaprof.costs.roofline import ModelShape
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, EagleCache, EagleHead, HeadLayer, Reading, by_round, causal
from alphaprof.profiling.heads.eagle_files import OTHER_TARGET, layer_config
from alphaprof.profiling.heads.files import HeadFiles, files_of
from alphaprof.profiling.heads.p_eagle import mask_of
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import FINAL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import PardDraft
    from alphaprof.config.profile import ProfileOptions

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # and whether layers are those of Qwen3
PREFIX = "model."


class Pard(EagleHead):
    """A PARD model, which reads no state of the target. `mask`: its mask token; `drafts`: how many tokens a round drafts."""

    def __init__(self, config: Any, *, mask: int, drafts: int) -> None:
        super().__init__(config, Reading((FINAL,)), None, MappingProxyType({}))
        self.mask, self.drafts = mask, drafts
        self.blocks = nn.ModuleList(HeadLayer(config, config.hidden_size, True) for _ in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def with_mask(self, mask: int) -> Pard:
        """The same tensors with another mask token."""
        twin = copy.copy(self)
        twin.mask = mask
        return twin

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """See `EagleHead`: nothing of them."""
        return features[..., :1].to(self.dtype)

    def deeper(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EagleHead`: mask tokens, whatever was drafted."""
        return torch.full_like(tokens, self.mask), states

    def passed(self, embedded: torch.Tensor, states: torch.Tensor, rotation: Any, attend: Any) -> torch.Tensor:
        """See `EagleHead`."""
        states = embedded
        block: Any
        for index, block in enumerate(self.blocks):
            states = block(block.input_layernorm(states), states, rotation, index, attend)
        return states

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `EagleHead`."""
        return self.head(self.norm(states))

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """See `HeadNetwork`. Base i reads the tokens up to i + 1, the first one of the text among them."""
        length = ids.shape[1]
        tokens = functional.pad(ids, (0, 1))
        places = torch.arange(length + 1, device=ids.device)
        nothing = self.entry(features)
        true: list[tuple[torch.Tensor, torch.Tensor]] = []
        own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.blocks]

        def attend_true(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            true.append((key, value))
            return causal(query, key, value)

        def attend_round(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            own[index].append((key, value))
            return by_round(query, *true[index], own[index], first + 1)

        states = self.step(tokens, functional.pad(nothing, (0, 0, 0, 1)), places, attend_true)[:, first + 1 :]
        yield states
        masks = torch.full_like(ids[:, first:], self.mask)
        for depth in range(2, depths + 1):
            states = self.step(masks, states, places[first + 1 :] + depth - 1, attend_round)
            yield states

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`. All of it is used once a round."""
        shape = super().shape()
        return None if shape is None else replace(shape, first_parameters=shape.parameters)

    def cache(self, first: torch.Tensor | None = None) -> PardCache:
        """An empty cache."""
        return PardCache(self, first)


class PardCache(EagleCache):
    """A PARD model at work: mask tokens run behind the verified ones, and the next round writes over their keys."""

    _head: Pard

    def __init__(self, head: Pard, first: torch.Tensor | None) -> None:
        super().__init__(head)
        self._first = first

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        read = tokens if self._bases or self._first is None else torch.cat([self._first[:, None], tokens], 1)
        masks = torch.full_like(tokens[:, :1], self._head.mask).expand(-1, self._head.drafts - 1)
        rows = torch.cat([read, masks], 1)
        self._states = self._step(rows, self._head.entry(features[:, :1]).expand(-1, rows.shape[1], -1), self._bases)
        self._states = self._states[:, read.shape[1] - 1 :]
        self._bases += read.shape[1]
        return self._states[:, 0]

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self._states[:, depth - 1]


def load_pard(
    name: str, draft: PardDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`."""
    files = files_of(name, draft.own_model)
    (architecture,) = (files.config.get("architectures") or [""])[:1]
    if architecture not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise files.refused(f"it is a {architecture or 'model of no architecture'}", f"PARD models that are known: {known}")
    config, mask = layer_config(files, files.config, ARCHITECTURES[architecture]), mask_of(files)
    if config.vocab_size != target.vocabulary:
        problem = f"it is for {config.vocab_size} ids, and {target.reference} has {target.vocabulary}"
        raise files.refused(problem, OTHER_TARGET)
    network = _network(
        files, config, mask, draft.depths or max(options.gammas), target, DTYPES[draft.dtype or target.dtype_name]
    )
    others = dict.fromkeys(token for token in (0, *target.eos[:1]) if token != mask)
    return HeadDraft.of(
        name,
        draft,
        options.gammas,
        target,
        network,
        method="draft_model",
        context=config.max_position_embeddings - 1,  # the anchor is a row of its own
        in_one_step=True,
        parallel=True,
        reading={"layout": f"transformers, {architecture}", "mask token": str(mask), "target states": "none"},
        engines=("vLLM",),
        alternatives=[
            Alternative(f"mask token {token}", f"set pard_token: {token} in its config.json", network.with_mask(token), 2)
            for token in others
        ],
    )


def _network(files: HeadFiles, config: Any, mask: int, drafts: int, target: Model, dtype: torch.dtype) -> Pard:
    """The model on the target's device. Raises `ModelUnloadable` for tensors that are missing, unused, of other shapes,
    quantised or not finite.
    """
    with torch.device("meta"):
        network = Pard(config, mask=mask, drafts=drafts)
    tied = LM_HEAD not in files.tensors
    names = {key: PREFIX + key.replace("blocks.", "layers.") for key in network.state_dict() if key not in ("ids", LM_HEAD)}
    names |= {LM_HEAD: names[EMBEDDING] if tied else LM_HEAD}
    files.require({names[key]: tuple(weight.shape) for key, weight in network.state_dict().items() if key != "ids"})
    weights = {key: files.loaded(stored, dtype) for key, stored in names.items()}
    if tied:
        weights[LM_HEAD] = weights[EMBEDDING]
    network.load_state_dict(weights, assign=True)
    return network.to(target.device).eval().requires_grad_(False)
