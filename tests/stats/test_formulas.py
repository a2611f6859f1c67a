"""Tokens per round without a model: by hand, against the textbook, and against chains of accept bits replayed as rounds."""

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


@st.composite
def chains(draw: st.DrawFn) -> tuple[float, float]:
    """Alpha and a burstiness that a text with this alpha can have."""
    alpha = draw(shares)
    return alpha, draw(st.floats(formulas.least_burstiness(alpha), 0.99))


BY_HAND = {
    "one draft": (0.3, 1, 0.0, 1.3),
    "two drafts": (0.5, 2, 0.0, 1.75),
    "never right": (0.0, 5, 0.0, 1.0),
    "never right, whatever follows": (0.0, 5, 0.7, 1.0),
    "always right": (1.0, 5, 0.0, 6.0),
    "always right, whatever follows": (1.0, 5, 0.7, 6.0),
    # A round that starts right emits a draft and a correction; one that starts wrong leaves a right start to the next.
    "in turns": (0.5, 3, -1.0, 2.0),
    # Half of the tokens cost a round each, half a fifth of one: the harmonic mean of 1 and 5.
    "all right or all wrong": (0.5, 4, 1.0, 1 / (0.5 / 5 + 0.5 / 1)),
}


@each(("alpha", "gamma", "burstiness", "expected"), BY_HAND.values(), ids=list(BY_HAND))
def test_tokens_per_round_by_hand(alpha: float, gamma: int, burstiness: float, expected: float) -> None:
    assert tokens_per_round(alpha, gamma, burstiness) == pytest.approx(expected, rel=1e-14)


@each(
    ("alpha", "gamma", "burstiness", "expected"),
    [
        (0.8, 4, 0.0, 3.36),
        (0.8, 4, 0.6, 2.99),
        (0.8, 8, 0.6, 3.81),
        (0.8, 4, -0.2, 3.50),
        # Leviathan et al., table 2: T5-XXL with T5-small. Their speedups: 3.4, 2.6, 3.1, 2.3.
        (0.75, 7, 0.0, 3.60),
        (0.62, 7, 0.0, 2.57),
        (0.65, 5, 0.0, 2.64),
        (0.53, 5, 0.0, 2.08),
    ],
)
def test_tokens_per_round_of_known_examples(alpha: float, gamma: int, burstiness: float, expected: float) -> None:
    assert round(float(tokens_per_round(alpha, gamma, burstiness)), 2) == expected


@given(chains(), gammas)
def test_the_form_without_singularities_is_the_textbook_form_where_that_is_defined(
    chain: tuple[float, float], gamma: int
) -> None:
    alpha, burstiness = chain
    r = alpha + burstiness * (1 - alpha)
    expected = 1 + alpha / (1 - alpha) * (1 - r**gamma) / (1 - burstiness * r**gamma)
    assert tokens_per_round(alpha, gamma, burstiness) == pytest.approx(expected, rel=1e-9)


def bits(alpha: float, burstiness: float, documents: int, length: int, seed: int) -> np.ndarray:
    """Accept bits of stationary chains, [documents, length]; the transition chances are those of the definition:
    P(right after right) - P(right after wrong) = burstiness, and alpha in equilibrium.
    """
    draw = np.random.default_rng(seed).random((length, documents))
    found = [draw[0] < alpha]
    after_wrong = alpha * (1 - burstiness)
    for row in draw[1:]:
        found.append(row < np.where(found[-1], after_wrong + burstiness, after_wrong))
    return np.array(found).T


@each(("alpha", "burstiness"), [(0.8, 0.0), (0.8, 0.6), (0.8, -0.2), (0.35, 0.3), (0.5, 0.95), (0.3, -0.4), (0.5, -0.9)])
def test_the_formula_is_what_replay_counts_on_simulated_chains(alpha: float, burstiness: float) -> None:
    documents, length = 500, 2000
    drawn = bits(alpha, burstiness, documents, length, seed=3)
    assert drawn.mean() == pytest.approx(alpha, abs=0.01)
    stop = length * np.arange(1, documents + 1)
    start, free = stop - length, np.full(drawn.size, 100)
    runs = run_lengths(drawn.ravel(), start, stop)
    trace = Trace(runs, free, start, stop, np.full(documents, 10**9), np.zeros(drawn.size, dtype=bool))
    for gamma in (1, 4, 8):
        counted = replay(trace, gamma)
        simulated = counted.tokens.sum() / counted.rounds.sum()
        assert tokens_per_round(alpha, gamma, burstiness) == pytest.approx(simulated, rel=0.01)


@given(chains(), gammas)
def test_the_alpha_of_a_rate_is_the_alpha_that_made_it(chain: tuple[float, float], gamma: int) -> None:
    alpha, burstiness = chain
    rate = float(formulas.accepted_per_drafted(tokens_per_round(alpha, gamma, burstiness), gamma))
    assert formulas.alpha_of_rate(rate, gamma, burstiness) == pytest.approx(alpha, abs=1e-7)


@each(("rate", "burstiness"), [(0.9, -0.5), (0.05, -0.5), (1.2, 0.0)])
def test_rates_that_no_text_has_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="no text of burstiness"):
        formulas.alpha_of_rate(rate, 4, burstiness)


@given(st.floats(-1, 1), gammas, st.floats(0.001, 1), st.floats(0.5, 2), st.floats(0, 0.3), st.floats(0, 0.5))
def test_at_the_break_even_alpha_the_speedup_is_1(
    burstiness: float, gamma: int, draft: float, verify: float, slope: float, overhead: float
) -> None:
    cost = RoundCost(draft, verify, slope, overhead)
    found = formulas.break_even_alpha(gamma, cost, burstiness)
    low, high = formulas.feasible_alphas(burstiness)
    if found is None:
        assert formulas.speedup(high, gamma, cost, burstiness) < 1
    elif found == low:
        assert formulas.speedup(low, gamma, cost, burstiness) >= 1
    else:
        assert formulas.speedup(found, gamma, cost, burstiness) == pytest.approx(1, abs=1e-6)


def test_the_cost_of_a_round_by_hand() -> None:
    cost = RoundCost(draft=0.1, verify=1.05, verify_slope=0.02, overhead=0.03)
    assert cost.verification(4) == pytest.approx(1.13)
    assert cost.of_round(4) == pytest.approx(0.4 + 1.13 + 0.03)
    assert formulas.speedup(0.8, 4, cost) == pytest.approx(3.3616 / 1.56)


@each(("alpha", "least"), [(0.8, -0.25), (0.2, -0.25), (0.5, -1.0), (0.0, 0.0), (1.0, 0.0)])
def test_the_least_burstiness_by_hand(alpha: float, least: float) -> None:
    assert formulas.least_burstiness(alpha) == pytest.approx(least)
    formulas.check_chain(alpha, least)
    formulas.check_chain(alpha, 1.0)
    with pytest.raises(ValueError, match="burstiness must be between"):
        formulas.check_chain(alpha, least - 0.001)
