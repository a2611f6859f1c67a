"""PARD draft models: causal language models that draft all tokens of a round in one pass, from mask tokens.

They read tokens alone, none of the target's states. Depth d of a round reads the text and d - 1 mask tokens behind it, and
nothing that was drafted or that depends on γ. Sources: arXiv:2504.18583, vLLM 0.32 (v1/spec_decode/llm_base_proposer.py).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, EagleHead, Wiring, decoder_layers
from alphaprof.profiling.heads.eagle_files import OTHER_TARGET, layer_config
from alphaprof.profiling.heads.files import HeadFiles, files_of
from alphaprof.profiling.heads.masks import mask_of, other_masks
from alphaprof.profiling.heads.network import MaskRows
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import FINAL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import PardDraft
    from alphaprof.config.profile import ProfileOptions

ARCHITECTURES = {"LlamaForCausalLM": LlamaConfig, "Qwen2ForCausalLM": Qwen2Config, "Qwen3ForCausalLM": Qwen3Config}
PREFIX = "model."


class Pard(EagleHead):
    """A PARD model, which reads no state of the target."""

    ahead = 1

    def __init__(self, config: Any, masks: MaskRows) -> None:
        super().__init__(config, Wiring((FINAL,)), None, MappingProxyType({}))
        self.masks = masks
        self.blocks = decoder_layers(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """See `RoundHead`: nothing of them is read."""
        return features[..., :1].to(self.dtype)

    def passed(self, inputs_embeds: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """See `EagleHead`."""
        hidden_states = inputs_embeds
        for layer in self.blocks:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `EagleHead`."""
        return self.head(self.norm(states))


def load_pard(
    name: str, draft: PardDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    files = files_of(name, draft.own_model, draft.kind)
    (architecture,) = (files.config.get("architectures") or [""])[:1]
    if architecture not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise files.refused(f"it is a {architecture or 'model of no architecture'}", f"use a supported PARD model: {known}")
    config, mask = layer_config(files, files.config, ARCHITECTURES[architecture]), mask_of(files)
    if config.vocab_size != target.vocabulary:
        problem = f"it has {config.vocab_size} ids, but {target.reference} has {target.vocabulary}"
        raise files.refused(problem, OTHER_TARGET)
    masks = MaskRows(mask, draft.depths or max(options.gammas))
    network = _network(files, config, masks, target, DTYPES[draft.dtype or target.dtype_name])
    return HeadDraft.of(
        name,
        draft,
        options.gammas,
        target,
        network,
        context=config.max_position_embeddings - 1,  # the anchor is a row of its own
        files=files.paths,
        reading={"layout": f"transformers, {architecture}", "mask token": str(mask), "target states": "none"},
        engines=("vLLM",),
        alternatives=list(other_masks(network, target, "pard_token")),
    )


def _network(files: HeadFiles, config: Any, masks: MaskRows, target: Model, dtype: torch.dtype) -> Pard:
    """Return the model on the target's device. Raises `ModelUnloadable` for tensors that are missing, unused, of other
    shapes, quantised or not finite.
    """
    with torch.device("meta"):
        network = Pard(config, masks)
    tied = LM_HEAD not in files.tensors
    names = {key: PREFIX + key.replace("blocks.", "layers.") for key in network.state_dict() if key not in ("ids", LM_HEAD)}
    names |= {LM_HEAD: names[EMBEDDING] if tied else LM_HEAD}
    files.require({names[key]: tuple(weight.shape) for key, weight in network.state_dict().items() if key != "ids"})
    weights = {key: files.loaded(stored, dtype) for key, stored in names.items()}
    if tied:
        weights[LM_HEAD] = weights[EMBEDDING]
    network.load_state_dict(weights, assign=True)
    return network.to(target.device).eval().requires_grad_(False)
