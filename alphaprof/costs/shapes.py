"""The shape of a model: what its config.json says of parameters, cache and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Decoders with gated MLPs (three matrices) and one kind of attention, whose parameters the counts below add up.
KNOWN = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek",
    "ministral3",
    "qwen3_vl_text",
)
HEAD = "draft_vocab_size"  # what tells the config of an EAGLE-3 head from a model's
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """A decoder. `parameters` counts everything once, all experts and the input embedding included; `weight_bytes` per
    parameter (0.5 where weights are quantised to 4 bits), `kv_bytes` per element of the KV cache. Mixture of experts:
    `experts` in each layer that has them, `experts_per_token` of them used, `expert_parameters` of one expert summed over
    all layers; 0 for a dense model. `tied`: input embedding and output head are one matrix.

    Of a draft head, `parameters` are those that the first step of a round uses, the target's included, without the input
    embedding (`tied` says that there is none beside them). Among them are `first_parameters`, which later steps do not use
    (what joins the target's states), and `last_parameters`, which a step uses for its last token alone (the logits).
    `stored_parameters` are all of its own, which take memory (0: `parameters`).
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
    first_parameters: float = 0.0
    last_parameters: float = 0.0
    stored_parameters: float = 0.0
    head_bytes: float = 0.0  # bytes per parameter of input embedding and output head; 0: as weight_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], weight_bytes: float = 2.0, kv_bytes: float = 2.0) -> ModelShape:
        """Return the shape of a model from its config.json, for the architectures in `KNOWN`.

        Norms, biases and routers are not counted (together less than 0.2% of the parameters). A sliding window is read as
        full attention. Raises `KeyError` for other architectures, and for configs that lack a number.
        """
        kind = config.get("model_type")
        if kind not in KNOWN or config.get("kv_lora_rank"):
            raise KeyError(f"alphaprof cannot count the parameters or latent KV cache of {kind}")
        layers, hidden, vocabulary = (config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        tied = bool(config.get("tie_word_embeddings", False))
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
        mixed, width, shared, used = 0, 0, 0, 0  # layers with experts, the inner width of one and of what all tokens use
        if experts:
            mixed, used = _mixed_layers(config, layers), config["num_experts_per_tok"]
            width = config["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"]
            shared = width * (config.get("n_shared_experts") or 0) + (config.get("shared_expert_intermediate_size") or 0)
        dense = 0 if mixed == layers else 3 * hidden * config["intermediate_size"]
        parameters = vocabulary * hidden * (1 if tied else 2) + layers * attention + (layers - mixed) * dense
        parameters += mixed * 3 * hidden * (experts * width + shared)
        sizes = (parameters, layers, hidden, heads, kv_heads, head_dim, vocabulary, weight_bytes, kv_bytes)
        return cls(*sizes, experts, used, mixed * 3 * hidden * width, tied)

    @classmethod
    def of_head(cls, config: Mapping[str, Any], target: ModelShape, weight_bytes: float = 2.0) -> ModelShape:
        """Return the shape of an EAGLE-3 head from its config.json, or that of speculators, which holds its layer's apart.

        The first layer reads embedding and state side by side, three states of the target enter through one matrix, and
        logits are of `HEAD` ids. Raises `KeyError` for configs that lack a number.
        """
        layer = config.get("transformer_layer_config") or config
        layers, hidden, heads = (layer[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        kv_heads = layer.get("num_key_value_heads") or heads
        head_dim = layer.get("head_dim") or hidden // heads
        vocabulary = config[HEAD] or layer["vocab_size"]
        read = (layers + 1) * hidden  # by the matrices of queries, keys and values: the first layer reads twice as much
        attention = read * head_dim * (heads + 2 * kv_heads) + layers * heads * head_dim * hidden
        entering, logits = 3 * target.hidden * hidden, hidden * vocabulary
        parameters = attention + layers * 3 * hidden * layer["intermediate_size"] + entering + logits
        sizes = (parameters, layers, hidden, heads, kv_heads, head_dim, vocabulary, weight_bytes, weight_bytes)
        return cls(*sizes, tied=True, first_parameters=entering, last_parameters=logits, stored_parameters=parameters)

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
        if self.stored_parameters:
            return self.stored_parameters * self.weight_bytes
        return self.read_bytes(self.experts) + self.looked_up * (self.head_bytes or self.weight_bytes)

    def read_bytes(self, experts: float) -> float:
        """Return the bytes of weights that a step reads which touches so many experts of each layer."""
        head = 0.0 if self.last_parameters else self.vocabulary * self.hidden
        body = self.shared_parameters - self.looked_up - head + experts * self.expert_parameters
        return body * self.weight_bytes + head * (self.head_bytes or self.weight_bytes)

    @property
    def later(self) -> ModelShape:
        """The shape by which later steps of a round are worked out."""
        return replace(self, parameters=self.parameters - self.first_parameters, first_parameters=0.0)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the KV cache that one token takes: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def cache_bytes(self, context: float) -> float:
        """Bytes of the KV cache that a step reads of one sequence with `context` tokens."""
        return context * self.kv_bytes_per_token

    def attention_flops(self, context: float) -> float:
        """FLOPs by which one token attends to `context` tokens."""
        return 4 * self.layers * self.heads * self.head_dim * context


def _mixed_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many of the layers have experts."""
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    step, frequency = config.get("decoder_sparse_step") or 1, config.get("moe_layer_freq") or 1
    sparse = (layer for layer in range(first, layers) if (layer + 1) % step == 0 and layer % frequency == 0)
    return sum(layer not in dense for layer in sparse)
