"""One domain, draft and rule: totals and step times in, a `Result` out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import UNTIMED, StepTimes, free_draft, round_costs
from alphaprof.costs.speedup import Domain, Mix, Speedup, speedup
from alphaprof.report import speeds
from alphaprof.report.answer import GammaResult, Result
from alphaprof.report.verdict import Decision, Pair, Question, judge, no_decision, not_defined, without_times
from alphaprof.rules import GREEDY, SAMPLED, BoundRule
from alphaprof.run.manifest import DraftFacts
from alphaprof.stats.estimate import Array, Interval, autocorrelation, by_cluster, distinct, pooled_share, ratio
from alphaprof.stats.student import quantile
from alphaprof.totals.count import by_chance
from alphaprof.totals.pool import DocumentTotals

SELF_CHECK_CONFIDENCE = 0.999  # many domains, drafts and rules are checked at once
SELF_CHECK_FLOOR = 0.005  # rounding between the pass that sampled and the one that scored may make as much
UNBELIEVABLE = 0.1  # share of tokens that contradict a text's policy beyond what rounding does


@dataclass(frozen=True)
class ResultKey:
    """What a result is about. `facts`: of its draft; `costs`: all step times; None: there are none, or as `untold` says they
    tell no speedup.
    """

    domain: str
    draft: str
    rule: BoundRule
    facts: DraftFacts
    costs: CostModel | None
    untold: str = ""


def build_result(
    key: ResultKey,
    pool: DocumentTotals,
    question: Question,
    gammas: Sequence[int],
    judged: tuple[Pair | None, Decision] | None = None,
) -> Result:
    """Everything about one domain, draft and rule; `judged`: what was chosen and decided, if it is known."""
    rule = key.rule
    positions = int(pool["positions"].sum())
    coverage = float(pool["proposals"].sum()) / positions if pool.observed else None
    alpha = pooled_share(pool.cluster, pool["accepted"], pool["proposals"], question.confidence) if pool.observed else None
    by_gamma: tuple[GammaResult, ...] = ()
    best, decision = None, no_decision(not_defined(rule.id, pool.policy, key.facts))
    if pool.defined:
        # The textbook formula is of acceptance that is the same at every depth: not of a head's.
        iid_alpha = alpha.value if alpha and coverage == 1 and not key.facts.by_depth else None
        by_gamma, best, decision = _round_results(key, pool, iid_alpha, question, gammas, judged)
    greedy, sampled = (pool.scored and pool.policy == policy for policy in (GREEDY, SAMPLED))
    decisive = question.rule_for(pool.policy)
    decides = decisive == rule.id
    pairs = (pool["pairs"], pool["pairs_first"], pool["pairs_second"], pool["pairs_both"])
    at_best = next((item for item in by_gamma if item.gamma == best), None)
    return Result(
        domain=key.domain,
        verdict=decision.verdict if decides else None,
        reason=decision.reason if decides or not pool.defined else f"the verdict concerns {decisive} only",
        remedy=decision.remedy if decides else "",
        draft=key.draft,
        rule=rule.id,
        gamma=best,
        speedup=decision.bounds,
        tokens_per_round=at_best.tokens_per_round if at_best else None,
        acceptance=alpha,
        documents=len(pool.cluster),
        units=distinct(pool.cluster),
        held_out=decision.speedup.documents if decision.speedup else 0,
        documents_needed=decision.documents_needed if decides else None,
        lossy=rule.rule.lossy,
        estimator=("expected" if by_chance(rule, key.facts) else "exact") if pool.defined else "one-step",
        continuation=pool.continuation,
        sampling=pool.sampling,
        on_policy=pool.policy in rule.rule.policies,
        positions=positions,
        alpha=alpha,
        coverage=coverage,
        mismatches=float(pool["mismatches"].sum()) / positions if greedy else None,
        clear_mismatches=float(pool["clear_mismatches"].sum()) / positions if greedy else None,
        near_ties=float(pool["near_ties"].sum()) / positions if pool.scored and pool.sampling is None else None,
        impossible=float(pool["impossible"].sum()) / positions if sampled else None,
        self_check=self_check(pool) if sampled and pool.defined else None,
        # Unknown for lossy rules, whose next position is another.
        burstiness=None if np.isnan(pairs[1]).any() else autocorrelation(pool.cluster, pairs, question.confidence),
        gammas=by_gamma,
        chosen=question.chooses([(key.draft, gamma) for gamma in key.facts.lengths(question.gammas(gammas))]),
    )


def _round_results(
    key: ResultKey,
    pool: DocumentTotals,
    alpha: float | None,
    question: Question,
    gammas: Sequence[int],
    judged: tuple[Pair | None, Decision] | None,
) -> tuple[tuple[GammaResult, ...], int | None, Decision]:
    """Return the rounds of a pool that has any: by gamma, the gamma that was chosen, and the decision on it. `alpha`: where
    the textbook formula applies.
    """
    draft, mix = key.draft, Mix.of({key.domain: 1.0})
    candidates = {draft: {key.domain: pool}}
    costs = key.costs.of_domain(key.domain) if key.costs and key.rule.rule.timed else None
    untimed = dataclasses.replace(UNTIMED, missing={draft: key.untold}) if key.untold else UNTIMED
    timing = costs.timing(question.concurrency) if costs else untimed
    times = timing.times.get(draft)
    best, decision = judged or judge(candidates, timing, mix, question, gammas)
    by_gamma = []
    for gamma in key.facts.lengths(gammas):
        domain: Domain | None = mix.decoded([pool.counts(gamma)], times)[0] if times is not None else None
        faster = mix.routed([domain]) if domain else None
        shown = speeds.deciding_interval(faster, question.confidence)
        if best is not None and decision.tested is not None and decision.tested.domains:
            shown = decision.bounds if gamma == best[1] else decision.tested.beside(faster, question.confidence)
        request = speeds.of_requests(shown, [pool], None, costs, draft, question.concurrency) if shown and costs else None
        by_gamma.append(_gamma(pool, gamma, times, (faster, shown), request, alpha, question.confidence))
    if not key.rule.rule.timed:  # a tree drafts more tokens than its depth
        by_gamma = [dataclasses.replace(item, accepted_per_drafted=None) for item in by_gamma]
    if times is None:
        decision = no_decision(without_times([key.rule.id], timing.lacks([draft])))
    if doubt := contradiction(pool):
        decision = no_decision(doubt)
    return tuple(by_gamma), best[1] if best else None, decision


def contradiction(pool: DocumentTotals) -> str:
    """Return why a text cannot be what it is said to be; empty if nothing contradicts it, or nothing could."""
    if not pool.scored:
        return ""
    positions = pool["positions"].sum()
    if pool.policy == SAMPLED:
        check = self_check(pool)
        off = check is not None and (check.low > SELF_CHECK_FLOOR or check.high < -SELF_CHECK_FLOOR)
        if off or pool["impossible"].sum() > UNBELIEVABLE * positions:
            return "the text was not sampled from these distributions (see the notes): its rounds describe other traffic"
    elif pool["clear_mismatches"].sum() > UNBELIEVABLE * positions:
        return "the text is not the target's greedy text (see the notes): its rounds describe other traffic"
    return ""


def self_check(pool: DocumentTotals) -> Interval | None:
    """Return mean of a_t less mean of beta_t: on text that the rule's own decoding would emit it is 0 on average."""
    difference, counts = by_cluster(pool.cluster, pool["emitted"] - pool["accepted"], pool["proposals"])
    if counts.sum() <= 0:
        return None
    mean = ratio(difference, counts)
    half = quantile((1 + SELF_CHECK_CONFIDENCE) / 2, mean.freedom) * mean.stderr
    return Interval(mean.value, mean.value - half, mean.value + half)


def _gamma(
    pool: DocumentTotals,
    gamma: int,
    times: StepTimes | None,
    speedups: tuple[Speedup | None, Interval | None],
    request: Interval | None,
    alpha: float | None,
    confidence: float,
) -> GammaResult:
    """`speedups`: of this gamma on all documents, and the one that is shown, which may be cross-fitted."""
    faster, shown = speedups
    counts = pool.counts(gamma)
    times = times if times is not None and times.covers(gamma) else None
    free = speedup([counts], [1.0], free_draft(gamma))
    rounds, drafted, tested, accepted = counted(pool, gamma, free)
    mixed = times.mixed([counts]) if times is not None else None
    iid = sum(alpha**depth for depth in range(gamma + 1)) if alpha is not None else None
    return GammaResult(
        gamma=gamma,
        rounds=rounds,
        tokens_per_round=speeds.tokens_interval(free, gamma, confidence),
        acceptance_length=float(1 + accepted.sum() / drafted[0]) if drafted[0] > 0 else None,
        accepted_per_drafted=float(accepted.sum() / drafted.sum()) if drafted.sum() > 0 else None,
        iid_tokens_per_round=iid,
        iid_error=iid / free.value - 1 if iid is not None and free else None,
        break_even_length=free.value / faster.value if free and faster else None,
        full_round_cost=float(round_costs(times, gamma)[gamma]) if times else None,
        draft_cost=times.c() if times else None,
        verify_cost=times.v(gamma) if times else None,
        speedup=shown,
        request_speedup=request,
        of_documents=speeds.of_documents(counts, mixed) if mixed else None,
        reached=tuple(float(count) if count >= 0 else None for count in tested),
        marginal=tuple(float(count / drafted[0]) if drafted[0] > 0 else None for count in accepted),
        conditional=tuple(float(a / t) if t > 0 else None for a, t in zip(accepted, tested, strict=True)),
    )


def counted(pool: DocumentTotals, gamma: int, free: Speedup | None) -> tuple[float, Array, Array, Array]:
    """Rounds, and by depth rounds that drafted, were tested and accepted, over all documents; NaN if that is not known.

    If rounds are expectations, the control variate that mends tokens per round mends all of them: tokens stay what
    rounds and accepted drafts add up to.
    """
    counts = pool.counts(gamma)
    rounds, tokens = float(counts.rounds.sum()), float(counts.tokens.sum())
    depths = [pool[f"{name}_depths_{gamma}"].sum(0) for name in ("drafted", "tested", "accepted")]
    if free is None or not counts.control.any():
        return rounds, depths[0], depths[1], depths[2]
    factor = tokens / free.value / rounds
    kept = (tokens - factor * rounds) / (tokens - rounds) if tokens > rounds else 1.0
    drafted, tested, accepted = depths[0] * factor, depths[1] * kept, np.minimum(depths[2] * kept, depths[0] * factor)
    tested[0] = depths[1][0] * factor  # all others were reached by an accepted draft
    return factor * rounds, drafted, tested, np.minimum(accepted, tested)
