"""A new EAGLE-3 head for a target, to be trained; and the files of a head, as `eagle_files` reads them."""

from __future__ import annotations

import json
from typing import Any, TypeGuard, cast

import torch
from safetensors.torch import save
from torch import nn
from transformers import LlamaConfig

from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.attention import SLIDING
from alphaprof.profiling.heads.eagle import EMBEDDING, Eagle3, Wiring
from alphaprof.profiling.heads.eagle_files import FIXED_ROPE, IDS, KEPT, WINDOWS, require_layers, stored_name, usual_layers
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import FINAL, TeacherForced

STD = 0.02  # of weights that begin at random


def require_trainable(target: Model) -> None:
    """Raise `ModelUnloadable` for a target that a head cannot be trained for here."""
    require_layers(target, ModelUnloadable)
    weight: Any = target.network.get_input_embeddings().weight
    usable = is_plain(weight) and weight.shape[1] == target.network.config.get_text_config().hidden_size
    if not usable or not TeacherForced(target).chunked:
        problem = f"heads cannot be trained on {target.reference}: its embedding or states are unsupported"
        hint = "train on one device in 16 or 32 bits, or with speculators or SpecForge (docs/training.md)"
        raise ModelUnloadable(problem, hint)


def is_plain(weight: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a weight is numbers on a device, neither quantized nor left on the disk."""
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and not weight.is_meta


@torch.no_grad()
def new_head(target: Model, ids: torch.Tensor, seed: int) -> Eagle3:
    """Return a head in float32 on the target's device, of one layer in the style of Llama, that begins as the target's last
    layer after its highest recorded state, wherever shapes allow: its projections over the state (the embedding's half
    begins at random), MLP and norms, the final norm, and the rows `ids` of the LM head. The embedding is the target's.
    """
    text, base = target.network.config.get_text_config(), target.decoder
    hidden, last = text.hidden_size, base.layers[-1]
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type", "default") not in FIXED_ROPE or "rope_theta" not in rope:
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    shape = {name: value for name in names if (value := getattr(text, name, None)) is not None}
    shape = {"intermediate_size": 4 * hidden, "hidden_size": hidden, "vocab_size": target.vocabulary} | shape
    context = target.context or 131_072
    config = LlamaConfig(**shape, num_hidden_layers=1, max_position_embeddings=context, rope_parameters=dict(rope))
    blocks = text.num_hidden_layers
    layers = usual_layers(blocks)  # those that engines guess, where these are three
    if not layers[0] < layers[1] < layers[2]:
        layers = tuple(sorted({1, blocks // 2, blocks - 1}))
    embedding = {EMBEDDING: target.network.get_input_embeddings()}
    network = Eagle3(config, Wiring(layers), width=hidden, ids=ids, target=embedding)
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        if weight.dim() > 1:
            weight.normal_(std=STD, generator=generator)
    fc, block, lm_head = cast(nn.Linear, network.fc), cast(Any, network.blocks[0]), cast(nn.Linear, network.lm_head)
    fc.weight[:, -hidden:] += torch.eye(hidden)
    own = dict(block.named_parameters())
    if hasattr(getattr(last, "self_attn", None), "q_norm"):  # what they give means nothing without it
        own = {name: weight for name, weight in own.items() if ".q_proj" not in name and ".k_proj" not in name}
    for name, weight in last.named_parameters():
        if name in own and weight.dim() == 2 and is_plain(weight):
            part = own[name][:, -weight.shape[1] :]  # of projections over embedding and state the state's half
            if part.shape == weight.shape:
                part.copy_(weight)
    norms = ((last, "input_layernorm", network.hidden_norm), (base, "norm", network.norm))
    for owner, name, norm in (*norms, (last, "post_attention_layernorm", block.post_attention_layernorm)):
        theirs: Any = getattr(owner, name, None)
        gain = getattr(theirs, "weight", None)
        if is_plain(gain) and gain.shape == (hidden,) and getattr(theirs, "bias", None) is None:
            norm.weight.copy_(theirs(torch.ones_like(gain)[None])[0])  # some norms multiply by 1 + weight
    rows = target.network.get_output_embeddings().weight
    if is_plain(rows) and rows.shape[1] == hidden:
        lm_head.weight.copy_(rows[ids.to(rows.device)])
    return network.to(device=target.device, dtype=torch.float32)


def config_content(network: Eagle3, target: Model, depths: int) -> bytes:
    """Return the config.json of a head that was trained over `depths` drafts a round, as speculators and vLLM have it."""
    wiring, layers = network.wiring, network.config
    rope = dict(layers.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    shape = {key: getattr(layers, key) for key in KEPT} | {"num_hidden_layers": len(network.blocks), "rope_theta": theta}
    shape |= {"model_type": layers.model_type, "tie_word_embeddings": False}
    shape |= {"rope_scaling": rope} if kind != "default" else {}
    if SLIDING in (getattr(layers, "layer_types", None) or ()):
        shape |= {key: getattr(layers, key) for key in WINDOWS if hasattr(layers, key)}
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": network.vocabulary if network.ids is None else len(network.ids),
        "target_hidden_size": target.network.config.get_text_config().hidden_size,
        "norm_before_residual": wiring.norm_before_residual,
        "norm_before_fc": wiring.norm_before_fc,
        "norm_output": wiring.norm_output,
        "fc_norm": network.fc_norm is not None,
        "transformer_layer_config": shape,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depths}],
            "verifier": {"name_or_path": target.reference, "architectures": [type(target.network).__name__]},
        },
    }
    inner = FINAL not in wiring.layers
    content |= {IDS: list(wiring.layers)} if inner else {"use_aux_hidden_state": False}
    return (json.dumps(content, indent=1) + "\n").encode()


def weights_content(network: Eagle3, dtype: torch.dtype) -> bytes:
    """Return the tensors of a head in a dtype, as safetensors. An embedding or LM head that is the target's is left out."""
    own = {name: weight for name, weight in network.state_dict().items() if name != "ids"}
    tensors = {stored_name(name): weight.detach().to("cpu", dtype).contiguous() for name, weight in own.items()}
    if network.ids is not None:
        ids = network.ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(network.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    return save(tensors, metadata={"format": "pt"})
