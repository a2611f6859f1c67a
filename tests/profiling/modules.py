"""Tiny random targets with MTP modules in the layouts that are published, and rounds of a head at work on a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, modeling_layers

MtpModel: Any = getattr(modeling_layers, "MtpModel", None)
NEEDS_MTP = pytest.mark.skipif(MtpModel is None, reason="this transformers has no MTP modules")
VOCABULARY = 7  # so few that drafts are often right by chance
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
GLM = {"head_dim": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1} | GROUPS
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = {"num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1} | GROUPS | LATENT


def target(kind: str, seed: int = 0, **settings: Any) -> Any:
    """A random float32 causal language model whose weights are wide enough that its text varies."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **SIZES | settings)
    network = AutoModelForCausalLM.from_config(config).eval().float().requires_grad_(False)
    spread(network)
    network.generation_config = GenerationConfig(pad_token_id=0)
    return network


def spread(network: torch.nn.Module, std: float = 0.4) -> None:
    """Draws all matrices, and makes norms differ from each other."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=std)
            elif "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)


def modules_of(network: Any, count: int, seed: int = 0) -> Any:
    """Random MTP modules of transformers, on a target; the target stays as it is."""
    torch.manual_seed(seed + 1000)
    modules = MtpModel(network, count).eval().requires_grad_(False)
    spread(modules.layers)
    return modules


def published(modules: Any, layers: int) -> dict[str, torch.Tensor]:
    """Tensors of MTP modules under the names that DeepSeek-V3 and GLM-4.5 give them, after `layers` of the target."""
    names = {"post_norm": "shared_head.norm", "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
    tensors = {}
    for name, weight in modules.layers.state_dict().items():
        number, part, rest = name.split(".", 2)
        place = f"model.layers.{layers + int(number)}."
        if part != "mtp_block":
            tensors[f"{place}{names[part]}.{rest}"] = weight
        elif rest.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                for half, matrix in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[f"{place}{rest.replace('gate_up_proj', str(expert))}.{half}.weight"] = matrix
        elif rest.endswith("experts.down_proj"):
            for expert, matrix in enumerate(weight):
                tensors[f"{place}{rest.replace('down_proj', str(expert))}.down_proj.weight"] = matrix
        else:
            tensors[place + rest] = weight
    return tensors


def save(network: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Writes a target with tensors that its architecture does not have."""
    network.save_pretrained(folder)
    path = folder / "model.safetensors"
    whole = load_file(path) | {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})
    return folder


@torch.inference_mode()
def features_of(network: Any, ids: torch.Tensor) -> torch.Tensor:
    """The target's states after its final norm, [batch, length, hidden]."""
    states: torch.Tensor = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def replayed(head: Any, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int = 0) -> list[torch.Tensor]:
    """The token that each depth proposes from each base, [batch, length - first] for each depth."""
    return [
        torch.stack([head.logits(row, depth).argmax(-1) for row in states])
        for depth, states in enumerate(head.states(ids, features, depths, first), 1)
    ]


def rounds(head: Any, ids: torch.Tensor, features: torch.Tensor, prompt: int, gamma: int) -> list[tuple[int, list[int]]]:
    """Base and drafts of every round of a head at work on a text [1, length]: greedy drafts, accepted where they are the
    text's own.
    """
    cache, read, at, length = head.cache(), 0, prompt, ids.shape[1]
    text, made = ids[0].tolist(), []
    while at + gamma < length:
        state = cache.extend(ids[:, read + 1 : at], features[:, read : at - 1])
        drafts: list[int] = []
        for depth in range(1, gamma + 1):
            if depth > 1:
                state = cache.deepen(torch.tensor(drafts[-1:]), state, depth)
            drafts.append(int(head.logits(state, depth).argmax(-1)))
        made.append((at - 2, drafts))
        read, at = at - 1, at + accepted(drafts, text[at:]) + 1
    return made


def accepted(drafts: Sequence[int], text: Sequence[int]) -> int:
    """How many of the drafts come before the first that is not the text's."""
    pairs = enumerate(zip(drafts, text, strict=False))
    return next((number for number, (draft, token) in pairs if draft != token), len(drafts))


def agrees(made: list[tuple[int, list[int]]], tops: list[torch.Tensor], text: list[int], first: int = 0) -> list[bool]:
    """For every round whether its drafts, up to and with the first wrong one, are what the depths propose over the text."""
    same = []
    for base, drafts in made:
        count = min(accepted(drafts, text[base + 2 :]) + 1, len(drafts))
        same.append(drafts[:count] == [int(tops[depth][0, base - first]) for depth in range(count)])
    return same


HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
