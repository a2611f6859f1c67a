"""Hybrids of two drafts by min_match: how many tokens prompt lookup should have found before it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alphaprof.report.inputs import ReportInputs
from alphaprof.report.model import DraftAnswer
from alphaprof.report.traffic import Tried
from alphaprof.report.verdict import decoded
from alphaprof.run.manifest import Hybrid
from alphaprof.stats.estimate import Interval
from alphaprof.totals.hybrid import with_hybrids

MOST = 8  # tokens that were found, at most


@dataclass(frozen=True)
class HybridResult:
    """A hybrid at one γ and min_match, on the whole traffic and all documents. `slowest`: the speedup if a draft model reads
    each token that prompt lookup wrote in a draft step; None: reading was timed, or there are no step times.
    """

    min_match: int  # tokens that prompt lookup must have found
    gamma: int
    tokens_per_round: float  # over all rounds
    speedup: float | None  # None: there are no step times
    slowest: float | None


@dataclass(frozen=True)
class HybridCurve:
    """What a hybrid reaches by min_match, and beside it the faster of its parts alone."""

    draft: str
    results: tuple[HybridResult, ...]  # one for each γ and min_match
    part: str | None  # the faster of its two drafts; None: not known
    part_speedup: Interval | None  # of that draft alone, as it was judged
    own_speedup: Interval | None  # of the hybrid with its own min_match, as it was judged

    @property
    def ahead(self) -> bool:
        """Whether it looks faster than both of its parts."""
        return bool(self.own_speedup and self.part_speedup and self.own_speedup.value > self.part_speedup.value)


def hybrid_curves(inputs: ReportInputs, answers: Sequence[DraftAnswer]) -> tuple[HybridCurve, ...]:
    """Return the curve of each hybrid of a run. `answers`: every draft by itself on the whole traffic."""
    known = {answer.draft: answer.speedup for answer in answers}
    curves = []
    for draft, facts in inputs.run.manifest.drafts.items():
        if (hybrid := facts.hybrid) is None:
            continue
        longest = int(inputs.run.manifest.drafts[hybrid.first].settings["max_ngram"])
        results = [
            result for least in range(1, min(longest, MOST) + 1) for result in _curve_at(inputs, draft, hybrid, least)
        ]
        parts = {part: speed for part in (hybrid.first, hybrid.then) if (speed := known.get(part)) is not None}
        part = max(parts, key=lambda name: parts[name].value, default=None)
        curves.append(HybridCurve(draft, tuple(results), part, parts.get(part or ""), known.get(draft)))
    return tuple(curves)


def _curve_at(inputs: ReportInputs, draft: str, hybrid: Hybrid, min_match: int) -> list[HybridResult]:
    run = with_hybrids(inputs.run, {draft: replace(hybrid, min_match=min_match)})
    tried = Tried.of(replace(inputs, run=run), [draft])
    return [_result(tried, draft, min_match, gamma) for gamma in run.gammas] if tried else []


def _result(tried: Tried, draft: str, min_match: int, gamma: int) -> HybridResult:
    """Return a hybrid at one γ. A draft model whose step over two tokens has no time is bounded: it reads no token faster
    than it drafts one.
    """
    times, slowest = tried.timing.times.get(draft), None
    if times is not None and not times.draft_first and times.draft_after_full is None and times.draft.ms:
        slow = {draft: replace(times, draft_after_full=replace(times.draft, ms=2 * times.draft.ms))}
        slowest = tried.mix.value(decoded(tried.candidates, (draft, gamma), slow, tried.mix))
    rounds = tried.rounds(draft, gamma)
    faster = tried.mix.value(rounds) if rounds else None
    return HybridResult(min_match, gamma, tried.tokens_per_round(draft, gamma), faster, slowest)
