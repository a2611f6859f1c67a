"""Draws the sections of a report on a terminal (rich). It computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from alphaprof.render.sections.blocks import Row, Table
from alphaprof.render.sections.contents import ALL, Section, chosen
from alphaprof.render.tables import NAME_LEAST, named_table, plain
from alphaprof.report.build import Report

COLOURS = {"GO": "bold green", "NO-GO": "bold red", "UNDECIDED": "bold yellow", "note:": "yellow"}
EDGES, GAP = 3, 2  # columns beside a table's first one, and between any two
NAME_KEPT = 14  # columns of a name that no other column takes; longer names fold sooner than tables go on below


def render_terminal(report: Report, console: Console, show: Sequence[str] = (ALL,)) -> None:
    """Print the run, then the sections that `show` names. Text from the data is printed as it is, without control characters
    or markup.
    """
    run = report.run
    console.print(plain(f"alphaprof {report.alphaprof}   run {run.path} ({'complete' if run.complete else 'PARTIAL'})"))
    for section in chosen(show, report):
        console.print()
        console.print(Text(f"{section.name}: {section.title}", "bold"))
        console.print()
        _draw(section, report, console)


def _draw(section: Section, report: Report, console: Console) -> None:
    """Print a section, or why it is empty. Nothing, not even an empty line, stands after its last block."""
    blocks = section.written(report)
    while blocks and not blocks[-1]:
        blocks.pop()
    for place, block in enumerate(blocks):
        if isinstance(block, str):
            _line(block, console)
        else:
            _table(block, console)
            if place < len(blocks) - 1:
                console.print()


def _line(line: str, console: Console) -> None:
    """Print a line, which goes on below where it begins; a verdict at its beginning has its colour."""
    text = plain(line.lstrip(" "))
    word, indent = line.split(" ", 1)[0], len(line) - len(line.lstrip(" "))
    text.stylize(COLOURS.get(word, ""), 0, len(word))
    for part in text.wrap(console, max(console.width - indent, 1)):
        part.rstrip()
        console.print(Text(" " * indent).append_text(part))


def _table(table: Table, console: Console) -> None:
    """Print a table as it is where that fits, else with intervals below their values, else in parts side by side."""
    rows = [*table.rows, *table.footer]
    longest = max(NAME_LEAST, *map(cell_len, (table.named, *(name for name, _ in rows))))
    room = console.width - min(longest, NAME_KEPT) - EDGES
    if sum(_widths(table.columns, rows).values()) > room:
        rows = [(name, {column: _interval_below(cell) for column, cell in cells.items()}) for name, cells in rows]
    widths = _widths(table.columns, rows)
    for part in _side_by_side(widths, room):
        drawn = named_table(table.named, *part, left=table.left)
        for place, (name, cells) in enumerate(rows):
            if place == len(table.rows):
                drawn.add_section()
            texts = (cells.get(column, "") for column in part)
            drawn.add_row(plain(name), *(Text(text, COLOURS.get(text, "")) for text in texts))
        console.print(Text.assemble(plain(table.title), style="italic"))
        # A terminal that is narrower than one column of numbers gets them whole all the same.
        least = NAME_LEAST + EDGES + sum(widths[column] for column in part)
        console.print(drawn, width=max(console.width, least), crop=False)
    for line in table.below:
        _line(line, console)


def _interval_below(cell: str) -> str:
    """A cell with its interval below the value; several intervals stay beside theirs."""
    return cell.replace(" [", "\n[") if cell.count(" [") == 1 else cell


def _widths(columns: Sequence[str], rows: Sequence[Row]) -> dict[str, int]:
    """The width of each column with the gap to the next."""
    texts = {column: [column, *(cells.get(column, "") for _, cells in rows)] for column in columns}
    return {
        column: max(cell_len(line) + GAP for text in several for line in text.split("\n"))
        for column, several in texts.items()
    }


def _side_by_side(widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Yields columns in parts that fit, one column at least; `widths` include the gap to the next."""
    part: list[str] = []
    left = room
    for column, width in widths.items():
        if part and width > left:
            yield part
            part, left = [], room
        part.append(column)
        left -= width
    if part:
        yield part
