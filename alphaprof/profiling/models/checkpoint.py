"""What the files of a model say before any of it is loaded: they can be read, and hold no pickles and what they promise."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from alphaprof.errors import VALUE, ModelUnloadable, cut

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DESCRIPTIONS = (CONFIG, GENERATION, INDEX)
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
# The log numbers positions in 32 bits; published models have at most some ten million.
POSITIONS = 2**31 - 1
CONTEXTS = ("max_position_embeddings", "n_positions")
# What architectures call their sizes in config.json.
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SIZES = (*WIDTHS, *EXPERTS, "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MOST_LAYERS = 10_000  # published models have some hundreds
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
# Floating dtypes as safetensors and GGUF name them.
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
GGUF_DTYPES = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
CONVERSION = (
    "run python: import torch, safetensors.torch; weights = torch.load('pytorch_model.bin', weights_only=True); "
    "safetensors.torch.save_file({name: each.contiguous() for name, each in weights.items()}, 'model.safetensors')"
)


def require_sound(folder: Path, cache: bool = False) -> None:
    """Raise `ModelUnloadable` for a folder whose descriptions cannot be read, whose weights are pickles or lie elsewhere, or
    whose config.json asks for more than its weights can hold. What else the folder does not hold is not missed here.

    `cache`: it is the hub's cache of a model, where files may be missing; transformers downloads them, pickles never.
    """
    config = _described(folder / CONFIG)
    _require_eos(folder / GENERATION)
    groups = [group for group in (config, config.get("text_config")) if isinstance(group, dict)]
    for group, name in itertools.product(groups, CONTEXTS):
        if group.get(name) is not None:
            require_context(group[name], f"{folder / CONFIG}: {name}")
    tensors: int | None = None
    size: int | None = None
    explicit = config.get("transformers_weights")
    if explicit is not None:
        _require_safetensors(explicit, folder / CONFIG)
    if (folder / WEIGHTS).is_file() and explicit is None:
        tensors, size = _tensors(folder / WEIGHTS), (folder / WEIGHTS).stat().st_size
    elif (index := folder / (explicit or INDEX)).is_file() and index.name.endswith(".json"):
        tensors, size = _indexed(folder, index, cache)
    elif explicit is None and not cache and (pickles := [name for name in PICKLES if (folder / name).is_file()]):
        raise ModelUnloadable(
            f"{folder} holds its weights as pickles only ({pickles[0]}), and reading a pickle can run code",
            "where you trust it, load it with transformers and save it again: save_pretrained writes safetensors; of a "
            f"draft head {CONVERSION}",
        )
    _require_room(groups, folder / CONFIG, tensors, size)


def require_context(limit: object, where: str) -> None:
    """Raise `ModelUnloadable` for a longest text that is none; `where` says which number it is."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= POSITIONS:
        hint = f"it is the largest context in tokens: write a whole number from 1 to {POSITIONS}"
        raise ModelUnloadable(f"{where} is {_short(limit)}", hint)


def require_sound_gguf(path: Path) -> None:
    """Raise `ModelUnloadable` for a .gguf file that cannot be read or whose number of layers is not that of its tensors.
    transformers reads the layers that the file's settings speak of and leaves the others out.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            settings, tensors = _Gguf(content).header()
    except (OSError, ValueError, KeyError, struct.error) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise ModelUnloadable(f"{path} cannot be read: {reason}", "download the model again") from None
    blocks = {int(match[1]) for tensor in tensors if (match := re.match(r"blk\.(\d{1,9})\.", tensor.name))}
    for name, value in settings.items():
        is_sound = type(value) is int and max(blocks, default=-1) < value <= len(tensors)
        if name.endswith(".block_count") and not is_sound:
            raise ModelUnloadable(
                f"{path}: {name} is {_short(value)}, and the file holds weights of {len(blocks)} layers",
                "download the model again, or convert it again",
            )
        if name.endswith(".context_length"):
            require_context(value, f"{path}: {name}")


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
    """Returns the floating dtype of most bytes of a safetensors file; None where it holds none or is damaged, which loading
    it says.
    """
    sizes: Counter[str] = Counter()
    for name, tensor in (_header(path) or {}).items():
        match tensor:
            case _ if name == "__metadata__":
                continue
            case {"dtype": str(stored), "data_offsets": [int(begin), int(end)]}:
                if stored in SAFETENSORS_DTYPES:
                    sizes[SAFETENSORS_DTYPES[stored]] += end - begin
            case _:
                return None
    return sizes.most_common(1)[0][0] if sizes else None


def gguf_dtype(path: Path) -> str | None:
    """Returns the dtype of most weights of a sound .gguf file; None where these are quantised."""
    counts: Counter[int] = Counter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for tensor in _Gguf(content).header()[1]:
            counts[tensor.kind] += tensor.weights
    return GGUF_DTYPES.get(counts.most_common(1)[0][0]) if counts else None


class _GgufTensor(NamedTuple):
    """A tensor as the header of a GGUF file describes it."""

    name: str
    weights: int
    kind: int  # number of its type


class _Gguf:
    """The header of a GGUF file. Its strings and arrays are prefixed by their length."""

    NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY = 8, 9

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 0

    def header(self) -> tuple[dict[str, Any], list[_GgufTensor]]:
        """Settings that are no arrays, and all tensors. Raises `ValueError` and `struct.error`."""
        if self._skip(4) != b"GGUF":
            raise ValueError("no GGUF file")
        _, tensors, pairs = self._numbers("IQQ")
        settings = {self._string(): self._value(self._number("I")) for _ in range(pairs)}
        return settings, [self._tensor() for _ in range(tensors)]

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{kinds}", self._skip(struct.calcsize(f"<{kinds}")))

    def _number(self, kind: str) -> Any:
        return self._numbers(kind)[0]

    def _string(self) -> str:
        return self._skip(self._number("Q")).decode(errors="replace")

    def _skip(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise ValueError("longer than the file")
        self.at += size
        return self.content[self.at - size : self.at]

    def _value(self, kind: int) -> Any:
        if kind == self.STRING:
            return self._string()
        if kind != self.ARRAY:
            return self._number(self.NUMBERS[kind])
        inner, count = self._numbers("IQ")
        if inner == self.STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._skip(count * struct.calcsize(f"<{self.NUMBERS[inner]}"))
        return None

    def _tensor(self) -> _GgufTensor:
        name, dimensions = self._string(), self._number("I")
        if dimensions > len(self.content) // 8:
            raise ValueError("longer than the file")
        *shape, kind, _ = self._numbers(f"{dimensions}QIQ")  # the last is its place
        return _GgufTensor(name, math.prod(shape), kind)


def _described(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file. Raises `ModelUnloadable`."""
    hint = "download the model again, or repair the file"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ModelUnloadable(f"{path} is nested too deeply", hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "msg", None) or str(error)
        raise ModelUnloadable(f"{path} cannot be read: {reason[:200]}", hint) from None
    if not isinstance(content, dict):
        raise ModelUnloadable(f"{path} is not a JSON object", hint)
    return content


def _require_eos(path: Path) -> None:
    """Texts end at these ids. transformers goes on without them where it cannot read the file."""
    eos = _described(path).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        hint = "it is where texts end: write a token id or a list of them, or leave it out"
        raise ModelUnloadable(f"{path}: eos_token_id is {_short(eos)}", hint)


def _require_safetensors(name: object, where: Path) -> None:
    """A file of weights is named by `where`: it must be safetensors, or their index, in the same folder."""
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    if path.is_absolute() or ".." in path.parts or "\\" in str(name):
        hint = "take the model from where it was published, whole"
        raise ModelUnloadable(f"{where} names weights outside its folder: {_short(name)}", hint)
    if not path.name.endswith((".safetensors", ".safetensors.index.json")):
        hint = "reading a pickle can run code: give the model as safetensors or as a .gguf file"
        raise ModelUnloadable(f"{where} names weights that are not safetensors: {_short(name)}", hint)


def _indexed(folder: Path, index: Path, cache: bool) -> tuple[int, int | None]:
    """How many tensors an index names, and the bytes of their files; None where the hub's cache lacks one. Raises
    `ModelUnloadable` for an index that names none, and for a file that is missing elsewhere.
    """
    shards = _described(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelUnloadable(f"{index} names no weights", "download the model again, or repair the file")
    names = sorted({name if isinstance(name, str) else repr(name) for name in shards.values()})
    for name in names:
        _require_safetensors(name, index)
    missing = [folder / name for name in names if not (folder / name).is_file()]
    if missing and not cache:
        raise ModelUnloadable(f"{missing[0]} is missing: {index.name} names it", "download the model again, whole")
    return len(shards), None if missing else sum((folder / name).stat().st_size for name in names)


def _tensors(path: Path) -> int | None:
    """How many tensors a safetensors file holds; None where it is damaged, as reading it will say."""
    header = _header(path)
    return None if header is None else len(header.keys() - {"__metadata__"})


def _header(path: Path) -> dict[str, Any] | None:
    """The header of a safetensors file; None where it is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= LONGEST_HEADER else b""
    try:
        content = json.loads(header)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _require_room(groups: list[dict[str, Any]], path: Path, tensors: int | None, size: int | None) -> None:
    """Every layer has a tensor of its own, and every width is that of a matrix with a bit for each weight. Building a
    network of absurd sizes takes for ever or all memory before transformers compares it with the files.
    """
    hint = "correct config.json, or give the complete checkpoint"
    published = "correct config.json, or take the model from where it was published"
    for name, value in _numbers(groups, LAYERS):
        if tensors is not None and value > tensors:
            raise ModelUnloadable(f"{path}: {name} is {_short(value)}, and the checkpoint holds {tensors} tensors", hint)
        if value > MOST_LAYERS:
            raise ModelUnloadable(f"{path}: {name} is {_short(value)}, and no model has more than {MOST_LAYERS}", published)
    if size is None:
        return
    sizes = dict(_numbers(groups, SIZES))
    if "vocab_size" in sizes:
        sizes["vocab_size"] *= max(sizes.get(name, 1) for name in WIDTHS)  # the embeddings
    for name, value in sizes.items():
        if value > 8 * size:
            room = f"more than {size} bytes of the checkpoint can hold"
            raise ModelUnloadable(f"{path}: {name} asks for {_short(value)} weights, {room}", hint)


def _numbers(groups: list[dict[str, Any]], names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, group[name]) for group in groups for name in names if type(group.get(name)) is int]


def _short(value: object) -> str:
    return cut(repr(value), VALUE)
