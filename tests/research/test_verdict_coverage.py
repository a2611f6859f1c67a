"""The simulations of verdicts, in small: every part prints its rates, and none of them fails on what the product says."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.conftest import ROOT
from tests.loops import each

pytestmark = pytest.mark.slow
SCRIPT = str(ROOT / "scripts" / "research" / "verdict_coverage.py")


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
        ("gate", "users of 1 document", r"-7\.0%, 5 x 80: FAIL 100\.0±[\d.]+%, PASS 0\.0"),
    ],
)
def test_parts_print_their_rates(part: str, design: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(SCRIPT)["main"]([part, "--designs", design, "--samples", "3"])
    text = capsys.readouterr().out
    assert re.search(says, text), text
