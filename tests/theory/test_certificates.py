"""Certificates of acceptance: against golden values, convex programs and a second implementation."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import rel_entr

from alphaprof.report.sections.target import certain_runs
from alphaprof.rules import BoundRule, parse_rule
from alphaprof.theory.certificates import (
    ACCEPTED,
    CHUNK,
    LARGE,
    SMALL,
    Accepted,
    Divergence,
    Target,
    beta_bound,
    budget,
    certify,
    margin_thresholds,
    pooled,
    strict_thresholds,
    thresholds,
)
from tests.loops import each
from tests.reference import DIVERGENCES, threshold

Array = np.ndarray[Any, Any]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "certificates.json").read_text())["cases"]
GOLDEN_RULES = {
    "greedy_index": "strict",
    "greedy_value": "additive:0",
    "additive": "additive:{eps}",
    "mult": "multiplicative:{c}",
    "topm": "top_m:{m}",
    "typical": "typical:{eps},{delta}",
}
SPECIFICATIONS = [
    "strict",
    "additive:0",
    "additive:0.1",
    "additive:0.3",
    "multiplicative:0",
    "multiplicative:0.3",
    "top_m:1",
    "top_m:3",
    "typical:0.09,0.3",
    "typical:0.3,0.55",
    "trtllm:2,0.6",
    "trtllm:4,0.1",
    "tree:1",
    "tree:3",
]
TIGHT = {"kl": 0.7, "tv": 0.8}  # median of lower bounds over thresholds, from 8 of 40 probabilities
PARTS = {  # what one token adds to each divergence
    "kl": rel_entr,
    "tv": lambda p, q: np.abs(p - q) / 2,
}
every_divergence = each("divergence", DIVERGENCES)
every_rule = each("rule", [parse_rule(name) for name in SPECIFICATIONS], ids=lambda rule: rule.id)


def distance(p: Array, q: Array, divergence: Divergence) -> Array:
    """A divergence by its definition, over the last axis."""
    return np.asarray(PARTS[divergence](p, q).sum(-1))


def distributions(count: int, size: int, seed: int) -> Array:
    """Flat, peaked and very peaked distributions, [count, size], the largest probability first."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, size)) * rng.choice([0.05, 0.5, 1.5, 4.0], size=(count, 1))
    p = np.exp(logits)
    return -np.sort(-p / p.sum(1, keepdims=True))


def entropies(p: Array) -> Array:
    return np.asarray(-np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1))


def whole(p: Array) -> Target:
    """Everything is known of distributions [n, V]."""
    return Target(p, p.shape[-1], entropies(p))


@st.composite
def ranked(draw: st.DrawFn, least: int = 1, most: int = 7) -> Array:
    """A distribution, the largest probability first, often with ties and zeros, [V]."""
    weights = draw(st.lists(st.integers(0, 12), min_size=least, max_size=most).filter(any))
    return np.sort(np.array(weights) / sum(weights))[::-1]


def infinities_and(expected: object) -> Any:
    return math.inf if math.isinf(float(expected)) else pytest.approx(float(expected), abs=1e-6)


@every_divergence
@each("case", GOLDEN, ids=lambda case: f"{case['id']}: {case['note']}")
def test_golden_cases_are_met(case: dict[str, Any], divergence: Divergence) -> None:
    p, width = np.sort(case["p"])[::-1], case["draft_width"]
    target = whole(p[None])
    rule = parse_rule(GOLDEN_RULES[case["rule"]].format(**case["params"]))
    accepted = ACCEPTED[rule.name](target, **rule.arguments)
    assert (accepted.count.tolist(), accepted.known.tolist()) == ([case["n_accepted"]], [True])
    found = thresholds(target, accepted, width, divergence)
    assert found.exact.tolist() == [True]
    assert found.value[0] == infinities_and(case[divergence])
    assert threshold(case["p"], case["n_accepted"], width, divergence) == infinities_and(case[divergence])


@every_divergence
@each("temperature", [0.3, 1.0, 2.0])
@each("size", [2, 5, 50, 2000])
def test_the_two_implementations_agree_on_float32_softmaxes(size: int, temperature: float, divergence: Divergence) -> None:
    """Their sums are off by about 1e-7, which leaves a block that holds all of p more than everything to give away."""
    logits = (np.random.default_rng(size).normal(size=(100, size)) * 3 / temperature).astype(np.float32)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert p.dtype == np.float32
    assert (p.astype(np.float64).sum(1) > 1).any()
    for count, width in ((1, 1), (2, 1), (1, 2), (3, 2)):
        if count + width <= size:
            accepted = Accepted(np.full(100, count), np.ones(100, dtype=bool), np.full(100, np.inf))
            logged = Target(-np.sort(-p, 1)[:, : count + width], size)
            found = thresholds(logged, accepted, width, divergence)
            assert found.exact.all()
            expected = [threshold(row, count, width, divergence) for row in p]
            assert found.value == pytest.approx(expected, rel=1e-13, abs=1e-14)


@every_divergence
def test_a_truncated_log_gives_lower_bounds_and_says_so(divergence: Divergence) -> None:
    p = distributions(400, 40, 5)
    full, ratios = whole(p), []
    target = Target(p[:, :8], 40, full.entropy)
    for rule in map(parse_rule, SPECIFICATIONS):
        for width in (1, 2, 4, 12):
            truth = thresholds(full, ACCEPTED[rule.name](full, **rule.arguments), width, divergence)
            found = thresholds(target, ACCEPTED[rule.name](target, **rule.arguments), width, divergence)
            assert truth.exact.all()
            assert (found.value <= truth.value + 1e-12).all()
            assert found.value[found.exact] == pytest.approx(truth.value[found.exact], abs=1e-12)
            lower = ~found.exact & np.isfinite(truth.value) & (truth.value > 1e-3)
            ratios.append(found.value[lower] / truth.value[lower])
    assert np.median(np.concatenate(ratios)) > TIGHT[divergence]


def test_what_is_left_over_limits_tokens_that_are_not_logged() -> None:
    """Rank 4 has at most 0.02; ranks 4 and 5 at best 0.01 each (and what rounding may hide)."""
    target = Target(np.array([[0.5, 0.3, 0.18]]), 9)
    everything = ACCEPTED["top_m"](target, m=3)
    high = np.array([[0.5], [0.3], [0.18]])
    for width in (1, 2):
        found = thresholds(target, everything, width)
        low = np.full((width, 1), 0.02 / width)
        assert found.value == pytest.approx(pooled(high, low, "kl"), abs=1e-5)
        assert (found.value < pooled(high, low, "kl")).all()
        assert not found.exact.any()


def test_zeros_at_the_end_of_the_log_are_all_that_follows() -> None:
    target = Target(np.array([[0.6, 0.4, 0.0], [0.6, 0.3, 0.1]]), 50)
    found = thresholds(target, ACCEPTED["strict"](target), 5, "kl")
    assert found.exact.tolist() == [True, False]
    assert found.value[0] == pytest.approx(threshold([0.6, 0.4, 0, 0, 0, 0], 1, 5), abs=1e-12)


@each(
    ("divergence", "gap", "expected"),
    [("kl", 1e-9, 5e-19 / 0.74), ("tv", 1e-9, 5e-10)],
)
def test_a_near_tie_keeps_its_precision(divergence: Divergence, gap: float, expected: float) -> None:
    """With p = 0.37 and 0.37 - x: x^2/(2 * 0.74) for kl."""
    found = pooled(np.array([[0.37]]), np.array([[0.37 - gap]]), divergence)[0]
    assert found == pytest.approx(expected, rel=1e-5, abs=0)


@every_divergence
def test_a_wide_tree_over_tokens_without_probability_keeps_its_precision(divergence: Divergence) -> None:
    p = np.concatenate([[0.6, 0.3, 0.1], np.zeros(40)])
    for width in (3, 12, 30):
        expected = threshold(p, 1, width, divergence)
        assert pooled(p[:1, None], p[width:0:-1, None], divergence)[0] == pytest.approx(expected, abs=1e-13)


def test_many_positions_are_what_they_are_one_by_one() -> None:
    p = distributions(CHUNK + 37, 6, 3)
    target = whole(p)
    rule = parse_rule("multiplicative:0.4")
    found = thresholds(target, ACCEPTED[rule.name](target, **rule.arguments), 2)
    for row in (0, CHUNK - 1, CHUNK, CHUNK + 36):
        alone = whole(p[row : row + 1])
        expected = thresholds(alone, ACCEPTED[rule.name](alone, **rule.arguments), 2)
        assert found.value[row] == pytest.approx(expected.value[0], abs=1e-14)


# Accepted sets


@every_rule
@given(p=ranked(), kind=st.sampled_from([np.float32, np.float64]))
def test_the_accepted_tokens_are_those_that_the_rule_keeps(rule: BoundRule, p: Array, kind: Any) -> None:
    """Rank by rank against the rule on the columns of a log."""
    p, size, ranks = p.astype(kind), len(p), np.arange(len(p))
    columns = {
        "draft_top": ranks,
        "target_top": np.zeros(size, dtype=int),
        "token": np.zeros(size, dtype=int),
        "greedy": np.ones(size, dtype=bool),
        "target_top_prob": np.full(size, p[0]),
        "target_prob_of_draft_top": p,
        "target_rank_of_draft_top": ranks + 1,
        "target_entropy": np.full(size, entropies(p)),
        "draft_rank_of_token": ranks + 1,
    }
    accepted = ACCEPTED[rule.name](whole(p[None]), **rule.arguments)
    kept = parse_rule("strict").accept(columns) if rule.name == "tree" else rule.accept(columns)
    assert (ranks < accepted.count[0]).tolist() == (kept > 0).tolist()
    assert accepted.known.all()
    assert (p[accepted.count[0] :] <= accepted.ceiling[0]).all()


@every_rule
@given(p=ranked(least=2), cut=st.integers(1, 6))
def test_what_a_truncated_log_says_of_the_accepted_tokens_is_true(rule: BoundRule, p: Array, cut: int) -> None:
    full = whole(p[None])
    truth = ACCEPTED[rule.name](full, **rule.arguments)
    found = ACCEPTED[rule.name](Target(p[None, :cut], len(p), full.entropy), **rule.arguments)
    assert found.count[0] <= truth.count[0]
    assert not found.known[0] or found.count[0] == truth.count[0]
    assert (p[truth.count[0] :] <= found.ceiling[0]).all()
    assert found.known[0] or found.count[0] == min(cut, len(p))  # as much as can be known


@each(
    ("specification", "count", "known"),
    [
        ("strict", 1, True),
        ("additive:0", 2, True),
        ("additive:0.25", 3, True),
        ("additive:0.3125", 4, False),
        ("additive:0.375", 9, True),
        ("multiplicative:1", 2, True),
        ("multiplicative:0.25", 3, True),
        ("multiplicative:0", 9, True),
        ("top_m:6", 6, True),
        ("top_m:20", 9, True),
        ("trtllm:2,0.25", 2, True),
        ("trtllm:5,0.25", 3, True),
        ("trtllm:4,0.3125", 4, True),
        ("trtllm:5,0.3125", 4, False),
        ("tree:5", 1, True),
        ("typical:0.5,0.3", 2, True),
        ("typical:0.125,1", 3, True),
    ],
)
def test_accepted_tokens_by_hand(specification: str, count: int, known: bool) -> None:
    """3/8, 3/8, 1/8 and 1/16 are logged of nine tokens; exp(-H) = 3/4."""
    target = Target(np.array([[0.375, 0.375, 0.125, 0.0625]]), 9, np.array([-math.log(0.75)]))
    rule = parse_rule(specification)
    found = ACCEPTED[rule.name](target, **rule.arguments)
    assert (found.count.tolist(), found.known.tolist()) == ([count], [known])


def test_the_top_token_is_accepted_whatever_rounding_says() -> None:
    """Where p is flat, exp(-H) is the top probability, and may come out above it."""
    target = Target(np.full((1, 4), 0.25), 4, np.array([math.log(4) - 1e-12]))
    assert ACCEPTED["typical"](target, epsilon=1, delta=1).count == [4]


@every_divergence
def test_the_two_implementations_agree(divergence: Divergence) -> None:
    for size, seed in ((2, 0), (5, 1), (24, 2)):
        p = distributions(60, size, seed)
        for count, width in itertools.product(range(size + 2), (1, 2, 5, size)):
            accepted = Accepted(np.full(60, count), np.ones(60, dtype=bool), np.full(60, np.inf))
            found = thresholds(whole(p), accepted, width, divergence)
            assert found.exact.all()
            chosen = range(60) if size < 10 else range(count, 60, 25)
            assert found.value[chosen] == pytest.approx(
                [threshold(p[i], count, width, divergence) for i in chosen], abs=1e-12
            )


def hostile(p: Array, count: int, width: int, drafts: int, rng: np.random.Generator) -> Array:
    """Drafts [drafts, V] whose `width` top tokens are rejected ones, ties allowed: at random, and close to the cheapest."""
    size = len(p)
    block = np.arange(size) >= count
    lifted = np.where(block & (np.arange(size) < count + width), np.maximum(p, p[0]), p)
    near = np.exp(rng.normal(size=(drafts // 2, size)) * rng.choice([1e-4, 1e-2, 0.3], size=(drafts // 2, 1)))
    mix = rng.uniform(size=(drafts // 2, 1))
    q = np.vstack([near * (mix * p + (1 - mix) * lifted), rng.dirichlet(np.ones(size), drafts - drafts // 2)])
    keys = rng.random((drafts, size)) - (q > np.median(q)) + np.where(block, 0, 9)
    keys[: drafts // 2, count : count + width] -= 5  # the cheapest choice, as often as any
    drafted = np.zeros((drafts, size), dtype=bool)
    np.put_along_axis(drafted, np.argsort(keys, 1)[:, :width], True, 1)
    best = np.where(drafted, 0, q).max(1, keepdims=True)
    level = np.where(rng.random((drafts, 1)) < 0.5, best, rng.uniform(q.min(1, keepdims=True), best))
    q = np.where(drafted, np.maximum(q, level), np.minimum(q, level))  # lift the drafts, lower the others
    return np.asarray(q / q.sum(1, keepdims=True))


@every_divergence
def test_no_draft_below_the_threshold_has_all_its_top_tokens_rejected(divergence: Divergence) -> None:
    """And some come close to it: no larger number would do."""
    rng = np.random.default_rng(11)
    closest = []
    for index, size in enumerate([3, 4, 5, 6, 8] * 5):
        p = distributions(1, size, index)[0]
        count = int(rng.integers(1, size - 1))
        width = int(rng.integers(1, min(3, size - count) + 1))
        q = hostile(p, count, width, 1000, rng)
        top = np.sort(q, 1)[:, -width]
        assert ((q >= top[:, None] - 1e-15)[:, count:].sum(1) >= width).all()  # rejected, for a tie-break at least
        found = distance(p, q, divergence)
        limit = threshold(p, count, width, divergence)
        assert found.min() >= limit - 1e-12
        closest.append(found.min() / limit)
    assert np.median(closest) < 1.01


@each("width", [1, 2, 3, 5])
def test_the_margin_alone_never_promises_too_much_and_its_bound_is_attained(width: int) -> None:
    """Against the certificates of whole distributions, for any p; by hand: width 1, margin 0.5 is log 2 - h(0.75)."""
    p = distributions(2_000, 12, seed=width)
    exact = certify(parse_rule(f"tree:{width}"), Target(p, p.shape[1])).value
    assert (margin_thresholds(p[:, 0] - p[:, 1], width) <= exact + 1e-12).all()
    margin = np.linspace(0.0, 0.99, 12)
    rest = (1 - margin) / (width + 1)
    sharpest = np.concatenate([(rest + margin)[:, None], np.repeat(rest[:, None], width, axis=1)], axis=1)
    attained = certify(parse_rule(f"tree:{width}"), Target(sharpest, width + 1)).value
    assert margin_thresholds(margin, width) == pytest.approx(attained, abs=1e-12)
    assert margin_thresholds(np.array([0.5])) == pytest.approx(math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75))


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
    for epsilon, runs in (
        (0.15, [2 + 1 + 0 + 1, 3 + 2 + 1]),
        (0.2, [1 + 0 + 0 + 1, 0 + 2 + 1]),
        (0.0, [4 + 3 + 2 + 1, 3 + 2 + 1]),
    ):
        assert certain_runs(found, np.array([4, 3]), epsilon, 3)[1].tolist() == runs


@each("rule", ["strict", "multiplicative:0"])  # the second rejects nothing, so that nothing is pooled
def test_what_has_no_threshold_is_refused_with_what_has(rule: str) -> None:
    target, unknown = Target(np.array([[0.6, 0.3, 0.1]]), 3), "rkl"
    with pytest.raises(ValueError, match="no threshold is known for divergence rkl, only for kl, tv"):
        certify(parse_rule(rule), target, unknown)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no threshold is known for rule lossless, only for strict, additive"):
        certify(parse_rule("lossless"), target)
