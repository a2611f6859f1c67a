"""`alphaprof curve`: what records of heads say together, the forecast, and what is refused. No head is trained here."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from alphaprof.commands.curve.answer import CurveReport, answer_lines
from alphaprof.commands.curve.build import build_curve
from alphaprof.commands.curve.collect import Tester
from alphaprof.config.heads import load_heads
from alphaprof.costs.cost_model import open_costs
from alphaprof.costs.roofline import ModelShape
from alphaprof.costs.speedup import free_draft, spent_and_base
from alphaprof.errors import AlphaprofError, HeadRecordUnreadable, NotComparable, ProfileInvalid
from alphaprof.log.split import STOP, TEST
from alphaprof.log.store import Run
from alphaprof.log.training import TESTS, TRAINING, TrainingRecord, head_digest, read_tests, read_training, texts_digest
from alphaprof.render.answer import answer_text
from alphaprof.render.json import json_schema
from alphaprof.stats.paired import inverse_difference
from alphaprof.totals.replay import RoundCounts
from tests.conftest import ROOT, Runner
from tests.heads import SIZES, curve_run, head_tests, law, write_curve, write_tests, write_training
from tests.reporting import HOSTILE

TRUTH = law(0.1, 0.4, 0.25)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return curve_run(tmp_path_factory.mktemp("curve") / "run", decision={"min_speedup": 1.3, "gamma": 3})


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curve; tests that change it work on a copy."""
    return write_curve(tmp_path_factory.mktemp("heads") / "c", run, TRUTH, beside={"published": 0.6, "tuned": 0.4})


@pytest.fixture(scope="module")
def found(folder: Path) -> CurveReport:
    return built(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def built(place: Path, *changes: str, test: Tester | None = None, source: Run | None = None) -> CurveReport:
    return build_curve(*load_heads(place), source, list(changes), test)


def listed(place: Path, **changes: Any) -> None:
    """Changes curve.yaml."""
    file = place / "curve.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))


def test_points_are_those_of_the_records(folder: Path, found: CurveReport) -> None:
    """A second way to every number of a size: sums over the files of its heads."""
    assert [point.label for point in found.points] == ["1/8", "1/4", "1/2", "1"]
    assert [(point.units, point.heads) for point in found.points] == [(10, 3), (20, 3), (40, 3), (80, 1)]
    for point, fraction in zip(found.points, SIZES, strict=True):
        files = sorted((folder / "heads").glob(f"{fraction.replace('/', '-')}-?"))
        tests = [read_tests(file / TESTS) for file in files]
        tests = [each.rows(each.part == TEST) for each in tests]
        assert len(tests) == point.heads
        tokens = sum(each.tokens.sum() for each in tests) / sum(each.rounds[:, 2].sum() for each in tests)
        assert point.tokens_per_round is not None
        assert point.tokens_per_round.value == pytest.approx(tokens)
        assert point.tokens_per_round.low < tokens < point.tokens_per_round.high
        first = sum(each.agree[:, 0].sum() for each in tests) / sum(each.starts[:, 0].sum() for each in tests)
        assert point.agreement[0] == pytest.approx(first)
        each_alone = [each.tokens.sum() / each.rounds[:, 2].sum() for each in tests]
        assert point.spread == (pytest.approx(np.std(each_alone, ddof=1)) if len(tests) > 1 else None)
        by_domain = {domain.domain: domain for domain in point.domains}
        for domain in ("chat", "code"):
            rows = tests[0].domain == domain
            value = sum(each.tokens[rows].sum() for each in tests) / sum(each.rounds[rows, 2].sum() for each in tests)
            assert by_domain[domain].tokens_per_round is not None
            assert by_domain[domain].tokens_per_round.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "texts are split at random: later traffic may be harder than the test part"),
        ({"split": "random", "begins": {}}, "texts are split at random: later traffic may be harder than the test part"),
        (
            {"split": "time", "begins": {"stop": "2026-03-25T06:00:00+00:00", "test": "2026-03-28T06:00:00+00:00"}},
            "texts are split by time: the test part from 2026-03-28T06:00:00+00:00 on, the stop part from "
            "2026-03-25T06:00:00+00:00, and all to train on was asked before both",
        ),
        ({"split": "time", "begins": {"test": ["\x1b[2J" * 50]}}, "texts are split by time: the test part from "),
    ],
)
def test_the_answer_says_how_texts_were_split(copy: Path, settings: dict[str, Any], words: str) -> None:
    for folder in (copy / "heads").iterdir():
        record = read_training(folder)
        write_training(folder, dataclasses.replace(record, settings=record.settings | settings))
    (note,) = [note for note in built(copy).notes if "split" in note]
    assert note.startswith(words)
    assert len(note) < 250
    assert note.isprintable()


def test_a_list_that_says_another_split_than_its_heads_had_is_refused(copy: Path) -> None:
    """Heads from elsewhere would be tested on units that they have learnt."""
    listed(copy, split="time")
    with pytest.raises(ProfileInvalid, match="says split: time, and a head in it was trained on a split at random"):
        built(copy)


def test_sizes_are_paired_by_test_unit(folder: Path, found: CurveReport) -> None:
    """The interval of a difference is that of paired units, and much narrower than that of two samples."""
    sides = []
    for fraction in ("1-2", "1"):
        tests = [read_tests(file / TESTS) for file in sorted((folder / "heads").glob(f"{fraction}-?"))]
        tests = [each.rows(each.part == TEST) for each in tests]
        unit = np.unique(tests[0].unit.astype(str), return_inverse=True)[1]
        rounds = np.mean([each.rounds[:, 2] for each in tests], axis=0)
        nothing = np.zeros((len(unit), 3))
        counts = RoundCounts(tests[0].tokens.astype(float), rounds, nothing, nothing, np.zeros(len(unit)), unit)
        sides.append(spent_and_base(counts, free_draft(3)))
    expected = inverse_difference(sides[0], sides[1], 0.95, 3)
    difference = found.points[-1].difference
    assert difference is not None
    assert difference.value == pytest.approx(expected.value)
    assert (difference.low, difference.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.points[0].difference is None
    last = found.points[-1].tokens_per_round
    assert last is not None
    assert difference.high - difference.low < last.high - last.low


def test_speedups_are_tokens_over_the_cost_of_a_round(run: Run, found: CurveReport) -> None:
    """The step times of the draft head that the run has."""
    book = open_costs(run, run.manifest.config["costs"], 256.0)
    assert book is not None
    times = book.times(1)["old"]
    cost = (3 * times.draft.ms + times.target[4].ms + times.bookkeeping.ms) / times.decode.ms
    for point in found.points:
        assert point.tokens_per_round is not None
        assert point.speedup is not None
        assert point.speedup.value == pytest.approx(point.tokens_per_round.value / cost, rel=0.02)
    assert found.times.endswith("with the steps of the draft head old")


def test_heads_beside_the_curve_are_compared_with_its_largest_size(found: CurveReport) -> None:
    published, tuned = found.beside
    assert (published.label, tuned.label) == ("published", "tuned")
    assert published.difference is not None
    assert tuned.difference is not None
    assert published.difference.high < 0 < tuned.difference.low
    assert found.instead[0].startswith("the tuned head has ")


def test_another_gamma_is_named_where_it_is_faster(folder: Path, found: CurveReport) -> None:
    """Speeds of the largest size at each gamma, as the answer has them where that one is asked for."""
    speeds = {}
    for gamma in (1, 2, 3, 4):
        report = built(folder, f"decision.gamma={gamma}")
        assert report.gamma == gamma
        assert report.points[-1].speedup is not None
        speeds[gamma] = report.points[-1].speedup.value
    best, worst = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    here = f"{speeds[worst]:.2f}x at gamma {worst}"
    report = built(folder, f"decision.gamma={worst}")
    assert f"gamma {best}: {speeds[best]:.2f}x with the largest size, and {here}" in report.instead
    report = built(folder, f"decision.gamma={best}")
    assert not any(words.startswith("gamma ") for words in report.instead)


def test_a_forecast_leads_with_its_backtest(found: CurveReport) -> None:
    backtest = found.backtest
    assert backtest is not None
    assert backtest.inside
    assert backtest.seen == ("1/8", "1/4", "1/2")
    largest = found.points[-1].tokens_per_round
    assert largest is not None
    assert backtest.measured == pytest.approx(largest.value)
    assert backtest.error == pytest.approx(backtest.measured / backtest.predicted.value - 1)
    assert found.reason == ""
    assert [(row.factor, row.units) for row in found.forecast] == [(1, 80), (2, 160), (4, 320)]
    for row in found.forecast:
        truth = 1 - TRUTH(row.factor)
        assert row.alpha.low < truth < row.alpha.high
        assert row.tokens_per_round.low < row.tokens_per_round.value < row.tokens_per_round.high
    lines = answer_lines(found)
    assert len(lines) == 5
    words = r"backtest: from 1/8 to 1/2 it predicted \d\.\d\d \[\d\.\d\d, \d\.\d\d\] tokens per round at full size; "
    assert re.fullmatch(words + r"measured \d\.\d\d \([+-]\d+(\.\d)?%\); inside its band: yes", lines[1])


@pytest.mark.parametrize(
    ("least", "words", "reached"),
    [
        (1.01, "REACHED: 1.01x in every scenario with the data there is", ("every", "every", "every")),
        (3.0, "NOT BY DATA: 3x in no scenario up to 4 times the data", ("none", "none", "none")),
    ],
)
def test_verdicts_in_words(folder: Path, least: float, words: str, reached: tuple[str, ...]) -> None:
    report = built(folder, f"decision.min_speedup={least}")
    assert report.outcome == words
    assert tuple(row.reached for row in report.forecast) == reached
    assert bool(report.instead) >= (reached[0] == "every")


def test_unsure_step_times_widen_speedups_and_nothing_else(
    run: Run, folder: Path, found: CurveReport, tmp_path: Path
) -> None:
    """Step times ten times as unsure: tokens per round stay, and speedups lie farther apart."""
    unsure = curve_run(tmp_path / "run", decision=dict(run.manifest.config["decision"]), timing_error=0.1)
    known = {"target": unsure.manifest.target.fingerprint, "texts": texts_digest(unsure.manifest)}
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for path in copy.rglob(TESTS):
        write_tests(path, dataclasses.replace(read_tests(path), **known))
    report = built(copy, source=unsure)
    for one, other in zip(report.forecast, found.forecast, strict=True):
        assert one.tokens_per_round == other.tokens_per_round
        assert one.speedup is not None
        assert other.speedup is not None
        assert one.speedup.low < other.speedup.low
        assert one.speedup.high > other.speedup.high


def test_between_the_scenarios_the_answer_names_the_amount(folder: Path, found: CurveReport) -> None:
    """Thresholds inside the band of 4 times the data, and below all of it but above what there is."""
    last, now = found.forecast[-1].speedup, found.forecast[0].speedup
    assert last is not None
    assert now is not None
    report = built(folder, f"decision.min_speedup={(last.low + last.high) / 2}")
    assert report.outcome.startswith("OPEN: ")
    assert report.forecast[-1].reached == "some"
    assert now.low < last.low
    report = built(folder, f"decision.min_speedup={now.low + 0.9 * (last.low - now.low)}")
    assert (units := re.search(r"MORE DATA: about (\d+) training units \((\d\.\d) times\)", report.outcome))
    assert 80 < int(units[1]) <= 320


def test_one_size_has_no_forecast(run: Run, tmp_path: Path) -> None:
    report = built(write_curve(tmp_path / "c", run, TRUTH, sizes={"1": 1}))
    assert report.outcome == "NO FORECAST: there is one size only, and a forecast that can be tested takes 3"
    assert report.forecast == ()
    assert report.backtest is None
    assert report.points[0].tokens_per_round is not None
    assert answer_lines(report)[1].startswith("backtest: none, there is one size only")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"1/2": 3, "1": 1}, "there are 2 sizes"),
        ({"1/4": 1, "1/2": 1, "1": 1}, "no size has two heads"),
    ],
)
def test_too_little_for_a_forecast(run: Run, tmp_path: Path, sizes: dict[str, int], words: str) -> None:
    report = built(write_curve(tmp_path / "c", run, TRUTH, sizes=sizes))
    assert words in report.reason
    assert report.forecast == ()


def test_too_few_test_units_have_no_forecast(run: Run, tmp_path: Path) -> None:
    report = built(write_curve(tmp_path / "c", run, TRUTH, tests=4))
    assert report.reason == "there are too few independent test units to know the noise"


def test_seeds_that_differ_by_more_than_the_last_step_have_no_forecast(run: Run, tmp_path: Path) -> None:
    report = built(write_curve(tmp_path / "c", run, law(0.595, 0.005, 0.3), spread=0.03))
    assert report.backtest is not None
    assert report.backtest.inside
    assert report.reason == "heads of one size differ by more than the last step in size brought"
    assert report.forecast == ()
    assert answer_lines(report)[4].startswith("next: ")
    assert "more data was not seen to help" in answer_lines(report)[4]


def test_a_step_has_no_forecast(run: Run, tmp_path: Path) -> None:
    """The largest size learns nothing more, which all smaller ones contradict."""
    report = built(write_curve(tmp_path / "c", run, lambda share: 0.8 - 0.15 * np.log2(min(share, 0.5) * 8), spread=0.001))
    assert report.backtest is not None
    assert not report.backtest.inside
    assert report.reason == "the largest size fell outside what the smaller ones predict"
    assert answer_lines(report)[1].endswith("inside its band: no")
    assert answer_lines(report)[2].startswith("no forecast: ")


def test_a_curve_that_speeds_up_has_no_forecast(run: Run, tmp_path: Path) -> None:
    """Its largest size lies inside the band of a backtest that is wide; all sizes together contradict the model. That more
    data do not help was not seen.
    """
    report = built(write_curve(tmp_path / "c", run, lambda share: 0.45 + 0.3 / (1 + (2 * share) ** 2)))
    assert report.backtest is not None
    assert report.backtest.inside
    assert report.reason == "no curve 1 - alpha = e + A N^-b fits the measured sizes"
    assert report.forecast == ()
    assert "not seen to help" not in answer_lines(report)[4]


def test_sizes_that_are_not_nested_have_no_forecast(copy: Path) -> None:
    record = read_training(copy / "heads" / "1-4-1")
    units = dataclasses.replace(record.units, train=("0" * 16, *record.units.train[1:]))
    write_training(copy / "heads" / "1-4-1", dataclasses.replace(record, units=units))
    report = built(copy)
    assert re.fullmatch(r"sizes are not nested: 1-(4-1|8-1) has seen units that 1-[24]-1 has not", report.reason)
    assert report.forecast == ()


def test_gamma_is_chosen_on_the_stop_part(folder: Path, tmp_path: Path) -> None:
    """Where the decision leaves it open; without stop texts the answer says that it was chosen on what it is reported on."""
    assert built(folder).gamma_from == "decision"
    options, file = load_heads(folder)
    run = Run.open(str(options.run))
    config = run.manifest.config | {"decision": run.manifest.config["decision"] | {"gamma": "auto"}}
    open_run = run.view(dataclasses.replace(run.manifest, config=config))
    chosen = build_curve(options, file, open_run, [], None)
    assert chosen.gamma_from == "stop"
    assert not any("chosen on the test texts" in note for note in chosen.notes)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for path in copy.rglob(TESTS):
        tests = read_tests(path)
        write_tests(path, tests.rows(tests.part == TEST))
    single = open_run.view(dataclasses.replace(open_run.manifest, config=config | {"gammas": [3]}))
    assert build_curve(*load_heads(copy), single, [], None).gamma_from == "decision"  # nothing to choose
    report = build_curve(*load_heads(copy), open_run, [], None)
    assert report.gamma_from == "test"
    assert any("chosen on the test texts themselves" in note for note in report.notes)


def test_stop_texts_count_for_nothing_else(copy: Path, found: CurveReport) -> None:
    for path in copy.rglob(TESTS):
        tests = read_tests(path)
        stop = tests.part == STOP
        rounds = np.where(stop[:, None], tests.tokens[:, None], tests.rounds)
        write_tests(path, dataclasses.replace(tests, rounds=rounds.astype(float)))
    report = built(copy)
    assert (report.points, report.forecast) == (found.points, found.forecast)


def test_weights_are_those_of_the_decision(folder: Path) -> None:
    """The traffic of one domain alone is that domain."""
    report = built(folder, "decision.weights={chat: 1.0, code: 0.0}")
    for point in report.points:
        chat = next(domain for domain in point.domains if domain.domain == "chat")
        assert point.tokens_per_round is not None
        assert chat.tokens_per_round is not None
        assert point.tokens_per_round.value == pytest.approx(chat.tokens_per_round.value)
    missing = built(folder, "decision.weights={chat: 0.5, code: 0.2, poems: 0.3}")
    assert any("has no test text" in note for note in missing.notes)


def test_the_floor_is_that_of_the_weighted_traffic(copy: Path) -> None:
    """A domain without weight keeps its tokens outside the vocabulary to itself."""
    for path in copy.rglob(TESTS):
        tests = read_tests(path)
        write_tests(path, dataclasses.replace(tests, outside=np.where(tests.domain == "code", 12, 0)))
    assert built(copy).floor == pytest.approx(0.05)
    assert built(copy, "decision.weights={chat: 1.0, code: 0.0}").floor == 0
    assert built(copy, "decision.weights={chat: 0.5, code: 0.5}").floor == pytest.approx(0.05)


def test_without_step_times_there_is_a_forecast_of_tokens(folder: Path) -> None:
    report = built(folder, "costs.source=none")
    assert all(point.speedup is None for point in report.points)
    assert all(row.speedup is None and row.reached is None for row in report.forecast)
    assert report.outcome.startswith("FORECAST: ")
    assert any(note.startswith("no speedup: ") for note in report.notes)


def test_a_roofline_takes_the_shape_of_the_head(run: Run, copy: Path, tmp_path: Path) -> None:
    """Where the run has no draft head: from the config.json of the largest head."""
    shape = dataclasses.asdict(ModelShape(1e9, 16, 2048, 32, 8, 64, 128_000))
    target = dataclasses.replace(run.manifest.target, shape=shape)
    alone = run.view(dataclasses.replace(run.manifest, target=target, drafts={}))
    changes = ["costs.source=roofline", "costs.accelerator=h100-sxm"]
    assert built(copy, *changes, source=alone).points[0].speedup is None
    layer = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192}
    config = {"transformer_layer_config": layer, "draft_vocab_size": 8000}
    (copy / "heads" / "1-0" / "config.json").write_text(json.dumps(config))
    report = built(copy, *changes, source=alone)
    assert report.times.endswith("by the shape of the head")
    point = report.points[-1]
    assert point.speedup is not None
    assert point.tokens_per_round is not None
    assert 0.7 * point.tokens_per_round.value < point.speedup.value < point.tokens_per_round.value
    for odd in (0, -32, float("inf")):
        config = {"transformer_layer_config": layer | {"num_attention_heads": odd}, "draft_vocab_size": 8000}
        (copy / "heads" / "1-0" / "config.json").write_text(json.dumps(config))
        assert built(copy, *changes, source=alone).points[0].speedup is None


def test_costs_grow_with_the_data(folder: Path, found: CurveReport) -> None:
    record = read_training(folder / "heads" / "1-0")
    twice, four = found.costs
    parts = len(record.units.train) + len(record.units.stop) + len(record.units.test)
    assert (twice.prompts, four.prompts) == (parts, 3 * parts)
    assert twice.tokens == round(record.size.tokens / len(record.units.train) * parts)
    seconds = record.seconds
    assert twice.seconds == pytest.approx(2 * (seconds.features + seconds.training + seconds.testing))
    assert four.feature_bytes == 4 * record.bytes.features_on_disk


def test_costs_name_the_size_of_states_wherever_they_were_kept(copy: Path) -> None:
    record = read_training(copy / "heads" / "1-0")
    settings = record.settings | {"layers": [1, 3, 5], "dtype": "bfloat16"}
    in_memory = dataclasses.replace(record.bytes, features_on_disk=0)
    write_training(copy / "heads" / "1-0", dataclasses.replace(record, settings=settings, bytes=in_memory))
    tokens = (record.size.tokens + record.size.prompt_tokens) * (1 + len(record.units.stop) / len(record.units.train))
    assert built(copy).costs[0].feature_bytes == pytest.approx(2 * tokens * 4 * record.target.hidden_size * 2, abs=2)


def test_heads_that_began_with_an_unknown_one_are_named(copy: Path) -> None:
    assert not any("nothing says what" in note for note in built(copy).notes)
    record = read_training(copy / "heads" / "1-4-1")
    for learnt, words in ((None, "nothing says what 1-4-1"), ([record.units.test[0]], "")):
        settings = record.settings | {"init": "published", "learnt": learnt}
        write_training(copy / "heads" / "1-4-1", dataclasses.replace(record, settings=settings))
        if learnt is None:
            assert any(note.startswith(words) for note in built(copy).notes)
        else:
            with pytest.raises(NotComparable, match="1-4-1 was trained on 1 of the units"):
                built(copy)


def test_a_rule_that_heads_were_not_tested_by_is_named(folder: Path) -> None:
    assert not any("tested by the rule" in note for note in built(folder, "decision.rule=strict").notes)
    assert any("tested by the rule strict" in note for note in built(folder, "decision.rule=lossless").notes)


def test_the_answer_in_the_page_is_real(tmp_path: Path) -> None:
    run = curve_run(tmp_path / "run", decision={"min_speedup": 1.45})
    place = write_curve(
        tmp_path / "c", run, law(0.1, 0.35, 0.3), beside={"published": 0.6, "tuned": 0.4}, units=800, tests=60
    )
    (block,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "curve.md").read_text(), re.DOTALL)
    assert block.splitlines() == answer_lines(built(place))


@pytest.mark.parametrize("output", ["terminal", "json", "md", "html"])
def test_every_format_says_the_same(folder: Path, found: CurveReport, output: str) -> None:
    text = answer_text(found, output)
    if output == "json":
        content = json.loads(text)
        assert (content["format"], content["outcome"]) == ("alphaprof-curve", found.outcome)
        jsonschema.validate(content, json.loads(json_schema("curve")))
        return
    assert found.outcome in re.sub(r"\s+", " ", text.replace("\\", ""))
    assert "inside its band: yes" in re.sub(r"\s+", " ", text)
    if output == "html":
        (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
        assert {trace["name"] for trace in json.loads(data)["curve"]["data"] if trace.get("name")} >= {"measured", "tuned"}


@pytest.mark.parametrize("output", ["terminal", "md", "html"])
def test_hostile_names_are_text(run: Run, tmp_path: Path, output: str) -> None:
    hostile = [name for name in HOSTILE.values() if name]
    place = write_curve(tmp_path / "c", run, TRUTH, domains=hostile, sizes={"1": 1})
    text = answer_text(built(place), output)
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
        (lambda data: data.update(floor=float("nan")), HeadRecordUnreadable, "is damaged"),
        (lambda data: data.update(schema="foreign"), HeadRecordUnreadable, "is not a record"),
        (lambda data: data.update(status="running"), HeadRecordUnreadable, "is not trained to its end"),
        (lambda data: data["target"].update(fingerprint="e" * 64), NotComparable, "trained for another target"),
        (lambda data: data["size"].update(fraction="0"), HeadRecordUnreadable, "is damaged"),
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


@pytest.mark.parametrize(
    ("change", "failure", "words"),
    [
        ({"units": 20}, NotComparable, "were tested on other documents"),
        ({"target": "e" * 64}, NotComparable, "is of another target"),
        ({"texts": "0" * 16}, NotComparable, "is of texts that"),
        ({"depths": 2}, NotComparable, "1-2-0 was tested for 2 drafts a round"),
    ],
)
def test_tests_that_cannot_be_used(
    run: Run, copy: Path, change: dict[str, Any], failure: type[AlphaprofError], words: str
) -> None:
    file = copy / "heads" / "1-2-0" / TESTS
    known = read_tests(file)
    made = {"target": known.target, "texts": known.texts, "domains": ("chat", "code")} | change
    write_tests(file, head_tests(0.5, **made))
    with pytest.raises(failure, match=words):
        built(copy)


def test_damaged_tests_are_two_lines(copy: Path, console_script: Runner) -> None:
    (copy / "heads" / "1-2-0" / TESTS).write_bytes(b"PAR1 broken")
    code, _, errors = console_script("curve", copy)
    assert code == 6
    assert re.fullmatch(r"error: \S+ cannot be read: [^\n]+\nhint: train the head again[^\n]+\n", errors)


def foreign(place: Path, name: str, miss: float) -> Path:
    """A head trained elsewhere: files, and no record."""
    head = place / name
    head.mkdir()
    (head / "config.json").write_text("{}")
    (head / "model.safetensors").write_bytes(str(miss).encode())
    return head


def test_heads_from_elsewhere_are_tested_once_and_nothing_is_written_to_them(run: Run, copy: Path) -> None:
    """Their tests lie beside the list, and are made again where the files of a head have changed."""
    head = foreign(copy, "mine", 0.3)
    entries = yaml.safe_load((copy / "curve.yaml").read_text())["heads"]
    listed(copy, heads=[*entries, {"head": "./mine", "units": 160, "tokens": 1000}])
    calls = []

    def test(_run: Run, files: Mapping[Path, Path], record: TrainingRecord | None) -> None:
        assert record is not None
        calls.append(sorted(files))
        for folder, file in files.items():
            known = read_tests(copy / "heads" / "1-0" / TESTS)
            made = head_tests(0.3, target=known.target, texts=known.texts, domains=("chat", "code"))
            write_tests(file, dataclasses.replace(made, head=head_digest(folder)))

    with pytest.raises(HeadRecordUnreadable, match=r"mine holds no test\.parquet") as refused:
        built(copy)
    assert "--profile PROFILE" in refused.value.hint
    report = built(copy, test=test)
    assert report.points[-1].label == "160 units"
    assert built(copy).points == report.points
    assert len(calls) == 1
    (head / "model.safetensors").write_bytes(b"another")
    built(copy, test=test)
    assert calls == [[head], [head]]
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors"]
    assert any("nothing says what mine was trained on" in note for note in report.notes)
    assert "does not say that larger heads have seen what mine has (order:)" in report.reason


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("heads: []", "heads: List should have at least 1 item"),
        ("run: a", "heads: Field required"),
        ("heads: [{head: a, unitss: 3}]", r"heads\.0\.unitss: Extra inputs"),
        ("heads: [{head: a, units: -3}]", r"heads\.0\.units"),
        ("heads: [{head: a, units: yes}]", r"heads\.0\.units"),
        ("{", "line 1"),
        ("[]", "holds no list of heads"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("heads: [{head: heads/1-0}, {head: heads/1-0}]", "is listed twice"),
        ("heads: [{head: nowhere}]", "nowhere is no folder"),
        ("heads: [{head: .}]", "nothing says how much"),
    ],
)
def test_lists_that_are_none(copy: Path, content: str, words: str) -> None:
    run = yaml.safe_load((copy / "curve.yaml").read_text())["run"]
    text = content if content.startswith(("run:", "[", "{", "a:")) else f"run: {run}\n{content}"
    (copy / "curve.yaml").write_text(text)
    with pytest.raises(ProfileInvalid, match=words):
        built(copy)


def test_a_list_without_a_run_asks_for_one(copy: Path, run: Run, found: CurveReport) -> None:
    listed(copy, run=None)
    with pytest.raises(ProfileInvalid, match="names no run"):
        built(copy)
    assert built(copy, source=run).points == found.points


def test_the_command_line(folder: Path, tmp_path: Path, console_script: Runner) -> None:
    code, out, errors = console_script("curve", folder, "--set", "decision.min_speedup=3")
    assert (code, errors) == (0, "")
    assert out.startswith("NOT BY DATA: 3x in no scenario up to 4 times the data\nbacktest: ")
    page = tmp_path / "curve.html"
    assert console_script("curve", folder / "curve.yaml", "--format", "html", "--out", page)[0] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    code, _, errors = console_script("curve", tmp_path / "nowhere")
    assert code == 2
    assert errors.startswith("error: cannot read the list of heads ")
