"""How often the forecast of a learning curve holds the truth, on synthetic curves whose truth is known.

Truths of the family 1 - alpha(N) = e + A N^-b, with b from .05 to .6 and e from the floor to the present miss rate, are what
is promised: at 4 times the data the band holds the truth in 95 % of the forecasts, and the truth is worse than its worse end
in at most 5 % ("GO in every scenario" is then wrong for the least favourable threshold; for others it is wrong less often).
Truths outside the family are printed, and nothing is promised of them; `fits` withholds some of their forecasts.
Run: python scripts/research/forecast_coverage.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import beta

from alphaprof.stats.estimate import influences
from alphaprof.stats.learning import LearningCurve, Measured, backtest, fits, scenarios

SIZES, SEEDS = (50, 100, 200, 400), (3, 3, 3, 1)
FLOOR, CONFIDENCE, FACTOR = 0.05, 0.95, 4
TOKENS = 120
UNIT_SIZE = 12.0  # concentration of the miss rates of units: standard deviation .14 at .5
Truth = Callable[[float], float]  # miss rate by training units


@dataclass(frozen=True)
class Outcome:
    """What became of one synthetic curve."""

    tested: bool  # the backtest held, and the last doubling brought more than seeds differ
    fits: bool  # a curve of the family passes all sizes
    held: bool  # the truth lies inside the band
    above: bool  # the truth is worse than the worse end of the band
    width: float  # of the band
    present: float  # width of the band at the largest size, which was measured: what test units and seeds leave open there
    naive: float  # from "nothing changes any more" to a power law through the two largest sizes, floor apart

    @property
    def made(self) -> bool:
        """Whether there is a forecast."""
        return self.tested and self.fits


def family(generator: np.random.Generator) -> Truth:
    """A truth of the family, a rate at every size."""
    while True:
        b, present = generator.uniform(0.05, 0.6), generator.uniform(0.3, 0.8)
        e = generator.uniform(FLOOR, present)
        if e + (present - e) * (SIZES[0] / SIZES[-1]) ** -b <= 0.98:
            return lambda size: float(e + (present - e) * (size / SIZES[-1]) ** -b)


def step(generator: np.random.Generator) -> Truth:
    """Falls as a power law up to the largest size, and stays there."""
    b, present = generator.uniform(0.05, 0.6), generator.uniform(0.3, 0.8)
    return lambda size: float(min(present * max((min(size, SIZES[-1]) / SIZES[-1]) ** -b, 1.0), 0.99))


def late_rise(generator: np.random.Generator) -> Truth:
    """Hardly learns up to the largest size, and then three times as fast."""
    b, present = generator.uniform(0.03, 0.1), generator.uniform(0.5, 0.8)
    return lambda size: float(present * (size / SIZES[-1]) ** -(b if size <= SIZES[-1] else 3 * b))


def shifted(generator: np.random.Generator) -> Truth:
    """A power law of N + N_0, N_0 from half to twice the largest size: it gets steeper over log N."""
    while True:
        b, present, start = generator.uniform(0.3, 1.5), generator.uniform(0.3, 0.8), generator.uniform(0.5, 2.0)
        e = generator.uniform(FLOOR, present)
        if e + (present - e) * ((SIZES[0] / SIZES[-1] + start) / (1 + start)) ** -b <= 0.98:
            return lambda size: float(e + (present - e) * ((size / SIZES[-1] + start) / (1 + start)) ** -b)


def sigmoid(generator: np.random.Generator) -> Truth:
    """A logistic curve over log N, whose middle lies within a factor of 2.8 of the largest size."""
    low, high = generator.uniform(FLOOR, 0.4), generator.uniform(0.7, 0.95)
    steep, middle = generator.uniform(0.7, 2.0), SIZES[-1] * 2 ** generator.uniform(-1.5, 1.5)
    return lambda size: float(low + (high - low) / (1 + (size / middle) ** steep))


def plateau(generator: np.random.Generator) -> Truth:
    """Falls as a power law, and stops between half and twice the largest size."""
    b, present = generator.uniform(0.05, 0.6), generator.uniform(0.3, 0.8)
    end = 2 ** generator.uniform(-1, 1)
    return lambda size: float(min(present * (min(size / SIZES[-1], end) / min(end, 1)) ** -b, 0.99))


def measured(truth: Truth, generator: np.random.Generator, spread: float, units: int) -> LearningCurve:
    """What heads of the sizes get on test units: each unit has its own difficulty, the same for all heads."""
    place = generator.random(units)
    heads = []
    for size, seeds in zip(SIZES, SEEDS, strict=True):
        same = []
        for _ in range(seeds):
            mean = float(np.clip(truth(size) + generator.normal(0, spread), 0.01, 0.99))
            rates = beta.ppf(place, mean * UNIT_SIZE, (1 - mean) * UNIT_SIZE)
            missed = generator.binomial(TOKENS, rates).astype(float)
            counts = np.full(units, float(TOKENS))
            same.append(Measured(float(missed.sum() / counts.sum()), influences(missed, counts)))
        heads.append((size, same))
    return LearningCurve.of(heads, FLOOR)


def outcome(truth: Truth, generator: np.random.Generator, units: int) -> Outcome:
    """Forecasts one curve and compares with its truth."""
    curve = measured(truth, generator, generator.uniform(0.003, 0.015), units)
    tested = backtest(curve, CONFIDENCE).inside and curve.last_gain > curve.spread
    size = FACTOR * SIZES[-1]
    found, real = scenarios(curve, size, CONFIDENCE), truth(size)
    present, slope = curve.miss[-1] - FLOOR, (curve.miss[-1] - FLOOR) / (curve.miss[-2] - FLOOR)
    naive = present - present * min(slope, 1.0) ** np.log2(FACTOR)
    now = scenarios(curve, SIZES[-1], CONFIDENCE)
    widths = (found.high - found.low, now.high - now.low, float(naive))
    return Outcome(tested, fits(curve), found.low <= real <= found.high, real > found.high, *widths)


def outcomes(kind: Callable[[np.random.Generator], Truth], curves: int, seed: int, units: int = 40) -> Iterator[Outcome]:
    """Yields what became of so many curves of a kind."""
    for index in range(curves):
        generator = np.random.default_rng([seed, index])
        yield outcome(kind(generator), generator, units)


def summary(name: str, found: list[Outcome]) -> str:
    """A line about one kind of truths."""
    tested, made = ([each for each in found if getattr(each, what)] for what in ("tested", "made"))
    if not made:
        return f"{name:10} {len(found)} curves, no forecast of any"
    before, after = (
        f"held {np.mean([each.held for each in some]):.1%}, worse than both {np.mean([each.above for each in some]):.1%}"
        for some in (tested, made)
    )
    every = np.mean([each.held for each in found])
    wide, present, naive = (
        float(np.median([getattr(each, what) for each in made])) for what in ("width", "present", "naive")
    )
    return (
        f"{name:10} {len(found)} curves (at {FACTOR} x held {every:.1%}), {len(tested)} pass the backtest: {before};"
        f" {1 - len(made) / len(tested):.1%} of them fit no curve; {len(made)} forecasts: {after};"
        f" median width {wide:.3f} (at 1 x {present:.3f}), naive scenarios {naive:.3f} apart"
    )


def main() -> None:
    """Prints coverage for truths of the family, and for others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--units", type=int, default=40, help="test units")
    asked = parser.parse_args()
    for kind in (family, step, late_rise, shifted, sigmoid, plateau):
        print(summary(kind.__name__, list(outcomes(kind, asked.curves, asked.seed, asked.units))))


if __name__ == "__main__":
    main()
