"""The verdict on the whole traffic, what to use for each domain by itself, and the route that both lead to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.speedup import (
    UNTIMED,
    Decoded,
    Mix,
    Speedup,
    StepTimes,
    Timing,
    free_draft,
    spent_and_base,
    without_draft,
)
from alphaprof.report.format import short
from alphaprof.report.inputs import ReportInputs, draft_pools, evidence_of
from alphaprof.report.model import DomainAnswer, DraftAnswer, Route, ServerPool, Traffic
from alphaprof.report.speeds import by_concurrency, pays_up_to, speedup_interval, tokens_interval
from alphaprof.report.verdict import (
    AUTO,
    Decision,
    Evidence,
    Mask,
    Pair,
    Pools,
    Question,
    VerdictName,
    decoded,
    halves,
    judge,
    no_decision,
    pooled_speedup,
    without_times,
)
from alphaprof.rules import rules_of
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct, pooled_share, present, rank_correlation
from alphaprof.stats.gates import holm
from alphaprof.totals.pool import DocumentTotals, accepted_of

MOST_POOLS = 3  # of one model: each pool needs its own spare servers
NO_GAIN = "no domain would gain by another pool"
Configuration = Pair | None  # of a server; None: no speculation


def find_route(
    candidates: Pools,
    timing: Timing,
    mix: Mix,
    question: Question,
    gammas: Sequence[int],
    weights: Mapping[str, float],
) -> Route | str:
    """Return the pools that half of the documents and of the timing rounds choose, and what they gain on the other half over
    one pool for all domains; or why there is one pool.

    A second pool is always tried; a third one only if it gains `question.min_route_gain` on the half that chooses.
    `weights`: the share of output tokens of each domain.
    """
    if question.route_by != "domain":
        return f"route.by is {question.route_by}"
    if len(mix.domains) < 2:
        return "there is one domain"
    if question.order is not None and question.weights is not None:
        return "the documents' mixture of domains differs from the weights"
    if missing := next((draft for draft in candidates if draft not in timing.times), None):
        return f"there are no step times for {missing}"
    parts = halves({domain: next(iter(candidates.values()))[domain] for domain in mix.domains}, question.order)
    options = question.options(candidates, gammas, timing)
    if parts is None or not options:
        return f"there are no {'documents' if options else 'rounds'} to choose pools by"
    halves_of_times = zip((timing.choosing, timing.testing), parts, strict=True)
    choosing, testing = (_Half(candidates, times, mix, rows, options[0]) for times, rows in halves_of_times)
    single, assigned = _assigned(*choosing.relative_times([None, *options]), [None, *options], question.min_route_gain)
    if len(set(assigned)) < 2:
        return NO_GAIN
    ways = [testing.decoded(configurations) for configurations in ([single] * len(assigned), assigned)]
    gain, whole = mix.gain(*ways), mix.routed(ways[1])
    faster, speedup = (speedup_interval(each, question.confidence) for each in (gain, whole))
    if gain is None or whole is None or faster is None or speedup is None:
        return "some domain has no tokens for testing pools"
    more = Interval(faster.value - 1, faster.low - 1, faster.high - 1)

    def served(used: Configuration, domains: Sequence[str]) -> ServerPool:
        draft, gamma = used or (None, None)
        return ServerPool(draft, gamma, tuple(domains), sum(weights[domain] for domain in domains))

    servers = [
        served(used, [domain for domain, each in zip(mix.domains, assigned, strict=True) if each == used])
        for used in dict.fromkeys(assigned)
    ]
    servers.sort(key=lambda each: -each.share)
    why_not = _why_not(gain.tells and whole.tells, more.low, speedup.low, question)
    return Route(tuple(servers), speedup, more, served(single, mix.domains), gain.documents, why_not)


def _why_not(enough: bool, gain: float, speedup: float, question: Question) -> str:
    """Return what speaks against the pools of a route; empty if nothing does. `gain`, `speedup`: lower ends of the
    intervals.
    """
    if question.stand_in:
        return question.stand_in
    if question.order is not None:  # it stops at a random place: an interval for a fixed number does not hold
        return "a run that stops early cannot tell"
    if not enough:
        return "too few documents to tell"
    if gain < question.min_route_gain:
        return f"the lower end of the gain is below {100 * question.min_route_gain:g}%"
    if speedup < question.min_speedup:
        return f"the lower end of the speedup is below {question.min_speedup:g}x"
    return ""


@dataclass(frozen=True)
class _Half:
    """Some documents of each domain, decoded by any configuration. `known`: one that there are rounds of."""

    candidates: Pools
    times: Mapping[str, StepTimes]
    mix: Mix
    rows: Mapping[str, Mask]
    known: Pair
    cache: dict[tuple[str, Configuration], Decoded] = field(default_factory=dict)

    def decoded(self, configurations: Sequence[Configuration]) -> list[Decoded]:
        """Return each domain by its configuration; the same object for the same two."""
        return [self._decoded(domain, used) for domain, used in zip(self.mix.domains, configurations, strict=True)]

    def _decoded(self, domain: str, used: Configuration) -> Decoded:
        if (domain, used) not in self.cache:
            draft, gamma = used or self.known
            counts, times = self.candidates[draft][domain].counts(gamma).rows(self.rows[domain]), self.times[draft]
            self.cache[domain, used] = (counts, times) if used else without_draft(counts, times)
        return self.cache[domain, used]

    def relative_times(self, options: Sequence[Configuration]) -> tuple[Array, Array]:
        """Return the time of each domain by each option in units of that without a draft, [domains, options], and the weight
        of each domain, [domains]. A domain without tokens has no weight, and the times of all others together.
        """
        sums = [
            [[float(part.sum()) for part in spent_and_base(*self._decoded(domain, used))] for used in options]
            for domain in self.mix.domains
        ]
        spent, base = np.moveaxis(np.array(sums), 2, 0)
        seen = base[:, 0] > 0
        weights = np.where(seen, base[:, 0] if self.mix.weights is None else self.mix.weights, 0.0)
        relative = np.divide(spent, base, out=np.ones_like(spent), where=base > 0)
        if seen.any():
            relative[~seen] = weights @ relative / weights.sum()
        return relative, weights


def _assigned(
    relative: Array, weights: Array, options: Sequence[Configuration], least_gain: float
) -> tuple[Configuration, list[Configuration]]:
    """Return the best option for all domains, and the option of each domain among the best two or three together."""

    def time(places: tuple[int, ...]) -> float:
        return float(weights @ relative[:, places].min(1))

    every = range(len(options))
    single = min(every, key=lambda place: time((place,)))
    best: tuple[int, ...] = min(itertools.combinations(every, 2), key=time)
    while len(best) < MOST_POOLS:
        larger = min(((*best, place) for place in every), key=time)
        if time(best) < (1 + least_gain) * time(larger):
            break
        best = larger
    return options[single], [options[best[place]] for place in relative[:, best].argmin(1)]


SURELY = 0.01  # chance of a rank correlation as strong as this if there is none
IMPORT_DECIDES = (
    "for the target in {} (decision.served_dtype), import the engine's metrics and compare them (alphaprof compare RUN "
    "IMPORT): the report of the import decides"
)


def judge_traffic(evidence: Evidence, costs: CostModel | None, question: Question, gammas: Sequence[int]) -> Traffic:
    """Return one draft, one gamma, one verdict for the whole traffic."""
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
    timed = best is not None and best[0] in times
    whole = pooled_speedup(candidates, best, times, mix) if best and timed else None
    free = _tokens_per_round(candidates, best, mix) if best else None
    effective, correlation = _length_facts(candidates, best, times, mix) if best and timed else (None, None)
    allowed = question.gammas(gammas)
    several = by_concurrency(candidates[best[0]], costs, best[0], mix, allowed, question.confidence) if best else ()
    return Traffic(
        verdict=decision.verdict,
        reason=reason,
        draft=best[0] if best else None,
        rule=" and ".join(evidence.rules) or question.rule,
        gamma=best[1] if best else None,
        tokens_per_round=tokens_interval(free, best[1], question.confidence) if best else None,
        break_even_length=free.value / whole.value if free and whole else None,
        speedup=speedup_interval(decision.speedup, question.confidence),
        tested=decision.tested,
        chosen=question.chooses(question.options(candidates, gammas, timing)),
        documents=decision.speedup.documents if decision.speedup else 0,
        effective_documents=effective,
        length_correlation=correlation,
        documents_needed=decision.documents_needed,
        documents_likely=decision.documents_likely,
        min_speedup=question.min_speedup,
        weights=dict(weights),
        weights_observed=question.weights is None,
        served_dtype=question.served_dtype if question.stand_in else None,
        load=several,
        pays_up_to=pays_up_to(several, question.min_speedup),
    )


def _length_facts(
    candidates: Pools, pair: Pair, times: Mapping[str, StepTimes], mix: Mix
) -> tuple[float | None, float | None]:
    """Return how many units of one length would say as much as all of these, and the rank correlation of their length and
    their time per token, if there surely is one.
    """
    counts = [candidates[pair[0]][domain].counts(pair[1]) for domain in mix.domains]
    sums = [spent_and_base(each, times[pair[0]]) for each in counts]
    clusters = np.concatenate([present(each.cluster) for each in counts])
    spent, base = by_cluster(clusters, *(np.concatenate(side) for side in zip(*sums, strict=True)))
    spent, base = spent[base > 0], base[base > 0]
    if not len(base):
        return None, None
    correlation, by_chance = rank_correlation(base, spent / base)
    return float(base.sum() ** 2 / (base**2).sum()), correlation if by_chance < SURELY else None


def tested_rows(
    evidence: Evidence, costs: CostModel | None, question: Question, gammas: Sequence[int]
) -> Mapping[str, Mask] | None:
    """Return the documents of each domain that did not choose what `judge_traffic` chose, [documents] each; None: all may
    judge.
    """
    _, timing, candidates, mix, _ = basis(evidence, costs, question)
    if not question.chooses(question.options(candidates, gammas, timing)):
        return None
    parts = halves({domain: next(iter(candidates.values()))[domain] for domain in mix.domains}, question.order)
    return parts[1] if parts else None


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
        """From the rounds of `drafts` under the rules of the verdict; None if no verdict is defined."""
        inputs = replace(inputs, question=replace(inputs.question, draft=AUTO))
        evidence = evidence_of(inputs, list(draft_pools(inputs, inputs.deciding, drafts)))
        evidence = replace(evidence, candidates={draft: evidence.candidates[draft] for draft in drafts})
        _, timing, candidates, mix, weights = basis(evidence, inputs.costs, inputs.question)
        undecidable = why_undecidable(weights, evidence, next(iter(candidates.values())))
        return None if undecidable else cls(candidates, mix, timing)

    def at(self, draft: str, gamma: int) -> tuple[float, float | None]:
        """Return tokens per round and speedup, None without step times, of a draft at one γ."""
        free, times = {draft: free_draft(gamma)}, self.timing.times
        ways = [decoded(self.candidates, (draft, gamma), each, self.mix, None) for each in (free, times) if draft in each]
        tokens, *faster = map(self.mix.value, ways)
        return tokens or 0.0, faster[0] if faster else None


@dataclass(frozen=True)
class Parts:
    """What stands beside the verdict on the whole traffic: what to use for each domain by itself, the largest share first;
    every draft by itself on the whole traffic, the fastest first; and the route.
    """

    domains: tuple[DomainAnswer, ...]
    drafts: tuple[DraftAnswer, ...]
    routing: Route | None
    one_pool: str  # why there is no route


def judge_parts(
    evidence: Evidence,
    costs: CostModel | None,
    question: Question,
    gammas: Sequence[int],
    documents: Mapping[str, int],
) -> Parts:
    """Return the answers for parts of the traffic, each as of a traffic of its own. `documents`: how many there are of a
    domain.

    Drafts that have no step times are left out if others have some.
    """
    _, timing, candidates, mix, weights = basis(evidence, costs, question)
    every = {draft: pools for draft, pools in evidence.candidates.items() if draft in timing.times or not timing.times}
    lacking = timing.lacks(candidates) if timing.times else None  # of a draft that was asked for
    lacking = without_times([], lacking) if lacking else "no rounds"
    answer_of = partial(_best_answer, timing=timing, question=question, gammas=gammas)
    domains: list[DomainAnswer] = []
    claims: list[_Claim] = []
    for domain, share in sorted(weights.items(), key=lambda item: -item[1]):
        here, alone = {draft: pools for draft, pools in every.items() if domain in pools}, Mix.of({domain: 1.0})
        best, others = _no_answer(evidence.undefined.get(domain, lacking)), dict[str, Mapping[str, DocumentTotals]]()
        claims.append(_Claim("UNDECIDED", lambda _: False))
        if domain not in evidence.undefined and here.keys() & candidates.keys():
            mine = {draft: pools for draft, pools in here.items() if draft in candidates}
            best, decision = answer_of(mine, mix=alone)
            claims[-1] = _Claim(decision.verdict, partial(_still, decision, mine, timing, alone, question, gammas))
            others = {draft: pools for draft, pools in here.items() if draft != best.draft} if best.draft else {}
        next_best = answer_of(others, mix=alone)[0] if others else None
        ahead = _lead(here, best, next_best, domain, timing, question) if next_best else None
        domains.append(DomainAnswer(domain, share, documents.get(domain, 0), best, "UNDECIDED", next_best, ahead))
    domains = _adjusted(domains, claims, 1 - question.confidence)
    reason = why_undecidable(weights, evidence, next(iter(candidates.values())))
    if reason or not candidates.keys() & every.keys():
        return Parts(tuple(domains), (), None, reason or lacking)
    best, _ = answer_of(candidates, mix=mix)
    drafts = [answer_of({draft: pools}, mix=mix)[0] for draft, pools in every.items() if draft != best.draft]
    drafts = sorted([best, *drafts] if best.draft else drafts, key=_speed_of, reverse=True)
    route: Route | str = without_times([], timing.lacks(candidates))
    if timing.times:
        route = find_route(candidates, timing, mix, question, gammas, weights)
    found, one_pool = (None, route) if isinstance(route, str) else (route, "")
    return Parts(tuple(domains), tuple(drafts), found, one_pool)


class _Claim(NamedTuple):
    """The verdict on a domain, and whether it holds if its bound may miss with another probability."""

    verdict: VerdictName
    holds: Callable[[float], bool]


def _still(
    decision: Decision,
    candidates: Pools,
    timing: Timing,
    mix: Mix,
    question: Question,
    gammas: Sequence[int],
    tail: float,
) -> bool:
    """Return whether a decision is the same if each bound misses with a probability of `tail`."""
    if question.order is not None:  # bets are lost or won at their own error
        asked = replace(question, confidence=1 - tail)
        return judge(candidates, timing, mix, asked, gammas)[1].verdict == decision.verdict
    low, high = decision.speedup.deciding(tail) if decision.speedup else (0.0, math.inf)
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
    candidates: Pools, best: DraftAnswer, next_best: DraftAnswer, domain: str, timing: Timing, question: Question
) -> Interval | None:
    """Return how many times as fast the best answer is as the next best, on the documents of a domain that chose neither."""
    if best.speedup is None or next_best.speedup is None:
        return None
    parts = halves({domain: next(iter(candidates.values()))[domain]}, question.order)
    if parts is None:
        return None
    ways = [
        [(candidates[draft][domain].counts(gamma).rows(parts[1][domain]), timing.testing[draft])]
        for draft, gamma in ((answer.draft, answer.gamma) for answer in (next_best, best))
        if draft is not None and gamma is not None
    ]
    return speedup_interval(Mix.of({domain: 1.0}).gain(*ways), question.confidence)


def _no_answer(reason: str) -> DraftAnswer:
    return DraftAnswer(None, None, None, None, None, None, "UNDECIDED", reason, 0, None, None)


def _speed_of(answer: DraftAnswer) -> tuple[float, float]:
    speedup, tokens = answer.speedup, answer.tokens_per_round
    return speedup.value if speedup else 0.0, tokens.value if tokens else 0.0


def _best_answer(
    candidates: Pools, timing: Timing, mix: Mix, question: Question, gammas: Sequence[int]
) -> tuple[DraftAnswer, Decision]:
    """Return the best of some drafts, and the decision on it. Without step times that is the one that emits most tokens per
    round at the largest gamma, and nothing is decided.
    """
    if timing.times:
        best, decision = judge(candidates, timing, mix, question, gammas)
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
        speedup=speedup_interval(decision.speedup, question.confidence),
        tested=decision.tested,
        verdict=decision.verdict,
        reason=decision.reason,
        documents=distinct(np.concatenate([pool.cluster for pool in pools])),
        documents_needed=decision.documents_needed,
        documents_likely=decision.documents_likely,
    )
    return answer, decision


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
