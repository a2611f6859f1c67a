"""The power of `check --baseline`, in small: the script's own functions, and a gate that would not do."""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np
import pytest

from alphaprof.stats import paired
from tests.conftest import ROOT

pytestmark = pytest.mark.slow
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


def test_pairs_lose_what_they_are_said_to_lose(power: dict[str, Any]) -> None:
    """Tokens per round of many documents, and of 4 drafts that are accepted with 0.5 each: 1 + 1/2 + ... + 1/16."""
    assert power["per_round"](0.5) == 1.9375
    for loses, lost in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.25)):
        (rounds, tokens), (after, same) = power["pair"](np.random.default_rng(3), loses, 100_000, lost)
        assert (tokens == same).all()
        gone = after == tokens
        assert gone.mean() == pytest.approx(lost, abs=0.006)
        kept = ~gone
        assert rounds[kept].sum() / after[kept].sum() == pytest.approx(1 - loses, rel=0.003)
