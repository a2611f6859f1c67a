"""What the training of a head begins with: the target's last layer and LM head, or another head; which ids it proposes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from alphaprof.errors import ModelUnloadable, OptionInvalid
from alphaprof.profiling.heads.attention import SLIDING
from alphaprof.profiling.heads.eagle import EMBEDDING, Eagle3, Wiring
from alphaprof.profiling.heads.eagle_files import FIXED_ROPE, IDS, KEPT, WINDOWS, require_layers, stored_name, usual_layers
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import FINAL, TeacherForced
from alphaprof.run.split import RunText

if TYPE_CHECKING:
    from alphaprof.profiling.heads.draft import HeadDraft

STD = 0.02  # of weights that begin at random
NORM_TOLERANCE = 1e-5
MOST = 32_000  # ids, where a share is asked for or nothing: what published heads have
Vocabulary = np.ndarray[Any, np.dtype[np.int64]]
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def require_trainable(target: Model) -> None:
    """Raise `ModelUnloadable` for a target that heads of our own cannot be trained or tested on."""
    require_layers(target, ModelUnloadable)
    weight: Any = target.network.get_input_embeddings().weight
    plain = weight.is_floating_point() and not weight.is_meta
    hidden = target.network.config.get_text_config().hidden_size
    if not plain or weight.shape[1] != hidden or not TeacherForced(target).chunked:
        problem = f"heads cannot be trained on {target.reference}: its embedding or states are unsupported"
        hint = "train on one device in 16 or 32 bits, or with speculators or SpecForge (docs/training.md)"
        raise ModelUnloadable(problem, hint)


def layers_to_read(blocks: int) -> tuple[int, ...]:
    """After how many of a target's layers the states are that a new head reads: those that engines guess, 2, n//2 and n-3,
    where these are three; of a shallow target layers around its middle.
    """
    low, middle, high = usual_layers(blocks)
    if low < middle < high:
        return low, middle, high
    return (1, blocks // 2, blocks - 1) if blocks >= 4 else tuple(range(max(0, blocks - 2), blocks + 1))


def new_head(target: Model, ids: torch.Tensor | None, seed: int) -> Eagle3:
    """Return a head in float32 on the target's device, of one layer in the style of Llama, that begins as the target's last
    layer after its highest recorded state, wherever shapes allow: its projections over the state (the embedding's half
    begins at random), MLP and norms, the final norm, and the rows `ids` of the LM head (None: all). The embedding is the
    target's.
    """
    text = target.network.config.get_text_config()
    config = _shape(target, text)
    layers = layers_to_read(text.num_hidden_layers)
    embedding = target.network.get_input_embeddings().weight
    network = Eagle3(config, Wiring(layers), width=config.hidden_size, ids=ids, target={EMBEDDING: embedding})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=STD, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
        _take_over(network, target, ids)
    return network.to(device=target.device, dtype=torch.float32)


def _shape(target: Model, text: Any) -> LlamaConfig:
    """Return the layer of a new head: as wide as the target's, with its heads and positions."""
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type", "default") not in FIXED_ROPE or "rope_theta" not in rope:
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return LlamaConfig(
        vocab_size=target.vocabulary,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_position_embeddings=target.context or 131_072,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters=dict(rope),
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
    )


def _take_over(network: Eagle3, target: Model, ids: torch.Tensor | None) -> None:
    """Copy what the target's last layer, final norm and LM head hold in the same shapes. `fc` begins as the highest of
    the recorded states.
    """
    base, hidden = target.network.base_model, network.config.hidden_size
    base_layers: Any = base.layers
    block: Any = network.blocks[0]
    last = base_layers[-1]
    with torch.no_grad():
        fc: Any = network.fc
        fc.weight[:, -hidden:] += torch.eye(hidden, device=fc.weight.device)
        has_norms = hasattr(getattr(last, "self_attn", None), "q_norm")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = _weight(last, f"self_attn.{name}")
            own = getattr(block.self_attn, name).weight
            part = own if name == "o_proj" else own[:, hidden:]
            if weight is not None and weight.shape == part.shape and not (has_norms and name in ("q_proj", "k_proj")):
                part.copy_(weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight, own = _weight(last, f"mlp.{name}"), getattr(block.mlp, name).weight
            if weight is not None and weight.shape == own.shape:
                own.copy_(weight)
        norms = ((last, "input_layernorm", network.hidden_norm), (base, "norm", network.norm))
        for owner, name, norm in (*norms, (last, "post_attention_layernorm", block.post_attention_layernorm)):
            if (gain := _gain(getattr(owner, name, None), norm)) is not None:
                norm.weight.copy_(gain)
        rows = _weight(target.network.get_output_embeddings(), "")
        if network.lm_head is not None and rows is not None and rows.shape[1] == hidden:
            network.lm_head.weight.copy_(rows if ids is None else rows[ids.to(rows.device)])


def _weight(owner: Any, path: str) -> torch.Tensor | None:
    """Return the weight of a linear layer; None if there is none, or it is quantised or on no device."""
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, None)
    weight: Any = getattr(owner, "weight", None)
    plain = isinstance(owner, nn.Linear) and weight.is_floating_point() and not weight.is_meta
    return weight if plain else None


def _gain(norm: Any, own: LlamaRMSNorm) -> torch.Tensor | None:
    """Return what a norm of the head needs as its weight to compute what a norm of the target does; None: it cannot."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.shape != own.weight.shape or weight.is_meta:
        return None
    probe = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0))
    expected = norm(probe.to(weight)).float().cpu()
    plain = probe * (probe.square().mean(-1, keepdim=True) + own.variance_epsilon).rsqrt()
    for gain in (weight.float().cpu(), 1 + weight.float().cpu()):
        if torch.allclose(plain * gain, expected, rtol=2e-2, atol=NORM_TOLERANCE + 2e-2 * (weight.dtype != torch.float32)):
            return gain.to(weight.device)
    return None


def prepared(draft: HeadDraft, target: Model, ids: torch.Tensor | None) -> Eagle3:
    """Return the network of a head that was loaded in float32, to be trained further; with `ids`, over these: rows that it
    lacks come from the target's LM head.
    """
    network = cast(Eagle3, draft.network)
    if ids is not None and network.lm_head is not None and (network.ids is None or not torch.equal(network.ids, ids)):
        known = torch.arange(network.vocabulary) if network.ids is None else network.ids.cpu()
        place = torch.searchsorted(known, ids.cpu()).clamp(max=len(known) - 1)
        has = known[place] == ids.cpu()
        rows = target.network.get_output_embeddings().weight.float().cpu()[ids.cpu()]
        rows[has] = network.lm_head.weight.float().cpu()[place[has]]
        network.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
        network.lm_head.weight.data = rows.to(target.device)
        network.ids = ids.to(target.device)
    return network


def trained_parameters(network: Eagle3) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name: all but an embedding."""
    return {name: weight for name, weight in network.named_parameters() if name != EMBEDDING}


def chosen_vocabulary(texts: Sequence[RunText], wanted: float | None, always: Collection[int], size: int) -> Vocabulary:
    """Return ids of a target with `size` logits, ascending: the most frequent ones of the continuations of training texts,
    those of `always` (EOS and other special tokens) among them. `wanted`: how many ids (1 and above), or which share of the
    tokens they cover (below 1); None: all that occur. Of ids that occur equally often those come first that prompts have
    more of.

    Raises `OptionInvalid` if `always` alone are more than are wanted.
    """
    counts = np.bincount(np.concatenate([text.ids for text in texts]), minlength=size)[:size]
    prompts = np.bincount(np.concatenate([text.prompt for text in texts]), minlength=size)[:size]
    kept = np.array(sorted({token for token in always if token < size}), dtype=np.int64)
    order = np.lexsort((np.arange(size), -prompts, -counts))
    order = order[(counts[order] > 0) & ~np.isin(order, kept)]
    most = MOST
    if wanted is not None and wanted < 1:
        covered = (counts[kept].sum() + np.cumsum(counts[order])) / counts.sum()
        most = min(most, len(kept) + int(np.searchsorted(covered, wanted - 1e-12)) + 1)
    elif wanted is not None:
        most = int(wanted)
        fillers = np.lexsort((np.arange(size), -prompts))  # ids that occur in prompts, then the first ones
        order = np.concatenate([order, fillers[~np.isin(fillers, order) & ~np.isin(fillers, kept)]])
    if len(kept) >= most:
        problem = f"a draft vocabulary of {most} ids leaves no room beyond {len(kept)} special tokens"
        raise OptionInvalid(problem, "raise --draft-vocab")
    return np.sort(np.concatenate([kept, order[: most - len(kept)]]).astype(np.int64))


def outside(ids: Vocabulary | None, text: RunText) -> int:
    """Return how many tokens of those that rounds emit, all of a continuation but its first, are not among some ids (None:
    all).
    """
    return 0 if ids is None else int((~np.isin(text.ids[1:], ids)).sum())


def vocabulary_digest(ids: Vocabulary) -> str:
    """SHA-256 over ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


def config_content(network: Eagle3, target: Model, depths: int) -> bytes:
    """Return the config.json of a head that was trained over `depths` drafts a round."""
    wiring, layers = network.wiring, network.config
    rope = dict(layers.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    shape = {key: getattr(layers, key) for key in KEPT} | {"num_hidden_layers": len(network.blocks), "rope_theta": theta}
    shape |= {"model_type": layers.model_type, "tie_word_embeddings": False}
    if kind != "default":
        shape["rope_scaling"] = rope
    if SLIDING in (getattr(layers, "layer_types", None) or ()):
        shape |= {key: getattr(layers, key) for key in WINDOWS if hasattr(layers, key)}
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": network.vocabulary if network.ids is None else len(network.ids),
        "target_hidden_size": target.network.config.get_text_config().hidden_size,
        "norm_before_residual": wiring.norm_before_residual,
        "norm_before_fc": wiring.norm_before_fc,
        "norm_output": wiring.norm_output,
        "fc_norm": network.fc_norm is not None,
        "transformer_layer_config": shape,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depths}],
            "verifier": {"name_or_path": target.reference, "architectures": [type(target.network).__name__]},
        },
    }
    inner = FINAL not in wiring.layers
    content |= {IDS: list(wiring.layers)} if inner else {"use_aux_hidden_state": False}
    return (json.dumps(content, indent=1) + "\n").encode()


def weights_content(network: Eagle3, dtype: torch.dtype) -> bytes:
    """Return the tensors of a head in a dtype, as safetensors. An embedding or LM head that is the target's is left out."""
    tensors: dict[str, Any] = {}
    for name, weight in network.state_dict().items():
        if name != "ids":
            tensors[stored_name(name)] = weight.detach().to("cpu", dtype).contiguous()
    if network.ids is not None:
        ids = network.ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(network.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    return save(tensors, metadata={"format": "pt"})
