"""Any number of processes on one run: the same rows as from one process. What fails is in test_failure_matrix.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from alphaprof.config.load import load_profile
from alphaprof.log.files import shards_of
from alphaprof.log.manifest import commit_name
from alphaprof.log.run import Run
from alphaprof.profiling.run import parts
from alphaprof.profiling.run import profile as profiling
from alphaprof.profiling.run.parts import Part, part_of
from alphaprof.report.build import build_report
from tests.conftest import slow
from tests.runs import Silent, mixed_file

pytestmark = pytest.mark.models
TABLES = ("positions", "continuations", "totals", "documents", "prompts")


def everything(run: Run) -> dict[str, pa.Table]:
    """Every table of a complete run by folder and shards, but for step times."""
    tables = {}
    for name in run.manifest.files:
        if name.startswith(TABLES):
            with run.storage.open(name) as stream:
                tables[f"{name.rpartition('/')[0]} {shards_of(name)}"] = pa.parquet.read_table(stream)
    return tables


def require_equal(found: Run, expected: Run) -> None:
    """Equal tables, an equal report, and nothing else in the folder."""
    one, other = everything(found), everything(expected)
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equals(other[name])] == []
    found.verify()
    named = set(found.manifest.files) | {commit_name(shard.index) for shard in found.shards}
    others = {name for name in found.storage.names("") if name not in named and not name.startswith("workers/")}
    assert others == {"manifest.json", "profile.json"}
    reports = [build_report(run) for run in (found, expected)]
    assert reports[0].results == reports[1].results
    assert reports[0].traffic == reports[1].traffic


def profiled(path: Path, out: Path, part: Part = parts.WHOLE, **more: Any) -> Run:
    """A part of a profile."""
    return profiling.profile(load_profile(path), out, Silent(), part=part, **more)


@pytest.mark.parametrize(
    ("order", "count"), [([0, 1], 2), *slow([([0, 2, 1], 3), ([0, 3, 1, 2], 4), ([0, 5, 4, 3, 2, 1], 6)])]
)
def test_parts_in_any_order_make_the_run_of_one_process(
    sampled_run: Run, order: list[int], count: int, tiny: Path, tmp_path: Path
) -> None:
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    for place, index in enumerate(order):
        run = profiled(path, out, Part(index, count))
        assert run.manifest.status == ("complete" if place == count - 1 else "running")
    require_equal(run, sampled_run)
    frame = pd.read_parquet(out / "positions")
    assert len(frame) == sum(shard.positions for shard in run.shards) * 2


COMMAND = [sys.executable, "-m", "alphaprof", "profile"]


def started(path: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """`alphaprof profile` as a process of its own, which leads its group."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, str(path), "--out", str(out), *more], env=environment, **pipes)


def ended(process: subprocess.Popen[str]) -> str:
    """What a process said, once it has ended well."""
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def children(process: subprocess.Popen[str]) -> Sequence[int]:
    """Numbers of the processes that it has started."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("0/1", {}, (0, 1)),
        ("3/64", {}, (3, 64)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "1"}, (2, 8)),
        ("auto", {"JOB_COMPLETION_INDEX": "5", "ALPHAPROF_PARTS": "6"}, (5, 6)),
        ("auto", {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "4"}, (1, 4)),
    ],
)
def test_a_part_is_what_an_option_or_a_scheduler_says(
    text: str, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    assert part_of(text, environment) == Part(*expected)
