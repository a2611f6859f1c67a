"""Answers of commands that are not reports: terminal, Markdown and page draw the same blocks."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.doctor import Doctor
from alphaprof.commands.dry_run import DryRun, Finding
from alphaprof.commands.first_look import Counters
from alphaprof.render.answer import Answer, answer_text
from alphaprof.render.blocks import Table
from alphaprof.servers.pages import CountedRounds, ServerTraffic
from tests.reporting import HOSTILE
from tests.synthetic import Recipe, write_run

NAME = HOSTILE["markup"]
CHECKS = (
    Finding.of("dtype", "target", "float32 is as fast"),
    Finding.of("data", NAME, "3 prompts", "remove duplicates"),
    Finding("data", "run", "problem", f"/{'very/long/' * 20}path", "take another"),
)
ANSWERS: dict[str, Callable[[Path], Answer]] = {
    "counters": lambda _: Counters(
        "0",
        "vLLM",
        NAME,
        1,
        ServerTraffic(20.0, 40, 21.0, 60.0, 900, 2.81, 8.6, (8.3, 8.9), 1.02, 21.0, 0.5),
        CountedRounds(2, 10, 20, 9, 0.45, 1.9, (0.6, 0.3), (0.6, None)),
    ),
    "dry run": lambda _: DryRun.of(CHECKS),
    "doctor": lambda _: Doctor("0", "3.11", "Linux", {"torch": "2"}, ("cpu",), None, {"html": None}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_format_holds_every_cell(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    answer = ANSWERS[name](tmp_path)
    texts = {form: answer_text(answer, form) for form in ("terminal", "md", "html")}
    assert texts["md"].startswith("## ")
    texts["html"] = html.unescape(re.sub(r"<[^>]+>", "", texts["html"][texts["html"].index("<main") :]))
    tables = [block for block in answer.blocks() if isinstance(block, Table)]
    words = {word for table in tables for _, cells in table.rows for cell in cells.values() for word in cell.split()}
    assert bool(tables) == (name != "doctor")
    for form, text in texts.items():
        assert [word for word in words if word.isalnum() and word not in text] == [], form


def test_long_words_fold_in_narrow_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in a cell does not push the other columns off the screen."""
    monkeypatch.setenv("COLUMNS", "80")
    text = answer_text(ANSWERS["dry run"](Path()), "terminal")
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("finding and remedy") == 1


FILES = {"txt": "terminal", "md": "md", "html": "html", "json": "json"}
OF_REPORTS = FILES | {"svg": "svg", "png": "png"}
WRITES = (
    ("report {run}", OF_REPORTS),
    ("check {run}", FILES | {"xml": "junit"}),
    ("compare {run}:small {run}:ngram", FILES),
)


@pytest.mark.parametrize(("command", "files"), WRITES)
def test_the_suffix_of_a_file_decides_its_format(command: str, files: dict[str, str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(lookups=("ngram",))).path
    words = command.format(run=run).split()
    outs = [word for suffix in files for word in ("--out", str(tmp_path / f"answer.{suffix}"))]
    result = CliRunner().invoke(app, [*words, *outs])
    assert (result.exit_code, result.stdout) == (0, "")
    for suffix, form in files.items():
        content = (tmp_path / f"answer.{suffix}").read_bytes()
        if form in ("svg", "png"):
            assert content[:4] == {"svg": b"<svg", "png": b"\x89PNG"}[form]
        else:
            printed = CliRunner().invoke(app, [*words, "--format", form])
            assert content.decode() == printed.stdout
            assert len(content) > 100
    again = CliRunner().invoke(app, [*words, "--format", "json", *outs[:2], *outs[6:8]])
    assert again.stdout == ""  # it is in the file
    both = CliRunner().invoke(app, [*words, "--format", "md", *outs[6:8]])
    assert both.stdout == (tmp_path / "answer.md").read_text(encoding="utf-8")
    dash = CliRunner().invoke(app, [*words, "--out", "-", *outs[6:8]])
    assert dash.stdout == (tmp_path / "answer.txt").read_text(encoding="utf-8")
