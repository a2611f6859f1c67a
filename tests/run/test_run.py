"""The run directory: nothing half-written is ever seen, and what cannot be written or read says so."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from alphaprof.errors import DiskFull, RunDamaged, RunExists, RunUnreadable
from alphaprof.run.journal import Journal, records_text
from alphaprof.run.manifest import part_name
from alphaprof.run.reader import Run
from alphaprof.run.storage import LocalStorage
from alphaprof.run.writer import RunWriter
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals, write_totals
from scripts.bench_log import bytes_per_position
from tests.loops import each
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
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nothing of the shard is recorded then, and the run goes on with it later."""
    going = interrupted(run, tmp_path / "going", 1)
    before = contents(going)
    with RunWriter.opened(going.path, resume=True) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing(code))
        with pytest.raises(DiskFull, match=rf"cannot write .*going.*: {os.strerror(code)}") as caught:
            score(writer, run, 1)
    assert REMEDIES[code] in caught.value.hint
    assert contents(going) == before
    with RunWriter.opened(going.path, resume=True) as writer:
        assert writer.lacking("rows") == [1]
        score(writer, run, 1)
    assert len(Run.open(going.path).shards) == 2


def score(writer: RunWriter, source: Run, index: int) -> None:
    """Write the rows of a shard that another run holds."""
    logs = {draft: source.positions(draft, index) for draft in source.manifest.drafts}
    writer.write_rows(source.shards[index], logs)


def test_the_files_of_a_shard_are_on_the_disk_before_its_record(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is synced and has its name before the next begins, and so has its folder: where the power goes, a record never
    names a file that is empty.
    """
    going, steps, replace = interrupted(run, tmp_path / "going", 1), list[str](), os.replace
    with RunWriter.opened(going.path, resume=True) as writer:
        monkeypatch.setattr(os, "fsync", lambda number: steps.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
        monkeypatch.setattr(os, "replace", lambda one, other: steps.append("named") or replace(one, other))
        score(writer, run, 1)
    expected = [".part-00001.parquet.", "named", "draft=small", ".rows-0000.json.", "named", "records"]
    assert len(steps) == len(expected)
    assert all(step.startswith(start) for step, start in zip(steps, expected, strict=True))


STORY = Domain(documents=2, temperature=0.7, continuation="sampled")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=3), "story": STORY}))


PART = part_name(1)
FILES = {
    "positions": f"positions/draft=small/{PART}",
    "continuations": f"continuations/{PART}",
    "prompts": f"prompts/{PART}",
    "latency": "latency.parquet",
    "totals": f"totals/draft=small/{part_name(0)}",
    "documents": "documents.parquet",
}
HINTS = {
    **dict.fromkeys(("positions", "continuations"), "measure it again with alphaprof profile --resume"),
    "prompts": "profile again into a new directory",
    "latency": "time the steps again",
    **dict.fromkeys(("totals", "documents"), "write it again with alphaprof profile --resume"),
}


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit in a page": lambda path: path.write_bytes(flipped(path, 8 * 40)),
    "one bit in the footer": lambda path: path.write_bytes(flipped(path, 8 * (path.stat().st_size - 300))),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"PAR1"),
    "missing": lambda path: path.unlink(),
}


def read_all(run: Run) -> list[object]:
    """What every table of a run holds, of its log the second shard."""
    request = TotalsRequest(run.rules, run.gammas)
    tables = [run.positions("small", 1), run.continuations(1), run.prompts(1), run.documents(), run.latency()]
    tables.append(read_totals(run, "small", request))
    return [None if table is None else table.to_pylist() for table in tables]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_named_with_a_next_step(run: Run, kind: str, damage: str) -> None:
    """Step times that somebody deleted are a run without step times, and totals are counted again from the log."""
    expected = read_all(run)
    DAMAGE[damage](run.path / FILES[kind])
    if (kind, damage) == ("totals", "missing"):
        assert not run.has_totals("small")
        assert read_all(run) == expected
    elif (kind, damage) == ("latency", "missing"):
        assert run.latency() is None
        run.verify()
        return
    else:
        with pytest.raises(RunUnreadable, match=rf"{FILES[kind]} (is damaged|cannot be read)") as caught:
            read_all(run)
        assert HINTS[kind] in caught.value.hint
    with pytest.raises(RunUnreadable, match=FILES[kind]) as caught:
        run.verify()
    assert caught.value.hint == HINTS["prompts" if kind == "prompts" else "totals"]


@each("name", ["notes.txt", "totals/notes.txt", "records/rows-0000.json", "documents.parquet", "prompts/part-00000.parquet"])
def test_a_users_own_files_are_refused_and_those_that_come_later_stay(run: Run, tmp_path: Path, name: str) -> None:
    """Even if they are called like those of a run."""
    own = tmp_path / name.replace("/", "-") / name
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    for resume in (False, True):
        with pytest.raises(RunExists, match=r"exists and is not empty") as caught:
            RunWriter.opened(tmp_path / name.replace("/", "-"), resume).__enter__()
        assert (caught.value.hint, own.read_text()) == ("choose a new directory for --out", "mine")
    mine = run.path / "totals" / "mine.parquet"
    mine.write_text("mine")
    with RunWriter.opened(run.path, resume=True) as writer:
        writer.finish(write_totals)
    assert mine.read_text() == "mine"


def test_a_place_that_is_no_folder_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises((DiskFull, RunExists)), RunWriter.opened(path):
            pass
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_process_that_cannot_go_on_with_a_damaged_run_changes_nothing(run: Run) -> None:
    """Its models may be others: whoever reads totals and documents can do so still."""
    (run.path / FILES["positions"]).unlink()
    before = contents(run)
    with RunWriter.opened(run.path, resume=True) as writer:
        assert (writer.forget_damaged(), writer.manifest.status) == ([1], "running")
    assert contents(run) == before


def test_a_disk_that_fails_for_a_moment_is_no_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalStorage.read

    def failing(self: LocalStorage, name: str) -> bytes:
        if name.endswith(PART):
            raise RunUnreadable(f"{name} cannot be read: Input/output error", "check that disk")
        return read(self, name)

    monkeypatch.setattr(LocalStorage, "read", failing)
    with RunWriter.opened(run.path, resume=True) as writer, pytest.raises(RunUnreadable, match="Input/output"):
        writer.forget_damaged()
    assert Run.open(run.path).manifest.status == "complete"


def test_shards_that_changed_places_are_found(run: Run) -> None:
    first, second = (run.path / f"positions/draft=small/{part_name(index)}" for index in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    for index in (0, 1):
        with pytest.raises(RunDamaged, match="is damaged"):
            run.positions("small", index)


def test_a_copy_without_its_log_is_verified_as_what_it_is(run: Run) -> None:
    """Damaged totals come from the run that it was copied from."""
    shutil.rmtree(run.path / "positions")
    run.verify()
    shutil.rmtree(run.path / "continuations")
    run.verify()
    (run.path / FILES["totals"]).write_bytes(b"")
    with pytest.raises(RunUnreadable) as caught:
        run.verify()
    assert "copy it again from the run that it comes from" in caught.value.hint


def test_a_run_that_goes_on_has_the_shards_that_are_recorded_without_a_gap(tmp_path: Path) -> None:
    """In whatever order they come, as from several workers; each is read as soon as those before it are there."""
    run = write_run(tmp_path / "many", dataclasses.replace(MANY, shard_documents=2))
    going = interrupted(run, tmp_path / "going", 1)
    with RunWriter.opened(going.path, resume=True) as writer:
        for index, there in ((3, 1), (2, 1), (1, 4)):
            score(writer, run, index)
            opened = Run.open(going.path)
            assert (len(opened.shards), set(Journal.of(opened.storage)["rows"])) == (there, {0, *range(index, 4)})
            assert opened.documents().equals(run.documents().slice(0, 2 * there))
    assert [opened.positions("small", index) for index in range(4)] == [run.positions("small", index) for index in range(4)]
    going.refresh()
    assert going.manifest == opened.manifest


MANY = Recipe(domains={"code": Domain(documents=8)})


def test_a_run_that_goes_on_is_read_whole_though_its_writer_records_meanwhile(run: Run, tmp_path: Path) -> None:
    """A reader keeps the shards that it knew of when it began, until it asks again."""
    going = interrupted(run, tmp_path / "going", 1)
    with RunWriter.opened(going.path, resume=True) as writer:
        score(writer, run, 1)
    assert (len(going.shards), len(going.documents())) == (1, run.shards[0].documents)
    going.refresh()
    assert len(going.shards) == len(run.shards)


@pytest.mark.parametrize("damage", ["half", "of another shard", "edited", "flipped format"])
def test_damaged_records_are_an_error_for_readers_and_not_recorded_for_the_writer(
    run: Run, tmp_path: Path, damage: str
) -> None:
    """Of a run that is running: the manifest of a complete one has all of them."""
    going = interrupted(run, tmp_path / "going")
    path = going.path / "records" / "rows-0000.json"
    text, record = path.read_text(), Journal.of(going.storage)["rows"][0]
    other = dataclasses.replace(record, shard=dataclasses.replace(record.shard, index=256))
    path.write_text(
        {
            "half": text[: len(text) // 2],
            "of another shard": records_text([other]).decode(),
            "edited": text.replace('"seconds":0.0', '"seconds":1.0'),
            "flipped format": text.replace("alphaprof-records", "alphaprof-rdcords"),
        }[damage]
    )
    with pytest.raises(RunDamaged, match=r"records/rows-0000\.json (is damaged|cannot be read)") as caught:
        Run.open(going.path)
    assert caught.value.hint == "measure its shards again with alphaprof profile --resume"
    with RunWriter.opened(going.path, resume=True) as writer:
        assert writer.lacking("rows") == [0, 1]
    shutil.copy(path, run.path / "records")
    assert len(Run.open(run.path).shards) == 2


def test_a_file_that_the_manifest_does_not_name_does_not_exist(run: Run) -> None:
    assert Run(run.path, dataclasses.replace(run.manifest, files={})).latency() is None
    named = {name: file for name, file in run.manifest.files.items() if not name.startswith("totals")}
    assert not Run(run.path, dataclasses.replace(run.manifest, files=named)).has_totals("small")
    with pytest.raises(RunUnreadable, match="is not in the run's manifest"):
        Run(run.path, dataclasses.replace(run.manifest, files={})).continuations(0)
    assert (run.path / FILES["totals"]).exists()


def test_the_log_of_a_head_has_at_most_82_bytes_a_position_on_greedy_text(tmp_path: Path) -> None:
    """With 8 depths and all rules, in a shard as large as a run's; docs/research/performance.md has sampled text."""
    domain = Domain(documents=160, shortest=64, longest=128)
    recipe = Recipe(
        {"code": domain}, {}, (1, 4, 8), rules=LOGGED_RULES, heads={"head": {}}, shard_documents=160, latency=False
    )
    assert write_run(tmp_path / "run", recipe).manifest.drafts["head"].depths == 8
    assert 55 < bytes_per_position(tmp_path / "run") <= 82
