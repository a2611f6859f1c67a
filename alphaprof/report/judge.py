"""The verdict on the whole traffic, on which domains alone its draft is faster still, and what to use for each domain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from alphaprof.config.profile import AUTO
from alphaprof.costs.rounds import UNTIMED, StepTimes, Timing, free_draft, without_draft
from alphaprof.costs.speedup import Domain, Mix, Speedup, parts_of, spent_and_base
from alphaprof.costs.timing import GO_ROUNDS
from alphaprof.report.answer import Answer, AtGamma, DomainAnswer, DraftAnswer, OnFor, Traffic
from alphaprof.report.asked import Asked, DraftPool, Evidence, draft_pools
from alphaprof.report.loads import AtLoad, pays_up_to
from alphaprof.report.schedule import GammaByLoad
from alphaprof.report.speeds import deciding_interval, tokens_interval
from alphaprof.report.verdict import (
    CrossFit,
    Decision,
    Halves,
    Pair,
    Pools,
    Question,
    VerdictName,
    decoded,
    judge,
    no_decision,
    pooled_speedup,
    without_times,
)
from alphaprof.rules import rules_of
from alphaprof.stats.estimate import Interval, by_cluster, distinct, pooled_share, present, rank_correlation
from alphaprof.stats.gates import holm
from alphaprof.stats.grouping import grouped
from alphaprof.totals.pool import DocumentTotals, accepted_of

ALONE = Mix(("",), (1.0,))  # one domain
SURELY = 0.01  # chance of a rank correlation as strong as this if there is none
IMPORT_DECIDES = (
    "for the target in {} (decision.served_dtype), import the engine's metrics and compare them (alphaprof diagnose RUN "
    "IMPORT): the report of the import decides"
)


Judged = tuple[Pair | None, Decision]  # what was chosen, and the decision on it


class Judge:
    """Answers for the whole traffic, for each domain by itself and for each draft by itself, each judged once.

    `pools`: of `drafts` under the rules that the verdict concerns. `candidates`: the drafts that may be chosen, those that
    have step times if any has; `every`: the same, of drafts that the question is not about too. `weights`: shares of output
    tokens by domain, and how they `mix` domains. `undecidable`: what prevents a verdict on the whole traffic; empty if
    nothing does. Domains are judged as a traffic of their own, by step times at their own mean context.
    """

    def __init__(self, asked: Asked, pools: Sequence[DraftPool], drafts: Sequence[str]) -> None:
        self.asked, self.pools, self.evidence = asked, pools, Evidence.of(asked, pools, drafts)
        timed = all(rule.rule.timed for rule in rules_of(asked.decisive))
        self.costs = asked.costs if timed else None
        self.timing = asked.timing if timed else UNTIMED
        every, times = self.evidence.candidates, self.timing.times
        self.every: Pools = {draft: every[draft] for draft in every if draft in times or not times}
        named = {draft: every[draft] for draft in asked.drafts if draft in every}
        self.candidates: Pools = {draft: named[draft] for draft in named if draft in times} or named
        self.weights = asked.question.weights or dict(self.evidence.observed)
        observed = Mix(tuple(domain for domain, weight in self.weights.items() if weight > 0), None, asked.strata)
        self.mix = Mix.of(self.weights) if asked.question.weights is not None else observed
        self.undecidable = self.evidence.lacks(self.weights, next(iter(self.candidates)))
        self._question, self._gammas = asked.question, asked.run.gammas
        self._known: dict[tuple[str | None, tuple[str, ...]], Judged] = {}

    @classmethod
    def of(cls, asked: Asked, drafts: Sequence[str] | None = None) -> Judge:
        """From the totals of some drafts (None: those that the question is about)."""
        drafts = drafts or asked.drafts
        return cls(asked, list(draft_pools(asked, asked.deciding, drafts)), drafts)

    def judged(self, domain: str | None, drafts: Sequence[str]) -> Judged:
        """Return what is chosen among some drafts for a domain (None: the whole traffic), and the decision on it. Without
        step times that is the draft that emits most tokens per round at the `_largest` gamma, and nothing is decided.
        """
        key = domain, tuple(drafts)
        if key not in self._known:
            timing, mix, candidates = (
                self.timing_of(domain),
                self._mix_of(domain),
                {name: self.every[name] for name in drafts},
            )
            if timing.times:
                self._known[key] = judge(candidates, timing, mix, self._question, self._gammas)
            else:
                largest = [(draft, gamma) for draft, gamma in self._largest.items() if draft in candidates]
                lengths = {option: _tokens_per_round(candidates, option, mix) for option in largest}
                best = max(lengths, key=lambda option: each.value if (each := lengths[option]) else 0.0, default=None)
                self._known[key] = best, self._untimed(without_times([], timing.lacks(candidates)))
        return self._known[key]

    @cached_property
    def _largest(self) -> dict[str, int]:
        """The largest gamma of each draft: the largest that all drafts have rounds of, if they have one in common."""
        own = grouped(self._question.options(self.every, self._gammas))
        common = set.intersection(*map(set, own.values())) if own else set[int]()
        return {draft: max(common or gammas) for draft, gammas in own.items()}

    def _untimed(self, reason: str) -> Decision:
        """Return UNDECIDED, with the remedy where there are step times that do not tell it."""
        return replace(no_decision(reason), remedy=self.timing.surer if self.asked.untold else "")

    @property
    def untold(self) -> str:
        """Why step times do not tell how fast the whole traffic is, or which draft is the fastest; empty if they do, or if
        there are none.
        """
        if not self.timing.times or self.undecidable:
            return ""
        best, decision = self.judged(None, list(self.candidates))
        if decision.untold or decision.verdict != "UNDECIDED" or best is None:
            return decision.untold
        return self._unranked(best)

    def _unranked(self, best: Pair) -> str:
        """Return that step times do not tell the fastest draft from the one with most tokens per round, at the largest gamma
        of both, if these are two.
        """
        drafts = [draft for draft in self._largest if draft in self.timing.times and draft in self.candidates]
        emitted = {draft: _tokens_per_round(self.candidates, (draft, self._largest[draft]), self.mix) for draft in drafts}
        most = max(emitted, key=lambda draft: each.value if (each := emitted[draft]) else 0.0, default=best[0])
        other = self.judged(None, [most])[0] if most != best[0] else None
        if other is None:
            return ""
        times = self.timing.times
        gain = self.mix.gain(*(decoded(self.candidates, pair, times, self.mix) for pair in (other, best)))
        if gain is None or not gain.hidden_by_times(1 - self._question.confidence):
            return ""
        return f"step times do not tell {best[0]} from {most}, which emits most tokens per round"

    def known(self, domain: str, draft: str, pool: DocumentTotals) -> Judged | None:
        """Return what was chosen for a draft in a domain, if that rests on this pool and the run's step times; else None."""
        same = self.every.get(draft, {}).get(domain) is pool and self.costs is not None and self.timing.times
        return self.judged(domain, [draft]) if same else None

    def timing_of(self, domain: str | None) -> Timing:
        """Return the step times of a domain, at its own context, or of the whole traffic."""
        if domain is None or self.costs is None:
            return self.timing
        return self.costs.of_domain(domain).timing(self._question.concurrency)

    def _mix_of(self, domain: str | None) -> Mix:
        return self.mix if domain is None else Mix.of({domain: 1.0})

    def answer(self, domain: str | None, judged: Judged) -> Answer:
        """Return what was decided for a domain, or the whole traffic, as an answer."""
        (best, decision), mix, acceptance, free, units = judged, self._mix_of(domain), None, None, 0
        if best is not None:
            pools = [self.every[best[0]][name] for name in mix.domains]
            units = distinct(np.concatenate([pool.cluster for pool in pools]))
            free = tokens_interval(_tokens_per_round(self.every, best, mix), best[1], self._question.confidence)
            if mix.weights is None or len(pools) == 1:
                acceptance = _pooled_acceptance(pools, best[1], self._question.confidence)
        return Answer(
            domain=domain,
            verdict=decision.verdict,
            reason=decision.reason,
            remedy=decision.remedy,
            draft=best[0] if best else None,
            rule=" and ".join(self.asked.decisive) or self._question.rule,
            gamma=best[1] if best else None,
            speedup=decision.bounds,
            tokens_per_round=free,
            acceptance=acceptance,
            documents=sum(len(group.rows) for group in self.asked.documents.groups if domain in (None, group.domain)),
            units=units,
            held_out=decision.speedup.documents if decision.speedup else 0,
            documents_needed=decision.documents_needed,
        )

    def traffic(self) -> tuple[Answer, Traffic]:
        """Return one draft, one gamma and one verdict for the whole traffic, and what else is said of the traffic."""
        question, timing, mix, candidates = self._question, self.timing, self.mix, self.candidates
        best: Pair | None = None
        if self.undecidable:
            decision = no_decision(self.undecidable)
        elif timing.times:
            best, decision = self.judged(None, list(candidates))
        else:
            best, _ = judge(candidates, timing, mix, question, self._gammas)
            decision = self._untimed(without_times(self.asked.decisive, timing.lacks(candidates)))
        reason = decision.reason
        if question.draft == AUTO and timing.times:
            reason += "".join(f"; {draft} was left out: {why}" for draft, why in timing.missing.items())
        reason += f"; {IMPORT_DECIDES.format(question.served_dtype)}" if question.stand_in else ""
        timed = best if best is not None and best[0] in timing.times else None
        named = decision.tested.named if decision.tested else None
        free = _tokens_per_round(candidates, best, mix) if best is not None else None
        load = self.loads()
        traffic = Traffic(
            min_speedup=question.min_speedup,
            weights=dict(self.weights),
            weights_observed=question.weights is None,
            chosen=question.chooses(question.options(candidates, self._gammas, timing)),
            disagreement=decision.disagreement,
            alike=_alike(candidates, timed, timing, mix, question, self._gammas) if timed else (),
            break_even_length=free.value / named.value if free and named else None,
            length_correlation=_length_correlation(candidates, timed, timing.times, mix) if timed else None,
            served_dtype=question.served_dtype if question.stand_in else None,
            load=load,
            pays_up_to=pays_up_to(load, question.min_speedup),
            only=on_for(candidates, timed, timing, mix, question, decision.tested) if timed else None,
            slow=tuple(self._slow()) if timed else (),
        )
        return self.answer(None, (best, replace(decision, reason=reason))), traffic

    def loads(self, *, everywhere: bool = False) -> tuple[AtLoad, ...]:
        """Return the gamma by concurrency of the draft that is chosen for the whole traffic, at the traffic's own context or
        `everywhere`, as `GammaByLoad.at_loads` does.
        """
        if self.undecidable or self.costs is None or not self.timing.times:
            return ()
        (best, decision), question = self.judged(None, list(self.candidates)), self._question
        if best is None:
            return ()
        pools = [self.candidates[best[0]][domain] for domain in self.mix.domains]
        gammas = [gamma for gamma in question.gammas(self._gammas) if all(pool.has(gamma) for pool in pools)]
        load = GammaByLoad(best[0], pools, self.mix, self.costs, gammas, question.confidence)
        return tuple(load.at_loads(question.concurrency, best[1], decision.bounds, everywhere=everywhere))

    def _slow(self) -> Iterator[str]:
        """Yield the drafts that are NO-GO in every domain."""
        for draft, pools in self.every.items():
            domains = [domain for domain in self.weights if domain in pools and domain not in self.evidence.undefined]
            if domains and all(self.judged(domain, [draft])[1].verdict == "NO-GO" for domain in domains):
                yield draft

    def for_domain(self, domain: str) -> Judged:
        """Return what is chosen for a domain by itself, and the decision on it."""
        mine = [draft for draft in self.candidates if domain in self.every.get(draft, {})]
        if domain not in self.evidence.undefined and mine:
            return self.judged(domain, mine)
        lacking = self.timing.lacks(self.candidates) if self.timing.times else None  # of a draft that was asked for
        reason = without_times([], lacking) if lacking else "no rounds"
        return None, no_decision(self.evidence.undefined.get(domain, reason))

    def domains(self) -> tuple[DomainAnswer, ...]:
        """Return what to use for each domain by itself, the largest share first."""
        answers, claims = list[DomainAnswer](), list[_Claim]()
        for domain, share in sorted(self.weights.items(), key=lambda item: -item[1]):
            here = [draft for draft, pools in self.every.items() if domain in pools]
            judged = self.for_domain(domain)
            others = [draft for draft in here if draft != judged[0][0]] if judged[0] else []
            next_best, ahead = None, None
            if others:
                behind = self.judged(domain, others)
                next_best, ahead = self.answer(domain, behind), self._lead(domain, here, behind, judged)
            answers.append(DomainAnswer(share, self.answer(domain, judged), "UNDECIDED", next_best, ahead))
            claims.append(_Claim(judged[1].verdict, partial(_still, judged[1], self._question)))
        error = 1 - self._question.confidence
        for verdict in ("GO", "NO-GO"):  # of each kind any is wrong with at most `error`
            mine_hold = [claim.holds if claim.verdict == verdict else lambda _: False for claim in claims]
            held = zip(answers, holm(mine_hold, error), strict=True)
            answers = [replace(answer, adjusted=verdict) if holds else answer for answer, holds in held]
        return tuple(answers)

    def _lead(self, domain: str, drafts: Sequence[str], *sides: Judged) -> Interval | None:
        """Return how many times as fast the second of two choices is as the first in a domain: each half of the documents as
        the other half chose both.
        """
        alone, ways = Mix.of({domain: 1.0}), []
        halves = Halves.of({draft: self.every[draft] for draft in drafts}, self.timing_of(domain), alone)
        for pair, decision in sides:
            if decision.tested is None or pair is None:
                return None
            first, second = decision.tested.choice.halves if decision.tested.choice else (pair, pair)
            ways.append(halves.decoded((second, first)))
        return deciding_interval(alone.gain(*ways), self._question.confidence)

    def drafts(self) -> tuple[DraftAnswer, ...]:
        """Return every draft by itself on the whole traffic, the fastest first."""
        if self.undecidable or not self.candidates.keys() & self.every.keys():
            return ()
        best = self.judged(None, list(self.candidates))
        others = [draft for draft in self.every if best[0] is None or draft != best[0][0]]
        each = ([] if best[0] is None else [best]) + [self.judged(None, [draft]) for draft in others]
        answers = [(self.answer(None, judged), judged[1]) for judged in each]
        found = [
            DraftAnswer(answer, self._at_gammas(answer, decided) if answer.draft else ()) for answer, decided in answers
        ]

        def speed(item: DraftAnswer) -> tuple[float, float]:
            speedup, tokens = item.answer.speedup, item.answer.tokens_per_round
            return speedup.value if speedup else 0.0, tokens.value if tokens else 0.0

        return tuple(sorted(found, key=speed, reverse=True))

    def _at_gammas(self, answer: Answer, decision: Decision) -> tuple[AtGamma, ...]:
        """Return what a draft does on the whole traffic at every γ that it has rounds of."""
        draft, found = str(answer.draft), []
        pools, timing, mix = self.every[draft], self.timing, self.mix
        known = [name.removeprefix("rounds_") for name in pools[mix.domains[0]].columns if name.startswith("rounds_")]
        for gamma in sorted(map(int, known)):
            if not all(pools[domain].has(gamma) for domain in mix.domains):
                continue
            free = _tokens_per_round({draft: pools}, (draft, gamma), mix)
            speedup = answer.speedup
            if gamma != answer.gamma or speedup is None:
                faster = pooled_speedup({draft: pools}, (draft, gamma), timing.times, mix) if draft in timing.times else None
                speedup = (decision.tested or CrossFit([], faster)).beside(faster, self._question.confidence)
            found.append(AtGamma(gamma, free.value if free else 0.0, speedup))
        return tuple(found)


class _Claim(NamedTuple):
    """The verdict on a domain, and whether it holds if its bound may miss with another probability."""

    verdict: VerdictName
    holds: Callable[[float], bool]


def _still(decision: Decision, question: Question, tail: float) -> bool:
    """Return whether a decision is the same if each bound misses with a probability of `tail`."""
    low, high = decision.tested.deciding(tail) if decision.tested else (0.0, math.inf)
    return low >= question.min_speedup if decision.verdict == "GO" else high < question.min_speedup


def _tokens_per_round(candidates: Pools, pair: Pair, mix: Mix) -> Speedup | None:
    return pooled_speedup(candidates, pair, {pair[0]: free_draft(pair[1])}, mix)


def _alike(
    candidates: Pools, pair: Pair, timing: Timing, mix: Mix, question: Question, gammas: Sequence[int]
) -> tuple[int, ...]:
    """Return the gammas next to a pair's own, it included, between which and it these documents show no clear difference."""
    draft, own = pair
    named, tail = decoded(candidates, pair, timing.times, mix), 1 - question.confidence
    known = sorted({own, *(gamma for drafted, gamma in question.options(candidates, gammas, timing) if drafted == draft)})
    place = known.index(own)

    def differs(gamma: int) -> bool:
        gain = mix.gain(named, decoded(candidates, (draft, gamma), timing.times, mix))
        low, high = gain.deciding(tail) if gain is not None else (0.0, math.inf)
        return not low <= 1 <= high

    below, above = (
        list(itertools.takewhile(lambda g: not differs(g), side)) for side in (known[:place][::-1], known[place + 1 :])
    )
    return (*below[::-1], own, *above)


def on_for(
    candidates: Pools, pair: Pair, timing: Timing, mix: Mix, question: Question, tested: CrossFit | None
) -> OnFor | None:
    """Return the domains in which alone the draft is surely faster than in all of them; None if there are no such domains,
    or what would keep the verdict from GO keeps this from being told.

    Each half of the documents and of the timing rounds leaves out the domains that the draft slows down there, and both must
    leave out the same, so that no domain is left out by the luck of the documents that then speak against it.
    """
    if tested is None or question.stand_in or 0 < timing.times[pair[0]].rounds < GO_ROUNDS:
        return None
    chosen: tuple[set[str], set[str]] = (set(), set())
    for domain, parts in zip(mix.domains, Halves.of(candidates, timing, mix).decoded((pair, pair)), strict=True):
        for half, part in zip(chosen, parts, strict=True):
            value = ALONE.value([part])
            half |= {domain} if value is None or value >= 1 else set()
    on, other = chosen
    if on != other or not 0 < len(on) < len(mix.domains):
        return None
    there = list[Domain]()
    for domain, each in zip(mix.domains, tested.domains, strict=True):
        off: Domain = [without_draft(*part) for part in parts_of(each)]
        there.append(each if domain in on else off)
    gain, speedup = (
        deciding_interval(each, question.confidence) for each in (mix.gain(tested.domains, there), mix.routed(there))
    )
    if gain is None or speedup is None or gain.low <= 1:
        return None
    return OnFor(tuple(domain for domain in mix.domains if domain in on), speedup, gain)


def _length_correlation(candidates: Pools, pair: Pair, times: Mapping[str, StepTimes], mix: Mix) -> float | None:
    """Return the rank correlation of the length of units and their time per token, if there surely is one."""
    counts = [candidates[pair[0]][domain].counts(pair[1]) for domain in mix.domains]
    sums = [spent_and_base(*each) for each in mix.decoded(counts, times[pair[0]])]
    clusters = np.concatenate([present(each.cluster) for each in counts])
    spent, base = by_cluster(clusters, *(np.concatenate(side) for side in zip(*sums, strict=True)))
    spent, base = spent[base > 0], base[base > 0]
    if not len(base):
        return None
    correlation, by_chance = rank_correlation(base, spent / base)
    return correlation if by_chance < SURELY else None


def _pooled_acceptance(pools: Sequence[DocumentTotals], gamma: int, confidence: float) -> Interval | None:
    """Alpha over all these documents; of an imported run, whose positions are not known, the share of rounds whose first
    draft was kept, if that is known.
    """
    observed = all(pool.observed for pool in pools)
    sums = [accepted_of(pool, None if observed else gamma) for pool in pools]
    if not observed:
        sums = [(pool[f"accepted_depths_{gamma}"][:, 0], drafted) for pool, (_, drafted) in zip(pools, sums, strict=True)]
    accepted, counts = (np.concatenate(side) for side in zip(*sums, strict=True))
    if np.isnan(accepted).any():
        return None
    return pooled_share(np.concatenate([pool.cluster for pool in pools]), accepted, counts, confidence)
