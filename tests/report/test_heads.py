"""Draft heads in reports: acceptance by depth, the draft vocabulary, causes, words, in every format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from alphaprof.report.build import RunReport
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.run.manifest import Trial
from alphaprof.run.reader import Run
from tests.reporting import as_markdown, as_terminal, only, reported, rounds_of_head
from tests.synthetic import Domain, Recipe, write_run

TRIALS = (
    Trial("", 1, 0.51, 0.0, 0.0, 900, ("vllm",)),
    Trial("layers 1, 2, 4", 1, 0.73, 0.22, 0.01, 900, ("sglang",)),
)
RECIPE = Recipe(
    domains={
        "code": Domain(documents=12),
        "chat": Domain(documents=12, alpha=0.6, temperature=1.0, continuation="sampled"),
    },
    drafts={"small": 0.0},
    heads={"head": {"trials": TRIALS}},
    rules=("strict", "one_hot", "lossless", "tree_2"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("heads") / "run", dataclasses.replace(RECIPE, certificates=True))


def log_of(run: Run, domain: str) -> pd.DataFrame:
    rows = pa.concat_tables([run.positions("head", shard.index) for shard in run.shards]).to_pandas()
    return rows[rows["domain"] == domain]


def test_an_infinite_divergence_is_said_and_not_printed(report: RunReport) -> None:
    """In its place stands the mean total variation."""
    text = as_terminal(report, 230)
    assert "draft head cannot propose some tokens that the target can emit: KL(p||q) is infinite" in text
    assert "\\n" not in text
    assert "draft head: certified of accepted" not in text
    bounds = report.section("target").certificates.lossless
    beta = next(item.beta.value for item in bounds if (item.draft, item.domain) == ("head", "code"))
    assert f"Mean total variation, 1 - overlap: code {1 - beta:.3f}" in text
    assert "draft head: share rejected" not in text
    assert "draft small: share rejected" in text
    assert not any(word in text[: text.index("\nlegend: ")].split() for word in ("inf", "nan"))


def test_accept_at_1_is_of_all_positions_and_depth_1_of_real_rounds(run: Run, report: RunReport) -> None:
    log, head = log_of(run, "code"), only(report, "code", "head", "strict")
    right = log["draft_top"] == log["token"]
    assert head.alpha.value == pytest.approx(right.mean())
    for item in head.gammas:
        tokens, rounds, tested, kept = rounds_of_head(log, item.gamma)
        assert item.tokens_per_round.value == pytest.approx(tokens / rounds)
        assert item.conditional[0] == pytest.approx(kept[0] / tested[0])


def test_what_a_head_cannot_propose_is_a_cause_of_its_own(run: Run, report: RunReport) -> None:
    """Its share: positions of tokens outside of the vocabulary, none of which is accepted."""
    log = log_of(run, "code")
    key = ("head", "strict", "code")
    (item,) = [each for each in report.section("causes") if (each.draft, each.rule, each.domain) == key]
    causes = {cause.name: cause for cause in item.causes}
    tied = np.isclose(log["target_top_prob"], log["target_second_prob"], rtol=0.13) & (log["token"] != log["draft_top"])
    outside = ~log["in_draft_vocabulary"].astype(bool) & ~tied
    assert causes["draft vocabulary"].share.value == pytest.approx(outside.mean(), abs=0.01)
    assert "d2t" in causes["draft vocabulary"].remedy
    assert sum(cause.share.value for cause in item.causes) == pytest.approx(item.lost.value)


def test_a_stand_in_for_another_dtype_decides_nothing(tmp_path: Path) -> None:
    for served, decided in ((None, True), ("bfloat16", True), ("fp8", False)):
        decision = {"served_dtype": served} if served else {}
        report = reported(tmp_path / str(served), dataclasses.replace(RECIPE, decision=decision, heads={}))
        verdicts = {item.verdict for item in report.results if item.verdict} | {report.answer.verdict}
        assert (verdicts == {"UNDECIDED"}) != decided
        assert ("diagnose RUN IMPORT" in report.answer.reason) != decided
        assert report.answer.speedup is not None
        assert report.traffic.served_dtype == (None if decided else "fp8")
        said = "on any engine" if decided else "on any engine that serves the target in bfloat16, not in fp8"
        assert f"{said[1:]}, draft small" in as_terminal(report, 170)
        assert f"{said[1:]}, draft small" in as_markdown(report, "verdict")
        assert f"{said[1:]}, draft small" in ReportAnswer(report).html()
        for item in (each for each in report.results if each.verdict):
            assert item.reason.startswith("the target in bfloat16 stands in") != decided
            assert "diagnose RUN IMPORT" not in item.reason


def test_a_block_has_rounds_of_its_own_length_alone(tmp_path: Path) -> None:
    block = {"settings": {"block": 4}}
    report = reported(tmp_path / "block", dataclasses.replace(RECIPE, heads={"flash": block}, decision={"weights": None}))
    for result in report.results:
        assert [item.gamma for item in result.gammas] in ([], [3] if result.draft == "flash" else [1, 2, 3, 4])
    assert next(item.answer.gamma for item in report.drafts if item.answer.draft == "flash") == 3
    fixed = {"draft": "flash", "gamma": 2}
    report = reported(tmp_path / "fixed", dataclasses.replace(RECIPE, heads={"flash": block}, decision=fixed))
    assert (report.answer.verdict, report.answer.gamma) == ("UNDECIDED", None)
    assert "no draft has rounds of 2 speculative tokens" in report.answer.reason


def test_rounds_by_block_are_not_said_to_be_token_by_token(tmp_path: Path) -> None:
    drawn = {"code": dataclasses.replace(RECIPE.domains["chat"], documents=12)}
    for rule, said in (("lossless", True), ("block", False)):
        recipe = dataclasses.replace(RECIPE, domains=drawn, rules=(rule,), decision={"rule": rule})
        report = reported(tmp_path / rule, recipe)
        assert ("they verify token by token" in as_terminal(report, 150, "drafts")) == said
