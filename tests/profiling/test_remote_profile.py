"""Profiles into an object store: the same run as in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaprof.config.load import load_profile
from alphaprof.errors import DiskFull, RunExists, RunUnreadable
from alphaprof.log.run import Run
from alphaprof.log.storage import storage_of
from alphaprof.profiling.run import profile as profiling
from alphaprof.profiling.run.parts import WHOLE, Part
from tests.log.test_storage import Gate, gate, on_servers, server
from tests.profiling.test_many_workers import require_equal
from tests.runs import Silent, mixed_file

__all__ = ["gate", "server"]  # fixtures
pytestmark = pytest.mark.models
OUT = "s3://bucket/runs/r1"


def profiled(path: Path, part: Part = WHOLE, resume: bool = False) -> Run:
    return profiling.profile(load_profile(path), OUT, Silent(), part=part, resume=resume)


@on_servers
def test_parts_of_a_run_in_an_object_store_make_the_run_of_a_folder(
    gate: Gate, sampled_run: Run, tiny: Path, tmp_path: Path
) -> None:
    path = mixed_file(tmp_path, tiny)
    gate.faults["PUT"] = [503, 503]
    profiled(path, Part(0, 2))
    gate.faults["GET"] = [503]
    require_equal(profiled(path, Part(1, 2)), sampled_run)
    with pytest.raises(RunExists, match="s3://bucket/runs/r1 already holds a run"):
        profiled(path)
    assert "sesame" not in "".join(str(storage_of(OUT).read(name)) for name in storage_of(OUT).names("") if "json" in name)


@on_servers
def test_a_store_that_fails_for_good_leaves_what_is_committed(
    gate: Gate, sampled_run: Run, tiny: Path, tmp_path: Path
) -> None:
    path = mixed_file(tmp_path, tiny)

    class Failing(Silent):
        """Makes the store fail after the first shard."""

        def advance(self, steps: float, positions: int = 0) -> None:
            if storage_of(OUT).names("commits"):
                gate.always = 503

    with pytest.raises((DiskFull, RunUnreadable), match="the store failed or cannot be reached, and retries did not help"):
        profiling.profile(load_profile(path), OUT, Failing())
    gate.always = None
    assert "commits/00000.json" in storage_of(OUT).names("commits")
    require_equal(profiled(path, resume=True), sampled_run)


@on_servers
def test_a_store_that_ignores_the_condition_is_refused_for_several(gate: Gate, tiny: Path, tmp_path: Path) -> None:
    gate.deaf = True
    with pytest.raises(DiskFull, match="ignores put-if-absent"):
        profiled(mixed_file(tmp_path, tiny), Part(0, 2))
    assert storage_of(OUT).names("") == {}
