"""The profiles of the repository are valid, say what their users must know, and hold what their names promise. No model is
loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alphaprof.config.load import load_profile
from alphaprof.config.options import (
    GivenContinuation,
    GreedyContinuation,
    NoCosts,
)
from alphaprof.config.profile import DomainColumn, ProfileOptions
from tests.cli import test_docs_commands as pages
from tests.conftest import ROOT

FETCHED = "question.jsonl", "HumanEval.jsonl.gz", "test.jsonl"  # by the lines of docs/reference.md
PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))
place = pages.place


def shipped(name: str) -> ProfileOptions:
    return load_profile(ROOT / "profiles" / f"{name}.yaml", None)


def comment(name: str) -> list[str]:
    """The lines of the comment that a profile begins with."""
    (text,) = re.findall(r"\A((?:#.*\n)+)", (ROOT / "profiles" / f"{name}.yaml").read_text())
    return [line.removeprefix("#").strip() for line in text.splitlines()]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_shipped_profile_is_valid_and_begins_with_a_comment(path: Path) -> None:
    profile = shipped(path.stem)
    assert profile.drafts
    assert len(comment(path.stem)) >= 2
    local = [source.path for source in profile.data if Path(source.path).is_absolute()]
    fetched = [str(ROOT / "data" / name) for name in FETCHED if path.stem.startswith("reference-")]
    missing = [place for place in local if not Path(place).exists() and place not in fetched]
    assert missing == ([str(ROOT / "profiles" / "traffic.jsonl")] if path.stem == "logged-traffic" else [])


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b-eagle3", "logged-traffic", "ci"])
def test_commands_in_the_comment_of_a_profile_work(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    commands = [line for line in comment(name) if line.startswith("alphaprof ")]
    assert any(f"profiles/{name}.yaml" in command for command in commands)
    for command in commands:
        pages.tried(command)


def test_logged_traffic_reads_the_line_that_its_comment_shows() -> None:
    profile = shipped("logged-traffic")
    (line,) = [json.loads(line) for line in comment("logged-traffic") if line.startswith("{")]
    (source,) = profile.data
    assert isinstance(source.domain, DomainColumn)
    assert isinstance(profile.continuation, GivenContinuation)
    named = {source.messages, source.cluster, source.domain.column, profile.continuation.column}
    assert named == set(line)
    assert profile.continuation.on_policy


def test_the_nightly_profile_is_small_and_needs_no_clock() -> None:
    profile = shipped("ci")
    assert isinstance(profile.costs, NoCosts)
    assert isinstance(profile.continuation, GreedyContinuation)
    assert sum((source.limit or 10**9) * profile.continuation.max_new_tokens for source in profile.data) <= 20_000
