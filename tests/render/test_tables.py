"""Tables of every command at the widths of terminals: nothing is cut, and no word is broken."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from alphaprof.commands.check import checked
from alphaprof.commands.compare import compare
from alphaprof.commands.latency import Latency
from alphaprof.commands.predict import acceptance_of, build_prediction
from alphaprof.commands.trees import build_trees
from alphaprof.log.run_draft import RunDraft
from alphaprof.render.answer import Answer, answer_text
from alphaprof.render.report import ReportAnswer
from alphaprof.render.sections.contents import NAMES
from alphaprof.render.tables import NAME_WIDTH, named_table, show
from alphaprof.stats.formulas import RoundCost
from alphaprof.theory.trees import Tree
from tests.commands.test_check import RECIPE as CHECKED
from tests.commands.test_compare import RECIPE as COMPARED
from tests.commands.test_curve import TRUTH
from tests.commands.test_curve import built as built_curve
from tests.commands.test_report_trees import BUSHY, made
from tests.commands.test_validate import compared
from tests.heads import write_curve
from tests.render.test_sections import everything
from tests.report.test_report_costs import timed
from tests.synthetic import write_run


def of_two(path: Path) -> Answer:
    run = write_run(path / "run", COMPARED)
    return compare(RunDraft(run, "small"), RunDraft(run, "large"))


def of_check(path: Path) -> Answer:
    run = write_run(path / "run", CHECKED)
    return checked(
        run.path, "small", None, 3, {"alpha": ["0.5"], "acceptance_length": ["1.5"], "speedup": ["1.1"]}, None, 0.05, False
    )


def of_curve(path: Path) -> Answer:
    decision = {"min_speedup": 1.3, "gamma": 3}
    return built_curve(write_curve(path / "heads", TRUTH, beside={"published": 0.6, "tuned": 0.4}, decision=decision))


ANSWERS: dict[str, Callable[[Path], Answer]] = {
    "report": lambda path: ReportAnswer.of(everything(path), NAMES),
    "check": of_check,
    "compare": of_two,
    "curve": of_curve,
    "latency": lambda path: Latency.of(timed(path / "run")),
    "predict": lambda path: build_prediction(acceptance_of(0.8, None, None), 0.0, RoundCost(0.1, 1.0, 0.01, 0.0), (1, 2, 3)),
    "trees": lambda path: build_trees(RunDraft(made(path), "small"), given={"mine.json": Tree.from_paths(BUSHY)}),
    "validate": lambda path: compared(path, 1.02),
    "lossy": lambda path: compared(path, rule="additive_0p1"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_word_and_number_is_whole_in_80_and_100_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What a very wide terminal gets as one word is one word; paths may be longer than any column."""
    answer = ANSWERS[name](tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    words = {word for word in answer_text(answer, "terminal").split() if len(word) <= NAME_WIDTH}
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        text = answer_text(answer, "terminal")
        assert words - set(text.split()) == set()
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert max(map(len, text.splitlines())) <= width


def test_every_part_of_a_wide_table_says_whose_rows_it_holds() -> None:
    """The columns that tell rows apart are repeated, and those between that do not are not."""
    table = named_table("draft", "docs", "gamma", "first", "second", "third", left=("docs",))
    for row in (("small", "8", "1"), ("small", "8", "3"), ("large", "8", "1")):
        table.add_row(*row, *(f"{column}{row[2]} {'x' * 14}" for column in "abc"))
    buffer = io.StringIO()
    show(table, "title", Console(file=buffer, width=60))
    heads = [line.split() for line in buffer.getvalue().splitlines() if "gamma" in line]
    assert heads == [["draft", "gamma", "docs", "first"], ["draft", "gamma", "second"], ["draft", "gamma", "third"]]
    assert [line.split()[:2] for line in buffer.getvalue().splitlines() if "a3" in line or "c3" in line] == [
        ["small", "3"]
    ] * 2
