"""Tables of a run as Parquet files: how each is written, and rows of totals are read back."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alphaprof.log.schema import Column, violations

ALIKE = b"alike"  # in a file's metadata: by rule, places of columns that hold the same bytes, [column, earlier one]
Span = tuple[int, int]  # first row, number of rows


def table_content(table: pa.Table, columns: Sequence[Column], shown: str = "a table") -> pa.Buffer:
    """Return the Parquet file of a table, after a check against the declaration of its columns."""
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


def totals_content(tables: Sequence[pa.Table], columns: Sequence[Column], shown: str) -> pa.Buffer:
    """Return the file of the rows of some tables, each of them sorted by rule: a row group a rule, which holds their rows in
    this order, after a check against the declaration of its columns; no rows, no row group.

    If every round drafts gamma tokens, a third of the columns holds what another one holds: the footer says which, and
    readers need one of them.
    """
    schema, spans = tables[0].schema, dict[str, list[tuple[pa.Table, Span]]]()
    split = [field.name for field in schema if pa.types.is_floating(field.type)]
    options = {
        "compression": "zstd",
        "use_dictionary": [field.name for field in schema if field.name not in ("document", *split)],
        "write_statistics": ["rule"],  # of hundreds of columns they are half of what is read first
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") | {"document": "DELTA_BINARY_PACKED"},
        "write_page_checksum": True,
    }
    _require_declared(schema.empty_table(), columns, shown)
    for table in tables:
        for rule, span in _spans(table).items():
            spans.setdefault(rule, []).append((table, span))
    alike, buffer = dict[str, list[list[int]]](), pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, schema, **options) as writer:
        for rule, parts in spans.items():  # one at a time: its rows are copies, and thousands of pieces would take longer
            rows = pa.concat_tables(_of_span(*part, rule) for part in parts).combine_chunks()
            _require_declared(rows, columns, shown)
            if places := _alike(rows):
                alike[rule] = places
            writer.write_table(rows, row_group_size=len(rows))
        if alike:
            writer.add_key_value_metadata({ALIKE: json.dumps(alike, separators=(",", ":"))})
    return buffer.getvalue()


def _alike(table: pa.Table) -> list[list[int]]:
    """Return places of columns that hold the same bytes as an earlier one, with its place; those of one value take no
    room.
    """
    first: dict[tuple[pa.DataType, bytes], list[tuple[int, np.ndarray[Any, Any]]]] = {}
    places = []
    for place, column in enumerate(table.columns):
        if not (pa.types.is_floating(column.type) or (pa.types.is_integer(column.type) and not column.null_count)):
            continue
        values = column.to_numpy()
        values = values.view(f"i{values.itemsize}")  # bits: a null is NaN, which no column holds
        if len(values) and (values == values[0]).all():
            continue
        candidates = first.setdefault((column.type, values[:16].tobytes()), [])
        same = next((other for other, held in candidates if np.array_equal(held, values)), None)
        if same is None:
            candidates.append((place, values))
        else:
            places.append([place, same])
    return places


def _require_declared(table: pa.Table, columns: Sequence[Column], shown: str) -> None:
    if problems := violations(table, columns):
        raise ValueError(f"{shown} contradicts the schema: {'; '.join(problems)}")  # a bug, not a user error


def rows_of(file: pq.ParquetFile, rules: Collection[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Return rows of a file of totals, of some rules and some columns (None: all): `totals_content` writes a row group a
    rule, and what `table_content` writes of a shard is small.
    """
    place = file.metadata.schema.names.index("rule")
    held = [file.metadata.row_group(index).column(place).statistics for index in range(file.metadata.num_row_groups)]
    if all(rule and rule.has_min_max and rule.min == rule.max for rule in held):
        alike = json.loads((file.metadata.metadata or {}).get(ALIKE, b"{}"))
        groups = {index: alike.get(rule.min, []) for index, rule in enumerate(held) if rules is None or rule.min in rules}
        parts = [_group(file, index, places, columns) for index, places in groups.items()]
        table = pa.concat_tables(parts) if parts else file.schema_arrow.empty_table()
    else:  # a shard's: to open a row group of that many columns takes longer than to read its rows
        table = file.read(None if columns is None else [*{*columns, "rule"}], use_threads=False)
        spans = _spans(table)
        wanted = [_of_span(table, span, rule) for rule, span in spans.items() if rules is None or rule in rules]
        if len(wanted) < len(spans):
            table = pa.concat_tables(wanted) if wanted else table.slice(0, 0)
    return table if columns is None else table.select(columns)


def _group(file: pq.ParquetFile, index: int, alike: Sequence[tuple[int, int]], columns: Sequence[str] | None) -> pa.Table:
    """Return the rows of a row group: of columns that are alike one is read."""
    names = file.schema_arrow.names
    same = {names[place]: names[other] for place, other in alike}
    wanted = names if columns is None else columns
    table = file.read_row_group(index, columns=list(dict.fromkeys(same.get(name, name) for name in wanted)))
    schema = pa.schema([file.schema_arrow.field(name) for name in wanted], file.schema_arrow.metadata)
    return pa.table([table[same.get(name, name)] for name in wanted], schema=schema)


def _spans(table: pa.Table) -> dict[str, Span]:
    """Return where the rows of each rule begin, and how many there are: they follow each other."""
    spans = dict[str, Span]()
    if not len(table):
        return spans
    ends = pc.run_end_encode(table["rule"].cast(pa.string()).combine_chunks())
    stops = ends.run_ends.to_pylist()
    for rule, start, stop in zip(ends.values.to_pylist(), [0, *stops], stops, strict=False):
        spans[rule] = start, stop - start
    return spans


def _of_span(table: pa.Table, span: Span, rule: str) -> pa.Table:
    """Return the rows of a rule, whose name takes no room."""
    place, (start, length) = table.schema.get_field_index("rule"), span
    alike = pa.DictionaryArray.from_arrays(np.zeros(length, dtype=np.int32), [rule])
    return table.slice(start, length).set_column(place, table.schema.field("rule"), alike)


def of_rule(table: pa.Table, rule: str) -> pa.Table:
    """Return the rows of one rule: often all of them, as dictionaries tell without a look at the rows."""
    if all(chunk.dictionary.to_pylist() == [rule] for chunk in table["rule"].chunks):
        return table
    return table.filter(pc.equal(table["rule"].cast(pa.string()), rule))
