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
from alphaprof.profiling.models.checkpoint import POSITIONS
from alphaprof.profiling.models.hub import first_line

# Sources: vLLM 0.32 (models/llama_eagle3.py, configs/speculators/algos.py), SGLang 0.5.23 (models/llama_eagle3.py),
# speculators 0.9.0 (models/eagle3), SafeAILab/EAGLE (eagle/model/cnets.py), SpecForge (modeling/target).
SPECULATORS, SPECFORGE, SAFEAILAB, VLLM = "speculators", "SpecForge", "SafeAILab", "vLLM"
LLAMA_STYLE = {
    "LlamaForCausalLM": SAFEAILAB,
    "LlamaForCausalLMEagle3": SPECFORGE,
    "Eagle3LlamaForCausalLM": VLLM,
    "Eagle3MiniMaxM2ForCausalLM": VLLM,
    "Eagle3Qwen2_5vlForCausalLM": VLLM,
    "Eagle3Qwen3vlForCausalLM": VLLM,
}
EAGLE1_STYLE = {"LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"}
QWEN3_STYLE = {"Eagle3Qwen3ForCausalLM": VLLM}
IDS = "eagle_aux_hidden_state_layer_ids"
PARALLEL = re.compile(r"p-?eagle|dflash|dspark|xpress", re.IGNORECASE)
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # the others depend on how long the text is
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
MORE_SIZES = ("num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings")
WIDTHS = ("target_hidden_size", "draft_vocab_size")
KEPT = (*SIZES, *MORE_SIZES, "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias")
FLAGS = ("use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "use_aux_norm")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
LEGACY = {"fc_norm.0.weight": "aux_norm_low", "fc_norm.1.weight": "aux_norm_mid", "fc_norm.2.weight": "aux_norm_high"}
# Of the target, kept by trainers; tables that newer versions compute.
IGNORED = re.compile(r"^verifier_(norm|lm_head)\.weight$|rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class EagleFormat:
    """What the files of a head say. `layout`: who writes such files; `layers`: of transformers, the shape of its layers;
    `settings`: its config, with what speculators keeps elsewhere or others nest in `eagle_config`; `context`: the longest
    text; `ids`: the target's ids of its logits and `order`, the rows of its LM head in the order of these (None: all ids).
    """

    files: HeadFiles
    layout: str
    layers: Any
    settings: dict[str, Any]
    context: int | None
    ids: torch.Tensor | None
    order: torch.Tensor | None

    @property
    def width(self) -> int:
        """How wide the target's states are that it reads."""
        return int(self.settings.get("target_hidden_size") or self.layers.hidden_size)

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
    layout, qwen3 = _layout(files)
    config = files.config
    shape = config.get("transformer_layer_config", {}) if layout == SPECULATORS else config
    if not isinstance(shape, dict):
        raise files.refused("transformer_layer_config in its config.json is no object", COMPLETE)
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise files.refused("eagle_config in its config.json is no object", COMPLETE)
    settings = {**config, **{key: value for key, value in nested.items() if key != IDS}, "nested_ids": nested.get(IDS)}
    files.require_values(settings, flags=FLAGS)
    _require_sizes(files, settings, WIDTHS, can_lack=WIDTHS)
    _require_known(files, shape)
    layers = _layers(files, shape, qwen3)
    ids, order = _draft_vocabulary(files, config.get("draft_vocab_size") or layers.vocab_size, layers.vocab_size)
    context = shape.get("max_position_embeddings")
    return EagleFormat(files, layout, layers, settings, context, ids, order)


def eagle1_format(files: HeadFiles) -> EagleFormat:
    """What the files of an EAGLE-1, EAGLE-2 or HASS head say. Raises `ModelUnloadable` as `eagle3_format` does."""
    kinds, config = _kinds(files), files.config
    if config.get("speculators_model_type") or config.get("model_type", "llama") != "llama" or set(kinds[1:]) - EAGLE1_STYLE:
        given = f"{', '.join(filter(None, kinds))} with model_type {shown(config.get('model_type'))}"
        raise files.refused(f"its architecture, {given}, is no EAGLE-1 head that is known", ENGINE)
    if odd := {"d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & files.tensors.keys():
        raise files.refused(f"its tensors are those of EAGLE-3 ({min(odd)})", "use kind: eagle3")
    _require_known(files, config)
    layers = _layers(files, config, qwen3=False)
    settings = {"use_aux_hidden_state": False, "nested_ids": None}
    return EagleFormat(files, SAFEAILAB, layers, settings, config.get("max_position_embeddings"), None, None)


def _kinds(files: HeadFiles) -> list[str]:
    """What a config calls its kind for speculators ("" for none), and its architectures. Raises `ModelUnloadable` for heads
    that do not draft one token after another, and for latent attention.
    """
    config, tensors = files.config, files.tensors
    names = config.get("architectures") or []
    kinds = [str(config.get("speculators_model_type") or ""), *map(str, names if isinstance(names, list) else [names])]
    if any(PARALLEL.search(kind) for kind in kinds) or "mask_hidden" in tensors:
        kind = next((kind for kind in kinds if PARALLEL.search(kind)), "P-EAGLE")
        hint = "serve it, and import what the engine logs: alphaprof import vllm"
        raise files.refused(f"{kind} drafts a block of tokens in parallel, which is not measured here", hint)
    if any("q_a_proj" in name or "kv_a_proj" in name for name in tensors) or shape_is_mla(config):
        raise files.refused(f"heads with latent attention (MLA) are not measured ({kinds[-1]})", ENGINE)
    return kinds


def _layout(files: HeadFiles) -> tuple[str, bool]:
    """Who writes such files of EAGLE-3, and whether the layers are those of Qwen3."""
    kinds, config, tensors = _kinds(files), files.config, files.tensors
    if config.get("speculators_model_type"):
        if kinds[0] != "eagle3":
            raise files.refused(f"it is a speculator of type {shown(kinds[0])}, not eagle3", KINDS)
        layer_config = config.get("transformer_layer_config")
        model_type = layer_config.get("model_type", "qwen3") if isinstance(layer_config, dict) else None
        if model_type not in ("llama", "qwen3"):
            raise files.refused(f"its layers are those of {shown(model_type)}, not of llama or qwen3", ENGINE)
        return SPECULATORS, model_type == "qwen3"
    architecture = kinds[1] if len(kinds) > 1 else "LlamaForCausalLM"
    if architecture not in LLAMA_STYLE | QWEN3_STYLE or config.get("model_type", "llama") not in ("llama", "qwen3"):
        given = f"{architecture} with model_type {shown(config.get('model_type'))}"
        raise files.refused(f"its architecture, {given}, is no EAGLE-3 head that is known", KINDS)
    if "lm_head.weight" not in tensors and "norm.weight" not in tensors and "layers.0.mlp.up_proj.weight" in tensors:
        raise files.refused("its tensors are those of EAGLE-1 or EAGLE-2: no norm and no LM head", "use kind: eagle1")
    layout = (LLAMA_STYLE | QWEN3_STYLE)[architecture]
    if layout == SAFEAILAB and ("eagle_config" in config or IDS in config):
        layout = SPECFORGE
    return layout, architecture in QWEN3_STYLE


ENGINE = "serve it with an engine that has it, and import what the engine logs: alphaprof import vllm"
KINDS = f"kind eagle3 reads heads of llama or qwen3 style; {ENGINE}"


def shape_is_mla(config: dict[str, Any]) -> bool:
    """Whether a config says that attention is latent."""
    groups = (config, config.get("transformer_layer_config"))
    return any(isinstance(group, dict) and group.get("kv_lora_rank") is not None for group in groups)


def _require_known(files: HeadFiles, shape: dict[str, Any]) -> None:
    """Raise `ModelUnloadable` for settings that would be read as if they were not there."""
    kinds = shape.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise files.refused(f"layer_types in its config.json is {shown(kinds)}, not a list", COMPLETE)
    if "sliding_attention" in (kinds or []):
        raise files.refused("its layers have sliding windows (layer_types), which are not measured", ENGINE)
    for key in ("partial_rotary_factor", "logit_scale"):
        if shape.get(key) not in (None, 1):
            raise files.refused(f"{key} {shown(shape[key])} in its config.json is not known for heads", ENGINE)


def _layers(files: HeadFiles, shape: dict[str, Any], qwen3: bool) -> Any:
    """The shape of its layers, as a config of transformers."""
    _require_sizes(files, shape, (*SIZES, *MORE_SIZES), can_lack=MORE_SIZES)
    files.require_values(shape, flags=["attention_bias", "mlp_bias"], numbers=["rms_norm_eps"])
    for group in (shape, *(shape[key] for key in ROPE if isinstance(shape.get(key), dict))):
        files.require_values(group, numbers=["rope_theta"])
    kept = {key: shape[key] for key in (*KEPT, *ROPE) if shape.get(key) is not None}
    heads = kept["num_attention_heads"]
    if not qwen3:
        kept.setdefault("head_dim", kept["hidden_size"] // heads)
    kept.setdefault("num_key_value_heads", heads)
    blocks = kept.setdefault("num_hidden_layers", 1)
    found = {name.split(".")[1] for name in files.tensors if re.match(r"layers\.\d+\.", name)}
    found |= {"0" for name in files.tensors if name.startswith("midlayer.")}
    if blocks != len(found):
        problem = f"num_hidden_layers in its config.json is {blocks}, and its files hold {len(found)} layers"
        raise files.refused(problem, COMPLETE)
    if heads % kept["num_key_value_heads"]:
        problem = f"{kept['num_key_value_heads']} key-value heads do not divide its {heads} attention heads"
        raise files.refused(problem, COMPLETE)
    for key in ROPE[1:]:
        if isinstance(kept.get(key), dict) and "mrope_section" in kept[key]:  # in text all three positions are the same
            kept[key] = {"rope_theta": kept[key]["rope_theta"]} if "rope_theta" in kept[key] else {}
            kept[key]["rope_type"] = "default"
    try:
        config: Any = (Qwen3Config if qwen3 else LlamaConfig)(**kept)
        config.mlp_bias = bool(shape.get("mlp_bias", False))
        rope = config.rope_parameters["rope_type"]
    except Exception as error:
        raise files.refused(f"its config.json: {first_line(error)[:300]}", COMPLETE) from error
    if config.hidden_act not in ACT2FN:
        raise files.refused(f"its activation, {shown(config.hidden_act)}, is not known to transformers", ENGINE)
    if rope not in FIXED_ROPE:
        raise files.refused(f"its positions are of type {shown(rope)}, which depends on how long a text is", ENGINE)
    _require_positions(files, config)
    return config


def _require_sizes(files: HeadFiles, settings: dict[str, Any], names: tuple[str, ...], can_lack: tuple[str, ...]) -> None:
    """Raise `ModelUnloadable` for sizes that are none; those that `can_lack` may be null or missing."""
    for name in names:
        value = settings.get(name)
        if value is None and name in can_lack:
            continue
        if type(value) is not int or not 1 <= value <= POSITIONS:
            raise files.refused(f"{name} in its config.json is {shown(value)}, not a whole number above 0", COMPLETE)


def _require_positions(files: HeadFiles, config: Any) -> None:
    """Raise `ModelUnloadable` where transformers cannot compute the rotations of positions, or they are not finite."""
    try:
        rotary = LlamaRotaryEmbedding(config)
        finite = bool(rotary.inv_freq.isfinite().all()) and math.isfinite(rotary.attention_scaling)
        problem = "" if finite else "its rotations are not finite"
    except Exception as error:
        problem = first_line(error)[:300]
    if problem:
        raise files.refused(f"positions in its config.json ({', '.join(ROPE)}): {problem}", COMPLETE)


def _draft_vocabulary(files: HeadFiles, count: object, total: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The target's ids of its logits, ascending, and the rows of its LM head in that order: None for all ids."""
    if "d2t" not in files.tensors:
        if count != total:
            problem = f"it proposes {count} of {total} tokens, and its files lack d2t, which says which"
            raise files.refused(problem, COMPLETE)
        return None, None
    stored = files.tensors["d2t"]
    if stored.shape != (count,) or stored.dtype not in ("I64", "I32"):
        problem = f"d2t is {list(stored.shape)} of {stored.dtype}, and draft_vocab_size in its config.json is {shown(count)}"
        raise files.refused(problem, OFFSETS)
    offsets = files.tensor("d2t").long()
    ids = offsets + torch.arange(len(offsets))
    if int(ids.min()) < 0 or int(ids.max()) >= total:
        problem = f"d2t leads to ids from {int(ids.min())} to {int(ids.max())}, and the vocabulary has {total}"
        raise files.refused(problem, OFFSETS)
    ids, order = ids.sort()
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise files.refused(f"d2t leads to id {int(twice[0])} more than once", OFFSETS)
    if "t2d" in files.tensors:
        flags = files.tensor("t2d").bool()
        if flags.shape != (total,) or not torch.equal(flags.nonzero().flatten(), ids):
            problem = f"d2t and t2d name different tokens of {total} (t2d is {list(flags.shape)})"
            raise files.refused(problem, OFFSETS)
    return (None, None) if len(ids) == total else (ids, order)


OFFSETS = "d2t holds offsets (draft id j is the target's id j + d2t[j]), t2d one flag for each id of the target"
