"""What single timing rounds say: halves that a regular disturbance does not fool, and slow rounds that the mean counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alphaprof.costs.cost_model import measured_rows
from alphaprof.costs.rounds import StepTimes, Timing, round_costs
from alphaprof.costs.speedup import Mix, speedup
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import mean_error, median_error, step_times
from alphaprof.stats.student import quantile
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
    spent = np.array(times.target[GAMMA + 1].rounds) + GAMMA * np.array(times.draft.rounds)
    error, freedom = median_error(np.log(spent / times.decode.rounds / cost), times.decode.autocorrelation)
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


def with_tail(rng: np.random.Generator, rounds: int) -> Array:
    """Noise of 5 %, and in every five rounds 0, 5, 0, 62 and 10 ms more of verification."""
    ms = noisy(rng, still, rounds)
    ms[:, 1:-1] += np.resize([0.0, 5.0, 0.0, 62.0, 10.0], rounds)[:, None]
    return ms


def test_the_lower_bound_counts_the_mean_where_a_tail_lifts_it() -> None:
    """A server spends the sum of its rounds: the bound is below the true speedup by means, which that by medians is not."""
    rng, held, by_medians = np.random.default_rng(6), 0, 0
    full = RoundCounts(*(np.array(each) for each in ([9.0], [1.0], [[1.0] * GAMMA], [[1.0] * GAMMA], [0.0], [0])))
    certain = {"sampling_error": 0.0, "freedom": math.inf, "skewness": 0.0, "unseen_slower": 0.0, "unseen_faster": 0.0}
    true = (MS[GAMMA] + 77 / 5 + GAMMA * MS[-1]) / MS[0]
    for _ in range(200):
        found = speedup([full], [1.0], table(with_tail(rng, ROUNDS)).times("small", GAMMA, 1, 0))
        assert found is not None
        found = replace(found, least=0.0, **certain)
        held += found.bounds(0.05)[0] <= 9 / true
        medians = replace(found, tail=0.0, mean_error=0.0)
        by_medians += medians.bounds(0.05)[0] <= 9 / true
        assert found.possible(0.05)[0] <= medians.possible(0.05)[0]
    assert held / 200 >= 0.95
    assert by_medians / 200 < 0.9


def test_the_error_of_a_mean_by_hand() -> None:
    """Four rounds, of which one takes twice as long with the draft and none without: a quarter more, or a fifth off."""
    more, error = mean_error(np.ones(4), np.array([1.0, 1.0, 1.0, 2.0]), 0.0)
    assert more == pytest.approx(0.25)
    assert error == pytest.approx(0.5 / 2 / 1.25)
    assert mean_error(np.ones(4), np.array([1.0, 1.0, 1.0, 2.0]), 0.5)[1] == pytest.approx(math.sqrt(3) * error)
    alike = np.array([1.0, 1.0, 1.0, 2.0])
    assert mean_error(alike, 1.5 * alike, 0.0) == pytest.approx((0.5, 0.0))  # what slows down all steps alike cancels
    assert mean_error(np.ones(2), np.array([1.0, 2.0]), 0.0)[1] == math.inf


def test_the_mean_counts_however_little_it_is_above_the_median() -> None:
    """Noise of 1 %, and verification takes 15 % more in three of 20 rounds, which lifts the mean by 2 %: bounds by medians
    alone know nothing of it.
    """
    full = RoundCounts(*(np.array(each) for each in ([9.0], [1.0], [[1.0] * GAMMA], [[1.0] * GAMMA], [0.0], [0])))
    ms = MS * np.exp(0.01 * np.random.default_rng(2).standard_normal((20, len(MS))))
    usual = speedup([full], [1.0], table(ms).times("small", GAMMA, 1, 0))
    ms[[4, 9, 17], 1:-1] *= 1.15
    found = speedup([full], [1.0], table(ms).times("small", GAMMA, 1, 0))
    assert usual is not None
    assert found is not None
    assert 0.01 < found.tail < 0.03
    assert found.mean_error > 1.5 * usual.mean_error
    assert found.possible(0.05)[0] < (1 - 0.02) * usual.possible(0.05)[0]
    assert found.possible(0.05)[1] >= usual.possible(0.05)[1]


def test_a_tail_counts_alike_if_each_half_of_the_documents_has_its_half_of_the_rounds() -> None:
    """Verification takes 48 % more in four of 16 rounds, two of either half, which lifts the mean by 8 %."""
    ms = np.tile(MS, (16, 1))
    ms[[3, 4, 9, 14], 1:-1] *= 1.48  # two of either half
    full = RoundCounts(*(np.array(each) for each in ([9.0], [1.0], [[1.0] * GAMMA], [[1.0] * GAMMA], [0.0], [0])))
    whole = timing(ms)
    assert whole.halves is not None
    parts = [(full, replace(half["small"], half=place)) for place, half in enumerate(whole.halves)]
    mix = Mix.of({"all": 1.0})
    alone, crossed = mix.routed([(full, whole.times["small"])]), mix.routed([parts])
    assert alone is not None
    assert crossed is not None
    assert 0.06 < alone.tail < 0.1
    assert crossed.tail == pytest.approx(alone.tail, rel=0.05)


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
