"""Profiles into an object store: the same run as in a folder, whatever the store does in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaprof.commands.merge import merge
from alphaprof.config.load import load_profile
from alphaprof.config.part import WHOLE, Part
from alphaprof.errors import DiskFull, RunExists, RunUnreadable
from alphaprof.profiling import profile as profiling
from alphaprof.report.build import build_report
from alphaprof.run import storage
from alphaprof.run.reader import Run
from alphaprof.run.storage import WRITER, storage_of
from tests.reporting import every
from tests.run.test_storage import Gate, gate, on_servers, server
from tests.runs import Silent, mixed_file

__all__ = ["gate", "server"]  # fixtures
pytestmark = pytest.mark.models
OUT = "s3://bucket/runs/r1"


def profiled(path: Path, part: Part = WHOLE, out: str = OUT) -> Run:
    return profiling.profile(load_profile(path), out, Silent(), part=part)


def require_equal(found: Run, expected: Run) -> None:
    """The same files, but for the claim of a writer, and the same report."""
    found = Run.open(found.storage)
    found.verify()
    assert found.manifest.files == expected.manifest.files
    assert not found.storage.has(WRITER)
    reports = [build_report(run) for run in (found, expected)]
    assert every(reports[0]) == every(reports[1])


@on_servers
def test_a_run_in_an_object_store_is_that_of_a_folder(gate: Gate, sampled_run: Run, tiny: Path, tmp_path: Path) -> None:
    """So are parts of it that are merged there; busy answers are asked again, and no file holds a key."""
    path = mixed_file(tmp_path, tiny)
    faults = {"PUT": [503], "GET": [503]}
    gate.rule = lambda request: faults.get(request.split()[0], []).pop() if faults.get(request.split()[0]) else None
    require_equal(profiled(path), sampled_run)
    with pytest.raises(RunExists, match="s3://bucket/runs/r1 already holds a run"):
        profiled(path)
    parts = [profiled(path, Part(index, 2), out=f"s3://bucket/runs/part-{index}") for index in range(2)]
    require_equal(merge([str(part.path) for part in parts], "s3://bucket/runs/merged"), sampled_run)
    assert "sesame" not in "".join(str(storage_of(OUT).read(name)) for name in storage_of(OUT).names("") if "json" in name)


@on_servers
def test_a_store_that_fails_for_good_leaves_what_is_recorded(
    gate: Gate, sampled_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    path = mixed_file(tmp_path, tiny)

    class Failing(Silent):
        """Makes the store fail after the first shard."""

        def advance(self, steps: float, positions: int = 0) -> None:
            if positions and any(name.startswith("records/rows") for name in storage_of(OUT).names("records")):
                gate.rule = lambda _: 503

    with pytest.raises((DiskFull, RunUnreadable), match="the store failed or cannot be reached, and retries did not help"):
        profiling.profile(load_profile(path), OUT, Failing())
    gate.rule = lambda _: None
    assert "records/rows-0000.json" in storage_of(OUT).names("records")
    again = profiling.profile(load_profile(path), OUT, Silent(), resume=True, take_over=True)  # this process lives on
    require_equal(again, sampled_run)
