"""Drafters that draft all tokens of a round in one pass, from mask rows: what P-EAGLE, PARD and DFlash share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import shown
from alphaprof.profiling.heads.draft import Alternative
from alphaprof.profiling.heads.eagle import EagleHead
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles
from alphaprof.profiling.heads.network import HeadNetwork, RoundCache
from alphaprof.profiling.models.load import Model

MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM looks


class OnePass(HeadNetwork):
    """A head that drafts all tokens of a round in its first step."""

    def at_once(self, cache: OnePassCache) -> torch.Tensor:
        """See `HeadNetwork`."""
        return cache.drafted

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`."""
        shape = super().shape()  # type: ignore[safe-super]
        return None if shape is None else shape.at_once()


class OnePassCache:
    """Such a head at work: `drafted` [batch, depths, hidden], the states of the round that began last."""

    drafted: torch.Tensor

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self.drafted[:, depth - 1]


class MaskRows(OnePass, EagleHead):
    """A head whose depths beyond the first are mask rows. `mask`: their token; `drafts`: how many tokens a round drafts."""

    mask: int
    drafts: int

    def deeper(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RoundHead`: mask rows, whatever was drafted."""
        return torch.full_like(tokens, self.mask), states

    def cache(self, first: torch.Tensor | None = None) -> MaskCache:
        """Return an empty cache."""
        return MaskCache(self, first if self.ahead else None)


class MaskCache(OnePassCache, RoundCache):
    """Mask rows at work: they run behind the verified rows, and the next round writes over their keys."""

    _head: MaskRows

    def __init__(self, head: MaskRows, first: torch.Tensor | None) -> None:
        super().__init__(head)
        self._first = first

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        if self._first is not None and not self.length:
            tokens = torch.cat([self._first[:, None], tokens], 1)
        entered, more = self._head.entry(features), self._head.drafts - 1
        masks = self._head.deeper(tokens[:, :1].expand(-1, more), entered[:, :1].expand(-1, more, -1))
        rows = torch.cat([tokens, masks[0]], 1), torch.cat([entered, masks[1]], 1)
        self.drafted = self._step(*rows, self.length)[:, tokens.shape[1] - 1 :]
        self.length += tokens.shape[1]
        return self.drafted[:, 0]


def mask_of(files: HeadFiles) -> int:
    """Return the mask token that the files of a parallel drafter name. Raises `ModelUnloadable`."""
    given = next((files.config[key] for key in MASKS if files.config.get(key) is not None), None)
    if type(given) is not int or given < 0:
        raise files.refused(f"config.json has no valid mask token: {shown(given)}", f"{COMPLETE}: mask_token_id")
    layers = files.config.get("transformer_layer_config") or files.config
    require_mask(files, given, layers.get("vocab_size"))
    return given


def require_mask(files: HeadFiles, mask: int, vocabulary: object) -> None:
    """Raise `ModelUnloadable` for a mask token that the vocabulary does not have."""
    if not isinstance(vocabulary, int) or not 0 <= mask < vocabulary:
        raise files.refused(f"mask token {mask} is not in its vocabulary of {shown(vocabulary)}", COMPLETE)


def other_masks(network: Any, target: Model, key: str, depth: int = 2) -> Iterator[Alternative]:
    """Yield the readings with another `mask` token: id 0, and the target's first EOS. `key`: of config.json; `depth`: of the
    first mask row.
    """
    for token in dict.fromkeys((0, *target.eos[:1])):
        if token != network.mask:
            setting = f"set {key}: {token} in its config.json"
            yield Alternative(f"mask token {token}", setting, network.changed(mask=token), depth)
