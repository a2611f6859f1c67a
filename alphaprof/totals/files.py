"""The totals of a run: worked out shard by shard on all cores, written as few files, and read back or worked out again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TypeVar

import pyarrow as pa

from alphaprof.errors import OptionInvalid, RunUnreadable
from alphaprof.log.files import TotalsPart, ranges
from alphaprof.log.run import Run
from alphaprof.log.schema import Column, arrow_schema, hybrid_totals_columns
from alphaprof.log.writer import RunWriter
from alphaprof.rules import rules_of
from alphaprof.totals.count import SHAPED, Counts, TotalsRequest, columns_of, counts, needs_log, table_of
from alphaprof.totals.hybrid import hybrid_positions

Source = Callable[[], pa.Table]
Made = TypeVar("Made")
POSITIONS = 2**17  # that are counted at once, in arrays of a MiB each; more of them are no faster


@contextlib.contextmanager
def _threads() -> Iterator[Executor]:
    """Yield an executor of one thread more than there are cores: one usually waits for the interpreter. An error that ends
    the block cancels what has not begun.
    """
    threads = ThreadPoolExecutor((os.cpu_count() or 1) + 1)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def join_totals(run: RunWriter) -> None:
    """Write the totals of complete shards as few files, see `log.files.ranges`: of those that have theirs joined, of others
    from the position log. The next manifest names them.
    """
    request = TotalsRequest(run.rules, run.gammas)
    coming: deque[Future[None]] = deque()

    def write(draft: str, shards: tuple[int, int], tables: Sequence[Future[pa.Table]]) -> None:
        run.write_totals([table.result() for table in tables], shards, draft)

    with _threads() as threads:
        for draft in run.manifest.drafts:
            totals = DraftTotals(run, draft)
            stored = {(part.first, part.last) for part in totals.parts}
            for shards in ranges(run.shards):
                if shards in stored:
                    continue
                if len(coming) > 1:  # one is written while the next one is worked out
                    coming.popleft().result()
                tables = [threads.submit(source) for source in totals.sources(threads, shards, request)]
                coming.append(threads.submit(write, draft, shards, tables))  # after all that it waits for
        for last in coming:
            last.result()


class DraftTotals:
    """The totals of a draft, to be read several times: what tells of their files is read once, as long as they are there."""

    def __init__(self, run: Run, draft: str) -> None:
        self.run, self.draft = run, draft

    @cached_property
    def parts(self) -> list[TotalsPart]:
        """The files that hold them."""
        return self.run.totals_parts(self.draft)

    def read(self, request: TotalsRequest, columns: Sequence[str] | None, use: Callable[[Iterator[pa.Table]], Made]) -> Made:
        """Return what `use` makes of `tables`."""
        try:
            return use(self.tables(request, columns))
        except RunUnreadable:
            there = self.run.storage.names(f"totals/draft={self.draft}")
            if all(part.name in there for part in self.parts):
                raise
            # A process that has finished the run has joined some of them meanwhile.
            manifest = dataclasses.replace(self.run.manifest, files=Run.open(self.run.storage).manifest.files)
            return use(DraftTotals(self.run.view(manifest), self.draft).tables(request, columns))

    def tables(self, request: TotalsRequest, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield what `read_totals` joins, one table of documents after the other; the next one is read meanwhile."""
        run = self.run
        whole = [rule for rule in rules_of(request.rules) if needs_log(rule, run.manifest.drafts[self.draft])]
        if unknown := [rule.id for rule in whole if rule.id not in run.rules]:
            raise OptionInvalid(
                f"the log of {run.path} is not enough for {', '.join(unknown)}, which needs whole distributions",
                "name the rule in the profile's rules and profile again; --reuse-continuations keeps the text",
            )
        schema = arrow_schema(_columns(run, self.draft, columns))
        with _threads() as threads:
            coming: deque[Future[pa.Table]] = deque()
            for source in self.sources(threads, (0, len(run.shards) - 1), request, schema.names):
                coming.append(threads.submit(source))  # after all that it waits for
                if len(coming) > 1:
                    yield coming.popleft().result().cast(schema)
            for last in coming:
                yield last.result().cast(schema)

    def sources(
        self, threads: Executor, shards: tuple[int, int], request: TotalsRequest, columns: Sequence[str] | None = None
    ) -> list[Source]:
        """Return what gives the rows of shards, from the first to the last, in their order: files that hold them, and counts
        that `threads` begins to work out. All columns, or some.
        """
        run, (first, last) = self.run, shards
        parts = self.parts if request.stored else []
        stored = [part for part in parts if first <= part.first and part.last <= last]
        covered = {index for part in stored for index in range(part.first, part.last + 1)}
        known = [rule for rule in request.rules if rule in run.rules]
        unknown = [rule for rule in request.rules if rule not in run.rules]
        sources: list[tuple[int, Source]] = [(part.first, partial(run.totals, part, known, columns)) for part in stored]
        for stored_too, group in itertools.groupby(range(first, last + 1), covered.__contains__):
            if lacking := unknown if stored_too else request.rules:
                asked, indices = dataclasses.replace(request, rules=lacking), list(group)
                coming = [threads.submit(_compute, run, self.draft, several, asked) for several in _together(run, indices)]
                sources.append((indices[0], partial(_table, coming, _columns(run, self.draft, columns))))
        return [source for _, source in sorted(sources, key=lambda place: place[0])]


def _together(run: Run, indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield shards, in their order, of `POSITIONS` together: counting small ones costs mostly the interpreter's time."""
    several, positions = list[int](), 0
    for index in indices:
        several.append(index)
        positions += run.shards[index].positions
        if positions >= POSITIONS or index == indices[-1]:
            yield several
            several, positions = [], 0


def _compute(run: Run, draft: str, indices: Sequence[int], request: TotalsRequest) -> Counts:
    """Return totals of some shards, from their position log."""
    models = run.manifest.target, run.manifest.drafts[draft]
    columns, hybrid = [*columns_of(request, models[1]), "phase"], models[1].hybrid
    positions = pa.concat_tables(
        run.positions(draft, index, columns) if hybrid is None else hybrid_positions(run, hybrid, index, columns)
        for index in indices
    )
    return counts(positions, pa.concat_tables(run.continuations(index, SHAPED) for index in indices), models, request)


def shard_totals(run: Run, draft: str, positions: pa.Table, documents: pa.Table) -> pa.Table:
    """Return totals of one shard of a draft's log that is not written yet, of all rules and speculation lengths of the
    run.
    """
    request, models = TotalsRequest(run.rules, run.gammas), (run.manifest.target, run.manifest.drafts[draft])
    return table_of([counts(positions, documents, models, request)], run.totals_columns)


def _table(coming: list[Future[Counts]], columns: Sequence[Column]) -> pa.Table:
    return table_of([one.result() for one in coming], columns)


def read_totals(run: Run, draft: str, request: TotalsRequest, columns: Sequence[str] | None = None) -> pa.Table:
    """Return totals of all complete shards for the rules that `request` names: all columns, or some; each rule's documents
    ascend.

    What is not stored is computed from the log and not written: of an interrupted run, at a p_min, and of a
    rule that the profile did not ask for. Raises `OptionInvalid` for a rule that the log cannot tell of.
    """
    tables = DraftTotals(run, draft).read(request, columns, list)
    return pa.concat_tables(tables) if tables else arrow_schema(_columns(run, draft, columns)).empty_table()


def _columns(run: Run, draft: str, names: Sequence[str] | None) -> list[Column]:
    """Return the columns of a draft's totals, all of them or some."""
    every = hybrid_totals_columns(run.gammas) if run.manifest.drafts[draft].hybrid else run.totals_columns
    return [column for column in every if names is None or column.name in names]
