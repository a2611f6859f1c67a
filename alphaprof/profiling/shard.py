"""One shard of a run: its texts, and its rows. Values in, tables out: the run's one writer writes them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from alphaprof.profiling.engine.texts import TextWriter
from alphaprof.profiling.models.draft import Arrays, Draft
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.scoring.scorer import Scorer, by_document, position_table
from alphaprof.profiling.texts.continuations import (
    Continuation,
    continuation_table,
    continuations_of,
    digest,
    generate,
    generation_batches,
    given,
    halving,
    scoring_batches,
)
from alphaprof.profiling.texts.corpus import Document, DocumentSource
from alphaprof.profiling.texts.spans import kinds_of, spans
from alphaprof.run.manifest import DraftFacts, Shard
from alphaprof.run.writer import RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

# Called with steps and positions that are done (see `Progress.advance`).
Advance = Callable[[float, int], None]


class Progress(Protocol):
    """What a run reports while it works; the command line draws it on stderr."""

    def say(self, message: str) -> None:
        """Say in a line what happens now."""

    def warn(self, code: str, message: str, remedy: str) -> None:
        """Something that the user should know and can change."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """A new stage begins; `total` in `unit`, None if it is unknown."""

    def advance(self, steps: float, positions: int = 0) -> None:
        """Part of the stage is done."""

    def relabel(self, label: str) -> None:
        """The stage is called otherwise from now on: its label holds a figure."""


@dataclass(frozen=True)
class Loaded:
    """A profile with its models and its documents."""

    options: ProfileOptions
    tokenizer: PreTrainedTokenizerBase
    target: Model
    drafts: Sequence[Draft]
    documents: DocumentSource
    scorer: Scorer


@dataclass(frozen=True)
class Plan(Loaded):
    """A loaded profile with the run that is made of it."""

    run: RunWriter


@dataclass(frozen=True)
class ShardTexts:
    """What the texts step returns of a shard, in `seconds`."""

    shard: Shard
    texts: pa.Table
    seconds: float


@dataclass(frozen=True)
class ShardRows:
    """What the rows step returns of a shard: position logs by draft, in `seconds`."""

    shard: Shard
    positions: dict[str, pa.Table]
    seconds: float


def write_shard(
    loaded: Loaded | None,
    index: int,
    documents: Sequence[Document],
    advance: Advance,
    writer: TextWriter | None,
    eos: Sequence[int],
    texts: dict[int, Continuation] | None = None,
) -> ShardTexts:
    """Return the continuations of a shard's documents: those that are given, and others by the `writer`'s engine or by the
    target. `loaded`: None if the target writes none of them. `texts`: those by document that are written already, to which
    each batch is added, and none of the shard's own in the end.
    """
    began, halved = time.monotonic(), 0
    texts = {} if texts is None else texts
    texts |= {item.document.document: item for item in given(documents, eos)}
    lacking = [document for document in documents if document.document not in texts]
    advance(len(documents) - len(lacking), 0)
    if writer is not None:
        for item in writer.write([document for document in lacking if writer.writes(document)]):
            texts[item.document.document] = item
            advance(1, 0)
    if loaded is not None:
        target, width = loaded.target, loaded.scorer.width
        mine = [document for document in documents if writer is None or not writer.writes(document)]
        for batch in generation_batches(mine, loaded.options.padded_tokens):
            if all(document.document in texts for document in batch):
                continue
            generated, times = halving(lambda items: generate(target, items, width), batch, _name, [target])
            texts |= {item.document.document: item for item in generated}
            halved += times
            advance(len(batch), 0)
    written = [texts.pop(document.document) for document in documents]
    shard = Shard(index, len(documents), sum(len(item.ids) for item in written), digest(documents), halved)
    return ShardTexts(shard, continuation_table(written), time.monotonic() - began)


def score_shard(
    loaded: Loaded, drafts: Mapping[str, DraftFacts], shard: Shard, texts: pa.Table, advance: Advance
) -> ShardRows:
    """Return the position logs of a shard's texts, by drafts with these facts. `advance`: called after each batch (see
    `Progress.advance`).
    """
    began = time.monotonic()
    continuations = continuations_of(texts)
    scored: dict[str, dict[int, Arrays]] = {draft.name: {} for draft in loaded.drafts}
    halved, models = shard.halved_batches, [loaded.target, *(model for each in loaded.drafts for model in each.models)]
    for batch in scoring_batches(continuations, loaded.options.padded_tokens):
        parts, times = halving(lambda items: [(items, loaded.scorer.score(items))], batch, _name, models)
        for items, columns in parts:
            for draft, arrays in columns.items():
                scored[draft] |= by_document(items, arrays)
        halved += times
        advance(len(batch), sum(len(item.ids) for item in batch))
    words, named = loaded.tokenizer, None
    if (kinds := kinds_of(loaded.options, words)) is not None:
        named = [spans(kinds, words, item.document.prompt, item.ids, item.finish == "eos") for item in continuations]
    held, positions = loaded.scorer.extras.log_rules(loaded.options.rules), dict[str, pa.Table]()
    for name, found in scored.items():
        can = drafts[name]
        flags = {"has_distribution": can.has_distribution, "starts_matter": can.starts_matter}
        positions[name] = position_table(continuations, found, held.of(can), name, named, **flags)
    return ShardRows(dataclasses.replace(shard, halved_batches=halved), positions, time.monotonic() - began)


def _name(item: Document | Continuation) -> str:
    document = item.document if isinstance(item, Continuation) else item
    return f"document {document.document} ({document.domain}, {len(document.prompt)} prompt tokens)"
