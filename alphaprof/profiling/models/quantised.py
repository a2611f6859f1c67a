"""Quantised weights: what a config says of them, what computes with them, and how much of it there is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alphaprof.config.model_files import ModelFiles
from alphaprof.errors import VALUE, ModelUnloadable, cut
from alphaprof.profiling.models.identity import of_text
from alphaprof.profiling.models.private import kept_in_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Quantisers write biases of zeros for layers that have none (GPTQ), and scales for a KV cache of 8 bits.
OF_QUANTISERS = re.compile(r"\.bias$|\.[qkv]_scale$|\.[qkv]_proj\.output_scale$")
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64)  # of weights and of buffers
WRAPPER = "__tensor_flatten__"  # what a tensor has that consists of others, by torch's protocol for subclasses
WITHOUT = "give the unquantized checkpoint, or import your engine's logs (alphaprof import)"


def declared_in(files: ModelFiles | None, reference: str) -> dict[str, Any] | None:
    """Return what a model's config.json says of its quantisation; None: nothing. Raises `ModelUnloadable` for a method that
    transformers does not know: it would read packed weights as if they were plain ones.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    groups = [] if files is None else files.settings
    declared = next((found for group in groups if (found := group.get("quantization_config")) is not None), None)
    if declared is None:
        return None
    method = method_of(declared) if isinstance(declared, dict) else None
    if method is None or not AutoHfQuantizer.supports_quant_method(declared):
        shown = cut(repr(declared if method is None else method), VALUE)
        raise ModelUnloadable(f"{reference}: transformers does not support the quantization in its config: {shown}", WITHOUT)
    return dict(declared)


def method_of(declared: Mapping[str, Any]) -> str | None:
    """Return the name of a method; old configs of bitsandbytes have none."""
    if declared.get("load_in_4bit") or declared.get("load_in_8bit"):
        return "bitsandbytes"
    method = declared.get("quant_method")
    return method if isinstance(method, str) else None


def bits_of(declared: Mapping[str, Any]) -> int | None:
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
