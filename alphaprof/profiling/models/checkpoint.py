"""What the files of a model say before it is loaded: whether descriptions can be read and weights are pickles; the dtype."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from alphaprof.errors import VALUE, ModelUnloadable, cut

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DESCRIPTIONS = (CONFIG, GENERATION, INDEX)
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
# The log numbers positions in 32 bits; published models have at most some ten million.
POSITIONS = 2**31 - 1
# Floating dtypes as safetensors and GGUF name them.
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
GGUF_DTYPES = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
CONVERSION = (
    "run python: import torch, safetensors.torch; weights = torch.load('pytorch_model.bin', weights_only=True); "
    "safetensors.torch.save_file({name: each.contiguous() for name, each in weights.items()}, 'model.safetensors')"
)


def require_sound(folder: Path, cache: bool = False) -> None:
    """Raise `ModelUnloadable` for a folder whose config.json or index cannot be read, or whose weights are pickles or lie
    elsewhere. What else the folder does not hold, transformers says.

    `cache`: it is the hub's cache of a model, where files may be missing; transformers downloads them, pickles never.
    """
    explicit = _described(folder / CONFIG).get("transformers_weights")
    if explicit is not None:
        _require_safetensors(explicit, folder / CONFIG)
    if (folder / WEIGHTS).is_file() and explicit is None:
        return
    if (index := folder / (explicit or INDEX)).is_file() and index.name.endswith(".json"):
        for name in set(map(str, (_described(index).get("weight_map") or {}).values())):
            _require_safetensors(name, index)
    elif explicit is None and not cache and (pickles := [name for name in PICKLES if (folder / name).is_file()]):
        raise ModelUnloadable(
            f"{folder} holds its weights as pickles only ({pickles[0]}), and reading a pickle can run code",
            "where you trust it, load it with transformers and save it again: save_pretrained writes safetensors; of a "
            f"draft head {CONVERSION}",
        )


def declared_dtype(folder: Path) -> str | None:
    """Returns the floating dtype that config.json declares for a model's text; None: it declares none. Raises
    `ModelUnloadable`.
    """
    config = _described(folder / CONFIG)
    groups = [group for group in (config, config.get("text_config")) if isinstance(group, dict)]
    values = [group.get(key) for group in groups for key in ("dtype", "torch_dtype")]
    given = [value.removeprefix("torch.") for value in values if isinstance(value, str)]
    return next((name for name in given if name in SAFETENSORS_DTYPES.values()), None)


def weights_names(folder: Path) -> Iterator[str]:
    """Yields names that a file of a model's weights may have: the first that an index names, and that of a single file."""
    shards = _described(folder / INDEX).get("weight_map")
    yield from sorted({str(name) for name in shards.values()})[:1] if isinstance(shards, dict) else ()
    yield WEIGHTS


def weights_dtype(path: Path) -> str | None:
    """Returns the floating dtype of most weights of a safetensors file; None where it holds none or is damaged: loading it
    says so.
    """
    from safetensors import SafetensorError, safe_open

    counts: Counter[str] = Counter()
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                weights = file.get_slice(name)
                counts[weights.get_dtype()] += math.prod(weights.get_shape())
    except (SafetensorError, OSError):
        return None
    known = {SAFETENSORS_DTYPES[stored]: count for stored, count in counts.items() if stored in SAFETENSORS_DTYPES}
    return max(known, key=lambda name: known[name], default=None)


def gguf_dtype(path: Path) -> str | None:
    """Returns the dtype of most weights of a .gguf file; None where these are quantised, or the file is damaged: loading it
    says so. The reader of `gguf` takes seconds for the vocabulary, which is skipped here.
    """
    counts: Counter[int] = Counter()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for kind, weights in _Gguf(content).tensors():
                counts[kind] += weights
    except (OSError, ValueError, KeyError, struct.error):
        return None
    return GGUF_DTYPES.get(counts.most_common(1)[0][0]) if counts else None


class _Gguf:
    """The header of a GGUF file. Its strings and arrays are prefixed by their length."""

    NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY = 8, 9

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 0

    def tensors(self) -> Iterator[tuple[int, int]]:
        """The number of the type and the weights of each tensor. Raises `ValueError`, `KeyError` and `struct.error`."""
        if self._skip(4) != b"GGUF":
            raise ValueError("no GGUF file")
        _, tensors, pairs = self._numbers("IQQ")
        for _ in range(pairs):
            self._string()
            self._value(self._numbers("I")[0])
        for _ in range(tensors):
            self._string()
            dimensions = self._numbers("I")[0]
            *shape, kind, _ = self._numbers(f"{min(dimensions, 9)}QIQ")  # the last is its place
            yield kind, math.prod(shape)

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{kinds}", self._skip(struct.calcsize(f"<{kinds}")))

    def _skip(self, size: int) -> bytes:
        self.at += size
        return self.content[self.at - size : self.at]

    def _string(self) -> None:
        self._skip(self._numbers("Q")[0])

    def _value(self, kind: int) -> None:
        if kind == self.STRING:
            self._string()
        elif kind != self.ARRAY:
            self._numbers(self.NUMBERS[kind])
        else:
            inner, count = self._numbers("IQ")
            for _ in range(count if inner == self.STRING else 0):
                self._string()
            if inner != self.STRING:
                self._skip(count * struct.calcsize(f"<{self.NUMBERS[inner]}"))


def _described(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file. Raises `ModelUnloadable`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelUnloadable(f"{path} cannot be read: {reason[:200]}", "download the model again") from None
    if not isinstance(content, dict):
        raise ModelUnloadable(f"{path} is not a JSON object", "download the model again")
    return content


def _require_safetensors(name: object, where: Path) -> None:
    """A file of weights is named by `where`: it must be safetensors, or their index, in the same folder."""
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    if path.is_absolute() or ".." in path.parts or "\\" in str(name):
        hint = "take the model from where it was published, whole"
        raise ModelUnloadable(f"{where} names weights outside its folder: {cut(repr(name), VALUE)}", hint)
    if not path.name.endswith((".safetensors", ".safetensors.index.json")):
        hint = "reading a pickle can run code: give the model as safetensors or as a .gguf file"
        raise ModelUnloadable(f"{where} names weights that are not safetensors: {cut(repr(name), VALUE)}", hint)
