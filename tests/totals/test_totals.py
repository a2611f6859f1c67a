"""Totals: worked out by hand from small logs, and read back or computed where they are not stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from alphaprof.rules import parse_rule
from alphaprof.run.manifest import DraftFacts, ModelFacts
from alphaprof.run.parquet import blocks_of, totals_content
from alphaprof.run.reader import Run
from alphaprof.run.schema import totals_columns
from alphaprof.totals.count import TotalsRequest, counts, table_of
from alphaprof.totals.files import read_totals
from tests.loops import each
from tests.reference import LOGGED_RULES
from tests.synthetic import Domain, Recipe, contents, listed, signed, write_run

FACTS = ModelFacts("m", "model", "M", "f", "bfloat16", "cpu", 1, None, 100, (9,), 0.125)
DRAFT = DraftFacts(**vars(FACTS), has_distribution=True, has_steps=True)
LOOKUP = DraftFacts(**vars(FACTS), has_distribution=False, has_steps=False, starts_matter=True)
ALL_RULES = [*LOGGED_RULES, "tree_2"]
LOSSY = [rule for rule in ALL_RULES if parse_rule(rule).rule.lossy]


def log(**columns: list) -> pa.Table:
    """Positions of two documents: five tokens and three tokens."""
    base = {
        "token": [1, 2, 3, 4, 9, 5, 6, 7],
        "target_top": [1, 2, 3, 4, 9, 5, 6, 7],
        "draft_top": [1, 2, 0, 4, 9, 0, 6, 0],
        "target_top_prob": [0.5] * 8,
        "target_second_prob": [0.2] * 8,
        "proposed": [256] * 8,
        "target_token_prob": [0.5] * 8,
        "target_entropy": [1.0] * 8,
        "draft_token_prob": [0.4] * 8,
        "target_prob_of_draft_top": [0.5] * 8,
        "target_rank_of_draft_top": [1] * 8,
        "draft_rank_of_token": [1] * 8,
        "overlap": [0.8] * 8,
        "accepted_run": pa.nulls(8, pa.int16()),
    } | columns
    return pa.table({name: pa.array(values) for name, values in base.items()})


def documents(
    on_policy: tuple[bool, bool] = (True, True), temperature: tuple[float | None, float | None] = (None, None)
) -> pa.Table:
    return pa.table(
        {
            "document": pa.array([0, 1]),
            "continuation_tokens": pa.array([5, 3], pa.int32()),
            "on_policy": pa.array(on_policy),
            "temperature": pa.array(temperature, pa.float64()),
        }
    )


def totals(positions: pa.Table, texts: pa.Table | None = None, draft: DraftFacts = DRAFT, **request: Any) -> list[dict]:
    asked = TotalsRequest(**({"rules": ["strict"], "gammas": [1, 2]} | request))
    found = counts(positions, documents() if texts is None else texts, (FACTS, draft), asked)
    table = table_of(found, totals_columns(asked.gammas))
    return [listed(row, asked.gammas) for row in table.to_pylist()]


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


def test_near_ties_and_mismatches_are_counted_where_they_are() -> None:
    tied = [0.5, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5]
    # log(.4/.36) = .105 and log(.3/.3) = 0 lie within .125, log(.5/.4) = .22 does not.
    seconds = [0.4, 0.3, 0.36, 0.2, 0.2, 0.2, 0.2, 0.0]
    found = totals(log(target_top_prob=tied, target_second_prob=seconds, target_top=[1, 3, 3, 4, 9, 5, 5, 5]))
    assert [row["near_ties"] for row in found] == [2, 0]
    assert [row["mismatches"] for row in found] == [1, 2]
    assert [row["clear_mismatches"] for row in found] == [0, 2]  # the first document's one lies at a near-tie


@each(("gap", "tied"), [(0.125, 1), (0.1255, 0)])
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
    first, second = totals(log(), documents((False, True)))
    assert first["accepted"] == 4.0
    assert (first["tokens"], first["rounds_1"], first["drafted_depths_2"], first["mismatches"]) == (None, None, None, 0)
    assert second["rounds_1"] == 1.0


def text(columns: dict[str, list], temperature: float | None = 0.7, on_policy: bool = True) -> tuple[pa.Table, pa.Table]:
    """Positions and documents of one text, by default a sampled one."""
    size = len(columns["token"])
    base = {
        "target_top": columns["token"],
        "draft_top": columns["token"],
        "target_top_prob": [0.9] * size,
        "target_second_prob": [0.05] * size,
        "proposed": [256] * size,
        "target_token_prob": [0.9] * size,
        "target_entropy": [1.0] * size,
        "draft_token_prob": [0.9] * size,
        "target_prob_of_draft_top": [0.9] * size,
        "target_rank_of_draft_top": [1] * size,
        "draft_rank_of_token": [1] * size,
        "overlap": [0.9] * size,
        "accepted_run": pa.nulls(size, pa.int16()),
    } | columns
    rows = {
        "document": pa.array([0]),
        "continuation_tokens": pa.array([size], pa.int32()),
        "on_policy": pa.array([on_policy]),
        "temperature": pa.array([temperature], pa.float64()),
    }
    return pa.table({name: pa.array(values) for name, values in base.items()}), pa.table(rows)


def row_of(rule: str, columns: dict[str, list], draft: DraftFacts = DRAFT, **options: Any) -> dict:
    positions, texts = text(columns, **options)
    (row,) = totals(positions, texts, draft, rules=[rule])
    return row


# a = (.5, .5, .8, .4); the prefill emits the first token, so that rounds begin at the second.
DRAWN = {
    "token": [1, 2, 3, 4],
    "target_token_prob": [0.5, 0.8, 0.5, 0.5],
    "draft_token_prob": [0.25, 0.4, 0.4, 0.2],
    "overlap": [0.6, 0.7, 0.5, 0.5],
}


def test_expected_rounds_of_a_sampled_text_by_hand() -> None:
    """Gamma 1: a round at 1; one at 2 where it rejects (.5); one at 3 after its bonus (.5) or two rejections (.5 x .2).
    Gamma 2: a round at 1; at 2 after its rejection (.5); at 3 after a rejection at 2, by either (.5 x .2 + .5 x .2).
    """
    row = row_of("lossless", DRAWN)
    assert (row["accepted"], row["emitted"]) == pytest.approx((0.6 + 0.7 + 0.5 + 0.5, 0.5 + 0.5 + 0.8 + 0.4))
    assert (row["tokens"], row["impossible"], row["mismatches"], row["near_ties"]) == (3.0, 0, 0, 0)
    expected = {
        "rounds_1": 1 + 0.5 + 0.6,
        "drafted_1": 2.1,
        "accepted_depths_1": [0.5 + 0.5 * 0.8 + 0.6 * 0.4],
        "tested_depths_1": [2.1],
        "control_1": (0.5 - 0.7) + 0.5 * (0.8 - 0.5) + 0.6 * (0.4 - 0.5),
        "rounds_2": 1 + 0.5 + 0.2,
        "drafted_2": 3.4,
        "drafted_depths_2": [1.7, 1.7],
        "tested_depths_2": [1.7, 0.5 + 0.5 * 0.8],
        "accepted_depths_2": [0.5 + 0.5 * 0.8 + 0.2 * 0.4, 0.5 * 0.8 + 0.4 * 0.4],
        "control_2": (0.5 - 0.7) + (0.8 - 0.5) + 0.6 * (0.4 - 0.5),
    }
    assert {name: row[name] for name in expected} == {name: pytest.approx(value) for name, value in expected.items()}


def test_a_drawn_token_that_the_scoring_pass_finds_impossible_counts_as_rejected() -> None:
    """a = (.5, .5, 0, .4): gamma 1 takes a round at 3 in any case but after a rejection and an acceptance, which is none."""
    row = row_of("lossless", DRAWN | {"target_token_prob": [0.5, 0.8, 0.0, 0.5]})
    assert row["impossible"] == 1
    assert row["emitted"] == pytest.approx(0.5 + 0.5 + 0.4)
    assert row["rounds_1"] == pytest.approx(1 + 0.5 + 1)


# The draft is right at 1, 2 and 4, and its second choice would have been right at 3.
TOP = {
    "token": [1, 2, 3, 4, 5],
    "draft_top": [0, 2, 3, 0, 5],
    "target_top": [1, 2, 0, 4, 5],
    "draft_rank_of_token": [3, 1, 1, 2, 1],
    "target_prob_of_draft_top": [0.1, 0.8, 0.35, 0.2, 0.9],
}


# What has rounds on which text, said once more.
POLICIES = {
    "strict": {"greedy"},
    "lossless": {"sampled"},
    "one_hot": {"sampled"},
    "tree_2": {"greedy", "sampled"},
}
TEXTS = {
    "greedy": (None, True),
    "sampled": (0.7, True),
    "given off-policy": (None, False),
    "given off-policy at a temperature": (0.7, False),
}


def mixed_shard() -> tuple[pa.Table, pa.Table]:
    """Documents of every policy in one shard, in the order of TEXTS; draws and top tokens as above."""
    parts = [text(TOP | {name: [*values, 0.7] for name, values in DRAWN.items() if name != "token"}, *options)
             for options in TEXTS.values()]  # fmt: skip
    documents = pa.concat_tables([documents for _, documents in parts])
    numbers = pa.array(range(len(parts)))
    return pa.concat_tables([positions for positions, _ in parts]), documents.set_column(0, "document", numbers)


@each("rule", ALL_RULES)
def test_a_mixed_shard_has_rounds_where_the_rule_would_write_that_text(rule: str) -> None:
    """And every document counts as it does alone, whatever it shares a shard with."""
    positions, texts = mixed_shard()
    rows = totals(positions, texts, rules=[rule])
    assert [row["document"] for row in rows] == [0, 1, 2, 3]
    found = {name for name, row in zip(TEXTS, rows, strict=True) if row["tokens"] is not None}
    assert found == POLICIES.get(rule, set())
    for index, row in enumerate(rows):
        (alone,) = totals(positions.slice(5 * index, 5), texts.slice(index, 1), rules=[rule])
        assert row == {name: value if isinstance(value, str) else pytest.approx(value) for name, value in alone.items()}
        assert (row["emitted"] is None) == (rule in LOSSY)


def test_a_mixed_shard_counts_what_belongs_to_each_policy() -> None:
    """Mismatches are those of greedy text, near-ties those of plain softmaxes; strict asks for x_t on greedy text alone."""
    positions, texts = mixed_shard()
    tied = positions.set_column(positions.schema.get_field_index("target_second_prob"), "target_second_prob", [[0.9] * 20])
    rows = totals(tied, texts, rules=["strict"])
    assert [row["mismatches"] for row in rows] == [1, 0, 0, 0]
    assert [row["clear_mismatches"] for row in rows] == [0, 0, 0, 0]
    assert [row["near_ties"] for row in rows] == [5, 0, 5, 0]
    assert [row["accepted"] for row in rows] == [3.0, 2.0, 2.0, 2.0]


def test_totals_are_the_same_to_the_bit_however_documents_are_divided_into_shards(tmp_path: Path) -> None:
    """Many texts of one to three tokens are accepted or rejected for certain: alone their rounds are expectations, too."""
    texts = Domain(documents=64, shortest=1, longest=3, temperature=1.0, continuation="sampled", alpha=0.8)
    run = write_run(tmp_path / "run", Recipe(domains={"s": texts}, rules=LOGGED_RULES, shard_documents=64))
    positions, documents = run.positions("small", 0), run.continuations(0)
    request = TotalsRequest(run.rules, [1, 2])

    def by_document(parts: list[tuple[pa.Table, pa.Table]]) -> list[dict]:
        columns = totals_columns(request.gammas)
        joined = pa.concat_tables(table_of(counts(*part, (FACTS, DRAFT), request), columns) for part in parts)
        return sorted(joined.to_pylist(), key=lambda row: (row["rule"], row["document"]))

    single = [
        (positions.filter(pc.equal(positions["document"], number)), documents.slice(number, 1)) for number in range(64)
    ]
    assert by_document(single) == by_document([(positions, documents)])


# No match at 0 and 2; at 1 three tokens, of which two come true; at 3 a wrong one; at 4 two, where one token is left.
FOUND = {
    "token": [1, 2, 3, 4, 5],
    "draft_top": [None, 2, None, 0, 5],
    "target_prob_of_draft_top": [None, 0.8, None, 0.1, 0.6],
    "target_rank_of_draft_top": [None, 1, None, 4, 1],
    "draft_rank_of_token": [None] * 5,
    "draft_token_prob": pa.nulls(5, pa.float32()),
    "overlap": pa.nulls(5, pa.float32()),
    "proposed": [0, 3, 0, 1, 2],
    "accepted_run": [None, 2, None, 0, 1],
}


# The proposal at 1 is 2 0 5, of which 2 is right; those at 3 and 4 begin with an EOS, 0, with which the text ends.
THROUGH_EOS = FOUND | {
    "token": [1, 2, 3, 4, 0],
    "draft_top": [None, 2, None, 0, 0],
    "proposed": [0, 3, 0, 2, 3],
    "accepted_run": [None, 1, None, 0, 1],
    "draft_rank_of_token": pa.nulls(5, pa.int32()),
}


def test_proposals_of_prompt_lookup_go_through_an_eos() -> None:
    """[2, 3], [4], [0]: of three drafts one is right, of two none, of three the EOS."""
    row = row_of("strict", THROUGH_EOS, LOOKUP, temperature=None)
    expected = {"proposals": 3, "emitted": 2.0, "drafted_depths_2": [3.0, 3.0], "accepted_depths_2": [2.0, 0.0]}
    assert {name: row[name] for name in expected} == expected


STORED = Recipe(
    domains={"code": Domain(), "story": Domain(temperature=0.7, continuation="sampled")}, lookups=("lookup",), gammas=(1, 3)
)


def asked(run: Run, rules: Sequence[str]) -> TotalsRequest:
    return TotalsRequest(list(rules), run.gammas)


def sorted_rows(table: pa.Table, rules: Sequence[str]) -> list[dict]:
    rows = [row for row in table.to_pylist() if row["rule"] in rules]
    return sorted(rows, key=lambda row: (row["rule"], row["document"]))


def poison(run: Run, draft: str) -> Run:
    """Put a mark into the stored totals that no computation gives."""
    (table,) = blocks_of(run.totals(draft), run.rules)
    place = table.schema.get_field_index("accepted")
    table = table.set_column(place, table.schema.field(place), pa.array([-7.0] * len(table)))
    columns = [dataclasses.replace(column, low=None) for column in run.totals_columns]
    content = totals_content([[table]], columns, "poison")
    (run.path / "totals" / f"draft={draft}" / "part-00000.parquet").write_bytes(content)
    return signed(run)


@pytest.mark.parametrize("draft", ["small", "lookup"])
def test_rules_that_are_not_stored_are_computed_from_the_log_and_not_written(tmp_path: Path, draft: str) -> None:
    run = write_run(tmp_path / "few", dataclasses.replace(STORED, rules=["strict"]))
    whole = write_run(tmp_path / "all", dataclasses.replace(STORED, rules=ALL_RULES))
    before = contents(run)
    found = read_totals(run, draft, asked(run, ALL_RULES))
    assert contents(run) == before
    assert sorted_rows(found, ALL_RULES) == sorted_rows(read_totals(whole, draft, asked(whole, ALL_RULES)), ALL_RULES)
    assert len(found) == len(ALL_RULES) * 12


def test_stored_totals_are_what_is_read(tmp_path: Path) -> None:
    """Those that are stored are not computed again; those beside them are."""
    run = write_run(tmp_path / "run", STORED)
    run = poison(run, "small")
    found = read_totals(run, "small", asked(run, ["strict", "one_hot"])).to_pylist()
    assert {row["rule"] for row in found if row["accepted"] == -7.0} == {"strict"}
    assert len(found) == 24
