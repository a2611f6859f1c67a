"""Sections of a report: each is there by its name, says why where it is empty, and together they hold all that there is."""

from __future__ import annotations

import html
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from alphaprof.commands.check import checked
from alphaprof.commands.compare.comparison import compare
from alphaprof.commands.doctor import Doctor
from alphaprof.commands.dry_run import DryRun, Finding
from alphaprof.commands.first_look import Counters
from alphaprof.commands.predict import acceptance_of, build_prediction
from alphaprof.errors import RunUnreadable
from alphaprof.render import format as fmt
from alphaprof.render.answer import Answer, answer_text
from alphaprof.render.blocks import table_of_rows
from alphaprof.render.markdown import escaped_sentence
from alphaprof.render.terminal import NAME_WIDTH, draw
from alphaprof.report import build
from alphaprof.report.build import RunReport
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.report.sections import NAMES, context, rules, value_types
from alphaprof.run.manifest import Trial
from alphaprof.run.reader import RunDraft
from alphaprof.servers.pages import CountedRounds, ServerTraffic
from alphaprof.stats.formulas import RoundCost
from alphaprof.version import __version__
from tests.commands.test_check import RECIPE as CHECKED
from tests.commands.test_compare import RECIPE as COMPARED
from tests.commands.test_validate import compared
from tests.conftest import Runner
from tests.reporting import HOSTILE, as_first_screen, as_terminal, changed, reported
from tests.synthetic import Domain, Recipe, write_run

EVERYTHING = Recipe(
    domains={
        "code": Domain(documents=12),
        "chat": Domain(documents=12, alpha=0.6, temperature=1.0, continuation="sampled"),
        "wiki": Domain(documents=5, on_policy=False, continuation="text"),
    },
    drafts={"small": 0.0},
    lookups=("ngram",),
    heads={"head": {"trials": (Trial("", 1, 0.51, 0.0, 0.0, 900, ("vllm",)),)}},
    rules=("strict", "one_hot", "lossless", "additive_0p1", "tree_2"),
    decision={"weights": {"code": 0.5, "chat": 0.5, "wiki": 0.0}},
    thinking=0.5,
    certificates=True,
)
LONG = Recipe(
    domains={f"{number} {'long name ' * 20}"[:200]: Domain(documents=3) for number in range(12)}, lookups=("ngram",)
)


def everything(path: Path) -> RunReport:
    """A run with a model, a head and prompt lookup, three kinds of text, spans and certificates."""
    return reported(path, EVERYTHING)


def cells(line: str) -> Counter[str]:
    """The cells of a printed line: what stands between gaps."""
    return Counter(cell.strip() for cell in line.split("  ") if cell.strip())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return everything(tmp_path_factory.mktemp("everything"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """A run of one rule and one draft model: no step times, thresholds, head or gamma that pays best."""
    return reported(tmp_path_factory.mktemp("bare"), Recipe(latency=False))


def empty_of(report: RunReport) -> list[str]:
    """The sections that have nothing to show."""
    return [name for name in NAMES if report.drawn(name)[2]]


def test_all_is_every_section_that_has_something_in_the_order_of_the_table(whole: RunReport, bare: RunReport) -> None:
    for report in (whole, bare):
        head, *parts = (as_terminal(report, 150, name) for name in ("none", *NAMES))
        full = [part.removeprefix(head) for part, name in zip(parts, NAMES, strict=True) if name not in empty_of(report)]
        assert as_terminal(report, 150) == as_terminal(report, 150, "all")
        assert as_terminal(report, 150) == f"{as_first_screen(report, 150)}\n{head}{''.join(full)}"
        assert head.count("\n") == 1
        assert f"run {report.run.path} (complete)" in head
    assert empty_of(whole) == ["load"]
    assert empty_of(bare) == ["rules", "spans", "load", "context", "requests", "times", "wiring"]


def test_a_section_that_is_asked_for_by_name_is_never_silent(whole: RunReport, bare: RunReport) -> None:
    """It writes something, or a sentence that says why it does not."""
    for report in (whole, bare, changed(bare, results=(), pools=(), notes=())):
        for name in NAMES:
            title, blocks, empty = report.drawn(name)
            said = as_terminal(report, 200, name).split("\n", 1)[1]
            assert said.startswith(f"\n{name}: {title}\n\n")
            assert said.removeprefix(f"\n{name}: {title}\n\n").strip()
            assert ("\nnothing to show: " in said) == empty
            if empty:
                assert said.endswith(f"\n{blocks[0]}\n")
                assert len(str(blocks[0])) > len("nothing to show: ")


@pytest.mark.parametrize("step", ["compute", "draw"])
@pytest.mark.parametrize(
    ("raised", "lines"),
    [
        (
            ZeroDivisionError("a / 0"),
            ("ZeroDivisionError('a / 0')", "no answer depends on this section; please report this as a bug"),
        ),
        (RunUnreadable("a file is damaged", "write it again"), ("a file is damaged", "write it again")),
    ],
    ids=["a bug", "an error"],
)
def test_a_section_that_fails_says_so_in_its_place_and_the_answer_stands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    console_script: Runner,
    step: str,
    raised: Exception,
    lines: tuple[str, str],
) -> None:
    """In two lines, beside all other sections; the exit code is 0."""
    run = write_run(tmp_path / "run").path

    def printed(*arguments: str) -> str:
        code, output, _ = console_script("report", run, *arguments)
        assert code == 0
        return output

    whole = {form: printed("--format", form) for form in ("terminal", "md", "json")}

    def fail(_: RunReport) -> None:
        raise raised

    monkeypatch.setattr(context, step, fail)
    monkeypatch.setattr(build, "CAUGHT", (Exception,))
    error, hint = lines
    assert printed() == whole["terminal"]
    assert printed("--show", "context").endswith(f"\ncontext: {context.TITLE}\n\nerror: {error}\nhint: {hint}\n")
    assert printed("--show", "all").count(f"\nerror: {error}\nhint: {hint}\n") == 1
    assert printed("--format", "md") == whole["md"]
    section = printed("--show", "context", "--format", "md").removeprefix(whole["md"])
    assert (
        section
        == f"\n### {fmt.sentence(context.TITLE)}\n\n- error: {escaped_sentence(error)}\n- hint: {escaped_sentence(hint)}\n"
    )
    content, before = json.loads(printed("--format", "json")), json.loads(whole["json"])
    if step == "compute":
        assert content["sections"].pop("context") == {"error": error, "hint": hint}
        before["sections"].pop("context")
    assert content == before


def test_a_section_that_shows_what_another_failed_to_compute_is_there_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(rules=("strict", "tree_2"))
    whole = as_terminal(reported(tmp_path / "whole", recipe), 100, "gammas")
    monkeypatch.setattr(rules, "compute", lambda _: 1 / 0)
    monkeypatch.setattr(build, "CAUGHT", (Exception,))
    part = as_terminal(reported(tmp_path / "part", recipe), 100, "gammas")
    assert set(part[part.index("gammas: ") :].splitlines()) < set(whole.splitlines())
    assert ("rule tree_2" in whole, "rule tree_2" in part, "rule strict" in part) == (True, False, True)


def test_acceptance_by_depth_is_that_of_the_largest_gamma(tmp_path: Path) -> None:
    report = reported(tmp_path / "run", Recipe())
    lines = as_terminal(report, 200, "gammas").splitlines()
    (title,) = (place for place, line in enumerate(lines) if "shares by depth d" in line)
    result = report.results[0]
    last = max(result.gammas, key=lambda item: item.gamma)
    assert f"at gamma {last.gamma}, " in lines[title]
    row = next(line for line in lines[title:] if line.split()[:1] == [result.domain])
    shares = zip(last.conditional, last.marginal, strict=True)
    assert row.split()[1:] == [word for one, first in shares for word in (fmt.share(one), "/", fmt.share(first))]


def test_json_holds_the_sections_that_were_asked_for(tmp_path: Path, console_script: Runner) -> None:
    run = write_run(tmp_path / "run", Recipe(rules=("strict", "additive_0p1"))).path

    def held(*arguments: str) -> Any:
        code, output, _ = console_script("report", run, *arguments, "--format", "json")
        assert code == 0
        return json.loads(output)

    every, some = held(), held("--show", "rules,context,load")
    assert set(every["sections"]) == set(value_types())
    assert some == every | {"sections": {name: every["sections"][name] for name in ("rules", "context", "load")}}
    page, beside = tmp_path / "a.html", tmp_path / "a.json"  # which needs every section, and comes first
    console_script("report", run, "--show", "rules,context,load", "--out", page, "--out", beside)
    assert json.loads(beside.read_text()) == some


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return reported(tmp_path_factory.mktemp("long"), LONG)


def numbers(text: str) -> Iterator[str]:
    """Every cell of a text that holds a digit, its interval apart."""
    for line in text.replace(" [", "  [").splitlines():
        yield from (cell for cell in cells(line) if any(map(str.isdigit, cell)) and not cell[0].isalpha())


@pytest.mark.parametrize("width", [40, 79, 100])
def test_narrow_terminals_get_every_number_whole(long: RunReport, whole: RunReport, width: int) -> None:
    """Also where twelve domains have names of 200 characters."""
    for report in (whole, long):
        for name in ("drafts", "gammas", "rules", "causes", "requests", "target"):
            narrow, wide = as_terminal(report, width, name), as_terminal(report, 1000, name)
            assert report is not whole or "\N{HORIZONTAL ELLIPSIS}" not in narrow  # long names end in one
            tables = [line for line in wide.splitlines() if "  " in line and not line.startswith("  ")]
            lost = set(numbers("\n".join(tables))) - set(numbers(narrow))
            assert {cell for cell in lost if "name" not in cell} == set()
            if width >= 60:
                assert max(map(len, narrow.splitlines())) <= width


def test_the_page_on_reports_lists_every_section_with_its_title() -> None:
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- `(\w+)`: (.*?)(?: \(`.*`\))?$", page.split("## Sections")[1].split("\n## ")[0], re.MULTILINE)
    assert rows == [(name, import_module(f"alphaprof.report.sections.{name}").TITLE) for name in NAMES]


def of_two(path: Path) -> Answer:
    run = write_run(path / "run", COMPARED)
    return compare(RunDraft(run, "small"), RunDraft(run, "large"))


def of_check(path: Path) -> Answer:
    run = write_run(path / "run", CHECKED)
    return checked(
        run.path, "small", None, 3, {"alpha": ["0.5"], "acceptance_length": ["1.5"], "speedup": ["1.1"]}, None, 0.05
    )


NAME = HOSTILE["markup"]
CHECKS = (
    Finding.of("dtype", "target", "float32 is as fast"),
    Finding.of("data", NAME, "3 prompts", "remove duplicates"),
    Finding("data", "run", "problem", f"/{'very/long/' * 20}path", "take another"),
)
ANSWERS: dict[str, Callable[[Path], Answer]] = {
    "report": lambda path: ReportAnswer(everything(path), [name for name in NAMES if name not in ("legend", "load")]),
    "check": of_check,
    "compare": of_two,
    "predict": lambda path: build_prediction(acceptance_of(0.8), RoundCost(0.1, 1.03, 0.0), (1, 2, 3)),
    "validate": lambda path: compared(path, 1.02),
    "lossy": lambda path: compared(path, rule="additive_0p1"),
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


@pytest.mark.parametrize("name", ANSWERS)
def test_every_format_holds_every_word_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As the terminal has them, which names the version beside a report; titles begin with a capital elsewhere. JSON is held
    against its schema by a guard.
    """
    answer = ANSWERS[name](tmp_path)
    answer_text(answer, "json")
    monkeypatch.setenv("COLUMNS", "1000")
    told = answer_text(answer, "terminal").casefold().split()
    words = {word for word in told if word.isalnum() or any(map(str.isdigit, word))} - {__version__}
    for form in ("md", "html"):
        text = html.unescape(answer_text(answer, form)).replace("\\", "").casefold()
        assert [word for word in words if word not in text] == [], form


def test_every_part_of_a_wide_table_says_whose_rows_it_holds() -> None:
    """The columns that tell rows apart are repeated, and those between that do not are not."""
    keys = (("small", "8", "1"), ("small", "8", "3"), ("large", "8", "1"))
    rows = [(*key, *(f"{column}{key[2]} {'x' * 14}" for column in "abc")) for key in keys]
    table = table_of_rows("title", ("draft", "docs", "gamma", "first", "second", "third"), rows, left=("docs",))
    buffer = io.StringIO()
    draw([table], Console(file=buffer, width=60))
    heads = [line.split() for line in buffer.getvalue().splitlines() if "gamma" in line]
    assert heads == [["draft", "gamma", "docs", "first"], ["draft", "gamma", "second"], ["draft", "gamma", "third"]]
    assert [line.split()[:2] for line in buffer.getvalue().splitlines() if "a3" in line or "c3" in line] == [
        ["small", "3"]
    ] * 2


def test_no_line_is_wider_than_a_terminal_however_narrow() -> None:
    buffer = io.StringIO()
    draw(["   words"], Console(file=buffer, width=4))
    assert {len(line) for line in buffer.getvalue().splitlines()} == {4}
