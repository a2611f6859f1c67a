"""One draft under two targets: the verdict, what it rests on, and what the scoring run of the old texts adds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.check import check_baseline
from alphaprof.commands.compare.comparison import Comparison, compare
from alphaprof.commands.compare.target_change import Moved, TargetChange
from alphaprof.config.load import load_profile
from alphaprof.errors import NotComparable, OptionInvalid
from alphaprof.render.answer import answer_text
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run, RunDraft, side_of
from alphaprof.stats.estimate import Interval
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
    assert change_of(old, cases["RETRAIN"], margin=1.0).verdict == "KEEP"


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
    assert (found.common, found.command, found.changes[0].documents) == (None, None, 120)


def test_two_drafts_of_one_target_have_no_such_answer(old: Run) -> None:
    run = write_run(Path(old.path).parent / "two", Recipe(drafts={"small": 0.0, "large": 0.1}))
    sides = RunDraft(run, "small"), RunDraft(run, "large")
    assert compare(*sides).target_change is None
    with pytest.raises(OptionInvalid, match="--shared is for runs of two targets"):
        compare(*sides, shared=run)


def test_a_scoring_run_that_tells_nothing_is_refused(old: Run, tmp_path: Path) -> None:
    """Texts of another tokenizer cannot be compared by position, nor texts without rounds under the rules asked for."""
    new = run_under(tmp_path / "new", "two", {"code": 0, "chat": 0})
    sides = RunDraft(old, "small"), RunDraft(new, "small")
    with pytest.raises(OptionInvalid, match="--shared is for runs of two targets"):
        compare(*sides, rules=["one_hot"], shared=new)
    sides = RunDraft(old, "small"), RunDraft(altered(new, tokenizer="1" * 64), "small")
    with pytest.raises(OptionInvalid, match="--shared is for runs of two targets with one tokenizer"):
        compare(*sides, shared=new)


def test_a_share_of_a_loss_needs_a_sure_loss() -> None:
    def moved(*parts: Interval) -> Moved:
        return Moved("all traffic", 9, None, None, 0.0, (None, 0.5), (0.5, 0.4, 0.3), *parts)

    sure, unsure, gain = Interval(-0.06, -0.08, -0.04), Interval(-0.02, -0.05, 0.01), Interval(0.01, -0.05, 0.07)
    assert moved(sure, unsure).share_of_target == pytest.approx(0.75)
    assert moved(unsure, sure).share_of_target == pytest.approx(0.25)
    assert (moved(unsure, unsure).share_of_target, moved(sure, gain).share_of_target) == (None, None)


def test_imports_of_two_targets_have_rounds_alone(tmp_path: Path) -> None:
    often, rarely = logged(tmp_path / "often", (3, 1) * 10, 0), logged(tmp_path / "rarely", (1, 1) * 10, 0)
    target = dataclasses.replace(rarely.manifest.target, reference="int4", fingerprint="another")
    found = compare(side_of(str(often.path)), side_of(str(altered(rarely, target=target).path))).target_change
    assert found is not None
    assert (found.verdict, found.common, found.moved, found.command) == ("RETRAIN", None, (), None)


# Real networks


@pytest.fixture(scope="module")
def three(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run, Run, Comparison]:
    """A run, one of a target with noise on its weights, the scoring run by the command that compare prints, and the answer
    with all three.
    """
    folder = tmp_path_factory.mktemp("three")
    models.noisy(models.llama(), 0.02, seed=7).save_pretrained(folder / "tuned")
    models.tokenizer().save_pretrained(folder / "tuned")
    drafts = {"close": {"kind": "model", "model": str(tiny / "draft")}, "skip": {"kind": "layer_skip", "drop_layers": [2]}}
    path = profile_file(folder, tiny, drafts=drafts, costs={"source": "none"}, execution={"threads": 1})
    old = run_profile(path, folder / "old run")
    new = run_profile(path, folder / "new", False, f"target.model={folder / 'tuned'}")
    sides = [f"{run.path}:close" for run in (old, new)]
    printed = CliRunner().invoke(app, ["compare", *sides]).output
    lines = itertools.dropwhile(lambda line: not line.startswith("alphaprof profile"), printed.splitlines())
    command = "\n".join(itertools.takewhile(str.strip, lines))
    result = CliRunner().invoke(app, shlex.split(command.replace("\\\n", ""))[1:])
    assert result.exception is None, result.exception
    shared = Run.open(folder / "new-on-old-texts")
    written = CliRunner().invoke(app, ["compare", *sides, "--shared", str(shared.path), "--format", "json"])
    assert json.loads(written.output)["target_change"]["moved"]  # valid by its schema, as conftest has it
    return old, new, shared, compare(*map(side_of, sides), shared=shared)


@pytest.mark.models
def test_the_scoring_run_has_the_old_texts_and_no_rounds(three: tuple[Run, Run, Run, Comparison]) -> None:
    old, new, shared, _ = three
    assert shared.manifest.target.fingerprint == new.manifest.target.fingerprint
    assert shared.manifest.drafts["before"].fingerprint == old.manifest.target.fingerprint
    assert log_of(shared, "close")["token"].tolist() == log_of(old, "close")["token"].tolist()
    assert not shared.documents().to_pandas()["on_policy"].any()
    assert stored_totals(shared, "close")["tokens"].isna().all()
    assert build_report(shared).answer.verdict == "UNDECIDED"


@pytest.mark.models
def test_how_far_p_moved_is_what_transformers_says(three: tuple[Run, Run, Run, Comparison], tiny: Path) -> None:
    """Both networks over prompt and text of every document of the first run, in float64."""
    old, new, _, comparison = three
    networks = [AutoModelForCausalLM.from_pretrained(run.manifest.target.reference).double().eval() for run in (new, old)]
    rows = []
    for shard in old.shards:
        for row in old.continuations(shard.index).to_pylist():
            ids, start = torch.tensor([row["prompt_ids"] + row["continuation_ids"]]), len(row["prompt_ids"]) - 1
            with torch.no_grad():
                p, q = (network(ids).logits[0, start:-1].log_softmax(-1) for network in networks)
            top = q.exp().topk(2).values
            for kl, same, margin in zip(
                (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1), top[:, 0] - top[:, 1], strict=True
            ):
                rows.append({"domain": row["domain"], "kl": float(kl), "agree": bool(same), "margin": float(margin)})
    frame = pd.DataFrame(rows)
    assert comparison.target_change is not None
    found = {each.domain: each for each in comparison.target_change.moved}
    assert list(found) == ["all traffic", "long", "short"]
    for name, each in found.items():
        mine = frame if name == "all traffic" else frame[frame["domain"] == name]
        assert each.agreement is not None
        assert (each.agreement.value, each.kl.value) == pytest.approx((mine["agree"].mean(), mine["kl"].mean()), rel=1e-4)
        flips = mine[~mine["agree"]]["margin"].median()
        assert each.margins == pytest.approx((flips, mine["margin"].median()), abs=1e-5)
        assert each.infinite == 0


@pytest.mark.models
def test_the_parts_of_a_change_add_up(three: tuple[Run, Run, Run, Comparison]) -> None:
    old, new, shared, comparison = three
    logs = [log_of(run, "close") for run in (old, shared, new)]
    assert comparison.target_change is not None
    for each in comparison.target_change.moved:
        alphas = [
            (log if each.domain == "all traffic" else log[log["domain"] == each.domain])["accept_strict"].mean()
            for log in logs
        ]
        assert each.alpha == pytest.approx(alphas, abs=1e-6)
        assert each.by_target is not None
        assert each.by_text is not None
        assert each.by_target.value == pytest.approx(alphas[1] - alphas[0], abs=1e-6)
        assert each.by_target.value + each.by_text.value == pytest.approx(alphas[2] - alphas[0], abs=1e-6)


@pytest.mark.models
def test_up_to_the_first_token_that_differs_both_logs_are_of_one_text(three: tuple[Run, Run, Run, Comparison]) -> None:
    old, new, _, comparison = three
    one, two = (dict(iter(log_of(run, "close").groupby("document"))) for run in (old, new))
    common = [[], []]
    for number, log in one.items():
        other = two[number]
        size = min(len(log), len(other))
        differs = np.flatnonzero(log["token"].to_numpy()[:size] != other["token"].to_numpy()[:size])
        size = differs[0] + 1 if len(differs) else size
        for side, rows in zip(common, (log, other), strict=True):
            side.append(rows.iloc[:size])
    first, second = (pd.concat(side).reset_index(drop=True) for side in common)
    assert comparison.target_change is not None
    found = comparison.target_change.common
    assert found is not None
    assert (found.documents, found.share) == (15, pytest.approx(len(first) / sum(map(len, one.values()))))
    assert found.agreement is not None
    assert found.agreement.value == pytest.approx((first["target_top"] == second["target_top"]).mean())
    assert found.alpha == pytest.approx((first["accept_strict"].mean(), second["accept_strict"].mean()))
    assert 0 < found.share < 1


@pytest.mark.models
def test_a_draft_of_the_targets_own_layers_changes_with_it(three: tuple[Run, Run, Run, Comparison]) -> None:
    old, new, shared, _ = three
    found = compare(RunDraft(old, "skip"), RunDraft(new, "skip"), shared=shared).target_change
    assert found is not None
    assert not found.same_draft
    logs = [log_of(run, "skip")["accept_strict"].mean() for run in (old, shared, new)]
    assert found.moved[0].alpha == pytest.approx(logs, abs=1e-6)


@pytest.mark.models
def test_another_run_in_place_of_the_scoring_run_is_refused(three: tuple[Run, Run, Run, Comparison]) -> None:
    old, new, shared, _ = three
    sides = RunDraft(old, "close"), RunDraft(new, "close")
    for run, reason in ((old, "its target is not"), (new, "is not one of its drafts")):
        with pytest.raises(NotComparable, match=reason):
            compare(*sides, shared=run)
    with pytest.raises(NotComparable, match=r"its target is not"):
        compare(*sides[::-1], shared=shared)


@pytest.mark.models
def test_a_run_is_a_profile(three: tuple[Run, Run, Run, Comparison], tmp_path: Path) -> None:
    old, *_ = three
    assert load_profile(Path(old.path)) == old.manifest.profile
    (tmp_path / "manifest.json").write_text("{}")
    result = CliRunner().invoke(app, ["profile", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exception is not None
    assert str(tmp_path) in str(result.exception)
