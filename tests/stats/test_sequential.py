"""The sequential verdict: bets worked out by hand, fair where nothing can be won, and wrong as rarely as it says."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from alphaprof.stats.sequential import (
    BOLDEST,
    Bounds,
    Sequential,
    decide_sequentially,
    log_wealth,
    rejections,
    thresholds_between,
)
from tests.loops import each
from tests.synthetic import drawn_alphas, simulated_rounds

Array = np.ndarray[Any, Any]
CONFIDENCE, ERROR = 0.95, 0.05
BOUNDS = Bounds(best=0.25, worst=1.5, reach=100.0)  # speedups from 2/3 to 4


def wealth(gains: list[float], least: float, largest: float) -> list[float]:
    """Wealth against one threshold after each document."""
    return np.exp(log_wealth(np.array([gains]), np.array([least]), np.array([largest]))[0]).tolist()


def alike(size: int, relative: float) -> tuple[Array, Array]:
    """Documents of 50 tokens that all spend the same share of the time without a draft."""
    return np.full(size, 50.0), np.full(size, 50.0 * relative)


def test_first_bets_are_what_they_are_by_hand() -> None:
    """Gains from -1 to 3: a fair coin would lie at m = 1/4 of them, and the prior mean 1/2 is 1/4 ahead of that."""
    first = 0.25 / (0.25 + 0.25**2)  # lead / (variance + lead^2) = 0.8
    mean, variance = (0.5 + 1) / 2, (0.25 + (1 - 0.75) ** 2) / 2  # after a gain of 3, the outcome 1
    second = (mean - 0.25) / (variance + (mean - 0.25) ** 2)
    mean_after = (0.5 + 1 + 0) / 3
    variance_after = (0.25 + (1 - 0.75) ** 2 + (0 - mean_after) ** 2) / 3
    third = (mean_after - 0.25) / (variance_after + (mean_after - 0.25) ** 2)
    expected = np.cumprod([1 + first * 0.75, 1 - second * 0.25, 1 + third * 0.75])
    assert expected[:2] == pytest.approx([1.6, 1.6 * (1 - 16 / 13 / 4)])
    assert wealth([3.0, -1.0, 3.0], -1.0, 3.0) == pytest.approx(expected.tolist(), rel=1e-12)


def by_definition(values: list[float], least: float, largest: float) -> list[float]:
    """Wealth one document at a time, mean and variance from scratch."""
    fair, won, outcomes, squares = -least / (largest - least), [1.0], [0.5], [0.25]
    for value in values:
        lead = sum(outcomes) / len(outcomes) - fair
        bet = min(max(lead / (sum(squares) / len(squares) + lead**2), 0), 0.5 / fair)
        outcome = (value - least) / (largest - least)
        won.append(won[-1] * (1 + bet * (outcome - fair)))
        outcomes.append(outcome)
        squares.append((outcome - sum(outcomes) / len(outcomes)) ** 2)
    return won[1:]


@given(st.lists(st.floats(-0.3, 2), max_size=40))
def test_wealth_is_what_its_definition_says(values: list[float]) -> None:
    assert wealth(values, -0.3, 2.0) == pytest.approx(by_definition(values, -0.3, 2.0), rel=1e-9)
    down = [-value for value in values]
    assert wealth(down, -2.0, 0.3) == pytest.approx(by_definition(down, -2.0, 0.3), rel=1e-9)


def test_bets_are_never_negative_and_risk_nine_tenths_of_the_wealth_at_most() -> None:
    """m = 0.9: below it nothing is bet. m = 0.05: the boldest bet is 18, 0.9 / m, where steady gains ask for more."""
    assert wealth([-9.0, -9.0, 1.0], -9.0, 1.0) == [1.0, 1.0, 1.0]
    gains = np.array([[1.0] * 4000 + [-1.0]])
    bold = log_wealth(gains, np.array([-1.0]), np.array([19.0]))[0]
    assert math.exp(bold[-1] - bold[-2]) == pytest.approx(1 - BOLDEST)


@each(("least", "largest"), [(-1.0, 1.0), (-1.0, 3.0), (-3.0, 1.0), (-0.1, 2.0)])
def test_wealth_stays_what_it_was_on_average_where_there_is_nothing_to_win(least: float, largest: float) -> None:
    """All sequences of ten gains, each at one of both ends, with mean 0: exactly 1; with a lower mean less."""
    sequences = np.array(list(itertools.product([least, largest], repeat=10)))
    ends = np.full(len(sequences), least), np.full(len(sequences), largest)
    value = np.exp(log_wealth(sequences, *ends))
    for share, expected in ((1.0, np.ones(10)), (0.8, None)):
        high = share * -least / (largest - least)
        chance = np.prod(np.where(sequences == largest, high, 1 - high), axis=1)
        mean = chance @ value
        if expected is not None:
            np.testing.assert_allclose(mean, expected, rtol=1e-12)
        else:
            assert (np.diff(mean) <= 1e-15).all()
            assert mean[-1] < 1


def test_bounds_are_those_of_every_document() -> None:
    """Against documents of any length up to the reach, at any time per token in between."""
    size, pace = np.meshgrid(np.linspace(0, 100, 21), np.linspace(0.25, 1.5, 21))
    for threshold in (0.5, 1.0, 2.0, 5.0):
        gain = size * (1 - threshold * pace)
        least, largest = BOUNDS.of_gains(np.array([threshold]))
        assert (least[0], largest[0]) == pytest.approx((gain.min(), gain.max()))


@each(("threshold", "verdict"), [(0.6, "GO"), (1 / 1.5, "GO"), (0.7, "UNDECIDED"), (4.0, "NO-GO"), (5.0, "NO-GO")])
@each("size", [0, 1, 2])
def test_what_bounds_say_needs_no_document(threshold: float, verdict: str, size: int) -> None:
    found = decide_sequentially(*alike(size, 1.0), 1.0, BOUNDS, threshold, CONFIDENCE)
    assert (found.verdict, found.documents) == (verdict, size if verdict == "UNDECIDED" else 0)
    expected = {"GO": (threshold, math.inf), "NO-GO": (0.0, threshold), "UNDECIDED": (0.0, math.inf)}
    assert (found.low, found.high) == expected[verdict]


def sample(rng: np.random.Generator, size: int) -> tuple[Array, Array]:
    """Documents inside BOUNDS, of any length; mean time per token 0.625, so a speedup of 1.6."""
    base = rng.integers(1, 101, size).astype(float)
    return base, base * (0.25 + 1.25 * rng.beta(1.5, 3.5, size))


@each("threshold", [1.2, 1.55, 2.1])
@each("timing", [0.0, 0.03])
def test_a_verdict_stands_where_its_bets_have_won(threshold: float, timing: float) -> None:
    """Bets against thresholds moved away by step times; no later document matters; the sequence holds the verdict."""
    rng = np.random.default_rng(5)
    move = math.exp(float(stats.norm.ppf(1 - ERROR / 10)) * timing)
    error = ERROR * (0.9 if timing else 1)
    for _ in range(20):
        base, spent = sample(rng, 300)
        found = decide_sequentially(base, spent, 1.0, BOUNDS, threshold, CONFIDENCE, timing)
        above = rejections(base, spent, BOUNDS, np.array([threshold * move]), error, "above")[0]
        below = rejections(base, spent, BOUNDS, np.array([threshold / move]), error, "below")[0]
        assert found.documents == min(above, below, 300)
        first = "GO" if above <= min(below, 300) else "NO-GO" if below <= 300 else "UNDECIDED"
        assert found.verdict == first
        assert (found.low >= threshold) == (first == "GO")
        assert (found.high <= threshold) == (first == "NO-GO")
        cut = decide_sequentially(base[: above + 3], spent[: above + 3], 1.0, BOUNDS, threshold, CONFIDENCE, timing)
        assert first != "GO" or cut == found


def test_weights_say_which_documents_count() -> None:
    """Half of the documents are at 2, half at 1; weighted 3 : 1 the speedup is 4 / (3 / 2 + 1) = 1.6, not 4 / 3."""
    base, spent = np.full(2000, 25.0), np.tile([12.5, 25.0], 1000)
    spent *= np.random.default_rng(8).uniform(0.8, 1.2, 2000)
    plain = decide_sequentially(base, spent, 1.0, BOUNDS, 1.45, CONFIDENCE)
    weighted = decide_sequentially(base, spent, np.tile([3.0, 1.0], 1000), BOUNDS, 1.45, CONFIDENCE)
    assert (plain.verdict, weighted.verdict) == ("NO-GO", "GO")


@each(("side", "odds"), [("above", 0.1), ("below", 0.9)])
def test_a_bound_passes_no_threshold_that_was_not_rejected(side: Literal["above", "below"], odds: float) -> None:
    """At 10 % confidence luck rejects a threshold ahead of an easier one: that is no verdict while that one is open."""
    rng, grid, jumps = np.random.default_rng(1), thresholds_between(BOUNDS, 1.1), 0
    for _ in range(1000):
        base = 100.0 * rng.choice([1.0, 0.2], 30)
        spent = base * np.where(rng.random(30) < odds, 1.5, 0.25)
        stops = rejections(base, spent, BOUNDS, grid, 0.9, side)
        for place in np.flatnonzero(np.diff(stops) * (1 if side == "below" else -1) > 0):
            jumps += 1
            asked, easier = (place, place + 1) if side == "below" else (place + 1, place)
            rows = slice(0, stops[asked])
            found = decide_sequentially(base[rows], spent[rows], 1.0, BOUNDS, float(grid[asked]), 0.1)
            assert found.verdict != ("NO-GO" if side == "below" else "GO")
            assert found.high > grid[easier] if side == "below" else found.low < grid[easier]
    assert jumps > 0, "nothing was tried"


RUNS, MOST = 400, 250


@pytest.fixture(scope="module", params=[1.0, 1.3], ids=["at the threshold", "above it"])
def watched(request: pytest.FixtureRequest) -> tuple[float, list[Sequential]]:
    """Verdicts on samples whose speedup is exactly 1.6, at a threshold of 1.6 / 1 or 1.6 / 1.3."""
    rng = np.random.default_rng(9)
    found = [decide_sequentially(*sample(rng, MOST), 1.0, BOUNDS, 1.6 / request.param, CONFIDENCE) for _ in range(RUNS)]
    return request.param, found


def test_verdicts_at_the_threshold_are_wrong_as_rarely_as_they_say(watched: tuple[float, list[Sequential]]) -> None:
    """Whenever they stop: at most 5 % false GO and 5 % false NO-GO at the threshold, no more than 5 % NO-GO above it."""
    above, found = watched
    verdicts = [one.verdict for one in found]
    most = ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / RUNS)
    assert verdicts.count("NO-GO") / RUNS <= most
    if above == 1:
        assert verdicts.count("GO") / RUNS <= most
    else:
        assert verdicts.count("GO") == RUNS


def test_the_sequence_holds_the_truth(watched: tuple[float, list[Sequential]]) -> None:
    """Each side misses it in at most 5 % of the samples, though it stopped when it liked."""
    most = ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / RUNS)
    assert np.mean([one.low > 1.6 for one in watched[1]]) <= most
    assert np.mean([one.high < 1.6 for one in watched[1]]) <= most
    assert all(one.low < one.high for one in watched[1])


def test_uncertain_step_times_are_paid_for() -> None:
    """At the threshold, times off by 10 %: false verdicts are as rare as they say, but not where that is hidden."""
    rng, wrong = np.random.default_rng(13), np.zeros(2)
    wide = Bounds(BOUNDS.best / 2, BOUNDS.worst * 2, BOUNDS.reach)
    for _ in range(200):
        base, spent = sample(rng, 400)
        spent *= math.exp(0.1 * float(np.clip(rng.normal(), -6, 6)))
        found = [decide_sequentially(base, spent, 1.0, wide, 1.6, CONFIDENCE, timing).verdict for timing in (0.1, 0.0)]
        wrong += [verdict != "UNDECIDED" for verdict in found]
    honest, hidden = wrong / 200
    assert honest <= 2 * ERROR + 3 * math.sqrt(2 * ERROR * (1 - 2 * ERROR) / 200)
    assert hidden > 0.3


@each("freedom", [5, 19, math.inf])
def test_step_times_of_few_rounds_move_thresholds_further(freedom: float) -> None:
    """By t bounds at a tenth of the error: as if times were that much slower for GO, without the part that is paid."""
    base, spent = sample(np.random.default_rng(14), 300)
    wide = Bounds(BOUNDS.best / 2, BOUNDS.worst * 2, BOUNDS.reach)
    found = decide_sequentially(base, spent, 1.0, wide, 1.6, CONFIDENCE, 0.01, freedom)
    shift = math.exp(0.01 * float(stats.t.ppf(1 - 0.1 * ERROR, freedom)))
    grid = thresholds_between(wide, 1.6)
    above = np.maximum.accumulate(rejections(base, spent, wide, grid * shift, 0.9 * ERROR, "above"))
    assert found.low == pytest.approx(float(grid[above <= found.documents][-1]))


@dataclass(frozen=True)
class Corpus:
    """Documents of 32 to 512 tokens with alpha ~ N(0.65, 0.15^2) and rounds of 5 drafts, all of one cost, which makes the
    speedup 1.83.
    """

    base: Array
    rounds: Array

    @property
    def cost(self) -> float:
        return float(self.base.sum() / self.rounds.sum() / 1.83)

    def verdicts(self, rng: np.random.Generator, threshold: float) -> list[Sequential]:
        """Of 41 samples of up to 600 documents."""
        bounds, found = Bounds(self.cost / 6, self.cost, 511.0), []
        for _ in range(41):
            rows = rng.integers(0, len(self.base), 600)
            spent = self.cost * self.rounds[rows]
            found.append(decide_sequentially(self.base[rows], spent, 1.0, bounds, threshold, CONFIDENCE))
        return found


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    rng, lengths = np.random.default_rng(10), np.arange(32, 513, 32) - 1
    rounds = [simulated_rounds(rng, drawn_alphas(rng, (500,)), int(tokens), 5) for tokens in lengths]
    return Corpus(np.repeat(lengths, 500).astype(float), np.concatenate(rounds))


@each(
    ("margin", "verdict", "least", "most"),
    [(1.10, "GO", 120, 300), (1.30, "GO", 35, 90), (0.91, "NO-GO", 60, 160), (0.77, "NO-GO", 18, 50)],
)
def test_power_is_about_what_theory_promises(corpus: Corpus, margin: float, verdict: str, least: int, most: int) -> None:
    """Medians near 234, 65, 116 and 35 documents, which were found with lengths of an unknown law."""
    found = corpus.verdicts(np.random.default_rng(11), 1.83 / margin)
    assert [one.verdict for one in found].count(verdict) >= 40
    assert least <= np.median([one.documents for one in found]) <= most
