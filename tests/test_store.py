"""The run directory: nothing half-written is ever seen, and what cannot be written or read says so."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pytest

from alphaprof.errors import DiskFull, RunUnreadable
from alphaprof.log import store
from alphaprof.log.schema import Column
from alphaprof.log.store import Run, replacing, require_writable, write_table

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
