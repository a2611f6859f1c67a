"""Step times that do not tell how fast a draft is rank nothing and are drawn nowhere; those of one thread do not wait."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from alphaprof.commands.check import checked
from alphaprof.config.load import changed_question
from alphaprof.costs import timing
from alphaprof.profiling.profile import step_times_of
from alphaprof.profiling.timing import steppers
from alphaprof.profiling.timing.latency import Timed
from alphaprof.render.answer import answer_text
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.formats.first_screen import first_screen
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.report.sections import NAMES
from alphaprof.report.speeds import deciding_interval
from alphaprof.report.wording import timed
from alphaprof.run.manifest import Environment
from alphaprof.run.reader import Run
from tests.loops import each
from tests.report.test_decision import found
from tests.reporting import as_first_screen
from tests.runs import Silent
from tests.synthetic import Domain, Recipe, altered, write_run

# The draft that emits most tokens is slow to run.
RECIPE = Recipe(
    domains={"code": Domain(documents=24, alpha=0.75), "chat": Domain(documents=24, alpha=0.5)},
    drafts={"most": 0.1, "ngram": -0.3},
    lookups=("ngram",),
    draft_ms=6.0,
)
QUIET, NOISY, BUSY, WAITING = 0.0, 0.35, 0.81, "steps waited 81% of their time for a core"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Run]:
    """The same run on a quiet and on a busy machine, by the share of waiting."""
    made = {}
    for waiting in (QUIET, NOISY, BUSY):
        run = write_run(tmp_path_factory.mktemp("untold") / "run", RECIPE)
        altered(run, environment=run.manifest.environment | Environment(timing_waiting=waiting))
        made[waiting] = Run.open(run.path)
    return made


@pytest.fixture(autouse=True)
def _waiting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUSY", 0.1)


def report_of(run: Run, *changes: str) -> RunReport:
    return build_report(run, config=changed_question(run.manifest.config, list(changes)) if changes else None)


@each(
    ("changes", "says"),
    [
        ({}, ""),
        ({"timing_error": math.inf}, "step times of fewer than 3 rounds have no bounds"),
        ({"waited": -math.log1p(-0.4)}, ""),
        ({"waited": -math.log1p(-0.6)}, "steps waited 60% of their time for a core"),
        ({"timing_error": 0.3}, ""),  # 1.645 standard errors: a factor of 1.64
        ({"timing_error": 0.5}, "step times are known to a factor of 2.3 only"),
        ({"timing_error": 0.5, "redrawn": False}, ""),  # of a table, or computed
    ],
)
def test_step_times_tell_a_speedup_within_a_factor_of_two(changes: dict[str, float], says: str) -> None:
    assert dataclasses.replace(found(1.5), **changes).untold(0.05) == says


def test_a_speedup_without_bounds_has_no_interval() -> None:
    assert deciding_interval(found(1.5, timing=math.inf), 0.95) is None
    assert deciding_interval(found(1.5), 0.95) is not None


def test_a_busy_machine_leads_with_tokens_and_says_that_the_speedup_is_not_known(runs: dict[float, Run]) -> None:
    busy = report_of(runs[BUSY])
    whole = as_first_screen(busy)
    lines = whole[whole.index("\n\n") :].splitlines()  # below the conclusion
    assert whole.startswith(f"Not known whether it pays: {WAITING}")
    assert "; most breaks even where a round costs 2." in " ".join(whole.split())
    assert lines[2] == "UNDECIDED  speedup not known, threshold 1.1x"
    assert lines[3].strip().startswith("tokens per round: most ")
    assert " ngram " in lines[3]
    assert "Next: time more rounds on an idle machine." in " ".join(whole.split())
    assert (busy.answer.draft, busy.answer.gamma, first_screen(busy).serve) == (None, None, None)
    assert any("no draft and no γ is recommended" in line for line in first_screen(busy).table.below)
    quiet = as_first_screen(report_of(runs[QUIET]))
    assert "speedup not known" not in quiet
    assert "recommended" not in quiet


def test_drafts_stand_in_the_order_of_tokens_at_the_largest_gamma_in_common(runs: dict[float, Run], tmp_path: Path) -> None:
    """By their speedups the order is another one; a draft with one gamma alone makes that the common one."""
    quiet, busy = (report_of(runs[waiting]) for waiting in (QUIET, BUSY))
    assert [item.answer.draft for item in quiet.drafts] == ["ngram", "most"]
    assert [(item.answer.draft, item.answer.gamma) for item in busy.drafts] == [("most", 4), ("ngram", 4)]
    fewer = dataclasses.replace(
        RECIPE, drafts={"most": 0.1}, heads={"head": {"settings": {"block": 3}}}, lookups=(), latency=False
    )
    found_ = report_of(write_run(tmp_path / "run", fewer))
    assert {item.answer.gamma for item in found_.drafts} == {2}


def test_what_is_not_known_is_drawn_nowhere(runs: dict[float, Run]) -> None:
    """In no section, no format, and no JSON; tokens per round are what they are on a quiet machine."""
    quiet, busy = (report_of(runs[waiting]) for waiting in (QUIET, BUSY))
    for form in ("terminal", "md", "html", "json"):
        text = answer_text(ReportAnswer(busy, NAMES), form)
        assert "inf]" not in text
        assert '"inf"' not in text
    assert timed(quiet)
    assert not timed(busy)
    assert [gamma.tokens_per_round for result in busy.results for gamma in result.gammas] == [
        gamma.tokens_per_round for result in quiet.results for gamma in result.gammas
    ]
    assert busy.times is not None  # which section times shows as they are


def test_a_verdict_that_holds_in_spite_of_waiting_stays(runs: dict[float, Run]) -> None:
    """Bounds decide, however far apart they are."""
    for threshold, verdict in ((0.05, "GO"), (50, "NO-GO")):
        answer = report_of(runs[BUSY], f"decision.min_speedup={threshold}").answer
        assert (answer.verdict, answer.speedup is not None) == (verdict, True)


def test_a_threshold_of_speedup_is_undecided_without_a_number(runs: dict[float, Run]) -> None:
    items = checked(Path(runs[BUSY].path), None, None, None, {"speedup": ["1.1"]}, None, 0.0).items
    assert {(item.outcome, item.value, item.low, item.high, item.note) for item in items} == {
        ("undecided", None, None, None, WAITING)
    }


def test_where_one_thread_computes_its_own_clock_times_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, taken in ((1, 2.0), (2, 10.0)):
        own, wall = iter((5.0, 7.0)), iter((20.0, 30.0))
        monkeypatch.setattr(steppers.time, "thread_time", own.__next__)
        monkeypatch.setattr(steppers.time, "perf_counter", wall.__next__)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert steppers.seconds(torch.device("cpu"), lambda: None) == taken


@each(("computed", "code", "kept"), [(True, "cpu_seconds", 0.0), (False, "busy", 0.5)])
def test_cpu_seconds_of_a_busy_machine_say_so_and_waiting_is_no_part_of_them(computed: bool, code: str, kept: float) -> None:
    times = step_times_of(lambda: Timed(None, (), (), 0.5, computed=computed), Silent())
    assert ([warning["code"] for warning in times.warnings], times.waiting) == ([code], kept)
    assert "50%" in times.warnings[0]["message"]


def test_drafts_that_moderate_noise_does_not_tell_apart_are_in_the_order_of_tokens_per_round(runs: dict[float, Run]) -> None:
    """Both are timed to a factor of 1.54, and one is faster than the other by less."""
    quiet, noisy = (report_of(runs[waiting], "decision.min_speedup=1.2") for waiting in (QUIET, NOISY))
    assert quiet.answer.draft == quiet.drafts[0].answer.draft == "ngram"
    assert quiet.answer.speedup is not None
    assert (noisy.answer.verdict, noisy.answer.speedup) == ("UNDECIDED", None)
    assert [item.answer.draft for item in noisy.drafts] == ["most", "ngram"]
    assert "step times do not tell ngram from most, which emits most tokens per round" in " ".join(
        as_first_screen(noisy).split()
    )
