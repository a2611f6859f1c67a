"""What transformers keeps to itself, and has no public way for: the one place that a new version of it may break."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from transformers import modeling_layers

RELEASE = tuple(map(int, version("transformers").split(".")[:2]))
CACHE = "cache" if RELEASE >= (5, 24) else "past_key_values"  # what a forward calls its KV cache


def attention_of(config: Any) -> str:
    """Return the name of how layers with a config compute attention; None where it does not say."""
    return str(getattr(config, "_attn_implementation", None))


def attend_by(config: Any, name: str) -> None:
    """Have layers with a config compute attention by this function of transformers' registry."""
    config._attn_implementation = name


def kept_in_float32(network: Any) -> set[str]:
    """Return the names of modules whose weights a network keeps in float32, whatever its dtype."""
    return {*(network._keep_in_fp32_modules or ()), *(network._keep_in_fp32_modules_strict or ())}


def mtp_model(
    owner: Any, count: int, tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Return a MtpModel of `count` modules of a target, filled with tensors of its checkpoint by name, and what transformers
    says of loading them: missing, unexpected and mismatched names.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import ContextManagers

    with ContextManagers(modeling_layers.MtpModel.get_init_context(dtype, False, False, None)):
        mtp = modeling_layers.MtpModel(owner, count)
    how = LoadStateDictConfig(weight_mapping=mtp.get_weight_conversions(owner), device_map={"": device}, dtype=dtype)
    loaded, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=dict(tensors), load_config=how)
    return mtp, loaded


def mtp_logits(mtp: Any, states: torch.Tensor) -> torch.Tensor:
    """Return logits [n, vocabulary] of states [n, hidden] by the LM head that a MtpModel shares with its target."""
    logits: torch.Tensor = mtp._project_to_logits(states)
    return logits
