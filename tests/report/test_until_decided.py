"""Runs that stop as soon as they are decided: the order, the stop, and verdicts that hold whenever that was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.config.load import load_profile
from alphaprof.errors import ProfileInvalid, RunMismatch
from alphaprof.log.run import Run
from alphaprof.log.writer import RunWriter
from alphaprof.profiling.run import profile as profiling
from alphaprof.report.build import build_report, settled
from alphaprof.stats.estimate import ratio
from alphaprof.stats.sequential import Bounds, decide_sequentially
from tests.reporting import asked
from tests.runs import Silent, profile_file, run_profile, tables
from tests.synthetic import Domain, Recipe, interrupted, rewritten, stored_totals, write_run

LENGTH = 60
TRAFFIC = {
    "code": Domain(documents=60, alpha=0.9, spread=0.03, shortest=LENGTH, longest=LENGTH),
    "chat": Domain(documents=60, alpha=0.8, spread=0.05, shortest=20, longest=LENGTH),
}
RECIPE = Recipe(domains=TRAFFIC, drafts={"small": 0.0, "poor": -0.5}, timing_error=0.0, gammas=(1, 3))
ORDER = {
    "choosing": 32,
    "available": 500,
    "reach": {"code": LENGTH - 1, "chat": LENGTH - 1},
    "shard_documents": 16,
}


def ordered(path: Path, recipe: Recipe = RECIPE, **order: Any) -> RunWriter:
    """A synthetic run that came in random order (its documents are alike in any)."""
    run = write_run(path, recipe)
    run.write_manifest(dataclasses.replace(run.manifest, sequential=ORDER | order))
    return RunWriter.open(path)


def rows(run: Run, draft: str, gamma: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Numbers, tokens and time with the draft of all documents, counted from the totals and the times of the recipe."""
    frame = stored_totals(run, draft)
    number, tokens, rounds = (frame[name].to_numpy() for name in ("document", "tokens", f"rounds_{gamma}"))
    cost = (gamma * RECIPE.draft_ms + 10 + gamma * RECIPE.extra_ms) / 10
    return number, tokens, cost * rounds


def test_the_first_documents_choose_and_the_others_are_bet_on(tmp_path: Path) -> None:
    run = ordered(tmp_path / "run")
    found = asked(run, min_speedup=1.5).traffic
    assert (found.draft, found.gamma, found.verdict) == ("small", 3, "GO")
    number, base, spent = rows(run, "small", 3)
    tested = number >= 32
    times = build_report(run).results[0].gammas[-1]
    assert times.full_round_cost == pytest.approx(1.45)
    bounds = Bounds(1.45 / 4, 1.45, LENGTH - 1)
    expected = decide_sequentially(base[tested], spent[tested], 1.0, bounds, 1.5, 0.95)
    assert (found.tested.low, found.tested.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.tested.value == pytest.approx(base[tested].sum() / spent[tested].sum())
    assert found.documents == tested.sum()
    assert f"reached 1.5 after {expected.documents} of them" in found.reason
    assert found.reason.startswith("by step times measured here with transformers: speedup")


def test_what_is_fixed_needs_nobody_to_choose_it(tmp_path: Path) -> None:
    run = ordered(tmp_path / "run", choosing=0)
    found = asked(run, min_speedup=1.5, draft="small", gamma=3).traffic
    assert (found.verdict, found.documents) == ("GO", 120)
    poor = asked(run, min_speedup=1.5, draft="poor", gamma=3).traffic
    assert poor.verdict == "NO-GO"
    assert "upper bound" in poor.reason


def test_weights_ask_for_another_mixture_than_the_documents_came_in(tmp_path: Path) -> None:
    found = asked(ordered(tmp_path / "run"), weights={"code": 0.5, "chat": 0.5}).traffic
    assert (found.verdict, found.documents) == ("UNDECIDED", 0)
    assert "which differs from the weights" in found.reason


def test_what_was_chosen_does_not_hang_on_what_is_tested(tmp_path: Path) -> None:
    """Draft a is right on the first documents, b on all others, which are more: a it is, and a that fails."""
    recipe = dataclasses.replace(RECIPE, drafts={"a": 0.1, "b": 0.1}, gammas=(3,))
    run = ordered(tmp_path / "run", recipe)

    def wrong(first: bool) -> Any:
        def change(frame: Any) -> None:
            bad = (frame["document"] < 32) == first
            frame.loc[bad, "draft_top"] = (frame.loc[bad, "token"] + 7) % 1000

        return change

    rewritten(rewritten(run, "a", wrong(first=False)), "b", wrong(first=True))
    for shards in (9, 15, None):
        part = run if shards is None else interrupted(run, tmp_path / str(shards), shards)
        assert asked(part, min_speedup=1.2).traffic.draft == "a"
    assert asked(run, min_speedup=1.2).traffic.verdict == "NO-GO"


def test_nobody_is_chosen_before_all_first_documents_are_there(tmp_path: Path) -> None:
    run = interrupted(ordered(tmp_path / "run"), tmp_path / "cut", shards=7)
    assert run.manifest.documents == 28
    found = asked(run, min_speedup=50).traffic
    assert (found.verdict, found.draft) == ("UNDECIDED", None)
    assert "the first 32 documents choose" in found.reason
    unasked = asked(ordered(tmp_path / "fixed", choosing=0), min_speedup=1.5).traffic
    assert unasked.verdict == "UNDECIDED"
    assert "fixed draft and gamma before its first document" in unasked.reason


def test_equal_prompts_are_one_observation(tmp_path: Path) -> None:
    """Forty documents of one prompt say as much as one."""
    same = dataclasses.replace(TRAFFIC["code"], documents=40, prompts=["the same"] * 40)
    recipe = dataclasses.replace(RECIPE, domains={"code": same}, gammas=(3,))
    run = ordered(tmp_path / "run", recipe, choosing=0, reach={"code": LENGTH - 1})
    found = asked(run, min_speedup=1.1, draft="small", gamma=3).traffic
    assert (found.verdict, found.documents) == ("UNDECIDED", 1)
    assert "on 1 document in random order: too few to rule anything out" in found.reason


def test_rounds_of_hugging_face_have_one_token_more(tmp_path: Path) -> None:
    """Its first round starts at the first token: a document of max_new_tokens still lies within its bounds."""
    run = ordered(tmp_path / "run", choosing=0)
    config = run.manifest.config
    asking = {"decision": config["decision"] | {"min_speedup": 1.5, "draft": "small", "gamma": 3}}
    assert build_report(run, "hf", config | asking).traffic.verdict == "GO"


# --- runs of tiny models ---


def until(path: Path, out: Path, *overrides: str, resume: bool = False, stop: Any = None) -> Run:
    return profiling.profile(load_profile(path, list(overrides)), out, Silent(), resume, settled=stop or settled)


def plain_file(folder: Path, tiny: Path) -> Path:
    data = [
        {"domain": "long", "path": "long.jsonl", "prompt": "{text}"},
        {"domain": "short", "path": "short.jsonl", "prompt": "{text}"},
    ]
    return profile_file(folder, tiny, data=data, drafts={"close": {"kind": "model", "model": str(tiny / "draft")}})


@pytest.mark.models
def test_documents_come_in_the_same_random_order_and_the_run_ends_when_it_is_told(tiny: Path, tmp_path: Path) -> None:
    path = plain_file(tmp_path, tiny)
    whole = run_profile(path, tmp_path / "whole")
    asked_after: list[int] = []

    def two_shards(run: Run) -> str | None:
        asked_after.append(run.manifest.documents)
        return "enough" if len(run.shards) == 2 else None

    run = until(path, tmp_path / "run", stop=two_shards)
    assert asked_after == [4, 8]
    assert (run.manifest.status, run.manifest.documents) == ("complete", 8)
    facts = run.manifest.sequential
    assert facts is not None
    assert facts == {"available": 15, "choosing": 32, "shard_documents": 4, "reach": {"long": 23, "short": 23}}
    # The same texts as in the order of the data, whatever place they have.
    both = [found.documents().to_pandas().set_index("prompt_hash") for found in (whole, run)]
    drawn = both[1]
    assert drawn["document"].tolist() == list(range(8))
    assert drawn["source_row"].tolist() != sorted(drawn["source_row"].tolist())
    columns = ["domain", "source_row", "prompt_tokens", "continuation_tokens", "finish"]
    assert drawn[columns].equals(both[0].loc[drawn.index, columns])


@pytest.mark.models
def test_an_interrupted_run_goes_on_in_its_order(tiny: Path, tmp_path: Path) -> None:
    path = plain_file(tmp_path, tiny)
    unbroken = until(path, tmp_path / "unbroken", stop=lambda run: None)

    def killed(run: Run) -> str | None:
        if len(run.shards) == 2:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        until(path, tmp_path / "run", stop=killed)
    until(path, tmp_path / "run", stop=lambda run: None, resume=True)
    assert unbroken.manifest.documents == 15
    expected, found = tables(tmp_path / "unbroken"), tables(tmp_path / "run")
    assert list(found) == list(expected)
    assert all(found[name].equals(expected[name]) for name in expected)


@pytest.mark.models
def test_what_cannot_be_drawn_at_random_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ProfileInvalid, match="groups them by cluster"):
        until(profile_file(tmp_path, tiny), tmp_path / "run")
    path = plain_file(tmp_path, tiny)
    with pytest.raises(ProfileInvalid, match="weights asks for another"):
        until(path, tmp_path / "run", "decision.weights={long: 0.5, short: 0.5}")
    stopped = until(path, tmp_path / "stopped", stop=lambda run: "enough")
    with pytest.raises(RunMismatch, match="stopped early at a sure verdict"):
        profiling.profile(load_profile(path), tmp_path / "again", Silent(), reuse=stopped.path)
    profiling.profile(load_profile(path, ["data.0.limit=4"]), tmp_path / "begun", Silent())
    begun = RunWriter.open(tmp_path / "begun")
    begun.write_manifest(dataclasses.replace(begun.manifest, status="running"))
    with pytest.raises(RunMismatch, match="begun without --until-decided"):
        until(path, tmp_path / "begun", "data.0.limit=4", resume=True)


@pytest.mark.models
def test_the_command_stops_says_what_it_saved_and_reports_what_it_found(tiny: Path, tmp_path: Path) -> None:
    """A draft is never worth 50x: its step times alone say so, after the first look."""
    path = plain_file(tmp_path, tiny)
    run = tmp_path / "run"
    arguments = ["profile", str(path), "--out", str(run), "--until-decided", "--set", "decision.min_speedup=50"]
    found = CliRunner().invoke(app, [*arguments, "--set", "decision.gamma=1", "--set", "costs.repeats=20"])
    assert found.exit_code == 0, found.output
    assert "NO-GO after 4 of 15 documents: the other 11 are not needed" in " ".join(found.stderr.split())
    report = build_report(Run.open(run))
    assert report.traffic.verdict == "NO-GO"
    assert "at any acceptance" in report.traffic.reason
    assert "stopped" in {warning.code for warning in report.notes}
    refused = CliRunner().invoke(app, [*arguments, "--reuse-continuations", str(run)])
    assert refused.exit_code != 0


def test_what_is_shown_of_documents_in_random_order_is_of_those_that_were_tested(tmp_path: Path) -> None:
    """With the interval of a fixed number of them; nothing chose where draft and gamma were fixed, and nobody says so."""
    run = ordered(tmp_path / "run")
    fixed, auto = asked(run, draft="small", gamma=3, min_speedup=1.5), asked(run, min_speedup=1.5)
    assert not fixed.traffic.chosen
    number, base, spent = rows(run, "small", 3)
    expected = ratio(spent[number >= 32], base[number >= 32])
    speedup = auto.traffic.speedup
    assert auto.traffic.chosen
    assert speedup.value == pytest.approx(1 / expected.value)
    assert speedup.low < 1 / (expected.value + expected.stderr)
