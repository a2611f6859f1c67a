"""What decides the bytes and FLOPs of a head's steps, counted from its own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from alphaprof.costs.roofline import EXPERTS, ModelShape


def head_shape(
    module: nn.Module, config: Any, logits: torch.Tensor, entering: Sequence[str] = (), elsewhere: Sequence[str] = ()
) -> ModelShape | None:
    """The shape of a head whose steps run decoder layers as `config` describes them; None for a latent KV cache.

    `module`: its own parameters, all of which a step uses for every token, but for the modules of the names `elsewhere`
    (embeddings, and those of the logits) and those that later steps of a round leave out, `entering`. `logits` [rows,
    hidden]: the weight that its logits are computed by, whoever it belongs to. As of models, norms and biases do not count.
    """
    config = config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        return None
    matrices = {name: weight.numel() for name, weight in module.named_parameters() if weight.dim() > 1}
    used = {name: count for name, count in matrices.items() if name.partition(".")[0] not in elsewhere}
    heads = config.num_attention_heads
    experts = next((number for key in EXPERTS if (number := getattr(config, key, None))), 0)
    mixed = sum(count for name, count in used.items() if ".experts." in name)
    size = float(next(module.parameters()).element_size())
    return ModelShape(
        parameters=sum(used.values()) + logits.numel(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=len(logits),
        weight_bytes=size,
        kv_bytes=size,
        experts=experts if mixed else 0,
        experts_per_token=config.num_experts_per_tok if mixed else 0,
        expert_parameters=mixed / experts if mixed else 0.0,
        tied=True,
        first_parameters=sum(count for name, count in used.items() if name.partition(".")[0] in entering),
        last_parameters=logits.numel(),
        stored_parameters=sum(weight.numel() for weight in module.parameters()),
    )
