"""Build the `Report` value of a run: totals and step times in, estimates, speedups and verdicts out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof import __version__
from alphaprof.analysis.decision import Decision, decide, held_out
from alphaprof.analysis.estimate import by_cluster, ratio, share_interval
from alphaprof.analysis.replay import Flavour
from alphaprof.analysis.speedup import Speedup, StepTime, StepTimes, free_draft, speedup
from alphaprof.analysis.totals import read_totals
from alphaprof.log.store import Run
from alphaprof.report.model import Cost, GammaResult, Interval, Report, Result, RunFacts, Traffic
from alphaprof.report.pool import Pool, pools
from alphaprof.report.warnings import report_warnings

Pair = tuple[str, int]  # a draft and a gamma
Pools = Mapping[str, Mapping[str, Pool]]  # by draft, then domain


@dataclass(frozen=True)
class Question:
    """What the verdict is about: the profile's decision."""

    rule: str
    draft: str
    gamma: int | str
    min_speedup: float
    confidence: float
    weights: dict[str, float] | None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Question:
        """From the manifest's copy of the profile."""
        return cls(**config["decision"])

    def gammas(self, known: Sequence[int]) -> list[int]:
        """The lengths that the verdict may choose from."""
        return list(known) if self.gamma == "auto" else [int(self.gamma)]


def build_report(run: Run, flavour: Flavour = "engine") -> Report:
    """The report of a run, complete or not. Raises `RunUnreadable`."""
    manifest = run.manifest
    question = Question.of(manifest.config)
    documents = run.documents()
    times = step_times(run)
    results: list[Result] = []
    by_draft: dict[str, dict[str, Pool]] = {}
    for draft in manifest.drafts:
        totals = read_totals(run, draft, flavour)
        for rule in run.rules:
            found = list(pools(totals, documents, rule, run.gammas))
            results += [_result(domain, draft, rule, pool, times.get(draft), question, run.gammas) for domain, pool in found]
            if rule == question.rule:
                by_draft[draft] = {domain: pool for domain, pool in found if pool.on_policy}
    traffic = _traffic(by_draft, times, question, run.gammas)
    facts = RunFacts(
        path=str(run.path),
        complete=manifest.status == "complete",
        documents=manifest.documents,
        positions=manifest.positions,
        target=manifest.target.reference,
        drafts=tuple(manifest.drafts),
        dtype=manifest.target.dtype,
        created=manifest.created,
        skipped=manifest.skipped,
        truncated=manifest.truncated,
    )
    report = Report(
        alphaprof=__version__,
        confidence=question.confidence,
        replay=flavour,
        run=facts,
        cost=_cost(run),
        traffic=traffic,
        results=tuple(results),
        warnings=(),
    )
    return report_warnings(report, manifest)


def step_times(run: Run) -> dict[str, StepTimes]:
    """Step times by draft; empty where none were measured."""
    table = run.latency()
    if table is None:
        return {}
    rows = table.to_pylist()
    target = {row["tokens"]: StepTime(row["median_ms"], row["relative_error"]) for row in rows if row["model"] == "target"}
    drafts = {row["model"]: StepTime(row["median_ms"], row["relative_error"]) for row in rows if row["step"] == "draft"}
    return {name: StepTimes(target, draft) for name, draft in drafts.items()}


def _cost(run: Run) -> Cost | None:
    table = run.latency()
    if table is None:
        return None
    rows = table.to_pylist()
    environment = run.manifest.environment
    return Cost(
        source=run.manifest.config["costs"]["source"],
        engine=f"transformers {environment['packages']['transformers']}",
        device=run.manifest.target.device,
        dtype=run.manifest.target.dtype,
        concurrency=1,
        context=rows[0]["context"],
        threads=environment["torch_threads"] if run.manifest.target.device == "cpu" else None,
        target_ms={row["tokens"]: row["median_ms"] for row in rows if row["model"] == "target"},
        draft_ms={row["model"]: row["median_ms"] for row in rows if row["step"] == "draft"},
    )


def _result(
    domain: str,
    draft: str,
    rule: str,
    pool: Pool,
    times: StepTimes | None,
    question: Question,
    gammas: Sequence[int],
) -> Result:
    """Everything about one domain, draft and rule."""
    positions = int(pool["positions"].sum())
    alpha = None
    if pool["proposals"].sum() > 0:
        share = ratio(*by_cluster(pool.cluster, pool["accepted"], pool["proposals"]))
        alpha = Interval(*_fields(share_interval(share, question.confidence)))
    gamma_results = tuple(_gamma(pool, gamma, times, question.confidence) for gamma in gammas) if pool.on_policy else ()
    best, decision = _decide({draft: {domain: pool}}, {draft: times} if times else None, {domain: 1.0}, question, gammas)
    return Result(
        domain=domain,
        draft=draft,
        rule=rule,
        lossy=False,
        estimator="exact",
        continuation=pool.continuation,
        on_policy=pool.on_policy,
        documents=len(np.unique(pool.cluster)),
        positions=positions,
        alpha=alpha,
        coverage=float(pool["proposals"].sum()) / positions,
        mismatches=float(pool["mismatches"].sum()) / positions if pool.on_policy else None,
        near_ties=float(pool["near_ties"].sum()) / positions,
        gammas=gamma_results,
        best_gamma=best[1] if best else None,
        verdict=decision.verdict,
        reason=decision.reason,
        documents_needed=decision.documents_needed,
    )


def _fields(estimate: Any) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def _gamma(pool: Pool, gamma: int, times: StepTimes | None, confidence: float) -> GammaResult:
    counts = pool.counts(gamma)
    rounds = float(counts.rounds.sum())
    drafted, accepted = pool[f"drafted_depths_{gamma}"].sum(0), pool[f"accepted_depths_{gamma}"].sum(0)
    tested = pool[f"tested_depths_{gamma}"].sum(0)
    faster = speedup([counts], [1.0], times) if times is not None else None
    return GammaResult(
        gamma=gamma,
        rounds=rounds,
        tokens_per_round=_tokens(speedup([counts], [1.0], free_draft(gamma)), gamma, confidence),
        acceptance_length=1 + float(accepted.sum()) / drafted[0] if drafted[0] else None,
        accepted_per_drafted=float(accepted.sum()) / drafted.sum() if drafted.sum() else None,
        break_even_length=times.break_even(gamma) if times else None,
        draft_cost=times.c() if times else None,
        verify_cost=times.v(gamma) if times else None,
        speedup=_interval(faster, confidence),
        marginal=tuple(float(count) / rounds if rounds else None for count in accepted),
        conditional=tuple(float(a) / t if t else None for a, t in zip(accepted, tested, strict=True)),
    )


def _tokens(found: Speedup | None, gamma: int, confidence: float) -> Interval | None:
    """Tokens per round, its interval cut to what a round can emit: 1 to gamma + 1."""
    whole = _interval(found, confidence)
    return None if whole is None else Interval(whole.value, max(1.0, whole.low), min(gamma + 1.0, whole.high))


def _interval(found: Speedup | None, confidence: float) -> Interval | None:
    return None if found is None else Interval(found.value, *found.bounds((1 - confidence) / 2))


def _decide(
    candidates: Pools,
    times: Mapping[str, StepTimes] | None,
    weights: Mapping[str, float],
    question: Question,
    gammas: Sequence[int],
) -> tuple[Pair | None, Decision]:
    """The chosen draft and gamma, and the verdict on them. What is `auto` is chosen on one half of the documents of every
    domain and tested on the other, so that the winner is not judged by the luck that made it win.
    """
    if not times:
        return None, _no_decision("no step times were measured, so acceptance cannot be turned into speedup")
    if not candidates or any(not pool.on_policy for domains in candidates.values() for pool in domains.values()):
        return None, _no_decision(f"rounds of {question.rule} are not defined on text that the target did not produce")
    options = [(draft, gamma) for draft in candidates for gamma in question.gammas(gammas)]
    if len(options) == 1:
        found = _speedup(candidates, options[0], times, weights, None)
        return options[0], _explained(decide(found, question.min_speedup, question.confidence, held_out=False))
    chosen = {option: _speedup(candidates, option, times, weights, False) for option in options}
    known = {option: found.value for option, found in chosen.items() if found is not None}
    if not known:
        return None, _explained(decide(None, question.min_speedup, question.confidence, held_out=True))
    best = max(known, key=lambda option: known[option])
    found = _speedup(candidates, best, times, weights, True)
    return best, _explained(decide(found, question.min_speedup, question.confidence, held_out=True))


def _no_decision(reason: str) -> Decision:
    return Decision("UNDECIDED", reason, None, 0.0, math.inf, None)


def _explained(decision: Decision) -> Decision:
    """A verdict on step times that were measured with another engine than the one that will serve says so first."""
    reason = f"by step times measured here with Hugging Face, {decision.reason}"
    return dataclasses.replace(decision, reason=reason)


def _speedup(
    candidates: Pools, option: Pair, times: Mapping[str, StepTimes], weights: Mapping[str, float], testing: bool | None
) -> Speedup | None:
    """Speedup of one draft and gamma on the held-out half (True), the choosing half (False) or all documents (None)."""
    draft, gamma = option
    counts = []
    for domain in weights:
        pool = candidates[draft][domain]
        rows = pool.counts(gamma)
        counts.append(rows if testing is None else rows.rows(held_out(pool.cluster) == testing))
    return speedup(counts, list(weights.values()), times[draft])


def _traffic(candidates: Pools, times: Mapping[str, StepTimes], question: Question, gammas: Sequence[int]) -> Traffic:
    """The verdict on all domains together, weighted by their shares of output tokens."""
    if question.draft != "auto":
        candidates = {question.draft: candidates[question.draft]}
    first = next(iter(candidates.values()))
    tokens = {domain: float(pool["positions"].sum()) for domain, pool in first.items()}
    weights = question.weights or {domain: count / sum(tokens.values()) for domain, count in tokens.items()}
    missing = sorted(set(weights) ^ set(tokens))
    if missing or not tokens:
        what = (
            f"weights and data do not have the same domains ({', '.join(missing)})" if missing else "no on-policy document"
        )
        best, decision = None, _no_decision(what)
    else:
        best, decision = _decide(candidates, times, weights, question, gammas)
    whole = _speedup(candidates, best, times, weights, None) if best else None
    free = _speedup(candidates, best, {best[0]: free_draft(best[1])}, weights, None) if best else None
    return Traffic(
        verdict=decision.verdict,
        reason=decision.reason,
        draft=best[0] if best else None,
        rule=question.rule,
        gamma=best[1] if best else None,
        tokens_per_round=_tokens(free, best[1], question.confidence) if best else None,
        break_even_length=times[best[0]].break_even(best[1]) if best else None,
        speedup=_interval(whole, question.confidence),
        tested=Interval(decision.speedup.value, decision.low, decision.high) if decision.speedup else None,
        documents=decision.speedup.documents if decision.speedup else 0,
        documents_needed=decision.documents_needed,
        min_speedup=question.min_speedup,
        weights=dict(weights),
        weights_observed=question.weights is None,
    )
