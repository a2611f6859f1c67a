"""What a config.json says of a decoder, layer by layer: the matrices of each, and what a step reads of its cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT = ("text_config", "llm_config", "language_config", "thinker_config")  # where multimodal configs keep the decoder's
INHERITED = ("tie_word_embeddings", "quantization_config")  # of the whole that hold for its decoder
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k", "experts_per_token")
WIDTHS = ("moe_intermediate_size", "expert_intermediate_size")
SHARED = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
MIXTURES = ("mlp.experts.up_proj", "experts.up_proj")  # the names of all experts of a layer
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}  # letters of `hybrid_override_pattern`
# Families whose configs need not say which layers have a window: each but the n-th, (n + n)-th, ...
PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "cohere2": 4, "llama4": 4}
UNGATED, UNGATED_FAMILIES = ("relu", "relu2"), ("phi", "starcoder2")  # activations, families of MLPs of two matrices
SIZES = ("_size", "_heads", "_dim", "_experts", "_groups", "_rank", "_tok")  # what names of sizes end with
STATE_BYTES = 4.0  # of an element of a recurrent state, which engines keep in float32


@dataclass(frozen=True)
class Read:
    """What a step reads of a layer's cache: `elements` for each token of context, or for `window` tokens at most (0: all),
    by which each new token computes `flops`. `kept`: those beyond the window stay in memory.
    """

    elements: float
    flops: float
    window: int = 0
    kept: bool = False


@dataclass
class Layer:
    """Parameters of matrices by the names of modules, all `experts` together; what a step reads of the cache, and `state`
    elements that it reads and writes for a sequence of any length.
    """

    matrices: dict[str, float] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    state: float = 0.0
    mixes: bool = False  # tokens: it has attention or a state


def decoder_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the decoder that a config describes, also where it is a part of a multimodal model."""
    inner = next((config[key] for key in TEXT if isinstance(config.get(key), Mapping)), None)
    if inner is None:
        return dict(config)
    return decoder_of({key: config[key] for key in INHERITED if config.get(key) is not None} | dict(inner))


def first_of(config: Mapping[str, Any], *names: str, default: Any = 0) -> Any:
    """Return the value of the first of some names that is set."""
    return next((value for name in names if (value := config.get(name)) is not None), default)


def layers_of(config: Mapping[str, Any]) -> list[Layer]:
    """Return the layers of a decoder. Raises `LookupError` for a config that lacks a number or an entry of a list, and
    `TypeError` if a size is a text or a list.
    """
    if any(isinstance(value, str | list) for key, value in config.items() if key.endswith(SIZES)):
        raise TypeError("a size is a text or a list, not a number")  # which a product would repeat until memory ends
    blocks = config.get("layers_block_type") or [BLOCKS[key] for key in config.get("hybrid_override_pattern") or ""]
    number = len(blocks) or config["num_hidden_layers"]
    mixtures, kinds = set(_mixtures(config, number)), list(_kinds(config, number))
    layers, whole = [], config
    own = {int(key): settings for key, settings in (config.get("per_layer_config") or {}).items()}
    for index in range(number):
        layer, config = Layer(), {**whole, **own.get(index, {})}
        if blocks and blocks[index] in ("moe", "mlp"):
            _add_mlp(layer, config, blocks[index] == "moe")
        else:
            _add_mixer(layer, config, kinds[index], index)
            if not blocks:
                _add_mlp(layer, config, index in mixtures)
        if per_layer := config.get("hidden_size_per_layer_input"):
            layer.matrices["per_layer_input_gate"] = 3 * config["hidden_size"] * per_layer
        layers.append(layer)
    for layer in layers[number - (config.get("num_kv_shared_layers") or 0) :]:  # they read the cache of others
        layer.matrices.update({"self_attn.k_proj": 0.0, "self_attn.v_proj": 0.0})
        layer.reads = [Read(0.0, read.flops, read.window) for read in layer.reads]
        if config.get("use_double_wide_mlp"):
            layer.matrices["mlp.up_proj"] *= 2
    return layers


def _kinds(config: Mapping[str, Any], number: int) -> Iterator[str]:
    """Yield how each layer mixes tokens: full, sliding or linear (with a state)."""
    windowed = bool(first_of(config, "sliding_window", "attention_chunk_size")) and config.get("use_sliding_window", True)
    letters = [BLOCKS[key] for key in config.get("hybrid_override_pattern") or ""]
    if named := config.get("layers_block_type") or letters or config.get("layer_types"):
        for name in named[:number]:
            sliding = any(word in name for word in ("sliding", "chunked", "local"))
            yield "linear" if "linear" in name or "mamba" in name else "sliding" if sliding else "full"
    elif (hybrid := config.get("hybrid_layer_pattern")) is not None:
        yield from ("sliding" if each else "full" for each in hybrid[:number])
    elif (each := config.get("attn_type_list")) is not None:
        yield from ("full" if attends else "linear" for attends in each[:number])
    elif linear := config.get("linear_attn_config"):
        yield from ("full" if index + 1 in linear["full_attn_layers"] else "linear" for index in range(number))
    elif every := config.get("full_attention_interval"):
        yield from ("linear" if (index + 1) % every else "full" for index in range(number))
    else:
        every = first_of(config, "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval")
        every = every or PATTERNS.get(str(config.get("model_type")).removesuffix("_text"), 0)
        first = config.get("max_window_layers") or 0 if config.get("use_sliding_window") else 0
        for index in range(number):
            yield "sliding" if windowed and index >= first and not (every and (index + 1) % every == 0) else "full"


def _mixtures(config: Mapping[str, Any], number: int) -> Iterator[int]:
    """Yield the layers that have experts."""
    frequency, kinds = config.get("moe_layer_freq") or 1, config.get("mlp_layer_types")
    step = first_of(config, "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval") or 1
    listed, dense = config.get("moe_layers"), config.get("mlp_only_layers") or ()
    if isinstance(enumerated := config.get("moe_layers_enum"), str):
        listed = [int(each) for each in enumerated.split(",")]
    first = first_of(config, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    if not first_of(config, *EXPERTS) or config.get("enable_moe_block") is False:
        return
    for index in range(number):
        if isinstance(frequency, list):
            sparse = bool(frequency[index])
        elif kinds is not None:
            sparse = kinds[index] != "dense"
        elif listed is not None:
            sparse = index in listed
        else:
            sparse = index >= first and (index + 1) % step == 0 and index % frequency == 0
        if sparse and index not in dense:
            yield index


def _add_mlp(layer: Layer, config: Mapping[str, Any], mixture: bool) -> None:
    """Add the MLP of a layer: a dense one, or experts and what all tokens use beside them."""
    hidden, activation = config["hidden_size"], first_of(config, "mlp_hidden_act", "hidden_act")
    matrices = 2 if activation in UNGATED or config.get("model_type") in UNGATED_FAMILIES else 3
    both = config.get("enable_moe_block")  # experts beside a dense MLP
    if not mixture or both:
        width = first_of(config, "dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", default=None)
        if width is None:
            raise KeyError("intermediate_size")
        layer.matrices["mlp.up_proj"] = matrices * hidden * width
    if mixture:
        width = first_of(config, *WIDTHS) or config["intermediate_size"]
        latent = first_of(config, "moe_latent_size", "routed_expert_hidden_size")
        experts, name = first_of(config, *EXPERTS), MIXTURES[bool(both)]
        layer.matrices[name] = experts * matrices * (latent or hidden) * width
        llama4 = "interleave_moe_layer_step" in config
        shared = width if llama4 else first_of(config, *SHARED) or width * first_of(config, *SHARED_EXPERTS)
        layer.matrices["mlp.shared_experts.up_proj"] = matrices * hidden * shared + 2 * hidden * latent


def _add_mixer(layer: Layer, config: Mapping[str, Any], kind: str, index: int) -> None:
    """Add what mixes the tokens of a layer."""
    layer.mixes = True
    if kind == "linear":
        (_add_mamba if first_of(config, "mamba_num_heads", "mamba_n_heads") else _add_linear_attention)(layer, config)
    elif config.get("o_lora_rank"):
        ratios = config.get("compress_ratios") or [config["compress_rates"].get(name, 0) for name in config["layer_types"]]
        _add_compressed_attention(layer, config, ratios[index])
    elif config.get("kv_lora_rank"):
        _add_latent_attention(layer, config, index)
    else:
        _add_attention(layer, config, kind == "sliding")


def _add_attention(layer: Layer, config: Mapping[str, Any], sliding: bool) -> None:
    """Add attention with keys and values of some heads, in a window or to all of the context."""
    if sliding and isinstance(other := config.get("attention_other_setting"), Mapping):
        config = {**config, **other, "num_key_value_heads": other.get("num_attention_groups")}
    own, hidden = ("swa_" if sliding else "global_"), config["hidden_size"]
    heads = first_of(config, own + "num_attention_heads", "num_attention_heads", default=None)
    if heads is None:
        raise KeyError("num_attention_heads")
    named = (own + "num_key_value_heads", "num_key_value_heads", "num_attention_groups")
    kv_heads = first_of(config, *(("num_global_key_value_heads",) if not sliding else ()), *named) or heads
    head_dim = first_of(config, own + "head_dim", "head_dim", "attention_head_dim") or hidden // heads
    value_dim = first_of(config, own + "v_head_dim", "v_head_dim") or head_dim
    gated = first_of(config, "attn_output_gate", "attention_output_gate", default="linear_num_value_heads" in config)
    one = config.get("attention_k_eq_v") and not sliding  # keys are values
    layer.matrices |= {
        "self_attn.q_proj": hidden * heads * head_dim * (2 if gated else 1),
        "self_attn.k_proj": hidden * kv_heads * head_dim,
        "self_attn.v_proj": 0 if one else hidden * kv_heads * value_dim,
        "self_attn.o_proj": heads * value_dim * hidden,
    }
    window = first_of(config, "sliding_window", "attention_chunk_size") if sliding else 0
    layer.reads.append(Read(kv_heads * (head_dim + value_dim), 2 * heads * (head_dim + value_dim), window))


def _add_latent_attention(layer: Layer, config: Mapping[str, Any], index: int) -> None:
    """Add attention to a latent cache, in the absorbed form: all heads read one vector of a token. With an indexer they read
    it of the tokens that this chooses.
    """
    hidden, heads, rank = (config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    rope, nope, value = (config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    q_rank = config.get("q_lora_rank") or 0
    into = q_rank or hidden  # what the queries of the heads are made of
    layer.matrices |= {
        "self_attn.q_a_proj": hidden * q_rank,
        "self_attn.q_b_proj": into * heads * (rope + nope),
        "self_attn.kv_a_proj_with_mqa": hidden * (rank + rope),
        "self_attn.kv_b_proj": rank * heads * (nope + value),
        "self_attn.o_proj": heads * value * hidden,
        "self_attn.g_proj": hidden * heads * value if config.get("mla_use_output_gate") else 0,
    }
    window, kinds = config.get("index_topk") or 0, config.get("indexer_types")
    if window and (kinds is None or kinds[index] == "full"):
        indexers, dim = config["index_n_heads"], config["index_head_dim"]
        layer.matrices["self_attn.indexer"] = into * indexers * dim + hidden * (dim + indexers)
        layer.reads.append(Read(dim, 2 * indexers * dim))
    layer.reads.append(Read(rank + rope, 2 * heads * (2 * rank + rope), window, bool(window)))


def _add_compressed_attention(layer: Layer, config: Mapping[str, Any], ratio: int) -> None:
    """Add the attention of DeepSeek V4: to a window, and to one vector of all heads for `ratio` tokens (0: none), of which
    an indexer chooses some where they are many.
    """
    hidden, heads, dim, rank = (config[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"))
    out = config["o_lora_rank"]
    layer.matrices |= {
        "self_attn.q_a_proj": hidden * rank,
        "self_attn.q_b_proj": rank * heads * dim,
        "self_attn.kv_proj": hidden * dim,
        "self_attn.o_a_proj": heads * dim * out,
        "self_attn.o_b_proj": config["o_groups"] * out * hidden,
    }
    layer.state = config["sliding_window"] * dim / STATE_BYTES  # read once, in 16 bits
    chosen, flops = 0 < ratio < config["sliding_window"], 4 * heads * dim
    if ratio:
        layer.matrices["self_attn.compressor"] = (4 if chosen else 2) * hidden * dim
        layer.reads.append(Read(dim / ratio, flops / ratio, config["index_topk"] * ratio if chosen else 0, chosen))
    if chosen:
        indexers, each = config["index_n_heads"], config["index_head_dim"]
        layer.matrices["self_attn.indexer"] = hidden * (4 * each + indexers) + rank * indexers * each
        layer.reads.append(Read(each / ratio, 2 * indexers * each / ratio))


def _add_linear_attention(layer: Layer, config: Mapping[str, Any]) -> None:
    """Add attention whose state does not grow with the context."""
    hidden, delta = config["hidden_size"], config.get("linear_attn_config")
    if delta:  # Kimi's: queries, keys, values, two gates
        heads, dim = delta["num_heads"], delta["head_dim"]
        width, gates = heads * dim, hidden * dim + dim * heads * dim
        gates += hidden * width if delta.get("use_full_rank_gate") else gates
        into, inner, state = 3 * hidden * width + gates + hidden * heads, width, width * dim
        layer.matrices["linear_attn.conv1d"] = 3 * width * delta["short_conv_kernel_size"]
    elif config.get("linear_num_value_heads"):  # Qwen's
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        heads, inner = config["linear_num_value_heads"], config["linear_num_value_heads"] * config["linear_value_head_dim"]
        into, state = hidden * (2 * keys + 2 * inner + 2 * heads), inner * config["linear_key_head_dim"]
        layer.matrices["linear_attn.conv1d"] = (2 * keys + inner) * config["linear_conv_kernel_dim"]
    else:  # MiniMax's
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or hidden // heads
        into, inner, state = 4 * hidden * heads * dim, heads * dim, heads * dim**2
    layer.matrices |= {"linear_attn.in_proj_qkv": into, "linear_attn.out_proj": inner * hidden}
    layer.state = state


def _add_mamba(layer: Layer, config: Mapping[str, Any]) -> None:
    """Add a second-generation Mamba."""
    heads, dim, groups, state, kernel = (
        config[name if name in config else other]
        for name, other in (
            ("mamba_num_heads", "mamba_n_heads"),
            ("mamba_head_dim", "mamba_d_head"),
            ("n_groups", "mamba_n_groups"),
            ("ssm_state_size", "mamba_d_state"),
            ("conv_kernel", "mamba_d_conv"),
        )
    )
    hidden, inner = config["hidden_size"], heads * dim
    mixed = inner + 2 * groups * state
    layer.matrices |= {
        "mixer.in_proj": hidden * (inner + mixed + heads),
        "mixer.conv1d": mixed * kernel,
        "mixer.out_proj": inner * hidden,
    }
    layer.state = inner * state
