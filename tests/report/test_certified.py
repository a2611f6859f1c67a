"""Certificates of a log: edges of tenths, rounding, and runs that are certain whatever the draft. The counts of a log by
pandas are here for `test_report_certificates`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from alphaprof.report.sections.target import Columns, certain_runs, decile_counts, tallies
from alphaprof.rules import rules_of
from alphaprof.run.reader import Run
from alphaprof.theory.certificates import budget
from alphaprof.totals import log_sample
from alphaprof.totals.log_sample import MARGIN, decile_edges
from alphaprof.totals.replay import Trace, replay, run_lengths
from tests.reference import LOGGED_RULES
from tests.reporting import log_of
from tests.synthetic import Domain, Recipe, rewritten, write_run

Array = np.ndarray[Any, Any]
SAMPLED = {"temperature": 0.7, "continuation": "sampled"}
RULES = (*LOGGED_RULES, "tree_2", "tree_3")
MIXED = Recipe(
    domains={
        "code": Domain(documents=8, alpha=0.8),
        "chat": Domain(documents=7, alpha=0.5, coverage=0.6, clusters=["a", "b", "a", None, "b", None, "c"]),
        "story": Domain(documents=8, alpha=0.75, **SAMPLED),
        "silent": Domain(documents=3, coverage=0.0),
        "wiki": Domain(documents=5, alpha=0.3, on_policy=False, continuation="text"),
    },
    sources=[
        ("code", Domain(documents=5, alpha=0.6, coverage=0.7, **SAMPLED)),
        ("code", Domain(documents=4, continuation="given")),
    ],
    drafts={"small": 0.0, "large": 0.2},
    lookups=("lookup",),
    rules=RULES,
    gammas=(1, 2, 4),
    certificates=True,
    thinking=0.5,
    seed=11,
)
CERTIFIED = [rule for rule in RULES if rule not in ("lossless", "one_hot")]
GREEDY = ("greedy", "given")  # kinds of text that the target chose greedily here
# When a rule keeps the proposal d, said once more over rows of the log: the target's top token decides, not the text's.
ACCEPTS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "strict": lambda rows: rows["draft_top"] == rows["target_top"],
    "additive_0p1": lambda rows: rows["known"] >= rows["best"] - 0.1,
    "multiplicative_0p3": lambda rows: rows["known"] >= 0.3 * rows["best"],
    "top_m_3": lambda rows: rows["target_rank_of_draft_top"] <= 3,
    "typical_0p09_0p3": lambda rows: (
        rows["known"] >= np.minimum(rows["best"], np.minimum(0.09, 0.3 * np.exp(-rows["target_entropy"].astype(float))))
    ),
    "trtllm_10_0p6": lambda rows: (rows["target_rank_of_draft_top"] <= 10) & (rows["known"] >= rows["best"] - 0.6),
    "tree_2": lambda rows: rows["draft_rank_of_token"] <= 2,
    "tree_3": lambda rows: rows["draft_rank_of_token"] <= 3,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("mixed") / "run", MIXED)


@pytest.fixture(scope="module")
def log(run: Run) -> pd.DataFrame:
    return prepared(run)


def prepared(run: Run) -> pd.DataFrame:
    """The log of a run with what the formulas need, in corpus order for each draft."""
    rows = log_of(run)
    kinds = run.documents().to_pandas().set_index("document")["continuation"].astype(str)
    rows["kind"] = rows["document"].map(kinds)
    rows["known"], rows["best"] = rows["target_prob_of_draft_top"].astype(float), rows["target_top_prob"].astype(float)
    return rows


def judged(rows: pd.DataFrame, rule: str) -> pd.Series:
    """Which rows a rule's certificates are about."""
    found = (rows["proposed"] > 0) & rows["kl_target_draft"].notna()
    if rule.startswith("tree"):
        found &= (rows["token"] == rows["target_top"]) & rows["kind"].isin(GREEDY)
    return found


def recounted(rows: pd.DataFrame, rule: str) -> pd.DataFrame:
    """One rule's counts by document, by pandas alone."""
    kept = judged(rows, rule)
    sure = kept & (rows["kl_target_draft"].astype(float).clip(lower=0) + 1e-5 < rows[f"threshold_{rule}"].astype(float))
    right = kept & ACCEPTS[rule](rows)
    table = pd.DataFrame({"judged": kept, "certified": sure, "accepted": right, "both": sure & right})
    table["divergence"] = rows["kl_target_draft"].astype(float).where(kept, 0.0)
    return table.groupby(rows["document"]).sum()


def tally_of(run: Run, rule: str, draft: str = "small") -> Columns:
    return tallies(run, draft)[rule]


def handmade(path: Path, length: int, documents: int = 1, **options: Any) -> Run:
    """A run of greedy documents of one length, under strict."""
    domains = {"code": Domain(documents=documents, shortest=length, longest=length)}
    return write_run(path / "run", Recipe(domains=domains, certificates=True, **options))


def with_margins(run: Run, margins: Array) -> Run:
    """The run with these margins, position by position."""

    def change(rows: pd.DataFrame) -> None:
        rows["target_margin"] = margins[: len(rows)]

    return rewritten(run, "small", change)


def test_edges_of_twenty_positions_by_hand(tmp_path: Path) -> None:
    """Two positions a tenth: the edge is the value of the third, the fifth, and so on."""
    margins = np.random.default_rng(0).permutation(np.arange(20) / 20)
    edges = decile_edges(with_margins(handmade(tmp_path, 20), margins), "small")
    assert edges == pytest.approx(np.arange(2, 20, 2) / 20)


def test_equal_edges_are_one(tmp_path: Path) -> None:
    """Ten positions, four of which have the largest margin, or the smallest, below which there is nothing."""
    margins, run = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 1, 1, 1, 1]), handmade(tmp_path, 10)
    for values, expected, sizes in (
        (margins, [0.1, 0.2, 0.3, 0.4, 0.5, 1], [1, 1, 1, 1, 1, 1, 4]),
        (1 - margins, [0.5, 0.6, 0.7, 0.8, 0.9, 1], [4, 1, 1, 1, 1, 1, 1]),
    ):
        changed = with_margins(run, values)
        edges = decile_edges(changed, "small")
        assert edges == pytest.approx(expected)
        counts = decile_counts(changed, "small", rules_of(["strict"]), edges)
        assert counts["strict"][0, :, 0].tolist() == sizes


@pytest.mark.parametrize("sample", [40, 300])
def test_in_a_long_log_edges_come_from_every_nth_position_and_counts_from_all(
    run: Run, log: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, sample: int
) -> None:
    every = tally_of(run, "strict")
    monkeypatch.setattr(log_sample, "SAMPLE", sample)
    edges, some = decile_edges(run, "small"), tally_of(run, "strict")
    stride = 1 + run.manifest.positions // sample
    assert run.manifest.positions / stride <= sample
    rows = log[log["draft"] == "small"]
    shard = rows["document"] // MIXED.shard_documents
    taken = rows[rows.groupby(shard).cumcount() % stride == 0]
    assert set(edges) <= set(taken[MARGIN])
    sizes = np.histogram(taken[MARGIN], [-np.inf, *edges, np.inf])[0]
    assert max(abs(sizes - len(taken) / 10)) <= 1
    counts = decile_counts(run, "small", rules_of(["strict"]), edges)["strict"]
    np.testing.assert_array_equal(counts.sum(1)[:, 2], every["judged"])
    for name, values in every.items():
        np.testing.assert_array_equal(some[name], values)


def test_rounding_of_sums_is_left_to_the_draft(tmp_path: Path) -> None:
    """Nearer than 1e-5 nats to its threshold a divergence certifies nothing, whatever the threshold is."""
    thresholds = np.array([1e-5, 0.01, 0.1, 0.3, 0.69])
    for offset, expected in ((2e-5, 1), (1.1e-5, 1), (0.9e-5, 0), (1e-6, 0), (0, 0), (-1e-4, 0)):

        def change(rows: pd.DataFrame, offset: float = offset) -> None:
            rows["threshold_strict"] = thresholds + max(0.0, offset)
            rows["kl_target_draft"] = thresholds + max(0.0, -offset)

        found = tally_of(rewritten(handmade(tmp_path / str(offset), 5), "small", change), "strict")
        assert found["certified"].tolist() == [5 * expected]


def test_a_budget_of_many_positions_does_not_drift() -> None:
    """A million thresholds of .1, as logs hold them, and a mean of .09: nine in ten, where sums in float32 come to more."""
    assert budget(np.full(10**6, np.float32(0.1)), 0.09) == pytest.approx(0.9, abs=2e-6)


def sharpest(divergence: float) -> float:
    """The least beta at a KL, by a root of the curve of Fedotov, Harremoes and Topsoe."""
    if divergence == 0:
        return 1.0

    def nats(s: float) -> float:
        return math.log(s / math.sinh(s)) + s / math.tanh(s) - (s / math.sinh(s)) ** 2

    s = brentq(lambda s: nats(s) - divergence, 1e-4, 300)
    return 1 - s / 2 * (1 - (1 / math.tanh(s) - 1 / s) ** 2)


# What the target alone says.

texts = st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.3, 0.6, math.inf]), min_size=1, max_size=12), min_size=1)


def flat(found: list[list[float]]) -> tuple[Array, Array]:
    """Positions of documents one after the other, and how many each has."""
    return np.array([value for document in found for value in document]), np.array([len(document) for document in found])


def trace_of(agrees: Array, lengths: Array, gamma: int) -> Trace:
    """What replay reads of a draft that always proposes `gamma` tokens."""
    stop = np.cumsum(lengths)
    start = stop - lengths
    run = run_lengths(agrees, start, stop)
    return Trace(run, np.full(len(agrees), gamma), start, stop)


@given(texts, st.sampled_from([0.01, 0.05, 0.3]), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_no_draft_within_epsilon_needs_more_rounds_than_are_certain(
    found: list[list[float]], epsilon: float, gamma: int, seed: int
) -> None:
    """It is accepted wherever its divergence is below the threshold, and elsewhere by luck."""
    thresholds, lengths = flat(found)
    rng = np.random.default_rng(seed)
    divergence = epsilon * rng.random(len(thresholds))
    accepted = (divergence < thresholds) | (rng.random(len(thresholds)) < rng.random())
    most = certain_runs(thresholds, lengths, epsilon, gamma)[2]
    needed = replay(trace_of(accepted, lengths, gamma), gamma)
    assert (needed.rounds <= most.rounds).all()
    np.testing.assert_array_equal(needed.tokens, most.tokens)


@pytest.mark.parametrize("rule", CERTIFIED)
@pytest.mark.parametrize("draft", MIXED.drafts)
def test_whole_distributions_never_contradict_a_certificate(run: Run, log: pd.DataFrame, draft: str, rule: str) -> None:
    """Sampled text of these runs has divergences and acceptance from one pair of distributions at each position."""
    kinds = log[log["draft"] == draft].groupby("document")["kind"].first()
    found = tally_of(run, rule, draft)
    sampled = (kinds == "sampled").to_numpy()
    np.testing.assert_array_equal(found["certified"][sampled], found["both"][sampled])
    if not rule.startswith("tree"):
        assert found["certified"][sampled].sum() > 5
