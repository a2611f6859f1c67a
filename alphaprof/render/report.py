"""Joins a report to what draws it, and writes its Markdown for pull requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from alphaprof.render.html.page import render_html
from alphaprof.render.markdown import SIGNS, block_lines, escaped, escaped_sentence, heading, row
from alphaprof.render.sections.contents import ALL, chosen
from alphaprof.render.terminal import render_terminal
from alphaprof.render.wording import ACCEPT_AT_1, alpha_name, any_engine, at_best, of_all, speedup_lines
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import Result

COMMENT = 65_000  # characters: a comment on GitHub holds 65,536, and needs room for what an action adds


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
        """Prints the sections that were asked for, or the whole report."""
        render_terminal(self, console, *([self._show] if self._show else []))

    def md(self) -> str:
        """Returns the verdict, the domains and the sections, for pull requests."""
        return report_markdown(self, self._show)

    def html(self) -> str:
        """Returns one self-contained page. Raises `ExtraMissing` where the packages that draw it are missing."""
        return render_html(self)


def report_markdown(report: Report, show: Sequence[str] = ()) -> str:
    """Returns the report's verdict and its domains, then all sections folded, or those of `show` alone and unfolded."""
    traffic = report.traffic
    about = f"speculative decoding, at least {traffic.min_speedup:g}x wanted"
    lines = heading(traffic.verdict, about, traffic.reason)
    if traffic.tokens_per_round is not None:
        emits = fmt.interval(traffic.tokens_per_round)
        setting = f"Draft {escaped(str(traffic.draft))}, rule {escaped(traffic.rule)}, gamma {traffic.gamma}"
        lines += [f"{setting}: a round emits {emits} tokens {escaped_sentence(any_engine(report))}.", ""]
    for line in speedup_lines(traffic, report.confidence):
        lines += [f"{fmt.sentence(line)}.", ""]
    lines += _domains(report)
    lines += _unfolded(report, show) if show else _folded(report, COMMENT - sum(len(line) + 1 for line in lines))
    return "\n".join(lines).rstrip() + "\n"


def _unfolded(report: Report, show: Sequence[str]) -> Iterator[str]:
    """Yields the sections that `show` names."""
    for section in chosen(show, report):
        yield from (f"### {fmt.sentence(section.title)}", "", *block_lines(section.written(report)))


def _folded(report: Report, room: int) -> Iterator[str]:
    """Yields all sections folded, the notes first; those that do not fit into `room` characters are named."""
    left_out = []
    for section in sorted(chosen([ALL], report), key=lambda section: section.name != "notes"):
        summary = f"<summary>{fmt.sentence(section.title)}</summary>"
        lines = ["<details>", summary, "", *block_lines(section.written(report)), "</details>", ""]
        size = sum(len(line) + 1 for line in lines)
        if size > room:
            left_out.append(section.name)
        else:
            room -= size
            yield from lines
    if left_out:
        yield f"Too long for a comment on GitHub: {', '.join(left_out)}. `alphaprof report --show NAME` prints one."


def _domains(report: Report) -> Iterator[str]:
    """Yields the one table, a row for each domain, draft and rule of the verdict; nothing where there are none."""
    judged = [result for result in report.results if result.verdict is not None]
    if not judged:
        return
    heads = {draft for draft in report.run.drafts if alpha_name(report.run, draft) != "alpha"}
    level = fmt.level(report.confidence)
    yield f"| domain | draft | rule | documents | alpha | gamma | tokens/round | speedup ({level}) | of all | |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|---|"
    yield from (_row(result, " @1" if result.draft in heads else "") for result in judged)
    yield ""
    if any(result.draft in heads for result in judged):
        yield f"@1: accept@1, {ACCEPT_AT_1}"
        yield ""


def _row(result: Result, mark: str) -> str:
    best = at_best(result)
    return row(
        *map(escaped, (result.domain, result.draft, result.rule)),
        fmt.documents(result.documents, result.clusters),
        fmt.share_with_interval(result.alpha) + mark,
        str(best.gamma) if best else fmt.NOTHING,
        fmt.interval(best.tokens_per_round if best else None),
        fmt.interval(result.speedup, "x"),
        of_all(result),
        f"{SIGNS[str(result.verdict)]} {result.verdict}",
    )
