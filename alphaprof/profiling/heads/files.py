"""The files of a draft head: its config.json and its tensors, looked at before any of them is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from alphaprof.config.heads import recognized, require_kind
from alphaprof.config.model_files import CONFIG, ModelFiles, Stored
from alphaprof.errors import ModelUnloadable, shown
from alphaprof.profiling.models.hub import CONVERSION, downloaded, is_local, require_model
from alphaprof.profiling.models.load import first_three

if TYPE_CHECKING:
    from alphaprof.config.options import ModelOptions

PICKLES = ("*.bin", "*.pt", "*.pth")
FLOATS = ("F32", "F16", "BF16", "F64")  # as safetensors calls dtypes
QUANTISED = "give the head in 16 or 32 bits, as it was trained"
COMPLETE = "give the complete checkpoint of the head, with the config.json that belongs to it"


@dataclass(frozen=True)
class HeadFiles:
    """The files of a head; `name`: what messages call it."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Stored]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that its tensors lie in."""
        return tuple(sorted({each.path for each in self.tensors.values()}))

    def refused(self, problem: str, hint: str) -> ModelUnloadable:
        """Return an error about them."""
        return ModelUnloadable(f"{self.name}: {problem}", hint)

    def require_flags(self, settings: Mapping[str, Any], names: Iterable[str]) -> None:
        """Raise `ModelUnloadable` unless settings of these names are true, false, null or missing."""
        for name in names:
            if settings.get(name) not in (None, True, False):
                raise self.refused(f"{name} in its config.json is {shown(settings[name])}, not true or false", COMPLETE)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, as it is stored."""
        stored = self.tensors[name]
        with safe_open(stored.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(stored.name)
            return tensor

    def require(self, wanted: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Raise `ModelUnloadable` unless the wanted tensors are there, in these shapes and not quantised, and no others
        beside the ignored ones.
        """
        both = wanted.keys() & self.tensors.keys()
        self.require_none(self.quantised(both), QUANTISED)
        faults = {
            "lack": wanted.keys() - both,
            "hold tensors that its config does not use:": self.tensors.keys() - wanted.keys() - set(ignored),
            "do not match the shapes of its config and the target:": {
                f"{name} {list(self.tensors[name].shape)} for {list(wanted[name])}"
                for name in both
                if self.tensors[name].shape != wanted[name]
            },
        }
        self.require_none(faults, COMPLETE)

    def require_none(self, faults: Mapping[str, Collection[str]], hint: str) -> None:
        """Raise `ModelUnloadable` for the first of these faults that has names of tensors."""
        for words, names in faults.items():
            if names:
                raise self.refused(f"its files {words} {first_three(names)}", hint)

    def quantised(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the fault of those of these tensors that are not of floats, with their dtypes."""
        dtypes = {name: self.tensors[name].dtype for name in names}
        odd = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in FLOATS]
        return {"are quantized, which cannot be measured:": odd}

    def loaded(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of weights in a dtype. Raises `ModelUnloadable` for NaN and infinite numbers."""
        weight = self.tensor(name).to(dtype)
        if not bool(weight.isfinite().all()):
            hint = "download the head again; if its numbers are too large for this dtype, set dtype for this draft"
            raise self.refused(f"{name} has NaN or infinite weights in {str(dtype).removeprefix('torch.')}", hint)
        return weight


def files_of(name: str, options: ModelOptions, kind: str = "") -> HeadFiles:
    """Return the files of draft `name`, from its folder or the hub. Names of tensors are those without a `model.` before
    them, but of models by themselves. Raises `ModelUnloadable`, also for files that are no draft of a `kind`.
    """
    called = f"draft {name} ({options.model})"
    files = require_model(options, f"draft {name}")
    if not is_local(options.model):
        folder = downloaded(options)
        files = require_model(options, f"draft {name}") or ModelFiles.of(folder)
    if kind:
        require_kind(called, kind, files or Path(options.model))
    files = files or ModelFiles.of(Path(options.model))
    if not files.config:
        raise ModelUnloadable(f"{called} has no {CONFIG}", "give a folder or a hub id with config.json and safetensors")
    if not files.paths:
        pickles = sorted(path.name for pattern in PICKLES for path in files.folder.glob(pattern))
        if not pickles:
            raise ModelUnloadable(
                f"{called} holds no safetensors", "give a folder or a hub id with config.json and safetensors"
            )
        problem = f"{called} holds its weights as pickles only ({pickles[0]}), and reading a pickle can run code"
        raise ModelUnloadable(problem, f"if you trust it, {CONVERSION}")
    tensors = files.tensors
    if not recognized(files.config, tensors).whole:
        tensors = {key.removeprefix("model."): each for key, each in tensors.items()}
    found = HeadFiles(called, files.config, tensors)
    groups = (*files.settings, *(value for value in files.config.values() if isinstance(value, dict)))
    if any(group.get("quantization_config") or group.get("compression_config") for group in groups):
        where = "quantization_config in its config.json, or hf_quant_config.json"
        raise found.refused(f"quantized heads cannot be measured ({where})", QUANTISED)
    return found
