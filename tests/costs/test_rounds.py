"""What single timing rounds say: halves that a regular disturbance does not fool, and halves that disagree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alphaprof.costs.cost_model import measured_rows
from alphaprof.costs.rounds import costs_by_round, halves_disagree
from alphaprof.costs.speedup import StepTimes, Timing, round_costs, speedup
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import median_error, step_times
from alphaprof.stats.estimate import quantile
from alphaprof.totals.replay import RoundCounts

Array = np.ndarray[Any, Any]
GAMMA, ROUNDS = 8, 20
STEPS = [("target", "decode", 1), *(("target", "verify", n) for n in range(2, GAMMA + 2)), ("small", "draft", 1)]
MS = np.array([60.0, *(60 * 1.02**n for n in range(1, GAMMA + 1)), 3.0])
COST = (MS[GAMMA] + GAMMA * MS[-1]) / MS[0]


def table(ms: Array) -> StepTable:
    rows = zip(STEPS, step_times(ms), ms.T, strict=True)
    return StepTable([StepRow(*step, 1, 0, time, rounds=tuple(each)) for step, time, each in rows])


def noisy(rng: np.random.Generator, disturbed: Callable[[Array], Array], rounds: int = ROUNDS) -> Array:
    """Rounds of steps with log-normal noise of .05, [rounds, steps]; the decode step is `disturbed` by place besides."""
    ms = MS * np.exp(0.05 * rng.standard_normal((rounds, len(MS))))
    ms[:, 0] *= np.exp(disturbed(np.arange(rounds)))
    return ms


def alternating(place: Array) -> Array:
    return 0.1 * np.where(place % 2, 1.0, -1.0)


def two_and_two(place: Array) -> Array:
    return 0.1 * np.where(place % 4 < 2, 1.0, -1.0)


def growing(place: Array) -> Array:
    return np.linspace(-0.1, 0.1, len(place))


def still(place: Array) -> Array:
    return np.zeros(len(place))


def timing(ms: Array) -> Timing:
    whole = table(ms)
    first, second = ({"small": half.times("small", GAMMA, 1, 0)} for half in whole.halves)
    return Timing({"small": whole.times("small", GAMMA, 1, 0)}, "", {}, (first, second))


def holds(times: StepTimes) -> bool:
    """Whether the 95 % interval of a round's cost holds the truth."""
    cost = round_costs(times, GAMMA)[GAMMA]
    error, freedom = median_error(np.log(costs_by_round(times, GAMMA) / cost), times.decode.autocorrelation)
    return abs(math.log(cost / COST)) <= quantile(0.975, freedom) * error


@pytest.mark.parametrize("disturbed", [alternating, two_and_two, growing, still])
def test_no_regular_disturbance_falls_on_one_half(disturbed: Callable[[Array], Array]) -> None:
    """A decode step that takes 10 % more and less by turns, or by two and two: halves that alternate are off by 20 % of each
    other, and both hold the truth in 1.5 % of all cases.
    """
    rng, held, apart = np.random.default_rng(11), 0, []
    for _ in range(200):
        first, second = (half.times("small", GAMMA, 1, 0) for half in table(noisy(rng, disturbed)).halves)
        held += holds(first) and holds(second)
        apart.append(math.log(first.v(GAMMA) / second.v(GAMMA)))
    assert held / 200 >= 0.92
    assert float(np.sqrt(np.mean(np.square(apart)))) < 0.09


@pytest.mark.parametrize("rounds", range(2, 40))
def test_halves_divide_the_rounds_evenly(rounds: int) -> None:
    ms = MS * np.exp(0.05 * np.random.default_rng(0).standard_normal((rounds, len(MS))))
    first, second = (half.times("small", GAMMA, 1, 0).decode.rounds for half in table(ms).halves)
    assert abs(len(first) - len(second)) <= 1
    assert sorted([*first, *second]) == pytest.approx(sorted(ms[:, 0]))


def test_costs_by_round_by_hand() -> None:
    times = timing(MS * np.array([[1.0], [2.0], [1.0]]))
    assert costs_by_round(times.times["small"], GAMMA) == pytest.approx([COST] * 3)
    assert costs_by_round(times.times["small"], 1) == pytest.approx([(MS[1] + MS[-1]) / MS[0]] * 3)


def test_halves_that_disagree_are_found_and_those_that_do_not_are_not() -> None:
    """A disturbance that falls on one half alone; noise by itself in 1 % of all cases."""

    def on_one_half(place: Array) -> Array:
        return 0.3 * np.array([number.bit_count() % 2 for number in place.tolist()])

    rng = np.random.default_rng(3)
    found = [halves_disagree(timing(noisy(rng, on_one_half)), "small", GAMMA) for _ in range(50)]
    assert all(found)
    assert found[0] is not None
    assert found[0].costs[0] / found[0].costs[1] == pytest.approx(math.exp(0.3), rel=0.1)
    assert found[0].rounds == ROUNDS
    assert sum(halves_disagree(timing(noisy(rng, still)), "small", GAMMA) is not None for _ in range(400)) <= 8


def test_a_new_run_times_its_own_steps_again_and_no_table() -> None:
    """Whether a speedup's error is drawn again, from rows of a run's own timing and of a table with the same rounds."""
    ms = noisy(np.random.default_rng(0), still)
    one = RoundCounts(*(np.array(each) for each in ([2.0], [1.0], [[1.0]], [[1.0]], [0.0], [0])))
    for redrawn in (True, False):
        rows = [replace(row, redrawn=redrawn) for row in table(ms).rows]
        found = speedup([one], [1.0], StepTable(rows).times("small", 1, 1, 0))
        assert found is not None
        assert found.redrawn == redrawn
    assert all(row.redrawn for row in measured_rows([{**vars(rows[0]), "median_ms": 1.0, "rounds_ms": None}]))


def test_halves_that_cannot_disagree() -> None:
    """Fewer than three rounds in either, times without rounds, a gamma that was not timed, another draft."""
    few = timing(noisy(np.random.default_rng(0), still, 5))
    assert halves_disagree(few, "small", GAMMA) is None
    enough = timing(noisy(np.random.default_rng(0), still, 6))
    assert halves_disagree(enough, "small", GAMMA + 1) is None
    assert halves_disagree(enough, "other", 1) is None
    assert halves_disagree(Timing(enough.times, "", {}), "small", GAMMA) is None
