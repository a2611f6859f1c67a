"""Scripts that read runs: published figures beside a run's, and four divergences beside the one that the log keeps."""

from __future__ import annotations

import dataclasses
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alphaprof.config.load import load_profile
from tests.conftest import ROOT
from tests.synthetic import Domain, Recipe, write_run

PAPER = runpy.run_path(str(ROOT / "scripts" / "research" / "reproduce_paper.py"))
PUBLISHED = PAPER["PUBLISHED"]
RULES = tuple(name.removeprefix("threshold_") for name in PUBLISHED if name.startswith("threshold_"))
RECIPE = Recipe(rules=RULES, certificates=True, lookups=("ngram",))
Capture = pytest.CaptureFixture[str]


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, whose second line must be its rule."""
    lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in table.splitlines()]
    assert all(len(line) == len(lines[0]) and line[0] == line[-1] == "" for line in lines)
    assert all(re.fullmatch(r"-+:?", cell) for cell in lines[1][1:-1])
    return [line[1:-1] for line in (lines[0], *lines[2:])]


def reproduced(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """The exit code of reproduce_paper.py, what it prints, and what goes to stderr."""
    code = PAPER["main"]([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


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


def test_the_table_holds_each_figure_once_a_run_and_what_is_published(tmp_path: Path, capsys: Capture) -> None:
    runs = [
        write_run(tmp_path / name, dataclasses.replace(RECIPE, seed=seed)) for seed, name in enumerate(("one", "a|b\nc"))
    ]
    code, text, _ = reproduced(capsys, *(run.path for run in runs))
    table, notes = text.split("\n\n")
    head, *rows = cells(table)
    assert code == 0
    assert head[:3] == ["", "Qwen3-1.7B, published", "Qwen3-4B, published"]
    assert [Path(name).name for name in head[3:]] == ["one", "a\\|b c"]
    by_name = {name: row for name, *row in rows}
    assert len(by_name) == len(rows) == 6 + sum(map(len, PUBLISHED.values()))
    assert by_name["documents"][2:] == ["12", "12"]
    assert [int(cell.replace(",", "")) for cell in by_name["positions"][2:]] == [run.manifest.positions for run in runs]
    exact = [pd.read_parquet(run.path / "positions" / "draft=small")["thresholds_exact"].mean() for run in runs]
    assert [float(cell) for cell in by_name["inexact"][2:]] == pytest.approx([1 - share for share in exact], abs=1e-4)
    for place, run in enumerate(runs, start=2):
        for (column, statistic), estimate in PAPER["measured"](run).items():
            shown = re.findall(r"[\d.]+|inf", by_name[f"{PAPER['NAMES'][column]}: {statistic}"][place])
            assert [float(cell) for cell in shown] == pytest.approx([estimate.value, estimate.low, estimate.high], abs=1e-3)
    for column, figures in PUBLISHED.items():
        for statistic, values in figures.items():
            theirs = by_name[f"{PAPER['NAMES'][column]}: {statistic}"][:2]
            assert theirs == ["-" if value is None else f"{value:.3f}" for value in values]
    assert "arXiv:2606.30265" in notes


REFUSED: list[tuple[Recipe, int, str]] = [
    (Recipe(), 2, "holds no thresholds"),
    (Recipe(rules=("strict", "lossless")), 2, "holds no thresholds"),
    (Recipe(rules=("top_m_3",), certificates=True), 2, "holds no threshold that is published"),
]


@pytest.mark.parametrize(("recipe", "expected", "message"), REFUSED)
def test_a_run_with_nothing_to_compare_is_refused_in_two_lines(
    tmp_path: Path, capsys: Capture, recipe: Recipe, expected: int, message: str
) -> None:
    run = write_run(tmp_path / "run", recipe)
    code, text, failure = reproduced(capsys, run.path)
    assert (code, text) == (expected, "")
    first, second = failure.splitlines()
    assert first == f"error: {run.path} {message}"
    assert second.startswith("hint: profile with ")


def test_profiles_of_the_paper_measure_every_published_rule_on_their_target() -> None:
    for size in ("1.7B", "4B"):
        profile = load_profile(ROOT / "profiles" / f"paper-qwen3-{size.lower()}.yaml")
        assert profile.target.model == f"Qwen/Qwen3-{size}"
        assert f"Qwen3-{size}" in PAPER["TARGETS"]
        assert profile.certificates
        assert tuple(profile.rules) == RULES
