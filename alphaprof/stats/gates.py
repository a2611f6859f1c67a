"""Several gates at one confidence: each quantity and its least value, judged by one-sided bounds with Holm's correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True)
class Gate:
    """A quantity that has to be at least `threshold`. `bounds`: its lower and upper bound, each wrong with a probability."""

    threshold: float
    bounds: Callable[[float], tuple[float, float]]


@dataclass(frozen=True)
class GateResult:
    """What became of a gate: the one-sided bounds that it was judged by, the upper one with Holm's correction."""

    outcome: Outcome
    low: float
    high: float


def judge(gates: Sequence[Gate], confidence: float) -> list[GateResult]:
    """Return the result of each gate, in their order."""
    error = 1 - confidence
    highs: dict[int, float] = {}
    left = list(range(len(gates)))
    while left:
        upper = {index: gates[index].bounds(error / len(left))[1] for index in left}
        failed = [index for index in left if upper[index] < gates[index].threshold]
        if not failed:
            highs |= upper
            break
        highs |= {index: upper[index] for index in failed}
        left = [index for index in left if index not in failed]
    results = []
    for index, gate in enumerate(gates):
        low, high = gate.bounds(error)[0], highs[index]
        outcome: Outcome = "fail" if high < gate.threshold else "pass" if low >= gate.threshold else "undecided"
        results.append(GateResult(outcome, low, high))
    return results


def holm(claims: Sequence[Callable[[float], bool]], error: float) -> list[bool]:
    """Return which claims hold if any of them may be wrong with a probability of `error`; each tells if it holds at its
    own.
    """
    left = list(range(len(claims)))
    while held := [index for index in left if claims[index](error / len(left))]:
        left = [index for index in left if index not in held]
        if not left:
            break
    return [index not in left for index in range(len(claims))]


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Return fail if any fails, pass if all pass, and else undecided, as of none at all."""
    if "fail" in outcomes:
        return "fail"
    return "pass" if outcomes and all(outcome == "pass" for outcome in outcomes) else "undecided"
