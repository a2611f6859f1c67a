"""Stopping a draft that is unsure (p_min of llama.cpp, assistant_confidence_threshold of Hugging Face).

A round drafts until γ, or until the draft's top probability falls below p_min. What it gets accepted is a fact of the log.
What it drafted is one if it stopped or all was accepted; after a wrong draft it lies between that one and γ, since the log
does not hold what the draft proposes on its own path. So a speedup has two ends (`RoundCounts.ends`). Its interval encloses
both (`costs.speedup.Speedup.doubt`), its value is the middle, and p_min is chosen by the slower one: the middle is too fast
where the draft is as sure after a wrong token as elsewhere, and most so at a low p_min, which the log says least about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alphaprof.costs.rounds import StepTimes
from alphaprof.errors import OptionInvalid
from alphaprof.report.inputs import ReportInputs
from alphaprof.report.speeds import deciding_interval
from alphaprof.report.traffic import Tried
from alphaprof.report.verdict import AUTO, Halves, Pair
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
    """What stopping early brings one draft. Each half of the documents and timing rounds chooses the best γ and p_min, by
    the slowest speedup that the log allows, and the best γ without it; `gain` compares the two on the other half, paired.
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
    if not drafts or not run.has_log or (run.manifest.positions > MOST and not whole_log):
        return ()
    tried = _by_p_min(inputs, drafts)
    return tuple(_surface(draft, inputs, tried) for draft in drafts if tried and draft in tried[0.0].candidates)


def answered_p_min(inputs: ReportInputs) -> ReportInputs:
    """Return the same with a number if `decision.p_min` is auto: what each half of the documents chooses with draft and γ,
    or 0 if they do not choose the same. Raises `OptionInvalid` if a draft's log does not say when it stops.
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
        return replace(inputs, question=question.model_copy(update={"p_min": 0.0}))
    drafts = list(tried[0.0].candidates)
    choice = _together(tried, drafts).chosen(_options(tried, drafts, question.gammas(inputs.run.gammas)))
    agreed = choice is not None and len({p_min for p_min, _ in map(_apart, choice.halves)}) == 1
    best = _apart(choice.pair)[0] if choice is not None and agreed else 0.0
    return replace(inputs, question=question.model_copy(update={"p_min": best, "chose_p_min": best > 0}))


def _by_p_min(inputs: ReportInputs, drafts: Sequence[str]) -> dict[float, Tried]:
    """Return drafts at every p_min, none first; empty if no verdict is defined."""
    tried = {}
    for p_min in (0.0, *P_MINS):
        asked = replace(inputs, question=inputs.question.model_copy(update={"p_min": p_min}))
        if (found := Tried.of(asked, drafts)) is None:
            return {}
        tried[p_min] = found
    return tried


def _named(p_min: float, draft: str) -> str:
    return f"{p_min:g} {draft}"


def _apart(pair: Pair) -> tuple[float, Pair]:
    """Return the p_min of a pair whose draft is `_named`, and the pair."""
    p_min, _, draft = pair[0].partition(" ")
    return float(p_min), (draft, pair[1])


def _together(tried: Mapping[float, Tried], drafts: Sequence[str]) -> Halves:
    """Return the halves of the documents, with each draft at each p_min as a draft of its own."""
    whole = next(iter(tried.values()))

    def renamed(times: Mapping[str, StepTimes]) -> dict[str, StepTimes]:
        return {_named(p_min, draft): times[draft] for p_min in tried for draft in drafts if draft in times}

    first, second = (renamed(each) for each in whole.timing.halves or (whole.timing.times, whole.timing.times))
    timing = replace(whole.timing, times=renamed(whole.timing.times), halves=(first, second))
    pools = {_named(p_min, draft): at.candidates[draft] for p_min, at in tried.items() for draft in drafts}
    return Halves.of(pools, timing, whole.mix)


def _options(tried: Mapping[float, Tried], drafts: Sequence[str], gammas: Sequence[int]) -> list[Pair]:
    """Return every draft at every p_min and γ that there are step times for, drafts as `_named`."""
    timing = next(iter(tried.values())).timing
    options = [(draft, gamma) for draft in drafts for gamma in gammas if timing.covers(draft, gamma)]
    return [(_named(p_min, draft), gamma) for p_min in tried for draft, gamma in options]


def _surface(draft: str, inputs: ReportInputs, tried: Mapping[float, Tried]) -> StopSurface:
    gammas, question = inputs.run.gammas, inputs.question
    results = [_result(at, p_min, draft, gamma) for p_min, at in tried.items() for gamma in gammas]
    nothing = StopSurface(draft, tuple(results), None, None, None, None)
    if draft not in tried[0.0].timing.times:
        return nothing
    halves, options = _together(tried, [draft]), _options(tried, [draft], gammas)
    plain, best = (
        halves.chosen([option for option in options if (_apart(option)[0] > 0) == stopping]) for stopping in (False, True)
    )
    if plain is None or best is None:
        return nothing
    gain = halves.mix.gain(*(halves.decoded((each.halves[1], each.halves[0])) for each in (plain, best)))
    known = deciding_interval(gain, question.confidence) if gain is not None and gain.tells else None
    p_min, (_, gamma) = _apart(best.pair)
    return replace(nothing, p_min=p_min, gamma=gamma, plain_gamma=plain.pair[1], gain=known)


def _result(at: Tried, p_min: float, draft: str, gamma: int) -> StopResult:
    tokens, rounds = at.tokens_per_round(draft, gamma), at.rounds(draft, gamma)
    if not rounds:
        return StopResult(p_min, gamma, tokens, None, None)
    slowest = at.mix.slowest(rounds)
    known = all(counts.doubt is None for counts, _ in rounds)
    return StopResult(p_min, gamma, tokens, slowest, slowest if known else at.mix.fastest(rounds))
