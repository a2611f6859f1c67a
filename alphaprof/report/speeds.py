"""Speedups of one draft at every gamma and concurrency, of whole requests, and of single documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.speedup import Mix, Speedup, StepTimes, time_spent, with_prefill
from alphaprof.costs.steps import TARGET
from alphaprof.report.model import AtConcurrency, DocumentSpeedups
from alphaprof.stats.estimate import Interval
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import RoundCounts

Array = np.ndarray[Any, Any]


def tokens_interval(speedup: Speedup | None, gamma: int, confidence: float) -> Interval | None:
    """Return tokens per round, all of it cut to what a round can emit: 1 to gamma + 1."""
    whole = speedup_interval(speedup, confidence)
    return None if whole is None else Interval(*(min(max(1.0, end), gamma + 1.0) for end in vars(whole).values()))


def speedup_interval(speedup: Speedup | None, confidence: float) -> Interval | None:
    """Return a speedup with its two-sided interval."""
    if speedup is None:
        return None
    low, high = speedup.bounds((1 - confidence) / 2)
    # The value is a ratio of sums: at the end of what is possible it may lie beyond it by rounding.
    return Interval(speedup.value, min(low, speedup.value), max(high, speedup.value))


def by_concurrency(
    pools: Mapping[str, DocumentTotals],
    costs: CostModel | None,
    draft: str,
    mix: Mix,
    gammas: Sequence[int],
    confidence: float,
) -> tuple[AtConcurrency, ...]:
    """Return speedups of one draft on a mix of domains at every concurrency; nothing if there are times of one alone."""
    if costs is None or len(costs.concurrencies) < 2:
        return ()
    each = []
    gammas = [gamma for gamma in gammas if all(pools[domain].has(gamma) for domain in mix.domains)]
    for concurrency in costs.concurrencies:
        times = costs.times(concurrency).get(draft)
        if times is None:
            continue
        speedups = [mix.speedup([pools[domain].counts(gamma) for domain in mix.domains], times) for gamma in gammas]
        known = {gamma: speedup for gamma, speedup in zip(gammas, speedups, strict=True) if speedup is not None}
        best = max(known, key=lambda gamma: known[gamma].value, default=None)
        each.append(AtConcurrency(concurrency, best, speedup_interval(known[best], confidence) if best else None))
    return tuple(each)


def pays_up_to(concurrencies: Sequence[AtConcurrency], least: float) -> int | None:
    """Return the last concurrency before the first one at which the best gamma's speedup is below `least`; None: not even
    the first one reaches it.
    """
    last = None
    for item in concurrencies:
        if item.speedup is None or item.speedup.value < least:
            return last
        last = item.concurrency
    return last


def prefill_times(pool: DocumentTotals, costs: CostModel, draft: str) -> tuple[Array, Array] | None:
    """Prefill of each document's prompt by target and draft, in ms, [documents] each; 0 for a draft without steps. None if
    no prefill was timed.
    """
    facts = costs.manifest.drafts[draft]
    model = facts.hybrid.then if facts.hybrid is not None else draft
    target, own = (costs.table.prefill_ms(each, pool["prompt_tokens"]) for each in (TARGET, model))
    if target is None or (own is None and facts.has_steps):
        return None
    return target[0], own[0] if own is not None else np.zeros(len(pool.cluster))


def request_speedup(
    counts: RoundCounts, times: StepTimes, prefill: tuple[Array, Array] | None, concurrency: int
) -> Speedup | None:
    """Time of whole requests without the draft / with it: prompts are read one by one, by the target and by a draft model,
    and each request takes its share of the batch's decode steps. `prefill`: see `prefill_times`; None: no result either.
    """
    if prefill is None:
        return None
    target, draft = prefill
    step = times.decode.ms / concurrency  # of one sequence
    return with_prefill(counts, times, target / step, draft / step)


def of_documents(counts: RoundCounts, times: StepTimes) -> DocumentSpeedups | None:
    """Return speedups of single documents; of expected rounds if rounds are expectations. None without a token."""
    emitted = counts.tokens > 0
    speeds = counts.tokens[emitted] / time_spent(counts, times)[emitted]
    if not len(speeds):
        return None
    p10, p50, p90 = np.percentile(speeds, [10, 50, 90])
    return DocumentSpeedups(float(p10), float(p50), float(p90), float((speeds < 1).mean()))
