"""Load target and draft models, quantised or not, and their tokenizer (transformers), and say what identifies them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from alphaprof.config.model_files import ADAPTER, ModelFiles
from alphaprof.costs.cost_model import no_shape
from alphaprof.costs.layers import EXPERTS, USED, first_of
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import VALUE, ModelUnloadable, VocabularyMismatch, cut
from alphaprof.profiling.models.dtype import DTYPES, DtypeChoice, choose_dtype
from alphaprof.profiling.models.hashes import fingerprint_by_files, weight_files
from alphaprof.profiling.models.hub import (
    fetch_descriptions,
    first_line,
    folder_of,
    is_local,
    require_model,
)
from alphaprof.profiling.models.private import attention_of, kept_in_float32
from alphaprof.run.manifest import ModelFacts, Quantisation
from alphaprof.version import install_line, missing

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from alphaprof.config.options import ModelOptions

Value = TypeVar("Value")
# Logit differences that batching alone was seen to make: 9e-5 in float32 and 0.125 in bfloat16 (two logits each);
# float16 has three more bits than bfloat16. Below them the order of two tokens is arbitrary.
NOISE = {torch.float32: 2e-4, torch.bfloat16: 0.125, torch.float16: 0.125 / 8}
# Weights that take no part in a model's text: of parts for images and sound, for predicting several tokens, for training
# and for decoding; and masks and frequencies that older versions saved and newer ones compute.
NOT_THE_TEXT = re.compile(
    r"^([^.]+\.)?[^.]*(mtp|vision|visual|image|audio|speech|talker|projector|v_head|medusa)"
    r"|(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask)$|\.masked_bias$|inv_freq$|(^|\.)position_ids$"
)
# Quantisers write biases of zeros for layers that have none (GPTQ), and scales for a KV cache of 8 bits.
OF_QUANTISERS = re.compile(r"\.bias$|\.[qkv]_scale$|\.[qkv]_proj\.output_scale$")
BEFORE_LAYERS = re.compile(r"^.*?(?=[a-z]+\.\d+\.)")  # what transformers may rename: model.language_model. and the like
# What tells a model that does not attend to the whole text in every layer, by parameters and by settings.
STATE = re.compile(r"A_log|ssm|mamba|conv1d|time_mix|recurrent|kv_a_proj|linear_attn", re.IGNORECASE)
NOT_PLAIN = (
    "sliding_window",
    "window_size",
    "attention_chunk_size",
    "kv_lora_rank",
    "multi_query",
    "num_ln_in_parallel_attn",
)
# What allocators without an error of their own say.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64)  # of weights and of buffers
WRAPPER = "__tensor_flatten__"  # what a tensor has that consists of others, by torch's protocol for subclasses
WITHOUT = "give the unquantized checkpoint, or import your engine's logs (alphaprof import)"


@dataclass(frozen=True)
class Model:
    """A loaded causal language model with the name that it has in the run (target, or a draft's name). `served`: what its
    own generation config sets; generation and scoring here do not follow it unless a profile asks. `quantised`: how its
    weights are; None: they are not. `choice`: how auto chose its dtype; None: it was given. `files`: what its weights were
    loaded from (none: they are not known); `layers`: those in the files that it has; None: all.
    """

    name: str
    network: PreTrainedModel
    kind: str
    reference: str
    served: Mapping[str, Any] = field(default_factory=dict)
    quantised: Quantisation | None = None
    choice: DtypeChoice | None = None
    files: tuple[Path, ...] = ()
    layers: tuple[int, ...] | None = None

    @property
    def decoder(self) -> Any:
        """Its embeddings, decoder layers and final norm."""
        return decoder_of(self.network)

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        device: torch.device = self.network.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; of a quantised model, of those that are not."""
        dtype: torch.dtype = next(weight.dtype for weight in self.network.parameters() if weight.dtype in NOISE)
        return dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as profiles name it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def attn_implementation(self) -> str:
        """How its decoder computes attention, as transformers names it."""
        return attention_of(self.network.config.get_text_config())

    @property
    def context(self) -> int | None:
        """The longest text in tokens; None if the architecture has no limit."""
        limit = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def vocabulary(self) -> int:
        """The number of logits, padding included."""
        head = self.network.get_output_embeddings()
        weight = getattr(head, "weight", None)
        return int(self.network.config.get_text_config().vocab_size if weight is None else weight.shape[0])

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return eos_of(self.network.generation_config)

    @property
    def parameters(self) -> int:
        """The number of parameters that take part in text."""
        if self.quantised is not None:
            return parameters_of(self.network)
        return sum(weight.numel() for weight in of_text(self.network, self.network.named_parameters()).values())

    @property
    def weight_bytes(self) -> float:
        """Bytes of a parameter: the mean of all in a quantised model, those included that are not quantised."""
        return float(self.dtype.itemsize) if self.quantised is None else stored_bytes(self.network) / self.parameters

    @cached_property
    def digest(self) -> str:
        """The fingerprint, computed once."""
        quantised = self.quantised and dataclasses.asdict(self.quantised)
        return fingerprint_by_files([settings_of(self.network), self.dtype_name, quantised, self.layers], self.files)

    def facts(self) -> ModelFacts:
        """Return what the manifest keeps of this model."""
        return ModelFacts(
            reference=self.reference,
            kind=self.kind,
            architecture=type(self.network).__name__,
            fingerprint=self.digest,
            dtype=self.dtype_name,
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            parameters=self.parameters,
            context=self.context,
            vocabulary=self.vocabulary,
            eos=self.eos,
            noise=NOISE[self.dtype],
            shape=shape_of(self.network, self.weight_bytes),
            quantised=self.quantised,
        )


def load_model(
    name: str, options: ModelOptions, dtype: str, device: str | None = None, extra_eos: tuple[int, ...] = ()
) -> Model:
    """Load one model for inference. Raises `ModelUnloadable`.

    `options.model` is a resolved reference; `dtype`: a name of `DTYPES`, or auto; `device` (default: what the options say)
    is where it goes; `extra_eos` are ids that end a text beside those of the model's generation config.
    """
    files = require_model(options, name)
    from transformers import AutoModelForCausalLM

    where, arguments = _location(options)
    place = choose_device(device or options.device)
    if where != options.model:
        from transformers import GgufConfig

        arguments["quantization_config"] = GgufConfig(dequantize=True)
    else:
        arguments["use_safetensors"] = True
    if options.device_map is not None:
        arguments["device_map"] = options.device_map
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if not is_local(options.model):
        with _loading(options.model):
            fetch_descriptions(options)
        files = require_model(options, name)
    with without_advice():
        declared = declared_in(files, options.model)
    if declared is not None and options.adapter is not None:
        hint = "name the unquantized checkpoint it was trained on, or the quantized checkpoint of the merged model"
        raise ModelUnloadable(f"{options.adapter} cannot be merged into the quantized weights of {options.model}", hint)
    if declared is not None and options.device_map is None:  # kernels are chosen for the device that weights are loaded to
        arguments["device_map"] = {"": place}
    with _loading(options.model, declared, options.attn_implementation):
        choice = choose_dtype(options, place, files) if dtype == "auto" else None
        chosen = DTYPES[dtype if choice is None else choice.chosen]
        auto_class = _auto_class(files)
        network, loaded = auto_class.from_pretrained(where, dtype=chosen, output_loading_info=True, **arguments)
    if auto_class is not AutoModelForCausalLM:
        require_causal(network, options)
    _require_weights(network, loaded, options.model, files, quantised=declared is not None)
    require_on_gpus(network, options)
    quantised = None
    if declared is not None:
        quantised = Quantisation(str(_method(declared)), _bits(declared), kernels_of(network))
        if not quantised.kernels:
            to_dtype(network, chosen)
    if "device_map" not in arguments:
        network = network.to(place)
    if options.adapter is not None:
        network = _merged(network, options)
    served = network.generation_config.to_diff_dict()
    _prepare(network, extra_eos)
    network = network.eval().requires_grad_(False)
    reference = options.model if options.adapter is None else f"{options.model} + {options.adapter}"
    return Model(name, network, "model", reference, served, quantised, choice, weight_files(options, files))


def _merged(network: PreTrainedModel, options: ModelOptions) -> PreTrainedModel:
    """Return a network with a LoRA adapter in its weights. Raises `ModelUnloadable`, also where weights of the adapter have
    other names than the network's: peft warns of these, and merges nothing.
    """
    from peft import PeftModel

    with _loading(str(options.adapter), base=options.model), warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted = PeftModel.from_pretrained(network, str(options.adapter), use_safetensors=True)
        merged: PreTrainedModel = adapted.merge_and_unload()
    return merged


def _auto_class(files: ModelFiles | None) -> Any:
    """Return what transformers loads a model by: for images and text where its type has no causal language model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as auto

    kind = None if files is None else files.config.get("model_type")
    has_text_alone = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    beside_images = kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not has_text_alone
    return AutoModelForImageTextToText if beside_images else AutoModelForCausalLM


def require_causal(network: Any, options: ModelOptions) -> None:
    """Raise `ModelUnloadable` for a network with an encoder for text, or whose attention sees what follows."""
    causal = all(getattr(module, "is_causal", True) for module in decoder_of(network).modules())
    if network.config.is_encoder_decoder or not causal:
        raise ModelUnloadable(
            f"{options.model} is no causal language model: {type(network).__name__} is not autoregressive",
            "give a decoder, for text alone or for images beside text",
        )


def decoder_of(network: Any) -> Any:
    """Return what embeds tokens and runs decoder layers and the final norm, whatever holds it beside parts for images."""
    decoder = network.get_decoder()
    return getattr(decoder, "model", decoder)  # Llama 4 answers with what holds it and the LM head


def without_hooks(module: Any) -> Any:
    """Return a shallow copy of a module without what accelerate gave it: a `forward` that runs the module and not the copy.
    Its parts keep theirs, which bring what they are given to their device.
    """
    twin = copy.copy(module)
    twin.__dict__ = {name: value for name, value in vars(module).items() if name not in ("forward", "_hf_hook")}
    twin._modules, twin._buffers = dict(module._modules), dict(module._buffers)
    return twin


def of_text(network: Any, weights: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return those of some weights, by name, that take part in a network's text: all of its decoder, and others unless
    their names say that they are for images or sound.
    """
    decoder = decoder_of(network)
    inside = next((f"{name}." for name, module in network.named_modules() if name and module is decoder), "")
    return {name: value for name, value in weights if name.startswith(inside) or not NOT_THE_TEXT.search(name)}


def require_on_gpus(network: PreTrainedModel, options: ModelOptions) -> None:
    """Raise `ModelUnloadable` for parts that a device map leaves to the CPU or the disk, because GPUs have no room for them:
    each step would bring them there.
    """
    places = [str(place) for place in getattr(network, "hf_device_map", {}).values()]
    left = sum(place in ("cpu", "disk") for place in places)
    if options.device_map != "cpu" and ("disk" in places or 0 < left < len(places)):
        raise ModelUnloadable(
            f"{options.model} does not fit into the memory of its GPUs: {left} of {len(places)} parts would be elsewhere",
            "use more GPUs (execution.gpus_per_worker) or a smaller dtype, or set device_map: cpu",
        )


def _prepare(network: PreTrainedModel, extra_eos: tuple[int, ...]) -> None:
    """Set where texts end and nothing else of how a network generates, and lay rows out for its head."""
    from transformers import GenerationConfig

    # A server stops at the tokenizer's EOS as well as at those of the generation config.
    eos = tuple(dict.fromkeys((*eos_of(network.generation_config), *extra_eos)))
    # generate() fills options that a caller leaves unset from the model's own generation config: penalties and sampling
    # settings would slip into greedy text.
    network.generation_config = GenerationConfig(eos_token_id=list(eos) or None, pad_token_id=eos[0] if eos else 0)
    # `logits_to_keep` takes the last row of each prompt out of all rows of a batch, and on a CPU torch multiplies rows with
    # gaps by the weight of the head one prompt at a time.
    if (head := network.get_output_embeddings()) is not None:
        head.register_forward_pre_hook(lambda _, rows: tuple(row.contiguous() for row in rows))


def first_three(names: Iterable[str]) -> str:
    """Return the first names in order, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:3])[:200] + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _require_weights(
    network: PreTrainedModel, loaded: dict[str, Any], reference: str, files: ModelFiles | None, quantised: bool
) -> None:
    """Raise `ModelUnloadable` for weights that the network lacks, which are filled in at random and make every number noise,
    and for those without a place in it, which belong to another config. Parts for images and sound are never run.
    """
    lacking = [*of_text(network, ((str(key), None) for key in loaded.get("missing_keys") or ()))]
    lacking += map(str, loaded.get("mismatched_keys") or ())
    unused = [] if lacking else _unused(network, loaded, files, quantised)
    if lacking or unused:
        problem = "lacks weights of its architecture" if lacking else "holds weights that its config does not use"
        raise ModelUnloadable(
            f"{reference} {problem}: {first_three(lacking or unused)}",
            "give a complete causal language model checkpoint, with its LM head and its own config.json "
            "(architecture, num_hidden_layers); to leave weights out on purpose, load and save it with transformers",
        )


def _unused(network: PreTrainedModel, loaded: dict[str, Any], files: ModelFiles | None, quantised: bool) -> list[str]:
    """Return names of weights without a place in the network. Published checkpoints carry some that no architecture
    declares: `NOT_THE_TEXT`, `OF_QUANTISERS` (biases: of zeros), and layers for several tokens ahead that only the config
    declares.
    """
    settings = network.config.get_text_config()
    last = getattr(settings, "num_hidden_layers", None) or 0
    ahead = range(last, last + (getattr(settings, "num_nextn_predict_layers", None) or 0))
    unused, biases = [], []
    for key in map(str, loaded.get("unexpected_keys") or ()):
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", key)
        if NOT_THE_TEXT.search(key) or (layer is not None and int(layer[1]) in ahead):
            continue
        if not (quantised and OF_QUANTISERS.search(key)):
            unused.append(key)
        elif key.endswith(".bias"):
            biases.append(key)
    if biases:
        zeros = _biases_of_zeros(None if files is None else files.folder)
        unused += [key for key in biases if BEFORE_LAYERS.sub("", key) not in zeros]
    return unused


def _biases_of_zeros(folder: Path | None) -> set[str]:
    """Return names of the biases that hold nothing but zeros in a model's safetensors, without what `BEFORE_LAYERS`
    matches.
    """
    from safetensors import safe_open

    is_zero: dict[str, bool] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder else ():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it cannot be iterated)
                if name.endswith(".bias") and not NOT_THE_TEXT.search(name):
                    place = BEFORE_LAYERS.sub("", name)
                    is_zero[place] = is_zero.get(place, True) and not file.get_tensor(name).any()
    return {name for name, zero in is_zero.items() if zero}


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """Return the tokenizer that belongs to a model. Raises `ModelUnloadable`."""
    require_model(options, "the tokenizer")
    from transformers import AutoTokenizer

    where, arguments = _location(options)
    folder = folder_of(options)
    names = set() if folder is None or not folder.is_dir() else {path.name for path in folder.iterdir()}
    if "tokenizer.json" in names or "tekken.json" not in names:  # transformers would take Mistral's, without a chat template
        arguments["mistral_format"] = False
    if "tokenizer.model" in names and "tokenizer.json" not in names and find_spec("sentencepiece") is None:
        problem = f"{options.model} has its tokenizer as tokenizer.model alone, which needs sentencepiece to be read"
        raise ModelUnloadable(problem, "pip install sentencepiece")
    with _loading(options.model):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, **arguments)
        tokenizer("a")  # settings that are not what they should be are met at the first text only
    return tokenizer


def _location(options: ModelOptions) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a model, and the arguments that say so; a .gguf file is found through its folder."""
    arguments: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if not options.is_gguf:
        return options.model, arguments | {"revision": options.revision or "main"}
    if lacking := missing("gguf"):  # older versions of transformers read BOS and EOS wrongly
        raise ModelUnloadable(f"a GGUF file needs {', '.join(map(str, lacking))}", install_line("gguf"))
    return str(Path(options.model).parent), arguments | {"gguf_file": Path(options.model).name}


@contextlib.contextmanager
def _loading(
    reference: str, quantised: object = None, attention: str | None = None, base: str | None = None
) -> Iterator[None]:
    """Turn the many exceptions of transformers into `ModelUnloadable`, and keep its progress bars off the terminal.
    `quantised`: the config declares a quantisation, whose packages and devices are the likeliest to be missing; `attention`:
    the implementation that was asked for; `base`: the model that an adapter is merged into.
    """
    try:
        # The bar of the GGUF reader has no switch of its own.
        with without_advice(), contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = first_line(error)
        hint = "give a directory with config.json, safetensors weights and tokenizer files, a .gguf file, or a hub id"
        if "ignore_mismatched_sizes" in str(error):  # the sizes themselves are in transformers' log only
            reason = "the shapes of its weights do not match its config.json"
            hint = "give the config.json that belongs to these weights"
        if reference.lower().endswith(".gguf") and not _is_whole(reference):
            reason = "the file is incomplete, or not in the GGUF format"
            hint = "download it again, and compare its size with the original's"
        elif "trust_remote_code" in str(error):
            hint = "if you trust its code, set trust_remote_code: true for this model"
        elif attention is not None and re.search("attention|attn|kernel", reason, re.IGNORECASE):
            hint = f"set attn_implementation to what this model and this machine have, not {attention}, or leave it out"
        elif quantised is not None and "ignore_mismatched_sizes" not in str(error):
            hint = f"its weights are quantized: install what transformers asks for, or {WITHOUT}"
        elif base is not None and is_local(reference):
            hint = f"is it an adapter of {base}? base_model_name_or_path in its {ADAPTER} names the model it was trained on"
        elif not is_local(reference):
            hint = "check the id and your access rights (gated models need a token), or give a local path"
        raise ModelUnloadable(f"cannot load {reference}: {reason[:300]}", hint) from error


def _is_whole(path: str) -> bool:
    """Return whether all tensors that a GGUF file names are in it."""
    from gguf import GGUFReader

    with contextlib.suppress(Exception):  # NumPy raises for a cut file: a short array, an unknown type number
        GGUFReader(path)
        return True
    return False


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Keep what transformers advises its callers off the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def choose_device(device: str) -> torch.device:
    """Return the device that an option means. Raises `ModelUnloadable` if it does not exist, or is of a kind on which
    times and statistics would be wrong: nothing here waits for it before it reads the clock, and not all have float64.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
        if chosen.type in ("cpu", "cuda"):
            return chosen
        reason = "models run on CPUs and on GPUs with CUDA or ROCm"
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
    hint = "use auto, cpu, cuda or cuda:N" if torch.cuda.is_available() else "use auto or cpu: torch finds no GPU here"
    raise ModelUnloadable(f"device {device!r} cannot be used: {reason}", hint)


def target_device(options: ModelOptions) -> torch.device:
    """Return where a model will run, before it is loaded; with a device map, where its first layers do. Raises
    `ModelUnloadable`.
    """
    if options.device_map is None:
        return choose_device(options.device)
    return choose_device("cpu" if options.device_map == "cpu" else "auto")


def require_shape(name: str, options: ModelOptions) -> None:
    """Raise `CostsUnreadable` for a model of a run whose shape `shape_of` will not know, by its config alone."""
    from transformers import AutoConfig

    files = require_model(options, name)
    where, arguments = _location(options)
    with _loading(options.model):
        config = AutoConfig.from_pretrained(where, **arguments)
    try:
        ModelShape.from_config(config.to_dict(), 2.0)
    except (LookupError, TypeError):
        with _loading(options.model), torch.device("meta"):
            plain = _auto_class(files).from_config(config)
        if _counted_shape(plain, 2.0, 2.0) is None:
            raise no_shape(name, next(iter(config.architectures or ()), config.model_type)) from None


def shape_of(network: PreTrainedModel, weight_bytes: float | None = None) -> dict[str, float | bool] | None:
    """Return what decides the bytes and FLOPs of a model's steps; None if that is not known of its architecture.
    `weight_bytes`: of a parameter (default: of the dtype).
    """
    size = float(network.dtype.itemsize)
    weights = weight_bytes or size
    tied = {"tie_word_embeddings": getattr(network.config, "tie_word_embeddings", False)}
    settings = network.config.get_text_config().to_dict() | tied
    try:
        shape: ModelShape | None = ModelShape.from_config(settings, weight_bytes=weights, kv_bytes=size)
    except (LookupError, TypeError):
        with torch.device("meta"):
            plain = type(network)(network.config)
        shape = _counted_shape(plain, weights, size)
    return None if shape is None else dataclasses.asdict(shape)


def _counted_shape(plain: PreTrainedModel, weight_bytes: float, kv_bytes: float) -> ModelShape | None:
    """Return the shape of a network of any family whose layers all attend to the whole text, by its parameters, experts by
    their names; None where names or settings say that it has a state, a window, a latent cache or an unknown number of
    experts.
    """
    config = plain.config.get_text_config()
    counts = {name: weight.numel() for name, weight in of_text(plain, plain.named_parameters()).items()}
    settings = {name: getattr(config, name, None) for name in (*EXPERTS, *USED, *NOT_PLAIN, "num_key_value_heads")}
    mixed = sum(count for name, count in counts.items() if ".experts." in name)
    experts, used = (first_of(settings, *names) if mixed else 0 for names in (EXPERTS, USED))
    heads = getattr(config, "num_attention_heads", None)
    if not heads or first_of(settings, *NOT_PLAIN) or any(map(STATE.search, counts)) or (mixed and not (experts and used)):
        return None
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    return ModelShape(
        parameters=sum(counts.values()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=settings["num_key_value_heads"] or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=embedding.weight.shape[0],
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        experts=experts,
        experts_per_token=used,
        expert_parameters=mixed / experts if mixed else 0.0,
        tied=head is None or head.weight is embedding.weight,
    )


def settings_of(network: PreTrainedModel) -> dict[str, Any]:
    """Return what of a model's configuration tells it from others."""
    volatile = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config")
    return {key: value for key, value in network.config.to_diff_dict().items() if key not in volatile}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the vocabulary and the chat template."""
    content = [sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def eos_of(owner: PreTrainedTokenizerBase | GenerationConfig) -> tuple[int, ...]:
    """Return the ids with which a tokenizer or a generation config ends a text."""
    eos: int | list[int] | None = owner.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(map(int, eos))


def check_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str, special_tokens: str = "same"
) -> None:
    """Raise `VocabularyMismatch` unless every id that both tokenizers have stands for the same token string; of special and
    added tokens only where `special_tokens` is same, not any.

    Tokens that only one of them has, and padding rows of an embedding, are no mismatch. Equal vocabularies do not
    imply equal encodings, which is why the target's tokenizer encodes the text for both.
    """
    ours, theirs = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    shared = sorted(ours.keys() & theirs.keys())
    odd = [index for index in shared if ours[index] != theirs[index]]
    added = target.added_tokens_decoder.keys() & draft.added_tokens_decoder.keys()
    only_names = bool(odd) and added.issuperset(odd)
    if (odd or not shared) and not (only_names and special_tokens == "any"):
        examples = "; ".join(f"id {index}: {ours[index]!r} / {theirs[index]!r}" for index in odd[:3])
        hint = "choose a draft with the target's tokenizer: speculative decoding compares token ids"
        if only_names:
            hint += "; only special or added tokens differ here: if your engine serves this pair, set special_tokens: any"
        raise VocabularyMismatch(
            f"draft {name} has another vocabulary: {len(odd)} of {len(shared)} ids differ (target / draft {examples})", hint
        )


def token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest id that stands for a token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return ids that stand for no text: BOS, EOS, ends of turn, markers of chat templates."""
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return tuple(sorted({*map(int, tokenizer.all_special_ids), *map(int, added)}))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, by its type or one of the many wordings of torch and its backends,
    or was raised because of one that does.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in OUT_OF_MEMORY):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def kept_logits(model: Model) -> dict[str, Any]:
    """Return what to pass to a model for the last token's logits alone, where it can: the head over a whole prompt would
    cost more memory than the prompt's keys and values.
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.network.forward).parameters else {}


def declared_in(files: ModelFiles | None, reference: str) -> dict[str, Any] | None:
    """Return what a model's config.json says of its quantisation; None: nothing. Raises `ModelUnloadable` for a method that
    transformers does not know: it would read packed weights as if they were plain ones.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    groups = [] if files is None else files.settings
    declared = next((found for group in groups if (found := group.get("quantization_config")) is not None), None)
    if declared is None:
        return None
    method = _method(declared) if isinstance(declared, dict) else None
    if method is None or not AutoHfQuantizer.supports_quant_method(declared):
        shown = cut(repr(declared if method is None else method), VALUE)
        raise ModelUnloadable(f"{reference}: transformers does not support the quantization in its config: {shown}", WITHOUT)
    return dict(declared)


def _method(declared: Mapping[str, Any]) -> str | None:
    """Return the name of a method; old configs of bitsandbytes have none."""
    if declared.get("load_in_4bit") or declared.get("load_in_8bit"):
        return "bitsandbytes"
    method = declared.get("quant_method")
    return method if isinstance(method, str) else None


def _bits(declared: Mapping[str, Any]) -> int | None:
    """Return the bits of a weight: as GPTQ and AWQ write them, as bitsandbytes does, and as compressed-tensors does by
    group.
    """
    groups = (declared.get("config_groups") or {}).values()
    own = 4 if declared.get("load_in_4bit") else 8 if declared.get("load_in_8bit") else declared.get("bits")
    numbers = {own, *((group.get("weights") or {}).get("num_bits") for group in groups)} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def kernels_of(network: nn.Module) -> dict[str, int]:
    """Return the classes that compute with quantised weights, and the number of layers of each."""
    kernels = Counter(name for module in network.modules() if (name := _kernel(module)) is not None)
    return dict(sorted(kernels.items()))


def _kernel(module: nn.Module) -> str | None:
    """Return the class that computes with quantised weights: the layer's own, or that of its weight in a plain layer."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if wrapped := [weight for weight in own if hasattr(weight, WRAPPER)]:
        return type(wrapped[0] if type(module) is nn.Linear else module).__name__
    is_other_linear = isinstance(module, nn.Linear) and type(module) is not nn.Linear
    return type(module).__name__ if is_other_linear or any(weight.dtype not in PLAIN for weight in own) else None


def to_dtype(network: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters: transformers dequantises a model and leaves those that were not quantised in their file's dtype."""
    kept = kept_in_float32(network)
    for name, parameter in network.named_parameters():
        if parameter.is_floating_point() and not kept.intersection(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def parameters_of(network: PreTrainedModel) -> int:
    """Return the number of parameters of an architecture that take part in text, however its weights are packed."""
    with torch.device("meta"):
        plain = type(network)(network.config)
    return sum(weight.numel() for weight in of_text(plain, plain.named_parameters()).values())


def plain_tensors(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a weight consists of, with their names: a quantised one may wrap several."""
    if not hasattr(weight, WRAPPER):
        yield name, weight
        return
    for inner in getattr(weight, WRAPPER)()[0]:
        yield from plain_tensors(f"{name}.{inner}", getattr(weight, inner))


def stored_bytes(network: PreTrainedModel) -> int:
    """Return bytes of all saved weights that take part in text, those with several names once."""
    named = of_text(network, network.state_dict().items())
    weights = [item for name, weight in named.items() for item in plain_tensors(name, weight)]
    return sum({tensor.data_ptr(): tensor.nbytes for _, tensor in weights}.values())
