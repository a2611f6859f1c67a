"""The parts of the answer about a learning curve, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphaprof.stats.estimate import Interval

Reached = Literal["every", "some", "none"]


@dataclass(frozen=True)
class CurveDomain:
    """One domain on test texts."""

    domain: str
    alpha: float  # share of positions whose first draft is accepted
    tokens_per_round: Interval | None  # over all rounds; None: no tokens
    speedup: Interval | None  # None: no step times
    difference: Interval | None  # tokens per round less those of the size before (beside the curve: of the largest), paired


@dataclass(frozen=True)
class CurvePoint:
    """The heads of one size together, or a head beside the curve. `difference`: tokens per round less those of the size
    before, paired by test unit; of a head beside the curve: less those of the largest size.
    """

    label: str  # "1/8" of the training units, their number where no fraction is known, or published, tuned
    units: int | None  # independent units that it was trained on; None: not known
    tokens: int | None  # tokens of continuations that it was trained on; None: not known
    heads: int  # that were trained on as much, in other orders
    alpha: float  # share of positions whose first draft is accepted
    accepted: tuple[float, ...]  # share of rounds that accepted at least 1, 2, ... drafts, at the largest gamma
    tokens_per_round: Interval | None  # at `gamma`, mean over heads; the interval is over test units
    spread: float | None  # standard deviation of tokens per round between these heads; None: a single one
    speedup: Interval | None  # predicted at `concurrency`; None: no step times
    difference: Interval | None  # None: the smallest size
    domains: tuple[CurveDomain, ...]  # by share of the tokens, the largest first


@dataclass(frozen=True)
class CurveBacktest:
    """The largest size as all smaller ones predicted it, in tokens per round."""

    seen: tuple[str, ...]  # labels of the sizes that it was predicted from
    predicted: Interval  # between both scenarios
    measured: float  # tokens per round of the largest size
    error: float  # measured / predicted - 1
    inside: bool  # the band held what was measured


@dataclass(frozen=True)
class ForecastRow:
    """What heads would reach with `factor` times the training units. In intervals `low` is the scenario that saturates,
    `high` the one that goes on as before, `value` lies between.
    """

    factor: float  # 1: as measured, with what the whole curve says about it
    units: int  # independent units to train on
    tokens_per_round: Interval  # at `gamma`
    alpha: Interval  # share of positions whose first draft is right
    speedup: Interval | None  # at the cost of a round that was predicted for the largest size; None: no step times
    reached: Reached | None  # scenarios in which min_speedup is reached; None: no step times


@dataclass(frozen=True)
class CurveCost:
    """What heads with `factor` times the training units would need, from what the largest size needed."""

    factor: float  # times the training units of the largest size
    prompts: int  # further independent units to log, those of the stop and test parts included
    tokens: int  # further tokens to generate, those of the stop and test parts included
    seconds: float  # of the device for one head: features, training and tests, on as many passes over the texts
    device: str  # that the largest size was trained on
