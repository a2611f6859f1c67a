"""What the terminal's tables share (rich)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.report.format import visible

WIDE = 140  # columns that it takes to show intervals beside their values
NAME_LEAST, NAME_WIDTH = 10, 22  # columns of a table's first column, at least and at most; longer names fold


def plain(text: str) -> Text:
    """Untrusted text: control and direction-changing characters become visible, markup means nothing."""
    return Text(visible(text))


def empty_table(*columns: str, left: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """Makes an empty table whose columns hold numbers, which are never cut; those in `left` hold words, and those in
    `wrapped` go on in the next line.
    """
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in wrapped)
    return table


def named_table(name: str = "domain", *columns: str, left: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """Makes an empty table whose first column holds names; the others are those of `empty_table`."""
    table = empty_table(name, *columns, left=(name, *left), wrapped=wrapped)
    first = table.columns[0]
    first.overflow, first.no_wrap, first.min_width, first.max_width = "fold", False, NAME_LEAST, NAME_WIDTH
    return table


def fitted(cells: Sequence[str], console: Console) -> Sequence[str]:
    """Returns cells with their intervals beside the values, or below them where the terminal is narrow."""
    return cells if console.width >= WIDE else [cell.replace(" [", "\n[") for cell in cells]


def show(table: Table, title: str, console: Console) -> None:
    """Print a table below its title, which may be wider than the table."""
    console.print(Text.assemble(plain(title), style="italic"))
    console.print(table)
