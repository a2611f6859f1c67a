"""Bounds from a few numbers: against closed forms, what attains them, and random distributions that must not beat them."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import expit, rel_entr

from alphaprof.rules import BoundRule, parse_rule
from alphaprof.theory.bounds import (
    BEST_REJECTED,
    LARGE,
    SMALL,
    beta_bound,
    budget,
    certified_runs,
    coverage_bound,
    least_js,
    margin_bound,
    mean_beta_bound,
    strict_thresholds,
)
from alphaprof.theory.certificates import ACCEPTED, Divergence, certify, thresholds
from tests.loops import each
from tests.reference import threshold
from tests.theory.test_certificates import SPECIFICATIONS, distance, distributions, every_divergence, whole

Array = np.ndarray[Any, Any]
MARGINS = np.array([0.0, 1e-6, 0.05, 0.2, 0.37, 0.5, 0.8, 0.99, 1.0])
every_rule = each("rule", [parse_rule(name) for name in SPECIFICATIONS], ids=lambda rule: rule.id)
widths = each("width", [1, 2, 3, 6])


def coin(x: Any) -> Any:
    """log 2 - h((1 + x)/2)."""
    heads, tails = (1 + np.asarray(x)) / 2, (1 - np.asarray(x)) / 2
    return rel_entr(heads, 0.5) + rel_entr(tails, 0.5)


def peaked(count: int, size: int, seed: int) -> Array:
    """Distributions near those at the edge: one large token, several equal ones, dust, [count, size]."""
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.9, 1.1, size=(count, size)) * np.where(
        np.arange(size) < rng.integers(2, size + 1, (count, 1)), 1, 0.05
    )
    p[:, 0] *= rng.uniform(1, 30, count)
    return -np.sort(-p / p.sum(1, keepdims=True))


# The two largest probabilities


@every_divergence
def test_strict_decoding_needs_the_two_largest_probabilities_alone(divergence: Divergence) -> None:
    p = np.vstack([distributions(2000, 6, 1), np.eye(1, 6), [[0.3, 0.3, 0.2, 0.1, 0.1, 0.0]]])
    found = strict_thresholds(p[:, 0], p[:, 1], divergence)
    assert found == pytest.approx(certify(parse_rule("strict"), whole(p), divergence).value, abs=1e-12)
    assert found[-1] == 0


@each(
    ("divergence", "expected"),
    [
        ("kl", 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)),
        ("rkl", -math.log(0.2 + 2 * math.sqrt(0.15))),
        ("tv", 0.1),
        ("js", 0.006362199),
    ],
)
def test_strict_thresholds_by_hand(divergence: Divergence, expected: float) -> None:
    found = strict_thresholds(np.array([0.5], dtype=np.float32), np.array([0.3], dtype=np.float32), divergence)
    assert found == pytest.approx([expected], abs=1e-7)
    assert found.dtype == np.float64


# Margins


@widths
@every_rule
@every_divergence
def test_no_distribution_with_a_margin_falls_below_its_bound(rule: BoundRule, width: int, divergence: Divergence) -> None:
    """For every rule, as a tree of any width too."""
    for p in (distributions(600, 8, 2), peaked(600, 8, 3)):
        target = whole(p)
        accepted = ACCEPTED[rule.name](target, **rule.arguments)
        found = thresholds(target, accepted, width, divergence).value
        some = accepted.count < 8
        margin = p[some, 0] - p[some, accepted.count[some]]
        assert (margin_bound(rule, margin, width, divergence) <= found[some] * (1 + 1e-9) + 1e-10).all()


def test_margin_bounds_by_closed_form() -> None:
    m, log = MARGINS, np.log
    strict, several = parse_rule("strict"), parse_rule("top_m:4")
    assert margin_bound(strict, m, 1, "kl") == pytest.approx(coin(m), abs=1e-12)
    assert margin_bound(strict, m[:-1], 1, "rkl") == pytest.approx(-log(1 - m[:-1] ** 2) / 2, abs=1e-12)
    assert margin_bound(strict, m, 1, "rkl")[-1] == math.inf
    assert margin_bound(strict, m, 1, "tv") == pytest.approx(m / 2, abs=1e-12)
    share = (2 + 3 * m) / 5
    assert margin_bound(several, m, 1, "kl") == pytest.approx(share * coin(m / share), abs=1e-12)
    ratio = 0.6
    widest = np.maximum(m, (1 - ratio) / (1 + ratio))
    assert margin_bound(parse_rule("multiplicative:0.6"), m, 1) == pytest.approx(m * coin(widest) / widest, abs=1e-12)
    for delta, epsilon in ((0.2, 0.3), (0.5, 0.05)):
        most = np.minimum(1, np.minimum(m + 2 * epsilon, m * (1 + delta) / (1 - delta)))
        expected = most * coin(np.divide(m, most, out=np.ones_like(m), where=most > 0))
        assert margin_bound(parse_rule({"typical": [epsilon, delta]}), m, 1) == pytest.approx(expected, abs=1e-12)
    for width in (1, 2, 5):
        inside = m[:-1]
        up, down = log(1 + width * inside), log(1 - inside)
        tree = ((1 + width * inside) * up + width * (1 - inside) * down) / (width + 1)
        assert margin_bound(strict, inside, width, "kl") == pytest.approx(tree, abs=1e-12)
        assert margin_bound(strict, inside, width, "rkl") == pytest.approx(-(up + width * down) / (width + 1), abs=1e-12)
        assert margin_bound(strict, m, width, "tv") == pytest.approx(width * m / (width + 1), abs=1e-12)
        assert margin_bound(strict, m[-1:], width, "kl")[0] == pytest.approx(log(width + 1))


def precise_margin(margin: float, width: int, best: Decimal) -> Decimal:
    """The margin bound for KL(q||p) by its formula, in 60 digits."""
    m, x = Decimal(margin), best
    mean = (((x + m) * x**width).ln() / (width + 1)).exp()
    return -(1 - m - (width + 1) * x + (width + 1) * mean).ln()


def precise_coverage(margin: float, width: int) -> Decimal:
    """The coverage bound for KL(q||p) by its formula, in 60 digits."""
    m, w = Decimal(margin), width
    ends = (1 + (1 + (w * w - 1) * m * m).sqrt()) / (w + 1)
    logs = ((ends + m) / 2).ln() + ((ends - m) / 2).ln() + (w - 1) * ((ends * ends - m * m) / (2 * ends)).ln()
    return -Decimal(w + 1).ln() - logs / (w + 1)


@each("width", [1, 2, 5, 8])
@each("margin", [0.3, 0.9, *(1 - 10.0**-power for power in range(3, 16)), float(np.nextafter(1.0, 0.0))])
def test_bounds_in_the_other_direction_are_precise_up_to_a_point_mass(margin: float, width: int) -> None:
    """KL(q||p) is the logarithm of what rejected tokens have, and a point mass leaves them next to nothing."""
    margins = np.array([margin])
    with localcontext(prec=60):
        least = (1 - Decimal(margin)) / (width + 1)
        strict, dusty = (float(precise_margin(margin, width, best)) for best in (least, least / 5))
        coverage = float(precise_coverage(margin, width))
    assert margin_bound(parse_rule("strict"), margins, width, "rkl") == pytest.approx([strict], rel=1e-14)
    assert coverage_bound(margins, width, "rkl") == pytest.approx([coverage], rel=1e-14)
    wider = parse_rule(f"top_m:{5 * (width + 1) - width}")
    assert margin_bound(wider, margins, width, "rkl") == pytest.approx([dusty], rel=1e-14)


# Coverage of a tree


@widths
@every_divergence
def test_no_distribution_with_a_coverage_margin_falls_below_its_bound(width: int, divergence: Divergence) -> None:
    for size in (width + 1, width + 3):
        p = np.vstack([distributions(2000, size, 4), peaked(2000, size, 5)])
        target = whole(p)
        found = thresholds(target, ACCEPTED["strict"](target), width, divergence).value
        bound = coverage_bound(p[:, 0] - p[:, width], width, divergence)
        assert (bound <= found * (1 + 1e-9) + 1e-10).all()
        assert (bound >= 0).all()


@widths
def test_coverage_bounds_by_closed_form(width: int) -> None:
    """The Legendre transform of a tilted flat distribution, and the harmonic mean."""
    d, w = MARGINS[:-1], width
    tilt = (d * (w - 1) + np.sqrt(d**2 * (w - 1) ** 2 + 4 * (1 - d**2))) / (2 * (1 - d))
    kl = np.log(tilt) * d - np.log((w - 1 + tilt + 1 / tilt) / (w + 1))
    assert coverage_bound(d, w, "kl") == pytest.approx(kl, abs=1e-12)
    ends = (1 + np.sqrt(1 + (w**2 - 1) * d**2)) / (w + 1)
    logs = np.log((ends + d) / 2) + np.log((ends - d) / 2) + (w - 1) * np.log((ends**2 - d**2) / (2 * ends))
    assert coverage_bound(d, w, "rkl") == pytest.approx(-math.log(w + 1) - logs / (w + 1), abs=1e-12)
    assert coverage_bound(d, w, "tv") == pytest.approx(np.maximum(d / 2, d - 1 / (w + 1)), abs=1e-12)
    assert (coverage_bound(d, w, "kl") >= d**2 / 2 - 1e-12).all()
    z = d * (w + 1) / 2
    assert (coverage_bound(d, w) >= 2 / (w + 1) * (z * np.arcsinh(z) - np.sqrt(1 + z**2) + 1) - 1e-12).all()
    one = np.array([1.0])
    assert coverage_bound(one, w, "kl") == pytest.approx([math.log(w + 1)], abs=1e-12)
    assert coverage_bound(one, w, "rkl") == [math.inf]
    assert coverage_bound(one, w, "js") == pytest.approx(least_js(np.array([w / (w + 1) if w > 1 else 0.5])))


@given(st.floats(0, 1), st.floats(0, 1))
def test_no_pair_has_less_jensen_shannon_than_its_total_variation_asks_for(x: float, y: float) -> None:
    p, q = np.array([x, 1 - x]), np.array([y, 1 - y])
    assert distance(p, q, "js") >= least_js(distance(p, q, "tv")) - 1e-14
    assert distance(p, 1 - p, "js") == pytest.approx(least_js(abs(np.array(2 * x - 1))), abs=1e-14)


# Lossless sampling

KLS = [0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4]


def test_the_table_of_bounds_on_lossless_acceptance() -> None:
    kl = np.array(KLS)
    exact = [0.92933, 0.84233, 0.77764, 0.65145, 0.51443, 0.33556, 0.13485, 0.01832]
    assert beta_bound(kl) == pytest.approx(exact, abs=5e-6)


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
    kl, rkl = distance(p, q, "kl"), distance(p, q, "rkl")
    for divergence in (kl, rkl):
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


def extremal(rule: BoundRule, margin: float, width: int, best: float) -> Array:
    """One token ahead by `margin`, accepted and rejected tokens of probability `best`, and dust."""
    same = width + (int(rule.values[0]) - 1 if rule.name in ("top_m", "trtllm") and margin <= rule.values[-1] else 0)
    p = np.concatenate([[best + margin], np.full(same, best)])
    left = 1 - p.sum()
    grains = max(1, math.ceil(left / best * 1.01)) if left > 1e-12 else 0
    return np.concatenate([p, np.full(grains, left / max(1, grains))])


@widths
@every_divergence
@each(
    ("specification", "margin"),
    [
        ("strict", 0.3),
        ("additive:0.1", 0.3),
        ("tree:2", 0.3),
        ("top_m:3", 0.3),
        ("top_m:1", 0.7),
        ("trtllm:4,0.6", 0.3),
        ("trtllm:4,0.2", 0.3),
        ("multiplicative:0.9", 0.6),
        ("multiplicative:0.2", 0.3),
        ("multiplicative:1", 0.3),
        ("typical:0.09,0.3", 0.8),
    ],
)
def test_margin_bounds_are_attained(specification: str, margin: float, width: int, divergence: Divergence) -> None:
    """A little inside what the rule rejects, where only strictly smaller tokens are."""
    rule = parse_rule(specification)
    best = float(BEST_REJECTED[rule.name](np.array(margin), width, *rule.values))
    p = extremal(rule, margin + 1e-9, width, best - 1e-9)
    target = whole(p[None])
    accepted = ACCEPTED[rule.name](target, **rule.arguments)
    assert p[accepted.count[0]] == pytest.approx(best, abs=1e-8)
    found = thresholds(target, accepted, width, divergence).value
    assert found == pytest.approx(margin_bound(rule, np.array([margin]), width, divergence), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("divergence", ["kl", "rkl", "tv"])
@pytest.mark.parametrize("margin", [0.02, 0.3, 0.6, 0.95])
def test_coverage_bounds_are_attained(margin: float, divergence: Divergence) -> None:
    """Three tokens, width 2: all p with the margin in one scan. Two tokens, width 1: the margin is all there is."""
    last = np.linspace(max(0.0, (1 - 2 * margin) / 3), (1 - margin) / 3, 20001)
    target = whole(np.stack([last + margin, np.clip(1 - margin - 2 * last, last, last + margin), last], 1))
    found = thresholds(target, ACCEPTED["strict"](target), 2, divergence).value
    assert found.min() == pytest.approx(coverage_bound(np.array([margin]), 2, divergence)[0], abs=1e-8)
    pair = threshold(np.array([(1 + margin) / 2, (1 - margin) / 2]), 1, 1, divergence)
    assert coverage_bound(np.array([margin]), 1, divergence) == pytest.approx([pair], abs=1e-12)


def bisected(low: Array, high: Array, exceeds: Any) -> Array:
    """Where a condition that holds from some number on begins to hold, between `low` and `high`."""
    for _ in range(200):
        middle = (low + high) / 2
        beyond = exceeds(middle)
        low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
    return low


def jeffreys_bound(total: Any) -> Array:
    """The least beta at KL(p||q) + KL(q||p) = `total`, as docs/theory.md states it: 2 expit(-2z), 4 z tanh z = total."""
    quarter = np.maximum(np.asarray(total, dtype=np.float64), 0) / 4
    z = bisected(np.zeros_like(quarter), quarter + 0.3, lambda z: z * np.tanh(z) > quarter)
    return np.asarray(2 * expit(-2 * np.where(np.isinf(quarter), np.inf, z)))


def rejection_bound(rejected: Any, amount: Any, divergence: Divergence) -> Array:
    """The most q(R) at a divergence of `amount` with p(R) = `rejected`, as docs/theory.md states it: that of two coins."""
    x, amount = (np.asarray(values, dtype=np.float64) for values in (rejected, amount))

    def coins(y: Array) -> Array:
        return distance(np.stack([x, 1 - x], -1), np.stack([y, 1 - y], -1), divergence)

    with np.errstate(divide="ignore", invalid="ignore"):
        return bisected(x, np.ones_like(x), lambda y: coins(y) > np.maximum(amount, 0))


@given(st.floats(1e-6, 1 - 1e-6))
def test_the_bound_from_both_directions_is_attained_by_a_coin_and_its_mirror_image(x: float) -> None:
    p = np.array([x, 1 - x])
    total = distance(p, 1 - p, "kl") + distance(1 - p, p, "kl")
    assert float(jeffreys_bound(total)) == pytest.approx(2 * min(x, 1 - x), rel=1e-9)


@every_divergence
@given(x=st.floats(0.01, 0.99), share=st.floats(0, 1))
def test_the_bound_on_sampled_drafts_is_attained_by_coins(x: float, share: float, divergence: Divergence) -> None:
    y = x + share * (0.999 - x) if x < 0.999 else x
    amount = distance(np.array([x, 1 - x]), np.array([y, 1 - y]), divergence)
    bound = rejection_bound(np.array([x]), np.array([amount]), divergence)[0]
    assert bound == pytest.approx(y, abs=1e-5)
    assert bound >= y - 1e-6
