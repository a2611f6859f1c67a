"""What a report checks about itself: sampled text against its distributions, and warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alphaprof.report.answer import Result
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.result import SELF_CHECK_CONFIDENCE, self_check
from alphaprof.totals.documents import Units
from alphaprof.totals.pool import DocumentTotals
from tests.reporting import as_terminal, asked, codes, every, log_of, only, reported, rows_of
from tests.synthetic import Domain, Recipe, rewritten, write_run

STORY = Domain(documents=16, alpha=0.5, shortest=40, longest=80, temperature=0.7, continuation="sampled")
RULES = ("strict", "lossless", "one_hot", "additive_0p1", "tree_2")
HONEST = Recipe(
    domains={f"story {index}": dataclasses.replace(STORY, alpha=0.2 + 0.03 * index) for index in range(20)},
    lookups=("lookup",),
    rules=RULES,
    gammas=(2,),
    shard_documents=320,
    seed=2,
)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return reported(tmp_path_factory.mktemp("honest"), HONEST)


def checked(report: RunReport) -> list[Result]:
    return [result for result in every(report) if result.self_check is not None]


def test_honest_sampled_text_agrees_with_its_distributions(honest: RunReport) -> None:
    """In every domain, under both rules, for both drafts; and the interval is not so wide that anything would."""
    found = [result for result in checked(honest) if result.rule != "tree_2"]
    assert len(found) == 20 * 2 * 2
    for result in found:
        assert result.self_check.low < 0 < result.self_check.high
        assert result.self_check.high - result.self_check.low < 0.3
    assert "off_policy_sample" not in codes(honest)


def test_the_self_check_is_what_happened_less_what_was_expected(tmp_path: Path) -> None:
    """From the columns: min(1, q/p) less the overlap, and 1[d = x_t] less p(d)."""
    run = write_run(tmp_path / "run", Recipe(domains={"story": STORY}, rules=RULES, lookups=("lookup",)))
    found, log = build_report(run), log_of(run)
    for draft in ("small", "lookup"):
        rows = rows_of(log, "story", draft)
        rows = rows[rows["proposed"] > 0]
        hits = (rows["draft_top"] == rows["token"]) - rows["target_prob_of_draft_top"]
        kept = (rows["draft_token_prob"] / rows["target_token_prob"]).clip(upper=1) - rows["overlap"]
        for rule, difference in (("one_hot", hits), ("lossless", hits if draft == "lookup" else kept)):
            check = only(found, "story", draft, rule).self_check
            assert check.value == pytest.approx(difference.mean(), abs=1e-6)


def test_the_self_check_of_texts_of_one_length_by_hand() -> None:
    """Four texts of ten proposals that differ by 1, 0, 2 and 1: .1 +- t(3 at 99.95 %) x .0816 / 2."""
    columns = {"accepted": np.full(4, 5.0), "emitted": np.array([6.0, 5.0, 7.0, 6.0]), "proposals": np.full(4, 10.0)}
    check = self_check(DocumentTotals(columns, Units.named("abcd"), "sampled", "sampled", None))
    assert (check.value, check.high - check.value) == pytest.approx((0.1, 12.924 * 0.08165 / 2), rel=1e-4)
    assert check.value - check.low == pytest.approx(check.high - check.value)


def pool_of(rng: np.random.Generator, documents: int) -> DocumentTotals:
    """Totals of texts of 20 to 60 tokens, the accept events of which have the probabilities that are said."""
    sizes = rng.integers(20, 61, documents)
    expected, happened = np.zeros(documents), np.zeros(documents)
    for index, size in enumerate(sizes):
        chances = rng.beta(2, 2, size)
        expected[index], happened[index] = chances.sum(), (rng.random(size) < chances).sum()
    columns = {"accepted": expected, "emitted": happened, "proposals": sizes.astype(float)}
    return DocumentTotals(columns, Units.named(map(str, range(documents))), "sampled", "sampled", None)


def test_the_self_check_is_wrong_as_rarely_as_it_says() -> None:
    """One in a thousand: about 6 of 6000 samples of eight documents."""
    rng, misses = np.random.default_rng(1), 0
    for _ in range(6000):
        check = self_check(pool_of(rng, 8))
        misses += not check.low <= 0 <= check.high
    assert SELF_CHECK_CONFIDENCE == 0.999
    assert 1 <= misses <= 14


FALSE = dataclasses.replace(STORY, documents=20, uniform=True)


@pytest.mark.parametrize("continuation", ["sampled", "given"])
def test_text_that_was_drawn_from_another_distribution_is_found_out(tmp_path: Path, continuation: str) -> None:
    domains = {"honest": STORY, "false": dataclasses.replace(FALSE, continuation=continuation), "code": Domain()}
    run = write_run(tmp_path / "run", Recipe(domains=domains, rules=RULES))
    for rule, sign in (("one_hot", "-"), ("lossless", "+")):
        found = asked(run, rule=rule)
        check = only(found, "false", rule=rule).self_check
        assert not check.low <= 0 <= check.high
        (warning,) = [warning for warning in found.notes if warning.code == "off_policy_sample"]
        assert f"false ({continuation} at temperature 0.7; small, {rule}) {sign}0." in warning.message
        assert "honest" not in warning.message
        assert "temperature" in warning.remedy
        assert "not sampled from them" in as_terminal(found, 200)


def test_what_rounding_may_make_is_no_accusation(tmp_path: Path) -> None:
    """Every token's q is .4 % less than the overlap says: sure beyond doubt, and within what two passes differ by."""
    run = write_run(tmp_path / "run", Recipe(domains={"story": STORY}, rules=("lossless",), decision={"rule": "lossless"}))

    def nearly(share: float) -> Callable[[pd.DataFrame], None]:
        def change(rows: pd.DataFrame) -> None:
            rows["target_token_prob"], rows["draft_token_prob"], rows["overlap"] = 0.5, 0.5 * (0.8 - share), 0.8

        return change

    for share, accused in ((0.004, False), (0.006, True)):
        found = build_report(rewritten(run, "small", nearly(share)))
        check = only(found, "story", rule="lossless").self_check
        assert check.value == pytest.approx(-share, abs=1e-6)
        assert ("lossless" in " ".join(warning.message for warning in found.notes)) == accused


def impossible(share: float) -> Callable[[pd.DataFrame], None]:
    """A log in which the scoring pass gives a share of the tokens no probability."""

    def change(rows: pd.DataFrame) -> None:
        rows["target_token_prob"] = np.where(np.arange(len(rows)) < share * len(rows), 0.0, rows["target_token_prob"])

    return change


@pytest.mark.parametrize(("share", "warned"), [(0.002, False), (0.02, True)])
def test_tokens_outside_the_support_are_counted_and_said(tmp_path: Path, share: float, warned: bool) -> None:
    recipe = Recipe(domains={"story": STORY, "novel": STORY}, drafts={"small": 0.0, "large": 0.1}, rules=RULES)
    run = write_run(tmp_path / "run", dataclasses.replace(recipe, shard_documents=32))
    for draft in recipe.drafts:
        run = rewritten(run, draft, impossible(share))
    found = build_report(run)
    rows = log_of(run)
    for domain in recipe.domains:
        mine = rows_of(rows, domain, "small")
        assert only(found, domain, rule="one_hot").impossible == (mine["target_token_prob"] == 0).mean()
    assert ("outside_support" in codes(found)) == warned
    if warned:
        (warning,) = [warning for warning in found.notes if warning.code == "outside_support"]
        whole = (rows["target_token_prob"] == 0).mean()
        assert warning.message.startswith(f"{whole:.2%} of sampled tokens")


def ends(documents: int, finish: str, **options: object) -> Domain:
    return dataclasses.replace(STORY, documents=documents, finish=finish, **options)


@pytest.mark.parametrize(("cut", "whole", "cut_share"), [(1, 4, 0.2), (2, 4, 1 / 3), (0, 5, 0.0), (5, 0, 1.0)])
def test_texts_that_were_cut_are_pointed_out_above_a_fifth(tmp_path: Path, cut: int, whole: int, cut_share: float) -> None:
    domains = {"cut": ends(cut, "length"), "whole": ends(whole, "eos")}
    domains = {name: domain for name, domain in domains.items() if domain.documents}
    # Other texts were not written by the target in this run: where they end says nothing about its limit.
    domains["wiki"] = ends(9, "length", temperature=None, continuation="text", on_policy=False)
    domains["logged"] = ends(9, "length", continuation="given")
    found = reported(tmp_path, Recipe(domains=domains, rules=("one_hot",)))
    assert found.run.cut == pytest.approx(cut_share)
    assert ("cut_by_length" in codes(found)) == (cut_share > 0.2)
    if cut_share > 0.2:
        assert f"{100 * cut_share:.0f}% of the texts were cut" in as_terminal(found, 150)
