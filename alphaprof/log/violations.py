"""What in a table contradicts the declaration of its columns: checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.log.schema import Column


def violations(table: pa.Table, columns: Iterable[Column]) -> list[str]:
    """What in `table` contradicts the declaration of its columns: other columns, types, nulls, NaN and values out of range.

    The values inside a list obey the unit and range of its column, and are never null.
    """
    columns = tuple(columns)
    names = [column.name for column in columns]
    if table.column_names != names:
        return [f"columns {table.column_names} instead of {names}"]
    return [problem for column in columns for problem in _column_violations(column, table[column.name])]


def _column_violations(column: Column, values: pa.ChunkedArray) -> Iterator[str]:
    if values.type != column.type:
        yield f"{column.name} has type {values.type} instead of {column.type}"
        return
    if not column.nullable and values.null_count:
        yield f"{column.name} has {values.null_count} nulls"
    if pa.types.is_nested(column.type):
        values = pc.list_flatten(values)
        if values.null_count:
            yield f"{column.name} has {values.null_count} nulls inside lists"
    if pa.types.is_floating(values.type) and pc.any(pc.is_nan(values)).as_py():
        yield f"{column.name} holds NaN"
    if column.low is not None or column.high is not None:
        extremes = pc.min_max(values).as_py()
        low, high = extremes["min"], extremes["max"]
        if column.low is not None and low is not None and low < column.low:
            yield f"{column.name} holds {low}, below {column.low}"
        if column.high is not None and high is not None and high > column.high * (1 + 1e-6):
            yield f"{column.name} holds {high}, above {column.high}"
