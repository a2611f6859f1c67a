"""The gate for CI: outcomes recomputed from the totals, exit codes, and what cannot be checked."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from alphaprof.cli.app import app
from alphaprof.config.load import changed_question
from alphaprof.errors import AlphaprofError
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import ratio, share_interval
from alphaprof.totals.files import DraftTotals
from tests.synthetic import Domain, Recipe, altered, interrupted, rewritten, stored_totals, write_run

RECIPE = Recipe(
    domains={"code": Domain(documents=30, alpha=0.8, spread=0.05), "chat": Domain(documents=30, alpha=0.5, spread=0.05)},
    drafts={"small": 0.0, "poor": -0.3},
    gammas=(1, 3),
    decision={"draft": "small", "gamma": 3, "min_speedup": 1.1},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("check") / "run", RECIPE)


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same prompts, on which the draft agrees less in one domain."""
    domains = dict(RECIPE.domains) | {"code": dataclasses.replace(RECIPE.domains["code"], alpha=0.6)}
    return write_run(tmp_path_factory.mktemp("worse") / "run", dataclasses.replace(RECIPE, domains=domains))


def check(run: Run, *arguments: str) -> tuple[int, Any, Result]:
    """The exit code and the JSON of a check."""
    result = CliRunner().invoke(app, ["check", str(run.path), *arguments, "--format", "json"])
    code = result.exception.exit_code if isinstance(result.exception, AlphaprofError) else result.exit_code
    return code, json.loads(result.stdout) if result.stdout else None, result


def totals(run: Run, domain: str, draft: str = "small") -> pd.DataFrame:
    frame = stored_totals(run, draft).merge(run.documents().to_pandas(), on="document")
    return frame[frame["domain"].astype(str) == domain]


def test_a_check_builds_no_report() -> None:
    code = "import sys; import alphaprof.commands.check; sys.exit('alphaprof.report.build' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_threshold_reads_the_totals_of_its_draft_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read, tables = set[str](), DraftTotals.tables

    def reading(self: DraftTotals, *arguments: Any) -> Any:
        read.add(self.draft)
        return tables(self, *arguments)

    monkeypatch.setattr(DraftTotals, "tables", reading)
    for measure in ("--min-alpha", "--min-acceptance-length", "--min-speedup"):
        assert check(run, measure, "0.1")[0] == 0
    assert read == {"small"}


def test_that_a_run_is_not_complete_stands_beside_its_outcome(run: Run, tmp_path: Path) -> None:
    part = interrupted(run, tmp_path / "part", shards=6)
    for asked in ((), ("--min-alpha", "0.1"), ("--baseline", str(run.path))):
        _, found, _ = check(part, "--draft", "small", *asked)
        assert "partial" in [note["code"] for note in found["notes"]]
    assert "partial" not in [note["code"] for note in check(run)[1]["notes"]]


def test_what_texts_say_against_themselves_is_what_the_report_says(tmp_path: Path) -> None:
    recipe = Recipe({"code": Domain(documents=12), "chat": Domain(documents=12)})
    old, run = (write_run(tmp_path / name, recipe) for name in ("old", "run"))
    named = {(note.code, note.message) for note in build_report(run).notes}
    assert "not_greedy" in {code for code, _ in named}
    for asked in ((), ("--min-alpha", "0.1"), ("--baseline", str(old.path))):
        found = {(note["code"], note["message"]) for note in check(run, *asked)[1]["notes"]}
        assert found <= named
        assert {each for each in found if each[0] == "not_greedy"} == {each for each in named if each[0] == "not_greedy"}


def test_whose_step_times_a_speedup_rests_on_is_said(run: Run) -> None:
    """`speedup 1.5x` of a roofline is no promise of an engine: the outcome says so, with thresholds as well."""
    basis = build_report(run).answer.reason.split(": ")[0]
    for asked, times in (((), basis), (("--min-speedup", "1.1"), basis), (("--min-alpha", "0.1"), None)):
        assert check(run, *asked)[1]["times"] == times
        text = CliRunner().invoke(app, ["check", str(run.path), *asked]).stdout
        assert text.count(basis) == (times is not None)


def test_what_is_undecided_passes_with_a_warning_or_fails_when_asked_to_in_junit_too(run: Run, tmp_path: Path) -> None:
    alpha = check(run, "--min-alpha", "0")[1]["items"][1]["value"]
    for asked in (
        ("--min-alpha", f"chat={alpha}"),
        ("--set", f"decision.min_speedup={build_report(run).answer.speedup.value:.3f}"),
    ):
        for undecided, (failures, skipped) in (("pass", ("0", "1")), ("fail", ("1", "0"))):
            out = tmp_path / f"{undecided}.xml"
            code, found, result = check(run, *asked, "--undecided", undecided, "--out", str(out))
            assert (code, found["outcome"]) == ({"pass": 0, "fail": 11}[undecided], "undecided")
            assert ("warning: " in result.stderr) == (undecided == "pass")
            suite = ET.parse(out).getroot()  # noqa: S314  (our own)
            assert (suite.get("failures"), suite.get("skipped")) == (failures, skipped)


def test_the_decision_of_the_run_is_checked_by_default(run: Run) -> None:
    code, found, _ = check(run)
    assert (code, found["outcome"], found["draft"], found["gamma"]) == (0, "pass", "small", 3)
    assert found["items"][0]["measure"] == "speedup"


def test_a_draft_that_is_named_alone_is_checked_for_go(run: Run) -> None:
    report = build_report(run, config=changed_question(run.manifest.config, ["decision.draft=poor"]))
    assert report.answer.verdict == "NO-GO"
    code, found, _ = check(run, "--draft", "poor")
    assert (code, found["outcome"], found["draft"], found["gamma"]) == (10, "fail", "poor", 3)
    assert found["items"][0]["value"] == report.answer.speedup.value
    for threshold in ((), ("--min-alpha", "0.5")):
        asked = CliRunner().invoke(app, ["check", f"{run.path}:poor", *threshold, "--format", "json"])
        assert asked.stdout == check(run, "--draft", "poor", *threshold)[2].stdout
    at_one = check(run, "--draft", "poor", "--gamma", "1", "--rule", "strict")[1]
    assert (at_one["draft"], at_one["gamma"], at_one["rule"]) == ("poor", 1, "strict")


@pytest.mark.parametrize(
    ("suffix", "arguments", "hint"),
    [
        (":nobody", (), "name one: small or poor"),
        (":poor", ("--draft", "small"), "leave --draft out"),
        ("", ("--draft", "poor", "--gamma", "7"), "name one: 1 or 3"),
    ],
)
def test_a_draft_that_cannot_be_checked_is_refused(run: Run, suffix: str, arguments: tuple[str, ...], hint: str) -> None:
    result = CliRunner().invoke(app, ["check", f"{run.path}{suffix}", *arguments])
    assert isinstance(result.exception, AlphaprofError)
    assert (result.exception.exit_code, result.exception.hint) == (2, hint)


def test_alphas_are_held_against_one_sided_bounds(run: Run) -> None:
    frame = totals(run, "code")
    low = share_interval(ratio(frame["accepted"].to_numpy(), frame["proposals"].to_numpy(float)), 0.9).low
    for least, code, outcome in ((low - 1e-6, 0, "pass"), (low + 1e-6, 0, "undecided"), (0.95, 10, "fail")):
        exit_code, found, _ = check(run, "--min-alpha", f"code={least}")
        (item,) = found["items"]
        assert (exit_code, found["outcome"]) == (code, outcome)
        assert item["low"] == pytest.approx(low)
        assert item["value"] == pytest.approx(frame["accepted"].sum() / frame["proposals"].sum())
        assert (item["domain"], item["documents"]) == ("code", 30)


def test_a_domains_own_threshold_goes_before_that_of_all(run: Run) -> None:
    _, found, _ = check(run, "--min-alpha", "0.1", "--min-alpha", "code=0.2")
    assert {item["domain"]: item["threshold"] for item in found["items"]} == {"code": 0.2, "chat": 0.1}


def test_acceptance_lengths_and_speedups(run: Run) -> None:
    _, found, _ = check(run, "--min-acceptance-length", "1.0", "--min-speedup", "code=1.01", "--gamma", "3")
    items = {(item["measure"], item["domain"]): item for item in found["items"]}
    frame = totals(run, "code")
    accepted, rounds = (
        np.stack(frame["accepted_depths_3"].to_list()).sum(),
        np.stack(frame["drafted_depths_3"].to_list())[:, 0].sum(),
    )
    length = items["acceptance_length", "code"]
    assert length["value"] == pytest.approx(1 + accepted / rounds)
    assert 1 <= length["low"] < length["value"] < length["high"] <= 4
    cost = (3 * 1.0 + 11.5) / 10
    assert items["speedup", "code"]["value"] == pytest.approx(frame["tokens"].sum() / (frame["rounds_3"].sum() * cost))
    assert found["outcome"] == "pass"


def test_against_a_baseline_a_domain_that_is_worse_fails(run: Run, worse: Run) -> None:
    code, found, result = check(worse, "--draft", "small", "--baseline", str(run.path))
    outcomes = {item["domain"]: item["outcome"] for item in found["items"]}
    assert (code, outcomes["code"]) == (10, "fail")
    assert found["paired"] == 60
    assert "tokens_per_round_change of code" in str(result.exception)
    better, found, _ = check(run, "--draft", "small", "--baseline", f"{worse.path}:small")
    assert found["items"][0]["value"] > 0.1
    assert better == 0
    wide, found, _ = check(worse, "--draft", "small", "--baseline", str(run.path), "--margin", "0.5")
    assert (wide, found["outcome"]) == (0, "pass")


def test_upper_bounds_widen_with_the_number_of_thresholds_whatever_their_outcome(run: Run) -> None:
    """As the legend says: those that do not fail as well, and lower ones never."""
    alone = check(run, "--min-alpha", "code=0.1")[1]["items"][0]
    together = check(run, "--min-alpha", "0.1")[1]["items"][0]
    assert (alone["domain"], alone["outcome"]) == (together["domain"], together["outcome"]) == ("code", "pass")
    assert together["low"] == alone["low"]
    assert together["high"] > alone["high"]


@pytest.mark.parametrize(("arguments", "gamma"), [(("--min-alpha", "0.1"), None), (("--min-acceptance-length", "1"), 3)])
def test_a_gamma_is_named_where_a_threshold_needs_one(run: Run, arguments: tuple[str, ...], gamma: int | None) -> None:
    assert check(run, *arguments, "--gamma", "3")[1]["gamma"] == gamma


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        (["--min-alpha", "poetry=0.5"], "unknown domain with rounds in {run}: poetry", 2),
        (["--min-alpha", "0.5", "--min-alpha", "0.6"], "or is a duplicate", 2),
        (["--gamma", "7", "--min-acceptance-length", "2"], "unknown gamma in {run}: 7", 2),
        (["--rule", "additive:0.1", "--min-alpha", "0.5"], "has no rounds", 2),
        (["--min-alpha", "0.5", "--baseline", "{run}:poor"], "thresholds, --baseline and --golden cannot be combined", 2),
    ],
)
def test_what_cannot_be_checked_is_refused(run: Run, arguments: list[str], problem: str, code: int) -> None:
    found, _, result = check(run, *(text.replace("{run}", str(run.path)) for text in arguments))
    assert found == code
    assert problem.replace("{run}", str(run.path)) in str(result.exception)


def test_another_target_is_compared_and_named(run: Run, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", RECIPE)
    target = dataclasses.replace(other.manifest.target, reference="tuned", fingerprint="f" * 64, dtype="float16")
    altered(other, target=target)
    arguments = ("--draft", "small", "--baseline", str(run.path))
    code, found, _ = check(other, *arguments, "--margin", "0.2")
    assert (code, found["outcome"], found["paired"], found["new_target"]) == (0, "pass", 60, "tuned")
    assert check(run, "--draft", "small", "--baseline", f"{run.path}:poor")[1]["new_target"] is None
    # Sixty documents that agree to the last digit do not show that no other would differ by more than 0.005.
    assert check(other, *arguments, "--margin", "0.005")[1]["outcome"] == "undecided"


def test_text_that_the_target_did_not_write_asks_for_no_rule(tmp_path: Path) -> None:
    """Its rule has no rounds on it, and thus no part in the check."""
    sampled = Domain(temperature=1.0, continuation="sampled", documents=12)
    domains = {"story": sampled, "notes": Domain(on_policy=False, continuation="given")}
    run = write_run(tmp_path / "run", Recipe(domains=domains, rules=("one_hot",)))
    code, found, _ = check(run, "--min-alpha", "story=0.01", "--gamma", "2")
    assert (code, [item["domain"] for item in found["items"]]) == (0, ["story"])


def test_two_rules_of_two_kinds_of_text_must_be_told_apart(tmp_path: Path) -> None:
    domains = {"story": Domain(temperature=1.0, continuation="sampled"), "code": Domain()}
    run = write_run(tmp_path / "run", Recipe(domains=domains, rules=("strict", "one_hot")))
    found = CliRunner().invoke(app, ["check", str(run.path), "--min-alpha", "0.01"])
    assert isinstance(found.exception, AlphaprofError)
    assert "strict and one_hot" in found.exception.message


AUTO = dataclasses.replace(RECIPE, decision={"draft": "auto", "gamma": "auto"})


def test_a_draft_is_checked_at_the_gamma_that_is_best_for_it(tmp_path: Path) -> None:
    """Also where the verdict on the whole traffic chose another draft: the gamma that an export of this one has."""
    run = write_run(tmp_path / "run", AUTO)
    exported = CliRunner().invoke(app, ["export", f"{run.path}:poor", "--to", "vllm-config"])
    code, found, _ = check(run, "--draft", "poor", "--min-speedup", "0.1", "--min-acceptance-length", "0.1")
    assert (code, found["draft"]) == (0, "poor")
    assert json.loads(exported.stdout)["num_speculative_tokens"] == found["gamma"]


def test_without_step_times_the_largest_gamma_is_checked_and_a_draft_must_be_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", dataclasses.replace(AUTO, latency=False))
    code, found, _ = check(run, "--draft", "poor", "--min-acceptance-length", "1")
    assert (code, found["draft"], found["gamma"]) == (0, "poor", 3)
    assert {each.answer.gamma for each in build_report(run).domains} == {3}
    code, _, result = check(run, "--min-alpha", "0.1")
    assert isinstance(result.exception, AlphaprofError)
    assert (code, result.exception.hint) == (2, "name one: --draft small or poor")


@pytest.mark.parametrize("threshold", ["--min-alpha", "--min-acceptance-length"])
def test_a_draft_that_proposes_nothing_reaches_no_threshold(tmp_path: Path, threshold: str) -> None:
    """That is known, and neither luck nor an unknown that a gate lets pass."""
    run = write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=12), "chat": Domain(documents=12)}))

    def silenced(frame: pd.DataFrame) -> None:
        frame.loc[frame["domain"] == "chat", "proposed"] = 0

    code, found, _ = check(rewritten(run, "small", silenced), threshold, "0.01", "--draft", "small", "--gamma", "2")
    outcomes = {item["domain"]: (item["outcome"], item["low"]) for item in found["items"]}
    assert (code, outcomes["chat"]) == (10, ("fail", None))
    assert outcomes["code"][0] == "pass"
    assert "proposes nothing" in found["reason"]


def test_alpha_of_a_head_is_that_of_first_drafts(tmp_path: Path) -> None:
    _, found, _ = check(write_run(tmp_path / "run", Recipe(drafts={}, heads={"head": {}})), "--min-alpha", "0.1")
    assert {item["measure"] for item in found["items"]} == {"accept@1"}


def test_hybrids_and_a_p_min_that_is_auto_are_checked_as_the_report_judges_them(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, lookups=("ngram",), decision={"p_min": "auto", "gamma": 3, "min_speedup": 1.0})
    judged = write_run(tmp_path / "auto", recipe)
    report = build_report(judged)
    code, found, _ = check(judged, "--min-speedup", "0.5")
    answers = {(each.answer.domain, each.answer.draft, each.answer.gamma) for each in report.domains}
    assert (code, {(item["domain"], item["draft"], item["gamma"]) for item in found["items"]}) == (0, answers)
    assert found["items"][0]["documents"] == 30
    config = changed_question(judged.manifest.config, ["hybrids.both={first: ngram, then: small, min_match: 1}"])
    config["decision"] |= {"draft": "both", "p_min": 0}
    altered(judged, config=config)
    code, found, result = check(judged, "--min-acceptance-length", "1")
    assert (code, found and found["draft"]) == (0, "both"), result.exception
