"""Reports of runs with greedy, sampled and other text under many rules: what has rounds, a verdict, and which numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from alphaprof.render import format as fmt
from alphaprof.render.blocks import Table
from alphaprof.report.build import RunReport, build_report
from alphaprof.run.reader import Run
from tests.conftest import slow
from tests.loops import each
from tests.reference import LOGGED_RULES
from tests.report.test_report_certificates import ACCEPTS
from tests.reporting import (
    as_json,
    as_terminal,
    asked,
    every,
    log_of,
    only,
    recounted,
    reported,
    rows_of,
)
from tests.synthetic import SETTINGS, Domain, Recipe, altered, write_run

SAMPLED = {"temperature": 0.7, "continuation": "sampled"}
GIVEN = {"temperature": 1.2, "continuation": "given"}
MIXED = Recipe(
    domains={
        "code": Domain(documents=8, alpha=0.8),
        "chat": Domain(documents=7, alpha=0.5, coverage=0.6),
        "story": Domain(documents=8, alpha=0.5, **SAMPLED),
        "novel": Domain(documents=14, alpha=0.6, shortest=40, **SAMPLED),
        "holes": Domain(documents=7, alpha=0.7, coverage=0.6, **SAMPLED),
        "logged": Domain(documents=6, alpha=0.7, **GIVEN),
        "foreign": Domain(documents=6, alpha=0.7, on_policy=False, **GIVEN),
        "wiki": Domain(documents=5, alpha=0.3, on_policy=False, continuation="text"),
    },
    drafts={"small": 0.0, "large": 0.2},
    lookups=("lookup",),
    rules=(*LOGGED_RULES, "tree_2"),
    gammas=(1, 2, 4),
    lookup_ms=0.4,
    seed=11,
)
POLICY = {
    **dict.fromkeys(("code", "chat"), "greedy"),
    **dict.fromkeys(("story", "novel", "holes", "logged"), "sampled"),
    **dict.fromkeys(("foreign", "wiki"), ""),
}
DRAFTS = (*MIXED.drafts, *MIXED.lookups)
RULES = (*LOGGED_RULES, "tree_2")
# What beta_t is, said once more, over the rows of one draft's log that have a proposal.
FORMULAS: dict[str, Callable[[pd.DataFrame], Any]] = ACCEPTS | {
    "strict": lambda rows: rows["draft_top"] == rows["reference"],
    "lossless": lambda rows: rows["overlap"].fillna(rows["target_prob_of_draft_top"]),
    "one_hot": lambda rows: rows["target_prob_of_draft_top"],
    "tree_2": lambda rows: (rows["draft_rank_of_token"] <= 2) | (rows["draft_top"] == rows["token"]),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("mixed") / "run", MIXED)


@pytest.fixture(scope="module")
def positions(run: Run) -> pd.DataFrame:
    table = log_of(run)
    greedy = table["domain"].astype(str).map(POLICY) == "greedy"
    table["reference"] = table["token"].where(greedy, table["target_top"])
    table["known"], table["best"] = table["target_prob_of_draft_top"].astype(float), table["target_top_prob"].astype(float)
    return table


@each("draft", DRAFTS)
@each("rule", RULES)
def test_alpha_is_that_of_the_position_log(report: RunReport, positions: pd.DataFrame, rule: str, draft: str) -> None:
    """By the column of the rule, and by its formula over the other columns."""
    for domain in POLICY:
        rows, result = rows_of(positions, domain, draft), only(report, domain, draft, rule)
        proposals = rows[rows["proposed"] > 0]
        assert result.alpha.value == pytest.approx(rows[f"accept_{rule}"].mean(), abs=1e-6)
        assert result.alpha.value == pytest.approx(float(FORMULAS[rule](proposals).mean()), abs=1e-6)
        assert result.alpha.low <= result.alpha.value <= result.alpha.high
        assert result.coverage == len(proposals) / len(rows)
        assert (result.positions, result.documents) == (len(rows), MIXED.domains[domain].documents)


@each("draft", DRAFTS)
def test_every_other_rule_shows_its_alpha_with_what_it_is_worth(report: RunReport, draft: str) -> None:
    """In the row of its text and the column of its rule: * off-policy, ~ lossy."""
    (table,) = [block for block in report.drawn("rules")[1] if isinstance(block, Table) and block.draft == draft]
    own = {"strict": ("greedy",), "one_hot": ("sampled",), "lossless": ("sampled",)}  # other rules keep any text
    for found in (found for found in every(report) if found.draft == draft and found.verdict is None):
        known = POLICY[found.domain] in own.get(found.rule, ("greedy", "sampled"))
        mark = "*" if not known else " " if found.rule in (*own, "tree_2") else "~"
        (cells,) = [cells for name, cells in table.rows if name.split()[0] == found.domain and found.rule in cells]
        ends = f"[{fmt.share(found.alpha.low, 2)}, {fmt.share(found.alpha.high, 2)}]"
        assert cells[found.rule] == f"{fmt.share(found.alpha.value)}{mark}\n{ends}"


SAMPLED_TEXT = [name for name in POLICY if POLICY[name] == "sampled"]
FACTS = [(name, "one_hot", draft) for name in SAMPLED_TEXT for draft in DRAFTS]
FACTS += [(name, "strict", draft) for name in ("code", "chat") for draft in DRAFTS]
FACTS += [(name, "lossless", "lookup") for name in SAMPLED_TEXT]  # of models it is a matter of chance, see below


@each(("domain", "rule", "draft"), FACTS)
def test_rounds_of_top_tokens_are_those_of_the_position_log(
    report: RunReport, positions: pd.DataFrame, domain: str, rule: str, draft: str
) -> None:
    for found in only(report, domain, draft, rule).gammas:
        again = recounted(rows_of(positions, domain, draft), found.gamma, draft == "lookup")
        accepted = again["by_depth"].sum()
        assert found.rounds == again["rounds"]
        assert found.tokens_per_round.value == pytest.approx(again["tokens"] / again["rounds"])
        assert found.acceptance_length == pytest.approx(1 + accepted / again["with"])
        assert found.accepted_per_drafted == pytest.approx(accepted / again["drafted"])
        assert found.marginal == pytest.approx(again["by_depth"] / again["with"])
        reached = [(a / t if t else None) for a, t in zip(again["by_depth"], again["tested"], strict=True)]
        assert found.conditional == tuple(None if share is None else pytest.approx(share) for share in reached)


def test_a_tree_has_rounds_and_no_times(report: RunReport) -> None:
    """What verifying a whole tree costs was not measured: chains were."""
    found = [item for result in every(report) if result.rule == "tree_2" for item in result.gammas]
    assert len(found) == 3 * len(DRAFTS) * 6
    assert {(item.speedup, item.break_even_length, item.draft_cost, item.verify_cost) for item in found} == {(None,) * 4}
    assert all(item.tokens_per_round is not None for item in found)


def test_the_verdict_concerns_what_engines_do_by_default(report: RunReport) -> None:
    """Strict on greedy text and on text that nobody can decode, one_hot on sampled text; nothing else has a verdict."""
    decided = {"greedy": "strict", "sampled": "one_hot", "": "strict"}
    for result in every(report):
        concerned = result.rule == decided[POLICY[result.domain]]
        assert (result.verdict is not None) == concerned
        assert result.verdict == "UNDECIDED" or POLICY[result.domain] or not concerned
        if not concerned and result.gammas:
            assert result.reason == f"the verdict concerns {decided[POLICY[result.domain]]} only"
        assert concerned or result.documents_needed is None
        assert result.reason


WEIGHED = {"code": 0.25, "chat": 0.0, "story": 0.5, "novel": 0.25, "holes": 0.0, "logged": 0.0, "foreign": 0.0, "wiki": 0.0}


@pytest.mark.parametrize("draft", ["large", *slow([("small",), ("lookup",)])])
def test_the_traffic_weighs_greedy_text_under_strict_and_sampled_text_under_one_hot(run: Run, draft: str) -> None:
    found = asked(run, weights=WEIGHED, draft=draft, gamma=2)
    rules = {"code": "strict", "story": "one_hot", "novel": "one_hot"}
    speedups = [only(found, domain, draft, rule).gammas[1].speedup for domain, rule in rules.items()]
    time = sum(WEIGHED[domain] / one.value for domain, one in zip(rules, speedups, strict=True) if one)
    assert found.answer.speedup.value == pytest.approx(1 / time)
    assert (found.answer.rule, found.answer.draft, found.answer.gamma) == ("strict and one_hot", draft, 2)
    assert found.answer.held_out == 8 + 8 + 14


@pytest.mark.parametrize("rule", ["lossless", *slow([("one_hot",)])])
def test_a_rule_that_is_asked_for_gets_the_verdict(run: Run, rule: str) -> None:
    found = asked(run, rule=rule)
    decided = [result for result in found.results if result.verdict is not None]
    assert {result.rule for result in decided} == {rule}
    assert {result.domain for result in decided} == set(POLICY)
    assert {result.domain for result in decided if result.gammas} == set(SAMPLED_TEXT)
    assert all(result.verdict == "UNDECIDED" for result in decided if not result.gammas)
    assert found.answer.rule == rule


@pytest.mark.parametrize("rule", ["additive_0p2", *slow([("additive_0p1",), ("typical_0p09_0p3",)])])
def test_a_lossy_rule_never_has_a_verdict(run: Run, rule: str) -> None:
    found = asked(run, rule=rule)
    assert (found.answer.verdict, found.answer.rule) == ("UNDECIDED", rule)
    assert (found.answer.speedup, found.answer.tokens_per_round) == (None, None)
    assert "alphaprof validate --rule" in found.answer.reason
    decided = [result for result in found.results if result.verdict is not None]
    assert {result.rule for result in decided} == {rule}
    for result in decided:
        assert (result.verdict, result.gammas, result.gamma, result.lossy) == ("UNDECIDED", (), None, True)
        assert "is lossy" in result.reason
        assert "alphaprof validate --rule" in result.reason
    assert as_json(found)["answer"]["speedup"] is None


@pytest.mark.parametrize(
    ("top_k", "rule", "shown"), [(20, "one_hot", "rules"), (20, "lossless", "verdict"), (0, "lossless", "")]
)
def test_a_report_says_how_q_was_processed_where_a_rule_draws_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int, rule: str, shown: str
) -> None:
    monkeypatch.setattr("tests.synthetic.SETTINGS", SETTINGS | {"top_k": top_k})
    recipe = Recipe(
        {"story": Domain(**SAMPLED)}, rules=("one_hot", "lossless"), seed=40 + top_k
    )  # equal recipes are written once
    run = write_run(tmp_path / "run", recipe)
    said = {"temperature": "q has temperature only, p is also cut by top_k, top_p and min_p", "same": "q is cut like p"}
    for setting, words in said.items():
        report = build_report(altered(run, config=run.manifest.config | {"draft_processing": setting}))
        asked_for = asked(report.asked.run, rule=rule)
        where = [name for name in ("verdict", "rules") if words in as_terminal(asked_for, 100, name)]
        assert where == [shown] * bool(shown)


def textbook(alpha: float, gamma: int) -> float:
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def markov(alpha: float, correlation: float, gamma: int) -> float:
    """Tokens per round where acceptance is a stationary two-state chain."""
    stays = alpha + correlation * (1 - alpha)
    return 1 + alpha / (1 - alpha) * (1 - stays**gamma) / (1 - correlation * stays**gamma)


@pytest.mark.parametrize(("bursts", "at_four"), [(0.6, 0.124), (0.0, 0.0), (-0.2, -0.04)])
def test_the_textbook_formula_is_too_high_where_acceptance_comes_in_bursts(
    tmp_path: Path, bursts: float, at_four: float
) -> None:
    """With alpha .8 and a correlation of .6 from token to token, gamma 4 gives 2.99 tokens a round and the formula 3.36."""
    domain = Domain(documents=30, alpha=0.8, spread=0.0, shortest=1500, longest=1500, bursts=bursts)
    found = only(reported(tmp_path, Recipe(domains={"code": domain}, gammas=(4, 8), seed=3)), "code")
    alpha = found.alpha.value
    for item in found.gammas:
        assert item.tokens_per_round.value == pytest.approx(markov(alpha, bursts, item.gamma), rel=0.01)
        assert item.iid_error == pytest.approx(textbook(alpha, item.gamma) / markov(alpha, bursts, item.gamma) - 1, abs=0.01)
    assert found.gammas[0].iid_error == pytest.approx(at_four, abs=0.015)
