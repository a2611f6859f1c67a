"""Rounds of heads, whose proposals depend on the depth: every way that they can go, and plain loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.errors import OptionInvalid
from alphaprof.report.build import build_report
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import DraftFacts
from alphaprof.totals.count import TotalsRequest, columns_of, counts, has_rounds
from alphaprof.totals.files import read_totals
from alphaprof.totals.replay import runs_by_depth
from tests.loops import each
from tests.synthetic import Domain, Recipe, write_run
from tests.totals.test_replay import Models, conditional_counts, process, random_models, texts
from tests.totals.test_totals import FACTS

Array = np.ndarray[Any, Any]
HEAD = DraftFacts(**vars(FACTS), has_distribution=True, has_steps=True, starts_matter=True, depths=3)
SETTINGS = [(2, 5, 2), (2, 5, 3), (3, 4, 2), (3, 4, 3)]  # vocabulary, limit, gamma


def head_models(vocabulary: int, limit: int, gamma: int, context: int = 256) -> Models:
    """A random target, and a head whose law depends on history and depth."""
    first, *others = (random_models(seed, vocabulary, limit, gamma, context=context) for seed in range(gamma))
    return dataclasses.replace(first, deeper=tuple(other.q for other in others))


def logged(models: Models, written: list[tuple[int, ...]]) -> tuple[pa.Table, pa.Table]:
    """Positions and documents as profiling would log them, in float64."""
    rows = []
    for text in written:
        for place, token in enumerate(text):
            p, history = models.p[text[:place]], text[:place]
            row = {"token": token, "proposed": min(models.proposed(place), 1 + len(models.deeper))}
            row |= {"target_token_prob": p[token], "draft_token_prob": models.q[history][token]}
            row["overlap"] = np.minimum(p, models.q[history]).sum()
            for depth in range(2, 2 + len(models.deeper)):
                q, begun = models.draft(history, depth), place - depth + 1
                drafted = begun >= 0 and models.proposed(begun) >= depth
                row[f"emitted_lossless_{depth}"] = min(1.0, q[token] / p[token]) if drafted else None
                row[f"accept_lossless_{depth}"] = np.minimum(p, q).sum() if drafted else None
            rows.append(row)
    whole = ("token", "proposed", "target_top", "draft_top", "accepted_run")
    whole += ("target_rank_of_draft_top", "draft_rank_of_token")
    names = dict.fromkeys([*columns_of(TotalsRequest(["lossless"], ()), HEAD), *rows[0]])
    nothing = {"target_top_prob": 0.5, "target_second_prob": 0.25}  # what no number here depends on
    columns = {name: [row.get(name, nothing.get(name)) for row in rows] for name in names}
    table = pa.table({name: pa.array(columns[name], pa.int64() if name in whole else pa.float64()) for name in names})
    lengths = pa.array([len(text) for text in written])
    documents = {"document": range(len(written)), "continuation_tokens": lengths}
    documents |= {"on_policy": [True] * len(lengths)}
    documents |= {"temperature": [1.0] * len(lengths)}
    return table, pa.table(documents)


def counted(models: Models, written: list[tuple[int, ...]], gamma: int, depths: int) -> dict[str, Array]:
    """Totals of the texts from such a log; `depths`: the head's."""
    facts = dataclasses.replace(HEAD, depths=depths)
    return counts(*logged(models, written), (FACTS, facts), TotalsRequest(["lossless"], [gamma]))["lossless"]


@each(("vocabulary", "limit", "gamma"), SETTINGS)
@each("context", [256, 3])
def test_expected_counts_of_a_head_are_those_of_every_way_it_can_go(
    vocabulary: int, limit: int, gamma: int, context: int
) -> None:
    """Given each text, from the columns of the log. The control variate is 0 on average over texts."""
    models = head_models(vocabulary, limit, gamma, context)
    chances = texts(models)
    written, weights = list(chances), np.array(list(chances.values()))
    law = process(models, gamma)
    enumerated = conditional_counts(law, written, gamma)
    found = counted(models, written, gamma, depths=gamma)
    assert found[f"rounds_{gamma}"] == pytest.approx(enumerated.rounds, abs=1e-12)
    for name in ("drafted", "tested", "accepted"):
        by_depth = np.stack([found[f"{name}_{gamma}_{depth}"] for depth in range(1, gamma + 1)], 1)
        assert by_depth == pytest.approx(getattr(enumerated, name), abs=1e-12), name
    assert float(weights @ found[f"control_{gamma}"]) == pytest.approx(0, abs=1e-12)
    assert np.abs(found[f"control_{gamma}"]).max() > 0.1
    written_law = {text: sum(share for (whole, _), share in law.items() if whole == text) for text in written}
    assert written_law == pytest.approx(chances, abs=1e-12)  # the enumeration is of the right process


depths_of_documents = st.lists(
    st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.integers(0, 4)), min_size=1, max_size=7),
    min_size=1,
    max_size=4,
)


@given(depths_of_documents)
def test_what_rounds_of_a_head_get_accepted_is_that_of_a_plain_loop(
    documents: list[list[tuple[list[bool], int]]],
) -> None:
    expected = []
    for document in documents:
        for begin, (_, proposed) in enumerate(document):
            accepted = 0
            while accepted < min(proposed, 3) and begin + accepted < len(document):
                agrees, _ = document[begin + accepted]
                if not agrees[accepted]:
                    break
                accepted += 1
            expected.append(accepted)
    rows = [row for document in documents for row in document]
    agrees, proposed = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    stop = np.cumsum([len(document) for document in documents])
    found = runs_by_depth(agrees, proposed, np.array([0, *stop[:-1]]), stop)
    assert found.tolist() == expected


RECIPE = Recipe(
    domains={
        "code": Domain(documents=5),
        "chat": Domain(documents=5, alpha=0.6, temperature=1.0, continuation="sampled"),
    },
    drafts={},
    heads={"head": {}},
    rules=("strict", "lossless", "one_hot", "tree_2"),
    gammas=(1, 3, 4),
)


def rounds_by_loop(log: dict[str, list[Any]], kept: Callable[[int, int], bool], gamma: int) -> tuple[int, list[int]]:
    """Rounds of one document, and drafts that were all accepted up to each depth, [gamma]; `kept`: of a row at a depth."""
    at, rounds, accepted = 1, 0, [0] * gamma
    while at < len(log["token"]):
        depth = 0
        while depth < min(gamma, log["proposed"][at]) and at + depth < len(log["token"]) and kept(at + depth, depth + 1):
            accepted[depth] += 1
            depth += 1
        at, rounds = at + depth + 1, rounds + 1
    return rounds, accepted


@pytest.mark.parametrize("rule", ["strict", "one_hot"])
def test_rounds_of_facts_are_those_of_a_plain_loop_over_the_log(tmp_path: Path, rule: str) -> None:
    """`accepted_run` says what `agrees_2` and so on do."""
    run = write_run(tmp_path / "run", RECIPE)
    totals = read_totals(run, "head", TotalsRequest([rule], run.gammas)).to_pylist()
    positions = pa.concat_tables([run.positions("head", shard.index) for shard in run.shards]).to_pandas()
    checked = 0
    for row in (row for row in totals if row["tokens"] is not None):
        log = positions[positions["document"] == row["document"]].to_dict("list")

        def kept(place: int, depth: int, log: dict[str, list[Any]] = log) -> bool:
            return bool(log[f"agrees_{depth}"][place]) if depth > 1 else log["draft_top"][place] == log["token"][place]

        for gamma in run.gammas:
            rounds, accepted = rounds_by_loop(log, kept, gamma)
            assert row[f"rounds_{gamma}"] == rounds
            assert [row[f"accepted_{gamma}_{depth}"] for depth in range(1, gamma + 1)] == accepted
            checked += 1
    assert checked == 3 * 5


def test_rules_whose_depths_the_log_lacks_have_no_rounds(tmp_path: Path) -> None:
    """A tree, whose ranks of a head are those of first drafts; alpha, at depth 1, is there."""
    run = write_run(tmp_path / "run", RECIPE)
    totals = read_totals(run, "head", TotalsRequest(["tree_2"], run.gammas)).to_pylist()
    assert not has_rounds(parse_rule("tree_2"), run.manifest.drafts["head"])
    assert all(row["tokens"] is None for row in totals)
    assert sum(row["accepted"] for row in totals) > 0
    found = build_report(run, rules=["tree_2"]).section("rules")
    said = {result.reason for result in found if result.rule == "tree_2"}
    assert said == {"tree_2 of a head is known for first drafts only (accept@1), so it has no rounds"}


def test_expected_rounds_need_a_log_that_was_written_with_the_rule(tmp_path: Path) -> None:
    """Of a head; any log of a draft without depth is enough."""
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, rules=("strict", "one_hot"), lookups=("lookup",)))
    assert len(read_totals(run, "lookup", TotalsRequest(["lossless"], run.gammas))) == 10
    with pytest.raises(OptionInvalid, match="not enough for lossless"):
        read_totals(run, "head", TotalsRequest(["strict", "lossless"], run.gammas))
    with pytest.raises(OptionInvalid, match="not enough for lossless"):
        build_report(run, rules=["lossless"])
