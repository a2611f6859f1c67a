"""The simulations that hold intervals and verdicts against known truth, in small: every part prints its rates, what it
promises is met, and it can fail.
"""

from __future__ import annotations

import re
import runpy
from typing import Any

import numpy as np
import pytest

from alphaprof.stats.estimate import Interval
from tests.conftest import ROOT
from tests.loops import each

pytestmark = pytest.mark.slow
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "research" / "coverage.py"))
GLOBALS = SCRIPT["main"].__globals__  # what the script's functions look names up in
SAMPLES = 250


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GLOBALS, "EACH_LENGTH", 40)


@each("name", SCRIPT["TEXTS"])
def test_intervals_hold_the_truth(name: str) -> None:
    lines = list(SCRIPT["intervals"](np.random.default_rng(6), name, SAMPLES))
    judged, noise = [line for line in lines if line.met is not None], SCRIPT["slack"](SAMPLES)
    assert (len(lines), len(judged)) == (6, 3)
    for line in lines:
        held, above, below = line.rates
        assert held + above + below == pytest.approx(1)
        off = 0.02 if line in judged else 0.03  # with 20 documents a little less is to be expected
        assert held >= 0.95 - off - noise, line
        if "alpha" in line:  # of the others documents that were not seen widen the interval
            assert held <= 0.95 + off + noise, line
    assert all(line.met for line in judged)


@each(("part", "samples"), [("gates", 20), ("bad", 100), ("step_times", 25)])
def test_promises_are_met_in_small(part: str, samples: int) -> None:
    """In the first design of a part, with the noise of few samples granted."""
    simulated, designs, _ = SCRIPT["PARTS"][part]
    lines = list(simulated(np.random.default_rng(7), designs[0], samples))
    assert any(line.met for line in lines)
    assert [line for line in lines if line.met is False] == []


@each(
    ("part", "design", "says"),
    [
        ("choice", "noisy", r"noisy: false GO [\d.]+±[\d.]+%.* shown/true (0\.[89]|1\.[01])\d+±"),
        (
            "traffic",
            "2 x 8",
            r"2 x 8: true 1\.[45]\d+, .*\n  one sample: .* 0\.[5-7]\d+ wide\n  a stratum a source: .* 0\.[23]\d+ wide",
        ),
        ("load", "24, quiet", r"64 at a time: kept of the best (0\.9|1\.0)\d+±"),
        ("settle", "log-normal", r"truth at 1\.2 of the threshold: \d+ of 3 are asked for \d+ documents"),
        ("baseline", "users of 1 document", r"-7\.0%, 5 x 80: FAIL 100\.0±[\d.]+%, PASS 0\.0"),
    ],
)
def test_parts_print_their_rates(part: str, design: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"]([part, "--designs", design, "--samples", "3"]) == 0
    text = capsys.readouterr().out
    assert re.search(says, text), text


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
    name: str, wrong: Any, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(GLOBALS, name, wrong(GLOBALS[name]))
    assert SCRIPT["main"]([part, "--designs", "different", "--samples", "120"]) == 1
    assert capsys.readouterr().out.count("NOT MET") == 1
