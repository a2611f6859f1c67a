"""Mask tokens of drafters that draft all tokens of a round in one pass: what their files say, and what else it could be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from alphaprof.errors import shown
from alphaprof.profiling.heads.draft import Alternative
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles
from alphaprof.profiling.models.load import Model

MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM looks


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
    """Yield the readings with another mask token: id 0, and the target's first EOS. `key`: of config.json; `depth`: of the
    first mask row.
    """
    for token in dict.fromkeys((0, *target.eos[:1])):
        if token != network.masks.token:
            setting = f"set {key}: {token} in its config.json"
            changed = network.changed(masks=replace(network.masks, token=token))
            yield Alternative(f"mask token {token}", setting, changed, depth)
