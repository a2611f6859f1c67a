"""Build the `Report` value of a run: totals and step times in, estimates, speedups and verdicts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof import __version__
from alphaprof.analysis.estimate import by_cluster, ratio, share_interval
from alphaprof.analysis.replay import Flavour
from alphaprof.analysis.speedup import Speedup, StepTime, StepTimes, free_draft, speedup
from alphaprof.analysis.totals import read_totals
from alphaprof.log.manifest import Manifest
from alphaprof.log.store import Run
from alphaprof.report.model import Cost, GammaResult, Interval, Report, Result, RunFacts, Traffic
from alphaprof.report.pool import Pool, merged, pools, units
from alphaprof.report.verdict import Pair, Pools, Question, choose_and_decide, no_decision, not_defined, pooled_speedup
from alphaprof.report.warnings import report_warnings


def build_report(run: Run, flavour: Flavour = "engine", question: Question | None = None) -> Report:
    """The report of a run, complete or not. Raises `RunUnreadable`.

    `question`: what the verdict is about, where it is not what the profile asked.
    """
    manifest = run.manifest
    question = question or Question.of(manifest.config)
    documents = run.documents()
    latency = run.latency()
    steps = latency.to_pylist() if latency is not None else []
    times = step_times(steps)
    independent = units(documents)
    results: list[Result] = []
    by_draft: dict[str, dict[str, Pool]] = {}
    for draft in manifest.drafts:
        totals = read_totals(run, draft, flavour)
        for rule in run.rules:
            found = list(pools(totals, documents, independent, rule, run.gammas))
            results += [_result(domain, draft, rule, pool, times.get(draft), question, run.gammas) for domain, pool in found]
            if rule == question.rule:
                by_draft[draft] = _on_policy(found)
    traffic = _traffic(by_draft, _observed_weights(documents), times, question, run.gammas)
    facts = RunFacts(
        path=str(run.path),
        complete=manifest.status == "complete",
        documents=manifest.documents,
        positions=manifest.positions,
        target=manifest.target.reference,
        drafts=tuple(manifest.drafts),
        dtype=manifest.target.dtype,
        created=manifest.created,
        mean_context=_mean_context(documents),
        skipped=manifest.skipped,
        truncated=manifest.truncated,
    )
    report = Report(
        alphaprof=__version__,
        confidence=question.confidence,
        replay=flavour,
        run=facts,
        cost=_cost(steps, manifest) if steps else None,
        traffic=traffic,
        results=tuple(results),
        warnings=(),
    )
    return report_warnings(report, manifest)


def _on_policy(found: Sequence[tuple[str, Pool]]) -> dict[str, Pool]:
    """By domain, what rounds are defined for: the pools of all its on-policy kinds of continuation as one."""
    parts: dict[str, list[Pool]] = {}
    for domain, pool in found:
        if pool.on_policy:
            parts.setdefault(domain, []).append(pool)
    return {domain: merged(several) for domain, several in parts.items()}


def _observed_weights(documents: pa.Table) -> dict[str, float]:
    """Shares of tokens by domain, in the order in which domains occur."""
    tokens: dict[str, int] = {}
    domains = documents["domain"].cast(pa.string()).to_pylist()
    for domain, count in zip(domains, documents["continuation_tokens"].to_pylist(), strict=True):
        tokens[domain] = tokens.get(domain, 0) + count
    return {domain: count / sum(tokens.values()) for domain, count in tokens.items()}


def _mean_context(documents: pa.Table) -> float | None:
    """Tokens before a position, on average over positions: the prompt and half of the continuation."""
    prompt, length = (documents[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
    return float(((prompt + length / 2) * length).sum() / length.sum()) if len(length) else None


def step_times(rows: Sequence[Mapping[str, Any]]) -> dict[str, StepTimes]:
    """Step times by draft, from rows of the latency table; empty where none were measured."""
    target = {row["tokens"]: StepTime(row["median_ms"], row["relative_error"]) for row in rows if row["model"] == "target"}
    drafts = {row["model"]: StepTime(row["median_ms"], row["relative_error"]) for row in rows if row["step"] == "draft"}
    return {name: StepTimes(target, draft) for name, draft in drafts.items()}


def _cost(rows: Sequence[Mapping[str, Any]], manifest: Manifest) -> Cost:
    environment = manifest.environment
    return Cost(
        source=manifest.config["costs"]["source"],
        engine=f"transformers {environment['packages']['transformers']}",
        device=manifest.target.device,
        dtype=manifest.target.dtype,
        concurrency=1,
        context=rows[0]["context"],
        threads=environment["torch_threads"] if manifest.target.device == "cpu" else None,
        overhead_ms=None,
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
    gamma_results: tuple[GammaResult, ...] = ()
    best, decision = None, no_decision(not_defined(rule))
    if pool.on_policy:
        gamma_results = tuple(_gamma(pool, gamma, times, question.confidence) for gamma in gammas)
        known = {draft: times} if times else {}
        best, decision = choose_and_decide({draft: {domain: pool}}, known, {domain: 1.0}, question, gammas)
    return Result(
        domain=domain,
        draft=draft,
        rule=rule,
        lossy=False,
        estimator="exact",
        continuation=pool.continuation,
        on_policy=pool.on_policy,
        documents=len(pool.cluster),
        clusters=len(np.unique(pool.cluster)),
        positions=positions,
        alpha=alpha,
        coverage=float(pool["proposals"].sum()) / positions,
        mismatches=float(pool["mismatches"].sum()) / positions if pool.on_policy else None,
        clear_mismatches=float(pool["clear_mismatches"].sum()) / positions if pool.on_policy else None,
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
        acceptance_length=float(1 + accepted.sum() / drafted[0]) if drafted[0] else None,
        accepted_per_drafted=float(accepted.sum() / drafted.sum()) if drafted.sum() else None,
        break_even_length=times.break_even(gamma) if times else None,
        draft_cost=times.c() if times else None,
        verify_cost=times.v(gamma) if times else None,
        speedup=_interval(faster, confidence),
        marginal=tuple(float(count / drafted[0]) if drafted[0] else None for count in accepted),
        conditional=tuple(float(a / t) if t else None for a, t in zip(accepted, tested, strict=True)),
    )


def _tokens(found: Speedup | None, gamma: int, confidence: float) -> Interval | None:
    """Tokens per round, its interval cut to what a round can emit: 1 to gamma + 1."""
    whole = _interval(found, confidence)
    return None if whole is None else Interval(whole.value, max(1.0, whole.low), min(gamma + 1.0, whole.high))


def _interval(found: Speedup | None, confidence: float) -> Interval | None:
    return None if found is None else Interval(found.value, *found.bounds((1 - confidence) / 2))


def _obstacle(weights: Mapping[str, float], observed: Mapping[str, float], rounds: Mapping[str, Pool], rule: str) -> str:
    """What stands against a verdict on the whole traffic; empty where nothing does. `rounds`: domains that have rounds."""
    if not observed:
        return "no document is complete yet"
    if odd := sorted(set(weights) ^ set(observed)):
        return f"weights and data do not have the same domains ({', '.join(odd)})"
    if undefined := [domain for domain, weight in weights.items() if weight > 0 and domain not in rounds]:
        return f"{not_defined(rule)} ({', '.join(undefined)}): decision.weights can leave it out with weight 0"
    return ""


def _traffic(
    candidates: Pools,
    observed: Mapping[str, float],
    times: Mapping[str, StepTimes],
    question: Question,
    gammas: Sequence[int],
) -> Traffic:
    """The verdict on all domains together, weighted by their shares of output tokens (`observed`: those of the run)."""
    if question.draft != "auto":
        candidates = {question.draft: candidates[question.draft]}
    weights = question.weights or dict(observed)
    counted = {domain: weight for domain, weight in weights.items() if weight > 0}
    best: Pair | None = None
    if obstacle := _obstacle(weights, observed, next(iter(candidates.values())), question.rule):
        decision = no_decision(obstacle)
    else:
        best, decision = choose_and_decide(candidates, times, counted, question, gammas)
    timed = best is not None and best[0] in times
    whole = pooled_speedup(candidates, best, times, counted) if best and timed else None
    free = pooled_speedup(candidates, best, {best[0]: free_draft(best[1])}, counted) if best else None
    return Traffic(
        verdict=decision.verdict,
        reason=decision.reason,
        draft=best[0] if best else None,
        rule=question.rule,
        gamma=best[1] if best else None,
        tokens_per_round=_tokens(free, best[1], question.confidence) if best else None,
        break_even_length=times[best[0]].break_even(best[1]) if best and timed else None,
        speedup=_interval(whole, question.confidence),
        tested=Interval(decision.speedup.value, decision.low, decision.high) if decision.speedup else None,
        documents=decision.speedup.documents if decision.speedup else 0,
        documents_needed=decision.documents_needed,
        min_speedup=question.min_speedup,
        weights=dict(weights),
        weights_observed=question.weights is None,
    )
