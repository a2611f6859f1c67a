"""`alphaprof check`: the gate for CI. A run judged by the verdict of its report, by least values, or against an older run,
at one confidence for all.

A threshold asks the report's answer for a domain: the same draft and gamma, cross-fitted in the same way; what keeps a
report from a verdict keeps a threshold from being passed. Against a baseline, tokens per round of a draft are compared with
an older one's on the same prompts, and two questions are asked: does the whole traffic, by the weights of the decision, keep
what it had, which decides, and is any domain shown to lose more than the margin, which fails too. Few domains are large
enough to be shown to lose nothing: a gate that asked that of each would hardly ever pass.

The gamma is named, else that of the decision, else the one that the verdict prefers for the baseline: a
draft whose deeper tokens got worse would itself prefer one at which nothing is lost. A draft that proposed something in a
domain and no longer does fails there, whatever the margin: nothing is left to take a bound from, and a gate that skipped it
would pass the worst case. The same draft with equal totals has not changed: it passes, and nothing is estimated.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from alphaprof.config.golden import golden_lengths
from alphaprof.config.load import changed_question, known_rules
from alphaprof.config.profile import AUTO, ProfileOptions
from alphaprof.costs.cost_model import TIMED
from alphaprof.costs.rounds import free_draft
from alphaprof.costs.timing import GO_ROUNDS
from alphaprof.errors import CheckFailed, CheckUndecided, NotComparable, OptionInvalid, RunMismatch, shown
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, Verdict, table_of_rows
from alphaprof.render.format import short, visible
from alphaprof.report.answer import Note
from alphaprof.report.asked import Asked
from alphaprof.report.judge import ALONE, Judge
from alphaprof.report.notes import once_a_code, text_notes
from alphaprof.report.pairing import (
    TextPair,
    changed_facts,
    common_gammas,
    deciding_gamma,
    difference_over,
    over_domains,
    paired_texts,
    require_comparable,
    surely_one,
)
from alphaprof.report.rates import rates_at
from alphaprof.report.result import contradiction
from alphaprof.report.scope import scope_of
from alphaprof.report.speeds import length_interval
from alphaprof.report.stopping import settled
from alphaprof.report.verdict import Mask, Pair, not_defined
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import CHAIN, DraftFacts
from alphaprof.run.notes import concerns_of, note
from alphaprof.run.reader import Run, RunDraft, path_and_draft, side_of
from alphaprof.stats.estimate import NO_SPREAD, Interval, by_cluster, distinct, ratio, share_interval
from alphaprof.stats.gates import Gate, Outcome, together
from alphaprof.stats.gates import judge as judge_gates
from alphaprof.totals.pool import DocumentTotals, accepted_of, proposes_nothing

Measure = Literal[
    "alpha",
    "accept@1",  # alpha of a head, which holds for first drafts
    "acceptance_length",
    "speedup",
    "tokens_per_round_change",  # against the baseline, as a share of what it had
]
Bounds = Callable[[float], tuple[float, float]]  # by the probability with which each may be wrong
Minimums = Mapping[Measure, Sequence[str] | None]  # as they were written, by measure: X, or DOMAIN=X
EVERY = ""  # the domain of a threshold that holds for every domain
WHOLE = "whole traffic"
TOLD = 3  # failed thresholds that a reason names
VERDICTS: Mapping[str, Outcome] = {"GO": "pass", "NO-GO": "fail", "UNDECIDED": "undecided"}
LOST = "the draft proposes nothing there, but did in the baseline"
FIRST = "first drafts only; --min-acceptance-length covers the others"
SILENT = "the draft proposes nothing there"
SAME = "the same draft with equal totals"
NEXT: dict[Outcome, str] = {
    "pass": "use this run as --baseline of later checks",
    "fail": "see where acceptance is lost with {}",
    "undecided": "settle what the reason names; {} shows more",
}


@dataclass(frozen=True)
class Item:
    """One quantity and its threshold. `low`, `high`: the one-sided bounds that it was judged by; None if it fails or passes
    without them, for the reason in `note`.
    """

    measure: Measure  # what the threshold is a limit of
    domain: str
    draft: str | None  # the one that was judged
    gamma: int | None  # None: the measure has none
    threshold: float  # the least value that passes
    value: float | None
    low: float | None
    high: float | None
    documents: int  # independent ones
    outcome: Outcome  # of this threshold alone
    note: str | None = None  # what decided without bounds, or what the bounds do not say

    def number(self, value: float | None) -> str:
        """Return a value of the measure as text."""
        if value is not None and self.measure == "tokens_per_round_change":
            return f"{100 * value:+.1f}%"
        return fmt.number(value, 3, "x" if self.measure == "speedup" else "")

    @property
    def used(self) -> tuple[str, str]:
        """Its draft and gamma as text."""
        return self.draft or fmt.NOTHING, fmt.NOTHING if self.gamma is None else str(self.gamma)

    @property
    def bounds(self) -> str:
        """Its bounds as text."""
        return fmt.NOTHING if self.low is None else f"[{self.number(self.low)}, {self.number(self.high)}]"


@dataclass(frozen=True)
class Unjudged:
    """A domain, or some of its text, that has no part in the outcome."""

    domain: str
    reason: str  # why it has none


@dataclass(frozen=True, kw_only=True)
class Check:
    """The whole check. `paired`: documents with a partner in the baseline; `unpaired` in the run and in the baseline."""

    format: ClassVar[str] = "alphaprof-check"
    version: ClassVar[str] = "2.2"

    outcome: Outcome  # of all thresholds together
    reason: str
    run: str
    baseline: str | None = None  # the older run and its draft; None: judged by thresholds or a decision
    new_target: str | None = None  # the run's target if the baseline had another one
    golden: str | None = None  # path of the file of published acceptance lengths; None: none was compared with
    draft: str | None  # None: none was chosen, or domains have others
    rule: str
    gamma: int | None  # None: none was chosen, domains have others, or no measure has one
    times: str | None = None  # whose step times speedups rest on; None: none was judged
    confidence: float
    undecided: Literal["pass", "fail"] = "pass"  # what --undecided makes of that outcome
    items: tuple[Item, ...]  # one for each threshold and domain
    notes: tuple[Note, ...] = ()  # of the run, those that concern what was checked
    unjudged: tuple[Unjudged, ...] = ()  # domains of the baseline or the run that could not be compared
    paired: int | None = None
    unpaired: tuple[int, int] | None = None  # documents without a partner: in the run, in the baseline

    def blocks(self) -> Iterator[Block]:
        """Yield the outcome with its reason, what to do next, what was checked, and each threshold with its bounds."""
        yield Verdict(self.outcome.upper(), f"  {self.reason}")
        yield from (f"next: {self.following}", "", f"run {self.run}")
        if self.unpaired is not None:
            paired, (new, old) = fmt.many(self.paired or 0, "document"), self.unpaired
            yield f"baseline {self.baseline}"
            if self.new_target is not None:
                yield f"new target {self.new_target}: alphaprof compare says whether to keep, retrain or turn off the draft"
            yield f"{paired} paired by prompt; unpaired: {new} of the run, {old} of the baseline"
        if self.golden is not None:
            yield f"golden lengths {self.golden}"
        drafts, gammas = {item.draft for item in self.items} - {None}, {item.gamma for item in self.items} - {None}
        apart = len(drafts) > 1 or len(gammas) > 1
        gamma = f", gamma {self.gamma or 'by domain'}" if self.gamma is not None or gammas else ""
        yield f"draft {self.draft or ('by domain' if drafts else 'none chosen')}, rule {self.rule}{gamma}"
        if self.times is not None and self.times not in self.reason:
            yield f"speedups {self.times}"
        if self.items:
            rows = (
                (
                    *(short(item.domain), item.measure, *(item.used if apart else ())),
                    *(fmt.count(item.documents), item.number(item.threshold)),
                    *(item.number(item.value), item.bounds, Verdict(item.outcome.upper())),
                )
                for item in self.items
            )
            pair = ("draft", "gamma") if apart else ()
            headings = ("domain", "measure", *pair, "docs", self._limit, "value", "bounds", "outcome")
            yield from ("", table_of_rows("thresholds", headings, rows, left=("measure", "draft", "outcome")))
        yield from (f"{short(item.domain)}: {item.note}" for item in self.items if item.note)
        yield from (f"not judged: {short(left.domain)} ({left.reason})" for left in self.unjudged)
        yield from (Verdict("note", f": {message}; {note.remedy}") for message, note in once_a_code(self.notes))
        if self.golden is not None:
            yield from map(
                Small,
                (
                    f"bounds: two-sided, together at {fmt.level(self.confidence)} (Bonferroni); over rounds with a draft.",
                    "pass: every golden length lies within the run's bounds; the file has no bounds of its own.",
                ),
            )
            return
        level, deciding = fmt.level(self.confidence), "every" if self.baseline is None else "the first"
        together = "over all thresholds" if self.baseline is None else "of the domains together"
        yield Small(f"bounds: one-sided, lower ones at {level}, upper ones at {level}, {together} (Holm).")
        yield Small(f"pass: {deciding} lower bound reaches its threshold. fail: an upper bound is below its threshold.")
        if self.outcome == "undecided":
            code = f"{0 if self.undecided == 'pass' else CheckUndecided.exit_code}"
            other = f"; --undecided fail makes it {CheckUndecided.exit_code}" if self.undecided == "pass" else ""
            yield Small(f"UNDECIDED ends with exit code {code}{other}.")

    @property
    def following(self) -> str:
        """What to do next, with the command that shows more."""
        return NEXT[self.outcome].format(f"alphaprof report {shlex.quote(path_and_draft(self.run)[0])} --show gammas")

    @property
    def _limit(self) -> str:
        """What a threshold is, as text."""
        return "at least" if self.golden is None else "golden"

    def junit(self) -> str:
        """Return JUnit XML: a test case a threshold. What could not be judged is skipped; so is what is undecided, unless it
        fails the pipeline.
        """
        suite = ET.Element("testsuite", name="alphaprof check")

        def case(classname: str, name: str, outcome: Outcome, text: str) -> None:
            tested = ET.SubElement(suite, "testcase", classname=classname, name=visible(short(name)))
            if outcome != "pass":
                message = visible(f"{text}; {self.following}")
                ET.SubElement(tested, "failure" if outcome == "fail" else "skipped", message=message)

        for number, item in enumerate(self.items):
            decides = item.outcome == self.outcome == "undecided" and (self.baseline is None or number == 0)
            notes = [f"bounds {item.bounds}"] if item.low is not None else []
            notes += [item.note] if item.note else []
            text = f"{item.number(item.value)}, {', '.join(notes)}, {self._limit} {item.threshold:g}"
            fails = decides and self.undecided == "fail"
            case(f"{item.draft}.{item.measure}", item.domain, "fail" if fails else item.outcome, text)
        for left in self.unjudged:
            case(f"{self.draft}.baseline", left.domain, "undecided", f"not judged: {left.reason}")
        if not self.items:
            fails = self.outcome == "undecided" and self.undecided == "fail"
            case("alphaprof", "decision", "fail" if fails else self.outcome, self.reason)
        suite.set("tests", str(len(suite)))
        for count, outcome in (("failures", "failure"), ("skipped", "skipped")):
            suite.set(count, str(len(suite.findall(f"*/{outcome}"))))
        ET.indent(suite)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def require_passed(check: Check) -> None:
    """Raise `CheckFailed`, or `CheckUndecided` if that is asked for."""
    if check.outcome == "fail":
        raise CheckFailed(f"check failed: {check.reason}", check.following)
    if check.outcome == "undecided" and check.undecided == "fail":
        raise CheckUndecided(f"check undecided: {check.reason}", "settle what the reason names, or use --undecided pass")


def _in_words(items: Sequence[Item], outcome: Outcome, unjudged: Sequence[Unjudged] = (), passed: str | None = None) -> str:
    """Return the items that decided, in words, and what was not judged. `passed`: why all pass, if no bound shows it."""
    if outcome == "pass":
        parts = [passed or (f"all {len(items)} thresholds are reached" if len(items) > 1 else "the threshold is reached")]
    else:
        decisive = [(item, f"{item.measure} of {short(item.domain)}") for item in items if item.outcome == outcome]
        parts = [f"{name}: {item.note}" for item, name in decisive if item.low is None]
        if judged := [
            f"{name} {item.number(item.value)} {item.bounds}, at least {item.number(item.threshold)} wanted"
            for item, name in decisive
            if item.low is not None
        ]:
            surer = " or more precise step times" if any(item.measure == "speedup" for item, _ in decisive) else ""
            unclear = f": bounds enclose the threshold, more documents{surer} needed"
            more = f" and {len(judged) - TOLD} more" if len(judged) > TOLD else ""
            parts.append(f"{'; '.join(judged[:TOLD])}{more}{'' if outcome == 'fail' else unclear}")
    if unjudged:
        parts.append(f"not judged: {', '.join(dict.fromkeys(short(item.domain) for item in unjudged))}")
    return "; ".join(parts)


def checked(
    path: Path,
    draft: str | None,
    rule: str | None,
    gamma: int | None,
    minimums: Minimums,
    baseline: str | None,
    margin: float,
    overrides: Sequence[str] = (),
    golden: str | None = None,
) -> Check:
    """Return the check that the options of `alphaprof check` ask for; `overrides`: what `--set` changes of the question.
    Raises `OptionInvalid`, `ProfileInvalid`, `NotComparable`, `RunUnreadable`.
    """
    rule = known_rules([rule], "--rule")[0] if rule else None
    thresholds = {measure: _thresholds(measure, texts) for measure, texts in minimums.items() if texts}
    folder, named = path_and_draft(str(path))
    if None not in (draft, named) and draft != named:
        raise OptionInvalid(f"two drafts are named: {short(str(named))} and {short(str(draft))}", "leave --draft out")
    draft = draft if named is None else named
    run = Run.open(Path(folder))
    profile = run.manifest.profile
    if overrides:
        config = changed_question(run.manifest.config, list(overrides))
        profile = dataclasses.replace(run.manifest, config=config).profile
    if len([each for each in (thresholds, baseline, golden) if each]) > 1:
        raise OptionInvalid("thresholds, --baseline and --golden cannot be combined in one check", "run check once for each")
    if golden is not None:
        side = side_of(f"{folder}:{draft}" if draft else folder)
        return check_golden(side.asked(config) if overrides else side, golden, rule, gamma)
    if baseline is not None:
        new = side_of(f"{folder}:{draft}" if draft else folder)
        old = side_of(f"{baseline}:{new.draft}" if path_and_draft(baseline)[1] is None else baseline)
        return check_baseline(new, old, rule, margin, gamma, profile)
    asked = Asked.of(run, profile)
    drafts = asked.run.manifest.drafts  # hybrids too
    _require_one_of("draft", draft, drafts, run)
    if thresholds and draft is None and profile.decision.draft == AUTO and len(drafts) == 1:
        draft = next(iter(drafts))
    _require_one_of("gamma", gamma, drafts[draft].lengths(run.gammas) if draft else run.gammas, run)
    asked = settled(Asked.of(run, profile.deciding(draft, rule, gamma)))
    return _check_thresholds(asked, thresholds, rule) if thresholds else _check_decision(asked)


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
            raise OptionInvalid(
                f"{shown(text)} is not a threshold for {measure}, or is a duplicate",
                "give NUMBER for all domains, or DOMAIN=NUMBER once per domain: code=0.6",
            )
        least[domain] = value
    return least


def _check_decision(asked: Asked) -> Check:
    """Judges a run by its decision: GO passes, NO-GO fails."""
    judged = Judge.of(asked)
    answer, traffic = judged.traffic()
    outcome = VERDICTS[str(answer.verdict)]
    items: tuple[Item, ...] = ()
    if (found := answer.speedup) is not None:
        item = partial(Item, "speedup", WHOLE, answer.draft, answer.gamma, traffic.min_speedup)
        items = (item(found.value, found.low, found.high, answer.held_out, outcome),)
    return Check(
        outcome=outcome,
        notes=_notes(asked, [(item.domain, item.pool) for item in judged.pools], speedup=True),
        reason=answer.reason,
        run=str(asked.run.path),
        draft=answer.draft,
        rule=answer.rule,
        gamma=answer.gamma,
        times=asked.costs.basis if asked.costs else None,
        confidence=asked.question.confidence,
        items=items,
    )


def _notes(asked: Asked, pools: Iterable[tuple[str, DocumentTotals]], *, speedup: bool) -> tuple[Note, ...]:
    """Return those of the run's own notes that concern what is checked, and what the texts of some pools, each with its
    domain, say against themselves.
    """
    manifest, costs = asked.run.manifest, asked.costs
    source = costs.options.source if costs else manifest.profile.costs.source
    concern = {"texts", *(("times",) if speedup else ()), *(("own times",) if speedup and source in TIMED else ())}
    partial = [note("partial", documents=manifest.documents)] if manifest.status != "complete" else []
    found = [*manifest.warnings, *partial, *text_notes(pools)]
    return tuple(Note(**each) for each in found if concerns_of(each["code"]) in concern)


def _judged_together(parts: Sequence[tuple[Item, Bounds | None]], confidence: float) -> tuple[Item, ...]:
    """Return items with the outcomes and bounds of their gates, together at one confidence (Holm). One without bounds has no
    part in the correction of the others.
    """
    gates = [Gate(item.threshold, bounds) for item, bounds in parts if bounds is not None]
    results = iter(judge_gates(gates, confidence))
    return tuple(item if bounds is None else dataclasses.replace(item, **vars(next(results))) for item, bounds in parts)


def _measured(measure: Measure, parts: Sequence[tuple[DocumentTotals, int]]) -> tuple[float | None, Bounds]:
    """Return alpha or the acceptance length over all documents of some parts, each at its gamma (None: not known), and its
    bounds.
    """
    sums = [accepted_of(pool, None if measure == "alpha" else gamma) for pool, gamma in parts]
    accepted, proposed = (np.concatenate(side) for side in zip(*sums, strict=True))
    least, most = (0.0, 1.0) if measure == "alpha" else (1.0, float(max(gamma for _, gamma in parts)))
    if not proposed.sum():
        return None, lambda _: (least, least + most)
    estimate = ratio(*by_cluster(np.concatenate([pool.cluster for pool, _ in parts]), accepted, proposed))
    free = ALONE.routed([[(pool.counts(gamma), free_draft(gamma)) for pool, gamma in parts]]) if measure != "alpha" else None

    def bounds(tail: float) -> tuple[float, float]:
        if free is not None:
            found = length_interval(least + estimate.value, Interval(free.value, *free.bounds(tail)), round(most))
        else:
            found = share_interval(estimate, 1 - 2 * tail)
        return found.low, found.high

    return least + estimate.value, bounds


def _check_thresholds(asked: Asked, thresholds: Mapping[Measure, Mapping[str, float]], rule: str | None) -> Check:
    """Judges a run by least values of measures of the report's answer for each domain. Raises `OptionInvalid` for what the
    run does not have.
    """
    run, question = asked.run, asked.question
    chosen, judge = rule or one_rule(asked), Judge.of(asked)
    domains = list(dict.fromkeys(item.domain for item in judge.pools if item.pool.defined))
    if not domains:
        hint = "name a rule that applies to this text: strict if it is greedy; one_hot, lossless or block if it is sampled"
        raise OptionInvalid(f"{chosen} has no rounds on the text of {run.path}", hint)
    drafting, timed = run.manifest.drafting, judge.candidates.keys() & judge.timing.times.keys()
    for measure, missing, why in (
        ("alpha", run.imported, "an engine's metrics do not give alpha, since what follows a rejection is never tested"),
        ("acceptance_length", drafting != CHAIN, f"it was served with {drafting} drafting, so its rounds are not known"),
        ("speedup", not timed, f"it has no step times for {' or '.join(judge.candidates)}"),
    ):
        if missing and measure in thresholds:
            raise OptionInvalid(
                f"{measure} of {run.path} cannot be checked: {why}",
                "use --min-acceptance-length, or --baseline to compare tokens per round with another run",
            )
    if not timed and len(judge.candidates) > 1:
        raise OptionInvalid(
            f"the best draft for {run.path} is not known: it has no step times",
            f"name one: --draft {' or '.join(judge.candidates)}",
        )
    undefined, parts, unjudged = judge.evidence.undefined, list[tuple[Item, Bounds | None]](), dict[str, str]()
    unjudged |= {domain: why for domain, why in undefined.items() if domain not in domains}
    for measure, named in thresholds.items():
        for domain in named.keys() - {EVERY}:
            _require_one_of("domain with rounds", domain, domains, run)
        for domain in domains:
            if domain not in named and not judge.weights.get(domain, 0):
                unjudged[domain] = "weight 0 in decision.weights"
            elif (least := named.get(domain, named.get(EVERY))) is not None:
                parts.append(_judged(measure, judge, domain, least))
    items = _judged_together(parts, question.confidence)
    few = f"a speedup needs step times of at least {GO_ROUNDS} rounds to pass"  # a report has no GO by fewer
    items = tuple(
        dataclasses.replace(item, outcome="undecided", note=few)
        if (item.measure, item.outcome) == ("speedup", "pass") and 0 < judge.timing.times[str(item.draft)].rounds < GO_ROUNDS
        else item
        for item in items
    )
    outcome, pairs = together([item.outcome for item in items]), [(item.draft, item.gamma) for item in items]
    drafts, gammas = {draft for draft, _ in pairs}, {gamma for _, gamma in pairs if gamma is not None}
    return Check(
        outcome=outcome,
        notes=_notes(asked, [(item.domain, item.pool) for item in judge.pools], speedup="speedup" in thresholds),
        reason=_in_words(items, outcome),
        run=str(run.path),
        draft=drafts.pop() if len(drafts) == 1 else None,
        rule=chosen,
        gamma=gammas.pop() if len(gammas) == 1 else None,
        times=judge.costs.basis if judge.costs and "speedup" in thresholds else None,
        confidence=question.confidence,
        items=items,
        unjudged=tuple(Unjudged(*each) for each in unjudged.items()),
    )


def _judged(measure: Measure, judge: Judge, domain: str, least: float) -> tuple[Item, Bounds | None]:
    """Return the least value of a measure in a domain, of the report's answer there, and its bounds; None if these do not
    decide. What was chosen is cross-fitted, as its speedup is; if what was named has to clear a threshold as well, so does
    it here.
    """
    pair, decision = judge.for_domain(domain)
    if pair is None:
        return Item(measure, domain, None, None, least, None, None, None, 0, "undecided", decision.reason), None
    (draft, gamma), tested, asked = pair, decision.tested, judge.asked
    if measure == "speedup" and decision.untold:
        return Item(measure, domain, draft, gamma, least, None, None, None, 0, "undecided", decision.untold), None

    def over(*parts: tuple[Pair, Mask | None]) -> tuple[float | None, Bounds]:
        pools = [(judge.every[draft][domain], gamma, rows) for (draft, gamma), rows in parts]
        return _measured(measure, [(pool if rows is None else pool.rows(rows), gamma) for pool, gamma, rows in pools])

    value, bounds = over((pair, None)) if measure != "speedup" else (None, lambda _: (0.0, math.inf))
    if measure == "speedup":
        if tested is not None and tested.shown is not None:
            value, bounds = tested.shown.value, tested.deciding
    elif tested is not None and tested.choice is not None and tested.rows is not None:
        halves = over(*zip(tested.choice.halves[::-1], (rows[domain] for rows in tested.rows), strict=True))
        sides = (halves[1], bounds) if tested.own is not None else (halves[1],)
        value = halves[0] if tested.own is None or tested.close else value
        bounds = partial(_widest, sides)
    whole, used = judge.every[draft][domain], None if measure == "alpha" else gamma
    first = measure == "alpha" and asked.run.manifest.drafts[draft].by_depth
    item = partial(
        Item, "accept@1" if first else measure, domain, draft, used, least, value, None, None, distinct(whole.cluster)
    )
    if measure != "speedup" and proposes_nothing(whole, used) and whole["tokens"].sum():  # it had every chance
        return item("fail", SILENT), None
    if asked.question.stand_in:
        return item("undecided", asked.question.stand_in), None
    return item("undecided", FIRST if first else None), bounds


def _widest(sides: Sequence[Bounds], tail: float) -> tuple[float, float]:
    """Return bounds that enclose those of all sides."""
    lows, highs = zip(*(bounds(tail) for bounds in sides), strict=True)
    return min(lows), max(highs)


def _require_one_of(what: str, asked: object, known: Collection[object], run: Run) -> None:
    """Raise `OptionInvalid` for a name that is asked for and that the run does not have."""
    if asked is not None and asked not in known:
        names = " or ".join(short(str(name)) for name in known)
        raise OptionInvalid(f"unknown {what} in {run.path}: {short(str(asked))}", f"name one: {names}")


def one_rule(asked: Asked) -> str:
    """Return the rule of the decision. Raises `OptionInvalid` if greedy and sampled text have one each, or none exists, and
    `RunMismatch` for a run that has no rows yet.
    """
    if not asked.run.manifest.shards:
        raise RunMismatch(f"{asked.run.path} has no measured text yet", "finish it with alphaprof profile --resume first")
    if len(asked.decisive) != 1:
        found = " and ".join(asked.decisive) or "no text is the target's own"
        raise OptionInvalid(f"the run's text has no single rule: {found}", "name one: --rule strict")
    return asked.decisive[0]


def check_golden(side: RunDraft, reference: str, rule: str | None, gamma: int | None) -> Check:
    """Say whether the intervals of a draft's acceptance lengths hold those that others published, see `golden_lengths`: of
    domains that have the name of a mode or a category, and of the whole traffic. All intervals together miss a true length
    with a probability of at most 1 - confidence (Bonferroni); the published ones have errors of their own, and no interval.
    Raises `ProfileInvalid`, and `OptionInvalid` if nothing can be compared.
    """
    lengths, asked = golden_lengths(reference), Asked.of(side.run, side.run.manifest.profile)
    domains, unjudged, wanted = Judge.of(asked).evidence.observed, dict[str, str](), list[tuple[str | None, int, float]]()
    for each in lengths:
        if (at := each.gamma or gamma) is None:
            raise OptionInvalid(f"{reference} does not say how many tokens were drafted", "name it: --gamma N")
        if each.domain is not None and each.domain not in domains:
            unjudged[each.domain] = "the run has no such domain"
        elif at not in side.gammas:
            unjudged.setdefault(each.domain or WHOLE, f"the run has no rounds of gamma {at}")
        elif gamma in (None, at):
            wanted.append((each.domain, at, each.length))
    if not wanted:
        why = "; ".join(f"{short(visible(name))}: {reason}" for name, reason in unjudged.items())
        raise OptionInvalid(
            f"nothing of {reference} can be compared: {why or f'it has no gamma {gamma}'}",
            "name the run's domains as the file does, and profile with its numbers of speculative tokens",
        )
    confidence, items, rules = asked.question.confidence, list[Item](), dict[str, None]()
    scopes = {domain: scope_of(side, "a check of golden lengths", rule, gamma, domain) for domain, _, _ in wanted}
    for domain, at, length in wanted:
        scope = scopes[domain]
        rates = rates_at(scope, at, 1 - (1 - confidence) / len(wanted))
        ends = vars(rates.acceptance_length_all).values()
        value, low, high = (min(1 + (end - 1) / rates.drafting, at + 1.0) for end in ends)
        item = Item("acceptance_length", domain or WHOLE, side.draft, at, length, value, low, high, scope.documents, "pass")
        if not low <= length <= high:
            where = "below" if length > high else "above"
            note = f"at gamma {at} the run is surely {where} the golden length {length:.2f}"
            item = dataclasses.replace(item, outcome="fail", note=note)
        items.append(item)
        rules[scope.rules] = None
    missed, gammas = [item for item in items if item.outcome == "fail"], {item.gamma for item in items}
    return Check(
        outcome="fail" if missed else "pass",
        notes=_notes(asked, (), speedup=False),
        reason=f"{len(items) - len(missed)} of {len(items)} golden lengths lie within the run's bounds",
        run=side.label,
        golden=reference,
        draft=side.draft,
        rule=" and ".join(rules),
        gamma=gammas.pop() if len(gammas) == 1 else None,
        confidence=confidence,
        items=tuple(items),
        unjudged=tuple(Unjudged(*each) for each in unjudged.items()),
    )


def check_baseline(
    new: RunDraft,
    old: RunDraft,
    rule: str | None,
    margin: float,
    gamma: int | None = None,
    profile: ProfileOptions | None = None,
) -> Check:
    """Compare a draft with an older one on the same prompts: tokens per round of the whole traffic must surely have lost no
    more than the share `margin`, and no domain may surely have lost more. That of the whole traffic is wrong with a
    probability of at most 1 - confidence, and so are all of domains together (Holm). `profile`: the new run's, with another
    decision. Raises `NotComparable` with the reason, and `OptionInvalid` for a gamma that is not one of both runs.
    """
    require_comparable(old, new)
    both = common_gammas(new, old, gamma)
    if not both:
        raise NotComparable(
            f"{new.run.path} and {old.run.path} have no gamma in common", "profile both with the same gammas"
        )
    profile = profile or new.run.manifest.profile
    used = int(deciding_gamma(old, both, profile) or 0)
    drafts = [side.run.manifest.drafts[side.draft] for side in (old, new)]
    asked = Asked.of(new.run, profile)
    chosen, confidence, weights = rule or one_rule(asked), asked.question.confidence, asked.question.weights
    texts, rows, unpaired = paired_texts(old, new, [chosen])
    judged, unjudged = list[TextPair](), list[Unjudged]()
    for text in texts:
        why = _why_not_judged(text, used, drafts)
        if not why and weights is not None and not weights.get(text.domain, 0):
            why = "weight 0 in decision.weights"
        if why:
            unjudged.append(Unjudged(text.domain, why))
        else:
            judged.append(text)
    if not judged:
        why = "; ".join(dict.fromkeys(item.reason for item in unjudged))
        raise NotComparable(
            f"nothing can be compared with {old.label}: {why}",
            "name a --rule that applies to this text, or use a baseline with longer texts and a draft that proposes",
        )
    same, parts = _same_draft(old, new), list[tuple[Item, Bounds | None]]()
    whole = [(WHOLE, judged, weights)] if len(judged) > 1 else []
    for domain, those, shares in (*whole, *((text.domain, [text], None) for text in judged)):
        item, bounds = _kept_of_baseline(domain, those, shares, new.draft, used, margin, same, confidence)
        against = (contradiction(side) for text in those for side in (text.second, text.first))
        if doubt := asked.question.stand_in or next(filter(None, against), ""):  # rounds describe other traffic
            item, bounds = dataclasses.replace(item, outcome="undecided", note=doubt), None
        parts.append((item, bounds))
    # Two questions, each at the confidence: of the whole traffic, as `compare` asks it, and of any domain.
    items = (*_judged_together(parts[:1], confidence), *_judged_together(parts[1:], confidence))
    unjudged += _unpaired(old.run, new.run, {text.domain for text in texts})
    failed = any(item.outcome == "fail" for item in items)
    outcome: Outcome = "fail" if failed else items[0].outcome
    unmoved = SAME if items[0].note == SAME else "the threshold is reached"
    return Check(
        outcome=outcome,
        notes=_notes(asked, [(text.domain, text.second) for text in texts], speedup=False),
        reason=_in_words(items if failed else items[:1], outcome, unjudged, unmoved),
        run=new.label,
        baseline=old.label,
        new_target=new.run.manifest.target.reference if changed_facts(old.run, new.run) else None,
        draft=new.draft,
        rule=chosen,
        gamma=used,
        confidence=confidence,
        items=items,
        unjudged=tuple(unjudged),
        paired=len(rows[0]),
        unpaired=unpaired[::-1],
    )


def _why_not_judged(text: TextPair, gamma: int, drafts: Sequence[DraftFacts]) -> str | None:
    """Return why a text cannot be judged; None if it can. `drafts`: of both sides."""
    old, new, rule = text.first, text.second, text.rule
    if old.policy not in parse_rule(rule).rule.policies:
        return f"{rule} does not apply to this text ({fmt.text_kind(old.continuation, old.sampling)})"
    if not (old.defined and new.defined):
        return not_defined(rule, str(old.policy), max(drafts, key=attrgetter("by_depth")))
    if not text.has_rounds:
        return "in one run, no text goes beyond its first token (prefill)"
    if proposes_nothing(old, gamma):
        return f"the baseline's draft proposes nothing there{', nor does this one' if proposes_nothing(new, gamma) else ''}"
    return None


def _kept_of_baseline(
    domain: str,
    texts: Sequence[TextPair],
    weights: Mapping[str, float] | None,
    draft: str,
    gamma: int,
    margin: float,
    same_draft: bool,
    confidence: float,
) -> tuple[Item, Bounds | None]:
    """Return what a draft kept of the baseline's tokens per round on some texts, by the weights of their domains (None: as
    they are). `same_draft`: both sides are surely one draft of one target.
    """
    parts, shares = over_domains(texts, weights)
    before, _, change = difference_over(parts, shares, gamma, confidence)
    whole = TextPair.together(domain, texts)
    item = partial(Item, "tokens_per_round_change", domain, draft, gamma, -margin, change.value / before)

    def bounds(tail: float) -> tuple[float, float]:
        difference = difference_over(parts, shares, gamma, 1 - 2 * tail)[2]
        return difference.low / before, difference.high / before

    if proposes_nothing(whole.second, gamma):
        return item(None, None, distinct(whole.first.cluster), "fail", LOST), None
    # Counts that are expectations are equal to six digits. Nothing is estimated then: a margin is never below 0.
    sides = whole.totals(gamma)
    if same_draft and all(np.allclose(old, new, rtol=NO_SPREAD, atol=0) for old, new in zip(*sides, strict=True)):
        return dataclasses.replace(item(None, None, distinct(whole.first.cluster), "pass", SAME), value=0.0), None
    return item(None, None, min(int(np.count_nonzero(counts)) for _, counts in sides), "undecided"), bounds


def _same_draft(old: RunDraft, new: RunDraft) -> bool:
    """Return whether both sides are certainly one draft of one target; an engine's metrics do not show its draft."""
    # The same anyway: tokenizer and `draft_processing` of sides that can be compared, continuation settings of paired
    # documents; the parameters of a rule are in its id.
    before, after = (side.run.manifest for side in (old, new))
    same_target = surely_one(before.target, after.target)
    return not new.run.imported and same_target and surely_one(before.drafts[old.draft], after.drafts[new.draft])


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
