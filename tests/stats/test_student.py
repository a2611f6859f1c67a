"""Student's t and the normal distribution, against scipy to twelve digits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from alphaprof.stats.student import probability, quantile
from tests.loops import each

FREEDOMS = (0.3, 0.7, 1.0, 2.0, 3.3, 7.71, 28.2, 39.9, 40.1, 1234.5, 4e5, 1e7)


@each("freedom", FREEDOMS)
def test_both_are_those_of_scipy(freedom: float) -> None:
    for p in (1e-6, 5e-4, 0.0125, 0.025, 0.05, 0.4999, 0.5, 0.5001, 0.95, 0.9875, 0.9995, 1 - 1e-6):
        assert quantile(p, freedom) == pytest.approx(float(stdtrit(freedom, p)), rel=1e-12, abs=1e-15)
    for value in (-1e3, -8.0, -3.0, -1.8, -1.7, -1e-3, 0.0, 1e-5, 0.3, 1.75, 4.0, 30.0):
        assert probability(value, freedom) == pytest.approx(float(stdtr(freedom, value)), rel=1e-12, abs=1e-300)


@given(p=st.floats(1e-9, 1 - 1e-9), freedom=st.floats(0.2, 1e6))
def test_a_quantile_has_its_probability(p: float, freedom: float) -> None:
    assert probability(quantile(p, freedom), freedom) == pytest.approx(p, rel=1e-11)


def test_without_a_limit_of_freedom_it_is_the_normal_distribution_and_without_any_nothing_is_known() -> None:
    for p in (1e-9, 0.025, 0.5, 0.9875):
        assert quantile(p, math.inf) == pytest.approx(float(ndtri(p)), rel=1e-12, abs=1e-15)
    for value in (-30.0, -2.0, 0.0, 5.0):
        assert probability(value, math.inf) == pytest.approx(float(ndtr(value)), rel=1e-12)
    assert (quantile(0.9, 0.0), probability(3.0, 0.0)) == (math.inf, 0.0)
    assert (quantile(0.0, 3.0), quantile(1.0, 3.0), quantile(1.0, math.inf)) == (-math.inf, math.inf, math.inf)
