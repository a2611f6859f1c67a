"""The CI gate: what the options ask for; a run judged by thresholds or by its own decision, at one confidence for all."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.commands.check.answer import ALPHA, LENGTH, SPEEDUP, Check, Item, Measure, reason_of
from alphaprof.commands.check.baseline import check_baseline, one_rule
from alphaprof.costs.speedup import StepTimes, speedup
from alphaprof.errors import VALUE, OptionInvalid, cut, shown
from alphaprof.log.manifest import CHAIN
from alphaprof.log.run_draft import require_drafts, side_of
from alphaprof.log.store import Run
from alphaprof.report.build import build_report
from alphaprof.report.format import short
from alphaprof.report.inputs import ReportInputs, by_domain, draft_pools, evidence_of
from alphaprof.report.model import Traffic
from alphaprof.report.verdict import judge_traffic
from alphaprof.stats.estimate import bounded_interval, by_cluster, distinct, pooled_share, ratio
from alphaprof.stats.gates import Gate, GateResult, Outcome, judge, together
from alphaprof.totals.pool import DocumentTotals, accepted_of, proposes_nothing

Array = np.ndarray[Any, Any]
EVERY = ""  # the domain of a threshold that holds for every domain
Thresholds = Mapping[Measure, Mapping[str, float]]  # by measure, then domain


@dataclass(frozen=True)
class CheckTarget:
    """What is checked; None: what the run's decision is about, or what it chose."""

    draft: str | None
    rule: str | None
    gamma: int | None


@dataclass(frozen=True)
class CheckRequest:
    """The options of `alphaprof check`, as they were written; `minimums` by measure: X, or DOMAIN=X."""

    run: Path
    draft: str | None
    rule: str | None
    gamma: int | None
    minimums: Mapping[Measure, Sequence[str]]
    baseline: str | None
    margin: float
    target_change: bool


def minimums(
    alpha: Sequence[str] | None, length: Sequence[str] | None, speedup: Sequence[str] | None
) -> dict[Measure, Sequence[str]]:
    """Options by measure."""
    return {"alpha": alpha or [], "acceptance_length": length or [], "speedup": speedup or []}


def checked(asked: CheckRequest) -> Check:
    """The check that is asked for. Raises `OptionInvalid`, `NotComparable` and `RunUnreadable`."""
    thresholds = {measure: _thresholds(measure, texts) for measure, texts in asked.minimums.items() if texts}
    if asked.baseline is not None:
        if thresholds:
            raise OptionInvalid("thresholds and --baseline cannot be combined in one check", "run check once with each")
        new = side_of(f"{asked.run}:{asked.draft}" if asked.draft else str(asked.run))
        named = not os.path.exists(asked.baseline) and ":" in asked.baseline
        old = side_of(asked.baseline if named else f"{asked.baseline}:{new.draft}")
        return check_baseline(new, old, asked.rule, asked.margin, asked.target_change)
    run = Run.open(asked.run)
    if thresholds:
        return check_thresholds(run, CheckTarget(asked.draft, asked.rule, asked.gamma), thresholds)
    if asked.draft or asked.rule or asked.gamma:
        raise OptionInvalid(
            "--draft, --rule and --gamma need a threshold or a baseline",
            "add --min-acceptance-length, --min-alpha, --min-speedup or --baseline; without all of these the run's "
            "own decision is checked",
        )
    return check_decision(run)


def _thresholds(measure: Measure, texts: Sequence[str]) -> dict[str, float]:
    """Returns least values by domain. Raises `OptionInvalid` for what is no number, and for a domain that is named twice."""
    least: dict[str, float] = {}
    for text in texts:
        domain, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise OptionInvalid(
                f"{shown(text)} is not a threshold for {measure}", "write a number, or DOMAIN=NUMBER: code=0.6"
            )
        if domain in least:
            raise OptionInvalid(
                f"{measure} has two thresholds for {cut(domain, VALUE) or 'every domain'}", "remove one of them"
            )
        least[domain or EVERY] = value
    return least


def check_decision(run: Run) -> Check:
    """Judges a run by the decision of its profile: GO passes, NO-GO fails."""
    report = build_report(run)
    traffic = report.traffic
    outcome: dict[str, Outcome] = {"GO": "pass", "NO-GO": "fail", "UNDECIDED": "undecided"}
    tested = traffic.tested
    items: tuple[Item, ...] = ()
    if tested is not None:
        bounds = (tested.value, tested.low, tested.high)
        items = (Item(SPEEDUP, "whole traffic", traffic.min_speedup, *bounds, traffic.documents, outcome[traffic.verdict]),)
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
    """Judges a run by least values of its domains. Raises `OptionInvalid` for what the run does not have."""
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
        _item(item, pools[item[1]], _value(pools[item[1]], item[0], gamma, times), judged.get(item)) for item in asked
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


def _pools(inquiry: ReportInputs, draft: str, rule: str) -> dict[str, DocumentTotals]:
    """Returns the pools of the text that a rule belongs to, by domain. Raises `OptionInvalid` where there is none."""
    mine = [item for item in draft_pools(inquiry, [rule]) if (item.draft, item.rule.id) == (draft, rule)]
    pools = by_domain([(item.domain, item.pool) for item in mine if item.pool.defined])
    if not pools:
        raise OptionInvalid(
            f"{rule} has no rounds on the text of {inquiry.run.path}",
            "name a rule that applies to this text: strict if it is greedy, one_hot or lossless if it is sampled",
        )
    return pools


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


def _item(asked: tuple[Measure, str, float], pool: DocumentTotals, value: float | None, result: GateResult | None) -> Item:
    """Returns a threshold with its `result`, which is None where the draft proposes nothing."""
    measure, domain, least = asked
    documents = distinct(pool.cluster)
    if result is None:
        return Item(measure, domain, least, None, None, None, documents, "fail", "the draft proposes nothing there")
    return Item(measure, domain, least, value, result.low, result.high, documents, result.outcome)


def _bounds(
    pool: DocumentTotals, measure: str, gamma: int | None, times: StepTimes | None, tail: float
) -> tuple[float, float]:
    """Returns the one-sided bounds of a measure, each wrong with probability `tail`."""
    if measure == ALPHA:
        alpha = pooled_share(pool.cluster, pool["accepted"], pool["proposals"], 1 - 2 * tail)
        return (alpha.low, alpha.high) if alpha else (0.0, 1.0)
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
