"""Totals of many small shards: counted together or one by one, by the process that measured them or later, they are one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from alphaprof.log.store import Run
from alphaprof.totals import files
from alphaprof.totals.files import shard_totals
from alphaprof.totals.finish import finish
from tests.synthetic import Domain, Recipe, write_run

RULES = ("strict", "lossless", "additive_0p1")
RECIPE = Recipe(
    domains={
        "code": Domain(documents=10, continuation="dataset"),
        "story": Domain(documents=10, temperature=0.7, continuation="sampled"),
    },
    rules=RULES,
    lookups=["lookup"],
    shard_documents=2,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Ten shards of two documents."""
    return write_run(tmp_path / "run", RECIPE)


def joined(run: Run) -> dict[str, bytes]:
    return {name: (run.path / name).read_bytes() for name in run.manifest.files if name.startswith("totals/")}


def measured_again(run: Run, path: Path) -> Run:
    """The same run, as processes write it that add up the totals of each shard; nobody has finished it."""
    again = Run(path, dataclasses.replace(run.manifest, status="running", shards=(), files={}))
    again.place.make()
    again.begin()
    for shard in run.shards:
        logs, texts = (
            {draft: run.positions(draft, shard.index) for draft in run.manifest.drafts},
            run.continuations(shard.index),
        )
        again.commit(shard, logs, texts, {draft: shard_totals(run, draft, log, texts) for draft, log in logs.items()})
    return again


@pytest.mark.parametrize("positions", [1, 100, 2**16])
def test_however_many_shards_are_counted_at_once_the_files_are_equal(
    run: Run, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    before, shards = joined(run), range(len(run.shards))
    monkeypatch.setattr(files, "POSITIONS", positions)
    together = list(files._together(run, shards))
    assert [index for several in together for index in several] == list(shards)
    assert len(together) == {1: 10, 2**16: 1}.get(positions, len(together))
    assert all(sum(run.shards[index].positions for index in several) >= positions for several in together[:-1])
    run.manifest = dataclasses.replace(
        run.manifest, files={name: run.manifest.files[name] for name in run.manifest.files if name not in before}
    )
    finish(run)
    assert joined(run) == before


def test_totals_that_came_with_the_shards_are_joined_to_the_same_files(run: Run, tmp_path: Path) -> None:
    again = measured_again(run, tmp_path / "again")
    finish(again)
    assert joined(again) == joined(run)
