"""The outcome of a check: the value that `alphaprof check` answers with, its table (rich), Markdown and JUnit XML."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.console import Console
from rich.text import Text

from alphaprof.errors import CheckFailed, CheckUndecided
from alphaprof.render.markdown import SIGNS, escaped, escaped_sentence, heading, row
from alphaprof.render.tables import named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.report.format import short, visible
from alphaprof.stats.gates import Outcome

Measure = Literal["alpha", "acceptance_length", "speedup", "alpha_difference", "tokens_per_round_difference"]
ALPHA: Measure = "alpha"
LENGTH: Measure = "acceptance_length"
SPEEDUP: Measure = "speedup"
DIFFERENCE: Measure = "alpha_difference"
TOKENS_DIFFERENCE: Measure = "tokens_per_round_difference"
WORDS = {"pass": ("PASS", "bold green"), "fail": ("FAIL", "bold red"), "undecided": ("UNDECIDED", "bold yellow")}


@dataclass(frozen=True)
class Item:
    """One quantity and its threshold. `low`, `high`: the one-sided bounds that it was judged by; None where it fails or
    passes without them, for the reason in `note`.
    """

    measure: Measure  # what the threshold is a limit of
    domain: str
    threshold: float  # the least value that passes
    value: float | None
    low: float | None
    high: float | None
    documents: int  # independent ones
    outcome: Outcome  # of this threshold alone
    note: str | None = None  # what decided without bounds, or what the bounds do not say


@dataclass(frozen=True)
class Unjudged:
    """A domain, or some of its text, that has no part in the outcome."""

    domain: str
    reason: str  # why it has none


@dataclass(frozen=True, kw_only=True)
class Check:
    """The whole check. `paired`: documents with a partner in the baseline; `unpaired` in the run and in the baseline."""

    format: ClassVar[str] = "alphaprof-check"
    version: ClassVar[int] = 1

    outcome: Outcome  # of all thresholds together
    reason: str
    run: str
    baseline: str | None = None  # the older run and its draft; None: judged by thresholds or a decision
    draft: str | None
    rule: str
    gamma: int | None
    confidence: float
    items: tuple[Item, ...]  # one for each threshold and domain
    unjudged: tuple[Unjudged, ...] = ()  # domains of the baseline or the run that could not be compared
    paired: int | None = None
    unpaired: tuple[int, int] | None = None  # documents without a partner: in the run, in the baseline

    def terminal(self, console: Console) -> None:
        """Prints what was checked, each threshold with its bounds, and the outcome."""
        console.print(plain(f"run {self.run}"))
        if self.baseline is not None and self.unpaired is not None:
            new, old = self.unpaired
            console.print(plain(f"baseline {self.baseline}"))
            console.print(
                f"{fmt.many(self.paired or 0, 'document')} paired by prompt; without a partner: {new} of the run, {old} of "
                "the baseline",
                highlight=False,
            )
        gamma = f", gamma {self.gamma}" if self.gamma is not None else ""
        console.print(plain(f"draft {self.draft or 'none chosen'}, rule {self.rule}{gamma}"))
        if self.items:
            console.print()
            _table(self, console)
        _beside(self, console)
        word, style = WORDS[self.outcome]
        console.print(Text(word, style).append_text(plain(f"  {self.reason}")))
        level = fmt.level(self.confidence)
        for line in (
            f"bounds: one-sided; the lower ones at {level}, the upper ones at {level} over all thresholds together (Holm), "
            "so that they widen with their number.",
            "pass: every lower bound reaches its threshold. fail: some upper bound is below it. else undecided.",
        ):
            console.print(line, style="dim", highlight=False)

    def md(self) -> str:
        """Returns the outcome and the thresholds, for pull requests."""
        against = f" against {escaped(self.baseline)}" if self.baseline else ""
        lines = heading(self.outcome, f"draft quality of {escaped(str(self.draft))}{against}", self.reason)
        if self.paired is not None:
            lines += [f"{fmt.many(self.paired, 'document')} paired by prompt.", ""]
        if self.items:
            lines += ["| domain | measure | documents | at least | value | bounds | |", "|---|---|--:|--:|--:|--:|---|"]
            lines += [row(*_cells(item)) for item in self.items]
        notes = [f"- {escaped(item.domain)}: {escaped_sentence(item.note)}" for item in self.items if item.note]
        notes += [f"- not judged: {escaped(item.domain)} ({escaped_sentence(item.reason)})" for item in self.unjudged]
        if notes:
            lines += ["", *notes]
        return "\n".join(lines).rstrip() + "\n"

    def junit(self) -> str:
        """Returns JUnit XML: a test case a threshold; what is undecided, or could not be judged, is skipped."""
        items = self.items
        counts = {name: sum(item.outcome == name for item in items) for name in ("fail", "undecided")}
        suite = ET.Element(
            "testsuite",
            name="alphaprof check",
            tests=str(max(len(items), 1) + len(self.unjudged)),
            failures=str(counts["fail"] if items else int(self.outcome == "fail")),
            skipped=str((counts["undecided"] if items else int(self.outcome == "undecided")) + len(self.unjudged)),
        )
        for item in items:
            case = ET.SubElement(
                suite, "testcase", classname=f"{self.draft}.{item.measure}", name=visible(short(item.domain))
            )
            notes = [f"bounds {_plain(item.low)} to {_plain(item.high)}"] if item.low is not None else []
            notes += [item.note] if item.note else []
            _outcome(case, item.outcome, f"{_plain(item.value)}, {', '.join(notes)}, at least {item.threshold:g}")
        for left in self.unjudged:
            case = ET.SubElement(suite, "testcase", classname=f"{self.draft}.baseline", name=visible(short(left.domain)))
            _outcome(case, "undecided", f"not judged: {left.reason}")
        if not items:
            _outcome(ET.SubElement(suite, "testcase", classname="alphaprof", name="decision"), self.outcome, self.reason)
        ET.indent(suite)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def require_passed(check: Check, undecided_fails: bool) -> None:
    """Raise `CheckFailed`, or `CheckUndecided` where that is asked for."""
    if check.outcome == "fail":
        raise CheckFailed(f"check failed: {check.reason}", "alphaprof report shows where acceptance is lost")
    if check.outcome == "undecided" and undecided_fails:
        raise CheckUndecided(f"check undecided: {check.reason}", "profile more documents, or --undecided pass")


def reason_of(items: Sequence[Item], outcome: Outcome, unjudged: Sequence[Unjudged] = (), passed: str | None = None) -> str:
    """The items that decided, in words, and what was not judged. `passed`: why all pass, where no bound shows it."""
    decisive = [item for item in items if item.outcome == outcome]
    parts = []
    if outcome == "pass":
        reached = f"all {len(items)} thresholds are reached" if len(items) > 1 else "the threshold is reached"
        parts.append(passed or reached)
    else:
        parts += [f"{item.measure} of {short(item.domain)}: {item.note}" for item in decisive if item.low is None]
        if judged := [item for item in decisive if item.low is not None]:
            named = ", ".join(f"{item.measure} of {short(item.domain)}" for item in judged)
            parts.append(f"{named} {'below' if outcome == 'fail' else 'neither shown to reach nor to miss'} the threshold")
    if unjudged:
        parts.append(f"not judged: {', '.join(dict.fromkeys(short(item.domain) for item in unjudged))}")
    return "; ".join(parts)


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


def _cells(item: Item) -> tuple[str, ...]:
    bounds = f"{_plain(item.low)} to {_plain(item.high)}" if item.low is not None else fmt.NOTHING
    sign = f"{SIGNS[item.outcome]} {item.outcome}"
    numbers = (fmt.count(item.documents), f"{item.threshold:g}", _plain(item.value))
    return (escaped(item.domain), item.measure, *numbers, bounds, sign)


def _plain(value: float | None) -> str:
    if value is None:
        return fmt.NOTHING
    return f"{value:.3f}" if math.isfinite(value) else "inf"


def _outcome(case: ET.Element, outcome: str, text: str) -> None:
    if outcome != "pass":
        ET.SubElement(case, "failure" if outcome == "fail" else "skipped", message=visible(text))
