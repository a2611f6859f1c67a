"""The curve that the demo shows was recorded: it is read without its heads, and says what the pages quote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alphaprof.commands.curve.answer import CurveReport, answer_lines
from alphaprof.commands.curve.build import build_curve
from alphaprof.config.heads import load_heads
from alphaprof.log.training import TRAINING

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "profiles" / "recorded-curve"


def answered(*changes: str) -> CurveReport:
    options, file = load_heads(RECORD)
    return build_curve(options, file, list(changes))


@pytest.fixture(scope="module")
def report() -> CurveReport:
    return answered()


def test_ten_heads_of_four_sizes_are_read_without_their_weights(report: CurveReport) -> None:
    assert [(point.label, point.units, point.heads) for point in report.points] == [
        ("1/8", 16, 3),
        ("1/4", 32, 3),
        ("1/2", 64, 3),
        ("1", 128, 1),
    ]
    assert {path.name for path in (RECORD / "heads").glob("*/*")} == {TRAINING}


def test_another_threshold_has_another_answer() -> None:
    lines = answer_lines(answered("decision.min_speedup=1.5"))
    assert lines[0].startswith("OPEN: 1.5x in some scenarios from about 440 training units (3.4 times) on, ")


def test_more_text_helped_at_every_step(report: CurveReport) -> None:
    """Paired by test unit: what the page says of this curve."""
    gains = [point.difference for point in report.points[1:]]
    assert [gain.low > 0 for gain in gains if gain] == [True] * 3


def test_pages_quote_what_the_record_says(report: CurveReport) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    assert [line for line in answer_lines(report) if line not in page] == []
    alphas = [f"{point.alpha:.3f}" for point in report.points]
    (row,) = re.findall(r"^\| accept@1 \|(.*)\|$", page, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")][: len(alphas)] == alphas


def test_the_record_is_small_and_names_no_machine() -> None:
    files = [path for path in RECORD.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for path in files:
        assert not re.search(rb"/(?:home|root|tmp|work|Users|mnt|srv)/", path.read_bytes()), path
