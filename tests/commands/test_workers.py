"""Processes that `--workers` starts: who is started again, who is named, and what the others do meanwhile."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from alphaprof.cli import measuring
from alphaprof.commands import runs
from alphaprof.errors import WorkerFailed
from alphaprof.log.run import Run
from alphaprof.log.storage import storage_of
from tests.synthetic import Recipe, interrupted, write_run

FAILS = "import sys; sys.exit('error: no such file\\nhint: make it')"
ENDS = "pass"
# Ends well when it is started the second time, and by a signal before.
KILLED_ONCE = """
import os, pathlib, signal
if not (mark := pathlib.Path({mark!r})).exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
# Ends when another process has failed, and says that it was there until then.
OUTLASTS = """
import pathlib, time
while not (mark := pathlib.Path({mark!r})).exists():
    time.sleep(0.01)
mark.with_suffix(".seen").touch()
"""
MARKS = "import pathlib, sys; pathlib.Path({mark!r}).touch(); sys.exit(3)"
WAITS = "import time; time.sleep(600)"


def worked(monkeypatch: pytest.MonkeyPatch, out: Path, *scripts: str) -> list[str]:
    """What is said of workers that run these scripts."""
    said: list[str] = []
    commands = [[sys.executable, "-c", script.format(mark=str(out) + ".mark")] for script in scripts]
    monkeypatch.setattr(runs, "_worker_command", lambda _, number, count: commands[number])
    monkeypatch.setattr(runs, "visible_gpus", list)
    monkeypatch.setattr(runs, "LOOK", 0.01)
    try:
        runs.work_together([], len(scripts), storage_of(out), said.append)
    except WorkerFailed as error:
        said.append(f"{error.exit_code}: {error.message}; {error.hint}")
    return said


@pytest.fixture
def going(tmp_path: Path) -> Path:
    """A run that lacks shards."""
    return Path(interrupted(write_run(tmp_path / "whole", Recipe()), tmp_path / "going", 1).path)


def test_workers_that_end_well_say_nothing(monkeypatch: pytest.MonkeyPatch, going: Path) -> None:
    assert worked(monkeypatch, going, ENDS, ENDS) == []


def test_a_worker_that_is_killed_is_started_again(monkeypatch: pytest.MonkeyPatch, going: Path) -> None:
    said = worked(monkeypatch, going, ENDS, KILLED_ONCE)
    assert said == ["worker 1 was ended by SIGKILL; restarting it"]


def test_one_that_is_killed_again_and_again_has_failed(monkeypatch: pytest.MonkeyPatch, going: Path) -> None:
    *again, last, end = worked(monkeypatch, going, ENDS, KILLED)
    assert len(again) == runs.AGAIN
    assert last == "worker 1 failed with exit code -9"
    assert end.startswith("137: 1 of 2 workers failed: 1 (exit code 137)")


def test_where_one_fails_the_others_go_on_and_the_exit_code_says_it(monkeypatch: pytest.MonkeyPatch, going: Path) -> None:
    first, end = worked(monkeypatch, going, ENDS, OUTLASTS, MARKS)
    assert first == "worker 2 failed with exit code 3"
    assert end.startswith("3: 1 of 3 workers failed: 2 (exit code 3)")
    assert "the same command with --resume" in end
    assert Path(f"{going}.seen").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_workers_are_told_to_resume(resume: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or each would compare only what earlier workers of the same number wrote, and miss damaged shards."""
    told: list[str] = []
    monkeypatch.setattr(runs, "work_together", lambda arguments, *_: told.extend(arguments))
    measuring._profile_in_workers(Path("my.yaml"), str(tmp_path / "run"), 2, resume, None, None, None)
    assert ("--resume" in told) == resume


def test_the_last_lines_of_one_that_fails_are_said(monkeypatch: pytest.MonkeyPatch, going: Path) -> None:
    first, end = worked(monkeypatch, going, ENDS, FAILS)
    assert first == "worker 1 failed with exit code 1\nerror: no such file\nhint: make it"
    assert end.startswith("1: ")


def test_where_the_one_that_begins_the_run_fails_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = worked(monkeypatch, tmp_path / "none", FAILS, WAITS)
    assert said[0] == "worker 0 failed with exit code 1"
    assert said[1].startswith("1: 1 of 2 workers failed: 0 (exit code 1)")


@pytest.mark.parametrize("interruptions", [1, 2])
def test_an_interruption_ends_every_worker_and_a_second_one_at_once(
    monkeypatch: pytest.MonkeyPatch, going: Path, interruptions: int
) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    started, left, wait = list[subprocess.Popen[bytes]](), itertools.count(1), subprocess.Popen.wait

    def starting(worker: runs._Worker) -> None:
        script = stubborn if interruptions == 2 else WAITS
        worker.process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        if interruptions == 2 and worker.process.stdout is not None:
            worker.process.stdout.readline()  # it does not heed SIGTERM from now on
        started.append(worker.process)

    def interrupted_once(_: float) -> None:
        raise KeyboardInterrupt

    def waiting(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if interruptions == 2 and next(left) == 1:
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(runs._Worker, "start", starting)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupted_once))
    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    with pytest.raises(KeyboardInterrupt):
        worked(monkeypatch, going, ENDS, ENDS)
    for process in started:
        assert wait(process, 60) < 0
        if process.stdout is not None:
            process.stdout.close()


def test_progress_counts_what_all_workers_have_committed(
    monkeypatch: pytest.MonkeyPatch, going: Path, tmp_path: Path
) -> None:
    """Said when the one that speaks is done, by how much of the run is there."""
    assert runs.progress_line(storage_of(going)).startswith("profiling: 1 of 3 shards, ")
    assert runs.progress_line(storage_of(tmp_path / "whole")) == "profiling: 3 of 3 shards"
    assert "cannot read the run's progress now" in runs.progress_line(storage_of(tmp_path / "none"))
    monkeypatch.setattr(runs, "SAY", 0.0)
    monkeypatch.setattr(runs, "progress_line", lambda place: Path(f"{going}.mark").touch() or "a line")
    assert set(worked(monkeypatch, going, ENDS, OUTLASTS)) == {"a line"}
    assert Run.open(going).manifest.status == "running"
