"""Stopping a draft that is unsure (p_min of llama.cpp, assistant_confidence_threshold of Hugging Face).

A round drafts until γ, or until the draft's top probability falls below p_min. What it gets accepted is a fact of the log.
What it drafted is one if it stopped or all was accepted; after a wrong draft it lies between that one and γ, which widens
the interval of a speedup (`costs.speedup.Speedup.doubt`).
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
from alphaprof.report.verdict import AUTO, Mask, decoded, halves
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
    speedup: float | None  # None: there are no step times


@dataclass(frozen=True)
class StopSurface:
    """What stopping early brings one draft. One half of the documents and timing rounds chose the best γ and p_min, and the
    best γ without it; `gain` compares these two on the other half, paired.
    """

    draft: str
    results: tuple[StopResult, ...]  # one for each γ and p_min
    p_min: float | None  # of the best; None: not known
    gamma: int | None
    plain_gamma: int | None  # the best without stopping
    gain: Interval | None  # how many times as fast stopping is; None: not known


def stop_surfaces(inputs: ReportInputs, whole_log: bool) -> tuple[StopSurface, ...]:
    """Return the surface of each draft whose probabilities the log holds; none of large runs but with the `whole_log`."""
    run = inputs.run
    drafts = [draft for draft, facts in run.manifest.drafts.items() if stops(facts)]
    if not drafts or not run.has_log or (run.manifest.positions > MOST and not whole_log):
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
    if not tried or not tried[0.0].timing.times:
        return replace(inputs, question=replace(question, p_min=0.0))
    values = _chosen(tried, list(tried[0.0].candidates), question.gammas(inputs.run.gammas), _halves(tried)[0])
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


def _halves(tried: Mapping[float, Tried]) -> tuple[Mapping[str, Mask], Mapping[str, Mask]]:
    """Return the documents of each domain that choose, and those that test."""
    mix, pools = tried[0.0].mix, next(iter(tried[0.0].candidates.values()))
    return halves({domain: pools[domain] for domain in mix.domains})


def _chosen(
    tried: Mapping[float, Tried], drafts: Sequence[str], gammas: Sequence[int], rows: Mapping[str, Mask]
) -> dict[tuple[float, str, int], float]:
    """Return speedups by p_min, draft and γ on the documents that choose."""
    return {
        (p_min, draft, gamma): at.mix.value(decoded(at.candidates, (draft, gamma), at.timing.choosing, at.mix, rows)) or 0.0
        for p_min, at in tried.items()
        for draft in drafts
        for gamma in gammas
    }


def _surface(draft: str, inputs: ReportInputs, tried: Mapping[float, Tried]) -> StopSurface:
    gammas, question, timing = inputs.run.gammas, inputs.question, tried[0.0].timing
    results = [StopResult(p_min, gamma, *at.at(draft, gamma)) for p_min, at in tried.items() for gamma in gammas]
    nothing = StopSurface(draft, tuple(results), None, None, None, None)
    if draft not in timing.times:
        return nothing
    choosing, testing = _halves(tried)
    chosen = _chosen(tried, [draft], gammas, choosing)
    plain, best = (
        max((option for option in chosen if (option[0] > 0) == stopping), key=lambda option: chosen[option])
        for stopping in (False, True)
    )
    mix = tried[0.0].mix
    ways = (decoded(tried[p].candidates, (draft, gamma), timing.testing, mix, testing) for p, _, gamma in (plain, best))
    gain = mix.gain(*ways)
    known = speedup_interval(gain, question.confidence) if gain is not None and gain.tells else None
    return replace(nothing, p_min=best[0], gamma=best[2], plain_gamma=plain[2], gain=known)


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
