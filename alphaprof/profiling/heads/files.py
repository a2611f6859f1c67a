"""The files of a draft head: its config.json and its tensors, looked at before any of them is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from alphaprof.config.options import ModelOptions
from alphaprof.errors import ModelUnloadable, shown
from alphaprof.profiling.models.checkpoint import CONFIG, CONVERSION
from alphaprof.profiling.models.hub import downloaded, first_line, is_local, require_model

PICKLES = ("*.bin", "*.pt", "*.pth")
FLOATS = ("F32", "F16", "BF16", "F64")  # as safetensors calls dtypes
QUANTISED = "give the head in 16 or 32 bits, as it was trained"
COMPLETE = "give the complete checkpoint of the head, with the config.json that belongs to it"


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it; `dtype` as safetensors calls it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class HeadFiles:
    """The files of a head; `name`: what messages call it."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Stored]

    def refused(self, problem: str, hint: str) -> ModelUnloadable:
        """An error about them."""
        return ModelUnloadable(f"{self.name}: {problem}", hint)

    def require_values(self, settings: Mapping[str, Any], flags: Iterable[str] = (), numbers: Iterable[str] = ()) -> None:
        """Raise `ModelUnloadable` unless flags in settings are true or false, and numbers finite and above 0; a null or none
        at all is no fault.
        """
        for names, kinds, words in ((flags, (bool,), "true or false"), (numbers, (int, float), "a finite number above 0")):
            for name in names:
                value = settings.get(name)
                if value is not None and (type(value) not in kinds or not (kinds == (bool,) or 0 < value < math.inf)):
                    raise self.refused(f"{name} in its config.json is {shown(value)}, not {words}", COMPLETE)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, as it is stored."""
        with safe_open(self.tensors[name].path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def require(self, wanted: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Raise `ModelUnloadable` unless the wanted tensors are there, in these shapes and not quantised, and no others
        beside the ignored ones.
        """
        if missing := wanted.keys() - self.tensors.keys():
            raise self.refused(f"its files lack {first_three(missing)}", COMPLETE)
        if unused := self.tensors.keys() - wanted.keys() - set(ignored):
            raise self.refused(f"its files hold tensors that its config does not use: {first_three(unused)}", COMPLETE)
        for name, shape in wanted.items():
            stored = self.tensors[name]
            if stored.dtype not in FLOATS:
                raise self.refused(f"{name} holds {stored.dtype}: quantised heads cannot be measured", QUANTISED)
            if stored.shape != tuple(shape):
                expected = f"{name} is {list(stored.shape)}, and its config and the target say {list(shape)}"
                raise self.refused(expected, COMPLETE)

    def loaded(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of weights in a dtype. Raises `ModelUnloadable` for NaN and infinite numbers."""
        weight = self.tensor(name).to(dtype)
        if not bool(weight.isfinite().all()):
            hint = "download the head again; if its numbers are too large for this dtype, set dtype for this draft"
            raise self.refused(f"{name} has NaN or infinite weights in {str(dtype).removeprefix('torch.')}", hint)
        return weight


def files_of(name: str, options: ModelOptions) -> HeadFiles:
    """The files of draft `name`, from its folder or the hub. Raises `ModelUnloadable`."""
    called = f"draft {name} ({options.model})"
    require_model(options, f"draft {name}")
    folder = Path(options.model)
    if not is_local(options.model):
        folder = downloaded(options)
        require_model(options, f"draft {name}")
    if not (folder / CONFIG).is_file():
        raise ModelUnloadable(f"{called} has no {CONFIG}", "give a folder or a hub id with config.json and safetensors")
    config = json.loads((folder / CONFIG).read_bytes())  # a JSON object, as `require_model` has seen
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        found = f"holds its weights as pickles only ({pickles[0]})" if pickles else "holds no safetensors"
        raise ModelUnloadable(f"{called} {found}, and reading a pickle can run code", f"where you trust it: {CONVERSION}")
    files = HeadFiles(called, config, _stored(paths, called))
    for group in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("quantization_config", "compression_config"):
            if group.get(key):
                method = group[key].get("quant_method") if isinstance(group[key], dict) else group[key]
                raise files.refused(f"quantised heads cannot be measured ({key}: {shown(method)})", QUANTISED)
    return files


def _stored(paths: list[Path], called: str) -> dict[str, Stored]:
    """What safetensors files hold, by name."""
    tensors: dict[str, Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it cannot be iterated)
                    part = file.get_slice(name)
                    if name in tensors:
                        message = f"{called} holds {name} in {tensors[name].path.name} and in {path.name}"
                        raise ModelUnloadable(message, "keep one of the two files")
                    tensors[name] = Stored(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            message = f"{called}: {path.name} cannot be read: {first_line(error)}"
            raise ModelUnloadable(message, "download the head again") from None
    return tensors


def first_three(names: Collection[str]) -> str:
    """The first of some names in their order, and how many more there are."""
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
