"""What the terminal's tables share (rich)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from alphaprof.render.format import visible

NAME_KEPT, NAME_WIDTH = 14, 22  # columns of a table's first column that no other takes, and at most; longer names fold
WORD_KEPT = 24  # columns of a word in a column that goes on in the next line; longer ones fold
EDGE, GAP = 1, 2  # columns before a table's first one, and after each


def plain(text: str) -> Text:
    """Untrusted text: control and direction-changing characters become visible, markup means nothing."""
    return Text(visible(text))


def empty_table(*columns: str, left: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """Make an empty table whose columns hold numbers, which are never cut; those in `left` hold words, and those in
    `wrapped` go on in the next line.
    """
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in left else "right"
        table.add_column(name, justify=justify, no_wrap=name not in wrapped, overflow="fold")
    return table


def named_table(name: str = "domain", *columns: str, left: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """Make an empty table whose first column holds names; the others are those of `empty_table`."""
    table = empty_table(name, *columns, left=(name, *left), wrapped=wrapped)
    first = table.columns[0]
    first.overflow, first.no_wrap, first.min_width, first.max_width = "fold", False, NAME_KEPT, NAME_WIDTH
    return table


def show(table: Table, title: str, console: Console) -> None:
    """Print a table below its title, which may be wider than the table: as it is if that fits, else with intervals below
    their values, else in parts, each of which begins with the columns that tell rows apart.
    """
    columns = [_Texts.of(column) for column in table.columns]
    if _total(columns) > console.width:
        columns = [column.with_intervals_below() for column in columns]
    for part in _parts(columns, console.width):
        spare = max(console.width - _total(part), 0)
        for column in part:  # what need not fold takes what is left
            column.head.width = min(column.most, column.least + spare)
            spare -= column.head.width - column.least
        drawn = Table(
            *(column.head.copy() for column in part), header_style=table.header_style, box=table.box, padding=table.padding
        )
        for row, *cells in zip(table.rows, *(column.cells for column in part), strict=True):
            drawn.add_row(*cells, style=row.style, end_section=row.end_section)
        console.print(Text.assemble(plain(title), style="italic"))
        # A terminal that is narrower than one column of numbers gets them whole all the same.
        drawn.width = EDGE + sum((column.head.width or 0) + GAP for column in part)
        console.print(drawn, crop=False)


@dataclass(frozen=True)
class _Texts:
    """A column's texts, and how wide it is at least (with no number cut and no word that is not too long) and at most."""

    head: Column  # without its cells
    cells: list[Text]
    least: int
    most: int

    @classmethod
    def of(cls, column: Column, cells: Sequence[Text] | None = None) -> _Texts:
        """Return the texts of a column, or others in their place."""
        if cells is None:
            cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in column.cells]
        lines = [line for text in (str(column.header), *(cell.plain for cell in cells)) for line in text.split("\n")]
        words = lines if column.no_wrap else [word for line in lines for word in line.split()]
        word, line = (min(max(map(cell_len, some), default=1), column.max_width or sys.maxsize) for some in (words, lines))
        word = word if column.no_wrap else min(word, WORD_KEPT)
        # What names are changes no layout: the first column counts the same whatever they are.
        head = replace(column, _cells=[], min_width=None, max_width=None)
        return cls(head, list(cells), column.min_width or word, line)

    def with_intervals_below(self) -> _Texts:
        """Return the same with each interval below its value; several in a cell stay beside theirs, and so do words."""
        if not self.head.no_wrap:
            return self
        once = (cell.plain.count(" [") == 1 for cell in self.cells)
        cells = [
            Text(cell.plain.replace(" [", "\n["), cell.style) if one else cell
            for cell, one in zip(self.cells, once, strict=True)
        ]
        return self.of(self.head, cells)


def _total(columns: Sequence[_Texts]) -> int:
    """Return how wide a table of these columns is at least."""
    return EDGE + sum(column.least + GAP for column in columns)


def _parts(columns: Sequence[_Texts], width: int) -> Iterator[list[_Texts]]:
    """Yield columns in parts that fit, beside those that tell rows apart; one column at least."""
    if _total(columns) <= width:
        yield list(columns)
        return
    names = _telling_apart(columns, 2 * width // 3)
    part: list[_Texts] = []
    for column in (each for each in columns if each not in names):
        if part and _total([*names, *part, column]) > width:
            yield [*names, *part]
            part = []
        part.append(column)
    yield [*names, *part]


def _telling_apart(columns: Sequence[_Texts], room: int) -> list[_Texts]:
    """Return the first column, and those after it that distinguish more rows, if there is room."""
    names = [columns[0]]
    for column in columns[1:]:
        known, more = (
            {tuple(cell.plain for cell in row) for row in zip(*(each.cells for each in some), strict=True)}
            for some in (names, [*names, column])
        )
        if len(known) == len(column.cells) or _total([*names, column]) > room:
            break
        names += [column] if len(more) > len(known) else []
    return names
