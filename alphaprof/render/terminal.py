"""Draws the sections of a report on a terminal (rich). It computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from alphaprof.render.blocks import BAD, GOOD, OUTCOMES, UNSURE, Block, Figure, Small, Table, Verbatim, outcome_of
from alphaprof.render.first_screen import ALONE, WORDS, FirstScreen, first_screen
from alphaprof.render.sections.contents import ALL, chosen
from alphaprof.render.tables import named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.report.build import Report

STYLES = {GOOD: "bold green", BAD: "bold red", UNSURE: "bold yellow"}
COLOURS = {word: STYLES[kind] for word, kind in OUTCOMES.items()} | {"note:": "yellow"}
WIDTH, LINES = 100, 40  # of the first screen, however wide the terminal is
LABEL = 7  # columns of what a line is about
MOST = {"domain": 16, "draft": 12, "next best": 20}  # columns of names
LESS = ("docs", "next best", "share", "alpha", "tokens/round")  # columns that a narrow terminal goes without, in turn


def render_terminal(report: Report, console: Console, names: Sequence[str] = ()) -> None:
    """Print the first screen, or the sections of these names; both for `all`. Text from the data is printed as it is,
    without control characters or markup.
    """
    if not names or ALL in names:
        _first_screen(report, console)
    if names:
        run = report.run
        if ALL in names:
            console.print()
        console.print(plain(f"alphaprof {report.alphaprof}   run {run.path} ({'complete' if run.complete else 'PARTIAL'})"))
    for section in chosen(names, report):
        console.print()
        console.print(Text(f"{section.name}: {section.title}", "bold"))
        console.print()
        draw(section.written(report), console)


def _first_screen(report: Report, console: Console) -> None:
    """Prints the first screen in 100 columns, or in those of a narrower terminal. In 100 columns five drafts and twelve
    domains fit 40 lines: notes are cut for that, then what stands below the table. What is cut says where it is whole.
    """
    screen = first_screen(report)
    for note_lines, others in ((2, 2), (1, 2), (1, 1)):
        page = _Page(console, min(console.width, WIDTH), [])
        _write(page, screen, note_lines, others)
        if len(page.lines) <= LINES or console.width < WIDTH:
            break
    for line in page.lines:
        console.print(line, soft_wrap=True, highlight=False)


def _write(page: _Page, screen: FirstScreen, note_lines: int, others: int) -> None:
    """Writes the first screen. `note_lines`: most lines of a note; `others`: of a reason, or of a remark below the table."""
    page.say("", screen.run, indent=0, most=1, cut=" (--show verdict)")
    page.say("")
    for place, line in enumerate(screen.about):
        most, cut = (others + 1, " (--show verdict)") if place else (2, "")
        page.say("" if place else screen.verdict, line, style=COLOURS[screen.verdict], most=most, cut=cut)
    for place, line in enumerate(screen.route):
        page.say("" if place else "ROUTE", line)
    page.say("Times", screen.times)
    page.say("")
    page.table(screen)
    for line in screen.below:
        page.say("", line, indent=0, most=others, cut=" (--show drafts)")
    page.say("")
    page.load(screen)
    for place, note in enumerate(screen.notes):
        page.say("" if place else "Notes", f"{place + 1} {note}", cut=" (--show notes)", hang=2, most=note_lines)
    for place, (command, remark) in enumerate(screen.serve):
        page.whole("" if place else "Serve", "   ".join(filter(None, (command, remark))))
    page.say("More", screen.more, most=3)


@dataclass(frozen=True)
class _Page:
    """Lines of text for a terminal."""

    console: Console
    width: int
    lines: list[Text]

    def say(
        self,
        label: str,
        text: str = "",
        *,
        style: str = "bold",
        indent: int = LABEL,
        hang: int = 0,
        most: int = 2,
        cut: str = "",
    ) -> None:
        """Writes a text of at most `most` lines beside its label, all but the first `hang` columns further in; nothing where
        there is a label without a text. What is cut off ends in an ellipsis and `cut`.
        """
        if not text:
            self.lines.extend([] if label else [Text()])
            return
        indent = max(indent, cell_len(label) + 2) if label else indent
        lines = Text(fmt.visible(text)).wrap(self.console, self.width - indent - hang)
        for place, line in enumerate(lines[:most]):
            if place == most - 1 and len(lines) > most:  # between words: a number that is cut is another number
                (line, *_) = line.wrap(self.console, self.width - indent - hang - len(cut) - 2)
                line.rstrip()
                line.append(f" \N{HORIZONTAL ELLIPSIS}{cut}")
            line.rstrip()
            before = Text(" " * (indent + hang)) if place else Text(label.ljust(indent), style)
            self._print(before.append_text(line))

    def whole(self, label: str, text: str) -> None:
        """Writes a text that is copied, in one line however long it is."""
        self._print(Text(label.ljust(LABEL), "bold").append(fmt.visible(text)))

    def _print(self, line: Text) -> None:
        line.rstrip()
        self.lines.append(line)

    def table(self, screen: FirstScreen) -> None:
        """Prints the domains, without the columns that a narrow terminal has no place for."""
        rows = [screen.headings, *screen.rows, *((screen.total,) if screen.total else ())]
        names = screen.columns
        cells = [[_cut(cell, MOST.get(name)) for name, cell in zip(names, row, strict=True)] for row in rows]
        widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
        shown, gap = list(range(len(names))), 2
        for name in LESS:
            gap = 2 if sum(widths[place] + 2 for place in shown) - 2 <= self.width else 1
            if sum(widths[place] + gap for place in shown) - gap > self.width:
                shown = [place for place in shown if names[place] != name]
        rule = Text("-" * min(sum(widths[place] + gap for place in shown) - gap, self.width))
        for number, row in enumerate(cells):
            if number == len(rows) - 1 and screen.total:
                self._print(rule.copy())
            for place in shown:
                row[place].align("left" if names[place] in WORDS else "right", widths[place])
            if number:
                row[names.index("verdict")].stylize(COLOURS[rows[number][names.index("verdict")].rstrip(ALONE)])
            self._print(Text(" " * gap).join(row[place] for place in shown))
            if number == 0:
                self._print(rule.copy())
        if len(shown) < len(names):
            left_out = ", ".join(name for place, name in enumerate(screen.headings) if place not in shown)
            self.say("", f"left out, the terminal is narrow: {left_out}", indent=0)

    def load(self, screen: FirstScreen) -> None:
        """Prints the best speedups by concurrency."""
        if not screen.load:
            return
        columns = list(zip(*screen.load, strict=True))
        first = max(cell_len(cell) for cell in columns[0])
        widths = [max(len(cell) for cell in column) for column in columns[1:]]
        for place, (name, *row) in enumerate(screen.load):
            cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            told = f"   {screen.pays}" if place == 1 else ""
            self.say("Load" if place == 0 else "", f"{name.ljust(first)}  {cells}{told}")


def _cut(cell: str, most: int | None) -> Text:
    text = Text(fmt.visible(cell))
    if most is not None:
        text.truncate(most, overflow="ellipsis")
    return text


def draw(blocks: Iterable[Block], console: Console) -> None:
    """Print blocks, an empty line below each table. Nothing, not even an empty line, stands after the last block."""
    shown = [block for block in blocks if not isinstance(block, Figure)]
    while shown and not shown[-1]:
        shown.pop()
    for place, block in enumerate(shown):
        if isinstance(block, Table):
            _table(block, console)
            if place < len(shown) - 1:
                console.print()
        elif isinstance(block, Small):
            console.print(plain(block.text), style="dim")
        elif isinstance(block, Verbatim):
            for line in block.lines:
                console.print(plain(line), soft_wrap=True)
        else:
            _line(block, console)


def _line(line: str, console: Console) -> None:
    """Print a line, which goes on below where it begins; a verdict at its beginning has its colour."""
    text = plain(line.lstrip(" "))
    word, indent = outcome_of(line), len(line) - len(line.lstrip(" "))
    text.stylize(COLOURS.get(word, ""), 0, len(word))
    for part in text.wrap(console, max(console.width - indent, 1)):
        part.rstrip()
        console.print(Text(" " * indent).append_text(part))


def _table(table: Table, console: Console) -> None:
    """Print a table, and the lines below it."""
    drawn = named_table(table.named, *table.columns, left=table.left, wrapped=table.wrapped)
    for place, (name, cells) in enumerate([*table.rows, *table.footer]):
        if place == len(table.rows):
            drawn.add_section()
        style = "bold" if name in table.marked else ""
        drawn.add_row(plain(name), *(_cell(cells.get(column, "")) for column in table.columns), style=style)
    show(drawn, table.title, console)
    for line in table.below:
        _line(line, console)


def _cell(text: str) -> Text:
    """A cell with its line breaks; an outcome has its color."""
    return Text("\n".join(map(fmt.visible, text.split("\n"))), COLOURS.get(text, ""))
