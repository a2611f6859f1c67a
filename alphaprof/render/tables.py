"""What the terminal's tables share (rich)."""

from __future__ import annotations

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


def named_table(name: str = "domain") -> Table:
    """An empty table whose first column holds names."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(name, overflow="fold", min_width=NAME_LEAST, max_width=NAME_WIDTH)
    return table


def show(table: Table, title: str, console: Console) -> None:
    """Print a table below its title, which may be wider than the table."""
    console.print(Text.assemble(plain(title), style="italic"))
    console.print(table)
