"""`--engine ray`: whoever dies when, the rows are those of one process. A run is begun by a driver that loses an actor and
is killed itself; another one meets an actor that fails; a third one finishes it. Drivers are processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaprof.config.load import load_profile
from alphaprof.config.profile import ExecutionOptions
from alphaprof.errors import ExtraMissing, OptionInvalid, RunMismatch, RunUnreadable, WorkerFailed
from alphaprof.log.manifest import commit_name
from alphaprof.log.run import Run
from alphaprof.profiling.run import on_ray
from alphaprof.profiling.run import profile as profiling
from alphaprof.profiling.run.on_ray import Measurer, actors_for, profile_on_ray, require_ray
from alphaprof.profiling.run.parts import Part
from tests.profiling.test_many_workers import COMMAND, profiled, require_equal
from tests.runs import Silent, mixed_file

HERE = Path(__file__).parents[2]
# In processes of Ray, the first commit is not written: the actor is killed after its data files.
KILLING = """
import os, signal, sys
if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    from alphaprof.log.storage import LocalStorage

    put_new = LocalStorage.put_new

    def killing(self, name, content):
        if name.startswith("commits/"):
            try:
                os.close(os.open(os.environ["KILLED"], os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return put_new(self, name, content)

    LocalStorage.put_new = killing
"""


def driver(path: Path, out: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    """`alphaprof profile --engine ray` with two actors, as a process of its own."""
    given = ["--set", "execution.workers=2", "--engine", "ray"]
    paths = os.pathsep.join([environment.pop("FIRST", str(HERE)), str(HERE), os.environ.get("PYTHONPATH", "")])
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [*COMMAND, str(path), "--out", str(out), *given, *more],
        env=variables | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a driver said, once it has ended with an exit code. Compiled code of Ray ends a process without a word: what it
    logged tells why."""
    _, errors = process.communicate(timeout=500)
    if process.returncode != code:
        logs = Path(tempfile.gettempdir(), "ray").glob(f"session_*_{process.pid}/logs/*")
        tails = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs if path.is_file()]
        pytest.fail("\n".join([f"exit code {process.returncode}, not {code}", errors, *tails]))
    return errors


def wait_until_gone(out: Path) -> None:
    """Wait until no process that has registered with a run lives."""
    processes = [json.loads(path.read_text())["process"] for path in (out / "workers").glob("*.json")]
    assert processes
    while any(is_alive(process) for process in processes):
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    """Whether there is such a process, which nobody has to bury."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.cluster
@pytest.mark.models
@pytest.mark.timeout(1500)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_killed_actors_and_drivers_lose_nothing_and_failing_actors_say_why(
    sampled_run: Run,
    tiny: Path,
    tmp_path: Path,
) -> None:
    path, out, killed = mixed_file(tmp_path, tiny), tmp_path / "run", tmp_path / "killed"
    (tmp_path / "first").mkdir()
    (tmp_path / "first/sitecustomize.py").write_text(KILLING)
    process = driver(path, out, KILLED=str(killed), FIRST=str(tmp_path / "first"))
    while process.poll() is None and not (killed.exists() and len(list((out / "commits").glob("*.json"))) >= 2):
        time.sleep(0.02)
    process.kill()
    said = process.communicate()[1]
    assert killed.exists(), said
    wait_until_gone(out)
    run = Run.open(out)
    there = set(run.commits())
    assert run.manifest.status == "running"
    assert 2 <= len(there) < len(sampled_run.shards)
    lost = max(set(range(len(sampled_run.shards))) - there)  # an actor cannot measure it: an error of two lines, and an end
    prompts = out / run.name_of("prompts", lost)
    prompts.rename(tmp_path / "prompts")
    said = finished(driver(path, out, "--resume"), RunUnreadable.exit_code)
    assert f"error: {prompts} cannot be read" in said
    assert "hint: profile again into a new directory" in said
    assert "reported by a Ray actor on" in said
    assert "Traceback" not in said
    (tmp_path / "prompts").rename(prompts)
    said = finished(driver(path, out, "--resume"))
    assert "Traceback" not in said
    assert "adding up totals" in said
    run = Run.open(out)
    require_equal(run, sampled_run)
    assert len({commit.worker for commit in run.commits().values()}) > 2
    assert {worker.environment["torch_threads"] for worker in run.workers().values()} == {1}
    wait_until_gone(out)


@pytest.mark.models
def test_an_actor_that_computes_otherwise_answers_with_both_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    run = profiled(path, out, Part(0, 4))
    left = next(index for index in range(len(run.manifest.staged)) if index not in run.commits())
    monkeypatch.setattr(profiling, "set_threads", lambda *_, **__: None)  # 1 is what the run has
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    execution = ExecutionOptions(engine="ray").model_dump(mode="json")
    actor = Measurer(str(out), execution)
    failure = actor.measure(left)
    assert failure is not None
    assert failure == actor.measure(left)
    assert failure["kind"] == "RunMismatch"
    assert "7 threads, not 1" in failure["message"]
    error = on_ray._error_of(failure)
    assert isinstance(error, RunMismatch)
    assert "mixed_devices=true" in error.hint
    actor = Measurer(str(out), execution | {"mixed_devices": True})
    assert actor.measure(left) is None
    assert (out / commit_name(left)).exists()
    before = (out / commit_name(left)).read_bytes()
    assert actor.measure(left) is None  # it is there already: no work, no error
    assert (out / commit_name(left)).read_bytes() == before


def test_an_actor_on_a_node_that_does_not_see_the_run_says_so(tmp_path: Path) -> None:
    failure = Measurer(str(tmp_path / "run"), {}).measure(None)
    assert failure is not None
    assert failure["kind"] == "RunUnreadable"
    assert "where Ray has placed an actor" in failure["message"]
    assert "--out s3://" in failure["hint"]
    assert not (tmp_path / "run").exists()


def test_without_ray_the_line_that_installs_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    path = tmp_path / "profile.yaml"
    path.write_text("target: {model: some/model}\ndrafts: {}\ndata: [{domain: a, path: some/data, prompt: '{text}'}]\n")
    with pytest.raises(ExtraMissing, match="needs ray") as caught:
        profile_on_ray(load_profile(path, ["execution.engine=ray"]), tmp_path / "run", Silent())
    assert caught.value.hint.startswith("pip install")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_an_address_for_clients_is_refused_with_the_way_out(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: object())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(OptionInvalid, match="is not a node's HOST:PORT") as caught:
        require_ray()
    assert "ray job submit" in caught.value.hint


def test_an_address_where_nobody_answers_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> Any:
        assert address == ("head", 6379)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(on_ray, "find_spec", lambda name: object())
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(OptionInvalid, match="nothing answers at RAY_ADDRESS=head:6379"):
        require_ray()


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


class Dead(Exception):
    """In place of what Ray raises for an actor that was killed."""


class FakeRay:
    """Answers a driver in place of Ray: actors die as often as is planned, by the shard that they have (None: they load)."""

    def __init__(self, deaths: Mapping[int | None, int]) -> None:
        self.deaths, self.done, self.actors = Counter(deaths), list[int](), 0
        self.exceptions = SimpleNamespace(RayError=Dead, RayTaskError=ZeroDivisionError)
        self.measure = SimpleNamespace(remote=lambda shard: (object(), shard))

    def remote(self, *_: Any) -> FakeRay:
        self.actors += 1
        return self

    def wait(self, answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return answers[:1], answers[1:]

    def get(self, answer: tuple[object, int | None]) -> None:
        if self.deaths[answer[1]]:
            self.deaths[answer[1]] -= 1
            raise Dead("killed")
        self.done += [] if answer[1] is None else [answer[1]]


def drive(deaths: Mapping[int | None, int]) -> FakeRay:
    """What a driver with one actor has done with five shards, until nobody works any more."""
    ray, driver = FakeRay(deaths), object.__new__(on_ray._Driver)
    driver._ray, driver._actor, driver._busy, driver._loaded = ray, ray.remote, {}, 0
    driver._lacking = deque(range(5))
    driver._give(driver._actor(), None, 0)
    driver._hear(1.0)
    assert driver._loaded == 1
    return ray


def test_a_killed_actor_is_replaced_and_its_shard_measured_but_not_for_ever() -> None:
    ray = drive({None: 2, 1: 1, 3: 3})
    assert ray.done == list(range(5))
    assert ray.actors == 1 + 2 + 1 + 3
    for deaths in ({None: 4}, {3: 4}, {None: 3, 0: 1}):
        with pytest.raises(WorkerFailed, match="killed 4 times in a row") as caught:
            drive(deaths)
        assert "--resume" in caught.value.hint


@pytest.mark.parametrize("option", [["--part", "0/2"]])
def test_ray_and_parts_are_two_ways_and_not_one(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from alphaprof.cli.app import main

    path = tmp_path / "profile.yaml"
    path.write_text("target: {model: some/model}\ndrafts: {}\ndata: [{domain: a, path: some/data, prompt: '{text}'}]\n")
    arguments = ["alphaprof", "profile", str(path), "--out", str(tmp_path / "run"), "--engine", "ray", *option]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == OptionInvalid.exit_code
    assert f"error: engine ray cannot be combined with {option[0]}" in capsys.readouterr().err
