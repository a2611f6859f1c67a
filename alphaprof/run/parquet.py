"""Tables of a run as Parquet files: how each is written, and rows of totals are read back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphaprof.run.schema import Column, arrow_schema, violations
from alphaprof.stats.grouping import grouped

Rows = tuple[int, int]  # the first one, and how many


def table_content(table: pa.Table, columns: Sequence[Column], shown: str = "a table") -> pa.Buffer:
    """Return the Parquet file of a table, after a check against the declaration of its columns."""
    _require_declared(table, columns, shown)
    # Acceptance columns are mostly 0 and 1: a dictionary is smaller than split bytes.
    split = (column for column in columns if not column.name.startswith("accept_"))
    floats = [column.name for column in split if column.type in (pa.float16(), pa.float32())]
    others = [column.name for column in columns if column.name not in floats and not pa.types.is_nested(column.type)]
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=others,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
    )
    return buffer.getvalue()


def totals_content(blocks: Iterable[Sequence[pa.Table]], columns: Sequence[Column], shown: str) -> pa.Buffer:
    """Return the file of the rows of blocks of documents, each of them several tables that are sorted by rule: a row group a
    block and rule, which holds their rows in this order, after a check against the declaration of its columns.
    """
    schema, buffer = arrow_schema(columns), pa.BufferOutputStream()
    split = [field.name for field in schema if pa.types.is_floating(field.type)]
    options = {
        "compression": "zstd",
        "use_dictionary": [field.name for field in schema if field.name not in ("document", *split)],
        "write_statistics": ["rule"],  # of hundreds of columns they are half of what is read first
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") | {"document": "DELTA_BINARY_PACKED"},
    }
    with pq.ParquetWriter(buffer, schema, **options) as writer:
        for tables in blocks:
            places = ((rule, (table, where)) for table in tables for rule, where in _rows_by_rule(table).items())
            for rule, found in grouped(places).items():  # one at a time: its rows are copies
                rows = pa.concat_tables(_of_rows(*part, rule) for part in found).combine_chunks()
                _require_declared(rows, columns, shown)
                writer.write_table(rows, row_group_size=len(rows))
    return buffer.getvalue()


def _require_declared(table: pa.Table, columns: Sequence[Column], shown: str) -> None:
    if problems := violations(table, columns):
        raise ValueError(f"{shown} contradicts the schema: {'; '.join(problems)}")  # a bug, not a user error


def blocks_of(file: pq.ParquetFile, rules: Collection[str], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a file of totals block by block: of some rules, all columns or some."""
    place = file.metadata.schema.names.index("rule")
    held = [file.metadata.row_group(index).column(place).statistics.min for index in range(file.metadata.num_row_groups)]
    size, names = len(set(held)), file.schema_arrow.names if columns is None else columns
    for start in range(0, len(held), size or 1):
        wanted = [index for index in range(start, start + size) if held[index] in rules]
        yield pa.concat_tables(file.read_row_group(index, names, use_threads=False) for index in wanted)


def _rows_by_rule(table: pa.Table) -> dict[str, Rows]:
    """Return where the rows of each rule begin, and how many there are: they follow each other."""
    found = dict[str, Rows]()
    if not len(table):
        return found
    ends = pc.run_end_encode(table["rule"].cast(pa.string()).combine_chunks())
    stops = ends.run_ends.to_pylist()
    for rule, start, stop in zip(ends.values.to_pylist(), [0, *stops], stops, strict=False):
        found[rule] = start, stop - start
    return found


def _of_rows(table: pa.Table, rows: Rows, rule: str) -> pa.Table:
    """Return the rows of a rule, whose name takes no room."""
    place, (start, length) = table.schema.get_field_index("rule"), rows
    alike = pa.DictionaryArray.from_arrays(np.zeros(length, dtype=np.int32), [rule])
    return table.slice(start, length).set_column(place, table.schema.field("rule"), alike)


def of_rule(table: pa.Table, rule: str) -> pa.Table:
    """Return the rows of one rule: often all of them, as dictionaries tell without a look at the rows."""
    if all(chunk.dictionary.to_pylist() == [rule] for chunk in table["rule"].chunks):
        return table
    return table.filter(pc.equal(table["rule"].cast(pa.string()), rule))
