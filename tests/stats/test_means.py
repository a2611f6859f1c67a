"""Means of quantities without an upper end, and their paired difference, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from alphaprof.stats.estimate import mean_interval, ratio
from alphaprof.stats.paired import mean_difference


def test_a_mean_of_units_that_agree_is_not_certain() -> None:
    spread = ratio(np.array([1.0, 3.0]), np.array([10.0, 10.0]))
    found = mean_interval(spread, 0.9)
    assert found.value == pytest.approx(0.2)
    assert found.high == pytest.approx(0.2 + 6.3138 * 0.1, rel=1e-4)  # t with one degree of freedom, standard error 0.1
    assert found.low == 0
    for alike in (np.zeros(3), np.ones(3)):
        assert dataclasses.astuple(mean_interval(ratio(alike, np.ones(3)), 0.9))[1:3] == (0, np.inf)
    assert mean_interval(ratio(np.ones(1), np.ones(1)), 0.9).high == np.inf


def test_what_two_texts_share_cancels_in_the_difference_of_their_means() -> None:
    counts = np.full(4, 10.0)
    one = np.array([1.0, 4.0, 2.0, 5.0])
    two = one + np.array([1.0, 1.0, 2.0, 2.0])
    found = mean_difference((one, counts), (two, counts), 0.9)
    assert found.value == pytest.approx(0.15)
    error = np.std([0.1, 0.1, 0.2, 0.2], ddof=1) / 2
    assert found.high - found.value == pytest.approx(2.3534 * error, rel=1e-4)
    assert found.low == pytest.approx(0.15 - 2.3534 * error, rel=1e-4)
    alike = mean_difference((one, counts), (one, counts), 0.9)
    assert (alike.value, alike.low, alike.high) == (0, -0.3, np.inf)
