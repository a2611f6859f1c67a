"""Markdown and JUnit: every number is that of the JSON, and text from the data means nothing but itself."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.render.blocks import OUTCOMES, Table
from alphaprof.render.markdown import SIGNS
from alphaprof.report.build import build_report
from alphaprof.report.formats.first_screen import first_screen
from alphaprof.report.sections import NAMES
from alphaprof.run.reader import Run
from tests.reporting import as_markdown
from tests.synthetic import Domain, Recipe, write_run

RECIPE = Recipe(
    domains={"code": Domain(documents=12, alpha=0.8), "a|b <i>": Domain(documents=12, alpha=0.4)},
    decision={"draft": "small", "gamma": 3},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("markdown") / "run", RECIPE)


def cells(line: str) -> list[str]:
    """The cells of a row, escaped bars being none."""
    return [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]


def read(line: str) -> str:
    """A line as its readers see it."""
    return html.unescape(re.sub(r"\\(.)", r"\1", line))


def table_of(text: str) -> list[list[str]]:
    """The cells of the one table, as its readers see them."""
    lines = text.splitlines()
    return [[read(cell.replace("\0", "|")) for cell in cells(line)] for line in lines if line.startswith("| ")]


def test_a_report_has_its_verdict_and_a_row_a_domain(run: Run) -> None:
    report = build_report(run)
    text = as_markdown(report)
    told = [read(line) for line in text.splitlines()]
    screen, whole, verdict = first_screen(report), report.answer.speedup, report.answer.verdict
    assert told[0] == f"**{screen.conclusion}**"
    assert told[2].startswith(f"## {SIGNS[OUTCOMES[verdict]]} {verdict}: small overall, 3 speculative tokens: ")
    assert f": {whole.value:.2f}x [{whole.low:.2f}, {whole.high:.2f}] measured here on CPU, threshold 1.1x" in told[2]
    lines = [*screen.about[1:], screen.times, screen.run, *screen.table.below, screen.pays, *(screen.serve or ())]
    assert [line for line in lines if line not in "\n".join(told)] == []
    named, *rows = table_of(text)
    assert len(rows) == len(report.domains) + 1 == 3
    aligned = ["---" if name in ("domain", "draft", "verdict", "next best") else "--:" for name in named]
    assert f"|{'|'.join(aligned)}|" in text
    total = next(item.answer for item in report.drafts if item.answer.draft == report.answer.draft)
    for row, answer in zip(rows, (*(item.answer for item in report.domains), total), strict=True):
        cell = dict(zip(named, row, strict=True))
        assert (cell["draft"], cell["γ"], cell["alpha"]) == ("small", "3", f"{answer.acceptance.value:.2f}")
        assert cell["tokens/round"] == f"{answer.tokens_per_round.value:.2f}"
        ends = f"{answer.speedup.low:.2f}, {answer.speedup.high:.2f}"
        assert cell["speedup [95% each]"] == f"{answer.speedup.value:.2f} [{ends}]"
        assert cell["verdict"] == f"{SIGNS[OUTCOMES[answer.verdict]]} {answer.verdict}"
    assert sorted(row[0] for row in rows) == ["all traffic", "a|b <i>", "code"]
    assert rows[-1][0] == "all traffic"
    assert "| a\\|b &lt;i\\> |" in text
    assert [line for line in screen.notes if f"- {line}" not in told] == []


def called(run: Run, *arguments: str) -> str:
    return CliRunner().invoke(app, [arguments[0], str(run.path), *arguments[1:]]).stdout


def test_the_commands_print_it(run: Run) -> None:
    assert called(run, "report", "--format", "md") == as_markdown(build_report(run))
    text = called(run, "check", "--min-alpha", "0.6", "--format", "md")
    assert text.startswith("## ❌ FAIL  alpha of a\\|b &lt;i\\> 0.")
    rows = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == ["code", "a\0b &lt;i\\>"]
    assert [row[-1] for row in rows[1:]] == ["✅ PASS", "❌ FAIL"]


def test_junit_has_a_case_a_threshold(run: Run) -> None:
    suite = ET.fromstring(called(run, "check", "--min-alpha", "0.6", "--format", "junit"))  # noqa: S314  (our own)
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    passed, failed = suite.findall("testcase")
    assert (passed.get("name"), list(passed)) == ("code", [])
    assert failed.get("name") == "a|b <i>"
    assert "at least 0.6" in str(failed[0].get("message"))
    assert failed[0].tag == "failure"


def test_sections_that_are_asked_for_stand_below_the_table(run: Run) -> None:
    """A parser of Markdown finds all of their tables, and no other markup than line breaks."""
    report = build_report(run)
    text = as_markdown(report, "all")
    assert text.startswith(as_markdown(report))
    filled = [(title, blocks) for title, blocks, empty in map(report.drawn, NAMES) if not empty]
    assert re.findall(r"^### (.*)", text, re.MULTILINE) == [title[:1].upper() + title[1:] for title, _ in filled]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    tables = sum(isinstance(block, Table) for _, blocks in filled for block in blocks)
    assert [token.type for token in tokens].count("table_open") == 1 + tables > 5
    inside = [child for token in tokens for child in token.children or () if child.type == "html_inline"]
    assert [token for token in tokens if token.type == "html_block"] == []
    assert {child.content for child in inside} <= {"<br>"}
