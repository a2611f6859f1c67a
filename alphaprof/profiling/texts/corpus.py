"""Rows of datasets to documents: read rows, render prompts and responses, encode them with the target's tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from alphaprof.config.load import stored_profile
from alphaprof.errors import (
    VALUE,
    AlphaprofError,
    ColumnMissing,
    DataEmpty,
    DataUnreadable,
    ProfileInvalid,
    RunMismatch,
    cut,
    shown,
)
from alphaprof.log.manifest import RandomOrder, left_out_remedy
from alphaprof.log.run import Run
from alphaprof.log.schema import PROMPT_COLUMNS, arrow_schema
from alphaprof.log.split import unit_of
from alphaprof.log.storage import is_remote
from alphaprof.profiling.models.hub import FORMATS, first_line, is_local, opened, require_data, row_count
from alphaprof.profiling.models.processing import PLAIN, Processing, resolved

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import ContinuationOptions, GivenContinuation
    from alphaprof.config.profile import ProfileOptions, SourceOptions


Row = Mapping[str, Any]
FILE = 1 << 32  # beyond the rows of any file
FILES = 10  # files that a shuffle reads at a time
CHUNK = 1 << 24  # bytes that one request fetches of a file in an object store


def rows(source: SourceOptions) -> Iterator[tuple[int, Row]]:
    """Yield the rows of one source with their numbers there, from 0, streamed, shuffled if the profile asks for it.

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
    """Yield rows in random order: drawn from a buffer that is filled from several files in turn, themselves in random
    order.
    """

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
    """Yield a path of a source that `datasets` reads: a copy of a file in an object store."""
    if not is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="alphaprof-") as folder:
        place = Path(folder) / f"data{Path(path).suffix}"
        with opened(path) as file:
            file.download(str(place), buffer_size=CHUNK)
        yield str(place)


def _loading(source: SourceOptions, place: str) -> dict[str, Any]:
    """Return arguments of `load_dataset_builder` for a source at a place. Raises `DataUnreadable`."""
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
    """Return the first line of a .jsonl file that is not a JSON object, and why; parsers count lines from the start of a
    block.
    """
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


Ids = np.ndarray[Any, np.dtype[np.int32]]
EMPTY, NOTHING = "with an empty prompt or response", np.empty(0, dtype=np.int32)
LOST_BOS = "cut prompts lost their initial BOS"
INT32_MAX = np.iinfo(np.int32).max
# Of documents in random order, so that a run may stop as soon as its verdict is sure (`profile --until-decided`).
CHOOSING = 32  # documents that choose what is auto
SHARD = 16  # documents between two looks: betting allows for any number of them
READ_ON = 10_000  # rows of a stream that bring nothing, after which no other domain is looked for
NOT_READ = f"sources read no further: the last {READ_ON:,} rows had only domains at the limit"
REPEATED = 0.01  # of the documents may repeat a prompt, where a bet counts each prompt once
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
EARLIEST = datetime.datetime(1990, 1, 1, tzinfo=datetime.UTC)  # an empty date (0001, 1970) is not the time of a request
SECONDS = re.compile(r"\d{9,}(\.\d*)?")  # text that is a number; 20261123 is a date
# Fields of a document that tables hold under the same names.
STORED = ("document", "domain", "cluster", "time", "source", "source_row", "max_new_tokens", "on_policy", "seed")


@dataclass(frozen=True)
class Document:
    """A prompt with what is known about its continuation, as token ids of the target. `processing`: what turns logits into
    the distributions that tokens are drawn from; None: the plain softmax, greedily.
    """

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
    processing: Processing | None = None
    seed: int | None = None  # of the sampling, where this run samples
    time: datetime.datetime | None = None  # when it was asked; None: the source names no column that says so

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the token ids of the prompt: what tells equal prompts."""
        return hashlib.sha256(self.prompt.astype("<i4").tobytes()).hexdigest()

    @property
    def limit(self) -> int:
        """How many tokens the continuation has at most."""
        return len(self.given) if self.given is not None else self.max_new_tokens or 0

    @property
    def greedy(self) -> bool:
        """Whether the tokens are the target's own greedy choices: under `strict` they are what is verified."""
        return self.on_policy and self.processing is None


class _LeftOut(Exception):
    """A row of which no document can be made: it is left out and counted, by the reason."""


@dataclass
class Corpus:
    """The documents of a profile, round robin over its sources; counts what it leaves out or truncates, and why. A pure
    function of data and profile: iterating again yields the same documents with the same numbers.
    """

    options: ProfileOptions
    tokenizer: PreTrainedTokenizerBase
    context: int | None
    vocabulary: int
    served: Mapping[str, Any] = field(default_factory=dict)  # sampling settings of the target's own generation config
    limit: int | None = None  # this many documents only
    skipped: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Document]:
        """Documents with consecutive numbers. Raises the errors of `rows`, `render` and `encode`."""
        self.skipped.clear()
        self.truncated.clear()
        streams = [self._source(index) for index in range(len(self.options.data))]
        number = 0
        while streams:
            for stream in list(streams):
                if (fields := next(stream, None)) is None:
                    streams.remove(stream)
                else:
                    yield Document(document=number, **fields)
                    number += 1
                    if number == self.limit:
                        return

    def _source(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the documents of one source, all of their fields but the number. Where a column names the domain, rows are
        read to the end for domains that have fewer than `limit`, of a stream until READ_ON rows in a row bring no document.
        """
        source = self.options.data[index]
        by_column = not isinstance(source.domain, str)
        taken: Counter[str] = Counter()
        left_out: Counter[str] = Counter()
        read = last = 0
        for row_number, row in rows(source):
            read += 1
            where = f"{source.path} row {row_number}"
            try:
                domain = _domain(source, row, where)
                if taken[domain] == source.limit:
                    if _streamed(source) and read - last > READ_ON:
                        self.truncated[NOT_READ] += 1
                        return
                    continue
                fields = self._fields(source, index, row, where)
            except _LeftOut as reason:
                self.skipped[str(reason)] += 1
                left_out[str(reason)] += 1
                continue
            taken[domain], last = taken[domain] + 1, read
            yield {**fields, "domain": domain, "source_row": row_number}
            if taken[domain] == source.limit and not by_column:
                return
        if not last:
            reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise DataEmpty(
                f"{source.path} yields no document from {read} rows" + (f" (left out: {reasons})" if reasons else ""),
                left_out_remedy(left_out.most_common(1)[0][0]) if left_out else "check path, split and the rows there",
            )

    def _fields(self, source: SourceOptions, index: int, row: Row, where: str) -> dict[str, Any]:
        """Return the fields of a row's document but its number, domain and row. Raises `_LeftOut`."""
        continuation = self.options.continuation_of(index)
        prompt = encode_prompt(source, row, self.tokenizer, where)
        given = None
        if continuation.kind == "given":
            given = encode_given(continuation, row, self.tokenizer, where)
        elif continuation.kind == "text":
            prompt, given = prompt[: continuation.prompt_tokens], prompt[continuation.prompt_tokens :]
        for ids in (prompt, given):
            if ids is not None and len(ids) and ids.max() >= self.vocabulary:
                raise ColumnMissing(
                    f"{where} holds the token id {ids.max()}, beyond the target's vocabulary of {self.vocabulary}",
                    "give token ids of the target's own tokenizer, or give text",
                )
        left_out = None
        if continuation.kind == "text" and len(prompt) and given is not None and len(given) == 0:
            left_out = f"with no text beyond prompt_tokens ({continuation.prompt_tokens})"
        elif len(prompt) == 0 or (given is not None and len(given) == 0):
            left_out = EMPTY
        elif len(prompt) < source.min_prompt_tokens:
            left_out = f"with a prompt shorter than min_prompt_tokens ({source.min_prompt_tokens})"
        if left_out:
            raise _LeftOut(left_out)
        limit = continuation.max_new_tokens
        cut = given is not None and limit is not None and len(given) > limit
        given = given[:limit] if given is not None else None
        fitted = self._fit(prompt, len(given) if given is not None else int(limit or 0), source)
        self.truncated.update(["texts cut to max_new_tokens"] if cut else [])
        self.truncated.update(["prompts cut to the target's context"] if len(fitted) < len(prompt) else [])
        begin = self.tokenizer.bos_token_id
        self.truncated.update([LOST_BOS] if prompt[0] == begin and fitted[0] != begin else [])
        cluster = _value(row, source.cluster, where, optional=True) if source.cluster else None
        time = _moment(_value(row, source.time, where, optional=True), where, source.time) if source.time else None
        return {
            "cluster": None if cluster is None else f"{index}:{_text(cluster)}",
            "time": time,
            "source": index,
            "prompt": fitted,
            "given": given,
            "cut": cut,
            "max_new_tokens": limit,
            **policy(continuation, self.served),
        }

    def _fit(self, prompt: Ids, new_tokens: int, source: SourceOptions) -> Ids:
        """Return the prompt, if need be without its beginning, so that the document fits the context. Raises `_LeftOut`."""
        room = len(prompt) if self.context is None else self.context - new_tokens
        if len(prompt) <= room:
            return prompt
        if source.too_long == "skip" or room < 1:
            raise _LeftOut(f"longer than the target's context of {self.context} tokens")
        return prompt[-room:]


@dataclass(frozen=True)
class InRandomOrder:
    """All documents of a corpus, drawn without replacement, in an order that follows from their prompts. Iterated like a
    `Corpus`.
    """

    documents: Sequence[Document]
    skipped: Counter[str]
    truncated: Counter[str]

    @classmethod
    def of(cls, corpus: Corpus, options: ProfileOptions) -> InRandomOrder:
        """Read the whole corpus. Raises `ProfileInvalid` if documents depend on each other or prompts recur, if weights ask
        for a mixture of domains that the data does not have, or if a corpus on the hub has no limit.
        """
        endless = [source.path for source in options.data if _streamed(source) and source.limit is None]
        problem = None
        if any(source.cluster for source in options.data):
            problem = "needs independent documents, but this profile groups them by cluster"
        elif options.decision.weights is not None:
            problem = "keeps the data's mix of domains, but decision.weights asks for another"
        elif endless:
            problem = f"draws from all documents, but {endless[0]} on the hub has no limit"
        documents = [] if problem else list(corpus)
        # A bet counts a prompt once, an interval as often as it comes: where prompts recur they answer two questions.
        prompts = sorted(document.prompt_hash for document in documents)
        if (repeats := len(prompts) - len(set(prompts))) > REPEATED * len(prompts):
            problem = f"needs independent documents, but {repeats} of {len(prompts)} repeat a prompt"
        if problem:
            raise ProfileInvalid(f"--until-decided {problem}", "change that, or profile without --until-decided")
        seed = int.from_bytes(hashlib.sha256("".join(prompts).encode()).digest())
        documents.sort(key=lambda document: document.prompt_hash)  # the order of the files has no say
        order = np.random.default_rng(seed).permutation(len(documents)).tolist()
        drawn = [dataclasses.replace(documents[place], document=number) for number, place in enumerate(order)]
        return cls(drawn, corpus.skipped, corpus.truncated)

    def __iter__(self) -> Iterator[Document]:
        """The documents, numbered in this order."""
        return iter(self.documents)

    def facts(self, options: ProfileOptions) -> RandomOrder:
        """Return what a verdict must know before it sees any of them: see `report.verdict.Order`; and `shard_documents`."""
        from alphaprof.config.profile import AUTO

        choices = (options.drafts, options.decision.draft), (options.gammas, options.decision.gamma)
        chooses = any(len(given) > 1 and decided == AUTO for given, decided in choices)
        reach: dict[str, int] = {}
        for document in self.documents:
            reach[document.domain] = max(reach.get(document.domain, 1), document.limit - 1)
        return {
            "choosing": CHOOSING if chooses else 0,
            "available": len(self.documents),
            "reach": reach,
            "shard_documents": min(SHARD, options.shard_documents),
        }


def policy(continuation: ContinuationOptions, served: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Document` that say how its tokens come about."""
    on_policy = continuation.on_policy if continuation.kind == "given" else continuation.kind != "text"
    processing, seed = None, None
    if continuation.kind == "given" and continuation.temperature is not None:
        processing = resolved(continuation, {})
    elif continuation.kind == "sampled":
        processing = resolved(continuation, served if continuation.generation_config else {})
        seed = continuation.seed
    return {"kind": continuation.kind, "on_policy": on_policy, "processing": processing, "seed": seed}


def encode_prompt(source: SourceOptions, row: Row, tokenizer: PreTrainedTokenizerBase, where: str) -> Ids:
    """Return token ids of a row's prompt: given ids, chat messages through the chat template, or a rendered template; none
    if it says nothing.
    """
    if source.prompt_ids is not None:
        return _token_ids(_value(row, source.prompt_ids, where), where, source.prompt_ids)
    if source.messages is not None:
        messages = _value(row, source.messages, where)
        is_chat = isinstance(messages, list) and all(isinstance(turn, Mapping) and turn.get("role") for turn in messages)
        if not is_chat or (messages and messages[-1]["role"] == "assistant"):
            problem = "ends with an assistant turn" if is_chat else "holds no chat messages"
            hint = "give a list of {role, content} ending with a user turn; put logged answers in a column (kind: given)"
            raise ColumnMissing(f"{where}: {source.messages} {problem}", hint)
        messages = [{**turn, "content": _joined(turn.get("content"))} for turn in messages]
        if not messages or _blank(messages[-1]["content"]):
            return NOTHING
    else:
        text = render(str(source.prompt), row, where)
        if _blank(text):
            return NOTHING
        if not source.chat:
            return np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
        system = [{"role": "system", "content": source.system}] if source.system is not None else []
        messages = [*system, {"role": "user", "content": text}]
    if not tokenizer.chat_template:
        hint = "use prompt without chat: true, or an instruct model"
        raise ProfileInvalid(f"{source.path}: the target's tokenizer has no chat template", hint)
    chat = render_chat(tokenizer, messages, source.chat_options, where)
    # The template writes BOS itself where the model wants one.
    return np.asarray(tokenizer(chat, add_special_tokens=False)["input_ids"], dtype=np.int32)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], where: str
) -> str:
    """Return the prompt that a tokenizer's chat template writes for a chat, the model's turn begun; `variables`: its own
    options.

    Keys that hold nothing are left out, as newer versions of transformers do. Raises `DataUnreadable` if the template
    refuses the chat; `where` names it.
    """
    chat = [{name: value for name, value in turn.items() if value is not None} for turn in messages]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **variables))
    except Exception as error:  # templates raise jinja's errors and those of whatever they call
        message = f"{where}: the chat template refuses it: {first_line(error)[:200]}"
        raise DataUnreadable(message, "check roles and chat_options") from error


def _streamed(source: SourceOptions) -> bool:
    """Return whether it is a dataset on the hub, which may be endless."""
    return not is_local(source.path) and not is_remote(source.path)


def _joined(content: Any) -> Any:
    """Return the content of a turn; text parts of OpenAI's format as one text, by lines, as vLLM does. Raises `_LeftOut` for
    parts that are not text.
    """
    if not isinstance(content, list):
        return content
    if any(not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text") for part in content):
        raise _LeftOut("with content that is not text")
    return "\n".join(str(part.get("text") or "") for part in content)


def _blank(text: Any) -> bool:
    """Return whether it says nothing: the tokens of a template or a BOS are no prompt."""
    return text is None or (isinstance(text, str) and not text.strip())


def _domain(source: SourceOptions, row: Row, where: str) -> str:
    """Return the domain of a row. Raises `_LeftOut` where its column is empty."""
    if isinstance(source.domain, str):
        return source.domain
    domain = _text(_value(row, source.domain.column, where))
    if _blank(domain):
        raise _LeftOut(f"with nothing in the column {source.domain.column}")
    return domain


def encode_given(continuation: GivenContinuation, row: Row, tokenizer: PreTrainedTokenizerBase, where: str) -> Ids:
    """Return token ids of a logged response: ids as they are, text as the tokenizer encodes it without special tokens."""
    value = _value(row, continuation.column, where)
    if isinstance(value, str):
        return np.asarray(tokenizer(value, add_special_tokens=False)["input_ids"], dtype=np.int32)
    return _token_ids(value, where, continuation.column)


def _token_ids(value: Any, where: str, column: str) -> Ids:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        raise ColumnMissing(f"{where}: {column} holds no token ids", "give a list of integer ids from the tokenizer")
    return np.asarray(value, dtype=np.int32)


def render(template: str, row: Row, where: str) -> str:
    """Return the template with {column} replaced by the row's values; a value's own braces and attributes mean nothing."""
    from alphaprof.config.profile import template_parts

    return "".join(
        literal + ("" if name is None else _text(_value(row, name, where))) for literal, name in template_parts(template)
    )


def _text(value: Any) -> str:
    """Return a cell as text; a date as JSON writes it, since its reader turns a column of dates into timestamps."""
    if isinstance(value, datetime.datetime):
        return (value.date() if value.time() == datetime.time() else value).isoformat()
    return str(value)


def _moment(value: Any, where: str, column: str) -> datetime.datetime:
    """When a document was asked, in UTC, of a cell: ISO 8601, a date, a time, or seconds since 1970, which text may hold as
    well. Without a zone it is UTC. Raises `ColumnMissing` for anything else, before `EARLIEST`, and later than tomorrow, as
    milliseconds and 2026112310 would be.
    """
    with contextlib.suppress(ValueError, OverflowError):
        time = value
        if isinstance(value, str):
            text = value.strip()
            time = float(text) if SECONDS.fullmatch(text) else datetime.datetime.fromisoformat(text)
        if isinstance(time, (int, float)) and not isinstance(time, bool):
            time = EPOCH + datetime.timedelta(seconds=time)
        elif isinstance(time, datetime.date) and not isinstance(time, datetime.datetime):
            time = datetime.datetime.combine(time, datetime.time())
        if isinstance(time, datetime.datetime):
            time = (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).astimezone(datetime.UTC)
            if EARLIEST <= time <= datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1):
                return datetime.datetime.combine(time.date(), time.time(), datetime.UTC)  # of pandas: without nanoseconds
    hint = "write ISO 8601, like 2026-11-23T10:00:00Z, or seconds since 1970 (no milliseconds), from 1990 to today"
    raise ColumnMissing(f"{where}: {cut(column, VALUE)} holds {shown(value)}, which is not the time of a request", hint)


def _value(row: Row, column: str, where: str, optional: bool = False) -> Any:
    """Return the cell of a column that must exist, also `outer.inner` of an object. Raises `_LeftOut` if it holds nothing,
    unless that is allowed.
    """
    outer, dot, inner = column.partition(".")
    if column not in row and dot and isinstance(row.get(outer), Mapping):
        return _value(row[outer], inner, where, optional)
    if column not in row:
        near = difflib.get_close_matches(column, list(row), n=1)
        hint = f"did you mean {cut(near[0], VALUE)}?" if near else f"it has: {cut(', '.join(row))}"
        raise ColumnMissing(f"{where} has no column {shown(column)}", hint)
    if row[column] is None and not optional:
        raise _LeftOut(f"with nothing in the column {column}")
    return row[column]


def stored(document: Document) -> dict[str, Any]:
    """Return what the tables of prompts and of continuations both hold of a document."""
    return {
        **{name: getattr(document, name) for name in STORED},
        **{name: getattr(document.processing, name, None) for name in vars(PLAIN)},
        "continuation": document.kind,
        "prompt_ids": document.prompt,
    }


def prompt_table(documents: Sequence[Document]) -> pa.Table:
    """Return rows of the prompts table, one a document."""
    rows = [{**stored(document), "cut": document.cut, "given_ids": document.given} for document in documents]
    return pa.Table.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))


def documents_of(table: pa.Table) -> Iterator[Document]:
    """Yield the documents of rows of the prompts table."""
    for row in table.to_pylist():
        yield document_of(row, row["given_ids"], row["cut"])


def document_of(row: Mapping[str, Any], given: Sequence[int] | None, cut: bool) -> Document:
    """Return the document of a row of either table."""
    drawn = row["temperature"] is not None
    return Document(
        **{name: row[name] for name in STORED},
        prompt=np.array(row["prompt_ids"], dtype=np.int32),
        given=None if given is None else np.array(given, dtype=np.int32),
        cut=cut,
        kind=row["continuation"],
        processing=Processing(**{name: row[name] for name in vars(PLAIN)}) if drawn else None,
    )


class Staged:
    """Stands in for a `Corpus`: the documents of a run as they were staged."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.skipped = run.manifest.skipped
        self.truncated = run.manifest.truncated

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for index in range(len(self.run.manifest.staged)):
            yield from documents_of(self.run.prompts(index))


class Reused(Staged):
    """Stands in for a `Corpus`: the documents of a run in their order, each with the continuation that the run stored.
    `units`: of these independent units alone (`log.split.unit_of`); None: all documents.
    """

    def __init__(self, run: Run, units: frozenset[str] | None) -> None:
        super().__init__(run)
        self.units = units

    @classmethod
    def open(cls, path: Path, options: ProfileOptions, units: frozenset[str] | None) -> Reused:
        """Return the documents of the complete run in `path`. Raises `RunUnreadable`, and `RunMismatch` if `options` ask for
        other data or continuations than the run holds.
        """
        run = Run.open(path)
        run.require_complete()
        order = run.manifest.sequential
        if order is not None and run.manifest.documents < order["available"]:
            raise RunMismatch(
                f"{path} stopped early at a sure verdict: its number of documents depends on its results",
                "reuse continuations of a run that measured all of its documents",
            )
        before, asked = (each.model_dump(mode="json") for each in (stored_profile(run.manifest.config), options))
        if changed := [key for key in ("data", "continuation") if asked[key] != before[key]]:
            hint = "reuse continuations with the data and continuation of the run that made them"
            raise RunMismatch(f"{path} was made with another profile (other {', '.join(changed)})", hint)
        return cls(run, units)

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for shard in self.run.shards:
            for row in self.run.continuations(shard.index).to_pylist():
                if self.units is None or unit_of(row["cluster"], row["prompt_hash"]) in self.units:
                    yield document_of(row, row["continuation_ids"], row["finish"] == "length")


DocumentSource = Corpus | InRandomOrder | Staged
