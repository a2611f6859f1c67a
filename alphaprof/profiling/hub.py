"""Local paths and hub ids: find out within seconds that something is missing or empty, before heavy work starts."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from alphaprof.config import ProfileOptions, SourceOptions
from alphaprof.errors import AlphaprofError, DataEmpty, DataUnreadable, ModelUnloadable
from alphaprof.options import ModelDraft, ModelOptions
from alphaprof.profiling.checkpoint import CONFIG, DESCRIPTIONS, require_sound, require_sound_gguf

TIMEOUT_S = 3.0
# Local data files and the builders of `datasets` that read them.
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def require(
    reference: str, error: type[AlphaprofError], what: str, cached_file: str | None = None, revision: str | None = None
) -> None:
    """Raise `error` unless `reference` exists locally, lies in the hub's cache, or the hub answers.

    `cached_file` is a file that a complete cache of a hub repository holds (config.json for a model); None when a
    cache does not help.
    """
    if is_local(reference):
        if not os.path.exists(reference):
            raise error(f"{what} {reference} does not exist", "correct the path; relative ones start at the profile file")
        return
    if cached_file is not None and _cached(reference, cached_file, revision):
        return
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES") or not hub_answers():
        raise error(
            f"{what} {reference} is no local path, and the model hub cannot be reached",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or download it and give the local path",
        )


def check_references(options: ProfileOptions) -> None:
    """Raise the error of the first model or dataset of a profile that cannot be had. Imports nothing heavy."""
    require_model(options.target, "target")
    for name, draft in options.drafts.items():
        if isinstance(draft, ModelDraft):
            require_model(draft, f"draft {name}")
    for source in options.data:
        require_data(source.path)


def require_data(reference: str) -> None:
    """Raise `DataUnreadable` unless a dataset can be had in a known format, and `DataEmpty` for a file without rows."""
    require(reference, DataUnreadable, "dataset")
    path = Path(reference)
    if not is_local(reference) or path.is_dir():
        return
    if path.suffix not in FORMATS:
        raise DataUnreadable(
            f"{path} has no known format", f"give a file that ends with {', '.join(FORMATS)}, or a dataset directory"
        )
    try:
        empty = _is_empty(path)
    except OSError as error:
        raise DataUnreadable(f"cannot read {path}: {error.strerror}", "check that it is a file that you may read") from None
    if empty:
        raise DataEmpty(f"{path} is empty", "put documents into it, or remove this source")


def _is_empty(path: Path) -> bool:
    """Whether a data file holds no rows or nothing but white space; reads little of any other file."""
    if path.suffix == ".parquet":
        return row_count(path) == 0
    with path.open("rb") as file:
        return not any(block.strip() for block in iter(lambda: file.read(1 << 16), b""))


def row_count(path: Path) -> int | None:
    """About how many rows a data file holds; None where only reading it would tell."""
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(path).num_rows)
        except pa.ArrowInvalid:
            return None  # damaged: reading it will say so
    if path.suffix in (".jsonl", ".csv", ".txt") and path.is_file():
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip()) - (path.suffix == ".csv")
    return None


def expected_documents(options: ProfileOptions) -> int | None:
    """About how many documents the sources hold, for the progress display; None where that is not known beforehand."""
    total = 0
    for source in options.data:
        count = row_count(Path(source.path))
        if count is None and source.limit is None:
            return None
        total += min(known for known in (count, source.limit) if known is not None)
    return total


def read_whole(source: SourceOptions) -> bool:
    """Whether a source has to be read whole before its first row: a .json file that holds one array."""
    path = Path(source.path)
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(1024).lstrip().startswith("[")


def require_model(options: ModelOptions, name: str) -> None:
    """Raise `ModelUnloadable` unless a model can be had, and for files that show already that it cannot be loaded."""
    require(options.model, ModelUnloadable, f"model of {name}:", CONFIG, options.revision)
    if not is_local(options.model):
        described = _cached(options.model, CONFIG, options.revision)
        if described is not None:
            require_sound(Path(described).parent)
    elif options.model.endswith(".gguf"):
        require_sound_gguf(Path(options.model))
    else:
        require_sound(Path(options.model))


def fetch_descriptions(options: ModelOptions) -> None:
    """Bring what describes a model from the hub into its cache, where `require_model` finds it before weights come."""
    from huggingface_hub import hf_hub_download

    for file in DESCRIPTIONS:
        with contextlib.suppress(Exception):  # it has no such file, or loading the model will say what is wrong
            hf_hub_download(options.model, file, revision=options.revision)


def is_local(reference: str) -> bool:
    """Whether a resolved reference is a path (`config.resolve` makes existing and explicit paths absolute)."""
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
    """Whether the hub answers at all within the time, name resolution included (which a client's timeout is not)."""
    answered = threading.Event()

    def ask() -> None:
        from huggingface_hub import constants, get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=timeout_s)
            answered.set()
        except Exception:  # any failure of any HTTP library means the same here: no answer
            return

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(timeout_s)
