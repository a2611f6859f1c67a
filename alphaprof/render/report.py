"""Joins a report to what draws it, and writes its Markdown for pull requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from alphaprof.render.first_screen import ALONE, WORDS, first_screen, first_screen_csv
from alphaprof.render.html.page import render_html
from alphaprof.render.markdown import SIGNS, block_lines, escaped, escaped_sentence, row
from alphaprof.render.sections.contents import ALL, chosen
from alphaprof.render.terminal import render_terminal
from alphaprof.report import format as fmt
from alphaprof.report.build import Report

COMMENT = 50_000  # bytes: a comment on GitHub holds 65,536, and the action adds to it


class ReportAnswer(Report):
    """A report with its texts, which the folder `report` cannot import, and the sections that its reader asked for."""

    _show: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: Report, show: Sequence[str] = ()) -> ReportAnswer:
        """Returns the same report. `show`: names of the sections that terminal and Markdown print; none: what they print by
        themselves.
        """
        answer = cls(**vars(report))
        object.__setattr__(answer, "_show", tuple(show))
        return answer

    def terminal(self, console: Console) -> None:
        """Prints the first screen, or the sections that were asked for."""
        render_terminal(self, console, self._show)

    def csv(self) -> str:
        """Returns the one table: a row a domain, then the whole traffic."""
        return first_screen_csv(self)

    def md(self) -> str:
        """Returns the verdict, the domains and the sections, for pull requests."""
        return report_markdown(self, self._show)

    def html(self) -> str:
        """Returns one self-contained page. Raises `ExtraMissing` where the packages that draw it are missing."""
        return render_html(self)


def report_markdown(report: Report, show: Sequence[str] = ()) -> str:
    """Returns the first screen, then all sections folded, or those of `show` alone and unfolded."""
    screen = first_screen(report)
    lines = [f"## {SIGNS[screen.verdict]} {screen.verdict}: {escaped_sentence(screen.about[0])}", ""]
    for line in (*screen.about[1:], "; ".join(screen.route), screen.times, screen.run):
        lines += [escaped_sentence(line), ""] if line else []
    lines += [
        row(*map(escaped_sentence, screen.headings)),
        row(*("---" if name in WORDS else "--:" for name in screen.columns)),
    ]
    for cells in (*screen.rows, *([screen.total] if screen.total else [])):
        named = dict(zip(screen.columns, map(escaped_sentence, cells), strict=True))
        verdict = cells[screen.columns.index("verdict")]
        named |= {"domain": escaped(cells[0]), "verdict": f"{SIGNS[verdict.rstrip(ALONE)]} {escaped_sentence(verdict)}"}
        lines.append(row(*named.values()))
    lines += ["", *(f"{escaped_sentence(line)}\n" for line in screen.below)]
    lines += _unfolded(report, show) if show else _folded(report, COMMENT - _bytes(lines))
    return "\n".join(lines).rstrip() + "\n"


def _unfolded(report: Report, show: Sequence[str]) -> Iterator[str]:
    """Yields the sections that `show` names."""
    for section in chosen(show, report):
        yield from (f"### {fmt.sentence(section.title)}", "", *block_lines(section.written(report)))


def _folded(report: Report, room: int) -> Iterator[str]:
    """Yields all sections folded, the notes first; those that do not fit into `room` bytes are named."""
    left_out = []
    for section in sorted(chosen([ALL], report), key=lambda section: section.name != "notes"):
        summary = f"<summary>{fmt.sentence(section.title)}</summary>"
        lines = ["<details>", summary, "", *block_lines(section.written(report)), "</details>", ""]
        size = _bytes(lines)
        if size > room:
            left_out.append(section.name)
        else:
            room -= size
            yield from lines
    if left_out:
        yield f"Too long for a comment on GitHub: {', '.join(left_out)}. `alphaprof report --show NAME` prints one."


def _bytes(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)
