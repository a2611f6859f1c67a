"""`alphaprof.open`: a run's tables and its report in Python."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaprof.errors import OptionInvalid, cut
from alphaprof.log.manifest import Manifest
from alphaprof.log.run import Run
from alphaprof.log.schema import arrow_schema
from alphaprof.log.storage import reading

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.dataset as ds

    from alphaprof.report.build import Report

AGAIN = "copy the run again, or profile again into a new directory"


class OpenedRun:
    """A run directory, for reading. Tables are those of docs/columns.md, with complete shards only.

    `columns` and `where` are pushed down: what they leave out is not read. `where`: conditions that all must hold, a list of
    (column, operator, value) as in `pyarrow.parquet`: [("draft", "==", "small"), ("target_margin", "<", 0.1)].

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

    def report(self, rules: Sequence[str] | None = None, whole_log: bool = False) -> Report:
        """Return what `alphaprof report` shows; `rules`: other than the profile's, like additive:0.2; `whole_log`: read all
        of a large position log, not just part of its shards.
        """
        from alphaprof.config.load import known_rules
        from alphaprof.report.build import build_report

        named = known_rules([rules] if isinstance(rules, str) else list(rules), "rules") if rules else None
        return build_report(self._run, rules=named, whole_log=whole_log)

    def _repr_html_(self) -> str:
        """Return the report's first screen as notebooks show it: without a script, and without an extra."""
        from alphaprof.render.html.page import first_screen_fragment

        return first_screen_fragment(self.report())

    def _read(self, table: str, columns: Sequence[str] | None, where: list[Any] | None) -> pa.Table:
        import pyarrow as pa
        import pyarrow.dataset as ds

        run = self._run
        if table == "totals":
            parts = [part for draft in self.drafts for part in run.totals_parts(draft)]
            whole = sum(part.last - part.first + 1 for part in parts) == len(run.shards) * len(self.drafts) > 0
            data = self._stored(table, [part.name for part in parts]) if whole else self._worked_out()
        else:
            data = self._stored(table, [run.logged(draft, shard.index) for draft in self.drafts for shard in run.shards])
            if not run.shards:  # no file says what the columns are
                declared = pa.schema(arrow_schema(run.log_rules.columns))
                data = ds.dataset(pa.unify_schemas([declared, data.schema]).empty_table())
        scanner = _scanner(table, data, [columns] if isinstance(columns, str) else columns, where)
        with reading(f"{self.path}/{table}", AGAIN):
            return scanner.to_table()

    def _stored(self, table: str, names: Sequence[str]) -> ds.Dataset:
        """Return a table of files whose folders name the drafts."""
        import pyarrow as pa
        import pyarrow.dataset as ds

        draft = pa.field("draft", pa.dictionary(pa.int32(), pa.string()))
        partitioning = ds.partitioning(pa.schema([draft]), flavor="hive", dictionaries={"draft": pa.array(self.drafts)})
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = ds.ParquetFileFormat(default_fragment_scan_options=options)
        files, here = self._run.storage.filesystem, {"partitioning": partitioning, "partition_base_dir": table}
        with reading(f"{self.path}/{table}", AGAIN):
            return ds.dataset(list(names), format=parquet, filesystem=files, **here)

    def _worked_out(self) -> ds.Dataset:
        """Return the totals of all drafts; those that are not stored come from the position log."""
        import pyarrow as pa
        import pyarrow.dataset as ds

        from alphaprof.totals.count import TotalsRequest
        from alphaprof.totals.files import read_totals

        request, tables = TotalsRequest(self._run.rules, self._run.gammas), []
        for number, name in enumerate(self.drafts):
            table = read_totals(self._run, name, request)
            codes = pa.repeat(pa.scalar(number, pa.int32()), len(table))
            tables.append(table.append_column("draft", pa.DictionaryArray.from_arrays(codes, self.drafts)))
        return ds.dataset(pa.concat_tables(tables))


def _scanner(table: str, data: ds.Dataset, columns: Sequence[str] | None, where: list[Any] | None) -> ds.Scanner:
    """Return a scanner of some columns and rows. Raises `OptionInvalid` for columns and conditions that do not fit it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        expression = pq.filters_to_expression(list(where)) if where else None
        return data.scanner(columns=None if columns is None else list(columns), filter=expression)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise OptionInvalid(
            f"`columns` or `where` do not fit the {table}: {cut(str(error).splitlines()[0])}",
            'docs/columns.md names the columns; `where` is a list like [("draft", "==", "small")]',
        ) from None
