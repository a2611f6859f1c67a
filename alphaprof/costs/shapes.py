"""The shape of a model: what its config.json says of parameters, cache and attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alphaprof.config.heads import GEMMA, REDUCED, DraftForm, draft_form, layer_of, settings_of
from alphaprof.costs.layers import EXPERTS, MIXTURES, STATE_BYTES, USED, Layer, decoder_of, first_of, layers_of
from alphaprof.costs.quantization import quantization_of

# Families whose parameters and cache the counts below add up, each against a model of transformers or its published size;
# their decoders in multimodal models have the same names with _text behind.
KNOWN = frozenset(
    """
    arcee cohere cohere2 cohere2_moe cwm deepseek deepseek_ref deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3 gemma4 glm glm4 glm4_moe glm4_moe_lite glm4v
    glm4v_moe glm_moe_dsa gpt_oss granite granitemoe granitemoehybrid granitemoeshared helium hy_v3 internlm3 kimi_k2
    kimi_linear llama llama4 mimo mimo_v2_flash minicpm3 minimax minimax_m1 minimax_m2
    minimax_text_01 ministral3 mistral mixtral nemotron nemotron_h olmo olmo2 olmo3 olmoe phi phi3 phimoe
    qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl
    qwen3_vl_moe seed_oss smollm3 solar_open stablelm starcoder2 step3p5 step3p7 vaultgemma
    """.split()  # noqa: SIM905 (a list would take a line a name)
)
TIED = ("gemma", "cohere")  # families of one matrix for input and output where the config does not say


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
    expert_bytes: float = 0.0  # bytes per parameter of experts; 0: as weight_bytes
    embedded: float = 0.0  # parameters of further embeddings, of which a step reads a row a token and layer
    token_elements: float = 0.0  # of the cache that a step reads for each token of context
    context_flops: float = 0.0  # by which a new token attends to each token of context
    window: int = 0  # tokens of context, of which at most so many are read of some layers
    window_elements: float = 0.0  # that these read for each
    window_flops: float = 0.0
    kept_elements: float = 0.0  # those of them that stay in memory beyond the window
    state_bytes: float = 0.0  # read and written for a sequence of any length, twice what they take
    own_cache: bool = True  # the cache that it reads takes memory of its own

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], weight_bytes: float | None = None, kv_bytes: float | None = None
    ) -> ModelShape:
        """Return the shape of a model from its config.json, for the families in `KNOWN`; of a multimodal one, that of its
        decoder. `weight_bytes`, `kv_bytes`: by default those that the config declares, else 2.

        Norms, biases and routers are not counted (together less than 0.5% of the parameters). Raises `KeyError` for other
        architectures, and `LookupError` for configs that lack a number.
        """
        config = decoder_of(config)
        kind = str(config.get("model_type")).removesuffix("_text")
        if kind not in KNOWN:
            raise KeyError(f"alphaprof cannot count the parameters of {kind}")
        quantization = quantization_of(config) if weight_bytes is None else None
        layers, hidden, vocabulary = layers_of(config), config["hidden_size"], config["vocab_size"]
        heads = config["num_attention_heads"]
        tied = bool(config.get("tie_word_embeddings", kind.startswith(TIED)))
        counts, sizes = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}  # of experts, and of all else
        for index, layer in enumerate(layers):
            for name, count in layer.matrices.items():
                each = quantization.bytes_of(f"layers.{index}.{name}") if quantization else weight_bytes or 2.0
                counts[name in MIXTURES] += count
                sizes[name in MIXTURES] += count * each
        embedded = len(layers) * config.get("hidden_size_per_layer_input", 0) * config.get("vocab_size_per_layer_input", 0)
        experts = first_of(config, *EXPERTS) if counts[True] else 0
        body = sizes[False] / counts[False]
        return cls(
            parameters=counts[True] + counts[False] + vocabulary * hidden * (1 if tied else 2) + embedded,
            layers=sum(layer.mixes for layer in layers),
            hidden=hidden,
            heads=heads,
            kv_heads=1 if config.get("kv_lora_rank") else config.get("num_key_value_heads") or heads,
            head_dim=first_of(config, "head_dim", "attention_head_dim") or hidden // heads,
            vocabulary=vocabulary,
            weight_bytes=body,
            kv_bytes=kv_bytes or (quantization and quantization.kv_bytes) or 2.0,
            experts=experts,
            experts_per_token=first_of(config, *USED) if experts else 0,
            expert_parameters=counts[True] / experts if experts else 0.0,
            tied=tied,
            head_bytes=quantization.bytes_of("embed_tokens" if tied else "lm_head") if quantization else 0.0,
            expert_bytes=sizes[True] / counts[True] if quantization and experts else 0.0,
            embedded=embedded,
            **_read_of(layers),
            state_bytes=2 * STATE_BYTES * sum(layer.state for layer in layers),
        )

    @classmethod
    def of_head(
        cls, config: Mapping[str, Any], target: ModelShape, form: DraftForm | None = None, weight_bytes: float = 2.0
    ) -> ModelShape:
        """Return the shape of a head of a form (None: the one that its config describes) from its config.json, or that of
        speculators, which holds its layers' apart. What drafts in one pass has no later steps: all of its parameters are
        among `first_parameters`.

        EAGLE-3: the first layer reads embedding and state side by side, three states of the target enter through one matrix,
        and logits are of `REDUCED` ids. EAGLE: one matrix reads both in each step. DFlash: as many states enter as the
        config names; beside its layers stand thin matrices, those that look up tokens not counted. Without `REDUCED` logits
        are by the target's matrix. Raises `LookupError` for configs that lack a
        number.
        """
        layer = layer_of(config)
        form = form or draft_form(config, layer, {})
        if form is GEMMA:
            return cls.of_assistant(config, weight_bytes)
        layers, hidden, heads = layers_of(layer), layer["hidden_size"], layer["num_attention_heads"]
        kv_heads = layer.get("num_key_value_heads") or heads
        head_dim = layer.get("head_dim") or hidden // heads
        vocabulary = config.get(REDUCED) or target.vocabulary
        matrices = [(name, count) for each in layers for name, count in each.matrices.items()]
        own = sum(count for _, count in matrices)
        mixed, experts = sum(count for name, count in matrices if name in MIXTURES), first_of(layer, *EXPERTS) or 1
        states = target.hidden * hidden  # through which one state of the target enters
        if form.wide:
            own, entering = own + hidden * head_dim * (heads + 2 * kv_heads), 3 * states
        elif form.joins:
            own, entering = own + 2 * hidden**2, 0
        else:
            settings = settings_of(config)
            entering = len(first_of(settings, "target_layer_ids", "aux_hidden_state_layer_ids") or layers) * states
            own += (settings.get("markov_rank") or 0) * vocabulary + (settings.get("selector_rank") or 0) * hidden
            kernels = 2 * (settings.get("conv_kernel_size") or 0) * hidden  # of a convolution, which a row changes by group
            own += len(layers) * 2 * kernels * (1 + hidden // (settings.get("conv_group_size") or hidden))
        logits = hidden * vocabulary
        parameters = own + entering + logits
        shape = cls(
            parameters=parameters,
            layers=len(layers),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            weight_bytes=weight_bytes,
            kv_bytes=weight_bytes,
            experts=experts if mixed else 0,
            experts_per_token=first_of(layer, *USED) if mixed else 0,
            expert_parameters=mixed / experts,
            tied=True,
            first_parameters=entering,
            last_parameters=logits,
            stored_parameters=parameters if config.get(REDUCED) else own + entering,
        )
        return shape.at_once() if form.one_pass else shape

    @classmethod
    def of_assistant(cls, config: Mapping[str, Any], weight_bytes: float) -> ModelShape:
        """Return the shape of an assistant of Gemma 4 from its config.json: layers that read the target's keys, what joins
        embedding and state and makes the next state, and logits of its own, of a few clusters where ids are ordered. Raises
        `LookupError` for configs that lack a number.
        """
        decoder = {**decoder_of(config), "model_type": "gemma4"}
        layers, wide = decoder["num_hidden_layers"], 3 * config["backbone_hidden_size"] * decoder["hidden_size"]
        shape = cls.from_config({**decoder, "num_kv_shared_layers": layers}, weight_bytes, weight_bytes)
        rows, clusters = shape.vocabulary, first_of(config, "num_centroids", default=2048)
        if config.get("use_ordered_embeddings"):
            rows = clusters + first_of(config, "centroid_intermediate_top_k", default=32) * (rows // clusters)
        return replace(
            shape,
            parameters=shape.parameters + wide + (rows - shape.vocabulary) * shape.hidden,
            tied=True,
            last_parameters=rows * shape.hidden,
            stored_parameters=shape.parameters + wide,
            own_cache=False,
            **_read_of(layers_of({**decoder, "num_kv_shared_layers": 0})),
        )

    @classmethod
    def of_mtp(cls, config: Mapping[str, Any], target: ModelShape) -> ModelShape:
        """Return the shape of the MTP module that a target's config.json names: a layer like the last, what joins embedding
        and state, and the target's logits. Raises `LookupError` for configs that lack a number.
        """
        config = decoder_of(config)
        quantization, own_layers = quantization_of(config), layers_of(config)
        names, layers = ("mtp.layers.0", f"layers.{len(own_layers)}"), own_layers[-1:]  # of some models and of others
        for name in ("layers_block_type", "hybrid_override_pattern"):
            if blocks := config.get(f"mtp_{name}"):
                layers = layers_of({**config, name: blocks})
        matrices = [(name, count) for layer in layers for name, count in layer.matrices.items()]
        experts = sum(count for name, count in matrices if name in MIXTURES)
        own, logits = sum(count for _, count in matrices) + 2 * target.hidden**2, target.vocabulary * target.hidden

        def size_of(part: str) -> float:
            return max(quantization.bytes_of(f"{name}.{part}") for name in names) if quantization else 0.0

        return replace(
            target,
            parameters=own + logits,
            layers=1,
            weight_bytes=size_of("self_attn.q_proj") or target.weight_bytes,
            experts=target.experts if experts else 0,
            expert_parameters=experts / target.experts if experts else 0.0,
            expert_bytes=size_of(MIXTURES[0]) if experts else 0.0,
            tied=True,
            last_parameters=logits,
            stored_parameters=own,
            embedded=0.0,
            state_bytes=0.0,
            **_read_of(layers),
        )

    def at_once(self) -> ModelShape:
        """Return the shape of a draft that drafts in one pass, with logits of every row."""
        return replace(self, first_parameters=self.parameters, last_parameters=0.0)

    @property
    def one_pass(self) -> bool:
        """Whether it drafts in one pass, which leaves no matrix for later steps."""
        return self.first_parameters == self.parameters

    @property
    def output_parameters(self) -> float:
        """Parameters of the matrix that makes the logits."""
        return self.last_parameters or self.vocabulary * self.hidden

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
        return self.embedded + (0.0 if self.tied else self.vocabulary * self.hidden)

    @property
    def total_weight_bytes(self) -> float:
        """Bytes that the weights take in memory."""
        if self.stored_parameters:
            return self.stored_parameters * self.weight_bytes
        return self.read_bytes(self.experts) + self.looked_up * (self.head_bytes or self.weight_bytes)

    def read_bytes(self, experts: float) -> float:
        """Return the bytes of weights that a step reads which touches so many experts of each layer."""
        head = self.output_parameters
        body = self.shared_parameters - self.looked_up - head
        return (
            body * self.weight_bytes
            + head * (self.head_bytes or self.weight_bytes)
            + experts * self.expert_parameters * (self.expert_bytes or self.weight_bytes)
        )

    @property
    def later(self) -> ModelShape:
        """The shape by which later steps of a round are worked out."""
        return replace(self, parameters=self.parameters - self.first_parameters, first_parameters=0.0)

    @property
    def of_prompt(self) -> ModelShape:
        """The shape by which a prefill is worked out: of the logits it needs the last token's alone."""
        return replace(self, last_parameters=self.output_parameters)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of memory that one more token takes in the KV cache of a long text: keys and values of every layer, but for
        layers that keep a window.
        """
        if not self.own_cache:
            return 0.0
        if not (self.token_elements or self.window):
            return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes
        return (self.token_elements + self.kept_elements) * self.kv_bytes

    def stored_bytes(self, context: float) -> float:
        """Bytes of memory that the KV cache and the states of one sequence with `context` tokens take."""
        in_window = min(context, self.window) * (self.window_elements - self.kept_elements) * self.kv_bytes
        return context * self.kv_bytes_per_token + in_window + self.state_bytes / 2

    def cache_bytes(self, context: float) -> float:
        """Bytes of the KV cache and of states that a step reads of one sequence with `context` tokens."""
        if not (self.token_elements or self.window):
            return context * self.kv_bytes_per_token + self.state_bytes
        read = context * self.token_elements + min(context, self.window) * self.window_elements
        return read * self.kv_bytes + self.state_bytes

    def attention_flops(self, context: float) -> float:
        """FLOPs by which one token attends to `context` tokens."""
        if not (self.token_elements or self.window):
            return 4 * self.layers * self.heads * self.head_dim * context
        return self.context_flops * context + self.window_flops * min(context, self.window)


def _read_of(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return the fields that say what a step reads of the cache of some layers."""
    reads = [read for layer in layers for read in layer.reads]
    all_of = [read for read in reads if not read.window]
    limited = [read for read in reads if read.window]
    return {
        "token_elements": sum(read.elements for read in all_of),
        "context_flops": sum(read.flops for read in all_of),
        "window": max((read.window for read in limited), default=0),
        "window_elements": sum(read.elements for read in limited),
        "window_flops": sum(read.flops for read in limited),
        "kept_elements": sum(read.elements for read in limited if read.kept),
    }
