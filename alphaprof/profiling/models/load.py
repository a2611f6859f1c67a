"""Load target and draft models, quantised or not, and their tokenizer (transformers)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alphaprof.config.model_files import ADAPTER, ModelFiles
from alphaprof.costs.cost_model import no_shape
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.models.dtype import DTYPES, DtypeChoice, choose_dtype
from alphaprof.profiling.models.hashes import fingerprint_by_files, weight_files
from alphaprof.profiling.models.hub import (
    fetch_descriptions,
    first_line,
    is_local,
    require_model,
)
from alphaprof.profiling.models.identity import (
    NOT_THE_TEXT,
    counted_shape,
    decoder_of,
    eos_of,
    of_text,
    settings_of,
    shape_of,
)
from alphaprof.profiling.models.private import attention_of
from alphaprof.profiling.models.quantised import (
    OF_QUANTISERS,
    WITHOUT,
    bits_of,
    declared_in,
    kernels_of,
    method_of,
    parameters_of,
    stored_bytes,
    to_dtype,
)
from alphaprof.run.manifest import ModelFacts, Quantisation
from alphaprof.version import install_line, missing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from alphaprof.config.options import ModelOptions

# Logit differences that batching alone was seen to make: 9e-5 in float32 and 0.125 in bfloat16 (two logits each);
# float16 has three more bits than bfloat16. Below them the order of two tokens is arbitrary.
NOISE = {torch.float32: 2e-4, torch.bfloat16: 0.125, torch.float16: 0.125 / 8}
BEFORE_LAYERS = re.compile(r"^.*?(?=[a-z]+\.\d+\.)")  # what transformers may rename: model.language_model. and the like
# What allocators without an error of their own say.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


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
        weight = getattr(self.network.get_output_embeddings(), "weight", None)
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
        raise ModelUnloadable(
            f"{options.adapter} cannot be merged into the quantized weights of {options.model}",
            "name the unquantized checkpoint it was trained on, or the quantized checkpoint of the merged model",
        )
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
        quantised = Quantisation(str(method_of(declared)), bits_of(declared), kernels_of(network))
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


def without_hooks(module: Any) -> Any:
    """Return a shallow copy of a module without what accelerate gave it: a `forward` that runs the module and not the copy.
    Its parts keep theirs, which bring what they are given to their device.
    """
    twin = copy.copy(module)
    twin.__dict__ = {name: value for name, value in vars(module).items() if name not in ("forward", "_hf_hook")}
    twin._modules, twin._buffers = dict(module._modules), dict(module._buffers)
    return twin


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
    files = require_model(options, "the tokenizer")
    from transformers import AutoTokenizer

    where, arguments = _location(options)
    names = frozenset[str]() if files is None else files.beside
    if "tokenizer.json" in names or "tekken.json" not in names:  # transformers would take Mistral's, without a chat template
        arguments["mistral_format"] = False
    if "tokenizer.model" in names and "tokenizer.json" not in names and find_spec("sentencepiece") is None:
        raise ModelUnloadable(
            f"{options.model} has its tokenizer as tokenizer.model alone, which needs sentencepiece to be read",
            "pip install sentencepiece",
        )
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
        torn = reference.lower().endswith(".gguf") and not _is_whole(reference)
        other_shapes = "ignore_mismatched_sizes" in str(error)  # the sizes themselves are in transformers' log only
        reason = "the shapes of its weights do not match its config.json" if other_shapes else first_line(error)
        reason = "the file is incomplete, or not in the GGUF format" if torn else reason
        asked = f"set attn_implementation to what this model and this machine have, not {attention}, or leave it out"
        packed = quantised is not None and not other_shapes
        trained_on = f"base_model_name_or_path in its {ADAPTER} names the model it was trained on"
        hints = {  # the first that applies
            "download it again, and compare its size with the original's": torn,
            "if you trust its code, set trust_remote_code: true for this model": "trust_remote_code" in str(error),
            asked: attention is not None and re.search("attention|attn|kernel", reason, re.IGNORECASE),
            f"its weights are quantized: install what transformers asks for, or {WITHOUT}": packed,
            f"is it an adapter of {base}? {trained_on}": base is not None and is_local(reference),
            "check the id and your access rights (gated models need a token), or give a local path": not is_local(reference),
            "give the config.json that belongs to these weights": other_shapes,
            "give a directory with config.json, safetensors weights and tokenizer files, a .gguf file, or a hub id": True,
        }
        hint = next(hint for hint, applies in hints.items() if applies)
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
    raise ModelUnloadable(
        f"device {device!r} cannot be used: {reason}",
        "use auto, cpu, cuda or cuda:N" if torch.cuda.is_available() else "use auto or cpu: torch finds no GPU here",
    )


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
        if counted_shape(plain, 2.0, 2.0) is None:
            raise no_shape(name, next(iter(config.architectures or ()), config.model_type)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, by its type or one of the many wordings of torch and its backends,
    or was raised because of one that does.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in OUT_OF_MEMORY):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def kept_logits(model: Model) -> dict[str, Any]:
    """Return what to pass to a model for the last token's logits alone, where it can: the head over a whole prompt would
    cost more memory than the prompt's keys and values. Layers that share keys leave tokens out for a number of logits, but
    not for places of them, and their states would be missing.
    """
    if "logits_to_keep" not in inspect.signature(model.network.forward).parameters:
        return {}
    shares = getattr(model.network.config.get_text_config(), "num_kv_shared_layers", None)
    return {"logits_to_keep": torch.tensor([-1]) if shares else 1}
