"""`alphaprof predict`: what the formulas say of numbers that a user gives. No run, no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from alphaprof.errors import OptionInvalid
from alphaprof.render.blocks import Block, Small, Table, table_by_columns
from alphaprof.report import format as fmt
from alphaprof.stats import formulas
from alphaprof.stats.formulas import RoundCost

GAMMAS = tuple(range(1, 9))
LONGEST = 64  # drafts in a round
LEAST_COST = 1e-3  # of a verification, which always takes time


@dataclass(frozen=True)
class EngineRate:
    """An acceptance rate as engines show it: accepted / drafted tokens, in rounds of `gamma` drafts."""

    accepted_per_drafted: float  # accepted / drafted tokens
    gamma: int


@dataclass(frozen=True)
class GammaPrediction:
    """One gamma. `break_even_length`: tokens per round at which the speedup is 1, the cost of a round in decode steps;
    `break_even_alpha`: the alpha that gives them (None: no alpha does).
    """

    gamma: int
    tokens_per_round: float  # tokens emitted per round, the target's own included
    accepted_per_drafted: float  # accepted / drafted tokens: what engines call acceptance rate
    verify_cost: float  # v = T(gamma + 1) / T(1)
    break_even_length: float
    break_even_alpha: float | None
    speedup: float  # of decoding


@dataclass(frozen=True)
class Prediction:
    """What was assumed, and what follows for each gamma. `engine_rate`: what alpha was worked out from (None: given)."""

    format: ClassVar[str] = "alphaprof-predict"
    version: ClassVar[str] = "1.0"

    alpha: float  # share of positions where the draft's proposal is kept
    burstiness: float  # correlation of acceptance from one position to the next
    engine_rate: EngineRate | None
    cost: RoundCost  # what a round is taken to cost
    gammas: tuple[GammaPrediction, ...]  # one a gamma
    best_gamma: int  # of the largest speedup

    def blocks(self) -> Iterator[Block]:
        """Yield the best gamma and its speedup, what was assumed, a row for each gamma, and which number is which."""
        yield from (*_outcome_lines(self), "", *_assumed_lines(self), "")
        yield _gamma_table(self)
        yield Small("alpha: share of all positions where the draft's proposal is kept; does not depend on gamma.")
        yield Small("accepted/drafted: what engines call acceptance rate; depends on gamma, and is not alpha.")
        yield Small("tokens/round: emitted by a round, the target's own included (engines: mean acceptance length).")
        yield Small("break-even: tokens/round where the speedup is 1 (the cost of a round in decode steps), and its alpha.")


def build_prediction(
    acceptance: float | EngineRate, burstiness: float, cost: RoundCost, gammas: Iterable[int] = GAMMAS
) -> Prediction:
    """Predictions for an alpha, or for the one that gives an engine's rate. Raises `OptionInvalid` for impossible values."""
    gammas = tuple(gammas)
    for option, value in (("--cost", cost.draft), ("--verify-slope", cost.verify_slope), ("--overhead", cost.overhead)):
        _require_between(option, value, 0, math.inf)
    _require_between("--verify", cost.verify, LEAST_COST, math.inf)
    for gamma in gammas:
        _require_between("--gamma", gamma, 1, LONGEST)
    alpha = _alpha_of(acceptance, burstiness)
    predictions = tuple(_of_gamma(alpha, burstiness, gamma, cost) for gamma in gammas)
    best = max(predictions, key=lambda item: item.speedup)
    rate = acceptance if isinstance(acceptance, EngineRate) else None
    return Prediction(alpha, burstiness, rate, cost, predictions, best.gamma)


def acceptance_of(alpha: float | None, rate: float | None, at_gamma: int | None) -> float | EngineRate:
    """What the user says about acceptance: an alpha, or an engine's rate with its gamma."""
    if alpha is not None and rate is None and at_gamma is None:
        return alpha
    if alpha is None and rate is not None and at_gamma is not None:
        return EngineRate(rate, at_gamma)
    problem = "acceptance is either one alpha, or an engine's rate with the gamma at which the engine showed it"
    raise OptionInvalid(problem, "give --alpha 0.75, or --accepted-per-drafted 0.53 --at-gamma 4")


def _of_gamma(alpha: float, burstiness: float, gamma: int, cost: RoundCost) -> GammaPrediction:
    tokens = float(formulas.tokens_per_round(alpha, gamma, burstiness))
    return GammaPrediction(
        gamma=gamma,
        tokens_per_round=tokens,
        accepted_per_drafted=float(formulas.accepted_per_drafted(tokens, gamma)),
        verify_cost=cost.verification(gamma),
        break_even_length=cost.of_round(gamma),
        break_even_alpha=formulas.break_even_alpha(gamma, cost, burstiness),
        speedup=float(formulas.speedup(alpha, gamma, cost, burstiness)),
    )


def _alpha_of(acceptance: float | EngineRate, burstiness: float) -> float:
    _require_between("--burstiness", burstiness, -1, 1)
    try:
        if isinstance(acceptance, EngineRate):
            _require_between("--accepted-per-drafted", acceptance.accepted_per_drafted, 0, 1)
            _require_between("--at-gamma", acceptance.gamma, 1, LONGEST)
            return formulas.alpha_of_rate(acceptance.accepted_per_drafted, acceptance.gamma, burstiness)
        _require_between("--alpha", acceptance, 0, 1)
        formulas.check_chain(acceptance, burstiness)
    except ValueError as error:
        raise OptionInvalid(str(error), "correct the values; --burstiness 0 means independence") from None
    return acceptance


def _require_between(option: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        limits = f"between {low:g} and {high:g}" if math.isfinite(high) else f"{low:g} or above, and finite"
        raise OptionInvalid(f"{option} is {value:g}; it must be {limits}", "correct the value; --help says what it means")


def _outcome_lines(prediction: Prediction) -> Iterator[str]:
    """Yield the speedup at the best gamma, where it would end, and what the numbers are not."""
    best = next(item for item in prediction.gammas if item.gamma == prediction.best_gamma)
    gamma = f"{'best ' if len(prediction.gammas) > 1 else ''}gamma {best.gamma}"
    faster = f"decoding is {'faster' if best.speedup > 1 else 'no faster'} if all of this holds"
    yield f"{gamma}: {fmt.number(best.speedup, unit='x')}, {faster}"
    emitted, cost = fmt.number(best.tokens_per_round), fmt.number(best.break_even_length)
    least = "no alpha makes it faster"
    if best.break_even_alpha is not None:
        least = f"it breaks even at alpha {fmt.share(best.break_even_alpha)} (here {fmt.share(prediction.alpha)})"
    yield f"a round emits {emitted} tokens and costs {cost} decode steps; {least}"
    yield "These are formulas: no text was measured, so there is no interval. next: alphaprof profile measures"


def _assumed_lines(prediction: Prediction) -> tuple[str, ...]:
    burst, rate, cost = prediction.burstiness, prediction.engine_rate, prediction.cost
    kind = "independent from position to position" if burst == 0 else f"with burstiness (lag-1 autocorrelation) {burst:g}"
    lines = [f"alpha {fmt.share(prediction.alpha)}, acceptance {kind}"]
    if rate is not None:
        says = f"an engine's {rate.accepted_per_drafted:g} accepted/drafted at gamma {rate.gamma}"
        assumes = "assuming independence: bursts would mean a higher one" if burst == 0 else "assuming that burstiness"
        lines.append(f"this alpha is worked out from {says}, {assumes}")
    slope = f" + {cost.verify_slope:g} a drafted token" if cost.verify_slope else ""
    steps = f"draft step {cost.draft:g}, verification {cost.verify:g}{slope}, overhead of a round {cost.overhead:g}"
    return (*lines, f"in plain decode steps: {steps}")


def _gamma_table(prediction: Prediction) -> Table:
    rows = [
        (
            str(item.gamma),
            {
                "tokens/round": fmt.number(item.tokens_per_round),
                "accepted/drafted": fmt.share(item.accepted_per_drafted),
                "break-even": fmt.number(item.break_even_length),
                "break-even alpha": "none" if item.break_even_alpha is None else fmt.share(item.break_even_alpha),
                "speedup": fmt.number(item.speedup, unit="x"),
            },
        )
        for item in prediction.gammas
    ]
    return table_by_columns("by gamma", rows, named="gamma", marked=[str(prediction.best_gamma)])
