"""DFlash drafters: a block of mask rows that read each other and the target's states, all tokens of a round in one pass.

A round's block is its anchor, the last token that was emitted, and mask rows. Its rows read, not causally, each other and
keys that are made of the target's states before the anchor: what a row proposes depends on how many there are, and on
nothing that was drafted. Engines run 1 + γ rows, of which each mask row proposes the token at its own position; or γ rows,
of which each proposes the token behind it (sample_from_anchor). Sources: z-lab/dflash (model.py), speculators 0.9.0
(models/dflash), vLLM 0.32 (models/qwen3_dflash.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from alphaprof.errors import ModelUnloadable, shown
from alphaprof.profiling.heads.attention import SLIDING, Pair, Rounds, StepKeys
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.eagle import LM_HEAD, SharingHead, decoder_layers
from alphaprof.profiling.heads.eagle_files import (
    ENGINE,
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
from alphaprof.profiling.heads.parallel import OnePass, OnePassCache, other_masks, require_mask
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import DFlashDraft
    from alphaprof.config.profile import ProfileOptions

ZLAB, ARCHITECTURE = "z-lab", "DFlashDraftModel"
NESTED = "dflash_config"  # of config.json, in z-lab's layout
KNOWN = {"mask_token_id", "target_layer_ids", "block_size", "sample_from_anchor"}
ANCHOR = "sample_from_anchor"
BLOCK = 16  # rows, if files do not say
AT_ONCE, GPU_AT_ONCE = 64, 512  # blocks that are run together, with all of their rows


class DFlash(OnePass, SharingHead):
    """A DFlash drafter. `layers`: see `HeadNetwork`; `mask`: its mask token; `rows`: of a block; `anchored`: 1 if each row
    proposes the token behind it, so that the anchor's row proposes one; 0 if each proposes the token at its own position.
    """

    most: int

    def __init__(
        self,
        config: Any,
        layers: tuple[int, ...],
        *,
        mask: int,
        rows: int,
        anchored: int = 0,
        ids: torch.Tensor | None = None,
        target: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(config, ids, target)
        self.layers, self.mask, self.rows, self.anchored = layers, mask, rows, anchored
        self.most = rows - 1 + anchored
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (LlamaRMSNorm(hidden, eps) for _ in range(2))
        self.blocks = decoder_layers(config)
        count = config.vocab_size if ids is None else len(ids)
        self.lm_head = nn.Linear(hidden, count, bias=False) if LM_HEAD not in target else None

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

    def block(self, anchors: torch.Tensor, position_ids: torch.Tensor, **keys: Any) -> torch.Tensor:
        """Return states [batch, depths, n, hidden] of blocks with `anchors` [batch, n] at `position_ids` [n]. `keys`: for
        the layers, see `attention`.
        """
        batch, count = anchors.shape
        tokens = anchors.new_full((batch, self.rows, count), self.mask)
        tokens[:, 0] = anchors
        rows = position_ids + torch.arange(self.rows, device=anchors.device)[:, None]  # positions [rows, n]
        hidden_states = self.embedded(tokens.flatten(1), self.norm.weight)
        turns = self.rotary(hidden_states, rows.flatten()[None])
        for layer in self.blocks:
            hidden_states = layer(hidden_states, attention_mask=None, position_embeddings=turns, **keys)
        states: torch.Tensor = self.norm(hidden_states).view(batch, self.rows, count, -1)[:, 1 - self.anchored :]
        return states

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """See `HeadNetwork`."""
        length, known = ids.shape[1], self.context(features, 0)
        anchors, position_ids = functional.pad(ids[:, 1:], (0, 1)), torch.arange(1, length + 1, device=ids.device)
        span, parts = AT_ONCE if ids.device.type == "cpu" else GPU_AT_ONCE, []
        for start in range(first, length, span):
            end = min(start + span, length)
            rounds = Rounds(end - start, ((keys[:, :, :end], values[:, :, :end]) for keys, values in known))
            parts.append(self.block(anchors[:, start:end], position_ids[start:end], rounds=rounds))
        yield from torch.cat(parts, 2).unbind(1)[:depths]

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadNetwork`."""
        return self.head(states)

    def cache(self, first: torch.Tensor | None = None) -> DFlashCache:
        """Return an empty cache."""
        return DFlashCache(self)


class DFlashCache(OnePassCache):
    """A DFlash drafter at work, a `HeadCache`: all that it keeps are keys of the target's states."""

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
        states = self._network.block(tokens[:, -1:], position_ids, past_key_values=self.keys, is_causal=False)
        self.drafted = states[:, :, 0]
        return self.drafted[:, 0]


@dataclass(frozen=True, kw_only=True)
class DFlashFormat(EagleFormat):
    """What the files of a DFlash drafter say. `passed`: the target's states, by layers passed; `rows`: of a block."""

    passed: tuple[int, ...]
    mask: int
    rows: int
    anchored: int

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
    rows = draft.block or head.rows
    drafts = rows - 1 + head.anchored
    if drafts not in options.gammas:
        problem = f"draft {name} drafts {drafts} tokens in a block of {rows} rows, but gammas is {list(options.gammas)}"
        raise ModelUnloadable(problem, f"add {drafts} to gammas, or set this draft's block to match one of them")
    if draft.depths not in (None, drafts):
        problem = f"draft {name} drafts {drafts} tokens in a block of {rows} rows, but its depths are {draft.depths}"
        raise ModelUnloadable(problem, "remove depths: block sets how many tokens it drafts")
    network = _network(head, rows, target, DTYPES[draft.dtype or target.dtype_name])
    zlab = not head.anchored and head.layout == ZLAB  # what SGLang serves
    proposes = "proposes the token after it" if head.anchored else "but the anchor proposes its own token"
    words = {
        "layout": head.layout,
        "target states": f"after {', '.join(map(str, head.passed))} layers",
        "mask token": str(head.mask),
        "block": f"{rows} rows; each {proposes}",
    }
    return HeadDraft.of(
        name,
        draft,
        [drafts],
        target,
        network,
        context=head.context,
        block=drafts + 1,
        in_one_step=True,
        foreign=() if zlab else ("SGLang",),
        reading=words | described(head, network),
        engines=("vLLM", "SGLang") if zlab else ("vLLM",),
        alternatives=list(_alternatives(head, network, target)),
    )


def _alternatives(head: DFlashFormat, network: DFlash, target: Model) -> Iterator[Alternative]:
    """Yield the readings that are likely mistakes: states one layer off, and another mask token."""
    off_by, key = (1, "aux_hidden_state_layer_ids") if head.layout == SPECULATORS else (0, "target_layer_ids")
    for words, step in (("later", 1), ("earlier", -1)):
        layers = tuple(layer + step for layer in head.passed)
        if min(layers) >= 1 and max(layers) <= target.network.config.get_text_config().num_hidden_layers:
            setting = f"set {key}: {[layer - 1 + off_by for layer in layers]} in its config.json"
            yield Alternative(f"states of the target one layer {words}", setting, network.changed(layers=layers))
    yield from other_masks(network, target, "mask_token_id", min(2, network.most))


def dflash_format(files: HeadFiles) -> DFlashFormat:
    """Return what the files of a DFlash drafter in z-lab's layout, or that of speculators, say. Raises `ModelUnloadable`."""
    config = files.config
    written = config.get("speculators_model_type")
    architecture = written or (config.get("architectures") or [""])[0]
    shape, settings = (config.get("transformer_layer_config"), config) if written else (config, config.get(NESTED))
    if architecture not in ("dflash", ARCHITECTURE) or not (isinstance(shape, dict) and isinstance(settings, dict)):
        raise files.refused(f"it is a {shown(architecture)}, not a {ARCHITECTURE} with {NESTED}", ENGINE)
    if not written and (odd := sorted(set(settings) - KNOWN)):
        raise files.refused(f"{NESTED} has {', '.join(odd)}, which is unsupported", ENGINE)
    if shape.get("sliding_window") is not None or SLIDING in str(shape.get("layer_types")):
        raise files.refused("its config.json has sliding_window, which is unsupported", ENGINE)
    files.require_flags(config | settings, [ANCHOR])
    layers = settings.get("aux_hidden_state_layer_ids" if written else "target_layer_ids")
    mask = settings.get("mask_token_id")
    if not (isinstance(layers, list) and layers and all(type(each) is int for each in layers) and type(mask) is int):
        raise files.refused("its config.json lacks the ids of the target's layers, or mask_token_id", COMPLETE)
    require_mask(files, mask, shape.get("vocab_size"))
    of_transformers = layer_config(files, shape, Qwen3Config)
    total = of_transformers.vocab_size
    ids, order = draft_vocabulary(files, config.get("draft_vocab_size") or total, total)
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
        rows=settings.get("block_size") or config.get("block_size") or BLOCK,
        anchored=int(bool(settings.get(ANCHOR, config.get(ANCHOR)))),
    )


def _require_states(head: DFlashFormat, target: Model) -> None:
    """Raise `ModelUnloadable` for states that the target does not have, and for one with another number of layers."""
    count = target.network.config.get_text_config().num_hidden_layers
    named = head.settings.get("num_target_layers") or count
    if min(head.passed) < 1 or max(head.passed) > count or named != count:
        problem = f"it reads states after {', '.join(map(str, head.passed))} of {named} layers, but the target has {count}"
        raise head.files.refused(problem, OTHER_TARGET)


def _network(head: DFlashFormat, rows: int, target: Model, dtype: torch.dtype) -> DFlash:
    """Return the drafter on the target's device. Raises `ModelUnloadable` for tensors that are missing, unused, of other
    shapes, quantised or not finite.
    """
    shared = shared_weights(head, target)
    with torch.device("meta"):
        network = DFlash(
            head.layers, head.passed, mask=head.mask, rows=rows, anchored=head.anchored, ids=head.ids, target=shared
        )
    return filled(network, head, set(), target, dtype)
