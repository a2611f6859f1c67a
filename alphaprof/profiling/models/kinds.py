"""Kinds of drafts without a network on the target's states: an independent model, the target without some layers, lookup."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from alphaprof.config.options import ModelDraft
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.models.draft import Arrays, Draft
from alphaprof.profiling.models.identity import check_vocabulary, decoder_of
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.models.quantised import kernels_of
from alphaprof.profiling.models.teacher_forced import TeacherForced
from alphaprof.run.manifest import DraftFacts
from alphaprof.run.schema import PROPOSED_LIMIT
from alphaprof.totals.lookup import Index, lookup_facts, matches, offers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import DraftOptions, LayerSkipDraft, PromptLookupDraft
    from alphaprof.config.profile import ProfileOptions


@dataclass(frozen=True)
class DraftModel(Model):
    """A draft that is a causal language model; one that has `layers` is made of these of the target."""

    @property
    def models(self) -> tuple[Model, ...]:
        """Itself."""
        return (self,)

    def facts(self) -> DraftFacts:
        """Return what the manifest keeps of it."""
        return DraftFacts(
            **vars(super().facts()),
            has_distribution=True,
            has_steps=True,
            shares_target_weights=self.layers is not None,
        )

    def teacher_forced(self, target: TeacherForced) -> TeacherForced:
        """Return its own, which goes on from the target's states where its first layers are the target's."""
        return TeacherForced(self, target)

    def columns(self, ids: np.ndarray[Any, Any], prompt: int) -> Arrays:
        """`proposed`: until its context is full, and none after a token that it does not have."""
        foreign = np.flatnonzero(ids[:-1] >= self.vocabulary)
        end = int(foreign[0]) if len(foreign) else len(ids) + PROPOSED_LIMIT
        end = end if self.context is None else min(end, self.context)
        return {"proposed": np.clip(end - np.arange(prompt - 1, len(ids) - 1), 0, PROPOSED_LIMIT).astype(np.int16)}


@dataclass(frozen=True)
class PromptLookup:
    """A prompt lookup draft with its name in the run, for a target with these EOS ids, number of ids and dtype. `padded`: it
    takes the rightmost match, and all rounds draft as many tokens.
    """

    name: str
    max_ngram: int
    eos: tuple[int, ...]
    vocabulary: int
    dtype: str
    min_ngram: int = 1
    padded: bool = False

    @property
    def index(self) -> Index:
        """An index of a text that is empty so far."""
        return Index(self.max_ngram, self.min_ngram, self.padded)

    def columns(self, ids: np.ndarray[Any, Any], prompt: int) -> Arrays:
        """Of the proposal at every position the first token (-1: no match), how many tokens it has, at most PROPOSED_LIMIT,
        and how many of them are what the text goes on with.
        """
        tokens, start = ids.astype(np.int64), np.zeros(1, dtype=np.int64)
        places, _ = matches(tokens, start, self.max_ngram, self.min_ngram, self.padded)
        names = ("draft_top", "proposed", "accepted_run")
        return dict(zip(names, offers(tokens, start, places, self.padded)[:, prompt:], strict=True))

    def proposal(self, tokens: list[int], place: int | None, end: int, most: int = PROPOSED_LIMIT) -> list[int]:
        """Return at most `most` tokens, those from index `place` up to `end`, the length of the text so far; none if `place`
        is None. Filled up to `most` with the last token if `padded`.
        """
        found = [] if place is None else tokens[place : min(place + most, end)]
        return found + [tokens[end - 1]] * (most - len(found)) if self.padded else found

    def search(self, tokens: list[int]) -> float:
        """Return seconds that one search of a text takes when it is indexed up to its last token."""
        index = self.index
        for end in range(1, len(tokens)):
            index.add(tokens, end)
        start = time.perf_counter()
        self.proposal(tokens, index.add(tokens, len(tokens)), len(tokens))
        return time.perf_counter() - start

    @property
    def models(self) -> tuple[Model, ...]:
        """None."""
        return ()

    def teacher_forced(self, target: TeacherForced) -> None:
        """None: it proposes tokens, not distributions."""

    def facts(self) -> DraftFacts:
        """Return what the manifest keeps of this draft."""
        return lookup_facts(self.max_ngram, self.min_ngram, self.padded, self.vocabulary, self.eos, self.dtype)


def load_drafts(options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase) -> list[Draft]:
    """Return all drafts of a profile, each checked against the target's vocabulary."""
    return [load_draft(name, draft, options, target, tokenizer) for name, draft in options.drafts.items()]


def check_tokenizers(options: ProfileOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `VocabularyMismatch` for a draft model whose tokenizer is not the target's; no weights are loaded."""
    for name, draft in options.drafts.items():
        if isinstance(draft, ModelDraft):
            check_vocabulary(tokenizer, load_tokenizer(draft), name, draft.special_tokens)


def load_draft(
    name: str, draft: DraftOptions, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> Draft:
    """Return one draft, by the function that its options name as `loader`: checked against the target's vocabulary. Raises
    `VocabularyMismatch` and `ModelUnloadable`.
    """
    module, _, function = draft.loader.partition(":")
    loaded: Draft = getattr(import_module(module), function)(name, draft, options, target, tokenizer)
    return loaded


def load_prompt_lookup(
    name: str, draft: PromptLookupDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> PromptLookup:
    """Return a loader of `load_draft`. Without `match` it looks up as vLLM does: on this CPU leftmost, where the profile has
    one started here, else rightmost.
    """
    on_cpu = options.vllm is not None and options.vllm.python is not None and target.device.type == "cpu"
    padded = (draft.match or ("leftmost" if on_cpu else "rightmost")) == "rightmost"
    facts = (target.eos, target.vocabulary, target.dtype_name)
    return PromptLookup(name, draft.max_ngram, *facts, draft.min_ngram, padded)


def load_layer_skip(
    name: str, draft: LayerSkipDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> DraftModel:
    """Return a loader of `load_draft`."""
    return layer_skip(name, target, draft.drop_layers)


def load_draft_model(
    name: str, draft: ModelDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> DraftModel:
    """Return a loader of `load_draft`."""
    device = draft.device if draft.device != "auto" else str(target.device)
    return DraftModel(**vars(load_model(name, draft, draft.dtype or target.dtype_name, device)))


def layer_skip(name: str, target: Model, drop_layers: list[int]) -> DraftModel:
    """Return the target without some layers (none: a copy of it). It shares every parameter and has its own KV cache. Raises
    `ModelUnloadable` where the layers do not exist or cannot be taken out.
    """
    network, config = target.network, target.network.config.get_text_config()
    layers: Any = getattr(target.decoder, "layers", None)
    shares_kv = bool(getattr(config, "num_kv_shared_layers", 0))
    is_plain = config is network.config and isinstance(layers, nn.ModuleList) and not shares_kv
    is_plain = is_plain and target.decoder in network.children()
    if not is_plain or any(hasattr(module, "_hf_hook") for module in network.modules()):
        raise ModelUnloadable(
            f"draft {name}: layers cannot be left out of this {type(network).__name__}",
            "use kind: model; layer_skip needs a plain decoder on one device whose layers do not share a KV cache",
        )
    kept = [index for index in range(len(layers)) if index not in drop_layers]
    if max(drop_layers, default=0) >= len(layers) or not kept:
        raise ModelUnloadable(
            f"draft {name}: drop_layers {drop_layers} does not fit a target with {len(layers)} layers",
            f"name some of the layers 0 to {len(layers) - 1}, and leave at least one",
        )
    left = _without_layers(network, kept)
    quantised = target.quantised and replace(target.quantised, kernels=kernels_of(left))
    made, layers = (name, left, "layer_skip", target.reference), tuple(kept)
    return DraftModel(*made, quantised=quantised, files=target.files, layers=layers)


def _without_layers(network: Any, kept: list[int]) -> Any:
    """Return a network of the same class with the kept layers, built on the meta device and filled with the target's
    modules.
    """
    decoder = decoder_of(network)
    layers = decoder.layers
    config = copy.deepcopy(network.config)
    for key, value in network.config.to_dict().items():
        if isinstance(value, list) and len(value) == len(layers) and not key.endswith("_token_id"):  # e.g. layer_types
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    with torch.device("meta"):
        draft = type(network)(config)
    for child, module in decoder.named_children():
        setattr(decoder_of(draft), child, module)
    decoder_of(draft).layers = nn.ModuleList(_renumbered(layers[old], new) for new, old in enumerate(kept))
    for child, module in network.named_children():
        if module is not decoder:  # the head
            setattr(draft, child, module)
    draft.generation_config = copy.deepcopy(network.generation_config)
    return draft.eval()


def _renumbered(module: nn.Module, index: int) -> nn.Module:
    """Return a copy of a layer that shares its parameters, with every `layer_idx` set: it is the layer's place in the
    cache.
    """
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = {name: child and _renumbered(child, index) for name, child in module._modules.items()}
    if hasattr(twin, "layer_idx"):
        twin.layer_idx = index  # type: ignore[assignment]
    return twin
