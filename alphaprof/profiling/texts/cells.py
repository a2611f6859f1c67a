"""Cells of rows to text: a cell by its path, and what may stand in a prompt."""

from __future__ import annotations

import datetime
import difflib
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from alphaprof.config.profile import template_parts
from alphaprof.errors import VALUE, AlphaprofError, ColumnMissing, DataUnreadable, cut, shown, visible

T = TypeVar("T")
Row = Mapping[str, Any]
KINDS = {bool: "true or false", list: "a list", dict: "an object"}


class BadRow(Exception):
    """A row that cannot be used: the problem, on one line whatever the data hold, and `hint`, what to do. `where`: its line
    or row, once that is known.
    """

    def __init__(self, problem: str, hint: str, kind: type[AlphaprofError] = DataUnreadable) -> None:
        super().__init__(visible(problem))
        self.hint, self.kind, self.where = hint, kind, ""


class LeftOut(Exception):
    """A row of which no document can be made, for a reason that many rows may have: it is left out and counted."""


def decoded(value: Any) -> Any:
    """Return a cell, parsed if it is the JSON text of an object or a list."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def by_name(value: Any) -> Any:
    """Return a value, and OpenTelemetry's attributes, [{key, value: {stringValue: ...}}], as the object that they mean."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(each, Mapping) and {*each} == {"key", "value"} for each in value)
    ):
        return {str(each["key"]): _any_value(each["value"]) for each in value}
    return value


def _any_value(value: Any) -> Any:
    """Return what an AnyValue of the OpenTelemetry protocol holds: {stringValue: x}, or values of a list or an object."""
    ((kind, inner),) = value.items() if isinstance(value, Mapping) and len(value) == 1 else [("", value)]
    values = inner.get("values", []) if isinstance(inner, Mapping) else inner
    if kind == "arrayValue" and isinstance(values, list):
        return [_any_value(each) for each in values]
    return by_name(values) if kind == "kvlistValue" else inner


def cell(row: Row, column: str, optional: bool = False) -> Any:
    """Return the cell of a column that must exist, also `outer.inner` of an object, `turns.0` of a list, or of the JSON text
    of either. Raises `LeftOut` if it holds nothing, unless that is allowed, and `BadRow` if it is not there.
    """
    return cell_and_beside(row, column, optional)[0]


def cell_and_beside(row: Row, column: str, optional: bool = False) -> tuple[Any, Row]:
    """Return what `cell` returns, and the object that it stands in: the row, or one in it; {} in a list."""
    found, rest, beside = (row[column], "", row) if column in row else (row, column, row)
    while rest:
        found = by_name(decoded(found))
        beside = found if isinstance(found, Mapping) else {}
        name, _, rest = (rest, "", "") if rest in beside else rest.partition(".")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif name in beside:
            found = beside[name]
        else:
            near = difflib.get_close_matches(column, list(row), n=1)
            raise BadRow(
                f"has no column {shown(column)}",
                f"did you mean {cut(near[0], VALUE)}?" if near else f"it has: {cut(', '.join(map(str, row)))}",
                ColumnMissing,
            )
        if found is None and rest:
            break
    if isinstance(found, float) and math.isnan(found):
        found = None
    if found is None and not optional:
        raise LeftOut(f"with nothing in the column {column}")
    return found, beside


def cell_if_any(row: Row, column: str | None) -> Any:
    """Return the cell of a column that some rows lack; None: it is not there, or holds nothing."""
    try:
        return None if column is None else cell(row, column, optional=True)
    except BadRow:
        return None


def render(template: str, row: Row, optional: bool = False) -> str:
    """Return the template with {column} replaced by the row's texts and numbers; a value's own braces mean nothing. Raises
    `BadRow` for a value that is neither, and for one that is not there, or `LeftOut`, unless it is `optional`.
    """
    texts = []
    for literal, name in template_parts(template):
        value = "" if name is None else cell_if_any(row, name) if optional else cell(row, name)
        texts += [literal, "" if value is None else text_in(value, str(name))]
    return "".join(texts)


def text_in(value: Any, column: str) -> str:
    """Return a text, a number, or a date as ISO 8601 writes it. Raises `BadRow` for any other cell."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        value = value.date()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, float) and abs(value) >= 2**63:  # an integer that the parser of JSON could not hold
        raise BadRow(f"{column} holds a number of more than 64 bits", "write it as text", ColumnMissing)
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    kind = KINDS.get(type(value), f"a {type(value).__name__}")
    raise BadRow(
        f"{column} holds {kind}, not text",
        "name a column with text, or a place inside it, like turns.0 or choices.0.message.content",
        ColumnMissing,
    )


def label_of(value: Any, column: str | None) -> str:
    """Return the name of a domain or a cluster."""
    return str(value).lower() if isinstance(value, bool) else text_in(value, str(column))


def named(column: str, read: Callable[[Any], T], value: Any) -> T:
    """Return what is read of a cell. Raises `BadRow` with the name of its column."""
    try:
        return read(value)
    except BadRow as bad:
        raise BadRow(f"{column} {bad}", bad.hint, bad.kind) from bad
