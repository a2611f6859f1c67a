"""The Markdown rendering of a report, for pull requests, and how untrusted text is written in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from alphaprof.render.wording import at_best, of_all, speedup_lines
from alphaprof.report import format as fmt
from alphaprof.report.format import short, visible
from alphaprof.report.model import GammaResult, Report, Result

SYMBOLS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>@:])")
SYMBOLS_IN_SENTENCES = re.compile(r"([\\`*_{}\[\]#|~>@])")
SIGNS = {"GO": "✅", "NO-GO": "❌", "UNDECIDED": "❔", "pass": "✅", "fail": "❌", "undecided": "❔"}


def escaped(text: str) -> str:
    """Untrusted text as Markdown that means nothing but itself: no markup, HTML, mentions, links or line breaks."""
    return _neutral(SYMBOLS, short(text))


def report_markdown(report: Report) -> str:
    """The report's verdict, its domains and its notes."""
    traffic = report.traffic
    lines = [
        f"## {SIGNS[traffic.verdict]} {traffic.verdict}: speculative decoding, at least {traffic.min_speedup:g}x wanted",
        "",
        escaped_sentence(traffic.reason),
        "",
    ]
    if traffic.tokens_per_round is not None:
        emits = fmt.interval(traffic.tokens_per_round)
        setting = f"Draft {escaped(str(traffic.draft))}, rule {escaped(traffic.rule)}, gamma {traffic.gamma}"
        lines += [f"{setting}: a round emits {emits} tokens on any engine.", ""]
    for line in speedup_lines(traffic, report.confidence):
        lines += [f"{fmt.sentence(line)}.", ""]
    rows = list(_rows(report.results))
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


def _rows(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        if result.verdict is None:
            continue
        best = at_best(result)
        yield row(
            escaped(result.domain),
            escaped(result.draft),
            escaped(result.rule),
            fmt.documents(result.documents, result.clusters),
            fmt.share_interval(result.alpha),
            *_numbers(best),
            fmt.interval(result.speedup, "x"),
            of_all(result),
            f"{SIGNS[result.verdict]} {result.verdict}",
        )


def _numbers(best: GammaResult | None) -> tuple[str, str]:
    if best is None:
        return fmt.NOTHING, fmt.NOTHING
    return str(best.gamma), fmt.interval(best.tokens_per_round)


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"
