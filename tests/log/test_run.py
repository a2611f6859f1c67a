"""The run directory: nothing half-written is ever seen, and what cannot be written or read says so."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from alphaprof.errors import DiskFull, RunUnreadable
from alphaprof.log.writer import RunWriter
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import join_totals, read_totals
from scripts.bench_log import bytes_per_position
from tests.reference import LOGGED_RULES
from tests.synthetic import Domain, Recipe, contents, flipped, interrupted, write_run

REMEDIES = {
    errno.ENOSPC: "free space, then go on with --resume",
    errno.EACCES: "correct the permissions",
    errno.EFBIG: "lower shard_documents",
    errno.EIO: "check that disk or mount",
}


def refusing(code: int) -> Callable[..., None]:
    """What a system says that cannot write."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refused


@pytest.mark.parametrize("code", REMEDIES, ids=errno.errorcode.get)
def test_a_disk_that_cannot_be_written_is_an_error_that_keeps_what_was_there(
    run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nothing of the shard is committed then, and the run goes on with it later."""
    going = interrupted(run, tmp_path / "going", 1)
    before = contents(going)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing(code))
        with pytest.raises(DiskFull, match=rf"cannot write .*going.*: {os.strerror(code)}") as caught:
            commit_again(going, run, 1)
    assert REMEDIES[code] in caught.value.hint
    assert contents(going) == before
    assert commit_again(going, run, 1)
    assert len(RunWriter.open(going.path).shards) == 2


def commit_again(going: RunWriter, source: RunWriter, index: int) -> bool:
    """Commit a shard of a run with what another one holds of it."""
    logs = {draft: source.positions(draft, index) for draft in source.manifest.drafts}
    return going.commit(source.shards[index], logs, source.continuations(index))


def test_the_files_of_a_shard_are_on_the_disk_before_its_commit(
    run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is synced and has its name before the next begins, and so has its folder: where the power goes, a commit never
    names a file that is empty.
    """
    going, steps = interrupted(run, tmp_path / "going", 1), list[str]()
    replace, link = Path.replace, os.link
    monkeypatch.setattr(os, "fsync", lambda number: steps.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
    monkeypatch.setattr(Path, "replace", lambda one, other: steps.append("named") or replace(one, other))
    monkeypatch.setattr(os, "link", lambda one, other: steps.append("named") or link(one, other))
    assert commit_again(going, run, 1)
    part = f".part-00001.{going.worker}.parquet."
    for step, expected in zip(steps, [part, "named", "draft=small", part, "named", "continuations"], strict=False):
        assert step.startswith(expected)
    assert steps[6].startswith(".00001.json.")
    assert steps[7:] == ["named", "commits"]


STORY = Domain(documents=2, temperature=0.7, continuation="sampled")


@pytest.fixture
def run(tmp_path: Path) -> RunWriter:
    return write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=3), "story": STORY}))


LOG = {"positions": "positions/draft=small/part-00001.*", "continuations": "continuations/part-00001.*"}
TIMES = {"latency": "latency.*.parquet"}
MADE_AGAIN = {"totals": "totals/draft=small/part-*", "documents": "documents/part-*"}
FILES = {**LOG, **TIMES, **MADE_AGAIN}


def file_in(run: RunWriter, kind: str) -> Path:
    """The one file of a kind."""
    (path,) = run.path.glob(FILES[kind])
    return path


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit in a page": lambda path: path.write_bytes(flipped(path, 8 * 40)),
    "one bit in the footer": lambda path: path.write_bytes(flipped(path, 8 * (path.stat().st_size - 300))),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"PAR1"),
    "missing": lambda path: path.unlink(),
}


def read_all(run: RunWriter) -> list[object]:
    """What every table of a run holds, position logs and continuations of its second shard."""
    request = TotalsRequest(run.rules, run.gammas)
    tables = [run.positions("small", 1), run.continuations(1), run.documents(), run.latency()]
    tables.append(read_totals(run, "small", request))
    return [None if table is None else table.to_pylist() for table in tables]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", [*LOG, *TIMES])
def test_a_damaged_file_is_named_with_a_next_step(run: RunWriter, kind: str, damage: str) -> None:
    """Step times that somebody deleted are a run without step times."""
    path = file_in(run, kind)
    DAMAGE[damage](path)
    if (kind, damage) == ("latency", "missing"):
        assert run.latency() is None
        return
    with pytest.raises(RunUnreadable, match=rf"{path.name} (is damaged|cannot be read)") as caught:
        read_all(run)
    assert (
        "time the steps again" if kind == "latency" else "measure it again with alphaprof profile --resume"
    ) in caught.value.hint
    assert run.damaged_shards() == ([] if kind == "latency" else [1])
    with pytest.raises(RunUnreadable, match=path.name):
        run.verify()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", MADE_AGAIN)
def test_what_the_log_can_tell_is_worked_out_again(run: RunWriter, kind: str, damage: str) -> None:
    """And written by `finish`, under the name that it had: the content is the same."""
    expected, before, path = read_all(run), contents(run), file_in(run, kind)
    DAMAGE[damage](path)
    again = RunWriter.open(run.path)
    assert read_all(again) == expected
    assert again.damaged == ({str(path.relative_to(run.path))} if damage != "missing" or kind == "documents" else set())
    with pytest.raises(RunUnreadable, match=path.name) as caught:
        again.verify()
    assert caught.value.hint == "write it again with alphaprof profile --resume"
    again.finish(join_totals)
    RunWriter.open(run.path).verify()
    assert contents(run) == before


def test_a_bit_in_a_file_that_is_too_large_to_be_read_whole_is_found_too(
    run: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the footer's digest, or by the checksum of its page: whatever bit it is but for the headers of pages."""
    monkeypatch.setattr("alphaprof.log.run.SMALL", 0)
    path = file_in(run, "positions")
    expected, content = run.positions("small", 1), path.read_bytes()
    rng = np.random.default_rng(0)
    silent = 0
    for bit in rng.choice(8 * len(content), 300, replace=False):
        path.write_bytes(flipped(path, int(bit)))
        with contextlib.suppress(RunUnreadable):
            silent += not run.positions("small", 1).equals(expected)
        path.write_bytes(content)
    assert silent == 0


def test_shards_that_changed_places_are_found(run: RunWriter) -> None:
    first, second = (run.path / run.name_of("positions/draft=small", index) for index in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(RunUnreadable, match="is damaged"):
        run.positions("small", 0)
    assert run.damaged_shards() == [0, 1]


def test_a_copy_without_its_log_is_verified_as_what_it_is(run: RunWriter) -> None:
    """Damaged totals come from the run that it was copied from."""
    shutil.rmtree(run.path / "positions")
    run.verify()
    shutil.rmtree(run.path / "continuations")
    run.verify()
    file_in(run, "totals").write_bytes(b"")
    with pytest.raises(RunUnreadable) as caught:
        run.verify()
    assert caught.value.hint == "copy it again from the run that has the position log"


def test_a_run_that_goes_on_has_the_shards_that_are_committed_without_a_gap(run: RunWriter, tmp_path: Path) -> None:
    """In whatever order they come; each is read as soon as those before it are there."""
    run = write_run(tmp_path / "many", dataclasses.replace(MANY, shard_documents=2))
    going = interrupted(run, tmp_path / "going", 1)
    for index, there in ((3, 1), (2, 1), (1, 4)):
        assert commit_again(going, run, index)
        opened = RunWriter.open(going.path)
        assert (len(opened.shards), set(opened.commits())) == (there, {0, *range(index, 4)})
        assert opened.documents().equals(run.documents().slice(0, 2 * there))
    assert [opened.positions("small", index) for index in range(4)] == [run.positions("small", index) for index in range(4)]
    going.refresh()
    assert going.manifest == opened.manifest


MANY = Recipe(domains={"code": Domain(documents=8)})


@pytest.mark.parametrize("damage", ["half", "another shard's", "edited"])
def test_a_damaged_commit_is_none_for_readers_and_its_shard_is_measured_again(
    run: RunWriter, tmp_path: Path, damage: str
) -> None:
    going = interrupted(run, tmp_path / "going")
    path, text = going.path / "commits" / "00001.json", (going.path / "commits" / "00001.json").read_text()
    data = json.loads(text) | {"seconds": 1.0}
    other = (going.path / "commits" / "00000.json").read_text()
    path.write_text({"half": text[: len(text) // 2], "another shard's": other, "edited": json.dumps(data)}[damage])
    opened = RunWriter.open(going.path)
    assert len(opened.shards) == 1
    assert opened.damaged_shards() == [1]
    opened.withdraw(1)
    assert not path.exists()


def test_a_file_that_the_manifest_does_not_name_does_not_exist(run: RunWriter) -> None:
    (totals,) = run.totals_parts("small")
    assert RunWriter(run.path, dataclasses.replace(run.manifest, files={})).latency() is None
    named = {name: file for name, file in run.manifest.files.items() if not name.startswith("totals")}
    assert RunWriter(run.path, dataclasses.replace(run.manifest, files=named)).totals_parts("small") == []
    with pytest.raises(RunUnreadable, match="is not in the run's manifest"):
        RunWriter(run.path, dataclasses.replace(run.manifest, files={})).continuations(0)
    assert (run.path / totals.name).exists()


def test_the_log_of_a_head_has_at_most_66_bytes_a_position_on_greedy_text(tmp_path: Path) -> None:
    """With 8 depths and all rules, in a shard as large as a run's; docs/research/performance.md has sampled text."""
    domain = Domain(documents=160, shortest=64, longest=128)
    recipe = Recipe(
        {"code": domain}, {}, (1, 4, 8), rules=LOGGED_RULES, heads={"head": {}}, shard_documents=160, latency=False
    )
    assert write_run(tmp_path / "run", recipe).manifest.drafts["head"].depths == 8
    assert 50 < bytes_per_position(tmp_path / "run") <= 66
