"""The one writer of a run: what it records and when, what a resume does again, and what it refuses."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.errors import DiskFull, RunDamaged, RunExists, RunMismatch
from alphaprof.run.journal import Journal
from alphaprof.run.manifest import File
from alphaprof.run.reader import Run
from alphaprof.run.schema import LATENCY_COLUMNS, PROMPT_COLUMNS, arrow_schema
from alphaprof.run.storage import LocalStorage
from alphaprof.run.writer import RunWriter
from alphaprof.totals.files import write_totals
from tests.loops import each
from tests.synthetic import Domain, Recipe, contents, flipped, interrupted, manifest, write_anew

RECIPE = Recipe(domains={"code": Domain(documents=3, shortest=4, longest=8)}, shard_documents=1)
FOLDERS = {"prompts": "prompts", "texts": "continuations", "rows": "positions/draft=small"}
put = LocalStorage.put


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A complete run of three shards, whose records lie in segments of two."""
    monkeypatch.setattr("alphaprof.run.journal.SEGMENT", 2)
    write_anew(tmp_path / "run", RECIPE)
    return Run.open(tmp_path / "run")


def measure(place: Path, source: Run) -> list[int]:
    """Write a run as a profile does, whatever of it is there already, and return the shards that were scored."""
    with RunWriter.opened(place, resume=True) as run:
        if not run.begun:
            for shard in source.shards:
                run.stage(source.prompts(shard.index), shard.digest)
            run.begin(manifest(RECIPE))
        run.forget_damaged()
        for index in run.lacking("texts"):
            run.write_texts(source.shards[index], source.continuations(index))
        run.write_table("latency.parquet", source.latency(), LATENCY_COLUMNS)
        run.update()
        scored = run.lacking("rows")
        for index in scored:
            run.write_rows(source.shards[index], {"small": source.positions("small", index)})
        run.finish(write_totals)
    return scored


def tables_of(place: Path) -> dict[str, str]:
    """What a run holds, rows by file, and nothing else does."""
    Run.open(place).verify()
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert not {name for name in names if name.startswith(".") or name.endswith(".tmp")}
    return {name: repr(pq.read_table(place / name).to_pylist()) if name.endswith("parquet") else "" for name in names}


def test_a_record_is_written_after_its_files_and_names_them(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    written = list[str]()
    monkeypatch.setattr(LocalStorage, "put", lambda self, name, content: written.append(name) or put(self, name, content))
    measure(tmp_path / "again", run)
    again = Run.open(tmp_path / "again")
    for step, folder in FOLDERS.items():
        expected = [
            name for at in range(3) for name in (f"{folder}/part-{at:05d}.parquet", f"records/{step}-{at // 2:04d}.json")
        ]
        assert [name for name in written if name.startswith((folder, f"records/{step}"))] == expected
        for record in Journal.of(again.storage)[step].values():
            assert record.files == {name: File.of((again.path / name).read_bytes()) for name in record.files}
    ends = ["manifest.json", "latency.parquet", "manifest.json", "documents.parquet", "manifest.json"]
    assert [name for name in written if "/" not in name] == ends
    assert again.manifest.files.keys() == {name for name in written if name.endswith(".parquet")}


def test_a_record_costs_the_same_late_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    monkeypatch.setattr(LocalStorage, "put", lambda *given: sizes.append(len(memoryview(given[-1]))))
    with RunWriter.opened(tmp_path / "run") as run:
        for _ in range(601):
            run.stage(arrow_schema(PROMPT_COLUMNS).empty_table(), "0" * 32)
    records = sizes[1::2]
    assert (len(records), max(records)) == (601, max(records[255::256]))
    assert records[600] == pytest.approx(records[600 - 256], rel=0.01)
    assert records[600] - records[300] < max(records)


def test_a_resume_does_what_is_not_recorded(run: Run, tmp_path: Path) -> None:
    going = interrupted(run, tmp_path / "going", 1)
    assert (len(going.shards), measure(going.path, run), measure(going.path, run)) == (1, [1, 2], [])
    assert tables_of(going.path) == tables_of(run.path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(flipped(path, 8 * 40)),
    "missing": lambda path: path.unlink(),
}
NAMES = [name for step, folder in FOLDERS.items() for name in (f"{folder}/part-00001.parquet", f"records/{step}-0000.json")]


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_damaged_is_done_again(run: Run, tmp_path: Path, name: str, damage: str, complete: bool) -> None:
    """Of prompts it is an error: the data that they were read from may have changed."""
    place = shutil.copytree(run.path, tmp_path / "whole") if complete else interrupted(run, tmp_path / "going").path
    DAMAGE[damage](place / name)
    if "prompts" in name:
        with pytest.raises(RunDamaged, match="prompts") as caught:
            measure(place, run)
        assert caught.value.hint == "profile again into a new directory"
    else:
        assert measure(place, run) == ([0, 1] if name.startswith("records") else [1])
        assert tables_of(place) == tables_of(run.path)


def test_rows_of_texts_that_are_lost_are_forgotten_for_good(run: Run) -> None:
    """Also if the process ends between the new texts and their rows, which are of other texts."""
    (run.path / "continuations" / "part-00001.parquet").unlink()
    for found, texts in (([1], [1]), ([], [])):
        with RunWriter.opened(run.path, resume=True) as writer:
            assert (writer.forget_damaged(), writer.lacking("texts"), writer.lacking("rows")) == (found, texts, [1])
            if texts:
                writer.write_texts(run.shards[1], run.continuations(2))
    assert (Run.open(run.path).manifest.status, len(Run.open(run.path).shards)) == ("running", 1)


def ended_at(number: int, place: Path, source: Run, kill: bool) -> int | None:
    """Return how another process ends that writes a run: its n-th write fails, or kills it with half of the file there."""
    calls = iter(range(1, 1000))

    def failing(self: LocalStorage, name: str, content: Any) -> None:
        if next(calls) != number:
            put(self, name, content)
        elif kill:
            (self.path / f".{name.rpartition('/')[2]}.77.tmp").write_bytes(bytes(memoryview(content))[:20])
            os._exit(9)
        else:
            raise DiskFull(f"cannot write {name}", "free space")

    def write() -> None:
        LocalStorage.put = failing  # type: ignore[method-assign]  # of the fork
        measure(place, source)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("kill", [True, False])
def test_a_run_goes_on_wherever_a_write_fails_or_its_process_is_killed(run: Run, tmp_path: Path, kill: bool) -> None:
    """A killed writer's lock is free at once; without a manifest the run is begun again."""
    expected, writes = tables_of(run.path), 3 * 3 * 2 + 6  # a file and a record of each shard and step, and those at the top
    for number in range(1, writes + 1):
        place = tmp_path / str(number)
        assert ended_at(number, place, run, kill) == (9 if kill else 1)
        measure(place, run)
        assert tables_of(place) == expected
    assert ended_at(writes + 1, tmp_path / "whole", run, kill) == 0


@each(("name", "there"), [("new/run", False), ("mine", True)])
def test_what_ends_before_there_is_a_run_leaves_nothing(tmp_path: Path, name: str, there: bool) -> None:
    (tmp_path / "mine").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="contradicts the schema"), RunWriter.opened(tmp_path / name) as run:
        run.stage(pa.table({"odd": [1]}), "0")
    assert (list(tmp_path.rglob("*.*")), (tmp_path / name).exists()) == ([], there)


def test_a_second_writer_is_refused_by_name(run: Run) -> None:
    """In this process and in another one; readers read on."""
    before = contents(run)
    with RunWriter.opened(run.path, resume=True):
        for resume in (True, False):
            words = f"is being written by process {os.getpid()} on "
            with pytest.raises(RunExists, match=words), RunWriter.opened(run.path, resume):
                pass
        assert ended_at(1, run.path, run, kill=True) == 1
        Run.open(run.path).verify()
    assert contents(run) == before


def test_a_run_that_lacks_shards_or_has_those_of_other_documents_is_not_finished(run: Run, tmp_path: Path) -> None:
    going, other = interrupted(run, tmp_path / "going", 1), dataclasses.replace(run.shards[2], digest="0" * 32)
    with RunWriter.opened(going.path, resume=True) as writer:
        for shards, lost in (((), r"2 of 3 shards \(1, 2\)"), ((run.shards[1], other), r"1 of 3 shards \(2\)")):
            for shard in shards:
                writer.write_rows(shard, {"small": run.positions("small", shard.index)})
            with pytest.raises(RunMismatch, match=f"lacks {lost}") as caught:
                writer.finish(write_totals)
            assert caught.value.hint == "measure them with alphaprof profile --resume"
    assert Run.open(going.path).manifest.status == "running"
