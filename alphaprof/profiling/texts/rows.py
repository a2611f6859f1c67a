"""Rows of data files, parsed line by line: no type is inferred from other rows, and a bad line is one bad row.

Files that are here, or in an object store, are read here; a dataset on the hub, and a directory with splits, by `datasets`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from alphaprof.config.paths import data_format, is_remote
from alphaprof.config.profile import SourceOptions
from alphaprof.errors import AlphaprofError, DataEmpty, DataUnreadable, shown
from alphaprof.profiling.models.hub import first_line, is_local, opened, require_data
from alphaprof.profiling.texts.cells import BadRow, Row
from alphaprof.profiling.texts.requests import TEXTUAL

FILE = 1 << 32  # beyond the rows of any file
FILES = 10  # files that a shuffle reads at a time
BLOCK = 1 << 20  # bytes that are read at a time
WHOLE = 1 << 30  # bytes of a .json file, which is read whole
CELL = 1 << 26  # characters of a cell: beyond it, a quotation mark has no second
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}
TABLES = ("parquet", "arrow")  # formats in columns
BATCH = 256  # rows of a Parquet file that are turned into Python objects together
# Names of files and folders by which `datasets` divides a directory.
SPLITS = re.compile(r"(?<![a-z])(train(ing)?|test(ing)?|val(id(ation)?)?|dev|eval(uation)?)(?![a-z])", re.IGNORECASE)


# A row's number in its source, from 0; where it is, for messages; the row, or why there is none.
Numbered = tuple[int, str, Row | BadRow]


def rows(source: SourceOptions, roots: Sequence[str] = ()) -> Iterator[Numbered]:
    """Yield the rows of one source, streamed, shuffled if the profile asks for it. `roots`: columns that are asked for; a
    Parquet file reads no others.

    A shuffled row keeps its number; where files are shuffled as well, that is its number in its file plus `FILE` times that
    of the file. Raises `DataUnreadable` and `DataEmpty`.
    """
    if not is_remote(source.path):  # opening it says the same
        require_data(source.path)
    files = _files(source)
    read = [_file(file, roots, f"{Path(file).name} " if len(files) > 1 else "") for file in files] or _streams(source)
    if source.shuffle_seed is not None:
        yield from _shuffled(read, np.random.default_rng(source.shuffle_seed), source.shuffle_buffer, roots)
        return
    number = itertools.count()
    for one in read:
        for _, where, row in one():
            yield next(number), where, row


def first_row(source: SourceOptions) -> Row:
    """Return the first row of a source. Raises `DataUnreadable` and `DataEmpty`."""
    path = source.path
    _, where, row = next(rows(source), (0, "", None))
    if row is None:
        raise DataEmpty(f"{path} has no rows", "put one request per line into it")
    if isinstance(row, BadRow):
        raise DataUnreadable(f"{path} {where} {row}", row.hint)
    return row


def _files(source: SourceOptions) -> list[str]:
    """Return the files that are read here: none of the hub, or of a directory that `datasets` divides into splits."""
    path = source.path
    if is_remote(path) or (is_local(path) and not os.path.isdir(path)):
        return [path]
    inside = Path(path).rglob("[!.]*") if is_local(path) else ()
    found = sorted(str(file) for file in inside if file.is_file())
    if is_local(path) and Path(path, "state.json").exists():  # as save_to_disk of `datasets` writes it
        return [file for file in found if file.endswith(".arrow")]
    divided = source.split != "train" or any(SPLITS.search(os.path.relpath(file, path)) for file in found)
    return found if all(map(data_format, found)) and not divided else []


def _file(path: str, roots: Sequence[str], prefix: str) -> Callable[[], Iterator[Numbered]]:
    """Return what reads the rows of a file. `prefix`: its name, for messages, where there are several."""
    form, compression = data_format(path) or ("", None)

    def read() -> Iterator[Numbered]:
        number = 0
        try:
            with contextlib.ExitStack() as stack:
                file: Any = stack.enter_context(opened(path) if is_remote(path) else pa.OSFile(path))
                if form in TABLES:
                    found = _table(file, form, roots, path)
                else:
                    stream = pa.CompressedInputStream(file, compression) if compression else file
                    found = READERS[form](_decodable(io.BufferedReader(stream, BLOCK), path), path, roots)
                for place, row in found:
                    yield number, f"{prefix}{'row' if form in (*TABLES, 'json') else 'line'} {place}", row
                    number += 1
        except (OSError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
            after = f" after row {number}" if number else ""
            raise DataUnreadable(
                f"cannot read {path}{after}: {first_line(error)[:200]}",
                "check that the file is complete, and that it is what its suffix says",
            ) from error

    return read


def _decodable(file: io.BufferedReader, path: str) -> io.BufferedReader:
    """Return a file without its byte order mark. Raises `DataUnreadable` for UTF-16, which Excel and PowerShell write, and
    for a file in a binary format.
    """
    start = file.peek(4)[:4]
    if kind := next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), ""):
        raise DataUnreadable(
            f"{path} is a {kind} file with another suffix", "unpack it, or give it the suffix of what it is"
        )
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise DataUnreadable(f"{path} is in UTF-16", "save it as UTF-8: iconv -f UTF-16 -t UTF-8")
    if start.startswith(b"\xef\xbb\xbf"):
        file.read(3)
    return file


Found = Iterator[tuple[int, Row | BadRow]]  # by line, or by row


def _json_lines(file: Iterable[bytes], path: str, roots: Sequence[str]) -> Found:
    """Yield an object for each line that is not blank."""
    loads = orjson.loads
    for place, line in enumerate(file, 1):
        try:
            row = loads(line)
        except orjson.JSONDecodeError:
            if line.isspace():
                continue
            row = _parsed(line)
        yield place, row if type(row) is dict else _no_object(row)


def _parsed(line: bytes) -> Any:
    """Return what the standard library reads of a line that orjson does not: NaN, half a surrogate pair, other bytes."""
    try:
        return json.loads(line.decode(errors="surrogateescape"))
    except RecursionError:
        return BadRow("is nested too deeply", "drop the row, or what is nested in it")
    except ValueError as error:
        return BadRow(f"is not JSON: {getattr(error, 'msg', error)}", "write one JSON object per line")


def _no_object(row: Any) -> BadRow:
    return row if isinstance(row, BadRow) else BadRow("is not a JSON object", 'write one object per line: {"prompt": "..."}')


def _json(file: io.BufferedReader, path: str, roots: Sequence[str]) -> Found:
    """Yield the objects of an array, of lines, or one after the other. Raises `DataUnreadable` for an object around them."""
    first = file.readline(WHOLE)
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(orjson.loads(first), dict) and file.peek(1):
            yield from _json_lines(itertools.chain([first], file), path, roots)
            return
    content = first + file.read(WHOLE + 1 - len(first))
    if len(content) > WHOLE:
        raise DataUnreadable(f"{path} is larger than 1 GB", f"write one object per line: jq -c '.[]' {path} > rows.jsonl")
    try:
        found = [orjson.loads(content)]
    except orjson.JSONDecodeError:
        found = list(_concatenated(content.decode(errors="surrogateescape").strip()))
    if len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    elif len(found) == 1 and isinstance(found[0], dict) and not any(root in found[0] for root in roots):
        inside = next((f'.["{name}"]' for name, value in found[0].items() if isinstance(value, list)), ".")
        raise DataUnreadable(
            f"{path} is one object, not a list of rows",
            f"take the rows out: jq -c '{inside}[]' {Path(path).name} > rows.jsonl",
        )
    yield from ((place, row if type(row) is dict else _no_object(row)) for place, row in enumerate(found, 1))


def _concatenated(text: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        yield value
        at = end + len(text[end : end + BLOCK]) - len(text[end : end + BLOCK].lstrip())


def _cells(file: io.BufferedReader, path: str, roots: Sequence[str], separator: str | None = None) -> Found:
    """Yield the rows of a CSV or TSV file, cells as they stand: 007 is not 7, and NA is a word; only nothing is None."""
    csv.field_size_limit(CELL)
    lines = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    first = next((line for line in lines if line.strip()), "")
    semicolons = ";" in first and "," not in first  # as Excel writes them in much of Europe
    reader = csv.reader(itertools.chain([first], lines), delimiter=separator or (";" if semicolons else ","))
    header, place = next(reader, []), 2
    _require_unique(header, path)
    for cells in reader:
        if len(cells) > len(header):
            problem = f"has {len(cells)} cells, but the header has {len(header)}"
            yield place, BadRow(problem, "put cells that hold the separator into quotation marks")
        elif cells:
            yield place, dict(itertools.zip_longest(header, (cell or None for cell in cells)))
        place = reader.line_num + 1


def _lines(file: Iterable[bytes], path: str, roots: Sequence[str]) -> Found:
    """Yield every line as the column `text`."""
    for place, line in enumerate(file, 1):
        yield place, {"text": line.rstrip(b"\r\n").decode(errors="surrogateescape")}


READERS: dict[str, Callable[[io.BufferedReader, str, Sequence[str]], Found]] = {
    "jsonl": _json_lines,
    "json": _json,
    "csv": _cells,
    "tsv": partial(_cells, separator="\t"),
    "txt": _lines,
}


def _table(file: Any, form: str, roots: Sequence[str], path: str) -> Found:
    """Yield the rows of a Parquet or Arrow file with the columns that are asked for; with all of them if it lacks one."""
    if form == "parquet":
        parquet = pq.ParquetFile(file)
        names = parquet.schema_arrow.names
    else:
        try:
            arrow = pa.ipc.open_file(file)
        except pa.ArrowInvalid:  # a stream, as `datasets` saves them
            file.seek(0)
            arrow = pa.ipc.open_stream(file)
        names = arrow.schema.names
    _require_unique(names, path)
    asked = [name for name in names if name in roots or TEXTUAL.fullmatch(name)]
    chosen = asked if any(root in names for root in roots) else names
    if form == "parquet":
        batches = parquet.iter_batches(BATCH, columns=chosen)
    else:
        each = map(arrow.get_batch, range(arrow.num_record_batches)) if hasattr(arrow, "get_batch") else arrow
        batches = (batch.select(chosen) for batch in each)
    place = 0
    for batch in batches:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a key that a map has twice: the last one counts, as in JSON
            rows = batch.to_pylist(maps_as_pydicts="lossy")
        for row in rows:
            place += 1
            yield place, as_in_json(row)


def as_in_json(row: Row) -> Row:
    """Return a row of a table as JSON has it: without keys within a cell that are null because other rows have them."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and isinstance(next((each for each in value if each is not None), None), dict | list):
        return [_without_nulls(each) for each in value]
    return value


def _require_unique(names: Sequence[str], path: str) -> None:
    """Raise `DataUnreadable` for two columns of one name, of which only one would be read."""
    if twice := [name for name, count in Counter(names).items() if count > 1 and name]:
        raise DataUnreadable(f"{path} has two columns named {shown(twice[0])}", "give every column a name of its own")


def _streams(source: SourceOptions) -> list[Callable[[], Iterator[Numbered]]]:
    """Return what reads the files of a dataset that `datasets` reads. Raises `DataUnreadable` and `DataEmpty`."""
    from datasets import load_dataset_builder
    from datasets.utils.logging import disable_progress_bar, set_verbosity

    path = source.path
    if is_local(path) and Path(path, "dataset_dict.json").exists():
        raise DataUnreadable(f"{path} holds a dataset for each split", f"give one of them, like {path}/train")
    disable_progress_bar()
    set_verbosity(logging.CRITICAL)  # it logs the errors that it raises
    revision = {} if is_local(path) else {"revision": source.revision}

    def numbered(file: int) -> Iterator[Numbered]:
        try:
            for number, row in enumerate(stream.shard(num_shards=stream.num_shards, index=file)):
                yield number, f"row {number}", as_in_json(row)
        except Exception as error:  # datasets raises whatever its parsers raise
            raise failure(error) from error

    def failure(error: Exception) -> AlphaprofError:
        if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
            return DataEmpty(f"{path} holds an empty file", "remove that file, or fill it")
        hint = "check name, split, its README.md and the files in it"
        hint = hint if is_local(path) else "check the dataset's id, name, split and your access rights"
        return DataUnreadable(f"cannot read {path}: {first_line(error)[:200]}", hint)

    try:
        stream = load_dataset_builder(path=path, name=source.name, **revision).as_streaming_dataset(split=source.split)
        return [partial(numbered, file) for file in range(stream.num_shards)]
    except Exception as error:
        raise failure(error) from error


def _shuffled(
    files: Sequence[Callable[[], Iterator[Numbered]]], random: np.random.Generator, size: int, roots: Sequence[str]
) -> Iterator[Numbered]:
    """Yield rows in random order: drawn from a buffer that is filled from several files in turn, themselves in random
    order. The buffer holds no other columns than `roots`.
    """

    def numbered(file: int) -> Iterator[Numbered]:
        for number, where, row in files[file]():
            if not isinstance(row, BadRow) and any(name in row for name in roots):
                row = {name: value for name, value in row.items() if name in roots or TEXTUAL.fullmatch(name)}
            yield number + file * FILE, where, row

    waiting = map(numbered, random.permutation(len(files)).tolist())
    read = list(itertools.islice(waiting, FILES))
    buffer: list[Numbered] = []
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
