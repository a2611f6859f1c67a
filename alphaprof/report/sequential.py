"""Verdicts on runs that came in random order to stop as soon as they are decided: valid whenever that was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from alphaprof.analysis.decision import Decision, Mask
from alphaprof.analysis.sequential import Bounds, Sequential, decide_sequentially
from alphaprof.analysis.speedup import Speedup, cost_bounds
from alphaprof.report.verdict import (
    Order,
    Pair,
    Pools,
    Question,
    Timing,
    cheapness,
    choose_and_decide,
    explained,
    no_decision,
    pooled_speedup,
    without_times,
)


def judge(
    candidates: Pools, timing: Timing, weights: Mapping[str, float], question: Question, gammas: Sequence[int]
) -> tuple[Pair | None, Decision]:
    """The chosen draft and gamma, and the verdict on them: by intervals of a fixed number of documents, or by bets where
    they came in random order.
    """
    if question.order is None:
        return choose_and_decide(candidates, timing, weights, question, gammas)
    options = [(draft, gamma) for draft in candidates for gamma in question.gammas(gammas)]
    only = options[0] if len(options) == 1 else None
    if lacking := timing.lacks(candidates):
        return only, no_decision(without_times([], lacking))
    pools = next(iter(candidates.values()))
    first = {domain: pools[domain]["document"] < question.order.choosing for domain in weights}
    found = {option: pooled_speedup(candidates, option, timing.times, weights, first) for option in options}
    known = {option: speedup.value for option, speedup in found.items() if speedup is not None}
    if not known and (only is None or question.weights is not None):
        reason = f"the first {question.order.choosing} documents do not hold a token of every domain yet"
        return only, explained(no_decision(reason), timing.basis)
    best = only or max(known, key=lambda option: known[option])
    chosen_before = only is not None and question.weights is None
    rows = {domain: mask | ~mask if chosen_before else ~mask for domain, mask in first.items()}
    decision = _decided(candidates, best, timing, question, rows, found[best])
    return best, explained(decision, timing.basis, cheapness(timing.times, best))


def _decided(
    candidates: Pools, pair: Pair, timing: Timing, question: Question, rows: Mapping[str, Mask], first: Speedup | None
) -> Decision:
    """The verdict on one draft and gamma by bets over the tested documents, in the order in which they came."""
    order, times = question.order, timing.times[pair[0]]
    if order is None:
        raise ValueError("documents in no known order")
    importance = _importance(candidates, pair, question, rows)
    parts = []
    for domain, chosen in rows.items():
        pool = candidates[pair[0]][domain]
        counts = pool.counts(pair[1]).rows(chosen)
        weight = np.full(len(counts.tokens), importance[domain])
        parts.append(np.column_stack([pool["document"][chosen], counts.tokens, counts.spent(times), weight]))
    table = np.concatenate(parts)
    _, base, spent, weight = table[np.argsort(table[:, 0], kind="stable")].T
    best, worst = cost_bounds(times, pair[1])
    reach = max(importance[domain] * order.reach[domain] for domain in rows)
    error = first.timing_error if first is not None else 0.0
    found = decide_sequentially(
        base, spent, weight, Bounds(best, worst, reach), question.min_speedup, question.confidence, error
    )
    value = (
        Speedup(float((weight * base).sum() / (weight * spent).sum()), math.nan, error, 0, len(base)) if len(base) else None
    )
    return Decision(found.verdict, _reason(found, value, question, order, len(base)), value, found.low, found.high, None)


def _importance(candidates: Pools, pair: Pair, question: Question, rows: Mapping[str, Mask]) -> dict[str, float]:
    """What a document of each domain stands for: 1, or where the profile gives weights, the domain's share of tokens over
    the share that its documents are taken to have: their number, times the mean length of those that are not tested.
    """
    order = question.order
    if question.weights is None or order is None or len(rows) == 1:
        return dict.fromkeys(rows, 1.0)
    pools = candidates[pair[0]]
    tokens = {
        domain: float(pools[domain]["tokens"][~chosen].mean()) * order.documents[domain] for domain, chosen in rows.items()
    }
    total = sum(tokens.values())
    return {domain: question.weights[domain] / (tokens[domain] / total) for domain in rows}


def _reason(found: Sequential, value: Speedup | None, question: Question, order: Order, tested: int) -> str:
    level = f"{100 * question.confidence:g} %"
    if value is None:
        return f"no document behind the first {order.choosing}, which choose, was tested yet"
    on = f"speedup {value.value:.2f}x on {tested} documents in random order"
    if found.verdict == "UNDECIDED":
        bounds = f"{level} bounds that hold at any time, {found.low:.3f} and {found.high:.3f}"
        return f"{on}, {bounds}, enclose {question.min_speedup:g}: more documents would narrow them"
    side, bound = ("lower", found.low) if found.verdict == "GO" else ("upper", found.high)
    reached = "reached" if found.verdict == "GO" else "fell below"
    threshold = f"{question.min_speedup:g} after {found.documents} of them"
    return f"{on}; its {level} {side} bound, {bound:.3f}, which holds at any time, {reached} {threshold}"
