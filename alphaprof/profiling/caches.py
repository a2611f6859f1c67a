"""A model with a KV cache at batch 1: feed it tokens, and take the last ones back."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import version
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations import sdpa_attention

from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.models import Model

# Whether keys and values are repeated for each query head where a single token comes with a mask: newer versions do not.
REPEATS = not hasattr(sdpa_attention, "pack_gqa")


def kept_logits(model: Model) -> dict[str, Any]:
    """What to pass to a model for the last token's logits alone, where it can: the head over a whole prompt would cost more
    memory than the prompt's keys and values.
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.network.forward).parameters else {}


class Cached:
    """A model, and keys and values of the first `length` tokens of one text.

    `width`: only the first so many logits are looked at (see `vocabulary.scored_width`). Neither mask nor positions are
    passed: without padding a model derives both from its cache, and a mask is looked at before it is used: a GPU would wait.
    """

    def __init__(self, model: Model, width: int) -> None:
        self.model = model
        self.width = width
        self.device = model.device
        self.context = model.context or sys.maxsize
        self.length = 0
        self._largest = model.vocabulary - 1
        self._cache: Any = _empty_cache(model.network.config)
        self._rewinds = False
        self._last = kept_logits(model)

    def prefill(self, ids: list[int], rewinds: bool) -> torch.Tensor:
        """Logits [1, width] behind the first tokens of the text.

        `rewinds`: whether tokens will be taken back. Raises `ModelUnloadable` where the model's cache cannot do that, or
        does not hold the tokens at all.
        """
        rows = self.last(self.tensor(ids))
        if _held(self._cache) != len(ids) or (rewinds and not _takes_back(self._cache)):
            raise ModelUnloadable(
                f"{self.model.name} ({type(self.model.network).__name__}) cannot take tokens back from its cache",
                "speculative decoding needs a model with attention layers only: recurrent states cannot be taken back",
            )
        if rewinds:
            # Sliding windows forget what falls out of them unless told that it may be needed again. Told after the prefill,
            # so that they need not keep all of it.
            self._cache.activate_past_recording()
        self._rewinds = rewinds
        return rows

    def last(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [1, width] behind the last of `ids` [tokens], which are added to the text."""
        return self._forward(ids, **self._last)[-1:]

    def each(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, width] behind each of `ids` [tokens], which are added to the text.

        Ids that the model does not have are fed as its last one: what follows them means nothing.
        """
        return self._forward(ids.clamp(max=self._largest))

    def rewind(self, count: int) -> None:
        """Take the last tokens back: once a round, even if there are none, since sliding windows are trimmed in it."""
        self.length -= count
        if self._rewinds:
            self._cache.crop(-count)

    def tensor(self, ids: list[int]) -> torch.Tensor:
        """Token ids [tokens] on the model's device."""
        return torch.tensor(ids, device=self.device)

    def _forward(self, ids: torch.Tensor, **how: Any) -> torch.Tensor:
        output = self.model.network(input_ids=ids[None], past_key_values=self._cache, use_cache=True, **how)
        self.length += len(ids)
        logits: torch.Tensor = output.logits[0, :, : self.width]
        return logits.to(self.device)  # a model that is spread over devices may end on another one


def _empty_cache(config: Any) -> Any:
    """A cache for a model with this configuration.

    In transformers 5.17 a sliding window that may be rewound returns keys and values that its mask does not cover, once
    several forwards follow each other without a rewind. In 5.23 it does not; before it layers keep the whole text, and the
    mask is the window.
    """
    cache: Any = DynamicCache(config=config)
    if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23):
        cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def _takes_back(cache: Any) -> bool:
    """Whether tokens can be taken back from a cache that holds some: a layer without any keeps its state elsewhere."""
    return bool(cache.is_croppable and cache.is_initialized)


def _held(cache: Any) -> int:
    """Tokens that a cache holds; 0 where it has no layer that could tell."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return 0
