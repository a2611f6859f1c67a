"""Certificates and predictability held against a log: counts are those of pandas, what is certain is certain, whatever the
draft.
"""

from __future__ import annotations

import dataclasses
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

from alphaprof.log.store import Run
from alphaprof.report.sections.certificates import LosslessTally, Tally, inexact_share, lossless_tally, tallies
from alphaprof.report.sections.difficulty import decile_counts
from alphaprof.report.sections.predictability import TargetLog, certain_runs
from alphaprof.rules import DEFAULT_RULES, rules_of
from alphaprof.theory.bounds import budget
from alphaprof.totals import log_sample
from alphaprof.totals.log_sample import AXES, decile_edges
from alphaprof.totals.replay import Trace, replay, run_lengths
from tests.reporting import engine, log_of, runs_of
from tests.synthetic import Domain, Recipe, interrupted, rewritten, write_run

Array = np.ndarray[Any, Any]
SAMPLED = {"temperature": 0.7, "continuation": "sampled"}
RULES = (*DEFAULT_RULES, "tree_2", "tree_3")
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


def tally_of(run: Run, rule: str, draft: str = "small") -> Tally:
    return tallies(run, draft)[rule]


NAMES = ["judged", "certified", "accepted", "both", "divergence"]


@pytest.mark.parametrize("draft", MIXED.drafts)
def test_every_rule_with_a_threshold_is_tallied(run: Run, draft: str) -> None:
    assert list(tallies(run, draft)) == CERTIFIED


@pytest.mark.parametrize("rule", CERTIFIED)
@pytest.mark.parametrize("draft", MIXED.drafts)
def test_counts_are_those_of_pandas(run: Run, log: pd.DataFrame, draft: str, rule: str) -> None:
    rows, found = log[log["draft"] == draft], tally_of(run, rule, draft)
    again = recounted(rows, rule)
    assert len(again) == run.manifest.documents
    for name in NAMES:
        np.testing.assert_allclose(getattr(found, name), again[name], rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found.thresholds, rows.loc[judged(rows, rule), f"threshold_{rule}"])
    assert again["certified"].sum() != again["accepted"].sum()


@pytest.mark.parametrize("rule", CERTIFIED)
@pytest.mark.parametrize("axis", AXES)
def test_counts_by_tenths_are_those_of_pandas(run: Run, log: pd.DataFrame, axis: str, rule: str) -> None:
    """A tenth holds the positions from its lower edge, included, to its upper edge, left out."""
    rows, edges = log[log["draft"] == "small"], decile_edges(run, "small")
    found = decile_counts(run, "small", rules_of([rule]), edges)[rule, axis]
    places = pd.cut(rows[AXES[axis]].astype(float), [-np.inf, *edges[axis].astype(float), np.inf], right=False, labels=False)
    for place in range(10):
        mine = rows[places == place]
        again = recounted(mine, rule)
        again["proposed"] = (mine["proposed"] > 0).groupby(mine["document"]).sum()
        again["kept"] = mine[f"accept_{rule}"].astype(float).fillna(0).groupby(mine["document"]).sum()
        again = again.reindex(range(run.manifest.documents), fill_value=0)
        np.testing.assert_allclose(found[:, place], again[["proposed", "kept", "judged", "certified"]], atol=1e-5)
    assert found.shape[1] == 10


@pytest.mark.parametrize("rule", CERTIFIED)
def test_tenths_add_up_to_all_that_was_judged(run: Run, rule: str) -> None:
    found, counts = tally_of(run, rule), decile_counts(run, "small", rules_of([rule]), decile_edges(run, "small"))
    for axis in AXES:
        np.testing.assert_array_equal(counts[rule, axis].sum(1)[:, 2:], np.stack([found.judged, found.certified], axis=-1))


@pytest.mark.parametrize("draft", MIXED.drafts)
def test_tenths_hold_a_tenth_of_all_positions_each(run: Run, log: pd.DataFrame, draft: str) -> None:
    """Of all, those without a proposal included: edges are the target's, and the same for every draft."""
    edges = decile_edges(run, draft)
    for axis, name in AXES.items():
        values = log.loc[log["draft"] == draft, name]
        sizes = np.histogram(values, [-np.inf, *edges[axis], np.inf])[0]
        assert sizes.sum() == run.manifest.positions
        assert max(abs(sizes - run.manifest.positions / 10)) <= 1
        np.testing.assert_array_equal(edges[axis], decile_edges(run, "lookup")[axis])


def handmade(path: Path, length: int, documents: int = 1, **options: Any) -> Run:
    """A run of greedy documents of one length, under strict."""
    domains = {"code": Domain(documents=documents, shortest=length, longest=length)}
    return write_run(path / "run", Recipe(domains=domains, certificates=True, **options))


def with_margins(run: Run, margins: Array) -> Run:
    """The run with these margins, position by position, and entropies that are their negatives on another scale."""

    def change(rows: pd.DataFrame) -> None:
        rows["target_margin"] = margins[: len(rows)]
        rows["target_entropy"] = 10 * (1 - margins[: len(rows)])

    return rewritten(run, "small", change)


def test_edges_of_twenty_positions_by_hand(tmp_path: Path) -> None:
    """Two positions a tenth: the edge is the value of the third, the fifth, and so on."""
    margins = np.random.default_rng(0).permutation(np.arange(20) / 20)
    edges = decile_edges(with_margins(handmade(tmp_path, 20), margins), "small")
    assert edges["margin"] == pytest.approx(np.arange(2, 20, 2) / 20)
    assert edges["entropy"] == pytest.approx(np.arange(1.5, 10, 1))  # of 0.5, 1.0, ..., 10.0


def test_equal_edges_are_one(tmp_path: Path) -> None:
    """Ten positions, four of which have the largest margin: the last four tenths are one."""
    run = with_margins(handmade(tmp_path, 10), np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 1, 1, 1, 1]))
    edges = decile_edges(run, "small")
    assert edges["margin"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 1])
    assert edges["entropy"] == pytest.approx([5, 6, 7, 8, 9, 10])  # 0 four times; there is nothing below it
    counts = decile_counts(run, "small", rules_of(["strict"]), edges)
    assert counts["strict", "margin"][0, :, 0].tolist() == [1, 1, 1, 1, 1, 1, 4]
    assert counts["strict", "entropy"][0, :, 0].tolist() == [4, 1, 1, 1, 1, 1, 1]


def test_positions_that_are_all_alike_are_one_part(tmp_path: Path) -> None:
    run = with_margins(handmade(tmp_path, 10), np.full(10, 0.25))
    edges = decile_edges(run, "small")
    assert [len(values) for values in edges.values()] == [0, 0]
    assert decile_counts(run, "small", rules_of(["strict"]), edges)["strict", "margin"][:, :, 0].tolist() == [[10]]


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
    for axis, name in AXES.items():
        assert set(edges[axis]) <= set(taken[name])
        sizes = np.histogram(taken[name], [-np.inf, *edges[axis], np.inf])[0]
        assert max(abs(sizes - len(taken) / 10)) <= 1
        counts = decile_counts(run, "small", rules_of(["strict"]), edges)["strict", axis]
        np.testing.assert_array_equal(counts.sum(1)[:, 2], every.judged)
    for name in (*NAMES, "thresholds"):
        np.testing.assert_array_equal(getattr(some, name), getattr(every, name))


def test_rounding_of_sums_is_left_to_the_draft(tmp_path: Path) -> None:
    """Nearer than 1e-5 nats to its threshold a divergence certifies nothing, whatever the threshold is."""
    thresholds = np.array([1e-5, 0.01, 0.1, 0.3, 0.69])
    for offset, expected in ((2e-5, 1), (1.1e-5, 1), (0.9e-5, 0), (1e-6, 0), (0, 0), (-1e-4, 0)):

        def change(rows: pd.DataFrame, offset: float = offset) -> None:
            rows["threshold_strict"] = thresholds + max(0.0, offset)
            rows["kl_target_draft"] = thresholds + max(0.0, -offset)

        found = tally_of(rewritten(handmade(tmp_path / str(offset), 5), "small", change), "strict")
        assert found.certified.tolist() == [5 * expected]


def test_a_divergence_of_nothing_is_below_what_rounding_takes_only_just(tmp_path: Path) -> None:
    """Strictly: 0 + 1e-5 is not below a threshold of 1e-5, and below the next number."""
    least = np.float32(1e-5)

    def change(rows: pd.DataFrame) -> None:
        rows["kl_target_draft"], rows["threshold_strict"] = (
            0.0,
            np.where(rows["position"] < 3, least, np.nextafter(least, 1)),
        )

    assert tally_of(rewritten(handmade(tmp_path, 5), "small", change), "strict").certified.tolist() == [2]


def test_what_cannot_be_rejected_is_certified_and_an_infinite_divergence_never(tmp_path: Path) -> None:
    """KL and threshold: (1, inf), (inf, 1), (inf, inf), (0, .5), (0, 0), by document."""

    def change(rows: pd.DataFrame) -> None:
        place = rows["document"].to_numpy()
        rows["kl_target_draft"] = np.array([1, np.inf, np.inf, 0, 0])[place]
        rows["threshold_strict"] = np.array([np.inf, 1, np.inf, 0.5, 0])[place]

    run = handmade(tmp_path, 3, documents=5, shard_documents=2)
    for draft in run.manifest.drafts:
        run = rewritten(run, draft, change)
    found = tally_of(run, "strict")
    assert found.certified.tolist() == [3, 0, 0, 3, 0]
    assert found.divergence.tolist() == [3, math.inf, math.inf, 0, 0]
    assert found.judged.tolist() == [3] * 5


def test_trees_are_judged_where_the_targets_top_token_was_emitted(run: Run, log: pd.DataFrame) -> None:
    """Greedy text but for near-ties; elsewhere nobody knows whether the tree holds the top token."""
    rows = log[log["draft"] == "small"]
    odd = rows["token"] != rows["target_top"]
    greedy = rows["kind"].isin(GREEDY)
    assert (odd & greedy & (rows["proposed"] > 0)).sum() > 5
    assert (~odd & ~greedy).sum() > 50
    expected = (greedy & ~odd & (rows["proposed"] > 0)).groupby(rows["document"]).sum()
    assert tally_of(run, "tree_2").judged.tolist() == expected.tolist()
    assert tally_of(run, "strict").judged.sum() > expected.sum()


@pytest.mark.parametrize("rule", CERTIFIED)
@pytest.mark.parametrize("draft", MIXED.drafts)
def test_whole_distributions_never_contradict_a_certificate(run: Run, log: pd.DataFrame, draft: str, rule: str) -> None:
    """Sampled text of these runs has divergences and acceptance from one pair of distributions at each position."""
    kinds = log[log["draft"] == draft].groupby("document")["kind"].first()
    found = tally_of(run, rule, draft)
    sampled = (kinds == "sampled").to_numpy()
    np.testing.assert_array_equal(found.certified[sampled], found.both[sampled])
    if not rule.startswith("tree"):
        assert found.certified[sampled].sum() > 5


def test_an_interrupted_run_gives_the_counts_of_its_shards(run: Run, tmp_path: Path) -> None:
    part = interrupted(run, tmp_path / "part", 3)
    edges = decile_edges(run, "small")
    whole, found = (tallies(each, "small") for each in (run, part))
    tenths = [decile_counts(each, "small", rules_of(CERTIFIED), edges) for each in (run, part)]
    kept = 3 * MIXED.shard_documents
    for rule in CERTIFIED:
        for name in NAMES:
            np.testing.assert_array_equal(getattr(found[rule], name), getattr(whole[rule], name)[:kept])
        for axis in AXES:
            np.testing.assert_array_equal(tenths[1][rule, axis], tenths[0][rule, axis][:kept])
        size = len(found[rule].thresholds)
        assert size == found[rule].judged.sum()
        np.testing.assert_array_equal(found[rule].thresholds, whole[rule].thresholds[:size])


def test_a_run_without_a_shard_says_nothing(run: Run, tmp_path: Path) -> None:
    empty = interrupted(run, tmp_path / "empty", 0)
    assert tallies(empty, "small") == {}
    assert decile_counts(empty, "small", rules_of(CERTIFIED), {axis: np.zeros(0) for axis in AXES}) == {}
    assert lossless_tally(empty, "small") is None
    assert TargetLog.of(empty) is None


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


@pytest.mark.parametrize("draft", MIXED.drafts)
def test_lossless_sums_are_those_of_the_log(run: Run, log: pd.DataFrame, draft: str) -> None:
    """Over positions with an overlap, from the smaller of both directions of KL."""
    rows = log[log["draft"] == draft].copy()
    rows["least"] = rows[["kl_target_draft", "kl_draft_target"]].astype(float).min(axis=1)
    rows["sharp"] = [0.0 if np.isnan(each) else sharpest(each) for each in rows["least"]]
    rows["positions"] = rows["overlap"].notna()
    names = {"positions": "positions", "beta": "overlap", "sharp": "sharp", "divergence": "least"}
    again = rows.groupby("document")[list(names.values())].sum()
    found = lossless_tally(run, draft)
    assert found is not None
    for name, column in names.items():
        np.testing.assert_allclose(getattr(found, name), again[column], rtol=2e-5, atol=1e-6, err_msg=name)
    assert 0 < found.positions.sum() < run.manifest.positions


def test_the_bound_lies_below_beta(run: Run) -> None:
    """Document by document, where p and q are whole distributions, and so is every sum."""
    found = lossless_tally(run, "small")
    assert found is not None
    kinds = run.documents().to_pandas()["continuation"].astype(str)
    whole = (kinds == "sampled").to_numpy()
    assert (found.sharp[whole] <= found.beta[whole] + 1e-5 * found.positions[whole]).all()
    assert 0 < found.sharp[whole].sum() < found.beta[whole].sum()


def test_truncated_distributions_leave_bounds_of_nothing(tmp_path: Path) -> None:
    """Infinite one way: the other way counts. Both ways: beta may be 0, and the mean divergence is infinite."""

    def change(rows: pd.DataFrame) -> None:
        place = rows["document"].to_numpy()
        rows["kl_target_draft"], rows["overlap"] = np.inf, np.array([0.5, 0.0])[place]
        rows["kl_draft_target"] = np.array([0.5, np.inf])[place]

    found = lossless_tally(rewritten(handmade(tmp_path, 4, documents=2), "small", change), "small")
    assert found is not None
    again = LosslessTally(
        positions=np.array([4, 4]),
        beta=np.array([2, 0]),
        sharp=np.array([4 * sharpest(0.5), 0]),
        divergence=np.array([2, math.inf]),
    )
    for field in dataclasses.fields(LosslessTally):
        np.testing.assert_allclose(getattr(found, field.name), getattr(again, field.name), atol=1e-9)


def test_a_draft_without_distributions_has_no_bounds(run: Run, tmp_path: Path) -> None:
    assert lossless_tally(run, "lookup") is None
    silent = write_run(tmp_path / "run", Recipe(domains={"code": Domain(coverage=0.0)}, certificates=True))
    assert lossless_tally(silent, "small") is None
    assert tally_of(silent, "strict").judged.sum() == 0


def test_thresholds_that_are_lower_bounds_are_counted(tmp_path: Path) -> None:
    """A third of the positions of each document."""
    run = handmade(tmp_path, 6, documents=5, shard_documents=2)

    def change(rows: pd.DataFrame) -> None:
        rows["thresholds_exact"] = rows["position"] % 3 > 0

    assert inexact_share(rewritten(run, "small", change)) == pytest.approx(1 / 3)


# What the target alone says.

TARGET = ["target_top_prob", "target_second_prob", "target_margin", "target_entropy"]


def equal(left: TargetLog, right: TargetLog) -> bool:
    """The same columns, thresholds and lengths."""
    pairs = [(left.columns, right.columns), (left.thresholds, right.thresholds), ({"": left.lengths}, {"": right.lengths})]
    return all(list(a) == list(b) and all(np.array_equal(a[name], b[name]) for name in a) for a, b in pairs)


def reordered(run: Run) -> Run:
    """The same run, its drafts named in another order."""
    drafts = dict(reversed(run.manifest.drafts.items()))
    return Run(run.path, dataclasses.replace(run.manifest, drafts=drafts))


def test_the_targets_columns_are_those_of_every_drafts_log(run: Run, log: pd.DataFrame) -> None:
    found = TargetLog.of(run)
    assert found is not None
    for draft in run.manifest.drafts:
        rows = log[log["draft"] == draft]
        for name in TARGET:
            np.testing.assert_array_equal(found.columns[name], rows[name])
        for rule in CERTIFIED:
            np.testing.assert_array_equal(found.thresholds[rule], rows[f"threshold_{rule}"])
        assert found.lengths.tolist() == rows.groupby("document").size().tolist()
    assert (list(found.columns), list(found.thresholds)) == (TARGET, CERTIFIED)
    other = TargetLog.of(reordered(run))
    assert next(iter(reordered(run).manifest.drafts)) == "lookup"
    assert other is not None
    assert equal(found, other)


@pytest.mark.parametrize("chosen", [[0], [1, 3, 4, 11], [5, 2, 9], list(range(40)), []])
def test_a_part_of_the_target_log_holds_the_positions_of_its_documents(
    run: Run, log: pd.DataFrame, chosen: list[int]
) -> None:
    """In corpus order, also of documents that do not follow each other."""
    found = TargetLog.of(run)
    assert found is not None
    part = found.part(np.array(chosen, dtype=np.int64))
    rows = log[(log["draft"] == "large") & log["document"].isin(chosen)]
    assert part.lengths.tolist() == [found.lengths[number] for number in sorted(chosen)]
    for name in TARGET:
        np.testing.assert_array_equal(part.columns[name], rows[name])
    for rule in CERTIFIED:
        np.testing.assert_array_equal(part.thresholds[rule], rows[f"threshold_{rule}"])


def test_strict_thresholds_need_no_logged_ones(run: Run, log: pd.DataFrame, tmp_path: Path) -> None:
    """From the two largest probabilities, in runs that logged other rules' only, or none."""
    without = write_run(tmp_path / "without", dataclasses.replace(MIXED, certificates=False))
    bare = TargetLog.of(without)
    assert bare is not None
    assert list(bare.thresholds) == ["strict"]
    logged = log.loc[log["draft"] == "small", "threshold_strict"]
    np.testing.assert_array_equal(log.loc[log["draft"] == "small", "target_top_prob"], bare.columns["target_top_prob"])
    np.testing.assert_allclose(bare.thresholds["strict"], logged, rtol=1e-6, atol=1e-9)
    others = write_run(tmp_path / "others", dataclasses.replace(MIXED, rules=("additive_0p1", "tree_2")))
    found = TargetLog.of(others)
    assert found is not None
    assert list(found.thresholds) == ["strict", "additive_0p1", "tree_2"]
    np.testing.assert_allclose(found.thresholds["strict"], logged, rtol=1e-6, atol=1e-9)


texts = st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.3, 0.6, math.inf]), min_size=1, max_size=12), min_size=1)


def flat(found: list[list[float]]) -> tuple[Array, Array]:
    """Positions of documents one after the other, and how many each has."""
    return np.array([value for document in found for value in document]), np.array([len(document) for document in found])


def trace_of(agrees: Array, lengths: Array, gamma: int) -> Trace:
    """What replay reads of a draft that always proposes `gamma` tokens."""
    stop = np.cumsum(lengths)
    start = stop - lengths
    run = run_lengths(agrees, start, stop)
    return Trace(run, np.full(len(agrees), gamma), start, stop, lengths, np.zeros(len(agrees), dtype=bool))


def test_certain_runs_by_hand() -> None:
    """The example of docs/theory.md: the prefill emits the first token, and three rounds the other seven."""
    thresholds = np.array([0.6, 0.5, 0.02, 0.4, 0.3, 0.01, 0.5, 0.6])
    found = certain_runs(thresholds, np.array([8]), 0.1, 3)
    assert (found.epsilon, found.certain.tolist(), found.run.tolist()) == (0.1, [6], [2 + 1 + 2 + 1 + 2 + 1])
    assert (found.rounds.rounds.tolist(), found.rounds.tokens.tolist()) == ([3], [7])


@given(texts, st.sampled_from([0.01, 0.05, 0.07, 0.3, 1.0]), st.integers(1, 5))
def test_certain_runs_are_those_of_a_plain_loop(found: list[list[float]], epsilon: float, gamma: int) -> None:
    """A threshold of just epsilon is not beyond it."""
    runs = certain_runs(*flat(found), epsilon, gamma)
    for place, document in enumerate(found):
        sure = [threshold > epsilon for threshold in document]
        lengths = runs_of(sure)
        again = engine(lengths, [gamma] * len(document), gamma)
        assert (runs.certain[place], runs.run[place]) == (sum(sure), sum(lengths))
        assert (runs.rounds.rounds[place], runs.rounds.tokens[place]) == (again["rounds"], again["tokens"])
        assert runs.rounds.drafted[place].sum() == again["drafted"]
    assert runs.rounds.drafted.shape == (len(found), gamma)


@given(texts, st.sampled_from([0.01, 0.05, 0.3]), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_no_draft_within_epsilon_needs_more_rounds_than_are_certain(
    found: list[list[float]], epsilon: float, gamma: int, seed: int
) -> None:
    """It is accepted wherever its divergence is below the threshold, and elsewhere by luck."""
    thresholds, lengths = flat(found)
    rng = np.random.default_rng(seed)
    divergence = epsilon * rng.random(len(thresholds))
    accepted = (divergence < thresholds) | (rng.random(len(thresholds)) < rng.random())
    most = certain_runs(thresholds, lengths, epsilon, gamma).rounds
    needed = replay(trace_of(accepted, lengths, gamma), gamma)
    assert (needed.rounds <= most.rounds).all()
    np.testing.assert_array_equal(needed.tokens, most.tokens)


@given(texts, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_accepting_more_never_needs_more_rounds(found: list[list[float]], gamma: int, seed: int) -> None:
    """What the promise rests on."""
    values, lengths = flat(found)
    rng = np.random.default_rng(seed)
    some = rng.random(len(values)) < 0.5
    more = some | (rng.random(len(values)) < 0.3)
    few, many = (replay(trace_of(agrees, lengths, gamma), gamma).rounds for agrees in (some, more))
    assert (many <= few).all()


@pytest.mark.parametrize("rule", ["strict", "tree_2"])
def test_what_is_certain_is_replayed_with_that_rule(run: Run, log: pd.DataFrame, rule: str) -> None:
    """On a log: a draft that is right where its divergences would make it, and where it was by luck, needs fewer rounds."""
    target = TargetLog.of(run)
    assert target is not None
    rows = log[log["draft"] == "large"]
    for epsilon in (0.01, 0.1, 0.3):
        found = certain_runs(target.thresholds[rule], target.lengths, epsilon, 4)
        sure = (rows[f"threshold_{rule}"] > epsilon).to_numpy()
        right = np.asarray(ACCEPTS[rule](rows) & (rows["proposed"] > 0))
        needed = replay(trace_of(sure | right, target.lengths, 4), 4).rounds
        assert found.certain.sum() == sure.sum() > 0
        assert (needed <= found.rounds.rounds).all()
        assert needed.sum() < found.rounds.rounds.sum()


def test_lossy_rules_certify_more_than_strict_ones(run: Run) -> None:
    """A rule that accepts more cannot be rejected more cheaply."""
    found = TargetLog.of(run)
    assert found is not None
    for rule in CERTIFIED:
        assert (found.thresholds[rule] >= found.thresholds["strict"] - 1e-7).all()
