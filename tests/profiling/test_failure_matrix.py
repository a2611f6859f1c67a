"""The failure matrix of many processes on one run: each row has a test here, or stands elsewhere.

What object stores do (bad credentials, a missing bucket, 503s, an exception before a request, a lost answer) is in
tests/log/test_storage.py, and what a profile makes of it (503s, a store that fails for good, one that ignores put-if-absent)
in test_remote_profile.py. Two that finish at once, and a commit that is withdrawn, in tests/log/test_finish.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaprof.config.load import load_profile
from alphaprof.errors import OptionInvalid, RunUnreadable
from alphaprof.log.manifest import MANIFEST
from alphaprof.log.run import Run
from alphaprof.log.storage import LocalStorage, storage_of
from alphaprof.log.writer import SIGN
from alphaprof.profiling.run import parts
from alphaprof.profiling.run import profile as profiling
from alphaprof.profiling.run.parts import Part, part_of, wait_until_begun
from tests.profiling.test_many_workers import (
    profiled,
    require_equal,
)
from tests.runs import Silent, mixed_file

pytestmark = pytest.mark.models


class Killed(BaseException):
    """Stands in for SIGKILL: nothing handles it, and what is cleaned up after it is forbidden."""


class Meanwhile(Silent):
    """Does something else, once, while the first shard is measured: another part works, and this one is slow."""

    def __init__(self, other: Callable[[], object]) -> None:
        super().__init__()
        self.other: Callable[[], object] | None = other

    def advance(self, steps: float, positions: int = 0) -> None:
        other, self.other = self.other, self.other if positions == 0 else None
        if positions and other is not None:
            other()


def killed_at(monkeypatch: pytest.MonkeyPatch, verb: str, name: str, after: bool) -> None:
    """Have the process die before or after it writes the first file of that name; it touches no file from then on."""
    dead = False

    def dying(original: Callable[..., Any], is_it: bool) -> Callable[..., Any]:
        def call(place: LocalStorage, file: str, *rest: Any) -> Any:
            nonlocal dead
            hit = is_it and file.startswith(name)
            if dead or (hit and not after):
                dead = True
                raise Killed
            found = original(place, file, *rest)
            if hit:
                dead = True
                raise Killed
            return found

        return call

    for each in ("put", "put_new", "remove"):
        monkeypatch.setattr(LocalStorage, each, dying(getattr(LocalStorage, each), each == verb))


@pytest.mark.slow
def test_two_workers_measure_one_shard(sampled_run: Run, tiny: Path, tmp_path: Path) -> None:
    """The same part twice at once: one of two attempts is named, the other one's files are removed."""
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    profiled(path, out, Part(0, 2))
    profiling.profile(load_profile(path), out, Meanwhile(lambda: profiled(path, out, Part(1, 2))), part=Part(1, 2))
    require_equal(Run.open(out), sampled_run)
    part = [worker for worker in Run.open(out).workers().values() if worker.part == "1/2"]
    assert len(part) == 2


@pytest.mark.slow
def test_part_0_dies_while_it_stages(sampled_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins again reads the prompts from the first one; what the dead one staged is in no manifest."""
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, "put", "prompts/part-00001", True)
        with pytest.raises(Killed):
            profiled(path, out, Part(0, 2))
    assert not (out / MANIFEST).exists()
    assert len(list((out / "prompts").iterdir())) == 2
    profiled(path, out, Part(0, 2))
    require_equal(profiled(path, out, Part(1, 2)), sampled_run)
    assert not (out / SIGN).exists()


class Clock:
    """A clock that goes on when somebody sleeps, and what happens meanwhile, by the second at which it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, happens: dict[int, Callable[[], object]]) -> None:
        self.now, self.happens = 0.0, happens
        monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.happens if when <= self.now]:
            self.happens.pop(when)()


def test_a_part_waits_for_part_0_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says who was seen last, and how to go on; nothing depends on a real clock."""
    clock = Clock(monkeypatch, {})
    (tmp_path / SIGN).write_text("process 7 on node-3, at 2026-01-01T00:00:00+00:00")
    with pytest.raises(RunUnreadable, match=r"silent for 30 minutes \(last seen: process 7 on node-3") as caught:
        wait_until_begun(storage_of(tmp_path), Part(1, 4), str)
    assert clock.now == pytest.approx(parts.PATIENCE, abs=2 * parts.LOOK)
    assert "restart it (--part 0/4)" in caught.value.hint


def test_a_part_waits_for_part_0_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours to load, with a sign now and then, and then prompts: nobody gives up."""
    (tmp_path / "prompts").mkdir()

    def sign(minute: int) -> Callable[[], object]:
        return lambda: (tmp_path / SIGN).write_text(f"process 7 on node-3, at minute {minute:03d}")

    happens: dict[int, Callable[[], object]] = {60 * minute: sign(minute) for minute in range(1, 121)}
    happens[7400] = (tmp_path / "prompts" / "part-00000.0123abcd.parquet").touch
    happens[9100] = (tmp_path / "prompts" / "part-00001.0123abcd.parquet").touch
    happens[9300] = (tmp_path / MANIFEST).touch
    Clock(monkeypatch, happens)
    said = list[str]()
    for _ in range(2):  # a part of a run that has begun says nothing of it
        wait_until_begun(storage_of(tmp_path), Part(1, 4), said.append)
    assert said == ["part 1/4 waits until part 0 has read the prompts and timed the steps"]


@pytest.mark.slow
def test_spot_takes_all(sampled_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts are killed after a shard each, while they hold the files of the next; others, fewer, finish the run."""
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    for index in range(4):
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            killed_at(patch, "put_new", "commits/", after=index % 2 == 0)
            profiled(path, out, Part(index, 4))
    assert Run.open(out).committed() == {0, 2}
    for index in range(2):
        run = profiled(path, out, Part(index, 2), resume=True)
    require_equal(run, sampled_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "environment"),
    [
        *((text, {}) for text in ("4/4", "1", "auto")),
        ("auto", {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "8"}),
    ],
)
def test_what_is_no_part_is_refused(text: str, environment: dict[str, str]) -> None:
    with pytest.raises(OptionInvalid):
        part_of(text, environment)
