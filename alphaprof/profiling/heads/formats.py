"""EAGLE heads as SafeAILab, SpecForge, vLLM and the package speculators write them, told apart by config and tensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from alphaprof.errors import shown
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles

# Sources: vLLM 0.32 (models/llama_eagle3.py, configs/speculators/algos.py), SGLang 0.5.23 (models/llama_eagle3.py),
# speculators 0.9.0 (models/eagle3), SafeAILab/EAGLE (eagle/model/cnets.py), SpecForge (modeling/target).
SPECULATORS, SPECFORGE, SAFEAILAB, VLLM = "speculators", "SpecForge", "SafeAILab", "vLLM"
PLAIN, QWEN3 = "LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"
# Who writes a kind of EAGLE-3 head: the type of speculators, or an architecture.
EAGLE3_KINDS = {
    "eagle3": SPECULATORS,
    PLAIN: SAFEAILAB,
    "LlamaForCausalLMEagle3": SPECFORGE,
    "Eagle3LlamaForCausalLM": VLLM,
    "Eagle3MiniMaxM2ForCausalLM": VLLM,
    "Eagle3Qwen2_5vlForCausalLM": VLLM,
    "Eagle3Qwen3vlForCausalLM": VLLM,
    QWEN3: VLLM,
}
EAGLE1_KINDS = dict.fromkeys((PLAIN, "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"), SAFEAILAB)
IDS = "eagle_aux_hidden_state_layer_ids"
PARALLEL = re.compile(r"p-?eagle|dflash|dspark|xpress", re.IGNORECASE)
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # the others depend on how long the text is
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
KEPT = (
    *SIZES,
    *("num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
)
FLAGS = ("use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "use_aux_norm")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
LEGACY = {"fc_norm.0.weight": "aux_norm_low", "fc_norm.1.weight": "aux_norm_mid", "fc_norm.2.weight": "aux_norm_high"}
# Of the target, kept by trainers; tables that newer versions compute.
IGNORED = re.compile(r"^verifier_(norm|lm_head)\.weight$|rotary_emb\.inv_freq$")
ENGINE = "serve it with an engine that has it, and import what the engine logs: alphaprof import vllm"
OFFSETS = "d2t holds offsets (draft id j is the target's id j + d2t[j]), t2d one flag for each id of the target"


@dataclass(frozen=True)
class EagleFormat:
    """What the files of a head say. `layout`: who writes such files; `layers`: of transformers, the shape of its layers;
    `settings`: its config, with what others nest in `eagle_config`; `context`: the longest text; `ids`: the target's ids of
    its logits and `order`, the rows of its LM head in the order of these (None: all ids).
    """

    files: HeadFiles
    layout: str
    layers: Any
    settings: dict[str, Any]
    context: int | None
    ids: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """How wide the target's states are that it reads."""
        wide: int = self.settings.get("target_hidden_size") or self.layers.hidden_size
        return wide

    @property
    def reads_inner_states(self) -> bool:
        """Whether it reads states between layers, not the one after the final norm."""
        return bool(self.settings.get("use_aux_hidden_state", True))

    def stored_name(self, name: str) -> str:
        """What its files call a tensor of `Eagle3`."""
        first = "midlayer." if any(each.startswith("midlayer.") for each in self.files.tensors) else "layers.0."
        if name in LEGACY and name not in self.files.tensors:
            legacy = f"{LEGACY[name]}.weight"
            return legacy if legacy in self.files.tensors else name
        if name.startswith("hidden_norm."):
            return first + name
        return re.sub(r"^blocks\.", "layers.", re.sub(r"^blocks\.0\.", first, name))


def eagle3_format(files: HeadFiles) -> EagleFormat:
    """What the files of a head say. Raises `ModelUnloadable` for heads of other kinds, by name, and for settings that
    contradict each other.
    """
    config = files.config
    layers_config, nested = config.get("transformer_layer_config") or {}, config.get("eagle_config") or {}
    if not (isinstance(layers_config, dict) and isinstance(nested, dict)):
        raise files.refused("transformer_layer_config or eagle_config in its config.json is not an object", COMPLETE)
    is_speculator = bool(config.get("speculators_model_type"))
    shape = layers_config if is_speculator else config
    model_type = shape.get("model_type", "qwen3" if is_speculator else "llama")
    layout = _layout(files, EAGLE3_KINDS, model_type, ("llama", "qwen3"))
    if layout == SAFEAILAB and ("eagle_config" in config or IDS in config):
        layout = SPECFORGE
    settings = {**config, **{key: value for key, value in nested.items() if key != IDS}, "nested_ids": nested.get(IDS)}
    files.require_flags(settings, FLAGS)
    layers = _layers(files, shape, model_type == "qwen3" if is_speculator else QWEN3 in (config.get("architectures") or ()))
    ids, order = _draft_vocabulary(files, config.get("draft_vocab_size") or layers.vocab_size, layers.vocab_size)
    return EagleFormat(files, layout, layers, settings, shape.get("max_position_embeddings"), ids, order)


def eagle1_format(files: HeadFiles) -> EagleFormat:
    """What the files of an EAGLE-1, EAGLE-2 or HASS head say. Raises `ModelUnloadable` as `eagle3_format` does."""
    config = files.config
    layout = _layout(files, EAGLE1_KINDS, config.get("model_type", "llama"), ("llama",))
    layers = _layers(files, config, qwen3=False)
    settings = {"use_aux_hidden_state": False, "nested_ids": None}
    return EagleFormat(files, layout, layers, settings, config.get("max_position_embeddings"))


def _layout(files: HeadFiles, known: dict[str, str], model_type: object, model_types: tuple[str, ...]) -> str:
    """Who writes such files, of the kinds that are `known`. Raises `ModelUnloadable` for all others."""
    architectures = files.config.get("architectures") or [PLAIN]
    kind = str(files.config.get("speculators_model_type") or architectures[0])
    if PARALLEL.search(f"{kind} {architectures}") or "mask_hidden" in files.tensors:
        raise files.refused(f"{kind} drafts a block of tokens in parallel, which is not measured here", ENGINE)
    if kind not in known or model_type not in model_types:
        problem = f"it is of an unknown kind: {kind} with layers of {shown(model_type)}"
        raise files.refused(problem, f"known are {', '.join(known)} with layers of {' or '.join(model_types)}; {ENGINE}")
    is_eagle3 = "d2t" in files.tensors or any(name.endswith("hidden_norm.weight") for name in files.tensors)
    if is_eagle3 != (known is EAGLE3_KINDS):
        names = ("EAGLE-3", "kind: eagle3") if is_eagle3 else ("EAGLE-1 or EAGLE-2", "kind: eagle1")
        raise files.refused(f"its tensors are those of {names[0]}", f"use {names[1]}")
    return known[kind]


def _layers(files: HeadFiles, shape: dict[str, Any], qwen3: bool) -> Any:
    """The shape of its layers, as a config of transformers. Raises `ModelUnloadable` for what that refuses, and for settings
    that would be read as if they were not there.
    """
    if missing := [key for key in SIZES if shape.get(key) is None]:
        raise files.refused(f"its config.json lacks {', '.join(missing)}", COMPLETE)
    kept = {"num_hidden_layers": 1, "num_key_value_heads": shape["num_attention_heads"], "mlp_bias": False}
    kept |= {key: shape[key] for key in (*KEPT, *ROPE) if shape.get(key) is not None}
    for key in ROPE[1:]:
        if "mrope_section" in (kept.get(key) or ()):  # in text all three positions are the same
            kept[key] = {"rope_type": "default"} | {name: kept[key][name] for name in ("rope_theta",) if name in kept[key]}
    try:
        config: Any = (Qwen3Config if qwen3 else LlamaConfig)(**kept)
        rope = config.rope_parameters["rope_type"]
        rotary = LlamaRotaryEmbedding(config) if rope in FIXED_ROPE else None
    except Exception as error:
        raise files.refused(f"its config.json: {' '.join(str(error).split())[:300]}", COMPLETE) from error
    finite = rotary is None or (bool(rotary.inv_freq.isfinite().all()) and math.isfinite(rotary.attention_scaling))
    unknown = {
        f"hidden_act {shown(config.hidden_act)}": config.hidden_act not in ACT2FN,
        f"positions of type {shown(rope)}": rope not in FIXED_ROPE,
        "positions whose rotations are not finite": not finite,
        "sliding windows (layer_types)": "sliding_attention" in str(shape.get("layer_types")),
        "partial_rotary_factor": shape.get("partial_rotary_factor") not in (None, 1),
        "logit_scale": shape.get("logit_scale") not in (None, 1),
    }
    if found := [words for words, is_there in unknown.items() if is_there]:
        raise files.refused(f"its config.json has {', '.join(found)}, which is not measured", ENGINE)
    return config


def _draft_vocabulary(files: HeadFiles, count: object, total: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The target's ids of its logits, ascending, and the rows of its LM head in that order: None for all ids."""
    if "d2t" not in files.tensors:
        if count != total:
            problem = f"it proposes {count} of {total} tokens, and its files lack d2t, which says which"
            raise files.refused(problem, COMPLETE)
        return None, None
    offsets = files.tensor("d2t").long().flatten()
    ids, order = (offsets + torch.arange(len(offsets))).sort()
    sound = len(set(ids.tolist())) == len(ids) == count and int(ids[0]) >= 0 and int(ids[-1]) < total
    if "t2d" in files.tensors:
        sound = sound and torch.equal(files.tensor("t2d").bool().nonzero().flatten(), ids)
    if not sound:
        problem = f"d2t and t2d do not name {count} different tokens (draft_vocab_size) of a vocabulary of {total}"
        raise files.refused(problem, OFFSETS)
    return (None, None) if len(ids) == total else (ids, order)
