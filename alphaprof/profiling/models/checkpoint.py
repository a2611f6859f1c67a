"""What the files of a model say before it is loaded: whether descriptions can be read and weights are pickles; the dtype."""

from __future__ import annotations

import json
import math
from collections import Counter
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
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
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


def settings_in(folder: Path) -> list[dict[str, Any]]:
    """Return the settings in config.json: of the model, and of its text if it has other parts. Raises `ModelUnloadable`."""
    config = _described(folder / CONFIG)
    return [group for group in (config, config.get("text_config")) if isinstance(group, dict)]


def declared_dtype(folder: Path) -> str | None:
    """Returns the floating dtype that config.json declares for a model's text; None: it declares none. Raises
    `ModelUnloadable`.
    """
    values = [group.get(key) for group in settings_in(folder) for key in ("dtype", "torch_dtype")]
    given = [value.removeprefix("torch.") for value in values if isinstance(value, str)]
    return next((name for name in given if name in DTYPES.values()), None)


def weights_name(folder: Path) -> str:
    """Returns the name of a file of a model's weights: the first that an index names, or that of a single file."""
    return min(map(str, (_described(folder / INDEX).get("weight_map") or {}).values()), default=WEIGHTS)


def stored_dtype(path: Path) -> str | None:
    """Returns the dtype of most weights of a safetensors file; None: it is not a floating one, or holds none."""
    from safetensors import safe_open

    counts: Counter[str] = Counter()
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            weights = file.get_slice(name)
            if weights.get_dtype() in DTYPES:  # beside packed integers
                counts[weights.get_dtype()] += math.prod(weights.get_shape())
    return DTYPES.get(max(counts, key=lambda name: counts[name], default=""))


def _described(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file. Raises `ModelUnloadable`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
        reason = "it is not a JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ModelUnloadable(f"{path} cannot be read: {reason[:200]}", "download the model again")


def _require_safetensors(name: object, where: Path) -> None:
    """A file of weights is named by `where`: it must be safetensors, or their index, in the same folder."""
    path = PurePosixPath(str(name))
    outside = path.is_absolute() or ".." in path.parts or "\\" in str(name)
    if outside or not path.name.endswith((".safetensors", ".safetensors.index.json")):
        problem = "outside its folder" if outside else "that are not safetensors"
        hint = "reading a pickle can run code: give the whole model as safetensors, or as a .gguf file"
        raise ModelUnloadable(f"{where} names weights {problem}: {cut(repr(name), VALUE)}", hint)
