"""`alphaprof curve`: what records of heads say together, the forecast, and what is refused. No head is trained here."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
import yaml

from alphaprof.commands.curve import CurveReport, answer_lines, build_curve, collected, uncertainty
from alphaprof.config.load import load_heads
from alphaprof.costs.cost_model import open_costs
from alphaprof.costs.speedup import free_draft, spent_and_base
from alphaprof.errors import AlphaprofError, NotComparable, ProfileInvalid
from alphaprof.log.run import Run
from alphaprof.log.training import TRAINING, read_training
from alphaprof.render.answer import answer_text
from alphaprof.render.json import json_schema
from alphaprof.stats.paired import inverse_difference
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals
from alphaprof.totals.replay import RoundCounts
from tests.conftest import ROOT, Runner
from tests.heads import SIZES, law, run_of_heads, write_curve, write_training
from tests.reporting import HOSTILE
from tests.synthetic import Domain, Recipe, write_run

TRUTH = law(0.1, 0.4, 0.25)


ASKED = {"min_speedup": 1.3, "gamma": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curve; tests that change it work on a copy."""
    place = tmp_path_factory.mktemp("heads") / "c"
    return write_curve(place, TRUTH, beside={"published": 0.6, "tuned": 0.4}, decision=ASKED)


@pytest.fixture(scope="module")
def found(folder: Path) -> CurveReport:
    return built(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def built(place: Path, *changes: str) -> CurveReport:
    return build_curve(*load_heads(place), list(changes))


def totals(place: Path, draft: str) -> pd.DataFrame:
    """The totals of the test documents of a head, and their domains and units."""
    run = Run.open(place / "tested")
    table = read_totals(run, draft, TotalsRequest(["strict"], run.gammas)).to_pandas()
    return table.merge(run.documents().to_pandas()[["document", "domain"]], on="document")[:40]


def listed(place: Path, **changes: Any) -> None:
    """Changes curve.yaml."""
    file = place / "curve.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))


def test_points_are_those_of_the_records(folder: Path, found: CurveReport) -> None:
    """A second way to every number of a size: sums over the files of its heads."""
    assert [point.label for point in found.points] == ["1/8", "1/4", "1/2", "1"]
    assert [(point.units, point.heads) for point in found.points] == [(10, 3), (20, 3), (40, 3), (80, 1)]
    for point, (fraction, orders) in zip(found.points, SIZES.items(), strict=True):
        heads = [totals(folder, f"head-{fraction.replace('/', '-')}-{order}") for order in range(orders)]
        tokens = sum(each["tokens"].sum() for each in heads) / sum(each["rounds_3"].sum() for each in heads)
        assert point.tokens_per_round.value == pytest.approx(tokens)
        assert point.tokens_per_round.low < tokens < point.tokens_per_round.high
        right = sum(each["accepted"].sum() for each in heads) / sum(each["proposals"].sum() for each in heads)
        assert point.alpha == pytest.approx(right)
        rounds = sum(each["rounds_4"].sum() for each in heads)
        reached = [sum(each[f"accepted_4_{depth}"].sum() for each in heads) / rounds for depth in (1, 2, 3, 4)]
        assert point.accepted == pytest.approx(tuple(reached))
        each_alone = [each["tokens"].sum() / each["rounds_3"].sum() for each in heads]
        assert point.spread == (pytest.approx(np.std(each_alone, ddof=1)) if orders > 1 else None)
        by_domain = {domain.domain: domain for domain in point.domains}
        for domain in ("chat", "code"):
            rows = [each[each["domain"] == domain] for each in heads]
            value = sum(each["tokens"].sum() for each in rows) / sum(each["rounds_3"].sum() for each in rows)
            assert by_domain[domain].tokens_per_round.value == pytest.approx(value)


def test_sizes_are_paired_by_test_unit(folder: Path, found: CurveReport) -> None:
    """The interval of a difference is that of paired units, and much narrower than that of two samples."""
    sides = []
    for names in (["1-2-0", "1-2-1", "1-2-2"], ["1-0"]):
        heads = [totals(folder, f"head-{name}") for name in names]
        rounds, nothing = np.mean([each["rounds_3"] for each in heads], axis=0), np.zeros((40, 3))
        counts = RoundCounts(heads[0]["tokens"].to_numpy(), rounds, nothing, nothing, np.zeros(40), np.arange(40))
        sides.append(spent_and_base(counts, free_draft(3)))
    expected = inverse_difference(sides[0], sides[1], 0.95, 3)
    difference = found.points[-1].difference
    assert difference.value == pytest.approx(expected.value)
    assert (difference.low, difference.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.points[0].difference is None
    last = found.points[-1].tokens_per_round
    assert difference.high - difference.low < last.high - last.low


def test_speedups_are_tokens_over_the_cost_of_a_round(folder: Path, found: CurveReport) -> None:
    """The step times of the largest head, as the run that tested it has them."""
    run = Run.open(folder / "tested")
    costs = open_costs(run, run.manifest.profile.costs, 256.0)
    times = costs.times(1)["head-1-0"]
    cost = (3 * times.draft.ms + times.target[4].ms + times.bookkeeping.ms) / times.decode.ms
    for point in found.points:
        assert point.speedup.value == pytest.approx(point.tokens_per_round.value / cost, rel=0.02)


def test_heads_beside_the_curve_are_compared_with_its_largest_size(found: CurveReport) -> None:
    published, tuned = found.beside
    assert (published.label, tuned.label) == ("published", "tuned")
    assert published.difference.high < 0 < tuned.difference.low
    assert found.instead[0].startswith("the tuned head has ")


@pytest.mark.slow
def test_another_gamma_is_named_where_it_is_faster(folder: Path) -> None:
    """Speeds of the largest size at each gamma, as the answer has them if that one is asked for."""
    reports = {gamma: built(folder, f"decision.gamma={gamma}") for gamma in (1, 2, 3, 4)}
    speeds = {gamma: report.points[-1].speedup.value for gamma, report in reports.items() if report.points[-1].speedup}
    best, worst = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    here = f"{speeds[worst]:.2f}x at gamma {worst}"
    assert f"gamma {best}: {speeds[best]:.2f}x with the largest size, and {here}" in reports[worst].instead
    assert not any(words.startswith("gamma ") for words in reports[best].instead)


def test_a_forecast_leads_with_its_backtest(found: CurveReport) -> None:
    backtest = found.backtest
    assert backtest.inside
    assert backtest.seen == ("1/8", "1/4", "1/2")
    largest = found.points[-1].tokens_per_round
    assert backtest.measured == pytest.approx(largest.value)
    assert backtest.error == pytest.approx(backtest.measured / backtest.predicted.value - 1)
    assert found.reason == ""
    assert [(row.factor, row.units) for row in found.forecast] == [(1, 80), (2, 160), (4, 320)]
    for row in found.forecast:
        truth = 1 - TRUTH(row.factor)
        assert row.alpha.low < truth < row.alpha.high
        assert row.tokens_per_round.low < row.tokens_per_round.value < row.tokens_per_round.high


@pytest.mark.parametrize(
    ("least", "words", "reached"),
    [
        (1.01, "REACHED: 1.01x in every scenario with the present data", ("every", "every", "every")),
        (3.0, "NOT BY DATA: 3x in no scenario up to 4 times the data", ("none", "none", "none")),
    ],
)
def test_verdicts_in_words(folder: Path, least: float, words: str, reached: tuple[str, ...]) -> None:
    report = built(folder, f"decision.min_speedup={least}")
    assert report.outcome == words
    assert tuple(row.reached for row in report.forecast) == reached
    assert bool(report.instead) >= (reached[0] == "every")


def test_unsure_step_times_widen_speedups_and_nothing_else(found: CurveReport, tmp_path: Path) -> None:
    """Step times ten times as unsure: tokens per round stay, and speedups lie farther apart."""
    report = built(write_curve(tmp_path / "c", TRUTH, decision=ASKED, timing_error=0.1))
    for one, other in zip(report.forecast, found.forecast, strict=True):
        assert one.tokens_per_round == other.tokens_per_round
        assert one.speedup.low < other.speedup.low
        assert one.speedup.high > other.speedup.high


def test_between_the_scenarios_the_answer_names_the_amount(folder: Path, found: CurveReport) -> None:
    """Thresholds inside the band of 4 times the data, and below all of it but above what there is."""
    last, now = found.forecast[-1].speedup, found.forecast[0].speedup
    report = built(folder, f"decision.min_speedup={(last.low + last.high) / 2}")
    assert report.outcome.startswith("OPEN: ")
    assert report.forecast[-1].reached == "some"
    assert now.low < last.low
    report = built(folder, f"decision.min_speedup={now.low + 0.9 * (last.low - now.low)}")
    assert (units := re.search(r"MORE DATA: about (\d+) training units \((\d\.\d) times\)", report.outcome))
    assert 80 < int(units[1]) <= 320


FLAT, STEP = law(0.595, 0.005, 0.3), lambda share: 0.8 - 0.15 * np.log2(min(share, 0.5) * 8)
NO_FORECAST: dict[str, tuple[Any, dict[str, Any], bool | None]] = {  # the truth, the records, inside the backtest
    "there is one size only": (TRUTH, {"sizes": {"1": 1}}, None),
    "there are 2 sizes": (TRUTH, {"sizes": {"1/2": 3, "1": 1}}, None),
    "no size has two heads": (TRUTH, {"sizes": {"1/4": 1, "1/2": 1, "1": 1}}, None),
    "too few independent test units to estimate the noise": (TRUTH, {"tests": 4}, None),
    "the last gain is smaller than the spread between heads of one size": (FLAT, {"spread": 0.03}, True),
    "the largest size lies outside the prediction of the smaller ones": (STEP, {"spread": 0.001}, False),
    # The largest size lies inside the wide band of its backtest; all sizes together contradict the model.
    "no curve 1 - alpha = e + A N^-b fits": (lambda share: 0.45 + 0.3 / (1 + (2 * share) ** 2), {}, True),
}


QUICK = ("there is one size only", "the largest size lies outside the prediction of the smaller ones")


@pytest.mark.parametrize(
    "reason", [pytest.param(reason, marks=() if reason in QUICK else pytest.mark.slow) for reason in NO_FORECAST]
)
def test_without_a_forecast_the_measured_curve_stands_and_says_why(tmp_path: Path, reason: str) -> None:
    truth, records, inside = NO_FORECAST[reason]
    report = built(write_curve(tmp_path / "c", truth, decision=ASKED, **records))
    assert report.reason.startswith(reason)
    assert report.outcome == f"NO FORECAST: {report.reason}"
    assert report.forecast == ()
    assert (report.backtest and report.backtest.inside) is inside
    assert report.points[-1].tokens_per_round is not None
    assert ("more data did not help measurably" in answer_lines(report)[4]) == (truth is FLAT)


def test_sizes_that_are_not_nested_have_no_forecast(copy: Path) -> None:
    record = read_training(copy / "heads" / "1-4-1")
    units = dataclasses.replace(record.units, train=("0" * 16, *record.units.train[1:]))
    write_training(copy / "heads" / "1-4-1", dataclasses.replace(record, units=units))
    report = built(copy)
    assert re.match(r"sizes are not nested: head-1-(4-1|8-1) has seen units that head-", report.reason)
    assert report.forecast == ()


def test_an_order_that_ends_early_is_held_against_the_largest_heads(copy: Path) -> None:
    """Heads of one order hold each other's units, and not those of another order of their size."""
    entries = yaml.safe_load((copy / "curve.yaml").read_text())["heads"]
    kept = [entry for entry in entries if not re.fullmatch("head-1-4-[12]", entry["draft"])]
    assert len(kept) < len(entries)
    listed(copy, heads=kept)
    assert "not nested" not in built(copy).reason


def test_gamma_is_chosen_on_the_stop_part(folder: Path, found: CurveReport, copy: Path) -> None:
    """If the decision leaves it open; without stop texts the answer says that it was chosen on what it is reported on."""
    assert (found.gamma_from, built(folder, "decision.gamma=auto").gamma_from) == ("decision", "stop")
    for path in (copy / "heads").iterdir():
        record = read_training(path)
        write_training(path, dataclasses.replace(record, units=dataclasses.replace(record.units, stop=())))
    report = built(copy, "decision.gamma=auto")
    assert report.gamma_from == "test"
    assert any("chosen on the test texts themselves" in note for note in report.notes)
    report = built(copy)
    assert (report.points, report.forecast) == (found.points, found.forecast)


def test_weights_are_those_of_the_decision(folder: Path, found: CurveReport) -> None:
    """The traffic of one domain alone is that domain; a floor is known of all test texts together."""
    report = built(folder, "decision.weights={chat: 1.0, code: 0.0}")
    assert (found.floor, report.floor) == (0.05, 0)
    for point in report.points:
        chat = next(domain for domain in point.domains if domain.domain == "chat")
        assert point.tokens_per_round.value == pytest.approx(chat.tokens_per_round.value)
    missing = built(folder, "decision.weights={chat: 0.5, code: 0.2, poems: 0.3}")
    assert any("has no test text" in note for note in missing.notes)


def test_what_the_target_draws_cannot_be_foreseen(tmp_path: Path) -> None:
    """Sampled texts under a rule that keeps one token: no head reaches more than the target's top probability."""
    domains = {"chat": Domain(documents=24, temperature=1.0, continuation="sampled", alpha=0.9)}
    run = write_run(tmp_path / "run", Recipe(domains=domains, rules=("one_hot",), drafts={"a": 0.0}))
    (tmp_path / "list.yaml").write_text("run: run\nheads: [{draft: a, units: 3}]")
    heads = collected(*load_heads(tmp_path / "list.yaml"), run)
    top = run.positions("a", 0, ["document", "target_top_prob"]).to_pandas()
    every = [run.positions("a", shard.index, ["target_top_prob"]).to_pandas() for shard in run.shards]
    expected = 1 - pd.concat(every)["target_top_prob"].mean()
    assert len(top) > 0
    assert uncertainty(heads, [(np.arange(24), 1.0)]) == pytest.approx(expected)
    assert uncertainty(heads, [(np.arange(12), 1.0)]) == 0


def test_without_step_times_there_is_a_forecast_of_tokens(folder: Path) -> None:
    report = built(folder, "costs.source=none")
    assert all(point.speedup is None for point in report.points)
    assert all(row.speedup is None and row.reached is None for row in report.forecast)
    assert report.outcome.startswith("FORECAST: ")
    assert any(note.startswith("no speedup: ") for note in report.notes)


def test_costs_grow_with_the_data(folder: Path, found: CurveReport) -> None:
    record = read_training(folder / "heads" / "1-0")
    twice, four = found.costs
    parts = len(record.units.train) + len(record.units.stop) + len(record.units.test)
    assert (twice.prompts, four.prompts) == (parts, 3 * parts)
    assert twice.tokens == round(record.size.tokens / len(record.units.train) * parts)
    seconds = record.seconds
    assert twice.seconds == pytest.approx(2 * (seconds.features + seconds.training + seconds.testing))


def test_heads_that_began_with_an_unknown_one_are_named(copy: Path) -> None:
    listed(copy, beside={})
    assert not any("the training data of " in note for note in built(copy).notes)
    record = read_training(copy / "heads" / "1-4-1")
    for learnt, words in ((None, "the training data of head-1-4-1 is not known"), ([record.units.test[0]], "")):
        settings = record.settings | {"init": "published", "learnt": learnt}
        write_training(copy / "heads" / "1-4-1", dataclasses.replace(record, settings=settings))
        if learnt is None:
            assert any(note.startswith(words) for note in built(copy).notes)
        else:
            with pytest.raises(NotComparable, match="1-4-1 was trained on 1 of the units"):
                built(copy)


def test_every_format_says_the_same(found: CurveReport) -> None:
    jsonschema.validate(json.loads(answer_text(found, "json")), json.loads(json_schema("curve")))
    for output in ("terminal", "md", "html"):
        text = answer_text(found, output)
        assert found.outcome in re.sub(r"\s+", " ", text.replace("\\", ""))
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
    assert {trace["name"] for trace in json.loads(data)["curve"]["data"] if trace.get("name")} >= {"measured", "tuned"}


def test_hostile_names_are_text(tmp_path: Path) -> None:
    hostile = [name for name in HOSTILE.values() if name]
    report = built(write_curve(tmp_path / "c", TRUTH, decision=ASKED, domains=hostile, sizes={"1": 1}))
    for output in ("terminal", "md", "html"):
        text = answer_text(report, output)
        assert output == "terminal" or "<script>alert" not in text
        assert "\x1b[31m" not in text
        assert "\u202e" not in text


def edited_record(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = place / "heads" / "1-2-0" / TRAINING
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "failure", "words"),
    [
        (lambda data: data.update(status="running"), NotComparable, "was not fully trained"),
        (lambda data: data["target"].update(fingerprint="e" * 64), NotComparable, ", not for the target"),
    ],
)
def test_records_that_cannot_be_used(copy: Path, change: Any, failure: type[AlphaprofError], words: str) -> None:
    edited_record(copy, change)
    with pytest.raises(failure, match=words):
        built(copy)


def test_a_head_that_has_seen_the_test_units_is_refused(copy: Path) -> None:
    record = read_training(copy / "heads" / "1-2-0")
    units = dataclasses.replace(record.units, train=(record.units.test[0], *record.units.train[1:]), test=())
    write_training(copy / "heads" / "1-2-0", dataclasses.replace(record, units=units))
    with pytest.raises(NotComparable, match="1-2-0 was trained on 1 of the units that it is tested on"):
        built(copy)


def test_heads_that_cannot_be_compared(copy: Path, tmp_path: Path) -> None:
    """A head of another run, whose documents are others; and one of a run that holds no test text of the heads."""
    other = run_of_heads(tmp_path / "other", {"mine": 0.3}, tests=20)
    entries = yaml.safe_load((copy / "curve.yaml").read_text())["heads"]
    listed(copy, heads=[*entries, {"draft": "mine", "run": str(other.path), "units": 160}])
    with pytest.raises(NotComparable, match="tested on other documents"):
        built(copy)
    elsewhere = write_run(tmp_path / "elsewhere", Recipe(drafts={"mine": 0.0}))
    listed(copy, heads=[*entries, {"draft": "mine", "run": str(elsewhere.path), "units": 160}])
    with pytest.raises(NotComparable, match="is a test text of the heads"):
        built(copy)


def test_a_head_of_another_run_is_compared_on_the_same_documents(copy: Path, tmp_path: Path) -> None:
    """Tested elsewhere on the same texts, with nothing known of its training but how much."""
    other = run_of_heads(tmp_path / "other", {"mine": 0.3})
    entries = yaml.safe_load((copy / "curve.yaml").read_text())["heads"]
    listed(copy, heads=[*entries, {"draft": "mine", "run": str(other.path), "units": 160, "tokens": 1000}])
    report = built(copy)
    assert report.points[-1].label == "160 units"
    assert report.points[-1].alpha == pytest.approx(0.7, abs=0.05)
    assert any("the training data of mine" in note for note in report.notes)
    assert "give mine an order if larger heads have seen its data" in report.reason


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("run: a", "heads: is missing"),
        ("run: tested\nheads: [{draft: a, unitss: 3}]", r"unknown key heads\.0\.unitss"),
        ("{", "line 1"),
        ("[]", "is not a list of heads"),
        ("run: tested\nheads: [{draft: head-1-0, units: 3}, {draft: head-1-0, units: 4}]", "is listed twice"),
        ("run: tested\nheads: [{draft: head-1-0}]", "the amount of training data of head-1-0 is not known"),
    ],
)
def test_lists_that_are_none(copy: Path, content: str, words: str) -> None:
    (copy / "curve.yaml").write_text(content)
    with pytest.raises(ProfileInvalid, match=words):
        built(copy)


def test_the_command_line(folder: Path, tmp_path: Path, console_script: Runner) -> None:
    code, out, errors = console_script("curve", folder, "--set", "decision.min_speedup=3")
    assert (code, errors) == (0, "")
    assert out.startswith("NOT BY DATA: 3x in no scenario up to 4 times the data\nbacktest: ")
    code, _, errors = console_script("curve", tmp_path / "nowhere")
    assert code == 2
    assert errors.startswith("error: cannot read the list of heads ")


RECORD = ROOT / "profiles" / "recorded-curve"


def answered(*changes: str) -> CurveReport:
    options, file = load_heads(RECORD)
    return build_curve(options, file, list(changes))


@pytest.fixture(scope="module")
def report() -> CurveReport:
    return answered()


def test_ten_heads_of_four_sizes_are_read_without_their_weights(report: CurveReport) -> None:
    assert [(point.label, point.units, point.heads) for point in report.points] == [
        ("1/8", 16, 3),
        ("1/4", 32, 3),
        ("1/2", 64, 3),
        ("1", 128, 1),
    ]
    assert {path.name for path in (RECORD / "heads").glob("*/*")} == {TRAINING}


def test_another_threshold_has_another_answer() -> None:
    lines = answer_lines(answered("decision.min_speedup=1.5"))
    assert lines[0].startswith("OPEN: 1.5x in some scenarios from about 440 training units (3.4 times) on, ")


def test_more_text_helped_at_every_step(report: CurveReport) -> None:
    """Paired by test unit: what the page says of this curve."""
    gains = [point.difference for point in report.points[1:]]
    assert [gain.low > 0 for gain in gains if gain] == [True] * 3


def test_pages_quote_what_the_record_says(report: CurveReport) -> None:
    (block,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "curve.md").read_text(), re.DOTALL)
    assert block.splitlines() == answer_lines(report)
    page = (ROOT / "docs" / "training.md").read_text()
    alphas = [f"{point.alpha:.3f}" for point in report.points]
    (row,) = re.findall(r"^\| accept@1 \|(.*)\|$", page, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")][: len(alphas)] == alphas


def test_the_record_is_small_and_names_no_machine() -> None:
    files = [path for path in RECORD.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for path in files:
        assert not re.search(rb"/(?:home|root|tmp|work|Users|mnt|srv)/", path.read_bytes()), path
