"""Files of totals: which shards each covers, how they are joined, and what of them is read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from alphaprof.errors import RunUnreadable
from alphaprof.log import files
from alphaprof.log.files import shards_of
from alphaprof.log.manifest import Shard
from alphaprof.log.writer import RunWriter
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import DraftTotals, join_totals, read_totals, shard_totals
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
def run(tmp_path: Path) -> RunWriter:
    """Ten shards of two documents, in one file."""
    return write_run(tmp_path / "run", RECIPE)


def covered(run: RunWriter) -> list[tuple[int, int] | None]:
    """The shards that the files in the folder cover, whether a manifest names them or not."""
    return sorted(shards_of(path.name) or (-1, -1) for path in (run.path / "totals" / "draft=small").iterdir())


def shards(count: int, documents: int) -> list[Shard]:
    return [Shard(index, documents, 10, "0" * 64) for index in range(count)]


def rows(table: pa.Table) -> list[dict]:
    return table.set_column(1, "rule", table["rule"].cast(pa.string())).sort_by(ORDER).to_pylist()


def test_totals_are_joined_in_files_of_enough_documents(
    run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same rows however they are cut, and pandas reads the folder."""
    request = TotalsRequest(RULES, run.gammas)
    going = interrupted(run, tmp_path / "going")
    cuts = {6: [(0, 2), (3, 5), (6, 8), (9, 9)], 8: [(0, 3), (4, 7), (8, 9)]}  # the latter of another version
    for enough, expected in cuts.items():
        monkeypatch.setattr(files, "ENOUGH", enough)
        going.finish(join_totals)
        assert covered(going) == expected
        assert rows(read_totals(going, "small", request)) == rows(read_totals(run, "small", request))
        assert len(pd.read_parquet(going.path / "totals")) == 2 * 20 * len(RULES)


def test_files_that_are_joined_while_a_report_reads_are_looked_up_again(run: RunWriter, tmp_path: Path) -> None:
    """By a process that finishes the run: those of each shard, that the report knew of, are gone."""
    request = TotalsRequest(RULES, run.gammas)
    expected = rows(read_totals(run, "small", request))
    going = with_totals_of_shards(run, tmp_path / "going")
    held = DraftTotals(going, "small")
    assert len(held.parts) == 10
    RunWriter.open(going.path).finish(join_totals)
    assert covered(going) == [(0, 9)]
    shutil.rmtree(going.path / "positions")
    assert rows(pa.concat_tables(held.read(request, None, list))) == expected
    (part,) = RunWriter.open(going.path).totals_parts("small")
    (going.path / part.name).write_bytes(b"")
    with pytest.raises(RunUnreadable):
        DraftTotals(RunWriter.open(going.path), "small").read(request, None, list)


def with_totals_of_shards(run: RunWriter, folder: Path) -> RunWriter:
    """The run while it goes on, all of its shards committed by one that adds up each shard's totals."""
    going = interrupted(run, folder, 0)
    for shard in run.shards:
        texts = run.continuations(shard.index)
        logs = {draft: run.positions(draft, shard.index) for draft in run.manifest.drafts}
        totals = {draft: shard_totals(going, draft, log, texts) for draft, log in logs.items()}
        assert going.commit(shard, logs, texts, totals)
    return RunWriter.open(folder)


def test_totals_of_shards_are_joined_without_a_look_at_the_log(
    run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the file that is worked out from the log, to the last bit."""
    going = with_totals_of_shards(run, tmp_path / "going")
    assert [(part.first, part.last) for part in going.totals_parts("small")] == [(index, index) for index in range(10)]
    monkeypatch.setattr(RunWriter, "positions", lambda *_: pytest.fail("reads the log"))
    going.finish(join_totals)
    assert joined(going) == joined(run)


def joined(run: RunWriter) -> dict[str, bytes]:
    """The files of totals of all drafts."""
    return {name: (run.path / name).read_bytes() for name in run.manifest.files if name.startswith("totals/")}


@pytest.mark.parametrize("positions", [1, 100])
def test_however_many_shards_are_counted_at_once_the_files_are_equal(
    run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    monkeypatch.setattr("alphaprof.totals.files.POSITIONS", positions)
    going = interrupted(run, tmp_path / "going")
    going.finish(join_totals)
    assert joined(going) == joined(run)


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
