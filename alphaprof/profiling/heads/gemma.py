"""Assistants of Gemma 4: a few layers with queries only, which read keys and values of the target's own layers.

Each depth joins the target's embedding of the token before with a state: at depth 1 the target's after its final norm, then
what the depth before hands on. All depths of a round stand at one place, that of the last token that the target has read,
and read the same keys: those up to there, by layer type of the target's last layer of that type that makes its own. Sources:
vLLM 0.33 (v1/spec_decode/gemma4.py, models/gemma4_mtp.py), SGLang 0.5.23 (frozen_kv_mtp_utils.py). The generator of
transformers 5.24 drafts otherwise: one place later, and over keys that rejected drafts have left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers import AutoConfig, AutoModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from alphaprof.config.heads import IMPORT
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.attention import Pair, StepKeys, use_rounds
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.eagle_files import OTHER_TARGET, EagleFormat, filled, head_of
from alphaprof.profiling.heads.files import COMPLETE, HeadFiles
from alphaprof.profiling.heads.network import HeadNetwork
from alphaprof.profiling.models.dtype import DTYPES
from alphaprof.profiling.models.load import Model, without_hooks
from alphaprof.profiling.models.private import RELEASE
from alphaprof.profiling.models.teacher_forced import FINAL, States, keys_of
from alphaprof.profiling.scoring.statistics import ABSENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import GemmaDraft
    from alphaprof.config.profile import ProfileOptions

LEAST = 5, 24  # of transformers: 5.23 cannot build one
FEW = 64  # rows whose logits are computed of chosen clusters alone; of more rows all take less memory
ORDER = "masked_embedding.token_ordering"


class GemmaAssistant(HeadNetwork):
    """An assistant. `settings`: its config.json; `text`: that of its layers, as transformers has it; `sources`: by layer
    type the number of the target's layer that it reads, and how wide this layer's keys are; `order` [ids]: the target's ids
    by cluster (None: no clusters). `later`: 1 if its place is that of the token behind the last one that the target has
    read.
    """

    ids = None
    later = 0
    order: torch.Tensor

    def __init__(
        self,
        settings: Mapping[str, Any],
        text: Any,
        sources: Mapping[str, tuple[int, int]],
        target: Model,
        order: torch.Tensor | None,
    ) -> None:
        super().__init__()
        body = AutoModel.from_config(text)
        self.config, self.settings, self.sources, self.vocabulary = body.config, settings, sources, text.vocab_size
        self.layers = (*(code for layer, _ in sources.values() for code in keys_of(layer)), FINAL)
        self._target = target.network.get_input_embeddings(), without_hooks(target.decoder.rotary_emb)  # no parts of it
        hidden, wide, clusters = text.hidden_size, settings["backbone_hidden_size"], settings.get("num_centroids", 2048)
        self.blocks, self.norm, self.embed_tokens = body.layers, body.norm, nn.Embedding(text.vocab_size, hidden)
        use_rounds(self.blocks, self.config)
        self.pre_projection, self.post_projection = (
            nn.Linear(2 * wide, hidden, bias=False),
            nn.Linear(hidden, wide, bias=False),
        )
        self.picks = order is not None
        self.top, self.cap = settings.get("centroid_intermediate_top_k", 32), text.final_logit_softcapping
        if order is not None:
            self.register_buffer("order", order.long().view(clusters, -1), persistent=False)
            self.masked_embedding = nn.ModuleDict({"centroids": nn.Linear(hidden, clusters, bias=False)})
        with torch.device("cpu"):
            self.rotary = type(body.rotary_emb)(self.config)

    def known(self, features: torch.Tensor, start: int) -> tuple[dict[str, Pair], torch.Tensor]:
        """Return the target's keys and values [batch, kv heads, n, head_dim] by layer type, and its states [batch, n,
        width], of features [batch, n, features] at positions from `start` on.
        """
        position_ids = torch.arange(start, start + features.shape[1], device=features.device)[None]
        widths = [width for _, width in self.sources.values() for _ in ("key", "value")]
        *parts, states = torch.split(features.to(self.dtype), [*widths, self.post_projection.out_features], -1)
        pairs: dict[str, Pair] = {}
        for kind, key, value in zip(self.sources, parts[::2], parts[1::2], strict=True):
            cos, sin = self._target[1](key, position_ids, kind)
            key, value = (each.view(*each.shape[:2], -1, cos.shape[-1]).transpose(1, 2) for each in (key, value))
            pairs[kind] = apply_rotary_pos_emb(key, key, cos, sin)[1], value
        return pairs, states

    def step(
        self, tokens: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, keys: Mapping[str, Pair]
    ) -> torch.Tensor:
        """Return states [batch, n, hidden] at a depth, of tokens [batch, n] and the states handed on [batch, n, width] of
        rounds after the tokens at `position_ids` [n], which are the last ones that `keys` hold.
        """
        embedding, _ = self._target
        embedded = embedding(tokens.to(embedding.weight.device)).to(states)
        hidden_states = self.pre_projection(torch.cat([embedded, states], -1))
        turns = {kind: self.rotary(hidden_states, position_ids[None] + self.later, kind) for kind in keys}
        for layer, kind in zip(self.blocks, self.config.layer_types, strict=True):
            hidden_states = layer(hidden_states, shared_kv_states=keys, position_embeddings=turns[kind])
        after: torch.Tensor = self.norm(hidden_states)
        return after

    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        """See `HeadNetwork`. Every round reads the keys up to the token that it begins after: causal attention, at every
        depth the same.
        """
        length, tokens = ids.shape[1], pad(ids, (0, depths))
        keys, states = self.known(features, 0)
        states, position_ids, drafted = states[:, first:], torch.arange(first, length, device=ids.device), None
        for depth in range(1, depths + 1):
            fed = tokens[:, first + depth : length + depth] if drafted is None else drafted
            rows = self.step(fed, states, position_ids, keys)
            drafted = yield rows
            states = self.post_projection(rows)

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadNetwork`. With clusters those of the ids in the best ones, all others are ABSENT."""
        weight = self.embed_tokens.weight
        if not self.picks:
            logits = linear(states, weight)
            return logits if not self.cap else (logits / self.cap).tanh() * self.cap
        centroids: Any = self.masked_embedding["centroids"]
        ids = self.order[centroids(states).topk(self.top).indices].flatten(1)
        few = len(states) <= FEW
        scores = (weight[ids] @ states[..., None])[..., 0] if few else linear(states, weight).gather(1, ids)
        return scores.float().new_full((len(states), len(weight)), ABSENT).scatter(1, ids, scores.float())

    def shape(self) -> ModelShape:
        """See `HeadNetwork`."""
        return ModelShape.of_assistant(self.settings, float(self.dtype.itemsize))

    def cache(self, first: torch.Tensor | None = None) -> AssistantCache:
        """Return an empty cache."""
        return AssistantCache(self)


class AssistantCache:
    """An assistant at work, a `HeadCache`: all that it keeps are the target's keys and values."""

    def __init__(self, network: GemmaAssistant) -> None:
        self._network, self.keys, self.length = network, StepKeys(), 0
        self._known: dict[str, Pair] = {}

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `HeadCache`."""
        self.keys.start = self.length
        pairs, states = self._network.known(features, self.length)
        self._known = {kind: self.keys.update(*pair, layer) for layer, (kind, pair) in enumerate(pairs.items())}
        self.length += tokens.shape[1]
        return self._step(tokens[:, -1], states[:, -1])

    @torch.inference_mode()
    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """See `HeadCache`."""
        return self._step(token, self._network.post_projection(state))

    def _step(self, token: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        position_ids = torch.tensor([self.length - 1], device=states.device)
        return self._network.step(token[:, None], states[:, None], position_ids, self._known)[:, 0]


def load_assistant(
    name: str, draft: GemmaDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`."""
    if RELEASE < LEAST:
        problem = f"draft {name}: transformers {'.'.join(map(str, RELEASE))} cannot build an assistant of Gemma 4"
        raise ModelUnloadable(problem, f"pip install 'transformers>={'.'.join(map(str, LEAST))}'; or {IMPORT}")
    head = head_of(name, draft, target, assistant_format)
    sources, settings = _sources(head, target), head.settings
    with torch.device("meta"):
        order = head.files.tensor(ORDER) if settings.get("use_ordered_embeddings") else None
        network = GemmaAssistant(settings, head.layers, sources, target, order)
    network = filled(network, head, {ORDER} if network.picks else set(), target, DTYPES[draft.dtype or target.dtype_name])
    layers = ", ".join(f"layer {layer} ({kind})" for kind, (layer, _) in sources.items())
    ids = f"the ids in {network.top} of {len(network.order)} clusters" if network.picks else "all ids"
    words = {
        "layout": head.layout,
        "target states": f"after the final norm; keys and values of {layers}",
        "place": "of the last token that the target has read, at every depth; transformers' own generator has the next one",
        "layers": f"{len(network.blocks)} of {head.layers.model_type}, without keys of their own",
        "logits": f"of {ids}",
    }
    setting = "serve it with an engine that counts so; vLLM 0.33 and SGLang 0.5.23 do not"
    return HeadDraft.of(
        name,
        draft,
        options.gammas,
        target,
        network,
        context=head.context,
        files=head.files.paths,
        reading=words,
        engines=("vLLM", "SGLang"),
        alternatives=[Alternative("the place of the next token", setting, network.changed(later=1))],
    )


def assistant_format(files: HeadFiles) -> EagleFormat:
    """Return what the files of an assistant say. Raises `ModelUnloadable` for what transformers refuses."""
    try:
        config = AutoConfig.for_model(**files.config)
        text: Any = config.get_text_config()
        settings = files.config | {"target_hidden_size": config.backbone_hidden_size}
    except Exception as error:
        raise files.refused(f"its config.json: {' '.join(str(error).split())[:300]}", COMPLETE) from error
    return EagleFormat(files, "Gemma 4", text, settings, text.max_position_embeddings)


def _sources(head: EagleFormat, target: Model) -> dict[str, tuple[int, int]]:
    """Return by layer type the number of the target's layer whose keys an assistant reads, and how wide they are. Raises
    `ModelUnloadable` for a target that has none.
    """
    config = target.network.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    own = types[: len(types) - (getattr(config, "num_kv_shared_layers", None) or 0)]
    last, found = {kind: layer for layer, kind in enumerate(own)}, {}  # of each type
    for number, kind in enumerate(head.layers.layer_types):
        attention: Any = target.decoder.layers[last[kind]].self_attn if kind in last else None
        size = head.layers.per_layer_config[number].head_dim
        if not hasattr(attention, "v_norm") or attention.head_dim != size:
            problem = f"it reads keys of {size} numbers a head in layers of {kind}, which {target.reference} does not have"
            raise head.files.refused(problem, OTHER_TARGET)
        found[kind] = last[kind], attention.k_proj.out_features
    return found
