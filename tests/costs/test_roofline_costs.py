"""The roofline as rows: by hand, complete for the table that reads them, and with every overhead where it belongs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.costs.cost_model import RooflineSetting, roofline_rows, shape_of
from alphaprof.costs.roofline import ModelShape
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.errors import CostsUnreadable
from tests.costs.test_roofline import LLAMA, QWEN3
from tests.synthetic import facts

TARGET, SMALL = ModelShape.from_config(LLAMA), ModelShape.from_config(QWEN3)
DRAFTS = {"small": SMALL, "ngram": None}
PLAIN = RooflineSetting("h100-sxm")


def rows(setting: RooflineSetting = PLAIN, gamma: int = 2) -> dict[tuple[str, str, int, int, int], StepRow]:
    found = roofline_rows(TARGET, DRAFTS, setting, gamma, (1, 8), (0, 1024), (128, 512))
    keyed = {(row.model, row.step, row.tokens, row.batch, row.context): row for row in found}
    assert len(keyed) == len(found)
    return keyed


def test_every_step_that_a_table_needs_is_there() -> None:
    places = [(batch, context) for batch in (1, 8) for context in (0, 1024)]
    steps = [("target", "decode", 1), ("target", "verify", 2), ("target", "verify", 3)]
    steps += [("small", "draft", 1), ("small", "draft", 2), ("ngram", "lookup", 1)]
    prefill = {(model, "prefill", tokens, 1, 0) for model in ("target", "small") for tokens in (128, 512)}
    assert set(rows()) == {(*step, *place) for step in steps for place in places} | prefill


def test_a_head_has_first_steps_over_every_number_of_verified_tokens_and_a_later_one() -> None:
    """Which goes without the parameters of the first; with the overhead of a draft's step each."""
    shape = dataclasses.replace(SMALL, first_parameters=1e8)
    setting = dataclasses.replace(PLAIN, draft_overhead_ms=0.25)
    found = roofline_rows(TARGET, {"eagle": shape}, setting, 2, (8,), (512,), (), ["eagle"])
    times = {(row.step, row.tokens): row.ms for row in found if row.model == "eagle"}
    assert set(times) == {("draft", 1), *(("draft_first", n) for n in (1, 2, 3))}
    for tokens in (1, 2, 3):
        assert times["draft_first", tokens] == pytest.approx(PLAIN.ms(shape, False, tokens, 8, 512) + 0.25)
    joining = 1000 * (2e8 / (0.8 * 3.35e12) + 8 * 2e8 / (0.66 * 989e12))
    assert times["draft_first", 1] - times["draft", 1] == pytest.approx(joining)
    steps = StepTable(found).times("eagle", 2, 8, 512)
    assert list(steps.draft_first) == [1, 2, 3]


def test_a_decode_step_by_hand() -> None:
    # All parameters but for the input embedding: 2 bytes each at 0.8 of 3.35 TB/s, 2 FLOPs each at 0.66 of 989 TFLOP/s.
    parameters = TARGET.parameters - 128256 * 4096
    expected = 1000 * (2 * parameters / (0.8 * 3.35e12) + 2 * parameters / (0.66 * 989e12))
    assert rows()["target", "decode", 1, 1, 0].ms == pytest.approx(expected)
    assert expected == pytest.approx(5.62, abs=0.01)


def test_overheads_are_added_where_they_belong() -> None:
    plain, slow = rows(), rows(dataclasses.replace(PLAIN, overhead_ms=3.0, draft_overhead_ms=0.5))
    added = {(place[0], place[1]): slow[place].ms - plain[place].ms for place in plain}
    assert added == pytest.approx(
        {
            ("target", "decode"): 3.0,
            ("target", "verify"): 3.0,
            ("target", "prefill"): 0.0,
            ("small", "draft"): 0.5,
            ("small", "prefill"): 0.0,
            ("ngram", "lookup"): 0.0,
        }
    )


def test_target_and_draft_have_their_own_devices() -> None:
    plain, both = rows(), rows(dataclasses.replace(PLAIN, tp=2))
    apart = rows(dataclasses.replace(PLAIN, tp=2, draft_tp=1, all_reduce_ms=0.01))
    decode, draft = ("target", "decode", 1, 8, 1024), ("small", "draft", 1, 8, 1024)
    assert both[decode].ms == pytest.approx(plain[decode].ms / 2)
    assert both[draft].ms == pytest.approx(plain[draft].ms / 2)
    assert apart[decode].ms == pytest.approx(plain[decode].ms / 2 + 32 * 0.01)
    assert apart[draft].ms == pytest.approx(plain[draft].ms)


@given(st.integers(1, 64), st.integers(0, 4096))
def test_interpolation_meets_the_roofline_of_a_dense_model(batch: int, context: int) -> None:
    # Bytes and FLOPs are linear in batch for a context, and the other way round: two batches and two contexts tell all.
    table = StepTable(roofline_rows(TARGET, DRAFTS, PLAIN, 3, (1, 64), (0, 4096), ()))
    times = table.times("small", 3, batch, context)
    for tokens, found in times.target.items():
        assert found.ms == pytest.approx(PLAIN.ms(TARGET, True, tokens, batch, context), rel=1e-9)


def test_a_model_of_an_unknown_shape_is_refused_with_what_to_do() -> None:
    known = dataclasses.replace(facts("small"), shape=dataclasses.asdict(SMALL))
    assert shape_of("small", known) == SMALL
    with pytest.raises(CostsUnreadable, match="the shape of target, and that of Synthetic is not known") as caught:
        shape_of("target", facts("target"))
    assert "source: table" in caught.value.hint
