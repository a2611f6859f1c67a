"""`alphaprof.open`: a run's tables and its report in Python."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaprof.log.manifest import Manifest
from alphaprof.log.store import Run

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from alphaprof.report.model import Report


class OpenedRun:
    """A run directory, for reading. Tables are those of docs/columns.md; only complete shards are in them.

    `columns` and `filters` are pushed down: what they leave out is not read. Filters are those of `pyarrow.parquet`: a list
    of (column, operator, value), all of which must hold, like [("draft", "==", "small"), ("target_margin", "<", 0.1)].
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._run = Run.open(Path(path))

    @property
    def path(self) -> Path:
        """The directory."""
        return self._run.path

    @property
    def manifest(self) -> Manifest:
        """What was run: models, profile, versions, hardware."""
        return self._run.manifest

    @property
    def drafts(self) -> list[str]:
        """Names of the drafts."""
        return list(self._run.manifest.drafts)

    def positions(self, columns: Sequence[str] | None = None, filters: list[Any] | None = None) -> pd.DataFrame:
        """The position log, a row a position and draft, with the column `draft`."""
        frame: pd.DataFrame = self.positions_arrow(columns, filters).to_pandas()
        return frame

    def positions_arrow(self, columns: Sequence[str] | None = None, filters: list[Any] | None = None) -> pa.Table:
        """The position log as an Arrow table."""
        self._run.require_positions()
        return self._read("positions", columns, filters)

    def totals(self, columns: Sequence[str] | None = None, filters: list[Any] | None = None) -> pd.DataFrame:
        """Totals, a row a document, rule and draft: tokens, accepted, and rounds for every gamma."""
        frame: pd.DataFrame = self._read("totals", columns, filters).to_pandas()
        return frame

    def documents(self) -> pd.DataFrame:
        """The documents, a row each."""
        frame: pd.DataFrame = self._run.documents().to_pandas()
        return frame

    def report(self, rules: Sequence[str] | None = None, whole_log: bool = False) -> Report:
        """What `alphaprof report` says, as a value; `rules`: others than the profile's, like additive:0.2; `whole_log`: read
        all of a large position log, not a part of its shards.
        """
        from alphaprof.analysis.rule_names import parse_rule
        from alphaprof.report.build import build_report

        return build_report(self._run, rules=[parse_rule(rule).id for rule in rules] if rules else None, whole_log=whole_log)

    def _parts(self, table: str, draft: str) -> list[Path]:
        if table == "totals":
            return [part.path for part in self._run.totals_parts(draft)]
        return [self._run.part(table, shard.index, draft) for shard in self._run.shards]

    def _read(self, table: str, columns: Sequence[str] | None, filters: list[Any] | None) -> pa.Table:
        import pyarrow as pa
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        parts = [path for draft in self.drafts for path in self._parts(table, draft)]
        draft = pa.field("draft", pa.dictionary(pa.int32(), pa.string()))
        partitioning = ds.partitioning(pa.schema([draft]), flavor="hive", dictionaries={"draft": pa.array(self.drafts)})
        files = [str(part) for part in parts]
        data = ds.dataset(files, format="parquet", partitioning=partitioning, partition_base_dir=str(self.path / table))
        expression = pq.filters_to_expression(filters) if filters else None
        return data.to_table(columns=list(columns) if columns is not None else None, filter=expression)
