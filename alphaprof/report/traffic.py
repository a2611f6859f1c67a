"""The verdict on the whole traffic, on which domains alone its draft is faster still, and what to use for each domain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import UNTIMED, StepTimes, Timing, free_draft, without_draft
from alphaprof.costs.speedup import Decoded, Domain, Mix, Speedup, parts_of, spent_and_base
from alphaprof.costs.timing import GO_ROUNDS
from alphaprof.report.format import short
from alphaprof.report.inputs import ReportInputs, draft_pools, evidence_of
from alphaprof.report.model import AtConcurrency, AtGamma, DomainAnswer, DraftAnswer, OnFor, Traffic
from alphaprof.report.speeds import by_concurrency, deciding_interval, pays_up_to, tokens_interval
from alphaprof.report.verdict import (
    AUTO,
    CrossFit,
    Decision,
    Evidence,
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
from alphaprof.totals.pool import DocumentTotals, accepted_of

ALONE = Mix(("",), (1.0,))  # one domain
SURELY = 0.01  # chance of a rank correlation as strong as this if there is none
IMPORT_DECIDES = (
    "for the target in {} (decision.served_dtype), import the engine's metrics and compare them (alphaprof compare RUN "
    "IMPORT): the report of the import decides"
)


Judged = tuple[Pair | None, Decision]


def judge_traffic(
    evidence: Evidence, costs: CostModel | None, question: Question, gammas: Sequence[int]
) -> tuple[Traffic, Judged]:
    """Return one draft, one gamma, one verdict for the whole traffic; and what was decided, for `judge_parts`."""
    costs, timing, candidates, mix, weights = basis(evidence, costs, question)
    times = timing.times
    best: Pair | None = None
    if reason := why_undecidable(weights, evidence, next(iter(candidates.values()))):
        decision = no_decision(reason)
    else:
        best, decision = judge(candidates, timing, mix, question, gammas)
        decision = decision if times else no_decision(without_times(evidence.rules, timing.lacks(candidates)))
    reason = decision.reason
    if question.draft == "auto" and times:
        reason += "".join(f"; {draft} was left out: {why}" for draft, why in timing.missing.items())
    if question.stand_in:
        reason += f"; {IMPORT_DECIDES.format(question.served_dtype)}"
    timed = best if best is not None and best[0] in times else None
    free = _tokens_per_round(candidates, best, mix) if best else None
    named = decision.tested.named if decision.tested else None
    load: tuple[AtConcurrency, ...] = ()
    if best is not None:
        load = by_concurrency({best[0]: candidates[best[0]]}, costs, mix, question, gammas, (best, decision))
    traffic = Traffic(
        verdict=decision.verdict,
        reason=reason,
        draft=best[0] if best else None,
        rule=" and ".join(evidence.rules) or question.rule,
        gamma=best[1] if best else None,
        alike=_alike(candidates, timed, timing, mix, question, gammas) if timed else (),
        tokens_per_round=tokens_interval(free, best[1], question.confidence) if best else None,
        break_even_length=free.value / named.value if free and named else None,
        speedup=decision.bounds,
        chosen=question.chooses(question.options(candidates, gammas, timing)),
        disagreement=decision.disagreement,
        documents=decision.speedup.documents if decision.speedup else 0,
        length_correlation=_length_correlation(candidates, timed, times, mix) if timed else None,
        documents_needed=decision.documents_needed,
        documents_likely=decision.documents_likely,
        min_speedup=question.min_speedup,
        weights=dict(weights),
        weights_observed=question.weights is None,
        served_dtype=question.served_dtype if question.stand_in else None,
        load=load,
        pays_up_to=pays_up_to(load, question.min_speedup),
        only=on_for(candidates, timed, timing, mix, question, decision.tested) if timed else None,
    )
    return traffic, (best, decision)


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


def why_undecidable(weights: Mapping[str, float], evidence: Evidence, rounds: Mapping[str, DocumentTotals]) -> str:
    """Return what prevents a verdict on the whole traffic; empty if nothing does. `rounds`: domains that have rounds."""
    if not evidence.observed:
        return "no document is complete yet"
    if odd := sorted(set(weights) ^ set(evidence.observed)):
        return f"weights and data do not have the same domains ({', '.join(map(short, odd))})"
    # A domain is judged by all of its text or not at all: its weight is that of all of it.
    without = {domain: "no rounds" for domain in weights if domain not in rounds} | dict(evidence.undefined)
    if undefined := [domain for domain in without if weights.get(domain, 0) > 0]:
        reasons = dict.fromkeys(without[domain] for domain in undefined)
        advice = ": weight 0 in decision.weights leaves it out" if rounds else ""
        return f"{'; '.join(reasons)} ({', '.join(map(short, undefined))}){advice}"
    return ""


def basis(
    evidence: Evidence, costs: CostModel | None, question: Question
) -> tuple[CostModel | None, Timing, Pools, Mix, Mapping[str, float]]:
    """Return what a verdict on the whole traffic is made of: step times, drafts that may be chosen (those that have step
    times, if any has), and how domains are mixed.
    """
    candidates = evidence.candidates
    if question.draft != "auto":
        candidates = {question.draft: candidates[question.draft]}
    if not all(rule.rule.timed for rule in rules_of(list(evidence.rules))):
        costs = None
    timing = costs.timing(question.concurrency) if costs else UNTIMED
    if timed := {draft: pools for draft, pools in candidates.items() if draft in timing.times}:
        candidates = timed
    weights = question.weights or dict(evidence.observed)
    observed = Mix(tuple(domain for domain, weight in weights.items() if weight > 0), None, evidence.strata)
    mix = Mix.of(weights) if question.weights is not None else observed
    return costs, timing, candidates, mix, weights


@dataclass(frozen=True)
class Tried:
    """Drafts that draft otherwise than the run asks, on the whole traffic and all documents."""

    candidates: Pools
    mix: Mix
    timing: Timing

    @classmethod
    def of(cls, inputs: ReportInputs, drafts: Sequence[str]) -> Tried | None:
        """From the rounds of `drafts` under the rules of the verdict; None if no verdict is defined, no domain has
        rounds, or one has none that has a weight.
        """
        inputs = replace(inputs, question=replace(inputs.question, draft=AUTO))
        evidence = evidence_of(inputs, list(draft_pools(inputs, inputs.deciding, drafts)))
        evidence = replace(evidence, candidates={draft: evidence.candidates[draft] for draft in drafts})
        _, timing, candidates, mix, weights = basis(evidence, inputs.costs, inputs.question)
        if why_undecidable(weights, evidence, next(iter(candidates.values()))):
            return None
        needed = any if mix.weights is None else all  # as drawn, a domain without rounds adds nothing
        have_rounds = all(needed(pools[domain]["tokens"].any() for domain in mix.domains) for pools in candidates.values())
        return cls(candidates, mix, timing) if have_rounds else None

    def tokens_per_round(self, draft: str, gamma: int) -> float:
        """Return tokens per round of a draft at one γ."""
        return self.mix.value(decoded(self.candidates, (draft, gamma), {draft: free_draft(gamma)}, self.mix)) or 0.0

    def rounds(self, draft: str, gamma: int) -> list[Decoded]:
        """Return how each domain is decoded, by the step times; empty without any."""
        times = self.timing.times
        return decoded(self.candidates, (draft, gamma), times, self.mix) if draft in times else []


@dataclass(frozen=True)
class Parts:
    """What stands beside the verdict on the whole traffic: what to use for each domain by itself, the largest share first;
    and every draft by itself on the whole traffic, the fastest first.
    """

    domains: tuple[DomainAnswer, ...]
    drafts: tuple[DraftAnswer, ...]


def judge_parts(
    evidence: Evidence,
    costs: CostModel | None,
    question: Question,
    gammas: Sequence[int],
    documents: Mapping[str, int],
    whole: Judged,
) -> Parts:
    """Return the answers for parts of the traffic, each as of a traffic of its own, by step times at its own mean context.
    `documents`: how many there are of a domain; `whole`: what was decided on the whole traffic.

    Drafts that have no step times are left out if others have some.
    """
    costs, timing, candidates, mix, weights = basis(evidence, costs, question)
    every = {draft: pools for draft, pools in evidence.candidates.items() if draft in timing.times or not timing.times}
    lacking = timing.lacks(candidates) if timing.times else None  # of a draft that was asked for
    lacking = without_times([], lacking) if lacking else "no rounds"
    answer_of = partial(_best_answer, question=question, gammas=gammas)
    domains: list[DomainAnswer] = []
    claims: list[_Claim] = []
    for domain, share in sorted(weights.items(), key=lambda item: -item[1]):
        here, alone = {draft: pools for draft, pools in every.items() if domain in pools}, Mix.of({domain: 1.0})
        best, others = _no_answer(evidence.undefined.get(domain, lacking)), dict[str, Mapping[str, DocumentTotals]]()
        decision, own = no_decision(best.reason), costs.of_domain(domain).timing(question.concurrency) if costs else timing
        claims.append(_Claim("UNDECIDED", lambda _: False))
        if domain not in evidence.undefined and here.keys() & candidates.keys():
            mine = {draft: pools for draft, pools in here.items() if draft in candidates}
            best, decision = answer_of(mine, own, alone)
            claims[-1] = _Claim(decision.verdict, partial(_still, decision, question))
            others = {draft: pools for draft, pools in here.items() if draft != best.draft} if best.draft else {}
        next_best, ahead = None, None
        if others:
            next_best, behind = answer_of(others, own, alone)
            ahead = _lead(here, own, domain, question.confidence, ((next_best, behind), (best, decision)))
        domains.append(DomainAnswer(domain, share, documents.get(domain, 0), best, "UNDECIDED", next_best, ahead))
    domains = _adjusted(domains, claims, 1 - question.confidence)
    undecidable = why_undecidable(weights, evidence, next(iter(candidates.values())))
    if undecidable or not candidates.keys() & every.keys():
        return Parts(tuple(domains), ())
    best, _ = answer_of(candidates, timing, mix, judged=whole)
    drafts = [answer_of({draft: pools}, timing, mix)[0] for draft, pools in every.items() if draft != best.draft]
    drafts = [
        replace(each, by_gamma=_at_gammas(each, every[each.draft], timing, mix, question.confidence)) if each.draft else each
        for each in ([best, *drafts] if best.draft else drafts)
    ]
    return Parts(tuple(domains), tuple(sorted(drafts, key=_speed_of, reverse=True)))


class _Claim(NamedTuple):
    """The verdict on a domain, and whether it holds if its bound may miss with another probability."""

    verdict: VerdictName
    holds: Callable[[float], bool]


def _still(decision: Decision, question: Question, tail: float) -> bool:
    """Return whether a decision is the same if each bound misses with a probability of `tail`."""
    low, high = decision.tested.deciding(tail) if decision.tested else (0.0, math.inf)
    return low >= question.min_speedup if decision.verdict == "GO" else high < question.min_speedup


def _adjusted(domains: Sequence[DomainAnswer], claims: Sequence[_Claim], error: float) -> list[DomainAnswer]:
    """Return the answers with the verdicts that hold for all domains together: of each kind any is wrong with at most
    `error`.
    """
    found = list(domains)
    for verdict in ("GO", "NO-GO"):
        mine = [claim.holds if claim.verdict == verdict else lambda _: False for claim in claims]
        held = zip(found, holm(mine, error), strict=True)
        found = [replace(answer, adjusted=verdict) if holds else answer for answer, holds in held]
    return found


def _lead(
    candidates: Pools, timing: Timing, domain: str, confidence: float, sides: Sequence[tuple[DraftAnswer, Decision]]
) -> Interval | None:
    """Return how many times as fast the second of two answers is as the first in a domain: each half of the documents as the
    other half chose both.
    """
    alone, ways = Mix.of({domain: 1.0}), []
    halves = Halves.of(candidates, timing, alone)
    for answer, decision in sides:
        if decision.tested is None or answer.draft is None or answer.gamma is None:
            return None
        pair = answer.draft, answer.gamma
        first, second = decision.tested.choice.halves if decision.tested.choice else (pair, pair)
        ways.append(halves.decoded((second, first)))
    return deciding_interval(alone.gain(*ways), confidence)


def _no_answer(reason: str) -> DraftAnswer:
    return DraftAnswer(None, None, None, None, None, "UNDECIDED", reason, 0, None, None, ())


def _speed_of(answer: DraftAnswer) -> tuple[float, float]:
    speedup, tokens = answer.speedup, answer.tokens_per_round
    return speedup.value if speedup else 0.0, tokens.value if tokens else 0.0


def _best_answer(
    candidates: Pools, timing: Timing, mix: Mix, question: Question, gammas: Sequence[int], judged: Judged | None = None
) -> tuple[DraftAnswer, Decision]:
    """Return the best of some drafts, and the decision on it, which may be known (`judged`). Without step times that is the
    one that emits most tokens per round at the largest gamma, and nothing is decided.
    """
    if timing.times:
        best, decision = judged or judge(candidates, timing, mix, question, gammas)
    else:
        largest = dict(question.options(candidates, gammas)).items()  # by draft: γ ascend
        lengths = {option: _tokens_per_round(candidates, option, mix) for option in largest}
        best = max(lengths, key=lambda option: each.value if (each := lengths[option]) else 0.0, default=None)
        decision = no_decision(without_times([], timing.lacks(candidates)))
    if best is None:
        return _no_answer(decision.reason), decision
    pools = [candidates[best[0]][domain] for domain in mix.domains]
    answer = DraftAnswer(
        draft=best[0],
        gamma=best[1],
        acceptance=_pooled_acceptance(pools, best[1], question.confidence)
        if mix.weights is None or len(pools) == 1
        else None,
        tokens_per_round=tokens_interval(_tokens_per_round(candidates, best, mix), best[1], question.confidence),
        speedup=decision.bounds,
        verdict=decision.verdict,
        reason=decision.reason,
        documents=distinct(np.concatenate([pool.cluster for pool in pools])),
        documents_needed=decision.documents_needed,
        documents_likely=decision.documents_likely,
        by_gamma=(),
    )
    return answer, decision


def _at_gammas(
    answer: DraftAnswer, pools: Mapping[str, DocumentTotals], timing: Timing, mix: Mix, confidence: float
) -> tuple[AtGamma, ...]:
    """Return what a draft does on the whole traffic at every γ that it has rounds of."""
    draft, found = str(answer.draft), []
    known = [name.removeprefix("rounds_") for name in pools[mix.domains[0]].columns if name.startswith("rounds_")]
    for gamma in sorted(map(int, known)):
        if not all(pools[domain].has(gamma) for domain in mix.domains):
            continue
        free = _tokens_per_round({draft: pools}, (draft, gamma), mix)
        speedup = answer.speedup
        if gamma != answer.gamma or speedup is None:
            faster = pooled_speedup({draft: pools}, (draft, gamma), timing.times, mix) if draft in timing.times else None
            speedup = deciding_interval(faster, confidence)
        found.append(AtGamma(gamma, free.value if free else 0.0, speedup))
    return tuple(found)


def _tokens_per_round(candidates: Pools, pair: Pair, mix: Mix) -> Speedup | None:
    return pooled_speedup(candidates, pair, {pair[0]: free_draft(pair[1])}, mix)


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
