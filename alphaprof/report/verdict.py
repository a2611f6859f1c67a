"""Choose what is `auto` and judge it: from pools of totals to a verdict, for a domain and for the whole traffic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.speedup import UNTIMED, Mix, Speedup, StepTimes, Timing, cost_bounds, free_draft, time_spent
from alphaprof.log.manifest import Manifest
from alphaprof.report.decision import Decision, Mask, by_times_alone, decide, held_out
from alphaprof.report.format import short
from alphaprof.report.model import Traffic
from alphaprof.report.speeds import SpeedupQuestion, by_concurrency, pays_up_to, speedup_interval, tokens_interval
from alphaprof.rules import default_rule, parse_rule, rules_of
from alphaprof.stats.estimate import Interval
from alphaprof.stats.sequential import Bounds, Sequential, decide_sequentially
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
    found = manifest.sequential
    if found is None:
        return None
    reach = {domain: most + (flavour == "hf") for domain, most in found["reach"].items()}
    return Order(found["choosing"], found["available"], manifest.documents, reach)


@dataclass(frozen=True)
class Question:
    """What the verdict is about: the profile's decision, as plain data, so that reports need no validation library.

    `rule` may be auto: what engines do by default, on greedy and on sampled text.
    """

    rule: str
    draft: str
    gamma: int | str
    min_speedup: float
    confidence: float
    weights: dict[str, float] | None
    concurrency: int = 1
    order: Order | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Question:
        """From the manifest's copy of the profile."""
        return cls(**config["decision"])

    def rule_for(self, policy: str) -> str:
        """The id of the rule that the verdict concerns on text of a policy."""
        return default_rule(policy) if self.rule == "auto" else self.rule

    def gammas(self, known: Sequence[int]) -> list[int]:
        """The lengths that the verdict may choose from."""
        return list(known) if self.gamma == "auto" else [int(self.gamma)]


def choose_and_decide(
    candidates: Pools,
    timing: Timing,
    mix: Mix,
    question: Question,
    gammas: Sequence[int],
) -> tuple[Pair | None, Decision]:
    """The chosen draft and gamma, and the verdict on them. What is `auto` is chosen on one half of the documents of every
    domain and tested on the other, so that the winner is not judged by the luck that made it win.
    """
    options = [(draft, gamma) for draft in candidates for gamma in question.gammas(gammas)]
    only = options[0] if len(options) == 1 else None
    times = timing.times
    if lacking := timing.lacks(candidates):
        return only, no_decision(without_times([], lacking))
    if only is not None:
        found = pooled_speedup(candidates, only, times, mix)
        decision = decide(found, question.min_speedup, question.confidence, held_out=False)
        return only, explained(decision, timing.basis, cheapness(times, only))
    testing = held_out({domain: next(iter(candidates.values()))[domain].units.lots for domain in mix.domains})
    choosing = {domain: ~mask for domain, mask in testing.items()}
    chosen = {option: pooled_speedup(candidates, option, times, mix, choosing) for option in options}
    known = {option: found.value for option, found in chosen.items() if found is not None}
    if not known:
        return None, explained(decide(None, question.min_speedup, question.confidence, held_out=True), timing.basis)
    best = max(known, key=lambda option: known[option])
    found = pooled_speedup(candidates, best, times, mix, testing)
    decision = decide(found, question.min_speedup, question.confidence, held_out=True)
    return best, explained(decision, timing.basis, cheapness(times, best))


def cheapness(times: Mapping[str, StepTimes], pair: Pair) -> float:
    """The v of a draft and gamma: below 1 decoding is slow, and every draft looks good."""
    return times[pair[0]].v(pair[1])


def without_times(rules: Sequence[str], missing: str | None = None) -> str:
    """Why tokens per round of rules cannot be turned into speedup; `missing`: what step times lack."""
    if untimed := [rule for rule in rules if not parse_rule(rule).rule.timed]:
        return f"verification under {', '.join(untimed)} was not timed, so tokens per round cannot be turned into speedup"
    return f"{missing or 'no step times were measured'}, so acceptance cannot be turned into speedup"


def not_defined(rule: str, policy: str) -> str:
    """Why a rule has no rounds on text of a policy."""
    if parse_rule(rule).rule.lossy:
        return f"{rule} is lossy: its rounds depart from the text that was measured, and need a rollout"
    if not policy:
        return f"rounds of {rule} are not defined on text that the target did not produce"
    return f"rounds of {rule} are not defined on the target's {policy} text: its own decoding would emit another one"


def no_decision(reason: str) -> Decision:
    """Returns UNDECIDED, for a reason that more documents would not mend."""
    return Decision("UNDECIDED", reason, None, 0.0, math.inf, None)


def explained(decision: Decision, basis: str, v: float = 1.0) -> Decision:
    """A verdict says first whose step times it rests on: they may be those of another engine than the one that will serve.

    And a GO that rests on verification being cheaper than decoding (`v` < 1) says so last.
    """
    reason = f"{basis}, {decision.reason}"
    if decision.verdict == "GO" and v < SLOW_BASELINE:
        reason += f"; but decoding is slow here (v = {v:.2f} < 1), which flatters every draft"
    return dataclasses.replace(decision, reason=reason)


def pooled_speedup(
    candidates: Pools,
    option: Pair,
    times: Mapping[str, StepTimes],
    mix: Mix,
    rows: Mapping[str, Mask] | None = None,
) -> Speedup | None:
    """Speedup of one draft and gamma on some documents of each domain (default: on all)."""
    draft, gamma = option
    counts = [candidates[draft][domain].counts(gamma) for domain in mix.domains]
    if rows is not None:
        counts = [each.rows(rows[domain]) for domain, each in zip(mix.domains, counts, strict=True)]
    return mix.speedup(counts, times[draft])


def judge(
    candidates: Pools, timing: Timing, mix: Mix, question: Question, gammas: Sequence[int]
) -> tuple[Pair | None, Decision]:
    """The chosen draft and gamma, and the verdict on them: by intervals of a fixed number of documents, or by bets where
    they came in random order.
    """
    if question.order is None:
        return choose_and_decide(candidates, timing, mix, question, gammas)
    options = [(draft, gamma) for draft in candidates for gamma in question.gammas(gammas)]
    only = options[0] if len(options) == 1 else None
    if lacking := timing.lacks(candidates):
        return only, no_decision(without_times([], lacking))
    if question.weights is not None:
        return only, no_decision(
            "documents came in the mixture of domains that the data has, and weights ask for another one"
        )
    best = only or _chosen(candidates, timing, mix, question.order, options)
    if best is None:
        first = question.order.choosing
        reason = f"the first {first} documents choose draft and gamma, and the choice is not known yet"
        if first == 0:
            reason = "this run fixed draft and gamma before its first document, so none of them can choose"
        return None, explained(no_decision(reason), timing.basis)
    decision = _decided(candidates, best, timing, mix, question, 0 if only else question.order.choosing)
    return best, explained(decision, timing.basis, cheapness(timing.times, best))


def _chosen(candidates: Pools, timing: Timing, mix: Mix, order: Order, options: Sequence[Pair]) -> Pair | None:
    """The option that makes the first documents fastest, all together; None before all of them are there."""
    if order.seen < order.choosing:
        return None
    pools = next(iter(candidates.values()))
    first = {domain: pools[domain]["document"] < order.choosing for domain in mix.domains}
    speeds = {option: pooled_speedup(candidates, option, timing.times, mix, first) for option in options}
    known = {option: speedup.value for option, speedup in speeds.items() if speedup is not None}
    return max(known, key=lambda option: known[option], default=None)


def _decided(candidates: Pools, pair: Pair, timing: Timing, mix: Mix, question: Question, after: int) -> Decision:
    """The verdict on one draft and gamma by bets over the documents behind the first `after`, in the order they came in.

    Equal prompts are one observation: the first of them counts.
    """
    order, times = question.order, timing.times[pair[0]]
    if order is None:
        raise ValueError("documents in no known order")
    parts = []
    for domain in mix.domains:
        pool = candidates[pair[0]][domain]
        counts = pool.counts(pair[1])
        parts.append(np.column_stack([pool["document"], counts.tokens, time_spent(counts, times)]))
    table, unit = np.concatenate(parts), np.concatenate([candidates[pair[0]][domain].cluster for domain in mix.domains])
    in_order = np.argsort(table[:, 0], kind="stable")
    _, once = np.unique(unit[in_order], return_index=True)
    number, base, spent = table[in_order][np.sort(once)].T
    base, spent = base[number >= after], spent[number >= after]
    reach = float(max(order.reach[domain] for domain in mix.domains))
    best, worst = cost_bounds(times, pair[1])
    bounds = Bounds(best, worst, reach)
    whole = pooled_speedup(candidates, pair, timing.times, mix)
    error, freedom = (whole.timing_error, whole.timing_freedom) if whole is not None else (0.0, math.inf)
    asked = (question.min_speedup, question.confidence)
    found = decide_sequentially(base, spent, 1.0, bounds, *asked, timing_error=error, timing_freedom=freedom)
    rows = {domain: candidates[pair[0]][domain]["document"] >= after for domain in mix.domains}
    value = pooled_speedup(candidates, pair, timing.times, mix, rows)
    if value is not None:
        value = replace(value, value=float(base.sum() / spent.sum()), documents=len(base))
    return Decision(found.verdict, _reason(found, value, question, after), value, found.low, found.high, None)


def _reason(found: Sequential, value: Speedup | None, question: Question, after: int) -> str:
    level = f"{100 * question.confidence:g} %"
    if found.verdict != "UNDECIDED" and found.documents == 0:
        return by_times_alone(found.verdict, question.min_speedup)
    if value is None:
        return f"no document after the first {after}, which choose, has been tested yet"
    count = "1 document" if value.documents == 1 else f"{value.documents} documents"
    on = f"speedup {value.value:.2f}x on {count} in random order"
    if found.verdict == "UNDECIDED" and found.low == 0 and math.isinf(found.high):
        return f"{on}: too little to rule anything out at any time"
    if found.verdict == "UNDECIDED":
        bounds = f"{level} bounds that hold at any time, {found.low:.3f} and {found.high:.3f}"
        return f"{on}, {bounds}, enclose {question.min_speedup:g}: more documents would narrow them"
    side, bound = ("lower", found.low) if found.verdict == "GO" else ("upper", found.high)
    reached = "reached" if found.verdict == "GO" else "fell below"
    threshold = f"{question.min_speedup:g} after {found.documents} of them"
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


def judge_traffic(evidence: Evidence, book: CostModel | None, question: Question, gammas: Sequence[int]) -> Traffic:
    """One draft, one gamma, one verdict for the whole traffic."""
    timing = book.timing(question.concurrency) if book else UNTIMED
    candidates = evidence.candidates
    if question.draft != "auto":
        candidates = {question.draft: candidates[question.draft]}
    weights = question.weights or dict(evidence.observed)
    observed = Mix(tuple(domain for domain, weight in weights.items() if weight > 0), None, evidence.strata)
    mix = Mix.of(weights) if question.weights is not None else observed
    if not all(rule.rule.timed for rule in rules_of(list(evidence.rules))):
        book, timing = None, UNTIMED
    times = timing.times
    best: Pair | None = None
    if reason := why_undecidable(weights, evidence, next(iter(candidates.values()))):
        decision = no_decision(reason)
    else:
        best, decision = judge(candidates, timing, mix, question, gammas)
        decision = decision if times else no_decision(without_times(evidence.rules, timing.lacks(candidates)))
    timed = best is not None and best[0] in times
    whole = pooled_speedup(candidates, best, times, mix) if best and timed else None
    free = pooled_speedup(candidates, best, {best[0]: free_draft(best[1])}, mix) if best else None
    several = (
        by_concurrency(candidates[best[0]], book, best[0], mix, SpeedupQuestion(gammas, question.confidence)) if best else ()
    )
    return Traffic(
        verdict=decision.verdict,
        reason=decision.reason,
        draft=best[0] if best else None,
        rule=" and ".join(evidence.rules) or question.rule,
        gamma=best[1] if best else None,
        tokens_per_round=tokens_interval(free, best[1], question.confidence) if best else None,
        break_even_length=free.value / whole.value if free and whole else None,
        speedup=speedup_interval(decision.speedup, question.confidence),
        speedup_of_all=speedup_interval(whole, question.confidence),
        tested=Interval(decision.speedup.value, decision.low, decision.high) if decision.speedup else None,
        chosen=len(candidates) * len(question.gammas(gammas)) > 1,
        documents=decision.speedup.documents if decision.speedup else 0,
        documents_needed=decision.documents_needed,
        min_speedup=question.min_speedup,
        weights=dict(weights),
        weights_observed=question.weights is None,
        concurrencies=several,
        pays_up_to=pays_up_to(several),
    )


def why_undecidable(weights: Mapping[str, float], evidence: Evidence, rounds: Mapping[str, DocumentTotals]) -> str:
    """What stands against a verdict on the whole traffic; empty where nothing does. `rounds`: domains that have rounds."""
    if not evidence.observed:
        return "no document is complete yet"
    if odd := sorted(set(weights) ^ set(evidence.observed)):
        return f"weights and data do not have the same domains ({', '.join(map(short, odd))})"
    # A domain is judged by all of its text or not at all: its weight is that of all of it.
    without = {domain: "no rounds" for domain in weights if domain not in rounds} | dict(evidence.undefined)
    if undefined := [domain for domain in without if weights.get(domain, 0) > 0]:
        reasons = dict.fromkeys(without[domain] for domain in undefined)
        advice = ": decision.weights can leave it out with weight 0" if rounds else ""
        return f"{'; '.join(reasons)} ({', '.join(map(short, undefined))}){advice}"
    return ""
