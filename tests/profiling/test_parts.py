"""Parts that are profiled by themselves and merged, and texts that another machine scores: the rows of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from alphaprof.commands.merge import merge
from alphaprof.config.load import load_profile
from alphaprof.config.part import WHOLE, Part, part_of
from alphaprof.errors import OptionInvalid, RunMismatch
from alphaprof.profiling import profile as profiling
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from tests.reporting import every
from tests.runs import Silent, mixed_file, profile_file, require_same_tables
from tests.synthetic import Recipe, write_run

pytestmark = pytest.mark.models


def profiled(path: Path, out: Path, part: Part = WHOLE, *changes: str, **more: Any) -> Run:
    """A part of a profile."""
    return profiling.profile(load_profile(path, list(changes)), out, Silent(), part=part, **more)


def require_equal(found: Run, expected: Run) -> None:
    """Equal tables, and an equal report."""
    require_same_tables(Path(found.path), expected)
    reports = [build_report(run) for run in (found, expected)]
    assert reports[0].answer == reports[1].answer
    assert reports[0].traffic == reports[1].traffic
    assert every(reports[0]) == every(reports[1])


@pytest.fixture(scope="module")
def parts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three parts of the profile of `sampled_run`."""
    folder = tmp_path_factory.mktemp("parts")
    path = mixed_file(folder, tiny)
    return [str(profiled(path, folder / f"part-{index}", Part(index, 3)).path) for index in range(3)]


def test_merged_parts_are_the_run_of_one_process(sampled_run: Run, parts: list[str], tmp_path: Path) -> None:
    assert [Run.open(part).manifest.staged for part in parts] == [3, 3, 3]
    merged = merge([parts[2], parts[0], parts[1]], tmp_path / "run")
    assert merged.manifest.part == "0/1"
    require_equal(Run.open(merged.path), sampled_run)


def test_more_parts_than_blocks_leave_some_empty(tiny: Path, tmp_path: Path) -> None:
    path = profile_file(tmp_path, tiny, costs={"source": "none"}, shard_documents=8)
    whole = profiled(path, tmp_path / "whole")
    parts = [profiled(path, tmp_path / str(index), Part(index, 4)) for index in range(4)]
    assert [run.manifest.documents for run in parts] == [8, 7, 0, 0]
    require_equal(merge([str(run.path) for run in parts], tmp_path / "run"), whole)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0, 1), r"1 of 3 parts are missing: 2/3"),
        ((0, 1, 1), r"are both part 1/3"),
        ((0, 1, "whole"), r"are both part|is part 0/1, and .* 0/3"),
        ((0, 1, "limit"), r"does not fit .*: another profile \(data\)"),
        ((0, 1, "device"), r"does not fit .*: device cuda, not cpu"),
        ((0, 1, "model"), r"does not fit .*: another close \(fingerprint\)"),
        ((0, 1, "running"), r"is not complete"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_both_sides_named(
    given: tuple[Any, ...], words: str, parts: list[str], sampled_run: Run, tmp_path: Path
) -> None:
    def changed(kind: str) -> str:
        if kind == "whole":
            return str(sampled_run.path)
        run = Run.open(shutil.copytree(parts[2], tmp_path / kind))
        data = json.loads((run.path / "manifest.json").read_text())
        if kind == "limit":
            data["config"]["data"][0]["limit"] = 3
        elif kind == "device":
            data["environment"]["device"] = "cuda"
        elif kind == "model":
            data["drafts"]["close"]["fingerprint"] = "0" * 64
        else:
            data["status"], data["shards"], data["files"] = "running", [], {}
        from alphaprof.run.manifest import digest_of

        (run.path / "manifest.json").write_text(json.dumps(data | {"digest": digest_of(data)}))
        return str(run.path)

    names = [parts[each] if isinstance(each, int) else changed(each) for each in given]
    with pytest.raises(RunMismatch, match=words):
        merge(names, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_whole_run_merges_into_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe())
    require_same_tables(Path(merge([str(run.path)], tmp_path / "other").path), run)


def test_texts_of_one_machine_are_scored_by_another(
    sampled_run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of a package may score, unless rows are there already; a text is not written by two."""
    path, out = mixed_file(tmp_path, tiny), tmp_path / "run"
    run = profiled(path, out, texts_only=True)
    assert (run.manifest.status, sorted(run.journal["texts"]), run.journal["rows"]) == ("running", [*range(9)], {})
    with monkeypatch.context() as patch:
        patch.setattr(profiling, "version", lambda name: "1.0")
        run = profiled(path, out, resume=True)
    assert run.manifest.environment["packages"]["torch"] == "1.0"
    assert run.manifest.texts_environment["packages"]["torch"] != "1.0"
    require_equal(Run.open(out), sampled_run)


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("0/1", {}, (0, 1)),
        ("3/64", {}, (3, 64)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "1"}, (2, 8)),
        ("auto", {"JOB_COMPLETION_INDEX": "5", "ALPHAPROF_PARTS": "6"}, (5, 6)),
        ("auto", {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "4"}, (1, 4)),
        *((text, {}, None) for text in ("4/4", "1", "auto")),
        ("auto", {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "8"}, None),
        ("auto", {"RANK": "7", "WORLD_SIZE": "8"}, None),
    ],
)
def test_a_part_is_what_an_option_or_a_scheduler_says(
    text: str, environment: dict[str, str], expected: tuple[int, int] | None
) -> None:
    if expected is None:
        with pytest.raises(OptionInvalid):
            part_of(text, environment)
    else:
        assert part_of(text, environment) == Part(*expected)
