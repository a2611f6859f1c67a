"""Every command in the documentation works: those that read runs are run on synthetic ones, those that run models are parsed
with the profile that they name, and a line that nothing here knows is a failure.

A line that ends otherwise than with 0 says so in the page: `alphaprof check runs/x   # exit code 10`. What cannot run here
has `<!-- not run: why -->` above it; its commands must exist all the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import typer.main
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.config.load import load_profile
from alphaprof.costs.shapes import ModelShape
from alphaprof.errors import AlphaprofError
from alphaprof.run.place import TRAINING
from alphaprof.run.reader import Run
from tests.commands import test_first_look as prometheus
from tests.commands import test_import_sglang as sglang
from tests.commands.test_import import counted, response
from tests.costs.test_roofline import LLAMA
from tests.synthetic import Domain, Recipe, altered, write_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GREEDY = Recipe(
    {"code": Domain(documents=8), "support": Domain(documents=8)},
    {"small": 0.05},
    lookups=("ngram",),
    extra_ms=0.1,
    draft_ms=0.2,
)
SAMPLED = dataclasses.replace(
    GREEDY,
    domains={"code": Domain(documents=8, temperature=0.8, continuation="sampled")},
    rules=("strict", "lossless", "one_hot"),
)
# The runs that pages name, and what stands in for them.
RUNS = {
    "runs/my": dataclasses.replace(GREEDY, heads={"head": {}}),
    "runs/my-sampled": SAMPLED,
    "runs/demo": dataclasses.replace(GREEDY, drafts={"skip": 0.0}),
    **dict.fromkeys(
        (f"heads/{size}/tested" for size in ("quarter", "half", "mine")), dataclasses.replace(GREEDY, heads={"head": {}})
    ),
    "runs/new": dataclasses.replace(GREEDY, seed=1),
    "runs/old": dataclasses.replace(GREEDY, seed=1),
}
WITH_MODELS = ("profile", "validate", "train")
FOREIGN = ("vllm", "jq", "llama-server", "env", "docker")  # other people's commands
USAGE = typer.BadParameter.__bases__[0]  # the parser's own error: typer brings its own click
NAMES = {"predict.md": {"config": LLAMA}}  # what python blocks find


@dataclass(frozen=True)
class Block:
    """A piece of code in a page; `language` is sh or python, `unrun` why it is not run (empty: it is)."""

    unrun: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    code = r"(?:<!-- not run: ([^\n]+) -->\n\n?)?```(sh|python)\n(.*?)```"
    return [Block(*found) for found in re.findall(code, page.read_text(), re.DOTALL)]


def lines(block: Block) -> Iterator[str]:
    """Command lines, those that a backslash continues as one."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if shlex.split(line, comments=True):
            yield line


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with everything that pages name: runs, the README's profile, those of the repository, a table of costs."""
    folder = tmp_path_factory.mktemp("pages")
    for name, recipe in RUNS.items():
        with_shapes(write_run(folder / name, recipe))
    for part in range(2):  # of one shard each
        altered(write_run(folder / f"runs/{part}", Recipe(domains={"code": Domain(documents=4)})), part=f"{part}/2")
    os.symlink(ROOT / "profiles", folder / "profiles")
    (readme,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "my.yaml").write_text(readme)
    (table,) = re.findall(r"```csv\n(model,.*?)```", (ROOT / "docs" / "costs.md").read_text(), re.DOTALL)
    (folder / "h100.csv").write_text(table)
    rows = [("target,decode,1", 7.1), ("target,verify,2", 7.2), ("target,verify,5", 7.5), ("eagle3,draft,1", 0.5)]
    times = "".join(f"{step},1,1024,{ms},0.01\n" for step, ms in rows)
    (folder / "eagle3.csv").write_text(f"model,step,tokens,batch,context,ms,relative_error\n{times}")
    for name, chances in {"requests": (0.7, 0.5), "requests-new": (0.8, 0.65)}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(logged(dict(zip(("code", "chat"), chances, strict=True)))))
    answers = [sglang.answer(number) | {"domain": "code"} for number in range(3)]
    (folder / "sglang.jsonl").write_text("\n".join(map(json.dumps, answers)))
    texts = [{"prompt_token_ids": [1, number], "token_ids": [5, 6, 7] * 5, "domain": "code"} for number in range(3)]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "before.txt").write_text(prometheus.BEFORE)
    (folder / "after.txt").write_text(prometheus.AFTER)
    # What runs/my predicts of small at gamma 3.
    live = [(3, 0)] * 1163 + [(3, 1)] * 797 + [(3, 2)] * 444 + [(3, 3)] * 1596
    (folder / "metrics.txt").write_text(prometheus.page({"0": live}))
    return folder


def logged(chances: dict[str, float]) -> Iterator[str]:
    """Lines that an engine might have logged of drafts that are right with some probability, by domain."""
    rng = np.random.default_rng(0)
    for number, domain in enumerate(list(chances) * 30):
        accepted = np.minimum(rng.geometric(1 - chances[domain], 40) - 1, 4).tolist()
        usage = {"prompt_tokens": 2, "completion_tokens": 1 + 40 + sum(accepted)}
        yield json.dumps(response(number, **counted(accepted, [4] * 40, 4)) | {"domain": domain, "usage": usage})


def with_shapes(run: Run) -> Run:
    """The run with models whose bytes and FLOPs are known, so that a roofline can tell step times."""
    shape = dataclasses.asdict(ModelShape.from_config(LLAMA))
    manifest = run.manifest
    drafts = {
        name: facts if facts.kind == "prompt_lookup" else dataclasses.replace(facts, shape=shape)
        for name, facts in manifest.drafts.items()
    }
    target = dataclasses.replace(manifest.target, shape=shape)
    return altered(run, target=target, drafts=drafts)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda path: path.name)
def test_every_command_and_snippet_of_a_page_works(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they stand: a snippet may read what a command wrote."""
    monkeypatch.chdir(place)
    work_through(page)


def work_through(page: Path) -> None:
    """Run or check all of its blocks."""
    names: dict[str, Any] = dict(NAMES.get(page.name, {}))
    for block in blocks(page):
        if block.language == "python" and not block.unrun:
            exec(compile(block.text, page.name, "exec"), names)  # noqa: S102  (our own page)
        for line in lines(block) if block.language == "sh" else ():
            parsed(shlex.split(line, comments=True)) if block.unrun else tried(line)


def tried(line: str) -> None:
    """Run or check one command line. Raises `AssertionError` where it does not work, or is not known here."""
    words = shlex.split(line, comments=True)
    if words[0] == "alphaprof":
        expected = int(found[1]) if (found := re.search(r"# .*exit code (\d+)", line)) else 0
        alphaprof(words[1:], expected, line)
    elif words[:2] == ["pip", "install"]:
        assert not words[2].startswith("alphaprof") or "@" in words or "@" in words[2] or ".whl" in words[2], (
            line
        )  # no index
        extras = set(re.findall(r"\[(.*?)\]", line)[0].split(","))
        assert extras <= set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)), line
    elif words[0].startswith("./scripts/"):
        assert os.access(ROOT / words[0], os.X_OK), line
    elif words[0] == "python" and words[1].startswith("scripts/"):
        script = (ROOT / words[1]).read_text()
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in script] == [], line
    else:
        assert words[0] in FOREIGN or words[:2] == ["python", "-m"], f"nobody knows what to do with: {line}"


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line makes of a command's words; nothing of other people's commands."""
    if words[0] != "alphaprof":
        return {}
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    assert words[1] in command.commands, words[1]
    return command.commands[words[1]].make_context(words[1], words[2:]).params


def alphaprof(words: list[str], expected: int, line: str) -> None:
    if words[0] in WITH_MODELS:
        found = parsed(["alphaprof", *words])
        assert words[0] != "profile" or found["out"] or found["dry_run"], line
        load_profile(Path(found["profile_file"]), found["overrides"], found.get("limit") or found.get("documents"))
        return
    result = CliRunner().invoke(app, words)
    error = result.exception
    code = error.exit_code if isinstance(error, AlphaprofError) else result.exit_code
    assert code == expected, f"{line}\n{result.output}\n{error!r}"


@pytest.mark.parametrize(
    "line",
    [
        "alphaprof report runs/my --rule strict",
        "alphaprof report runs/my  # exit code 10",
        "alphaprof profile my.yaml --out runs/x --set target.dtyp=float32",
        "pip install '.[everything]'",
        "python scripts/campaign.py --no-such-option",
        "make demo",
    ],
)
def test_a_line_that_does_not_work_is_found(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with pytest.raises((AssertionError, AlphaprofError, USAGE)):
        tried(line)


@pytest.mark.models
def test_the_first_lines_of_getting_started_run_on_tiny_models(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run, a few documents, and a report of them, as the page has it."""
    from tests.runs import profile_file

    drafts = {"small": {"kind": "model", "model": str(tiny / "draft")}, "ngram": {"kind": "prompt_lookup"}}
    profile_file(tmp_path, tiny, drafts=drafts, gammas=[1, 2]).rename(tmp_path / "my.yaml")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "getting-started.md"
    found = [line for block in blocks(page) if block.language == "sh" for line in lines(block)]
    profiled = [line for line in found if line.startswith("alphaprof profile")]
    assert "--dry-run" in profiled[0]
    for line in profiled[:2]:
        result = CliRunner().invoke(app, [*shlex.split(line, comments=True)[1:], "--set", "costs.repeats=3"])
        assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["report", "runs/try"]).exit_code == 0


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
def test_heads_of_a_quarter_half_and_all_of_the_texts_are_trained_and_compared_as_the_page_has_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's commands, on 60 texts. All are tested on the same ones."""
    from tests.runs import run_of_prompts

    monkeypatch.chdir(tmp_path)
    run_of_prompts(tmp_path, tiny, 60).path.rename("my")
    Path("profile.yaml").rename("my.yaml")
    Path("runs").mkdir()
    Path("my").rename("runs/my")
    page = (ROOT / "docs" / "training.md").read_text().split("## Would more text make a better head?")[1].split("\n## ")[0]
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert "--steps 840" in commands
    commands = commands.replace("--steps 840", "--steps 2")
    lines = ["alphaprof train my.yaml --from runs/my --out heads/mine --steps 2", *commands.splitlines()]
    results = [CliRunner().invoke(app, shlex.split(line, comments=True)[1:]) for line in lines]
    assert [result.exit_code for result in results] == [0] * 5, [result.output for result in results]
    records = [json.loads(Path("heads", name, TRAINING).read_text()) for name in ("quarter", "half", "mine")]
    units = [record["units"] for record in records]
    assert [len(each["train"]) for each in units] == [12, 24, 47]
    assert set(units[0]["train"]) < set(units[1]["train"]) < set(units[2]["train"])
    assert units[0]["test"] == units[1]["test"] == units[2]["test"]
    assert all("tokens per round at gamma 3" in result.output for result in results[-2:])
