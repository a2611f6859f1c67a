"""A report as an answer: its first screen and the sections that its reader asked for, in every format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Heading, Named, Row, Table, Verdict
from alphaprof.render.json import render_json
from alphaprof.render.markdown import block_lines, escaped_sentence, signed, table_lines
from alphaprof.render.terminal import STYLES, draw, plain
from alphaprof.report.build import Report, RunReport
from alphaprof.report.formats.first_screen import LESS, FirstScreen, first_screen
from alphaprof.report.sections import ALL, NAMES

WIDTH, LINES, ROWS = 100, 34, 7  # of the first screen, however wide the terminal is, with so many domains
LABEL = 7  # columns of what a line is about
MOST = {"domain": 16, "draft": 12, "next best": 20}  # columns of names


class ReportAnswer:
    """A report with what its reader asked to see. `show`: names of the sections that terminal, Markdown and JSON hold; none:
    what they hold by themselves.
    """

    def __init__(self, report: RunReport, show: Sequence[str] = ()) -> None:
        self.report, self.show = report, tuple(show)

    def blocks(self) -> Iterator[Block]:
        """Yield the sections that were asked for; of `all` those that have something to show."""
        for name in NAMES:
            if name in self.show or ALL in self.show:
                title, blocks, empty = self.report.drawn(name)
                if name in self.show or not empty:
                    yield Heading(title, name)
                    yield from blocks

    def terminal(self, console: Console) -> None:
        """Print the first screen, or the sections that were asked for; both for `all`. Text from the data is printed as it
        is, without control characters or markup.
        """
        if not self.show or ALL in self.show:
            for line in _on_one_screen(first_screen(self.report), console):
                console.print(line, soft_wrap=True, highlight=False)
        if ALL in self.show:
            console.print()
        if self.show:
            state = "complete" if self.report.run.complete else "PARTIAL"
            console.print(plain(f"alphaprof {self.report.alphaprof}   run {self.report.run.path} ({state})"))
        draw(self.blocks(), console)

    def json(self) -> str:
        """Return the answers, and the values of the sections that were asked for, by default of all."""
        names = NAMES if not self.show or ALL in self.show else self.show
        values = {name: self.report.section(name) for name in names}
        sections = {name: value for name, value in values.items() if value is not None}  # not those of other files
        return render_json(dataclasses.replace(self.report, sections=sections)) + "\n"

    def md(self) -> str:
        """Return the first screen, and below it the sections that were asked for."""
        lines = [*first_screen_lines(self.report), *block_lines(self.blocks())]
        return "\n".join(lines).rstrip() + "\n"

    def html(self) -> str:
        """Return one self-contained page. Raises `ExtraMissing` if the packages that draw it are missing."""
        from alphaprof.report.formats.page import render_html

        return render_html(self.report)

    def svg(self) -> str:
        """Return the figure of the first screen. Raises `ExtraMissing` without the package that draws it, and
        `OptionInvalid` if there is nothing to draw.
        """
        from alphaprof.report.formats.page import answer_figure

        return answer_figure(self.report).svg(alone=True)

    def png(self) -> bytes:
        """Return the same figure as PNG."""
        from alphaprof.report.formats.page import answer_figure

        return answer_figure(self.report).png()


def first_screen_lines(report: Report) -> Iterator[str]:
    """Yield the first screen in Markdown, without what else there is."""
    screen = first_screen(report)
    yield from (f"**{escaped_sentence(screen.conclusion)}**", "")
    yield from (f"## {signed(screen.verdict)}: {escaped_sentence(screen.about[0])}", "")
    for line in filter(None, (*screen.about[1:], screen.times, screen.run)):
        yield from (escaped_sentence(line), "")
    yield from table_lines(screen.table)
    yield from table_lines(screen.load) if screen.load is not None else ()
    serve = f"Serve: {'   '.join(filter(None, screen.serve))}" if screen.serve else ""
    for line in filter(None, (screen.pays, serve)):
        yield from (escaped_sentence(line), "")
    yield from (f"- {escaped_sentence(note)}" for note in screen.notes)
    yield ""


def _on_one_screen(screen: FirstScreen, console: Console) -> list[Text]:
    """Return the first screen in 100 columns, or in those of a narrower terminal. In 100 columns seven domains fit 34 lines:
    notes are cut for that, then what stands below the table. What is cut says where it is whole.
    """
    lines, most = list[Text](), LINES + max(0, len(screen.table.rows) - ROWS)
    for most_of_note, most_of_others in ((2, 2), (1, 2), (1, 1)):
        lines = list(_screen_lines(screen, console, most_of_note, most_of_others))
        if len(lines) <= most or console.width < WIDTH:
            break
    return lines


def _screen_lines(screen: FirstScreen, console: Console, note_lines: int, others: int) -> Iterator[Text]:
    """Yield the first screen. `note_lines`: most lines of a note; `others`: of a reason, or of a remark below the table."""
    width = min(console.width, WIDTH)
    said = partial(_said, console, width)
    yield from said("", screen.conclusion, indent=0, most=4, cut=" (--show verdict)")
    yield Text()
    first, *behind = screen.about
    yield from said(screen.verdict, first, style=STYLES[screen.verdict.kind])
    for line in behind:
        yield from said("", line, most=others + 1, cut=" (--show verdict)")
    yield from said("Times", screen.times)
    yield from said("Run", screen.run, most=others, cut=" (--show verdict)")
    yield Text()
    shown, left_out = _domain_lines(screen.table, width)
    yield from shown
    if left_out:
        yield from said("", f"terminal too narrow to show: {', '.join(left_out)}", indent=0)
    for line in screen.table.below:
        yield from said("", line, indent=0, most=others, cut=" (--show drafts)")
    for place, line in enumerate(_load_lines(screen.load, screen.pays) if screen.load else ()):
        yield from said("" if place else "Load", line)
    for place, note in enumerate(screen.notes):
        yield from said("" if place else "Notes", f"{place + 1} {note}", cut=" (--show notes)", hang=2, most=note_lines)
    if screen.serve:  # which is copied: in one line however long it is
        yield Text("Serve".ljust(LABEL), "bold").append(fmt.visible("   ".join(filter(None, screen.serve))))
    yield from said("More", screen.more, most=3)


def _said(
    console: Console,
    width: int,
    label: str,
    text: str,
    *,
    style: str = "bold",
    indent: int = LABEL,
    hang: int = 0,
    most: int = 2,
    cut: str = "",
) -> Iterator[Text]:
    """Yield a text of at most `most` lines beside its label, all but the first `hang` columns further in; nothing for an
    empty text. What is cut off ends in an ellipsis and `cut`.
    """
    indent = max(indent, cell_len(label) + 2) if label else indent
    lines = Text(fmt.visible(text)).wrap(console, width - indent - hang) if text else ()
    for place, line in enumerate(lines[:most]):
        if place == most - 1 and len(lines) > most:  # between words: a number that is cut is another number
            (line, *_) = line.wrap(console, width - indent - hang - len(cut) - 2)
            line.rstrip()
            line.append(f" \N{HORIZONTAL ELLIPSIS}{cut}")
        line.rstrip()
        yield (Text(" " * (indent + hang)) if place else Text(label.ljust(indent), style)).append_text(line)


def _domain_lines(table: Table, width: int) -> tuple[list[Text], list[str]]:
    """Return the lines of the one table, and the columns that it goes without because the terminal is narrow."""
    head: Row = (table.named, {column: column for column in table.columns})
    rows = [{table.named: name, **cells} for name, cells in (head, *table.rows, *table.footer)]
    texts = [{column: _cut(cell, MOST.get(column)) for column, cell in row.items()} for row in rows]
    widths = {column: max(row[column].cell_len for row in texts) for column in rows[0]}

    def size(columns: Sequence[str], gap: int) -> int:
        return sum(widths[column] + gap for column in columns) - gap

    shown, gap = list(widths), 2
    for name in LESS:
        gap = 2 if size(shown, 2) <= width else 1
        if size(shown, gap) > width:
            shown = [column for column in shown if column != name]
    rule, lines = Text("-" * min(size(shown, gap), width)), list[Text]()
    for place, (row, cells) in enumerate(zip(rows, texts, strict=True)):
        for column in shown:
            cells[column].align("left" if column in (table.named, *table.left) else "right", widths[column])
        for column, cell in row.items():
            if isinstance(cell, Verdict):
                cells[column].stylize(STYLES[cell.kind])
        lines += [rule] if place == len(table.rows) + 1 else []
        lines.append(Text(" " * gap).join(cells[column] for column in shown))
        lines += [rule] if place == 0 else []
    for line in lines:
        line.rstrip()
    return lines, [column for column in widths if column not in shown]


def _cut(cell: str, most: int | None) -> Text:
    """Return a cell cut to `most` columns; of a `Named` one the name is cut."""
    head = cell.name if isinstance(cell, Named) else cell
    name, value = Text(fmt.visible(head)), fmt.visible(cell[len(head) :])
    if most is not None:
        name.truncate(most - cell_len(value), overflow="ellipsis")
    return name.append(value)


def _load_lines(table: Table, pays: str) -> list[str]:
    """Return the best speedups by concurrency, and beside or below them up to where they are enough."""
    head: Row = (table.named, {column: column for column in table.columns})
    rows = [head, *table.rows]
    first = max(cell_len(name) for name, _ in rows)
    widths = {column: max(len(cells[column]) for _, cells in rows) for column in table.columns}
    lines = [
        name.ljust(first) + "".join(f"  {cells[key].rjust(size)}" for key, size in widths.items()) for name, cells in rows
    ]
    if len(lines[1]) + len(pays) + 3 <= WIDTH - LABEL:
        lines[1] += f"   {pays}"
        return lines
    return [*lines, pays]
