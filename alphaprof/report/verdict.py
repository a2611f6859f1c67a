"""Choose what is `auto` and judge it: from pools of totals to a verdict, for a domain and for the whole traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaprof.costs.speedup import Decoded, Mix, Speedup, StepTimes, Timing, cost_bounds, time_spent
from alphaprof.costs.timing import GO_ROUNDS
from alphaprof.log.manifest import DecisionAsked, DraftFacts, Manifest
from alphaprof.report.decision import SURER, Decision, Mask, by_times_alone, decide, held_out
from alphaprof.rules import default_rule, parse_rule
from alphaprof.stats.sequential import Bounds, Sequential, decide_sequentially
from alphaprof.totals.count import has_rounds
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import Flavour

SLOW_BASELINE = 0.97  # v below it says more about the baseline than about the draft
Pair = tuple[str, int]  # a draft and a gamma
Pools = Mapping[str, Mapping[str, DocumentTotals]]  # by draft, then domain
Array = np.ndarray[Any, Any]


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
    """The order of a run's documents, where they came in a random one. Rounds of `hf` emit the first token too."""
    settings = manifest.sequential
    if settings is None:
        return None
    reach = {domain: most + (flavour == "hf") for domain, most in settings["reach"].items()}
    return Order(settings["choosing"], settings["available"], manifest.documents, reach)


@dataclass(frozen=True, kw_only=True)
class Question(DecisionAsked):
    """The profile's decision, and what else the verdict depends on. `measured_dtype`: the target's, of a run that was
    profiled; None: an engine's own.
    """

    measured_dtype: str | None = None
    order: Order | None = None
    route_by: str = "domain"

    @property
    def stand_in(self) -> str:
        """Why rounds of the target that was measured decide nothing about the one that is served; empty where they do."""
        if self.served_dtype is None or self.measured_dtype in (None, self.served_dtype):
            return ""
        return f"the target in {self.measured_dtype} stands in for the one that is served in {self.served_dtype}"

    def rule_for(self, policy: str) -> str:
        """The id of the rule that the verdict concerns on text of a policy."""
        return default_rule(policy) if self.rule == "auto" else self.rule

    def gammas(self, known: Sequence[int]) -> list[int]:
        """The lengths that the verdict may choose from."""
        return list(known) if self.gamma == "auto" else [int(self.gamma)]


def without_times(rules: Sequence[str], missing: str | None = None) -> str:
    """Why tokens per round of rules cannot be turned into speedup; `missing`: what step times lack."""
    if untimed := [rule for rule in rules if not parse_rule(rule).rule.timed]:
        return f"verification under {', '.join(untimed)} was not timed, so tokens per round cannot be turned into speedup"
    return f"{missing or 'no step times were measured'}, so acceptance cannot be turned into speedup"


def not_defined(rule: str, policy: str, draft: DraftFacts) -> str:
    """Why a rule has no rounds on text of a policy."""
    bound = parse_rule(rule)
    if bound.rule.lossy:
        return f"{rule} is lossy: its rounds depart from the text that was measured, and need alphaprof validate --rule"
    if policy in bound.rule.policies and not has_rounds(bound, draft):
        if bound.rule.logged:
            return f"rounds of {rule} are not known of a head: its log holds what one draft at each depth does"
        return f"rounds of {rule} need a head's ranks at every depth: profile with ranks_by_depth: true of the draft"
    if not policy:
        return f"rounds of {rule} are not defined on text that the target did not produce"
    return f"rounds of {rule} are not defined on the target's {policy} text: its own decoding would emit another one"


def no_decision(reason: str) -> Decision:
    """Returns UNDECIDED, for a reason that more documents would not mend."""
    return Decision("UNDECIDED", reason, None, 0.0, math.inf, None)


def pooled_speedup(
    candidates: Pools, option: Pair, times: Mapping[str, StepTimes], mix: Mix, rows: Mapping[str, Mask] | None = None
) -> Speedup | None:
    """Speedup of one draft and gamma on some documents of each domain (default: on all)."""
    return mix.routed(_decoded(candidates, option, times, mix, rows))


def _decoded(
    candidates: Pools, option: Pair, times: Mapping[str, StepTimes], mix: Mix, rows: Mapping[str, Mask] | None
) -> list[Decoded]:
    draft, gamma = option
    counts = [candidates[draft][domain].counts(gamma) for domain in mix.domains]
    if rows is not None:
        counts = [each.rows(rows[domain]) for domain, each in zip(mix.domains, counts, strict=True)]
    return [(each, times[draft]) for each in counts]


def judge(
    candidates: Pools, timing: Timing, mix: Mix, question: Question, gammas: Sequence[int]
) -> tuple[Pair | None, Decision]:
    """The chosen draft and gamma, and the verdict on them: by intervals of a fixed number of documents, or by bets where
    they came in random order. What is `auto` is chosen by some documents and tested on the others, so that the winner is
    not judged by the luck that made it win.
    """
    options = [(draft, gamma) for draft in candidates for gamma in question.gammas(gammas)]
    only = options[0] if len(options) == 1 else None
    if lacking := timing.lacks(candidates):
        return only, no_decision(without_times([], lacking))
    if question.order is not None and question.weights is not None:
        return only, no_decision(
            "documents came in the mixture of domains that the data has, and weights ask for another one"
        )
    order, best, testing = question.order, only, None
    parts = None if only else halves({domain: next(iter(candidates.values()))[domain] for domain in mix.domains}, order)
    if parts is not None:
        best, testing = _fastest(candidates, timing.choosing, mix, options, parts[0]), parts[1]
    times = timing.times if only else timing.testing
    if order is None:
        speedup = pooled_speedup(candidates, best, times, mix, testing) if best else None
        decision = decide(speedup, question.min_speedup, question.confidence, held_out=only is None)
    elif best is not None:
        decision = _decided(candidates, best, times[best[0]], mix, question, order, 0 if only else order.choosing)
    elif order.choosing:
        decision = no_decision(
            f"the first {order.choosing} documents choose draft and gamma, and the choice is not known yet"
        )
    else:
        decision = no_decision("this run fixed draft and gamma before its first document, so none of them can choose")
    if best is not None and decision.verdict == "GO" and 0 < (rounds := timing.times[best[0]].rounds) < GO_ROUNDS:
        needed = f"GO needs step times of at least {GO_ROUNDS} rounds, and there are {rounds}: {SURER}"
        decision = replace(decision, verdict="UNDECIDED", reason=needed)
    # A verdict says first whose step times it rests on: they may be those of another engine than the one that will serve.
    reason = f"{timing.basis}, {decision.reason}"
    if question.stand_in:
        decision = replace(decision, verdict="UNDECIDED", documents_needed=None, documents_likely=None)
        reason = f"{question.stand_in}; {reason}"
    if best is not None and decision.verdict == "GO" and (v := timing.times[best[0]].v(best[1])) < SLOW_BASELINE:
        reason += f"; but decoding is slow here (v = {v:.2f} < 1), which flatters every draft"
    return best, replace(decision, reason=reason)


def halves(pools: Mapping[str, DocumentTotals], order: Order | None) -> tuple[Mapping[str, Mask], Mapping[str, Mask]] | None:
    """The documents of each domain that choose what is auto, and those that test it; [documents] each. None where documents
    come in random order and those that choose are not all there, or none choose.
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
    """The option that makes some documents of each domain fastest, all together; None where no speedup is known."""
    values = {option: mix.value(_decoded(candidates, option, times, mix, rows)) for option in options}
    known = {option: value for option, value in values.items() if value is not None}
    return max(known, key=lambda option: known[option], default=None)


def _decided(
    candidates: Pools, pair: Pair, times: StepTimes, mix: Mix, question: Question, order: Order, after: int
) -> Decision:
    """The verdict on one draft and gamma by bets over the documents after the first `after`, in the order they came in.

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
    level = f"{100 * question.confidence:g} %"
    if sequential.verdict != "UNDECIDED" and sequential.documents == 0:
        return by_times_alone(sequential.verdict, question.min_speedup)
    if value is None:
        return f"no document after the first {after}, which choose, has been tested yet"
    count = "1 document" if value.documents == 1 else f"{value.documents} documents"
    on = f"speedup {value.value:.2f}x on {count} in random order"
    if sequential.verdict == "UNDECIDED" and sequential.low == 0 and math.isinf(sequential.high):
        return f"{on}: too little to rule anything out at any time"
    if sequential.verdict == "UNDECIDED":
        bounds = f"{level} bounds that hold at any time, {sequential.low:.3f} and {sequential.high:.3f}"
        return f"{on}, {bounds}, enclose {question.min_speedup:g}: more documents would narrow them"
    side, bound = ("lower", sequential.low) if sequential.verdict == "GO" else ("upper", sequential.high)
    reached = "reached" if sequential.verdict == "GO" else "fell below"
    threshold = f"{question.min_speedup:g} after {sequential.documents} of them"
    return f"{on}; its {level} {side} bound, {bound:.3f}, which holds at any time, {reached} {threshold}"


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
