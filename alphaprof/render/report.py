"""Joins a report to what draws it, and writes its short Markdown. Its tables are in `terminal.py`."""

from __future__ import annotations

from rich.console import Console

from alphaprof.render.html.page import render_html
from alphaprof.render.markdown import SIGNS, escaped, escaped_sentence, heading, row
from alphaprof.render.terminal import render_terminal
from alphaprof.render.wording import ACCEPT_AT_1, alpha_name, any_engine, at_best, of_all, speedup_lines, text_name
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import Result


class ReportAnswer(Report):
    """A report with its texts, which the folder `report` cannot import."""

    @classmethod
    def of(cls, report: Report) -> ReportAnswer:
        """Returns the same report."""
        return cls(**vars(report))

    def terminal(self, console: Console) -> None:
        """Prints the verdict, every domain, and what stands behind them."""
        render_terminal(self, console)

    def md(self) -> str:
        """Returns the verdict, the domains and the notes, for pull requests."""
        return report_markdown(self)

    def html(self) -> str:
        """Returns one self-contained page. Raises `ExtraMissing` where the packages that draw it are missing."""
        return render_html(self)


def report_markdown(report: Report) -> str:
    """The report's verdict, its domains and its notes."""
    traffic = report.traffic
    about = f"speculative decoding, at least {traffic.min_speedup:g}x wanted"
    lines = heading(traffic.verdict, about, traffic.reason)
    if traffic.tokens_per_round is not None:
        emits = fmt.interval(traffic.tokens_per_round)
        setting = f"Draft {escaped(str(traffic.draft))}, rule {escaped(traffic.rule)}, gamma {traffic.gamma}"
        lines += [f"{setting}: a round emits {emits} tokens {escaped_sentence(any_engine(report))}.", ""]
    for line in speedup_lines(traffic, report.confidence):
        lines += [f"{fmt.sentence(line)}.", ""]
    heads = {draft for draft in report.run.drafts if alpha_name(report.run, draft) != "alpha"}
    judged = [result for result in report.results if result.verdict is not None]
    rows = [_row(result, " @1" if result.draft in heads else "") for result in judged]
    if rows:
        level = fmt.level(report.confidence)
        lines += [
            f"| domain | draft | rule | documents | alpha | gamma | tokens/round | speedup ({level}) | of all | |",
            "|---|---|---|--:|--:|--:|--:|--:|--:|---|",
            *rows,
            "",
        ]
    if any(result.draft in heads for result in judged):
        lines += [
            f"@1: accept@1, {ACCEPT_AT_1}",
            "",
        ]
    for item in report.vocabulary:
        share = fmt.share_with_interval(item.proposable)
        text = escaped(text_name(item, report.vocabulary, not item.on_policy))
        lines += [f"- {text}: draft {escaped(item.draft)} can propose {share} of the tokens, and no more are accepted."]
    lines += [f"- {escaped_sentence(note.message)}. {escaped_sentence(fmt.sentence(note.remedy))}." for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


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
