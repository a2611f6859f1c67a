"""The Markdown rendering of a report, for pull requests, and how untrusted text is written in Markdown."""

from __future__ import annotations

import re

from alphaprof.render.wording import at_best, of_all, speedup_lines
from alphaprof.report import format as fmt
from alphaprof.report.format import short, visible
from alphaprof.report.model import Report, Result

SYMBOLS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>@:])")
SYMBOLS_IN_SENTENCES = re.compile(r"([\\`*_{}\[\]#|~>@])")
SIGNS = {"GO": "✅", "NO-GO": "❌", "UNDECIDED": "❔", "pass": "✅", "fail": "❌", "undecided": "❔"}


def escaped(text: str) -> str:
    """Untrusted text as Markdown that means nothing but itself: no markup, HTML, mentions, links or line breaks."""
    return _neutral(SYMBOLS, short(text))


def report_markdown(report: Report) -> str:
    """The report's verdict, its domains and its notes."""
    traffic = report.traffic
    about = f"speculative decoding, at least {traffic.min_speedup:g}x wanted"
    lines = heading(traffic.verdict, about, traffic.reason)
    if traffic.tokens_per_round is not None:
        emits = fmt.interval(traffic.tokens_per_round)
        setting = f"Draft {escaped(str(traffic.draft))}, rule {escaped(traffic.rule)}, gamma {traffic.gamma}"
        lines += [f"{setting}: a round emits {emits} tokens on any engine.", ""]
    for line in speedup_lines(traffic, report.confidence):
        lines += [f"{fmt.sentence(line)}.", ""]
    rows = [_row(result) for result in report.results if result.verdict is not None]
    if rows:
        level = fmt.level(report.confidence)
        lines += [
            f"| domain | draft | rule | documents | alpha | gamma | tokens/round | speedup ({level}) | of all | |",
            "|---|---|---|--:|--:|--:|--:|--:|--:|---|",
            *rows,
            "",
        ]
    lines += [
        f"- {escaped_sentence(note.message)}. {escaped_sentence(fmt.sentence(note.remedy))}." for note in report.warnings
    ]
    return "\n".join(lines).rstrip() + "\n"


def escaped_sentence(text: str) -> str:
    """A sentence of ours that may quote names: escaped whole, but for what sentences are made of."""
    return _neutral(SYMBOLS_IN_SENTENCES, text)


def _neutral(symbols: re.Pattern[str], text: str) -> str:
    return symbols.sub(r"\\\1", visible(text)).replace("&", "&amp;").replace("<", "&lt;")


def _row(result: Result) -> str:
    best = at_best(result)
    return row(
        *map(escaped, (result.domain, result.draft, result.rule)),
        fmt.documents(result.documents, result.clusters),
        fmt.share_interval(result.alpha),
        str(best.gamma) if best else fmt.NOTHING,
        fmt.interval(best.tokens_per_round if best else None),
        fmt.interval(result.speedup, "x"),
        of_all(result),
        f"{SIGNS[str(result.verdict)]} {result.verdict}",
    )


def heading(outcome: str, about: str, reason: str) -> list[str]:
    """The first lines of an answer: its outcome, what that is about, and why."""
    return [f"## {SIGNS[outcome]} {outcome}: {about}", "", escaped_sentence(reason), ""]


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"
