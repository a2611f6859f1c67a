"""Renderings for pull requests and CI: Markdown of a report and of a check, and JUnit XML of a check."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from alphaprof.report import format as fmt
from alphaprof.report.check import Check, Item
from alphaprof.report.format import short, visible
from alphaprof.report.model import GammaResult, Report, Result
from alphaprof.report.wording import at_best, of_all, speedup_lines

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
        yield _row(
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


def check_markdown(check: Check) -> str:
    """A check's outcome and its thresholds."""
    against = f" against {escaped(check.baseline)}" if check.baseline else ""
    lines = [
        f"## {SIGNS[check.outcome]} {check.outcome}: draft quality of {escaped(str(check.draft))}{against}",
        "",
        escaped_sentence(check.reason),
        "",
    ]
    if check.paired is not None:
        lines += [f"{fmt.many(check.paired, 'document')} paired by prompt.", ""]
    if check.items:
        lines += ["| domain | measure | documents | at least | value | bounds | |", "|---|---|--:|--:|--:|--:|---|"]
        lines += [_row(*_cells(item)) for item in check.items]
    notes = [f"- {escaped(item.domain)}: {escaped_sentence(item.note)}" for item in check.items if item.note]
    notes += [f"- not judged: {escaped(item.domain)} ({escaped_sentence(item.reason)})" for item in check.unjudged]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines).rstrip() + "\n"


def _cells(item: Item) -> tuple[str, ...]:
    bounds = f"{_plain(item.low)} to {_plain(item.high)}" if item.low is not None else fmt.NOTHING
    sign = f"{SIGNS[item.outcome]} {item.outcome}"
    return (
        escaped(item.domain),
        item.measure,
        fmt.count(item.documents),
        f"{item.threshold:g}",
        _plain(item.value),
        bounds,
        sign,
    )


def _plain(value: float | None) -> str:
    if value is None:
        return fmt.NOTHING
    return f"{value:.3f}" if math.isfinite(value) else "inf"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def check_junit(check: Check) -> str:
    """A check as JUnit XML: a test case a threshold; what is undecided, or could not be judged, is skipped."""
    items = check.items
    counts = {name: sum(item.outcome == name for item in items) for name in ("fail", "undecided")}
    suite = ET.Element(
        "testsuite",
        name="alphaprof check",
        tests=str(max(len(items), 1) + len(check.unjudged)),
        failures=str(counts["fail"] if items else int(check.outcome == "fail")),
        skipped=str((counts["undecided"] if items else int(check.outcome == "undecided")) + len(check.unjudged)),
    )
    for item in items:
        case = ET.SubElement(suite, "testcase", classname=f"{check.draft}.{item.measure}", name=visible(short(item.domain)))
        found = [f"bounds {_plain(item.low)} to {_plain(item.high)}"] if item.low is not None else []
        found += [item.note] if item.note else []
        _outcome(case, item.outcome, f"{_plain(item.value)}, {', '.join(found)}, at least {item.threshold:g}")
    for left in check.unjudged:
        case = ET.SubElement(suite, "testcase", classname=f"{check.draft}.baseline", name=visible(short(left.domain)))
        _outcome(case, "undecided", f"not judged: {left.reason}")
    if not items:
        _outcome(ET.SubElement(suite, "testcase", classname="alphaprof", name="decision"), check.outcome, check.reason)
    ET.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _outcome(case: ET.Element, outcome: str, text: str) -> None:
    if outcome != "pass":
        ET.SubElement(case, "failure" if outcome == "fail" else "skipped", message=visible(text))
