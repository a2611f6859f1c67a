"""P-EAGLE heads: EAGLE-3 layers that draft all tokens of a round in one pass, depths beyond the first from mask tokens.

Depth d of a round reads what is verified and d - 1 mask rows before it, and nothing that was drafted or that depends on γ.
Sources: speculators 0.9.0 (models/peagle), vLLM 0.32 (v1/spec_decode/llm_base_proposer.py, models/llama_eagle3.py), and
SpecForge of August 2026 (modeling/draft/peagle.py, training/model_utils.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.eagle import Eagle3, Wiring
from alphaprof.profiling.heads.eagle_files import (
    CHECKPOINT,
    SPECFORGE,
    EagleFormat,
    alternatives,
    described,
    doubts_of,
    eagle3_format,
    eagle3_network,
    head_of,
    require_verifier,
    wiring_as,
    words_of,
)
from alphaprof.profiling.heads.masks import MASKS, mask_of, other_masks
from alphaprof.profiling.heads.network import MaskRows
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model
from alphaprof.run.notes import note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import PEagleDraft
    from alphaprof.config.profile import ProfileOptions


class PEagle(Eagle3):
    """A P-EAGLE head, whose mask rows have the state `mask_hidden`."""

    def __init__(self, config: Any, wiring: Wiring, *, masks: MaskRows, width: int, **options: Any) -> None:
        super().__init__(config, wiring, width=width, **options)
        self.masks = masks
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, len(wiring.layers) * width))

    def deeper(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RoundHead`."""
        tokens, states = super().deeper(tokens, states)
        return tokens, self.entry(self.mask_hidden).expand_as(states)


def load_p_eagle(
    name: str, draft: PEagleDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    head = head_of(name, draft, target, eagle3_format)
    require_verifier(head.files, target, tokenizer)
    config, usual = target.network.config.get_text_config(), _usual_mask(head, tokenizer)
    mask = mask_of(head.files) if usual is None else usual
    wiring = wiring_as(CHECKPOINT, head, config)
    doubts = doubts_of(name, head, wiring)
    if usual is not None:
        doubt = f"the files of draft {name} name no mask token; SpecForge's default for this tokenizer is {usual}"
        remedy = "set mask_token_id in its config.json to the token that it was trained with"
        doubts += (note("wiring", doubt=doubt, remedy=remedy),)
    made = partial(PEagle, masks=MaskRows(mask, draft.depths or max(options.gammas)))
    network = eagle3_network(head, wiring, target, DTYPES[draft.dtype or target.dtype_name], made)
    words = words_of(head, wiring) | {"fed back": "nothing: mask rows", "mask token": str(mask)}
    readings = [item for item in alternatives(network, head, config) if item.depth == 1]
    return HeadDraft.of(
        name,
        draft,
        options.gammas,
        target,
        network,
        context=head.context,
        files=head.files.paths,
        reading=words | described(head, network),
        engines=("vLLM",) if head.layout != SPECFORGE else (),
        alternatives=[*readings, *other_masks(network, target, "mask_token_id")],
        doubts=doubts,
    )


def _usual_mask(head: EagleFormat, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the default mask token of SpecForge's trainer, for a SpecForge head whose config.json names no mask token: the
    tokenizer's own, the first id without a token, or the first of pad, EOS and UNK that there is.
    """
    if head.layout != SPECFORGE or any(head.settings.get(key) is not None for key in MASKS):
        return None
    ids = (getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos", "unk"))
    tokens = (tokenizer.mask_token_id, len(tokenizer), *ids)
    return next((token for token in tokens if token is not None and token < head.layers.vocab_size), None)
