"""Who may write a directory: processes with the profile that it was begun with, and no other; and what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alphaprof.errors import DiskFull, RunExists
from alphaprof.log.schema import PROMPT_COLUMNS, arrow_schema
from alphaprof.log.storage import storage_of
from alphaprof.log.writer import Beginning, RunWriter, joined
from tests.synthetic import Recipe, manifest

CONFIG: dict[str, Any] = {"target": "a", "decision": {"gamma": 1}}
OTHER = CONFIG | {"target": "b"}
AGAIN = CONFIG | {"decision": {"gamma": 2}, "execution": {"workers": 2}}  # what it may go on with
PART = "totals/draft=engine/part-00000.0123abcd.parquet"
MINE = ["train.parquet", ".draft.tmp", "totals/thesis.txt", "totals/draft=engine/part-00000.parquet", "latency.parquet"]


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def begun(run: RunWriter) -> list[str]:
    """The files of a run whose process has begun it and measured nothing."""
    return sorted(["manifest.json", "profile.json", *run.manifest.files, f"workers/{run.worker}.json"])


@contextlib.contextmanager
def written(folder: Path, config: dict[str, Any] | None = None, resume: bool = False) -> Iterator[RunWriter]:
    """Join a directory and write files there, as the staging of prompts does."""
    with joined(storage_of(folder), config or CONFIG, resume):
        run = RunWriter(folder, manifest(Recipe()))
        with run.beginning():
            run.stage(arrow_schema(PROMPT_COLUMNS).empty_table(), 0)
            yield run


def test_processes_with_one_profile_share_a_directory_and_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by another name of the directory; who began it is said."""
    monkeypatch.chdir(tmp_path)
    with written(tmp_path / "run") as first, written(Path("run"), AGAIN) as second:
        for resume in (False, True):
            with pytest.raises(RunExists) as caught, written(Path("run"), OTHER, resume):
                pass
            assert f"run was begun with another profile (process {os.getpid()} on " in caught.value.message
            assert caught.value.hint == "choose another --out; if that process has ended, delete run"
        assert (second.begin(), first.begin()) == (True, False)
    assert files_in(tmp_path / "run") == sorted(
        ["manifest.json", "profile.json", *second.manifest.files, f"workers/{second.worker}.json"]
    )
    with pytest.raises(RunExists, match="already holds a run") as caught, written(Path("run")):
        pass
    assert "--resume" in caught.value.hint
    with joined(storage_of("run"), CONFIG, resume=True):
        pass


def test_who_fails_before_there_is_a_run_leaves_nothing_but_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for folder, there in (("new/run", False), ("mine", True)):
        with pytest.raises(ZeroDivisionError), written(tmp_path / folder):
            raise ZeroDivisionError
        assert not files_in(tmp_path)
        assert (tmp_path / folder).exists() is there


def test_a_process_that_fails_takes_nothing_from_another_that_begins_the_same_run(tmp_path: Path) -> None:
    for failing_first in (True, False):
        folder = tmp_path / str(failing_first)
        with contextlib.ExitStack() as failing, contextlib.ExitStack() as other:
            stacks = (failing, other) if failing_first else (other, failing)
            runs = [stack.enter_context(written(folder)) for stack in stacks]
            failing.close()
            run = runs[stacks.index(other)]
            assert run.begin()
        assert files_in(folder) == sorted(
            ["manifest.json", "profile.json", *run.manifest.files, f"workers/{run.worker}.json"]
        )


def abandon(folder: Path) -> None:
    """Begin a run and end like a process that is killed."""
    with written(folder):
        os._exit(9)


def killed(folder: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=abandon, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 9


def test_what_a_killed_process_began_is_gone_on_with_by_the_same_profile(tmp_path: Path) -> None:
    killed(tmp_path / "run")
    with pytest.raises(RunExists, match="was begun with another profile"), written(tmp_path / "run", OTHER):
        pass
    with written(tmp_path / "run") as run:
        assert run.begin()


def test_a_users_own_files_stay_wherever_they_lie(tmp_path: Path) -> None:
    """A directory that holds some is refused, even if they are called like ours; those that come later are kept."""
    for number, name in enumerate(("notes.txt", "totals/notes.txt", "profile.json", PART)):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
        with pytest.raises(RunExists, match="exists and is not empty") as caught, written(folder):
            pass
        assert (files_in(folder), caught.value.hint) == ([name], "choose a new directory for --out")
    with written(tmp_path / "run"):  # and no run comes of it
        for name in MINE:
            (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "run" / name).write_text("mine")
    assert files_in(tmp_path / "run") == sorted(["profile.json", *MINE])


def test_a_place_that_is_no_folder_or_cannot_be_made_is_refused_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises((DiskFull, RunExists)), written(path):
            pass
    assert files_in(tmp_path) == ["file"]


def test_a_profile_is_known_whatever_the_order_of_its_options_is() -> None:
    assert Beginning.of(CONFIG).digest == Beginning.of(dict(reversed(AGAIN.items()))).digest
    assert Beginning.of(CONFIG).digest != Beginning.of(OTHER).digest
    assert dataclasses.asdict(Beginning.of(CONFIG))["process"] == os.getpid()
