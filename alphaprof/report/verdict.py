"""GO, NO-GO or UNDECIDED: a one-sided bound against the least speedup that is worth it.

From pools of totals to a verdict, for a domain and for the whole traffic; what is `auto` is chosen first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from alphaprof.costs.speedup import FEWEST, MORE_ROUNDS, Decoded, Mix, Speedup, StepTimes, Timing, cost_bounds, time_spent
from alphaprof.costs.timing import GO_ROUNDS, LEAST_ROUNDS
from alphaprof.log.manifest import DecisionAsked, DraftFacts, Manifest
from alphaprof.rules import default_rule, parse_rule
from alphaprof.stats.estimate import Interval, probability
from alphaprof.stats.sequential import Bounds, Sequential, decide_sequentially
from alphaprof.totals.count import has_rounds
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import Flavour

AUTO = "auto"
SLOW_BASELINE = 0.97  # v below it says more about the baseline than about the draft
Pair = tuple[str, int]  # a draft and a gamma
Pools = Mapping[str, Mapping[str, DocumentTotals]]  # by draft, then domain
Array = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
VerdictName = Literal["GO", "NO-GO", "UNDECIDED"]
MANY = 1_000_000
EVEN, LIKELY = 0.5, 0.8  # chances that a number of documents settles a verdict


@dataclass(frozen=True)
class Order:
    """A run that came in random order, to stop as soon as it is decided. The first `choosing` documents choose what is auto,
    and the others are tested; `available`: documents there were; `seen`: those that the run holds; `reach`: the most tokens
    that rounds can emit in a document, by domain.
    """

    choosing: int
    available: int
    seen: int
    reach: Mapping[str, int]


def order_of(manifest: Manifest, flavour: Flavour) -> Order | None:
    """Return the order of a run's documents, if they came in a random one. Rounds of `hf` emit the first token too."""
    settings = manifest.sequential
    if settings is None:
        return None
    reach = {domain: most + (flavour == "hf") for domain, most in settings["reach"].items()}
    return Order(settings["choosing"], settings["available"], manifest.documents, reach)


@dataclass(frozen=True, kw_only=True)
class Question(DecisionAsked):
    """The profile's decision, and what else the verdict depends on. `measured_dtype`: the target's, of a run that was
    profiled; None: an engine's own. `chose_p_min`: half of the documents chose p_min, so that the other half tests.
    """

    measured_dtype: str | None = None
    order: Order | None = None
    route_by: str = "domain"
    chose_p_min: bool = False

    @property
    def stand_in(self) -> str:
        """Why rounds of the target that was measured decide nothing about the one that is served; empty if they do."""
        if self.served_dtype is None or self.measured_dtype in (None, self.served_dtype):
            return ""
        return f"the target in {self.measured_dtype} stands in for the one served in {self.served_dtype}"

    def rule_for(self, policy: str) -> str:
        """Return the id of the rule that the verdict concerns on text of a policy."""
        return default_rule(policy) if self.rule == "auto" else self.rule

    def chooses(self, options: Sequence[Pair]) -> bool:
        """Return whether one half of the documents chooses draft, γ or p_min, and the other half tests the choice."""
        return self.chose_p_min or len(options) > 1

    def options(self, candidates: Pools, known: Sequence[int]) -> list[Pair]:
        """Return each draft with each γ that the verdict may choose and the draft has rounds of."""
        gammas = self.gammas(known)
        each = ((draft, gamma) for draft in candidates for gamma in gammas)
        return [(draft, gamma) for draft, gamma in each if all(pool.has(gamma) for pool in candidates[draft].values())]

    def gammas(self, known: Sequence[int]) -> list[int]:
        """Return the lengths that the verdict may choose from."""
        return list(known) if self.gamma == "auto" else [int(self.gamma)]


def without_times(rules: Sequence[str], missing: str | None = None) -> str:
    """Return why tokens per round of rules cannot be turned into speedup; `missing`: what step times lack."""
    if untimed := [rule for rule in rules if not parse_rule(rule).rule.timed]:
        return f"verification under {', '.join(untimed)} was not timed, so tokens per round cannot be turned into speedup"
    return f"{missing or 'no step times were measured'}, so acceptance cannot be turned into speedup"


def not_defined(rule: str, policy: str, draft: DraftFacts) -> str:
    """Return why a rule has no rounds on text of a policy."""
    bound = parse_rule(rule)
    if bound.rule.lossy:
        return f"{rule} is lossy: its rounds leave the measured text; use alphaprof validate --rule"
    if policy in bound.rule.policies and not has_rounds(bound, draft):
        if bound.rule.logged:
            return f"rounds of {rule} are not known for a head: its log has only one draft per depth"
        return f"rounds of {rule} need a head's ranks at every depth: profile with ranks_by_depth: true for the draft"
    if not policy:
        return f"rounds of {rule} are not defined on text that the target did not produce"
    return f"rounds of {rule} are not defined on the target's {policy} text: the rule would emit other text"


def no_decision(reason: str) -> Decision:
    """Return UNDECIDED, for a reason that more documents would not mend."""
    return Decision("UNDECIDED", reason, None, 0.0, math.inf, None)


def pooled_speedup(
    candidates: Pools, option: Pair, times: Mapping[str, StepTimes], mix: Mix, rows: Mapping[str, Mask] | None = None
) -> Speedup | None:
    """Return speedup of one draft and gamma on some documents of each domain (default: on all)."""
    return mix.routed(decoded(candidates, option, times, mix, rows))


def decoded(
    candidates: Pools, option: Pair, times: Mapping[str, StepTimes], mix: Mix, rows: Mapping[str, Mask] | None
) -> list[Decoded]:
    """Return how each domain is decoded with one draft and gamma, on some of its documents (None: on all)."""
    draft, gamma = option
    counts = [candidates[draft][domain].counts(gamma) for domain in mix.domains]
    if rows is not None:
        counts = [each.rows(rows[domain]) for domain, each in zip(mix.domains, counts, strict=True)]
    return [(each, times[draft]) for each in counts]


def judge(
    candidates: Pools, timing: Timing, mix: Mix, question: Question, gammas: Sequence[int]
) -> tuple[Pair | None, Decision]:
    """Return the chosen draft and gamma, and the verdict on them. `result.py` calls it for one domain, `traffic.py` for all.

    Tests with bounds for a fixed number of documents, or by betting (`stats/sequential.py`) if documents came in random
    order. What is `auto` is chosen by some documents and tested on the others, so that the winner is not judged by the luck
    that made it win.
    """
    options = question.options(candidates, gammas)
    if not options:
        return None, no_decision(f"no draft has rounds of {question.gamma} speculative tokens")
    only = None if question.chooses(options) else options[0]
    if lacking := timing.lacks(candidates):
        return only, no_decision(without_times([], lacking))
    if question.order is not None and question.weights is not None:
        return only, no_decision("documents came in the data's mixture of domains, which differs from the weights")
    if question.order is not None and question.p_min:
        return only, no_decision("a run in random order cannot decide with p_min: the log only bounds what a round drafts")
    order, best, testing = question.order, only, None
    parts = None if only else halves({domain: next(iter(candidates.values()))[domain] for domain in mix.domains}, order)
    if parts is not None:
        best, testing = _fastest(candidates, timing.choosing, mix, options, parts[0]), parts[1]
    times = timing.times if only else timing.testing
    if order is None:
        speedup = pooled_speedup(candidates, best, times, mix, testing) if best else None
        decision = decide(speedup, question.min_speedup, question.confidence, only is None, timing.surer)
    elif best is not None:
        decision = _decide_in_random_order(
            candidates, best, times[best[0]], mix, question, order, 0 if only else order.choosing
        )
    elif order.choosing:
        decision = no_decision(
            f"the first {order.choosing} documents choose draft and gamma, and the choice is not made yet"
        )
    else:
        decision = no_decision("this run fixed draft and gamma before its first document, so no document can choose")
    if best is not None and decision.verdict == "GO" and 0 < (rounds := timing.times[best[0]].rounds) < GO_ROUNDS:
        needed = f"GO needs step times of at least {GO_ROUNDS} rounds, but there are {rounds}"
        decision = replace(decision, verdict="UNDECIDED", reason=needed, remedy=timing.surer)
    # A verdict says first whose step times it rests on: they may be those of another engine than the one that will serve.
    few = decision.verdict == "UNDECIDED" and (decision.speedup is None or not decision.speedup.tells)
    remedy = f"{decision.remedy}; " if decision.remedy and not question.stand_in else ""  # first: a screen cuts what is long
    reason = remedy + (decision.reason if few else f"{timing.basis}: {decision.reason}")
    if question.stand_in:
        decision = replace(decision, verdict="UNDECIDED", documents_needed=None, documents_likely=None)
        reason = f"{question.stand_in}; {reason}"
    if best is not None and decision.verdict == "GO" and (v := timing.times[best[0]].v(best[1])) < SLOW_BASELINE:
        reason += f"; but decoding is slow here (v = {v:.2f} < 1), which favors every draft"
    return best, replace(decision, reason=reason)


def halves(pools: Mapping[str, DocumentTotals], order: Order | None) -> tuple[Mapping[str, Mask], Mapping[str, Mask]] | None:
    """Return the documents of each domain that choose what is auto, and those that test it; [documents] each. None if
    documents come in random order and those that choose are not all there, or none choose.
    """
    if order is None:
        testing = held_out({domain: pool.units.lots for domain, pool in pools.items()})
        return {domain: ~mask for domain, mask in testing.items()}, testing
    if not order.choosing or order.seen < order.choosing:
        return None
    choosing = {domain: pool["document"] < order.choosing for domain, pool in pools.items()}
    chose = np.concatenate([pool.cluster[choosing[domain]] for domain, pool in pools.items()])  # whole clusters, as above
    return choosing, {domain: ~np.isin(pool.cluster, chose) for domain, pool in pools.items()}


def _fastest(
    candidates: Pools, times: Mapping[str, StepTimes], mix: Mix, options: Sequence[Pair], rows: Mapping[str, Mask]
) -> Pair | None:
    """Return the option that makes some documents of each domain fastest, all together; None if no speedup is known."""
    values = {option: mix.value(decoded(candidates, option, times, mix, rows)) for option in options}
    known = {option: value for option, value in values.items() if value is not None}
    return max(known, key=lambda option: known[option], default=None)


def _decide_in_random_order(
    candidates: Pools, pair: Pair, times: StepTimes, mix: Mix, question: Question, order: Order, after: int
) -> Decision:
    """Return the verdict on one draft and gamma by bets over the documents after the first `after`, in the order they came
    in.

    Equal prompts are one observation: the first of them counts.
    """
    draft, gamma = pair
    times, pools = times.clipped, [candidates[draft][domain] for domain in mix.domains]
    number = np.concatenate([pool["document"] for pool in pools])
    unit = np.concatenate([pool.cluster for pool in pools])
    counts = [pool.counts(gamma) for pool in pools]
    base = np.concatenate([each.tokens for each in counts])
    spent = np.concatenate([time_spent(each, times) for each in counts])
    in_order = np.argsort(number, kind="stable")
    first = in_order[np.sort(np.unique(unit[in_order], return_index=True)[1])]
    tested = first[number[first] >= after]
    reach = float(max(order.reach[domain] for domain in mix.domains))
    whole = pooled_speedup(candidates, pair, {draft: times}, mix)
    sequential = decide_sequentially(
        base[tested],
        spent[tested],
        1.0,
        Bounds(*cost_bounds(times, gamma), reach),
        question.min_speedup,
        question.confidence,
        timing_error=whole.timing_error if whole is not None else 0.0,
        timing_freedom=whole.timing_freedom if whole is not None else math.inf,
        waited=whole.waited if whole is not None else 0.0,
    )
    rows = {domain: pool["document"] >= after for domain, pool in zip(mix.domains, pools, strict=True)}
    value = pooled_speedup(candidates, pair, {draft: times}, mix, rows)
    if value is not None:
        value = replace(value, value=float(base[tested].sum() / spent[tested].sum()), documents=len(tested))
    reason = _reason(sequential, value, question, after)
    return Decision(sequential.verdict, reason, value, sequential.low, sequential.high, None)


def _reason(sequential: Sequential, value: Speedup | None, question: Question, after: int) -> str:
    level = f"{100 * question.confidence:g}%"
    if sequential.verdict != "UNDECIDED" and sequential.documents == 0:
        return by_times_alone(sequential.verdict, question.min_speedup)
    if value is None:
        return f"no document tested yet: the first {after} only choose draft and gamma"
    count = "1 document" if value.documents == 1 else f"{value.documents} documents"
    on = f"speedup {value.value:.2f}x on {count} in random order"
    if sequential.verdict == "UNDECIDED" and sequential.low == 0 and math.isinf(sequential.high):
        return f"{on}: too few to rule anything out"
    if sequential.verdict == "UNDECIDED":
        bounds = f"{level} anytime-valid bounds {sequential.low:.3f} and {sequential.high:.3f}"
        return f"{on}; {bounds} enclose {question.min_speedup:g}: more documents would narrow them"
    side, bound = ("lower", sequential.low) if sequential.verdict == "GO" else ("upper", sequential.high)
    reached = "reached" if sequential.verdict == "GO" else "fell below"
    threshold = f"{question.min_speedup:g} after {sequential.documents} of them"
    return f"{on}; its {level} anytime-valid {side} bound, {bound:.3f}, {reached} {threshold}"


@dataclass(frozen=True)
class Evidence:
    """What the verdict on the traffic rests on, all under the rules that it concerns (`rules`: their ids).

    `candidates`: the pools that have rounds, by draft, then domain; `undefined`: why some text of a domain has none;
    `observed`: the share of tokens of each domain in the run; `strata` [units]: see `Documents.strata`.
    """

    rules: Sequence[str]
    candidates: Pools
    undefined: Mapping[str, str]
    observed: Mapping[str, float]
    strata: Array


@dataclass(frozen=True)
class Decision:
    """A verdict with the speedup and one-sided bounds that it rests on.

    `documents_needed`, `documents_likely`: of how many independent documents a new run would settle it with a chance of 50
    and of 80%; None if it is settled, or no number has that chance. `remedy`: what would settle it, in words; empty if it is
    settled, or the reason says so.
    """

    verdict: VerdictName
    reason: str
    speedup: Speedup | None
    low: float
    high: float
    documents_needed: int | None
    documents_likely: int | None = None
    remedy: str = ""

    @property
    def tested(self) -> Interval | None:
        """The speedup with the one-sided bounds that decide."""
        return Interval(self.speedup.value, self.low, self.high) if self.speedup else None


def decide(
    speedup: Speedup | None, min_speedup: float, confidence: float, held_out: bool, surer: str = MORE_ROUNDS
) -> Decision:
    """GO when the lower bound at `confidence` is at or above `min_speedup`, NO-GO when the upper bound is below it.

    If there are too few documents to speak for others, the bounds are those that step times allow, whatever is accepted.
    `held_out`: the speedup rests on half of the documents, because the other half chose draft or gamma. `surer`: see
    `Timing`.
    """
    if speedup is None:
        return Decision("UNDECIDED", _too_few(speedup, held_out), speedup, 0.0, math.inf, None)
    if math.isinf(speedup.timing_error):
        tests = "half of the timing rounds chose draft or gamma, and " if held_out else ""
        reason = f"{tests}step times of fewer than {LEAST_ROUNDS} rounds have no bounds"
        return Decision("UNDECIDED", reason, speedup, 0.0, math.inf, None, remedy=surer)
    low, high = speedup.deciding(1 - confidence)
    verdict: VerdictName = "GO" if low >= min_speedup else "NO-GO" if high < min_speedup else "UNDECIDED"
    needed, likely = (
        documents_needed(speedup, min_speedup, confidence, wanted) if verdict == "UNDECIDED" else None
        for wanted in (EVEN, LIKELY)
    )
    needed, likely = needed and needed * (1 + held_out), likely and likely * (1 + held_out)
    on = f"speedup {speedup.value:.2f}x on {speedup.documents} independent {'held-out ' if held_out else ''}documents"
    level = f"{100 * confidence:g}%"
    lower, upper, remedy = beside(low, min_speedup), beside(high, min_speedup), ""
    if not speedup.tells:
        reason = _too_few(speedup, held_out) if verdict == "UNDECIDED" else by_times_alone(verdict, min_speedup)
    elif verdict == "GO":
        reason = f"{on}, and its {level} lower bound {lower} reaches {min_speedup:g}"
    elif verdict == "NO-GO":
        reason = f"{on}, and its {level} upper bound {upper} is below {min_speedup:g}"
    else:
        reason = f"{on}, {level} bounds {lower} and {upper} enclose {min_speedup:g}"
        remedy = _remedy(needed, likely, speedup, surer)
    return Decision(verdict, reason, speedup, low, high, needed, likely, remedy)


def by_times_alone(verdict: VerdictName, min_speedup: float) -> str:
    """Return why a verdict needs no document."""
    side = "above" if verdict == "GO" else "below"
    return f"at any acceptance, these step times keep the speedup {side} {min_speedup:g}"


def _too_few(speedup: Speedup | None, held_out: bool) -> str:
    """Return why these documents decide nothing, and what to do."""
    documents = speedup.documents if speedup is not None else 0
    which, advice = "", f"profile {FEWEST} or more"
    if held_out:
        which, advice = "held-out ", f"profile {2 * FEWEST} or more, or fix decision.draft and decision.gamma"
    if documents >= FEWEST:
        return f"weights need at least two independent {which}documents longer than one token in every domain: {advice}"
    have = f"1 independent {which}document" if documents == 1 else f"{documents} independent {which}documents"
    return f"only {have} longer than one token, {FEWEST} needed: {advice}"


def beside(bound: float, threshold: float, digits: int = 3) -> str:
    """Return a bound with `digits` decimals, or as many as it takes to stand on its side of the threshold: 1.0996 is not
    1.100.
    """
    texts = (f"{bound:.{more}f}" for more in range(digits, 17))
    return next((text for text in texts if (float(text) < threshold) == (bound < threshold)), repr(bound))


def _remedy(needed: int | None, likely: int | None, speedup: Speedup, surer: str) -> str:
    if needed is not None:
        sure = f"{likely} with 80%" if likely is not None else "no size gives 80%"
        return f"a new run of {needed} independent documents would settle it with a 50% chance, {sure}"
    timing = max(speedup.timing_error, speedup.waited)
    if 0 < timing < speedup.sampling_error:
        return f"profile more documents, and {surer}"
    if timing > 0:
        return f"{surer} (more documents alone would not settle it)"
    return "choose another min_speedup: this one is too close for more documents to settle it"


def documents_needed(speedup: Speedup, min_speedup: float, confidence: float, wanted: float) -> int | None:
    """Return the smallest number of documents like these whose bound clears the threshold with a chance of `wanted`; None if
    no number up to a million has it.
    """

    def settles(documents: int) -> bool:
        return chance_of_settling(speedup, documents, min_speedup, confidence) >= wanted

    if not settles(MANY):
        return None
    least = max(speedup.documents, FEWEST)
    return least + bisect_left(range(least, MANY), True, key=settles)


def chance_of_settling(speedup: Speedup, documents: int, min_speedup: float, confidence: float) -> float:
    """Return the chance that a new run of `documents` documents clears the threshold on either side.

    The truth is not the estimate: on the log scale what the new run finds is around it by t, with the variance of this
    sample, that of the new one, which is 1 / documents of it, and the error of step times twice (a predictive distribution).
    """
    one = speedup.at(documents)
    low, high = one.bounds(1 - confidence)
    lead = math.log(speedup.value / min_speedup)
    below = math.log(speedup.value / low) if low > 0 else math.inf
    above = math.log(high / speedup.value)
    spread = math.hypot(speedup.sampling_error, one.sampling_error, math.sqrt(2) * speedup.timing_error)
    if spread == 0:
        return float(lead >= below or -lead > above)
    freedom = speedup.freedom
    return probability((lead - below) / spread, freedom) + probability((-lead - above) / spread, freedom)


def held_out(lots: Mapping[str, Array]) -> dict[str, Mask]:
    """Return which documents of each domain are held out to test what the others chose; [documents] each.

    `lots` [documents]: a pseudo-random number made from the name of each document's cluster (`totals.documents.lots_of`).
    Clusters in the order of their lots fall alternately on the two halves, domain by domain: every second one is held out,
    whatever order the data had. A cluster is never divided, not even if it lies in several domains.
    """
    if not lots:
        return {}
    domains = sorted(lots)
    drawn, cluster = np.unique(np.concatenate([lots[domain] for domain in domains]), return_inverse=True)
    home = np.repeat(np.arange(len(domains)), [len(lots[domain]) for domain in domains])
    pairs = np.sort(cluster * len(domains) + home)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # `np.unique` hashes numbers, which takes longer than sorting them
    places, homes = pairs // len(domains), pairs % len(domains)
    first, several = homes[np.diff(places, prepend=-1) > 0], np.bincount(places, minlength=len(drawn)) > 1
    sets: dict[int, tuple[int, ...]] = {}
    for place, number in zip(places[several[places]].tolist(), homes[several[places]].tolist(), strict=True):
        sets[place] = (*sets.get(place, ()), number)
    combinations = sorted({(number,) for number in range(len(domains))} | set(sets.values()))
    ranks = {combination: rank for rank, combination in enumerate(combinations)}
    rank = np.array([ranks[number,] for number in range(len(domains))], dtype=np.int64)[first]
    for place, combination in sets.items():
        rank[place] = ranks[combination]
    kept_back = np.zeros(len(drawn), dtype=bool)
    kept_back[np.argsort(rank, kind="stable")[1::2]] = True
    sides = np.split(kept_back[cluster], np.cumsum([len(lots[domain]) for domain in domains])[:-1])
    return dict(zip(domains, sides, strict=True))
