"""What a report says of certificates and predictability: the numbers against the log, renderings against the numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.cells import cell_len
from scipy import stats

from alphaprof.log.store import Run
from alphaprof.render.json import render_json
from alphaprof.report import format as fmt
from alphaprof.report.build import Report, build_report
from alphaprof.report.sections.certificates import Certificate, Certificates, LosslessBounds
from alphaprof.report.sections.difficulty import Decile
from alphaprof.report.sections.predictability import EPSILONS, Budget, CertainRun, FreeDraft, Predictability
from alphaprof.stats.estimate import Interval
from tests import reference
from tests.report.test_certified import CERTIFIED, GREEDY, MIXED, RULES, SAMPLED, judged, prepared, recounted, sharpest
from tests.reporting import HOSTILE, as_first_screen, as_json, as_terminal, codes, engine, only, reported, runs_of
from tests.synthetic import Domain, Recipe, contents, interrupted, rewritten, write_run

Array = np.ndarray[Any, Any]
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
def report(run: Run) -> Report:
    return build_report(run)


@pytest.fixture(scope="module")
def log(run: Run) -> pd.DataFrame:
    return with_units(run)


def with_units(run: Run) -> pd.DataFrame:
    """The log, with the independent unit of each row: its document, or the cluster that it belongs to."""
    rows = prepared(run)
    names = run.documents().to_pandas().set_index("document")["cluster"]
    alone = names.index.to_series().map("document {}".format)
    rows["unit"] = rows["document"].map(names.fillna(alone))
    return rows


def held(report: Report) -> Certificates:
    """The certificates, which there must be."""
    assert report.certificates is not None
    return report.certificates


def certificate(
    report: Report, domain: str, kind: str = "greedy", draft: str = "small", rule: str = "strict"
) -> Certificate:
    """The one certificate of a text, draft and rule."""
    key = (domain, kind, draft, rule)
    (found,) = [item for item in held(report).certificates if (item.domain, item.continuation, item.draft, item.rule) == key]
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
    assert found is not None
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected), abs=tolerance)


# Certificates: the numbers.


def test_there_is_a_certificate_of_every_text_draft_and_rule_that_something_was_judged_of(report: Report) -> None:
    """None of prompt lookup, of a draft that proposes nothing, and of trees beyond greedy text."""
    found = [(item.domain, item.continuation, item.on_policy, item.draft, item.rule) for item in held(report).certificates]
    expected = [
        (*text, draft, rule)
        for draft in MODELS
        for rule in CERTIFIED
        for text in PROPOSING
        if text[1] in GREEDY or not rule.startswith("tree")
    ]
    assert sorted(found) == sorted(expected)
    bounds = [(item.domain, item.continuation, item.on_policy, item.draft) for item in held(report).lossless]
    assert sorted(bounds) == sorted((*text, draft) for draft in MODELS for text in PROPOSING)


@pytest.mark.parametrize("rule", CERTIFIED)
@pytest.mark.parametrize("draft", MODELS)
def test_shares_are_those_of_the_log(report: Report, log: pd.DataFrame, draft: str, rule: str) -> None:
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


@pytest.mark.parametrize("rule", ["strict", "typical_0p09_0p3", "tree_2"])
@pytest.mark.parametrize(("domain", "kind"), [("code", "greedy"), ("chat", "greedy"), ("code", "given")])
def test_intervals_are_those_of_independent_units(
    report: Report, log: pd.DataFrame, domain: str, kind: str, rule: str
) -> None:
    """From sums by document, or by cluster; in chat there are five of seven documents."""
    rows = rows_of(log, domain, kind)
    rows = rows[judged(rows, rule)]
    each = recount_rows(rows, rule)
    found = certificate(report, domain, kind, rule=rule)
    for name in ("certified", "accepted", "accepted_not_certified"):
        close(getattr(found, name), share_of(each[name], rows["unit"]))
    assert found.documents == {"code": {"greedy": 8, "given": 4}[kind] if domain == "code" else 0, "chat": 5}[domain]


def test_documents_in_which_nothing_was_judged_are_none(tmp_path: Path) -> None:
    """A draft that seldom proposes anything: of twelve documents some have no proposal, and carry no information."""
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=12, coverage=0.03)}, certificates=True))
    rows = with_units(run)
    rows = rows[judged(rows, "strict")]
    found = build_report(run)
    item = certificate(found, "code")
    assert item.documents == held(found).lossless[0].documents == rows["document"].nunique() < 12
    assert found.predictability[0].documents == 12
    close(item.certified, share_of(recount_rows(rows, "strict")["certified"], rows["unit"]))


def recount_rows(rows: pd.DataFrame, rule: str) -> pd.DataFrame:
    """What is certified and accepted, row by row."""
    each = [recounted(rows.loc[[index]], rule).iloc[0] for index in rows.index]
    table = pd.DataFrame(each, index=rows.index)
    table["accepted_not_certified"] = table["accepted"] - table["both"]
    return table


@pytest.mark.parametrize("rule", ["strict", "additive_0p1", "tree_3"])
@pytest.mark.parametrize("axis", ["margin", "entropy"])
def test_tenths_are_those_of_the_log(report: Report, log: pd.DataFrame, axis: str, rule: str) -> None:
    """Of all domains' positions of one kind of text; from their lower edge on, below their upper one."""
    values = log[f"target_{axis}"].astype(float)
    edges = None
    for kind in ("greedy", "sampled", "given", "text"):
        found = [
            item
            for item in report.difficulty
            if (item.draft, item.rule, item.axis, item.continuation) == ("large", rule, axis, kind)
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
            again = recounted(mine, rule).sum() if len(mine) else {"judged": 0}
            assert item.positions == (mine["proposed"] > 0).sum()
            assert (item.certified is None, item.accepted is None) == (not again["judged"], not item.positions)
            if item.certified is not None:
                assert item.certified.value == pytest.approx(again["certified"] / again["judged"])
            if item.accepted is not None:
                accepted = mine.loc[mine["proposed"] > 0, f"accept_{rule}"].astype(float)
                assert item.accepted.value == pytest.approx(accepted.mean(), abs=1e-6)


def test_intervals_of_tenths_are_those_of_the_units_of_all_domains(report: Report, log: pd.DataFrame) -> None:
    rows = log[(log["draft"] == "small") & (log["kind"] == "greedy") & judged(log, "strict")]
    assert rows["domain"].nunique() == 2
    (found,) = [
        item
        for item in report.difficulty
        if (item.draft, item.rule, item.axis, item.continuation, item.high) == ("small", "strict", "margin", "greedy", None)
    ]
    rows = rows[rows["target_margin"] >= found.low]
    each = recount_rows(rows, "strict")
    close(found.certified, share_of(each["certified"], rows["unit"]))
    close(found.accepted, share_of(rows["accept_strict"].astype(float), rows["unit"]))


@pytest.mark.parametrize("draft", MODELS)
def test_lossless_bounds_are_those_of_the_log(report: Report, log: pd.DataFrame, draft: str) -> None:
    """The means over positions of each bound; and in their order."""
    for found in (item for item in held(report).lossless if item.draft == draft):
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


def test_sampled_text_of_whole_distributions_contradicts_nothing(report: Report) -> None:
    """And rejects no more than its mean divergence allows."""
    found = [item for item in held(report).certificates if item.continuation == "sampled"]
    assert len(found) == 2 * 2 * (len(CERTIFIED) - 2)
    for item in found:
        assert item.contradicted == 0
        assert 1 - item.accepted.value <= item.rejected_at_most + 1e-12
    assert min(item.rejected_at_most for item in found) < 0.5


def test_the_share_of_thresholds_that_are_lower_bounds(run: Run, report: Report, log: pd.DataFrame) -> None:
    assert held(report).inexact == pytest.approx(1 - log.loc[log["draft"] == "small", "thresholds_exact"].mean())
    assert held(report).inexact > 0


@pytest.mark.parametrize("shards", [None, 3])
def test_an_interrupted_run_has_the_certificates_of_its_shards(
    run: Run, report: Report, tmp_path: Path, shards: int | None
) -> None:
    copy = interrupted(run, tmp_path / "part", shards)
    before = contents(copy)
    partial, log = build_report(copy), with_units(copy)
    assert contents(copy) == before
    if shards is None:
        assert (partial.certificates, partial.predictability) == (report.certificates, report.predictability)
        return
    log = log[log["document"] < shards * MIXED.shard_documents]
    for item in held(partial).certificates:
        again = recounted(rows_of(log, item.domain, item.continuation, item.draft), item.rule).sum()
        counts = (item.positions, round(item.certified.value * item.positions), item.contradicted)
        assert counts == (again["judged"], again["certified"], again["certified"] - again["both"])
    for text in partial.predictability:
        assert text.positions == len(rows_of(log, text.domain, text.continuation))
    assert {item.domain for item in partial.predictability} == {domain for domain, _, _ in TEXTS}


def test_an_empty_run_has_neither_section(run: Run, tmp_path: Path) -> None:
    empty = build_report(interrupted(run, tmp_path / "empty", 0))
    assert (empty.certificates, empty.predictability) == (None, ())
    content = as_json(empty)
    assert (content["certificates"], content["predictability"]) == (None, [])
    text = as_terminal(empty)
    assert "certified" not in text
    assert "the target alone" not in text


def small_run(path: Path, thresholds: Array, divergences: Array, documents: int = 1) -> Run:
    """A run whose only domain has these thresholds under strict and divergences, document after document."""
    length = len(thresholds) // documents
    recipe = Recipe(domains={"code": Domain(documents=documents, shortest=length, longest=length)}, certificates=True)

    def change(rows: pd.DataFrame) -> None:
        place = rows["document"] * length + rows["position"]
        rows["threshold_strict"], rows["kl_target_draft"] = thresholds[place], divergences[place]
        rows["token"] = rows["target_top"]
        rows["draft_top"] = rows["target_top"] + (rows["kl_target_draft"] >= rows["threshold_strict"])

    return rewritten(write_run(path / "run", recipe), "small", change)


def test_the_budget_by_hand(tmp_path: Path) -> None:
    """Four positions and 4 x .15 nats: .1 + .2 + .3 is all of it. With .149 each, the third cannot be paid."""
    thresholds = np.array([0.4, 0.1, 0.3, 0.2])
    for mean, expected in ((0.15, 0.75), (0.149, 0.5), (0.26, 1.0), (0.0249, 0.0)):
        found = certificate(build_report(small_run(tmp_path / str(mean), thresholds, np.full(4, mean))), "code")
        assert found.mean_divergence == pytest.approx(mean)
        assert found.rejected_at_most == expected


@pytest.mark.parametrize("seed", range(6))
def test_no_draft_with_that_mean_divergence_can_be_rejected_more_often(tmp_path: Path, seed: int) -> None:
    """Every set of eight positions that could be rejected: their thresholds fit into the sum of the divergences."""
    rng = np.random.default_rng(seed)
    thresholds, divergences = rng.exponential(0.2, 8).astype(np.float32), rng.exponential(0.1, 8).astype(np.float32)
    thresholds[rng.random(8) < 0.15] = np.inf
    found = certificate(build_report(small_run(tmp_path, thresholds, divergences)), "code")
    budget = float(divergences.astype(float).sum())
    sizes = [
        len(chosen)
        for size in range(9)
        for chosen in itertools.combinations(thresholds.astype(float), size)
        if sum(chosen) <= budget
    ]
    assert found.rejected_at_most == max(sizes) / 8
    assert 1 - found.accepted.value <= found.rejected_at_most


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
    (bounds,) = held(found).lossless
    assert (bounds.mean_divergence, bounds.from_mean) == (math.inf, 0.0)
    assert bounds.sharp.value == pytest.approx(7 / 8 * sharpest(float(np.float32(0.1))))
    content = as_json(found)["certificates"]
    assert content["certificates"][0]["mean_divergence"] == "inf"
    assert content["lossless"][0]["mean_divergence"] == "inf"
    assert content["certificates"][0]["rejected_at_most"] == 0.875
    for width in (100, 150):
        text = as_terminal(found, width)
        assert "nan" not in text
        assert "0.125 <= 0.875" in text
        row = section(text, "lossless acceptance")[0].split()
        assert row[-2:] == ["inf", "0.000"]


def test_infinite_budgets_are_said(tmp_path: Path) -> None:
    """A rule that can reject at less than half of the positions."""
    thresholds = np.where(np.arange(40) % 5 < 2, 0.3, np.inf)
    found = build_report(small_run(tmp_path, thresholds, np.full(40, 0.1), documents=4))
    (text,) = found.predictability
    assert [item.value for item in (text.budgets[0].half, text.budgets[0].ninety)] == [math.inf, pytest.approx(0.3)]
    assert as_json(found)["predictability"][0]["budgets"][0]["half"]["value"] == "inf"
    assert "inf [" in "".join(section(as_terminal(found), "KL budget"))


# What contradicts the theory.


def consistent(rows: pd.DataFrame) -> None:
    """Rejected only where the divergence reaches the threshold."""
    right = rows["draft_top"] == rows["target_top"]
    rows["kl_target_draft"] = np.where(right, rows["kl_target_draft"], rows["threshold_strict"] + 0.01)


def test_certified_positions_that_were_rejected_are_an_alarm(tmp_path: Path) -> None:
    """Three of them, in one domain and draft; the terminal and a note say so."""
    recipe = Recipe(drafts={"small": 0.0, "large": 0.1}, certificates=True, shard_documents=32)
    run = write_run(tmp_path / "run", recipe)
    for draft in recipe.drafts:
        run = rewritten(run, draft, consistent)
    honest = build_report(run)
    assert "contradicted" not in codes(honest)
    assert sum(item.contradicted for item in held(honest).certificates) == 0
    certain = sum(
        round(item.certified.value * item.positions) for item in held(honest).certificates if item.draft == "large"
    )
    assert f"  certified and yet rejected: 0 of {certain:,} certified positions" in as_terminal(honest)

    def wrong(rows: pd.DataFrame) -> None:
        odd = rows.index[(rows["draft_top"] != rows["target_top"]) & (rows["domain"] == "chat")][:3]
        rows.loc[odd, "threshold_strict"] = 0.5
        rows.loc[odd, "kl_target_draft"] = 0.4

    found = build_report(rewritten(run, "large", wrong))
    assert [(item.domain, item.draft, item.contradicted) for item in held(found).certificates if item.contradicted] == [
        ("chat", "large", 3)
    ]
    (warning,) = [warning for warning in found.notes if warning.code == "contradicted"]
    assert warning.message == "3 certified positions were rejected, which should be impossible: chat (large, strict)"
    assert "report it" in warning.remedy
    for width in (100, 150):
        text = as_terminal(found, width)
        assert f"  certified and yet rejected: 3 of {certain + 3:,} certified positions, all rules together" in text
        assert f"note: {warning.message}" in text
        assert text.count("certified and yet rejected: 0 of ") == 1  # the other draft's


# What the target alone says.


def predicted(report: Report, domain: str, kind: str) -> Predictability:
    (found,) = [item for item in report.predictability if (item.domain, item.continuation) == (domain, kind)]
    return found


def test_every_text_is_described_in_the_order_of_the_documents(report: Report) -> None:
    assert [(item.domain, item.continuation, item.on_policy) for item in report.predictability] == TEXTS


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
def test_quantiles_are_those_of_the_log(report: Report, log: pd.DataFrame, domain: str, kind: str, on_policy: bool) -> None:
    """Entropy, margin, the mean top probability, and KL budgets of every rule."""
    found, rows = predicted(report, domain, kind), rows_of(log, domain, kind)
    assert (found.positions, found.documents) == (len(rows), rows["unit"].nunique())
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


def test_a_budget_leaves_what_it_says_certain(report: Report, log: pd.DataFrame) -> None:
    """Any divergence below it: at least half, 90 % and 99 % of the thresholds lie beyond."""
    for text in report.predictability:
        rows = rows_of(log, text.domain, text.continuation)
        for budget in text.budgets:
            thresholds = rows[f"threshold_{budget.rule}"].to_numpy()
            for item, share in ((budget.half, 0.5), (budget.ninety, 0.9), (budget.ninety_nine, 0.99)):
                below = np.nextafter(np.float32(item.value), np.float32(0))
                assert (thresholds > below).mean() >= share
                assert (thresholds > item.value).mean() <= share


@pytest.mark.parametrize(("domain", "kind", "on_policy"), TEXTS)
def test_certain_runs_are_those_of_the_log(
    report: Report, log: pd.DataFrame, domain: str, kind: str, on_policy: bool
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
        assert item.tokens_per_round is not None
        tokens, rounds = (sum(count[name] for count in counted) for name in ("tokens", "rounds"))
        assert item.tokens_per_round.value == pytest.approx(tokens / rounds)
        assert 1 <= item.tokens_per_round.low <= item.tokens_per_round.value <= item.tokens_per_round.high <= gamma + 1


def test_intervals_of_certain_runs_are_those_of_documents(report: Report, log: pd.DataFrame) -> None:
    """The mean run by sums over units, tokens per round on the log scale."""
    rows = rows_of(log, "chat", "greedy")
    (item,) = [each for each in predicted(report, "chat", "greedy").runs if (each.rule, each.epsilon) == ("strict", 0.1)]
    table = []
    for (unit, _), part in (rows["threshold_strict"] > 0.1).groupby([rows["unit"], rows["document"]]):
        runs = runs_of(part.tolist())
        counted = engine(runs, [4] * len(runs), 4)
        table.append((unit, sum(runs), len(runs), counted["rounds"], counted["tokens"]))
    sums = pd.DataFrame(table, columns=["unit", "runs", "positions", "rounds", "tokens"]).groupby("unit").sum()
    mean, reach = half(sums["runs"].to_numpy(), sums["positions"].to_numpy())
    close(item.mean_run, Interval(mean, max(0.0, mean - reach), mean + reach))
    time, reach = half(sums["rounds"].to_numpy(), sums["tokens"].to_numpy())
    share = max(2 / len(sums), 0.1)  # of units that were not seen: a round for each token, or for 5
    low = min(math.exp(-reach / time) / time, 1 / ((1 - share) * time + share))
    high = max(math.exp(reach / time) / time, 1 / ((1 - share) * time + share / 5))
    assert low > 1
    close(item.tokens_per_round, Interval(1 / time, low, high))


@pytest.mark.parametrize("luck", [0.0, 0.4])
def test_what_is_certain_is_the_least_that_a_draft_within_epsilon_reaches(tmp_path: Path, luck: float) -> None:
    """A draft with a KL of .03 everywhere that is right where it must be, and elsewhere with luck: without it, just that."""
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=10)}, certificates=True, seed=4))
    rng = np.random.default_rng(1)

    def change(rows: pd.DataFrame) -> None:
        rows["token"] = rows["target_top"]
        right = (rows["threshold_strict"] > 0.03) | (rng.random(len(rows)) < luck)
        rows["kl_target_draft"] = np.float32(0.03)
        rows["draft_top"] = np.where(right, rows["token"], rows["token"] + 1)

    found = build_report(rewritten(run, "small", change))
    (least,) = [item for item in found.predictability[0].runs if (item.rule, item.epsilon) == ("strict", 0.03)]
    reached = only(found, "code").gammas[-1]
    assert least.tokens_per_round is not None
    assert reached.tokens_per_round is not None
    assert reached.gamma == least.gamma == 4
    if luck:
        assert reached.tokens_per_round.value > least.tokens_per_round.value
    else:
        assert reached.tokens_per_round == least.tokens_per_round
    assert certificate(found, "code").contradicted == 0


@pytest.mark.parametrize(("thresholds", "value"), [(0.0, 0.0), (0.5, 5.5)])
def test_documents_that_all_agree_do_not_make_a_mean_run_certain(tmp_path: Path, thresholds: float, value: float) -> None:
    """Eight documents of ten tokens, nothing of which is certain, or everything: what is not seen may be there."""
    run = small_run(tmp_path, np.full(80, thresholds), np.full(80, 0.2), documents=8)
    (item,) = [each for each in build_report(run).predictability[0].runs if each.epsilon == 0.1]
    assert item.mean_run.value == value
    assert item.mean_run.high - item.mean_run.low >= 5.5 / 8
    assert item.mean_run.low >= 0


def test_one_document_tells_points_and_nothing_more(tmp_path: Path) -> None:
    """Every interval is all that there can be."""
    found = reported(tmp_path, Recipe(domains={"code": Domain(documents=1)}, certificates=True, lookups=("ngram",)))
    (text,) = found.predictability
    assert {(item.low, item.high) for item in text.entropy} == {(0.0, math.inf)}
    assert {(item.low, item.high) for item in (*text.margin, text.top_prob)} == {(0.0, 1.0)}
    for budget in text.budgets:
        assert {(item.low, item.high) for item in (budget.half, budget.ninety)} == {(0.0, math.inf)}
    for run in text.runs:
        assert (run.certain.low, run.certain.high) == (0, 1)
        assert (run.mean_run.low, run.mean_run.high) == (0, (text.positions + 1) / 2)  # certain throughout
        assert run.tokens_per_round is not None
        assert (run.tokens_per_round.low, run.tokens_per_round.high) == (1, 5)
    item = certificate(found, "code")
    assert {(each.low, each.high) for each in (item.certified, item.accepted, item.accepted_not_certified)} == {(0, 1)}
    assert held(found).lossless[0].sharp.high == 1
    as_json(found)


@pytest.mark.parametrize("decision", [{}, {"rule": "strict"}, {"rule": "additive_0p1"}])
def test_the_free_draft_is_prompt_lookup_under_the_rule_of_the_verdict(run: Run, decision: dict[str, Any]) -> None:
    found = build_report(run, config=run.manifest.config | {"decision": run.manifest.config["decision"] | decision})
    for text in found.predictability:
        rule = decision.get("rule") or ("one_hot" if text.continuation == "sampled" else "strict")
        (free,) = text.free
        (result,) = [
            item
            for item in found.results
            if (item.domain, item.continuation, item.draft, item.rule) == (text.domain, text.continuation, "lookup", rule)
        ]
        assert (free.draft, free.rule, free.coverage, free.alpha) == ("lookup", rule, result.coverage, result.alpha)
        best = max((item.tokens_per_round.value for item in result.gammas if item.tokens_per_round), default=None)
        assert (free.tokens_per_round.value if free.tokens_per_round else None) == best
        assert free.tokens_per_round in [item.tokens_per_round for item in result.gammas if item.gamma == free.gamma] or (
            free.gamma,
            best,
        ) == (None, None)


def test_the_order_of_drafts_changes_nothing_about_the_target(run: Run, report: Report) -> None:
    drafts = dict(reversed(run.manifest.drafts.items()))
    other = build_report(Run(run.path, dataclasses.replace(run.manifest, drafts=drafts)))
    assert other.predictability == report.predictability
    assert held(other).inexact == held(report).inexact


ALONE = dataclasses.replace(MIXED, drafts={}, lookups=("ngram",))


@pytest.mark.parametrize("certificates", [True, False])
def test_the_target_alone_is_described_with_prompt_lookup(tmp_path: Path, certificates: bool) -> None:
    """As `drafts: {}` measures it: no certificate, since there is no distribution; without thresholds strict alone."""
    found = reported(tmp_path, dataclasses.replace(ALONE, certificates=certificates))
    assert [(item.domain, item.continuation, item.on_policy) for item in found.predictability] == TEXTS
    rules = {tuple(budget.rule for budget in text.budgets) for text in found.predictability}
    assert rules == {tuple(CERTIFIED) if certificates else ("strict",)}
    assert all(text.free for text in found.predictability)
    text = as_terminal(found)
    assert "the target alone: how predictable is it?" in text
    assert "KL budget, nats" in text
    assert "certified:" not in text
    if certificates:
        assert dataclasses.replace(held(found), inexact=0.0, unknown=()) == Certificates((), (), 0.0, ())
        assert "some rule accepts more tokens than were looked at" in text
        assert as_json(found)["certificates"]["certificates"] == []
    else:
        assert found.certificates is None
        assert "looked at" not in text


def test_strict_says_the_same_with_thresholds_and_without(tmp_path: Path, report: Report) -> None:
    """The closed form of two probabilities against what the log holds: one kind of run for both."""
    without = reported(tmp_path, dataclasses.replace(ALONE, certificates=False, seed=MIXED.seed))
    with_them = reported(tmp_path / "with", dataclasses.replace(ALONE, seed=MIXED.seed))
    for mine, logged in zip(without.predictability, with_them.predictability, strict=True):
        (budget,) = mine.budgets
        assert dataclasses.astuple(budget.half) == pytest.approx(dataclasses.astuple(logged.budgets[0].half), rel=1e-5)
        strict = [run for run in logged.runs if run.rule == "strict"]
        assert list(mine.runs) == strict
        assert (mine.entropy, mine.margin, mine.top_prob, mine.free) == (
            logged.entropy,
            logged.margin,
            logged.top_prob,
            logged.free,
        )


def test_a_run_of_draft_models_without_thresholds_has_neither_section(tmp_path: Path) -> None:
    """And is otherwise what it is with them."""
    recipe = dataclasses.replace(MIXED, rules=("strict", "one_hot", "tree_2"))
    found, with_them = (
        reported(tmp_path / str(wanted), dataclasses.replace(recipe, certificates=wanted)) for wanted in (False, True)
    )
    assert (found.certificates, found.predictability) == (None, ())
    assert with_them.certificates is not None
    content = as_json(found)
    assert (content["certificates"], content["predictability"]) == (None, [])
    for width in (100, 150):
        text = as_terminal(found, width)
        assert "certified" not in text
        assert "the target alone" not in text
    assert (found.results, found.traffic, found.times) == (with_them.results, with_them.traffic, with_them.times)
    assert found.notes == tuple(warning for warning in with_them.notes if warning.code != "contradicted")


def test_text_of_one_kind_that_the_target_did_and_did_not_write_is_told_apart(tmp_path: Path) -> None:
    """Responses in one domain, some of which are the target's own."""
    own = Domain(documents=4, alpha=0.9, continuation="given")
    recipe = Recipe(
        domains={"code": own},
        sources=[("code", dataclasses.replace(own, documents=3, alpha=0.2, on_policy=False))],
        lookups=("lookup",),
        certificates=True,
    )
    found = reported(tmp_path, recipe)
    both = [item for item in held(found).certificates if item.rule == "strict"]
    assert [(item.on_policy, item.documents) for item in both] == [(True, 4), (False, 3)]
    assert [item.on_policy for item in held(found).lossless] == [True, False]
    tenths = [item for item in found.difficulty if (item.axis, item.draft) == ("margin", "small")]
    assert sum(item.positions for item in tenths) == sum(item.positions for item in both)
    own_text, foreign = found.predictability
    assert (own_text.on_policy, foreign.on_policy) == (True, False)
    (mine,), (theirs,) = own_text.free, foreign.free
    assert (mine.tokens_per_round is None, theirs.tokens_per_round is None) == (False, True)
    assert (own_text.runs[0].tokens_per_round is None, foreign.runs[0].tokens_per_round is None) == (False, True)
    text = as_terminal(found, 150)
    for title in ("certified of accepted, by domain", "lossless acceptance", "the target alone", "KL budget"):
        rows = " ".join(section(text, title))
        assert rows.count("code ") == 2
        assert "code (given, " in rows
        assert "off-policy" in rows
    assert cells_of(text, SHARES) == expected_cells(found, "small")


# Real models.


@pytest.fixture
def profiled(tiny: Path, tmp_path: Path) -> Callable[[dict[str, Any]], Run]:
    """Runs on tiny models, of greedy text and of sampled text with and without truncation, by their drafts."""
    from alphaprof.config.load import load_profile
    from alphaprof.profiling.run.pipeline import profile
    from tests.profiling.test_pipeline import Silent

    rows = [{"text": f"{place} the quick brown fox " * (1 + place % 3)} for place in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = {"kind": "sampled", "temperature": 0.3, "max_new_tokens": 24}
    source = {"path": "rows.jsonl", "prompt": "{text}"}
    tree = {
        "target": {"model": str(tiny / "target"), "dtype": "float32"},
        "data": [
            source | {"domain": "code"},
            source | {"domain": "story", "continuation": drawn},
            source | {"domain": "novel", "continuation": drawn | {"top_p": 0.8}},
        ],
        "continuation": {"kind": "greedy", "max_new_tokens": 24},
        "rules": [*RULES, "tree_4"],
        "gammas": [1, 4],
        "costs": {"context": 16, "repeats": 3},
    }

    def run(drafts: dict[str, Any]) -> Run:
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(tree | {"drafts": drafts} | ({"certificates": True} if drafts else {})))
        return profile(load_profile(path), tmp_path / f"run of {len(drafts)}", Silent(), resume=False)

    return run


@pytest.mark.models
def test_real_models_contradict_no_certificate(profiled: Callable[[dict[str, Any]], Run], tiny: Path) -> None:
    """Divergences, thresholds and acceptance of whole distributions, greedy, sampled and truncated; the target as its own
    draft is certified nearly everywhere. Without drafts the target says the same.
    """
    drafts = {
        "same": {"kind": "model", "model": str(tiny / "target")},
        "close": {"kind": "model", "model": str(tiny / "draft")},
        "skip": {"kind": "layer_skip", "drop_layers": [2]},
        "ngram": {"kind": "prompt_lookup"},
    }
    found = build_report(profiled(drafts))
    rules, trees = [*CERTIFIED, "tree_4"], ["tree_2", "tree_3", "tree_4"]
    judged = [(item.domain, item.draft, item.rule) for item in held(found).certificates]
    greedy, drawn = (list(itertools.product(names, drafts)) for names in (["code"], ["story", "novel"]))
    assert len(judged) == 3 * len(rules) + 2 * 3 * (len(rules) - len(trees)) == len(set(judged))
    assert {(domain, draft) for domain, draft, _ in judged} == {each for each in greedy + drawn if each[1] != "ngram"}
    for item in held(found).certificates:
        assert item.contradicted == 0
        assert item.certified.value <= item.accepted.value
        assert 1 - item.accepted.value <= item.rejected_at_most
        if item.draft == "same":
            assert (item.accepted.value, item.rejected_at_most) == (1, pytest.approx(0, abs=0.02))
            assert item.certified.value > 0.9
    for rule in rules:
        assert any(0 < item.certified.value < 1 for item in held(found).certificates if item.rule == rule)
    assert "contradicted" not in codes(found)
    truncated = [item for item in held(found).certificates if (item.domain, item.draft) == ("novel", "skip")]
    assert {item.mean_divergence for item in truncated} == {math.inf}
    for item in held(found).lossless:
        assert 0 <= item.from_mean <= item.sharp.value + 1e-9 <= item.beta.value + 1e-6
    as_json(found)
    assert "nan" not in as_terminal(found)
    alone = build_report(profiled({}))
    assert held(alone).certificates == ()
    bare, full = ([dataclasses.replace(text, free=()) for text in each.predictability] for each in (alone, found))
    assert bare == full
    assert [(free.draft, free.rule) for text in alone.predictability for free in text.free] == [
        ("ngram", "strict"),
        ("ngram", "one_hot"),
        ("ngram", "one_hot"),
    ]


# Renderings.


def leaves(value: Any) -> Iterator[Any]:
    """All numbers and words of a value."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def test_both_sections_hold_plain_numbers_that_are_numbers(report: Report) -> None:
    found = [*leaves(report.certificates), *leaves(report.predictability)]
    assert {type(value) for value in found} == {str, int, float, bool, type(None)}
    assert not any(isinstance(value, float) and math.isnan(value) for value in found)


def test_json_holds_both_sections(report: Report) -> None:
    """Every number where it belongs, infinite ones as a word."""
    content = as_json(report)

    def same(found: Any, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            assert list(found) == [field.name for field in dataclasses.fields(value)]
            for field in dataclasses.fields(value):
                same(found[field.name], getattr(value, field.name))
        elif isinstance(value, tuple):
            for one, other in zip(found, value, strict=True):
                same(one, other)
        else:
            assert found == ("inf" if value == math.inf else value)

    same(content["certificates"], report.certificates)
    same(content["predictability"], report.predictability)
    assert "inf" in {item["high"] for text in content["predictability"] for item in text["entropy"]}


def section(text: str, title: str) -> list[str]:
    """The rows of all tables below titles that hold some words."""
    lines, rows = text.splitlines(), []
    for index, line in enumerate(lines):
        head = [place for place in range(index + 1, index + 5) if BAR in "".join(lines[place : place + 1])]
        if title in line and head:
            rows += itertools.takewhile(str.strip, lines[head[0] + 1 :])
    return rows


BAR = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
SHARES = r"[<>]?\d\.\d{3} of [<>]?\d\.\d{3}"
BUDGETS = r"[<>]?\d\.\d{3} <= [<>]?\d\.\d{3}"


def cells_of(text: str, pattern: str) -> list[str]:
    return sorted(re.findall(pattern, text))


def expected_cells(report: Report, draft: str) -> list[str]:
    """What tables of certified shares of a draft hold, without an order."""
    rules = {item.rule for item in held(report).certificates}
    tenths = [item for item in report.difficulty if item.rule in rules]
    items = [item for item in (*held(report).certificates, *tenths) if item.draft == draft]
    shares = [(item.certified, item.accepted) for item in items]
    return sorted(f"{fmt.share(one.value)} of {fmt.share(other.value)}" for one, other in shares if one and other)


@pytest.mark.parametrize("width", [100, 150])
def test_the_terminal_shows_every_certificate_whole(report: Report, width: int) -> None:
    text = as_terminal(report, width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text.removeprefix(as_first_screen(report, width))
    for draft in MODELS:
        tables = re.split(r"^(?=draft )", as_terminal(report, width, "certificates", "difficulty"), flags=re.MULTILINE)
        mine = "".join(table for table in tables if table.startswith(f"draft {draft}: "))
        assert cells_of(mine, SHARES) == expected_cells(report, draft)
        items = [item for item in held(report).certificates if item.draft == draft]
        budgets = [f"{fmt.share(1 - item.accepted.value)} <= {fmt.share(item.rejected_at_most)}" for item in items]
        assert cells_of(mine, BUDGETS) == sorted(budgets)
        for item in items:
            assert f"[{fmt.share(item.certified.low, 2)}, {fmt.share(item.certified.high, 2)}]" in mine
        bounds = [item for item in held(report).lossless if item.draft == draft]
        rows = [line for line in section(mine, "lossless") if re.search(r"\d\.\d{3} *$", line)]
        for bound, row in zip(bounds, rows, strict=True):
            values = [bound.beta.value, bound.sharp.value]
            shown = [*map(fmt.share, values), fmt.number(bound.mean_divergence), fmt.share(bound.from_mean)]
            assert [word for word in row.split() if word in shown] == shown
        certain = sum(round(item.certified.value * item.positions) for item in items)
        wrong = sum(item.contradicted for item in items)
        assert f"  certified and yet rejected: {wrong:,} of {certain:,} certified positions, all rules together\n" in mine
    assert "draft lookup: certified" not in text


@pytest.mark.parametrize("width", [100, 150])
def test_the_terminal_shows_what_the_target_alone_says(report: Report, width: int) -> None:
    text = as_terminal(report, width)
    text = text[text.index("the target alone: ") :]
    flat = re.sub(r"\s+", " ", text)
    for item in report.predictability:
        (free,) = item.free
        for value in (item.entropy[1], item.margin[1], free.tokens_per_round):
            if width == 150:
                assert fmt.interval(value) in flat
            else:
                assert all(part in flat for part in fmt.interval(value).split(" ", maxsplit=1))
        for low, _, high in (item.entropy, item.margin):
            assert f"{fmt.number(low.value)} to {fmt.number(high.value)}" in flat
        assert fmt.share(item.top_prob.value) in flat
    budgets = " ".join(section(text, "KL budget"))
    runs = " ".join(section(text, "what is certain of any draft"))
    for item in report.predictability:
        for budget in item.budgets:
            for value in (budget.half, budget.ninety, budget.ninety_nine):
                assert fmt.interval(value, digits=3) in budgets
        for run in (each for each in item.runs if each.rule == "strict"):
            assert fmt.share_with_interval(run.certain) in runs
            assert f"run {fmt.interval(run.mean_run)}" in runs
            assert run.tokens_per_round is None or f">= {fmt.interval(run.tokens_per_round)}" in runs
    assert "rule strict, gamma 4: what is certain of any draft" in text
    for epsilon in EPSILONS:
        assert f"KL <= {epsilon:g}" in text


def number(value: float) -> Interval:
    return Interval(value, value - 0.01, value + 0.01)


HAND = Certificate(
    domain="code",
    draft="small",
    rule="strict",
    continuation="greedy",
    sampling=None,
    on_policy=True,
    documents=5,
    positions=1000,
    certified=number(0.4),
    accepted=number(0.7),
    accepted_not_certified=number(0.3),
    contradicted=0,
    mean_divergence=0.25,
    rejected_at_most=0.61,
)
TENTH = Decile("small", "strict", "greedy", None, True, "margin", 1, None, 0.25, 500, number(0.6), number(0.1))
TENTHS = (TENTH, dataclasses.replace(TENTH, low=0.25, high=None, certified=None, accepted=None))
BOUNDS = LosslessBounds(
    domain="code",
    draft="small",
    continuation="greedy",
    sampling=None,
    on_policy=True,
    documents=5,
    positions=1000,
    beta=number(0.8),
    sharp=number(0.75),
    mean_divergence=0.24,
    from_mean=0.7,
)
BY_HAND = Certificates(
    certificates=(HAND, dataclasses.replace(HAND, domain="chat", contradicted=2), dataclasses.replace(HAND, rule="tree_2")),
    lossless=(BOUNDS,),
    inexact=0.004,
    unknown=(),
)


def test_certificates_in_the_terminal_by_hand(report: Report) -> None:
    text = as_terminal(dataclasses.replace(report, certificates=BY_HAND, difficulty=TENTHS, predictability=()), 100)
    shown = text[text.index("draft small: certified of") : text.index("\ntimes: ")]
    lines = [line.rstrip() for line in shown.splitlines() if line.strip() and BAR not in line]
    assert lines == [
        "draft small: certified of accepted, by domain",
        " domain          strict          tree_2",
        " code    0.400 of 0.700  0.400 of 0.700",
        "           [0.39, 0.41]    [0.39, 0.41]",
        " chat    0.400 of 0.700",
        "           [0.39, 0.41]",
        "draft small: share rejected, and at most at this mean KL(p||q)",
        " domain          strict          tree_2",
        " code    0.300 <= 0.610  0.300 <= 0.610",
        " chat    0.300 <= 0.610",
        "  certified and yet rejected: 2 of 1,200 certified positions, all rules together",
        "draft small: lossless acceptance, and what the smaller KL of each position guarantees",
        "                                                 mean of the  bound from",
        " domain                beta               bound   smaller KL    the mean",
        " code    0.800 [0.79, 0.81]  0.750 [0.74, 0.76]         0.24       0.700",
        "  of text that was not sampled: beta at temperature 1 along it; lossless sampling would not write it",
        "certified: KL(p||q) is below the threshold at which the rule can reject: acceptance was certain",
        "beforehand.",
        "What is accepted beyond that was right, but not certain to be. Position by position: threshold_RULE",
        "in the log.",
        "At <1% of the positions some rule accepts more tokens than were looked at: a lower bound there.",
        "difficulty: acceptance by how sure the target is",
        "draft small: certified of accepted, by tenths of the target's margin",
        " margin               strict",
        " below 0.250  0.100 of 0.600",
        "                [0.09, 0.11]",
        " from 0.250              n/a",
    ]


def test_predictability_in_the_terminal_by_hand(report: Report) -> None:
    run = CertainRun("strict", 0.1, number(0.6), Interval(2.5, 2.0, 3.0), 4, Interval(2.2, 2.0, 2.4))
    nothing = CertainRun("additive_0p1", 0.1, number(0.9), Interval(9.5, 9.0, 9.9), 4, None)
    found = Predictability(
        domain="code",
        continuation="greedy",
        sampling=None,
        on_policy=True,
        documents=5,
        positions=1000,
        entropy=(number(0.1), number(1.5), number(3.2)),
        margin=(number(0.04), number(0.55), number(0.95)),
        top_prob=number(0.7),
        budgets=(
            Budget("additive_0p1", number(0.3), number(0.2), number(0.1)),
            Budget("strict", Interval(math.inf, 0.2, math.inf), number(0.02), Interval(0.0004, 0.0, 0.002)),
        ),
        runs=(nothing, run, dataclasses.replace(run, epsilon=0.3, tokens_per_round=None)),
        free=(FreeDraft("ngram", "strict", 0.55, number(0.35), 3, Interval(1.3, 1.2, 1.4)),),
    )
    lonely = dataclasses.replace(found, domain="chat", free=())
    text = as_terminal(dataclasses.replace(report, certificates=None, predictability=(found, lonely)), 150)
    shown = text[text.index("the target alone: ") : text.index("certain of any draft: share")]
    lines = [line.rstrip() for line in shown.splitlines() if line.strip() and BAR not in line]
    assert lines[0] == "the target alone: how predictable is it? Median, and from the tenth to the ninetieth percentile"
    assert squeezed(lines[1]).split("  ") == ["entropy,", "mean top", "free draft:"]
    assert squeezed(lines[2]).split("  ") == [
        *("domain", "docs", "nats", "margin", "probability", "alpha", "coverage", "tokens/round")
    ]
    assert [line.split("  ") for line in map(squeezed, lines[3:7])] == [
        ["code", "5", "1.50 [1.49, 1.51]", "0.55 [0.54, 0.56]", "0.700 [0.69, 0.71]", "0.350 [0.34, 0.36]", "0.550",
         "1.30 [1.20, 1.40]"],
        ["0.10 to 3.20", "0.04 to 0.95"],
        ["chat", "5", "1.50 [1.49, 1.51]", "0.55 [0.54, 0.56]", "0.700 [0.69, 0.71]", "n/a", "n/a", "n/a"],
        ["0.10 to 3.20", "0.04 to 0.95"],
    ]  # fmt: skip
    budgets = [
        ["code", "0.300 [0.290, 0.310]", "inf [0.200, inf]"],
        ["0.200 [0.190, 0.210]", "0.020 [0.010, 0.030]"],
        ["0.100 [0.090, 0.110]", "<0.001 [0.000, 0.002]"],
    ]
    assert lines[7] == "KL budget, nats: where half, 90 % and 99 % of the positions are still certain"
    assert squeezed(lines[8]).split("  ") == ["domain", "additive_0p1", "strict"]
    assert [squeezed(line).split("  ") for line in lines[9:12]] == budgets
    assert lines[15] == "rule strict, gamma 4: what is certain of any draft whose KL(p||q) is nowhere larger"
    assert squeezed(lines[16]).split("  ") == ["domain", "KL <= 0.1", "KL <= 0.3"]
    assert [squeezed(line).split("  ") for line in lines[17:20]] == [
        ["code", "0.600 [0.59, 0.61]", "0.600 [0.59, 0.61]"],
        ["run 2.50 [2.00, 3.00]", "run 2.50 [2.00, 3.00]"],
        [">= 2.20 [2.00, 2.40]"],
    ]


def squeezed(line: str) -> str:
    """A row with two spaces between its cells."""
    return re.sub(r" {2,}", "  ", line.strip())


def test_rules_are_not_cut_however_long_their_names_are(tmp_path: Path) -> None:
    rules = ("typical_0p0912345_0p3123", "multiplicative_0p123456", "additive_0p123456789", "strict", "trtllm_10_0p612345")
    text = as_terminal(reported(tmp_path, Recipe(domains={"code": Domain()}, rules=rules, certificates=True)), 100)
    for title in ("certified of accepted, by domain", "by tenths of the target's entropy", "KL budget"):
        start = text.index(title)
        assert all(f" {rule} " in text[start:] for rule in rules)
    shown = text[text.index("certified of accepted") :]
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_domains_whose_names_begin_alike_have_a_row_each(tmp_path: Path) -> None:
    """Long names are shown by their beginning: the rows must not become one."""
    name = "x" * 45
    recipe = Recipe(domains={f"{name} {place}": Domain(alpha=0.2 + 0.3 * place) for place in range(3)}, certificates=True)
    found = reported(tmp_path, recipe)
    text = as_terminal(found, 150)
    assert cells_of(text, SHARES) == expected_cells(found, "small")
    assert len(cells_of(text, BUDGETS)) == 3
    assert len([line for line in section(text, "KL budget") if "[" in line]) == 9


def test_tenths_that_lie_close_together_have_a_row_each(tmp_path: Path) -> None:
    """Most positions of a sure target: margins of .9999, entropies of .0001; nothing is rounded to certainty."""
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=6)}, certificates=True))
    rng = np.random.default_rng(3)

    def change(rows: pd.DataFrame) -> None:
        sure = rng.random(len(rows))
        rows["target_margin"], rows["target_entropy"] = 1 - 1e-4 * sure, 1e-3 * sure**4

    found = build_report(rewritten(run, "small", change))
    text = as_terminal(found)
    assert cells_of(text, SHARES) == expected_cells(found, "small")
    assert len(section(text, "tenths of the target's margin")) == len(section(text, "target's entropy")) == 20
    margins = [line.split("  ")[0].strip() for line in section(text, "target's margin") if " of " in line]
    assert margins == ["below >0.999", *["from >0.999"] * 9]
    assert "from <0.001" in " ".join(section(text, "target's entropy"))


def test_positions_that_are_all_alike_are_one_row(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=6)}, certificates=True))

    def change(rows: pd.DataFrame) -> None:
        rows["target_entropy"] = 0.5

    found = build_report(rewritten(run, "small", change))
    (item,) = [item for item in found.difficulty if item.axis == "entropy" and item.certified is not None]
    assert (item.low, item.high, item.positions) == (None, None, found.run.positions)
    assert section(as_terminal(found), "target's entropy")[0].split()[0] == "all"


@pytest.mark.parametrize("width", [100, 150])
@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_names_from_the_data_are_harmless_in_both_sections(tmp_path: Path, name: str, width: int) -> None:
    """Only printable characters reach a terminal, markup is text, no row is lost, and JSON holds the name as it is."""
    domains = {name: Domain(), f"{name} ": Domain(documents=2), "chat": Domain(documents=1, **SAMPLED)}
    recipe = Recipe(
        domains=domains,
        sources=[(name, Domain(on_policy=False, continuation="text"))],
        lookups=("ngram",),
        certificates=True,
    )
    found = build_report(write_run(tmp_path / "run", recipe))
    assert "contradicted" in codes(found)
    text = as_terminal(found, width)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert max(map(cell_len, text.splitlines())) <= width
    assert len(as_terminal(found, width, "certificates", "difficulty")) < 20_000
    assert len(name) < 100 or name[:100] not in "".join(text.split())  # nowhere is a long one whole
    shown = text[text.index("draft small: certified of") :]
    assert cells_of(shown, SHARES) == expected_cells(found, "small")
    beginning = "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)[:5]
    for title in (
        "certified of accepted, by domain",
        "lossless",
        "the target alone",
        "KL budget",
        "certain of any draft whose",
    ):
        rows = section(shown, title)
        assert len([line for line in rows if line.startswith(f" {beginning}")]) >= 3
    rendered = render_json(found)
    assert rendered.isascii()
    content = json.loads(rendered)
    for part in (content["certificates"]["certificates"], content["certificates"]["lossless"], content["predictability"]):
        assert {item["domain"] for item in part} == set(domains)


def test_every_kind_of_text_has_tenths_of_its_own(report: Report) -> None:
    """Named where there are several."""
    text = as_terminal(report, 150)
    kinds = ("greedy", "sampled at temperature 0.7", "given", "text, off-policy")
    for axis, unit in (("margin", ""), ("entropy", ", nats")):
        for kind in kinds:
            assert f"draft small: certified of accepted, by tenths of the target's {axis}{unit} ({kind})\n" in text


def test_one_kind_of_text_needs_no_name(tmp_path: Path) -> None:
    text = as_terminal(reported(tmp_path, Recipe(certificates=True)))
    assert "draft small: certified of accepted, by tenths of the target's margin\n" in text
    assert "(greedy)" not in text
