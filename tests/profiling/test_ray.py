"""`execution.workers`: however many actors, and whoever dies, the run is that of one process. Drivers are processes
of their own, whose actors are killed as often as a test says.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaprof import errors
from alphaprof.config.load import load_profile
from alphaprof.config.options import ModelOptions
from alphaprof.config.profile import ExecutionOptions
from alphaprof.errors import (
    AlphaprofError,
    ColumnMissing,
    ExtraMissing,
    ModelUnloadable,
    OptionInvalid,
    RunMismatch,
    WorkerFailed,
)
from alphaprof.profiling import checks, on_ray
from alphaprof.profiling.checks import require_ray
from alphaprof.profiling.models.load import require_on_gpus
from alphaprof.profiling.on_ray import Worker, actors_for, profile_on_ray
from alphaprof.profiling.profile import require_same_models
from alphaprof.run.reader import Run
from alphaprof.run.writer import RunWriter
from tests.runs import Silent, mixed_file, tables

HERE = Path(__file__).parents[2]
SMALL = "target: {model: some/model}\ndrafts: {}\ndata: [{domain: a, path: some/data, prompt: '{text}'}]\n"
TIMED = {"costs": {"context": 16, "repeats": 3}}


def with_ray(test: Any) -> Any:
    """A test that starts Ray."""
    marks = (pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"), pytest.mark.timeout(1500))
    for mark in (*marks, pytest.mark.cluster, pytest.mark.models):
        test = mark(test)
    return test


class Mortal(Worker):
    """An actor that leaves a file when it works, and is killed as soon as it has done some work, as often as the environment
    says: {name of the work: times}."""

    def do(self, name: str, *given: Any) -> Any:
        folder, deaths = Path(os.environ["ACTORS"]), dict(each.split("=") for each in os.environ["DEATHS"].split())
        (folder / f"process-{os.getpid()}").touch()
        answer = super().do(name, *given)
        for death in range(int(deaths.get(name, 0))):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(folder / f"{name}-{death}", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return answer


def drive() -> None:
    """The command line, whose actors are mortal."""
    from alphaprof.cli.app import main

    on_ray.Worker = Mortal  # type: ignore[misc]
    main()


def driver(path: Path, out: Path, *more: str, deaths: str = "", workers: int = 2) -> subprocess.Popen[str]:
    """`alphaprof profile` on Ray as a process of its own."""
    (actors := out.parent / "actors").mkdir(exist_ok=True)
    code = "from tests.profiling import test_ray; test_ray.drive()"
    given = ["profile", str(path), "--out", str(out), "--set", f"execution.workers={workers}", *more]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "ACTORS": str(actors), "DEATHS": deaths}
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *given], env=variables, text=True, **pipes)


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a driver said, once it has ended with an exit code."""
    _, said = process.communicate(timeout=500)
    assert process.returncode == code, said
    assert "Traceback" not in said
    return said


def lives(process: str) -> bool:
    """Whether there is such a process, which nobody has to bury."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def require_equal(out: Path, expected: Run) -> Run:
    """A complete run whose tables are those of another."""
    run, found, others = Run.open(out), tables(out), tables(Path(expected.path))
    run.verify()
    assert run.manifest.status == "complete"
    assert found.keys() == others.keys()
    assert [name for name in found if not found[name].equals(others[name])] == []
    assert run.manifest.shards == expected.manifest.shards
    while living := [path for path in (out.parent / "actors").glob("process-*") if lives(path.name.partition("-")[2])]:
        time.sleep(0.1)
    assert not living
    return run


@with_ray
def test_killed_actors_lose_nothing(sampled_run: Run, tiny: Path, tmp_path: Path) -> None:
    path, out = mixed_file(tmp_path, tiny, **TIMED), tmp_path / "run"
    finished(driver(path, out, deaths="begin=1 staged=1 write=1 time=1 score=2"))
    assert len(list((tmp_path / "actors").glob("[!p]*"))) == 6
    run = require_equal(out, sampled_run)
    assert run.latency() is not None
    assert run.manifest.environment["torch_threads"] == 1


@with_ray
@pytest.mark.slow
def test_a_run_goes_on_after_its_texts_after_its_driver_and_after_actors_that_die_for_ever(
    sampled_run: Run, tiny: Path, tmp_path: Path
) -> None:
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    finished(driver(path, out, "--texts-only"))
    assert Run.open(out).shards == ()
    process = driver(path, out, "--resume")
    while process.poll() is None and not list(out.glob("records/rows-*")):
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert Run.open(out).manifest.status == "running"
    said = finished(driver(path, out, "--resume", deaths="score=99"), WorkerFailed.exit_code)
    assert "error: a Ray actor was killed, and its work was done again in vain" in said
    assert "finished work is kept" in said
    deaths = len(list((tmp_path / "actors").glob("score-*")))
    assert 4 <= deaths <= 2 * 4
    finished(driver(path, out, "--resume"))
    require_equal(out, sampled_run)
    assert "is complete already" in " ".join(finished(driver(path, out, "--resume")).split())


@with_ray
def test_an_error_in_an_actor_is_one_of_the_command(tiny: Path, tmp_path: Path) -> None:
    source = {"domain": "odd", "path": "short.jsonl", "prompt": "{nowhere}"}
    said = finished(driver(mixed_file(tmp_path, tiny, data=[source]), tmp_path / "run"), ColumnMissing.exit_code)
    assert "error: " in said
    assert "nowhere" in said
    assert "hint: " in said
    assert "reported by a Ray actor on" in said
    assert not (tmp_path / "run/manifest.json").exists()


@with_ray
def test_an_actor_sees_as_many_gpus_as_a_worker_has(tiny: Path, tmp_path: Path) -> None:
    path = mixed_file(tmp_path, tiny, target={"model": str(tiny / "target"), "device_map": "auto"})
    code = """if True:
    import os, sys, ray
    from pathlib import Path
    from alphaprof.config.load import load_profile
    from alphaprof.profiling.on_ray import gpus_of, remote
    class Seen:
        def devices(self): return os.environ.get("CUDA_VISIBLE_DEVICES")
    ray.init("local", num_gpus=8, include_dashboard=False, log_to_driver=False)
    for gpus in (8, 2, 0.5):
        options = load_profile(Path(sys.argv[1]), [f"execution.gpus_per_worker={gpus}"])
        actor = remote(ray, Seen, gpus_of(options, ray.cluster_resources())).remote()
        print(len(ray.get(actor.devices.remote()).split(",")))
        ray.kill(actor)
    """
    given = [sys.executable, "-c", code, str(path)]
    variables = os.environ | {"PYTHONPATH": str(HERE)}
    done = subprocess.run(given, env=variables, capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.split() == ["8", "2", "1"], done.stderr


@pytest.mark.parametrize("places", [{"a": 0, "b": "cpu"}, {"a": 0, "b": 1, "c": "disk"}, {"a": "cpu", "b": "disk"}])
def test_parts_that_would_leave_the_gpus_unasked_are_an_error(places: dict[str, Any]) -> None:
    network: Any = SimpleNamespace(hf_device_map=places)
    with pytest.raises(ModelUnloadable, match=f"1 of {len(places)} parts|2 of 2 parts") as caught:
        require_on_gpus(network, ModelOptions(model="some/model", device_map="auto"))
    assert "gpus_per_worker" in caught.value.hint
    require_on_gpus(network, ModelOptions(model="some/model", device_map="cpu"))
    for whole in ({"": 0}, {"": "cpu"}, {"a": 0, "b": 1}):
        require_on_gpus(SimpleNamespace(hf_device_map=whole), ModelOptions(model="some/model", device_map="auto"))  # type: ignore[arg-type]


def test_errors_cross_processes_whole() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AlphaprofError)]
    for error in (*(kind("a problem", "a hint") for kind in kinds), WorkerFailed("a problem", "a hint", 4)):
        error.add_note("a note")
        found = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert type(found) is type(error)
        assert vars(found) == vars(error)
        assert (found.exit_code, found.__notes__) == (error.exit_code, ["a note"])


@pytest.mark.models
def test_an_actor_that_computes_otherwise_is_refused(sampled_run: Run, tiny: Path, tmp_path: Path, one_thread: None) -> None:
    options = load_profile(Path(sampled_run.path).parent / "profile.yaml", [])
    run = RunWriter(sampled_run.storage, sampled_run.manifest)
    answer = Worker(options, 7, run.manifest).do("describe", False)
    with pytest.raises(RunMismatch, match="7 threads, not 1") as caught:
        require_same_models(run, answer.made, moved=False)
    assert "mixed_devices=true" in caught.value.hint


def test_without_ray_the_line_that_installs_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    path = tmp_path / "profile.yaml"
    path.write_text(SMALL)
    with pytest.raises(ExtraMissing, match="needs ray") as caught:
        profile_on_ray(load_profile(path, ["execution.workers=2"]), tmp_path / "run", Silent())
    assert caught.value.hint.startswith("pip install")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("address", "problem"),
    [("ray://head:10001", "is not a node's HOST:PORT"), ("http://head:8265", "is not"), ("head:6379", "nothing answers at")],
)
def test_an_address_that_takes_no_driver_is_said_at_once(
    address: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> Any:
        assert address == ("head", 6379)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(OptionInvalid, match=problem) as caught:
        require_ray()
    assert ("ray job submit" in caught.value.hint) == ("://" in address)
    monkeypatch.delenv("RAY_ADDRESS")
    require_ray()  # this machine alone


@pytest.mark.parametrize(
    ("workers", "resources", "gpus", "shards", "expected"),
    [
        ("auto", {"CPU": 8.0}, 0.0, 100, 8),
        ("auto", {"CPU": 8.0}, 0.0, 3, 3),
        ("auto", {"CPU": 64.0, "GPU": 4.0}, 1.0, 100, 4),
        ("auto", {"CPU": 64.0, "GPU": 4.0}, 0.25, 100, 16),
        ("auto", {"CPU": 8.0}, 1.0, 100, 1),  # a cluster that makes GPU nodes when they are asked for
        (64, {"CPU": 8.0}, 1.0, 100, 64),
        (64, {"CPU": 8.0}, 1.0, 1, 1),
    ],
)
def test_as_many_actors_as_there_is_room_or_the_profile_says(
    workers: Any, resources: Mapping[str, float], gpus: float, shards: int, expected: int
) -> None:
    assert actors_for(ExecutionOptions(workers=workers), resources, gpus, shards) == expected


def test_ray_and_parts_are_two_ways_and_not_one(tmp_path: Path, console_script: Any) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(SMALL)
    given = ("profile", path, "--out", tmp_path / "run", "--set", "execution.workers=2", "--part", "0/2")
    code, _, said = console_script(*given)
    assert code == OptionInvalid.exit_code
    assert "error: execution.workers cannot be combined with --part" in said
