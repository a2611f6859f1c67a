"""The run directory: nothing half-written is ever seen, and what cannot be written or read says so."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.errors import DiskFull, RunUnreadable
from alphaprof.log import store
from alphaprof.log.schema import CONTINUATION_COLUMNS, Column, LogRules
from alphaprof.log.store import Run, replacing, require_writable, write_table
from tests.synthetic import Domain, Recipe, contents, interrupted, write_run

COLUMNS = (Column("share", pa.float32(), "A share.", low=0, high=1),)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with replacing(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
        assert temporary.name.startswith(".")
    with pytest.raises(FileNotFoundError), replacing(path) as temporary:
        temporary.with_name("other").rename(path)  # fails before anything was written
    assert path.read_text() == "first"
    assert [item.name for item in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_is_an_error_that_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, pa.table({"share": pa.array([0.5], pa.float32())}), COLUMNS)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(store.pq, "write_table", full)
    with pytest.raises(DiskFull, match=r"cannot write .*table\.parquet"):
        write_table(path, pa.table({"share": pa.array([0.25], pa.float32())}), COLUMNS)
    assert path.read_bytes() == before


def test_a_table_that_contradicts_its_declaration_is_a_bug_and_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"share holds 1\.5, above 1"):
        write_table(tmp_path / "t.parquet", pa.table({"share": pa.array([1.5], pa.float32())}), COLUMNS)
    assert list(tmp_path.iterdir()) == []


def test_a_place_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="is no directory"):
        require_writable(tmp_path / "file" / "run")
    require_writable(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no run"),
        ("{", "cannot be read"),
        ("[]", "is not version 1"),
        ('{"format": "alphaprof-run", "version": 2}', "is not version 1"),
        ('{"format": "alphaprof-run", "version": 1}', "is damaged"),
    ],
)
def test_a_directory_that_is_no_run_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RunUnreadable, match=message):
        Run.open(tmp_path)


def test_a_shard_that_a_killed_process_had_not_finished_is_removed(tmp_path: Path) -> None:
    """Of a run that goes on: other readers of its folders would see documents that the manifest does not name."""
    recipe = Recipe(drafts={"a": 0.0, "b": 0.1}, shard_documents=2)
    run = write_run(tmp_path / "run", recipe)
    assert len(run.shards) > 2
    before = contents(run)
    run.remove_leftovers()
    assert contents(run) == before
    going = interrupted(run, tmp_path / "going", 2)
    (going.path / "positions" / "draft=b" / "part-00002.parquet").unlink()
    (going.path / "continuations" / "part-00002.parquet").unlink()
    (going.path / "positions" / ".part-00003.parquet.1.tmp").touch()
    going.remove_leftovers()
    left = ["part-00000.parquet", "part-00001.parquet"]
    for folder in ("positions/draft=a", "positions/draft=b", "continuations"):
        assert sorted(path.name for path in (going.path / folder).iterdir()) == left
    assert not list(going.path.rglob(".*"))


@pytest.mark.parametrize("log", [True, False])
def test_damaged_totals_are_worked_out_again_where_there_is_a_log(run: Run, log: bool) -> None:
    (totals,) = run.totals_parts("small")
    totals.path.write_bytes(b"")
    if not log:
        shutil.rmtree(run.path / "positions")
    for read in (run.totals, run.totals_names):
        with pytest.raises(RunUnreadable) as caught:
            read(totals)
        assert ("delete it" in caught.value.hint) == log


STORY = Domain(documents=2, temperature=0.7, continuation="sampled")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=3), "story": STORY}))


def test_what_was_not_computed_or_measured_is_none(tmp_path: Path, run: Run) -> None:
    assert len(run.totals_parts("small")) == 1
    run.totals_parts("small")[0].path.unlink()
    assert run.totals_parts("small") == []
    assert write_run(tmp_path / "untimed", Recipe(latency=False)).latency() is None


def test_documents_are_those_of_complete_shards_with_their_settings(run: Run) -> None:
    """The rows of documents.parquet; greedy text has no sampling settings."""
    table = run.documents()
    assert table.to_pylist() == pq.ParquetFile(run.path / "documents.parquet").read().to_pylist()
    assert table["temperature"].to_pylist() == [None, 0.7, None, 0.7, None]
    run.write_manifest(dataclasses.replace(run.manifest, status="running", shards=run.shards[:1]))
    assert len(Run.open(run.path).documents()) == 4


FILES = ["positions/draft=small/part-00001.parquet", "continuations/part-00001.parquet"]
MAY_BE_MISSING = ["totals/draft=small/part-00000-00001.parquet", "documents.parquet", "latency.parquet"]
DAMAGED = [(name, damage) for name in FILES + MAY_BE_MISSING for damage in ("empty", "half")]


@pytest.mark.parametrize(("name", "damage"), [*DAMAGED, *((name, "missing") for name in FILES)])
def test_a_damaged_file_is_named(run: Run, name: str, damage: str) -> None:
    """A missing one too, where its shard is complete."""
    path, (totals,) = run.path / name, run.totals_parts("small")
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[: len(whole) // 2] if damage == "half" else b"")
    with pytest.raises(RunUnreadable, match=rf"{path.name} cannot be read"):
        (run.positions("small", 1), run.continuations(1), run.documents(), run.latency(), run.totals(totals))


def test_columns_that_came_later_are_null_where_they_may_be(run: Run) -> None:
    """And in their place: a run of an earlier version has the documents that it had."""
    expected = run.documents().to_pylist()
    for path in (run.part("continuations", 0), run.path / "documents.parquet"):
        pq.write_table(pq.ParquetFile(path).read().drop_columns(["cluster", "top_p", "seed"]), path)
    nothing = {"cluster": None, "top_p": None, "seed": None}
    assert run.documents().to_pylist() == [row | nothing for row in expected]
    going = Run(run.path, dataclasses.replace(run.manifest, status="running"))
    assert going.documents().to_pylist() == [row | nothing for row in expected[:4]] + expected[4:]
    assert run.continuations(0).column_names == [column.name for column in CONTINUATION_COLUMNS]


def test_a_file_without_a_column_that_everything_needs_is_refused(run: Run) -> None:
    path = run.path / "documents.parquet"
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["on_policy"]), path)
    with pytest.raises(RunUnreadable, match="on_policy"):
        run.documents()


RICH = Recipe(domains={"story": STORY}, rules=("strict", "multi_draft_2"), certificates=True)


def without(run: Run, columns: list[str]) -> None:
    """Take columns out of the first shard of the position log."""
    path = run.part("positions", 0, "small")
    pq.write_table(pq.ParquetFile(path).read().drop_columns(columns), path)


def test_a_log_of_an_earlier_version_is_read_as_what_it_holds(tmp_path: Path) -> None:
    """It has the columns of its own manifest, and none that came later."""
    run = write_run(tmp_path / "rich", RICH)
    assert [column.name for column in run.log_rules.columns] == run.positions("small", 0).column_names
    extra = ["emitted_multi_draft_2", "target_top_10_prob", "thresholds_exact", "threshold_strict"]
    assert run.positions("small", 0).column_names[-4:] == extra
    without(run, extra)
    run.write_manifest(dataclasses.replace(run.manifest, emitted=(), certified=()))
    earlier = Run.open(run.path)
    assert earlier.log_rules == LogRules(("strict", "multi_draft_2"))
    assert earlier.positions("small", 0).column_names[-2:] == ["accept_strict", "accept_multi_draft_2"]


def test_columns_on_request_are_read_by_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "rich", RICH)
    found = run.positions("small", 0, ["threshold_strict", "emitted_multi_draft_2", "token"])
    assert sorted(found.column_names) == ["emitted_multi_draft_2", "threshold_strict", "token"]
    assert max(column.null_count for column in found.columns) == 0
    assert set(run.positions("small", 0, ["threshold_top_m_3", "token"]).column_names) == {"token"}


def test_thresholds_that_the_manifest_names_and_a_file_lacks_are_refused(tmp_path: Path) -> None:
    """What may be null is null instead."""
    run = write_run(tmp_path / "rich", RICH)
    without(run, ["emitted_multi_draft_2"])
    assert run.positions("small", 0)["emitted_multi_draft_2"].null_count == run.shards[0].positions
    without(run, ["threshold_strict"])
    with pytest.raises(RunUnreadable, match=r"lacks the columns threshold_strict$"):
        run.positions("small", 0)
