"""The simulation that holds intervals and verdicts against known truth: it simulates what it says, and it can fail."""

from __future__ import annotations

import math
import runpy
from typing import Any

import numpy as np
import pytest

from alphaprof.stats.estimate import Interval
from tests.conftest import ROOT

pytestmark = pytest.mark.slow
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "research" / "interval_coverage.py"))
GLOBALS = SCRIPT["main"].__globals__  # what the script's functions look names up in
SETTINGS = list(SCRIPT["SETTINGS"])
MEMBERS, SAMPLES = 40, 250
every_setting = pytest.mark.parametrize("name", SETTINGS)


def noise(samples: int) -> float:
    """Three standard errors of a rate of 5 %."""
    return 3 * math.sqrt(0.05 * 0.95 / samples)


@pytest.fixture(scope="module")
def populations() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {name: SCRIPT["traffic"](name, MEMBERS, rng) for name in SETTINGS}


@every_setting
def test_intervals_hold_the_truth(populations: dict[str, Any], name: str) -> None:
    lines = SCRIPT["intervals"](name, populations[name], SAMPLES, np.random.default_rng(6))
    judged = [line for line in lines if line.met is not None]
    assert (len(lines), len(judged)) == (6, 3)
    for line in lines:
        held, above, below = line.rates
        assert held + above + below == pytest.approx(1)
        slack = 0.02 if line in judged else 0.03  # with 20 documents a little less is to be expected
        assert held >= 0.95 - slack - noise(SAMPLES), line
        if "alpha" in line.text:  # of the others documents that were not seen widen the interval
            assert held <= 0.95 + slack + noise(SAMPLES), line
    assert all(line.met for line in judged)


SMALL = {"gates": 20, "bad": 100, "step_times": 25}


@pytest.mark.parametrize("part", SMALL)
def test_promises_are_met_in_small(part: str) -> None:
    """In the first setting of a part, with the noise of few samples granted."""
    _, _, settings, measured = SCRIPT["PARTS"][part]
    lines = list(measured(next(iter(settings)), MEMBERS, SMALL[part], _rng(7)))
    assert any(line.met for line in lines)
    assert [str(line) for line in lines if line.met is False] == []


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def too_narrow(function: Any) -> Any:
    """An interval of half the width."""

    def narrowed(*arguments: Any) -> Any:
        found = function(*arguments)
        low, high = ((found.value + end) / 2 for end in (found.low, found.high))
        return Interval(found.value, low, high)

    return narrowed


def generous(function: Any) -> Any:
    """A verdict at a threshold that is 5 % too low."""
    return lambda found, threshold, *arguments, **options: function(found, 0.95 * threshold, *arguments, **options)


@pytest.mark.parametrize(
    ("name", "wrong", "part"),
    [
        ("pooled_share", too_narrow, "intervals"),
        ("speedup_interval", too_narrow, "intervals"),
        ("decide", generous, "gates"),
    ],
)
def test_what_is_wrong_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, part: str
) -> None:
    """In one setting, and no other part, to be quick."""
    title, header, _, measured = SCRIPT["PARTS"][part]
    monkeypatch.setitem(GLOBALS, "PARTS", {part: (title, header, ["different"], measured)})
    monkeypatch.setitem(GLOBALS, name, wrong(GLOBALS[name]))
    assert SCRIPT["main"]([f"--{part}", "120", "--members", "10"]) == 1
    assert capsys.readouterr().out.endswith("\n1 not met\n")
