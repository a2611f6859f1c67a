"""What users get wrong on the command line: two lines on stderr, the exit code of their kind, and never a traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from alphaprof.cli import app, common, measuring
from alphaprof.cli.progress import ConsoleProgress
from alphaprof.commands.export.texts import export_texts
from alphaprof.config.load import load_profile
from alphaprof.errors import AlphaprofError, DiskFull, OptionInvalid
from alphaprof.run.manifest import VERSION
from alphaprof.run.storage import storage_of
from tests.loops import each
from tests.synthetic import Recipe, altered, write_run

# A stand-in for `python -m alphaprof` in which packages cannot be imported.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); from alphaprof.cli.app import main; main()"


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
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(program, code, *texts)


def profile(folder: Path, content: str = '{"text": "a"}\n', **changes: Any) -> Path:
    """A folder with a profile and its data; the target exists, but holds no model."""
    (folder / "model").mkdir(parents=True)
    (folder / "data.jsonl").write_text(content)
    tree = {
        "target": {"model": "./model"},
        "drafts": {"skip": {"kind": "layer_skip", "drop_layers": [1]}},
        "data": [{"domain": "code", "path": "data.jsonl", "prompt": "{text}"}],
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree | changes))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile whose target holds no model, its data, a run, and what is no run."""
    folder = profile(tmp_path_factory.mktemp("place") / "place")
    (folder / "empty.jsonl").write_text("")
    (folder / "malformed.yaml").write_text("target: [")
    write_run(folder / "run", Recipe(drafts={"small": 0.0, "other": 0.1}))
    manifests = {
        "no-json": "{",
        "future": json.dumps({"format": "alphaprof-run", "version": 99}),
        "damaged": json.dumps({"format": "alphaprof-run", "version": VERSION}),
    }
    for name, text in manifests.items():
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(text)
    begun = write_run(folder / "begun", Recipe(drafts={"skip": 0.0}))
    config = load_profile(folder / "profile.yaml", limit=1).with_costs(None).model_dump(mode="json")
    altered(begun, config=config)
    (folder / "taken").mkdir()
    (folder / "taken" / "notes.txt").write_text("mine")
    return folder


def assert_two_lines(result: subprocess.CompletedProcess[str], code: int, problem: str, hint: str) -> None:
    """An error and a hint that hold these words, nothing else on either stream, and this exit code."""
    lines = result.stderr.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["error:", "hint:"], result.stderr
    assert all(line.isprintable() for line in lines)
    assert problem in lines[0]
    assert hint in lines[1]
    assert (result.returncode, result.stdout) == (code, "")


LONG = "x" * 256
NEW = "profile profile.yaml --out new"
OTHER = f"is version 99 of an alphaprof run, not version {VERSION}"
# A command, its exit code, and words of its error and its hint.
ERRORS: list[tuple[str, int, str, str]] = [
    (f"{NEW} --set gamas=[1]", 2, "unknown key gamas", "did you mean gammas?"),
    ("report run --rules nonsense", 2, "unknown rule 'nonsense'", "alphaprof rules"),
    ("report run --rules fly", 2, "'fly' is not supported", ""),
    ("report run --rules additive:2", 2, "epsilon must be a number from 0 to 1", ""),
    ("report run --rules typical:0.1", 2, "has 2 parameters, not 1", ""),
    ("report run --rules 'x\n\x1b[2J\u202e'", 2, "unknown rule", ""),
    ("report run --show cuases", 2, "a report has no section 'cuases'", ""),
    ("report run --set decision.rul=strict", 2, "unknown key decision.rul", "did you mean rule?"),
    ("report run --set gammas=[1]", 2, "a report can only change decision.*, costs.* and hybrids.*", "profile again"),
    ("report run --set decision.weights='{code: 1.0}'", 2, "does not name domain 'chat'", ""),
    ("report run --set decision.draft=large", 2, "not among the drafts (small, other)", ""),
    ("report run --set costs.context=512", 2, "a report measures no step times", ""),
    ("report run --set decision.concurrency=65", 2, "65 is outside", ""),
    ("report run --set min_speedup=2", 2, "a report can only change decision.*", "did you mean decision.min_speedup?"),
    (f"{NEW} --set limit=3", 2, "unknown key limit", "did you mean data.DOMAIN.limit?"),
    (f"{NEW} --set min_speedup=2", 2, "unknown key min_speedup", "did you mean decision.min_speedup?"),
    ("--set min_speedup=2 report run", 2, "--set stands before the command", "report RUN --set"),
    (f"{NEW} --set vllm.url=server", 2, "'server' does not begin with http:// or https://", "correct the value"),
    (
        f"{NEW} --set drafts.m='{{kind: medusa, model: m}}'",
        2,
        "drafts.m: unknown kind medusa",
        "use one of them",
    ),
    (f"{NEW} --set gammas=[0]", 2, "gammas.0: must be at least 1, not 0", "correct the value"),
    (f"{NEW} --set data.0.prompt=\"'{{'\"", 2, "data.0.prompt", "correct the value"),
    (f"{NEW} --set 'a\n\x1b[2J\u202eb=1'", 2, "unknown key", "remove it"),
    (f"{NEW} --set data.0.path=none.jsonl", 3, "none.jsonl does not exist", "correct the path"),
    (f"{NEW} --set data.0.path=empty.jsonl", 3, "empty.jsonl is empty", "remove this source"),
    (f"{NEW} --set data.0.path=hub/data", 3, "dataset hub/data is not a local path", "HF_HUB_OFFLINE"),
    (f"{NEW} --set target.model=./none", 4, "model of target: ", "correct the path"),
    (f"{NEW} --set target.model=hub/none", 4, "hub cannot be reached", "HF_HUB_OFFLINE"),
    (f"{NEW} --set 'drafts={{big: {{kind: model, model: none.gguf}}}}'", 4, "model of draft big: ", "correct the path"),
    ("profile profile.yaml", 2, "--out is missing", "--out RUN"),
    ("profile none.yaml --out new", 2, "cannot read the profile none.yaml: No such file", "YAML"),
    (
        "profile /dev/zero --out new",
        2,
        "/dev/zero is not a profile: it is longer than",
        "give the path of a YAML profile",
    ),
    ("report run --out run/manifest.json", 5, "it lies inside a run, whose files are its own", "choose another --out"),
    ("profile malformed.yaml --out new", 2, "line 1", "correct the YAML"),
    ("profile profile.yaml --out taken", 6, "taken exists and is not empty", "--out"),
    ("profile profile.yaml --out taken --resume", 6, "taken exists and is not empty", "--out"),
    ("profile profile.yaml --out begun --resume --limit 3", 6, "with another limit", "profile that many other documents"),
    ("profile profile.yaml --out begun --resume --limit 1 --set rules=[one_hot]", 6, "(rules changed)", "first call"),
    (f"{NEW} --format json", 2, "--format needs --dry-run", "alphaprof report"),
    ("validate profile.yaml --set continuation.kind=text", 2, "none of this text is the target's own", "kind=greedy"),
    ("validate profile.yaml --set gammas=[4,8]", 2, "none of the gammas", "--gamma 4"),
    ("validate profile.yaml --rule additiv:0.1", 2, "--rule: unknown rule 'additiv'", "list them with alphaprof rules"),
    ("validate profile.yaml --out taken", 6, "taken exists and is not empty", "--out"),
    ("validate profile.yaml --rule tree:2", 2, "the rule tree_2 drafts trees", "choose strict on greedy text"),
    ("validate profile.yaml --rule lossless", 2, "lossless applies to sampled text, but this is greedy", "lossy rule"),
    ("report none", 6, "none holds no run", "profile"),
    ("report no-json", 6, "manifest.json cannot be read", "profile"),
    ("report future", 6, OTHER, "profile"),
    ("report damaged", 6, "is damaged", "profile"),
    (f"report {LONG}", 6, "", ""),
    ("report run --out answer.pdf", 2, "cannot write answer.pdf: this command writes no .pdf files", ".json, .svg or .png"),
    ("check run --out a.json --out answer.svg", 2, "this command writes no .svg files", ".txt, .md, .html, .json or .xml"),
    ("report run --out answer", 2, "cannot write answer: the suffix decides the format", "end the name in .txt, "),
    ("report run --out answer.svg --show drafts", 2, "--show chooses what terminal, md and json hold", "leave out --show"),
    ("check run --min-alpha many", 2, "many", ""),
    ("export run:small --to rates --domain none", 2, "none", ""),
    ("import none.jsonl --out new --rule strict", 3, "none.jsonl", ""),
    (
        "predict --cost 0 --alpha 0.5 --out none/a.txt",
        5,
        "cannot write none/a.txt: the directory none does not exist",
        "--out",
    ),
    ("predict --cost 0 --alpha 0.5 --out .", 5, "cannot write .: it is not a file (use - for standard output)", "--out"),
    (f"predict --cost 0 --alpha 0.5 --out {LONG}", 5, "File name too long", "--out"),
]


@each(("command", "code", "problem", "hint"), ERRORS)
def test_what_users_get_wrong_is_told_in_two_lines(
    place: Path, command: str, code: int, problem: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_two_lines(run(place, *shlex.split(command)), code, problem, hint)
    assert not (place / "new").exists()
    assert (place / "taken" / "notes.txt").read_text() == "mine"


def test_a_process_of_its_own_says_the_same_two_lines_and_nothing_else(place: Path) -> None:
    """As a user sees it, with what packages print when they are imported and at the end."""
    command, code, problem, hint = next(case for case in ERRORS if case[1] == 4)
    assert_two_lines(run(place, *shlex.split(command), apart=True), code, problem, hint)


BAD_NAME = os.fsdecode(b"bad\xff")


@each(
    "command",
    [
        f"{NEW} --reuse-continuations {BAD_NAME}",
        f"profile profile.yaml --out {BAD_NAME}/run",
        f"{NEW} --set target.model=./{BAD_NAME}",
        f"init target --data {BAD_NAME}.jsonl --out new",
        f"train profile.yaml --from run --out {BAD_NAME}",
        f"import none.jsonl --format vllm --rule strict --out {BAD_NAME}",
        BAD_NAME,
        f"report {BAD_NAME}",
        f"report run --out {BAD_NAME}",
        f"check {BAD_NAME}:small --min-alpha 0.1",
    ],
)
def test_names_that_are_not_utf_8_are_refused_before_anything_is_done(place: Path, command: str) -> None:
    before = set(place.iterdir())
    assert_two_lines(run(place, *command.split()), 2, r"bad\udcff", "rename")
    assert set(place.iterdir()) == before


def test_a_folder_above_that_is_not_utf_8_is_refused_as_well(tmp_path: Path) -> None:
    """Of the profile, which names models and data from there, and of a run that the library is given."""
    folder = tmp_path / BAD_NAME
    folder.mkdir()
    profile(folder)
    assert_two_lines(run(folder, "profile", "profile.yaml", "--out", "new"), 2, r"bad\udcff", "rename")
    with pytest.raises(OptionInvalid, match="not valid UTF-8"):
        storage_of(folder / "run")


def test_a_process_is_told_the_same_of_bytes_in_a_name(place: Path) -> None:
    program: list[str | bytes] = [sys.executable, "-m", "alphaprof", "report", b"bad\xff"]
    result = subprocess.run(program, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert_two_lines(result, 2, r"bad\udcff is not valid UTF-8", "rename")


@each(("name", "pasted"), [("plain", "plain"), ("with space #1", "'with space #1'"), ("it's", "'it'\"'\"'s'")])
def test_the_next_command_can_be_pasted(
    name: str, pasted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, options = write_run(Path(name)), SimpleNamespace(execution=SimpleNamespace(workers=1))
    monkeypatch.setattr(measuring, "loaded_profile", lambda *_: options)
    for checked in ("run.place.require_no_run", "profiling.checks.check_early"):
        monkeypatch.setattr(f"alphaprof.{checked}", lambda *_: None)
    monkeypatch.setattr("alphaprof.profiling.profile.profile", lambda *_: run)
    measuring.profile(Path("profile.yaml"), name)
    assert f"Next: alphaprof report {pasted}\n" in capsys.readouterr().out
    with pytest.raises(OptionInvalid) as caught:
        export_texts(name, None)
    assert f"alphaprof export {pasted} --to texts" in caught.value.hint


@pytest.mark.parametrize(("stream", "code"), [(">&-", 0), ("2>&-", 6)])
def test_a_closed_stream_is_not_another_one(stream: str, code: int, tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m alphaprof {'rules' if code == 0 else 'report .'} {stream}"
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_a_message_repeats_a_bounded_part_of_what_was_given() -> None:
    error = OptionInvalid(f"{'w' * 3000} is no rule", "w " * 3000)
    assert len(error.message) == len(error.hint) == 599
    assert error.message.endswith(" is no rule")


def test_what_a_run_says_of_its_data_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress()
    progress.say("domain \x1b[2J[bold]a\u202e has no text")
    progress.warn("odd", "domain \x1b[2J", "name it\x07 otherwise")
    assert capsys.readouterr().err == (
        "domain \\x1b[2J[bold]a\\u202e has no text\nwarning: domain \\x1b[2J (odd)\n  name it\\x07 otherwise\n"
    )


def test_a_bar_says_its_rate_behind_one_comma(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with ConsoleProgress() as progress:
        progress.start("texts", 4, "shards")
        progress.advance(1, positions=9)
    assert re.search(r"1 of 4 shards, \d+ positions/s", capsys.readouterr().err)


def test_a_hub_that_does_not_answer_ends_in_two_lines(place: Path, tmp_path: Path) -> None:
    hub = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://192.0.2.1",
        "HF_HOME": str(tmp_path),
    }  # an address reserved for examples
    result = run(place, *NEW.split(), "--set", "target.model=hub/none", **hub)
    assert_two_lines(result, 4, "hub/none is not a local path, and the model hub cannot be reached", "HF_ENDPOINT")


def test_a_model_in_the_cache_of_the_hub_needs_no_hub(place: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--owner--name"
    for name, content in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_text(content)
    changes = ["--set", "target.model=owner/name", "--set", "data.0.path=none.jsonl"]
    result = run(place, *NEW.split(), *changes, HF_HOME=str(tmp_path))
    assert_two_lines(result, 3, "none.jsonl does not exist", "correct the path")


HEAVY = ("torch", "transformers", "datasets")


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    assert_two_lines(run(tmp_path, "report", ".", without=HEAVY), 6, "holds no run", "alphaprof profile --out")


@each("package", HEAVY)
def test_profiling_without_its_packages_says_how_to_get_them(place: Path, package: str) -> None:
    result = run(place, *NEW.split(), without=(package,))
    assert_two_lines(result, 2, f"profiling needs {package}", "pip install 'datasets>=")


@pytest.mark.parametrize("arguments", [["profile"], ["profile", "x.yaml"], ["nothing"], ["report", ".", "--format", "pdf"]])
def test_wrong_usage_has_the_exit_code_of_a_wrong_profile_and_no_traceback(tmp_path: Path, arguments: list[str]) -> None:
    result = run(tmp_path, *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


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


PREDICTED = ("predict", "--cost", "0", "--alpha", "0.5")
PRINTING = ("rules", "schema report", "--version", "predict --cost 0 --alpha 0.5")


@each("command", PRINTING)
def test_a_full_standard_output_is_an_error_of_every_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(monkeypatch, *command.split()) == 5
    assert "No space left on device\nhint: " in capsys.readouterr().err


@each("command", PRINTING)
def test_a_command_whose_reader_has_gone_ends_quietly(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(monkeypatch, *command.split()) == 1
    assert capsys.readouterr().err == ""


def test_characters_that_a_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    app.escape_characters()
    common.print_text("speedup \u2265 1 of \udcff\n", None)
    terminal.flush()
    assert terminal.buffer.getvalue() == b"speedup \\u2265 1 of \\udcff\n"


DISK = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE]


@each("number", DISK)
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


def test_a_dash_is_the_standard_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for words in ((), ("--out", "-")):
        assert main(monkeypatch, *PREDICTED, *words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


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
    assert ("--resume" if begun else "nothing written: start again") in said[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@each("kind", AlphaprofError.__subclasses__())
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
