"""Reports of synthetic runs: the numbers against the tables, the renderings against what users put into them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from scipy import stats

from alphaprof.config.load import changed_question
from alphaprof.errors import ProfileInvalid, RunUnreadable
from alphaprof.render import format as fmt
from alphaprof.report.build import RunReport, build_report
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from tests import reference
from tests.loops import each
from tests.reporting import as_json, as_terminal, log_of, only, reported, rows_of
from tests.synthetic import Domain, Recipe, altered, interrupted, write_run

RICH = Recipe(
    domains={
        "code": Domain(documents=9, alpha=0.8),
        "chat": Domain(documents=8, alpha=0.5, coverage=0.6),
        "poetry": Domain(documents=7, alpha=0.3, on_policy=False, continuation="given"),
    },
    drafts={"small": 0.0, "large": 0.1},
    seed=5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("rich") / "run", RICH)


@pytest.fixture(scope="module")
def positions(run: Run) -> pd.DataFrame:
    return log_of(run)


def spread(totals: Any, counts: Any, below: float = 0.975) -> tuple[float, float, float]:
    """A ratio of sums, its standard error over documents, and Student's t with its freedom, by default at two-sided 95 %."""
    share = totals.sum() / counts.sum()
    correction, freedom = reference.small_sample(np.asarray(counts))
    error = math.sqrt(correction * ((totals - share * counts) ** 2).sum()) / counts.sum()
    return share, error, float(stats.t.ppf(below, freedom))


def test_alpha_interval_is_that_of_documents(report: RunReport, positions: pd.DataFrame) -> None:
    """From sums by document, in pandas."""
    by_document = rows_of(positions, "chat", "small").groupby("document")["accept_strict"].agg(["sum", "count"])
    share, error, t = spread(by_document["sum"], by_document["count"])
    half = t * error
    alpha = only(report, "chat").alpha
    assert (alpha.low, alpha.high) == (pytest.approx(share - half, abs=1e-5), pytest.approx(share + half, abs=1e-5))


def test_off_policy_text_has_alpha_but_no_rounds(report: RunReport) -> None:
    result = only(report, "poetry")
    assert result.alpha is not None
    assert result.gammas == ()
    assert (result.verdict, result.gamma, result.mismatches) == ("UNDECIDED", None, None)
    assert "not defined on text that the target did not produce" in result.reason


def test_unknown_is_null_and_unbounded_is_inf(tmp_path: Path) -> None:
    """One document: the point is known, and of its interval what step times allow: with 10.5 and 1 ms, 1.15 / 2 to 1.15."""
    content = as_json(reported(tmp_path, Recipe(domains={"code": Domain(documents=1)})))
    (result,) = content["sections"]["drafts"]
    assert (result["alpha"]["low"], result["alpha"]["high"]) == (0.0, 1.0)
    speedup = result["gammas"][0]["speedup"]
    assert (1 / speedup["high"], 1 / speedup["low"]) == pytest.approx((1.15 / 2, 1.15), rel=0.03)  # and their error
    assert [(item["tokens_per_round"]["low"], item["tokens_per_round"]["high"]) for item in result["gammas"]] == [
        (1.0, gamma + 1.0) for gamma in Recipe().gammas
    ]
    assert result["gamma"] is None or result["verdict"] == "UNDECIDED"
    assert content["times"]["overhead_ms"] is None


@pytest.mark.parametrize("shards", [None, 3])
def test_an_interrupted_run_gives_the_numbers_of_its_shards(
    run: Run, report: RunReport, tmp_path: Path, shards: int | None
) -> None:
    """Without stored totals they are computed, and nothing is written; the report says that it is partial."""
    copy = interrupted(run, tmp_path / "partial", shards)
    before = sorted(copy.path.rglob("*"))
    partial = build_report(copy)
    assert sorted(copy.path.rglob("*")) == before
    assert not partial.run.complete
    assert "partial" in {note.code for note in partial.notes}
    assert "PARTIAL" in as_terminal(partial)
    if shards is None:
        assert (partial.results, partial.answer, partial.traffic) == (report.results, report.answer, report.traffic)
    else:
        assert partial.run.documents == shards * RICH.shard_documents < report.run.documents


def test_a_run_without_a_complete_shard_has_an_empty_report(run: Run, tmp_path: Path) -> None:
    empty = build_report(interrupted(run, tmp_path / "empty", 0))
    assert empty.results == ()
    assert (empty.answer.verdict, empty.answer.reason) == ("UNDECIDED", "no document is complete yet")
    assert "UNDECIDED" in as_terminal(empty)
    assert as_json(empty)["run"]["documents"] == 0


FIXED = {"draft": "small", "gamma": 2}


def test_fixed_draft_and_gamma_are_judged_by_all_documents(tmp_path: Path) -> None:
    found = reported(tmp_path, Recipe(decision=FIXED))
    assert (found.answer.draft, found.answer.gamma, found.answer.held_out) == ("small", 2, 12)
    assert (found.traffic.chosen, found.traffic.disagreement) == (False, "")
    assert all(result.gamma == 2 for result in found.results)


def test_auto_chooses_the_better_draft_and_tests_it_on_all_documents(tmp_path: Path) -> None:
    recipe = Recipe(domains={"code": Domain(documents=20, alpha=0.4)}, drafts={"poor": -0.3, "good": 0.5})
    written = write_run(tmp_path / "run", recipe)
    report = build_report(written)
    answer, traffic = report.answer, report.traffic
    assert answer.draft == "good"
    assert (answer.documents, answer.held_out, traffic.chosen, traffic.disagreement) == (20, 20, True, "")
    assert "on 20 independent documents" in answer.reason
    (alone,) = {item.answer.speedup for item in report.drafts if item.answer.draft == "good"}
    assert answer.speedup == alone  # both halves choose it, and its gamma


def test_given_weights_weigh_times(tmp_path: Path) -> None:
    """1 / (0.9 / S_code + 0.1 / S_chat) at the fixed gamma; the same for tokens per round."""
    recipe = Recipe(decision=FIXED | {"weights": {"code": 0.9, "chat": 0.1}})
    found = reported(tmp_path, recipe)
    code, chat = (only(found, domain).gammas[1] for domain in ("code", "chat"))
    assert found.answer.speedup.value == pytest.approx(1 / (0.9 / code.speedup.value + 0.1 / chat.speedup.value))
    assert not found.traffic.weights_observed
    assert "shares of tokens from the profile" in as_terminal(found)


def test_observed_weights_are_shares_of_tokens(tmp_path: Path) -> None:
    found = reported(tmp_path)
    size = {result.domain: result.positions for result in found.results}
    assert found.traffic.weights == pytest.approx({domain: count / sum(size.values()) for domain, count in size.items()})
    assert found.traffic.weights_observed
    assert "observed shares of tokens" in as_terminal(found)


def test_a_domain_with_two_kinds_of_own_text_counts_both(tmp_path: Path) -> None:
    """Two results, kept apart by name; the traffic rests on the documents of both."""
    recipe = Recipe(
        domains={"code": Domain(documents=6)},
        sources=[("code", Domain(documents=5, continuation="given"))],
        decision=FIXED,
    )
    found = reported(tmp_path, recipe)
    assert [(result.continuation, result.documents) for result in found.results] == [("greedy", 6), ("given", 5)]
    assert found.answer.held_out == 11
    text = as_terminal(found, 150)
    assert "code (greedy)" in text
    assert "code (given)" in text


@pytest.mark.parametrize(
    "options", [{"clusters": ["a", "a", "b", "b", "c", None]}, {"prompts": ["a", "a", "b", "b", "c", "d"]}]
)
def test_dependent_documents_count_as_one(tmp_path: Path, options: dict[str, Any]) -> None:
    """Documents of one conversation, and documents with equal prompts."""
    found = reported(tmp_path, Recipe(domains={"code": Domain(documents=6, **options)}, decision=FIXED))
    result = only(found, "code")
    assert (result.documents, result.units, found.answer.held_out) == (6, 4, 4)
    assert "4 of 6" in as_terminal(found)
    assert "only 4 independent documents" in result.reason
    apart = only(reported(tmp_path / "apart", Recipe(domains={"code": Domain(documents=6)}, decision=FIXED)), "code")
    assert result.alpha.value == apart.alpha.value
    assert (result.alpha.low, result.alpha.high) != (apart.alpha.low, apart.alpha.high)


def test_documents_of_one_token_have_no_rounds(tmp_path: Path) -> None:
    """Prefill emits the only token: alpha is known, and nothing about rounds."""
    found = reported(tmp_path, Recipe(domains={"yes": Domain(shortest=1, longest=1)}))
    result = only(found, "yes")
    assert result.alpha is not None
    assert result.verdict == "UNDECIDED"
    for item in result.gammas:
        assert item.rounds == 0
        assert (item.tokens_per_round, item.speedup, item.acceptance_length, item.accepted_per_drafted) == (None,) * 4
        assert set(item.marginal) | set(item.conditional) == {None}
    assert "n/a" in as_terminal(found)
    as_json(found)


def test_a_draft_without_any_proposal_has_no_alpha(tmp_path: Path) -> None:
    found = reported(tmp_path, Recipe(domains={"code": Domain(documents=20, coverage=0.0)}))
    result = only(found, "code")
    assert (result.alpha, result.coverage) == (None, 0.0)
    assert result.gammas[0].tokens_per_round.value == 1.0
    assert result.gammas[0].speedup.value == pytest.approx(1.0)
    assert (result.gammas[0].acceptance_length, result.gammas[0].accepted_per_drafted) == (None, None)
    as_json(found)


FORMATS = {
    fmt.share: {None: "n/a", 0.0: "0.000", 0.0004: "<0.001", 0.5: "0.500", 0.9996: ">0.999", 1.0: "1.000"},
    fmt.percent: {0.0: "0%", 0.004: "<1%", 0.006: "1%", 0.994: "99%", 0.996: ">99%", 1.0: "100%"},
    fmt.number: {None: "n/a", 0.0: "0.00", 0.004: "<0.01", 0.006: "0.01", 1.8249: "1.82", math.inf: "inf"},
    fmt.interval: {Interval(1.8, 1.7, 1.9): "1.80 [1.70, 1.90]", Interval(1.8, 0.0, math.inf): "not known"},
    fmt.share_with_interval: {
        Interval(0.78, 0.74, 0.81): "0.780 [0.74, 0.81]",
        Interval(1.0, 0.998, 1.0): "1.000 [>0.99, 1.00]",
    },
    fmt.level: {0.95: "95%", 0.995: "99.5%", 0.57: "57%"},
    fmt.count: {1234567: "1,234,567"},
}


@each("written", FORMATS)
def test_numbers_are_not_rounded_to_certainty(written: Callable[[Any], str]) -> None:
    for value, text in FORMATS[written].items():
        assert written(value) == text


def test_a_go_that_rests_on_a_slow_baseline_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(decision={"min_speedup": 0.1, "gamma": 2, "draft": "small"}))
    table = run.latency().to_pandas()
    table.loc[(table["model"] == "target") & (table["tokens"] == 3), "median_ms"] = 0.5 * table["median_ms"][0]
    altered(run, pa.Table.from_pandas(table, schema=run.latency().schema, preserve_index=False))
    report = build_report(run)
    found = [result for result in report.results if result.draft == "small" and result.verdict == "GO"]
    assert found
    assert all("decoding is slow here (v = 0.50 < 1)" in result.reason for result in found)
    assert "slow_baseline" in {warning.code for warning in report.notes}


def test_a_report_can_be_asked_another_question(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    whole = run.manifest.config
    config = changed_question(whole, ["decision.min_speedup=50", "decision.confidence=0.9"])
    report = build_report(run, config=config)
    assert (report.traffic.min_speedup, report.confidence) == (50, 0.9)
    assert {result.verdict for result in report.results if result.on_policy} == {"NO-GO"}
    with pytest.raises(ProfileInvalid, match=r"costs\.\* and hybrids\.\*"):
        changed_question(whole, ["target.dtype=float32"])
    for value, hint in (
        ("decision.confidence=3", "correct this value"),
        ("costs.source=table", "add --set costs.path=..."),
    ):
        with pytest.raises(ProfileInvalid) as error:  # no profile is at hand that could be corrected
            changed_question(whole, [value])
        assert error.value.hint == hint


@each(
    ("changes", "words"),
    [
        ({"route": {"by": "domain"}}, "the profile of the run: unknown key route"),
        ({"drafts": {"small": {"kind": "medusa", "model": "m"}}}, "drafts.small: unknown kind medusa"),
        ({"costs": {"source": "elsewhere"}}, "costs: unknown source elsewhere"),
    ],
)
def test_the_profile_of_a_run_is_of_this_version_or_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(drafts={"small": 0.0}))
    with pytest.raises(RunUnreadable, match=words) as error:
        altered(run, config=run.manifest.config | changes)
    assert error.value.hint == "read it with the alphaprof that wrote it, 0.1.0, or profile again"


def test_a_verdict_stands_beside_the_bounds_that_decide_it_and_what_would_decide_otherwise(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=30)}, decision=FIXED))
    speedup = only(build_report(run), "code").speedup.value
    asked = changed_question(run.manifest.config, [f"decision.min_speedup={speedup - 0.08}"])
    report = build_report(run, config=asked)
    result = only(report, "code")
    assert (result.verdict, result.documents_needed > 30) == ("UNDECIDED", True)
    assert result.speedup.low < asked["decision"]["min_speedup"] < result.speedup.high
    text = " ".join(as_terminal(report, 150).split())
    assert f"80% chance of a verdict: code {fmt.count(result.documents_needed)}" in text
    # One value: in the headline and beside the verdict of the draft, and in the tables by domain and by gamma.
    assert [text.count(fmt.interval(result.speedup, unit)) for unit in ("x", "")] == [2, 2]
    assert f"{fmt.interval(result.speedup, 'x')} UNDECIDED" in text
