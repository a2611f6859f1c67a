"""Failures on the command line: two lines on stderr, the exit code of their kind, and never a traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from alphaprof.cli import answering, app, common
from alphaprof.cli.progress import ConsoleProgress
from alphaprof.errors import AlphaprofError, DiskFull
from alphaprof.log import store
from alphaprof.log.manifest import VERSION
from alphaprof.render import answer
from alphaprof.render import report as rendered
from alphaprof.report import build
from tests.synthetic import Recipe, write_run

# A stand-in for `python -m alphaprof` in which packages cannot be imported.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); from alphaprof.cli.app import main; main()"


SOURCE = {"domain": "code", "path": "data.jsonl", "prompt": "{text}"}


def run(
    folder: Path, *arguments: str, without: tuple[str, ...] = (), apart: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """How `alphaprof` ends in a folder; in a process of its own where packages are missing or the environment differs."""
    start = ["-c", WITHOUT.format(packages=without)] if without else ["-m", "alphaprof"]
    program = [sys.executable, *start, *arguments]
    if without or environment or apart:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
        return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, write_through=True) for errors in ("strict", "backslashreplace")
    )
    code = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["alphaprof", *arguments])
        try:
            app.main()
        except SystemExit as end:
            code = int(end.code or 0)
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(program, code, *texts)


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
        "dataset hub/data is not a local path",
        "HF_HUB_OFFLINE",
    ),
    "no such target": ({"target": {"model": "./none"}}, [], 4, "model of target: ", "correct the path"),
    "target on the hub": ({"target": {"model": "hub/none"}}, [], 4, "hub cannot be reached", "HF_HUB_OFFLINE"),
    "impossible hub id": ({"target": {"model": "a/b/c/d"}}, [], 4, "a/b/c/d is not a local path", "HF_HUB_OFFLINE"),
    "overlong name": ({"target": {"model": "./" + "x" * 5000}}, [], 4, "does not exist", "correct the path"),
    "no such draft": (
        {"drafts": {"big": {"kind": "model", "model": "none.gguf"}}},
        [],
        4,
        "model of draft big: ",
        "correct the path",
    ),
}


def test_what_a_run_says_of_its_data_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress()
    progress.say("domain \x1b[2J[bold]a\u202e has no text")
    progress.warn("odd", "domain \x1b[2J", "name it\x07 otherwise")
    assert capsys.readouterr().err == (
        "domain \\x1b[2J[bold]a\\u202e has no text\nwarning: domain \\x1b[2J (odd)\n  name it\\x07 otherwise\n"
    )


@pytest.mark.parametrize("case", PROFILING.values(), ids=list(PROFILING))
def test_a_profile_that_cannot_work_is_refused_in_two_lines(tmp_path: Path, case: Case) -> None:
    changes, options, code, problem, hint = case
    result = run(profile(tmp_path / "place", **changes), "profile", "profile.yaml", "--out", "run", *options)
    assert_two_lines(result, code, problem, hint)
    assert not (tmp_path / "place" / "run").exists()


def test_an_empty_data_file_is_refused_before_any_model_loads(tmp_path: Path) -> None:
    result = run(profile(tmp_path / "place", ""), "profile", "profile.yaml", "--out", "run")
    assert_two_lines(result, 3, "data.jsonl is empty", "remove this source")


def test_a_file_name_that_is_no_text_is_printed_in_two_lines(tmp_path: Path) -> None:
    assert_two_lines(run(tmp_path, "profile", "\udcff\n.yaml", "--out", "run"), 2, "cannot read the profile", "YAML")


@pytest.mark.parametrize("name", ["unknown key", "no such data", "no such target"])
def test_a_process_of_its_own_says_the_same_two_lines_and_nothing_else(tmp_path: Path, name: str) -> None:
    """As a user sees it, with what packages print when they are imported and at the end: one case for each exit code."""
    changes, options, code, problem, hint = PROFILING[name]
    result = run(profile(tmp_path / "place", **changes), "profile", "profile.yaml", "--out", "run", *options, apart=True)
    assert_two_lines(result, code, problem, hint)


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
    assert_two_lines(result, 4, "hub/none is not a local path, and the model hub cannot be reached", "HF_ENDPOINT")


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


OTHER = f"is not version {VERSION} of an alphaprof run"
MANIFESTS: dict[str, tuple[str | None, str]] = {
    "none": (None, "holds no run"),
    "no JSON": ("{", "manifest.json cannot be read"),
    "of something else": (json.dumps({"format": "other"}), OTHER),
    "of the future": (json.dumps({"format": "alphaprof-run", "version": 99}), OTHER),
    "damaged": (json.dumps({"format": "alphaprof-run", "version": VERSION}), "is damaged"),
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
    assert_two_lines(result, 2, "the log of run is not enough for multi_draft_4, which needs whole", "--reuse-continuations")


HEAVY = ("torch", "transformers", "datasets")


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    assert_two_lines(run(tmp_path, "report", ".", without=HEAVY), 6, "holds no run", "alphaprof profile --out")


@pytest.mark.parametrize("package", HEAVY)
def test_profiling_without_its_packages_says_how_to_get_them(tmp_path: Path, package: str) -> None:
    result = run(profile(tmp_path / "place"), "profile", "profile.yaml", "--out", "run", without=(package,))
    assert_two_lines(result, 2, f"profiling needs {package}", "pip install 'datasets>=")


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
    monkeypatch.setattr(rendered.ReportAnswer, "of", lambda *_: None)
    monkeypatch.setattr(answer, "answer_text", lambda *_, **__: "the report \u2265\n")
    answering.report(Path("run"), out=out)


def test_a_report_goes_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_to(tmp_path / "report.txt", monkeypatch)
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == "the report \u2265\n"


@pytest.mark.parametrize("place", [".", "no/such/folder/report.txt"])
def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    with pytest.raises(DiskFull, match="cannot write"):
        report_to(tmp_path / place, monkeypatch)


@pytest.mark.parametrize("bug", [KeyError("a bug"), OSError("a bug"), FileNotFoundError(errno.ENOENT, "a bug")], ids=repr)
def test_a_bug_keeps_its_traceback(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise bug

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(type(bug), match="a bug"):
        app.main()


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `alphaprof` with arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["alphaprof", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


def test_schema_lists_the_columns_of_heads_after_those_of_every_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(monkeypatch, "schema")
    every, heads = capsys.readouterr().out.split("\nof a draft head, beside these")
    names = ["in_draft_vocabulary", "agrees_2", "accept_lossless_2", "emitted_lossless_2", "draft_rank_of_token_2"]
    assert [line.split()[0] for line in heads.splitlines()[1:] if not line.startswith(" ")] == names
    assert "accepted_run " in every
    assert "agrees_2" not in every


PREDICTED = ("predict", "--cost", "0", "--alpha", "0.5")
PRINTING = ("rules", "schema", "schema --of report", "--version", "--help", "predict --cost 0 --alpha 0.5")


@pytest.mark.parametrize("command", PRINTING)
def test_a_full_standard_output_is_an_error_of_every_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(monkeypatch, *command.split()) == 5
    assert capsys.readouterr().err.startswith("error: cannot write the standard output: No space left on device\nhint: ")


@pytest.mark.parametrize("command", PRINTING)
def test_a_command_whose_reader_has_gone_ends_quietly(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(monkeypatch, *command.split()) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_not_another_one(stream: str, tmp_path: Path) -> None:
    """An answer without a place is an error; an error without a place is no answer."""
    script = f"import sys; sys.{stream} = None; from alphaprof.cli.app import main; main()"
    command = ["rules"] if stream == "stdout" else ["report", "."]
    result = subprocess.run(
        [sys.executable, "-c", script, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    if stream == "stdout":
        assert_two_lines(result, 5, "the standard output is closed", "redirect it")
    else:
        assert (result.returncode, result.stdout, result.stderr) == (6, "", "")


def test_characters_that_a_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with common.standard_streams():
        common.print_text("speedup \u2265 1 of \udcff\n", None)
    terminal.flush()
    assert terminal.buffer.getvalue() == b"speedup \\u2265 1 of \\udcff\n"  # type: ignore[attr-defined]


DISK = [errno.EIO, errno.ESTALE, errno.EBUSY, errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]


@pytest.mark.parametrize("number", [*DISK, errno.ENAMETOOLONG, errno.EMFILE], ids=errno.errorcode.get)
def test_what_a_disk_does_is_told_in_two_lines_wherever_it_happens(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "run/positions")

    monkeypatch.setattr(app, "app", fail)
    assert main(monkeypatch) == 5
    problem, hint = capsys.readouterr().err.splitlines()
    assert problem == f"error: run/positions cannot be read or written: {os.strerror(number)}"
    assert hint.startswith("hint: ")


def test_an_answer_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "report.txt").write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DiskFull, match=r"cannot write .*report.txt: No space left on device"):
        common.print_text("new", tmp_path / "report.txt")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"report.txt": "old"}


def test_an_answer_takes_the_place_of_the_file_that_a_link_names(tmp_path: Path) -> None:
    old, link = tmp_path / "old.txt", tmp_path / "link.txt"
    old.write_text("old")
    link.symlink_to("old.txt")
    common.print_text("answer \u2265\n", link)
    assert link.is_symlink()
    assert old.read_text(encoding="utf-8") == "answer \u2265\n"


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("none/report.txt", "there is no directory none"),
        (".", "it is not a file (- is the standard output)"),
        ("/dev/null", "it is not a file (- is the standard output)"),
    ],
)
def test_an_out_that_is_no_file_is_refused_before_any_work(
    out: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, *PREDICTED, "--out", out) == 5
    problem, hint = capsys.readouterr().err.splitlines()
    assert problem == f"error: cannot write {out}: {reason}"
    assert hint.startswith("hint: ")


def test_a_dash_is_the_standard_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for words in ((), ("--out", "-")):
        assert main(monkeypatch, *PREDICTED, *words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_a_name_may_have_the_255_characters_that_file_systems_allow(tmp_path: Path) -> None:
    common.print_text("answer", tmp_path / ("x" * 255))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["answer"]


LONG = "x" * 256
NAMED = {
    "report": (["report", LONG], 6),
    "report --out": (["report", "run", "--out", LONG], 5),
    "check": (["check", LONG], 6),
    "check --baseline": (["check", "run", "--draft", "small", "--baseline", LONG], 6),
    "compare": (["compare", "run:small", LONG], 6),
    "costs.path": (["report", "run", "--set", "costs.source=table", "--set", f"costs.path={LONG}"], 2),
    "trees": (["trees", LONG], 6),
    "trees --tree": (["trees", "run:small", "--tree", LONG], 2),
    "export": (["export", LONG, "--to", "vllm-synthetic"], 6),
    "import": (["import", "vllm", LONG, "--out", "new", "--rule", "strict"], 3),
    "import --out": (["import", "vllm", "none.jsonl", "--out", LONG, "--rule", "strict"], 5),
    "profile": (["profile", LONG], 2),
    "predict --out": (["predict", "--cost", "0", "--alpha", "0.5", "--out", LONG], 5),
}


@pytest.mark.parametrize(("command", "code"), NAMED.values(), ids=list(NAMED))
def test_a_name_longer_than_file_systems_allow_ends_in_two_lines(
    command: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(profile(tmp_path / "place"))
    write_run(Path("run"), Recipe(drafts={"small": 0.0}))
    assert main(monkeypatch, *command) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.split(" ")[0] for line in output.err.splitlines()] == ["error:", "hint:"]
    assert output.err.count("x") <= 210
    assert "File name too long" in output.err or "does not exist" in output.err


REPEATED = {
    "--set": ["report", "run", "--set", "WWW"],
    "--rules": ["report", "run", "--rules", "WWW"],
    "--out": ["report", "run", "--out", "WWW"],
    "--draft": ["check", "run", "--draft", "WWW", "--min-alpha", "0.5"],
    "--min-alpha": ["check", "run", "--min-alpha", "WWW"],
    "a domain": ["check", "run", "--min-alpha", "WWW=0.5"],
    "RUN:DRAFT": ["compare", "run:WWW", "run:small"],
    "--domain": ["export", "run:small", "--to", "vllm-synthetic", "--domain", "WWW"],
    "--tree": ["trees", "run:small", "--tree", "WWW"],
    "--of": ["schema", "--of", "WWW"],
    "PROFILE": ["profile", "WWW"],
    "REQUESTS": ["import", "vllm", "WWW", "--out", "new", "--rule", "strict"],
    "a draft's name": ["import", "vllm", "none", "--out", "new", "--rule", "strict", "--draft", "WWW"],
}


@pytest.mark.parametrize("long", ["w" * 3000, "w " * 1500], ids=["a word", "a sentence"])
@pytest.mark.parametrize("command", REPEATED.values(), ids=list(REPEATED))
def test_no_message_repeats_more_than_200_characters_of_an_argument(
    command: list[str], long: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), Recipe(drafts={"small": 0.0}))
    assert main(monkeypatch, *(part.replace("WWW", long) for part in command)) in (2, 3, 5)
    problem, hint = capsys.readouterr().err.splitlines()
    assert 0 < (problem + hint).count(long[:2]) * 2 <= 200


@pytest.mark.parametrize("begun", [True, False])
def test_sigterm_says_what_ctrl_c_says(begun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if begun:
        (tmp_path / "manifest.json").touch()
    said = {}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
    try:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            with pytest.raises(typer.Exit) as caught, common.interruptible(tmp_path):
                signal.raise_signal(number)
            assert caught.value.exit_code == code
            said[number] = capsys.readouterr().err
    finally:
        signal.signal(signal.SIGINT, before)
    assert said[signal.SIGTERM] == said[signal.SIGINT]
    assert ("--resume" if begun else "nothing was written yet") in said[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("kind", AlphaprofError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_error_is_printed_in_two_lines_with_its_exit_code(
    kind: Callable[[str, str], Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("it\nfailed", "try\r\x1bagain")

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == getattr(kind, "exit_code", None) in (2, 3, 4, 5, 6, 10, 11, 12, 13)
    assert capsys.readouterr() == ("", "error: it failed\nhint: try  again\n")
