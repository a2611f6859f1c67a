"""Build the `Report` value of a run: totals and step times in, estimates, speedups and verdicts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof import __version__
from alphaprof.analysis.replay import Flavour
from alphaprof.analysis.rules import parse_rule, rules_of
from alphaprof.analysis.speedup import NOTHING, StepTime, StepTimes, free_draft
from alphaprof.analysis.totals import Request, policies, read_totals
from alphaprof.log.manifest import Manifest
from alphaprof.log.store import Run
from alphaprof.report.model import Cost, Interval, Report, Result, RunFacts, Traffic
from alphaprof.report.pool import Pool, merged, pools, units
from alphaprof.report.result import Subject, build_result, speedup_interval, tokens_interval
from alphaprof.report.verdict import Pair, Pools, Question, choose_and_decide, no_decision, not_defined, pooled_speedup
from alphaprof.report.warnings import report_warnings


def build_report(
    run: Run, flavour: Flavour = "engine", question: Question | None = None, rules: Sequence[str] | None = None
) -> Report:
    """The report of a run, complete or not. Raises `RunUnreadable`.

    `question`: what the verdict is about, where it is not what the profile asked; `rules`: ids of the rules to report on
    beside those of the verdict, where they are not the profile's. What the log was not written with is evaluated on it.
    """
    manifest = run.manifest
    question = question or Question.of(manifest.config)
    documents = run.documents()
    latency = run.latency()
    steps = latency.to_pylist() if latency is not None else []
    times = step_times(steps)
    independent = units(documents)
    policy = np.unique(policies(documents)).tolist()
    shown = list(dict.fromkeys([*(question.rule_for(name) for name in policy), *(rules or run.rules)]))
    results: list[Result] = []
    by_draft: dict[str, dict[str, Pool]] = {}
    for draft in manifest.drafts:
        totals = read_totals(run, draft, Request(shown, run.gammas, flavour))
        decisive: list[tuple[str, Pool]] = []
        for rule in rules_of(shown):
            found = list(pools(totals, documents, independent, rule.id, run.gammas))
            results += [
                build_result(Subject(domain, draft, rule, times.get(draft)), pool, question, run.gammas)
                for domain, pool in found
            ]
            decisive += [pair for pair in found if pair[1].defined and question.rule_for(pair[1].policy) == rule.id]
        by_draft[draft] = _by_domain(decisive)
    traffic = _traffic(by_draft, _observed_weights(documents), _timed(times, question, policy), question, run.gammas, policy)
    report = Report(
        alphaprof=__version__,
        confidence=question.confidence,
        replay=flavour,
        run=_facts(run, documents),
        cost=_cost(steps, manifest) if steps else None,
        traffic=traffic,
        results=tuple(results),
        warnings=(),
    )
    return report_warnings(report, manifest)


def _facts(run: Run, documents: pa.Table) -> RunFacts:
    manifest = run.manifest
    return RunFacts(
        path=str(run.path),
        complete=manifest.status == "complete",
        documents=manifest.documents,
        positions=manifest.positions,
        target=manifest.target.reference,
        drafts=tuple(manifest.drafts),
        dtype=manifest.target.dtype,
        created=manifest.created,
        cut=_cut(documents),
        mean_context=_mean_context(documents),
        skipped=manifest.skipped,
        truncated=manifest.truncated,
    )


def _timed(times: Mapping[str, StepTimes], question: Question, policy: Sequence[str]) -> Mapping[str, StepTimes]:
    """Step times, as far as rounds of the verdict's rules cost what they say: those of a tree do not."""
    return times if all(parse_rule(question.rule_for(name)).rule.timed for name in policy) else {}


def _by_domain(found: Sequence[tuple[str, Pool]]) -> dict[str, Pool]:
    """By domain, the pools of all its kinds of text as one."""
    parts: dict[str, list[Pool]] = {}
    for domain, pool in found:
        parts.setdefault(domain, []).append(pool)
    return {domain: merged(several) for domain, several in parts.items()}


def _cut(documents: pa.Table) -> float | None:
    """The share of the texts that the target wrote in this run which ended at max_new_tokens; None: it wrote none."""
    written = documents.filter(pc.is_in(documents["continuation"].cast(pa.string()), pa.array(["greedy", "sampled"])))
    if len(written) == 0:
        return None
    return float(pc.equal(written["finish"].cast(pa.string()), "length").to_numpy().mean())


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
    timed = {(row["model"], row["step"], row["tokens"]): StepTime(row["median_ms"], row["relative_error"]) for row in rows}
    target = {tokens: time for (model, _, tokens), time in timed.items() if model == "target"}
    drafts = dict.fromkeys(model for model, _, _ in timed if model != "target")
    return {
        draft: StepTimes(target, timed.get((draft, "draft", 1), NOTHING), timed.get((draft, "lookup", 1), NOTHING))
        for draft in drafts
    }


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
        lookup_ms={row["model"]: row["median_ms"] for row in rows if row["step"] == "lookup"},
    )


def _obstacle(
    weights: Mapping[str, float],
    observed: Mapping[str, float],
    rounds: Mapping[str, Pool],
    question: Question,
    policy: Sequence[str],
) -> str:
    """What stands against a verdict on the whole traffic; empty where nothing does. `rounds`: domains that have rounds."""
    if not observed:
        return "no document is complete yet"
    if odd := sorted(set(weights) ^ set(observed)):
        return f"weights and data do not have the same domains ({', '.join(odd)})"
    if undefined := [domain for domain, weight in weights.items() if weight > 0 and domain not in rounds]:
        reasons = [not_defined(question.rule_for(name), name) for name in policy if not _has_rounds(question, name)]
        advice = ": decision.weights can leave it out with weight 0" if rounds else ""
        return f"{'; '.join(reasons)} ({', '.join(undefined)}){advice}"
    return ""


def _has_rounds(question: Question, policy: str) -> bool:
    rule = parse_rule(question.rule_for(policy)).rule
    return not rule.lossy and policy in rule.policies


def _traffic(
    candidates: Pools,
    observed: Mapping[str, float],
    times: Mapping[str, StepTimes],
    question: Question,
    gammas: Sequence[int],
    policy: Sequence[str],
) -> Traffic:
    """The verdict on all domains together, weighted by their shares of output tokens (`observed`: those of the run)."""
    if question.draft != "auto":
        candidates = {question.draft: candidates[question.draft]}
    weights = question.weights or dict(observed)
    counted = {domain: weight for domain, weight in weights.items() if weight > 0}
    best: Pair | None = None
    if obstacle := _obstacle(weights, observed, next(iter(candidates.values())), question, policy):
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
        rule=" and ".join(dict.fromkeys(question.rule_for(name) for name in policy if name)) or question.rule,
        gamma=best[1] if best else None,
        tokens_per_round=tokens_interval(free, best[1], question.confidence) if best else None,
        break_even_length=free.value / whole.value if free and whole else None,
        speedup=speedup_interval(whole, question.confidence),
        tested=Interval(decision.speedup.value, decision.low, decision.high) if decision.speedup else None,
        documents=decision.speedup.documents if decision.speedup else 0,
        documents_needed=decision.documents_needed,
        min_speedup=question.min_speedup,
        weights=dict(weights),
        weights_observed=question.weights is None,
    )
