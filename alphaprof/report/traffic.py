"""The verdict on all domains together, weighted by their shares of output tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.costs.cost_model import CostBook
from alphaprof.costs.speedup import UNTIMED, Mix, free_draft
from alphaprof.report.format import short
from alphaprof.report.model import Traffic
from alphaprof.report.sequential import judge
from alphaprof.report.speeds import Scope, by_concurrency, pays_up_to, speedup_interval, tokens_interval
from alphaprof.report.verdict import Pair, Pools, Question, no_decision, pooled_speedup, without_times
from alphaprof.rules import rules_of
from alphaprof.stats.estimate import Interval
from alphaprof.totals.pool import Pool

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Evidence:
    """What the verdict on the traffic rests on, all under the rules that it concerns (`rules`: their ids).

    `candidates`: the pools that have rounds, by draft, then domain; `undefined`: why some text of a domain has none;
    `observed`: the share of tokens of each domain in the run; `strata` [units]: see `Documents.strata`.
    """

    rules: Sequence[str]
    candidates: Pools
    undefined: Mapping[str, str]
    observed: Mapping[str, float]
    strata: Array


def judge_traffic(evidence: Evidence, book: CostBook | None, question: Question, gammas: Sequence[int]) -> Traffic:
    """One draft, one gamma, one verdict for the whole traffic."""
    timing = book.timing(question.concurrency) if book else UNTIMED
    candidates = evidence.candidates
    if question.draft != "auto":
        candidates = {question.draft: candidates[question.draft]}
    weights = question.weights or dict(evidence.observed)
    observed = Mix(tuple(domain for domain, weight in weights.items() if weight > 0), None, evidence.strata)
    mix = Mix.of(weights) if question.weights is not None else observed
    if not all(rule.rule.timed for rule in rules_of(list(evidence.rules))):
        book, timing = None, UNTIMED
    times = timing.times
    best: Pair | None = None
    if hindrance := obstacle(weights, evidence, next(iter(candidates.values()))):
        decision = no_decision(hindrance)
    else:
        best, decision = judge(candidates, timing, mix, question, gammas)
        decision = decision if times else no_decision(without_times(evidence.rules, timing.lacks(candidates)))
    timed = best is not None and best[0] in times
    whole = pooled_speedup(candidates, best, times, mix) if best and timed else None
    free = pooled_speedup(candidates, best, {best[0]: free_draft(best[1])}, mix) if best else None
    several = by_concurrency(candidates[best[0]], book, best[0], mix, Scope(gammas, question.confidence)) if best else ()
    return Traffic(
        verdict=decision.verdict,
        reason=decision.reason,
        draft=best[0] if best else None,
        rule=" and ".join(evidence.rules) or question.rule,
        gamma=best[1] if best else None,
        tokens_per_round=tokens_interval(free, best[1], question.confidence) if best else None,
        break_even_length=free.value / whole.value if free and whole else None,
        speedup=speedup_interval(decision.speedup, question.confidence),
        speedup_of_all=speedup_interval(whole, question.confidence),
        tested=Interval(decision.speedup.value, decision.low, decision.high) if decision.speedup else None,
        chosen=len(candidates) * len(question.gammas(gammas)) > 1,
        documents=decision.speedup.documents if decision.speedup else 0,
        documents_needed=decision.documents_needed,
        min_speedup=question.min_speedup,
        weights=dict(weights),
        weights_observed=question.weights is None,
        concurrencies=several,
        pays_up_to=pays_up_to(several),
    )


def obstacle(weights: Mapping[str, float], evidence: Evidence, rounds: Mapping[str, Pool]) -> str:
    """What stands against a verdict on the whole traffic; empty where nothing does. `rounds`: domains that have rounds."""
    if not evidence.observed:
        return "no document is complete yet"
    if odd := sorted(set(weights) ^ set(evidence.observed)):
        return f"weights and data do not have the same domains ({', '.join(map(short, odd))})"
    # A domain is judged by all of its text or not at all: its weight is that of all of it.
    without = {domain: "no rounds" for domain in weights if domain not in rounds} | dict(evidence.undefined)
    if undefined := [domain for domain in without if weights.get(domain, 0) > 0]:
        reasons = dict.fromkeys(without[domain] for domain in undefined)
        advice = ": decision.weights can leave it out with weight 0" if rounds else ""
        return f"{'; '.join(reasons)} ({', '.join(map(short, undefined))}){advice}"
    return ""
