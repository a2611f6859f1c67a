"""Intervals of speedups, speedups of whole requests, and of single documents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import StepTimes, time_spent
from alphaprof.costs.speedup import Speedup
from alphaprof.costs.steps import TARGET
from alphaprof.report.answer import DocumentSpeedups
from alphaprof.report.loads import throughput
from alphaprof.stats.estimate import Interval
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import RoundCounts


def tokens_interval(speedup: Speedup | None, gamma: int, confidence: float) -> Interval | None:
    """Return tokens per round, all of it cut to what a round can emit: 1 to gamma + 1."""
    whole = speedup_interval(speedup, confidence)
    return None if whole is None else Interval(*(min(max(1.0, end), gamma + 1.0) for end in vars(whole).values()))


def length_interval(length: float, tokens: Interval, gamma: int) -> Interval:
    """Return an acceptance length with the interval of tokens per round: the last round of a text may emit less than it
    accepted, and rounds without a draft may be left out, so the length is above them, and as precise.
    """
    return Interval(*(min(max(1.0, length * end / tokens.value), gamma + 1.0) for end in vars(tokens).values()))


def speedup_interval(speedup: Speedup | None, confidence: float) -> Interval | None:
    """Return a speedup with its two-sided interval."""
    if speedup is None:
        return None
    low, high = speedup.bounds((1 - confidence) / 2)
    # The value is a ratio of sums: at the end of what is possible it may lie beyond it by rounding.
    return Interval(speedup.value, min(low, speedup.value), max(high, speedup.value))


def deciding_interval(speedup: Speedup | None, confidence: float) -> Interval | None:
    """Return a speedup with one-sided bounds as verdicts rest on, each at `confidence`; None if it has none."""
    low, high = (0.0, math.inf) if speedup is None else speedup.deciding(1 - confidence)
    return Interval(speedup.value, low, high) if speedup is not None and math.isfinite(high) else None


def of_requests(
    speedup: Interval,
    pools: Sequence[DocumentTotals],
    weights: Sequence[float] | None,
    costs: CostModel,
    draft: str,
    concurrency: int,
    longer: int = 0,
) -> Interval | None:
    """Return the speedup of whole requests from that of decoding: prompts, `longer` by so many tokens, are read one by one,
    by the target and by a draft model, and each request takes its share of the batch's steps. None if no prefill was timed.
    `weights`: shares of output tokens of the pools; None: as the documents have them.
    """
    facts, spent = costs.manifest.drafts[draft], list[tuple[float, float]]()
    model = facts.hybrid.then if facts.hybrid is not None else draft
    for pool in pools:
        tokens = np.maximum(pool["prompt_tokens"] + longer, 0)
        target, own = (costs.table.prefill_ms(each, tokens) for each in (TARGET, model))
        if target is None or (own is None and facts.has_steps):
            return None
        spent.append((float(target[0].sum()), float(own[0].sum()) if own is not None else 0.0))
    step = costs.times(concurrency)[draft].decode.ms / concurrency  # of one sequence
    decoding = np.array([step * pool["tokens"].sum() for pool in pools])
    scale = np.array(weights) / sum(weights) / decoding if weights else np.full(len(pools), 1 / decoding.sum())
    return throughput(speedup, *(scale @ np.array(spent)).tolist())


def of_documents(counts: RoundCounts, times: StepTimes) -> DocumentSpeedups | None:
    """Return speedups of single documents; of expected rounds if rounds are expectations. None without a token."""
    emitted = counts.tokens > 0
    speeds = counts.tokens[emitted] / time_spent(counts, times)[emitted]
    if not len(speeds):
        return None
    p10, p50, p90 = np.percentile(speeds, [10, 50, 90])
    return DocumentSpeedups(float(p10), float(p50), float(p90), float((speeds < 1).mean()))
