"""A check as text: the terminal's table (rich), JSON, and for pull requests and CI Markdown and JUnit XML."""

from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree as ET

from rich.console import Console
from rich.text import Text

from alphaprof.commands.check.build import DIFFERENCE, SPEEDUP, TOKENS_DIFFERENCE, Check, Item
from alphaprof.render.json import plain_values
from alphaprof.render.markdown import SIGNS, escaped, escaped_sentence, row
from alphaprof.render.tables import named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.report.format import short, visible

FORMAT = "alphaprof-check"
VERSION = 1
WORDS = {"pass": ("PASS", "bold green"), "fail": ("FAIL", "bold red"), "undecided": ("UNDECIDED", "bold yellow")}


def check_json(check: Check) -> str:
    """The check as JSON. Unknown values are null, an infinite bound is the string "inf"."""
    content = {"format": FORMAT, "version": VERSION} | plain_values(dataclasses.asdict(check))
    return json.dumps(content, indent=2, allow_nan=False)


def check_terminal(check: Check, console: Console) -> None:
    """Print what was checked, each threshold with its bounds, and the outcome."""
    console.print(plain(f"run {check.run}"))
    if check.baseline is not None and check.unpaired is not None:
        new, old = check.unpaired
        console.print(plain(f"baseline {check.baseline}"))
        console.print(
            f"{fmt.many(check.paired or 0, 'document')} paired by prompt; without a partner: {new} of the run, {old} of the "
            "baseline",
            highlight=False,
        )
    gamma = f", gamma {check.gamma}" if check.gamma is not None else ""
    console.print(plain(f"draft {check.draft or 'none chosen'}, rule {check.rule}{gamma}"))
    if check.items:
        console.print()
        _table(check, console)
    _beside(check, console)
    word, style = WORDS[check.outcome]
    console.print(Text(word, style).append_text(plain(f"  {check.reason}")))
    level = fmt.level(check.confidence)
    for line in (
        f"bounds: one-sided; the lower ones at {level}, the upper ones at {level} over all thresholds together (Holm), "
        "so that they widen with their number.",
        "pass: every lower bound reaches its threshold. fail: some upper bound is below it. else undecided.",
    ):
        console.print(line, style="dim", highlight=False)


def _table(check: Check, console: Console) -> None:
    table = named_table("domain", "measure", "docs", "at least", "value", "bounds", "outcome", left=("measure", "outcome"))
    for item in check.items:
        word, style = WORDS[item.outcome]
        cells = (item.measure, fmt.count(item.documents), _number(item, item.threshold), _number(item, item.value))
        bounds = fmt.NOTHING if item.low is None else f"[{_number(item, item.low)}, {_number(item, item.high)}]"
        table.add_row(plain(short(item.domain)), *cells, bounds, Text(word, style))
    show(table, "thresholds", console)
    console.print()


def _beside(check: Check, console: Console) -> None:
    """What the table does not hold: notes on items, and what was not judged."""
    noted = [f"{short(item.domain)}: {item.note}" for item in check.items if item.note]
    noted += [f"not judged: {short(item.domain)} ({item.reason})" for item in check.unjudged]
    for line in noted:
        console.print(plain(line))
    if noted:
        console.print()


def _number(item: Item, value: float | None) -> str:
    if value is not None and item.measure in (DIFFERENCE, TOKENS_DIFFERENCE):
        return f"{value:+.3f}"
    return fmt.number(value, 3, "x" if item.measure == SPEEDUP else "")


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
        lines += [row(*_cells(item)) for item in check.items]
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
