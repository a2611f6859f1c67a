"""How many times as fast one way to decode documents is as another: by hand, against `routed`, a jackknife, derivatives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from alphaprof.costs.rounds import StepTime, StepTimes, cost_bounds, time_spent, without_draft
from alphaprof.costs.speedup import Decoded, Mix
from alphaprof.costs.timing import median_error
from alphaprof.stats.estimate import unseen
from alphaprof.stats.paired import FAR
from alphaprof.totals.replay import RoundCounts
from tests.loops import each

Array = np.ndarray[Any, Any]
Ways = tuple[list[Decoded], list[Decoded]]

TARGET = {1: StepTime(10.0, 0.01), 2: StepTime(12.0, 0.02), 3: StepTime(15.0, 0.03)}
SMALL = StepTimes(TARGET, StepTime(2.0, 0.05), draft_after_full=StepTime(3.0, 0.04), bookkeeping=StepTime(0.5, 0.1))
LOOKUP = StepTimes(TARGET, StepTime(0.0, 0.0), lookup=StepTime(0.3, 0.07))
HEAD = StepTimes(TARGET, StepTime(1.0, 0.02), draft_first={n: StepTime(1.0 + 0.5 * n, 0.03) for n in (1, 2, 3)})


def drawn(rng: np.random.Generator, tokens: Array, cluster: Array, alpha: float) -> RoundCounts:
    """Rounds of up to two drafts that emit these tokens, about `alpha` of the drafts being accepted."""
    share = np.clip(alpha + 0.15 * rng.normal(size=len(tokens)), 0.02, 0.95)
    full, half = tokens * share**2 / 3, tokens * share * (1 - share) / 2
    rounds = tokens - 2 * full - half
    drafted = np.column_stack([0.9 * rounds, 0.8 * rounds])
    return RoundCounts(tokens, rounds, drafted, np.column_stack([full + half, full]), np.zeros(len(tokens)), cluster)


def domains_of(clusters: Sequence[Sequence[int]], seed: int = 0) -> tuple[list[Decoded], list[Decoded], list[Decoded]]:
    """The same documents of some domains decoded by a draft model, a search and a head, whose counts differ."""
    rng = np.random.default_rng(seed)
    ways: tuple[list[Decoded], ...] = ([], [], [])
    for place, names in enumerate(clusters):
        tokens = rng.integers(20, 200, len(names)).astype(float)
        for way, times, alpha in zip(ways, (SMALL, LOOKUP, HEAD), (0.7 - 0.2 * place, 0.3 + 0.2 * place, 0.5), strict=True):
            way.append((drawn(rng, tokens, np.array(names), alpha), times))
    return ways[0], ways[1], ways[2]


APART = [list(range(6)), list(range(6, 14)), list(range(14, 19))]
TOGETHER = [[0, 0, 1, 2, 3, 4, 5, 6], [4, 5, 5, 7, 8, 9, 10], [2, 11, 12, 12, 13, 14]]
STRATA = np.repeat([0, 1, 2], [6, 8, 5])
NAMES, SHARES = ("a", "b", "c"), (0.5, 0.2, 0.3)
MIXES = {
    "given weights": (Mix(NAMES, SHARES), APART),
    "given weights, clusters in several domains": (Mix(NAMES, SHARES), TOGETHER),
    "as sampled": (Mix(NAMES, None), APART),
    "as sampled, clusters in several domains": (Mix(NAMES, None), TOGETHER),
    "as sampled from strata": (Mix(NAMES, None, STRATA), APART),
    "one stratum": (Mix(NAMES, None, np.zeros(19, dtype=np.int64)), APART),
}
every_mix = pytest.mark.parametrize(("mix", "clusters"), MIXES.values(), ids=MIXES.keys())


def plain(way: Sequence[Decoded]) -> list[Decoded]:
    return [without_draft(*decoded) for decoded in way]


def test_without_a_draft_every_token_takes_a_decode_step() -> None:
    counts, times = without_draft(*domains_of(APART)[0][0])
    assert time_spent(counts, times).tolist() == counts.tokens.tolist()
    assert cost_bounds(times, 0) == (1.0, 1.0)
    alone = Mix.of({"a": 1.0}).routed([(counts, times)])
    assert (alone.value, alone.sampling_error, alone.timing_error, alone.least, alone.most) == (1, 0, 0, 1, 1)
    assert alone.bounds(0.025) == (1, 1)


@every_mix
def test_what_is_gained_over_no_draft_is_the_speedup(mix: Mix, clusters: list[list[int]]) -> None:
    """In everything that says how sure it is; only the floor is that of differences."""
    small, lookup, head = domains_of(clusters)
    second = [small[0], lookup[1], head[2]]
    gain, whole = mix.gain(plain(second), second), mix.routed(second)
    floors = dict.fromkeys(("unseen_slower", "unseen_faster"), 0.0)
    mine, other = (dataclasses.asdict(dataclasses.replace(one, **floors)) for one in (gain, whole))
    assert mine == pytest.approx(other)
    assert gain.timing_error > 0 < gain.sampling_error
    assert gain.unseen_slower == pytest.approx(FAR * whole.unseen_slower)
    assert gain.unseen_faster == pytest.approx(FAR * whole.unseen_faster)


# Two domains of two documents, rounds of one draft: 10 tokens in 6 + 8 rounds of 1.5, then 20 tokens in 10 + 14.
ONE_DRAFT = StepTimes({1: StepTime(10.0, 0.0), 2: StepTime(12.0, 0.0)}, StepTime(3.0, 0.0))


def of_rounds(tokens: float, rounds: Sequence[float], cluster: Sequence[int]) -> RoundCounts:
    count, each = len(rounds), np.array(rounds)
    return RoundCounts(
        np.full(count, tokens), each, each[:, None], tokens - each[:, None], np.zeros(count), np.array(cluster)
    )


HAND = [(of_rounds(10, [6, 8], [0, 1]), ONE_DRAFT), (of_rounds(20, [12, 16], [2, 3]), ONE_DRAFT)]
THERE = [HAND[0], without_draft(*HAND[1])]


def test_gain_by_hand_with_given_weights() -> None:
    """1.5 x 7 / 10 = 1.05 of a token's time with the draft in both domains. Without it in the second, of weight 0.25,
    0.75 x 1.05 + 0.25 = 1.0375.

    R = 1.0375 / 1.05. Off by document: (1 - R) 9 and (1 - R) 12 of ten tokens each; 20 - 18 R and 20 - 24 R of twenty. Two
    documents of one length: sum of residuals squared x 2 over (sum of tokens)^2.
    """
    gain = Mix(("a", "b"), (0.75, 0.25)).gain(HAND, THERE)
    ratio = 1.0375 / 1.05
    first = 0.75 * math.sqrt(2 * 2 * (1.5 * (1 - ratio)) ** 2) / 20
    second = 0.25 * math.sqrt(2 * 2 * (3 * ratio) ** 2) / 40
    assert gain.value == pytest.approx(1 / ratio)
    assert gain.sampling_error == pytest.approx(math.hypot(first, second) / 1.05 / ratio)
    assert (gain.documents, gain.timing_error) == (4, 0)
    # A token takes 0.75 to 1.5 with the draft, and 1 without: as much in the first domain, else 1 / 1.5 to 1 / 0.75.
    assert (gain.least, gain.most) == pytest.approx((0.75, 1.5))


def test_gain_by_hand_as_sampled() -> None:
    """21 + 42 of the first way, 21 + 40 of the second: R = 61 / 63, of documents that differ in length."""
    gain = Mix(("a", "b"), None).gain(HAND, THERE)
    ratio = 61 / 63
    off = np.array([9 - 9 * ratio, 12 - 12 * ratio, 20 - 18 * ratio, 20 - 24 * ratio])
    shares = np.array([1, 1, 2, 2]) / 6
    centred = np.eye(4) - np.outer(np.ones(4), shares)
    trace = float(np.trace(centred.T @ np.diag(shares**2) @ centred))
    error = math.sqrt(float((shares**2).sum()) / trace * float((off**2).sum())) / 63
    assert gain.value == pytest.approx(1 / ratio)
    assert gain.sampling_error == pytest.approx(error / ratio)


MANY = [list(range(40)), list(range(40, 110)), list(range(110, 160))]
SHARED = [[n % 30 for n in range(40)], [20 + n % 50 for n in range(70)], [60 + n % 40 for n in range(50)]]


def sums_of(way: Sequence[Decoded], weights: Sequence[float] | None, left_out: int | None) -> float:
    """The time of some documents one way, by its definition: without the documents of one unit."""
    spent, base = [], []
    for counts, times in way:
        kept = counts.cluster != left_out
        spent.append(float(time_spent(counts, times)[kept].sum()))
        base.append(float(counts.tokens[kept].sum()))
    if weights is None:
        return sum(spent) / sum(base)
    return sum(weight * each / tokens for weight, each, tokens in zip(weights, spent, base, strict=True))


@each("weights", [None, SHARES], ids=["as sampled", "given weights"])
@each("clusters", [MANY, SHARED], ids=["apart", "clusters in several domains"])
def test_sampling_error_is_that_of_a_jackknife_over_units(
    weights: tuple[float, ...] | None, clusters: list[list[int]]
) -> None:
    """Leaving out one unit at a time, everything computed anew."""
    small, lookup, _ = domains_of(clusters, seed=3)
    second = [small[0], lookup[1], without_draft(*small[2])]
    found = Mix(NAMES, weights).gain(small, second)
    units = sorted({unit for names in clusters for unit in names})
    values = np.array([sums_of(second, weights, unit) / sums_of(small, weights, unit) for unit in units])
    whole = sums_of(second, weights, None) / sums_of(small, weights, None)
    if weights is None:
        variance = (len(units) - 1) / len(units) * float(((values - values.mean()) ** 2).sum())
    else:  # a unit belongs to the sample of its own domain: the deviations, not their mean over all domains
        variance = float(((values - whole) ** 2).sum())
    assert found.documents == len(units)
    assert found.sampling_error == pytest.approx(math.sqrt(variance) / whole, rel=0.04)


def test_sampling_error_from_strata_is_that_of_a_jackknife_in_each() -> None:
    small, lookup, _ = domains_of(MANY, seed=3)
    second = [small[0], lookup[1], without_draft(*small[2])]
    strata = np.repeat([0, 1, 2], [40, 70, 50])
    found = Mix(NAMES, None, strata).gain(small, second)
    variance = 0.0
    for units in MANY:
        values = np.array([sums_of(second, None, unit) / sums_of(small, None, unit) for unit in units])
        variance += (len(units) - 1) / len(units) * float(((values - values.mean()) ** 2).sum())
    assert found.sampling_error * sums_of(second, None, None) / sums_of(small, None, None) == pytest.approx(
        math.sqrt(variance), rel=0.04
    )
    assert found.sampling_error < 0.8 * Mix(NAMES, None).gain(small, second).sampling_error


def test_what_documents_share_both_ways_cancels() -> None:
    """A draft whose documents take 1.1 times what they take with the other, however much they differ: no sampling error."""
    rng = np.random.default_rng(4)
    counts = drawn(rng, rng.integers(20, 200, 30).astype(float), np.arange(30), 0.6)
    slower = dataclasses.replace(
        counts, rounds=1.1 * counts.rounds, drafted=1.1 * counts.drafted, accepted=1.1 * counts.accepted
    )
    ways: Ways = [(counts, SMALL)], [(slower, SMALL)]
    for mix in (Mix(("a",), None), Mix.of({"a": 1.0})):
        gain = mix.gain(*ways)
        assert gain.value == pytest.approx(1 / 1.1)
        assert gain.sampling_error == pytest.approx(0, abs=1e-12)
        assert mix.routed(ways[0]).sampling_error > 0.01
        assert gain.bounds(0.025)[0] < 1 / 1.1  # agreement is no certainty


Change = Callable[[tuple[str, int], StepTime], StepTime]


def changed(way: Sequence[Decoded], change: Change) -> list[Decoded]:
    """The same rounds with each step's time replaced: of the target the same one for all drafts."""
    owners = {id(SMALL): "small", id(LOOKUP): "lookup", id(HEAD): "head"}
    found = []
    for counts, times in way:
        owner = owners.get(id(times), "none")
        other = {
            name: change((owner + name, 0), time)
            for name in ("draft", "lookup", "draft_after_full", "bookkeeping")
            if (time := getattr(times, name)) is not None and time.ms > 0
        }
        target = {n: change(("target", n), time) for n, time in times.target.items()}
        first = {n: change((owner + "first", n), time) for n, time in times.draft_first.items()}
        found.append((counts, dataclasses.replace(times, target=target, draft_first=first, **other)))
    return found


def steps_of(*ways: Sequence[Decoded]) -> dict[tuple[str, int], StepTime]:
    """All different steps of some ways."""
    found: dict[tuple[str, int], StepTime] = {}

    def note(key: tuple[str, int], time: StepTime) -> StepTime:
        return found.setdefault(key, time)

    for way in ways:
        changed(way, note)
    return found


def both_ways(small: list[Decoded], lookup: list[Decoded], head: list[Decoded]) -> dict[str, Ways]:
    return {
        "another draft": (small, lookup),
        "none in one domain": (head, [head[0], head[1], without_draft(*head[2])]),
    }


COMPARED = list(both_ways(*domains_of(APART)))


@each("name", COMPARED)
@each("weights", [None, SHARES], ids=["as sampled", "given weights"])
def test_timing_error_is_that_of_the_derivatives(name: str, weights: tuple[float, ...] | None) -> None:
    """By every step's time in turn: what both ways have of it counts once, against each other."""
    ways, mix = both_ways(*domains_of(APART))[name], Mix(NAMES, weights)
    middle, errors = mix.gain(*ways), []
    for key, time in steps_of(*ways).items():
        logs = []
        for factor in (1 - 1e-5, 1 + 1e-5):

            def only(step: tuple[str, int], known: StepTime, key: Any = key, factor: float = factor) -> StepTime:
                return dataclasses.replace(known, ms=known.ms * factor) if step == key else known

            one, two = (changed(way, only) for way in ways)
            value, before = mix.value(two), mix.value(one)
            logs.append(math.log(value / before))
        errors.append((logs[1] - logs[0]) / 2e-5 * time.relative_error)
    assert middle.timing_error == pytest.approx(math.hypot(*errors), rel=1e-6)
    assert middle.timing_freedom == math.inf
    alone = [mix.routed(way).timing_error for way in ways]
    assert middle.timing_error < math.hypot(*alone)  # as if they were independent


@each("name", COMPARED)
@each("weights", [None, SHARES], ids=["as sampled", "given weights"])
def test_timing_error_in_rounds_is_that_of_the_gains_of_single_rounds(name: str, weights: tuple[float, ...] | None) -> None:
    ways, mix = both_ways(*domains_of(APART))[name], Mix(NAMES, weights)
    noise = np.random.default_rng(7).lognormal(0, 0.1, (40, 9))
    rows = {key: noise[place] for place, key in enumerate(steps_of(*ways))}

    def in_rounds(step: tuple[str, int], time: StepTime) -> StepTime:
        return dataclasses.replace(time, rounds=tuple(time.ms * rows[step]))

    memo: dict[tuple[str, int], StepTime] = {}  # a step is one object, wherever it occurs
    timed = [changed(way, lambda step, time: memo.setdefault(step, in_rounds(step, time))) for way in ways]
    found = mix.gain(*timed)
    logs = []
    for place in range(9):

        def single(step: tuple[str, int], time: StepTime, place: int = place) -> StepTime:
            return dataclasses.replace(time, ms=time.ms * rows[step][place])

        one, two = (changed(way, single) for way in ways)
        value, before = mix.value(two), mix.value(one)
        logs.append(math.log(value / before / found.value))
    assert (found.timing_error, found.timing_freedom) == pytest.approx(median_error(np.array(logs), 0.0))


def agreeing(number: int, rounds: float, start: int) -> RoundCounts:
    """Documents of 20 tokens that all take as many rounds of one draft."""
    return of_rounds(20, [rounds] * number, range(start, start + number))


@each("few", [5, 6, 20])
def test_many_documents_of_one_domain_say_nothing_of_another(few: int) -> None:
    """Given weights: 600 that agree here leave a domain of few documents as unsure as it is by itself."""
    first = [(agreeing(few, 16, 0), ONE_DRAFT), (agreeing(600, 16, few), ONE_DRAFT)]
    second = [(agreeing(few, 11, 0), ONE_DRAFT), first[1]]
    gain = Mix(("a", "b"), (0.9, 0.1)).gain(first, second)
    assert gain.sampling_error == pytest.approx(0, abs=1e-12)
    # 0.75 to 1.5 either way: a token can take 0.5 to 2 times as long. The second way, 0.9 x 11 of 0.9 x 11 + 0.1 x 16.
    part = 0.9 * 11 / (0.9 * 11 + 0.1 * 16)
    assert gain.unseen_slower == pytest.approx(part * FAR * unseen(few) * (2 / (11 / 16) - 1))
    assert gain.unseen_faster == pytest.approx(part * FAR * unseen(few) * (1 - 0.5 / (11 / 16)))
    low, high = gain.bounds(0.025)
    assert low == pytest.approx(gain.value / (1 + gain.unseen_slower))
    assert high == pytest.approx(gain.value / (1 - gain.unseen_faster))
