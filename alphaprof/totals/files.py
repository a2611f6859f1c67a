"""The totals of a run: counted from its log on all cores, written as a file a draft, and read back or counted again."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphaprof.errors import OptionInvalid
from alphaprof.rules import rules_of
from alphaprof.run.parquet import blocks_of
from alphaprof.run.reader import COPY, Run
from alphaprof.run.schema import Column, arrow_schema, hybrid_totals_columns
from alphaprof.run.storage import reading
from alphaprof.run.writer import RunWriter
from alphaprof.stats.grouping import filled
from alphaprof.totals.count import SHAPED, Counts, TotalsRequest, columns_of, counts, needs_log, table_of
from alphaprof.totals.hybrid import hybrid_positions

ENOUGH = 32_768  # documents of a row group, if there are as many
LOOKAHEAD = 2  # pieces that are counted ahead for each core
POSITIONS = 2**17  # counted at once, in arrays of a MiB each: more are no faster, fewer cost the interpreter's time


def write_totals(run: RunWriter) -> None:
    """Count the totals of all drafts from the position log, and write them. The next manifest names them."""
    request = TotalsRequest(run.rules, run.gammas)
    for draft in run.manifest.drafts:
        tables = counted(run, draft, request, run.totals_columns)
        run.write_totals(draft, filled(((table, len(pc.unique(table["document"]))) for table in tables), ENOUGH))


def counted(run: Run, draft: str, request: TotalsRequest, columns: Sequence[Column]) -> Iterator[pa.Table]:
    """Yield totals that are counted from the position log on all cores, one table of documents after the other."""
    threads, coming = ThreadPoolExecutor((os.cpu_count() or 1) + 1), deque[Future[Counts]]()
    try:
        for several in filled(((shard.index, shard.positions) for shard in run.shards), POSITIONS):
            coming.append(threads.submit(_compute, run, draft, several, request))
            if len(coming) > LOOKAHEAD * (os.cpu_count() or 1):
                yield table_of(coming.popleft().result(), columns)
        for last in coming:
            yield table_of(last.result(), columns)
    finally:
        threads.shutdown(cancel_futures=True)


class DraftTotals:
    """The totals of a draft, to be read several times: their file is fetched once."""

    def __init__(self, run: Run, draft: str) -> None:
        self.run, self.draft = run, draft

    @cached_property
    def stored(self) -> pq.ParquetFile | None:
        """The file that holds them; None: they are counted from the log."""
        return self.run.totals(self.draft) if self.run.has_totals(self.draft) else None

    def require(self, rules: Sequence[str]) -> None:
        """Raise `OptionInvalid` for a rule that the log cannot tell of, `NoPositionLog` for one that an import lacks."""
        run = self.run
        whole = [rule for rule in rules_of(rules) if needs_log(rule, run.manifest.drafts[self.draft])]
        if unknown := [rule.id for rule in whole if rule.id not in run.rules]:
            raise OptionInvalid(
                f"the log of {run.path} is not enough for {', '.join(unknown)}, which needs whole distributions",
                "name the rule in the profile's rules and profile again; --reuse-continuations keeps the text",
            )
        if not set(rules) <= set(run.rules):
            run.require_positions()

    def tables(self, request: TotalsRequest, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield what `read_totals` joins, one table of documents after the other."""
        run = self.run
        self.require(request.rules)
        declared = _columns(run, self.draft, columns)
        schema, file = arrow_schema(declared), self.stored if request.stored else None
        known = [rule for rule in request.rules if file is not None and rule in run.rules]
        if file is not None and known:
            with reading(f"{run.path}/totals", COPY):
                yield from (table.cast(schema) for table in blocks_of(file, known, schema.names))
        if lacking := [rule for rule in request.rules if rule not in known]:
            yield from counted(run, self.draft, dataclasses.replace(request, rules=lacking), declared)

    def read(self, request: TotalsRequest, columns: Sequence[str] | None = None) -> pa.Table:
        """Return what `read_totals` does, of some columns or all."""
        tables = list(self.tables(request, columns))
        return pa.concat_tables(tables) if tables else arrow_schema(_columns(self.run, self.draft, columns)).empty_table()


def _compute(run: Run, draft: str, indices: Sequence[int], request: TotalsRequest) -> Counts:
    """Return totals of some shards, from their position log."""
    models = run.manifest.target, run.manifest.drafts[draft]
    columns, hybrid = columns_of(request, models[1]), models[1].hybrid
    positions = pa.concat_tables(
        run.positions(draft, index, columns) if hybrid is None else hybrid_positions(run, hybrid, index, columns)
        for index in indices
    )
    return counts(positions, pa.concat_tables(run.continuations(index, SHAPED) for index in indices), models, request)


def read_totals(run: Run, draft: str, request: TotalsRequest, columns: Sequence[str] | None = None) -> pa.Table:
    """Return totals of all complete shards for the rules that `request` names: all columns, or some; each rule's whole
    documents ascend.

    What is not stored is computed from the log and not written: of an interrupted run, at a p_min, and of a rule that the
    profile did not ask for. Raises `OptionInvalid` for a rule that the log cannot tell of.
    """
    return DraftTotals(run, draft).read(request, columns)


def _columns(run: Run, draft: str, names: Sequence[str] | None) -> list[Column]:
    """Return the columns of a draft's totals, all of them or some."""
    every = hybrid_totals_columns(run.gammas) if run.manifest.drafts[draft].hybrid else run.totals_columns
    return [column for column in every if names is None or column.name in names]
