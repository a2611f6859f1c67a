"""Rows of datasets (datasets): streamed, shuffled where the profile asks for it, with errors that name the line."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alphaprof.errors import AlphaprofError, DataEmpty, DataUnreadable
from alphaprof.log.place import is_remote
from alphaprof.profiling.models.hub import FORMATS, first_line, is_local, opened, require_data, row_count

if TYPE_CHECKING:
    from datasets import IterableDataset

    from alphaprof.config.profile import SourceOptions

Row = Mapping[str, Any]
FILE = 1 << 32  # beyond the rows of any file
FILES = 10  # files that a shuffle reads at a time
CHUNK = 1 << 24  # bytes that one request fetches of a file in an object store


def rows(source: SourceOptions) -> Iterator[tuple[int, Row]]:
    """The rows of one source with their numbers there, from 0, streamed, shuffled if the profile asks for it.

    A shuffled row keeps its number; where files are shuffled as well, that is its number in its file plus `FILE` times that
    of the file. Raises `DataUnreadable` and `DataEmpty`.
    """
    require_data(source.path)
    from datasets import load_dataset_builder
    from datasets.utils.logging import disable_progress_bar, set_verbosity

    disable_progress_bar()
    set_verbosity(logging.CRITICAL)  # it logs the errors that it raises
    with _at_hand(source.path) as path:
        try:
            is_file = is_local(path) and not os.path.isdir(path)  # which is one split
            builder = load_dataset_builder(**_loading(source, path))
            stream = builder.as_streaming_dataset(split="train" if is_file else source.split)
            if source.shuffle_seed is None:
                yield from enumerate(stream)
            else:
                yield from _shuffled(stream, np.random.default_rng(source.shuffle_seed), source.shuffle_buffer)
        except AlphaprofError:
            raise
        except Exception as error:  # datasets raises whatever its parsers raise
            empty, reason = isinstance(error, StopIteration), first_line(error)
            with contextlib.suppress(OSError):  # a file that may not be read
                empty, reason = empty or row_count(Path(path)) == 0, _bad_line(Path(path)) or reason
            if empty:
                raise DataEmpty(f"{source.path} holds an empty file", "remove that file, or fill it") from error
            hint = "check that every line is valid and that columns keep their type"
            if not is_local(path):
                hint = "check the dataset's id, name, split and your access rights"
            elif not is_file:
                hint = "check name, split, its README.md and the files in it"
            raise DataUnreadable(f"cannot read {source.path}: {reason[:200]}", hint) from error


def _shuffled(stream: IterableDataset, random: np.random.Generator, size: int) -> Iterator[tuple[int, Row]]:
    """Rows in random order: drawn from a buffer that is filled from several files in turn, themselves in random order."""

    def numbered(file: int) -> Iterator[tuple[int, Row]]:
        return enumerate(stream.shard(num_shards=stream.num_shards, index=file), start=file * FILE)

    waiting = map(numbered, random.permutation(stream.num_shards).tolist())
    read = list(itertools.islice(waiting, FILES))
    buffer: list[tuple[int, Row]] = []
    turn = 0
    while read:
        row = next(read[turn % len(read)], None)
        if row is None:
            read[turn % len(read) : turn % len(read) + 1] = itertools.islice(waiting, 1)
            continue
        turn += 1
        if len(buffer) < size:
            buffer.append(row)
        else:
            place = int(random.integers(size))
            yield buffer[place]
            buffer[place] = row
    for place in random.permutation(len(buffer)).tolist():
        yield buffer[place]


@contextlib.contextmanager
def _at_hand(path: str) -> Iterator[str]:
    """A path of a source that `datasets` reads: a copy of a file in an object store."""
    if not is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="alphaprof-") as folder:
        place = Path(folder) / f"data{Path(path).suffix}"
        with opened(path) as file:
            file.download(str(place), buffer_size=CHUNK)
        yield str(place)


def _loading(source: SourceOptions, place: str) -> dict[str, Any]:
    """Arguments of `load_dataset_builder` for a source at a place. Raises `DataUnreadable`."""
    if not is_local(place):
        return {"path": place, "name": source.name, "revision": source.revision}
    path = Path(place)
    if path.is_dir():
        if (path / "state.json").exists():
            raise DataUnreadable(f"{path} was written by save_to_disk of datasets", "write the dataset with to_parquet")
        return {"path": place, "name": source.name}
    arguments: dict[str, Any] = {"path": FORMATS[path.suffix], "data_files": glob.escape(place)}
    if path.suffix == ".csv":
        import pandas as pd
        from datasets import Features, Value

        # Cells as they stand: 007 is not 7, and NA is a word; only nothing is empty.
        columns = {str(name): Value("string") for name in pd.read_csv(path, nrows=0).columns}
        arguments |= {"features": Features(columns), "keep_default_na": False, "na_values": [""]}
    return arguments


def _bad_line(path: Path) -> str | None:
    """The first line of a .jsonl file that is not a JSON object, and why; parsers count lines from the start of a block."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is not a JSON object"
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
                return f"line {number}: {reason}"
    return None
