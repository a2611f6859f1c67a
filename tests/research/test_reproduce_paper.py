"""Scripts that read runs: published figures beside a run's, and four divergences beside the one that the log keeps."""

from __future__ import annotations

import dataclasses
import math
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alphaprof.config.load import load_profile
from tests.conftest import ROOT
from tests.synthetic import Domain, Recipe, write_run

pytestmark = pytest.mark.slow
PAPER = runpy.run_path(str(ROOT / "scripts" / "research" / "reproduce_paper.py"))
PUBLISHED = PAPER["PUBLISHED"]
RULES = tuple(name.removeprefix("threshold_") for name in PUBLISHED if name.startswith("threshold_"))
RECIPE = Recipe(rules=RULES, certificates=True, lookups=("ngram",))


@pytest.mark.parametrize("draft", ["small", "ngram"])
def test_statistics_beside_published_figures_are_those_of_the_log(tmp_path: Path, draft: str) -> None:
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains={"a": Domain(9), "b": Domain(8, temperature=0.8)}))
    log = pd.read_parquet(run.path / "positions" / f"draft={draft}")
    found = PAPER["measured"](run)
    assert set(found) == {(column, statistic) for column, figures in PUBLISHED.items() for statistic in figures}
    for (column, statistic), estimate in found.items():
        values = np.sort(log[column].to_numpy(np.float64))
        places = {"median": math.ceil(len(values) / 2), "5th percentile": math.ceil(len(values) / 20)}
        expected = values.mean() if statistic == "mean" else values[places[statistic] - 1]
        assert estimate.value == pytest.approx(expected, rel=1e-12), (column, statistic)
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.high <= (1 if column.startswith("target_") else math.inf)


def test_every_published_figure_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", RECIPE)
    assert PAPER["main"]([str(run.path)]) == 0
    table = capsys.readouterr().out
    names = [f"| {PAPER['NAMES'][column]}: {statistic} |" for column, figures in PUBLISHED.items() for statistic in figures]
    assert [name for name in names if table.count(name) != 1] == []


def test_profiles_of_the_paper_measure_every_published_rule_on_their_target() -> None:
    for size in ("1.7B", "4B"):
        profile = load_profile(ROOT / "profiles" / f"paper-qwen3-{size.lower()}.yaml")
        assert profile.target.model == f"Qwen/Qwen3-{size}"
        assert f"Qwen3-{size}" in PAPER["TARGETS"]
        assert profile.certificates
        assert tuple(profile.rules) == RULES
