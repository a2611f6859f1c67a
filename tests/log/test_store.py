"""The run directory: nothing half-written is ever seen, and what cannot be written or read says so."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from alphaprof.log.claim import Owner, claimed

from alphaprof.errors import DiskFull, RunExists, RunUnreadable
from alphaprof.log import claim as claim_module
from alphaprof.log import files, store
from alphaprof.log.files import replacing
from alphaprof.log.schema import Column
from alphaprof.log.store import Run, begin, require_writable, write_table
from alphaprof.report.build import build_report
from alphaprof.rules import DEFAULT_RULES
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals, write_totals
from scripts.bench_log import bytes_per_position
from tests.synthetic import Domain, Recipe, contents, interrupted, write_run

COLUMNS = (Column("share", pa.float32(), "A share.", low=0, high=1),)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
        assert temporary.name.startswith(".")
    with pytest.raises(DiskFull, match="No such file"), replacing(path) as temporary:
        temporary.with_name("other").rename(path)  # fails before anything was written
    assert path.read_text() == "first"
    assert [item.name for item in path.parent.iterdir()] == ["file"]


def test_a_file_is_on_the_disk_before_it_takes_its_place_and_its_folder_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file after its rename could otherwise be empty where the power went."""
    steps: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: steps.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
    monkeypatch.setattr(Path, "replace", lambda one, other: steps.append("replaced") or replace(one, other))
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("whole")
    assert steps == [temporary.name, "replaced", tmp_path.name]


REMEDIES = {
    errno.ENOSPC: "free space; a profile goes on with --resume",
    errno.EDQUOT: "free space; a profile goes on with --resume",
    errno.EACCES: "correct the permissions",
    errno.EROFS: "correct the permissions",
    errno.EFBIG: "lower shard_documents",
    errno.EIO: "check that disk or mount",
    errno.ESTALE: "check that disk or mount",
    errno.EBUSY: "check that disk or mount",
}


@pytest.mark.parametrize("code", REMEDIES, ids=errno.errorcode.get)
def test_a_full_disk_is_an_error_that_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, pa.table({"share": pa.array([0.5], pa.float32())}), COLUMNS)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store.pq, "write_table", full)
    with pytest.raises(DiskFull, match=rf"cannot write .*table\.parquet: {os.strerror(code)}") as caught:
        write_table(path, pa.table({"share": pa.array([0.25], pa.float32())}), COLUMNS)
    assert REMEDIES[code] in caught.value.hint
    assert path.read_bytes() == before


def test_a_table_that_contradicts_its_declaration_is_a_bug_and_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"share holds 1\.5, above 1"):
        write_table(tmp_path / "t.parquet", pa.table({"share": pa.array([1.5], pa.float32())}), COLUMNS)
    assert list(tmp_path.iterdir()) == []


def test_a_place_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="is not a directory"):
        require_writable(tmp_path / "file" / "run")
    require_writable(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no run"),
        ("{", "cannot be read"),
        ("[]", "is not version 4"),
        ('{"format": "alphaprof-run", "version": 1}', "is not version 4"),
        ('{"format": "alphaprof-run", "version": 4}', "is damaged"),
    ],
)
def test_a_directory_that_is_no_run_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RunUnreadable, match=message):
        Run.open(tmp_path)


def test_a_shard_that_a_killed_process_had_not_finished_is_removed(tmp_path: Path) -> None:
    """Of a run that goes on: other readers of its folders would see documents that the manifest does not name."""
    recipe = Recipe(drafts={"a": 0.0, "b": 0.1}, shard_documents=2)
    run = write_run(tmp_path / "run", recipe)
    assert len(run.shards) > 2
    before = contents(run)
    run.remove_leftovers()
    assert contents(run) == before
    going = interrupted(run, tmp_path / "going", 2)
    (going.path / "positions" / "draft=b" / "part-00002.parquet").unlink()
    (going.path / "continuations" / "part-00002.parquet").unlink()
    (going.path / "positions" / ".part-00003.parquet.1.tmp").touch()
    going.remove_leftovers()
    left = ["part-00000.parquet", "part-00001.parquet"]
    for folder in ("positions/draft=a", "positions/draft=b", "continuations"):
        assert sorted(path.name for path in (going.path / folder).iterdir()) == left
    assert not list(going.path.rglob(".*"))


@pytest.mark.parametrize("damage", [b"", None], ids=["empty", "one bit"])
def test_damaged_totals_count_as_missing_where_there_is_a_log(run: Run, damage: bytes | None) -> None:
    (totals,) = run.totals_parts("small")
    totals.path.write_bytes(flipped(totals.path, 8 * 50) if damage is None else damage)
    assert run.totals_parts("small") == []
    assert run.damaged == {"totals/draft=small/part-00000-00001.parquet"}
    shutil.rmtree(run.path / "positions")
    with pytest.raises(RunUnreadable, match=r"part-00000-00001\.parquet is damaged") as caught:
        run.totals_parts("small")
    assert caught.value.hint == "copy it again from the run that has the position log"


def flipped(path: Path, bit: int) -> bytes:
    """The content of a file with one bit changed."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


STORY = Domain(documents=2, temperature=0.7, continuation="sampled")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path / "run", Recipe(domains={"code": Domain(documents=3), "story": STORY}))


def test_what_was_not_computed_or_measured_is_none(tmp_path: Path, run: Run) -> None:
    assert len(run.totals_parts("small")) == 1
    run.totals_parts("small")[0].path.unlink()
    assert run.totals_parts("small") == []
    assert write_run(tmp_path / "untimed", Recipe(latency=False)).latency() is None


def test_documents_are_those_of_complete_shards_with_their_settings(run: Run) -> None:
    """The rows of documents.parquet; greedy text has no sampling settings."""
    table = run.documents()
    assert table.to_pylist() == pq.ParquetFile(run.path / "documents.parquet").read().to_pylist()
    assert table["temperature"].to_pylist() == [None, 0.7, None, 0.7, None]
    run.write_manifest(dataclasses.replace(run.manifest, status="running", shards=run.shards[:1]))
    assert len(Run.open(run.path).documents()) == 4


LOG = ["positions/draft=small/part-00001.parquet", "continuations/part-00001.parquet"]
MADE_AGAIN = ["totals/draft=small/part-00000-00001.parquet", "documents.parquet"]
DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit in a page": lambda path: path.write_bytes(flipped(path, 8 * 40)),
    "one bit in the footer": lambda path: path.write_bytes(flipped(path, 8 * (path.stat().st_size - 300))),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"PAR1"),
    "missing": lambda path: path.unlink(),
}


def read_all(run: Run) -> list[object]:
    """What every table of a run holds, position logs and continuations of its second shard."""
    request = TotalsRequest(run.rules, run.gammas)
    tables = [run.positions("small", 1), run.continuations(1), run.documents(), run.latency()]
    tables.append(read_totals(run, "small", request))
    return [None if table is None else table.to_pylist() for table in tables]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [*LOG, "latency.parquet"])
def test_a_damaged_file_is_named_with_a_next_step(run: Run, name: str, damage: str) -> None:
    """Step times that somebody deleted are a run without step times."""
    path = run.path / name
    DAMAGE[damage](path)
    if (name, damage) == ("latency.parquet", "missing"):
        assert run.latency() is None
        return
    with pytest.raises(RunUnreadable, match=rf"{path.name} (is damaged|cannot be read)") as caught:
        read_all(run)
    steps = {"positions": "--reuse-continuations keeps the text", "continuations": "into a new directory"}
    assert steps.get(name.partition("/")[0], "--resume times the steps again") in caught.value.hint
    with pytest.raises(RunUnreadable, match=path.name):
        run.verify()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", MADE_AGAIN)
def test_what_the_log_can_tell_is_worked_out_again(run: Run, name: str, damage: str) -> None:
    expected = read_all(run)
    DAMAGE[damage](run.path / name)
    again = Run.open(run.path)
    assert read_all(again) == expected
    assert again.damaged == ({name} if damage != "missing" or name == "documents.parquet" else set())
    with pytest.raises(RunUnreadable, match=Path(name).name) as caught:
        again.verify()
    assert caught.value.hint == "alphaprof profile with --resume makes it again"
    again.mend_documents()
    write_totals(again)
    Run.open(run.path).verify()


def test_a_bit_in_a_file_that_is_too_large_to_be_read_whole_is_found_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the footer's digest, or by the checksum of its page: whatever bit it is but for the headers of pages."""
    monkeypatch.setattr(files, "SMALL", 0)
    path = run.path / LOG[0]
    expected, content = run.positions("small", 1), path.read_bytes()
    rng = np.random.default_rng(0)
    silent = 0
    for bit in rng.choice(8 * len(content), 300, replace=False):
        path.write_bytes(flipped(path, int(bit)))
        with contextlib.suppress(RunUnreadable):
            silent += not run.positions("small", 1).equals(expected)
        path.write_bytes(content)
    assert silent == 0


def test_shards_that_changed_places_are_found(run: Run) -> None:
    first, second = (run.part("positions", index, "small") for index in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(RunUnreadable, match="is damaged"):
        run.positions("small", 0)


def test_a_manifest_that_speaks_of_other_documents_is_found(run: Run) -> None:
    """Numbers of documents and positions, as two processes that wrote one directory would leave them."""
    first = dataclasses.replace(run.shards[0], documents=3)
    with pytest.raises(RunUnreadable, match="has 4 rows, and the manifest says 3"):
        Run(run.path, dataclasses.replace(run.manifest, shards=(first, *run.shards[1:]))).documents()
    first = dataclasses.replace(run.shards[0], positions=7)
    odd = Run(run.path, dataclasses.replace(run.manifest, shards=(first, *run.shards[1:])))
    for read in (odd.documents, lambda: odd.positions("small", 0)):
        with pytest.raises(RunUnreadable, match="and the manifest says"):
            read()
    with pytest.raises(RunUnreadable, match="the manifest says"):
        build_report(odd)


def test_a_copy_without_its_log_is_verified_as_what_it_is(run: Run) -> None:
    """Damaged totals come from the run that it was copied from."""
    shutil.rmtree(run.path / "positions")
    run.verify()
    shutil.rmtree(run.path / "continuations")
    run.verify()
    (run.path / MADE_AGAIN[0]).write_bytes(b"")
    with pytest.raises(RunUnreadable) as caught:
        run.verify()
    assert caught.value.hint == "copy it again from the run that has the position log"


def test_a_damaged_shard_of_a_partial_run_is_found_before_others_are_measured(run: Run, tmp_path: Path) -> None:
    going = interrupted(run, tmp_path / "going")
    going.require_log()
    DAMAGE["half"](going.part("positions", 0, "small"))
    for read in (going.require_log, lambda: going.positions("small", 0), going.verify):
        with pytest.raises(RunUnreadable) as caught:
            read()
        assert caught.value.hint == "profile again into a new directory"


def test_a_file_that_the_manifest_does_not_name_does_not_exist(run: Run) -> None:
    (totals,) = run.totals_parts("small")
    assert Run(run.path, dataclasses.replace(run.manifest, files={})).latency() is None
    named = {name: file for name, file in run.manifest.files.items() if not name.startswith("totals")}
    assert Run(run.path, dataclasses.replace(run.manifest, files=named)).totals_parts("small") == []
    with pytest.raises(RunUnreadable, match="not one of the files"):
        Run(run.path, dataclasses.replace(run.manifest, files={})).continuations(0)
    assert totals.path.exists()


RICH = Recipe(domains={"story": STORY}, rules=("strict", "multi_draft_2"), certificates=True)


def test_columns_on_request_are_read_by_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "rich", RICH)
    found = run.positions("small", 0, ["threshold_strict", "emitted_multi_draft_2", "token"])
    assert sorted(found.column_names) == ["emitted_multi_draft_2", "threshold_strict", "token"]
    assert max(column.null_count for column in found.columns) == 0
    assert set(run.positions("small", 0, ["threshold_top_m_3", "token"]).column_names) == {"token"}


def test_a_log_of_an_earlier_profile_is_read_as_what_it_holds(tmp_path: Path) -> None:
    """It has the columns of its own manifest, and none that came later."""
    run = write_run(tmp_path / "rich", RICH)
    assert [column.name for column in run.log_rules.columns] == run.positions("small", 0).column_names
    extra = ["emitted_multi_draft_2", "target_top_10_prob", "thresholds_exact", "threshold_strict"]
    assert run.positions("small", 0).column_names[-4:] == extra
    run.write_manifest(dataclasses.replace(run.manifest, emitted=(), certified=()))
    assert Run.open(run.path).positions("small", 0).column_names[-2:] == ["accept_strict", "accept_multi_draft_2"]


CONFIG: dict[str, object] = {"target": "a"}


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    """Another process is refused while it lives, whatever it asks for, and told who it is; afterwards nothing is left."""
    out = tmp_path / "new" / "run"
    with claimed(out, CONFIG) as claim:
        for config, profile in ((CONFIG, "this profile"), ({"target": "b"}, "another profile")):
            for resume in (False, True):
                with (
                    pytest.raises(
                        RunExists, match=rf"is being written with {profile} \(process {os.getpid()} on "
                    ) as caught,
                    claimed(out, config, resume),
                ):
                    pass
                assert caught.value.hint == "choose another --out, or wait"
        claim.require()
    assert not out.exists()
    assert (tmp_path / "new").exists()


def test_what_a_killed_process_left_is_taken_over_by_one(tmp_path: Path) -> None:
    """Files without a manifest, as an import leaves them, are removed; a manifest stays."""
    process = multiprocessing.get_context("fork").Process(target=abandon, args=(tmp_path / "run",))
    process.start()
    process.join()
    (tmp_path / "run" / "totals" / "half").unlink()
    with claimed(tmp_path / "run", CONFIG) as claim:
        assert (claim.number, claim.owner.begun) == (2, True)
        begin(claim)
        assert [path.name for path in (tmp_path / "run").iterdir()] == [claim.path.name]
        (tmp_path / "run" / "manifest.json").touch()
        with pytest.raises(RunExists, match="holds a run already"):
            begin(claim)


def test_a_directory_that_is_made_again_has_another_owner(tmp_path: Path) -> None:
    """The first one, whose directory was removed, writes nothing there and takes nothing away."""
    out = tmp_path / "run"
    before = claimed(out, CONFIG)
    first = before.__enter__()
    begin(first)
    shutil.rmtree(out)
    with claimed(out, {"target": "b"}) as second:
        begin(second)
        (out / "documents.parquet").touch()
        with pytest.raises(RunExists, match=r"another process writes .* now"):
            first.require()
        before.__exit__(None, None, None)
        second.require()
        assert (out / "documents.parquet").exists()


def test_one_directory_under_two_names_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with claimed(Path("run"), CONFIG), pytest.raises(RunExists), claimed(tmp_path / "run", CONFIG):
        pass


ELSEWHERE = {"a dead process": ({"ticks": 1}, False), "a child of init": ({"process": 1, "ticks": None}, True)}


@pytest.mark.parametrize(("facts", "alive"), ELSEWHERE.values(), ids=list(ELSEWHERE))
def test_a_process_lives_where_the_system_says_so(facts: dict[str, Any], alive: bool) -> None:
    assert dataclasses.replace(Owner.this(""), **facts).alive is alive


def test_a_process_that_may_not_be_looked_at_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another user, where processes of others are hidden."""

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    monkeypatch.setattr(claim_module, "_ticks", lambda process: 5 if process == os.getpid() else None)
    assert dataclasses.replace(Owner.this(""), process=os.getpid() + 1).alive is True
    monkeypatch.setattr(claim_module, "_ticks", lambda process: 5 if process == os.getpid() else -1)  # a zombie
    assert dataclasses.replace(Owner.this(""), process=os.getpid() + 1).alive is False


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    """A directory of the user's own keeps whatever it holds, even files that are called like ours."""
    mine = tmp_path / "mine" / "totals" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for _ in range(2):
        with claimed(mine.parent.parent, CONFIG) as claim, pytest.raises(RunExists, match="is not empty"):
            begin(claim)
    process = multiprocessing.get_context("fork").Process(target=abandon, args=(tmp_path / "mine", False))
    process.start()
    process.join()
    with claimed(tmp_path / "mine", CONFIG) as claim, pytest.raises(RunExists, match="is not empty"):
        begin(claim)
    assert [path.name for path in mine.parent.parent.iterdir()] == ["totals"]
    assert mine.read_text() == "mine"


def test_what_a_user_puts_beside_a_killed_run_stays(tmp_path: Path) -> None:
    """Also a profile whose manifest was moved away: its shards are hours of work."""
    out = tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(target=abandon, args=(out,))
    process.start()
    process.join()
    mine = ["train.parquet", ".draft.tmp", "totals/thesis.txt", "totals/draft=engine/part-00000.parquet.bak"]
    for name in mine:
        (out / name).write_text("mine")
    with claimed(out, CONFIG) as claim, pytest.raises(RunExists, match="is not empty"):
        begin(claim)
    left = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert left == sorted([*mine, "totals/half"])
    (out / "positions").mkdir()
    (out / "documents.parquet").touch()
    with claimed(out, CONFIG) as claim:
        claim.owner = dataclasses.replace(claim.owner, begun=True)
        claim.clear()
    assert (out / "documents.parquet").exists()


def test_a_failed_import_or_profile_leaves_nothing_without_a_manifest(tmp_path: Path) -> None:
    with claimed(tmp_path / "run", CONFIG) as claim:
        begin(claim)
        (tmp_path / "run" / "totals").mkdir()
        (tmp_path / "run" / "documents.parquet").touch()
    assert not (tmp_path / "run").exists()


def test_a_claim_that_could_not_be_given_back_does_not_lock_its_own_process_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, claimed(tmp_path / "run", CONFIG) as claim:
        begin(claim)
        (tmp_path / "run" / "documents.parquet").touch()
        patch.setattr(Path, "unlink", refused)
    assert claim.path.exists()
    with claimed(tmp_path / "run", CONFIG) as again:
        begin(again)
    assert not (tmp_path / "run" / "documents.parquet").exists()


def abandon(out: Path, begun: bool = True) -> None:
    """Claim a directory and end like a process that is killed."""
    kept = claimed(out, CONFIG)
    claim = kept.__enter__()
    if not begun:
        (out / "..owner-000001.json.7.tmp").touch()  # killed while it noted that it began
        os._exit(9)
    begin(claim)
    (out / "totals" / "draft=engine").mkdir(parents=True)
    (out / "totals" / "half").touch()
    for name in ("documents.parquet", ".manifest.json.7.tmp", "totals/draft=engine/part-00000.parquet"):
        (out / name).touch()
    os._exit(9)


def test_an_owner_on_another_machine_may_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only --resume takes its directory over; and what it still writes then is refused."""
    with monkeypatch.context() as patch:
        patch.setattr(claim_module, "_machine", lambda: "elsewhere")
        before = claimed(tmp_path / "run", CONFIG)
        first = before.__enter__()
    with pytest.raises(RunExists) as caught, claimed(tmp_path / "run", CONFIG):
        pass
    path = tmp_path / "run" / ".owner-000001.json"
    assert caught.value.hint == f"choose another --out; if that process has ended, add --resume, or delete {path}"
    with pytest.raises(RunExists, match="may still be written") as caught, claimed(tmp_path / "run", None):
        pass
    assert caught.value.hint == f"choose another --out; if that process has ended, delete {path}"
    said: list[str] = []
    with claimed(tmp_path / "run", CONFIG, resume=True, say=said.append):
        assert said == [f"taking {tmp_path / 'run'} over from process {os.getpid()} on {platform.node()}, {said[0][-31:]}"]
        with pytest.raises(RunExists, match=r"another process writes .* now"):
            first.require()
        before.__exit__(None, None, None)
        assert len(list((tmp_path / "run").iterdir())) == 1


@pytest.mark.parametrize("loss", ["deleted", "renamed"])
def test_a_directory_that_is_gone_ends_the_run_at_the_next_write(tmp_path: Path, loss: str) -> None:
    """It is not made again, half empty."""
    source, out = write_run(tmp_path / "source"), tmp_path / "run"
    with claimed(out, CONFIG) as claim:
        run = Run(out, source.manifest, claim)
        run.write_positions(source.positions("small", 0), 0, "small")
        shutil.rmtree(out) if loss == "deleted" else out.rename(tmp_path / "elsewhere")
        for write in (lambda: run.write_positions(source.positions("small", 0), 0, "small"), run.write_documents):
            with pytest.raises(DiskFull, match="was deleted or renamed while it was written"):
                write()
        with pytest.raises(DiskFull, match="was deleted or renamed while it was written"):
            run.write_manifest(run.manifest)
    assert not out.exists()


def test_a_directory_that_may_not_be_written_is_refused_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    run = write_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(DiskFull, match="Read-only file system"), claimed(run.path, CONFIG, resume=True):
            pass
    with monkeypatch.context() as patch:  # a folder that may be written and not be listed
        patch.setattr(os, "listdir", refused)
        with pytest.raises(DiskFull, match="Read-only file system"), claimed(run.path, CONFIG, resume=True):
            pass
    monkeypatch.setattr(Path, "unlink", refused)
    (run.path / ".manifest.json.1.tmp").write_text("")
    with pytest.raises(DiskFull, match="Read-only file system"):
        run.remove_leftovers()


def test_the_log_of_a_head_has_at_most_82_bytes_a_position_on_greedy_text(tmp_path: Path) -> None:
    """With 8 depths and all rules, in a shard as large as a run's; of sampled text docs/performance.md states it."""
    domain = Domain(documents=160, shortest=64, longest=128)
    recipe = Recipe(
        {"code": domain}, {}, (1, 4, 8), rules=DEFAULT_RULES, heads={"head": {}}, shard_documents=160, latency=False
    )
    assert write_run(tmp_path / "run", recipe).manifest.drafts["head"].depths == 8
    assert 60 < bytes_per_position(tmp_path / "run") <= 82
