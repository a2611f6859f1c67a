"""Draws blocks on a terminal (rich). It computes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from alphaprof.render import format as fmt
from alphaprof.render.blocks import BAD, GOOD, OUTCOMES, UNSURE, Block, Figure, Heading, Small, Table, Verbatim, outcome_of
from alphaprof.render.tables import named_table, plain, show

STYLES = {GOOD: "bold green", BAD: "bold red", UNSURE: "bold yellow"}
COLOURS = {word: STYLES[kind] for word, kind in OUTCOMES.items()} | {"note:": "yellow"}


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
        elif isinstance(block, Heading):
            console.print(Text(f"{block.name}: {block.title}" if block.name else block.title, "bold"))
        elif isinstance(block, Small):
            console.print(plain(block.text), style="dim")
        elif isinstance(block, Verbatim):
            for line in block.lines:
                console.print(plain(line), soft_wrap=True)
        else:
            _print_line(block, console)


def _print_line(line: str, console: Console) -> None:
    """Print a line, which goes on below where it begins; a verdict at its beginning has its colour."""
    text = plain(line.lstrip(" "))
    word, indent = outcome_of(line), len(line) - len(line.lstrip(" "))
    text.stylize(COLOURS.get(word, ""), 0, len(word))
    for part in text.wrap(console, max(console.width - indent, 1)):
        part.rstrip()
        console.print(Text(" " * indent).append_text(part))


def _print_table(table: Table, console: Console) -> None:
    """Print a table, and the lines below it."""
    drawn = named_table(table.named, *table.columns, left=table.left, wrapped=table.wrapped)
    for place, (name, cells) in enumerate([*table.rows, *table.footer]):
        if place == len(table.rows):
            drawn.add_section()
        style = "bold" if name in table.marked else ""
        drawn.add_row(plain(name), *(_cell_text(cells.get(column, "")) for column in table.columns), style=style)
    show(drawn, table.title, console)
    for line in table.below:
        _print_line(line, console)


def _cell_text(text: str) -> Text:
    """Return a cell with its line breaks; an outcome has its color."""
    return Text("\n".join(map(fmt.visible, text.split("\n"))), COLOURS.get(text, ""))
