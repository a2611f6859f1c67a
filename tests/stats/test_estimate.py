"""Ratio estimators and intervals: by hand, by property, and by how often they hold the truth."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from alphaprof.costs.speedup import Speedup
from alphaprof.stats.estimate import (
    CONTROL_DOCUMENTS,
    Interval,
    Ratio,
    by_cluster,
    controlled,
    distances,
    log_interval,
    mean_interval,
    nearest_mixture,
    quantile_interval,
    rank_correlation,
    ratio,
    share_interval,
    small_sample,
    unseen,
    without_single,
)
from alphaprof.stats.paired import mean_difference
from tests import reference
from tests.loops import each
from tests.synthetic import drawn_alphas

Array = np.ndarray[Any, Any]

rows = st.lists(st.tuples(st.floats(0, 50), st.integers(1, 50)), min_size=2, max_size=12)
sizes = st.lists(st.integers(1, 60) | st.integers(1, 1_000_000), min_size=2, max_size=12)


def columns(found: list[tuple[float, int]]) -> tuple[Array, Array]:
    """Totals and counts as arrays."""
    return np.array([row[0] for row in found]), np.array([row[1] for row in found])


def close(left: Ratio, right: Ratio) -> bool:
    """The same estimate up to rounding; errors of rounding size count as none."""
    scale = 1e-9 * (1 + abs(right.value))
    return left.documents == right.documents and all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=scale)
        for a, b in ((left.value, right.value), (left.stderr, right.stderr), (left.freedom, right.freedom))
    )


def test_ratio_of_unequal_documents_by_hand() -> None:
    """8 / 16; residuals 1, -1, 0; h = 1/4, 1/4, 1/2 and 128 M = [[7, -1, -6], [-1, 7, -6], [-6, -6, 12]].

    Its trace is 26 and that of its square 388; sum h^2 = 48 / 128. SE^2 = 48/26 * 2 / 16^2 = 3 / 208; 26^2 / 388 of freedom.
    """
    found = ratio(np.array([3.0, 1.0, 4.0]), np.array([4, 4, 8]))
    assert found == Ratio(0.5, pytest.approx(math.sqrt(3 / 208), rel=1e-15), 3, pytest.approx(26**2 / 388, rel=1e-15))


@given(rows)
def test_any_lengths_give_the_standard_error_of_the_matrices(found: list[tuple[float, int]]) -> None:
    totals, counts = columns(found)
    correction, freedom = reference.small_sample(counts)
    value = totals.sum() / counts.sum()
    stderr = math.sqrt(correction * float(((totals - value * counts) ** 2).sum())) / counts.sum()
    assert close(ratio(totals, counts), Ratio(float(value), float(stderr), len(found), freedom))


@given(sizes)
@example([100_000, 1])
@example([1_000_000, 3, 2, 1])
def test_small_sample_is_that_of_the_matrices(found: list[int]) -> None:
    """Also where one document is nearly everything, and rounding of sums that cancel would be all that is left."""
    assert small_sample(np.array(found)) == pytest.approx(reference.small_sample(np.array(found)), rel=1e-8)


@given(rows, st.integers(1, 5))
def test_documents_without_counts_are_left_out(found: list[tuple[float, int]], empty: int) -> None:
    totals, counts = columns(found)
    padded = ratio(np.append(totals, np.zeros(empty)), np.append(counts, np.zeros(empty, dtype=int)))
    assert close(padded, ratio(totals, counts))


def test_influences_agree_with_leaving_documents_out() -> None:
    """The jackknife, computed by leaving out one document at a time, tends to the linearised error."""
    rng = np.random.default_rng(1)
    counts = rng.integers(20, 60, 400)
    totals = rng.binomial(counts, rng.uniform(0.3, 0.9, 400)).astype(float)
    without = (totals.sum() - totals) / (counts.sum() - counts)
    jackknife = math.sqrt(399 / 400 * float(((without - without.mean()) ** 2).sum()))
    assert ratio(totals, counts).stderr == pytest.approx(jackknife, rel=0.01)


def test_a_document_given_twice_adds_no_information() -> None:
    """Copies in a cluster of their own leave value and error as they were; as documents they would shrink the error."""
    totals, counts, names = np.array([3.0, 1.0, 4.0]), np.array([4, 4, 8]), np.array(["x", "y", "z"])
    twice = [np.tile(column, 2) for column in (names, totals, counts)]
    assert close(ratio(*by_cluster(*twice)), ratio(totals, counts))
    assert ratio(twice[1], twice[2]).stderr < ratio(totals, counts).stderr


def test_the_nearest_mixture_finds_its_shares_and_none_below_0() -> None:
    columns = np.array([[1.0, 1.0, 1.0], [0.9, 0.4, 0.2], [0.7, 0.2, 0.1]])
    shares = np.array([0.3, 0.7, 0.0])
    assert nearest_mixture(columns, columns @ shares) == pytest.approx(shares, abs=1e-6)
    beyond = nearest_mixture(columns, np.array([1.0, 1.0, 0.9]))  # more than any of them
    assert beyond == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)


@each("documents", [1, 5, 16, 48, 112])
def test_what_goes_unseen_is_the_largest_share_that_a_twentieth_of_samples_misses(documents: int) -> None:
    """All of so many documents are of the kind that was seen with a chance of 5%."""
    assert (1 - unseen(documents)) ** documents == pytest.approx(0.05)


def test_skewness_by_hand() -> None:
    """Ratios 0, 0, 0 and 4: errors -1/4 (three times) and 3/4, squares times 4/3, the third moment times 4 / (4 - 2)."""
    found = ratio(np.array([0.0, 0.0, 0.0, 4.0]), np.ones(4))
    squares, cubes = 4 / 3 * (3 / 16 + 9 / 16), (4 / 3) ** 1.5 * (27 - 3) / 64
    assert found.skewness == pytest.approx(2 * cubes / squares)
    half, lower, higher = distances(found.stderr, found.freedom, found.skewness, 0.05)
    t = float(stats.t.ppf(0.95, 3))
    assert half == pytest.approx(t * math.sqrt(squares))
    assert (lower, higher) == pytest.approx((0, found.skewness / 6 * (1 + 2 * t**2)))


def test_variance_of_strata_by_hand() -> None:
    """Cochran's formula for documents of one length: sum over strata of n / (n - 1) of the squared, centred residuals."""
    totals, strata = np.array([1.0, 3.0, 10.0, 11.0, 15.0]), np.array([0, 0, 7, 7, 7])
    found = ratio(totals, np.full(5, 2.0), strata)
    expected = (2 / 1 * (1 + 1) + 3 / 2 * (4 + 1 + 9)) / 10**2
    assert found.stderr == pytest.approx(math.sqrt(expected))
    assert found.stderr < 0.5 * ratio(totals, np.full(5, 2.0)).stderr  # between the strata no error is left
    first, second = 4 / 100, 21 / 100
    assert found.freedom == pytest.approx((first + second) ** 2 / (first**2 / 1 + second**2 / 2))


def test_strata_of_uneven_documents_have_a_correction_of_their_own() -> None:
    """That of Bell and McCaffrey for the lengths in each; degrees of freedom by Satterthwaite from theirs."""
    totals, counts = np.array([3.0, 1.0, 9.0, 2.0, 8.0, 1.0]), np.array([1.0, 5.0, 9.0, 2.0, 2.0, 7.0])
    strata = np.array([0, 0, 0, 1, 1, 1])
    errors = (totals - 24 / 26 * counts) / 26
    parts = []
    for rows in (slice(0, 3), slice(3, 6)):
        correction, freedom = reference.small_sample(counts[rows])
        parts.append((correction * ((errors[rows] - errors[rows].mean()) ** 2).sum(), freedom))
    found = ratio(totals, counts, strata)
    assert found.stderr == pytest.approx(math.sqrt(sum(variance for variance, _ in parts)))
    assert found.freedom == pytest.approx(found.stderr**4 / sum(variance**2 / freedom for variance, freedom in parts))


def test_conversations_of_a_limited_source_are_sampled_by_their_documents() -> None:
    """64 documents each of a fast and a slow source that ended at their limits: how many conversations is chance, their
    documents are not. The interval holds the truth, and is half as wide as around the mean of conversations.
    """
    rng, rates, limit, sample = np.random.default_rng(2), (0.4, 1.37), 64, 400

    def conversations(rate: float) -> tuple[Array, Array, Array]:
        sizes = np.diff(np.minimum(np.concatenate([[0], np.cumsum(rng.geometric(0.25, limit))]), limit))
        sizes = sizes[sizes > 0].astype(float)
        tokens = np.array([rng.lognormal(4.5, 0.8, int(size)).sum() for size in sizes])
        return tokens * rate * rng.lognormal(-0.02, 0.2, len(sizes)), tokens, sizes

    held, widths = 0, []
    for _ in range(sample):
        parts = [conversations(rate) for rate in rates]
        totals, counts, sizes = (np.concatenate(side) for side in zip(*parts, strict=True))
        strata = np.repeat([0, 1], [len(part[0]) for part in parts])
        found, by_mean = ratio(totals, counts, strata, sizes), ratio(totals, counts, strata)
        half = stats.t.ppf(0.975, found.freedom) * found.stderr
        held += abs(found.value - sum(rates) / 2) <= half
        widths.append(half / (stats.t.ppf(0.975, by_mean.freedom) * by_mean.stderr))
    assert 0.92 <= held / sample <= 0.99
    assert np.median(widths) < 0.65


@each(
    ("strata", "expected"),
    [
        ([5, 5, 9, 9], [0, 0, 1, 1]),
        ([1, 2, 3, 3, 3], [0, 0, 1, 1, 1]),  # two of one unit, put together
        ([1, 3, 3, 3, 4, 4], [1, 0, 0, 0, 1, 1]),  # one alone goes to the smallest
        ([1, 2], [0, 0]),
        ([3], [0]),
    ],
)
def test_strata_of_one_unit_are_put_together(strata: list[int], expected: list[int]) -> None:
    assert without_single(np.array(strata)).tolist() == expected


@each("documents", [2, 5, 40])
@each("confidence", [0.8, 0.95])
def test_shares_at_the_edge_have_exact_intervals(documents: int, confidence: float) -> None:
    """At 1 and at 0 the interval is that of Clopper and Pearson for the share of documents."""
    at_one = share_interval(Ratio(1.0, 0.0, documents, documents - 1), confidence)
    at_zero = share_interval(Ratio(0.0, 0.0, documents, documents - 1), confidence)
    for found, successes in ((at_one, documents), (at_zero, 0)):
        exact = stats.binomtest(successes, documents).proportion_ci(confidence, method="exact")
        assert (found.low, found.high) == (pytest.approx(exact.low, abs=1e-12), pytest.approx(exact.high, abs=1e-12))


def test_share_interval_by_hand() -> None:
    """t(4 degrees of freedom, 97.5 %) is 2.776445, whatever the number of documents."""
    found = share_interval(Ratio(0.6, 0.1, 7, 4), 0.95)
    assert (found.low, found.high) == (pytest.approx(0.6 - 0.2776445), pytest.approx(0.6 + 0.2776445))


def test_worst_case_of_documents_that_are_all_or_nothing() -> None:
    """Every outcome of 20 documents with share 1 or 0, enumerated: nominal 95 % intervals never fall below 86 %."""
    agree, covered = np.linspace(0.5, 0.999, 200), np.zeros(200)
    for ones in range(21):
        found = share_interval(ratio(np.repeat([1.0, 0.0], [ones, 20 - ones]), np.ones(20)), 0.95)
        covered += stats.binom.pmf(ones, 20, agree) * ((found.low <= agree) & (agree <= found.high))
    assert covered.min() >= 0.86


def test_log_interval_by_hand() -> None:
    """t(1 degree of freedom, 75 %) is 1, so that the bounds are 2 e^-0.5 and 2 e^0.5."""
    assert log_interval(2.0, 0.5, 1, 0.25) == pytest.approx((2 * math.exp(-0.5), 2 * math.exp(0.5)))


@each(("error", "freedom"), [(math.inf, 3), (0.1, 0), (math.inf, 0), (0.0, 0)])
def test_what_is_unknown_is_unbounded(error: float, freedom: float) -> None:
    assert log_interval(2.0, error, freedom, 0.05) == (0.0, math.inf)


def bounds(found: Ratio, tail: float) -> tuple[float, float]:
    """Of the inverse of a ratio, which is a speedup: log t with its correction for skewness."""
    one = Speedup(1 / found.value, found.stderr / found.value, 0.0, found.freedom, found.documents)
    return dataclasses.replace(one, skewness=found.skewness / found.value).bounds(tail)


def adjusted(totals: Array, counts: Array, control: Array) -> Array:
    """Totals after a control variate, which must have been of use."""
    found = controlled(totals, counts, control)
    assert found is not None
    return found


controls = st.lists(
    st.tuples(st.floats(0, 50), st.integers(1, 50), st.integers(-20, 20)), min_size=CONTROL_DOCUMENTS, max_size=25
).filter(
    lambda found: min(np.ptp([row[2] / row[1] for row in [*found[:i], *found[i + 1 :]]]) for i in range(len(found))) > 0.1
)


def three(found: list[tuple[float, int, int]]) -> tuple[Array, Array, Array]:
    """Totals, counts and control as arrays."""
    totals, counts, control = (np.array(column, dtype=float) for column in zip(*found, strict=True))
    return totals, counts, control


@each("documents", [1, 2, CONTROL_DOCUMENTS - 1, CONTROL_DOCUMENTS, CONTROL_DOCUMENTS + 1])
def test_no_control_is_fitted_to_few_documents(documents: int) -> None:
    """Documents without counts are none."""
    rng = np.random.default_rng(0)
    totals, counts, control = (np.append(rng.random(documents), np.zeros(20)) for _ in range(3))
    assert (controlled(totals, counts, control) is None) == (documents < CONTROL_DOCUMENTS)


def test_a_control_of_zero_is_none() -> None:
    """That of every rule whose acceptance is a fact."""
    rng = np.random.default_rng(0)
    assert controlled(rng.random(30), np.ones(30), np.zeros(30)) is None


def test_the_only_document_with_a_control_is_not_controlled() -> None:
    """All others say nothing of its slope: 0 / 0."""
    totals, counts, control = np.arange(1.0, 21), np.full(20, 20.0), np.zeros(20)
    control[7] = 1.0
    assert adjusted(totals, counts, control)[7] == totals[7]


@given(controls, st.floats(-3, 3))
def test_what_a_control_explains_is_gone(found: list[tuple[float, int, int]], slope: float) -> None:
    """Totals that follow their counts and the control exactly give the ratio without the control, wherever its mean is."""
    _, counts, control = three(found)
    assert adjusted(2.5 * counts + slope * control, counts, control) == pytest.approx(2.5 * counts, abs=1e-6)


CONTROLLED, LONG = 12, 60


def luck(rng: np.random.Generator, alpha: Array, noise: float) -> tuple[Array, Array]:
    """Rounds of documents of 60 drawn tokens without limit on drafts, and their control: 60 - accepted, and accepted less
    its expectation. `noise`: what the control does not know.
    """
    accepted = rng.binomial(LONG, alpha)
    return LONG - accepted + noise * rng.normal(size=alpha.shape), accepted - LONG * alpha


@pytest.fixture(scope="module", params=[(0.0, 1.0), (0.15, 0.0)], ids=["equal documents", "different documents"])
def drawn_texts(request: pytest.FixtureRequest) -> tuple[Array, Array]:
    """Rounds per token, plain and controlled, of 20 000 samples of 12 documents; [samples] each."""
    spread, noise = request.param
    rng, shape = np.random.default_rng(21), (20_000, CONTROLLED)
    alpha = drawn_alphas(rng, shape, spread=spread) if spread else np.full(shape, 0.65)
    rounds, control = luck(rng, alpha, noise)
    size = np.full(CONTROLLED, float(LONG))
    better = [adjusted(one, size, its).sum() for one, its in zip(rounds, control, strict=True)]
    return rounds.sum(1) / (LONG * CONTROLLED), np.array(better) / (LONG * CONTROLLED)


def test_a_control_does_not_change_the_expectation(drawn_texts: tuple[Array, Array]) -> None:
    """Although its multiple is fitted to the same documents, and varies more in those that take more rounds."""
    plain, better = drawn_texts
    assert abs((better - plain).mean()) < 4 * (better - plain).std() / math.sqrt(len(plain))


# Quantiles of positions, with intervals over documents.

numbers = st.sampled_from([0.0, 0.1, 0.5, 0.5, 1.0, 2.5, 7.0, math.inf]) | st.floats(0, 10)
samples = st.lists(st.tuples(st.integers(0, 3), st.lists(numbers, min_size=1, max_size=8)), min_size=1, max_size=10)
probabilities = st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9, 0.99])


def drawn(found: list[tuple[int, list[float]]]) -> tuple[Array, Array, Array]:
    """Values of documents one after the other, how many each has, and its cluster."""
    values = np.array([value for _, document in found for value in document])
    return values, np.array([len(document) for _, document in found]), np.array([cluster for cluster, _ in found])


def test_quantile_interval_by_hand() -> None:
    """1 to 20 in four documents of five. Up to the median, 10, they hold 3, 3, 2, 2 values: SE^2 = 4/3 * 1 / 20^2 and t(3) =
    3.1824, so that the share may be .1837 more. Below it they hold 2, 3, 2, 2: SE^2 = 4/3 * .75 / 20^2, .1591 less. The ends
    are the values at .6837 and .3409, the 14th and the 7th.
    """
    values = np.array([1, 5, 10, 11, 20, 2, 6, 7, 12, 13, 3, 8, 14, 15, 16, 4, 9, 17, 18, 19], dtype=float)
    found = quantile_interval(values, np.full(4, 5), np.arange(4), 0.5, 0.95)
    assert found == Interval(10.0, 7.0, 14.0)


@given(samples, probabilities)
def test_quantiles_are_those_of_numpy(found: list[tuple[int, list[float]]], probability: float) -> None:
    """The least value that a share of at least p does not exceed; infinite values among them."""
    values, counts, clusters = drawn(found)
    estimate = quantile_interval(values, counts, clusters, probability, 0.95)
    assert estimate.value == np.sort(values)[math.ceil(round(probability * len(values), 9)) - 1]
    if np.isfinite(values).all():
        assert estimate.value == np.quantile(values, probability, method="inverted_cdf")
    assert 0 <= estimate.low <= estimate.value <= estimate.high


@each("probability", [1 - 0.9, 1 - 0.99, 0.1 + 0.2, 0.9])
def test_rounding_of_a_probability_does_not_take_the_next_value(probability: float) -> None:
    """1 - .9 and 1 - .99 are a hair off .1 and .01."""
    found = quantile_interval(np.arange(1000.0), np.full(10, 100), np.arange(10), probability, 0.95)
    assert found.value == round(1000 * probability) - 1


@given(samples, probabilities)
def test_documents_of_a_cluster_count_as_one_that_holds_them_all(
    found: list[tuple[int, list[float]]], probability: float
) -> None:
    whole: dict[int, list[float]] = {}
    for cluster, document in found:
        whole.setdefault(cluster, []).extend(document)
    joined = quantile_interval(*drawn(list(whole.items())), probability, 0.95)
    assert quantile_interval(*drawn(found), probability, 0.95) == joined


@each(
    ("documents", "probability", "low", "high"),
    [(10, 0.1, 0, 3), (10, 0.5, 3, 3), (10, 0.9, 3, math.inf), (100, 0.1, 3, 3), (100, 0.9, 3, 3), (2, 0.5, 0, math.inf)],
)
def test_values_that_are_all_alike(documents: int, probability: float, low: float, high: float) -> None:
    """Ten documents may all agree where 31 % of others do not (.025^(1/10) = .69): more than a tenth, less than a half."""
    found = quantile_interval(np.full(4 * documents, 3.0), np.full(documents, 4), np.arange(documents), probability, 0.95)
    assert found == Interval(3.0, low, high)


def test_the_lower_end_looks_below_a_tie() -> None:
    """Forty documents, half of which hold eight values of 1 and two of 2, the others ten of 2. No value is beyond the
    median, 2, and nearly all documents must agree on that; but the share of 1, .4, may be .129 more.
    """
    values = np.concatenate([np.repeat([1.0, 2.0], [ones, 10 - ones]) for ones in [8, 0] * 20])
    found = quantile_interval(values, np.full(40, 10), np.arange(40), 0.5, 0.95)
    assert found == Interval(2.0, 1.0, 2.0)


def test_an_interval_that_is_cut_at_one_has_no_end_there() -> None:
    """Six documents of about ten; 6 of 61 values are 2, all of them in one document. The share of 1 is .902, and may be 1
    or far less than .9: the ninth decile is 1, and nobody knows whether all that is larger has been seen.
    """
    counts = np.array([11, 10, 10, 10, 10, 10])
    values = np.concatenate([np.repeat([1.0, 2.0], [5, 6]), np.ones(50)])
    assert quantile_interval(values, counts, np.arange(6), 0.9, 0.95) == Interval(1.0, 1.0, math.inf)


def test_infinite_values_may_be_a_quantile_and_its_ends() -> None:
    """Of ten documents with .3, .4, .5 and inf each: the upper decile is infinite, the median's upper end is not."""
    values, counts = np.tile([0.3, 0.4, 0.5, math.inf], 10), np.full(10, 4)
    assert quantile_interval(values, counts, np.arange(10), 0.9, 0.95) == Interval(math.inf, 0.5, math.inf)
    assert quantile_interval(values, counts, np.arange(10), 0.4, 0.95).high == 0.5


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=40))
def test_rank_correlation_is_that_of_scipy(found: list[tuple[int, int]]) -> None:
    first, second = np.array(found, dtype=float).T
    value, by_chance = rank_correlation(first, second)
    if not (np.ptp(first) and np.ptp(second)):
        assert (value, by_chance) == (0, 1)
        return
    expected = stats.spearmanr(first, second)
    assert value == pytest.approx(expected.statistic, abs=1e-9)
    assert by_chance == pytest.approx(expected.pvalue, abs=1e-6)


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
