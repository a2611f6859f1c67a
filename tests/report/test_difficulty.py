"""Runs of accepted tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from alphaprof.stats.estimate import autocorrelation
from tests.reporting import log_of, only, reported, rows_of
from tests.synthetic import Domain, Recipe, write_run


def test_the_autocorrelation_of_a_sequence_by_hand() -> None:
    # 1 1 0 0 1: pairs 11 10 00 01, so both 1 of 4, first 2 of 4, second 2 of 4: (1/4 - 1/4) / (1/4) = 0
    found = autocorrelation(np.array([0]), tuple(np.array([[4.0], [2.0], [2.0], [1.0]])), 0.95)
    assert (found.value, found.low, found.high) == (0.0, -1.0, 1.0)


def test_a_document_without_neighbours_changes_no_autocorrelation() -> None:
    sums = np.array([[9.0, 8.0, 7.0, 0.0], [5.0, 3.0, 4.0, 0.0], [5.0, 4.0, 3.0, 0.0], [4.0, 2.0, 2.0, 0.0]])
    found = autocorrelation(np.arange(4), tuple(sums), 0.95)
    assert found == autocorrelation(np.arange(3), tuple(sums[:, :3]), 0.95)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(domains={"code": Domain(bursts=0.6, documents=20), "chat": Domain()})])
def test_burstiness_is_the_correlation_of_neighbours_in_the_log(tmp_path: Path, recipe: Recipe) -> None:
    run = write_run(tmp_path / "run", recipe)
    rows = rows_of(log_of(run), "code", "small")
    kept = (rows["draft_top"] == rows["token"]).astype(float)
    following = kept.groupby(rows["document"]).shift(-1)
    known = following.notna()
    expected = np.corrcoef(kept[known], following[known])[0, 1]
    found = only(reported(tmp_path / "again", recipe), "code").burstiness
    assert found.value == pytest.approx(expected, abs=1e-9)
    assert found.low < found.value < found.high
