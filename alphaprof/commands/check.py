"""`alphaprof check`: the gate for CI. A run judged by thresholds, by its own decision, or against an older run, at one
confidence for all; and the outcome as a table (rich), Markdown and JUnit XML.

Against a baseline, a draft is compared with an older one on the same prompts, by alpha, and two questions are asked: does
the whole traffic keep what it had, which decides, and is any domain shown to lose more than the margin, which fails too.
Few domains are large enough to be shown to lose nothing: a gate that asked that of each would hardly ever pass.

Alpha of imported runs is not known, and that of a head says nothing of later drafts: these are compared by tokens per
round over all rounds, at the gamma that was served, of the decision, or the largest; so is every draft where a gamma is
named. A draft that proposed something in a domain and no longer does fails there, whatever the margin: nothing is left to
take a bound from, and a gate that skipped it would pass the worst case. The same draft with equal totals has not
changed: it passes, and nothing is estimated.
"""

from __future__ import annotations

import dataclasses
import math
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.text import Text

from alphaprof.costs.speedup import UNTIMED, Speedup, StepTimes, speedup
from alphaprof.errors import CheckFailed, CheckUndecided, NotComparable, OptionInvalid, shown
from alphaprof.log.manifest import CHAIN, PARTIAL, DraftFacts
from alphaprof.log.notes import concerns_of
from alphaprof.log.run import Run, RunDraft, require_drafts, side_of
from alphaprof.render.markdown import SIGNS, escaped, escaped_sentence, heading, row
from alphaprof.render.tables import named_table, plain, show
from alphaprof.report import format as fmt
from alphaprof.report.build import build_report
from alphaprof.report.decision import Mask
from alphaprof.report.format import short, text_kind, visible
from alphaprof.report.inputs import ReportInputs, by_domain, draft_pools, evidence_of
from alphaprof.report.model import Note
from alphaprof.report.pairing import (
    common_gammas,
    deciding_gamma,
    paired_pools,
    require_comparable,
    side_difference,
    side_totals,
)
from alphaprof.report.traffic import judge_traffic, tested_rows
from alphaprof.report.verdict import not_defined
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import NO_SPREAD, Interval, bounded_interval, by_cluster, distinct, pooled_share, ratio
from alphaprof.stats.gates import Gate, Outcome, judge, together
from alphaprof.totals.pool import DocumentTotals, accepted_of, merged, proposes_nothing

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
LOST = "the draft proposes nothing there any more, as it did in the baseline"
FIRST = "of first drafts only: --min-acceptance-length covers the others"
Minimums = Mapping[Measure, Sequence[str] | None]  # as they were written, by measure: X, or DOMAIN=X
SAME = "the same draft with equal totals"
Bounds = Callable[[float], tuple[float, float]]  # by the probability with which each may be wrong
EVERY = ""  # the domain of a threshold that holds for every domain
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
        if self.unpaired is not None:
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
    if len(outcomes) > 1 or by_domain:
        deciding = "; a domain decides only if it fails" if by_domain else ""
        yield f"of {len(outcomes)} {'domains' if by_domain else 'thresholds'}: {counts}{deciding}"
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


def checked(
    path: Path,
    draft: str | None,
    rule: str | None,
    gamma: int | None,
    minimums: Minimums,
    baseline: str | None,
    margin: float,
    target_change: bool,
) -> Check:
    """The check that the options of `alphaprof check` ask for. Raises `OptionInvalid`, `NotComparable`, `RunUnreadable`."""
    thresholds = {measure: _thresholds(measure, texts) for measure, texts in minimums.items() if texts}
    if baseline is not None:
        if thresholds:
            raise OptionInvalid("thresholds and --baseline cannot be combined in one check", "run check once with each")
        new = side_of(f"{path}:{draft}" if draft else str(path))
        named = not os.path.exists(baseline) and ":" in baseline
        old = side_of(baseline if named else f"{baseline}:{new.draft}")
        return check_baseline(new, old, rule, margin, target_change, gamma)
    run = Run.open(path)
    if thresholds:
        return _check_thresholds(run, thresholds, draft, rule, gamma)
    if draft or rule or gamma:
        hint = "add --min-acceptance-length, --min-alpha, --min-speedup or --baseline; else the run's decision is checked"
        raise OptionInvalid("--draft, --rule and --gamma need a threshold or a baseline", hint)
    return check_decision(run)


def concerning(notes: Sequence[Note], *, speedup: bool) -> tuple[Note, ...]:
    """Those of a report's notes that concern what is checked."""
    concern = {"texts", "times", "own times"} if speedup else {"texts"}
    return tuple(note for note in notes if concerns_of(note.code) in concern)


def _thresholds(measure: Measure, texts: Sequence[str]) -> dict[str, float]:
    """Returns least values by domain. Raises `OptionInvalid` for what is not a number, and for a second one of a domain."""
    least: dict[str, float] = {}
    for text in texts:
        domain, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or domain in least:
            hint = "write NUMBER for every domain and DOMAIN=NUMBER for one, each once: code=0.6"
            raise OptionInvalid(f"{shown(text)} is not a threshold for {measure}, or a second one", hint)
        least[domain] = value
    return least


def check_decision(run: Run) -> Check:
    """Judges a run by the decision of its profile: GO passes, NO-GO fails."""
    report = build_report(run)
    traffic, tested = report.traffic, report.traffic.tested
    outcomes: dict[str, Outcome] = {"GO": "pass", "NO-GO": "fail", "UNDECIDED": "undecided"}
    outcome = outcomes[traffic.verdict]
    items: tuple[Item, ...] = ()
    if tested is not None:
        bounds = (tested.value, tested.low, tested.high)
        items = (Item("speedup", WHOLE, traffic.min_speedup, *bounds, traffic.documents, outcome),)
    return Check(
        outcome=outcome,
        notes=concerning(report.notes, speedup=True),
        reason=traffic.reason,
        run=str(run.path),
        draft=traffic.draft,
        rule=traffic.rule,
        gamma=traffic.gamma,
        confidence=report.confidence,
        items=items,
    )


@dataclass(frozen=True)
class _Threshold:
    """The least value of a measure in one domain, and what the measure is taken from. `by_depth`: see `DraftFacts`."""

    measure: Measure
    domain: str
    least: float
    pool: DocumentTotals
    by_depth: bool
    gamma: int | None  # None: alpha
    times: StepTimes | None  # None where no threshold needs them

    @property
    def silent(self) -> bool:
        """Whether the draft proposes nothing on texts that it had every chance on: no luck of the documents, no unknown."""
        had_chances = self.measure != "speedup" and bool(self.pool["tokens"].sum())
        return had_chances and proposes_nothing(self.pool, self.gamma)

    def faster(self) -> Speedup | None:
        return speedup([self.pool.counts(self.gamma)], [1.0], self.times) if self.gamma and self.times else None

    def value(self) -> float | None:
        if self.measure == "speedup":
            return faster.value if (faster := self.faster()) else None
        totals, counts = accepted_of(self.pool, self.gamma)
        return float(totals.sum() / counts.sum()) + (self.gamma is not None) if counts.sum() else None

    def bounds(self, tail: float) -> tuple[float, float]:
        if self.measure == "speedup":
            return faster.deciding(tail) if (faster := self.faster()) else (0.0, math.inf)
        if self.gamma is None:
            alpha = pooled_share(self.pool.cluster, *accepted_of(self.pool, None), 1 - 2 * tail)
            return (alpha.low, alpha.high) if alpha else (0.0, 1.0)
        accepted, rounds = by_cluster(self.pool.cluster, *accepted_of(self.pool, self.gamma))
        if not rounds.sum():
            return 1.0, self.gamma + 1.0
        low, high = bounded_interval(ratio(accepted, rounds), 0.0, float(self.gamma), tail)
        return 1 + low, 1 + high

    def item(self) -> Item:
        """What is known of it without bounds: all, where the draft proposes nothing."""
        documents, first = distinct(self.pool.cluster), self.by_depth and self.measure == "alpha"
        item = partial(Item, "accept@1" if first else self.measure, self.domain, self.least)
        if self.silent:
            return item(None, None, None, documents, "fail", "the draft proposes nothing there")
        return item(self.value(), None, None, documents, "undecided", FIRST if first else None)


def _judged(parts: Sequence[tuple[Item, Bounds | None]], confidence: float) -> tuple[Item, ...]:
    """Items with the outcomes and bounds of their gates, together at one confidence (Holm). An item without bounds stays as
    it is and has no part in the correction of the others.
    """
    results = iter(judge([Gate(item.threshold, bounds) for item, bounds in parts if bounds], confidence))
    return tuple(dataclasses.replace(item, **vars(next(results))) if bounds else item for item, bounds in parts)


def _check_thresholds(
    run: Run, thresholds: Mapping[Measure, Mapping[str, float]], draft: str | None, rule: str | None, gamma: int | None
) -> Check:
    """Judges a run by least values of measures in its domains. Raises `OptionInvalid` for what the run does not have."""
    inputs = ReportInputs.of(run, "engine", run.manifest.profile)
    needs_gamma = bool({"acceptance_length", "speedup"} & set(thresholds))
    draft, rule, gamma, tested = _settled(run, inputs, draft, rule, gamma, needs_gamma=needs_gamma)
    pools = _pools(inputs, draft, rule)
    timing = inputs.book.timing(inputs.question.concurrency) if inputs.book else UNTIMED
    times = timing.times.get(draft)
    if tested is not None:  # what chose draft or gamma does not judge them
        pools = {domain: pool.rows(tested[domain]) if domain in tested else pool for domain, pool in pools.items()}
        times = timing.testing.get(draft)
    drafting = run.manifest.drafting
    unknown: dict[Measure, tuple[bool, str]] = {
        "alpha": (run.imported, "an engine's metrics do not give alpha, since what follows a rejection is never tested"),
        "acceptance_length": (
            drafting != CHAIN,
            f"it was served with drafting {drafting}: rounds with a draft are not known",
        ),
        "speedup": (times is None, f"it has no step times for {draft}"),
    }
    for measure, (missing, why) in unknown.items():
        if missing and measure in thresholds:
            hint = "use --min-acceptance-length, or check --baseline: tokens per round against another run"
            raise OptionInvalid(f"{measure} of {run.path} cannot be checked: {why}", hint)
    by_depth = run.manifest.drafts[draft].by_depth
    least = [
        _Threshold(measure, domain, value, pools[domain], by_depth, None if measure == "alpha" else gamma, times)
        for measure, named in thresholds.items()
        for domain, value in _spread(named, pools, run).items()
    ]
    parts = [(threshold.item(), None if threshold.silent else threshold.bounds) for threshold in least]
    items = _judged(parts, inputs.question.confidence)
    outcome = together([item.outcome for item in items])
    return Check(
        outcome=outcome,
        notes=concerning(build_report(run).notes, speedup="speedup" in thresholds),
        reason=reason_of(items, outcome),
        run=str(run.path),
        draft=draft,
        rule=rule,
        gamma=gamma,
        confidence=inputs.question.confidence,
        items=items,
    )


def _settled(
    run: Run, inputs: ReportInputs, draft: str | None, rule: str | None, gamma: int | None, *, needs_gamma: bool
) -> tuple[str, str, int | None, Mapping[str, Mask] | None]:
    """Draft, rule and gamma (None if no threshold needs one): as named, else as the decision fixes them, else as the
    verdict on the whole traffic chooses them; the gamma of a named draft as the verdict on this draft does. And the
    documents that did not choose, see `tested_rows`.
    """
    require_drafts(run)
    question, drafts, tested = inputs.question, list(run.manifest.drafts), None
    draft = draft or (question.draft if question.draft != "auto" else None)
    gamma = gamma or (question.gamma if isinstance(question.gamma, int) else None)
    if draft is None and len(drafts) == 1:
        draft = drafts[0]
    _require_one_of("draft", draft, drafts, run)
    if draft is None or (gamma is None and needs_gamma):
        asked = ReportInputs.of(run, "engine", run.manifest.profile.deciding(draft, rule))
        evidence = evidence_of(asked, list(draft_pools(asked, asked.deciding)))
        chosen = judge_traffic(evidence, asked.book, asked.question, run.gammas)
        if chosen.draft is None or chosen.gamma is None:
            what, names = ("draft", drafts) if draft is None else (f"gamma of {draft}", list(map(str, run.gammas)))
            hint = f"name one: --{what.split()[0]} {' or '.join(names)}"
            raise OptionInvalid(f"no {what} is known to be the best for {run.path}: {chosen.reason}", hint)
        draft, gamma = chosen.draft, gamma or chosen.gamma
        tested = tested_rows(evidence, asked.book, asked.question, run.gammas)
    _require_one_of("gamma", gamma, run.gammas, run)
    return draft, rule or one_rule(inputs), gamma if needs_gamma else None, tested


def _require_one_of(what: str, asked: object, known: Collection[object], run: Run) -> None:
    """Raise `OptionInvalid` for a name that is asked for and that the run does not have."""
    if asked is not None and asked not in known:
        names = " or ".join(short(str(name)) for name in known)
        raise OptionInvalid(f"{run.path} has no {what} {short(str(asked))}", f"name one: {names}")


def _pools(inputs: ReportInputs, draft: str, rule: str) -> dict[str, DocumentTotals]:
    """Returns the pools of the text that a rule belongs to, by domain. Raises `OptionInvalid` where there is none."""
    pools = by_domain([(each.domain, each.pool) for each in draft_pools(inputs, [rule], [draft]) if each.pool.defined])
    if not pools:
        hint = "name a rule that applies to this text: strict if it is greedy, one_hot or lossless if it is sampled"
        raise OptionInvalid(f"{rule} has no rounds on the text of {inputs.run.path}", hint)
    return pools


def _spread(named: Mapping[str, float], pools: Mapping[str, DocumentTotals], run: Run) -> dict[str, float]:
    """Thresholds of every domain that has one; a domain's own goes before that of every domain."""
    own = {domain: least for domain, least in named.items() if domain != EVERY}
    for domain in own:
        _require_one_of("domain with rounds", domain, pools, run)
    return (dict.fromkeys(pools, named[EVERY]) if EVERY in named else {}) | own


def one_rule(inputs: ReportInputs) -> str:
    """The rule of the decision. Raises `OptionInvalid` where greedy and sampled text have one each, or there is neither."""
    if len(inputs.decisive) != 1:
        found = " and ".join(inputs.decisive) or "none is the target's own"
        raise OptionInvalid(f"the run's text has no single rule: {found}", "name one: --rule strict")
    return inputs.decisive[0]


@dataclass(frozen=True)
class PairedText:
    """The paired documents of one domain and kind of text. `gamma`: whose tokens per round are compared; None: alpha is.
    `same_draft`: both sides are surely one draft of one target.
    """

    domain: str
    old: DocumentTotals
    new: DocumentTotals
    gamma: int | None
    same_draft: bool = False

    def why_not_judged(self, rule: str, drafts: Sequence[DraftFacts]) -> str | None:
        """Why this text cannot be judged; None where it can. `drafts`: of both sides."""
        if self.old.policy not in parse_rule(rule).rule.policies:
            return f"{rule} does not apply to its text ({text_kind(self.old.continuation, self.old.sampling)})"
        if self.gamma is not None and not (self.old.defined and self.new.defined):
            return not_defined(rule, str(self.old.policy), max(drafts, key=attrgetter("by_depth")))
        if self.gamma is not None and not all(pool["tokens"].sum() for pool in (self.old, self.new)):
            return "no text of one run is longer than one token, which the prefill emits"
        if proposes_nothing(self.old, self.gamma):
            return f"the baseline's draft proposes nothing there{', nor does this one' if self.silent else ''}"
        return None

    @property
    def silent(self) -> bool:
        """Whether the new side proposes nothing at all."""
        return proposes_nothing(self.new, self.gamma)

    @property
    def unchanged(self) -> bool:
        """Whether one draft did the same twice; counts that are expectations, to six digits."""
        sides = (side_totals(self.old, self.gamma), side_totals(self.new, self.gamma))
        equal = all(np.allclose(old, new, rtol=NO_SPREAD, atol=0) for old, new in zip(*sides, strict=True))
        return self.same_draft and not self.silent and equal

    def difference(self, confidence: float) -> Interval:
        """The new side's alpha less the old one's; at a gamma, tokens per round. With an interval over units."""
        return side_difference(self.old, self.new, self.gamma, confidence)

    def bounds(self, tail: float) -> tuple[float, float]:
        """One-sided bounds of the difference, each wrong with probability `tail`."""
        difference = self.difference(1 - 2 * tail)
        return difference.low, difference.high

    def item(self, threshold: float) -> Item:
        """What is known of it without bounds: all, where it is silent or unchanged."""
        measure: Measure = "alpha_difference" if self.gamma is None else "tokens_per_round_difference"
        item, units = partial(Item, measure, self.domain, threshold), distinct(self.old.cluster)
        if self.silent:  # alpha is not known then, and rounds have one token each
            value = self.difference(0.5).value if self.gamma is not None else None
            return item(value, None, None, units, "fail", LOST)
        if self.unchanged:  # nothing is estimated: a margin, which is never below 0, is kept
            return item(0.0, None, None, units, "pass", SAME)
        compared = min(int(np.count_nonzero(side_totals(pool, self.gamma)[1])) for pool in (self.old, self.new))
        return item(self.difference(0.5).value, None, None, compared, "undecided", None)


def check_baseline(
    new: RunDraft, old: RunDraft, rule: str | None, margin: float, allow_target_change: bool, gamma: int | None = None
) -> Check:
    """Compare a draft with an older one on the same prompts: alpha of the whole traffic must be surely no lower than by
    `margin`, and that of no domain surely lower; of imported runs, of heads and if a gamma is named, tokens per round. All
    failures together are wrong with a probability of at most 1 - confidence (Holm). Raises `NotComparable` with the reason,
    and `OptionInvalid` for a gamma that is not one of both runs.
    """
    require_comparable(old, new, allow_target_change)
    gamma = _gamma_to_compare(new, old, gamma)
    drafts = [side.run.manifest.drafts[side.draft] for side in (old, new)]
    inputs = ReportInputs.of(new.run, "engine", new.run.manifest.profile)
    chosen, confidence = rule or one_rule(inputs), inputs.question.confidence
    (before, after), rows, unpaired = paired_pools(old, new, [chosen])
    same = _same_draft(old, new)
    every = [PairedText(key[0], pool, after[key], gamma, same) for key, pool in before.items()]
    reasons = [text.why_not_judged(chosen, drafts) for text in every]
    unjudged = [Unjudged(text.domain, reason) for text, reason in zip(every, reasons, strict=True) if reason]
    texts = [text for text, reason in zip(every, reasons, strict=True) if not reason]
    if not texts:
        why = "; ".join(dict.fromkeys(item.reason for item in unjudged))
        hint = "name a rule that applies to this text (--rule), or a baseline that proposes something on longer texts"
        raise NotComparable(f"nothing can be compared with {old.label}: {why}", hint)
    if len(texts) > 1:
        texts = [_whole(texts), *texts]
    items = _judged(
        [(text.item(-margin), None if text.silent or text.unchanged else text.bounds) for text in texts], confidence
    )
    unjudged += _unpaired(old.run, new.run, {text.domain for text in every})
    failed = any(item.outcome == "fail" for item in items)
    outcome: Outcome = "fail" if failed else items[0].outcome
    kept = SAME if texts[0].unchanged else "the threshold is reached"
    return Check(
        outcome=outcome,
        notes=concerning(build_report(new.run).notes, speedup=False),
        reason=reason_of(items if failed else items[:1], outcome, unjudged, kept),
        run=new.label,
        baseline=old.label,
        draft=new.draft,
        rule=chosen,
        gamma=gamma,
        confidence=confidence,
        items=items,
        unjudged=tuple(unjudged),
        paired=len(rows[0]),
        unpaired=unpaired[::-1],
    )


def _whole(texts: Sequence[PairedText]) -> PairedText:
    """All texts together: the traffic."""
    old, new = (merged([getattr(text, side) for text in texts]) for side in ("old", "new"))
    return PairedText(WHOLE, old, new, texts[0].gamma, texts[0].same_draft)


def _gamma_to_compare(new: RunDraft, old: RunDraft, named: int | None) -> int | None:
    """The gamma whose tokens per round are compared; None: alpha is, which tells of whole rounds."""
    by_depth = any(side.run.manifest.drafts[side.draft].by_depth for side in (new, old))
    if named is None and not by_depth and not new.run.imported:
        return None
    both = common_gammas(new.run, old.run, named)
    if not both:
        raise NotComparable(
            f"{new.run.path} and {old.run.path} have no gamma in common", "profile both with the same gammas"
        )
    return deciding_gamma(new.run, both)


def _same_draft(old: RunDraft, new: RunDraft) -> bool:
    """Whether both sides are surely one draft of one target; an engine's metrics do not show which draft it served."""
    # The same anyway: tokenizer and `draft_processing` of sides that can be compared, continuation settings of paired
    # documents; the parameters of a rule are in its id.
    before, after = (side.run.manifest for side in (old, new))
    pairs = ((before.target, after.target), (before.drafts[old.draft], after.drafts[new.draft]))
    return not new.run.imported and all(
        (one.fingerprint, one.dtype) == (other.fingerprint, other.dtype) and not one.fingerprint.startswith(PARTIAL)
        for one, other in pairs
    )


def _unpaired(old: Run, new: Run, paired: Collection[str]) -> Iterator[Unjudged]:
    """Yields the domains of either run of which no document has a partner in the other."""
    here, there = (dict.fromkeys(run.documents()["domain"].cast(pa.string()).to_pylist()) for run in (old, new))
    for domain in here | there:
        if domain not in there:
            yield Unjudged(domain, "this run does not have the domain, and the baseline does")
        elif domain not in here:
            yield Unjudged(domain, "the baseline does not have the domain")
        elif domain not in paired:
            yield Unjudged(domain, "none of its documents has a partner with the same prompt and kind of text")
