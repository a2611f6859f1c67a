"""Intervals of speedups, speedups of whole requests, and of single documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import StepTimes, time_spent
from alphaprof.costs.speedup import Domain, Speedup, parts_of, with_prefill
from alphaprof.costs.steps import TARGET
from alphaprof.report.answer import DocumentSpeedups
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


def deciding_interval(speedup: Speedup | None, confidence: float) -> Interval | None:
    """Return a speedup with one-sided bounds as verdicts rest on, each at `confidence`."""
    return None if speedup is None else Interval(speedup.value, *speedup.deciding(1 - confidence))


def prefill_times(pool: DocumentTotals, costs: CostModel, draft: str, longer: int = 0) -> tuple[Array, Array] | None:
    """Prefill of each document's prompt, `longer` by so many tokens, by target and draft, in ms, [documents] each; 0 for a
    draft without steps. None if no prefill was timed.
    """
    facts = costs.manifest.drafts[draft]
    model = facts.hybrid.then if facts.hybrid is not None else draft
    tokens = np.maximum(pool["prompt_tokens"] + longer, 0)
    target, own = (costs.table.prefill_ms(each, tokens) for each in (TARGET, model))
    if target is None or (own is None and facts.has_steps):
        return None
    return target[0], own[0] if own is not None else np.zeros(len(pool.cluster))


def request_speedup(domain: Domain, prefill: Sequence[tuple[Array, Array]] | None, concurrency: int) -> Speedup | None:
    """Time of whole requests without the draft / with it: prompts are read one by one, by the target and by a draft model,
    and each request takes its share of the batch's decode steps. `prefill` [parts]: see `prefill_times`; None: no result
    either.
    """
    if prefill is None:
        return None
    steps = [times.decode.ms / concurrency for _, times in parts_of(domain)]  # of one sequence
    return with_prefill(
        domain, [(target / step, draft / step) for (target, draft), step in zip(prefill, steps, strict=True)]
    )


def of_documents(counts: RoundCounts, times: StepTimes) -> DocumentSpeedups | None:
    """Return speedups of single documents; of expected rounds if rounds are expectations. None without a token."""
    emitted = counts.tokens > 0
    speeds = counts.tokens[emitted] / time_spent(counts, times)[emitted]
    if not len(speeds):
        return None
    p10, p50, p90 = np.percentile(speeds, [10, 50, 90])
    return DocumentSpeedups(float(p10), float(p50), float(p90), float((speeds < 1).mean()))
