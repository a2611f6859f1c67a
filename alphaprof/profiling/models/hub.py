"""Local paths, files in object stores and hub ids: find out within seconds that something is missing, empty or a pickle."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from alphaprof.config.heads import MODEL, require_kind
from alphaprof.config.model_files import (
    ADAPTER,
    CONFIG,
    GENERATION,
    INDEX,
    QUANTIZATION,
    WEIGHTS,
    ModelFiles,
    context_of,
    described,
)
from alphaprof.config.paths import COMPRESSED, FORMATS, data_format, is_remote
from alphaprof.errors import AlphaprofError, DataEmpty, DataUnreadable, ModelUnloadable, RunUnreadable, cut, shown
from alphaprof.run.storage import NAME, storage_of
from alphaprof.version import install_line

if TYPE_CHECKING:
    import pyarrow as pa

    from alphaprof.config.options import ModelOptions
    from alphaprof.config.profile import ProfileOptions

TIMEOUT_S = 3.0
PROMPT_LEARNING = re.compile("PROMPT|PREFIX|P_TUNING|CPT")  # kinds of peft that add tokens, and nothing to weights
ADAPTER_FILES = (ADAPTER, "adapter_model.safetensors")
DESCRIPTIONS = (CONFIG, GENERATION, INDEX, QUANTIZATION, ADAPTER)
GGUF_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", re.IGNORECASE)
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
CONVERSION = (
    "run python: import torch, safetensors.torch; weights = torch.load('pytorch_model.bin', weights_only=True); "
    "safetensors.torch.save_file({name: each.contiguous() for name, each in weights.items()}, 'model.safetensors')"
)


def require(
    reference: str, error: type[AlphaprofError], what: str, cached_file: str | None = None, revision: str | None = None
) -> None:
    """Raise `error` unless `reference` exists locally, lies in the hub's cache, or the hub answers. `cached_file` is a file
    that a complete cache of a hub repository holds (config.json for a model); None when a cache does not help.
    """
    name = f"{what} {cut(reference)}"
    if is_local(reference):
        if not os.path.exists(reference):
            raise error(f"{name} does not exist", "correct the path (relative to the profile file)")
        return
    if cached_file is not None and _cached(reference, cached_file, revision):
        return
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES") or not hub_answers():
        raise error(
            f"{name} is not a local path, and the model hub cannot be reached",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or download it and give the local path",
        )


def check_references(options: ProfileOptions, data: bool = True, drafts: bool = True) -> None:
    """Raise the error of the first model or dataset of a profile that cannot be had. Imports nothing heavy. `data`: whether
    datasets are read: not where prompts are staged already, or another process stages them; `drafts`: whether they are
    loaded.
    """
    for source in options.data if data else ():
        require_data(source.path)
    for what, model in options.models().items():
        if drafts or model is options.target:
            require_model(model, what)
    check_kinds(options, drafts)


def check_kinds(options: ProfileOptions, drafts: bool = True) -> None:
    """Raise `ModelUnloadable` for files of models that are here and are not what the profile takes them for."""
    asked = {f"draft {name}": (draft.kind, draft.own_model) for name, draft in options.drafts.items() if drafts}
    for name, (kind, model) in ({"target": (MODEL.kind, options.target)} | asked).items():
        if model is not None and (found := Path(model.model) if model.is_gguf else files_in(model)) is not None:
            require_kind(f"{name} ({model.model})", kind, found)


def require_data(reference: str) -> None:
    """Raise `DataUnreadable` unless a dataset can be had in a known format and is what it is called, and `DataEmpty`."""
    if is_remote(reference):
        with opened(reference):
            return
    if not is_local(reference):
        _require_hub_id(reference)
    require(reference, DataUnreadable, "dataset")
    if is_local(reference) and not os.path.isdir(reference):
        _require_format(reference)
        if not os.path.getsize(reference):
            raise DataEmpty(f"{reference} is empty", "put documents into it, or remove this source")


def _require_format(reference: str) -> None:
    if data_format(reference) is None:
        hint = f"give a file that ends with {', '.join(FORMATS)}, {' or '.join(COMPRESSED)} after it, or a local directory"
        raise DataUnreadable(f"{reference} has no known format", hint)


@contextlib.contextmanager
def opened(reference: str) -> Iterator[pa.NativeFile]:
    """Yield a data file in an object store. Raises `DataUnreadable` if it cannot be had, or read in the block."""
    folder, _, name = reference.rpartition("/")
    storage = storage_of(folder)  # refuses credentials in an address, which the messages below would repeat
    if not NAME.fullmatch(name):
        hint = "use only letters, digits, dots and _-= in its name, without URL encoding"
        plain = shown(reference.partition("?")[0])  # a signature may follow
        raise DataUnreadable(f"{plain} is not the address of a file", hint)
    _require_format(reference)
    try:
        with storage.opened(name) as file:
            yield file
    except FileNotFoundError:
        raise DataUnreadable(
            f"{reference} does not exist", "check the names of its bucket, folder and file: a source is one file"
        ) from None
    except RunUnreadable as error:
        raise DataUnreadable(error.message, error.hint) from None


def _require_hub_id(reference: str) -> None:
    """Raise `DataUnreadable` for what `datasets` would not look up on the hub: it reads the working directory instead."""
    # The builders that come with `datasets`: folders of the installed package, which is not imported.
    places = getattr(find_spec("datasets"), "submodule_search_locations", None) or []
    formats = {path.name for place in places for path in Path(place).glob("packaged_modules/*") if path.is_dir()}
    if reference.removeprefix("hf://datasets/") in formats or os.path.exists(reference):
        raise DataUnreadable(
            f"dataset {cut(reference)} is not on the hub: `datasets` would read the working directory instead",
            "give a file with its suffix, a directory relative to the profile (./NAME), or OWNER/NAME on the hub",
        )


def row_count(path: Path) -> int | None:
    """About how many rows a data file holds; None if only reading it would tell."""
    form, compression = data_format(str(path)) or ("", None)
    if not path.is_file() or compression:
        return None
    if form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(path).num_rows)
        except pa.ArrowInvalid:
            return None  # damaged: reading it will say so
    if form in ("json", "arrow"):
        return None
    with path.open("rb") as file:
        return max(0, sum(1 for line in file if line.strip()) - (form in ("csv", "tsv")))


def expected_documents(options: ProfileOptions) -> int | None:
    """About how many documents the sources hold, for the progress display; None if that is not known beforehand."""
    if any(source.limit and not isinstance(source.domain, str) for source in options.data):
        return None  # a number of each domain
    counts = [(row_count(Path(source.path)), source.limit) for source in options.data]
    if (None, None) in counts:
        return None
    return sum(min(number for number in pair if number is not None) for pair in counts)


def require_model(options: ModelOptions, name: str) -> ModelFiles | None:
    """Return the files of a model that are here already. Raises `ModelUnloadable` unless it can be had, and for files that
    show already that it cannot be loaded.
    """
    require(options.model, ModelUnloadable, f"model of {name}:", CONFIG, options.revision)
    if is_local(options.model) and GGUF_PART.search(options.model):
        raise ModelUnloadable(
            f"{options.model} is one part of a split GGUF file",
            "join the parts first: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf",
        )
    if (files := files_in(options)) is not None:
        require_sound(files, cache=not is_local(options.model))
    if options.adapter is None:
        return files
    require(options.adapter, ModelUnloadable, f"adapter of {name}:", ADAPTER)
    if is_local(options.adapter) and not all(Path(options.adapter, file).is_file() for file in ADAPTER_FILES):
        raise ModelUnloadable(
            f"adapter of {name}: {options.adapter} lacks {' or '.join(ADAPTER_FILES)}",
            "give the folder that peft's save_pretrained wrote; pickles are never read",
        )
    kind = str(described(Path(options.adapter, ADAPTER)).get("peft_type"))
    if PROMPT_LEARNING.search(kind):
        kind = kind.lower().replace("_", " ")
        raise ModelUnloadable(
            f"adapter of {name}: {options.adapter} is of {kind}, which cannot be merged into weights",
            "give a LoRA adapter, or profile the model without it: its virtual tokens are no text",
        )
    if find_spec("peft") is None:
        raise ModelUnloadable(f"the adapter of {name} needs peft", install_line("peft"))
    return files


def files_in(options: ModelOptions) -> ModelFiles | None:
    """Return the files of a model's folder; None: it has none, or is not here. Raises `ModelUnloadable`."""
    return None if (folder := folder_of(options)) is None else ModelFiles.of(folder)


def folder_of(options: ModelOptions) -> Path | None:
    """Where the files of a model lie: its directory, or the hub's cache of it; None if there is neither."""
    if is_local(options.model):
        return None if options.is_gguf else Path(options.model)
    described = _cached(options.model, CONFIG, options.revision) or _cached(options.model, ADAPTER, options.revision)
    return None if described is None else Path(described).parent


def context_in(options: ModelOptions) -> int | None:
    """Return the longest text of a model in tokens, by its files; None: they are not here, or do not say."""
    place = Path(options.model) if options.is_gguf else folder_of(options)
    return None if place is None else context_of(place)


def fetch_descriptions(options: ModelOptions) -> None:
    """Bring what describes a model from the hub into its cache, where `require_model` finds it before weights come."""
    from huggingface_hub import hf_hub_download

    for file in DESCRIPTIONS:
        with contextlib.suppress(Exception):  # it has no such file, or loading the model will say what is wrong
            hf_hub_download(options.model, file, revision=options.revision)


def downloaded(options: ModelOptions) -> Path:
    """Return the folder of the hub's cache with a repository's descriptions and safetensors. Pickles, and what lies in
    folders of the repository, are not fetched. Raises `ModelUnloadable`.
    """
    from huggingface_hub import snapshot_download

    try:
        patterns = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*/*"]}  # * matches / too
        return Path(snapshot_download(options.model, revision=options.revision, **patterns))
    except Exception as error:  # of the hub, of any HTTP library, of the disk
        raise ModelUnloadable(
            f"{options.model} cannot be downloaded: {first_line(error)[:300]}",
            "check the id and your access rights (gated models need a token), or give a local path",
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error of another library that says something; its class where none does."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def is_local(reference: str) -> bool:
    """Return whether a resolved reference is a path (`config.resolve` makes existing and explicit paths absolute)."""
    return os.path.isabs(reference)


def _cached(reference: str, name: str, revision: str | None) -> str | None:
    """Where the cache of the hub holds a file."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(reference, name, revision=revision)
    except HFValidationError:
        return None  # not a possible repository name: loading it will say so
    return path if isinstance(path, str) else None


def hub_answers(timeout_s: float = TIMEOUT_S) -> bool:
    """Return whether the hub answers at all within the time, name resolution included (which a client's timeout is not)."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # any failure of any HTTP library means the same here: no answer
            from huggingface_hub import constants, get_session

            get_session().head(constants.ENDPOINT, timeout=timeout_s)
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(timeout_s)


def require_sound(files: ModelFiles, cache: bool = False) -> None:
    """Raise `ModelUnloadable` for a folder whose weights are pickles, lie elsewhere or are missing, and for a LoRA adapter.
    What else the folder does not hold, transformers says.

    `cache`: it is the hub's cache of a model, where files may be missing; transformers downloads them, pickles never.
    """
    folder, single = files.folder, files.folder / str(files.explicit or WEIGHTS)
    if ADAPTER in files.beside and CONFIG not in files.beside:
        raise ModelUnloadable(
            f"{folder} is a LoRA adapter, not a model: it has {ADAPTER} and no {CONFIG}",
            "give its base model as model, and this folder as adapter: {model: BASE, adapter: FOLDER}",
        )
    if files.named != [single]:
        if not cache and (lacking := [path for path in files.named if not path.is_file()]):
            index = single if files.explicit else folder / INDEX
            raise ModelUnloadable(f"{index} names {lacking[0].name}, which is missing", "download the model again")
    elif not (files.explicit or cache or single.is_file()) and (
        pickles := [name for name in PICKLES if name in files.beside]
    ):
        raise ModelUnloadable(
            f"{folder} holds its weights as pickles only ({pickles[0]}), and reading a pickle can run code",
            "if you trust it, load it with transformers and save it with save_pretrained, as safetensors; for a "
            f"draft head, {CONVERSION}",
        )
