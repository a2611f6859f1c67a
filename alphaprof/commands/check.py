"""`alphaprof check`: the gate for CI. A run judged by thresholds, by its own decision, or against an older run, at one
confidence for all.

Against a baseline, a draft is compared with an older one on the same prompts, by alpha, and two questions are asked: does
the whole traffic keep what it had, which decides, and is any domain shown to lose more than the margin, which fails too.
Few domains are large enough to be shown to lose nothing: a gate that asked that of each would hardly ever pass.

Alpha of imported runs is not known, and that of a head says nothing of later drafts: these are compared by tokens per
round over all rounds, at the gamma that was served, of the decision, or the largest; so is every draft if a gamma is
named. A draft that proposed something in a domain and no longer does fails there, whatever the margin: nothing is left to
take a bound from, and a gate that skipped it would pass the worst case. The same draft with equal totals has not
changed: it passes, and nothing is estimated.
"""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from alphaprof.costs.speedup import UNTIMED, StepTimes, speedup
from alphaprof.errors import CheckFailed, CheckUndecided, NotComparable, OptionInvalid, shown
from alphaprof.log.manifest import CHAIN, PARTIAL, DraftFacts
from alphaprof.log.notes import concerns_of
from alphaprof.log.run import Run, RunDraft, path_and_draft, require_drafts, side_of
from alphaprof.render.blocks import Block, Small, Table, table_of_rows
from alphaprof.report import format as fmt
from alphaprof.report.build import build_report
from alphaprof.report.format import short, visible
from alphaprof.report.inputs import ReportInputs, by_domain, draft_pools, evidence_of
from alphaprof.report.model import Note
from alphaprof.report.pairing import TextPair, common_gammas, deciding_gamma, paired_texts, require_comparable
from alphaprof.report.sections.stopping import answered_p_min
from alphaprof.report.traffic import judge_traffic, tested_rows
from alphaprof.report.verdict import Mask, not_defined
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import NO_SPREAD, bounded_interval, by_cluster, distinct, ratio, share_interval
from alphaprof.stats.gates import Gate, Outcome, judge, together
from alphaprof.totals.pool import DocumentTotals, accepted_of, proposes_nothing

Measure = Literal[
    "alpha",
    "accept@1",  # alpha of a head, which holds for first drafts
    "acceptance_length",
    "speedup",
    "alpha_difference",
    "tokens_per_round_difference",
]
Bounds = Callable[[float], tuple[float, float]]  # by the probability with which each may be wrong
Minimums = Mapping[Measure, Sequence[str] | None]  # as they were written, by measure: X, or DOMAIN=X
EVERY = ""  # the domain of a threshold that holds for every domain
WHOLE = "whole traffic"
WORST_FIRST: tuple[Outcome, ...] = ("fail", "undecided", "pass")
VERDICTS: Mapping[str, Outcome] = {"GO": "pass", "NO-GO": "fail", "UNDECIDED": "undecided"}
LOST = "the draft proposes nothing there, but did in the baseline"
FIRST = "first drafts only; --min-acceptance-length covers the others"
SILENT = "the draft proposes nothing there"
SAME = "the same draft with equal totals"
NEXT: dict[Outcome, str] = {
    "pass": "use this run as --baseline of later checks",
    "fail": "run alphaprof report to see where acceptance is lost",
    "undecided": "do what the reason says; use --undecided fail to fail a pipeline",
}


@dataclass(frozen=True)
class Item:
    """One quantity and its threshold. `low`, `high`: the one-sided bounds that it was judged by; None if it fails or passes
    without them, for the reason in `note`.
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

    def number(self, value: float | None) -> str:
        """Return a value of the measure as text."""
        if value is not None and self.measure.endswith("_difference"):
            return f"{value:+.3f}"
        return fmt.number(value, 3, "x" if self.measure == "speedup" else "")

    @property
    def decided(self) -> bool:
        """Whether there is nothing more to judge."""
        return self.outcome != "undecided"

    @property
    def bounds(self) -> str:
        """Its bounds as text."""
        return fmt.NOTHING if self.low is None else f"[{self.number(self.low)}, {self.number(self.high)}]"

    @property
    def standing(self) -> tuple[int, float]:
        """Least of the worst item: failed before undecided before passed, then by value less threshold."""
        distance = -math.inf if self.value is None else self.value - self.threshold
        return WORST_FIRST.index(self.outcome), distance


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

    def blocks(self) -> Iterator[Block]:
        """Yield the outcome and the worst threshold, what was checked, and each threshold with its bounds."""
        first, *others = _decided_by(self)
        yield from (f"{self.outcome.upper()}  {first}", *others, "", f"run {self.run}")
        if self.unpaired is not None:
            paired, (new, old) = fmt.many(self.paired or 0, "document"), self.unpaired
            yield f"baseline {self.baseline}"
            yield f"{paired} paired by prompt; unpaired: {new} of the run, {old} of the baseline"
        gamma = f", gamma {self.gamma}" if self.gamma is not None else ""
        yield f"draft {self.draft or 'none chosen'}, rule {self.rule}{gamma}"
        if self.items:
            yield from ("", _thresholds_table(self.items))
        yield from (f"{short(item.domain)}: {item.note}" for item in self.items if item.note)
        yield from (f"not judged: {short(left.domain)} ({left.reason})" for left in self.unjudged)
        yield from (f"note: {note.message}; {note.remedy}" for note in self.notes)
        level, deciding = fmt.level(self.confidence), "every" if self.baseline is None else "the first"
        yield Small(f"bounds: one-sided, lower ones at {level}, upper ones at {level} over all thresholds (Holm).")
        yield Small(f"pass: {deciding} lower bound reaches its threshold. fail: an upper bound is below its threshold.")

    def junit(self) -> str:
        """Return JUnit XML: a test case a threshold; what is undecided, or could not be judged, is skipped."""
        suite = ET.Element("testsuite", name="alphaprof check")
        for item in self.items:
            notes = [f"bounds {item.bounds}"] if item.low is not None else []
            notes += [item.note] if item.note else []
            text = f"{item.number(item.value)}, {', '.join(notes)}, at least {item.threshold:g}"
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
    """Raise `CheckFailed`, or `CheckUndecided` if that is asked for."""
    if check.outcome == "fail":
        raise CheckFailed(f"check failed: {check.reason}", NEXT["fail"])
    if check.outcome == "undecided" and undecided_fails:
        raise CheckUndecided(f"check undecided: {check.reason}", "do what the reason says, or use --undecided pass")


def _in_words(items: Sequence[Item], outcome: Outcome, unjudged: Sequence[Unjudged] = (), passed: str | None = None) -> str:
    """Return the items that decided, in words, and what was not judged. `passed`: why all pass, if no bound shows it."""
    if outcome == "pass":
        parts = [passed or (f"all {len(items)} thresholds are reached" if len(items) > 1 else "the threshold is reached")]
    else:
        decisive = [(item, f"{item.measure} of {short(item.domain)}") for item in items if item.outcome == outcome]
        parts = [f"{name}: {item.note}" for item, name in decisive if item.low is None]
        if judged := ", ".join(name for item, name in decisive if item.low is not None):
            surer = " or more precise step times" if any(item.measure == "speedup" for item, _ in decisive) else ""
            unclear = f": bounds enclose the threshold, more documents{surer} needed"
            parts.append(f"{judged}{' below the threshold' if outcome == 'fail' else unclear}")
    if unjudged:
        parts.append(f"not judged: {', '.join(dict.fromkeys(short(item.domain) for item in unjudged))}")
    return "; ".join(parts)


def _decided_by(check: Check) -> Iterator[str]:
    """Yield the worst threshold with its bounds, how many there are of each outcome, what to do next, and the reason."""
    by_domain = check.baseline is not None and len(check.items) > 1
    if check.items:
        decides = by_domain and check.outcome != "fail"
        worst = check.items[0] if decides else min(check.items, key=attrgetter("standing"))
        bounds = "" if worst.low is None else f" {worst.bounds}"
        measured = f"{worst.measure.replace('_', ' ')} {worst.number(worst.value)}{bounds}"
        wanted = f"at least {worst.number(worst.threshold)} wanted"
        yield f"{short(worst.domain)}: {measured}, {wanted}, {fmt.many(worst.documents, 'document')}"
    outcomes = [item.outcome for item in check.items[by_domain:]]
    if len(outcomes) > 1 or by_domain:
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in WORST_FIRST[::-1] if outcome in outcomes)
        deciding = "; only a failure affects the result" if by_domain else ""
        yield f"of {len(outcomes)} {'domains' if by_domain else 'thresholds'}: {counts}{deciding}"
    lines = [f"next: {NEXT[check.outcome]}", check.reason]
    yield from lines if check.items else reversed(lines)


def _thresholds_table(items: Sequence[Item]) -> Table:
    rows = (
        (
            *(short(item.domain), item.measure, fmt.count(item.documents), item.number(item.threshold)),
            *(item.number(item.value), item.bounds, item.outcome.upper()),
        )
        for item in items
    )
    headings = ("domain", "measure", "docs", "at least", "value", "bounds", "outcome")
    return table_of_rows("thresholds", headings, rows, left=("measure", "outcome"))


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
    """Return the check that the options of `alphaprof check` ask for. Raises `OptionInvalid`, `NotComparable`,
    `RunUnreadable`.
    """
    thresholds = {measure: _thresholds(measure, texts) for measure, texts in minimums.items() if texts}
    folder, named = path_and_draft(str(path))
    if None not in (draft, named) and draft != named:
        raise OptionInvalid(f"two drafts are named: {short(str(named))} and {short(str(draft))}", "leave --draft out")
    draft = draft if named is None else named
    if baseline is not None:
        if thresholds:
            raise OptionInvalid("thresholds and --baseline cannot be combined in one check", "run check once for each")
        new = side_of(f"{folder}:{draft}" if draft else folder)
        old = side_of(f"{baseline}:{new.draft}" if path_and_draft(baseline)[1] is None else baseline)
        return check_baseline(new, old, rule, margin, target_change, gamma)
    run = Run.open(Path(folder))
    if thresholds:
        return _check_thresholds(run, thresholds, draft, rule, gamma)
    return check_decision(run, draft, rule, gamma)


def _concerning(notes: Sequence[Note], *, speedup: bool) -> tuple[Note, ...]:
    """Return those of a report's notes that concern what is checked."""
    concern = {"texts", "times", "own times"} if speedup else {"texts"}
    return tuple(note for note in notes if concerns_of(note.code) in concern)


def _thresholds(measure: Measure, texts: Sequence[str]) -> dict[str, float]:
    """Return least values by domain. Raises `OptionInvalid` for what is not a number, and for a second one of a domain."""
    least: dict[str, float] = {}
    for text in texts:
        domain, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or domain in least:
            hint = "give NUMBER for all domains, or DOMAIN=NUMBER once per domain: code=0.6"
            raise OptionInvalid(f"{shown(text)} is not a threshold for {measure}, or is a duplicate", hint)
        least[domain] = value
    return least


def check_decision(run: Run, draft: str | None = None, rule: str | None = None, gamma: int | None = None) -> Check:
    """Judges a run by the decision of its profile, about a draft, rule or gamma that is named: GO passes, NO-GO fails."""
    config, asked = run.manifest.config, {"draft": draft, "rule": rule, "gamma": gamma}
    given = {name: value for name, value in asked.items() if value is not None}
    if given:
        config = config | {"decision": config["decision"] | given}
        drafts = ReportInputs.of(run, "engine", run.manifest.profile).run.manifest.drafts  # hybrids too
        _require_one_of("draft", draft, drafts, run)
        _require_one_of("gamma", gamma, drafts[draft].lengths(run.gammas) if draft else run.gammas, run)
    report = build_report(run, config=config)
    traffic, tested = report.traffic, report.traffic.tested
    outcome = VERDICTS[traffic.verdict]
    items: tuple[Item, ...] = ()
    if tested is not None:
        bounds = (tested.value, tested.low, tested.high)
        items = (Item("speedup", WHOLE, traffic.min_speedup, *bounds, traffic.documents, outcome),)
    return Check(
        outcome=outcome,
        notes=_concerning(report.notes, speedup=True),
        reason=traffic.reason,
        run=str(run.path),
        draft=traffic.draft,
        rule=traffic.rule,
        gamma=traffic.gamma,
        confidence=report.confidence,
        items=items,
    )


def _value_and_bounds(
    measure: Measure, pool: DocumentTotals, gamma: int | None, times: StepTimes | None
) -> tuple[float | None, Bounds]:
    """Return the value of a measure on some documents (None: not known) and its bounds. `gamma`: None for alpha."""
    if measure == "speedup":
        faster = speedup([pool.counts(gamma)], [1.0], times) if gamma and times else None
        return (faster.value, faster.deciding) if faster else (None, lambda _: (0.0, math.inf))
    accepted, proposed = accepted_of(pool, gamma)
    least, most = (0.0, 1.0) if gamma is None else (1.0, gamma + 1.0)
    if not proposed.sum():
        return None, lambda _: (least, most)
    estimate = ratio(*by_cluster(pool.cluster, accepted, proposed))

    def bounds(tail: float) -> tuple[float, float]:
        if gamma is None:
            alpha = share_interval(estimate, 1 - 2 * tail)
            return alpha.low, alpha.high
        low, high = bounded_interval(estimate, 0.0, float(gamma), tail)
        return 1 + low, 1 + high

    return float(accepted.sum() / proposed.sum()) + least, bounds


def _judged_together(parts: Sequence[tuple[Item, Bounds]], confidence: float) -> tuple[Item, ...]:
    """Return items with the outcomes and bounds of their gates, together at one confidence (Holm). One that is decided
    without bounds has no part in the correction of the others.
    """
    gates = [Gate(item.threshold, bounds) for item, bounds in parts if not item.decided]
    results = iter(judge(gates, confidence))
    return tuple(item if item.decided else dataclasses.replace(item, **vars(next(results))) for item, _ in parts)


def _check_thresholds(
    run: Run, thresholds: Mapping[Measure, Mapping[str, float]], draft: str | None, rule: str | None, gamma: int | None
) -> Check:
    """Judges a run by least values of measures in its domains. Raises `OptionInvalid` for what the run does not have."""
    needs_gamma = bool({"acceptance_length", "speedup"} & set(thresholds))
    inputs, draft, rule, gamma, tested = _judged_choice(run, draft, rule, gamma, needs_gamma=needs_gamma)
    pools = _pools_of_rule(inputs, draft, rule)
    timing = inputs.costs.timing(inputs.question.concurrency) if inputs.costs else UNTIMED
    times = timing.times.get(draft)
    if tested is not None:  # what chose draft or gamma does not judge them
        pools = {domain: pool.rows(tested[domain]) if domain in tested else pool for domain, pool in pools.items()}
        times = timing.testing.get(draft)
    drafting = run.manifest.drafting
    for measure, missing, why in (
        ("alpha", run.imported, "an engine's metrics do not give alpha, since what follows a rejection is never tested"),
        ("acceptance_length", drafting != CHAIN, f"it was served with {drafting} drafting, so its rounds are not known"),
        ("speedup", times is None, f"it has no step times for {draft}"),
    ):
        if missing and measure in thresholds:
            hint = "use --min-acceptance-length, or --baseline to compare tokens per round with another run"
            raise OptionInvalid(f"{measure} of {run.path} cannot be checked: {why}", hint)
    by_depth, parts = inputs.run.manifest.drafts[draft].by_depth, list[tuple[Item, Bounds]]()
    for measure, named in thresholds.items():
        at, first = (None, by_depth) if measure == "alpha" else (gamma, False)
        name: Measure = "accept@1" if first else measure
        for domain, least in _least_by_domain(named, pools, run).items():
            pool, documents = pools[domain], distinct(pools[domain].cluster)
            value, bounds = _value_and_bounds(measure, pool, at, times)
            item = Item(name, domain, least, value, None, None, documents, "undecided", FIRST if first else None)
            if measure != "speedup" and proposes_nothing(pool, at) and pool["tokens"].sum():  # it had every chance
                item = dataclasses.replace(item, outcome="fail", note=SILENT)
            parts.append((item, bounds))
    items = _judged_together(parts, inputs.question.confidence)
    outcome = together([item.outcome for item in items])
    return Check(
        outcome=outcome,
        notes=_concerning(build_report(run).notes, speedup="speedup" in thresholds),
        reason=_in_words(items, outcome),
        run=str(run.path),
        draft=draft,
        rule=rule,
        gamma=gamma,
        confidence=inputs.question.confidence,
        items=items,
    )


def _judged_choice(
    run: Run, draft: str | None, rule: str | None, gamma: int | None, *, needs_gamma: bool
) -> tuple[ReportInputs, str, str, int | None, Mapping[str, Mask] | None]:
    """Draft, rule and gamma (None if no threshold needs one): as named, else as the decision fixes them, else as the
    verdict on the whole traffic chooses them; the gamma of a named draft as the verdict on this draft does. Before them
    what the pools are read by, behind them the documents that did not choose, see `tested_rows`.
    """
    require_drafts(run)
    inputs = ReportInputs.of(run, "engine", run.manifest.profile)
    run, question, tested = inputs.run, inputs.question, None
    drafts = list(run.manifest.drafts)
    draft = draft or (question.draft if question.draft != "auto" else None)
    gamma = gamma or (question.gamma if isinstance(question.gamma, int) else None)
    if draft is None and len(drafts) == 1:
        draft = drafts[0]
    _require_one_of("draft", draft, drafts, run)
    inputs = answered_p_min(ReportInputs.of(run, "engine", run.manifest.profile.deciding(draft, rule)))
    if draft is None or (needs_gamma and (gamma is None or inputs.question.chose_p_min)):
        evidence = evidence_of(inputs, list(draft_pools(inputs, inputs.deciding)))
        chosen = judge_traffic(evidence, inputs.costs, inputs.question, run.gammas)
        if chosen.draft is None or chosen.gamma is None:
            what, names = ("draft", drafts) if draft is None else (f"gamma of {draft}", list(map(str, run.gammas)))
            hint = f"name one: --{what.split()[0]} {' or '.join(names)}"
            raise OptionInvalid(f"the best {what} for {run.path} is not known: {chosen.reason}", hint)
        draft, gamma = chosen.draft, gamma or chosen.gamma
        tested = tested_rows(evidence, inputs.costs, inputs.question, run.gammas)
    lengths = run.manifest.drafts[draft].lengths(run.gammas) if needs_gamma else run.gammas
    _require_one_of("gamma", gamma, lengths, run)
    return inputs, draft, rule or one_rule(inputs), gamma if needs_gamma else None, tested


def _require_one_of(what: str, asked: object, known: Collection[object], run: Run) -> None:
    """Raise `OptionInvalid` for a name that is asked for and that the run does not have."""
    if asked is not None and asked not in known:
        names = " or ".join(short(str(name)) for name in known)
        raise OptionInvalid(f"unknown {what} in {run.path}: {short(str(asked))}", f"name one: {names}")


def _pools_of_rule(inputs: ReportInputs, draft: str, rule: str) -> dict[str, DocumentTotals]:
    """Return the pools of the text that a rule belongs to, by domain. Raises `OptionInvalid` if there is none."""
    pools = by_domain([(each.domain, each.pool) for each in draft_pools(inputs, [rule], [draft]) if each.pool.defined])
    if not pools:
        hint = "name a rule that applies to this text: strict if it is greedy; one_hot, lossless or block if it is sampled"
        raise OptionInvalid(f"{rule} has no rounds on the text of {inputs.run.path}", hint)
    return pools


def _least_by_domain(named: Mapping[str, float], pools: Mapping[str, DocumentTotals], run: Run) -> dict[str, float]:
    """Thresholds of every domain that has one; a domain's own goes before that of every domain."""
    own = {domain: least for domain, least in named.items() if domain != EVERY}
    for domain in own:
        _require_one_of("domain with rounds", domain, pools, run)
    return (dict.fromkeys(pools, named[EVERY]) if EVERY in named else {}) | own


def one_rule(inputs: ReportInputs) -> str:
    """Return the rule of the decision. Raises `OptionInvalid` if greedy and sampled text have one each, or none exists."""
    if len(inputs.decisive) != 1:
        found = " and ".join(inputs.decisive) or "no text is the target's own"
        raise OptionInvalid(f"the run's text has no single rule: {found}", "name one: --rule strict")
    return inputs.decisive[0]


def _why_not_judged(text: TextPair, gamma: int | None, drafts: Sequence[DraftFacts]) -> str | None:
    """Return why a text cannot be judged; None if it can. `drafts`: of both sides."""
    old, new, rule = text.first, text.second, text.rule
    if old.policy not in parse_rule(rule).rule.policies:
        return f"{rule} does not apply to this text ({fmt.text_kind(old.continuation, old.sampling)})"
    if gamma is not None and not (old.defined and new.defined):
        return not_defined(rule, str(old.policy), max(drafts, key=attrgetter("by_depth")))
    if gamma is not None and not text.has_rounds:
        return "in one run, no text goes beyond its first token (prefill)"
    if proposes_nothing(old, gamma):
        return f"the baseline's draft proposes nothing there{', nor does this one' if proposes_nothing(new, gamma) else ''}"
    return None


def _kept_of_baseline(text: TextPair, gamma: int | None, margin: float, same_draft: bool) -> tuple[Item, Bounds]:
    """Return what a draft kept of the baseline's alpha on a text; at a gamma, of its tokens per round. `same_draft`: both
    sides are surely one draft of one target.
    """
    measure: Measure = "alpha_difference" if gamma is None else "tokens_per_round_difference"
    item, units, sides = partial(Item, measure, text.domain, -margin), distinct(text.first.cluster), text.totals(gamma)

    def bounds(tail: float) -> tuple[float, float]:
        difference = text.difference(gamma, 1 - 2 * tail)
        return difference.low, difference.high

    silent = proposes_nothing(text.second, gamma)  # its alpha is not known, and its rounds have one token each
    value = None if silent and gamma is None else text.difference(gamma, 0.5).value
    if silent:
        return item(value, None, None, units, "fail", LOST), bounds
    # Counts that are expectations are equal to six digits. Nothing is estimated then: a margin is never below 0.
    if same_draft and all(np.allclose(old, new, rtol=NO_SPREAD, atol=0) for old, new in zip(*sides, strict=True)):
        return item(0.0, None, None, units, "pass", SAME), bounds
    compared = min(int(np.count_nonzero(counts)) for _, counts in sides)
    return item(value, None, None, compared, "undecided"), bounds


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
    texts, rows, unpaired = paired_texts(old, new, [chosen])
    every = [(text, _why_not_judged(text, gamma, drafts)) for text in texts]
    judged, unjudged = [text for text, why in every if not why], [Unjudged(text.domain, why) for text, why in every if why]
    if not judged:
        why = "; ".join(dict.fromkeys(item.reason for item in unjudged))
        hint = "name a --rule that applies to this text, or use a baseline with longer texts and a draft that proposes"
        raise NotComparable(f"nothing can be compared with {old.label}: {why}", hint)
    if len(judged) > 1:
        judged = [TextPair.together(WHOLE, judged), *judged]
    same_draft = _same_draft(old, new)
    items = _judged_together([_kept_of_baseline(text, gamma, margin, same_draft) for text in judged], confidence)
    unjudged += _unpaired(old.run, new.run, {text.domain for text in texts})
    failed = any(item.outcome == "fail" for item in items)
    outcome: Outcome = "fail" if failed else items[0].outcome
    unmoved = SAME if items[0].note == SAME else "the threshold is reached"
    return Check(
        outcome=outcome,
        notes=_concerning(build_report(new.run).notes, speedup=False),
        reason=_in_words(items if failed else items[:1], outcome, unjudged, unmoved),
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


def _gamma_to_compare(new: RunDraft, old: RunDraft, named: int | None) -> int | None:
    """Return the gamma whose tokens per round are compared; None: alpha is, which tells of whole rounds."""
    by_depth = any(side.run.manifest.drafts[side.draft].by_depth for side in (new, old))
    if named is None and not by_depth and not new.run.imported:
        return None
    both = common_gammas(new, old, named)
    if not both:
        raise NotComparable(
            f"{new.run.path} and {old.run.path} have no gamma in common", "profile both with the same gammas"
        )
    return deciding_gamma(new.run, both)


def _same_draft(old: RunDraft, new: RunDraft) -> bool:
    """Return whether both sides are certainly one draft of one target; an engine's metrics do not show its draft."""
    # The same anyway: tokenizer and `draft_processing` of sides that can be compared, continuation settings of paired
    # documents; the parameters of a rule are in its id.
    before, after = (side.run.manifest for side in (old, new))
    pairs = ((before.target, after.target), (before.drafts[old.draft], after.drafts[new.draft]))
    return not new.run.imported and all(
        (one.fingerprint, one.dtype) == (other.fingerprint, other.dtype) and not one.fingerprint.startswith(PARTIAL)
        for one, other in pairs
    )


def _unpaired(old: Run, new: Run, paired: Collection[str]) -> Iterator[Unjudged]:
    """Yield the domains of either run of which no document has a partner in the other."""
    here, there = (dict.fromkeys(run.documents()["domain"].cast(pa.string()).to_pylist()) for run in (old, new))
    for domain in here | there:
        if domain not in there:
            yield Unjudged(domain, "only the baseline has the domain")
        elif domain not in here:
            yield Unjudged(domain, "only this run has the domain")
        elif domain not in paired:
            yield Unjudged(domain, "no document can be paired by prompt and kind of text")
