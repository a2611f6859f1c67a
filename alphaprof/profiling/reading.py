"""Rows of datasets (datasets): streamed, shuffled where the profile asks for it, with errors that name the line."""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alphaprof.config import SourceOptions
from alphaprof.errors import DataEmpty, DataUnreadable
from alphaprof.profiling.hub import FORMATS, is_local, require_data

Row = Mapping[str, Any]


def rows(source: SourceOptions) -> Iterator[Row]:
    """The rows of one source, streamed, shuffled if the profile asks for it. Raises `DataUnreadable` and `DataEmpty`."""
    require_data(source.path)
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar, set_verbosity

    disable_progress_bar()
    set_verbosity(logging.CRITICAL)  # it logs the errors that it raises
    try:
        stream = load_dataset(**_loading(source), streaming=True)
        if source.shuffle_seed is not None:
            stream = stream.shuffle(seed=source.shuffle_seed, buffer_size=source.shuffle_buffer)
        yield from stream
    except StopIteration as error:  # from datasets, for a directory with an empty file
        raise DataEmpty(f"{source.path} holds an empty file", "remove that file, or fill it") from error
    except Exception as error:  # datasets raises whatever its parsers raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        reason = _bad_line(Path(source.path)) or reason
        hint = "check that every line is valid and that columns keep their type"
        if not is_local(source.path):
            hint = "check the dataset's id, name, split and your access rights"
        raise DataUnreadable(f"cannot read {source.path}: {reason[:300]}", hint) from error


def _loading(source: SourceOptions) -> dict[str, Any]:
    """Arguments of `load_dataset` for a source."""
    if not is_local(source.path):
        return {"path": source.path, "name": source.name, "split": source.split, "revision": source.revision}
    path = Path(source.path)
    if path.is_dir():
        return {"path": str(path), "name": source.name, "split": source.split}
    arguments = {"path": FORMATS[path.suffix], "data_files": glob.escape(str(path)), "split": "train"}
    return arguments | _as_text(path) if path.suffix == ".csv" else arguments


def _as_text(path: Path) -> dict[str, Any]:
    """Arguments that read the cells of a CSV file as they stand: 007 is not 7, and NA is a word; only nothing is empty."""
    import pandas as pd
    from datasets import Features, Value

    names = pd.read_csv(path, nrows=0).columns
    features = Features({str(name): Value("string") for name in names})
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def _bad_line(path: Path) -> str | None:
    """The first line of a .jsonl file that is no JSON object, and why; parsers count lines from the start of a block."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is no JSON object"
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
                return f"line {number}: {reason}"
    return None
