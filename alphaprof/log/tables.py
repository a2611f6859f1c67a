"""Tables of a run as Parquet files: how each is written, and rows of totals are read back."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphaprof.log.schema import Column, violations


def table_content(table: pa.Table, columns: Sequence[Column], shown: str = "a table") -> pa.Buffer:
    """The Parquet file of a table, after a check against the declaration of its columns."""
    _require_declared(table, columns, shown)
    # Acceptance columns are mostly 0 and 1: a dictionary is smaller than split bytes.
    split = (column for column in columns if not column.name.startswith("accept_"))
    floats = [column.name for column in split if pa.types.is_float32(column.type)]
    others = [column.name for column in columns if column.name not in floats and not pa.types.is_nested(column.type)]
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=others,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
    )
    return buffer.getvalue()


def totals_content(table: pa.Table, columns: Sequence[Column], shown: str) -> pa.Buffer:
    """The file of rows that are sorted by rule, a row group a rule, after a check against the declaration of its columns; no
    rows, no row group.
    """
    _require_declared(table, columns, shown)
    split = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    options = {
        "compression": "lz4",  # a third larger than zstd, and read in two thirds of the time
        "use_dictionary": [field.name for field in table.schema if field.name not in ("document", *split)],
        "write_statistics": ["rule"],  # of hundreds of columns they are half of what is read first
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") | {"document": "DELTA_BINARY_PACKED"},
        "write_page_checksum": True,
    }
    sizes = pc.run_end_encode(table["rule"].cast(pa.string()).combine_chunks()).run_ends.to_pylist()
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, table.schema, **options) as writer:
        for start, stop in itertools.pairwise([0, *sizes]):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)
    return buffer.getvalue()


def _require_declared(table: pa.Table, columns: Sequence[Column], shown: str) -> None:
    if problems := violations(table, columns):
        raise ValueError(f"{shown} contradicts the schema: {'; '.join(problems)}")  # a bug, not the user's fault


def rows_of(file: pq.ParquetFile, rules: Collection[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of a file of totals, of some rules and some columns (None: all). Each row group is of one rule, as its statistics
    say. Raises `KeyError` for another file.
    """
    place = file.metadata.schema.names.index("rule")
    held = [file.metadata.row_group(index).column(place).statistics for index in range(file.metadata.num_row_groups)]
    if not all(rule and rule.has_min_max and rule.min == rule.max for rule in held):
        raise KeyError("its rows are not grouped by rule, as alphaprof writes them")
    groups = [index for index, rule in enumerate(held) if rules is None or rule.min in rules]
    table = file.read_row_groups(groups, columns=columns)
    return table if columns is None else table.select(columns)


def of_rule(table: pa.Table, rule: str) -> pa.Table:
    """The rows of one rule: often all of them, as dictionaries tell without a look at the rows."""
    if all(chunk.dictionary.to_pylist() == [rule] for chunk in table["rule"].chunks):
        return table
    return table.filter(pc.equal(table["rule"].cast(pa.string()), rule))
