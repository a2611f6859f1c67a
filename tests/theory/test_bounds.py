"""Bounds from a few numbers: against what attains them, and random distributions that must not beat them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import rel_entr

from alphaprof.rules import parse_rule
from alphaprof.theory.bounds import (
    LARGE,
    SMALL,
    beta_bound,
    budget,
    certified_runs,
    mean_beta_bound,
    strict_thresholds,
)
from alphaprof.theory.certificates import certify
from tests.loops import each
from tests.theory.test_certificates import distance, distributions, whole

Array = np.ndarray[Any, Any]


def test_strict_thresholds_are_certificates_of_the_two_largest_probabilities() -> None:
    p = np.vstack([distributions(2000, 6, 1), np.eye(1, 6), [[0.3, 0.3, 0.2, 0.1, 0.1, 0.0]]])
    found = strict_thresholds(p[:, 0], p[:, 1])
    assert found == pytest.approx(certify(parse_rule("strict"), whole(p)).value, abs=1e-12)
    assert found[-1] == 0
    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)
    assert strict_thresholds(np.float32([0.5]), np.float32([0.3])) == pytest.approx([by_hand], abs=1e-7)


# Lossless sampling

KLS = [0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4]


def least_kl(tv: float) -> float:
    """The least KL of two coins whose chances differ by `tv`."""
    found = minimize_scalar(
        lambda y: float(rel_entr(y + tv, y) + rel_entr(1 - y - tv, 1 - y)),
        bounds=(0, 1 - tv),
        method="bounded",
        options={"xatol": 1e-12},
    )
    return float(found.fun)


@each("kl", [1e-7, 1e-5, 0.99e-4, 1.01e-4, 1e-3, 0.02, 0.3, 1.0, 2.5, 5.0, 5.99, 6.01, 8.0, 12.0])
def test_the_bound_on_lossless_acceptance_is_the_least_of_all_pairs_of_coins(kl: float) -> None:
    assert least_kl(1 - float(beta_bound(np.array(kl)))) == pytest.approx(kl, rel=2e-6)


def test_the_bound_on_lossless_acceptance_has_no_seams_and_exact_limits() -> None:
    kl = np.concatenate(
        [np.geomspace(1e-12, 60, 4001), SMALL * (1 + np.array([-1e-9, 1e-9])), LARGE + np.array([-1e-9, 1e-9])]
    )
    kl.sort()
    beta = beta_bound(kl)
    assert (np.diff(beta) < 0).all()
    slope = -np.diff(beta) / np.diff(kl)
    assert (slope[1:] <= slope[:-1] * (1 + 1e-4)).all()  # convex, across the seams too
    assert beta_bound(np.array([0.0, -1e-9, np.inf])).tolist() == [1, 1, 0]
    assert beta_bound(np.array([40.0])) == pytest.approx([math.exp(-40)], rel=1e-12)
    assert 1 - beta_bound(np.array([1e-10])) == pytest.approx([math.sqrt(5e-11)], rel=1e-6)
    assert beta_bound(np.array(KLS, dtype=np.float32)) == pytest.approx(beta_bound(np.array(KLS)), abs=1e-6)


def pairs(seed: int) -> tuple[Array, Array]:
    """Targets and drafts [n, V], close and far."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(4, 0.5), 20000) + 1e-12
    near = p * np.exp(rng.normal(size=p.shape) * rng.choice([0.01, 0.3, 2.0], size=(20000, 1)))
    q = np.where(rng.random((20000, 1)) < 0.7, near, rng.dirichlet(np.full(4, 0.5), 20000) + 1e-12)
    p[:4000, 2:] = q[:4000, 2:] = 1e-300  # coins
    return p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)


def test_no_pair_violates_a_bound_on_lossless_acceptance() -> None:
    p, q = pairs(1)
    beta = np.minimum(p, q).sum(1)
    kl = distance(p, q, "kl")
    for divergence in (kl, distance(q, p, "kl")):
        assert (beta_bound(divergence) <= beta + 1e-12).all()
    assert (beta - beta_bound(kl)).min() < 1e-3


@given(st.lists(st.floats(0, 30), min_size=1, max_size=6))
def test_a_mean_divergence_bounds_the_mean_acceptance(values: list[float]) -> None:
    kl = np.array(values)
    assert mean_beta_bound(kl) <= beta_bound(kl).mean() + 1e-9
    assert mean_beta_bound(np.full(3, kl[0])) == pytest.approx(beta_bound(kl)[0], rel=1e-12)
    assert mean_beta_bound(np.append(kl, np.inf)) == 0


# Many positions


@given(
    st.lists(st.one_of(st.integers(0, 8).map(lambda x: x / 8), st.just(math.inf)), min_size=1, max_size=9),
    st.integers(0, 64).map(lambda x: x / 32),
)
def test_the_budget_is_the_largest_set_of_rejections_that_a_mean_divergence_pays_for(
    values: list[float], mean: float
) -> None:
    best = max(
        bin(chosen).count("1")
        for chosen in range(2 ** len(values))
        if sum(value for bit, value in enumerate(values) if chosen >> bit & 1) <= mean * len(values)
    )
    assert budget(np.array(values), mean) == best / len(values)


def test_budgets_at_the_ends() -> None:
    ties = np.array([0.0, 0.2, np.inf, 0.1])
    assert budget(ties, 0.0) == 0.25
    assert budget(ties, math.inf) == 0.75
    assert budget(np.full(10, 0.1), 0.03) == 0.3  # 0.1 + 0.1 + 0.1 > 0.3 in floating point


def test_runs_are_certified_where_every_threshold_exceeds_the_divergence() -> None:
    found = np.array([0.3, 0.2, 0.1, 0.5, 0.2, 0.5, np.inf])
    start, stop = np.array([0, 4]), np.array([4, 7])
    assert certified_runs(found, 0.15, start, stop).tolist() == [2, 1, 0, 1, 3, 2, 1]
    assert certified_runs(found, 0.2, start, stop).tolist() == [1, 0, 0, 1, 0, 2, 1]
    assert certified_runs(found, 0.0, start, stop).tolist() == [4, 3, 2, 1, 3, 2, 1]
