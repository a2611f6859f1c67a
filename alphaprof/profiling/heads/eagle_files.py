"""EAGLE heads as SafeAILab, SpecForge, vLLM and the package speculators write them: what their files say, how these are read
and what else they could mean, to an engine as well; and how a head is loaded for a target.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from alphaprof.config.heads import IMPORT
from alphaprof.config.options import ModelOptions
from alphaprof.errors import ModelUnloadable, shown
from alphaprof.profiling.heads.attention import FULL, SLIDING
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, Eagle1, Eagle3, SharingHead, Wiring
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles, files_of
from alphaprof.profiling.heads.network import HeadNetwork
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.hub import folder_of
from alphaprof.profiling.models.identity import check_vocabulary
from alphaprof.profiling.models.load import Model, load_tokenizer
from alphaprof.profiling.models.teacher_forced import FINAL
from alphaprof.run.notes import note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import Eagle1Draft, Eagle3Draft, HeadFileOptions
    from alphaprof.config.profile import ProfileOptions

# Sources: vLLM 0.32 (models/llama_eagle3.py, configs/speculators/algos.py), SGLang 0.5.23 (models/llama_eagle3.py),
# speculators 0.9.0 (models/eagle3), SafeAILab/EAGLE (eagle/model/cnets.py), SpecForge (modeling/target).
SPECULATORS, SPECFORGE, SAFEAILAB, VLLM = "speculators", "SpecForge", "SafeAILab", "vLLM"
PLAIN = "LlamaForCausalLM"
OF_SPECULATORS = ("eagle3", "peagle")
BY_SPECFORGE = re.compile(r"Eagle3$|^PEagle")
OTHER_LAYERS = re.compile("llama-?4|gemma", re.IGNORECASE)  # whose norms or positions are others, under the same names
LAYERS_OF_SPECULATORS = ("llama", "qwen3")
IDS = "eagle_aux_hidden_state_layer_ids"
PARALLEL_STEP = "parallel_draft_step"  # of ModelOpt: from 2 on, heads of their own draft further tokens
LAYER = re.compile(r"^(?:midlayer|layers\.(\d+))\.")
FLAGS = ("use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "use_aux_norm")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # the others depend on how long the text is
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
KEPT = (
    *SIZES,
    *("num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
)
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
LEGACY = {"fc_norm.0.weight": "aux_norm_low", "fc_norm.1.weight": "aux_norm_mid", "fc_norm.2.weight": "aux_norm_high"}
# Of the target, kept by trainers; tables that newer versions compute.
IGNORED = re.compile(r"^verifier_(norm|lm_head)\.weight$|rotary_emb\.inv_freq$")
OFFSETS = "store offsets in d2t (draft id j is target id j + d2t[j]), and one flag per target id in t2d"
CHECKPOINT, SGLANG = "checkpoint", "SGLang"  # who reads files: as they mean it, or as an engine takes them
ENGINES = (VLLM, SGLANG)
# Targets for which SGLang 0.5.23 takes explicit ids as outputs of layers only if the first one is 1 (sglang#25454); for
# gpt-oss it does unless the last id is the number of layers (sglang#32334), and for all others always.
FIRST_ID_TELLS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite")
Head = TypeVar("Head", bound=HeadNetwork)
Format = TypeVar("Format", bound="EagleFormat")
OTHER_TARGET = "give a head trained for this target, or the head's own target"


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
        """Return what its files call a tensor of `Eagle3`."""
        first = "midlayer." if any(each.startswith("midlayer.") for each in self.files.tensors) else "layers.0."
        if name in LEGACY and name not in self.files.tensors:
            legacy = f"{LEGACY[name]}.weight"
            return legacy if legacy in self.files.tensors else name
        return stored_name(name, first)


def stored_name(name: str, first: str = "layers.0.") -> str:
    """Return what files call a tensor of `Eagle3`, by default those of speculators; `first`: its first layer."""
    if name.startswith("hidden_norm."):
        return first + name
    return re.sub(r"^blocks\.", "layers.", re.sub(r"^blocks\.0\.", first, name))


def eagle3_format(files: HeadFiles) -> EagleFormat:
    """Return what the files of an EAGLE-3 or P-EAGLE head say. Raises `ModelUnloadable` for layers of other kinds, and for
    settings that contradict each other.
    """
    config = files.config
    layers_config, nested = config.get("transformer_layer_config") or {}, config.get("eagle_config") or {}
    if not (isinstance(layers_config, dict) and isinstance(nested, dict)):
        raise files.refused("transformer_layer_config or eagle_config in its config.json is not an object", COMPLETE)
    is_speculator = bool(config.get("speculators_model_type"))
    shape = layers_config if is_speculator else config
    layout = _layout(files, layers_config.get("model_type", "qwen3"))
    if layout == SAFEAILAB and ("eagle_config" in config or IDS in config):
        layout = SPECFORGE
    settings = {**config, **{key: value for key, value in nested.items() if key != IDS}, "nested_ids": nested.get(IDS)}
    files.require_flags(settings, FLAGS)
    if settings.get(PARALLEL_STEP) not in (None, 1):
        problem = f"its config.json has {PARALLEL_STEP}: {shown(settings[PARALLEL_STEP])} (parallel heads of ModelOpt)"
        raise files.refused(f"{problem}, which is unsupported", IMPORT)
    is_qwen3 = any(name.endswith(".q_norm.weight") for name in files.tensors)
    layers = layer_config(files, shape, Qwen3Config if is_qwen3 else LlamaConfig)
    ids, order = draft_vocabulary(files, config.get("draft_vocab_size") or layers.vocab_size, layers.vocab_size)
    return EagleFormat(files, layout, layers, settings, shape.get("max_position_embeddings"), ids, order)


def eagle1_format(files: HeadFiles) -> EagleFormat:
    """Return what the files of an EAGLE-1, EAGLE-2 or HASS head say, or of one that vLLM converted, which has its config
    under `model`. Raises `ModelUnloadable` as `eagle3_format` does.
    """
    nested = files.config.get("model")
    config = nested if isinstance(nested, dict) else files.config
    layout = VLLM if config is nested else SAFEAILAB
    layers = layer_config(files, config, LlamaConfig)
    settings = {"use_aux_hidden_state": False, "nested_ids": None}
    return EagleFormat(files, layout, layers, settings, config.get("max_position_embeddings"))


def _layout(files: HeadFiles, layers: object) -> str:
    """Who writes such files. `layers`: their type, in files of speculators; else the tensors say what layers they are, and
    the architecture how the ids of the target's layers are meant: trainers often leave the target's there. Raises
    `ModelUnloadable` for layers that differ from Llama's and Qwen3's in what tensors do not show.
    """
    given = files.config.get("architectures") or [PLAIN]
    architecture = str(given if isinstance(given, str) else given[0])
    kind = files.config.get("speculators_model_type")
    other = OTHER_LAYERS.search(architecture) if kind is None else None if layers in LAYERS_OF_SPECULATORS else layers
    if other or kind not in (None, *OF_SPECULATORS):
        known = f"layers of Llama and Qwen3, in files of speculators {' or '.join(OF_SPECULATORS)}"
        words = f"{kind} with layers of {shown(layers)}" if kind else architecture
        raise files.refused(f"it is of an unknown kind: {words}", f"supported: {known}; {IMPORT}")
    if kind is not None:
        return SPECULATORS
    return VLLM if architecture.startswith("Eagle3") else SPECFORGE if BY_SPECFORGE.search(architecture) else SAFEAILAB


def layer_config(files: HeadFiles, shape: dict[str, Any], kind: Callable[..., Any]) -> Any:
    """Return the shape of its layers, as a `kind` of config of transformers: no more of them than the files hold, since
    trainers keep the target's num_hidden_layers. Raises `ModelUnloadable` for what transformers refuses, and for settings
    that would be read as if they were not there.
    """
    if missing := [key for key in SIZES if shape.get(key) is None]:
        raise files.refused(f"its config.json lacks {', '.join(missing)}", COMPLETE)
    kept = {"num_hidden_layers": 1, "num_key_value_heads": shape["num_attention_heads"], "mlp_bias": False}
    kept |= {key: shape[key] for key in (*KEPT, *ROPE, *WINDOWS) if shape.get(key) is not None}
    if isinstance(ropes := kept.get("rope_parameters"), dict) and any(isinstance(each, dict) for each in ropes.values()):
        types = dict.fromkeys((kept.get("layer_types") or [FULL])[: kept["num_hidden_layers"]])
        first, *others = (ropes.get(each) for each in types)
        if not isinstance(first, dict) or any(each != first for each in others):
            problem = f"rope_parameters in its config.json differ by layer type, or lack {' or '.join(types)}"
            raise files.refused(problem, IMPORT)
        kept["rope_parameters"] = first
    for key in ROPE[1:]:
        if "mrope_section" in (kept.get(key) or ()):  # in text all three positions are the same
            kept[key] = {"rope_type": "default"} | {name: kept[key][name] for name in ("rope_theta",) if name in kept[key]}
    held = [int(match[1] or 0) for name in files.tensors if (match := LAYER.match(name))]
    try:
        kept["num_hidden_layers"] = min(kept["num_hidden_layers"], max(held, default=math.inf) + 1)
        if "layer_types" in kept:
            kept["layer_types"] = kept["layer_types"][: kept["num_hidden_layers"]]
        config: Any = kind(**kept)
        rope = config.rope_parameters["rope_type"]
        rotary = LlamaRotaryEmbedding(config) if rope in FIXED_ROPE else None
    except Exception as error:
        raise files.refused(f"its config.json: {' '.join(str(error).split())[:300]}", COMPLETE) from error
    finite = rotary is None or (bool(rotary.inv_freq.isfinite().all()) and math.isfinite(rotary.attention_scaling))
    kinds, window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", 0)
    unknown = {
        f"hidden_act {shown(config.hidden_act)}": config.hidden_act not in ACT2FN,
        f"positions of type {shown(rope)}": rope not in FIXED_ROPE,
        "positions whose rotations are not finite": not finite,
        f"layer_types {', '.join(kinds)}": not {"full_attention", SLIDING}.issuperset(kinds),
        f"sliding_window {shown(window)}": SLIDING in kinds
        and window is not None
        and (type(window) is not int or window < 1),
        "partial_rotary_factor": shape.get("partial_rotary_factor") not in (None, 1),
        "logit_scale": shape.get("logit_scale") not in (None, 1),
    }
    if found := [words for words, is_there in unknown.items() if is_there]:
        raise files.refused(f"its config.json has unsupported settings: {', '.join(found)}", IMPORT)
    return config


def draft_vocabulary(files: HeadFiles, count: object, total: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the target's ids of its logits, ascending, and the rows of its LM head in that order: None for all ids."""
    if "d2t" not in files.tensors:
        if count != total:
            problem = f"it proposes {count} of {total} tokens, but its files lack d2t, which lists them"
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


def wiring_as(reader: str, head: EagleFormat, target: Any) -> Wiring:
    """Return how CHECKPOINT or one of ENGINES reads a head for a target (its config). Raises `ModelUnloadable` if its files
    cannot be read so.
    """
    settings = head.settings
    before = settings.get("norm_before_residual")
    if before is None:  # vLLM takes true for files of speculators, all others false
        before = reader == VLLM and head.layout == SPECULATORS
    meant = reader == CHECKPOINT and "input_norm.weight" in head.files.tensors  # engines go by the key alone
    return Wiring(
        _states(reader, head, target),
        bool(before) and reader != SGLANG,  # which has no norm_before_residual
        bool(settings.get("norm_output")),
        bool(settings.get("norm_before_fc")) or meant,
    )


def words_of(head: EagleFormat, wiring: Wiring) -> dict[str, str]:
    """Return how the files of a head are read in words, by what they are about."""
    states = "after the final norm" if wiring.layers == (FINAL,) else f"after {_listed(wiring.layers)} layers"
    words = {
        "layout": head.layout,
        "target states": states + (": config.json has no ids, so engines guess these" if is_guessed(head) else ""),
        "residual": f"{'after' if wiring.norm_before_residual else 'before'} the norm",
        "fed back": f"the state {'after' if wiring.norm_output else 'before'} the final norm",
    }
    if wiring.norm_before_fc or "input_norm.weight" in head.files.tensors:
        words["norm before fc"] = "yes" if wiring.norm_before_fc else "left out: config.json has no norm_before_fc"
    return words


def is_guessed(head: EagleFormat) -> bool:
    """Return whether the files leave open which states of the target the head reads."""
    return head.reads_inner_states and not (head.settings.get(IDS) or head.settings["nested_ids"])


def usual_layers(blocks: int) -> tuple[int, int, int]:
    """Return the numbers of layers that engines guess of a target with `blocks` layers."""
    return 2, blocks // 2, blocks - 3


def _states(reader: str, head: EagleFormat, target: Any) -> tuple[int, ...]:
    """Return the target's states that enter. Raises `ModelUnloadable` for states that the target does not have, or that are
    not as many as the head reads.
    """
    if not head.reads_inner_states:
        return (FINAL,)
    blocks = target.num_hidden_layers
    top, nested = head.settings.get(IDS), head.settings["nested_ids"]
    given = nested if reader == SGLANG and head.layout != SPECULATORS else top or nested
    if given and not (isinstance(given, list) and all(type(layer) is int and layer >= 0 for layer in given)):
        raise head.files.refused(f"{IDS} in its config.json is {shown(given)}", "write a list of layers, like [2, 16, 29]")
    layers = _explicit(reader, head, given, target) if given else tuple(sorted(set(usual_layers(blocks))))
    fc = head.files.tensors.get("fc.weight")
    reads = len(layers) if fc is None else fc.shape[-1] / head.width
    if len(set(layers)) != reads or min(layers) < 0 or max(layers) > blocks:
        if is_guessed(head):
            guess = f"those that engines guess for {blocks} layers ({_listed(usual_layers(blocks))}) do not fit"
            raise head.files.refused(
                f"it reads {reads:g} states, but config.json has no {IDS}, and {guess}",
                f"ask who trained it which layers it reads, and set {IDS} in its config.json",
            )
        raise head.files.refused(
            f"it reads {reads:g} states, but config.json names states after {_listed(layers)} of {blocks} layers",
            f"give the head that belongs to this target, or correct {IDS} in its config.json",
        )
    return layers


def _explicit(reader: str, head: EagleFormat, given: list[int], target: Any) -> tuple[int, ...]:
    """Return the numbers of layers that explicit ids mean: they count layers passed, or are outputs of layers counted from
    0.
    """
    blocks, later = target.num_hidden_layers, tuple(layer + 1 for layer in given)
    if reader == VLLM:
        return tuple(sorted(given))
    if reader == SGLANG:
        passed = (target.model_type in FIRST_ID_TELLS and given[0] != 1) or (
            target.model_type == "gpt_oss" and max(given) == blocks
        )
        return tuple(sorted(given if passed else later))
    # An output of layer `blocks` does not exist.
    return tuple(given) if head.layout != SPECFORGE or max(given) == blocks else later


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def alternatives(network: Eagle3, head: EagleFormat, target: Any) -> list[Alternative]:
    """Return what else the files of a head could mean for a target (its config), one difference at a time: states of one
    layer later and earlier, and the norms on their other sides. An engine is named at each difference that its wiring has.
    """
    measured, served = network.wiring, served_wirings(head, target)
    changes: dict[str, dict[str, Any]] = {}
    for offset, words in ((1, "later"), (-1, "earlier")):
        moved = tuple(layer + offset for layer in measured.layers)
        if FINAL not in measured.layers and min(moved) >= 0 and max(moved) <= target.num_hidden_layers:
            changes[f"states of the target one layer {words}"] = {"layers": moved}
    for words, name in (("the residual taken", "norm_before_residual"), ("states fed back", "norm_output")):
        other: dict[str, Any] = {name: not getattr(measured, name)}
        changes[f"{words} {'after' if other[name] else 'before'} the norm"] = other
    return [
        Alternative(
            words,
            _setting(measured, wiring := replace(measured, **change), target),
            network.with_wiring(wiring),
            2 if "norm_output" in change else 1,  # what is fed back shows then
            tuple(engine for engine, theirs in served.items() if change.items() <= vars(theirs).items()),
        )
        for words, change in changes.items()
    ]


def served_wirings(head: EagleFormat, target: Any) -> dict[str, Wiring]:
    """Return how each engine reads the files, without those that could not serve them."""
    served = {}
    for engine in ENGINES:
        with contextlib.suppress(ModelUnloadable):
            served[engine] = wiring_as(engine, head, target)
    return served


def doubts_of(name: str, head: EagleFormat, wiring: Wiring) -> tuple[dict[str, str], ...]:
    """Return a warning about the files of draft `name` where they leave open which states it reads."""
    if not is_guessed(head):
        return ()
    message = (
        f"the files of draft {name} do not say which target states it reads; engines guess layers {_listed(wiring.layers)} "
        "(2, n//2 and n-3 of n)"
    )
    return (note("wiring", doubt=message, remedy=f"ask who trained it, and set {IDS} in its config.json"),)


def _setting(measured: Wiring, wiring: Wiring, target: Any) -> str:
    """Return what to do so that engines read the files like this."""
    settings = []
    for key, value in vars(wiring).items():
        if value != getattr(measured, key):
            settings.append(f"{key}: {str(value).lower()}" if key != "layers" else f"{IDS}: {list(value)}")
    earlier = [layer - 1 for layer in wiring.layers]
    if wiring.layers != measured.layers and min(earlier) >= 0 and target.model_type not in FIRST_ID_TELLS:
        settings[0] += f" ({earlier} for SGLang)"
    return f"set {', '.join(settings)} in its config.json"


def load_eagle3(
    name: str, draft: Eagle3Draft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    head = head_of(name, draft, target, eagle3_format)
    require_verifier(head.files, target, tokenizer)
    config = target.network.config.get_text_config()
    wiring = wiring_as(CHECKPOINT, head, config)
    network = eagle3_network(head, wiring, target, DTYPES[draft.dtype or target.dtype_name], Eagle3)
    return HeadDraft.of(
        name,
        draft,
        options.gammas,
        target,
        network,
        context=head.context,
        files=head.files.paths,
        foreign=("SGLang",) if head.layout == SPECULATORS else (),  # it looks for a model_type in config.json
        reading=words_of(head, wiring) | described(head, network),
        engines=tuple(engine for engine, theirs in served_wirings(head, config).items() if theirs == wiring),
        alternatives=alternatives(network, head, config),
        doubts=doubts_of(name, head, wiring),
    )


def eagle3_network(head: EagleFormat, wiring: Wiring, target: Model, dtype: torch.dtype, made: Callable[..., Head]) -> Head:
    """Return the network of a head, `made` of what its files say, on the target's device. Raises `ModelUnloadable` for
    tensors that are missing, unused, of other shapes, quantised or not finite.
    """
    files = head.files
    has_fc = head.reads_inner_states or head.width != head.layers.hidden_size
    with torch.device("meta"):  # nothing takes memory before the shapes are known to be those of the files
        network = made(
            head.layers,
            wiring,
            width=head.width if has_fc else None,
            ids=head.ids,
            target=shared_weights(head, target),
            fc_bias="fc.bias" in files.tensors,
            input_norm=wiring.norm_before_fc or "input_norm.weight" in files.tensors,
            fc_norm=bool(head.settings.get("fc_norm") or head.settings.get("use_aux_norm")),
        )
    return filled(network, head, set() if has_fc else {"fc.weight", "fc.bias"}, target, dtype)


def load_eagle1(
    name: str, draft: Eagle1Draft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    head = head_of(name, draft, target, eagle1_format)
    with torch.device("meta"):
        shared = shared_weights(head, target, stored=head.files.tensors.keys() - {LM_HEAD})
        empty = Eagle1(head.layers, target=shared, fc_bias="fc.bias" in head.files.tensors)
    network = filled(empty, head, {LM_HEAD}, target, DTYPES[draft.dtype or target.dtype_name])
    words = {"layout": head.layout, "target states": "after the final norm", "fed back": "the state of its last layer"}
    words |= described(head, network)
    facts = {"context": head.context, "files": head.files.paths, "reading": words}
    return HeadDraft.of(name, draft, options.gammas, target, network, **facts)


def described(head: EagleFormat, network: SharingHead) -> dict[str, str]:
    """Return what of its layers its tensors do not show, and whose its embedding and LM head are, in words."""
    layers = head.layers
    heads = f"{layers.num_attention_heads} heads of width {layers.head_dim}, {layers.num_key_value_heads} KV heads"
    rope = ", ".join(f"{key} {value}" for key, value in sorted(layers.rope_parameters.items()))
    count = f"{layers.num_hidden_layers} of {layers.model_type}"
    if SLIDING in (getattr(layers, "layer_types", None) or ()) and layers.sliding_window:
        heads += f", of which {layers.layer_types.count(SLIDING)} with a window of {layers.sliding_window}"
    return {
        "layers": f"{count}: {heads}; {layers.hidden_act}; norms {layers.rms_norm_eps:g}; {rope}",
        "embedding": "the target's" if network.embed_tokens is None else "its own",
        "LM head": "the target's" if network.lm_head is None else "its own",
    }


def filled(network: Head, head: EagleFormat, unread: set[str], target: Model, dtype: torch.dtype) -> Head:
    """Return a network on the meta device, with the tensors of its files, on the target's device. `unread`: tensors that may
    be there and are not read.
    """
    files = head.files
    own = {key: weight for key, weight in network.state_dict().items() if key != "ids"}
    ignored = {"d2t", "t2d", *unread, *filter(IGNORED.search, files.tensors)}
    files.require({head.stored_name(key): tuple(weight.shape) for key, weight in own.items()}, ignored)
    weights = {key: files.loaded(head.stored_name(key), dtype) for key in own}
    if head.ids is not None and head.order is not None:
        weights |= {key: weights[key][head.order] for key in network.of_logits if key in weights} | {"ids": head.ids}
    network.load_state_dict(weights, assign=True)
    return network.to(target.device).eval().requires_grad_(False)


def shared_weights(head: EagleFormat, target: Model, stored: Collection[str] | None = None) -> dict[str, Any]:
    """Return the target's modules that stand in for weights that a head has none of its own for, by the names of these.
    `stored`: tensors of its files that are read (None: all). Raises `ModelUnloadable` for modules that cannot stand in.
    """
    shared: dict[str, Any] = {}
    embedding, output = target.network.get_input_embeddings(), target.network.get_output_embeddings()
    for key, module in ((EMBEDDING, embedding), (LM_HEAD, output)):
        if key in (head.files.tensors if stored is None else stored) or (key == LM_HEAD and head.ids is not None):
            continue
        weight: Any = getattr(module, "weight", None)
        is_usable = weight is not None and not weight.is_meta and weight.is_floating_point()
        if not is_usable or weight.shape[1] != head.layers.hidden_size:
            problem = f"it needs the target's {key}, which is quantized, not loaded or of another width"
            raise head.files.refused(problem, COMPLETE)
        shared[key] = module
    return shared


def require_layers(target: Model, refused: Callable[[str, str], ModelUnloadable]) -> None:
    """Raise `ModelUnloadable` for a target whose states cannot be recorded; `refused` words it."""
    if not isinstance(getattr(target.decoder, "layers", None), nn.ModuleList):
        problem = f"states of the target, a {type(target.network).__name__}, cannot be read: its decoder has no `layers`"
        raise refused(problem, "choose a target that is a plain decoder")


def head_of(name: str, draft: HeadFileOptions, target: Model, read: Callable[[HeadFiles], Format]) -> Format:
    """Return what the files of a head say. Raises `ModelUnloadable` if they are of another target, by width or
    vocabulary.
    """
    head = read(files_of(name, draft.own_model, draft.kind))
    require_layers(target, head.files.refused)
    config = target.network.config.get_text_config()
    theirs, ours = (head.width, head.layers.vocab_size), (config.hidden_size, target.vocabulary)
    if theirs != ours:
        problem = "it needs state width {} and {} ids".format(*theirs)
        problem += ", but {} has {} and {}".format(target.reference, *ours)
        raise head.files.refused(problem, OTHER_TARGET)
    return head


def require_verifier(files: HeadFiles, target: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise for a head that names a target of another architecture, or one whose tokenizer is here and is another."""
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    theirs, ours = verifier.get("architectures") or [], type(target.network).__name__
    # A target with parts for images names another class than its decoder has.
    if theirs and ours not in theirs and all(each.endswith("ForCausalLM") for each in theirs):
        problem = f"it was trained for {', '.join(theirs)}, but {target.reference} is a {ours}"
        raise files.refused(problem, OTHER_TARGET)
    reference = verifier.get("name_or_path")
    if not reference or reference == target.reference:
        return
    options = ModelOptions(model=reference)
    folder = folder_of(options)
    if folder is not None and (folder / "tokenizer_config.json").is_file():  # else it cannot be had here
        check_vocabulary(tokenizer, load_tokenizer(options), f"{files.name}, made for {reference},")
