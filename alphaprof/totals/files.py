"""The totals of a run: worked out shard by shard on all cores, written as few files, and read back or worked out again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import pyarrow as pa

from alphaprof.errors import OptionInvalid, RunUnreadable
from alphaprof.log.files import TotalsPart, of_rule, ranges
from alphaprof.log.schema import arrow_schema
from alphaprof.log.store import Run
from alphaprof.rules import rules_of
from alphaprof.totals.count import Counts, TotalsRequest, columns_of, counts, table_of

DOCUMENTS = ("document", "continuation_tokens", "max_new_tokens", "temperature", "on_policy")
Source = Callable[[], pa.Table]
Made = TypeVar("Made")


@dataclass(frozen=True)
class PartRequest:
    """Which totals of a draft: those of shards from the first to the last, all columns (None) or some."""

    first: int
    last: int
    columns: Sequence[str] | None = None


def _compute(run: Run, draft: str, index: int, request: TotalsRequest) -> Counts:
    """Totals of one shard, from its position log."""
    manifest = run.manifest
    positions = run.positions(draft, index, [*columns_of(request.rules, request.flavour), "phase"])
    documents = run.continuations(index, DOCUMENTS)
    return counts(positions, documents, (manifest.target, manifest.drafts[draft]), request)


def _sources(pool: Executor, held: DraftTotals, wanted: PartRequest, request: TotalsRequest) -> list[Source]:
    """What gives the rows of some shards, in their order: files that hold them, and counts that `pool` works out by now."""
    run = held.run
    parts = held.parts if request.flavour == "engine" else []
    stored = [part for part in parts if wanted.first <= part.first and part.last <= wanted.last]
    covered = {index for part in stored for index in range(part.first, part.last + 1)}
    known = [rule for rule in request.rules if rule in run.rules]
    unknown = [rule for rule in request.rules if rule not in run.rules]
    sources: list[tuple[int, Source]] = [(part.first, partial(run.totals, part, known, wanted.columns)) for part in stored]
    shards = range(wanted.first, wanted.last + 1)
    for stored_too, group in itertools.groupby(shards, covered.__contains__):
        if lacking := unknown if stored_too else request.rules:
            asked, indices = dataclasses.replace(request, rules=lacking), list(group)
            waited = [pool.submit(_compute, run, held.draft, index, asked) for index in indices]
            sources.append((indices[0], partial(_awaited, waited, asked.gammas, wanted.columns)))
    return [source for _, source in sorted(sources, key=lambda item: item[0])]


def _awaited(waited: list[Future[Counts]], gammas: Sequence[int], columns: Sequence[str] | None) -> pa.Table:
    table = table_of([one.result() for one in waited], gammas)
    return table if columns is None else table.select(list(columns))


@contextlib.contextmanager
def _threads() -> Iterator[Executor]:
    """A thread a core. What has not begun when an error ends the block is left."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def write_totals(run: Run) -> None:
    """Compute and write the totals that complete shards lack or that are damaged, and join those of shards that were written
    one by one, while the run went on: see `log.files.ranges`.
    """
    request, before = TotalsRequest(run.rules, run.gammas), run.manifest.files
    ahead: deque[tuple[DraftTotals, PartRequest, list[Source]]] = deque()
    with _threads() as pool:
        for draft in run.manifest.drafts:
            held = DraftTotals(run, draft)
            for first, last in ranges(run.shards, run.manifest.status == "complete"):
                if not held.stores(first, last):
                    wanted = PartRequest(first, last)
                    ahead.append((held, wanted, _sources(pool, held, wanted, request)))
                if len(ahead) > 1:  # one is written while the next one is worked out
                    _write(*ahead.popleft())
        while ahead:
            _write(*ahead.popleft())
    if run.manifest.files is not before:
        run.write_manifest(run.manifest)
    run.remove_covered()


def _write(held: DraftTotals, wanted: PartRequest, sources: Sequence[Source]) -> None:
    tables = [source() for source in sources]
    if len(tables) > 1:
        tables = [of_rule(table, rule) for rule in held.run.rules for table in tables]
    held.run.write_totals(pa.concat_tables(tables), (wanted.first, wanted.last), held.draft)


@dataclass(frozen=True)
class DraftTotals:
    """The totals of a draft, to be read several times: what tells of their files is read once, as long as they are there."""

    run: Run
    draft: str

    @cached_property
    def parts(self) -> list[TotalsPart]:
        """The files that hold them."""
        return self.run.totals_parts(self.draft)

    def stores(self, first: int, last: int) -> bool:
        """Whether there is a file of these shards."""
        return any((part.first, part.last) == (first, last) for part in self.parts)

    def read(self, request: TotalsRequest, columns: Sequence[str] | None, use: Callable[[Iterator[pa.Table]], Made]) -> Made:
        """What `use` makes of `tables`."""
        try:
            return use(self.tables(request, columns))
        except RunUnreadable:
            if all(part.path.exists() for part in self.parts):
                raise
            # A process that goes on with the run has joined some of them meanwhile.
            manifest = dataclasses.replace(self.run.manifest, files=Run.open(self.run.path).manifest.files)
            return use(DraftTotals(Run(self.run.path, manifest), self.draft).tables(request, columns))

    def tables(self, request: TotalsRequest, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """What `read_totals` tells of, one table of documents after the other; the next one is read meanwhile."""
        run = self.run
        if unknown := [rule.id for rule in rules_of(list(request.rules)) if rule.rule.logged and rule.id not in run.rules]:
            raise OptionInvalid(
                f"the log of {run.path} is not enough for {', '.join(unknown)}, which needs whole distributions",
                "name the rule in the profile's rules and profile again; --reuse-continuations keeps the text",
            )
        schema = _schema(run, columns)
        with _threads() as pool:
            coming: deque[Future[pa.Table]] = deque()
            for source in _sources(pool, self, PartRequest(0, len(run.shards) - 1, schema.names), request):
                coming.append(pool.submit(source))  # behind all that it waits for
                if len(coming) > 1:
                    yield _as(schema, coming.popleft().result())
            for last in coming:
                yield _as(schema, last.result())


def read_totals(run: Run, draft: str, request: TotalsRequest, columns: Sequence[str] | None = None) -> pa.Table:
    """Totals of all complete shards for the rules that `request` names: all columns, or some; each rule's documents ascend.

    What is not stored is computed from the log and not written: of an interrupted run, in a flavour other than `engine`, and
    of a rule that the profile did not ask for. Raises `OptionInvalid` for a rule that the log cannot tell of.
    """
    tables = DraftTotals(run, draft).read(request, columns, list)
    return pa.concat_tables(tables) if tables else _schema(run, columns).empty_table()


def _as(schema: pa.Schema, table: pa.Table) -> pa.Table:
    return table if table.schema.equals(schema) else table.cast(schema)


def _schema(run: Run, columns: Sequence[str] | None) -> pa.Schema:
    """The columns of totals, all of them or some."""
    return arrow_schema(column for column in run.totals_columns if columns is None or column.name in columns)
