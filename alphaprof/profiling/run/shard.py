"""One shard of a run: generate and score it, then write it, in a thread of its own, and last the commit that names it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from alphaprof.errors import OutOfMemory
from alphaprof.log.manifest import Shard
from alphaprof.log.writer import RunWriter
from alphaprof.profiling.engine.texts import TextWriter
from alphaprof.profiling.models.draft import Arrays, Draft
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.scoring.scorer import Scorer, by_document, position_table
from alphaprof.profiling.texts.continuations import (
    Continuation,
    continuation_table,
    digest,
    fed,
    generate,
    generation_batches,
    given,
    halving,
    scoring_batches,
    thinking,
)
from alphaprof.profiling.texts.corpus import Document, DocumentSource
from alphaprof.totals.files import shard_totals
from alphaprof.totals.replay import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alphaprof.config.profile import ProfileOptions

# Called with steps and positions that are done (see `Progress.advance`).
Advance = Callable[[float, int], None]
Work = Callable[[], None]
WAITING = 1  # pieces that may wait while one is written: what is measured must fit into memory


class Progress(Protocol):
    """What a run reports while it works; the command line draws it on stderr."""

    def say(self, message: str) -> None:
        """Say in a line what happens now."""

    def warn(self, code: str, message: str, remedy: str) -> None:
        """Something that the user should know and can change."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """A new stage begins; `total` in `unit`, None if it is unknown."""

    def advance(self, steps: float, positions: int = 0) -> None:
        """Part of the stage is done; generating and scoring a document are half a step each."""


@dataclass(frozen=True)
class Loaded:
    """A profile with its models and its corpus; `writer`: an engine that writes some of the texts."""

    options: ProfileOptions
    tokenizer: PreTrainedTokenizerBase
    target: Model
    drafts: Sequence[Draft]
    documents: DocumentSource
    scorer: Scorer
    writer: TextWriter | None


@dataclass(frozen=True)
class Plan(Loaded):
    """A loaded profile with the run that is made of it."""

    run: RunWriter


def measure_shard(plan: Plan, index: int, documents: Sequence[Document], advance: Advance) -> Work:
    """Generate and score one shard. Return a function that writes the shard and its totals, for the writer's thread.
    `advance`: called after each batch (see `Progress.advance`).
    """
    began = time.monotonic()
    continuations, read, halved = _continuations(plan, documents, advance)
    scored: dict[str, dict[int, Arrays]] = {draft.name: {} for draft in plan.drafts}
    scored_tokens = np.zeros(2, dtype=np.int64)
    for batch in scoring_batches(continuations, plan.options.batch_tokens):
        parts, times = halving(lambda items: [(items, plan.scorer.score(items))], batch, _name)
        for items, columns in parts:
            for draft, arrays in columns.items():
                scored[draft] |= by_document(items, arrays)
        halved += times
        scored_tokens += fed([item.tokens - 1 for item in batch])
        advance(0.5 * len(batch), sum(len(item.ids) for item in batch))
    facts = Shard(
        index,
        len(documents),
        positions=sum(len(item.ids) for item in continuations),
        digest=digest(documents),
        halved_batches=halved,
        scored_tokens=int(scored_tokens[0]),
        scored_padding=int(scored_tokens[1]),
        prompt_tokens=int(read[0]),
        prompt_padding=int(read[1]),
    )
    markers, phases = plan.options.thinking, None
    if markers is not None:
        phases = [thinking(markers, plan.tokenizer, item.document.prompt, item.ids) for item in continuations]
    run, seconds = plan.run, time.monotonic() - began

    def write() -> None:
        texts, positions = continuation_table(continuations), dict[str, pa.Table]()
        for draft, arrays in scored.items():
            can = run.manifest.drafts[draft]
            flags = {"has_distribution": can.has_distribution, "starts_matter": can.starts_matter}
            positions[draft] = position_table(continuations, arrays, run.log_of(draft), draft, phases, **flags)
        totals = {draft: shard_totals(run, draft, table, texts) for draft, table in positions.items()}
        run.commit(facts, positions, texts, totals, seconds)

    return write


def _continuations(plan: Plan, documents: Sequence[Document], advance: Advance) -> tuple[list[Continuation], Ints, int]:
    """Return continuations in document order, the prompts that were `fed` for them, and how many batches were halved."""
    texts = given(documents, plan.target.eos)
    advance(0.5 * len(texts), 0)
    read, halved, mine = np.zeros(2, dtype=np.int64), 0, documents
    if plan.writer is not None:
        theirs = [document for document in documents if plan.writer.writes(document)]
        texts += plan.writer.write(theirs, lambda: advance(0.5, 0))
        mine = [document for document in documents if not plan.writer.writes(document)]
    for batch in generation_batches(mine, plan.options.batch_tokens):
        generated, times = halving(lambda items: generate(plan.target, items, plan.scorer.width), batch, _name)
        texts += generated
        halved += times
        read += fed([len(document.prompt) for document in batch])
        advance(0.5 * len(batch), 0)
    return sorted(texts, key=lambda item: item.document.document), read, halved


def _name(item: Document | Continuation) -> str:
    document = item.document if isinstance(item, Continuation) else item
    return f"document {document.document} ({document.domain}, {len(document.prompt)} prompt tokens)"


class BackgroundWriter:
    """Does pieces of work in the order in which they come, one at a time, in a thread of its own; a context manager.

    Where one fails, those after it are not done, and the next call raises the error. Work that was handed over before the
    block ended is done, even if the block ended with an error or a first Ctrl-C comes while it is awaited: it is measured
    already. Nobody else writes meanwhile. Where the block ended with another error, the writer's is a note to it.
    """

    def __init__(self) -> None:
        self._queue: Queue[Work | None] = Queue(WAITING)
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="writer", daemon=True)  # a second Ctrl-C does not wait for it

    def __enter__(self) -> BackgroundWriter:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end()
        except KeyboardInterrupt:
            if error is None:  # the first one: after an error of the block it may be the second, which waits for nothing
                self._end()
            raise
        if error is None:
            self.check()
        elif self._error is not None and self._error is not error:
            error.add_note(f"earlier measurements could not be written: {self._error}")

    def _end(self) -> None:
        """Have the thread end after what was handed over; a second time does no harm."""
        self._queue.put(None)
        self._thread.join()

    def put(self, work: Work) -> None:
        """Hand over a piece of work; waits while as much as may wait does. Raises what an earlier piece raised."""
        self.check()
        self._queue.put(work)

    def check(self) -> None:
        """Raise what a piece of work raised, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Return whether there was another piece of work; a method, so that nothing holds on to it while the next is
        awaited.
        """
        work = self._queue.get()
        try:
            if work is not None and self._error is None:
                work()
        except MemoryError as error:  # pyarrow's, too
            self._error = OutOfMemory(
                f"out of memory while writing results: {error}",
                "free memory, then --resume; or profile again with a lower shard_documents",
            )
        except BaseException as error:  # whatever it is ends the run, in the thread that runs it
            self._error = error
        finally:
            self._queue.task_done()
        return work is not None
