"""A run in an object store is read as the same run in a folder, and little of it is fetched."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import alphaprof
from alphaprof.render.json import render_json
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from alphaprof.run.storage import storage_of
from scripts.synthetic_log import Size, write_log
from tests.run.test_storage import Gate, gate, on_servers, server
from tests.synthetic import Domain, Recipe, write_run

__all__ = ["gate", "server"]  # fixtures


def copied(run: Run, where: str) -> Run:
    """A run in another place."""
    place = storage_of(where)
    for name in run.storage.names(""):
        place.put(name, run.storage.read(name))
    return Run.open(where)


@on_servers
def test_a_report_of_a_remote_run_is_that_of_the_local_one(gate: Gate, tmp_path: Path) -> None:
    recipe = Recipe(
        {"code": Domain(60), "chat": Domain(60, alpha=0.4)}, shard_documents=16, rules=("strict", "additive_0p2")
    )
    local = write_run(tmp_path / "run", recipe)
    remote = copied(local, "s3://bucket/runs/r1")
    texts = [render_json(build_report(run)).replace(str(run.path), "RUN") for run in (local, remote)]
    assert texts[0] == texts[1]
    opened = alphaprof.open("s3://bucket/runs/r1")
    assert opened.path == "s3://bucket/runs/r1"
    where = [("draft", "==", "small"), ("position", "<", 3)]
    for frames in zip(
        *((each.positions(where=where), each.totals()) for each in (alphaprof.open(local.path), opened)), strict=True
    ):
        pd.testing.assert_frame_equal(*frames)
    remote.verify()


@on_servers
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "mixed", "sampled"])
def test_a_report_fetches_a_tenth_of_the_log(gate: Gate, tmp_path: Path, kind: str) -> None:
    """Of a million positions: all totals, since a file is read whole and hashed, and few shards of the log. `mixed`: half of
    the texts are sampled, and their totals, which are expectations, are four times as large.
    """
    local = write_log(tmp_path / "run", Size.of(1_000_000, kind=kind))
    remote = copied(local, "s3://bucket/runs/r1")
    log = sum(file.size for name, file in local.manifest.files.items() if name.startswith(("positions/", "continuations/")))
    gate.sent = 0
    texts = [render_json(build_report(run)).replace(str(run.path), "RUN") for run in (remote, Run.open(local.path))]
    assert texts[0] == texts[1]
    assert 0 < gate.sent <= {"greedy": 0.05, "mixed": 0.08, "sampled": 0.1}[kind] * log
