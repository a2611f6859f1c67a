"""The power of `check --baseline`, in small: the script's own functions, and a gate that would not do."""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np
import pytest

from alphaprof.stats import paired
from tests.conftest import ROOT

SCRIPT = str(ROOT / "scripts" / "research" / "gate_power.py")


@pytest.fixture(scope="module")
def power() -> dict[str, Any]:
    return runpy.run_path(SCRIPT)


def test_the_criteria_are_met_in_small(power: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert power["main"](["--runs", "120", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 + 4 + 8 + 9
    assert all(line.endswith("  met") for line in (*lines[2:5], *lines[10:13]))
    assert not any("NOT MET" in line for line in lines)


def test_a_gate_without_a_floor_does_not_do(
    power: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten documents in which nothing was lost, by luck, would show that nothing is: the criterion can fail."""
    monkeypatch.setattr(paired, "FAR", 0.0)
    assert power["losses"](np.random.default_rng(0), 60) > 0
    assert "NOT MET" in capsys.readouterr().out


def test_fewer_documents_do_not_do(power: dict[str, Any]) -> None:
    """With 15 instead of 60 documents a loss of 0.05 is not found in 95 % of the runs: the criterion can fail."""
    found = power["outcomes"](np.random.default_rng(0), [-0.05, 0.0, 0.0, 0.0, 0.0], 120, 15)
    assert found["fail"] / 120 < 0.8


def test_pairs_have_the_difference_that_they_are_asked_for(power: dict[str, Any]) -> None:
    (before, size), (after, again) = power["pair"](np.random.default_rng(0), -0.05, 20_000)
    assert (size == again).all()
    change = after / size - before / size
    assert change.mean() == pytest.approx(-0.05, abs=0.002)
    assert change.std() == pytest.approx(0.05, abs=0.002)


def test_documents_lose_everything_in_the_share_that_is_asked_for(power: dict[str, Any]) -> None:
    (before, _), (after, _) = power["pair"](np.random.default_rng(0), 0.0, 20_000, 0.1, 0.0)
    assert (after == 0).mean() == pytest.approx(0.1, abs=0.01)
    assert (after == before)[after > 0].all()
