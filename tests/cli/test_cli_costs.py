"""Profiles that time no steps, or whose step times come from elsewhere, on tiny models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from alphaprof.cli.app import app
from alphaprof.commands.validate.measure import as_decoded
from alphaprof.config.load import load_profile
from alphaprof.errors import AlphaprofError
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from tests.loops import each
from tests.runs import profile_file, run_profile

pytestmark = pytest.mark.models


def called(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def profile(tiny: Path, tmp_path: Path) -> Path:
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}, "ngram": {"kind": "prompt_lookup"}}
    return profile_file(tmp_path, tiny, drafts=drafts, gammas=[1, 2])


def failed(result: Result) -> AlphaprofError:
    """The error that a command ended with."""
    assert isinstance(result.exception, AlphaprofError), result.output
    return result.exception


def test_a_profile_that_asks_for_no_step_times_times_nothing(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("steps are timed")

    monkeypatch.setattr("alphaprof.profiling.timing.latency.measure", refuse)
    none, out = ["--set", "costs.source=none", "--limit", "2"], tmp_path / "run"
    looked = called("profile", profile, "--dry-run", *none)
    assert (looked.exit_code, looked.exception) == (0, None)
    made = called("profile", profile, "--out", out, *none)
    assert made.exit_code == 0, made.output
    assert Run.open(out).latency() is None
    assert "no step times were asked for" in " ".join(called("report", out).stdout.split())
    assert as_decoded(load_profile(profile, ["costs.source=none"])).source == "measured"  # validate times steps of its own


def test_a_profile_with_a_table_times_nothing_and_reports_by_it(profile: Path, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text(
        "model,tokens,context,ms\n"
        "target,1,0,10\ntarget,2,0,10\ntarget,3,0,10\ntarget,1,500,10\ntarget,2,500,10\ntarget,3,500,10\nclose,1,0,1\n"
        "ngram,1,0,0\n"
    )
    # A named gamma: one that is chosen is cross-fitted, so that its speedup is not one of its tokens per round alone.
    named = ["costs.source=table", "costs.path=own.csv", "decision.gamma=2"]
    run = run_profile(profile, tmp_path / "run", False, *named)
    assert run.latency() is None
    report = build_report(run)
    assert "by the step times in own.csv: " in report.answer.reason
    timed = [result.gammas for result in report.results if result.draft == "close" and result.gammas]
    assert timed
    for gammas in timed:
        assert [item.gamma for item in gammas] == [1, 2]
        for item in gammas:
            assert item.speedup.value == pytest.approx(item.tokens_per_round.value / (1 + 0.1 * item.gamma))


TABLES = (
    (None, "No such file"),
    ("model,tokens,ms\nsomeone,1,2\n", "no decode or verify step of the target"),
    ("model,tokens,ms\ntarget,1,2\n", "verify"),
)


@each(("content", "problem"), TABLES)
def test_a_table_that_cannot_be_used_is_found_before_any_work(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, problem: str
) -> None:
    monkeypatch.setattr("alphaprof.profiling.profile.load", None)  # weights of 70 B are not read for a path with a typo
    if content is not None:
        (tmp_path / "own.csv").write_text(content)
    out = tmp_path / "run"
    result = called("profile", profile, "--out", out, "--set", "costs.source=table", "--set", "costs.path=own.csv")
    error = failed(result)
    assert (problem in error.message, error.exit_code, out.exists()) == (True, 2, False)


def test_a_roofline_knows_the_shapes_of_the_models_of_a_run(profile: Path, tmp_path: Path) -> None:
    overrides = ["costs.source=roofline", "costs.accelerator=h200", "decision.concurrency=8"]
    run = run_profile(profile, tmp_path / "run", False, *overrides)
    target = Run.open(run.path).manifest.target
    assert (target.shape["layers"], target.shape["hidden"], target.shape["weight_bytes"]) == (4, 32, 4.0)
    assert target.shape["parameters"] == pytest.approx(target.parameters, rel=0.02)
    report = build_report(run)
    assert (report.times.source, report.times.concurrency, report.times.device) == ("roofline", 8, "h200")
    assert all(time > 0 for time in report.times.target_ms.values())


def test_threads_sleep_while_they_wait_unless_the_user_has_said_how(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
    for name in names:
        monkeypatch.setenv(name, "")  # put back after the test what the command sets
        monkeypatch.delenv(name)
    with monkeypatch.context() as user:
        user.setenv("KMP_BLOCKTIME", "200")
        called("profile", profile, "--dry-run", "--set", "costs.source=none")
        assert [name for name in names if name in os.environ] == ["KMP_BLOCKTIME"]
    called("profile", profile, "--dry-run", "--set", "costs.source=none")
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


def test_wrong_data_are_found_before_weights_are_loaded(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphaprof.profiling.profile.load_model", pytest.fail)
    error = failed(called("profile", profile, "--out", profile.parent / "new", "--set", "data.0.prompt='{nowhere}'"))
    assert "has no column 'nowhere'" in error.message
