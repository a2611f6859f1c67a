"""Stopping a draft that is unsure (p_min of llama.cpp, assistant_confidence_threshold of Hugging Face).

A round drafts until γ, or until the draft's top probability falls below p_min. What it gets accepted is a fact of the log.
What it drafted is one where it stopped or all was accepted; after a wrong draft it lies between that one and γ, which widens
the interval of a speedup (`costs.speedup.Speedup.doubt`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from alphaprof.costs.speedup import Mix, Timing, free_draft
from alphaprof.errors import OptionInvalid
from alphaprof.log.notes import note
from alphaprof.report.format import percent
from alphaprof.report.inputs import ReportInputs, draft_pools, evidence_of
from alphaprof.report.speeds import speedup_interval
from alphaprof.report.traffic import basis, why_undecidable
from alphaprof.report.verdict import AUTO, Pools, decoded, halves
from alphaprof.stats.estimate import Interval
from alphaprof.totals.count import stops
from alphaprof.totals.pool import DocumentTotals

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
    """The surface of each draft whose probabilities the log holds; none of large runs but with the `whole_log`."""
    inputs = replace(inputs, question=replace(inputs.question, draft=AUTO))
    run = inputs.run
    drafts = [draft for draft, facts in run.manifest.drafts.items() if stops(facts)]
    if not drafts or not run.has_log or inputs.question.order or (run.manifest.positions > MOST and not whole_log):
        return ()
    mix, timing, by_p_min = _candidates(inputs, drafts, (0.0, *P_MINS))
    if mix is None:
        return ()
    surfaces = (_surface(draft, inputs, mix, timing, by_p_min) for draft in drafts if draft in by_p_min[0.0])
    return tuple(surfaces)


def answered_p_min(inputs: ReportInputs) -> ReportInputs:
    """The same with a number where `decision.p_min` is auto: what the half of the documents that chooses draft and γ chooses
    with them. Raises `OptionInvalid` where a draft's log does not say when it stops.
    """
    question, facts = inputs.question, inputs.run.manifest.drafts
    judged = list(facts) if question.draft == AUTO else [question.draft]
    if question.p_min and (silent := [draft for draft in judged if facts[draft].by_depth]):
        problem = f"decision.p_min: the log of {silent[0]} holds no probabilities by depth, so that it is not known to stop"
        raise OptionInvalid(problem, "leave p_min out, or name another decision.draft")
    if question.p_min != AUTO:
        return inputs
    inputs = replace(inputs, question=replace(question, p_min=0.0))
    mix, timing, by_p_min = _candidates(inputs, judged, (0.0, *P_MINS))
    parts = None if mix is None else halves(_any_draft(by_p_min, mix), question.order)
    if mix is None or parts is None or not timing.times:
        return inputs
    values = {
        (p_min, draft, gamma): mix.value(decoded(candidates, (draft, gamma), timing.choosing, mix, parts[0])) or 0.0
        for p_min, candidates in by_p_min.items()
        for draft in candidates
        for gamma in question.gammas(inputs.run.gammas)
    }
    best = max(values, key=lambda option: values[option])[0]
    return replace(inputs, question=replace(question, p_min=best, chose_p_min=True))


def _any_draft(by_p_min: Mapping[float, Pools], mix: Mix) -> dict[str, DocumentTotals]:
    pools = next(iter(by_p_min[0.0].values()))
    return {domain: pools[domain] for domain in mix.domains}


def _candidates(
    inputs: ReportInputs, drafts: Sequence[str], p_mins: Sequence[float]
) -> tuple[Mix | None, Timing, Mapping[float, Pools]]:
    """The pools of drafts at every p_min, with how domains are mixed (None: no verdict is defined) and step times."""
    by_p_min = {}
    for p_min in p_mins:
        asked = replace(inputs, question=replace(inputs.question, p_min=p_min))
        evidence = evidence_of(asked, list(draft_pools(asked, asked.deciding, drafts)))
        evidence = replace(evidence, candidates={draft: evidence.candidates[draft] for draft in drafts})
        _, timing, candidates, mix, weights = basis(evidence, inputs.costs, inputs.question)
        if why_undecidable(weights, evidence, next(iter(candidates.values()))):
            return None, timing, {}
        by_p_min[p_min] = candidates
    return mix, timing, by_p_min


def _surface(draft: str, inputs: ReportInputs, mix: Mix, timing: Timing, by_p_min: Mapping[float, Pools]) -> StopSurface:
    gammas, question, times = inputs.run.gammas, inputs.question, timing.times.get(draft)
    options = [(p_min, gamma) for p_min in by_p_min for gamma in gammas]
    results = []
    for p_min, gamma in options:
        free, pair = {draft: free_draft(gamma)}, (draft, gamma)
        tokens = mix.value(decoded(by_p_min[p_min], pair, free, mix, None))
        faster = mix.value(decoded(by_p_min[p_min], pair, timing.times, mix, None)) if times else None
        results.append(StopResult(p_min, gamma, tokens or 0.0, faster))
    nothing = StopSurface(draft, tuple(results), None, None, None, None)
    parts = halves(_any_draft(by_p_min, mix), question.order)
    if times is None or parts is None:
        return nothing
    chosen = {
        (p_min, gamma): mix.value(decoded(by_p_min[p_min], (draft, gamma), timing.choosing, mix, parts[0])) or 0.0
        for p_min, gamma in options
    }
    plain, best = (
        max((option for option in options if (option[0] > 0) == stopping), key=lambda option: chosen[option])
        for stopping in (False, True)
    )
    ways = (decoded(by_p_min[p], (draft, gamma), timing.testing, mix, parts[1]) for p, gamma in (plain, best))
    gain = mix.gain(*ways)
    known = speedup_interval(gain, question.confidence) if gain is not None and gain.tells else None
    return replace(nothing, p_min=best[0], gamma=best[1], plain_gamma=plain[1], gain=known)


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
