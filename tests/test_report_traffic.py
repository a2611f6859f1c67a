"""What stands against a verdict on the whole traffic: text without rounds, and text that is not what it is said to be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.reporting import only, reported
from tests.synthetic import Domain, Recipe

FAST = Domain(documents=16, alpha=0.9)
STORY = Domain(documents=16, alpha=0.9, continuation="sampled", temperature=0.8)
CORPUS = Domain(documents=60, alpha=0.05, on_policy=False, continuation="text")


def test_a_domain_is_judged_by_all_of_its_text_or_not_at_all(tmp_path: Path) -> None:
    """Its weight counts the plain text as well, which no rule has rounds on."""
    report = reported(tmp_path, Recipe(domains={"code": FAST, "chat": FAST}, sources=[("code", CORPUS)]))
    assert report.traffic.verdict == "UNDECIDED"
    assert "(code)" in report.traffic.reason
    assert report.traffic.speedup is None


def test_without_weight_such_a_domain_does_not_matter(tmp_path: Path) -> None:
    decision = {"weights": {"code": 0.0, "chat": 1.0}, "draft": "small", "gamma": 4}
    recipe = Recipe(domains={"code": FAST, "chat": FAST}, sources=[("code", CORPUS)], decision=decision)
    assert reported(tmp_path, recipe).traffic.verdict == "GO"


def test_greedy_and_sampled_text_are_judged_each_by_its_rule(tmp_path: Path) -> None:
    recipe = Recipe(domains={"code": FAST, "story": STORY}, rules=("strict", "one_hot"))
    report = reported(tmp_path, recipe)
    assert report.traffic.rule == "strict and one_hot"
    assert report.traffic.speedup is not None
    assert report.run.texts == ("greedy", "sampled at temperature 0.8")


@pytest.mark.parametrize("continuation", ["sampled", "given"])
def test_text_that_was_not_drawn_from_the_target_gets_no_verdict(tmp_path: Path, continuation: str) -> None:
    false = dataclasses.replace(STORY, documents=30, uniform=True, continuation=continuation)
    recipe = Recipe(domains={"false": false}, rules=("one_hot", "lossless"))
    report = reported(tmp_path, recipe)
    result = only(report, "false", rule="one_hot")
    assert result.verdict == report.traffic.verdict == "UNDECIDED"
    assert "was not drawn from these distributions" in result.reason
    assert "was not drawn from these distributions" in report.traffic.reason
    honest = reported(tmp_path / "honest", dataclasses.replace(recipe, domains={"story": STORY}))
    assert "not drawn" not in only(honest, "story", rule="one_hot").reason


def test_counts_of_expected_rounds_agree_with_tokens_per_round(tmp_path: Path) -> None:
    """The control variate mends all of them, or one report would hold two estimates."""
    report = reported(tmp_path, Recipe(domains={"story": STORY}, rules=("lossless",)))
    result = only(report, "story", rule="lossless")
    assert result.estimator == "expected"
    for item in result.gammas:
        assert item.tokens_per_round is not None
        assert item.acceptance_length is not None
        assert item.acceptance_length >= item.tokens_per_round.value - 1e-9  # texts end within a round
        assert item.acceptance_length - 1 == pytest.approx(sum(item.marginal))
        assert all(0 <= value <= 1 for value in (*item.marginal, *item.conditional))
