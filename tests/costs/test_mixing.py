"""Steps that a batch shares: by enumeration of every batch, against a simulation in lock step, and what must not change."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from alphaprof.costs.mixing import Drafting, mixing
from alphaprof.costs.rounds import (
    NOTHING,
    StepTime,
    StepTimes,
    cost_bounds,
    doubtful_time,
    round_costs,
    time_by_step,
    time_spent,
)
from alphaprof.costs.speedup import Decoded, Mix, speedup
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.totals.replay import RoundCounts
from tests.loops import each

Array = np.ndarray[Any, Any]

MS = (10.0, 14.0, 14.5, 17.0)  # T(2) is far above T(1), T(3) is not above T(2)
TARGET = {n: StepTime(ms, 0.01 * n) for n, ms in enumerate(MS, start=1)}
LOOKUP = StepTimes(TARGET, NOTHING, lookup=StepTime(0.3, 0.05), bookkeeping=StepTime(0.5, 0.07))
MODEL = StepTimes(TARGET, StepTime(2.0, 0.05), draft_after_full=StepTime(2.6, 0.04), bookkeeping=StepTime(0.5, 0.07))
HEAD = StepTimes(TARGET, StepTime(1.0, 0.02), draft_first={n: StepTime(1.0 + 0.5 * n, 0.03) for n in range(1, 5)})
HYBRID = dataclasses.replace(MODEL, draft_after_full=None, optional=True)


def rounds_of(seed: int, kind: str = "", documents: int = 7) -> RoundCounts:
    """Documents whose rounds draft 0 to 3 tokens. `kind`: stop (each round that stops early discards a token) or hybrid (a
    third of the rounds run draft steps, three each).
    """
    rng = np.random.default_rng(seed)
    exactly = rng.integers(1, 20, (documents, 4)).astype(float)
    drafted = exactly[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
    accepted = drafted * np.array([0.7, 0.5, 0.3])
    rounds = exactly.sum(1)
    counts = RoundCounts(rounds + accepted.sum(1), rounds, drafted, accepted, np.zeros(documents), np.arange(documents))
    if kind == "stop":
        return dataclasses.replace(counts, unused=rounds - drafted[:, -1], doubt=0.1 * drafted)
    if kind == "hybrid":
        return dataclasses.replace(counts, steps=rounds, started=rounds / 3)
    return counts


def chances_of(counts: RoundCounts) -> Array:
    return np.asarray(counts.exactly / counts.exactly.sum())


def batch_of(times: StepTimes, batch: int) -> StepTimes:
    return dataclasses.replace(times, batch=batch)


def test_the_matrix_by_hand() -> None:
    """Columns: T(1), T(2), T(3), a draft step, first steps (two tokens; of a head 1, 2, 3), search, bookkeeping. Rows:
    rounds that draft 0, 1, 2 tokens; after 0, 1, 2 accepted; a discarded step; a hybrid's steps, started, idle, read.
    """
    verified = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    none = [0, 0, 0]
    assert mixing(2, head=False).tolist() == [
        *([*verified[m], m, 0, 1, m > 0] for m in range(3)),
        *([*none, *first, 0, 0] for first in ([0, 0], [0, 0], [-1, 1])),
        [*none, 1, 0, 0, 0],
        *([*none, *none, 0] for _ in range(4)),
    ]
    assert mixing(2, head=True)[:6].tolist() == [
        *([*verified[m], *steps, 1, m > 0] for m, steps in enumerate(([0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]))),
        *([*none, *first, 0, 0] for first in ([0, 0, 0, 0], [0, -1, 1, 0], [0, -1, 0, 1])),
    ]
    for head, started, read in ((False, [0, 0], [-1, 1]), (True, [-1, 1, 0, 0], [0, -0.5, 0, 0.5])):
        steps = [1, *none][: len(started)]
        hybrid = mixing(2, head, hybrid=True).tolist()
        assert hybrid[:3] == [[*verified[m], *(0 * step for step in steps), 1, m > 0] for m in range(3)]
        counted = (steps, started, [0] * len(steps), read)
        assert hybrid[3:] == [[0] * len(hybrid[0])] * 4 + [[*none, *each, 0, 0] for each in counted]


@each("discards", [False, True])
@each("batch", [2, 3, 4])
def test_a_round_costs_the_mean_over_every_batch_that_it_can_be_in(batch: int, discards: bool) -> None:
    """All combinations of what the other sequences draft, each with its probability."""
    counts = rounds_of(1, "stop" if discards else "")
    chances, gamma = chances_of(counts), 3
    costs = round_costs(batch_of(MODEL, batch).mixed([counts]), gamma)
    steps = [m + (discards and m < gamma) for m in range(gamma + 1)]
    for own in range(gamma + 1):
        mean = 0.0
        for others in itertools.product(range(gamma + 1), repeat=batch - 1):
            drafted = (own, *others)
            verify = float(np.interp(1 + sum(drafted) / batch, range(1, gamma + 2), MS))
            drafting = 2.0 * max(steps[m] for m in drafted) + 0.5 * (max(drafted) > 0)
            mean += math.prod(chances[m] for m in others) * (verify + drafting)
        # The step whose token is discarded is counted apart, by `RoundCounts.unused`.
        assert costs[own] == pytest.approx((mean - 2.0 * (steps[own] - own)) / 10, rel=1e-12)


@each("batch", [1, 3])
def test_a_head_runs_its_first_step_in_a_round_that_drafts_nothing(batch: int) -> None:
    """If drafts stop: 1.5 ms, and later steps for those sequences of a batch that draft more, 1 ms each."""
    counts = rounds_of(1, "stop")
    counts = dataclasses.replace(counts, started=counts.rounds - counts.drafted[:, 0], accepted=0 * counts.accepted)
    chances, times, mean = chances_of(counts), batch_of(HEAD, batch).mixed([counts]), 0.0
    for drafted in itertools.product(range(4), repeat=batch):
        verify = float(np.interp(1 + sum(drafted) / batch, range(1, 5), MS))
        steps = max(min(each + 1, 3) for each in drafted)
        mean += math.prod(chances[m] for m in drafted) * (verify + 1.5 + steps - 1)
    assert time_spent(counts, times).sum() == pytest.approx(counts.rounds.sum() * mean / 10)


def test_rounds_of_a_hybrid_without_draft_steps_wait_for_those_of_others() -> None:
    """A third of all rounds run 3 steps: a round of the others waits for them if any of 3 sequences does."""
    counts = rounds_of(2, "hybrid")
    times = batch_of(HYBRID, 4).mixed([counts])
    waiting = counts.rounds * (2 / 3) * (1 - (2 / 3) ** 3)
    without = time_spent(dataclasses.replace(counts, steps=0 * counts.rounds, started=counts.rounds), times)
    assert time_spent(counts, times) == pytest.approx(without + (counts.rounds + 3 * waiting) * 0.2)


@each("times", [LOOKUP, MODEL, HEAD])
def test_one_sequence_and_drafts_of_one_length_cost_what_they_did_to_the_last_digit(times: StepTimes) -> None:
    counts = rounds_of(3)
    assert batch_of(times, 1).mixed([counts]).others is None
    always = dataclasses.replace(counts, drafted=np.repeat(counts.rounds[:, None], 3, axis=1))
    mixed = batch_of(times, 8).mixed([always])
    assert np.array_equal(time_spent(always, mixed), time_spent(always, times))
    assert np.array_equal(time_by_step(always, mixed), time_by_step(always, times))
    assert cost_bounds(mixed, 3) == cost_bounds(times, 3)
    assert speedup([always], [1.0], mixed) == speedup([always], [1.0], times)


def test_many_sequences_take_the_time_of_their_mean() -> None:
    """The mean of 10,000 rounds hardly varies: a round of any kind takes T at it, and the draft steps of a full one."""
    chances = np.array([0.5, 0.1, 0.1, 0.3])
    rounds = mixing(3, head=False, batch=10_000, others=Drafting(chances))[:4]
    mean = float(np.interp(1 + chances @ range(4), range(1, 5), MS))
    assert rounds[:, :4] @ MS == pytest.approx(np.full(4, mean), rel=1e-3)
    assert rounds[:, :4].sum(1) == pytest.approx(np.ones(4), rel=1e-12)
    draft, two, search, bookkeeping = rounds[:, 4:].T
    assert draft == pytest.approx([3, 3, 3, 3])
    assert two == pytest.approx(0)
    assert search == pytest.approx(1)
    assert bookkeeping == pytest.approx(1)


KINDS = [(LOOKUP, ""), (MODEL, ""), (MODEL, "stop"), (HEAD, ""), (HEAD, "stop"), (HYBRID, "hybrid")]


@each(("times", "kind"), KINDS)
def test_shares_of_the_time_are_its_derivatives(times: StepTimes, kind: str) -> None:
    """Every step by itself a millionth slower: by its share of that the time grows."""
    counts = rounds_of(5, kind)
    times = batch_of(times, 4)

    def spent(changed: StepTimes) -> float:
        return float(time_spent(counts, changed.mixed([counts])).sum()) * changed.decode.ms

    def slower(time: StepTime) -> StepTime:
        return dataclasses.replace(time, ms=time.ms * (1 + 1e-6))

    shares = time_by_step(counts, times.mixed([counts]))
    assert shares.sum() == pytest.approx(time_spent(counts, times.mixed([counts])).sum())
    shares /= shares.sum()
    for n in TARGET:
        changed = dataclasses.replace(times, target=TARGET | {n: slower(TARGET[n])})
        assert 1e6 * (spent(changed) / spent(times) - 1) == pytest.approx(shares[n - 1], abs=1e-5)
    drafting = dataclasses.replace(times, draft=slower(times.draft), bookkeeping=slower(times.bookkeeping))
    if times.draft_after_full is not None:
        drafting = dataclasses.replace(drafting, draft_after_full=slower(times.draft_after_full))
    if times.draft_first:
        drafting = dataclasses.replace(drafting, draft_first={n: slower(time) for n, time in times.draft_first.items()})
    rest = shares[len(TARGET) :].sum() - shares[-2]
    assert 1e6 * (spent(drafting) / spent(times) - 1) == pytest.approx(rest, abs=1e-5)


@each(("times", "kind"), KINDS)
def test_bounds_of_step_times_hold_in_every_batch(times: StepTimes, kind: str) -> None:
    """Whatever the documents draft, all together stay inside; and each with the others that it has."""
    for seed in range(20):
        counts = rounds_of(seed, kind)
        mixed = batch_of(times, 1 + seed % 5).mixed([counts])
        least, most = cost_bounds(mixed, 3)
        token = time_spent(counts, mixed) / counts.tokens
        assert least <= token.min() <= token.max() <= most
        alone = cost_bounds(times, 3)
        assert alone[0] <= time_spent(counts, mixed).sum() / counts.tokens.sum() <= alone[1]


def test_bounds_allow_that_all_sequences_do_the_same() -> None:
    """Others that never draft, and others that always do: the bounds are those of a batch of which nothing is known."""
    alone = batch_of(MODEL, 4)
    assert alone.alone is alone
    for chances in ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]):
        mixed = dataclasses.replace(alone, others=Drafting(np.array(chances)))
        assert mixed.alone == alone
        least, most = cost_bounds(mixed, 3)
        assert least <= cost_bounds(alone, 3)[0]
        assert most == cost_bounds(alone, 3)[1]


def test_a_doubt_about_what_rounds_draft_counts_for_all_sequences() -> None:
    """To first order: the time of a batch in which every round may draft a hundredth of its doubt more."""
    counts = rounds_of(6, "stop")
    times = batch_of(dataclasses.replace(MODEL, draft_after_full=None), 4)
    assert counts.doubt is not None
    assert counts.unused is not None
    small = 1e-4
    longer = small * counts.doubt  # a round that drafts to the end discards no token
    more = dataclasses.replace(counts, drafted=counts.drafted + longer, unused=counts.unused - longer[:, -1])
    grown = time_spent(more, times.mixed([more])).sum() - time_spent(counts, times.mixed([counts])).sum()
    assert doubtful_time(counts, times.mixed([counts])) == pytest.approx(grown / small, rel=1e-3)


def test_domains_share_a_batch_by_their_weights() -> None:
    """Two domains by given shares of tokens: as if their documents were repeated until they have these shares."""
    one, two = rounds_of(7), rounds_of(8, documents=4)
    two = dataclasses.replace(two, drafted=0.2 * two.drafted, accepted=0.2 * two.accepted)
    weights = (0.8, 0.2)
    found = Mix(("a", "b"), weights).decoded([one, two], batch_of(LOOKUP, 4))
    scale = 0.8 / 0.2 * two.tokens.sum() / one.tokens.sum()
    larger = RoundCounts(*(scale * value if value.dtype == float else value for value in list(vars(one).values())[:6]))
    expected = Mix(("a", "b"), None).decoded([larger, two], batch_of(LOOKUP, 4))
    assert _costs(found) == pytest.approx(_costs(expected))
    assert found[0][1] is found[1][1]
    alone = Mix(("a",), None).decoded([one], batch_of(LOOKUP, 4))
    assert _costs(alone)[0] > _costs(found)[0]  # the other domain proposes less


def _costs(ways: list[Decoded]) -> Array:
    return round_costs(ways[0][1], 3)


def test_two_gammas_of_one_draft_share_the_error_of_computed_times() -> None:
    """An error that all verifications have in common cancels between two ways that both verify, in a batch as well; that of
    another draft is another one.
    """
    target = {n: dataclasses.replace(time, relative_error=0.0, shared_error=0.2 * (n > 1)) for n, time in TARGET.items()}
    times, long = StepTimes(target, NOTHING, batch=4), rounds_of(9)
    short = dataclasses.replace(long, drafted=long.drafted[:, :2], accepted=long.accepted[:, :2])
    mix = Mix(("a",), None)
    gain = mix.gain(mix.decoded([short], times), mix.decoded([long], times))
    single = mix.speedup([long], times)
    assert gain is not None
    assert single is not None
    assert gain.timing_error < 0.1 * single.timing_error
    other = mix.gain(mix.decoded([long], times), mix.decoded([long], dataclasses.replace(times, target=dict(target))))
    assert other is not None
    assert other.timing_error == pytest.approx(math.sqrt(2) * single.timing_error, rel=0.05)


def test_a_table_says_how_many_sequences_are_in_a_step() -> None:
    rows = [StepRow("target", "verify" if n > 1 else "decode", n, batch, 0, 1.0) for n in (1, 2) for batch in (1, 8)]
    table = StepTable([*rows, StepRow("ngram", "lookup", 1, 1, 0, 0.0), StepRow("ngram", "lookup", 1, 8, 0, 0.0)])
    assert [table.times("ngram", 1, batch, 0).batch for batch in (1, 4, 8)] == [1, 4, 8]
