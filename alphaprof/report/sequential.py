"""Verdicts on runs that came in random order to stop as soon as they are decided: valid whenever that was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alphaprof.costs.speedup import Mix, Speedup, Timing, cost_bounds, time_spent
from alphaprof.report.decision import Decision, by_times_alone
from alphaprof.report.verdict import (
    Order,
    Pair,
    Pools,
    Question,
    cheapness,
    choose_and_decide,
    explained,
    no_decision,
    pooled_speedup,
    without_times,
)
from alphaprof.stats.sequential import Bounds, Sequential, decide_sequentially


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
        return only, no_decision("documents came as the data has them, and weights ask for another mixture of domains")
    best = only or _chosen(candidates, timing, mix, question.order, options)
    if best is None:
        first = question.order.choosing
        reason = f"the first {first} documents choose draft and gamma, and do not say which yet"
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
        return f"no document behind the first {after}, which choose, was tested yet"
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
