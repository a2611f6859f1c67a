"""P-EAGLE heads: EAGLE-3 layers that draft all tokens of a round in one pass, depths beyond the first from mask tokens.

Depth d of a round reads what is verified and d - 1 mask rows before it, and nothing that was drafted or that depends on γ.
Sources: speculators 0.9.0 (models/peagle), vLLM 0.32 (v1/spec_decode/llm_base_proposer.py, models/llama_eagle3.py).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alphaprof.costs.roofline import ModelShape
from alphaprof.errors import shown
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.eagle import Eagle3, EagleCache, Reading
from alphaprof.profiling.heads.eagle_files import (
    CHECKPOINT,
    P_EAGLE_KINDS,
    alternatives,
    described,
    eagle3_format,
    eagle3_network,
    head_of,
    reading_as,
    require_verifier,
    words_of,
)
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import PEagleDraft
    from alphaprof.config.profile import ProfileOptions

MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM looks


class PEagle(Eagle3):
    """A P-EAGLE head. `mask`: the token of its mask rows, whose state is `mask_hidden`; `drafts`: rows of a round."""

    def __init__(self, config: Any, reading: Reading, *, mask: int, drafts: int, width: int, **options: Any) -> None:
        super().__init__(config, reading, width=width, **options)
        self.mask, self.drafts = mask, drafts
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, len(reading.layers) * width))

    def with_mask(self, mask: int) -> PEagle:
        """The same tensors with another mask token."""
        twin = copy.copy(self)
        twin.mask = mask
        return twin

    def deeper(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EagleHead`: mask rows, whatever was drafted."""
        return torch.full_like(tokens, self.mask), self.entry(self.mask_hidden).expand_as(states)

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`. All of it is used once a round."""
        shape = super().shape()
        return None if shape is None else replace(shape, first_parameters=shape.parameters)

    def cache(self, first: torch.Tensor | None = None) -> PEagleCache:
        """An empty cache."""
        return PEagleCache(self)


class PEagleCache(EagleCache):
    """A P-EAGLE head at work: mask rows run beside the verified bases, and the next round writes over their keys."""

    _head: PEagle

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        entered, more = self._head.entry(features), self._head.drafts - 1
        masks = self._head.deeper(tokens[:, :1].expand(-1, more), entered[:, :1].expand(-1, more, -1))
        rows = torch.cat([tokens, masks[0]], 1), torch.cat([entered, masks[1]], 1)
        self._states = self._step(*rows, self._bases)[:, tokens.shape[1] - 1 :]
        self._bases += tokens.shape[1]
        return self._states[:, 0]

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self._states[:, depth - 1]


def mask_of(files: HeadFiles) -> int:
    """The mask token that the files of a parallel drafter name. Raises `ModelUnloadable`."""
    given = next((files.config[key] for key in MASKS if files.config.get(key) is not None), None)
    if type(given) is not int or given < 0:
        raise files.refused(f"its config.json names the mask token {shown(given)}", f"{COMPLETE}: mask_token_id")
    layers = files.config.get("transformer_layer_config") or files.config
    require_mask(files, given, layers.get("vocab_size"))
    return given


def require_mask(files: HeadFiles, mask: int, vocabulary: object) -> None:
    """Raise `ModelUnloadable` for a mask token that the vocabulary does not have."""
    if not isinstance(vocabulary, int) or not 0 <= mask < vocabulary:
        raise files.refused(f"its mask token is {mask}, of a vocabulary of {shown(vocabulary)}", COMPLETE)


def load_p_eagle(
    name: str, draft: PEagleDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`."""
    head = head_of(name, draft, target, partial(eagle3_format, kinds=P_EAGLE_KINDS))
    require_verifier(head.files, target, tokenizer)
    config, mask = target.network.config.get_text_config(), mask_of(head.files)
    reading = reading_as(CHECKPOINT, head, config)
    made = partial(PEagle, mask=mask, drafts=draft.depths or max(options.gammas))
    network = eagle3_network(head, reading, target, DTYPES[draft.dtype or target.dtype_name], made)
    words = words_of(CHECKPOINT, head, reading) | {"fed back": "nothing: mask rows", "mask token": str(mask)}
    readings = [item for item in alternatives(network, head, config) if item.depth == 1]
    others = dict.fromkeys(token for token in (0, target.eos[0] if target.eos else 0) if token != mask)
    readings += [
        Alternative(f"mask token {token}", f"set mask_token_id: {token} in its config.json", network.with_mask(token), 2)
        for token in others
    ]
    return HeadDraft.of(
        name,
        draft,
        options.gammas,
        target,
        network,
        method="eagle3",
        context=head.context,
        in_one_step=True,
        parallel=True,
        reading=words | described(head, network),
        engines=("vLLM",),
        alternatives=readings,
    )
