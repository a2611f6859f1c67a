"""What `--help` says can be read in 80 columns, its examples work, and shells complete what is typed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.cli.common import ASKED, HOW, OUTPUT, PANELS
from tests.cli import test_docs_commands as pages
from tests.commands import test_import_sglang as sglang

ROOT = Path(__file__).parents[2]
place = pages.place


GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands


def examples_of(name: str) -> list[str]:
    """The examples at the end of a command's help."""
    return str(COMMANDS[name].epilog).split("\n\n")[1:]


def help_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    return CliRunner().invoke(app, [name, "--help"]).output.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_read_in_80_columns_and_ends_with_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(name, monkeypatch)
    assert max(map(len, lines)) == 80
    assert [each.name for each in COMMANDS[name].params if not each.help] == []
    assert [line for line in lines if "…" in line] == []  # an option that does not fit
    panels = [line.split("─ ")[1].split(" ─")[0] for line in lines if line.startswith("╭")]
    assert [panel for panel in panels if panel != "Arguments"] == [panel for panel in PANELS if panel in panels]
    examples = examples_of(name)
    assert examples
    assert [line.strip() for line in lines if line.strip()][-len(examples) :] == examples
    assert all(example.startswith(f"alphaprof {name}") for example in examples)


def test_an_option_stands_in_the_panel_of_its_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(help_of("check", monkeypatch))
    found = {
        name: [panel for panel in text.split("╭─ ") if f" {name} " in panel.split("╰")[0]] for name in ("--gamma", "--out")
    }
    assert found["--gamma"][0].startswith(ASKED)
    assert found["--out"][0].startswith(OUTPUT)
    assert [len(panels) for panels in found.values()] == [1, 1]
    assert any(panel.startswith(HOW) and "--undecided" in panel for panel in text.split("╭─ "))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_work(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    Path("log.jsonl").write_text(json.dumps(sglang.openai() | {"domain": "code"}))
    Path("traffic.jsonl").write_text(json.dumps({"prompt": "hello"}))
    for example in examples_of(name):
        pages.tried(example)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (("alphaprof", "re"), ["report"]),
        (("alphaprof", "report", "--format", "h"), ["html"]),
    ],
)
def test_bash_completes_commands_and_options_once_completion_is_installed(
    typed: tuple[str, ...], completed: list[str], tmp_path: Path
) -> None:
    """As a user's shell does: installed into an empty home, its line of .bashrc, then the function that bash calls."""
    program = tmp_path / "alphaprof"
    code = "import sys; sys.argv[0] = 'alphaprof'; from alphaprof.cli.app import main; main()"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    program.chmod(0o755)
    script = f"""
    exec 2> {shlex.quote(str(tmp_path / "errors"))}
    alphaprof --install-completion > installed && eval "$(grep -v '^$' "$HOME/.bashrc")"
    COMP_WORDS=({" ".join(map(shlex.quote, typed))}) COMP_CWORD={len(typed) - 1}
    $(complete -p alphaprof | sed 's/.*-F \\([a-z_]*\\).*/\\1/') alphaprof
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == completed, (tmp_path / "errors").read_text()


SERVERS = re.compile(
    r"--(speculative|per-request|address|enable-metrics|model$)|llama-gguf-split --"
)  # options of engines and Ray


def test_every_option_that_a_text_names_is_one_of_the_command_that_it_is_about() -> None:
    """Of `alphaprof train --init` one of train's, and of a bare `--init` one of some command."""
    options = {
        name: {"--help", *(option for each in command.params for option in each.opts)} for name, command in COMMANDS.items()
    }
    every, seen = {"--version"}.union(*options.values()), 0
    exports = {
        *(ROOT / "alphaprof/commands/export").glob("*.py"),
        ROOT / "alphaprof/config/engines.py",
    }  # options of engines and trainers
    for path in {*(ROOT / "alphaprof").rglob("*.py")} - exports:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or SERVERS.search(node.value):
                continue
            where = f"{path}:{node.lineno}"
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value)) <= every, where
            for text in re.finditer(r"alphaprof (\w+)(?: [\w/.=-]+(?::\w+)?)*? (--[a-z-]+)", node.value):
                assert text[2] in options.get(text[1], every), where
                seen += 1
    assert seen > 20


def test_a_value_that_is_none_of_several_names_the_one_that_was_meant() -> None:
    for given, meant in (("vllm", "vllm-config"), ("sglang-arg", "sglang-args"), ("rate", "rates")):
        said = " ".join(CliRunner().invoke(app, ["export", "run", "--to", given]).output.replace("│", " ").split())
        assert f"Invalid value for '--to': '{given}' is not one of" in said
        assert f"Did you mean {meant}?" in said
    assert "Did you mean" not in CliRunner().invoke(app, ["export", "run", "--to", "zzz"]).output
