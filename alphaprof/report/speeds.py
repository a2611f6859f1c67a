"""Speedups of one draft at every gamma and concurrency, of whole requests, and of single documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SpeedupQuestion:
    """What is asked of every pool: speculation lengths and the confidence of intervals."""

    gammas: Sequence[int]
    confidence: float


def tokens_interval(found: Speedup | None, gamma: int, confidence: float) -> Interval | None:
    """Tokens per round, its interval cut to what a round can emit: 1 to gamma + 1."""
    whole = speedup_interval(found, confidence)
    return None if whole is None else Interval(whole.value, max(1.0, whole.low), min(gamma + 1.0, whole.high))


def speedup_interval(found: Speedup | None, confidence: float) -> Interval | None:
    """A speedup with its two-sided interval."""
    return None if found is None else Interval(found.value, *found.bounds((1 - confidence) / 2))


def by_concurrency(
    pools: Mapping[str, DocumentTotals], book: CostModel | None, draft: str, mix: Mix, scope: SpeedupQuestion
) -> tuple[AtConcurrency, ...]:
    """Speedups of one draft on a mix of domains at every concurrency; nothing where there are times of one alone."""
    if book is None or len(book.concurrencies) < 2:
        return ()
    single = next(iter(pools.values())) if len(pools) == 1 else None
    reading = prefill_times(single, book, draft) if single is not None else None
    found = []
    for concurrency in book.concurrencies:
        times = book.times(concurrency).get(draft)
        if times is None:
            continue
        speedups = [mix.speedup([pools[domain].counts(gamma) for domain in mix.domains], times) for gamma in scope.gammas]
        requests = [
            request_speedup(single.counts(gamma), times, reading, concurrency) if single is not None else None
            for gamma in scope.gammas
        ]
        values = [item.value if item else 0.0 for item in speedups]
        found.append(
            AtConcurrency(
                concurrency=concurrency,
                gammas=tuple(scope.gammas),
                speedups=tuple(speedup_interval(item, scope.confidence) for item in speedups),
                request_speedups=tuple(speedup_interval(item, scope.confidence) for item in requests),
                best_gamma=scope.gammas[int(np.argmax(values))] if max(values) > 0 else None,
            )
        )
    return tuple(found)


def pays_up_to(found: Sequence[AtConcurrency]) -> int | None:
    """The last concurrency before the first one at which the best gamma makes decoding slower; None: not even the first."""
    last = None
    for item in found:
        values = [interval.value for interval in item.speedups if interval is not None]
        if not values or max(values) < 1:
            return last
        last = item.concurrency
    return last


@dataclass(frozen=True)
class PrefillTimes:
    """Prefill of each document's prompt by `target` and `draft`, in ms, [documents] each."""

    target: Array
    draft: Array


def prefill_times(pool: DocumentTotals, book: CostModel, draft: str) -> PrefillTimes | None:
    """What prompts take to read; nothing for a draft without steps. None where no prefill was timed."""
    target = book.table.prefill_ms(TARGET, pool["prompt_tokens"])
    own = book.table.prefill_ms(draft, pool["prompt_tokens"])
    if target is None or (own is None and book.manifest.drafts[draft].has_steps):
        return None
    return PrefillTimes(target[0], own[0] if own is not None else np.zeros(len(pool.cluster)))


def request_speedup(counts: RoundCounts, times: StepTimes, reading: PrefillTimes | None, concurrency: int) -> Speedup | None:
    """Time of whole requests without the draft / with it: prompts are read one by one, by the target and by a draft model,
    and each request takes its share of the batch's decode steps. None where no prefill was timed.
    """
    if reading is None:
        return None
    each = times.decode.ms / concurrency  # of a sequence's decode step
    return with_prefill(counts, times, reading.target / each, reading.draft / each)


def of_documents(counts: RoundCounts, times: StepTimes) -> DocumentSpeedups | None:
    """Speedups of single documents; of expected rounds where rounds are expectations. None without a token."""
    emitted = counts.tokens > 0
    speeds = counts.tokens[emitted] / time_spent(counts, times)[emitted]
    if not len(speeds):
        return None
    p10, p50, p90 = np.percentile(speeds, [10, 50, 90])
    return DocumentSpeedups(float(p10), float(p50), float(p90), float((speeds < 1).mean()))
