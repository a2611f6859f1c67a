"""DFlash drafters: a block of mask rows that read each other and the target's states, all tokens of a round in one pass.

A round's block is its anchor, the last token that was emitted, and a mask row for each token to draft. Its rows read, not
causally, each other and keys that are made of the target's states before the anchor: what a row proposes depends on how many
there are, and on nothing that was drafted. Engines run 1 + γ rows. Sources: z-lab/dflash (dflash.py), vLLM 0.32
(models/qwen3_dflash.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from alphaprof.costs.roofline import ModelShape
from alphaprof.errors import ModelUnloadable, shown
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, HeadLayer, Keys, by_round
from alphaprof.profiling.heads.eagle_files import ENGINE, OTHER_TARGET, layer_config, require_layers, shared_weights
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles, files_of
from alphaprof.profiling.heads.network import HeadNetwork, head_shape
from alphaprof.profiling.heads.parallel import require_mask, used_once
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import DFlashDraft
    from alphaprof.config.profile import ProfileOptions

ARCHITECTURE = "DFlashDraftModel"
OWN = "dflash_config"  # of config.json


class DFlash(HeadNetwork):
    """A DFlash drafter. `layers`: see `HeadNetwork`; `mask`: its mask token; `drafts`: rows of a block beside the anchor;
    `target`: the target's embedding and LM head [ids, hidden], by name.
    """

    def __init__(
        self, config: Any, layers: tuple[int, ...], *, mask: int, drafts: int, target: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.config, self.layers, self.mask, self.drafts, self.most = config, layers, mask, drafts, drafts
        self.vocabulary = len(target[LM_HEAD])
        self.register_buffer("ids", None)
        self._target = target  # in a mapping they are no parameters of this module
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (LlamaRMSNorm(hidden, eps) for _ in range(2))
        self.blocks = nn.ModuleList(HeadLayer(config, hidden, True) for _ in range(config.num_hidden_layers))
        with torch.device("cpu"):
            self.rotary = LlamaRotaryEmbedding(config)

    def with_layers(self, layers: tuple[int, ...]) -> DFlash:
        """The same tensors on other states of the target."""
        twin = copy.copy(self)
        twin.layers = layers
        return twin

    def context(self, features: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer [batch, groups, n, size] of target states [batch, n, features] from a place on."""
        states = self.hidden_norm(self.fc(features.to(self.dtype)))
        places = torch.arange(start, start + features.shape[1], device=features.device)
        rotation, blocks = self.rotary(states, places[None]), list[Any](self.blocks)
        return [block.self_attn.projected(states, rotation)[1:] for block in blocks]

    def rows(
        self, anchors: torch.Tensor, places: torch.Tensor, known: list[tuple[torch.Tensor, torch.Tensor]], first: int
    ) -> list[torch.Tensor]:
        """States [batch, n, hidden] of each row of the blocks with `anchors` [batch, n] at `places` [n], in the order of the
        bases from `first` on; `known`: what `context` gives of all tokens.
        """
        weight = self._target[EMBEDDING]
        tokens = [anchors, *[torch.full_like(anchors, self.mask)] * self.drafts]
        states = [functional.embedding(each.to(weight.device), weight).to(self.norm.weight) for each in tokens]
        rotations = [self.rotary(states[0], (places + row)[None]) for row in range(len(states))]
        block: Any
        for block, (keys, values) in zip(self.blocks, known, strict=True):
            inputs = zip(map(block.input_layernorm, states), rotations, strict=True)
            parts = [block.self_attn.projected(*each) for each in inputs]
            own = [(key, value) for _, key, value in parts]
            for row, (query, _, _) in enumerate(parts):
                after = states[row] + block.self_attn.added(by_round(query, keys, values, own, first))
                states[row] = after + block.mlp(block.post_attention_layernorm(after))
        return [self.norm(each) for each in states]

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> Iterator[torch.Tensor]:
        """See `HeadNetwork`."""
        length = ids.shape[1]
        anchors = functional.pad(ids, (0, 1))[:, first + 1 : length + 1]
        places = torch.arange(first + 1, length + 1, device=ids.device)
        yield from self.rows(anchors, places, self.context(features, 0), first)[1 : depths + 1]

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [n, logits] by the target's LM head."""
        weight = self._target[LM_HEAD]
        return functional.linear(states.to(weight), weight).to(states)

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`."""
        return used_once(head_shape(self, self.config, self._target[LM_HEAD]))

    def cache(self, first: torch.Tensor | None = None) -> DFlashCache:
        """An empty cache."""
        return DFlashCache(self)


class DFlashCache:
    """A DFlash drafter at work, a `HeadCache`: all that it keeps are keys of the target's states."""

    def __init__(self, network: DFlash) -> None:
        self._network = network
        self._keys = [Keys() for _ in network.blocks]
        self._bases = 0

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        made = self._network.context(features, self._bases)
        known = [keys.put(self._bases, *each) for keys, each in zip(self._keys, made, strict=True)]
        self._bases += tokens.shape[1]
        place = torch.tensor([self._bases], device=tokens.device)
        self._states = self._network.rows(tokens[:, -1:], place, known, self._bases - 1)
        return self._states[1][:, 0]

    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self._states[depth][:, 0]


def load_dflash(
    name: str, draft: DFlashDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """A loader of `load_draft`."""
    files = files_of(name, draft.own_model)
    config, own = _config(files), files.config[OWN]
    require_layers(target, files.refused)
    theirs, ours = target.network.config.get_text_config(), (config.hidden_size, config.vocab_size)
    if ours != (theirs.hidden_size, target.vocabulary):
        problem = "it is for states of {} numbers and {} ids".format(*ours)
        raise files.refused(
            f"{problem}, and {target.reference} has {theirs.hidden_size} and {target.vocabulary}", OTHER_TARGET
        )
    block = _block_of(name, draft, files, options.gammas)
    layers = tuple(layer + 1 for layer in own["target_layer_ids"])  # outputs of layers, counted from 0
    if max(layers) > theirs.num_hidden_layers:
        raise files.refused(f"it reads states after {max(layers)} layers of {theirs.num_hidden_layers}", OTHER_TARGET)
    network = _network(files, config, layers, block - 1, target, DTYPES[draft.dtype or target.dtype_name])
    reading = {
        "layout": "z-lab",
        "target states": f"after {', '.join(map(str, layers))} layers",
        "mask token": str(network.mask),
        "block": f"{block} rows, the anchor among them",
    }
    moved = {words: tuple(layer + off for layer in layers) for words, off in (("later", 1), ("earlier", -1))}
    return HeadDraft.of(
        name,
        draft,
        [block - 1],
        target,
        network,
        method="dflash",
        algorithm="DFLASH",
        block=block,
        context=config.max_position_embeddings - 1,  # the anchor is a row of its own
        in_one_step=True,
        reading=reading,
        engines=("vLLM", "SGLang"),
        alternatives=[
            Alternative(
                f"states of the target one layer {words}",
                f"set target_layer_ids: {[layer - 1 for layer in other]} in its config.json",
                network.with_layers(other),
            )
            for words, other in moved.items()
            if min(other) >= 1 and max(other) <= theirs.num_hidden_layers
        ],
    )


def _block_of(name: str, draft: DFlashDraft, files: HeadFiles, gammas: Sequence[int]) -> int:
    """The rows of a block. Raises `ModelUnloadable` if `gammas` lack what it drafts."""
    block: int = draft.block or files.config[OWN].get("block_size") or files.config.get("block_size") or 16
    if block - 1 not in gammas:
        problem = f"draft {name} drafts {block - 1} tokens in a block of {block} rows, and gammas is {list(gammas)}"
        raise ModelUnloadable(problem, f"add {block - 1} to gammas, or set block of this draft to one of them plus one")
    return block


def _config(files: HeadFiles) -> Any:
    """The shape of its layers. Raises `ModelUnloadable` for what is not a DFlash drafter of z-lab's layout."""
    architectures = files.config.get("architectures") or [""]
    own = files.config.get(OWN)
    if ARCHITECTURE not in architectures or not isinstance(own, dict):
        raise files.refused(f"it is a {shown(architectures[0])}, and no {ARCHITECTURE} with {OWN}", ENGINE)
    known = {"mask_token_id", "target_layer_ids", "block_size"}
    if odd := sorted(set(own) - known):
        raise files.refused(f"{OWN} has {', '.join(odd)}, which is not measured", ENGINE)
    if files.config.get("sample_from_anchor") or files.config.get("sliding_window") is not None:
        raise files.refused("its config.json has sample_from_anchor or sliding_window, which is not measured", ENGINE)
    ids, mask = own.get("target_layer_ids"), own.get("mask_token_id")
    if not (isinstance(ids, list) and ids and all(type(each) is int and each >= 0 for each in ids) and type(mask) is int):
        raise files.refused(f"{OWN} in its config.json lacks target_layer_ids or mask_token_id", COMPLETE)
    require_mask(files, mask, files.config.get("vocab_size"))
    return layer_config(files, files.config, qwen3=True)


def _network(
    files: HeadFiles, config: Any, layers: tuple[int, ...], drafts: int, target: Model, dtype: torch.dtype
) -> DFlash:
    """The drafter on the target's device. Raises `ModelUnloadable` for tensors that are missing, unused, of other shapes,
    quantised or not finite.
    """
    shared = shared_weights(files, config.hidden_size, target, {EMBEDDING, LM_HEAD})
    with torch.device("meta"):
        network = DFlash(config, layers, mask=files.config[OWN]["mask_token_id"], drafts=drafts, target=shared)
    names = {key: key.replace("blocks.", "layers.") for key in network.state_dict()}
    files.require({names[key]: tuple(weight.shape) for key, weight in network.state_dict().items()})
    network.load_state_dict({key: files.loaded(stored, dtype) for key, stored in names.items()}, assign=True)
    return network.to(target.device).eval().requires_grad_(False)
