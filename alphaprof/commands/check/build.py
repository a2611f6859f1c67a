"""The CI gate: what the options ask for; a run judged by thresholds or by its own decision, at one confidence for all."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.commands.check.answer import ALPHA, LENGTH, SPEEDUP, Check, Item, Measure, reason_of
from alphaprof.commands.check.baseline import check_baseline, one_rule
from alphaprof.costs.speedup import Speedup, StepTimes, speedup
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


def checked(
    path: Path,
    minimums: Mapping[Measure, Sequence[str] | None],
    *,
    draft: str | None,
    rule: str | None,
    gamma: int | None,
    baseline: str | None,
    margin: float,
    target_change: bool,
) -> Check:
    """The check that the options of `alphaprof check` ask for, as they were written; `minimums`: X, or DOMAIN=X.

    Raises `OptionInvalid`, `NotComparable` and `RunUnreadable`.
    """
    thresholds = {measure: _thresholds(measure, texts) for measure, texts in minimums.items() if texts}
    if baseline is not None:
        if thresholds:
            raise OptionInvalid("thresholds and --baseline cannot be combined in one check", "run check once with each")
        new = side_of(f"{path}:{draft}" if draft else str(path))
        named = not os.path.exists(baseline) and ":" in baseline
        return check_baseline(new, side_of(baseline if named else f"{baseline}:{new.draft}"), rule, margin, target_change)
    run = Run.open(path)
    if thresholds:
        return _check_thresholds(run, thresholds, draft, rule, gamma)
    if draft or rule or gamma:
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
    traffic, tested = report.traffic, report.traffic.tested
    outcomes: dict[str, Outcome] = {"GO": "pass", "NO-GO": "fail", "UNDECIDED": "undecided"}
    outcome = outcomes[traffic.verdict]
    items: tuple[Item, ...] = ()
    if tested is not None:
        bounds = (tested.value, tested.low, tested.high)
        items = (Item(SPEEDUP, "whole traffic", traffic.min_speedup, *bounds, traffic.documents, outcome),)
    return Check(
        outcome=outcome,
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
    """The least value of a measure in one domain, and what the measure is taken from."""

    measure: Measure
    domain: str
    least: float
    pool: DocumentTotals
    gamma: int  # 0 where no threshold needs one
    times: StepTimes | None  # None where no threshold needs them

    @property
    def silent(self) -> bool:
        """Whether the draft proposes nothing on texts that it had every chance on: no luck of the documents, no unknown."""
        if self.measure == SPEEDUP or self.pool["tokens"].sum() == 0:
            return False
        return proposes_nothing(self.pool, None if self.measure == ALPHA else self.gamma)

    def accepted(self) -> tuple[Array, Array]:
        """Accepted positions and those with a proposal; for acceptance length, accepted drafts and rounds that had any."""
        return accepted_of(self.pool, self.gamma if self.measure == LENGTH else None)

    def faster(self) -> Speedup | None:
        """The speedup of the domain."""
        return speedup([self.pool.counts(self.gamma)], [1.0], self.times) if self.times else None

    def value(self) -> float | None:
        """The estimate; None where there is nothing to take it from."""
        if self.measure == SPEEDUP:
            return faster.value if (faster := self.faster()) else None
        totals, counts = self.accepted()
        return float(totals.sum() / counts.sum()) + (self.measure == LENGTH) if counts.sum() else None

    def bounds(self, tail: float) -> tuple[float, float]:
        """The one-sided bounds, each wrong with probability `tail`."""
        if self.measure == SPEEDUP:
            return faster.deciding(tail) if (faster := self.faster()) else (0.0, np.inf)
        if self.measure == ALPHA:
            alpha = pooled_share(self.pool.cluster, *self.accepted(), 1 - 2 * tail)
            return (alpha.low, alpha.high) if alpha else (0.0, 1.0)
        accepted, rounds = by_cluster(self.pool.cluster, *self.accepted())
        if not rounds.sum():
            return 1.0, self.gamma + 1.0
        low, high = bounded_interval(ratio(accepted, rounds), 0.0, float(self.gamma), tail)
        return 1 + low, 1 + high

    def item(self, results: Iterator[GateResult]) -> Item:
        """What became of it; it has the next of the `results` unless the draft proposes nothing."""
        documents = distinct(self.pool.cluster)
        if self.silent:
            note = "the draft proposes nothing there"
            return Item(self.measure, self.domain, self.least, None, None, None, documents, "fail", note)
        result = next(results)
        bounds = (result.low, result.high)
        return Item(self.measure, self.domain, self.least, self.value(), *bounds, documents, result.outcome)


def _check_thresholds(
    run: Run,
    thresholds: Mapping[Measure, Mapping[str, float]],
    draft: str | None,
    rule: str | None,
    gamma: int | None,
) -> Check:
    """Judges a run by least values of measures in its domains. Raises `OptionInvalid` for what the run does not have."""
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
    inputs = ReportInputs.of(run, "engine", run.manifest.config)
    needs_gamma = bool({LENGTH, SPEEDUP} & set(thresholds))
    draft, rule, gamma = _settled(run, inputs, draft, rule, gamma, needs_gamma=needs_gamma)
    pools = _pools(inputs, draft, rule)
    times = inputs.book.times(inputs.question.concurrency).get(draft) if inputs.book else None
    if SPEEDUP in thresholds and times is None:
        raise OptionInvalid(
            f"{run.path} has no step times for {draft}, so no speedup", "use --min-acceptance-length instead"
        )
    least = [
        _Threshold(measure, domain, value, pools[domain], gamma or 0, times)
        for measure, named in thresholds.items()
        for domain, value in _spread(named, pools, run).items()
    ]
    gates = [Gate(threshold.least, threshold.bounds) for threshold in least if not threshold.silent]
    results = iter(judge(gates, inputs.question.confidence))
    items = tuple(threshold.item(results) for threshold in least)
    outcome = together([item.outcome for item in items])
    return Check(
        outcome=outcome,
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
) -> tuple[str, str, int | None]:
    """Draft, rule and gamma (None where no threshold needs one): as named, else as the decision fixes them, else as the
    verdict on the whole traffic chooses them; the gamma of a named draft as the verdict on this draft does.
    """
    require_drafts(run)
    question, drafts = inputs.question, run.manifest.drafts
    draft = draft or (question.draft if question.draft != "auto" else None)
    gamma = gamma or (question.gamma if isinstance(question.gamma, int) else None)
    if draft is None and len(drafts) == 1:
        draft = next(iter(drafts))
    if draft is not None and draft not in drafts:
        raise OptionInvalid(f"{run.path} has no draft {short(draft)}", f"name one: {', '.join(drafts)}")
    gammas = f"--gamma {' or '.join(map(str, run.gammas))}"
    if draft is None or (gamma is None and needs_gamma):
        chosen = _chosen(run, draft, rule)
        if chosen.draft is None or chosen.gamma is None:
            what, names = f"gamma is known to be the best for {run.path}:{draft}", gammas
            if draft is None:
                what, names = f"draft of {run.path} is known to be the best", f"--draft {' or '.join(drafts)}"
            raise OptionInvalid(f"no {what}: {chosen.reason}", f"name one: {names}")
        draft, gamma = chosen.draft, gamma or chosen.gamma
    if needs_gamma and gamma not in run.gammas:
        raise OptionInvalid(f"{run.path} has no gamma {gamma}", f"name one: {gammas}")
    return draft, rule or one_rule(inputs), gamma if needs_gamma else None


def _chosen(run: Run, draft: str | None, rule: str | None) -> Traffic:
    """The verdict on one draft (None: on the one of the decision), which chooses what is `auto`."""
    named = {name: value for name, value in (("draft", draft), ("rule", rule)) if value is not None}
    config = run.manifest.config | {"decision": run.manifest.config["decision"] | named}
    inputs = ReportInputs.of(run, "engine", config)
    evidence = evidence_of(inputs, list(draft_pools(inputs, inputs.deciding)))
    return judge_traffic(evidence, inputs.book, inputs.question, run.gammas)


def _pools(inputs: ReportInputs, draft: str, rule: str) -> dict[str, DocumentTotals]:
    """Returns the pools of the text that a rule belongs to, by domain. Raises `OptionInvalid` where there is none."""
    pools = by_domain([(each.domain, each.pool) for each in draft_pools(inputs, [rule], [draft]) if each.pool.defined])
    if not pools:
        raise OptionInvalid(
            f"{rule} has no rounds on the text of {inputs.run.path}",
            "name a rule that applies to this text: strict if it is greedy, one_hot or lossless if it is sampled",
        )
    return pools


def _spread(named: Mapping[str, float], pools: Mapping[str, DocumentTotals], run: Run) -> dict[str, float]:
    """Thresholds of every domain that has one; a domain's own goes before that of every domain."""
    own = {domain: least for domain, least in named.items() if domain != EVERY}
    if unknown := [domain for domain in own if domain not in pools]:
        known = ", ".join(map(short, pools))
        raise OptionInvalid(f"{run.path} has no domain {short(unknown[0])!r} with rounds", f"it has: {known}")
    return (dict.fromkeys(pools, named[EVERY]) if EVERY in named else {}) | own
