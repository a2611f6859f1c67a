"""Files of totals: one a draft, what of it is read, and how it is counted again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.run.reader import Run
from alphaprof.run.writer import RunWriter
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import DraftTotals, read_totals, write_totals
from tests.synthetic import Domain, Recipe, interrupted, write_run

RULES = ("strict", "lossless", "additive_0p1")
RECIPE = Recipe(
    domains={"code": Domain(documents=10), "story": Domain(documents=10, temperature=0.7, continuation="sampled")},
    rules=RULES,
    lookups=["lookup"],
    shard_documents=2,
)
ORDER = [("rule", "ascending"), ("document", "ascending")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Ten shards of two documents."""
    return write_run(tmp_path / "run", RECIPE)


def rows(table: pa.Table) -> list[dict]:
    return table.set_column(1, "rule", table["rule"].cast(pa.string())).sort_by(ORDER).to_pylist()


def groups(run: Run) -> list[tuple[str, int]]:
    """The rule and the number of rows of each row group of a draft's file, in order."""
    file = pq.ParquetFile(run.path / "totals" / "draft=small" / "part-00000.parquet")
    place = file.metadata.schema.names.index("rule")
    found = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    return [(group.column(place).statistics.min, group.num_rows) for group in found]


def stored(run: Run) -> dict[str, bytes]:
    """The files of totals of all drafts."""
    return {name: (run.path / name).read_bytes() for name in run.manifest.files if name.startswith("totals/")}


def finished(going: Run) -> Run:
    with RunWriter.opened(going.path, resume=True) as writer:
        writer.finish(write_totals)
    return Run.open(going.path)


@pytest.mark.parametrize(("enough", "blocks"), [(6, [6, 6, 6, 2]), (8, [8, 8, 4]), (20, [20]), (21, [20])])
def test_a_file_has_a_row_group_for_each_rule_of_enough_documents(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: int, blocks: list[int]
) -> None:
    """The rows are the same however they are cut, and pandas reads the folder."""
    request = TotalsRequest(RULES, run.gammas)
    monkeypatch.setattr("alphaprof.totals.files.ENOUGH", enough)
    monkeypatch.setattr("alphaprof.totals.files.POSITIONS", 1)  # else all shards are one table
    going = finished(interrupted(run, tmp_path / "going"))
    assert sorted(groups(going)) == sorted((rule, size) for size in blocks for rule in RULES)
    assert [size for _, size in groups(going)] == [size for size in blocks for _ in RULES]
    for rules in (RULES, RULES[1:2]):
        few = TotalsRequest(rules, run.gammas)
        assert rows(read_totals(going, "small", few)) == rows(read_totals(run, "small", few))
    assert [len(table) for table in DraftTotals(going, "small").tables(request, ["rounds_1"])] == [
        len(RULES) * size for size in blocks
    ]
    assert len(pd.read_parquet(going.path / "totals")) == 2 * 20 * len(RULES)


def test_totals_of_a_run_that_is_running_are_counted_from_its_log(run: Run, tmp_path: Path) -> None:
    """Of the shards that are recorded, and nothing is written."""
    request = TotalsRequest(RULES, run.gammas)
    expected = [row for row in rows(read_totals(run, "small", request)) if row["document"] < 8]
    going = interrupted(run, tmp_path / "going", 4)
    assert not going.has_totals("small")
    assert rows(read_totals(going, "small", request)) == expected
    assert not (going.path / "totals").exists()


def test_a_file_is_fetched_once_and_needs_no_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    request = TotalsRequest(RULES, run.gammas)
    expected = rows(read_totals(run, "small", request))
    shutil.rmtree(run.path / "positions")
    held = DraftTotals(run, "small")
    assert held.stored is not None
    monkeypatch.setattr(Run, "content", lambda *_: pytest.fail("reads a file"))
    for _ in range(2):
        assert rows(pa.concat_tables(held.tables(request, None))) == expected


@pytest.mark.parametrize("positions", [1, 100])
def test_however_many_shards_are_counted_at_once_the_files_are_equal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    monkeypatch.setattr("alphaprof.totals.files.POSITIONS", positions)
    assert stored(finished(interrupted(run, tmp_path / "going"))) == stored(run)


def test_a_report_on_stored_totals_compiles_nothing(tmp_path: Path) -> None:
    """It imports neither numba nor torch."""
    run = write_run(tmp_path / "run", Recipe())
    shutil.rmtree(run.path / "positions")  # with it, rounds are replayed to tell what rejections cost
    code = (
        "import sys; from alphaprof.cli.app import app\n"
        f"try: app(['report', {str(run.path)!r}])\n"
        "except SystemExit: pass\n"
        "sys.exit(', '.join(sorted({'torch', 'numba'} & set(sys.modules))) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "verdict" in result.stdout


def test_stored_totals_are_those_that_are_counted_from_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shards a row group holds, in which documents ascend."""
    monkeypatch.setattr("alphaprof.totals.files.ENOUGH", 6)
    monkeypatch.setattr("alphaprof.totals.files.POSITIONS", 1)  # else all shards are one table
    run = write_run(tmp_path / "run", Recipe(rules=("strict", "additive_0p1"), lookups=("ngram",), shard_documents=3))
    file = run.totals("small")
    groups = [file.read_row_group(index)["document"].to_pylist() for index in range(file.num_row_groups)]
    assert len(groups) > 2
    assert all(numbers == sorted(numbers) for numbers in groups)

    def ordered(some: Run) -> list[dict]:
        rows = read_totals(some, "small", TotalsRequest(run.rules, run.gammas)).to_pylist()
        return sorted(rows, key=lambda row: (row["rule"], row["document"]))

    assert ordered(run) == ordered(interrupted(run, tmp_path / "going"))
