"""What a report says of certificates and predictability: numbers against the log, edges of tenths, rounding, runs that are
certain whatever the draft, renderings against the numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq

from alphaprof.config.load import changed_question
from alphaprof.render.blocks import Table
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.sections.target import (
    EPSILONS,
    Certificate,
    Columns,
    Predictability,
    certain_runs,
    decile_counts,
    tallies,
)
from alphaprof.rules import rules_of
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from alphaprof.theory import certificates
from alphaprof.theory.certificates import margin_thresholds, strict_thresholds
from alphaprof.totals import log_sample
from alphaprof.totals.log_sample import MARGIN, decile_edges
from alphaprof.totals.replay import Trace, replay, run_lengths
from tests import reference
from tests.reference import LOGGED_RULES
from tests.reporting import as_json, as_terminal, engine, log_of, reported, runs_of
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
MODELS = list(MIXED.drafts)
# Domains and kinds of text of MIXED, and whether the target produced them, in the order in which they occur.
TEXTS = [
    ("code", "greedy", True),
    ("chat", "greedy", True),
    ("story", "sampled", True),
    ("silent", "greedy", True),
    ("wiki", "text", False),
    ("code", "sampled", True),
    ("code", "given", True),
]
PROPOSING = [text for text in TEXTS if text[0] != "silent"]
LOSSY = [rule for rule in CERTIFIED if rule not in ("strict", "tree_2", "tree_3")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("mixed") / "run", MIXED)


@pytest.fixture(scope="module")
def log(run: Run) -> pd.DataFrame:
    return prepared(run)


def prepared(run: Run) -> pd.DataFrame:
    """The log of a run with what the formulas need, in corpus order for each draft. The independent `unit` of a row is its
    document, or the cluster that it belongs to.
    """
    rows = log_of(run)
    kinds = run.documents().to_pandas().set_index("document")["continuation"].astype(str)
    rows["kind"] = rows["document"].map(kinds)
    rows["known"], rows["best"] = rows["target_prob_of_draft_top"].astype(float), rows["target_top_prob"].astype(float)
    names = run.documents().to_pandas().set_index("document")["cluster"]
    rows["unit"] = rows["document"].map(names.fillna(names.index.to_series().map("document {}".format)))
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


def sharpest(divergence: float) -> float:
    """The least beta at a KL, by a root of the curve of Fedotov, Harremoes and Topsoe."""
    if divergence == 0:
        return 1.0

    def nats(s: float) -> float:
        return math.log(s / math.sinh(s)) + s / math.tanh(s) - (s / math.sinh(s)) ** 2

    s = brentq(lambda s: nats(s) - divergence, 1e-4, 300)
    return 1 - s / 2 * (1 - (1 / math.tanh(s) - 1 / s) ** 2)


def certificate(
    report: RunReport, domain: str, kind: str = "greedy", draft: str = "small", rule: str = "strict"
) -> Certificate:
    """The one certificate of a text, draft and rule."""
    key = (domain, kind, draft, rule)
    (found,) = [
        item
        for item in report.section("target").certificates.certificates
        if (item.domain, item.continuation, item.draft, item.rule) == key
    ]
    return found


def rows_of(log: pd.DataFrame, domain: str, kind: str, draft: str = "small") -> pd.DataFrame:
    return log[(log["domain"] == domain) & (log["kind"] == kind) & (log["draft"] == draft)]


def half(totals: Array, counts: Array) -> tuple[float, float]:
    """A ratio of sums over units, and half of its interval at 95 % on both sides."""
    value = totals.sum() / counts.sum()
    if len(counts) == 1:
        return value, math.inf
    correction, freedom = reference.small_sample(counts.astype(float))
    error = math.sqrt(correction * ((totals - value * counts) ** 2).sum()) / counts.sum()
    return value, float(stats.t.ppf(0.975, freedom)) * error


def share_of(values: pd.Series, units: pd.Series) -> Interval:
    """The mean of values in [0, 1] with its interval over units, from sums by unit."""
    table = values.astype(float).groupby(units).agg(["sum", "count"])
    value, reach = half(table["sum"].to_numpy(), table["count"].to_numpy())
    if reach <= 1e-6 * value:
        agree = 0.025 ** (1 / len(table))
        return Interval(value, value * agree, 1 - (1 - value) * agree)
    return Interval(value, max(0.0, value - reach), min(1.0, value + reach))


def close(found: Interval | None, expected: Interval, tolerance: float = 1e-6) -> None:
    """Equal up to rounding."""
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected), abs=tolerance)


# Certificates: the numbers.


@pytest.mark.parametrize("rule", CERTIFIED)
@pytest.mark.parametrize("draft", MODELS)
def test_shares_are_those_of_the_log(report: RunReport, log: pd.DataFrame, draft: str, rule: str) -> None:
    for domain, kind, _ in PROPOSING:
        rows = rows_of(log, domain, kind, draft)
        again = recounted(rows, rule).sum()
        if not again["judged"]:
            continue
        found = certificate(report, domain, kind, draft, rule)
        assert found.positions == again["judged"]
        assert found.certified.value == pytest.approx(again["certified"] / again["judged"])
        assert found.accepted.value == pytest.approx(again["accepted"] / again["judged"])
        beyond = again["accepted"] - again["both"]
        assert found.accepted_not_certified.value == pytest.approx(beyond / again["judged"])
        assert found.contradicted == again["certified"] - again["both"]
        assert found.mean_divergence == pytest.approx(again["divergence"] / again["judged"])
        kept = rows[judged(rows, rule)]
        assert found.rejected_at_most == pytest.approx(most_rejected(kept[f"threshold_{rule}"], found.mean_divergence))
        assert found.documents == kept["unit"].nunique()


def most_rejected(thresholds: pd.Series, mean: float) -> float:
    """The share of positions that fit into a budget, the cheapest ones first, one by one."""
    left, count = mean * len(thresholds) * (1 + 1e-9), 0
    for cost in sorted(thresholds.astype(float)):
        if cost > left:
            break
        left, count = left - cost, count + 1
    return count / len(thresholds)


@pytest.mark.parametrize("rule", ["strict", "one_hot", "lossless", "additive_0p1", "tree_3"])
def test_tenths_are_those_of_the_log(report: RunReport, log: pd.DataFrame, rule: str) -> None:
    """Of all domains' positions of one kind of text; from their lower edge on, below their upper one."""
    values = log["target_margin"].astype(float)
    edges = None
    for kind in ("greedy", "sampled", "given", "text"):
        found = [
            item
            for item in report.section("target").tenths
            if (item.draft, item.rule, item.continuation) == ("large", rule, kind)
        ]
        rows = log[(log["draft"] == "large") & (log["kind"] == kind)]
        assert sum(item.positions for item in found) == (rows["proposed"] > 0).sum()
        assert (found[0].low, found[-1].high, len(found)) == (None, None, 10)
        assert [item.high for item in found[:-1]] == [item.low for item in found[1:]]
        assert edges in (None, [item.low for item in found])
        edges = [item.low for item in found]
        for item in found:
            inside = (values >= (-math.inf if item.low is None else item.low)) & (
                values < (math.inf if item.high is None else item.high)
            )
            mine = rows[inside.loc[rows.index]]
            again = recounted(mine, rule).sum() if len(mine) and rule in CERTIFIED else {"judged": 0}
            assert item.positions == (mine["proposed"] > 0).sum()
            assert (item.certified is None, item.accepted is None) == (not again["judged"], not item.positions)
            if item.certified is not None:
                assert item.certified.value == pytest.approx(again["certified"] / again["judged"])
            if item.accepted is not None:
                accepted = mine.loc[mine["proposed"] > 0, f"accept_{rule}"].astype(float)
                assert item.accepted.value == pytest.approx(accepted.mean(), abs=1e-6)


@pytest.mark.parametrize("draft", MODELS)
def test_lossless_bounds_are_those_of_the_log(report: RunReport, log: pd.DataFrame, draft: str) -> None:
    """The means over positions of each bound; and in their order."""
    for found in (item for item in report.section("target").certificates.lossless if item.draft == draft):
        rows = rows_of(log, found.domain, found.continuation, draft)
        rows = rows[rows["overlap"].notna()]
        least = rows[["kl_target_draft", "kl_draft_target"]].astype(float).min(axis=1)
        close(found.beta, share_of(rows["overlap"], rows["unit"]), 1e-5)
        close(found.sharp, share_of(least.map(sharpest), rows["unit"]), 1e-5)
        assert found.mean_divergence == pytest.approx(least.mean(), rel=1e-5)
        assert found.from_mean == pytest.approx(sharpest(least.mean()), rel=1e-5)
        assert (found.documents, found.positions) == (rows["unit"].nunique(), len(rows))
        assert found.from_mean <= found.sharp.value
        if found.continuation == "sampled":  # whole distributions, so that everything belongs together
            assert found.sharp.value < found.beta.value


def small_run(path: Path, thresholds: Array, divergences: Array, documents: int = 1) -> Run:
    """A run whose only domain has these thresholds under strict and divergences, document after document."""
    length = len(thresholds) // documents

    def change(rows: pd.DataFrame) -> None:
        place = rows["document"] * length + rows["position"]
        rows["threshold_strict"], rows["kl_target_draft"] = thresholds[place], divergences[place]
        rows["token"] = rows["target_top"]
        rows["draft_top"] = rows["target_top"] + (rows["kl_target_draft"] >= rows["threshold_strict"])

    return rewritten(handmade(path, length, documents), "small", change)


def test_infinite_divergences_are_said_and_promise_nothing(tmp_path: Path) -> None:
    """One position of a draft whose truncation left out what p can emit, and one at which nothing can be rejected."""
    thresholds, divergences = np.full(8, 0.2), np.full(8, 0.1)
    divergences[5], thresholds[2] = np.inf, np.inf
    run = small_run(tmp_path, thresholds, divergences, documents=2)

    def change(rows: pd.DataFrame) -> None:
        rows["kl_draft_target"] = rows["kl_target_draft"]

    found = build_report(rewritten(run, "small", change))
    item = certificate(found, "code")
    assert (item.mean_divergence, item.rejected_at_most) == (math.inf, 7 / 8)
    assert (item.certified.value, item.accepted.value, item.contradicted) == (7 / 8, 7 / 8, 0)
    (bounds,) = found.section("target").certificates.lossless
    assert (bounds.mean_divergence, bounds.from_mean) == (math.inf, 0.0)
    assert bounds.sharp.value == pytest.approx(7 / 8 * sharpest(float(np.float32(0.1))))
    content = as_json(found)["sections"]["target"]["certificates"]
    assert content["certificates"][0]["mean_divergence"] == "inf"
    assert content["lossless"][0]["mean_divergence"] == "inf"
    assert content["certificates"][0]["rejected_at_most"] == 0.875
    text = as_terminal(found)
    assert "nan" not in text
    assert "0.125 <= 0.875" in text


# What contradicts the theory.


def consistent(rows: pd.DataFrame) -> None:
    """Rejected only where the divergence reaches the threshold."""
    right = rows["draft_top"] == rows["target_top"]
    rows["kl_target_draft"] = np.where(right, rows["kl_target_draft"], rows["threshold_strict"] + 0.01)


def test_certified_positions_that_were_rejected_are_an_alarm(tmp_path: Path) -> None:
    """Three of them, in one domain and draft; its section says so, and where."""
    recipe = Recipe(drafts={"small": 0.0, "large": 0.1}, certificates=True, shard_documents=32)
    run = write_run(tmp_path / "run", recipe)
    for draft in recipe.drafts:
        run = rewritten(run, draft, consistent)
    honest = build_report(run)
    assert sum(item.contradicted for item in honest.section("target").certificates.certificates) == 0
    assert "impossible" not in as_terminal(honest)

    def wrong(rows: pd.DataFrame) -> None:
        odd = rows.index[(rows["draft_top"] != rows["target_top"]) & (rows["domain"] == "chat")][:3]
        rows.loc[odd, ["threshold_strict", "kl_target_draft"]] = 0.5, 0.4

    found = build_report(rewritten(run, "large", wrong))
    items = found.section("target").certificates.certificates
    alarms = [(item.domain, item.draft, item.contradicted) for item in items if item.contradicted]
    assert alarms == [("chat", "large", 3)]
    text = as_terminal(found)
    assert "  certified but rejected: 3 of " in text
    assert text.count("  this should be impossible: chat (strict)\n  do not trust the logged divergences there") == 1


# What the target alone says.


def predicted(report: RunReport, domain: str, kind: str) -> Predictability:
    (found,) = [item for item in report.section("target").texts if (item.domain, item.continuation) == (domain, kind)]
    return found


def woodruff(values: pd.Series, units: pd.Series, probability: float) -> Interval:
    """A quantile, and those at what the shares of values below it and up to it may be off by."""
    ordered = np.sort(values.to_numpy())

    def at(share: float) -> float:
        return float(ordered[max(0, math.ceil(share * len(ordered) - 1e-6) - 1)])

    value = at(probability)
    reaches = []
    for chosen in (values < value, values <= value):
        table = chosen.groupby(units).agg(["sum", "count"])
        share, reach = half(table["sum"].to_numpy(), table["count"].to_numpy())
        if reach <= 1e-6 * share:
            reach = (1 - 0.025 ** (1 / len(table))) * max(share, 1 - share)
        reaches.append(reach if reach < max(share, 1 - share) else math.inf)
    least, most = probability - reaches[0], probability + reaches[1]
    return Interval(value, at(least) if least > 0 else 0.0, at(most) if most < 1 else math.inf)


@pytest.mark.parametrize(("domain", "kind", "on_policy"), TEXTS)
def test_quantiles_are_those_of_the_log(
    report: RunReport, log: pd.DataFrame, domain: str, kind: str, on_policy: bool
) -> None:
    """Entropy, margin, the mean top probability, and KL budgets of every rule."""
    found, rows = predicted(report, domain, kind), rows_of(log, domain, kind)
    assert (found.positions, found.units) == (len(rows), rows["unit"].nunique())
    for place, probability in enumerate((0.1, 0.5, 0.9)):
        close(found.entropy[place], woodruff(rows["target_entropy"], rows["unit"], probability))
        margin = woodruff(rows["target_margin"], rows["unit"], probability)
        close(found.margin[place], dataclasses.replace(margin, high=min(1.0, margin.high)))
        plain = np.quantile(rows["target_entropy"], probability, method="inverted_cdf")
        assert found.entropy[place].value == plain
    close(found.top_prob, share_of(rows["target_top_prob"], rows["unit"]))
    assert [budget.rule for budget in found.budgets] == CERTIFIED
    for budget in found.budgets:
        thresholds = rows[f"threshold_{budget.rule}"]
        for item, probability in ((budget.half, 0.5), (budget.ninety, 0.1), (budget.ninety_nine, 0.01)):
            close(item, woodruff(thresholds, rows["unit"], probability))


def test_budgets_are_shown_in_thousandths(report: RunReport) -> None:
    tables = (block for block in report.drawn("target")[1] if isinstance(block, Table))
    (table,) = [table for table in tables if table.title.startswith("KL budget")]
    for (_, cells), item in zip(table.rows, report.section("target").texts, strict=True):
        found = {budget.rule: cells[f"{budget.rule}\n50%"].split()[0] for budget in item.budgets}
        assert found == {budget.rule: f"{budget.half.value:.3f}" for budget in item.budgets}


@pytest.mark.parametrize(("domain", "kind", "on_policy"), TEXTS)
def test_certain_runs_are_those_of_the_log(
    report: RunReport, log: pd.DataFrame, domain: str, kind: str, on_policy: bool
) -> None:
    """Token by token, for every rule and epsilon; rounds only under rules that keep the text, on the target's greedy one."""
    found, rows = predicted(report, domain, kind), rows_of(log, domain, kind)
    assert [(item.rule, item.epsilon) for item in found.runs] == list(itertools.product(CERTIFIED, EPSILONS))
    gamma = max(MIXED.gammas)
    for item in found.runs:
        sure = rows[f"threshold_{item.rule}"] > item.epsilon
        close(item.certain, share_of(sure, rows["unit"]))
        runs = [runs_of(part.tolist()) for _, part in sure.groupby(rows["document"])]
        assert item.mean_run.value == pytest.approx(sum(map(sum, runs)) / len(rows))
        assert item.mean_run.low <= item.mean_run.value <= item.mean_run.high
        assert item.gamma == gamma
        if kind not in GREEDY or item.rule in LOSSY:
            assert item.tokens_per_round is None
            continue
        counted = [engine(run, [gamma] * len(run), gamma) for run in runs]
        tokens, rounds = (sum(count[name] for count in counted) for name in ("tokens", "rounds"))
        assert item.tokens_per_round.value == pytest.approx(tokens / rounds)
        assert 1 <= item.tokens_per_round.low <= item.tokens_per_round.value <= item.tokens_per_round.high <= gamma + 1


ALONE = dataclasses.replace(MIXED, drafts={}, lookups=("ngram",))


def test_strict_says_the_same_with_thresholds_and_without(tmp_path: Path, report: RunReport) -> None:
    """The closed form of two probabilities against what the log holds: one kind of run for both."""
    without = reported(tmp_path, dataclasses.replace(ALONE, certificates=False, seed=MIXED.seed))
    with_them = reported(tmp_path / "with", dataclasses.replace(ALONE, seed=MIXED.seed))
    for mine, logged in zip(*(each.section("target").texts for each in (without, with_them)), strict=True):
        (budget,) = mine.budgets
        assert dataclasses.astuple(budget.half) == pytest.approx(dataclasses.astuple(logged.budgets[0].half), rel=1e-5)
        strict = [run for run in logged.runs if run.rule == "strict"]
        assert list(mine.runs) == strict
        assert (mine.entropy, mine.margin, mine.top_prob) == (logged.entropy, logged.margin, logged.top_prob)


def test_coverage_by_width_is_that_of_the_log(run: Run, log: pd.DataFrame) -> None:
    """On text that the target chose: ranks up to the width, and where the divergence leaves no other possibility."""
    found = {(item.draft, item.width): item for item in build_report(run).section("target").coverage}
    assert list(found) == [(draft, width) for draft in MODELS for width in (1, 2, 4, 8)]  # prompt lookup has no ranks
    own = {(domain, kind) for domain, kind, on_policy in TEXTS if on_policy}
    chosen = np.array([pair in own for pair in zip(log["domain"], log["kind"], strict=True)])
    for (draft, width), item in found.items():
        mine = log[chosen & (log["draft"] == draft)]
        ranks, divergence = mine["draft_rank_of_token"].fillna(0), mine["kl_target_draft"].clip(lower=0).to_numpy() + 1e-5
        assert item.covered.value == pytest.approx(((ranks >= 1) & (ranks <= width)).mean())
        sure = divergence < margin_thresholds(mine["target_margin"].to_numpy(), width)
        assert item.by_margin.value == pytest.approx(sure.mean())
        exact = {
            1: strict_thresholds(mine["target_top_prob"].to_numpy(), mine["target_second_prob"].to_numpy()),
            2: mine["threshold_tree_2"].to_numpy(),
        }
        assert (item.certified is not None) == (width in exact)
        if item.certified is not None:
            assert item.certified.value == pytest.approx((divergence < exact[width]).mean())
            assert 0 < item.by_margin.value < item.certified.value < item.covered.value <= 1


def test_coverage_is_of_text_that_the_target_chose(tmp_path: Path) -> None:
    wiki = Domain(documents=5, on_policy=False, continuation="text")
    assert reported(tmp_path, Recipe(domains={"wiki": wiki})).section("target").coverage == ()


def test_a_hybrid_beside_certificates_is_no_draft_of_the_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(certificates=True, lookups=("ngram",)))
    hybrid = changed_question(run.manifest.config, ["hybrids.both={first: ngram, then: small, min_match: 1}"])
    report = build_report(run, config=hybrid)
    assert "both" not in {item.draft for item in report.section("target").tenths}
    assert "both" in {result.draft for result in report.results}


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
    assert certificates.budget(np.full(10**6, np.float32(0.1)), 0.09) == pytest.approx(0.9, abs=2e-6)


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
