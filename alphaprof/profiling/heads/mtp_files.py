"""The MTP modules in a target's checkpoint: which layout they have, whether they are whole, and how they are used."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alphaprof.config.options import MtpDraft
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.depths import depths_of
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.files import FLOATS, first_three
from alphaprof.profiling.heads.mtp import ChainedModules, ReusedModule
from alphaprof.profiling.models.checkpoint import INDEX, WEIGHTS
from alphaprof.profiling.models.hub import first_line, folder_of
from alphaprof.profiling.models.load import Model, is_out_of_memory, without_advice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

# Where modules stand in a checkpoint: as layers after the target's last, under `mtp`, or under `mtp_layers`.
AFTER_LAST, QWEN, MIMO = "layers after the last", "mtp.*", "mtp_layers.*"
PLACES = {
    QWEN: re.compile(r"^(?:model\.)?mtp\.(?:layers\.(\d+)\.)?"),
    MIMO: re.compile(r"^model\.mtp_layers\.(\d+)\."),
    AFTER_LAST: re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\."),
}
MIMO_NAMES = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "shared_head.norm.",
}
# Copies of the target's own embeddings and LM head, beside the modules.
COPIES = {"embed_tokens.weight": "get_input_embeddings", "head.weight": "get_output_embeddings"}
# Targets whose modules do not work as these do, by the beginning of their model type.
OTHER_KINDS = {
    "mimo_v2": "MTP modules of MiMo-V2",
    "minimax_m3": "MTP modules of MiniMax-M3",
    "deepseek_v4": "MTP stages of DeepSeek-V4",
    "gemma4": "assistants of Gemma 4",
}
# vLLM's modules of these take the embedding at position 0 as zeros; transformers' do not.
BLIND = ("deepseek_v3", "glm4_moe", "mimo")
UNNORMED = "glm4_moe"
FED_BEFORE = "take an engine that feeds back like this: vLLM 0.32 does for GLM-4.5"  # no config.json says it
IMPORT = "serve it with an engine and import what that counts (alphaprof import)"
PUBLISHED = "give the target as it was published, whole: conversions and quantisers often leave out or change MTP modules"


def load_mtp(
    name: str, draft: MtpDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`: the modules of the target's own checkpoint."""
    called = f"draft {name}"
    _require_kind(called, target)
    config = target.network.config.get_text_config()
    layout, places = _found(called, target, _folder(called, options, target))
    count = _count(called, layout, places, config)
    reuse, why = _reuse(called, draft.reuse, count, target.reference)
    depths = depths_of(called, draft.depths, options.gammas, None if reuse else count, "reuse: true has any number")
    mtp = _loaded(called, target, layout, count, places)
    reading = {
        "layout": layout,
        "modules": str(count),
        "use of modules": why,
        "fed back": "the state after the module's final norm",
    }
    network: ReusedModule | ChainedModules
    alternatives: list[Alternative] = []
    if reuse:
        if config.model_type == UNNORMED:
            reading["fed back"] += " (vLLM 0.32 feeds back the one before it here; SGLang this one)"
        blind = config.model_type.startswith(BLIND) or layout == MIMO
        if blind:
            reading["embedding at position 0"] = "zeros, as in vLLM"
        window = _window(mtp.config)
        network = ReusedModule(mtp, target.vocabulary, blind, window)
        if mtp.layers[0].use_post_norm:
            unnormed = ReusedModule(mtp, target.vocabulary, blind, window, normed=False)
            engines = ("vLLM",) if config.model_type == UNNORMED else ()
            alternatives.append(Alternative("states fed back before the norm", FED_BEFORE, unnormed, 2, engines))
    else:
        network = ChainedModules(mtp, target.vocabulary)
    _require_running(called, network, target)
    return HeadDraft(
        name=name,
        network=network,
        target=target,
        kind=draft.kind,
        reference=target.reference,
        method="mtp",
        algorithm="NEXTN",
        depths=depths,
        context=target.context,
        ranks_by_depth=draft.ranks_by_depth,
        reading=reading,
        alternatives=alternatives,
    )


def _require_kind(called: str, target: Model) -> None:
    """Raises `ModelUnloadable` for targets that have no such modules, and where transformers cannot run them."""
    kind = target.network.config.get_text_config().model_type
    for beginning, words in OTHER_KINDS.items():
        if kind.startswith(beginning):
            raise ModelUnloadable(f"{called}: {words} cannot be measured here", IMPORT)
    if any(hasattr(module, "_hf_hook") for module in target.network.modules()):
        hint = "load the target on one device, without device_map"
        raise ModelUnloadable(f"{called}: MTP modules cannot be measured on a target that device_map spreads", hint)
    try:
        from transformers.modeling_layers import MtpModel  # noqa: F401
    except ImportError:
        raise ModelUnloadable(
            f"{called}: transformers {version('transformers')} cannot run MTP modules", "pip install 'transformers>=5.23'"
        ) from None


def _folder(called: str, options: ProfileOptions, target: Model) -> Path:
    """Where the target's files are."""
    if options.target.model.endswith(".gguf"):
        message = f"{called}: MTP modules of .gguf files are not read"
        raise ModelUnloadable(message, "give the target as safetensors, as it was published")
    if (folder := folder_of(options.target)) is None:
        raise ModelUnloadable(f"{called}: the files of {target.reference} are not here", "give the target as a local folder")
    return folder


def _found(called: str, target: Model, folder: Path) -> tuple[str, dict[str, Path]]:
    """The layout of a checkpoint's modules, and the file of each of their tensors."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        named = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = {name: folder / file for name, file in named.items()}
    else:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            files = dict.fromkeys(file.keys(), folder / WEIGHTS)
    last = target.network.config.get_text_config().num_hidden_layers
    for layout, place in PLACES.items():
        matches = {name: match for name in files if (match := place.search(name)) is not None}
        if layout == AFTER_LAST:
            matches = {name: match for name, match in matches.items() if int(match[1]) >= last}
        if matches:
            return layout, {name: files[name] for name in matches}
    raise ModelUnloadable(f"{called}: the checkpoint of {target.reference} holds no MTP modules", PUBLISHED)


def _count(called: str, layout: str, places: dict[str, Path], config: Any) -> int:
    """How many modules there are. Raises `ModelUnloadable` where the config says another number."""
    first = config.num_hidden_layers if layout == AFTER_LAST else 0
    matches = (PLACES[layout].search(name) for name in places)
    numbers = sorted({int(match[1]) for match in matches if match is not None and match[1] is not None})
    count = len(numbers)
    if numbers != list(range(first, first + count)) or not count:
        raise ModelUnloadable(f"{called}: the checkpoint holds parts of MTP modules: layers {numbers}", PUBLISHED)
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        promised = getattr(config, key, None)
        if promised is not None and promised != count:
            raise ModelUnloadable(f"{called}: {key} is {promised}, and the checkpoint holds {count} MTP modules", PUBLISHED)
    if count > 1 and any(".fc." in name for name in places):
        raise ModelUnloadable(f"{called}: {count} MTP layers that share one projection cannot be measured here", IMPORT)
    return count


def _reuse(called: str, reuse: bool | None, count: int, reference: str) -> tuple[bool, str]:
    """Whether the first module serves every depth, and that choice in words."""
    if count == 1 and reuse is None:
        return True, "the one module at every depth"
    if reuse is None:
        raise ModelUnloadable(
            f"{called}: {reference} has {count} MTP modules, and engines use them in two ways: set reuse",
            "reuse: false is a chain, one module a depth (transformers' use_mtp; vLLM's model runner V2 on GPUs); "
            "reuse: true is the first module at every depth (vLLM's model runner V1). "
            "SGLang loads DeepSeek's modules where there is one alone",
        )
    return reuse, "the first module at every depth" if reuse else "a chain: one module a depth"


def _loaded(called: str, target: Model, layout: str, count: int, places: dict[str, Path]) -> Any:
    """A MtpModel with the modules' weights, on the target's device and in its dtype."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_layers import MtpModel
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import ContextManagers

    tensors = _tensors(called, target, places)
    kind = target.network.config.get_text_config().model_type
    try:
        with without_advice(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            owner = _owner(target.network, layout, count)
            with ContextManagers(MtpModel.get_init_context(target.dtype, False, False, None)):
                mtp = MtpModel(owner, count)
            mapping = mtp.get_weight_conversions(owner)
            how = LoadStateDictConfig(weight_mapping=mapping, device_map={"": target.device}, dtype=target.dtype)
            named = {_renamed(name, layout, owner): tensor for name, tensor in tensors.items()}
            loaded, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=named, load_config=how)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        message = f"{called}: transformers {version('transformers')} has no MTP modules of {kind}"
        raise ModelUnloadable(f"{message} ({first_line(error)[:200]})", IMPORT) from error
    _require_complete(called, loaded)
    for name, weight in mtp.layers.state_dict().items():
        if weight.is_meta or not bool(weight.isfinite().all()):
            raise ModelUnloadable(f"{called}: {name} of the MTP modules holds NaN or infinite numbers", PUBLISHED)
    return mtp.eval().requires_grad_(False)


def _tensors(called: str, target: Model, places: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The modules' tensors by name, without the copies of the target's. Raises `ModelUnloadable` for quantised ones, and for
    copies that are none.
    """
    from safetensors import safe_open

    tensors = {}
    for path in sorted(set(places.values())):
        with safe_open(path, framework="pt") as file:
            for name in sorted(name for name, place in places.items() if place == path):
                dtype = file.get_slice(name).get_dtype()
                if dtype not in FLOATS:
                    message = f"{called}: {name} holds {dtype}, and quantised MTP modules cannot be measured"
                    raise ModelUnloadable(
                        message, "give the target in 16 or 32 bits; its engine drafts almost the same tokens"
                    )
                tensors[name] = file.get_tensor(name)
    for name in [name for name in tensors if name.endswith(tuple(COPIES))]:
        owner = next(getattr(target.network, getter)() for end, getter in COPIES.items() if name.endswith(end))
        own = owner.weight
        if own.shape != tensors[name].shape or not torch.equal(own.cpu(), tensors.pop(name).to(own.dtype)):
            raise ModelUnloadable(
                f"{called}: {name} differs from the target's own, which modules are read with here", IMPORT
            )
    return tensors


def _owner(network: Any, layout: str, count: int) -> Any:
    """The target with a config of its own that says what modules it has; the target's stays as it is."""
    owner = copy.copy(network)
    owner.config = copy.deepcopy(network.config)
    config = owner.config.get_text_config()
    own = getattr(config, "num_mtp_layers", None) is not None  # transformers knows this architecture's modules
    if not own and layout != MIMO and not config.model_type.startswith(("qwen3_next", "qwen3_5")):
        raise ValueError("its config class has no num_mtp_layers")
    config.num_mtp_layers = count
    if layout == MIMO:
        config.mtp_hidden_states_first = True
    if not own:  # these modules are layers with full attention
        config.mtp_layer_types = ["full_attention"] * count
    return owner


def _renamed(name: str, layout: str, owner: Any) -> str:
    """The name that transformers expects in a checkpoint: of MiMo's modules that of layers after the last."""
    if layout != MIMO:
        return name
    number, rest = name.removeprefix("model.mtp_layers.").split(".", 1)
    for theirs, common in MIMO_NAMES.items():
        rest = rest.replace(theirs, common)
    return f"model.layers.{owner.config.get_text_config().num_hidden_layers + int(number)}.{rest}"


def _require_complete(called: str, loaded: Any) -> None:
    """Raises `ModelUnloadable` for weights that modules lack, do not have, or have in another shape."""
    missing = {name for name in loaded.missing_keys if not name.startswith(("embed_tokens.", "shared_head."))}
    misshapen = {f"{name} {list(theirs)} for {list(ours)}" for name, theirs, ours in loaded.mismatched_keys}
    faults = {
        "lacks": missing,
        "has with other shapes": misshapen,
        "holds unused": set(loaded.unexpected_keys) | set(loaded.conversion_errors),
    }
    for what, names in faults.items():
        if names:
            message = f"{called}: the checkpoint {what} weights of MTP modules: {first_three(names)}"
            raise ModelUnloadable(message, PUBLISHED)


def _window(config: Any) -> int | None:
    """How many entries the first module sees by its layer type. Raises `ValueError` for what is no attention."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return int(config.sliding_window) if kinds[0] == "sliding_attention" else None


@torch.inference_mode()
def _require_running(called: str, network: ReusedModule | ChainedModules, target: Model) -> None:
    """Raises `ModelUnloadable` unless the modules work on two short texts, whole and step by step: some have attention
    without keys and values that could be kept.
    """
    kinds = set(getattr(network.mtp.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    kind = target.network.config.get_text_config().model_type
    ids = (torch.arange(2 * 6, device=target.device).reshape(2, 6) * 7919 + 13) % target.vocabulary
    features = target.network.get_input_embeddings()(ids)
    reason = f"layers of {', '.join(sorted(kinds))}" if kinds else ""
    try:
        depths = min(3, network.most or 3)
        whole = list(network.states(ids, features, depths, 0))
        cache = network.cache()
        states = [cache.extend(ids[:, 1:3], features[:, :2])]
        for depth in range(2, depths + 1):
            states.append(cache.deepen(ids[:, depth + 1], states[-1], depth))
        network.logits(states[-1], depths)
        if not all(each[:, 0].shape == state.shape for each, state in zip(whole, states, strict=True)):
            reason = reason or "states of another shape"
    except (TypeError, AttributeError, RuntimeError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        reason = reason or first_line(error)[:200]
    if reason:
        message = f"{called}: the MTP modules of {kind} cannot be run depth by depth: {reason}"
        raise ModelUnloadable(message, IMPORT)
