"""Speedup: costs worked out by hand, errors against numerical derivatives and simulation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from alphaprof.costs.rounds import StepTime, StepTimes, cost_bounds, round_costs, time_by_step, time_spent
from alphaprof.costs.speedup import Decoded, Mix, Speedup, speedup, spent_and_base
from alphaprof.costs.timing import median_error
from alphaprof.stats.estimate import ratio
from alphaprof.totals.replay import RoundCounts, Trace, replays
from tests import reference
from tests.loops import each
from tests.synthetic import alpha_law, drawn_alphas, expected_rounds

Array = np.ndarray[Any, Any]

# T(1), T(2), T(3) and one draft step: a round that drafts 0, 1, 2 tokens costs 1, 1.4, 1.9.
TIMES = StepTimes({1: StepTime(10.0, 0.01), 2: StepTime(12.0, 0.02), 3: StepTime(15.0, 0.03)}, StepTime(2.0, 0.05))
# The same for a draft that searches 3 ms before every round: 1.3, 1.7, 2.2.
EXACT = StepTimes({n: StepTime(time.ms, 0.0) for n, time in TIMES.target.items()}, StepTime(2.0, 0.0))
SEARCHING = dataclasses.replace(TIMES, lookup=StepTime(3.0, 0.07))


def counts(
    tokens: list[float], rounds: list[float], drafted: list[list[float]], cluster: list[str] | None = None
) -> RoundCounts:
    """Documents that stand alone, unless clusters are given; without a control variate."""
    names = cluster or [f"document {index}" for index in range(len(tokens))]
    nothing = np.zeros(len(tokens))
    return RoundCounts(
        np.array(tokens), np.array(rounds), np.array(drafted), 0 * np.array(drafted), nothing, np.array(names, dtype=object)
    )


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


def by_number(counts: RoundCounts) -> Array:
    """Rounds of each document that drafted exactly 0, 1, 2 tokens, [documents, 3]."""
    at_least = np.column_stack([counts.rounds, counts.drafted, np.zeros(len(counts.rounds))])
    return at_least[:, :-1] - at_least[:, 1:]


def test_cost_of_a_round_by_hand() -> None:
    assert round_costs(TIMES, 2) == pytest.approx([1.0, 0.2 + 1.2, 0.4 + 1.5])


def test_a_search_costs_every_round_the_same_with_and_without_a_proposal() -> None:
    """3 ms of 10 ms: also a round that finds nothing costs a decode step and the search."""
    assert round_costs(SEARCHING, 2) == pytest.approx([1.3, 1.7, 2.2])


def test_a_full_round_makes_the_next_first_step_dearer_and_bookkeeping_every_round_that_drafts() -> None:
    """HAND with 2 and 1 full rounds of its 4 and 4 that draft: 1 ms more after each of the former (3 ms for two tokens, not
    2), and 0.5 ms in each of the latter, of 10 ms a decode step.
    """
    times = dataclasses.replace(TIMES, draft_after_full=StepTime(3.0, 0.04), bookkeeping=StepTime(0.5, 0.1))
    found = dataclasses.replace(HAND, accepted=np.array([[3.0, 2.0], [2.0, 1.0]]))
    assert round_costs(times, 2) == pytest.approx([1.0, 1.45, 1.95])
    assert time_spent(found, times) == pytest.approx([8.1 + 0.2 + 0.2, 7.6 + 0.1 + 0.2])
    assert ratio(*spent_and_base(found, times)).value == pytest.approx(16.4 / 16)
    # 15 draft steps, 3 of them over two tokens.
    assert time_by_step(found, times) == pytest.approx(np.array([10, 12, 105, 24, 9, 0, 4]) / 10)
    errors = [0.01 * (1 - 10 / 164), 0.02 * 12 / 164, 0.03 * 105 / 164, 0.05 * 24 / 164, 0.04 * 9 / 164, 0.1 * 4 / 164]
    assert speedup([found], [1.0], times).timing_error == pytest.approx(math.hypot(*errors))


# First steps over 1, 2, 3 verified tokens, and 2 ms a later one.
FIRST = {1: StepTime(3.0, 0.04), 2: StepTime(3.5, 0.05), 3: StepTime(5.0, 0.06)}
HEAD = dataclasses.replace(TIMES, draft_first=FIRST)


def test_a_heads_first_step_runs_over_the_tokens_that_were_verified_by_hand() -> None:
    """HAND (rounds that drafted 0, 1, 2 tokens: 1, 1, 3 and 0, 0, 4), of which 2 and 3 had one draft accepted at least, and
    1 and 2 two: 3 ms and 2 ms where a draft step stood, 0.5 ms more after one accepted draft, 2 ms after two.
    """
    found = dataclasses.replace(HAND, accepted=np.array([[2.0, 1.0], [3.0, 2.0]]))
    assert round_costs(HEAD, 2) == pytest.approx([1.0, 0.3 + 1.2, 0.5 + 1.5])
    assert HEAD.prices(2).accepted == pytest.approx([0.0, 0.05, 0.2])
    assert time_spent(found, HEAD) == pytest.approx([1 + 1.5 + 3 * 2.0 + 0.05 + 0.2, 4 * 2.0 + 0.05 + 2 * 0.2])
    # 8 rounds drafted: 3 first steps over one token, 2 over two, 3 over three; 7 later steps.
    parts = np.array([10, 12, 105, 14, 9, 7, 15, 0, 0])
    assert time_by_step(found, HEAD) == pytest.approx(parts / 10)
    assert time_spent(found, HEAD).sum() == pytest.approx(parts.sum() / 10)
    errors = np.array([0.01, 0.02, 0.03, 0.05, 0.04, 0.05, 0.06, 0, 0]) * parts / parts.sum()
    errors[0] = 0.01 * (1 - 10 / parts.sum())
    assert speedup([found], [1.0], HEAD).timing_error == pytest.approx(math.hypot(*errors))


def test_rounds_of_a_head_one_by_one() -> None:
    """Random rounds, each of whose first step reads what the round before got accepted and one more: the same time up to the
    last round's, which has no step after it.
    """
    rng = np.random.default_rng(5)
    for _ in range(50):
        drafted = rng.integers(1, 3, 20)
        accepted = np.minimum(rng.integers(0, 3, 20), drafted)
        read = 1 + np.concatenate([[0], accepted[:-1]])  # the first round's step reads the last token of the prompt
        spent = sum(
            FIRST[int(n)].ms + (m - 1) * TIMES.draft.ms + TIMES.target[int(m) + 1].ms
            for n, m in zip(read, drafted, strict=True)
        )
        depths = [(values[:, None] >= [1, 2]).sum(0).astype(float) for values in (drafted, accepted)]
        one = dataclasses.replace(counts([50.0], [20.0], [depths[0].tolist()]), accepted=depths[1][None])
        last = FIRST[1 + int(accepted[-1])].ms - FIRST[1].ms
        assert time_spent(one, HEAD)[0] == pytest.approx((spent + last) / 10)


def test_bounds_of_what_a_token_costs() -> None:
    """At best every round is full (1.9 for three tokens, and 0.1 more), at worst every round yields one token after such."""
    assert cost_bounds(TIMES, 2) == pytest.approx((1.9 / 3, 1.9))
    dearer = dataclasses.replace(TIMES, draft_after_full=StepTime(3.0, 0.0))
    assert cost_bounds(dearer, 2) == pytest.approx((2.0 / 3, 2.0))
    cheaper = dataclasses.replace(TIMES, draft_after_full=StepTime(1.0, 0.0))
    assert cost_bounds(cheaper, 2) == pytest.approx((1.8 / 3, 1.9))


def nearest(draft: float, two: float) -> StepTimes:
    return dataclasses.replace(TIMES, draft=StepTime(draft, 0.0), draft_after_full=StepTime(two, 0.0))


def heads(*first: float) -> StepTimes:
    return dataclasses.replace(TIMES, draft_first={n: StepTime(ms, 0.0) for n, ms in enumerate(first, 1)})


ANY_TIMES = [nearest(draft, two) for draft in (0.01, 1.0, 30.0) for two in (0.001, 1.0, 300.0)]
ANY_TIMES += [heads(3.0, 3.5, 5.0), heads(3.0, 0.01, 90.0), heads(3.0, 90.0, 0.01)]


@each("times", ANY_TIMES)
def test_bounds_hold_for_every_round_whatever_was_timed(times: StepTimes) -> None:
    """Noise can make a step over two tokens far cheaper than one over one: time per token stays above 0 and in bounds."""
    best, worst = cost_bounds(times, 2)
    cost, more = round_costs(times, 2), times.prices(2).accepted
    rounds = [(cost[drafted] + more[kept], 1 + kept) for drafted in range(3) for kept in range(drafted + 1)]
    assert 0 < best == pytest.approx(min(spent / tokens for spent, tokens in rounds))
    assert worst == pytest.approx(max(spent for spent, _ in rounds))


def test_speedup_by_hand() -> None:
    found = speedup([HAND], [1.0], TIMES)
    assert found.value == pytest.approx(16 / 15.7)
    assert found.sampling_error == pytest.approx(1.37 * math.sqrt(136 / 18) / 15.7)
    assert (found.freedom, found.documents) == (pytest.approx(1), 2)


@each(("times", "expected"), [(TIMES, 1.0), (SEARCHING, 1 / 1.3)], ids=["model", "lookup"])
def test_a_draft_that_never_proposes_costs_its_searches_alone(times: StepTimes, expected: float) -> None:
    idle = counts([7.0, 9.0], [7.0, 9.0], [[0.0, 0.0], [0.0, 0.0]])
    assert speedup([idle], [1.0], times).value == pytest.approx(expected)


def test_weighted_traffic_is_the_harmonic_mean_of_its_speedups() -> None:
    """Weights are shares of tokens, each of which takes its domain's time: 1 / (0.75 / S1 + 0.25 / S2)."""
    one, two = speedup([HAND], [1.0], TIMES), speedup([OTHER], [1.0], TIMES)
    both = speedup([HAND, OTHER], [0.75, 0.25], TIMES)
    assert both.value == pytest.approx(1 / (0.75 / one.value + 0.25 / two.value))


def test_time_by_step_by_hand() -> None:
    """1, 1 and 7 verifications of 10, 12 and 15 ms, and 15 draft steps of 2 ms: 157 ms; with 9 searches of 3 ms 184 ms."""
    assert time_by_step(HAND, TIMES) == pytest.approx(np.array([10, 12, 105, 30, 0, 0, 0]) / 10)
    assert time_by_step(HAND, SEARCHING) == pytest.approx(np.array([10, 12, 105, 30, 0, 27, 0]) / 10)


def test_bounds_by_hand() -> None:
    """t(1 degree of freedom, 75 %) is 1, for documents and for step times; distances add up as squares."""
    one = Speedup(1.5, 0.03, 0.04, 1, 2, timing_freedom=1)
    assert one.bounds(0.25) == pytest.approx((1.5 * math.exp(-0.05), 1.5 * math.exp(0.05)))


def test_skewed_times_have_a_farther_bound_on_their_own_side() -> None:
    """t(1, 75 %) is 1: slow documents push the largest time up by 0.02 / 6 * (1 + 2), and leave the smallest one."""
    one = Speedup(1.5, 0.03, 0.0, 1, 20, skewness=0.02)
    assert one.bounds(0.25) == pytest.approx((1.5 / (math.exp(0.03) + 0.01), 1.5 * math.exp(0.03)))


def test_bounds_stay_inside_what_step_times_allow() -> None:
    """However wide the spread, and widened by the error of the step times, which is in these limits too."""
    one = Speedup(3.33, 12.0, 0.0, 1, 2, least=0.7, most=3.43)
    assert one.bounds(0.025) == (0.7, 3.43)
    low, high = dataclasses.replace(one, timing_error=0.01).bounds(0.025)
    assert (low, high) == pytest.approx((0.7 * math.exp(-0.0196), 3.43 * math.exp(0.0196)), rel=1e-4)


def test_unseen_documents_by_hand() -> None:
    """With nothing accepted in a tenth of documents that was not seen, the time is 0.9 of this one and 0.1 of the worst."""
    one = Speedup(2.0, 0.0, 0.0, 29, 30, least=0.5, most=4.0, unseen_slower=0.3, unseen_faster=0.05)
    assert one.bounds(0.05) == pytest.approx((1 / (0.9 / 2.0 + 0.1 / 0.5), 1 / (0.9 / 2.0 + 0.1 / 4.0)))


NOISE = np.random.default_rng(3).lognormal(0, 0.1, (5, 9))


def in_rounds(noise: Array, times: StepTimes = TIMES) -> StepTimes:
    """Times of T(1), T(2), T(3), draft and search in rounds, with their points as they are."""
    parts = [*times.target.values(), times.draft, times.lookup]
    found = [dataclasses.replace(part, rounds=tuple(part.ms * row)) for part, row in zip(parts, noise, strict=True)]
    return StepTimes(dict(enumerate(found[:3], start=1)), found[3], found[4])


def in_two_parts(domain: RoundCounts, one: StepTimes, other: StepTimes) -> list[Decoded]:
    """A domain of which the first document is decoded in one way, and the others in another."""
    first = np.arange(len(domain.tokens)) == 0
    return [(domain.rows(first), one), (domain.rows(~first), other)]


# Half 1 of the timing rounds has other medians, and its draft is another one.
OTHER_HALF = StepTimes({1: StepTime(9.0, 0.0), 2: StepTime(13.0, 0.0), 3: StepTime(14.0, 0.0)}, StepTime(2.5, 0.0))
NUMBERED = [dataclasses.replace(HAND, cluster=np.arange(2)), dataclasses.replace(OTHER, cluster=np.arange(2, 5))]
MIXES = [Mix(("x", "y"), None), Mix.of({"x": 0.3, "y": 0.7})]


def of_round(found: StepTimes, one: int) -> StepTimes:
    """The times of a single round."""
    return StepTimes(
        {n: StepTime(time.rounds[one], 0.0) for n, time in found.target.items()},
        StepTime(found.draft.rounds[one], 0.0),
        StepTime(found.lookup.rounds[one] if found.lookup.rounds else 0.0, 0.0),
    )


@each("mix", MIXES)
def test_timing_error_of_two_halves_is_that_of_the_speedups_of_single_rounds(mix: Mix) -> None:
    """Each round of a half gives a speedup beside the other half as it is; the errors of halves add up as squares, with
    Welch and Satterthwaite's freedom. In a round, noise is so small that effects add up.
    """
    small = np.random.default_rng(8).lognormal(0, 1e-4, (2, 5, 9))
    halves = [
        dataclasses.replace(in_rounds(noise, times), half=half)
        for half, (noise, times) in enumerate(zip(small, (SEARCHING, OTHER_HALF), strict=True))
    ]
    found = mix.routed([in_two_parts(each, *halves) for each in NUMBERED])
    squares, moments = 0.0, 0.0
    for half in (0, 1):
        logs = []
        for one in range(9):
            times = [of_round(each, one) if place == half else each for place, each in enumerate(halves)]
            value = mix.value([in_two_parts(each, *times) for each in NUMBERED])
            logs.append(math.log(value / found.value))
        error, freedom = median_error(np.array(logs), 0.0)
        squares, moments = squares + error**2, moments + error**4 / freedom
    assert found.timing_error == pytest.approx(math.sqrt(squares), rel=1e-3)
    assert found.timing_freedom == pytest.approx(squares**2 / moments, rel=1e-3)
    assert 8 <= found.timing_freedom <= 16


@each("times", [TIMES, SEARCHING, dataclasses.replace(TIMES, draft_after_full=StepTime(3.0, 0.04)), in_rounds(NOISE)])
@each("mix", MIXES)
def test_a_domain_in_two_parts_that_are_decoded_alike_is_the_whole(times: StepTimes, mix: Mix) -> None:
    """Value, errors, freedom, bounds and all; so for a gain."""
    plain = [(each, times) for each in NUMBERED]
    parts = [in_two_parts(each, times, times) for each in NUMBERED]
    assert dataclasses.astuple(mix.routed(parts)) == pytest.approx(dataclasses.astuple(mix.routed(plain)))
    assert mix.value(parts) == pytest.approx(mix.value(plain))
    dearer = dataclasses.replace(times, draft=StepTime(2.5, 0.05))
    whole = mix.gain(plain, [(each, dearer) for each in NUMBERED])
    halved = mix.gain(parts, [in_two_parts(each, dearer, dearer) for each in NUMBERED])
    assert dataclasses.astuple(halved) == pytest.approx(dataclasses.astuple(whole))


@given(documents)
def test_freedom_of_one_domain_is_that_of_its_documents(rows: list[tuple[int, int, int, int]]) -> None:
    found = drawn(rows)
    assume(np.ptp((by_number(found) @ np.array([1.0, 1.4, 1.9])) / found.tokens) > 0.01)  # they do not agree
    _, freedom = reference.small_sample(found.tokens)
    assert speedup([found], [1.0], TIMES).freedom == pytest.approx(freedom)


def test_freedom_of_two_domains_is_that_of_welch_and_satterthwaite() -> None:
    """(V1 + V2)^2 / (V1^2 / 1 + V2^2 / f), f of three documents of 20, 30 and 25 tokens."""
    other = dataclasses.replace(OTHER, cluster=np.array(["x", "y", "z"], dtype=object))
    first, second = (0.5 * ratio(*spent_and_base(part, TIMES)).stderr for part in (HAND, other))
    _, freedom = reference.small_sample(OTHER.tokens)
    expected = (first**2 + second**2) ** 2 / (first**4 / 1 + second**4 / freedom)
    found = speedup([HAND, other], [0.5, 0.5], TIMES)
    assert found.freedom == pytest.approx(expected)
    assert 1 <= found.freedom <= 3


def agreeing(number: int, name: str = "") -> RoundCounts:
    """Documents that all emit 2 tokens a round."""
    return counts([20.0] * number, [10.0] * number, [[10.0, 10.0]] * number, [f"{name}{index}" for index in range(number)])


@each("number", [2, 3, 10, 100])
def test_documents_that_all_agree_do_not_make_certainty(number: int) -> None:
    """A share of traffic that D documents miss may cost 1.9 / 3 (all accepted), or 1.9 (none), instead of 1.9 / 2."""
    found, share = speedup([agreeing(number)], [1.0], EXACT), 1 - 0.05 ** (1 / number)
    assert found.sampling_error == 0
    slowest, fastest = ((1 - share) * 1.9 / 2 + share * end for end in (1.9, 1.9 / 3))
    assert found.bounds(0.025) == pytest.approx((1 / slowest, 1 / fastest))


def test_clusters_that_lie_in_two_domains_count_once() -> None:
    """The same conversations in two domains are no more evidence than in one."""
    one, twice = speedup([OTHER], [1.0], TIMES), speedup([OTHER, OTHER], [0.4, 0.6], TIMES)
    assert dataclasses.astuple(twice) == pytest.approx(dataclasses.astuple(one))


@each(("names", "once"), [(["a", "b", "c"], 2 / 4), (["a", "b", "x"], 3 / 4), (["a", "x", "y"], 1), (["x", "y", "z"], 1)])
def test_freedom_of_domains_with_the_same_clusters_is_not_counted_twice(names: list[str], once: float) -> None:
    """Both have the freedom f of their lengths, and errors so alike that Welch and Satterthwaite make 2 f of it.

    Three clusters in each leave 2 + 2; as the 3, 4, 5 or 6 different ones that they are, 2, 3, 4 or 5, and at most all.
    """
    one = dataclasses.replace(OTHER, cluster=np.array(["a", "b", "c"], dtype=object))
    other = dataclasses.replace(OTHER, cluster=np.array(names, dtype=object))
    _, freedom = reference.small_sample(OTHER.tokens)
    assert speedup([one, other], [0.5, 0.5], TIMES).freedom == pytest.approx(2 * freedom * once)


def test_errors_that_seem_to_cancel_are_not_believed() -> None:
    """Two conversations, each fast in one domain and slow in the other: no certainty from two observations."""
    mirrored = counts([10.0, 10.0], [5.0, 8.0], [[5.0, 5.0], [8.0, 8.0]])
    other = counts([10.0, 10.0], [8.0, 5.0], [[8.0, 8.0], [5.0, 5.0]])
    found = speedup([mirrored, other], [0.5, 0.5], TIMES)
    alone = 0.5 * ratio(*spent_and_base(mirrored, TIMES)).stderr
    assert found.sampling_error == pytest.approx(math.sqrt(2) * alone * found.value)


DEPTH, LENGTH, POOL = 4, 61, 24_000
STEPS = StepTimes({n: StepTime(9.5 + 0.5 * n, 0.0) for n in range(1, DEPTH + 2)}, StepTime(0.5, 0.0))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Rounds of many drawn texts, and the speedup of the law that they come from."""

    counts: RoundCounts
    truth: float
    spread: float

    def samples(self, documents: int, number: int) -> list[RoundCounts]:
        """Samples of so many documents, none of them twice."""
        return [self.counts.rows(np.arange(index * documents, (index + 1) * documents)) for index in range(number)]


@pytest.fixture(scope="module", params=[0.0, 0.05, 0.15], ids=lambda spread: f"spread {spread}")
def drawn_texts(request: pytest.FixtureRequest) -> Drawn:
    """Documents of 61 tokens, accepted one by one with the probability of the document: all 0.7, or different ones."""
    rng, spread = np.random.default_rng(17), request.param
    law = alpha_law(0.7, spread).ppf((np.arange(4000) + 0.5) / 4000) if spread else np.array([0.7])
    alpha = drawn_alphas(rng, (POOL,), 0.7, spread) if spread else np.full(POOL, 0.7)
    accept = np.repeat(alpha, LENGTH)
    kept = (rng.random(len(accept)) < accept).astype(float)
    start, ready = np.arange(POOL) * LENGTH, np.full(len(accept), 256)
    trace = Trace(np.zeros(len(accept)), ready, start, start + LENGTH)
    found = replays(trace, [DEPTH], (kept, accept))[DEPTH]
    names = np.arange(POOL).astype(str)
    needed = float(expected_rounds(law, LENGTH - 1, DEPTH).mean()) * float(round_costs(STEPS, DEPTH)[-1])
    return Drawn(RoundCounts.of(found, names), (LENGTH - 1) / needed, spread)


def estimates(drawn: Drawn, documents: int) -> list[Speedup]:
    return [speedup([one], [1.0], STEPS) for one in drawn.samples(documents, min(1500, POOL // documents))]


@pytest.mark.slow
@pytest.mark.parametrize("documents", [12, 20, 50])
def test_intervals_with_a_control_variate_hold_the_truth_as_often_as_they_say(drawn_texts: Drawn, documents: int) -> None:
    """Nominal 95 % intervals of the speedup, and 5 % for each side of it, where texts and acceptance differ by chance."""
    found = estimates(drawn_texts, documents)
    bounds = np.array([one.bounds(0.025) for one in found])
    error = math.sqrt(0.05 * 0.95 / len(found))
    covered = ((bounds[:, 0] <= drawn_texts.truth) & (drawn_texts.truth <= bounds[:, 1])).mean()
    assert 0.945 - 3 * error <= covered
    if documents == 50 and drawn_texts.spread:  # where documents hardly differ, bounds are those of unseen ones
        assert covered <= 0.98 + error
    lows = np.array([one.bounds(0.05)[0] for one in found])
    assert (lows >= drawn_texts.truth).mean() <= 0.055 + 3 * error


@pytest.mark.slow
@pytest.mark.parametrize("documents", [12, 20, 50])
def test_errors_with_a_control_variate_are_the_spread_over_samples(drawn_texts: Drawn, documents: int) -> None:
    """What a standard error claims, and what the estimates do; and their mean is the truth."""
    found = estimates(drawn_texts, documents)
    logs = np.log([one.value for one in found])
    claimed = math.sqrt(float(np.mean([one.sampling_error**2 for one in found])))
    assert claimed == pytest.approx(logs.std(), rel=0.1)
    times = np.array([1 / one.value for one in found])
    assert times.mean() == pytest.approx(1 / drawn_texts.truth, abs=4 * times.std() / math.sqrt(len(times)))


def test_a_control_variate_narrows_what_luck_widens(drawn_texts: Drawn) -> None:
    """50 documents, the variance with it and without: the less documents differ, the more it takes away."""
    samples = drawn_texts.samples(50, 400)
    without = [dataclasses.replace(one, control=np.zeros(50)) for one in samples]
    with_it, plain = (np.var([speedup([one], [1.0], STEPS).value for one in kind]) for kind in (samples, without))
    assert plain / with_it > {0.0: 8, 0.05: 1.5, 0.15: 1}[drawn_texts.spread]


# Two documents of a hybrid: 5 and 3 draft steps in 3 and 2 rounds, whose first steps read 7 and 4 tokens more than one if
# the draft is a head, 6 and 2 if it is a model.
MIXED = dataclasses.replace(
    HAND,
    steps=np.array([5.0, 3.0]),
    started=np.array([3.0, 2.0]),
    read_by_head=np.array([7.0, 4.0]),
    read_by_model=np.array([6.0, 2.0]),
)
LOOKED_UP = dataclasses.replace(EXACT, optional=True)


@each(
    ("times", "more"),
    [
        (LOOKED_UP, [5 * 2, 3 * 2]),  # a step over two tokens was not timed
        (dataclasses.replace(LOOKED_UP, draft_after_full=StepTime(2.5, 0.0)), [5 * 2 + 6 * 0.5, 3 * 2 + 2 * 0.5]),
        (dataclasses.replace(LOOKED_UP, draft_after_full=StepTime(1.5, 0.0)), [5 * 2, 3 * 2]),  # noise, no gain
        (
            # A head's first step takes 4 ms over one token, and 1 ms more for each of two.
            dataclasses.replace(LOOKED_UP, draft_first={n: StepTime(3.0 + n, 0.0) for n in (1, 2, 3)}),
            [2 * 2 + 3 * 4 + 7 * 1, 1 * 2 + 2 * 4 + 4 * 1],
        ),
    ],
)
def test_a_hybrid_pays_for_reading_what_lookup_wrote(times: StepTimes, more: list[float]) -> None:
    none = dict.fromkeys(("steps", "started", "read_by_head", "read_by_model"), 0 * MIXED.tokens)
    without = time_spent(dataclasses.replace(MIXED, **none), times)
    assert (time_spent(MIXED, times) - without) * 10 == pytest.approx(more)
    drafting = time_by_step(MIXED, times)[3:-2]  # behind T(1) to T(3), before searches and bookkeeping
    assert drafting.sum() == pytest.approx(sum(more) / 10)
    least, most = cost_bounds(times, 2)
    assert least <= 1.9 / 3
    assert most >= 1.9 + times.prices(2, hybrid=True).apart.read
