"""The end of a run that any number of processes wrote: whoever finishes it, and however often, it is the same run."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from alphaprof.errors import RunMismatch, RunUnreadable
from alphaprof.log.manifest import Worker
from alphaprof.log.storage import LocalStorage
from alphaprof.log.writer import RunWriter
from alphaprof.report.build import build_report
from alphaprof.totals.files import join_totals, shard_totals
from tests.synthetic import Domain, Recipe, contents, interrupted, write_run

RECIPE = Recipe(domains={"code": Domain(documents=12, shortest=4, longest=8)}, shard_documents=2)  # six shards
MINE = ("notes.txt", "positions/thesis.parquet", "totals/draft=small/part-00000.parquet.bak")


@pytest.fixture
def run(tmp_path: Path) -> RunWriter:
    return write_run(tmp_path / "run", RECIPE)


@pytest.fixture
def going(run: RunWriter, tmp_path: Path) -> RunWriter:
    """The same with all shards committed, and not finished."""
    return interrupted(run, tmp_path / "going")


def commit_again(going: RunWriter, source: RunWriter, index: int) -> bool:
    """Commit a shard with what another run holds of it, totals included."""
    positions, texts = source.positions("small", index), source.continuations(index)
    totals = {"small": shard_totals(going, "small", positions, texts)}
    return going.commit(source.shards[index], {"small": positions}, texts, totals)


def data_of(run: RunWriter) -> dict[str, bytes]:
    """What readers of its folders see."""
    return {name: content for name, content in contents(run).items() if name.endswith(".parquet")}


def test_a_run_that_is_finished_twice_or_by_two_at_once_is_the_same(run: RunWriter, going: RunWriter) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda run: run.finish(join_totals), [RunWriter.open(going.path) for _ in range(4)]))
    assert RunWriter.open(going.path).manifest == run.manifest
    before = contents(going)
    assert data_of(going) == data_of(run)
    RunWriter.open(going.path).finish(join_totals)
    going.finish(join_totals)
    assert contents(going) == before


@pytest.mark.parametrize(("lost", "words"), [((3,), r"1 of 6 shards \(3\)"), ((0, 5), r"2 of 6 shards \(0, 5\)")])
def test_a_run_with_gaps_is_not_finished(going: RunWriter, lost: tuple[int, ...], words: str) -> None:
    for index in lost:
        going.withdraw(index)
    before = contents(going)
    with pytest.raises(RunMismatch, match=f"lacks {words}") as caught:
        going.finish(join_totals)
    assert "measure them with alphaprof profile --resume" in caught.value.hint
    assert contents(going) == before


def test_what_no_commit_names_is_removed_in_the_end_and_what_is_not_ours_stays(run: RunWriter, going: RunWriter) -> None:
    """Files of killed processes; until then `positions()` is the door to the log."""
    for folder in ("positions/draft=small", "continuations", "prompts"):
        (going.path / folder).mkdir(exist_ok=True)
        (going.path / folder / "part-00001.0badcafe.parquet").write_bytes(b"half")
    for name in MINE:
        (going.path / name).parent.mkdir(parents=True, exist_ok=True)
        (going.path / name).write_text("mine")
    going.finish(join_totals)
    left = set(contents(going)) - set(going.manifest.files)
    assert {name for name in left if not name.startswith(("commits/", "workers/"))} == {"manifest.json", *MINE}
    (going.path / "positions" / "thesis.parquet").unlink()
    assert len(pd.read_parquet(going.path / "positions")) == run.manifest.positions


def test_a_shard_that_two_processes_measure_is_committed_by_one(run: RunWriter, tmp_path: Path) -> None:
    """The other one takes back what it wrote, and nothing else."""
    first = interrupted(run, tmp_path / "going", 1)
    second = RunWriter.open(first.path)
    assert commit_again(first, run, 1)
    before = contents(first)
    assert not commit_again(second, run, 1)
    assert contents(first) == before
    assert {commit.worker for commit in second.commits().values()} >= {first.worker}


def test_the_last_shard_stays_where_another_process_finishes_the_run_at_once(
    run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the commit and the next step of the process that measured it."""
    last, other = interrupted(run, tmp_path / "going", 5), RunWriter(tmp_path / "going", run.manifest)
    put_new = last.storage.put_new

    def and_finished(_: LocalStorage, name: str, content: Any) -> bool:
        try:
            return put_new(name, content)
        finally:
            other.manifest = RunWriter.open(other.storage).manifest
            other.finish(join_totals)

    monkeypatch.setattr(LocalStorage, "put_new", and_finished)
    assert commit_again(last, run, 5)
    assert len(RunWriter.open(last.path).shards) == 6
    RunWriter.open(last.path).verify()


def measured_by(run: RunWriter, device: str, **environment: Any) -> Worker:
    """Register a process that computes otherwise as the one that measured the run."""
    worker = Worker.here(device, run.manifest.environment | environment)
    run.worker = next(iter(run.commits().values())).worker
    run.register(worker)
    return worker


ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "threads": ("cpu", {"torch_threads": 2}, "2 threads, not 1"),
    "device": ("NVIDIA H200", {"torch_threads": 2}, "device NVIDIA H200, not cpu"),
    "version": ("cpu", {"packages": {"transformers": "5.18.0"}}, "transformers 5.18.0, not 5.17.0"),
}


@pytest.mark.parametrize("case", ODD)
def test_processes_that_compute_otherwise_are_refused_or_noted(run: RunWriter, going: RunWriter, case: str) -> None:
    """As the profile says; every report of the run has the note then."""
    device, environment, words = ODD[case]
    measured_by(going, device, **environment)
    with pytest.raises(RunMismatch, match=f"a different device or version .*: {words}$") as caught:
        going.finish(join_totals)
    assert "--set execution.mixed_devices=true" in caught.value.hint
    assert RunWriter.open(going.path).manifest.status == "running"
    mixed = going.manifest.config | {"execution": {"mixed_devices": True}}
    going.write_manifest(dataclasses.replace(going.manifest, config=mixed))
    going.finish(join_totals)
    RunWriter.open(going.path).finish(join_totals)
    (warning,) = RunWriter.open(going.path).manifest.warnings
    assert (warning["code"], words in warning["message"]) == ("mixed_devices", True)
    assert words in next(note.message for note in build_report(going).notes if note.code == "mixed_devices")


def test_a_shard_of_other_documents_than_were_staged_is_refused_and_measured_again(run: RunWriter, going: RunWriter) -> None:
    """As many documents, but others; and a number of them that is another one."""
    shards = run.shards
    for staged, prompts, odd in (
        ((2, 2, 3, 2, 2, 2), (), [2]),
        ((2,) * 6, [shard.digest if shard.index != 4 else "0" * 32 for shard in shards], [4]),
    ):
        going.write_manifest(dataclasses.replace(going.manifest, staged=staged, prompts=tuple(prompts)))
        opened = RunWriter.open(going.path)
        with pytest.raises(RunMismatch, match=rf"1 shards of .* \({odd[0]}\) do not match the staged documents"):
            opened.finish(join_totals)
        assert RunWriter.open(going.path).damaged_shards() == odd
    going.write_manifest(dataclasses.replace(going.manifest, prompts=tuple(shard.digest for shard in shards)))
    RunWriter.open(going.path).finish(join_totals)
    assert RunWriter.open(going.path).manifest.status == "complete"


def test_a_run_that_is_finished_with_a_withdrawn_commit_is_finished_again_with_the_new_one(
    run: RunWriter, going: RunWriter
) -> None:
    """A process withdraws a damaged shard while another one, that has read its commit, finishes the run."""
    path = going.path / going.name_of("continuations", 2)
    mender, finisher = RunWriter.open(going.path), RunWriter.open(going.path)
    mender.withdraw(2)
    finisher.commits = lambda afresh=False: dict(going.commits()) | {2: cached}  # type: ignore[method-assign]
    cached = run.commits()[2]
    finisher.finish(join_totals)
    assert RunWriter.open(going.path).manifest.status == "complete"
    path.write_bytes(b"damaged")
    assert commit_again(mender, run, 2)
    assert RunWriter.open(going.path).manifest.status == "running"
    mender.finish(join_totals)
    again = RunWriter.open(going.path)
    again.verify()
    assert again.manifest.status == "complete"
    assert again.name_of("continuations", 2) == f"continuations/part-00002.{mender.worker}.parquet"
    assert again.positions("small", 2).equals(run.positions("small", 2))


def test_a_disk_that_fails_for_a_moment_is_no_damage(
    run: RunWriter, going: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read now may be whole: nothing is withdrawn for it, and no commit is taken for torn."""

    def failing(self: LocalStorage, name: str) -> Any:
        raise RunUnreadable(f"{name} cannot be read: Input/output error", "check that disk")

    monkeypatch.setattr(LocalStorage, "open", failing)
    with pytest.raises(RunUnreadable, match="Input/output error"):
        going.damaged_shards()
    monkeypatch.undo()
    read = LocalStorage.read

    def commits_fail(self: LocalStorage, name: str) -> bytes:
        return failing(self, name) if name.startswith("commits/") else read(self, name)

    monkeypatch.setattr(LocalStorage, "read", commits_fail)
    with pytest.raises(RunUnreadable, match="Input/output error"):
        RunWriter.open(going.path)


def test_a_shard_that_another_process_has_measured_anew_is_not_withdrawn(run: RunWriter, tmp_path: Path) -> None:
    first = interrupted(run, tmp_path / "going")
    late = RunWriter.open(first.path)
    assert late.commits().keys() == first.commits().keys()
    first.withdraw(2)
    assert commit_again(first, run, 2)
    late.withdraw(2)
    assert 2 in RunWriter.open(first.path).commits()


def test_a_decision_that_was_changed_meanwhile_stays(run: RunWriter, going: RunWriter) -> None:
    """Who finishes a run takes what stands in it then, not what stood there when it began."""
    other = RunWriter.open(going.path)
    changed = going.manifest.config["decision"] | {"min_speedup": 1.7}
    other.update_manifest(lambda stored: dataclasses.replace(stored, config=stored.config | {"decision": changed}))
    going.finish(join_totals)
    assert RunWriter.open(going.path).manifest.profile.decision.min_speedup == 1.7
    other.update_manifest(lambda stored: dataclasses.replace(stored, config=stored.config | {"decision": changed}))
    assert RunWriter.open(going.path).manifest.status == "complete"
