"""The outcome of a check: the value that `alphaprof check` answers with, its table (rich), Markdown and JUnit XML."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.console import Console
from rich.text import Text

from alphaprof.errors import CheckFailed, CheckUndecided
from alphaprof.render.markdown import SIGNS, escaped, escaped_sentence, heading, row
from alphaprof.render.tables import named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.report.format import short, visible
from alphaprof.report.model import Note
from alphaprof.stats.gates import Outcome

Measure = Literal[
    "alpha",
    "accept@1",  # alpha of a head, which holds for first drafts
    "acceptance_length",
    "speedup",
    "alpha_difference",
    "tokens_per_round_difference",
]
WHOLE = "whole traffic"
WORDS = {"pass": ("PASS", "bold green"), "fail": ("FAIL", "bold red"), "undecided": ("UNDECIDED", "bold yellow")}

NEXT: dict[Outcome, str] = {
    "pass": "later runs can be checked against this one with --baseline",
    "fail": "alphaprof report of the run shows where acceptance is lost",
    "undecided": "the reason says what is missing; --undecided fail stops a pipeline here",
}


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
    version: ClassVar[str] = "1.0"

    outcome: Outcome  # of all thresholds together
    reason: str
    run: str
    baseline: str | None = None  # the older run and its draft; None: judged by thresholds or a decision
    draft: str | None
    rule: str
    gamma: int | None
    confidence: float
    items: tuple[Item, ...]  # one for each threshold and domain
    notes: tuple[Note, ...] = ()  # of the run's report, those that concern what was checked
    unjudged: tuple[Unjudged, ...] = ()  # domains of the baseline or the run that could not be compared
    paired: int | None = None
    unpaired: tuple[int, int] | None = None  # documents without a partner: in the run, in the baseline

    def terminal(self, console: Console) -> None:
        """Prints the outcome and the worst threshold, what was checked, and each threshold with its bounds."""
        word, style = WORDS[self.outcome]
        first, *others = _answer(self)
        console.print(Text(word, style).append_text(plain(f"  {first}")), highlight=False)
        console.print(*map(plain, others), "", plain(f"run {self.run}"), sep="\n", highlight=False)
        if self.baseline is not None and self.unpaired is not None:
            new, old = self.unpaired
            console.print(plain(f"baseline {self.baseline}"))
            paired = f"{fmt.many(self.paired or 0, 'document')} paired by prompt"
            console.print(f"{paired}; without a partner: {new} of the run, {old} of the baseline", highlight=False)
        gamma = f", gamma {self.gamma}" if self.gamma is not None else ""
        console.print(plain(f"draft {self.draft or 'none chosen'}, rule {self.rule}{gamma}"))
        if self.items:
            console.print()
            _table(self, console)
        if notes := list(_notes(self, short, str)):
            console.print(*map(plain, notes), "", sep="\n")
        level = fmt.level(self.confidence)
        deciding = "every lower bound" if self.baseline is None else "the first lower bound"
        for line in (
            f"bounds: one-sided; the lower ones at {level}, the upper ones at {level} over all thresholds together (Holm), "
            "so that they widen with their number.",
            f"pass: {deciding} reaches its threshold. fail: some upper bound is below it. else undecided.",
        ):
            console.print(line, style="dim", highlight=False)

    def md(self) -> str:
        """Returns the outcome and the thresholds, for pull requests."""
        against = f" against {escaped(self.baseline)}" if self.baseline else ""
        first, *others = _answer(self)
        lines = heading(self.outcome, f"draft quality of {escaped(str(self.draft))}{against}", first)
        for line in others:
            lines += [f"{escaped_sentence(line)}.", ""]
        if self.paired is not None:
            lines += [f"{fmt.many(self.paired, 'document')} paired by prompt.", ""]
        if self.items:
            lines += ["| domain | measure | documents | at least | value | bounds | |", "|---|---|--:|--:|--:|--:|---|"]
            for item in self.items:
                named = (escaped(item.domain), item.measure, fmt.count(item.documents), f"{item.threshold:g}")
                lines.append(row(*named, _number(item, item.value), _bounds(item), f"{SIGNS[item.outcome]} {item.outcome}"))
        if notes := [f"- {note}" for note in _notes(self, escaped, escaped_sentence)]:
            lines += ["", *notes]
        return "\n".join(lines).rstrip() + "\n"

    def junit(self) -> str:
        """Returns JUnit XML: a test case a threshold; what is undecided, or could not be judged, is skipped."""
        suite = ET.Element("testsuite", name="alphaprof check")
        for item in self.items:
            notes = [f"bounds {_bounds(item)}"] if item.low is not None else []
            notes += [item.note] if item.note else []
            text = f"{_number(item, item.value)}, {', '.join(notes)}, at least {item.threshold:g}"
            _case(suite, f"{self.draft}.{item.measure}", item.domain, item.outcome, text)
        for left in self.unjudged:
            _case(suite, f"{self.draft}.baseline", left.domain, "undecided", f"not judged: {left.reason}")
        if not self.items:
            _case(suite, "alphaprof", "decision", self.outcome, self.reason)
        suite.set("tests", str(len(suite)))
        for count, outcome in (("failures", "failure"), ("skipped", "skipped")):
            suite.set(count, str(len(suite.findall(f"*/{outcome}"))))
        ET.indent(suite)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def require_passed(check: Check, undecided_fails: bool) -> None:
    """Raise `CheckFailed`, or `CheckUndecided` where that is asked for."""
    if check.outcome == "fail":
        raise CheckFailed(f"check failed: {check.reason}", "alphaprof report shows where acceptance is lost")
    if check.outcome == "undecided" and undecided_fails:
        raise CheckUndecided(f"check undecided: {check.reason}", "do what the reason says, or --undecided pass")


def reason_of(items: Sequence[Item], outcome: Outcome, unjudged: Sequence[Unjudged] = (), passed: str | None = None) -> str:
    """The items that decided, in words, and what was not judged. `passed`: why all pass, where no bound shows it."""
    if outcome == "pass":
        parts = [passed or (f"all {len(items)} thresholds are reached" if len(items) > 1 else "the threshold is reached")]
    else:
        decisive = [(item, f"{item.measure} of {short(item.domain)}") for item in items if item.outcome == outcome]
        parts = [f"{name}: {item.note}" for item, name in decisive if item.low is None]
        if judged := ", ".join(name for item, name in decisive if item.low is not None):
            surer = " or surer step times" if any(item.measure == "speedup" for item, _ in decisive) else ""
            unclear = f"neither shown to reach nor to miss the threshold: more documents{surer} would narrow the bounds"
            parts.append(f"{judged} {'below the threshold' if outcome == 'fail' else unclear}")
    if unjudged:
        parts.append(f"not judged: {', '.join(dict.fromkeys(short(item.domain) for item in unjudged))}")
    return "; ".join(parts)


def _answer(check: Check) -> Iterator[str]:
    """Yields the worst threshold with its bounds, how many there are of each outcome, what to do next, and the reason."""
    by_domain = check.baseline is not None and len(check.items) > 1
    if check.items:
        decides = by_domain and check.outcome != "fail"
        worst = check.items[0] if decides else min(check.items, key=_standing)
        bounds = "" if worst.low is None else f" {_bounds(worst)}"
        measured = f"{worst.measure.replace('_', ' ')} {_number(worst, worst.value)}{bounds}"
        wanted = f"at least {_number(worst, worst.threshold)} wanted"
        yield f"{short(worst.domain)}: {measured}, {wanted}, {fmt.many(worst.documents, 'document')}"
    outcomes = [item.outcome for item in check.items[by_domain:]]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in WORDS if outcome in outcomes)
    if by_domain:
        yield f"of {fmt.many(len(outcomes), 'domain')}: {counts}; a domain decides only if it fails"
    elif len(outcomes) > 1:
        yield f"that is the worst of {len(outcomes)} thresholds: {counts}"
    lines = [f"next: {NEXT[check.outcome]}", check.reason]
    yield from lines if check.items else reversed(lines)


def _standing(item: Item) -> tuple[int, float]:
    """The worst item has the least: failed before undecided before passed, and then how far its value is from the least."""
    distance = -math.inf if item.value is None else item.value - item.threshold
    return ("fail", "undecided", "pass").index(item.outcome), distance


def _table(check: Check, console: Console) -> None:
    table = named_table("domain", "measure", "docs", "at least", "value", "bounds", "outcome", left=("measure", "outcome"))
    for item in check.items:
        word, style = WORDS[item.outcome]
        cells = (item.measure, fmt.count(item.documents), _number(item, item.threshold), _number(item, item.value))
        table.add_row(plain(short(item.domain)), *cells, Text(_bounds(item)), Text(word, style))
    show(table, "thresholds", console)
    console.print()


def _notes(check: Check, name: Callable[[str], str], sentence: Callable[[str], str]) -> Iterator[str]:
    """Yields what the table does not hold; `name` and `sentence` write domains and reasons."""
    for item in check.items:
        if item.note:
            yield f"{name(item.domain)}: {sentence(item.note)}"
    for left in check.unjudged:
        yield f"not judged: {name(left.domain)} ({sentence(left.reason)})"
    for note in check.notes:
        yield f"note: {sentence(note.message)}; {sentence(note.remedy)}"


def _number(item: Item, value: float | None) -> str:
    if value is not None and item.measure in ("alpha_difference", "tokens_per_round_difference"):
        return f"{value:+.3f}"
    return fmt.number(value, 3, "x" if item.measure == "speedup" else "")


def _bounds(item: Item) -> str:
    return fmt.NOTHING if item.low is None else f"[{_number(item, item.low)}, {_number(item, item.high)}]"


def _case(suite: ET.Element, classname: str, name: str, outcome: Outcome, text: str) -> None:
    case = ET.SubElement(suite, "testcase", classname=classname, name=visible(short(name)))
    if outcome != "pass":
        ET.SubElement(case, "failure" if outcome == "fail" else "skipped", message=visible(text))
