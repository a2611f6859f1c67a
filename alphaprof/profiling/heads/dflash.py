"""DFlash drafters: a block of mask rows that read the target's states and each other, all tokens of a round in one pass.

A round's block is its anchor, the last token that was emitted, and mask rows. Its rows read keys that are made of the
target's states before the anchor, and each other: in a causal layer the earlier rows, else all of them. Where a layer is not
causal, what a row proposes depends on how many rows there are; nowhere on what was drafted. Engines run 1 + γ rows, of which
each mask row proposes the token at its own position; or γ rows, of which each proposes the token behind it
(sample_from_anchor). Sources: z-lab/dflash (model.py), speculators 0.9.0 (models/dflash), vLLM 0.33
(models/qwen3_dflash.py), SGLang 0.5.23 (models/dflash.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from alphaprof.config.heads import IMPORT, NESTED, causal_layers
from alphaprof.errors import ModelUnloadable, shown
from alphaprof.profiling.heads.attention import SLIDING, Pair, Reach, Rounds, StepKeys
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, SharingHead, decoder_layers
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
from alphaprof.profiling.models.teacher_forced import States

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import DFlashDraft
    from alphaprof.config.profile import ProfileOptions

ZLAB = "z-lab"
ANCHOR, CAUSAL, NON_CAUSAL, SCALE = "sample_from_anchor", "is_causal", "sliding_window_non_causal", "input_embedding_scale"
KNOWN = {*("mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size"), ANCHOR, SCALE}
BLOCK = 16  # rows, if files do not say
AT_ONCE, GPU_AT_ONCE = 64, 512  # blocks that are run together, with all of their rows


class DFlash(SharingHead):
    """A DFlash drafter. `layers`: see `HeadNetwork`; `anchored`: 1 if each row proposes the token behind it, so that the
    anchor's row proposes one; 0 if each proposes the token at its own position; `reach`: which keys the rows see, by layer;
    `scale`: of the weights of the target's embedding (None: as the target's module scales them).
    """

    masks: MaskRows

    def __init__(
        self,
        config: Any,
        layers: tuple[int, ...],
        *,
        masks: MaskRows,
        reach: tuple[Reach, ...],
        anchored: int = 0,
        scale: float | None = None,
        ids: torch.Tensor | None = None,
        target: Mapping[str, Any],
    ) -> None:
        super().__init__(config, ids, target)
        self.layers, self.masks, self.reach, self.anchored, self.scale = layers, masks, reach, anchored, scale
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (LlamaRMSNorm(hidden, eps) for _ in range(2))
        self.blocks = decoder_layers(config)
        count = config.vocab_size if ids is None else len(ids)
        self.lm_head = nn.Linear(hidden, count, bias=False) if LM_HEAD not in target else None

    @property
    def by_length(self) -> bool:
        """Whether what a row proposes depends on how many rows there are."""
        return not all(each.causal for each in self.reach)

    @property
    def most(self) -> int | None:  # type: ignore[override]
        """See `HeadNetwork`."""
        return self.masks.drafts if self.by_length else None

    def embedded(self, tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `SharingHead`."""
        if self.scale is None:
            return super().embedded(tokens, like)
        weight = self._target[EMBEDDING].weight if self.embed_tokens is None else self.embed_tokens.weight
        return functional.embedding(tokens.to(weight.device), weight).to(like) * self.scale

    def context(self, features: torch.Tensor, start: int) -> list[Pair]:
        """Return keys and values of every layer [batch, kv heads, n, head_dim] of target states [batch, n, features] at
        positions from `start` on.
        """
        hidden_states = self.hidden_norm(self.fc(features.to(self.dtype)))
        position_ids = torch.arange(start, start + features.shape[1], device=features.device)
        cos, sin = self.rotary(hidden_states, position_ids[None])
        pairs: list[Pair] = []
        for attention in (layer.self_attn for layer in list[Any](self.blocks)):
            shape = (*hidden_states.shape[:2], -1, attention.head_dim)
            key = attention.k_norm(attention.k_proj(hidden_states).view(shape)).transpose(1, 2)
            value = attention.v_proj(hidden_states).view(shape).transpose(1, 2)
            pairs.append((apply_rotary_pos_emb(key, key, cos, sin)[1], value))
        return pairs

    def block(self, anchors: torch.Tensor, position_ids: torch.Tensor, drafts: int, **keys: Any) -> torch.Tensor:
        """Return states [batch, drafts, n, hidden] of blocks with `anchors` [batch, n] at `position_ids` [n]. `keys`: for
        the layers, see `attention`.
        """
        batch, count = anchors.shape
        size = drafts + 1 - self.anchored
        tokens = anchors.new_full((batch, size, count), self.masks.token)
        tokens[:, 0] = anchors
        rows = position_ids + torch.arange(size, device=anchors.device)[:, None]  # positions [rows, n]
        hidden_states = self.embedded(tokens.flatten(1), self.norm.weight)
        turns = self.rotary(hidden_states, rows.flatten()[None])
        for layer, reach in zip(self.blocks, self.reach, strict=True):
            hidden_states = layer(hidden_states, attention_mask=None, position_embeddings=turns, reach=reach, **keys)
        states: torch.Tensor = self.norm(hidden_states).view(batch, size, count, -1)[:, 1 - self.anchored :]
        return states

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        """See `HeadNetwork`."""
        length, known = ids.shape[1], self.context(features, 0)
        anchors, position_ids = functional.pad(ids[:, 1:], (0, 1)), torch.arange(1, length + 1, device=ids.device)
        span, parts = AT_ONCE if ids.device.type == "cpu" else GPU_AT_ONCE, []
        drafts = self.masks.drafts if self.by_length else depths
        for start in range(first, length, span):
            end = min(start + span, length)
            rounds = Rounds(end - start, ((keys[:, :, :end], values[:, :, :end]) for keys, values in known))
            parts.append(self.block(anchors[:, start:end], position_ids[start:end], drafts, rounds=rounds))
        whole = torch.cat(parts, 2)
        for depth in range(depths):
            yield whole[:, depth]  # whatever is sent: its rows read nothing that is drafted

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadNetwork`."""
        return self.head(states)

    def cache(self, first: torch.Tensor | None = None) -> DFlashCache:
        """Return an empty cache."""
        return DFlashCache(self)


class DFlashCache:
    """A DFlash drafter at work, a `HeadCache`: all that it keeps are keys of the target's states. `drafted`: as in
    `RoundCache`.
    """

    drafted: torch.Tensor

    def __init__(self, network: DFlash) -> None:
        self._network, self.keys, self.length = network, StepKeys(), 0

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        self.keys.start = self.length
        for layer, pair in enumerate(self._network.context(features, self.length)):
            self.keys.update(*pair, layer)
        self.length += tokens.shape[1]
        self.keys.start = self.length
        position_ids = torch.tensor([self.length], device=tokens.device)
        drafts = self._network.masks.drafts
        self.drafted = self._network.block(tokens[:, -1:], position_ids, drafts, past_key_values=self.keys)[:, :, 0]
        return self.drafted[:, 0]

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self.drafted[:, depth - 1]


@dataclass(frozen=True, kw_only=True)
class DFlashFormat(EagleFormat):
    """What the files of a DFlash drafter say. `passed`: the target's states, by layers passed; `drafts`: of a block, as it
    was trained; `reach`: which keys its rows see, by layer; `served`: the same as engines read it that read it otherwise;
    `refusing`: engines that do not load such files; `anchored`, `scale`: see `DFlash`.
    """

    passed: tuple[int, ...]
    mask: int
    drafts: int
    anchored: int
    reach: tuple[Reach, ...]
    served: dict[str, tuple[Reach, ...]]
    refusing: tuple[str, ...]
    scale: float | None

    def stored_name(self, name: str) -> str:
        """Return what its files call a tensor of `DFlash`."""
        return name.replace("blocks.", "layers.")


def load_dflash(
    name: str, draft: DFlashDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    head = head_of(name, draft, target, dflash_format)
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
        reading=words | described(head, network),
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
    depth = min(2, network.masks.drafts)
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


def dflash_format(files: HeadFiles) -> DFlashFormat:
    """Return what the files of a DFlash drafter in z-lab's layout, or that of speculators, say. Raises `ModelUnloadable`."""
    config = files.config
    written = config.get("speculators_model_type")
    nested = {} if written else config.get(NESTED) or {}
    shape = config.get("transformer_layer_config") if written else config
    if not (isinstance(shape, dict) and isinstance(nested, dict)):
        raise files.refused(f"transformer_layer_config or {NESTED} in its config.json is not an object", COMPLETE)
    if odd := sorted(set(nested) - KNOWN):
        raise files.refused(f"{NESTED} has {', '.join(odd)}, which is unsupported", IMPORT)
    settings = config | nested
    files.require_flags(settings, [ANCHOR, CAUSAL, NON_CAUSAL, "causal", "use_swa"])
    layers = settings.get("aux_hidden_state_layer_ids" if written else "target_layer_ids")
    mask, scale, block = settings.get("mask_token_id"), settings.get(SCALE), settings.get("block_size") or BLOCK
    if not (isinstance(layers, list) and layers and all(type(each) is int for each in layers) and type(mask) is int):
        raise files.refused("its config.json lacks the ids of the target's layers, or mask_token_id", COMPLETE)
    anchored = int(bool(settings.get(ANCHOR)))
    if type(block) is not int or block < 2 - anchored or not isinstance(scale, int | float | None):
        raise files.refused(f"its config.json has block_size {shown(block)}, {SCALE} {shown(scale)}", COMPLETE)
    require_mask(files, mask, shape.get("vocab_size"))
    of_transformers = layer_config(files, shape, Qwen3Config)
    total = of_transformers.vocab_size
    ids, order = draft_vocabulary(files, config.get("draft_vocab_size") or total, total)
    reach, served, refusing = _reaches(files, of_transformers, nested)
    if anchored or written:
        refusing = (*refusing, "SGLang")
    return DFlashFormat(
        files,
        SPECULATORS if written else ZLAB,
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
    )


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
    shared = shared_weights(head, target)
    with torch.device("meta"):
        network = DFlash(
            head.layers,
            head.passed,
            masks=MaskRows(head.mask, drafts),
            reach=head.reach,
            anchored=head.anchored,
            scale=head.scale,
            ids=head.ids,
            target=shared,
        )
    return filled(network, head, set(), target, dtype)
