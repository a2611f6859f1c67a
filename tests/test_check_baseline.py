"""The gate against a baseline: a draft that stops proposing fails, and what cannot be judged is said."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest
from typer.testing import CliRunner

from alphaprof.cli import app
from alphaprof.errors import AlphaprofError
from alphaprof.formats import json_schema
from alphaprof.log.store import Run
from tests.synthetic import Domain, Recipe, rewritten, write_run

CODE, CHAT = Domain(documents=24, alpha=0.8, spread=0.05), Domain(documents=24, alpha=0.5, spread=0.05)
WIDE = ("--margin", "1")  # whatever alpha is, it is not lower by more
FORMATS = ("terminal", "json", "md", "junit")


def run_of(folder: Path, silent: tuple[str, ...] = (), **domains: Domain) -> Run:
    """A run of some domains, in which the draft proposes nothing in those that are `silent`."""

    def stop(frame: pd.DataFrame) -> None:
        frame.loc[frame["domain"].astype(str).isin(silent), "proposed"] = 0

    run = write_run(folder, Recipe(domains=domains or {"code": CODE, "chat": CHAT}, gammas=(1, 3)))
    return rewritten(run, "small", stop) if silent else run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs on the same prompts: a draft that proposes everywhere, not in chat, nowhere; and runs with other domains."""
    folder = tmp_path_factory.mktemp("baseline")
    return {
        "whole": run_of(folder / "whole"),
        "quiet": run_of(folder / "quiet", ("chat",)),
        "mute": run_of(folder / "mute", ("code", "chat")),
        "more": run_of(folder / "more", code=CODE, chat=CHAT, poetry=CHAT),
        "other": run_of(folder / "other", code=CODE, songs=CHAT),
    }


def held(new: Run, old: Run, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, JSON, and both lines of a failure."""
    result = CliRunner().invoke(app, ["check", str(new.path), "--baseline", str(old.path), *arguments, "--format", "json"])
    error = result.exception
    if not isinstance(error, AlphaprofError):
        assert error is None, error
        return result.exit_code, json.loads(result.stdout), ""
    return error.exit_code, json.loads(result.stdout) if result.stdout else None, f"{error.message} | {error.hint}"


def test_a_draft_that_stops_proposing_in_a_domain_fails_there(runs: dict[str, Run]) -> None:
    code, found, text = held(runs["quiet"], runs["whole"], *WIDE)
    items = {item["domain"]: item for item in found["items"]}
    assert (code, found["outcome"], items["code"]["outcome"], items["chat"]["outcome"]) == (10, "fail", "pass", "fail")
    assert [items["chat"][name] for name in ("value", "low", "high", "documents")] == [None, None, None, 24]
    assert "alpha_difference of chat: the draft proposes nothing there any more" in text
    jsonschema.Draft202012Validator(json.loads(json_schema("check"))).validate(found)


@pytest.mark.parametrize("output", FORMATS)
def test_every_format_says_why_it_fails(output: str, runs: dict[str, Run]) -> None:
    call = ["check", str(runs["quiet"].path), "--baseline", str(runs["whole"].path), *WIDE, "--format", output]
    text = " ".join(CliRunner().invoke(app, call).stdout.split())
    assert "proposes nothing there any more" in text
    assert ("fail" in text) or ("FAIL" in text)


def test_a_domain_of_which_the_baseline_proposes_nothing_is_said(runs: dict[str, Run]) -> None:
    code, found, _ = held(runs["whole"], runs["quiet"], *WIDE)
    assert (code, [item["domain"] for item in found["items"]]) == (0, ["code"])
    assert found["unjudged"] == [{"domain": "chat", "reason": "the baseline's draft proposes nothing there"}]
    assert found["reason"].endswith("; not judged: chat")


def test_domains_without_a_partner_are_said(runs: dict[str, Run]) -> None:
    _, found, _ = held(runs["whole"], runs["more"], *WIDE)
    assert [(item["domain"], "and the baseline does" in item["reason"]) for item in found["unjudged"]] == [("poetry", True)]
    _, found, _ = held(runs["more"], runs["whole"], *WIDE)
    assert found["unjudged"] == [{"domain": "poetry", "reason": "the baseline does not have the domain"}]


@pytest.mark.parametrize("output", FORMATS)
def test_every_format_says_what_was_not_judged(output: str, runs: dict[str, Run]) -> None:
    call = ["check", str(runs["other"].path), "--baseline", str(runs["whole"].path), *WIDE, "--format", output]
    text = CliRunner().invoke(app, call).stdout
    assert all(domain in text for domain in ("chat", "songs", "does not have the domain"))
    if output == "junit":
        suite = ET.fromstring(text)  # noqa: S314  (our own)
        assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "0", "2")
        assert len(suite.findall("testcase/skipped")) == 2


def test_a_single_domain_that_falls_silent_fails_like_any_other(runs: dict[str, Run], tmp_path: Path) -> None:
    whole, silent = run_of(tmp_path / "whole", code=CODE), run_of(tmp_path / "silent", ("code",), code=CODE)
    code, found, _ = held(silent, whole, *WIDE)
    assert (code, [item["outcome"] for item in found["items"]]) == (10, ["fail"])
    code, found, text = held(runs["mute"], runs["whole"], *WIDE)
    assert (code, [item["outcome"] for item in found["items"]]) == (10, ["fail", "fail"])
    assert text.count("proposes nothing there any more") == 2


NOTHING = {
    "a silent baseline": ("whole", "mute", (), "the baseline's draft proposes nothing there", "a baseline whose draft"),
    "both silent": ("quiet", "mute", (), "nor does this one", "a baseline whose draft"),
    "another rule": (
        "whole",
        "quiet",
        ("--rule", "one_hot"),
        "one_hot does not belong to its text (greedy)",
        "--rule strict",
    ),
}


@pytest.mark.parametrize(("new", "old", "options", "problem", "hint"), NOTHING.values(), ids=NOTHING)
def test_where_nothing_can_be_judged_the_reason_is_said(
    new: str, old: str, options: tuple[str, ...], problem: str, hint: str, runs: dict[str, Run]
) -> None:
    code, found, text = held(runs[new], runs[old], *options)
    assert (code, found) == (12, None)
    assert problem in text
    assert hint in text
    assert ("--rule" in text) == bool(options)  # the rule is not what is wrong with a silent draft


def logged(folder: Path, rounds: tuple[int, ...], plain: int) -> Run:
    """An imported run of 12 requests, each with `rounds` that kept so many of 3 drafts, and more that had none."""
    histogram = [rounds.count(kept) for kept in range(4)]
    metrics = {
        "acceptance_histogram": histogram,
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": sum(rounds),
        "num_draft_tokens": 3 * len(rounds),
    }
    lines = [
        {
            "model": "target",
            "prompt_token_ids": [number],
            "completion_tokens": 1 + len(rounds) + sum(rounds) + plain + number % 2,
            "spec_decode_metrics": metrics,
        }
        for number in range(12)
    ]
    folder.mkdir()
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["import", "vllm", str(path), "--rule", "strict", "--out", str(folder / "run")])
    assert result.exception is None, result.exception
    return Run.open(folder / "run")


def test_a_served_draft_that_proposes_more_rarely_fails(tmp_path: Path) -> None:
    """It keeps as many drafts of a proposal as before: acceptance length is the same, and tokens per round are fewer."""
    often, rarely = logged(tmp_path / "often", (3, 1) * 10, 0), logged(tmp_path / "rarely", (3, 1), 36)
    code, found, _ = held(rarely, often, "--margin", "0.1")
    (item,) = found["items"]
    assert (code, item["measure"], item["outcome"]) == (10, "tokens_per_round_difference", "fail")
    # 12 requests of 60 tokens, every second with one more, in 20 rounds (21), and of 42 (43) in 38 (39).
    assert item["value"] == pytest.approx((12 * 42 + 6) / (12 * 38 + 6) - (12 * 60 + 6) / (12 * 20 + 6))
    assert held(often, rarely, "--margin", "0.1")[0] == 0


def test_a_served_draft_that_proposes_nothing_fails_with_one_token_a_round(tmp_path: Path) -> None:
    often, never = logged(tmp_path / "often", (3, 1), 0), logged(tmp_path / "never", (), 6)
    code, found, text = held(never, often, *WIDE)
    (item,) = found["items"]
    assert (code, item["outcome"], item["low"], item["high"]) == (10, "fail", None, None)
    assert item["value"] == pytest.approx(1 - (12 * 6 + 6) / (12 * 2 + 6))
    assert "proposes nothing there any more" in text
    assert held(often, never)[0] == 12
