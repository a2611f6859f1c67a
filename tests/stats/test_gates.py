"""Several thresholds at once: nobody fails by luck, and nobody passes for want of a correction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from alphaprof.stats.gates import Gate, judge, together

CONFIDENCE = 0.95


def gate(value: float, error: float = 1.0, threshold: float = 0.0) -> Gate:
    """A normal estimate with a standard error."""

    def bounds(tail: float) -> tuple[float, float]:
        half = float(norm.ppf(1 - tail)) * error
        return value - half, value + half

    return Gate(threshold, bounds)


def test_one_gate_by_hand() -> None:
    """1.645 standard errors on either side."""
    found = [judge([gate(value)], CONFIDENCE)[0].outcome for value in (-1.66, -1.63, 1.63, 1.66)]
    assert found == ["fail", "undecided", "undecided", "pass"]
    (one,) = judge([gate(2.0, threshold=1.0)], CONFIDENCE)
    assert (one.low, one.high) == pytest.approx((2 - 1.6449, 2 + 1.6449), abs=1e-4)


@given(st.lists(st.floats(-4, 4), min_size=1, max_size=6))
def test_failures_are_those_of_holms_step_down_by_p_values(values: list[float]) -> None:
    """An implementation of its own: ordered p-values against 5 % / (m - k)."""
    p = norm.cdf(np.array(values))
    rejected = set()
    for rank, index in enumerate(np.argsort(p, kind="stable")):
        if p[index] >= 0.05 / (len(p) - rank):
            break
        rejected.add(int(index))
    found = judge([gate(value) for value in values], CONFIDENCE)
    close = any(abs(p[index] - 0.05 / (len(p) - rank)) < 1e-9 for index in range(len(p)) for rank in range(len(p)))
    assert close or {index for index, item in enumerate(found) if item.outcome == "fail"} == rejected


def test_all_must_pass_and_one_failure_is_enough() -> None:
    assert together(["pass", "pass"]) == "pass"
    assert together(["pass", "undecided"]) == "undecided"
    assert together(["pass", "undecided", "fail"]) == "fail"
    assert together([]) == "undecided"


def test_equal_thresholds_pass_and_nothing_known_is_undecided() -> None:
    exact = Gate(1.0, lambda tail: (1.0, 1.0))
    assert judge([exact], CONFIDENCE)[0].outcome == "pass"
    nothing = Gate(1.0, lambda tail: (0.0, float("inf")))
    assert judge([nothing, exact], CONFIDENCE)[0].outcome == "undecided"
