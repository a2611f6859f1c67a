"""The CI gate: a run compared with thresholds, or with its own decision, at one confidence for all; `baseline`: with an
older run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from alphaprof.costs.speedup import StepTimes, speedup
from alphaprof.errors import CheckFailed, CheckUndecided, OptionInvalid
from alphaprof.log.manifest import CHAIN
from alphaprof.log.run_draft import require_drafts
from alphaprof.log.store import Run
from alphaprof.report.build import build_report
from alphaprof.report.format import short
from alphaprof.report.inputs import ReportInputs, by_domain, draft_pools, evidence_of
from alphaprof.report.model import Traffic
from alphaprof.report.verdict import judge_traffic
from alphaprof.stats.estimate import bounded_interval, by_cluster, distinct, pooled_share, ratio
from alphaprof.totals.pool import DocumentTotals, accepted_of, proposes_nothing

Outcome = Literal["pass", "fail", "undecided"]
Bounds = tuple[float, float]
Array = np.ndarray[Any, Any]
Measure = Literal["alpha", "acceptance_length", "speedup", "alpha_difference", "tokens_per_round_difference"]
ALPHA: Measure = "alpha"
LENGTH: Measure = "acceptance_length"
SPEEDUP: Measure = "speedup"
DIFFERENCE: Measure = "alpha_difference"
TOKENS_DIFFERENCE: Measure = "tokens_per_round_difference"
EVERY = ""  # the domain of a threshold that holds for every domain
Thresholds = Mapping[Measure, Mapping[str, float]]  # by measure, then domain


@dataclass(frozen=True)
class Gate:
    """A quantity that shall be at least `threshold`. `bounds`: its lower and upper bound, each wrong with a probability."""

    threshold: float
    bounds: Callable[[float], Bounds]


@dataclass(frozen=True)
class GateResult:
    """What became of a gate: the one-sided bounds that it was judged by, the upper one with Holm's correction."""

    outcome: Outcome
    low: float
    high: float


def judge(gates: Sequence[Gate], confidence: float) -> list[GateResult]:
    """Each gate's outcome, in their order."""
    error = 1 - confidence
    highs: dict[int, float] = {}
    left = list(range(len(gates)))
    while left:
        found = {index: gates[index].bounds(error / len(left))[1] for index in left}
        failed = [index for index in left if found[index] < gates[index].threshold]
        if not failed:
            highs |= found
            break
        highs |= {index: found[index] for index in failed}
        left = [index for index in left if index not in failed]
    lows = [gate.bounds(error)[0] for gate in gates]
    return [
        GateResult(_outcome(gate.threshold, low, highs[index]), low, highs[index])
        for index, (gate, low) in enumerate(zip(gates, lows, strict=True))
    ]


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Fail if any fails, pass if all pass."""
    if "fail" in outcomes:
        return "fail"
    return "pass" if outcomes and all(outcome == "pass" for outcome in outcomes) else "undecided"


def _outcome(threshold: float, low: float, high: float) -> Outcome:
    if high < threshold:
        return "fail"
    return "pass" if low >= threshold else "undecided"


@dataclass(frozen=True)
class CheckTarget:
    """What is checked; None: what the run's decision is about, or what it chose."""

    draft: str | None
    rule: str | None
    gamma: int | None


@dataclass(frozen=True)
class Item:
    """One quantity and its threshold. `low`, `high`: the one-sided bounds that it was judged by; None where it fails or
    passes without them, for the reason in `note`.
    """

    measure: Measure  # the quantity that is compared with the threshold
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

    outcome: Outcome  # of all thresholds together
    reason: str
    run: str
    baseline: str | None = None  # the older run and its draft; None: compared with thresholds or a decision
    draft: str | None
    rule: str
    gamma: int | None
    confidence: float
    items: tuple[Item, ...]  # one for each threshold and domain
    unjudged: tuple[Unjudged, ...] = ()  # domains of the baseline or the run that could not be compared
    paired: int | None = None
    unpaired: tuple[int, int] | None = None  # documents without a partner: in the run, in the baseline


def check_decision(run: Run) -> Check:
    """A run held against what its profile asks: GO passes, NO-GO fails."""
    report = build_report(run)
    traffic = report.traffic
    outcome: dict[str, Outcome] = {"GO": "pass", "NO-GO": "fail", "UNDECIDED": "undecided"}
    tested = traffic.tested
    items: tuple[Item, ...] = ()
    if tested is not None:
        found = outcome[traffic.verdict]
        bounds = (tested.value, tested.low, tested.high)
        items = (Item(SPEEDUP, "whole traffic", traffic.min_speedup, *bounds, traffic.documents, found),)
    return Check(
        outcome=outcome[traffic.verdict],
        reason=traffic.reason,
        run=str(run.path),
        draft=traffic.draft,
        rule=traffic.rule,
        gamma=traffic.gamma,
        confidence=report.confidence,
        items=items,
    )


def check_thresholds(run: Run, subject: CheckTarget, thresholds: Thresholds) -> Check:
    """A run held against least values by domain. Raises `OptionInvalid` for what the run does not have."""
    if run.imported and ALPHA in thresholds:
        raise OptionInvalid(
            f"{run.path} was imported from an engine's metrics, which do not give alpha (what follows a rejection is never "
            "tested)",
            "use --min-acceptance-length instead",
        )
    if LENGTH in thresholds and (drafting := run.manifest.drafting) != CHAIN:
        raise OptionInvalid(
            f"{run.path} was served with drafting {drafting}: acceptance length needs rounds with a draft, which are "
            "not known",
            "check --baseline compares tokens per round with another run",
        )
    inquiry = ReportInputs.of(run, "engine", run.manifest.config)
    draft, rule, gamma = _settled(run, inquiry, subject, needs_gamma=bool({LENGTH, SPEEDUP} & set(thresholds)))
    pools = _pools(inquiry, draft, rule)
    times = inquiry.book.times(inquiry.question.concurrency).get(draft) if inquiry.book else None
    if SPEEDUP in thresholds and times is None:
        raise OptionInvalid(
            f"{run.path} has no step times for {draft}, so no speedup", "use --min-acceptance-length instead"
        )
    asked = [
        (measure, domain, least)
        for measure, named in thresholds.items()
        for domain, least in _spread(named, pools, run).items()
    ]
    judging = [item for item in asked if not _silent(pools[item[1]], item[0], gamma)]
    gates = [Gate(least, partial(_bounds, pools[domain], measure, gamma, times)) for measure, domain, least in judging]
    judged = dict(zip(judging, judge(gates, inquiry.question.confidence), strict=True))
    items = tuple(
        _held(item, pools[item[1]], _value(pools[item[1]], item[0], gamma, times), judged.get(item)) for item in asked
    )
    outcome = together([item.outcome for item in items])
    return Check(
        outcome=outcome,
        reason=reason_of(items, outcome),
        run=str(run.path),
        draft=draft,
        rule=rule,
        gamma=gamma,
        confidence=inquiry.question.confidence,
        items=items,
    )


def require_passed(check: Check, undecided_fails: bool) -> None:
    """Raise `CheckFailed`, or `CheckUndecided` where that is asked for."""
    if check.outcome == "fail":
        raise CheckFailed(f"check failed: {check.reason}", "alphaprof report shows where acceptance is lost")
    if check.outcome == "undecided" and undecided_fails:
        raise CheckUndecided(f"check undecided: {check.reason}", "profile more documents, or --undecided pass")


def _settled(run: Run, inquiry: ReportInputs, subject: CheckTarget, needs_gamma: bool) -> tuple[str, str, int | None]:
    """Draft, rule and gamma (None where no threshold needs one): as named, else as the decision fixes them, else as the
    verdict on the whole traffic chooses them; the gamma of a named draft as the verdict on this draft does.
    """
    require_drafts(run)
    question = inquiry.question
    draft = subject.draft or (question.draft if question.draft != "auto" else None)
    gamma = subject.gamma or (question.gamma if isinstance(question.gamma, int) else None)
    if draft is None and len(run.manifest.drafts) == 1:
        draft = next(iter(run.manifest.drafts))
    if draft is not None:
        _require_draft(run, draft)
    if draft is None or (gamma is None and needs_gamma):
        chosen = _chosen(run, draft, subject.rule)
        if chosen.draft is None or chosen.gamma is None:
            what, names = f"gamma is known to be the best for {run.path}:{draft}", _gammas(run)
            if draft is None:
                what, names = f"draft of {run.path} is known to be the best", f"--draft {' or '.join(run.manifest.drafts)}"
            raise OptionInvalid(f"no {what}: {chosen.reason}", f"name one: {names}")
        draft, gamma = chosen.draft, gamma or chosen.gamma
    if needs_gamma and gamma not in run.gammas:
        raise OptionInvalid(f"{run.path} has no gamma {gamma}", f"name one: {_gammas(run)}")
    return draft, subject.rule or one_rule(inquiry), gamma if needs_gamma else None


def _chosen(run: Run, draft: str | None, rule: str | None) -> Traffic:
    """The verdict on one draft (None: on the one of the decision), which chooses what is `auto`."""
    decision = run.manifest.config["decision"] | {
        name: value for name, value in (("draft", draft), ("rule", rule)) if value is not None
    }
    inquiry = ReportInputs.of(run, "engine", run.manifest.config | {"decision": decision})
    evidence = evidence_of(inquiry, list(draft_pools(inquiry, inquiry.deciding)))
    return judge_traffic(evidence, inquiry.book, inquiry.question, run.gammas)


def _require_draft(run: Run, draft: str) -> None:
    if draft not in run.manifest.drafts:
        raise OptionInvalid(f"{run.path} has no draft {short(draft)}", f"name one: {', '.join(run.manifest.drafts)}")


def _gammas(run: Run) -> str:
    """The options that name a gamma of a run."""
    return f"--gamma {' or '.join(map(str, run.gammas))}"


def one_rule(inquiry: ReportInputs) -> str:
    """The rule of the decision. Raises `OptionInvalid` where greedy and sampled text have one each, or there is neither."""
    rules = inquiry.decisive
    if not rules:
        raise OptionInvalid("no text of the run is the target's own, so no rule has rounds on it", "name one: --rule strict")
    if len(rules) > 1:
        raise OptionInvalid("the run holds greedy and sampled text, each with a rule of its own", "name one: --rule strict")
    return rules[0]


def _pools(inquiry: ReportInputs, draft: str, rule: str) -> dict[str, DocumentTotals]:
    """Pools of the text that a rule belongs to, by domain. Raises `OptionInvalid` where there is none."""
    mine = [item for item in draft_pools(inquiry, [rule]) if (item.draft, item.rule.id) == (draft, rule)]
    found = by_domain([(item.domain, item.pool) for item in mine if item.pool.defined])
    if not found:
        raise OptionInvalid(
            f"{rule} has no rounds on the text of {inquiry.run.path}",
            "name a rule that applies to this text: strict if it is greedy, one_hot or lossless if it is sampled",
        )
    return found


def _spread(named: Mapping[str, float], pools: Mapping[str, DocumentTotals], run: Run) -> dict[str, float]:
    """Thresholds of every domain that has one; a domain's own goes before that of every domain."""
    if unknown := [domain for domain in named if domain != EVERY and domain not in pools]:
        known = ", ".join(map(short, pools))
        raise OptionInvalid(f"{run.path} has no domain {short(unknown[0])!r} with rounds", f"it has: {known}")
    general = dict.fromkeys(pools, named[EVERY]) if EVERY in named else {}
    return general | {domain: least for domain, least in named.items() if domain != EVERY}


def _value(pool: DocumentTotals, measure: str, gamma: int | None, times: StepTimes | None) -> float | None:
    """The estimate of a measure; None where there is nothing to take it from."""
    if measure == SPEEDUP:
        faster = speedup([pool.counts(gamma)], [1.0], times) if times is not None and gamma is not None else None
        return faster.value if faster is not None else None
    totals, counts = accepted_of(pool, gamma if measure == LENGTH else None)
    if not counts.sum():
        return None
    return float(totals.sum() / counts.sum()) + (measure == LENGTH)


def _silent(pool: DocumentTotals, measure: Measure, gamma: int | None) -> bool:
    """Whether the draft proposes nothing on texts that it had every chance on: no luck of the documents, and no unknown."""
    if measure == SPEEDUP or pool["tokens"].sum() == 0:
        return False
    return proposes_nothing(pool, None if measure == ALPHA else gamma)


def _held(asked: tuple[Measure, str, float], pool: DocumentTotals, value: float | None, found: GateResult | None) -> Item:
    """A threshold and what became of it; `found` is None where the draft proposes nothing."""
    measure, domain, least = asked
    documents = distinct(pool.cluster)
    if found is None:
        return Item(measure, domain, least, None, None, None, documents, "fail", "the draft proposes nothing there")
    return Item(measure, domain, least, value, found.low, found.high, documents, found.outcome)


def _bounds(
    pool: DocumentTotals, measure: str, gamma: int | None, times: StepTimes | None, tail: float
) -> tuple[float, float]:
    """One-sided bounds of a measure, each wrong with probability `tail`."""
    if measure == ALPHA:
        found = pooled_share(pool.cluster, pool["accepted"], pool["proposals"], 1 - 2 * tail)
        return (found.low, found.high) if found else (0.0, 1.0)
    if gamma is None:
        raise ValueError(f"{measure} needs a gamma")
    if measure == SPEEDUP:
        faster = speedup([pool.counts(gamma)], [1.0], times) if times is not None else None
        return faster.deciding(tail) if faster is not None else (0.0, np.inf)
    accepted, rounds = by_cluster(pool.cluster, *accepted_of(pool, gamma))
    if not rounds.sum():
        return 1.0, gamma + 1.0
    low, high = bounded_interval(ratio(accepted, rounds), 0.0, float(gamma), tail)
    return 1 + low, 1 + high


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
