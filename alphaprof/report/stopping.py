"""Stopping a draft that is unsure (p_min of llama.cpp, assistant_confidence_threshold of Hugging Face).

A round drafts until γ, or until the draft's top probability falls below p_min. What it gets accepted is a fact of the log.
What it drafted is one too of a head that read its own drafts; of a draft model it is if it stopped or all was accepted, and
after a wrong draft it lies between that one and γ, since the log does not hold what the draft proposes on its own path. So a
speedup has two ends (`RoundCounts.ends`). Its interval encloses both (`costs.speedup.Speedup.doubt`), its value is the
middle, and p_min is chosen by the slower one: the middle is too fast where the draft is as sure after a wrong token as
elsewhere, and most so at a low p_min, which the log says least about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from alphaprof.config.profile import AUTO
from alphaprof.costs.rounds import UNTIMED, StepTimes, Timing
from alphaprof.costs.speedup import Mix
from alphaprof.errors import OptionInvalid
from alphaprof.report.asked import Asked
from alphaprof.report.judge import Judge
from alphaprof.report.verdict import Halves, Pools
from alphaprof.rules import SAMPLED

P_MINS = (0.2, 0.4, 0.5, 0.6, 0.75, 0.9)


class Tried(NamedTuple):
    """Drafts by p_min, 0 first, on the whole traffic and all documents."""

    candidates: Mapping[float, Pools]
    timing: Timing
    mix: Mix

    @classmethod
    def of(cls, asked: Asked, drafts: Sequence[str]) -> Tried | None:
        """From the rounds of `drafts` under the rules of the verdict; None if no verdict is defined, no domain has
        rounds, or one has none that has a weight.
        """
        pools, timing, mix = dict[float, Pools](), UNTIMED, None
        for p_min in (0.0, *P_MINS):
            question = asked.question.model_copy(update={"p_min": p_min, "draft": AUTO})
            judge = Judge.of(replace(asked, question=question), drafts)
            timing, candidates, mix = judge.timing, judge.candidates, judge.mix
            if judge.undecidable:
                return None
            needed = any if mix.weights is None else all  # as drawn, a domain without rounds adds nothing
            if not all(needed(by_domain[name]["tokens"].any() for name in mix.domains) for by_domain in candidates.values()):
                return None
            pools[p_min] = candidates
        return cls(pools, timing, mix) if mix is not None else None

    @property
    def drafts(self) -> list[str]:
        """Those that may be chosen."""
        return list(self.candidates[0.0])

    def halves(self) -> Halves:
        """Return the halves of the documents, with each draft at each p_min as a draft of its own."""

        def renamed(times: Mapping[str, StepTimes]) -> dict[str, StepTimes]:
            return {
                _named(p_min, draft): times[draft] for p_min in self.candidates for draft in self.drafts if draft in times
            }

        first, second = (renamed(each) for each in self.timing.halves or (self.timing.times, self.timing.times))
        timing = replace(self.timing, times=renamed(self.timing.times), halves=(first, second))
        pools = {_named(p_min, draft): pools[draft] for p_min, pools in self.candidates.items() for draft in self.drafts}
        return Halves.of(pools, timing, self.mix)


def settled(asked: Asked) -> Asked:
    """Return the same with a number if `decision.p_min` is auto: what each half of the documents chooses with draft and γ,
    or 0 if they do not choose the same. Raises `OptionInvalid` if the log of a head does not say when it stops.
    """
    question, facts = asked.question, asked.run.manifest.drafts
    heads = [draft for draft in asked.drafts if facts[draft].by_depth]
    fed = [draft for draft in heads if not facts[draft].own_path or SAMPLED in asked.policies]
    if question.p_min and fed:
        why = "sampled text" if facts[fed[0]].own_path else "a chain of MTP modules, or a run of an older version"
        raise OptionInvalid(
            f"decision.p_min: {fed[0]} read the text's tokens, not its own drafts ({why}): where it stops is unknown",
            "leave p_min out, name another decision.draft, or profile greedy text",
        )
    if question.p_min != AUTO:
        return asked
    tried = Tried.of(asked, asked.drafts)
    if tried is None or not tried.timing.times:
        return replace(asked, question=question.model_copy(update={"p_min": 0.0}))
    gammas = question.gammas(asked.run.gammas)
    covered = [(draft, gamma) for draft in tried.drafts for gamma in gammas if tried.timing.covers(draft, gamma)]
    options = [(_named(p_min, draft), gamma) for p_min in tried.candidates for draft, gamma in covered]
    choice = tried.halves().chosen(options)
    chosen = {float(draft.partition(" ")[0]) for draft, _ in choice.halves} if choice is not None else {0.0}
    best = float(choice.pair[0].partition(" ")[0]) if choice is not None and len(chosen) == 1 else 0.0
    return replace(asked, question=question.model_copy(update={"p_min": best, "chose_p_min": best > 0}))


def _named(p_min: float, draft: str) -> str:
    return f"{p_min:g} {draft}"
