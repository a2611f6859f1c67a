"""The kinds of draft: an independent model, the target without some of its layers, and prompt lookup."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.models.prompt_lookup import PromptLookup
from alphaprof.profiling.models.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import DraftOptions
    from alphaprof.config.profile import ProfileOptions

Draft = Model | PromptLookup


def load_drafts(options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase) -> list[Draft]:
    """All drafts of a profile, each checked against the target's vocabulary."""
    return [load_draft(name, draft, options, target, tokenizer) for name, draft in options.drafts.items()]


def load_draft(
    name: str, draft: DraftOptions, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> Draft:
    """One draft, checked against the target's vocabulary. Raises `VocabularyMismatch` and `ModelUnloadable`."""
    if draft.kind == "prompt_lookup":
        return PromptLookup(name, draft.max_ngram, target.eos, target.vocabulary, options.target.dtype)
    if draft.kind == "layer_skip":
        return layer_skip(name, target, draft.drop_layers)
    check_vocabulary(tokenizer, load_tokenizer(draft), name)
    device = draft.device if draft.device != "auto" else str(target.device)
    return load_model(name, draft, draft.dtype or options.target.dtype, device)


def layer_skip(name: str, target: Model, drop_layers: list[int]) -> Model:
    """The target without some layers (none: a copy of it). It shares every parameter and has its own KV cache.

    Raises `ModelUnloadable` where the layers do not exist or cannot be taken out.
    """
    network = target.network
    config = network.config.get_text_config()
    base = network.base_model
    layers = getattr(base, "layers", None)
    if config is not network.config or not isinstance(layers, nn.ModuleList) or _shares_kv(config):
        raise ModelUnloadable(
            f"draft {name}: layers cannot be left out of a {type(network).__name__}",
            "use kind: model; layer_skip needs a plain decoder whose layers do not share a KV cache",
        )
    if any(hasattr(module, "_hf_hook") for module in network.modules()):
        raise ModelUnloadable(
            f"draft {name}: layers cannot be left out of a target that device_map spreads",
            "load the target on one device, or use kind: model",
        )
    kept = [index for index in range(len(layers)) if index not in drop_layers]
    if max(drop_layers, default=0) >= len(layers) or not kept:
        raise ModelUnloadable(
            f"draft {name}: drop_layers {drop_layers} does not fit a target with {len(layers)} layers",
            f"name some of the layers 0 to {len(layers) - 1}, and leave at least one",
        )
    return Model(name, _without_layers(network, kept), "layer_skip", target.reference)


def _shares_kv(config: Any) -> bool:
    return bool(getattr(config, "num_kv_shared_layers", 0))


def _without_layers(network: Any, kept: list[int]) -> Any:
    """A network of the same class with the kept layers, built on the meta device and filled with the target's modules."""
    layers = network.base_model.layers
    config = copy.deepcopy(network.config)
    for key, value in network.config.to_dict().items():
        if isinstance(value, list) and len(value) == len(layers) and not key.endswith("_token_id"):  # e.g. layer_types
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    with torch.device("meta"):
        draft = type(network)(config)
    for child, module in network.base_model.named_children():
        if child != "layers":
            setattr(draft.base_model, child, module)
    draft.base_model.layers = nn.ModuleList(_renumbered(layers[old], new) for new, old in enumerate(kept))
    for child, module in network.named_children():
        if module is not network.base_model:  # the head
            setattr(draft, child, module)
    draft.generation_config = copy.deepcopy(network.generation_config)
    return draft.eval()


def _renumbered(module: nn.Module, index: int) -> nn.Module:
    """A copy of a layer that shares its parameters, with every `layer_idx` set: it is the layer's place in the cache."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = {name: child and _renumbered(child, index) for name, child in module._modules.items()}
    if hasattr(twin, "layer_idx"):
        twin.layer_idx = index  # type: ignore[assignment]
    return twin
