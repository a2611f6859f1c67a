"""Rows of datasets to documents: read rows, render prompts and responses, encode them with the target's tokenizer."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from alphaprof.config.paths import is_remote
from alphaprof.config.profile import template_parts
from alphaprof.errors import (
    ColumnMissing,
    DataEmpty,
    ProfileInvalid,
    cut,
    shown,
)
from alphaprof.profiling.models.hub import is_local
from alphaprof.profiling.models.processing import PLAIN, Processing, resolved
from alphaprof.profiling.texts.answers import answer_text
from alphaprof.profiling.texts.cells import (
    BadRow,
    LeftOut,
    Row,
    cell,
    cell_if_any,
    decoded,
    label_of,
    named,
    render,
    text_in,
)
from alphaprof.profiling.texts.chat import (
    needs_system_first,
    render_chat,
    template_of,
    text_of,
)
from alphaprof.profiling.texts.requests import Chat, chat_of, roots_of
from alphaprof.profiling.texts.rows import Numbered, rows
from alphaprof.run.manifest import Manifest, left_out_remedy
from alphaprof.run.reader import Run
from alphaprof.run.schema import PROMPT_COLUMNS, arrow_schema
from alphaprof.run.split import Ids, unit_of
from alphaprof.stats.grouping import grouped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.options import ContinuationOptions
    from alphaprof.config.profile import ProfileOptions, SourceOptions

T = TypeVar("T")
EMPTY, NOTHING = "with an empty prompt or response", np.empty(0, dtype=np.int32)
MESSAGE = 150  # characters of each reason
LOST_BOS = "cut prompts lost their initial BOS"
UNUSED = "prompts without the text that stands beside their messages, in"
INT32_MAX = np.iinfo(np.int32).max
OTHER_ROWS = "that data.where does not ask for"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # where SPEED-Bench may not publish a text
UNFETCHED = "whose text the benchmark does not publish"
BAD = "with a row that cannot be used"  # bad rows, each for its own reason
TRIED, SHOWN = 1_000, 3  # bad rows after which a source without a document is given up, and those that are shown
READ_ON = 10_000  # rows of a stream that bring nothing, after which no other domain is looked for
NOT_READ = f"sources read no further: the last {READ_ON:,} rows had only domains at the limit"
# Fields of a document that tables hold under the same names.
STORED = ("document", "domain", "cluster", "source", "source_row", "max_new_tokens", "on_policy", "seed")


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


@dataclass
class SourceRead:
    """What was read of a source: how many rows, why some were left out or cut, and the bad ones."""

    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    bad: int = 0
    shown: list[BadRow] = field(default_factory=list)  # the first of them

    def bad_rows(self, path: str) -> str:
        """Return how many rows are bad, with the first and their reasons; empty if there are none."""
        alike = grouped((str(bad), bad.where) for bad in self.shown)
        reasons = "; ".join(cut(f"{', '.join(places)} {reason}", MESSAGE) for reason, places in alike.items())
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        return f"{self.bad:,} of {rows} of {path} cannot be used: {reasons}" if self.bad else ""

    def require(self, source: SourceOptions, any_document: bool) -> None:
        """Raise the error of a source with too many bad rows, or without a document."""
        if self.bad and (not any_document or self.bad > source.bad_rows * self.rows):
            first = self.shown[0]
            more = ", or allow more bad rows with bad_rows" if any_document else ""
            raise first.kind(
                f"{source.path} {first.where} {first}" if self.rows == 1 else self.bad_rows(source.path), first.hint + more
            )
        if not any_document:
            reasons = "; ".join(f"{number} {reason}" for reason, number in self.left_out.items())
            raise DataEmpty(
                f"{source.path} yields no document from {self.rows} rows" + (f" (left out: {reasons})" if reasons else ""),
                left_out_remedy(self.left_out.most_common(1)[0][0]) if reasons else "check path, split and the rows there",
            )


@dataclass
class Corpus:
    """The documents of a profile, round robin over its sources; counts what it leaves out or truncates, and why. A pure
    function of data and profile: iterating again yields the same documents with the same numbers.

    `context` and `vocabulary` are the target's, which need not be known to `look`.
    """

    options: ProfileOptions
    tokenizer: PreTrainedTokenizerBase
    context: int | None = None
    vocabulary: int = INT32_MAX
    served: Mapping[str, Any] = field(default_factory=dict)  # sampling settings of the target's own generation config
    limit: int | None = None  # this many documents only
    read: list[SourceRead] = field(default_factory=list)  # of each source
    looked: dict[int, Iterator[Numbered]] = field(default_factory=dict)  # rows of a source with those of `look` in front

    @property
    def skipped(self) -> Counter[str]:
        """Why rows were left out, of all sources; none that `where` does not ask for."""
        found = sum((read.left_out + Counter({BAD: read.bad}) for read in self.read), Counter[str]())
        del found[OTHER_ROWS]
        return found

    @property
    def truncated(self) -> Counter[str]:
        """Why documents are shorter than their rows, or sources not read to the end."""
        return sum((read.truncated for read in self.read), Counter[str]())

    def look(self, most: int) -> None:
        """Read each source's first `most` rows, and on to its first document, so that wrong data are found before a model
        is loaded. The next iteration begins with these rows and reads on behind them. Raises what iterating raises.
        """
        self.read = [SourceRead() for _ in self.options.data]
        for index, source in enumerate(self.options.data):
            kept, rest = list[Numbered](), self._rows(index)
            self.looked[index] = itertools.chain(kept, rest)
            for _ in self._source(index, _kept(rest, kept), most):
                pass
            self.read[index].require(source, True)

    def __iter__(self) -> Iterator[Document]:
        """Documents with consecutive numbers. Raises the errors of `rows`, and those of sources without documents or with
        more than `bad_rows` bad rows.
        """
        self.read = [SourceRead() for _ in self.options.data]
        first = {index: self._rows(index) for index in range(len(self.options.data))} | self.looked
        self.looked.clear()
        streams = [self._source(index, numbered) for index, numbered in first.items()]
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

    def _rows(self, index: int) -> Iterator[Numbered]:
        """Return the rows of one source, from its beginning."""
        source = self.options.data[index]
        return rows(source, roots_of(source, getattr(self.options.continuation_of(index), "column", None)))

    def _source(self, index: int, numbered: Iterator[Numbered], most: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the documents of one source, all of their fields but the number, and count its rows. Where a column names
        the domain, rows are read to the end for domains that have fewer than `limit`, of a stream until READ_ON rows in a
        row bring no document. It ends after `most` rows if there was a document among them.
        """
        source, read, last = self.options.data[index], self.read[index], 0
        taken: Counter[str] = Counter()
        spoken = (name for _, name in template_parts(source.system or ""))
        unseen = {name for name in (source.tools, source.chat_template_kwargs, *spoken) if name}
        for number, where, row in numbered:
            if most is not None and last and read.rows >= most:
                return
            read.rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                unseen = {name for name in unseen if cell_if_any(row, name) is None}
                domain = _domain(source, row)
                fields = None if taken[domain] == source.limit else self._fields(source, index, number, row)
            except LeftOut as reason:
                read.left_out[str(reason)] += 1
            except BadRow as bad:
                bad.where = where
                read.bad += 1
                read.shown += [bad] if len(read.shown) < SHOWN else []
                if not last and read.bad == TRIED:
                    break
            else:
                if fields is not None:
                    taken[domain], last = taken[domain] + 1, read.rows
                    yield {"domain": domain, **fields}
                    if taken[domain] == source.limit and isinstance(source.domain, str):
                        break
                elif _streamed(source) and read.rows - last > READ_ON:
                    read.truncated[NOT_READ] += 1
                    break
        else:
            for name in sorted(unseen) if last else ():
                raise ColumnMissing(
                    f"no row of {source.path} has a column {shown(name)}", "correct its name, or leave it out"
                )
        read.require(source, bool(last))

    def bad_rows(self) -> list[str]:
        """Return, for each source with bad rows, how many there are, and the first of them."""
        each = zip(self.options.data, self.read, strict=True)
        return [bad for source, read in each if (bad := read.bad_rows(source.path))]

    def _fields(self, source: SourceOptions, index: int, number: int, row: Row) -> dict[str, Any]:
        """Return the fields of a row's document but its number and domain. Raises `LeftOut` and `BadRow`."""
        continuation = self.options.continuation_of(index)
        prompt, given, chat = encode(source, row, self.tokenizer, getattr(continuation, "answer", None) is not None)
        if continuation.kind == "given" and continuation.column is not None:
            given = encode_given(continuation.column, row, self.tokenizer)
        elif continuation.kind == "text":
            prompt, given = prompt[: continuation.prompt_tokens], prompt[continuation.prompt_tokens :]
        for ids in (prompt, given):
            if ids is not None and len(ids) and ids.max() >= self.vocabulary:
                raise BadRow(
                    f"holds the token id {ids.max()}, beyond the target's vocabulary of {self.vocabulary}",
                    "give token ids of the target's own tokenizer, or other text",
                    ColumnMissing,
                )
        if continuation.kind == "text" and len(prompt) and given is not None and len(given) == 0:
            raise LeftOut(f"with no text beyond prompt_tokens ({continuation.prompt_tokens})")
        if len(prompt) == 0 or (given is not None and len(given) == 0):
            raise LeftOut(EMPTY)
        if len(prompt) < source.min_prompt_tokens:
            raise LeftOut(f"with a prompt shorter than min_prompt_tokens ({source.min_prompt_tokens})")
        limit = continuation.max_new_tokens
        cut = given is not None and limit is not None and len(given) > limit
        given = given[:limit] if given is not None else None
        fitted = self._fit(prompt, len(given) if given is not None else int(limit or 0), source)
        cluster = cell(row, source.cluster, optional=True) if source.cluster else None
        label = None if cluster is None else label_of(cluster, source.cluster)
        places = [(other.path, other.name, other.split, other.revision) for other in self.options.data]
        alike = [place for place, other in enumerate(places) if other == places[index]]  # sources that read the same rows
        if len(alike) > 1 and label is None:  # a row is one unit, however many sources use it
            label = f"row {number}"
        begin, truncated = self.tokenizer.bos_token_id, self.read[index].truncated
        truncated.update(f"{UNUSED} {key}" for key in (chat.unused if chat is not None else ()))
        truncated.update(["texts cut to max_new_tokens"] if cut else [])
        truncated.update(["prompts cut to the target's context"] if len(fitted) < len(prompt) else [])
        truncated.update([LOST_BOS] if prompt[0] == begin and fitted[0] != begin else [])
        return {
            "cluster": None if label is None else f"{alike[0]}:{label}",
            "source": index,
            "source_row": number,
            "prompt": fitted,
            "given": given,
            "cut": cut,
            "max_new_tokens": limit,
            **policy(continuation, self.served),
        }

    def _fit(self, prompt: Ids, new_tokens: int, source: SourceOptions) -> Ids:
        """Return the prompt, if need be without its beginning, so that the document fits the context. Raises `LeftOut`."""
        room = len(prompt) if self.context is None else self.context - new_tokens
        if len(prompt) <= room:
            return prompt
        if source.too_long == "skip" or room < 1:
            raise LeftOut(f"longer than the target's context of {self.context} tokens")
        return prompt[-room:]


def _kept(numbered: Iterator[Numbered], kept: list[Numbered]) -> Iterator[Numbered]:
    """Yield rows, and keep them."""
    for row in numbered:
        kept.append(row)
        yield row


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


def encode(
    source: SourceOptions, row: Row, tokenizer: PreTrainedTokenizerBase, answered: bool = False
) -> tuple[Ids, Ids | None, Chat | None]:
    """Return token ids of a row's prompt: given ids, chat messages through the chat template, or a rendered template; none
    if it says nothing. If it is asked for as `answered`, those of the answer that ends a chat. And the chat, if it is one.
    """
    if source.prompt_ids is not None:
        return _token_ids(cell(row, source.prompt_ids), source.prompt_ids), None, None
    if source.messages is None and not source.chat:
        text = render(str(source.prompt), row)
        return NOTHING if _blank(text) else _encoded(tokenizer, text, True), None, None
    chat = chat_of(source, row, bool(tokenizer.chat_template) and needs_system_first(template_of(tokenizer, None)))
    if not chat.turns or (_blank(text_of(chat.turns[-1].get("content"))) and chat.turns[-1]["role"] != "tool"):
        return NOTHING, NOTHING if answered else None, chat
    if not tokenizer.chat_template:
        raise ProfileInvalid(
            f"{source.path}: the target's tokenizer has no chat template",
            "use prompt without chat: true, or an instruct model",
        )
    prompt = render_chat(tokenizer, chat.turns, chat.variables, chat.tools, not chat.closed, chat.begun)
    ids = _encoded(tokenizer, prompt, chat.special)  # else the template writes BOS itself where the model wants one
    if not answered:
        return ids, None, chat
    if not chat.answer:
        raise LeftOut("whose chat does not end with an answer")
    given = _encoded(tokenizer, answer_text(tokenizer, chat, prompt), False)
    return ids, given[: next(iter(np.flatnonzero(given == tokenizer.eos_token_id)), len(given))], chat


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> Ids:
    """Return the token ids of a text. Raises `BadRow` for one that is not Unicode: bytes of another encoding, half a
    surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("holds text that is not valid UTF-8", "save the file as UTF-8, or drop the row") from error
    return np.asarray(tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)


def _streamed(source: SourceOptions) -> bool:
    """Return whether it is a dataset on the hub, which may be endless."""
    return not is_local(source.path) and not is_remote(source.path)


def _blank(text: Any) -> bool:
    """Return whether it says nothing: the tokens of a template or a BOS are no prompt."""
    return text is None or (isinstance(text, str) and not text.strip())


def _domain(source: SourceOptions, row: Row) -> str:
    """Return the domain of a row. Raises `LeftOut` for a row that is not asked for, or where its column is empty."""
    if any(label_of(cell(row, name), name) not in kept for name, kept in source.where.items()):
        raise LeftOut(OTHER_ROWS)
    if source.benchmark and PLACEHOLDER in str(cell_if_any(row, "turns")):
        raise LeftOut(UNFETCHED)
    if isinstance(source.domain, str):
        return source.domain
    domain = label_of(cell(row, source.domain.column), source.domain.column)
    if _blank(domain):
        raise LeftOut(f"with nothing in the column {source.domain.column}")
    return domain


def encode_given(column: str, row: Row, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Return token ids of a logged response: ids as they are, text as the tokenizer encodes it without special tokens."""
    value = cell(row, column)
    if isinstance(value, list) and value and not isinstance(value[0], int):
        value = named(column, text_of, value)  # parts of a content
    return _token_ids(value, column) if isinstance(value, list) else _encoded(tokenizer, text_in(value, column), False)


def _token_ids(value: Any, column: str) -> Ids:
    value = decoded(value)
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        raise BadRow(f"{column} holds no token ids", "give a list of integer ids from the tokenizer", ColumnMissing)
    return np.asarray(value, dtype=np.int32)


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


class StagedRun(Protocol):
    """What holds the documents of a run as they are to be measured: the run itself, or a stand-in for it."""

    manifest: Manifest

    def prompts(self, index: int) -> pa.Table:
        """Return the documents of one shard."""


class Staged:
    """Stands in for a `Corpus`: the documents of a run as they were staged."""

    def __init__(self, run: StagedRun) -> None:
        self.run = run
        self.skipped = run.manifest.skipped
        self.truncated = run.manifest.truncated

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for index in range(self.run.manifest.staged):
            yield from documents_of(self.run.prompts(index))


class Reused(Staged):
    """Stands in for a `Corpus`: the documents of a run in their order, each with the continuation that the run stored.
    `units`: of these independent units alone (`run.split.unit_of`); None: all documents. `by_target`: whether the target
    that scores them wrote them.
    """

    by_target = True

    def __init__(self, run: Run, units: frozenset[str] | None) -> None:
        super().__init__(run)
        self.run: Run = run
        self.units = units

    def __iter__(self) -> Iterator[Document]:
        """The documents, in order."""
        for shard in self.run.shards:
            for row in self.run.continuations(shard.index).to_pylist():
                if self.units is None or unit_of(row["cluster"], row["prompt_hash"]) in self.units:
                    document = document_of(row, row["continuation_ids"], row["finish"] == "length")
                    yield document if self.by_target else replace(document, on_policy=False)


DocumentSource = Corpus | Staged
