"""The GitHub Action: its shell steps are run as they stand in action.yml, with what a runner would give them. Python is the
one of the tests (nothing is installed), and `gh` records what it is asked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_docs_commands import GREEDY, logged
from tests.synthetic import altered, write_run

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
NAMES = [step.get("name") for step in STEPS]
INSTALL, ANSWER = "Install alphaprof, without torch", "Report and check"
COMMENT, GATE = "Comment on the pull request", "Gate"
BOT = {"login": "github-actions[bot]"}

PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
  printf '#!/bin/sh\\nexec "{python}" -m alphaprof "$@"\\n' > "$3/bin/alphaprof" && chmod +x "$3/bin/alphaprof"
elif [ "$1 $2" = "-m pip" ]; then
  printf '%s\\n' "$@" > "{record}"
else
  exec "{python}" "$@"
fi
"""
GH = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
bodies = [pathlib.Path(word[6:]).read_text() for word in words if word.startswith("body=@")]
with (here / "calls").open("a") as file:
    print(json.dumps({{"words": words, "body": bodies[0] if bodies else None}}), file=file)
if (here / "refused").exists():
    sys.exit("gh: Resource not accessible by integration (HTTP 403)")
if not bodies:
    print((here / "comments").read_text())
"""


@dataclass
class Runner:
    """What a runner keeps between the steps of a job. `outputs`: by the id of a step; `log`: what the steps printed."""

    folder: Path
    inputs: dict[str, str]
    pull: str = "7"
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    log: str = ""
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "temp").mkdir(parents=True)
        self.python = self.program("python-tools", PYTHON.format(python=sys.executable, record=self.folder / "pip"))
        self.program("gh", GH.format(python=sys.executable))
        self.comments([])

    def program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def comments(self, comments: list[dict[str, Any]]) -> None:
        """What is on the pull request, a comment a page."""
        (self.folder / "comments").write_text(json.dumps([[comment] for comment in comments]))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What `gh` was asked to write."""
        path = self.folder / "calls"
        calls = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [call for call in calls if call["body"]]

    def value(self, text: str) -> str:
        """A value of the action with its expressions filled in."""
        github = {"github.token": "secret", "github.event.pull_request.number": self.pull}

        def filled(expression: re.Match[str]) -> str:
            name = expression[1]
            if name in github:
                return github[name]
            if name.startswith("inputs."):
                key = name.removeprefix("inputs.")
                return str(self.inputs.get(key, ACTION["inputs"][key]["default"]))
            _, step, _, key = name.split(".")
            return self.outputs.get(step, {}).get(key, "")

        return re.sub(r"\$\{\{ (.*?) \}\}", filled, text)

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),
            "RUNNER_OS": "Linux",
            "RUNNER_TEMP": str(self.folder / "temp"),
            "GITHUB_ACTION_PATH": "/runner/_actions/somebody/alphaprof/v1",
            "GITHUB_EVENT_NAME": "pull_request",
            "GITHUB_JOB": "gate",
            "GITHUB_WORKFLOW": "drafts",
            "GITHUB_REPOSITORY": "our/models",
            "GITHUB_RUN_ID": "11",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
        } | self.env

    def step(self, step: dict[str, Any]) -> int:
        """Run one step; its exit code."""
        if "uses" in step:
            if "setup-python" in step["uses"]:
                self.outputs[step["id"]] = {"python-path": str(self.python)}
            return 0
        script = self.folder / "step.sh"
        script.write_text(step["run"])
        (self.folder / "output").write_text("")
        env = self.environment() | {name: self.value(text) for name, text in step.get("env", {}).items()}
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]  # what `shell: bash` is on a runner
        ended = subprocess.run(shell, env=env, cwd=self.folder.parent, capture_output=True, text=True, check=False)
        self.log += ended.stdout + ended.stderr
        lines = (self.folder / "output").read_text().splitlines()
        self.outputs[step.get("id", "")] = dict(line.split("=", 1) for line in lines)
        return ended.returncode

    def named(self, name: str) -> int:
        return self.step(STEPS[NAMES.index(name)])

    def job(self) -> int:
        """Run steps until one fails, as a job does; the exit code of the last."""
        for step in STEPS:
            if code := self.step(step):
                return code
        return 0

    @property
    def answer(self) -> dict[str, str]:
        """The outputs of the action."""
        return {name: self.value(output["value"]) for name, output in ACTION["outputs"].items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace: a run, a copy of it that is the baseline, and the log of an engine."""
    folder = tmp_path_factory.mktemp("workspace")
    for name in ("new", "old run"):
        write_run(folder / name, GREEDY)
    (folder / "my requests.jsonl").write_text("\n".join(logged({"code": 0.7})))
    return folder


@pytest.mark.slow
def test_versions_are_pinned_and_no_expression_stands_in_a_script() -> None:
    uses = [step["uses"] for step in STEPS if "uses" in step]
    assert uses
    assert [name for name in uses if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name)] == []
    scripts = [step for step in STEPS if "run" in step]
    assert [step["name"] for step in scripts if "${{" in step["run"] or step["shell"] != "bash"] == []
    assert all("default" in given for given in ACTION["inputs"].values())


@pytest.mark.slow
def test_the_page_names_every_input_and_output_with_its_default() -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    rows = dict(re.findall(r"^- `([a-z-]+)`(?:, default (.*?))?: ", page, re.MULTILINE))
    assert set(rows) == set(ACTION["inputs"])
    assert {name: rows[name].strip("`") for name, given in ACTION["inputs"].items() if given["default"]} == {
        name: given["default"] for name, given in ACTION["inputs"].items() if given["default"]
    }
    (outputs,) = re.findall(r"^Outputs: (.*?)\. There", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`([a-z-]+)`", outputs) == list(ACTION["outputs"])
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    jobs = [job for block in blocks if "jobs" in block for job in block["jobs"].values()]
    steps = [step for job in jobs for step in job["steps"]] + [
        step for block in blocks if type(block) is list for step in block
    ]
    (night,) = [step["run"] for step in steps if "gh run list" in step.get("run", "")]
    assert {"--branch main", "--event schedule"} <= set(re.findall(r"--(?:branch|event) \w+", night))
    (given,) = [step["with"] for step in steps if step.get("uses") == "OWNER/alphaprof@REF"]
    assert set(given) <= set(ACTION["inputs"])


@pytest.mark.slow
def test_the_recipe_for_gitlab_runs(place: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    (recipe,) = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "junit: " in block]
    (job,) = recipe.values()
    (tmp_path / "runs").mkdir()
    for name, run in {"new": "new", "old": "old run"}.items():
        (tmp_path / "runs" / name).symlink_to(place / run)
    lines = [line for line in job["script"] if line.startswith("alphaprof ")]
    assert [line.split()[1] for line in lines] == ["report", "check"]
    for line in lines:
        command = [sys.executable, "-m", *shlex.split(line)]
        ended = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
    (page_file,), junit = job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]
    assert (tmp_path / page_file).read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / junit).read_text().lstrip().startswith("<?xml")
    assert job["allow_failure"] == {"exit_codes": [11]}  # as --undecided fail ends


@pytest.mark.slow
def test_the_same_answer_as_the_baseline_passes_without_a_comment(place: Path) -> None:
    runner = Runner(place / "same", {"run": "new", "baseline": "old run:small", "check-args": "--draft 'small'"})
    assert runner.job() == 0, runner.log
    answer = runner.answer
    report = json.loads(Path(answer["report-json"]).read_text())["answer"]
    assert (answer["verdict"], answer["exit-code"]) == (report["verdict"], "0")
    assert float(answer["speedup"]) == report["speedup"]["value"] != report["tokens_per_round"]["value"]
    assert float(answer["tokens-per-round"]) == report["tokens_per_round"]["value"]
    assert Path(answer["report-html"]).read_text().startswith("<!DOCTYPE html>")
    files = {path.name for path in Path(runner.outputs["answer"]["folder"]).iterdir()}
    assert {"check.xml", "check.md", "report.html", "report.json", "report.md"} <= files
    summary = (place / "same" / "summary").read_text()
    assert summary.startswith("## ✅ PASS  ")
    assert f"\n## ✅ {report['verdict']}: " in summary
    assert runner.calls == []
    runner.inputs["comment"] = "always"
    assert runner.named(COMMENT) == 0
    assert [call["words"][-4:-2] for call in runner.calls] == [["--silent", "repos/our/models/issues/7/comments"]]


@pytest.mark.slow
def test_a_failed_check_fails_the_job_and_one_comment_is_kept_up_to_date(place: Path) -> None:
    runner = Runner(place / "failed", {"run": "new", "check-args": "--draft small --min-alpha 0.99"})
    assert runner.job() == 10, runner.log
    assert runner.answer["exit-code"] == "10"
    assert "::error title=alphaprof::the check failed" in runner.log
    (posted,) = runner.calls
    assert re.match(r"<!-- alphaprof \d+ \d+ -->\n## ❌ FAIL  ", posted["body"])

    stranger = {"id": 1, "user": {"login": "somebody"}, "body": posted["body"]}
    other = {"id": 2, "user": BOT, "body": "<!-- alphaprof 1 1 -->\nof another job"}
    ours = {"id": 3, "user": BOT, "body": posted["body"]}
    runner.comments([stranger, other, ours])
    assert runner.named(COMMENT) == 0  # it says the same already
    assert len(runner.calls) == 1
    runner.comments([stranger, other, ours | {"body": re.sub(r" \d+ -->", " 1 -->", posted["body"])}])
    for comment in ("on-change", "always"):  # it said something else
        runner.inputs["comment"] = comment
        assert runner.named(COMMENT) == 0
        assert runner.calls[-1]["words"][:5] == [
            "api",
            "--silent",
            "--method",
            "PATCH",
            "repos/our/models/issues/comments/3",
        ]
        assert runner.calls[-1]["body"] == posted["body"]
    assert len(runner.calls) == 3
    runner.comments([stranger, other])  # of which none is ours
    assert runner.named(COMMENT) == 0
    assert "PATCH" not in runner.calls[-1]["words"]
    for quiet in ({"inputs": runner.inputs | {"comment": "never"}}, {"pull": ""}):
        runner.__dict__.update(quiet)
        assert runner.named(COMMENT) == 0
        assert len(runner.calls) == 4

    failed = runner.outputs["answer"]
    runner.inputs = {"run": "new", "check-args": "--draft small --min-alpha 0.01"}
    assert runner.named(ANSWER) == 0
    passed = runner.outputs["answer"]
    assert (passed["exit-code"], passed["verdict"]) == ("0", failed["verdict"])
    assert passed["state"] != failed["state"]  # the same verdict, and another outcome: a comment would be written again


@pytest.mark.slow
@pytest.mark.parametrize("timed", [True, False])
def test_the_comment_is_about_the_draft_that_is_checked_and_only_the_report_is_folded(timed: bool, tmp_path: Path) -> None:
    write_run(tmp_path / "new", dataclasses.replace(GREEDY, latency=timed, decision={"draft": "small"}))
    question = {"comment": "always", "run": "new", "check-args": "--draft ngram --min-alpha 0.01"}
    runner = Runner(tmp_path / "job", question)
    assert runner.job() == 0, runner.log
    (posted,) = runner.calls
    shown, *folded = posted["body"].split("<details>")
    assert re.match(r"<!-- alphaprof \d+ \d+ -->\n## ✅ PASS  ", shown)
    assert "- draft ngram, rule strict" in shown
    assert not re.search(r"\b(?:NO-)?GO\b|UNDECIDED", shown)
    assert folded[0].startswith("\n<summary>Report of this draft</summary>\n\n**")
    assert "**\n\n## " in folded[0]
    report = json.loads(Path(runner.answer["report-json"]).read_text())["answer"]
    assert (report["verdict"], report["draft"]) == (runner.answer["verdict"], "ngram" if timed else None)
    assert posted["body"].count("<details>") == posted["body"].count("</details>") == 1 + len(folded[1:])


@pytest.mark.slow
def test_a_warning_is_not_folded_behind_a_go(tmp_path: Path) -> None:
    run = write_run(tmp_path / "new", GREEDY)
    busy = {"code": "busy", "message": "this machine is busy", "remedy": "measure again"}
    altered(run, warnings=(busy,))
    runner = Runner(tmp_path / "job", {"run": "new", "comment": "always"})
    assert runner.job() == 0, runner.log
    assert "this machine is busy" in runner.calls[0]["body"].split("<details>")[0]


@pytest.mark.slow
def test_every_question_has_a_comment_and_an_artifact_of_its_own_whatever_the_answer(place: Path, tmp_path: Path) -> None:
    """A question is what is read, asked and compared with; words that only join to the same text are others."""
    questions = [
        {"run": "new"},
        {"run": "new", "check-args": "--draft small"},
        {"run": "new", "check-args": "--draft lookup"},
        {"run": "new", "baseline": "old run"},
        {"run": "new", "baseline": "run", "check-args": "old"},
        {"import": "new"},
    ]
    ids = []
    for question in questions:
        runner = Runner(tmp_path / str(len(ids)) / "job", question)
        runner.outputs["python"] = {"python-path": str(runner.python)}
        assert runner.named(INSTALL) == 0
        assert runner.named(ANSWER) == 0  # there is no run, which the gate says
        ids.append(runner.outputs["answer"]["id"])
    assert len(set(ids)) == len(ids)
    runner.folder.parent.joinpath("new").symlink_to(place / "new")
    first, runner.inputs = runner.outputs["answer"], questions[0]
    assert runner.named(ANSWER) == 0
    now = runner.outputs["answer"]
    assert now["id"] == ids[0]
    assert now["exit-code"] != first["exit-code"]


@pytest.mark.slow
def test_a_token_that_may_not_write_is_a_warning_and_a_long_report_is_not_cut_silently(place: Path) -> None:
    runner = Runner(place / "comments", {"comment": "always"})
    runner.outputs["python"] = {"python-path": str(runner.python)}
    assert runner.named(INSTALL) == 0
    (place / "comments" / "comment.md").write_text("## GO\n\nbecause\n\n" + "row\n" * 20_000 + "\nthe artifact\n")
    runner.outputs["answer"] = {"folder": str(place / "comments"), "id": "5", "state": "6", "news": "yes"}
    assert runner.named(COMMENT) == 0
    (call,) = runner.calls
    kept, said = (
        "<!-- alphaprof 5 6 -->\n## GO\n\nbecause\n",
        "The report is too long for a comment: the job's summary has it.",
    )
    assert call["body"] == f"{kept}\n{said}\n\nthe artifact\n"
    (place / "comments" / "refused").touch()
    assert runner.named(COMMENT) == 0
    assert "::warning title=alphaprof::no comment was written: the comments cannot be read" in runner.log


@pytest.mark.slow
def test_an_engines_log_is_imported_and_an_undecided_check_passes_unless_asked(place: Path) -> None:
    runner = Runner(place / "import", {"import": "'my requests.jsonl' --rule strict"})
    assert runner.job() == 0, runner.log
    assert (runner.answer["verdict"], runner.answer["exit-code"], runner.answer["speedup"]) == ("UNDECIDED", "11", "")
    assert "::warning title=alphaprof::the check is undecided" in runner.log
    runner.inputs["fail-on"] = "undecided"
    assert runner.named(GATE) == 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "code", "said"),
    [
        ({"run": "nowhere"}, 6, "nowhere"),
        ({"run": "new", "check-args": "--min-alpha '0.5"}, 2, "a quote is not closed in: --min-alpha '0.5"),
        ({"run": "new", "check-args": "--min-alpha $(touch injected)"}, 2, "unexpected extra argument"),
    ],
)
def test_what_cannot_be_answered_fails_and_the_comment_says_why(
    inputs: dict[str, str], code: int, said: str, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runner = Runner(tmp_path_factory.mktemp("unanswered") / "job", inputs)
    runner.folder.parent.joinpath("new").symlink_to(place / "new")
    assert runner.job() == code, runner.log
    assert runner.answer["exit-code"] == str(code)
    (call,) = runner.calls
    assert f"## ❌ alphaprof ended with exit code {code}\n\n    " in call["body"]
    assert call["body"].count(said) == 1
    *quoted, _, last = call["body"].splitlines()[3:]  # in a block of code: what is quoted may look like Markdown
    assert [line for line in quoted if not line.startswith("    ")] == []
    assert last.startswith("[The run of this job]")
    shown = re.search(r"::stop-commands::(\w{32})\n(.*)\n::\1::\n", runner.log, re.DOTALL)
    assert said in shown[2]
    assert not list(runner.folder.parent.rglob("injected"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "env", "said"),
    [
        ({}, {}, "nothing to report"),
        ({"run": "a", "import": "b"}, {}, "both set"),
        ({"run": "a", "baseline": "s3://bucket/run"}, {}, "baseline are local paths"),
        ({"run": "a", "comment": "sometimes"}, {}, "comment must be"),
        ({"run": "a", "version": "main --index-url x"}, {}, "version must be"),
        ({"run": "a"}, {"GITHUB_EVENT_NAME": "pull_request_target"}, "use on: pull_request"),
    ],
)
def test_inputs_that_make_no_sense_are_refused_at_once(
    inputs: dict[str, str], env: dict[str, str], said: str, tmp_path: Path
) -> None:
    runner = Runner(tmp_path / "job", inputs, env=env)
    assert runner.job() == 2
    assert runner.log.startswith("::error title=alphaprof::")
    assert said in runner.log
    assert runner.log.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "installed"),
    [
        ("", "/runner/_actions/somebody/alphaprof/v1[html]"),
        ("v0.2", "alphaprof[html] @ git+https://github.com/somebody/alphaprof@v0.2"),
    ],
)
def test_it_installs_itself_without_torch(version: str, installed: str, tmp_path: Path) -> None:
    runner = Runner(tmp_path / "job", {"run": "a", "version": version})
    runner.outputs["python"] = {"python-path": str(runner.python)}
    assert runner.named(INSTALL) == 0
    assert (tmp_path / "job" / "pip").read_text().splitlines()[-1] == installed
    runner.env["GITHUB_ACTION_PATH"] = "/home/runner/ours/alphaprof"
    assert runner.named(INSTALL) == (2 if version else 0)
