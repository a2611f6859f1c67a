"""The shape of a model: what decides the bytes and the FLOPs of a step, read off its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alphaprof.errors import ModelUnloadable

# Decoders with gated MLPs (three matrices) and one kind of attention, whose parameters the counts below add up.
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """A decoder. `parameters` counts everything once, all experts and the input embedding included; `weight_bytes` per
    parameter (0.5 where weights are quantised to 4 bits), `kv_bytes` per element of the KV cache. Mixture of experts:
    `experts` in each layer that has them, `experts_per_token` of them used, `expert_parameters` of one expert summed over
    all layers; 0 for a dense model. `tied`: input embedding and output head are one matrix.
    """

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        if (
            min(self.parameters, self.layers, self.heads, self.kv_heads, self.head_dim, self.weight_bytes, self.kv_bytes)
            <= 0
        ):
            raise ValueError("a shape's numbers are positive")
        if not 0 <= self.experts_per_token <= self.experts or self.shared_parameters < 0:
            raise ValueError("a token uses at most all experts, and they hold at most all parameters")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], weight_bytes: float = 2.0, kv_bytes: float = 2.0) -> ModelShape:
        """The shape of a model from its config.json, for the architectures in `KNOWN`.

        Norms, biases and routers are not counted (together less than 0.2 % of the parameters). A sliding window is read as
        full attention. Raises `ModelUnloadable` for other architectures and for configs that lack a number.
        """
        _check_known(config)
        layers, hidden, vocabulary = (_whole(config, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
        heads = _whole(config, "num_attention_heads")
        kv_heads = _whole(config, "num_key_value_heads", heads)
        head_dim = _whole(config, "head_dim", hidden // heads)
        tied = bool(config.get("tie_word_embeddings", False))
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        mixture = _Mixture.of(config, layers)
        dense = 0 if mixture.layers == layers else 3 * hidden * _whole(config, "intermediate_size")
        parameters = vocabulary * hidden * (1 if tied else 2) + layers * attention + (layers - mixture.layers) * dense
        parameters += mixture.layers * 3 * hidden * (mixture.experts * mixture.width + mixture.shared_width)
        return cls(
            parameters=parameters,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            experts=mixture.experts,
            experts_per_token=mixture.per_token,
            expert_parameters=mixture.layers * 3 * hidden * mixture.width,
            tied=tied,
        )

    @property
    def shared_parameters(self) -> float:
        """Parameters that every token uses: all but the experts."""
        return self.parameters - self.experts * self.expert_parameters

    @property
    def active_parameters(self) -> float:
        """Parameters that one token uses: what "12.9B active" counts."""
        return self.shared_parameters + self.experts_per_token * self.expert_parameters

    @property
    def looked_up(self) -> float:
        """Parameters of which a step reads a row a token and multiplies none: the input embedding, unless tied."""
        return 0.0 if self.tied else self.vocabulary * self.hidden

    @property
    def total_weight_bytes(self) -> float:
        """Bytes that the weights take in memory."""
        return self.parameters * self.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the KV cache that one token takes: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes


@dataclass(frozen=True)
class _Mixture:
    """The experts of a config: layers that have them, how many there are and are used, the inner width of one of them and
    of the part that every token uses; all 0 for a dense model.
    """

    layers: int = 0
    experts: int = 0
    per_token: int = 0
    width: int = 0
    shared_width: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], layers: int) -> _Mixture:
        key = next((name for name in EXPERTS if config.get(name)), None)
        if key is None:
            return cls()
        width = _whole(config, "intermediate_size" if config["model_type"] == "mixtral" else "moe_intermediate_size")
        shared = _whole(config, "n_shared_experts", 0) * width + _whole(config, "shared_expert_intermediate_size", 0)
        first, dense = _whole(config, "first_k_dense_replace", 0), config.get("mlp_only_layers") or ()
        step, frequency = _whole(config, "decoder_sparse_step", 1), _whole(config, "moe_layer_freq", 1)
        chosen = [
            layer
            for layer in range(first, layers)
            if layer not in dense and (layer + 1) % step == 0 and layer % frequency == 0
        ]
        return cls(len(chosen), _whole(config, key), _whole(config, "num_experts_per_tok"), width, shared)


def mlp_elements(config: Mapping[str, Any]) -> int:
    """Elements of one token that are alive in an MLP at most, beside hidden states of its layer: gate, up and their product;
    of a mixture of experts the token's state, gate and up as one, gate after its activation, and the product, for each
    expert that the token uses. Raises `ModelUnloadable` as `ModelShape.from_config`.
    """
    layers, hidden = _whole(config, "num_hidden_layers"), _whole(config, "hidden_size")
    mixture = _Mixture.of(config, layers)
    dense = 0 if mixture.layers == layers else _whole(config, "intermediate_size")
    return max(3 * dense, 3 * mixture.shared_width, mixture.per_token * (4 * mixture.width + hidden))


def _check_known(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if config.get("kv_lora_rank"):
        raise ModelUnloadable(
            "this config has a latent KV cache (kv_lora_rank), which is not counted in keys and values by head",
            "measure step times instead, or write a ModelShape by hand that moves as many bytes",
        )
    if kind not in KNOWN:
        raise ModelUnloadable(
            f"model_type {kind!r} is none whose parameters are counted here: {', '.join(KNOWN)}",
            "of a multimodal model give its text_config; else write a ModelShape by hand",
        )


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of a config, 0 or above; `default` where it is missing or null. Raises `ModelUnloadable`."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < (0 if default == 0 else 1):
        state = "lacks" if value is None else f"has {value!r} for"
        raise ModelUnloadable(f"the config {state} {key}, a whole number", "give the config.json of the model as it is")
    return value
