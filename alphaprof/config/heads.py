"""Which draft a model's files hold: by the names of tensors, and where these do not tell, or are not here, by the config.

The one place that knows: for a starter file, formulas, early checks, loaders and every error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaprof.config.model_files import CONFIG, MISTRAL, WEIGHTS, ModelFiles, gguf_kind, stored
from alphaprof.errors import ModelUnloadable

REDUCED = "draft_vocab_size"  # ids that an EAGLE-3 head has logits of
NESTED = "dflash_config", "dspark_config"  # settings of DFlash, DFlash2 and DSpark
MASKS = ("mask_token_id", "ptd_token_id")  # what tells the config of a P-EAGLE head from that of EAGLE-3
MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
SLIDING = "sliding_attention"  # a layer type of transformers
IMPORT = "serve it with an engine that supports it, and import what it logs: alphaprof import"
MASK_EMBEDDING = "mask_embedding.pt"


@dataclass(frozen=True)
class DraftForm:
    """What a draft is, in `words`, and what decides its steps. `kind`: in a profile (none: it is not measured); `whole`: a
    model by itself; `module`: a part of the target, which the target's config describes; `wide`: the first layer reads
    embedding and state side by side; `joins`: a matrix joins both in each step; `one_pass`: all tokens of a round are
    drafted at once; `block`: in as many rows as the config says, the first of which is the last token's and drafts nothing,
    unless `from_anchor`; `counted`: its steps can be computed.
    """

    name: str
    words: str
    kind: str = ""
    whole: bool = False
    module: bool = False
    wide: bool = False
    joins: bool = False
    one_pass: bool = False
    block: bool = False
    from_anchor: bool = False
    counted: bool = True


MODEL = DraftForm("model", "a model by itself", "model", whole=True)
PARD = DraftForm("pard", "PARD", "pard", whole=True, one_pass=True)
MTP = DraftForm("mtp", "MTP", module=True)
EAGLE = DraftForm("eagle", "EAGLE-1 or EAGLE-2", "eagle1", joins=True)
EAGLE3 = DraftForm("eagle3", "EAGLE-3", "eagle3", wide=True)
P_EAGLE = DraftForm("p-eagle", "P-EAGLE", "p_eagle", wide=True, one_pass=True)
DFLASH = DraftForm("dflash", "DFlash", "dflash", one_pass=True, block=True)
DSPARK = DraftForm("dspark", "DSpark", "dspark", one_pass=True, block=True, from_anchor=True)
DFLASH2 = DraftForm("dflash2", "DFlash2", "dflash", one_pass=True, block=True)
GEMMA = DraftForm("gemma4 assistant", "an assistant of Gemma 4", "gemma4_assistant")
MEDUSA = DraftForm("medusa", "Medusa", counted=False)
# By what architectures, types and names of groups say, in this order; and by what their tensors are called.
NAMED = (
    *((re.compile(name, re.IGNORECASE), DraftForm(name, words, counted=False)) for name, words in (
        ("hydra", "Hydra"), ("mlp_speculator", "MLP speculator"), ("xpress", "XPress"), ("domino", "Domino"),
        ("lilicorr", "LiLiCorr"),
    )),
    (re.compile(r"\bUno(?![a-z])|\buno\b"), DraftForm("uno", "UNO", counted=False)),
    (re.compile(r"eagle-?_?4", re.IGNORECASE), DraftForm("eagle4", "EAGLE-4", counted=False)),
    (re.compile("medusa", re.IGNORECASE), MEDUSA),
    (re.compile("dspark", re.IGNORECASE), DSPARK),
    (re.compile("dflash2", re.IGNORECASE), DFLASH2),
    (re.compile("gemma4_(unified_)?assistant", re.IGNORECASE), GEMMA),
    (re.compile("p-?eagle", re.IGNORECASE), P_EAGLE),
)  # fmt: skip
HELD = (
    (re.compile(r"^markov_head\."), DSPARK),
    (re.compile(r"^candidate_selector\.|^layers\.\d+\.(attention|mlp)_conv\."), DFLASH2),
    (re.compile(r"^(pre|post)_projection\.|^masked_embedding\."), GEMMA),
    (re.compile(r"^(medusa_heads?\.)?\d+\.\d+\.linear\."), MEDUSA),
    (re.compile(r"^mask_hidden$"), P_EAGLE),
    (re.compile(r"^(midlayer|layers\.\d+)\.hidden_norm\.|^midlayer\."), EAGLE3),
    (re.compile(r"^hidden_norm\.|^encoder\.output_norm_enc\."), DFLASH),
    (re.compile(r"^d2t$"), EAGLE3),
    (re.compile(r"^fc\.weight$"), EAGLE),
)
LAYER = re.compile(r"^(?:model\.)?(?:midlayer|layers\.(\d+))\.")
# What no head is measured with, by settings and by names of tensors.
SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias")


def recognized(
    config: Mapping[str, Any],
    tensors: Iterable[str] = (),
    decoder: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
) -> DraftForm:
    """Return what draft a config and names of tensors (none: they are not here) describe. `decoder`: its settings of the
    decoder; `target`: those of the target's, which describe its MTP module too, if it has one.
    """
    kinds = (config.get("speculators_model_type"), config.get("model_type"))
    named = " ".join(map(str, (*_architectures(config), *kinds, *(key for key in config if key.endswith("_config")))))
    held = list(tensors)
    found = next((form for pattern, form in NAMED if pattern.search(named)), None) or _held_by(held)
    if found is not None:
        return found
    named = named.lower()
    if not held and DFLASH.name in named:
        return DFLASH
    if not held and (REDUCED in config or "eagle" in named):
        parallel = any(config.get(key) is not None for key in MASKS)
        return P_EAGLE if parallel else EAGLE3 if REDUCED in config or EAGLE3.name in named else EAGLE
    if config.get("pard_token") is not None:
        return PARD
    keys, decoder = ("num_hidden_layers", "hidden_size", "vocab_size"), decoder or {}
    same = target is not None and all(decoder.get(key) == target.get(key) for key in keys)
    if "nextn" in named or MTP.name in named or (same and any(decoder.get(key) for key in MODULES)):
        return MTP
    return MODEL


def _held_by(tensors: Iterable[str]) -> DraftForm | None:
    """Return what names of tensors alone say; None: nothing."""
    names = [name.removeprefix("model.") for name in tensors]
    return next((form for pattern, form in HELD if any(map(pattern.search, names))), None)


def draft_form(
    config: Mapping[str, Any], decoder: Mapping[str, Any], target: Mapping[str, Any], tensors: Iterable[str] = ()
) -> DraftForm:
    """As `recognized`. Raises `KeyError` for heads whose steps are not computed."""
    form = recognized(config, tensors, decoder, target)
    if not form.counted:
        raise KeyError(f"steps of {form.name} heads are not computed")
    return form


def unsupported(config: Mapping[str, Any], tensors: Collection[str], beside: Collection[str] = ()) -> str:
    """Return why a head of a measured form cannot be; empty: nothing shows. `beside`: names of files in its folder."""
    settings = settings_of(config)
    ropes = [each for each in (*map(settings.get, ("rope_parameters", "rope_scaling")), settings) if isinstance(each, dict)]
    found = {
        "attention sinks": any(map(settings.get, SINKS)) or _any(r"sinks?$|attention_sink_bias$", tensors),
        "attention_value_scale": settings.get("attention_value_scale") not in (None, 1),
        "partial_rotary_factor": any(rope.get("partial_rotary_factor") not in (None, 1) for rope in ropes),
        "rotations in pairs of neighbors (is_neox_style: false)": settings.get("is_neox_style") is False,
        "latent attention (MLA)": _any(r"\.kv_a_proj|\.kv_b_proj", tensors),
        "experts in its layers": _any(r"\.experts\.", tensors),
        "Laguna's layers": "laguna" in " ".join(map(str, (*_architectures(config), config.get("model_type")))).lower(),
        "dspark_draft_topk": bool(settings.get("dspark_draft_topk")),
        f"{MASK_EMBEDDING}, a pickle that replaces the embedding of its mask token": MASK_EMBEDDING in beside,
    }
    reasons = [words for words, is_there in found.items() if is_there]
    return f"with {', '.join(reasons)}, which cannot be measured here" if reasons else ""


def require_kind(called: str, kind: str, files: ModelFiles | Path) -> None:
    """Raise `ModelUnloadable` for local files, or a GGUF file, that are not of a `kind` of draft, or cannot be measured, by
    what they are; what no file tells, loading it will say. `called`: what the message calls them.
    """
    if isinstance(files, Path):
        _require_whole(called, kind, gguf_kind(files))
        return
    if CONFIG not in files.beside:
        if MISTRAL in files.beside:
            problem = f"{called} is in Mistral's own format ({MISTRAL}), which transformers does not read"
            raise ModelUnloadable(problem, f"give it in the format of transformers ({CONFIG}); or {IMPORT}")
        return
    single = files.folder / WEIGHTS  # beside which transformers reads no other file of a model
    tensors = stored([single], called) if kind == MODEL.kind and single.is_file() else files.tensors
    form = recognized(files.config, tensors)
    by = "tensors are those" if form in (MODEL, _held_by(tensors)) else "config.json is that"
    words = f"{called}: its {by} of {form.words}"
    whole = {"norm.weight", "embed_tokens.weight"} <= {name.removeprefix("model.") for name in tensors}
    if not (
        form.module or form.kind == kind or (form.whole and kind in (MODEL.kind, PARD.kind)) or (form is MODEL and not whole)
    ):
        hint = f"use {'it as a draft of ' if kind == MODEL.kind else ''}kind: {form.kind}" if form.kind else IMPORT
        raise ModelUnloadable(words if form.kind else f"{words}, which is not measured here", hint)
    if kind not in (MODEL.kind, PARD.kind) and (problem := unsupported(files.config, tensors, files.beside)):
        raise ModelUnloadable(f"{words} {problem}", IMPORT)


def _require_whole(called: str, kind: str, said: str) -> None:
    """Raise `ModelUnloadable` for a GGUF file that is not what a kind of draft needs. `said`: what it says it is."""
    if said == "imatrix":
        problem, hint = "an importance matrix of llama.cpp, not a model", "give the .gguf file of the model itself"
        raise ModelUnloadable(f"{called} is {problem}", hint)
    if kind != MODEL.kind or re.search("eagle|dflash|dspark|assistant|medusa", said):
        problem = f"a GGUF file{f' of a head ({said})' if kind == MODEL.kind else ''}"
        hint = f"give the head's own safetensors and {CONFIG}, which llama.cpp converted; or {IMPORT}"
        raise ModelUnloadable(f"{called} is {problem}, which heads are not read from", hint)


def layer_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a head's layers, which speculators keep apart, and vLLM did for EAGLE."""
    of_vllm = config.get("model") if config.get("model_type") == EAGLE.name else None
    layer: Mapping[str, Any] = config.get("transformer_layer_config") or of_vllm or config
    return layer


def as_held(config: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """Return the config of a head without the layers and experts that its files do not hold: trainers keep the target's
    there. Raises `KeyError` for experts that it does not number.
    """
    numbers = {int(found[1] or 0) for name in tensors if (found := LAYER.search(name))}
    if not numbers:
        return config
    layer = dict(layer_of(config))
    experts = [key for key in layer if "expert" in key]
    if not _any(r"\.experts\.", tensors):
        layer = {key: value for key, value in layer.items() if key not in experts}
    elif not experts:
        raise KeyError("its tensors are of experts, whose number its config does not say")
    layer["num_hidden_layers"] = min(len(numbers), layer.get("num_hidden_layers") or len(numbers))
    return {**config, "transformer_layer_config": layer} if "transformer_layer_config" in config else layer


def longest_block(config: Mapping[str, Any], form: DraftForm) -> int | None:
    """Return how many tokens a block drafts at most; None: as many as asked for."""
    settings = settings_of(config)
    block = settings.get("block_size") if form.block else None
    return None if block is None else block - (not settings.get("sample_from_anchor", form.from_anchor))


def causal_layers(config: Mapping[str, Any], types: Sequence[str]) -> list[bool]:
    """Return which layers of a DFlash drafter are causal, whose types these are: what `is_causal` says, else `causal` of
    dflash_config, else the sliding layers alone; in files of speculators the sliding layers, unless
    `sliding_window_non_causal`.
    """
    sliding, given = [kind == SLIDING for kind in types], config.get("is_causal")
    if given is None and not config.get("speculators_model_type"):
        given = nested_of(config).get("causal")
    elif given is None and config.get("sliding_window_non_causal"):
        given = False
    return sliding if given is None else [bool(given)] * len(sliding)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a head: those of its layers and of `NESTED` beside its own."""
    return {**config, **_group(layer_of(config)), **nested_of(config)}


def nested_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a drafter that its config keeps apart."""
    return {key: value for name in NESTED for key, value in _group(config.get(name)).items()}


def _group(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    given = config.get("architectures") or []
    return given if isinstance(given, list) else [given]


def _any(pattern: str, names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in names)
