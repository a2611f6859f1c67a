"""The first screen: the answer whole on 40 lines of 100 columns, in every format, and nothing on it that is not so."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

import alphaprof
from alphaprof.cli.app import app
from alphaprof.config.load import changed_question
from alphaprof.render import format as fmt
from alphaprof.render.answer import answer_text
from alphaprof.report.answer import Note, OnFor
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.formats.first_screen import ALONE, first_screen
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.report.sections import verdict
from alphaprof.run.notes import NOTES, REMARKS
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from tests.commands.test_import import response
from tests.reporting import as_first_screen, changed
from tests.synthetic import Domain, Recipe, write_run

ALPHAS = (0.85, 0.6, 0.5, 0.3, 0.75, 0.65, 0.4, 0.55, 0.52, 0.82, 0.33, 0.45)
WIDE = Recipe(
    domains={f"{chr(97 + place)}{'x' * 199}": Domain(documents=16, alpha=alpha) for place, alpha in enumerate(ALPHAS)},
    drafts={"small": -0.05, "eagle3": 0.08, "tiny": -0.3, "skip": 0.1},
    lookups=("ngram",),
    gammas=(1, 2, 3, 4),
    draft_ms=6.0,
    shard_documents=64,
)
TWO = Recipe(
    domains={"code": Domain(documents=40, alpha=0.9), "chat": Domain(documents=20, alpha=0.2)},
    lookups=("ngram",),
    draft_ms=3.0,
)
TIMES = [(1, 7.0, 0.05), (4, 7.5, 0.15), (16, 9.0, 0.5), (64, 15.0, 4.0)]  # sequences, ms of a decode step, ms a token more


def table_of_engine(path: Path, drafts: tuple[str, ...], lookups: tuple[str, ...], prefill: float = 0.0) -> list[str]:
    """Writes step times at several concurrencies, and returns what sets them as a report's."""
    rows = ["model,step,tokens,batch,context,ms"]
    rows += [f"{model},prefill,16,1,0,{prefill}" for model in ("target", *drafts) if prefill]
    for batch, ms, more in TIMES:
        rows += [f"target,,{tokens},{batch},36,{ms + more * (tokens - 1)}" for tokens in range(1, 6)]
        rows += [f"{draft},draft,1,{batch},36,0.5" for draft in drafts]
        rows += [f"{draft},lookup,1,{batch},36,0.01" for draft in lookups]
    file = path / "h100.csv"
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return ["costs.source=table", f"costs.path={file}"]


FOUR = {"code": 0.85, "chat": 0.25, "math": 0.5, "sql": 0.7}
SCREENS: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "go": (FOUR, {"lookups": ("ngram",)}),
    "no-go": (FOUR, {"draft_ms": 9.0}),
    "undecided": (FOUR, {"draft_ms": 3.5}),
    "not-known": (FOUR, {"lookups": ("ngram",)}),
    "head": (FOUR, {"drafts": {}, "heads": {"eagle": {}}, "draft_ms": 0.6}),
    "import": ({}, {}),
}


@pytest.mark.parametrize("name", SCREENS)
def test_the_first_screen_of_each_verdict_is_this_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests/render/screens; a go has its engine's times."""
    monkeypatch.chdir(tmp_path)
    alphas, more = SCREENS[name]
    domains = {domain: Domain(documents=8 if name == "undecided" else 24, alpha=alpha) for domain, alpha in alphas.items()}
    times = table_of_engine(Path(), ("small",), ("ngram",), prefill=2.0) if name == "go" else []
    times += ["costs.source=none"] if name == "not-known" else []
    if name == "import":
        Path("log.jsonl").write_text("".join(json.dumps(response(number)) + "\n" for number in range(20)))
        assert CliRunner().invoke(app, ["import", "log.jsonl", "--rule", "strict", "--out", "run"]).exit_code == 0
    else:
        write_run(Path("run"), Recipe(domains=domains, **more))
    screen = as_first_screen(asked(Run.open(Path("run")), *times))
    assert screen == Path(__file__).with_name("screens").joinpath(f"{name}.txt").read_text(encoding="utf-8")


def asked(run: Run, *changes: str) -> RunReport:
    return build_report(run, config=changed_question(run.manifest.config, list(changes)))


def widest(lines: list[str]) -> int:
    """The columns of the widest line; commands to paste are never broken, however long the run's path is."""
    return max(cell_len(line) for line in lines if "alphaprof export " not in line)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("first") / "run", TWO)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("wide") / "run", WIDE)


def test_five_drafts_and_twelve_domains_fit_forty_lines(wide: Run, tmp_path: Path) -> None:
    times = table_of_engine(tmp_path, tuple(WIDE.drafts), ("ngram",))
    report = asked(wide, *times, "decision.min_speedup=1.3", "decision.concurrency=16")
    notes = tuple(
        Note(code, "a long message about a run. " * 20, "do") for code in ("skipped", "wiring", "partial", "other")
    )
    assert report.times is not None
    load = tuple(dataclasses.replace(item, throughput=item.speedup) for item in report.traffic.load)
    computed = changed(
        report,
        times=dataclasses.replace(report.times, source="roofline", device="h200", factor=1.25),
        traffic=dataclasses.replace(report.traffic, load=load, alike=(2, 3, 4)),
        notes=notes,
    )
    assert "Breaks even if" in as_first_screen(computed)
    assert "throughput 1" in as_first_screen(computed)
    for each in (report, build_report(wide), changed(report, notes=notes), computed):
        lines = as_first_screen(each).splitlines()
        assert len(lines) <= 40
        assert widest(lines) <= 100
        rows = [line for line in lines if re.match(r"[a-l]x{14}….*\[", line)]
        assert len(rows) == 12
        for row, item in zip(rows, each.domains, strict=True):
            assert item.answer.draft is not None
            assert f" {item.answer.draft} " in row
            assert f" {item.answer.speedup.value:.2f} [" in row
            alone = ALONE if item.adjusted != item.answer.verdict else ""
            assert f" {item.answer.verdict}{alone} " in row


def test_of_a_long_next_best_the_name_is_cut_and_the_number_whole(two: Run) -> None:
    report = build_report(two)
    for known in (True, False):
        domains = [
            dataclasses.replace(
                item,
                next_best=dataclasses.replace(
                    item.next_best, draft="a-draft-with-a-long-name", speedup=item.next_best.speedup if known else None
                ),
            )
            for item in report.domains
            if item.next_best is not None
        ]
        assert domains
        text = as_first_screen(changed(report, domains=tuple(domains)))
        for item in domains:
            assert item.next_best is not None
            value = item.next_best.speedup if known else item.next_best.tokens_per_round
            assert value is not None
            assert re.search(rf"a-draf\S*… {value.value:.2f}{'x' if known else ' tokens'}(?: |$)", text, re.MULTILINE)


@pytest.mark.parametrize("width", [99, 60, 40])
def test_a_narrow_terminal_gets_whole_numbers_and_says_what_is_left_out(wide: Run, width: int) -> None:
    report = build_report(wide)
    text = as_first_screen(report, width)
    for item in report.domains:
        assert fmt.interval(item.answer.speedup) in text
    assert fmt.percent(report.domains[0].share) in text or "terminal too narrow to show: share" in " ".join(text.split())
    if width >= 60:
        assert widest(text.splitlines()) <= width


def test_the_verdict_names_whose_times_it_rests_on_and_what_a_round_may_cost(two: Run, tmp_path: Path) -> None:
    """Unless the times are those of the user's engine; with what was measured elsewhere only of a like pair."""
    report = build_report(two)
    assert report.times is not None
    tokens = f"{report.answer.tokens_per_round.value:.2f}"

    def about(source: str, **times: Any) -> tuple[str, str]:
        assert report.times is not None
        screen = first_screen(changed(report, times=dataclasses.replace(report.times, source=source, **times)))
        return screen.about[0].split("]")[1], (*screen.about, "")[1]

    pays = f"Breaks even if a round costs {tokens} decode steps"
    assert about("measured") == (" measured here on CPU, threshold 1.1x", pays)
    assert about("roofline", device="h200", factor=1.25) == (" by a roofline of h200, threshold 1.1x", pays)
    for source, words in (("table", " by your table cpu"), ("vllm", " by vLLM 1.2 timed here")):
        first, second = about(source, engine="vLLM 1.2")
        assert (first, "Breaks even" in second) == (f"{words}, threshold 1.1x", False)
    slow = dataclasses.replace(
        report.answer, gamma=2, speedup=Interval(0.5, 0.4, 0.6), tokens_per_round=Interval(1.6, 1.5, 1.7)
    )
    lost = "Even a perfect draft loses: a round costs 3.20 decode steps and emits at most 3 tokens"
    assert first_screen(changed(report, answer=slow)).about[1] == lost
    slow = dataclasses.replace(slow, gamma=3)
    assert first_screen(changed(report, answer=slow)).about[1].startswith("Breaks even if a round costs 1.60")
    answer = dataclasses.replace(report.answer, draft="small", gamma=4)
    head = dataclasses.replace(report.run.draft_models["small"], depths=4)
    assert head.by_depth
    target = dataclasses.replace(report.run.target_model, parameters=8_030_000_000, dtype="bfloat16")
    for facts, own, known in ((head, target, True), (head, report.run.target_model, False), (None, target, False)):
        models = report.run.draft_models | ({"small": facts} if facts else {})
        run = dataclasses.replace(report.run, draft_models=models, target_model=own)
        line = first_screen(changed(report, run=run, answer=answer)).about[1]
        assert line == pays + (" (vLLM on H100: about 1.3)" if known else "")


def test_at_several_sequences_the_speedup_of_throughput_stands_below(two: Run, tmp_path: Path) -> None:
    times = table_of_engine(tmp_path, ("small",), ("ngram",))
    without = asked(two, *times, "decision.draft=small", "decision.concurrency=16", "decision.min_speedup=1.01")
    assert "throughput is not known: no prefill was timed" in first_screen(without).about
    file = tmp_path / "h100.csv"
    file.write_text(f"{file.read_text()}target,prefill,16,1,0,2.0\nsmall,prefill,16,1,0,0.5\n", encoding="utf-8")
    report = asked(two, *times, "decision.draft=small", "decision.concurrency=16", "decision.min_speedup=1.01")
    load = {item.concurrency: item for item in report.traffic.load}
    assert all(item.throughput.value < item.speedup.value for item in load.values() if item.gamma)
    line = f"throughput {fmt.interval(load[16].throughput, 'x')}: prefills of all sequences included, outputs of "
    assert f"{line}{report.run.mean_length:.0f} tokens" in first_screen(report).about
    name, cells = first_screen(report).load.rows[2]
    assert (name, cells["16"]) == ("throughput, prefills included", f"{load[16].throughput.value:.2f}x")
    one = asked(two, *times, "decision.draft=small")
    assert not any("throughput" in line for line in first_screen(one).about)


def test_load_shows_the_best_gamma_at_each_concurrency_and_up_to_where_it_is_enough(two: Run, tmp_path: Path) -> None:
    report = asked(
        two, *table_of_engine(tmp_path, ("small",), ("ngram",)), "decision.draft=small", "decision.min_speedup=1.3"
    )
    screen = first_screen(report)
    assert screen.load is not None
    assert screen.load.columns == ("1", "4", "16", "64")
    best = {item.concurrency: item.speedup for item in report.traffic.load}
    assert screen.load.rows[0][1] == {str(load): f"{speedup.value:.2f}x" for load, speedup in best.items() if speedup}
    assert best[1] == report.answer.speedup  # its concurrency is that of the headline
    enough = [concurrency for concurrency, speedup in best.items() if speedup and speedup.low >= 1.3]
    assert 1 <= len(enough) < 4  # else this run shows nothing
    assert screen.pays == f"surely above 1.3x up to {enough[-1]} at a time"
    assert first_screen(asked(two, "decision.draft=small")).load is None  # times of one concurrency alone
    assert not any("no step times" in line for line in screen.table.below)
    assert "no step times: ngram" in first_screen(asked(two, *table_of_engine(tmp_path, ("small",), ()))).table.below


def test_domains_on_which_alone_the_draft_is_faster_have_a_line(two: Run) -> None:
    """Below the verdict, in the order of the table; whole in section verdict however many they are."""
    report = build_report(two)
    assert not any("only" in line for line in first_screen(report).about)

    def confined(*domains: str) -> RunReport:
        only = OnFor(domains, Interval(1.31, 1.22, 1.4), Interval(1.1, 1.02, 1.2))
        return changed(report, traffic=dataclasses.replace(report.traffic, only=only))

    assert first_screen(confined("code")).about[2] == "on for code only: 1.31x [1.22, 1.40]"
    first, second = (item.answer.domain for item in report.domains)
    line = f"on for {first}, {second} only: 1.31x [1.22, 1.40]"
    assert as_first_screen(confined("chat", "code")).splitlines()[4].strip() == line
    assert list(verdict.draw(confined("chat", "code")))[-1] == line


def test_gammas_without_a_clear_difference_stand_below_the_verdict(two: Run) -> None:
    report = asked(two, "decision.min_speedup=0.1")

    def alike(*gammas: int) -> str:
        return first_screen(changed(report, traffic=dataclasses.replace(report.traffic, alike=gammas))).about[1]

    assert alike(2, 3, 4).endswith("; γ 2 to 4 are equally good")
    assert "equally good" not in alike(4)


def test_what_the_halves_disagree_about_stands_below_the_verdict(two: Run) -> None:
    text = "one half of the documents prefers a with 3 speculative tokens, the other b with 4 speculative tokens"
    report = build_report(two)
    traffic = dataclasses.replace(report.traffic, disagreement=text, alike=())
    assert first_screen(changed(report, traffic=traffic)).about[2] == text


def test_the_three_notes_that_matter_most_come_first_and_twins_are_counted(two: Run) -> None:
    codes = ["chain", "skipped", "near_ties", "wiring", "near_ties", "something new"]
    notes = tuple(Note(code, f"{code} number {place}", "do") for place, code in enumerate(codes))
    screen = first_screen(changed(build_report(two), notes=notes))
    assert screen.notes == ("wiring number 3", "near_ties number 2 (and 1 more note like it)", "skipped number 1")
    assert "notes (2 more)" in screen.more


def test_an_end_is_not_rounded_to_the_other_side_of_what_was_asked(two: Run) -> None:
    report = build_report(two)
    assert report.traffic.min_speedup == 1.1
    below = changed(report, answer=dataclasses.replace(report.answer, speedup=Interval(1.12, 1.0996, 1.15)))
    assert f"{report.answer.gamma} speculative tokens: 1.12x [1.0996, 1.15] measured " in first_screen(below).about[0]
    reached = changed(report, answer=dataclasses.replace(report.answer, speedup=Interval(1.12, 1.1004, 1.15)))
    assert "1.12x [1.10, 1.15]" in first_screen(reached).about[0]


def test_every_note_is_raised_with_the_facts_that_its_texts_name() -> None:
    """In the sources: each call of `note` with a code, against the table."""
    raised, known = set(), {**NOTES, **REMARKS}
    for path in Path(alphaprof.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "note":
                code = call.args[0].value if isinstance(call.args[0], ast.Constant) else "skipped"
                named = {name for text in known[code][:2] for _, name, _, _ in Formatter().parse(text) if name}
                assert {keyword.arg for keyword in call.keywords} == named, code
                raised.add(code)
    assert raised | {"truncated"} == set(known)


@pytest.mark.parametrize("form", ["terminal", "md", "html", "json"])
def test_every_format_draws_a_verdict_that_holds_for_its_domain_alone(form: str, two: Run) -> None:
    report = build_report(two, config=changed_question(two.manifest.config, ["decision.min_speedup=0.1"]))
    assert {item.answer.verdict for item in report.domains} == {"GO"}
    alone = [dataclasses.replace(item, adjusted="UNDECIDED") for item in report.domains]
    text = answer_text(ReportAnswer(changed(report, domains=tuple(alone)), ()), form)
    marked = {"terminal": "GO*", "md": r"GO\*", "html": "GO*", "json": '"adjusted": "UNDECIDED"'}[form]
    assert text.count(marked) >= len(alone)
    assert ("for all 2 domains together" in text) == (form != "json")
