"""Errors of step times from interleaved rounds: values by hand, and second implementations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from alphaprof.costs import timing
from alphaprof.costs.timing import autocorrelation, largest_error, median_error, reach, round_mixes, step_times
from tests.loops import each

Array = np.ndarray[Any, Any]
STEPS = [("target", "decode", 1), ("target", "verify", 2), ("target", "verify", 3), ("target", "bookkeeping", 1)]
STEPS += [("small", "draft", 1), ("small", "draft", 2), ("ngram", "lookup", 1)]


BUSY = timing.BUSY  # before `_on_any_machine` changes it


def test_a_thread_that_often_waits_for_a_processor_says_that_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUSY", BUSY)
    assert [timing.is_busy(waiting) for waiting in (0.0, 0.02, 0.3, 0.95)] == [False, False, True, True]


@each("rounds", [3, 4, 5])
def test_few_rounds_have_a_t_interval(rounds: int) -> None:
    """Around its own mean, of which the farther end counts."""
    logs = np.array([0.1, -0.2, 0.3, -0.1, 0.2])[:rounds]
    low, high = stats.t.interval(0.95, rounds - 1, logs.mean(), stats.sem(logs))
    assert reach(logs, 0.0) == pytest.approx(max(-low, high))


def test_fewer_than_three_rounds_bound_nothing() -> None:
    assert reach(np.array([0.0, 0.0]), 0.0) == math.inf
    assert median_error(np.array([0.0, 0.0]), 0.0) == (math.inf, 0)


@each("rounds", [6, 7, 8, 9, 20, 57])
def test_order_statistics_are_those_of_the_binomial_law(rounds: int) -> None:
    """Between the last two pairs of order statistics whose coverages, from the binomial law, enclose 95 %."""
    logs = np.arange(1.0, rounds + 1) - (rounds + 1) / 2
    places = range(1, rounds // 2 + 1)
    covered = {k: float(stats.binom.cdf(rounds - k, rounds, 0.5) - stats.binom.cdf(k - 1, rounds, 0.5)) for k in places}
    outer = max(k for k in places if covered[k] >= 0.95)
    assert (rounds + 1) / 2 - outer - 1 < reach(logs, 0.0) <= (rounds + 1) / 2 - outer


def test_interpolated_ends_by_hand() -> None:
    """Of 6 rounds the range covers 1 - 2/64 and the next pair 1 - 14/64: 1/10 of the way in coverage is 5/14 in values."""
    assert reach(np.array([1.0, -3.0, 2.0, -1.0, 5.0, -2.0]), 0.0) == pytest.approx(5 - 5 / 14 * 3)


def test_an_error_is_a_t_interval_of_the_same_reach() -> None:
    logs = np.arange(-10.0, 11)
    error, freedom = median_error(logs, 0.3)
    assert freedom == 20
    assert error * stats.t.ppf(0.975, 20) == pytest.approx(reach(logs, 0.3))


def steps_of(rounds: Array) -> list[tuple[str, Array]]:
    """Columns as steps that run a model."""
    return [("verify", column) for column in rounds.T]


def test_autocorrelation_is_the_mean_of_all_steps_and_corrected_for_few_rounds() -> None:
    """By definition, with ranks from SciPy: of the logarithm less the means of its round and of its step."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((2000, 12, 5))
    for place in range(1, 12):
        noise[:, place] = 0.5 * noise[:, place - 1] + math.sqrt(0.75) * noise[:, place]
    times = np.exp(0.1 * noise[0] + np.arange(5))
    own = np.log(times) - np.log(times).mean(0) - np.log(times).mean(1, keepdims=True)
    ranks = np.array([stats.rankdata(column) for column in own.T]) - 6.5
    plain = ((ranks[:, 1:] * ranks[:, :-1]).sum(1) / (ranks**2).sum(1)).mean()
    assert autocorrelation(steps_of(times)) == pytest.approx(min(max((12 * plain + 1) / 8, 0), 0.9))
    slower = times * np.exp(rng.standard_normal((12, 1)))  # whatever falls on a whole round
    free = [("lookup", np.zeros(12)), ("bookkeeping", np.arange(12.0))]
    assert autocorrelation([*steps_of(slower), *free]) == pytest.approx(autocorrelation(steps_of(times)))
    # On average what a long series has, 6 / pi asin(0.25).
    found = [autocorrelation(steps_of(np.exp(0.1 * each))) for each in noise]
    assert np.mean(found) == pytest.approx(6 / math.pi * math.asin(0.25), abs=0.05)


def test_rounds_that_are_alike_in_a_row_widen_the_interval() -> None:
    """By sqrt(1.9 / 0.1) for the strongest autocorrelation that is allowed for."""
    logs = np.arange(10.0) - 4.5
    assert reach(logs, 0.9) == pytest.approx(reach(logs, 0.0) * math.sqrt(19))


def test_a_time_is_a_ratio_within_rounds_times_the_decode_step() -> None:
    """The machine gets three times as slow: the decode step's median is 20 ms, and a verification takes 1.2 of it."""
    rounds = np.array([[10, 12, 2], [20, 24, 4], [30, 37, 7]])
    assert step_times(rounds) == pytest.approx(np.array([20, 24, 4]))


def test_rounds_of_every_draft_and_length_by_hand() -> None:
    """Two drafts at gamma 1 and 2: verification of all tokens, half a step over two tokens, searches and bookkeeping."""
    expected = [[0, 1, 0, 1, 0.5, 0.5, 0], [0, 0, 1, 1, 1.5, 0.5, 0], [0, 1, 0, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 1]]
    assert round_mixes(STEPS, 2).tolist() == expected
    assert round_mixes(STEPS[:3], 2).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_rounds_of_a_head_have_a_first_step_of_their_own() -> None:
    """Half of them after a round of as many drafts that was accepted in full, half after one of which nothing was."""
    head = [("eagle", "draft_first", n) for n in (1, 2, 3)] + [("eagle", "draft", 1)]
    assert round_mixes([*STEPS[:3], *head], 2).tolist() == [[0, 1, 0, 0.5, 0.5, 0, 0], [0, 0, 1, 0.5, 0, 0.5, 1]]


def test_the_least_sure_round_counts_and_the_machine_does_not() -> None:
    rng = np.random.default_rng(1)
    slow = np.exp(np.linspace(0, 2, 9))[:, None] * np.array([[10.0, 12.0, 15.0]])
    mixes = round_mixes(STEPS[:3], 2)
    assert largest_error(slow, mixes, 0.0) == pytest.approx(0, abs=1e-12)
    noise = np.exp(0.1 * rng.standard_normal((9, 3)))
    noise[:, :2] = 1  # the third step alone is noisy
    logs = np.log(noise[:, 2] / np.median(noise[:, 2]))
    assert largest_error(slow * noise, mixes, 0.2) == pytest.approx(reach(logs, 0.2))
    assert largest_error(slow * noise, mixes[:1], 0.0) == pytest.approx(0, abs=1e-12)
