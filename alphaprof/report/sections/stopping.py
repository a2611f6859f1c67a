"""Stopping a draft that is unsure (p_min of llama.cpp, assistant_confidence_threshold of Hugging Face).

A round drafts until γ, or until the draft's top probability falls below p_min. What it gets accepted is a fact of the log.
What it drafted is one if it stopped or all was accepted; after a wrong draft it lies between that one and γ, since the log
does not hold what the draft proposes on its own path. So a speedup has two ends (`RoundCounts.ends`). Its interval encloses
both (`costs.speedup.Speedup.doubt`), its value is the middle, and p_min is chosen by the slower one: the middle is too fast
where the draft is as sure after a wrong token as elsewhere, and most so at a low p_min, which the log says least about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from alphaprof.errors import OptionInvalid
from alphaprof.log.notes import note
from alphaprof.report.format import percent
from alphaprof.report.inputs import ReportInputs
from alphaprof.report.speeds import speedup_interval
from alphaprof.report.traffic import Tried
from alphaprof.report.verdict import AUTO, Mask, Question, decoded, halves
from alphaprof.stats.estimate import Interval
from alphaprof.totals.count import stops

P_MINS = (0.2, 0.4, 0.5, 0.6, 0.75, 0.9)
MOST = 100_000  # positions of a run that a report replays at every p_min unasked


@dataclass(frozen=True)
class StopResult:
    """A draft at one γ and p_min, on the whole traffic and all documents."""

    p_min: float  # 0: it never stops
    gamma: int
    tokens_per_round: float  # over all rounds
    slowest: float | None  # speedup if rounds drafted the most that the log allows; None: there are no step times
    fastest: float | None  # the same if they drafted the least


@dataclass(frozen=True)
class StopSurface:
    """What stopping early brings one draft. One half of the documents and timing rounds chose the best γ and p_min, by the
    slowest speedup that the log allows, and the best γ without it; `gain` compares these two on the other half, paired.
    """

    draft: str
    results: tuple[StopResult, ...]  # one for each γ and p_min
    p_min: float | None  # of the best; None: not known
    gamma: int | None
    plain_gamma: int | None  # the best without stopping
    gain: Interval | None  # how many times as fast stopping is: the middle of what the log allows; None: not known


def stop_surfaces(inputs: ReportInputs, whole_log: bool) -> tuple[StopSurface, ...]:
    """Return the surface of each draft whose probabilities the log holds; none of large runs but with the `whole_log`."""
    run = inputs.run
    drafts = [draft for draft, facts in run.manifest.drafts.items() if stops(facts)]
    if not drafts or not run.has_log or inputs.question.order or (run.manifest.positions > MOST and not whole_log):
        return ()
    tried = _by_p_min(inputs, drafts)
    return tuple(_surface(draft, inputs, tried) for draft in drafts if tried and draft in tried[0.0].candidates)


def answered_p_min(inputs: ReportInputs) -> ReportInputs:
    """Return the same with a number if `decision.p_min` is auto: what the half of the documents that chooses draft and γ
    chooses with them. Raises `OptionInvalid` if a draft's log does not say when it stops.
    """
    question, facts = inputs.question, inputs.run.manifest.drafts
    judged = list(facts) if question.draft == AUTO else [question.draft]
    if question.p_min and (silent := [draft for draft in judged if facts[draft].by_depth]):
        problem = f"decision.p_min: the log of {silent[0]} holds no probabilities by depth, so the draft's stops are unknown"
        raise OptionInvalid(problem, "leave p_min out, or name another decision.draft")
    if question.p_min != AUTO:
        return inputs
    tried = _by_p_min(inputs, judged)
    parts = _halves(tried, question) if tried else None
    if parts is None or not tried[0.0].timing.times:
        return replace(inputs, question=replace(question, p_min=0.0))
    values = _chosen(tried, list(tried[0.0].candidates), question.gammas(inputs.run.gammas), parts[0])
    best = max(values, key=lambda option: values[option])[0]
    return replace(inputs, question=replace(question, p_min=best, chose_p_min=True))


def _by_p_min(inputs: ReportInputs, drafts: Sequence[str]) -> dict[float, Tried]:
    """Return drafts at every p_min, none first; empty if no verdict is defined."""
    tried = {}
    for p_min in (0.0, *P_MINS):
        asked = replace(inputs, question=replace(inputs.question, p_min=p_min))
        if (found := Tried.of(asked, drafts)) is None:
            return {}
        tried[p_min] = found
    return tried


def _halves(tried: Mapping[float, Tried], question: Question) -> tuple[Mapping[str, Mask], Mapping[str, Mask]] | None:
    """Return the documents of each domain that choose, and those that test."""
    mix, pools = tried[0.0].mix, next(iter(tried[0.0].candidates.values()))
    return halves({domain: pools[domain] for domain in mix.domains}, question.order)


def _chosen(
    tried: Mapping[float, Tried], drafts: Sequence[str], gammas: Sequence[int], rows: Mapping[str, Mask]
) -> dict[tuple[float, str, int], float]:
    """Return the slowest speedups that the log allows, by p_min, draft and γ, on the documents that choose."""
    return {
        (p_min, draft, gamma): at.mix.slowest(decoded(at.candidates, (draft, gamma), at.timing.choosing, at.mix, rows))
        or 0.0
        for p_min, at in tried.items()
        for draft in drafts
        for gamma in gammas
    }


def _surface(draft: str, inputs: ReportInputs, tried: Mapping[float, Tried]) -> StopSurface:
    gammas, question, timing = inputs.run.gammas, inputs.question, tried[0.0].timing
    results = [_result(at, p_min, draft, gamma) for p_min, at in tried.items() for gamma in gammas]
    nothing = StopSurface(draft, tuple(results), None, None, None, None)
    parts = _halves(tried, question)
    if draft not in timing.times or parts is None:
        return nothing
    chosen = _chosen(tried, [draft], gammas, parts[0])
    plain, best = (
        max((option for option in chosen if (option[0] > 0) == stopping), key=lambda option: chosen[option])
        for stopping in (False, True)
    )
    mix = tried[0.0].mix
    ways = (decoded(tried[p].candidates, (draft, gamma), timing.testing, mix, parts[1]) for p, _, gamma in (plain, best))
    gain = mix.gain(*ways)
    known = speedup_interval(gain, question.confidence) if gain is not None and gain.tells else None
    return replace(nothing, p_min=best[0], gamma=best[2], plain_gamma=plain[2], gain=known)


def _result(at: Tried, p_min: float, draft: str, gamma: int) -> StopResult:
    tokens, _ = at.at(draft, gamma)
    if draft not in at.timing.times:
        return StopResult(p_min, gamma, tokens, None, None)
    rounds = decoded(at.candidates, (draft, gamma), at.timing.times, at.mix, None)
    return StopResult(p_min, gamma, tokens, at.mix.slowest(rounds), at.mix.fastest(rounds))


def stop_notes(surfaces: Sequence[StopSurface]) -> Iterator[dict[str, str]]:
    """Yield a note for each draft that stopping early surely makes faster."""
    for surface in surfaces:
        if surface.gain is not None and surface.gain.low > 1:
            gain, least, most = (percent(value - 1) for value in (surface.gain.value, surface.gain.low, surface.gain.high))
            yield note(
                "p_min",
                draft=surface.draft,
                gamma=surface.gamma,
                p_min=surface.p_min,
                plain=surface.plain_gamma,
                gain=gain,
                low=least,
                high=most,
            )
