"""Failures on the command line: two lines on stderr, the exit code of their kind, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaprof import cli
from alphaprof.errors import AlphaprofError, DiskFull
from alphaprof.log import store
from alphaprof.report import build, render
from tests.synthetic import Recipe, write_run

# A stand-in for `python -m alphaprof` in which packages cannot be imported.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); from alphaprof.cli import main; main()"


SOURCE = {"domain": "code", "path": "data.jsonl", "prompt": "{text}"}


def run(
    folder: Path, *arguments: str, without: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m alphaprof` with arguments, in a folder."""
    program = ["-c", WITHOUT.format(packages=without)] if without else ["-m", "alphaprof"]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def profile(folder: Path, content: str = '{"text": "a"}\n', **changes: Any) -> Path:
    """A folder with a profile and its data; the target exists, but holds no model."""
    (folder / "model").mkdir(parents=True)
    (folder / "data.jsonl").write_text(content)
    tree = {
        "target": {"model": "./model"},
        "drafts": {"skip": {"kind": "layer_skip", "drop_layers": [1]}},
        "data": [SOURCE],
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree | changes))
    return folder


def assert_two_lines(result: subprocess.CompletedProcess[str], code: int, problem: str, hint: str) -> None:
    """An error and a hint that hold these words, nothing else on either stream, and this exit code."""
    lines = result.stderr.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["error:", "hint:"], result.stderr
    assert all(line.isprintable() for line in lines)
    assert problem in lines[0]
    assert hint in lines[1]
    assert (result.returncode, result.stdout) == (code, "")


Case = tuple[dict[str, Any], list[str], int, str, str]
# Changes to the profile, options, then exit code, error and hint.
PROFILING: dict[str, Case] = {
    "unknown key": ({"gamas": [1]}, [], 2, "unknown key gamas", "did you mean gammas?"),
    "wrong value": ({"gammas": [0]}, [], 2, "gammas: must lie between 1 and", "correct the value"),
    "wrong template": ({"data": [SOURCE | {"prompt": "{"}]}, [], 2, "data.0.prompt", "correct the value"),
    "override of nothing": ({}, ["--set", "target.dtyp=x"], 2, "unknown key target.dtyp", "did you mean dtype?"),
    "no override": ({}, ["--set", "target"], 2, "--set 'target' is not KEY=VALUE", "target.dtype=float32"),
    "hostile override": ({}, ["--set", "a\n\x1b[2J\u202eb=1"], 2, "unknown key", "remove it"),
    "no such data": ({"data": [SOURCE | {"path": "none.jsonl"}]}, [], 3, "none.jsonl does not exist", "correct the path"),
    "no known format": ({"data": [SOURCE | {"path": "./profile.yaml"}]}, [], 3, "no known format", ".jsonl"),
    "data on the hub": (
        {"data": [SOURCE | {"path": "hub/data"}]},
        [],
        3,
        "dataset hub/data is no local path",
        "HF_HUB_OFFLINE",
    ),
    "no such target": ({"target": {"model": "./none"}}, [], 4, "model of target: ", "correct the path"),
    "target on the hub": ({"target": {"model": "hub/none"}}, [], 4, "hub cannot be reached", "HF_HUB_OFFLINE"),
    "impossible hub id": ({"target": {"model": "a/b/c/d"}}, [], 4, "a/b/c/d is no local path", "HF_HUB_OFFLINE"),
    "overlong name": ({"target": {"model": "./" + "x" * 5000}}, [], 4, "does not exist", "correct the path"),
    "no such draft": (
        {"drafts": {"big": {"kind": "model", "model": "none.gguf"}}},
        [],
        4,
        "model of draft big: ",
        "correct the path",
    ),
}


@pytest.mark.parametrize("case", PROFILING.values(), ids=list(PROFILING))
def test_a_profile_that_cannot_work_is_refused_in_two_lines(tmp_path: Path, case: Case) -> None:
    changes, options, code, problem, hint = case
    result = run(profile(tmp_path / "place", **changes), "profile", "profile.yaml", "--out", "run", *options)
    assert_two_lines(result, code, problem, hint)
    assert not (tmp_path / "place" / "run").exists()


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_data_file_without_content_is_refused_before_any_model_loads(tmp_path: Path, content: str) -> None:
    result = run(profile(tmp_path / "place", content), "profile", "profile.yaml", "--out", "run")
    assert_two_lines(result, 3, "data.jsonl is empty", "remove this source")


def test_a_file_name_that_is_no_text_is_printed_in_two_lines(tmp_path: Path) -> None:
    assert_two_lines(run(tmp_path, "profile", "\udcff\n.yaml", "--out", "run"), 2, "cannot read the profile", "YAML")


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "malformed": (b"target: [", "line 1"),
    "no text": (b"target: \xff", "not UTF-8 text"),
    "a key twice": (b"gammas: [1]\ngammas: [2]\n", "line 2: the key 'gammas' occurs twice"),
    "empty": (b"", "holds no profile"),
}


@pytest.mark.parametrize(("content", "problem"), UNREADABLE.values(), ids=list(UNREADABLE))
def test_a_file_that_is_no_profile_is_refused_in_two_lines(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "profile.yaml").write_bytes(content)
    assert_two_lines(run(tmp_path, "profile", "profile.yaml", "--out", "run"), 2, problem, "")


def test_a_hub_that_does_not_answer_ends_in_two_lines(tmp_path: Path) -> None:
    folder = profile(tmp_path / "place", target={"model": "hub/none"})
    hub = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://192.0.2.1",
        "HF_HOME": str(tmp_path),
    }  # an address reserved for examples
    result = run(folder, "profile", "profile.yaml", "--out", "run", **hub)
    assert_two_lines(result, 4, "hub/none is no local path, and the model hub cannot be reached", "HF_ENDPOINT")


def test_a_model_in_the_cache_of_the_hub_needs_no_hub(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--owner--name"
    for name, content in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_text(content)
    folder = profile(tmp_path / "place", target={"model": "owner/name"}, data=[SOURCE | {"path": "none.jsonl"}])
    result = run(folder, "profile", "profile.yaml", "--out", "run", HF_HOME=str(tmp_path))
    assert_two_lines(result, 3, "none.jsonl does not exist", "correct the path")


def test_an_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    folder = profile(tmp_path / "place")
    (folder / "run").mkdir()
    (folder / "run" / "notes.txt").write_text("mine")
    assert_two_lines(run(folder, "profile", "profile.yaml", "--out", "run"), 6, "run exists and is not empty", "--out")
    assert (folder / "run" / "notes.txt").read_text() == "mine"


def test_resuming_in_a_directory_of_other_things_is_refused(tmp_path: Path) -> None:
    folder = profile(tmp_path / "place")
    (folder / "run").mkdir()
    (folder / "run" / "notes.txt").write_text("mine")
    result = run(folder, "profile", "profile.yaml", "--out", "run", "--resume")
    assert_two_lines(result, 6, "run exists and is not empty", "--out")
    assert [path.name for path in (folder / "run").iterdir()] == ["notes.txt"]


MANIFESTS: dict[str, tuple[str | None, str]] = {
    "none": (None, "holds no run"),
    "no JSON": ("{", "manifest.json cannot be read"),
    "of something else": (json.dumps({"format": "other"}), "is not version 2 of an alphaprof run"),
    "of the future": (json.dumps({"format": "alphaprof-run", "version": 99}), "is not version 2 of an alphaprof run"),
    "damaged": (json.dumps({"format": "alphaprof-run", "version": 2}), "is damaged"),
}


@pytest.mark.parametrize(("manifest", "problem"), MANIFESTS.values(), ids=list(MANIFESTS))
def test_a_report_on_what_is_no_run_ends_in_two_lines(tmp_path: Path, manifest: str | None, problem: str) -> None:
    (tmp_path / "run").mkdir()
    if manifest is not None:
        (tmp_path / "run" / "manifest.json").write_text(manifest)
    assert_two_lines(run(tmp_path, "report", "run"), 6, problem, "profile")


def test_a_report_on_a_file_ends_in_two_lines(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    assert_two_lines(run(tmp_path, "report", "run"), 6, "run holds no run", "profile")


@pytest.mark.parametrize(
    "command",
    [
        ["report", "run", "--rules", "strict", "--rules", "multi_draft:4"],
        ["report", "run", "--format", "json", "--rules", "multi_draft:4"],
        ["report", "run", "--set", "decision.rule=multi_draft:4"],
        ["compare", "run:small", "run:other", "--rules", "multi_draft:4"],
    ],
    ids=" ".join,
)
def test_a_rule_that_a_log_cannot_tell_of_is_refused_in_two_lines(tmp_path: Path, command: list[str]) -> None:
    """It needs whole distributions, and the hint says how to get them."""
    write_run(tmp_path / "run", Recipe(drafts={"small": 0.0, "other": 0.1}))
    result = run(tmp_path, *command)
    assert_two_lines(result, 2, "the log of run cannot tell of multi_draft_4, which needs whole", "--reuse-continuations")


HEAVY = ("torch", "transformers", "datasets")


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    assert_two_lines(run(tmp_path, "report", ".", without=HEAVY), 6, "holds no run", "alphaprof profile --out")


@pytest.mark.parametrize("package", HEAVY)
def test_profiling_without_its_packages_says_how_to_get_them(tmp_path: Path, package: str) -> None:
    result = run(profile(tmp_path / "place"), "profile", "profile.yaml", "--out", "run", without=(package,))
    assert_two_lines(result, 2, f"profiling needs {package}", "pip install 'alphaprof[profile]'")


@pytest.mark.parametrize(("option", "answer"), [("--version", "alphaprof "), ("--help", "Usage")])
def test_version_and_help_need_nothing_heavy(tmp_path: Path, option: str, answer: str) -> None:
    result = run(tmp_path, option, without=(*HEAVY, "pandas", "pyarrow", "huggingface_hub"))
    assert (result.returncode, result.stderr) == (0, "")
    assert answer in result.stdout


@pytest.mark.parametrize("arguments", [["profile"], ["profile", "x.yaml"], ["nothing"], ["report", ".", "--format", "pdf"]])
def test_wrong_usage_has_the_exit_code_of_a_wrong_profile_and_no_traceback(tmp_path: Path, arguments: list[str]) -> None:
    result = run(tmp_path, *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def report_to(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`alphaprof report --out`, of a run that needs not exist."""
    monkeypatch.setattr(store.Run, "open", lambda _: None)
    monkeypatch.setattr(build, "build_report", lambda *_: None)
    monkeypatch.setattr(render, "render", lambda *_, **__: "the report \u2265\n")
    cli.report(Path("run"), out=out)


def test_a_report_goes_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_to(tmp_path / "report.txt", monkeypatch)
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == "the report \u2265\n"


@pytest.mark.parametrize("place", [".", "no/such/folder/report.txt"])
def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    with pytest.raises(DiskFull, match="cannot write"):
        report_to(tmp_path / place, monkeypatch)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "app", bug)
    with pytest.raises(KeyError, match="a bug"):
        cli.main()


@pytest.mark.parametrize("kind", AlphaprofError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_error_is_printed_in_two_lines_with_its_exit_code(
    kind: Callable[[str, str], Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("it\nfailed", "try\r\x1bagain")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == getattr(kind, "exit_code", None) in (2, 3, 4, 5, 6, 10, 11, 12, 13)
    assert capsys.readouterr() == ("", "error: it failed\nhint: try  again\n")
