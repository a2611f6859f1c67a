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
from transformers import modeling_layers

from alphaprof.config.options import MtpDraft
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.draft import Alternative, HeadDraft, depths_of
from alphaprof.profiling.heads.files import HeadFiles, Stored, stored
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
OTHER_KINDS = ("mimo_v2", "minimax_m3", "deepseek_v4", "gemma4")
# vLLM's modules of these take the embedding at position 0 as zeros; transformers' do not.
BLIND = ("deepseek_v3", "glm4_moe", "mimo")
UNNORMED = "glm4_moe"
FED_BEFORE = "take an engine that feeds back like this: vLLM 0.32 does for GLM-4.5"  # no config.json says it
IMPORT = "serve it with an engine and import what that counts (alphaprof import)"
REUSE = (
    "reuse: false is a chain, one module a depth (transformers' use_mtp; vLLM's model runner V2 on GPUs); reuse: true is "
    "the first module at every depth (vLLM's model runner V1). SGLang loads DeepSeek's modules where there is one alone"
)
PUBLISHED = "give the target as it was published, whole: conversions and quantisers often leave out or change MTP modules"


def load_mtp(
    name: str, draft: MtpDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`: the modules of the target's own checkpoint."""
    config = target.network.config.get_text_config()
    _require_kind(name, config.model_type, target)
    layout, files = _found(name, target, folder_of(options.target))
    count = _count(files, layout, config)
    if draft.reuse is None and count > 1:
        problem = f"{target.reference} has {count} MTP modules, and engines use them in two ways: set reuse"
        raise files.refused(problem, REUSE)
    reuse = draft.reuse is not False
    depths = depths_of(files.name, draft.depths, options.gammas, None if reuse else count)
    mtp = _loaded(files, target, layout, count)
    blind = config.model_type.startswith(BLIND) or layout == MIMO
    network: ReusedModule | ChainedModules
    alternatives: list[Alternative] = []
    if reuse:
        network = ReusedModule(mtp, target.vocabulary, blind, _window(mtp.config))
    else:
        network = ChainedModules(mtp, target.vocabulary)
    if reuse and mtp.layers[0].use_post_norm:
        unnormed = ReusedModule(mtp, target.vocabulary, blind, _window(mtp.config), normed=False)
        engines = ("vLLM",) if config.model_type == UNNORMED else ()
        alternatives.append(Alternative("states fed back before the norm", FED_BEFORE, unnormed, 2, engines))
    _require_running(files, network, target)
    reading = {
        "layout": layout,
        "modules": str(count),
        "use of modules": "the first module at every depth" if reuse else "a chain: one module a depth",
        "fed back": "the state after the module's final norm",
    }
    if reuse and blind:
        reading["embedding at position 0"] = "zeros, as in vLLM"
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


def _require_kind(name: str, kind: str, target: Model) -> None:
    """Raise `ModelUnloadable` for a target that has no such modules, or that is spread over devices, and where transformers
    cannot run them.
    """
    problem, hint = "", IMPORT
    if kind.startswith(OTHER_KINDS):
        problem = f"MTP modules of {kind} cannot be measured here"
    elif any(hasattr(module, "_hf_hook") for module in target.network.modules()):
        problem = "MTP modules cannot be measured on a target that device_map spreads"
        hint = "load the target on one device, without device_map"
    elif not hasattr(modeling_layers, "MtpModel"):
        problem = f"transformers {version('transformers')} cannot run MTP modules"
        hint = "pip install 'transformers>=5.23'"
    if problem:
        raise ModelUnloadable(f"draft {name}: {problem}", hint)


def _found(name: str, target: Model, folder: Path | None) -> tuple[str, HeadFiles]:
    """The layout of a checkpoint's modules, and their tensors."""
    found: dict[str, Stored] = {}
    if folder is not None:  # None: a .gguf file, which holds no modules that transformers reads
        index = folder / INDEX
        names = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else [WEIGHTS]
        found = stored(sorted({folder / each for each in names}), f"draft {name}")
    last = target.network.config.get_text_config().num_hidden_layers
    for layout, place in PLACES.items():
        matches = {key: match for key in found if (match := place.search(key)) is not None}
        tensors = {key: found[key] for key, match in matches.items() if layout != AFTER_LAST or int(match[1]) >= last}
        if tensors:
            return layout, HeadFiles(f"draft {name}", {}, tensors)
    raise ModelUnloadable(f"draft {name}: the checkpoint of {target.reference} holds no MTP modules", PUBLISHED)


def _count(files: HeadFiles, layout: str, config: Any) -> int:
    """How many modules there are. Raises `ModelUnloadable` where the config says another number."""
    matches = (PLACES[layout].search(name) for name in files.tensors)
    count = len({match[1] for match in matches if match is not None and match[1] is not None})
    promised = [getattr(config, key, None) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    if not count or any(each not in (None, count) for each in promised):
        raise files.refused(f"its config.json promises other MTP modules than the {count} in the checkpoint", PUBLISHED)
    if count > 1 and any(".fc." in name for name in files.tensors):
        raise files.refused(f"{count} MTP layers that share one projection cannot be measured here", IMPORT)
    return count


def _loaded(files: HeadFiles, target: Model, layout: str, count: int) -> Any:
    """A MtpModel with the modules' weights, on the target's device and in its dtype. Raises `ModelUnloadable` for weights
    that modules lack or do not have, of another shape, quantised or not finite.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import ContextManagers

    tensors = _tensors(files, target)
    try:
        with without_advice(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            owner = _owner(target.network, layout, count)
            with ContextManagers(modeling_layers.MtpModel.get_init_context(target.dtype, False, False, None)):
                mtp = modeling_layers.MtpModel(owner, count)
            mapping = mtp.get_weight_conversions(owner)
            how = LoadStateDictConfig(weight_mapping=mapping, device_map={"": target.device}, dtype=target.dtype)
            named = {_renamed(name, layout, owner): tensor for name, tensor in tensors.items()}
            loaded, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=named, load_config=how)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = f"transformers {version('transformers')} has no MTP modules of {target.network.config.model_type}"
        raise files.refused(f"{problem} ({first_line(error)[:200]})", IMPORT) from error
    weights = mtp.layers.state_dict()
    faults = {
        "lack weights of MTP modules:": {
            name for name in loaded.missing_keys if not name.startswith(("embed_tokens.", "shared_head."))
        },
        "have weights of MTP modules with other shapes:": {
            f"{name} {list(theirs)} for {list(ours)}" for name, theirs, ours in loaded.mismatched_keys
        },
        "hold unused weights of MTP modules:": set(loaded.unexpected_keys) | set(loaded.conversion_errors),
        "hold NaN or infinite numbers:": {
            name for name, weight in weights.items() if weight.is_meta or not bool(weight.isfinite().all())
        },
    }
    files.require_none(faults, PUBLISHED)
    return mtp.eval().requires_grad_(False)


def _tensors(files: HeadFiles, target: Model) -> dict[str, torch.Tensor]:
    """The modules' tensors by name, without the copies of the target's. Raises `ModelUnloadable` for quantised ones, and for
    copies that differ.
    """
    files.require_none(files.quantised(files.tensors), "give the target in 16 or 32 bits")
    tensors = {name: files.tensor(name) for name in files.tensors}
    for name in [name for name in tensors if name.endswith(tuple(COPIES))]:
        owner = next(getattr(target.network, getter)() for end, getter in COPIES.items() if name.endswith(end))
        own, copied = owner.weight, tensors.pop(name)
        if own.shape != copied.shape or not torch.equal(own.cpu(), copied.to(own.dtype)):
            raise files.refused(f"{name} differs from the target's own, which modules are read with here", IMPORT)
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


def _window(config: Any) -> int | None:
    """How many entries the first module sees by its layer type. Raises `ValueError` for what is no attention."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return int(config.sliding_window) if kinds[0] == "sliding_attention" else None


@torch.inference_mode()
def _require_running(files: HeadFiles, network: ReusedModule | ChainedModules, target: Model) -> None:
    """Raise `ModelUnloadable` unless the modules work on two short texts, whole and step by step: some have attention
    without keys and values that could be kept.
    """
    kinds = set(getattr(network.mtp.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
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
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = reason or first_line(error)[:200]
    if reason:
        raise files.refused(f"its MTP modules cannot be run depth by depth: {reason}", IMPORT)
