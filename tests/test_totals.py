"""Totals: worked out by hand from a log of two documents."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from alphaprof.analysis.totals import shard_totals
from alphaprof.log.manifest import ModelFacts

FACTS = ModelFacts("m", "model", "M", "f", "bfloat16", "cpu", 1, None, 100, (9,), 0.125)


def log(**columns: list) -> pa.Table:
    """Positions of two documents: five tokens and three tokens."""
    base = {
        "token": [1, 2, 3, 4, 9, 5, 6, 7],
        "target_top": [1, 2, 3, 4, 9, 5, 6, 7],
        "draft_top": [1, 2, 0, 4, 9, 0, 6, 0],
        "target_top_prob": [0.5] * 8,
        "target_second_prob": [0.2] * 8,
        "proposed": [256] * 8,
    } | columns
    accept = np.array(base["draft_top"], dtype=float) == np.array(base["token"], dtype=float)
    base["accept_strict"] = [float(kept) if count else None for kept, count in zip(accept, base["proposed"], strict=True)]
    return pa.table({name: pa.array(values) for name, values in base.items()})


def documents(on_policy: tuple[bool, bool] = (True, True)) -> pa.Table:
    return pa.table(
        {
            "document": pa.array([0, 1]),
            "continuation_tokens": pa.array([5, 3], pa.int32()),
            "max_new_tokens": pa.array([8, None], pa.int32()),
            "on_policy": pa.array(on_policy),
        }
    )


def totals(positions: pa.Table, **options: object) -> list[dict]:
    given = options.pop("documents", documents())
    return shard_totals(positions, given, FACTS, ["strict"], [1, 2], **options).to_pylist()


def test_two_documents_by_hand() -> None:
    first, second = totals(log())
    expected = {
        "document": 0,
        "rule": "strict",
        "positions": 5,
        "proposals": 5,
        "accepted": 4.0,
        "mismatches": 0,
        "near_ties": 0,
        "tokens": 4.0,  # the prefill emitted the first
        "rounds_1": 2.0,  # [2, 3] and [4, 9]: a draft and a token of the target each
        "rounds_2": 2.0,  # [2, 3]: the second draft is wrong; [4, 9]: both right, and the text ends
        "drafted_1": 2.0,
        "drafted_2": 4.0,
        "drafted_depths_2": [2.0, 2.0],
        "tested_depths_2": [2.0, 2.0],
        "accepted_depths_2": [2.0, 1.0],
    }
    assert {name: first[name] for name in expected} == expected
    assert (second["accepted"], second["tokens"], second["rounds_1"], second["rounds_2"]) == (1.0, 2.0, 1.0, 1.0)


def test_hf_rounds_start_at_the_first_token_and_do_not_count_a_matched_eos() -> None:
    first, _ = totals(log(), flavour="hf")
    # [1, 2, 3] two drafts kept; [4, 9] the EOS was drafted and matched, and counts as the target's own.
    assert (first["tokens"], first["rounds_2"], first["drafted_2"]) == (5.0, 2.0, 4.0)
    assert first["accepted_depths_2"] == [2.0, 1.0]


def test_near_ties_and_mismatches_are_counted_where_they_are() -> None:
    tied = [0.5, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5]
    # log(.4/.36) = .105 and log(.3/.3) = 0 lie within .125, log(.5/.4) = .22 does not.
    seconds = [0.4, 0.3, 0.36, 0.2, 0.2, 0.2, 0.2, 0.0]
    found = totals(log(target_top_prob=tied, target_second_prob=seconds, target_top=[1, 3, 3, 4, 9, 5, 5, 5]))
    assert [row["near_ties"] for row in found] == [2, 0]
    assert [row["mismatches"] for row in found] == [1, 2]
    assert [row["clear_mismatches"] for row in found] == [0, 2]  # the first document's one lies at a near-tie


@pytest.mark.parametrize(("gap", "tied"), [(0.125, 1), (0.1255, 0)])
def test_a_gap_of_one_step_of_the_dtype_is_a_near_tie_however_its_probabilities_round(gap: float, tied: int) -> None:
    ties = []
    for top in np.linspace(0.1, 0.5, 40, dtype=np.float32):
        second = np.float32(top * np.exp(-gap))
        rows = totals(log(target_top_prob=[0.5] * 7 + [float(top)], target_second_prob=[0.2] * 7 + [float(second)]))
        ties.append(rows[1]["near_ties"])
    assert ties == [tied] * 40


def test_positions_without_a_proposal_count_for_nothing_but_their_round() -> None:
    proposed = [256, 1, 0, 0, 0, 256, 256, 256]
    first, _ = totals(log(proposed=proposed, draft_top=[1, 2, None, None, None, 0, 6, 0]))
    assert (first["proposals"], first["accepted"]) == (2, 2.0)
    # One round keeps token 2 and adds 3; then tokens 4 and 9 cost a round each.
    assert (first["rounds_2"], first["drafted_2"]) == (3.0, 1.0)


def test_rounds_of_another_policys_text_are_null_and_alpha_is_not() -> None:
    first, second = totals(log(), documents=documents((False, True)))
    assert first["accepted"] == 4.0
    assert (first["tokens"], first["rounds_1"], first["drafted_depths_2"], first["mismatches"]) == (None, None, None, 0)
    assert second["rounds_1"] == 1.0


@pytest.mark.parametrize(("eos", "drafted"), [((9,), 4.0), ((1, 9), 5.0)])
def test_hugging_face_stops_the_draft_at_any_eos_of_the_target(eos: tuple[int, ...], drafted: float) -> None:
    facts = dataclasses.replace(FACTS, eos=eos)
    rows = shard_totals(log(), documents(), facts, ["strict"], [2], "hf").to_pylist()
    assert rows[0]["drafted_2"] == drafted
