"""Speedup: costs worked out by hand, errors against numerical derivatives and simulation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from alphaprof.analysis.estimate import ratio
from alphaprof.analysis.speedup import (
    RoundCounts,
    Speedup,
    StepTime,
    StepTimes,
    free_draft,
    relative_time,
    round_costs,
    speedup,
    time_shares,
)
from tests import reference

Array = np.ndarray[Any, Any]

# T(1), T(2), T(3) and one draft step: a round that drafts 0, 1, 2 tokens costs 1, 1.4, 1.9.
TIMES = StepTimes({1: StepTime(10.0, 0.01), 2: StepTime(12.0, 0.02), 3: StepTime(15.0, 0.03)}, StepTime(2.0, 0.05))


def counts(
    tokens: list[float], rounds: list[float], drafted: list[list[float]], cluster: list[str] | None = None
) -> RoundCounts:
    """Documents that stand alone, unless clusters are given."""
    names = cluster or [f"document {index}" for index in range(len(tokens))]
    return RoundCounts(np.array(tokens), np.array(rounds), np.array(drafted), np.array(names, dtype=object))


# Rounds that drafted exactly 0, 1, 2 tokens: 1, 1, 3 and 0, 0, 4.
HAND = counts([10.0, 6.0], [5.0, 4.0], [[4.0, 3.0], [4.0, 4.0]])
OTHER = counts([20.0, 30.0, 25.0], [9.0, 11.0, 12.0], [[9.0, 8.0], [11.0, 11.0], [10.0, 7.0]])

documents = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60), st.integers(1, 60)), min_size=2, max_size=8
)


def drawn(rows: list[tuple[int, int, int, int]]) -> RoundCounts:
    """Documents with rounds that drafted 0, 1 and 2 tokens (the last at least once) and further tokens."""
    none, one, two, more = (
        np.array(column, dtype=float) for column in zip(*((a, b, c, d) for d, a, b, c in rows), strict=True)
    )
    rounds = none + one + two
    return counts((rounds + more).tolist(), rounds.tolist(), np.column_stack([one + two, two]).tolist())


def joined(*parts: RoundCounts) -> RoundCounts:
    """Documents of several pools in one."""
    return RoundCounts(
        *(np.concatenate([getattr(part, item.name) for part in parts]) for item in dataclasses.fields(RoundCounts))
    )


def known(found: Speedup | None) -> Speedup:
    assert found is not None
    return found


def test_rounds_by_what_they_drafted() -> None:
    assert HAND.exactly().tolist() == [[1, 1, 3], [0, 0, 4]]


def test_rows_are_some_of_the_documents() -> None:
    picked = OTHER.rows(np.array([True, False, True]))
    assert picked.tokens.tolist() == [20, 25]
    assert picked.cluster.tolist() == ["document 0", "document 2"]
    assert picked.exactly().tolist() == OTHER.exactly()[[0, 2]].tolist()


def test_cost_of_a_round_by_hand() -> None:
    assert round_costs(TIMES, 2) == pytest.approx([1.0, 0.2 + 1.2, 0.4 + 1.5])


def test_relative_time_by_hand() -> None:
    """1 + 1.4 + 3 * 1.9 = 8.1 and 4 * 1.9 = 7.6 for 10 and 6 tokens.

    Of two documents, the variance of one is (7.6 / 6 - 8.1 / 10)^2 / 2 = 1.37^2 / 18, of which the ratio has
    (10^2 + 6^2) / 16^2.
    """
    found = relative_time(HAND, TIMES)
    assert found.value == pytest.approx(15.7 / 16)
    assert found.stderr == pytest.approx(1.37 * math.sqrt(136 / 18) / 16)
    assert (found.documents, found.freedom) == (2, pytest.approx(1))


def test_speedup_by_hand() -> None:
    found = known(speedup([HAND], [1.0], TIMES))
    assert found.value == pytest.approx(16 / 15.7)
    assert found.sampling_error == pytest.approx(1.37 * math.sqrt(136 / 18) / 15.7)
    assert (found.freedom, found.documents) == (pytest.approx(1), 2)


def test_break_even_by_hand() -> None:
    assert (TIMES.c(), TIMES.v(2), TIMES.break_even(2)) == pytest.approx((0.2, 1.5, 1.9))


@given(st.floats(1, 300), st.floats(0.1, 20), st.floats(5, 40))
def test_at_break_even_the_draft_neither_pays_nor_costs(rounds: float, draft: float, verify: float) -> None:
    """When every round drafts gamma tokens and emits what break-even asks for, the speedup is 1; twice of it gives 2."""
    times = StepTimes({1: StepTime(10.0, 0.0), 2: StepTime(verify, 0.0)}, StepTime(draft, 0.0))
    for factor in (1.0, 2.0):
        one = counts([factor * rounds * times.break_even(1)], [rounds], [[rounds]])
        assert known(speedup([one], [1.0], times)).value == pytest.approx(factor)


def test_a_draft_that_never_proposes_changes_nothing() -> None:
    idle = counts([7.0, 9.0], [7.0, 9.0], [[0.0, 0.0], [0.0, 0.0]])
    assert known(speedup([idle], [1.0], TIMES)).value == pytest.approx(1.0)


@given(documents)
def test_a_free_draft_is_worth_its_tokens_per_round(rows: list[tuple[int, int, int, int]]) -> None:
    found = drawn(rows)
    free = known(speedup([found], [1.0], free_draft(2)))
    assert free.value == pytest.approx(found.tokens.sum() / found.rounds.sum())
    assert free.timing_error == 0


@given(documents, st.floats(0.01, 100))
def test_only_ratios_of_times_matter(rows: list[tuple[int, int, int, int]], factor: float) -> None:
    scaled = StepTimes(
        {n: StepTime(factor * time.ms, time.relative_error) for n, time in TIMES.target.items()},
        StepTime(factor * TIMES.draft.ms, TIMES.draft.relative_error),
    )
    one, other = known(speedup([drawn(rows)], [1.0], TIMES)), known(speedup([drawn(rows)], [1.0], scaled))
    assert dataclasses.astuple(other) == pytest.approx(dataclasses.astuple(one))


def test_weighted_traffic_is_the_harmonic_mean_of_its_speedups() -> None:
    """Weights are shares of tokens, each of which takes its domain's time: 1 / (0.75 / S1 + 0.25 / S2)."""
    one, two = known(speedup([HAND], [1.0], TIMES)), known(speedup([OTHER], [1.0], TIMES))
    both = known(speedup([HAND, OTHER], [0.75, 0.25], TIMES))
    assert both.value == pytest.approx(1 / (0.75 / one.value + 0.25 / two.value))


def test_weights_that_are_the_shares_of_tokens_give_the_pooled_speedup() -> None:
    size = [float(part.tokens.sum()) for part in (HAND, OTHER)]
    weighted = known(speedup([HAND, OTHER], [item / sum(size) for item in size], TIMES))
    pooled = known(speedup([joined(HAND, OTHER)], [1.0], TIMES))
    assert weighted.value == pytest.approx(pooled.value)
    assert weighted.timing_error == pytest.approx(pooled.timing_error)


def test_errors_of_separate_domains_add_as_independent_ones() -> None:
    other = dataclasses.replace(OTHER, cluster=np.array(["x", "y", "z"], dtype=object))
    parts = [0.75 * relative_time(HAND, TIMES).stderr, 0.25 * relative_time(other, TIMES).stderr]
    both = known(speedup([HAND, other], [0.75, 0.25], TIMES))
    assert both.sampling_error == pytest.approx(math.hypot(*parts) * both.value)
    assert both.documents == 5


def test_a_domain_of_weight_zero_does_not_matter() -> None:
    """Not even where it has a single document or no token."""
    for idle in (counts([3.0], [2.0], [[2.0, 2.0]]), counts([0.0], [0.0], [[0.0, 0.0]])):
        assert speedup([HAND, idle], [1.0, 0.0], TIMES) == speedup([HAND], [1.0], TIMES)


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5]])
def test_a_domain_without_tokens_has_no_speedup(weights: list[float]) -> None:
    empty = counts([0.0, 0.0], [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]])
    assert speedup([empty, HAND][: len(weights)], weights, TIMES) is None


def test_one_document_in_one_domain_leaves_all_of_it_unknown() -> None:
    single = counts([10.0], [5.0], [[4.0, 3.0]], ["alone"])
    found = known(speedup([OTHER, single], [0.9, 0.1], TIMES))
    assert found.sampling_error == math.inf
    assert found.bounds(0.05) == (0.0, math.inf)


def perturbed(factors: dict[int, float], draft: float) -> StepTimes:
    """TIMES with some steps slower or faster by a factor."""
    target = {n: dataclasses.replace(time, ms=time.ms * factors.get(n, 1.0)) for n, time in TIMES.target.items()}
    return StepTimes(target, dataclasses.replace(TIMES.draft, ms=TIMES.draft.ms * draft))


@pytest.mark.parametrize(("domains", "weights"), [([HAND], [1.0]), ([HAND, OTHER], [0.3, 0.7])])
def test_timing_error_is_the_numerical_derivative(domains: list[RoundCounts], weights: list[float]) -> None:
    """Each step time perturbed by itself: the effects on log speedup, times the step's error, add up in squares."""
    step = 1e-6

    def effect(factors: dict[int, float], draft: float = 1.0) -> float:
        changed, plain = speedup(domains, weights, perturbed(factors, draft)), speedup(domains, weights, TIMES)
        return math.log(known(changed).value / known(plain).value) / step

    errors = [effect({n: 1 + step}) * time.relative_error for n, time in TIMES.target.items()]
    errors.append(effect({}, 1 + step) * TIMES.draft.relative_error)
    assert known(speedup(domains, weights, TIMES)).timing_error == pytest.approx(math.hypot(*errors), rel=1e-4)


def test_timing_error_is_the_spread_over_repeated_timings() -> None:
    """Step times drawn anew 4000 times with their errors: log speedup spreads as the timing error says."""
    rng = np.random.default_rng(0)
    logs = []
    for _ in range(4000):
        noise = {n: math.exp(rng.normal(0, time.relative_error)) for n, time in TIMES.target.items()}
        times = perturbed(noise, math.exp(rng.normal(0, TIMES.draft.relative_error)))
        logs.append(math.log(known(speedup([HAND], [1.0], times)).value))
    assert np.std(logs) == pytest.approx(known(speedup([HAND], [1.0], TIMES)).timing_error, rel=0.05)


def test_shares_of_time_by_hand() -> None:
    """1, 1 and 7 verifications of 10, 12 and 15 ms, and 15 draft steps of 2 ms: 157 ms."""
    verify, draft = time_shares(HAND, TIMES)
    assert verify == pytest.approx(np.array([10, 12, 105]) / 157)
    assert draft == pytest.approx(30 / 157)


def test_both_errors_together() -> None:
    assert Speedup(1.5, 0.03, 0.04, 7, 8).relative_error == pytest.approx(0.05)


def test_bounds_by_hand() -> None:
    """t(1 degree of freedom, 75 %) is 1."""
    assert Speedup(1.5, 0.03, 0.04, 1, 2).bounds(0.25) == pytest.approx((1.5 * math.exp(-0.05), 1.5 * math.exp(0.05)))


@given(documents)
def test_freedom_of_one_domain_is_that_of_its_documents(rows: list[tuple[int, int, int, int]]) -> None:
    found = drawn(rows)
    assume(np.ptp((found.exactly() @ np.array([1.0, 1.4, 1.9])) / found.tokens) > 0.01)  # they do not agree
    _, freedom = reference.small_sample(found.tokens)
    assert known(speedup([found], [1.0], TIMES)).freedom == pytest.approx(freedom)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60)), min_size=2, max_size=8))
def test_freedom_of_documents_of_one_length_is_one_less_than_them(rows: list[tuple[int, int, int]]) -> None:
    """Whether they agree or not."""
    of_one_length = drawn([(200 - sum(row), *row) for row in rows])
    assert known(speedup([of_one_length], [1.0], TIMES)).freedom == pytest.approx(len(rows) - 1)


def test_freedom_of_two_domains_is_that_of_welch_and_satterthwaite() -> None:
    """(V1 + V2)^2 / (V1^2 / 1 + V2^2 / f), f of three documents of 20, 30 and 25 tokens."""
    other = dataclasses.replace(OTHER, cluster=np.array(["x", "y", "z"], dtype=object))
    first, second = (0.5 * relative_time(part, TIMES).stderr for part in (HAND, other))
    _, freedom = reference.small_sample(OTHER.tokens)
    expected = (first**2 + second**2) ** 2 / (first**4 / 1 + second**4 / freedom)
    found = known(speedup([HAND, other], [0.5, 0.5], TIMES))
    assert found.freedom == pytest.approx(expected)
    assert 1 <= found.freedom <= 3


def agreeing(number: int, name: str = "") -> RoundCounts:
    """Documents that all emit 2 tokens a round."""
    return counts([20.0] * number, [10.0] * number, [[10.0, 10.0]] * number, [f"{name}{index}" for index in range(number)])


@pytest.mark.parametrize("number", [2, 3, 10, 100])
def test_documents_that_all_agree_do_not_make_certainty(number: int) -> None:
    """The error is that of one document at the far end: from 1.9 / 3 a token (all accepted) to 1.9 (none), over D."""
    found = known(speedup([agreeing(number)], [1.0], TIMES))
    assert found.sampling_error == pytest.approx((1.9 - 1.9 / 3) / number / (1.9 / 2))
    low, high = found.bounds(0.025)
    assert 0 < low < found.value < high < math.inf


def test_the_best_that_is_possible_may_be_a_shorter_round() -> None:
    """With a draft of 9 ms, a round of 3 tokens costs 3.3, which is more a token than plain decoding: 1 to 3.3, not 1.1."""
    dear = StepTimes(TIMES.target, StepTime(9.0, 0.0))
    assert relative_time(agreeing(2), dear).stderr == pytest.approx((3.3 - 1.0) / 2)


def test_agreement_in_one_domain_does_not_hide_the_spread_of_another() -> None:
    both = known(speedup([agreeing(5, "a"), OTHER], [0.5, 0.5], TIMES))
    assert both.sampling_error > 0.5 * relative_time(OTHER, TIMES).stderr * both.value


def test_clusters_that_lie_in_two_domains_count_once() -> None:
    """The same conversations in two domains are no more evidence than in one."""
    one, twice = known(speedup([OTHER], [1.0], TIMES)), known(speedup([OTHER, OTHER], [0.4, 0.6], TIMES))
    assert dataclasses.astuple(twice) == pytest.approx(dataclasses.astuple(one))


@pytest.mark.parametrize(
    ("names", "once"), [(["a", "b", "c"], 2 / 4), (["a", "b", "x"], 3 / 4), (["a", "x", "y"], 1), (["x", "y", "z"], 1)]
)
def test_freedom_of_domains_with_the_same_clusters_is_not_counted_twice(names: list[str], once: float) -> None:
    """Both have the freedom f of their lengths, and errors so alike that Welch and Satterthwaite make 2 f of it.

    Three clusters in each leave 2 + 2; as the 3, 4, 5 or 6 different ones that they are, 2, 3, 4 or 5, and at most all.
    """
    one = dataclasses.replace(OTHER, cluster=np.array(["a", "b", "c"], dtype=object))
    other = dataclasses.replace(OTHER, cluster=np.array(names, dtype=object))
    _, freedom = reference.small_sample(OTHER.tokens)
    assert known(speedup([one, other], [0.5, 0.5], TIMES)).freedom == pytest.approx(2 * freedom * once)


def test_errors_that_seem_to_cancel_are_not_believed() -> None:
    """Two conversations, each fast in one domain and slow in the other: no certainty from two observations."""
    mirrored = counts([10.0, 10.0], [5.0, 8.0], [[5.0, 5.0], [8.0, 8.0]])
    other = counts([10.0, 10.0], [8.0, 5.0], [[8.0, 8.0], [5.0, 5.0]])
    found = known(speedup([mirrored, other], [0.5, 0.5], TIMES))
    alone = 0.5 * relative_time(mirrored, TIMES).stderr
    assert found.sampling_error == pytest.approx(math.sqrt(2) * alone * found.value)


def test_error_of_shared_clusters_is_the_spread_over_repeated_samples() -> None:
    """30 conversations with documents in both of two domains and a speed of their own, drawn 1000 times."""
    rng = np.random.default_rng(2)
    names = [str(index) for index in range(30)]
    logs, errors = [], []
    for _ in range(1000):
        pace = rng.gamma(25, 40 / 25, 30)  # rounds of 100 tokens: the conversation's own, then noise in each domain
        domains = [
            counts([100.0] * 30, list(rounds), np.column_stack([rounds, rounds]).tolist(), names)
            for rounds in (pace * rng.gamma(100, 1 / 100, 30) for _ in range(2))
        ]
        found = known(speedup(domains, [0.5, 0.5], free_draft(2)))
        logs.append(math.log(found.value))
        errors.append(found.sampling_error)
    assert np.mean(errors) == pytest.approx(np.std(logs), rel=0.08)


def test_error_of_a_ratio_is_that_of_the_speedup() -> None:
    """The relative error of a ratio is that of its inverse: a second way to the same number."""
    spent = OTHER.exactly() @ np.array([1.0, 1.4, 1.9])
    found = ratio(spent, OTHER.tokens)
    assert known(speedup([OTHER], [1.0], TIMES)).sampling_error == pytest.approx(found.stderr / found.value)
