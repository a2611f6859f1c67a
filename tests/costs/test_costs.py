"""Step times as rows: exact where they were measured, between their neighbours elsewhere, and none outside."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.costs.rounds import NOTHING, StepTime, round_costs
from alphaprof.costs.speedup import Mix, speedup
from alphaprof.costs.steps import StepRow, StepTable, Unmeasured, with_path
from alphaprof.totals.replay import RoundCounts
from tests.loops import each


def row(model: str, step: str, tokens: int, batch: int, context: int, ms: float, error: float = 0.0) -> StepRow:
    return StepRow(model, step, tokens, batch, context, ms, error)


# Verification of 3 tokens is missing; batch 1 and 5 (4 apart), contexts 100 and 300.
ROWS = (
    row("target", "decode", 1, 1, 100, 10.0, 0.1),
    row("target", "decode", 1, 1, 300, 14.0, 0.2),
    row("target", "decode", 1, 5, 100, 20.0),
    row("target", "decode", 1, 5, 300, 28.0),
    row("target", "verify", 2, 1, 100, 12.0, 0.1),
    row("target", "verify", 4, 1, 100, 16.0, 0.2),
    row("target", "verify", 2, 5, 100, 24.0),
    row("target", "verify", 4, 5, 100, 32.0),
    row("small", "draft", 1, 1, 100, 1.0),
    row("small", "draft", 1, 5, 100, 2.0),
    row("small", "draft", 2, 1, 100, 1.5),
    row("small", "draft", 2, 5, 100, 3.5),
    row("ngram", "lookup", 1, 1, 100, 0.25),
)
TABLE = StepTable(ROWS)


def test_times_between_context_tokens_and_batches_by_hand() -> None:
    times = TABLE.times("small", 3, 2, 150)
    assert times.decode.ms == pytest.approx(0.75 * 11 + 0.25 * 22)  # a quarter of the way in context, then in batch
    assert times.target[3].ms == pytest.approx(0.75 * 14 + 0.25 * 28)  # half of the way in tokens; its one context
    assert times.draft.ms == pytest.approx(1.25)
    assert times.draft_after_full.ms == pytest.approx(2.0)


def test_the_path_costs_rounds_with_and_without_a_search_as_much_more_and_is_plain_decoding_there() -> None:
    table = StepTable(with_path(ROWS, ["small", "ngram"], 0.2))
    for draft, search in (("small", 0.0), ("ngram", 0.25)):
        times, plain = table.times(draft, 1, 1, 100), TABLE.times(draft, 1, 1, 100)
        assert (times.lookup.ms, times.decode.ms) == (pytest.approx(2 + search), 10)
        assert round_costs(times, 1) == pytest.approx(round_costs(plain, 1) + 0.2)
        assert table.path_overhead(draft, 1, 100) == pytest.approx(0.2)
    assert TABLE.path_overhead("small", 1, 100) is None
    assert with_path(ROWS, ["small"], 0.0) == ROWS


def test_errors_of_interpolated_times_add_up_as_independent_ones() -> None:
    times = TABLE.times("small", 3, 1, 150)
    assert times.decode.relative_error == pytest.approx(math.hypot(0.75 * 10 * 0.1, 0.25 * 14 * 0.2) / 11)
    assert times.target[3].relative_error == pytest.approx(math.hypot(0.5 * 12 * 0.1, 0.5 * 16 * 0.2) / 14)


def test_rounds_of_interpolated_times_are_interpolated_round_by_round() -> None:
    """As far as the shorter of two measurements goes; a row without rounds leaves none."""
    rounds = {row: tuple(row.ms * factor for factor in (0.9, 1.0, 1.3, 1.1)) for row in ROWS}
    rows = [dataclasses.replace(row, rounds=each[: 3 if row.context == 300 else 4]) for row, each in rounds.items()]
    times = StepTable(rows).times("small", 3, 1, 150)
    assert times.decode.rounds == pytest.approx((11 * 0.9, 11 * 1.0, 11 * 1.3))
    assert times.target[3].rounds == pytest.approx((14 * 0.9, 14 * 1.0, 14 * 1.3, 14 * 1.1))
    bare = [dataclasses.replace(row, rounds=()) if row.context == 300 else row for row in rows]
    times = StepTable(bare).times("small", 3, 1, 150)
    assert (times.decode.rounds, len(times.target[3].rounds)) == ((), 4)


def test_a_prompt_lookup_draft_has_searches_and_no_draft_steps() -> None:
    times = TABLE.times("ngram", 2, 1, 100)
    assert (times.draft, times.lookup, times.draft_after_full) == (NOTHING, StepTime(0.25, 0.0), None)


# A head's later step at batches 1 and 5; its first steps over 2 and 4 verified tokens, and at batch 1 over one.
HEAD = (
    row("eagle", "draft", 1, 1, 100, 1.0),
    row("eagle", "draft", 1, 5, 100, 2.0),
    row("eagle", "draft_first", 1, 1, 100, 1.5),
    row("eagle", "draft_first", 2, 1, 100, 2.0),
    row("eagle", "draft_first", 4, 1, 100, 3.0),
    row("eagle", "draft_first", 4, 5, 100, 5.0),
)


def test_a_head_has_first_steps_by_verified_tokens_and_later_ones() -> None:
    times = StepTable([*ROWS, *HEAD]).times("eagle", 3, 1, 100)
    assert times.draft == StepTime(1.0, 0.0)
    assert times.draft_after_full is None
    assert {n: first.ms for n, first in times.draft_first.items()} == {1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0}


def test_a_first_step_over_one_token_that_was_not_timed_is_as_long_as_a_later_one() -> None:
    times = StepTable([*ROWS, *HEAD]).times("eagle", 3, 5, 100)
    assert {n: first.ms for n, first in times.draft_first.items()} == pytest.approx({1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0})


def test_bookkeeping_is_that_of_the_target_and_of_the_draft() -> None:
    target, draft = row("target", "bookkeeping", 1, 1, 0, 3.0, 0.1), row("small", "bookkeeping", 1, 1, 0, 4.0, 0.1)
    for extra, expected in (
        ([target], StepTime(3.0, 0.1)),
        ([draft], StepTime(4.0, 0.1)),
        ([target, draft], StepTime(7.0, 0.5 / 7)),
        ([dataclasses.replace(target, ms=0.0)], NOTHING),
    ):
        times = StepTable([*ROWS, *extra]).times("small", 1, 1, 100)
        assert times.bookkeeping.ms == pytest.approx(expected.ms)
        assert times.bookkeeping.relative_error == pytest.approx(expected.relative_error)


@each(
    ("draft", "gamma", "batch", "reason"),
    [
        ("other", 1, 1, "no step time for draft other"),
        ("small", 1, 6, "no step time for target at batch 6, tokens 1 (timed: batch 1, tokens 1-4; batch 5, tokens 1-4)"),
        ("ngram", 1, 2, "no step time for lookup of draft ngram at batch 2, tokens 1 (timed: batch 1, tokens 1-1)"),
    ],
)
def test_what_was_not_measured_has_no_time_and_a_reason(draft: str, gamma: int, batch: int, reason: str) -> None:
    with pytest.raises(Unmeasured, match=re.escape(reason)):
        TABLE.times(draft, gamma, batch, 100)


def test_what_a_table_covers_has_times_and_the_rest_has_none() -> None:
    """Up to 4 tokens a step: 3 drafts, however many the run has. Of a head its first steps limit it as well."""
    times = TABLE.times("small", 8, 1, 100)
    assert list(times.target) == [1, 2, 3, 4]
    assert [gamma for gamma in range(1, 9) if times.covers(gamma)] == [1, 2, 3]
    assert times == TABLE.times("small", 3, 1, 100)
    assert (TABLE.reaches("target", "verify", 4, 1), TABLE.reaches("target", "verify", 5, 1)) == (True, False)
    assert not TABLE.reaches("target", "verify", 4, 6)
    head = StepTable([*ROWS, row("target", "verify", 9, 1, 100, 20.0), *HEAD]).times("eagle", 8, 1, 100)
    assert (list(head.target), list(head.draft_first)) == ([1, 2, 3, 4], [1, 2, 3, 4])
    with pytest.raises(Unmeasured, match=re.escape("no step time for target at batch 1, tokens 2 (timed: batch 1")):
        StepTable([row for row in ROWS if row.step != "verify"]).times("small", 8, 1, 100)


def test_rounds_without_times_have_no_speedup() -> None:
    times = TABLE.times("small", 8, 1, 100)
    one = np.ones(1)
    places = np.array([0])
    rounds = {gamma: RoundCounts(2 * one, one, np.ones((1, gamma)), np.eye(1, gamma), 0 * one, places) for gamma in (3, 4)}
    for mix in (Mix.of({"all": 1.0}), Mix(("all",), None)):
        ways = {gamma: [(counts, times)] for gamma, counts in rounds.items()}
        for gamma, way in ways.items():
            known = gamma == 3
            assert (mix.routed(way) is not None) == known
            assert (mix.value(way) is not None) == known
            assert (mix.gain(ways[3], way) is not None) == known
    assert speedup([rounds[4]], [1.0], times) is None


def test_batches_without_enough_tokens_are_passed_over() -> None:
    table = StepTable([*ROWS, row("target", "decode", 1, 2, 100, 11.0)])  # no verification at batch 2
    times = table.times("small", 1, 2, 100)
    assert (times.decode.ms, times.target[2].ms) == pytest.approx((11.0, 0.75 * 12 + 0.25 * 24))


def test_a_context_outside_takes_the_nearest() -> None:
    far, end = TABLE.times("small", 1, 1, 9000), TABLE.times("small", 1, 1, 300)
    assert far == end
    assert end.decode.ms == 14.0


def test_prefill_by_hand() -> None:
    rows = [row("target", "prefill", tokens, 1, 0, ms) for tokens, ms in ((200, 30.0), (100, 10.0))]
    others = [row("target", "prefill", 400, 2, 0, 1.0), row("target", "prefill", 400, 1, 64, 1.0)]
    found = StepTable([*rows, *others]).prefill_ms("target", np.array([50, 100, 150, 200, 300]))
    assert found[0] == pytest.approx([10, 10, 20, 30, 50])
    assert found[1] == pytest.approx(1 / 5)
    falling = StepTable([*rows, row("target", "prefill", 300, 1, 0, 20.0)]).prefill_ms("target", np.array([300, 900]))
    assert falling[0] == pytest.approx([20, 20])
    one = StepTable(rows[:1]).prefill_ms("target", np.array([100, 200, 400]))
    assert (list(one[0]), one[1]) == ([30, 30, 60], pytest.approx(1 / 3))
    assert TABLE.prefill_ms("target", np.array([100])) is None
    assert StepTable(others).prefill_ms("target", np.array([100])) is None
    assert StepTable(rows).prefill_ms("small", np.array([100])) is None
    nobody = StepTable(rows).prefill_ms("target", np.array([]))
    assert nobody[1] == 0


BATCHES, CONTEXTS, TOKENS = (1, 2, 8), (0, 64, 512), (1, 2, 5)
grids = st.lists(st.floats(0.1, 100), min_size=27, max_size=27)


def table(times: list[float]) -> StepTable:
    places = itertools.product(BATCHES, CONTEXTS, TOKENS)
    rows = [
        row("target", "decode" if tokens == 1 else "verify", tokens, batch, context, ms)
        for (batch, context, tokens), ms in zip(places, times, strict=True)
    ]
    return StepTable([*rows, *(row("small", "draft", 1, batch, 0, 1.0) for batch in BATCHES)])


def verify(costs: StepTable, tokens: int, batch: int, context: float) -> float:
    times = costs.times("small", tokens - 1, batch, context)
    return times.target[tokens].ms


@given(grids)
def test_interpolation_is_exact_at_every_row(times: list[float]) -> None:
    costs = table(times)
    for item in costs.rows:
        if item.model == "target":
            assert verify(costs, item.tokens, item.batch, item.context) == item.ms


@given(grids, st.integers(1, 5), st.integers(1, 8), st.floats(0, 512))
def test_what_lies_between_rows_lies_between_their_times(
    times: list[float], tokens: int, batch: int, context: float
) -> None:
    def around(known: tuple[int, ...], value: float) -> set[int]:
        return {max(n for n in known if n <= value), min(n for n in known if n >= value)}

    costs = table(times)
    near = [
        each.ms
        for each in costs.rows
        if each.model == "target"
        and each.tokens in around(TOKENS, tokens)
        and each.batch in around(BATCHES, batch)
        and each.context in around(CONTEXTS, context)
    ]
    assert min(near) * (1 - 1e-12) <= verify(costs, tokens, batch, context) <= max(near) * (1 + 1e-12)
