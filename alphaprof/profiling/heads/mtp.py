"""MTP modules in a target's checkpoint, and at work: a chain, one module a depth, or one that is reused at every depth.

A module reads, for the round after token i at depth k, the embedding of x_(i+k) and a state: at depth 1 the target's after
its final norm, then that of the depth before. Both kinds run the layers of transformers' MtpModel; they differ in what
attention sees.

Chain (DeepSeek-V3's training; transformers' `use_mtp`, vLLM's multi-module MTP): module k sees its own keys of all earlier
tokens. Engines make keys anew that came from rejected drafts, so that over a text they are those of the text's tokens, and
every depth is one causal pass.

Reused (vLLM and SGLang for a single module): true features overwrite, after verification, what the round's drafts left in
the cache. So the round after token i sees at depth k the keys that depth 1 made of tokens up to i, and its own of depths
2 .. k.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import modeling_layers

from alphaprof.config.model_files import ModelFiles, stored
from alphaprof.config.options import MtpDraft
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.attention import SLIDING, Rounds, StepKeys, use_rounds
from alphaprof.profiling.heads.draft import Alternative, HeadDraft
from alphaprof.profiling.heads.files import HeadFiles
from alphaprof.profiling.heads.network import HeadNetwork, RoundHead, head_shape
from alphaprof.profiling.models.hub import files_in, first_line
from alphaprof.profiling.models.load import Model, is_out_of_memory, without_advice, without_hooks
from alphaprof.profiling.models.private import CACHE, mtp_logits, mtp_model
from alphaprof.profiling.models.teacher_forced import States, short_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

# Where modules stand in a checkpoint: as layers after the target's last, under `mtp`, or under `mtp_layers`.
AFTER_LAST, QWEN, MIMO = "layers after the last", "mtp.*", "mtp_layers.*"
PATTERNS = {
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
OTHER_KINDS = ("mimo_v2", "minimax_m3", "deepseek_v4", "gemma4", "ernie4_5", "nemotron")
# vLLM's modules of these take the embedding at position 0 as zeros; transformers' do not.
BLIND = ("deepseek_v3", "glm4_moe", "mimo")
UNNORMED = "glm4_moe"
BEFORE_NORM = "use an engine that does so, like vLLM 0.32 for GLM-4.5"  # no config.json says it
IMPORT = "serve it with an engine and import its counters (alphaprof import)"
REUSE = (
    "reuse: false uses one module per depth (transformers' use_mtp; vLLM's model runner V2 on GPUs); reuse: true uses "
    "the first module at every depth (vLLM's model runner V1). SGLang cannot load more than one DeepSeek module"
)
PUBLISHED = "give the complete target as published: converters and quantizers often drop or change MTP modules"


class _Modules(HeadNetwork):
    """What both kinds share: the first `count` modules of a transformers MtpModel, which has embeddings and LM head of the
    target.
    """

    ids = None
    blind = False  # whether the embedding at position 0 is taken as zeros

    def __init__(self, mtp: Any, vocabulary: int, count: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config = mtp.config.get_text_config()
        self.own = nn.ModuleList(mtp.layers[:count])
        self.count = count
        use_rounds([module.mtp_block for module in mtp.layers], mtp.config)
        if mtp.use_shared_post_norm:
            self.own.append(mtp.shared_post_norm)
        self._whole = (mtp,)  # in a tuple: its embeddings and head are the target's, no tensors of a head

    @property
    def mtp(self) -> Any:
        """The MtpModel."""
        return self._whole[0]

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Return logits [n, vocabulary] by the target's LM head; the states come out of the module's own final norm."""
        return mtp_logits(self.mtp, states)

    def shape(self) -> ModelShape | None:
        """See `HeadNetwork`. Of a chain of several modules, each with a cache of its own, it is not known."""
        if (self.most or 1) > 1:
            return None
        config = copy.copy(self.config)
        config.num_hidden_layers = 1
        return head_shape(self.own, config, self.mtp.shared_head.weight)

    def run(
        self, module: int, tokens: torch.Tensor, hidden_states: torch.Tensor, position_ids: torch.Tensor, **keys: Any
    ) -> torch.Tensor:
        """Return states [batch, n, hidden] of a module, of tokens [batch, n] and states [batch, n, hidden] at `position_ids`
        [n]. `keys`: for its layer, see `attention`.
        """
        inputs_embeds = self.mtp.embed_tokens(tokens).to(hidden_states.device)
        if self.blind:
            inputs_embeds = inputs_embeds.masked_fill((position_ids == 0)[:, None], 0)
        position_ids = position_ids.expand(tokens.shape)
        cache = keys.pop(CACHE, None)
        after: torch.Tensor = self.mtp.forward_layer(
            module, hidden_states, position_ids, cache, inputs_embeds=inputs_embeds, **keys
        )
        return after


class ChainedModules(_Modules):
    """Modules of their own for each depth, as many as `mtp` has. In a round each makes its newest keys anew from what was
    drafted, where the pass over a text has those of the text's tokens: behind its first wrong draft a round is not known.
    """

    own_path = False

    def __init__(self, mtp: Any, vocabulary: int) -> None:
        super().__init__(mtp, vocabulary, len(mtp.layers))
        self.most = self.count

    @torch.inference_mode()
    def states(self, ids: torch.Tensor, features: torch.Tensor, depths: int, first: int) -> States:
        """Yield a causal pass for each depth; see `HeadNetwork`."""
        hidden_states, position_ids = features, torch.arange(ids.shape[1], device=ids.device)
        tokens = pad(ids, (0, depths))
        for depth in range(1, depths + 1):
            rows = tokens[:, depth : depth + ids.shape[1]], hidden_states
            hidden_states = self.run(depth - 1, *rows, position_ids + depth)
            yield hidden_states[:, first:]

    def cache(self, first: torch.Tensor | None = None) -> ChainedCache:
        """Return an empty cache."""
        return ChainedCache(self)


class ChainedCache:
    """The modules of a chain at work. A module makes keys anew from the first token on that was a draft. `_made`: how many
    keys of verified tokens there are, by module; `_given`: the states that it reads at the tokens after these.
    """

    def __init__(self, chain: ChainedModules) -> None:
        self._chain, self.keys = chain, StepKeys()
        self._tokens = torch.empty(0)  # x_1, x_2, ... and drafts after them
        self._length = 0
        self._made = [0] * chain.count
        self._given: dict[int, torch.Tensor] = {}

    def __copy__(self) -> ChainedCache:
        """See `HeadCache`."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _made=[*self._made], _given={**self._given})
        return twin

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Module 1 reads the tokens; see `HeadCache`."""
        self._tokens = tokens if not self._length else torch.cat([self._tokens[:, : self._length], tokens], dim=1)
        self._given[0] = features
        self._length += tokens.shape[1]
        return self._make(0)

    @torch.inference_mode()
    def deepen(self, token: torch.Tensor, state: torch.Tensor, depth: int) -> torch.Tensor:
        """The module of the depth reads all tokens that it has not seen verified; see `HeadCache`."""
        self._tokens = torch.cat([self._tokens[:, : self._length + depth - 2], token[:, None]], dim=1)
        return self._make(depth - 1)

    def _make(self, module: int) -> torch.Tensor:
        """Return the state after the last token, once a module has made the keys that it lacks."""
        begin, given = self._made[module], self._given[module]
        self.keys.start = begin
        tokens = self._tokens[:, begin + module : self._length + module]
        position_ids = torch.arange(begin, self._length, device=tokens.device) + module + 1
        states = self._chain.run(module, tokens, given, position_ids, **{CACHE: self.keys})
        verified = max(begin, self._length - module)
        self._made[module], self._given[module] = verified, given[:, verified - begin :]
        if module + 1 < self._chain.count:
            before = self._given.get(module + 1, states[:, :0])
            self._given[module + 1] = torch.cat([before[:, : begin - self._made[module + 1]], states], dim=1)
        return states[:, -1]


class ReusedModule(_Modules, RoundHead):
    """The first module at every depth. `blind`: the embedding at position 0 is taken as zeros, as engines have it for some
    architectures; `normed`: the state that the next depth reads is the one after the module's final norm (else the one
    before it; a module without such a norm has one state).
    """

    def __init__(self, mtp: Any, vocabulary: int, blind: bool = False, normed: bool = True) -> None:
        twin = _with_first_alone(mtp)
        super().__init__(twin, vocabulary, 1)
        self.blind = blind
        module = twin.layers[0]
        self._norm = module.post_norm if module.use_post_norm and not normed else None
        module.use_post_norm = module.use_post_norm and normed

    def entry(self, features: torch.Tensor) -> torch.Tensor:
        """See `RoundHead`."""
        return features

    @torch.inference_mode()
    def step(
        self, tokens: torch.Tensor, hidden_states: torch.Tensor, position_ids: torch.Tensor, **keys: Any
    ) -> torch.Tensor:
        """See `RoundHead`."""
        return self.run(0, tokens, hidden_states, position_ids, **keys)

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Return logits [n, vocabulary] by the target's LM head, after the module's final norm."""
        return super().logits(states if self._norm is None else self._norm(states), depth)


def _with_first_alone(mtp: Any) -> Any:
    """Return a shallow copy of a MtpModel with a copy of its first module, which shares all weights."""
    twin, module = copy.copy(mtp), copy.copy(mtp.layers[0])
    twin._modules, module._modules = dict(mtp._modules), dict(module._modules)
    twin.layers = nn.ModuleList([module])
    return twin


def load_mtp(
    name: str, draft: MtpDraft, options: ProfileOptions, target: Model, tokenizer: PreTrainedTokenizerBase
) -> HeadDraft:
    """Return a loader of `load_draft`: the modules of the target's own checkpoint."""
    config = target.network.config.get_text_config()
    _require_kind(name, config.model_type, target)
    layout, files = _found(name, target, files_in(options.target))
    count = _count(files, layout, config)
    if draft.reuse is None and count > 1:
        problem = f"{target.reference} has {count} MTP modules, and engines use them in two ways: set reuse"
        raise files.refused(problem, REUSE)
    reuse = draft.reuse is not False
    mtp = _loaded(files, target, layout, count)
    blind = config.model_type.startswith(BLIND) or layout == MIMO
    network = ReusedModule(mtp, target.vocabulary, blind) if reuse else ChainedModules(mtp, target.vocabulary)
    alternatives: list[Alternative] = []
    if reuse and mtp.layers[0].use_post_norm:
        unnormed = ReusedModule(mtp, target.vocabulary, blind, normed=False)
        engines = ("vLLM",) if config.model_type == UNNORMED else ()
        alternatives.append(Alternative("states fed back before the norm", BEFORE_NORM, unnormed, 2, engines))
    _require_running(files, network, target)
    words = {
        "layout": layout,
        "modules": str(count),
        "use of modules": "the first module at every depth" if reuse else "a chain: one module a depth",
        "fed back": "the state after the module's final norm",
    }
    if reuse and blind:
        words["embedding at position 0"] = "zeros, as in vLLM"
    return HeadDraft.of(
        name,
        draft,
        options.gammas,
        target,
        network,
        context=target.context,
        files=target.files,
        reading=words,
        alternatives=alternatives,
    )


def _require_kind(name: str, kind: str, target: Model) -> None:
    """Raise `ModelUnloadable` for a target that has no such modules, and where transformers cannot run them."""
    problem, hint = "", IMPORT
    if kind.startswith(OTHER_KINDS):
        problem = f"MTP modules of {kind} cannot be measured here"
    elif not hasattr(modeling_layers, "MtpModel"):
        problem = f"transformers {version('transformers')} cannot run MTP modules"
        hint = "pip install 'transformers>=5.23'"
    if problem:
        raise ModelUnloadable(f"draft {name}: {problem}", hint)


def _found(name: str, target: Model, files: ModelFiles | None) -> tuple[str, HeadFiles]:
    """Return the layout of a checkpoint's modules, and their tensors."""
    # None: a .gguf file, which holds no modules that transformers reads.
    found = {} if files is None else stored(files.named, f"draft {name}")
    last = target.network.config.get_text_config().num_hidden_layers
    for layout, pattern in PATTERNS.items():
        matches = {key: match for key in found if (match := pattern.search(key)) is not None}
        tensors = {key: found[key] for key, match in matches.items() if layout != AFTER_LAST or int(match[1]) >= last}
        if tensors:
            return layout, HeadFiles(f"draft {name}", {}, tensors)
    raise ModelUnloadable(f"draft {name}: the checkpoint of {target.reference} holds no MTP modules", PUBLISHED)


def _count(files: HeadFiles, layout: str, config: Any) -> int:
    """Return how many modules there are. Raises `ModelUnloadable` if the config says another number."""
    matches = (PATTERNS[layout].search(name) for name in files.tensors)
    count = len({match[1] for match in matches if match is not None and match[1] is not None})
    promised = [getattr(config, key, None) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    if not count or any(each not in (None, count) for each in promised):
        raise files.refused(f"its config.json does not match the {count} MTP modules in the checkpoint", PUBLISHED)
    if count > 1 and any(".fc." in name for name in files.tensors):
        raise files.refused(f"{count} MTP layers that share one projection cannot be measured here", IMPORT)
    return count


def _loaded(files: HeadFiles, target: Model, layout: str, count: int) -> Any:
    """Return a MtpModel with the modules' weights, where the target's LM head is and in its dtype. Raises `ModelUnloadable`
    for weights that modules lack or do not have, of another shape, quantised or not finite.
    """
    tensors, device = _tensors(files, target), getattr(target.network.get_output_embeddings(), "weight", target).device
    try:
        with without_advice(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            owner = _owner(target.network, layout, count)
            named = {_renamed(name, layout, owner): tensor for name, tensor in tensors.items()}
            mtp, loaded = mtp_model(owner, count, named, device, target.dtype)
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
    return beside_head(mtp, device).eval().requires_grad_(False)


def beside_head(mtp: Any, device: torch.device) -> Any:
    """Return a MtpModel that computes where its modules and the LM head are, whatever device its target's positions are on:
    `device_map` may spread the target. Its embeddings stay where they are, and bring tokens there.
    """
    if mtp.rotary_emb is not None:
        mtp.rotary_emb = without_hooks(mtp.rotary_emb).to(device)
    return mtp


def _tensors(files: HeadFiles, target: Model) -> dict[str, torch.Tensor]:
    """Return the modules' tensors by name, without the copies of the target's. Raises `ModelUnloadable` for quantised ones,
    and for copies that differ.
    """
    files.require_none(files.quantised(files.tensors), "give the target in 16 or 32 bits")
    tensors = {name: files.tensor(name) for name in files.tensors}
    for name in [name for name in tensors if name.endswith(tuple(COPIES))]:
        owner = next(getattr(target.network, getter)() for end, getter in COPIES.items() if name.endswith(end))
        own, copied = owner.weight, tensors.pop(name)
        if own.shape != copied.shape or not torch.equal(own.cpu(), copied.to(own.dtype)):
            raise files.refused(f"{name} differs from the target's own weights, which are used here", IMPORT)
    return tensors


def _owner(network: Any, layout: str, count: int) -> Any:
    """Return the target with a config of its own that says what modules it has; the target's stays as it is."""
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
    """Return the name that transformers expects in a checkpoint: of MiMo's modules that of layers after the last."""
    if layout != MIMO:
        return name
    number, rest = name.removeprefix("model.mtp_layers.").split(".", 1)
    for theirs, common in MIMO_NAMES.items():
        rest = rest.replace(theirs, common)
    return f"model.layers.{owner.config.get_text_config().num_hidden_layers + int(number)}.{rest}"


@torch.inference_mode()
def _require_running(files: HeadFiles, network: ReusedModule | ChainedModules, target: Model) -> None:
    """Raise `ModelUnloadable` unless the modules work on two short texts, whole and step by step: some have attention
    without keys and values that could be kept.
    """
    kinds = set(getattr(network.mtp.config, "layer_types", None) or ()) - {"full_attention", SLIDING}
    ids = short_texts(target).to(network.device)
    features = target.network.get_input_embeddings()(ids).to(network.device)
    reason = f"layers of {', '.join(sorted(kinds))}" if kinds else ""
    try:
        for module in range(network.count):
            network.run(module, ids, features, torch.arange(ids.shape[1], device=ids.device), rounds=(rounds := Rounds(1)))
            if not rounds.verified:
                raise NotImplementedError("attention that transformers' registry does not choose")
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
