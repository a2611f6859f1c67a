"""Scripts that read runs: published figures beside a run's, and four divergences beside the one that the log keeps."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from alphaprof.config.load import load_profile
from alphaprof.log.store import Run
from alphaprof.report.sections.certificates import tallies
from alphaprof.rules import parse_rule, rules_of
from alphaprof.theory.bounds import coverage_bound, margin_bound
from alphaprof.theory.certificates import DIVERGENCES
from tests.conftest import ROOT
from tests.synthetic import Domain, Recipe, interrupted, write_run

PAPER = runpy.run_path(str(ROOT / "scripts" / "research" / "reproduce_paper.py"))
PUBLISHED = PAPER["PUBLISHED"]
RULES = tuple(name.removeprefix("threshold_") for name in PUBLISHED if name.startswith("threshold_"))
RECIPE = Recipe(rules=RULES, certificates=True, lookups=("ngram",))
Capture = pytest.CaptureFixture[str]


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, whose second line must be its rule."""
    lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in table.splitlines()]
    assert all(len(line) == len(lines[0]) and line[0] == line[-1] == "" for line in lines)
    assert all(re.fullmatch(r"-+:?", cell) for cell in lines[1][1:-1])
    return [line[1:-1] for line in (lines[0], *lines[2:])]


def reproduced(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """The exit code of reproduce_paper.py, what it prints, and what goes to stderr."""
    code = PAPER["main"]([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("draft", ["small", "ngram"])
def test_statistics_beside_published_figures_are_those_of_the_log(tmp_path: Path, draft: str) -> None:
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains={"a": Domain(9), "b": Domain(8, temperature=0.8)}))
    log = pd.read_parquet(run.path / "positions" / f"draft={draft}")
    found = PAPER["measured"](run)
    assert set(found) == {(column, statistic) for column, figures in PUBLISHED.items() for statistic in figures}
    for (column, statistic), estimate in found.items():
        values = np.sort(log[column].to_numpy(np.float64))
        places = {"median": math.ceil(len(values) / 2), "5th percentile": math.ceil(len(values) / 20)}
        expected = values.mean() if statistic == "mean" else values[places[statistic] - 1]
        assert estimate.value == pytest.approx(expected, rel=1e-12), (column, statistic)
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.high <= (1 if column.startswith("target_") else math.inf)


def test_intervals_beside_published_figures_are_over_independent_documents(tmp_path: Path) -> None:
    domain = Domain(6, prompts=["x", "x", "y", "z", "u", "v"], clusters=[None, None, "1", "1", None, None])
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains={"a": domain}))
    assert PAPER["about"](run)["documents"] == "4 of 6"


def test_what_few_documents_cannot_tell_ends_where_probabilities_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, domains={"a": Domain(2)}))
    found = PAPER["measured"](run)
    assert found["target_top_prob", "median"].high == 1
    assert found["threshold_strict", "median"].high == math.inf


def test_the_table_holds_each_figure_once_a_run_and_what_is_published(tmp_path: Path, capsys: Capture) -> None:
    runs = [
        write_run(tmp_path / name, dataclasses.replace(RECIPE, seed=seed)) for seed, name in enumerate(("one", "a|b\nc"))
    ]
    code, text, _ = reproduced(capsys, *(run.path for run in runs), "--format", "markdown")
    table, notes = text.split("\n\n")
    head, *rows = cells(table)
    assert code == 0
    assert head[:3] == ["", "Qwen3-1.7B, published", "Qwen3-4B, published"]
    assert [Path(name).name for name in head[3:]] == ["one", "a\\|b c"]
    by_name = {name: row for name, *row in rows}
    assert len(by_name) == len(rows) == 6 + sum(map(len, PUBLISHED.values()))
    assert by_name["documents"][2:] == ["12", "12"]
    assert [int(cell.replace(",", "")) for cell in by_name["positions"][2:]] == [run.manifest.positions for run in runs]
    exact = [pd.read_parquet(run.path / "positions" / "draft=small")["thresholds_exact"].mean() for run in runs]
    assert [float(cell) for cell in by_name["inexact"][2:]] == pytest.approx([1 - share for share in exact], abs=1e-4)
    for place, run in enumerate(runs, start=2):
        for (column, statistic), estimate in PAPER["measured"](run).items():
            shown = re.findall(r"[\d.]+|inf", by_name[f"{PAPER['NAMES'][column]}: {statistic}"][place])
            assert [float(cell) for cell in shown] == pytest.approx([estimate.value, estimate.low, estimate.high], abs=1e-3)
    for column, figures in PUBLISHED.items():
        for statistic, values in figures.items():
            theirs = by_name[f"{PAPER['NAMES'][column]}: {statistic}"][:2]
            assert theirs == ["-" if value is None else f"{value:.3f}" for value in values]
    assert "arXiv:2606.30265" in notes


def test_a_rule_without_thresholds_is_not_available_in_either_format(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path / "run", dataclasses.replace(RECIPE, rules=("strict", "additive_0p3", "top_m_3")))
    _, text, _ = reproduced(capsys, run.path, "--format", "markdown")
    missing = {name for name, *row in cells(text.split("\n\n")[0]) if row[-1] == "n/a"}
    names = {name for column, name in PAPER["NAMES"].items() if column.startswith("threshold_")}
    assert {name.split(": ")[0] for name in missing} == names - {"strict", "additive, epsilon 0.3"}
    code, text, _ = reproduced(capsys, run.path)
    lines = text.split("\n\n")[0].splitlines()
    assert code == 0
    assert len({len(line) for line in lines}) == 1
    assert {line.split("  ")[0] for line in lines if line.endswith("n/a")} == missing


REFUSED: list[tuple[Recipe, int, str]] = [
    (Recipe(), 2, "holds no thresholds"),
    (Recipe(rules=("strict", "lossless")), 2, "holds no thresholds"),
    (Recipe(rules=("top_m_3",), certificates=True), 2, "holds no threshold that is published"),
]


@pytest.mark.parametrize(("recipe", "expected", "message"), REFUSED)
def test_a_run_with_nothing_to_compare_is_refused_in_two_lines(
    tmp_path: Path, capsys: Capture, recipe: Recipe, expected: int, message: str
) -> None:
    run = write_run(tmp_path / "run", recipe)
    code, text, failure = reproduced(capsys, run.path)
    assert (code, text) == (expected, "")
    first, second = failure.splitlines()
    assert first == f"error: {run.path} {message}"
    assert second.startswith("hint: profile with ")


def test_unfinished_and_missing_runs_are_refused(tmp_path: Path, capsys: Capture) -> None:
    run = interrupted(write_run(tmp_path / "run", RECIPE), tmp_path / "partial", 1)
    for path, words in ((run.path, "is not complete"), (tmp_path / "nowhere", "holds no run")):
        code, text, failure = reproduced(capsys, path)
        assert (code, text, len(failure.splitlines())) == (6, "", 2)
        assert words in failure


def test_profiles_of_the_paper_measure_every_published_rule_on_their_target() -> None:
    for size in ("1.7B", "4B"):
        profile = load_profile(ROOT / "profiles" / f"paper-qwen3-{size.lower()}.yaml")
        assert profile.target.model == f"Qwen/Qwen3-{size}"
        assert f"Qwen3-{size}" in PAPER["TARGETS"]
        assert profile.certificates
        assert tuple(profile.rules) == RULES


def test_reading_runs_for_the_paper_imports_no_torch() -> None:
    code = "import runpy, sys; runpy.run_path('scripts/research/reproduce_paper.py'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


class Silent:
    """A progress that says nothing."""

    def say(self, message: str) -> None: ...

    def warn(self, code: str, message: str, remedy: str) -> None: ...

    def start(self, label: str, total: int | None, unit: str) -> None: ...

    def advance(self, steps: float, positions: int = 0) -> None: ...


CERTIFIED = [
    "strict",
    "additive:0.1",
    "multiplicative:0.3",
    "typical:0.09,0.3",
    "top_m:3",
    "trtllm:4,0.3",
    "tree:2",
    "tree:4",
]
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"kind": "greedy", "max_new_tokens": 24},
    "sampled": {"kind": "sampled", "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 24},
}


def profiled(folder: Path, tiny: Path, **changes: Any) -> Run:
    """A run of tiny models, in float32; changes replace top-level keys of its profile."""
    from alphaprof.profiling.run.pipeline import profile

    folder.mkdir(exist_ok=True)
    rows = [{"text": "".join(chr(97 + (7 * row + 3 * place) % 26) for place in range(4 + row))} for row in range(10)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "target": {"model": str(tiny / "target"), "dtype": "float32"},
        "drafts": {
            "close": {"kind": "model", "model": str(tiny / "draft"), "dtype": "float32"},
            "skip": {"kind": "layer_skip", "drop_layers": [2]},
            "short": {"kind": "model", "model": str(tiny / "short")},
            "ngram": {"kind": "prompt_lookup"},
        },
        "data": [{"domain": "a", "path": "texts.jsonl", "prompt": "{text}"}],
        "continuation": TEXTS["greedy"],
        "rules": ["lossless", *CERTIFIED],
        "certificates": True,
        "gammas": [1, 2],
        "costs": {"context": 16, "repeats": 3},
        "shard_documents": 4,
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree | changes, sort_keys=False))
    return profile(load_profile(folder / "profile.yaml"), folder / "run", Silent())


@pytest.fixture(scope="module")
def divergences() -> dict[str, Any]:
    """The script, loaded only where it is used: it imports torch."""
    return runpy.run_path(str(ROOT / "scripts" / "research" / "divergences.py"))


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run a kind of text."""
    folder = tmp_path_factory.mktemp("runs")
    return {kind: profiled(folder / kind, tiny, continuation=text) for kind, text in TEXTS.items()}


def logged(run: Run, draft: str) -> pd.DataFrame:
    """The log of a draft in corpus order."""
    parts: list[pd.DataFrame] = [run.positions(draft, shard.index).to_pandas() for shard in run.shards]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.models
@pytest.mark.parametrize("kind", TEXTS)
def test_what_is_scored_again_is_what_the_log_holds(runs: dict[str, Run], kind: str, divergences: dict[str, Any]) -> None:
    run = runs[kind]
    rules = divergences["certified_rules"](run)
    assert [rule.id for rule in rules] == [parse_rule(name).id for name in CERTIFIED]
    scored = divergences["score"](run, rules, 100, None)
    assert scored.models == ("close", "skip", "short")
    for draft in scored.models:
        log, again = logged(run, draft), scored.columns[draft]
        proposed = (log["proposed"] > 0).to_numpy()
        for name in ("kl_target_draft", "kl_draft_target", "overlap", "js"):
            assert again[name][proposed] == pytest.approx(log.loc[proposed, name].to_numpy(), rel=1e-4, abs=1e-5)
        for rule in rules:
            # Near a tie a threshold goes with the square of a margin: how a batch rounds shows more there.
            assert again[f"threshold_{rule.id}"] == pytest.approx(log[f"threshold_{rule.id}"].to_numpy(), rel=1e-3, abs=1e-6)


@pytest.mark.models
@pytest.mark.parametrize("kind", TEXTS)
def test_shares_certified_by_kl_are_those_of_reports_and_others_add_to_them(
    runs: dict[str, Run], kind: str, divergences: dict[str, Any]
) -> None:
    run = runs[kind]
    rules = divergences["certified_rules"](run)
    scored = divergences["score"](run, rules, 100, None)
    more = 0
    for draft in scored.models:
        known = tallies(run, draft)
        for rule in rules:
            found, tally = divergences["shares"](scored, draft, rule), known[rule.id]
            if rule.name == "tree" and kind == "sampled":  # whether a tree holds the target's top token is not known there
                assert found.union is found.accepted is None
                assert tally.judged.sum() == found.certified == found.wrong == 0
                continue
            assert found.by["kl"].value == pytest.approx(tally.certified.sum() / tally.judged.sum())
            assert found.accepted.value == pytest.approx(tally.accepted.sum() / tally.judged.sum())
            assert found.union.value >= max(share.value for share in found.by.values())
            assert found.accepted.value >= found.union.value
            assert found.wrong == 0
            assert found.certified == pytest.approx(found.union.value * tally.judged.sum())
            more += found.certified - int(tally.certified.sum())
    assert more > 0


@pytest.mark.models
def test_bounds_from_margins_never_exceed_thresholds(runs: dict[str, Run], divergences: dict[str, Any]) -> None:
    run = runs["greedy"]
    scored = divergences["score"](run, divergences["certified_rules"](run), 100, None)
    log = logged(run, "close")
    margin = log["target_margin"].to_numpy(np.float64)
    for rule in rules_of(list(run.log_rules.certified)):
        names = ("margin", "coverage margin", "larger of both") if rule.name == "tree" else ("margin",)
        found = {name: scored.target[f"{name}_{rule.id}"] for name in names}
        for values in found.values():
            assert np.nanmin(values) >= 0
            assert np.nanmax(values) <= 1 + 1e-6
            assert np.isnan(values).mean() < 0.5
        threshold = log[f"threshold_{rule.id}"].to_numpy(np.float64)
        if rule.name in ("strict", "tree"):  # the best rejected token is the second one
            expected = margin_bound(rule, margin, int(rule.arguments.get("width", 1))) / threshold
            assert found["margin"] == pytest.approx(expected, rel=1e-2, nan_ok=True)
        if rule.name == "tree":
            assert found["larger of both"] == pytest.approx(np.fmax(found["margin"], found["coverage margin"]), nan_ok=True)


def test_bounds_are_held_against_exact_thresholds_only(divergences: dict[str, Any]) -> None:
    from alphaprof.theory.certificates import Target

    top = np.array([[0.5, 0.3, 0.12, 0.08], [0.4, 0.4, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]])
    tree, strict, near, two = map(parse_rule, ("tree:2", "strict", "additive:0.25", "top_m:2"))
    tightness = divergences["tightness"]
    found = tightness(tree, Target(top, 4))
    blocks = [np.array(block) for block in ([0.5, 0.3, 0.12], [0.4, 0.1], [0.7, 0.1, 0.1])]  # what pooling makes equal
    threshold = np.array([(block * np.log(block / block.mean())).sum() for block in blocks])
    from_gap, from_coverage = margin_bound(tree, np.array([0.2, 0, 0.6]), 2), coverage_bound(np.array([0.38, 0.3, 0.6]), 2)
    assert found["margin"] == pytest.approx(from_gap / threshold, rel=1e-9)
    assert found["coverage margin"] == pytest.approx(from_coverage / threshold, rel=1e-9)
    assert found["larger of both"] == pytest.approx(np.maximum(from_gap, from_coverage) / threshold, rel=1e-9)
    assert set(tightness(strict, Target(top, 4))) == {"margin"}
    assert np.isnan(tightness(strict, Target(top, 4))["margin"]).tolist() == [False, True, False]  # a tie has threshold 0
    assert np.isnan(tightness(near, Target(top[:, :2], 9))["margin"]).tolist() == [True, True, False]
    assert np.isnan(tightness(tree, Target(top[:, :2], 9))["coverage margin"]).all()
    assert np.isnan(tightness(tree, Target(top[:, :2], 2))["margin"]).all()  # nothing can be rejected
    assert tightness(two, Target(np.array([[1.0, 0.0]]), 9))["margin"] == pytest.approx(1)  # unlogged tokens have nothing


@pytest.mark.models
def test_all_tables_are_printed_and_read(runs: dict[str, Run], capsys: Capture, divergences: dict[str, Any]) -> None:
    run = runs["greedy"]
    assert divergences["main"]([str(run.path), "--documents", "7"]) == 0
    head, *sections = capsys.readouterr().out.split("\n## ")
    assert head.startswith(f"{run.path}: 7 documents, ")
    titles = [section.splitlines()[0] for section in sections]
    of_drafts = [f"Certified and accepted: draft {name}" for name in ("close", "skip", "short")]
    assert titles == ["Thresholds", *of_drafts, "Bounds from margins"]
    tables = [cells(section.split("\n\n")[1]) for section in sections]
    assert all(section.split("\n\n")[2] for section in sections)
    assert tables[0][0] == ["rule", "threshold", *DIVERGENCES]
    assert len(tables[0]) == 1 + 2 * len(CERTIFIED)
    assert tables[1][0] == ["rule", *DIVERGENCES, "any", "accepted", "wrong"]
    assert [row[0] for row in tables[1][1:]] == list(run.log_rules.certified)
    assert all(row[-1].startswith("0 of ") for row in tables[1][1:])
    assert len(tables[-1]) == 1 + len(CERTIFIED) + 2 * 2


@pytest.mark.models
def test_a_contradiction_is_counted_and_ends_in_exit_code_1(
    runs: dict[str, Run], capsys: Capture, divergences: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(divergences["main"].__globals__, "SLACK", -9.0)  # certifies whatever there is
    assert divergences["main"]([str(runs["greedy"].path)]) == 1
    wrong = [int(found) for found in re.findall(r"(\d+) of \d+ +\|", capsys.readouterr().out)]
    assert max(wrong) > 0


@pytest.mark.models
def test_a_run_of_the_target_alone_has_thresholds_and_bounds(
    tiny: Path, tmp_path: Path, capsys: Capture, divergences: dict[str, Any]
) -> None:
    run = profiled(tmp_path / "alone", tiny, drafts={}, rules=["strict", "tree:2"])
    assert divergences["main"]([str(run.path), "--documents", "3", "--dtype", "bfloat16"]) == 0
    found = capsys.readouterr().out
    assert re.findall(r"^## (.*)", found, re.MULTILINE) == ["Thresholds", "Bounds from margins"]
    assert len(cells(found.split("\n\n")[2])) == 1 + 2 * 2


@pytest.mark.models
def test_all_models_are_loaded_in_the_dtype_that_is_asked_for(
    runs: dict[str, Run], divergences: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    scorer = divergences["main"].__globals__["Scorer"]

    def kept(*arguments: Any) -> Any:
        made.append(scorer(*arguments))
        return made[-1]

    monkeypatch.setitem(divergences["main"].__globals__, "Scorer", kept)
    run = runs["greedy"]
    for dtype in (None, "bfloat16"):
        divergences["score"](run, divergences["certified_rules"](run), 1, dtype)
    found = [{str(head.model.dtype) for head in (one.target, *one.drafts)} for one in made]
    assert found == [{"torch.float32"}, {"torch.bfloat16"}]


@pytest.mark.models
def test_other_models_and_runs_without_a_threshold_are_refused(
    runs: dict[str, Run], tmp_path: Path, capsys: Capture, divergences: dict[str, Any]
) -> None:
    before = runs["greedy"].manifest
    other = dataclasses.replace(before.drafts["close"], fingerprint="0" * 64)
    changes: list[tuple[dict[str, Any], int, str]] = [
        ({"target": dataclasses.replace(before.target, fingerprint="0" * 64)}, 6, "target is not the model of"),
        ({"drafts": before.drafts | {"close": other}}, 6, "close is not the model of"),
        ({"tokenizer": "0" * 64}, 6, "tokenizer is not that of"),
        ({"status": "running"}, 6, "is not complete"),
        ({"config": before.config | {"rules": ["lossless"]}}, 2, "no rule that has a threshold"),
    ]
    for number, (change, code, words) in enumerate(changes):
        run = Run(tmp_path / str(number), dataclasses.replace(before, **change))
        run.place.make()
        run.write_manifest(run.manifest)
        assert divergences["main"]([str(run.path)]) == code
        failure = capsys.readouterr().err.splitlines()
        assert words in failure[0]
        assert failure[1].startswith("hint: ")
    with pytest.raises(SystemExit):
        divergences["main"]([str(runs["greedy"].path), "--documents", "0"])
