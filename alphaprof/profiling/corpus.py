"""Datasets to prompts: streams rows (datasets), renders them, and encodes them with the target's tokenizer."""

from __future__ import annotations

import difflib
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from alphaprof.config import DomainColumn, GivenContinuation, ProfileOptions, SourceOptions
from alphaprof.errors import AlphaprofError, ColumnMissing, DataEmpty, DataUnreadable, ProfileInvalid
from alphaprof.profiling.hub import is_local, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
Ids = np.ndarray[Any, np.dtype[np.int32]]
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class Document:
    """A prompt with what is known about its continuation, as token ids of the target."""

    document: int
    domain: str
    cluster: str | None
    source: int
    source_row: int
    prompt: Ids
    given: Ids | None  # the logged response, cut to max_new_tokens; None: the target will generate
    cut: bool  # whether the logged response was cut
    max_new_tokens: int | None
    kind: str
    on_policy: bool


@dataclass
class Corpus:
    """The documents of a profile, round robin over its sources; counts what it leaves out or truncates, and why.

    A pure function of data and profile: iterating again yields the same documents with the same numbers.
    """

    options: ProfileOptions
    tokenizer: PreTrainedTokenizerBase
    context: int | None
    vocabulary: int
    skipped: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Document]:
        """Documents with consecutive numbers. Raises the errors of `rows`, `render` and `encode`."""
        self.skipped.clear()
        self.truncated.clear()
        streams = {index: self._source(index) for index in range(len(self.options.data))}
        number = 0
        while streams:
            for index in list(streams):
                found = next(streams[index], None)
                if found is None:
                    del streams[index]
                    continue
                yield Document(document=number, **found)
                number += 1

    def _source(self, index: int) -> Iterator[dict[str, Any]]:
        """The documents of one source, all of their fields but the number."""
        source = self.options.data[index]
        taken = row_number = 0
        for row_number, row in enumerate(rows(source), start=1):
            found = self._document(source, index, row_number - 1, row)
            if found is not None:
                taken += 1
                yield found
            if taken == source.limit:
                return
        if taken == 0:
            left_out = "; ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            raise DataEmpty(
                f"{source.path} yields no document from {row_number} rows"
                + (f" (left out: {left_out})" if left_out else ""),
                "check its rows and split, and too_long and max_new_tokens against the target's context",
            )

    def _document(self, source: SourceOptions, index: int, row_number: int, row: Row) -> dict[str, Any] | None:
        continuation = self.options.continuation_of(index)
        where = f"{source.path} row {row_number}"
        prompt = encode_prompt(source, row, self.tokenizer, where)
        given = None
        if isinstance(continuation, GivenContinuation):
            given = encode_given(continuation, row, self.tokenizer, where)
        for ids in (prompt, given):
            if ids is not None and len(ids) and ids.max() >= self.vocabulary:
                raise ColumnMissing(
                    f"{where} holds the token id {ids.max()}, beyond the target's vocabulary of {self.vocabulary}",
                    "give token ids of the target's own tokenizer, or give text",
                )
        if len(prompt) == 0 or (given is not None and len(given) == 0):
            self.skipped["with an empty prompt or response"] += 1
            return None
        limit = continuation.max_new_tokens
        cut = given is not None and limit is not None and len(given) > limit
        if given is not None and cut:
            given = given[:limit]
            self.truncated["responses cut to max_new_tokens"] += 1
        fitted = self._fit(prompt, len(given) if given is not None else int(limit or 0), source)
        if fitted is None:
            return None
        cluster = _value(row, source.cluster, where) if source.cluster else None
        domain = source.domain
        return {
            "domain": str(_value(row, domain.column, where)) if isinstance(domain, DomainColumn) else domain,
            "cluster": None if cluster is None else f"{index}:{cluster}",
            "source": index,
            "source_row": row_number,
            "prompt": fitted,
            "given": given,
            "cut": cut,
            "max_new_tokens": limit,
            "kind": continuation.kind,
            "on_policy": continuation.on_policy if isinstance(continuation, GivenContinuation) else True,
        }

    def _fit(self, prompt: Ids, new_tokens: int, source: SourceOptions) -> Ids | None:
        """The prompt, if need be without its beginning, so that the document fits the target's context; None: skipped."""
        room = None if self.context is None else self.context - new_tokens
        if room is None or len(prompt) <= room:
            return prompt
        if source.too_long == "skip" or room < 1:
            self.skipped[f"longer than the target's context of {self.context} tokens"] += 1
            return None
        self.truncated["prompts cut to the target's context"] += 1
        return prompt[-room:]


def rows(source: SourceOptions) -> Iterator[Row]:
    """The rows of one source, streamed, shuffled if the profile asks for it. Raises `DataUnreadable` and `DataEmpty`."""
    require(source.path, DataUnreadable, "dataset")
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        stream = load_dataset(**_loading(source), streaming=True)
        if source.shuffle_seed is not None:
            stream = stream.shuffle(seed=source.shuffle_seed, buffer_size=source.shuffle_buffer)
        yield from stream
    except AlphaprofError:
        raise
    except Exception as error:  # datasets raises whatever its parsers raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
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
    if path.suffix not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise DataUnreadable(f"{path} has no known format", f"give a file that ends with {known}, or a dataset directory")
    if path.stat().st_size == 0:
        raise DataEmpty(f"{path} is empty", "put one document a line into it, or remove this source")
    return {"path": BUILDERS[path.suffix], "data_files": str(path), "split": "train"}


def expected_documents(options: ProfileOptions) -> int | None:
    """About how many documents the sources hold, for the progress display; None where that is not known beforehand."""
    total = 0
    for source in options.data:
        count = _row_count(Path(source.path))
        if count is None and source.limit is None:
            return None
        total += min(known for known in (count, source.limit) if known is not None)
    return total


def _row_count(path: Path) -> int | None:
    if path.suffix == ".parquet" and path.is_file():
        return int(pq.read_metadata(path).num_rows)
    if path.suffix in (".jsonl", ".csv", ".txt") and path.is_file():
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip()) - (path.suffix == ".csv")
    return None


def read_whole(source: SourceOptions) -> bool:
    """Whether a source has to be read whole before its first row: a .json file that holds one array."""
    path = Path(source.path)
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(1024).lstrip().startswith("[")


def encode_prompt(source: SourceOptions, row: Row, tokenizer: PreTrainedTokenizerBase, where: str) -> Ids:
    """Token ids of a row's prompt: given ids, chat messages through the chat template, or a rendered template."""
    if source.prompt_ids is not None:
        return _token_ids(_value(row, source.prompt_ids, where), where, source.prompt_ids)
    if source.messages is not None:
        messages = _value(row, source.messages, where)
        if not isinstance(messages, list) or not all(isinstance(turn, Mapping) and "role" in turn for turn in messages):
            raise ColumnMissing(f"{where}: {source.messages} holds no chat messages", "it must be a list of {role, content}")
        return _chat(messages, source, tokenizer, where)
    text = render(str(source.prompt), row, where)
    if source.chat:
        system = [{"role": "system", "content": source.system}] if source.system is not None else []
        return _chat([*system, {"role": "user", "content": text}], source, tokenizer, where)
    return np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)


def _chat(messages: list[Any], source: SourceOptions, tokenizer: PreTrainedTokenizerBase, where: str) -> Ids:
    if not tokenizer.chat_template:
        raise ProfileInvalid(
            f"{source.path}: the target's tokenizer has no chat template",
            "use prompt without chat: true, or an instruct model",
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **source.chat_options)
    except Exception as error:  # templates are programs of their own and raise jinja's errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataUnreadable(
            f"{where}: the chat template refuses it: {reason[:200]}", "check roles and chat_options"
        ) from error
    # The template writes BOS itself where the model wants one.
    return np.asarray(tokenizer(str(text), add_special_tokens=False)["input_ids"], dtype=np.int32)


def encode_given(continuation: GivenContinuation, row: Row, tokenizer: PreTrainedTokenizerBase, where: str) -> Ids:
    """Token ids of a logged response: ids as they are, text as the tokenizer encodes it without special tokens."""
    value = _value(row, continuation.column, where)
    if isinstance(value, str):
        return np.asarray(tokenizer(value, add_special_tokens=False)["input_ids"], dtype=np.int32)
    return _token_ids(value, where, continuation.column)


def _token_ids(value: Any, where: str, column: str) -> Ids:
    if isinstance(value, list) and all(isinstance(token, int) and token >= 0 for token in value):
        return np.asarray(value, dtype=np.int32)
    raise ColumnMissing(f"{where}: {column} holds neither text nor token ids", "it must be a string or a list of integers")


def render(template: str, row: Row, where: str) -> str:
    """The template with {column} replaced by the row's values; a value's own braces and attributes mean nothing."""
    parts = []
    for literal, name, specification, conversion in _parse(template):
        parts.append(literal)
        if name is not None:
            if not name or specification or conversion:
                raise ProfileInvalid(
                    f"prompt template {template!r} has the field {{{name}}}", "write {column}, or {{ for a brace"
                )
            parts.append(str(_value(row, name, where)))
    return "".join(parts)


def _parse(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError as error:
        raise ProfileInvalid(f"prompt template {template!r}: {error}", "write {column}, or {{ and }} for braces") from None


def _value(row: Row, column: str, where: str) -> Any:
    """A cell that must exist and hold something."""
    if column not in row:
        near = difflib.get_close_matches(column, list(row), n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has: {', '.join(row)}"
        raise ColumnMissing(f"{where} has no column {column!r}", hint)
    if row[column] is None:
        raise ColumnMissing(f"{where}: column {column!r} is empty there", "fill it in, or remove such rows")
    return row[column]
