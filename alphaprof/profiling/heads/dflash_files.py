"""Files of DFlash, DFlash2 and DSpark drafters: what they say, how engines read them, and how a drafter is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import Qwen3Config

from alphaprof.config.heads import DFLASH2, DSPARK, IMPORT, causal_layers, nested_of, recognized
from alphaprof.errors import ModelUnloadable, shown
from alphaprof.profiling.heads.attention import SLIDING, Reach
from alphaprof.profiling.heads.dflash import DFlash
from alphaprof.profiling.heads.dflash2 import DFlash2
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.dspark import MARKOV, VANILLA, DSpark
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD
from alphaprof.profiling.heads.eagle_files import (
    OTHER_TARGET,
    SPECULATORS,
    EagleFormat,
    described,
    draft_vocabulary,
    filled,
    head_of,
    layer_config,
    require_verifier,
    shared_weights,
)
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles
from alphaprof.profiling.heads.masks import other_masks, require_mask
from alphaprof.profiling.heads.network import MaskRows
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import BlockDraft
    from alphaprof.config.profile import ProfileOptions

ZLAB, DEEPSEEK = "z-lab", "DeepSeek"
ANCHOR, CAUSAL, NON_CAUSAL, SCALE = "sample_from_anchor", "is_causal", "sliding_window_non_causal", "input_embedding_scale"
KNOWN = {*("mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size"), ANCHOR, SCALE}
CONVOLVED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = {"output_multiplier": 1.0, "final_logit_softcapping": 0.0}  # of logits, where they do nothing
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
CONFIDENT = {"": "none", "row": "reads a row", "both": "reads a row and the token before it"}
OWN = {  # further keys of a form
    DFLASH2: (*CONVOLVED, *SCALES),
    DSPARK: ("markov_rank", "markov_head_type", *CONFIDENCE),
}
BLOCK = 16  # rows, if files do not say


@dataclass(frozen=True, kw_only=True)
class DFlashFormat(EagleFormat):
    """What the files of a DFlash drafter say. `passed`: the target's states, by layers passed; `drafts`: of a block, as it
    was trained; `reach`: which keys its rows see, by layer; `served`: the same as engines read it that read it otherwise;
    `refusing`: engines that do not load such files; `anchored`, `scale`: see `DFlash`; `made`: of its network; `own`: what
    else there is to say of its form, in words; `other_rows`: engines that take it as anchored where it is not, and the other
    way round (None: nobody would).
    """

    passed: tuple[int, ...]
    mask: int
    drafts: int
    anchored: int
    reach: tuple[Reach, ...]
    served: dict[str, tuple[Reach, ...]]
    refusing: tuple[str, ...]
    scale: float | None
    made: Callable[..., DFlash]
    own: dict[str, str]
    other_rows: tuple[str, ...] | None

    def stored_name(self, name: str) -> str:
        """Return what its files call a tensor of `DFlash`."""
        return name.replace("blocks.", "layers.")


def load_block(
    name: str, draft: BlockDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    head = head_of(name, draft, target, block_format)
    require_verifier(head.files, target, tokenizer)
    _require_states(head, target)
    by_length = not all(each.causal for each in head.reach)
    if by_length and draft.depths is not None:
        problem = f"draft {name}: its rows read each other, so each γ is a pass of its own, but depths is {draft.depths}"
        raise ModelUnloadable(problem, "write gamma: K instead, the drafts per round that an engine is asked for")
    drafts = draft.gamma or draft.depths or (head.drafts if by_length else max(options.gammas))
    if by_length and drafts not in options.gammas:
        problem = f"draft {name} drafts {drafts} tokens a round, but gammas is {list(options.gammas)}"
        raise ModelUnloadable(problem, f"add {drafts} to gammas, or set this draft's gamma to one of them")
    network = _network(head, drafts, target, DTYPES[draft.dtype or target.dtype_name])
    others = _alternatives(head, network, target)
    engines = [engine for engine in ("vLLM", "SGLang") if engine not in head.refusing]
    proposes = "proposes the token after it" if head.anchored else "but the anchor proposes its own token"
    words = {
        "layout": head.layout,
        "target states": f"after {', '.join(map(str, head.passed))} layers",
        "mask token": str(head.mask),
        "block": f"{drafts + 1 - head.anchored} rows; each {proposes}",
        "rows see": _seen(head.reach),
    }
    return HeadDraft.of(
        name,
        draft,
        [drafts],
        target,
        network,
        context=head.context,
        files=head.files.paths,
        gamma=drafts if by_length else None,
        foreign=head.refusing,
        reading=words | head.own | described(head, network),
        engines=tuple(engine for engine in engines if not any(engine in other.engines for other in others)),
        alternatives=others,
    )


def _seen(reach: tuple[Reach, ...]) -> str:
    """Return in words which keys the rows of a block see, by layer."""
    layers = []
    for each in reach:
        rows = "earlier rows" if each.causal else "all rows"
        layers.append(f"{rows}, keys less than {each.window} places away" if each.window else rows)
    return layers[0] if len(set(layers)) == 1 else "; ".join(f"layer {n}: {words}" for n, words in enumerate(layers))


def _alternatives(head: DFlashFormat, network: DFlash, target: Model) -> list[Alternative]:
    """Return the readings that are likely mistakes, and those of engines: states one layer off, other keys seen by its rows,
    an embedding of the target without its scale, and another mask token.
    """
    found = []
    drafts = network.masks.drafts
    depth = min(2, drafts)
    off_by, key = (1, "aux_hidden_state_layer_ids") if head.layout == SPECULATORS else (0, "target_layer_ids")
    for words, step in (("later", 1), ("earlier", -1)):
        layers = tuple(layer + step for layer in head.passed)
        if min(layers) >= 1 and max(layers) <= target.network.config.get_text_config().num_hidden_layers:
            setting = f"set {key}: {[layer - 1 + off_by for layer in layers]} in its config.json"
            found.append(Alternative(f"states of the target one layer {words}", setting, network.changed(layers=layers)))
    ways = {
        tuple(replace(each, causal=value) for each in head.reach): (
            f"{'no' if value else 'all'} rows seen that come later",
            f"set {CAUSAL}: {str(value).lower()} in its config.json",
        )
        for value in (True, False)
    }
    if head.other_rows is not None:
        token = "its own token" if head.anchored else "the token after it"
        words = f"{drafts + head.anchored} rows, each of which proposes {token}"
        setting = f"set {ANCHOR}: {str(not head.anchored).lower()} in its config.json"
        found.append(Alternative(words, setting, network.changed(anchored=1 - head.anchored), 1, head.other_rows))
    if any(each.window for each in head.reach):
        still = tuple(replace(each, fixed=True) for each in head.reach)
        ways[still] = "the window of each row counted from the anchor", "train it with the windows of engines, which move"
        whole = tuple(replace(each, window=None) for each in head.reach)
        ways[whole] = "no window", "remove the window from its config.json"
    for engine, reach in head.served.items():
        ways.setdefault(reach, (f"rows that see what {engine} lets them see", f"write the keys that {engine} reads"))
    for reach, (words, setting) in ways.items():
        if reach != head.reach:
            served = tuple(engine for engine, theirs in head.served.items() if theirs == reach)
            found.append(Alternative(words, setting, network.changed(reach=reach), depth, served))
    if network.scale is None and network.embed_tokens is None and _scales(target):
        setting = "serve it with an engine that scales the embedding: SGLang does, vLLM 0.33 does not"
        found.append(Alternative("the target's embedding not scaled", setting, network.changed(scale=1.0), 1, ("vLLM",)))
    return [*found, *other_masks(network, target, "mask_token_id", depth)]


@torch.inference_mode()
def _scales(target: Model) -> bool:
    """Return whether the module of the target's embedding does more than look up its weights."""
    module: Any = target.network.get_input_embeddings()
    ids = torch.arange(min(8, target.vocabulary), device=module.weight.device)
    return not torch.equal(module(ids), functional.embedding(ids, module.weight).to(module(ids)))


def block_format(files: HeadFiles) -> DFlashFormat:
    """Return what the files of a drafter in the layout of z-lab or DeepSeek, or that of speculators, say. Raises
    `ModelUnloadable`.
    """
    config, form = files.config, recognized(files.config, files.tensors)
    written = config.get("speculators_model_type")
    nested = {} if written else nested_of(config)
    shape = config.get("transformer_layer_config") if written else config
    if not isinstance(shape, dict):
        raise files.refused("transformer_layer_config in its config.json is not an object", COMPLETE)
    if odd := sorted(set(nested) - KNOWN - set(OWN.get(form, ()))):
        raise files.refused(f"{form.name}_config has {', '.join(odd)}, which is unsupported", IMPORT)
    settings = config | nested
    files.require_flags(settings, [ANCHOR, CAUSAL, NON_CAUSAL, "causal", "use_swa"])
    layers = settings.get("aux_hidden_state_layer_ids" if written else "target_layer_ids")
    mask, scale, block = settings.get("mask_token_id"), settings.get(SCALE), settings.get("block_size") or BLOCK
    if not (isinstance(layers, list) and layers and all(type(each) is int for each in layers) and type(mask) is int):
        raise files.refused("its config.json lacks the ids of the target's layers, or mask_token_id", COMPLETE)
    anchored = int(form.from_anchor if settings.get(ANCHOR) is None else settings[ANCHOR])
    if type(block) is not int or block < 2 - anchored or not isinstance(scale, int | float | None):
        raise files.refused(f"its config.json has block_size {shown(block)}, {SCALE} {shown(scale)}", COMPLETE)
    require_mask(files, mask, shape.get("vocab_size"))
    of_transformers = layer_config(files, shape, Qwen3Config)
    total = of_transformers.vocab_size
    ids, order = draft_vocabulary(files, config.get("draft_vocab_size") or total, total)
    reach, served, refusing = _reaches(files, of_transformers, nested)
    if written or (anchored and not form.from_anchor):
        refusing = (*refusing, "SGLang")
    made: Callable[..., DFlash] = DFlash
    own: dict[str, str] = {}
    if form is DFLASH2:
        made, own = _convolved(files, settings, of_transformers, ids)
    if form is DSPARK:
        made, own, cannot = _markov(files, settings)
        refusing, served = (*refusing, *cannot), {}
    others = ("vLLM",) if written and ANCHOR not in config and anchored else ()  # for which a missing key is false
    return DFlashFormat(
        files,
        SPECULATORS if written else DEEPSEEK if form is DSPARK else ZLAB,
        of_transformers,
        config,
        of_transformers.max_position_embeddings - 1,  # the anchor is a row of its own
        ids,
        order,
        passed=tuple(layer + (0 if written else 1) for layer in layers),  # of z-lab, outputs of layers from 0
        mask=mask,
        drafts=block - 1 + anchored,
        anchored=anchored,
        reach=reach,
        served={engine: theirs for engine, theirs in served.items() if theirs != reach and engine not in refusing},
        refusing=tuple(dict.fromkeys(refusing)),
        scale=scale,
        made=made,
        own=own,
        other_rows=others if form is DSPARK else None,
    )


def _convolved(
    files: HeadFiles, settings: Mapping[str, Any], layers: Any, ids: torch.Tensor | None
) -> tuple[Callable[..., DFlash], dict[str, str]]:
    """Return what makes a DFlash2 drafter, and its settings in words. Raises `ModelUnloadable`."""
    counts: dict[str, Any] = {key: settings.get(key) for key in CONVOLVED}
    scales = {key: settings.get(key) or neutral for key, neutral in SCALES.items()}
    unusable = [key for key, each in counts.items() if type(each) is not int or each < 1]
    unusable += [key for key, each in scales.items() if not isinstance(each, int | float) or each < 0]
    if unusable:
        raise files.refused(f"its config.json has no valid {', '.join(unusable)}", COMPLETE)
    (taps, group, rank, top), (multiplier, cap) = counts.values(), scales.values()
    if layers.hidden_size % group or top > layers.vocab_size or ids is not None:
        problem = f"groups of {group} channels of {layers.hidden_size}, {top} candidates of {layers.vocab_size} ids"
        raise files.refused(f"{problem}{', a vocabulary of its own' if ids is not None else ''}: unsupported", IMPORT)
    logits = f"times {multiplier:g}" + (f", capped at {cap:g}" if cap else "")
    words = {
        "convolution": f"{taps} rows, in groups of {group} channels",
        "candidates": f"{top} a row, scored by the token before them; vLLM's V1 runner has no selector, and refuses them",
        "logits": logits,
    }
    made = partial(DFlash2, taps=taps, group=group, rank=rank, top=top, multiplier=multiplier, cap=cap)
    return made, words


def _markov(files: HeadFiles, settings: Mapping[str, Any]) -> tuple[Callable[..., DFlash], dict[str, str], tuple[str, ...]]:
    """Return what makes a DSpark drafter, its settings in words, and engines that do not load such a Markov head. Raises
    `ModelUnloadable`.
    """
    files.require_flags(settings, CONFIDENCE)
    kind, rank = settings.get("markov_head_type") or VANILLA, settings.get("markov_rank") or 0
    if kind not in MARKOV or type(rank) is not int or rank < 0:
        raise files.refused(f"its config.json has markov_head_type {shown(kind)}, markov_rank {shown(rank)}", COMPLETE)
    confident = "both" if settings.get(CONFIDENCE[1]) else "row"
    if not any(name.startswith("confidence_head.") for name in files.tensors):
        confident = ""
    words = {
        "Markov head": f"{kind}, rank {rank}" if rank else "none: the rows of DFlash, of which the anchor's drafts too",
        "confidence head": CONFIDENT[confident],
    }
    cannot = ("SGLang",) if not rank else ("vLLM", "llama.cpp") if kind != VANILLA else ()
    return partial(DSpark, markov=kind, rank=rank, confident=confident), words, cannot


def _reaches(
    files: HeadFiles, layers: Any, nested: Mapping[str, Any]
) -> tuple[tuple[Reach, ...], dict[str, tuple[Reach, ...]], tuple[str, ...]]:
    """Return which keys rows see in each layer, what each engine reads, and the engines that refuse the files.

    A window belongs to layers of type sliding_attention, or with `use_swa` and none of these to every layer; its size is
    `swa_window_size`, else `sliding_window`. vLLM reads z-lab's keys so; SGLang knows none of these in dflash_config.
    """
    config, sliding = files.config, [kind == SLIDING for kind in layers.layer_types]
    size = nested.get("swa_window_size", layers.sliding_window)
    windowed = sliding if any(sliding) or not nested.get("use_swa") else [True] * len(sliding)
    if size is not None and (type(size) is not int or size < 1):
        raise files.refused(f"its config.json has a window of {shown(size)}", COMPLETE)
    if nested.get("use_swa") and size is None:
        raise files.refused("its config.json has use_swa, but no swa_window_size", COMPLETE)
    windows = [size if each else None for each in windowed]
    causal, forced = causal_layers(config, layers.layer_types), config.get(CAUSAL)
    if config.get("speculators_model_type"):
        if forced is None:  # vLLM takes a missing key as true, and the key for all layers
            forced = not config.get(NON_CAUSAL) and config.get(NON_CAUSAL) is not None
        theirs = {"vLLM": ([forced] * len(sliding), windows)}
    else:
        types = causal_layers({CAUSAL: forced}, layers.layer_types)
        theirs = {"SGLang": (types, [layers.sliding_window if each else None for each in sliding])}
    served = {engine: tuple(map(Reach, *each)) for engine, each in theirs.items()}
    return tuple(map(Reach, causal, windows)), served, ("vLLM",) if any(windowed) and size is None else ()


def _require_states(head: DFlashFormat, target: Model) -> None:
    """Raise `ModelUnloadable` for states that the target does not have, and for one with another number of layers."""
    count = target.network.config.get_text_config().num_hidden_layers
    named = head.settings.get("num_target_layers") or count
    if min(head.passed) < 1 or max(head.passed) > count or named != count:
        problem = f"it reads states after {', '.join(map(str, head.passed))} of {named} layers, but the target has {count}"
        raise head.files.refused(problem, OTHER_TARGET)


def _network(head: DFlashFormat, drafts: int, target: Model, dtype: torch.dtype) -> DFlash:
    """Return the drafter on the target's device. Raises `ModelUnloadable` for tensors that are missing, unused, of other
    shapes, quantised or not finite.
    """
    copies = {key for key in (EMBEDDING, LM_HEAD) if _is_copy(head, key, target)}
    shared = shared_weights(head, target, head.files.tensors.keys() - copies)
    with torch.device("meta"):
        network = head.made(
            head.layers,
            head.passed,
            masks=MaskRows(head.mask, drafts),
            reach=head.reach,
            anchored=head.anchored,
            scale=head.scale,
            ids=head.ids,
            target=shared,
        )
    return filled(network, head, {"mask_embedding"} | copies, target, dtype)


def _is_copy(head: DFlashFormat, key: str, target: Model) -> bool:
    """Return whether a tensor of its files is a copy of the target's own, which then stands in for it."""
    network = target.network
    module = network.get_input_embeddings() if key == EMBEDDING else network.get_output_embeddings()
    weight: Any = getattr(module, "weight", None)
    if key not in head.files.tensors or weight is None or head.ids is not None:
        return False
    own = head.files.tensor(key)
    return own.shape == weight.shape and torch.equal(own.to(weight.dtype), weight.cpu())
