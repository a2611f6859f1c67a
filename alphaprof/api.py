"""`alphaprof.open`: a run's tables and its report in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaprof.errors import OptionInvalid, cut
from alphaprof.run.manifest import Manifest
from alphaprof.run.reader import Run
from alphaprof.run.schema import arrow_schema

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from alphaprof.report.build import RunReport


class OpenedRun:
    """A run directory, for reading. Tables are those of docs/columns.md, with complete shards only.

    A file is read whole, and compared with what was written; of drafts that `where` leaves out nothing is read. `where`:
    conditions that all must hold, a list of (column, operator, value) as in `pyarrow.parquet`: [("draft", "==", "small"),
    ("target_margin", "<", 0.1)].

    Raises errors of `alphaprof.errors` only: `OptionInvalid` for columns and conditions that a table does not have,
    `RunUnreadable` for missing or damaged files, `NoPositionLog` for an imported run, `ProfileInvalid` for a rule that does
    not exist.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._run = Run.open(str(path))

    @property
    def path(self) -> Path | str:
        """Return the directory, or the URI of one in an object store."""
        return self._run.path

    @property
    def manifest(self) -> Manifest:
        """Return what was run: models, profile, versions, hardware."""
        return self._run.manifest

    @property
    def drafts(self) -> list[str]:
        """Return the names of the drafts."""
        return list(self._run.manifest.drafts)

    def positions(self, columns: Sequence[str] | None = None, where: list[Any] | None = None) -> pd.DataFrame:
        """Return the position log: one row per position and draft, with the column `draft`."""
        frame: pd.DataFrame = self.positions_arrow(columns, where).to_pandas()
        return frame

    def positions_arrow(self, columns: Sequence[str] | None = None, where: list[Any] | None = None) -> pa.Table:
        """Return the position log as an Arrow table."""
        self._run.require_positions()
        return self._read("positions", columns, where)

    def totals(self, columns: Sequence[str] | None = None, where: list[Any] | None = None) -> pd.DataFrame:
        """Return totals, one row per document, rule and draft: tokens, accepted, and rounds for every gamma.

        Totals that are not stored, as of an interrupted run, are computed from the position log, which takes longer.
        """
        frame: pd.DataFrame = self._read("totals", columns, where).to_pandas()
        return frame

    def documents(self) -> pd.DataFrame:
        """Return the documents, one per row."""
        frame: pd.DataFrame = self._run.documents().to_pandas()
        return frame

    def report(self, rules: Sequence[str] | None = None, whole_log: bool = False, changes: Sequence[str] = ()) -> RunReport:
        """Return what `alphaprof report` shows: `answer`, `domains`, `drafts`, and `section(name)`. `rules`: other than the
        profile's, like additive:0.2; `whole_log`: read all of a large position log, not just part of its shards; `changes`
        of the question or the step times, as `--set` takes them: "decision.min_speedup=1.2".
        """
        from alphaprof.config.load import changed_question, known_rules
        from alphaprof.report.build import build_report

        named = known_rules([rules] if isinstance(rules, str) else list(rules), "rules") if rules else None
        config = changed_question(self._run.manifest.config, list(changes)) if changes else None
        return build_report(self._run, config, named, whole_log, changes)

    def _repr_markdown_(self) -> str:
        """Return the report's first screen as notebooks show it."""
        from alphaprof.report.formats.text import first_screen_lines

        return "\n".join(first_screen_lines(self.report()))

    def _read(self, table: str, columns: Sequence[str] | None, where: list[Any] | None) -> pa.Table:
        import pyarrow as pa

        columns = [columns] if isinstance(columns, str) else columns
        conditions = [each for each in where or () if isinstance(each, tuple | list) and len(each) == 3]
        flat = len(conditions) == len(where or ())
        of_drafts = [each for each in conditions if each[0] == "draft"] if flat else []
        named = None if columns is None or not flat else [*columns, *(each[0] for each in conditions)]
        found = []
        for place, draft in enumerate(self.drafts):
            name = pa.DictionaryArray.from_arrays(pa.array([place], pa.int32()), self.drafts)
            if of_drafts and not len(_scanned(table, pa.table({"draft": name}), None, of_drafts)):
                continue  # nothing of it is read
            for rows in self._tables(table, draft, named):
                codes = pa.repeat(pa.scalar(place, pa.int32()), len(rows))
                whole = rows.append_column("draft", pa.DictionaryArray.from_arrays(codes, self.drafts))
                found.append(_scanned(table, whole, columns, where))
        if not found:  # no file says what the columns are
            every = self._run.totals_columns if table == "totals" else self._run.log_rules.columns
            draft = pa.field("draft", pa.dictionary(pa.int32(), pa.string()))
            found.append(_scanned(table, arrow_schema(every).append(draft).empty_table(), columns, where))
        return pa.concat_tables(found, promote_options="default")

    def _tables(self, table: str, draft: str, names: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield the rows of a draft, file by file: all columns, or those with some names."""
        from alphaprof.totals.count import TotalsRequest
        from alphaprof.totals.files import DraftTotals

        run = self._run
        if table == "totals":
            yield from DraftTotals(run, draft).tables(TotalsRequest(run.rules, run.gammas), None)
        else:
            for shard in run.shards:
                yield run.positions(draft, shard.index, None if names is None else ["document", *names])


def _scanned(table: str, rows: pa.Table, columns: Sequence[str] | None, where: list[Any] | None) -> pa.Table:
    """Return some columns and rows. Raises `OptionInvalid` for columns and conditions that do not fit the table."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    try:
        expression = pq.filters_to_expression(list(where)) if where else None
        return ds.dataset(rows).scanner(columns=None if columns is None else list(columns), filter=expression).to_table()
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise OptionInvalid(
            f"`columns` or `where` do not fit the {table}: {cut(str(error).splitlines()[0])}",
            'docs/columns.md names the columns; `where` is a list like [("draft", "==", "small")]',
        ) from None
