"""Random EAGLE-3 heads in every layout of files, and a decoder for them that keeps nothing from one step to the next."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from alphaprof.config.profile import ProfileOptions
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.models.kinds import load_draft
from alphaprof.profiling.models.load import Model
from tests.tiny import tokenizer

IDS = "eagle_aux_hidden_state_layer_ids"
VOCABULARY, HIDDEN, BLOCKS = 7, 32, 6  # so few tokens that random heads are right often
Tensors = dict[str, torch.Tensor]


def target(seed: int = 0, **changes: Any) -> Model:
    """A random float32 Llama whose greedy text does not repeat itself."""
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes | shape | {"bos_token_id": None, "eos_token_id": None} | changes)
    network = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, weight in network.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.35)
    return Model("target", network, "model", "tiny")


def config(**changes: Any) -> dict[str, Any]:
    """What speculators writes for a head of `target`; `layer`: what differs in its layers."""
    layer = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": 128,
    } | changes.pop("layer", {})
    described = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 5}
    return described | {IDS: [1, 3, 4], "norm_before_residual": False, "transformer_layer_config": layer} | changes


def tensors(described: dict[str, Any], ids: Sequence[int] | None = (0, 2, 3, 5, 6), seed: int = 1) -> Tensors:
    """Random weights for such a config: norms around 1, and d2t for the target's `ids` (None: all)."""
    layer, generator = described["transformer_layer_config"], torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    def norm(size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.4

    hidden, inner, size = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    wide = described.get("target_hidden_size") or hidden
    states = len(described[IDS] or [0, 0, 0])
    rows = {"q": layer["num_attention_heads"] * size} | dict.fromkeys("kv", layer["num_key_value_heads"] * size)
    made = {"fc.weight": weight(hidden, states * wide), "norm.weight": norm(hidden)}
    made["lm_head.weight"] = weight(described["draft_vocab_size"], hidden)
    for index in range(layer["num_hidden_layers"]):
        block = f"layers.{index}."
        for name, count in rows.items():
            made[f"{block}self_attn.{name}_proj.weight"] = weight(count, hidden if index else 2 * hidden)
        made[f"{block}self_attn.o_proj.weight"] = weight(hidden, rows["q"])
        made |= {f"{block}mlp.{name}_proj.weight": weight(inner, hidden) for name in ("gate", "up")}
        made[f"{block}mlp.down_proj.weight"] = weight(hidden, inner)
        made |= {f"{block}{name}.weight": norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        if layer.get("attention_bias"):
            made |= {f"{block}self_attn.{name}_proj.bias": weight(count) for name, count in (rows | {"o": hidden}).items()}
        if layer["model_type"] == "qwen3":
            made |= {f"{block}self_attn.{name}_norm.weight": norm(size) for name in "qk"}
    made["layers.0.hidden_norm.weight"] = norm(hidden)
    if described.get("norm_before_fc"):
        made["input_norm.weight"] = norm(states * wide)
    if described.get("fc_norm"):
        made |= {f"fc_norm.{index}.weight": norm(wide) for index in range(states)}
    if ids is not None:
        made["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        made["t2d"] = torch.zeros(layer["vocab_size"], dtype=torch.bool).index_fill(0, torch.tensor(ids), True)
    return made


def written(folder: Path, described: dict[str, Any], weights: Tensors) -> Path:
    """A folder with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def converted(described: dict[str, Any], weights: Tensors, layout: str) -> tuple[dict[str, Any], Tensors]:
    """A head of speculators as SafeAILab or SpecForge would write it, which read no other norms than its."""
    flat = dict(described["transformer_layer_config"]) | {"draft_vocab_size": described["draft_vocab_size"]}
    flat |= {"architectures": ["LlamaForCausalLM"]}
    if layout == "SpecForge":
        flat["architectures"] = ["LlamaForCausalLMEagle3"]
        flat["eagle_config"] = {IDS: [layer - 1 for layer in described[IDS]]}
    return flat, {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}


def loaded(folder: Path, model: Model, gammas: Sequence[int] = (3,), words: Any = None, **options: Any) -> HeadDraft:
    """The head in a folder, by the product's loader; `words`: the target's tokenizer."""
    profile = ProfileOptions.model_validate(
        {
            "target": {"model": "tiny", "dtype": "float32"},
            "drafts": {"head": {"kind": "eagle3", "model": str(folder)} | options},
            "data": [{"domain": "text", "path": "text.jsonl", "prompt": "text"}],
            "gammas": list(gammas),
        }
    )
    draft = load_draft("head", profile.drafts["head"], profile, model, words or tokenizer())
    assert isinstance(draft, HeadDraft)
    return draft


class Recomputing:
    """A head of speculators' layout at work on one text. It keeps nothing: for every draft it runs over all tokens again,
    causally, each with the state that belongs before it: of verified tokens the target's, of drafted ones its own.

    Written from the definition, without the product's or transformers' code. `embedding`: the target's.
    """

    def __init__(self, described: dict[str, Any], weights: Tensors, embedding: torch.Tensor) -> None:
        self.described, self.layer, self.weights = described, described["transformer_layer_config"], weights
        self.embedding = weights.get("embed_tokens.weight", embedding)
        self.entered = "fc.weight" in weights
        offsets = weights.get("d2t")
        self.ids = None if offsets is None else (torch.arange(len(offsets)) + offsets).tolist()

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.weights[name] * rows / (rows.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).sqrt()

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, heads, size] at positions 0, 1, ...: pairs (i, i + size / 2) are complex numbers that turn."""
        half = rows.shape[-1] // 2
        numbers = torch.complex(rows[..., :half].double(), rows[..., half:].double())
        angles = torch.arange(len(rows))[:, None, None] * self.frequencies(half)
        turned = numbers * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1).to(rows.dtype)

    def frequencies(self, half: int) -> torch.Tensor:
        """Radians a token [half], with linear and Llama 3's scaling."""
        base, scaling = self.layer["rope_theta"], self.layer.get("rope_scaling") or {"rope_type": "default"}
        plain = [base ** (-index / half) for index in range(half)]
        if scaling["rope_type"] == "linear":
            plain = [each / scaling["factor"] for each in plain]
        if scaling["rope_type"] == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = [scaling["original_max_position_embeddings"] * each / (2 * math.pi) for each in plain]
            kept = [min(max((each - low) / (high - low), 0.0), 1.0) for each in turns]
            plain = [each * (share + (1 - share) / scaling["factor"]) for each, share in zip(plain, kept, strict=True)]
        return torch.tensor(plain, dtype=torch.float64)

    def projected(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        answer = rows @ self.weights[f"{name}.weight"].T
        return answer if bias is None else answer + bias

    def block(self, index: int, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Rows [n, hidden] after a layer, each attending to itself and to those before it."""
        name, heads, groups = f"layers.{index}.", self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        q, k, v = (
            self.projected(f"{name}self_attn.{each}_proj", inputs).unflatten(1, (-1, self.layer["head_dim"]))
            for each in "qkv"
        )
        if self.layer["model_type"] == "qwen3":
            q, k = self.norm(f"{name}self_attn.q_norm.weight", q), self.norm(f"{name}self_attn.k_norm.weight", k)
        q, k = self.turned(q), self.turned(k)
        mixed = torch.zeros_like(q)
        for head in range(heads):
            group = head // (heads // groups)
            scores = q[:, head] @ k[:, group].T / self.layer["head_dim"] ** 0.5
            ahead = torch.arange(len(q))[None] - torch.arange(len(q))[:, None]
            hidden = (ahead > 0) | (ahead <= -(self.window(index) or len(q)))
            mixed[:, head] = scores.masked_fill(hidden, -torch.inf).softmax(1) @ v[:, group]
        rows = residual + self.projected(f"{name}self_attn.o_proj", mixed.flatten(1))
        normed = self.norm(f"{name}post_attention_layernorm.weight", rows)
        gate, up = (self.projected(f"{name}mlp.{each}_proj", normed) for each in ("gate", "up"))
        return rows + self.projected(f"{name}mlp.down_proj", silu(gate) * up)

    def window(self, index: int) -> int | None:
        """How many tokens a layer sees, itself among them; None: all."""
        sliding = (self.layer.get("layer_types") or ["full_attention"] * (index + 1))[index] == "sliding_attention"
        return self.layer["sliding_window"] if sliding else None

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """What verified tokens bring [n, hidden], of the target's states [n, states x width]."""
        if self.described.get("norm_before_fc"):
            features = self.norm("input_norm.weight", features)
        if self.described.get("fc_norm"):
            width = self.described.get("target_hidden_size") or self.layer["hidden_size"]
            parts = features.split(width, 1)
            features = torch.cat([self.norm(f"fc_norm.{index}.weight", part) for index, part in enumerate(parts)], 1)
        return self.projected("fc", features) if self.entered else features

    def logits(self, text: Sequence[int], features: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits of the next draft of a round, after a verified text of which the target has read all but the last token,
        with states [tokens - 1, ...], and after the tokens drafted so far.
        """
        entered, own = self.entry(features), torch.empty(0, self.layer["hidden_size"])
        for depth in range(1, len(drafted) + 2):
            tokens = [*text[1:], *drafted][: len(text) - 1 + depth - 1]
            before = torch.cat([entered, own])
            states = before
            for index in range(self.layer["num_hidden_layers"]):
                inputs = self.norm(f"layers.{index}.input_layernorm.weight", states if index else self.embedding[tokens])
                if index == 0:
                    normed = self.norm("layers.0.hidden_norm.weight", states)
                    inputs = torch.cat([inputs, normed], 1)
                    states = normed if self.described.get("norm_before_residual") else states
                states = self.block(index, inputs, states)
            last, normed = states[-1:], self.norm("norm.weight", states[-1:])
            own = torch.cat([own, normed if self.described.get("norm_output") else last])
        return self.projected("lm_head", normed)[0]

    def proposal(self, text: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        """The tokens of a greedy round."""
        drafted: list[int] = []
        while len(drafted) < count:
            best = int(self.logits(text, features, drafted).argmax())
            drafted.append(best if self.ids is None else self.ids[best])
        return drafted
