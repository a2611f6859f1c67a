"""A planted change in small: the truth is that of the runs' totals, and samples are judged against it."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest

from alphaprof.run.reader import Run
from tests.conftest import ROOT
from tests.synthetic import stored_totals

pytestmark = [pytest.mark.models, pytest.mark.slow]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "research" / "target_change_coverage.py"))


@pytest.fixture(scope="module")
def adapter(script: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("planted")
    ((name, text, differ),) = script["populations"](folder, 60, ["adapter"])
    return folder, script["measured"](name, text, differ, samples=40, size=20)


def test_the_truth_is_that_of_the_population(adapter: tuple[Path, Any]) -> None:
    folder, row = adapter
    lengths = []
    for name in ("old", "adapter"):
        totals = stored_totals(Run.open(folder / f"run {name}"), "small")
        lengths.append(totals["tokens"].sum() / totals["rounds_4"].sum())
    assert row.change == pytest.approx(lengths[1] / lengths[0] - 1, abs=0.01)  # less the control variate
    assert 0.5 < row.differ <= 1


def test_samples_hold_the_truth_and_find_the_change(script: dict[str, Any], adapter: tuple[Path, Any]) -> None:
    _, row = adapter
    assert row.covered >= 0.9
    assert row.speedup_covered >= 0.9
    assert (row.change < -0.03, row.keep) == (True, 0)
    assert list(script["faults"](row, 40)) == []


def test_a_broken_promise_is_named(script: dict[str, Any], adapter: tuple[Path, Any]) -> None:
    _, row = adapter
    for change, words in (
        ({"covered": 0.5}, "covers 50.0%"),
        ({"keep": 0.5}, "wrongly kept"),
        ({"name": "no change"}, "kept in 0.0%"),
    ):
        assert any(words in fault for fault in script["faults"](dataclasses.replace(row, **change), 2000))
