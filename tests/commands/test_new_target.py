"""One draft under two targets: the verdict, and what it rests on."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.check import check_baseline
from alphaprof.commands.compare.comparison import compare
from alphaprof.commands.compare.target_change import TargetChange
from alphaprof.config.load import load_profile
from alphaprof.render.answer import answer_text
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run, RunDraft, side_of
from tests import tiny as models
from tests.commands.test_check_baseline import logged
from tests.runs import log_of, profile_file, run_profile
from tests.synthetic import Domain, Recipe, altered, stored_totals, write_run

GAMMA = 3


def run_under(folder: Path, target: str, changes: dict[str, float], documents: int = 60, **more: Any) -> Run:
    """A run of some domains, in each of which alpha is 0.7 and what is `changes`d of it."""
    domains = {name: Domain(documents=documents, alpha=0.7 + off, spread=0.05) for name, off in changes.items()}
    run = write_run(folder, Recipe(domains=domains, gammas=(1, GAMMA), decision={"gamma": GAMMA}, **more))
    facts = run.manifest.target
    return altered(run, target=dataclasses.replace(facts, reference=target, fingerprint=f"files-{target}"))


def change_of(old: Run, new: Run, **more: Any) -> TargetChange:
    found = compare(RunDraft(old, "small"), RunDraft(new, "small"), **more).target_change
    assert found is not None
    return found


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_under(tmp_path_factory.mktemp("old") / "run", "one", {"code": 0, "chat": 0})


def test_the_verdict_follows_from_the_loss_and_the_speedup(old: Run, tmp_path: Path) -> None:
    cases = {
        "KEEP": run_under(tmp_path / "keep", "two", {"code": 0, "chat": 0}),
        "RETRAIN": run_under(tmp_path / "retrain", "two", {"code": -0.15, "chat": -0.15}),
        "TURN OFF": run_under(tmp_path / "off", "two", {"code": -0.6, "chat": -0.6}),
    }
    for verdict, new in cases.items():
        found = change_of(old, new, margin=0.1)
        assert (found.verdict, found.same_draft, found.differs) == (verdict, True, ("fingerprint",))
        assert found.must_reach == pytest.approx(0.9 * found.changes[0].tokens_per_round[0])
        assert found.documents_needed is None
        report = build_report(new).answer
        assert (report.verdict == "NO-GO") == (verdict == "TURN OFF")
    kept = change_of(old, cases["RETRAIN"], margin=1.0)
    assert kept.verdict == "KEEP"
    said = " ".join(answer_text(kept, "terminal").split())
    shown = re.search(r"(\d+) documents cannot show that fewer than 1 document in (\d+) loses all of its drafts", said)
    assert shown is not None
    documents, one_in = map(int, shown.groups())
    # A share of 1 in N that loses all stays unseen in 5% of samples of so many documents.
    assert (documents, (1 - 1 / one_in) ** documents) == (kept.changes[0].clusters, pytest.approx(0.05, abs=0.01))
    assert "cannot show that" not in answer_text(change_of(old, cases["RETRAIN"]), "terminal")


def test_the_same_bounds_decide_in_ci(old: Run, tmp_path: Path) -> None:
    new = run_under(tmp_path / "new", "two", {"code": -0.02, "chat": -0.04})
    found = change_of(old, new)
    call = ["check", str(new.path), "--baseline", str(old.path), "--margin", "0.03", "--format", "json"]
    whole = json.loads(CliRunner().invoke(app, call).output)["items"][0]
    assert (whole["domain"], whole["value"]) == ("whole traffic", pytest.approx(found.changes[0].change.value))
    assert whole["low"] == pytest.approx(found.bounds[0])  # upper bounds in CI are those of all domains together


def test_the_decision_of_the_new_run_is_asked_as_in_ci(old: Run, tmp_path: Path) -> None:
    """Its gamma, its weights and its confidence, where the old run had others."""
    new = run_under(tmp_path / "new", "two", {"code": -0.02, "chat": -0.04})
    decision = {"gamma": 1, "weights": {"code": 0.9, "chat": 0.1}, "confidence": 0.8}
    config = new.manifest.config | {"decision": new.manifest.config.get("decision", {}) | decision}
    found = change_of(old, altered(new, config=config))
    checked = check_baseline(RunDraft(new, "small"), RunDraft(old, "small"), None, 0.03)
    whole = checked.items[0]
    assert (found.gamma, checked.gamma) == (1, 1)
    assert (found.changes[0].change.value, found.bounds[0]) == (pytest.approx(whole.value), pytest.approx(whole.low))


def test_few_documents_leave_it_undecided_and_say_how_many_would_tell(tmp_path: Path) -> None:
    """As many as are asked for decide, most of the time: of 8 pairs of runs of this size, at least half."""
    sides = [run_under(tmp_path / name, name, {"code": off}, documents=12) for name, off in (("a", 0), ("b", -0.07))]
    found = change_of(*sides)
    assert (found.verdict, found.changes[0].domain, len(found.changes)) == ("UNDECIDED", "all traffic", 1)
    needed = found.documents_needed
    assert needed is not None
    assert 12 < needed < 200
    told = []
    for seed in range(8):
        pair = [
            run_under(tmp_path / f"{name} {seed}", name, {"code": off}, documents=needed, seed=seed)
            for name, off in (("a", 0), ("b", -0.07))
        ]
        told.append(change_of(*pair).verdict)
    assert told.count("RETRAIN") >= 4


def test_changes_are_those_of_the_totals_and_the_step_times(old: Run, tmp_path: Path) -> None:
    """Verification of n tokens takes 10 + (n - 1) / 2 ms under the old target, half of it under the new one."""
    new = run_under(tmp_path / "new", "two", {"code": -0.1, "chat": 0.1})
    times = new.latency()
    assert times is not None
    frame = times.to_pandas()
    halved = frame["model"] == "target"
    frame.loc[halved, "median_ms"] /= 2
    frame.loc[halved, "rounds_ms"] = frame.loc[halved, "rounds_ms"].map(lambda values: values / 2)
    altered(new, times=times.schema.empty_table().from_pandas(frame, schema=times.schema, preserve_index=False))
    found = change_of(old, new)
    assert [each.domain for each in found.changes] == ["all traffic", "code", "chat"]
    frames = [stored_totals(run, "small").merge(run.documents().to_pandas(), on="document") for run in (old, new)]
    for each in found.changes:
        lengths, speeds = [], []
        for frame, share in zip(frames, (1.0, 0.5), strict=True):
            mine = frame if each.domain == "all traffic" else frame[frame["domain"].astype(str) == each.domain]
            rounds, tokens = mine[f"rounds_{GAMMA}"].sum(), mine["tokens"].sum()
            lengths.append(tokens / rounds)
            spent = rounds * (share * (10 + 0.5 * GAMMA) + GAMMA)
            speeds.append(tokens * 10 * share / spent)
        assert each.tokens_per_round == pytest.approx(lengths)
        assert each.change.value == pytest.approx(lengths[1] / lengths[0] - 1)
        assert each.change.low < each.change.value < each.change.high
        assert each.speedup is not None
        assert each.speedup == pytest.approx(speeds, rel=0.1)  # a draft step over two tokens takes longer
        assert each.speedup_change is not None
        assert each.speedup_change.value == pytest.approx(each.speedup[1] / each.speedup[0] - 1)


def test_without_step_times_tokens_per_round_decide(tmp_path: Path) -> None:
    sides = [run_under(tmp_path / name, name, {"code": 0}, latency=False) for name in ("a", "b")]
    found = change_of(*sides, margin=0.1)
    assert (found.verdict, found.changes[0].speedup, found.pays_from) == ("KEEP", None, None)
    assert "the new run's report: no step times were measured" in found.reason


def test_the_speedup_beside_a_verdict_is_the_new_reports(old: Run, tmp_path: Path) -> None:
    """At the gamma that its report chooses, which may be another one than the table's."""
    new = run_under(tmp_path / "new", "two", {"code": -0.1, "chat": 0.1})
    answer = build_report(new).answer
    assert answer.speedup is not None
    assert f"the new run's report: {answer.speedup.value:.2f}x [" in change_of(old, new).reason


def test_a_draft_that_differs_too_is_named(old: Run, tmp_path: Path) -> None:
    new = run_under(tmp_path / "new", "two", {"code": 0, "chat": 0})
    draft = dataclasses.replace(new.manifest.drafts["small"], fingerprint="files-head")
    found = compare(RunDraft(old, "small"), RunDraft(altered(new, drafts={"small": draft}), "small"))
    assert found.target_change is not None
    assert not found.target_change.same_draft
    assert "the drafts differ too" in answer_text(found, "terminal", to_file=True)


def test_other_chat_templates_are_paired_by_row(old: Run, tmp_path: Path) -> None:
    """The prompts of the new target have other token ids, and thus other hashes."""
    new = run_under(tmp_path / "new", "two", {"code": -0.1, "chat": 0})
    expected = change_of(old, new)
    texts = {index: new.continuations(shard.index) for index, shard in enumerate(new.shards)}
    hashes = {index: [f"{text[::-1]}" for text in table["prompt_hash"].to_pylist()] for index, table in texts.items()}
    from tests.synthetic import replaced

    written = {
        index: table.set_column(
            table.schema.get_field_index("prompt_hash"), table.schema.field("prompt_hash"), [hashes[index]]
        )
        for index, table in texts.items()
    }
    replaced(new, {}, written)
    altered(new, tokenizer="1" * 64)
    found = change_of(old, new)
    assert found.differs == ("fingerprint", "tokenizer")
    assert [each.tokens_per_round for each in found.changes] == [each.tokens_per_round for each in expected.changes]
    assert (found.common, found.changes[0].documents) == (None, 120)


def test_two_drafts_of_one_target_have_no_such_answer(old: Run) -> None:
    run = write_run(Path(old.path).parent / "two", Recipe(drafts={"small": 0.0, "large": 0.1}))
    sides = RunDraft(run, "small"), RunDraft(run, "large")
    assert compare(*sides).target_change is None


def test_imports_of_two_targets_have_rounds_alone(tmp_path: Path) -> None:
    often, rarely = logged(tmp_path / "often", (3, 1) * 10, 0), logged(tmp_path / "rarely", (1, 1) * 10, 0)
    target = dataclasses.replace(rarely.manifest.target, reference="int4", fingerprint="another")
    found = compare(side_of(str(often.path)), side_of(str(altered(rarely, target=target).path))).target_change
    assert found is not None
    assert (found.verdict, found.common) == ("RETRAIN", None)


# Real networks


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A run, and one of a target with noise on its weights."""
    folder = tmp_path_factory.mktemp("two")
    models.noisy(models.llama(), 0.02, seed=7).save_pretrained(folder / "tuned")
    models.tokenizer().save_pretrained(folder / "tuned")
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}, "skip": {"kind": "layer_skip", "drop_layers": [2]}}
    path = profile_file(folder, tiny, drafts=drafts, costs={"source": "none"}, execution={"threads": 1})
    return run_profile(path, folder / "old run"), run_profile(
        path, folder / "new", False, f"target.model={folder / 'tuned'}"
    )


@pytest.mark.models
def test_up_to_the_first_token_that_differs_both_logs_are_of_one_text(two: tuple[Run, Run]) -> None:
    old, new = two
    one, others = (dict(iter(log_of(run, "close").groupby("document"))) for run in (old, new))
    common = [[], []]
    for number, log in one.items():
        other = others[number]
        size = min(len(log), len(other))
        differs = np.flatnonzero(log["token"].to_numpy()[:size] != other["token"].to_numpy()[:size])
        size = differs[0] + 1 if len(differs) else size
        for side, rows in zip(common, (log, other), strict=True):
            side.append(rows.iloc[:size])
    first, second = (pd.concat(side).reset_index(drop=True) for side in common)
    found = compare(RunDraft(old, "close"), RunDraft(new, "close")).target_change
    assert found is not None
    found = found.common
    assert found is not None
    assert (found.documents, found.share) == (15, pytest.approx(len(first) / sum(map(len, one.values()))))
    assert found.agreement is not None
    assert found.agreement.value == pytest.approx((first["target_top"] == second["target_top"]).mean())
    assert found.alpha == pytest.approx((first["accept_strict"].mean(), second["accept_strict"].mean()))
    assert 0 < found.share < 1


@pytest.mark.models
def test_a_draft_of_the_targets_own_layers_changes_with_it(two: tuple[Run, Run]) -> None:
    found = compare(*(RunDraft(run, "skip") for run in two)).target_change
    assert found is not None
    assert not found.same_draft


@pytest.mark.models
def test_a_run_is_a_profile(two: tuple[Run, Run], tmp_path: Path) -> None:
    old, _ = two
    assert load_profile(Path(old.path)) == old.manifest.profile
    (tmp_path / "manifest.json").write_text("{}")
    result = CliRunner().invoke(app, ["profile", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exception is not None
    assert str(tmp_path) in str(result.exception)
