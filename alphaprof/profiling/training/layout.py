"""The files of a trained head: the layout of speculators, which vLLM loads, with all written out that engines guess."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from safetensors.torch import save

from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.heads.formats import IDS, KEPT
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import FINAL

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def config_content(network: Eagle3, target: Model, depths: int) -> bytes:
    """The config.json of a head that was trained over `depths` drafts a round."""
    reading, layers = network.reading, network.config
    rope = dict(layers.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    shape = {key: getattr(layers, key) for key in KEPT} | {"num_hidden_layers": len(network.blocks), "rope_theta": theta}
    shape |= {"model_type": layers.model_type, "tie_word_embeddings": False}
    if kind != "default":
        shape["rope_scaling"] = rope
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": network.vocabulary if network.ids is None else len(network.ids),
        "target_hidden_size": target.network.config.get_text_config().hidden_size,
        "norm_before_residual": reading.norm_before_residual,
        "norm_before_fc": reading.norm_before_fc,
        "norm_output": reading.norm_output,
        "fc_norm": network.fc_norm is not None,
        "transformer_layer_config": shape,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depths}],
            "verifier": {"name_or_path": target.reference, "architectures": [type(target.network).__name__]},
        },
    }
    inner = FINAL not in reading.layers
    content |= {IDS: list(reading.layers)} if inner else {"use_aux_hidden_state": False}
    return (json.dumps(content, indent=1) + "\n").encode()


def weights_content(network: Eagle3, dtype: torch.dtype) -> bytes:
    """The tensors of a head in a dtype, as safetensors. An embedding or LM head that is the target's is left out."""
    tensors: dict[str, Any] = {}
    for name, weight in network.state_dict().items():
        if name != "ids":
            tensors[stored_name(name)] = weight.detach().to("cpu", dtype).contiguous()
    if network.ids is not None:
        ids = network.ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(network.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    return save(tensors, metadata={"format": "pt"})


def stored_name(name: str) -> str:
    """What the files of speculators call a tensor of `Eagle3`."""
    if name.startswith("hidden_norm."):
        return f"layers.0.{name}"
    return re.sub(r"^blocks\.", "layers.", name)
