"""What the folder of a model says without torch: its JSON files, read once, and the names and shapes of its tensors."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from alphaprof.errors import VALUE, ModelUnloadable, cut, shown

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUANTIZATION = "hf_quant_config.json"  # beside config.json: what ModelOpt says of the weights
ADAPTER = "adapter_config.json"  # of peft: a LoRA adapter
MISTRAL = "params.json"  # in place of config.json: Mistral's own format, whose weights are consolidated*.safetensors
OWN_NAMES = "consolidated"
DOWNLOAD = "download the model again"
MOST_LAYERS = 10_000
# Floating dtypes as safetensors and GGUF name them.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
LONGEST = 100_000_000  # bytes of a header, as safetensors limits it
# What a GGUF file is, near its beginning: the key, the type of a text, its length, and the text.
OF_GGUF = re.compile(rb"general\.(architecture|type)\x08\x00\x00\x00(.)\x00{7}([ -~]+)", re.DOTALL)


GGUF_CONTEXT = re.compile(rb"\.context_length\x04\x00\x00\x00(.{4})", re.DOTALL)  # a uint32


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it, under its `name` there; `dtype` as safetensors calls it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model in `folder`: what config.json, its index of weights and hf_quant_config.json say ({}: there is
    none). Tensors are read when they are asked for.
    """

    folder: Path
    config: dict[str, Any]
    index: dict[str, Any]
    quantization: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> ModelFiles:
        """Return the files in a folder. Raises `ModelUnloadable` for JSON that cannot be read, and for more layers than a
        model can have: transformers would make them all before it misses their weights.
        """
        files = cls(folder, *(described(folder / name) for name in (CONFIG, INDEX, QUANTIZATION)))
        numbers = [(key, value) for group in files.settings for key, value in group.items() if isinstance(value, int)]
        if many := [f"{key} is {shown(value)}" for key, value in numbers if "layer" in key and value > MOST_LAYERS]:
            raise ModelUnloadable(f"{folder / CONFIG} cannot be right: {many[0]}", DOWNLOAD)
        return files

    @cached_property
    def settings(self) -> list[dict[str, Any]]:
        """The settings in config.json: of the model, and of its text if it has other parts; and its quantization where only
        another file declares it.
        """
        groups = [group for group in (self.config, self.config.get("text_config")) if isinstance(group, dict)]
        beside = modelopt(self.quantization)
        declared = beside is None or any(group.get("quantization_config") is not None for group in groups)
        return groups if declared else [*groups, {"quantization_config": beside}]

    @property
    def explicit(self) -> Any:
        """The file of weights that config.json names; None: that of the usual name."""
        return self.config.get("transformers_weights")

    @property
    def declared_dtype(self) -> str | None:
        """The floating dtype that config.json declares for a model's text; None: it declares none."""
        values = [group.get(key) for group in self.settings for key in ("dtype", "torch_dtype")]
        given = [value.removeprefix("torch.") for value in values if isinstance(value, str)]
        return next((name for name in given if name in DTYPES.values()), None)

    @cached_property
    def named(self) -> list[Path]:
        """The files that transformers loads its weights from: what config.json names, else the single one, else those that
        an index names. They need not be there. Raises `ModelUnloadable` for names of anything but safetensors in its folder.
        """
        index, where = self.index, self.folder / INDEX
        single = self._inside(str(self.explicit or WEIGHTS), self.folder / CONFIG)
        if single.name.endswith(".json"):
            index, where = described(single), single
        elif single.is_file():
            return [single]
        given = index.get("weight_map")
        names = set(map(str, given.values())) if isinstance(given, dict) else set()
        return [self._inside(name, where) for name in sorted(names)] or [single]

    def _inside(self, name: str, where: Path) -> Path:
        """Return the path of a file of weights, or of their index, that the file `where` names."""
        path = PurePosixPath(name)
        outside = path.is_absolute() or ".." in path.parts or "\\" in name
        if outside or not path.name.endswith((".safetensors", ".safetensors.index.json")):
            problem = "outside its folder" if outside else "that are not safetensors"
            raise ModelUnloadable(
                f"{where} names weights {problem}: {cut(repr(name), VALUE)}",
                "give the whole model as safetensors or as a .gguf file: reading a pickle can run code",
            )
        return self.folder / path

    @cached_property
    def beside(self) -> frozenset[str]:
        """The names of all that lies in the folder."""
        return frozenset(path.name for path in self.folder.glob("*"))

    @cached_property
    def paths(self) -> list[Path]:
        """The safetensors that its tensors lie in: those that an index names, or else all in the folder, without copies in
        Mistral's own names.
        """
        if self.index:
            return [path for path in self.named if path.is_file()]
        found = sorted(self.folder.glob("*.safetensors"))
        return [path for path in found if not path.name.startswith(OWN_NAMES)] or found

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Its tensors by name. Raises `ModelUnloadable` for files that cannot be read, and two that hold one name."""
        return stored(self.paths, str(self.folder))


def described(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, or {} if `path` does not exist. Raises `ModelUnloadable`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
        reason = "it is not a JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ModelUnloadable(f"{path} cannot be read: {reason[:200]}", DOWNLOAD)


def quantization_beside(config: Path) -> dict[str, Any] | None:
    """Return how ModelOpt quantized a model's weights, as its config.json would say it, from hf_quant_config.json beside it,
    or NAME_hf_quant_config.json beside NAME_config.json; None: there is none, or its weights are not quantized. Raises
    `ModelUnloadable`.
    """
    if not config.name.endswith(CONFIG):
        return None
    return modelopt(described(config.with_name(config.name.removesuffix(CONFIG) + QUANTIZATION)))


def modelopt(said: dict[str, Any]) -> dict[str, Any] | None:
    """Return how ModelOpt quantized weights, as a config.json would say it, from hf_quant_config.json; None: it did not."""
    found = said.get("quantization")
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) and found.get("quant_algo") else None


def stored(paths: list[Path], called: str) -> dict[str, Stored]:
    """Return what safetensors files hold, by name. Raises `ModelUnloadable`; `called`: what it calls the model."""
    tensors: dict[str, Stored] = {}
    for path in paths:
        for name, (shape, dtype) in _header(path, called).items():
            if name in tensors:
                raise ModelUnloadable(
                    f"{called} holds {name} in {tensors[name].path.name} and in {path.name}", "keep one of the two files"
                )
            tensors[name] = Stored(path, name, shape, dtype)
    return tensors


def _header(path: Path, called: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shapes and dtypes by name: the file begins with the length of a JSON object that says where each tensor lies
    behind it.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            said = json.loads(file.read(length)) if length <= LONGEST else {}
        said.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in said.values()), default=0)
        if path.stat().st_size == 8 + length + end:
            return {name: (tuple(map(int, each["shape"])), str(each["dtype"])) for name, each in said.items()}
        reason = "it is not whole"
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, struct.error) as error:
        reason = getattr(error, "strerror", None) or "it is not in the safetensors format"
    raise ModelUnloadable(f"{called}: {path.name} cannot be read: {reason}", "download it again")


def stored_dtype(path: Path) -> str | None:
    """Return the dtype of most weights of a safetensors file; None: it is not a floating one, or holds none."""
    counts: Counter[str] = Counter()
    for tensor in stored([path], str(path)).values():
        if tensor.dtype in DTYPES:  # beside packed integers
            counts[tensor.dtype] += math.prod(tensor.shape)
    return DTYPES.get(max(counts, key=lambda name: counts[name], default=""))


def context_of(place: Path) -> int | None:
    """Return the longest text in tokens of the model in a folder or a GGUF file; None: its files do not say. Raises
    `ModelUnloadable`.
    """
    if place.is_file():
        with place.open("rb") as file:
            found = GGUF_CONTEXT.search(file.read(1 << 16))
        return None if found is None else int.from_bytes(found[1], "little") or None
    groups = ModelFiles.of(place).settings[::-1]  # those of its text first
    stated = [group.get(name) for group in groups for name in ("max_position_embeddings", "n_positions")]
    return next((limit for limit in stated if type(limit) is int and limit > 0), None)


def gguf_kind(path: Path) -> str:
    """Return what a GGUF file says it is: imatrix, or its architecture; empty if it does not."""
    try:
        with path.open("rb") as file:
            found = {key: text[: length[0]] for key, length, text in OF_GGUF.findall(file.read(1 << 16))}
    except OSError:
        return ""
    kind = found.get(b"type", b"model")
    return str(kind if kind != b"model" else found.get(b"architecture", b""), "ascii")
