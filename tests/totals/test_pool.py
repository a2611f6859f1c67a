"""Pools of totals: the same however their documents are spread over tables, and whatever their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from alphaprof.errors import RunUnreadable
from alphaprof.run.reader import Run
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, merged, pooled_columns, pools
from tests.loops import each
from tests.synthetic import Domain, Recipe, write_run

RULES = ("strict", "lossless", "additive_0p1")
RECIPE = Recipe(
    domains={"code": Domain(documents=7), "story": Domain(documents=6, temperature=0.7, continuation="sampled")},
    rules=RULES,
    shard_documents=2,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Greedy and sampled documents: each rule has rounds on some of them."""
    return write_run(tmp_path_factory.mktemp("pool") / "run", RECIPE)


def by_hand(rows: dict[int, dict[str, Any]], pool: DocumentTotals, name: str) -> list[float]:
    """A column of the totals, row by row."""
    stem, _, gamma = name.partition("_depths_")
    if not gamma:
        return [np.nan if rows[document][name] is None else rows[document][name] for document in pool["document"]]
    depths = [
        [rows[document][f"{stem}_{gamma}_{depth + 1}"] for depth in range(int(gamma))] for document in pool["document"]
    ]
    return np.array(depths).ravel().tolist()


@each("rule", RULES)
@each("spread", [1, 3, 100])
def test_columns_are_those_of_the_totals(run: Run, rule: str, spread: int) -> None:
    """In tables of one document, of some, and of all; other rules in them too."""
    totals = read_totals(run, "small", TotalsRequest(RULES, run.gammas), pooled_columns(run.gammas))
    number = totals["document"].to_numpy()
    tables = [
        totals.filter(pa.array((number >= low) & (number < low + spread))) for low in range(0, int(number.max()) + 1, spread)
    ]
    documents = Documents.of(run.documents())
    table = pa.concat_tables(tables)
    table = table.unify_dictionaries() if spread == 3 else table  # of all rules in every chunk
    found = dict(pools(table, documents, rule, run.gammas))
    rows = {row["document"]: row for row in read_totals(run, "small", TotalsRequest([rule], run.gammas)).to_pylist()}
    assert {name: len(pool["document"]) for name, pool in found.items()} == {"code": 7, "story": 6}
    for name, pool in found.items():
        rounds = {"strict": "code", "lossless": "story", "additive_0p1": ""}[rule] == name
        assert pool.defined == rounds
        assert ("accepted_depths_2" in pool.columns) == rounds
        assert pool["document"].tolist() == [row["document"] for row in run.documents().to_pylist() if row["domain"] == name]
        for column in set(pool.columns) - {"prompt_tokens", "document"}:
            assert np.ravel(pool[column]).tolist() == pytest.approx(by_hand(rows, pool, column), nan_ok=True, abs=0)


def test_documents_in_another_order(run: Run) -> None:
    """As the pairs of a comparison have them: each row stays that of its document."""
    totals = read_totals(run, "small", TotalsRequest(["strict"], run.gammas), pooled_columns(run.gammas))
    documents = Documents.of(run.documents())
    shuffled = Documents.of(run.documents().take(pa.array(np.random.default_rng(0).permutation(13))))
    (plain, other) = (dict(pools(totals, some, "strict", run.gammas))["code"] for some in (documents, shuffled))
    assert other["document"].tolist() != plain["document"].tolist()
    place = np.argsort(other["document"])
    for name in plain.columns:
        assert np.array_equal(other[name][place], plain[name], equal_nan=True)


def test_pools_of_one_domain_are_one_with_the_text_of_the_first(run: Run) -> None:
    totals = read_totals(run, "small", TotalsRequest(["additive_0p1"], run.gammas), pooled_columns(run.gammas))
    found = dict(pools(totals, Documents.of(run.documents()), "additive_0p1", run.gammas))
    for first, second in (("code", "story"), ("story", "code")):
        whole = merged([found[first], found[second]])
        assert (whole.policy, whole["document"].tolist()) == (
            found[first].policy,
            [*found[first]["document"], *found[second]["document"]],
        )


def test_documents_that_totals_lack_are_a_bug(run: Run) -> None:
    """At either end, in the middle, and all of them."""
    totals = read_totals(run, "small", TotalsRequest(["strict"], run.gammas), pooled_columns(run.gammas))
    for missing in ({0}, {5}, {12}, set(range(13))):
        some = totals.filter(pc.invert(pc.is_in(totals["document"], pa.array(missing))))
        with pytest.raises(RunUnreadable, match="totals do not match its documents"):
            pools(some, Documents.of(run.documents()), "strict", run.gammas)
