"""Files of totals: which shards each covers, how they are joined, and what of them is read."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.errors import RunUnreadable
from alphaprof.log import files
from alphaprof.log.files import TotalsPart, part_name, parts_in, ranges, readable
from alphaprof.log.manifest import Shard
from alphaprof.log.store import Run
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import DraftTotals, read_totals, write_totals
from tests.synthetic import Domain, Recipe, interrupted, write_run

RULES = ("strict", "lossless", "additive_0p1")
RECIPE = Recipe(
    domains={"code": Domain(documents=10), "story": Domain(documents=10, temperature=0.7, continuation="sampled")},
    rules=RULES,
    shard_documents=2,
)
ORDER = [("rule", "ascending"), ("document", "ascending")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Ten shards of two documents, in one file."""
    return write_run(tmp_path / "run", RECIPE)


def names(run: Run) -> list[str]:
    return sorted(path.name for path in (run.path / "totals" / "draft=small").iterdir())


def shards(count: int, documents: int) -> list[Shard]:
    return [Shard(index, documents, 10, "0" * 64) for index in range(count)]


def rows(table: pa.Table) -> list[dict]:
    return table.set_column(1, "rule", table["rule"].cast(pa.string())).sort_by(ORDER).to_pylist()


def test_ranges_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full files whether or not the run goes on; the rest joined once it is complete."""
    monkeypatch.setattr(files, "ENOUGH", 6)
    assert list(ranges(shards(8, 2), complete=True)) == [(0, 2), (3, 5), (6, 7)]
    assert list(ranges(shards(8, 2), complete=False)) == [(0, 2), (3, 5), (6, 6), (7, 7)]
    assert list(ranges(shards(6, 2), complete=True)) == [(0, 2), (3, 5)]
    assert list(ranges([], complete=True)) == []


def test_a_shard_is_read_once() -> None:
    """A file that another one covers, or that reaches beyond complete shards, is left alone."""
    covering = [(0, 2), (0, 0), (1, 1), (3, 9), (3, 3), (4, 4)]
    found = [TotalsPart(Path(part_name(*pair)), *pair) for pair in covering]
    assert [(part.first, part.last) for part in readable(found, 5)] == [(0, 2), (3, 3), (4, 4)]


def test_names_say_which_shards_they_cover(tmp_path: Path) -> None:
    for name in ("part-00003.parquet", "part-00000-00002.parquet", ".part-00004.parquet.1.tmp", "part-123456.parquet"):
        (tmp_path / name).touch()
    assert [(part.first, part.last) for part in parts_in(tmp_path)] == [(0, 2), (3, 3), (123456, 123456)]
    assert parts_in(tmp_path / "nothing") == []


def test_a_run_that_goes_on_has_its_totals_joined_in_the_end(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of a run that was computed at once, row by row, and pandas reads the folder."""
    monkeypatch.setattr(files, "ENOUGH", 6)
    going = interrupted(run, tmp_path / "going", 4)
    write_totals(going)
    assert names(going) == ["part-00000-00002.parquet", "part-00003.parquet"]
    going.write_manifest(dataclasses.replace(going.manifest, shards=run.shards[:6]))
    write_totals(going)
    assert names(going) == ["part-00000-00002.parquet", "part-00003-00005.parquet"]
    going.write_manifest(dataclasses.replace(going.manifest, shards=run.shards))
    write_totals(going)
    assert names(going)[2:] == ["part-00006-00008.parquet", "part-00009.parquet"]
    going.write_manifest(dataclasses.replace(going.manifest, status="complete"))
    monkeypatch.setattr(files, "ENOUGH", 8)  # of another version: what overlaps is replaced
    write_totals(going)
    assert names(going) == ["part-00000-00003.parquet", "part-00004-00007.parquet", "part-00008-00009.parquet"]
    request = TotalsRequest(RULES, run.gammas)
    assert rows(read_totals(going, "small", request)) == rows(read_totals(run, "small", request))
    assert len(pd.read_parquet(going.path / "totals")) == 20 * len(RULES)


def test_what_is_left_of_a_joined_file_is_not_read_twice(run: Run) -> None:
    request = TotalsRequest(RULES, run.gammas)
    expected = read_totals(run, "small", request)
    (part,) = run.totals_parts("small")
    shutil.copy(part.path, part.path.with_name("part-00003.parquet"))
    assert read_totals(run, "small", request).equals(expected)


def test_what_a_joined_file_covers_is_gone_after_the_next_look(run: Run) -> None:
    """Killed between the rename and the removals: other readers of the folder would see documents twice."""
    (part,) = run.totals_parts("small")
    before = part.path.read_bytes()
    shutil.copy(part.path, part.path.with_name("part-00003.parquet"))
    write_totals(run)
    assert (names(run), part.path.read_bytes()) == ([part.path.name], before)


def test_files_that_are_joined_while_a_report_reads_are_looked_up_again(run: Run, tmp_path: Path) -> None:
    """By a process that goes on with the run: those that the report knew of are gone."""
    request = TotalsRequest(RULES, run.gammas)
    expected = rows(read_totals(run, "small", request))
    going = interrupted(run, tmp_path / "going")
    write_totals(going)
    held = DraftTotals(going, "small")
    assert len(held.parts) == 10
    write_totals(Run(going.path, dataclasses.replace(going.manifest, status="complete")))
    assert names(going) == ["part-00000-00009.parquet"]
    shutil.rmtree(going.path / "positions")
    assert rows(pa.concat_tables(held.read(request, None, list))) == expected
    (going.path / "totals" / "draft=small" / names(going)[0]).write_bytes(b"")
    with pytest.raises(RunUnreadable):
        DraftTotals(going, "small").read(request, None, list)


def test_totals_that_are_damaged_are_worked_out_and_written_anew_from_the_log(run: Run) -> None:
    (part,) = run.totals_parts("small")
    before = part.read()
    part.path.write_bytes(part.path.read_bytes()[:-1])
    assert rows(read_totals(run, "small", TotalsRequest(RULES, run.gammas))) == rows(before)
    assert run.damaged == {"totals/draft=small/part-00000-00009.parquet"}
    again = Run.open(run.path)
    write_totals(again)
    (part,) = again.totals_parts("small")
    assert (part.read().equals(before), again.damaged) == (True, set())
    Run.open(run.path).verify()


def test_a_file_without_rows_is_written_and_read(run: Run, tmp_path: Path) -> None:
    (part,) = run.totals_parts("small")
    empty = part.read().slice(0, 0)
    files.write_part(tmp_path / part_name(0, 0), empty)
    assert TotalsPart(tmp_path / part_name(0, 0), 0, 0).read(["strict"]).equals(empty)


def test_rules_and_columns_that_nobody_asked_for_are_not_read(run: Run) -> None:
    """A row group a rule; each rule's documents ascend, stored or not."""
    (part,) = run.totals_parts("small")
    file = pq.ParquetFile(part.path)
    assert [set(file.read_row_group(group)["rule"].to_pylist()) for group in range(3)] == [{rule} for rule in RULES]
    found = read_totals(run, "small", TotalsRequest(["lossless", "top_m_3"], run.gammas), ["document", "rule", "rounds_2"])
    assert found.column_names == ["document", "rule", "rounds_2"]
    whole = {row["document"]: row for row in read_totals(run, "small", TotalsRequest(["lossless"], run.gammas)).to_pylist()}
    for rule in ("lossless", "top_m_3"):
        mine = [row for row in found.to_pylist() if row["rule"] == rule]
        assert [row["document"] for row in mine] == list(range(20))
        expected = [whole[row["document"]]["rounds_2"] if rule == "lossless" else None for row in mine]
        assert [row["rounds_2"] for row in mine] == expected


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
