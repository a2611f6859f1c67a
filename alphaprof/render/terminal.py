"""Draws blocks on a terminal (rich). It computes nothing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from alphaprof.render import format as fmt
from alphaprof.render.blocks import BAD, GOOD, UNSURE, Block, Command, Figure, Heading, Small, Table, Verdict

STYLES = {GOOD: "bold green", BAD: "bold red", UNSURE: "bold yellow"}
NAME_KEPT, NAME_WIDTH = 14, 22  # columns of a table's first column that no other takes, and at most; longer names fold
WORD_KEPT = 24  # columns of a word in a column that goes on in the next line; longer ones fold
EDGE, GAP = 1, 2  # columns before a table's first one, and after each


def plain(text: str) -> Text:
    """Untrusted text: control and direction-changing characters become visible, markup means nothing."""
    return Text(fmt.visible(text))


def draw(blocks: Iterable[Block], console: Console) -> None:
    """Print blocks, an empty line below each table and around each heading; nothing, not even such a line, after the last
    block.
    """
    waiting = 0  # empty lines that are printed if something follows
    for block in blocks:
        if isinstance(block, Figure):
            continue
        if not block:
            waiting += 1
            continue
        console.print("\n" * (1 if isinstance(block, Heading) else waiting), end="")
        waiting = 1 if isinstance(block, Heading | Table) else 0
        if isinstance(block, Table):
            _print_table(block, console)
            for line in block.below:
                _print_line(line, console)
        elif isinstance(block, Heading):
            console.print(Text(f"{block.name}: {block.title}" if block.name else block.title, "bold"))
        elif isinstance(block, Small):
            console.print(plain(block.text), style="dim")
        else:
            _print_line(block, console)


def _print_line(line: str, console: Console) -> None:
    """Print a line, which goes on below where it begins; the word of an outcome has its color."""
    text, indent = plain(line.lstrip(" ")), len(line) - len(line.lstrip(" "))
    if isinstance(line, Verdict):
        text.stylize(STYLES[line.kind], 0, len(line.word))
    if isinstance(line, Command):
        console.print(plain(line), soft_wrap=True)
        return
    for part in text.wrap(console, max(console.width - indent, 1)):
        part.rstrip()
        console.print(Text(" " * indent).append_text(part))


@dataclass(frozen=True)
class _Column:
    """A column's heading and cells, and how wide it is at least, with no number cut and no word that is not too long, and at
    most.
    """

    rich: Column
    cells: tuple[Text, ...]
    least: int
    most: int

    @classmethod
    def of(cls, table: Table, heading: str, cells: Sequence[str], below: bool) -> _Column:
        """`below`: intervals stand below their values."""
        name, wraps = heading == table.named, heading in table.wrapped or heading == table.named
        head, texts = _cell(heading, below), tuple(_cell(cell, below) for cell in cells)
        lines = [line for text in (head, *texts) for line in text.plain.split("\n")]
        words = [word for line in lines for word in line.split()] if wraps else lines
        widest = NAME_WIDTH if name else sys.maxsize
        word, line = (min(max(map(cell_len, some), default=1), widest) for some in (words, lines))
        left = name or heading in table.left
        column = Column(head, justify="left" if left else "right", no_wrap=not wraps, overflow="fold")
        return cls(column, texts, NAME_KEPT if name else min(word, WORD_KEPT) if wraps else word, line)


def _cell(cell: str, below: bool) -> Text:
    """Return a cell with its line breaks; an outcome has its color."""
    text = cell.stacked if below and isinstance(cell, fmt.Number) else str(cell)
    return Text("\n".join(map(fmt.visible, text.split("\n"))), STYLES[cell.kind] if isinstance(cell, Verdict) else "")


def _print_table(table: Table, console: Console) -> None:
    """Print a table below its title, which may be wider than the table: as it is if that fits, else with intervals below
    their values, else in parts, each of which begins with the columns that tell rows apart.
    """
    rows = [*table.rows, *table.footer]
    columns: list[_Column] = []
    for below in (False, True):
        columns = [_Column.of(table, table.named, [fmt.visible(name) for name, _ in rows], below)]
        columns += [_Column.of(table, each, [cells.get(each, "") for _, cells in rows], below) for each in table.columns]
        if _width(columns) <= console.width:
            break
    for part in _parts(columns, console.width):
        spare = max(console.width - _width(part), 0)
        heads = []
        for column in part:  # what need not fold takes what is left
            width = min(column.most, column.least + spare)
            spare -= width - column.least
            heads.append(dataclasses.replace(column.rich, width=width))
        drawn = RichTable(*heads, header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for place, ((name, _), *cells) in enumerate(zip(rows, *(column.cells for column in part), strict=True), 1):
            style, last = "bold" if name in table.marked else "", place == len(table.rows) and bool(table.footer)
            drawn.add_row(*cells, style=style, end_section=last)
        console.print(Text.assemble(plain(table.title), style="italic"))
        # A terminal that is narrower than one column of numbers gets them whole all the same.
        drawn.width = EDGE + sum((head.width or 0) + GAP for head in heads)
        console.print(drawn, crop=False)


def _width(columns: Sequence[_Column]) -> int:
    """Return how wide a table of these columns is at least."""
    return EDGE + sum(column.least + GAP for column in columns)


def _parts(columns: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """Yield columns in parts that fit, one column at least, beside those that tell rows apart: the first one, and those
    after it that distinguish more rows, if there is room.
    """
    if _width(columns) <= width:
        yield list(columns)
        return
    names = [columns[0]]
    for column in columns[1:]:
        known, more = (
            {tuple(cell.plain for cell in row) for row in zip(*(each.cells for each in some), strict=True)}
            for some in (names, [*names, column])
        )
        if len(known) == len(column.cells) or _width([*names, column]) > 2 * width // 3:
            break
        names += [column] if len(more) > len(known) else []
    part: list[_Column] = []
    for column in (each for each in columns if each not in names):
        if part and _width([*names, *part, column]) > width:
            yield [*names, *part]
            part = []
        part.append(column)
    yield [*names, *part]
