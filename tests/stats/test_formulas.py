"""Tokens per round without a model: by hand, against published ones, and against accept bits replayed as rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.stats import formulas
from alphaprof.stats.formulas import RoundCost, tokens_per_round
from alphaprof.totals.replay import Trace, replay, run_lengths
from tests.loops import each

gammas = st.integers(1, 12)
shares = st.floats(0.01, 0.99)

BY_HAND = {
    "one draft": (0.3, 1, 1.3),
    "two drafts": (0.5, 2, 1.75),
    "never right": (0.0, 5, 1.0),
    "always right": (1.0, 5, 6.0),
}


@each(("alpha", "gamma", "expected"), BY_HAND.values(), ids=list(BY_HAND))
def test_tokens_per_round_by_hand(alpha: float, gamma: int, expected: float) -> None:
    assert tokens_per_round(alpha, gamma) == pytest.approx(expected, rel=1e-14)


@each(
    ("alpha", "gamma", "expected"),
    [
        (0.8, 4, 3.36),
        # Leviathan et al., table 2: T5-XXL with T5-small. Their speedups: 3.4, 2.6, 3.1, 2.3.
        (0.75, 7, 3.60),
        (0.62, 7, 2.57),
        (0.65, 5, 2.64),
        (0.53, 5, 2.08),
    ],
)
def test_tokens_per_round_of_known_examples(alpha: float, gamma: int, expected: float) -> None:
    assert round(float(tokens_per_round(alpha, gamma)), 2) == expected


@given(shares, gammas)
def test_the_sum_is_the_textbook_form_where_that_is_defined(alpha: float, gamma: int) -> None:
    assert tokens_per_round(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-9)


def trace_of(agrees: np.ndarray, proposed: np.ndarray) -> Trace:
    """The log of documents of equal length, [documents, length]: which drafts are right, and how many would be proposed."""
    documents, length = agrees.shape
    stop = length * np.arange(1, documents + 1)
    runs = run_lengths(agrees.ravel(), stop - length, stop)
    return Trace(runs, proposed.ravel(), stop - length, stop)


@each("alpha", [0.2, 0.5, 0.8])
def test_the_formula_is_what_replay_counts_on_simulated_texts(alpha: float) -> None:
    agrees = np.random.default_rng(3).random((500, 2000)) < alpha
    for gamma in (1, 4, 8):
        counted = replay(trace_of(agrees, np.full(agrees.shape, 100)), gamma)
        assert tokens_per_round(alpha, gamma) == pytest.approx(counted.tokens.sum() / counted.rounds.sum(), rel=0.01)


@each(("alpha", "coverage"), [(0.51, 0.7), (0.2, 0.3), (0.8, 0.05), (0.5, 1.0)])
def test_coverage_is_what_replay_counts_where_only_some_positions_have_a_proposal(alpha: float, coverage: float) -> None:
    """Tokens per round and the time of all rounds, of texts where positions have a proposal independently of each other."""
    rng, cost = np.random.default_rng(4), RoundCost(0.02, 1.1, 0.05)
    agrees, proposed = rng.random((500, 2000)) < alpha, np.where(rng.random((500, 2000)) < coverage, 100, 0)
    for gamma in (1, 4, 8):
        counted = replay(trace_of(agrees, proposed), gamma)
        tokens, rounds, drafting = counted.tokens.sum(), counted.rounds.sum(), counted.drafted[:, 0].sum()
        emitted, spent = (
            formulas.over_all_rounds(each, coverage) for each in (tokens_per_round(alpha, gamma), cost.of_round(gamma))
        )
        time = drafting * cost.of_round(gamma) + rounds - drafting  # a decode step where nothing is proposed
        assert emitted == pytest.approx(tokens / rounds, rel=0.01)
        assert emitted / spent == pytest.approx(tokens / time, rel=0.01)


@given(shares, gammas)
def test_the_alpha_of_a_rate_is_the_alpha_that_made_it(alpha: float, gamma: int) -> None:
    rate = float(formulas.accepted_per_drafted(tokens_per_round(alpha, gamma), gamma))
    assert formulas.alpha_of_rate(rate, gamma) == pytest.approx(alpha, abs=1e-7)


@each("rate", [-0.1, 1.2])
def test_rates_that_are_no_shares_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="is not between 0 and 1"):
        formulas.alpha_of_rate(rate, 4)


@given(gammas, st.floats(0.001, 1), st.floats(0.5, 2), st.floats(0, 0.5))
def test_at_the_break_even_alpha_the_speedup_is_1(gamma: int, draft: float, verify: float, overhead: float) -> None:
    cost = RoundCost(draft, verify, overhead)
    found = formulas.break_even_alpha(gamma, cost)
    if found is None:
        assert formulas.speedup(1.0, gamma, cost) < 1
    elif found == 0:
        assert formulas.speedup(0.0, gamma, cost) >= 1
    else:
        assert formulas.speedup(found, gamma, cost) == pytest.approx(1, abs=1e-6)


def test_the_cost_of_a_round_by_hand() -> None:
    cost = RoundCost(draft=0.1, verify=1.13, overhead=0.03)
    assert cost.verification(4) == pytest.approx(1.13)
    assert cost.of_round(4) == pytest.approx(0.4 + 1.13 + 0.03)
    assert formulas.speedup(0.8, 4, cost) == pytest.approx(3.3616 / 1.56)
