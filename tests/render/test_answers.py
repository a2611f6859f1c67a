"""Answers of commands that are not reports: terminal, Markdown and page draw the same blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from tests.synthetic import Recipe, write_run

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
