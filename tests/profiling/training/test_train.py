"""Training from a run to a head: what is written, that it is tested as any draft is, and that a killed training goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from alphaprof.config.options import Eagle3Draft
from alphaprof.errors import (
    DataEmpty,
    HeadRecordUnreadable,
    LogitsNotFinite,
    OptionInvalid,
    PartsOverlap,
    RunExists,
    RunMismatch,
)
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.heads.eagle_files import trained_of
from alphaprof.profiling.models.kinds import load_draft
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.training import train as training
from alphaprof.profiling.training.features import Features
from alphaprof.profiling.training.train import train
from alphaprof.profiling.training.trainer import CHECKPOINT, Trainer, logits_by_depth, steps_of
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import Trained
from alphaprof.run.reader import Run
from alphaprof.run.split import PARTS, STOP, TEST, TRAIN, RunText, split, texts_of, unit_of
from alphaprof.run.storage import LocalStorage
from alphaprof.run.training import TESTED, TRAINING, read_training
from alphaprof.totals.pool import DocumentTotals, decoded_totals
from tests.conftest import Runner
from tests.heads import write_training
from tests.profiling.training.conftest import Case
from tests.runs import TRAINING as ASKED
from tests.runs import Silent

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]


def trained(case: Case, out: Path, resume: bool = False, **changes: Any) -> Path:
    """A head of some steps in a folder."""
    train(case.options, str(case.run), out, dataclasses.replace(ASKED, **changes), Silent(), resume)
    return out


@pytest.fixture(scope="module")
def head(head_run: Run) -> Path:
    return Path(head_run.path).parent


@pytest.fixture(scope="module")
def target(case: Case) -> Model:
    return load_model("target", case.options.target, "float32", extra_eos=(256,))


def draft_in(folder: Path, case: Case, target: Model) -> Any:
    """The head in a folder as a draft."""
    given = Eagle3Draft(kind="eagle3", model=str(folder))
    return load_draft("head", given, case.options, target, load_tokenizer(case.options.target))


def held_out(case: Case) -> dict[str, RunText]:
    """Texts of the stop and test part by their units."""
    texts = texts_of(case.opened)
    parts = split(texts)
    return {text.unit: text for part in (STOP, TEST) for text in parts.of(texts, part)}


def results(head: Path) -> dict[str, DocumentTotals]:
    """The totals of each unit in the run that tested a head."""
    run = Run.open(head / TESTED)
    table = run.documents()
    totals, _ = decoded_totals(run, "head", table, run.manifest.profile.decision.rule)
    units = map(unit_of, table["cluster"].to_pylist(), table["prompt_hash"].to_pylist())
    return {unit: totals.rows(np.array([row])) for row, unit in enumerate(units)}


def test_the_folder_of_a_head_holds_what_engines_and_readers_need(head: Path, case: Case) -> None:
    assert sorted(path.name for path in head.iterdir()) == [
        *("README.md", "config.json", "model.safetensors", "tested", "training.json"),
    ]
    described, weights = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    assert described["norm_before_residual"] is False
    assert described["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    offsets, flags = weights["d2t"], weights["t2d"]
    ids = torch.arange(len(offsets)) + offsets
    assert flags.nonzero().flatten().tolist() == ids.tolist()
    assert len(ids) == described["draft_vocab_size"] == weights["lm_head.weight"].shape[0]
    record = read_training(head)
    assert (record.status, record.settings["steps"]) == ("complete", 12)
    assert record.best_step <= record.steps <= 12
    assert record.target.fingerprint == case.opened.manifest.target.fingerprint
    assert record.seconds.cpu > 0
    assert record.size.tokens == sum(len(each.ids) for each in texts_of(case.opened) if each.unit in record.units.train)
    assert trained_of(head) == Trained(len(record.units.train), record.size.tokens)


def test_the_vocabulary_never_sees_what_it_is_stopped_by_or_tested_on(head: Path, case: Case) -> None:
    texts = texts_of(case.opened)
    parts = split(texts)
    weights = load_file(head / "model.safetensors")
    ids = set((torch.arange(len(weights["d2t"])) + weights["d2t"]).tolist())
    seen = {token for each in parts.of(texts, TRAIN) for token in each.ids.tolist()}
    held_out = {token for part in (STOP, TEST) for each in parts.of(texts, part) for token in each.ids.tolist()}
    assert ids == seen | {256, 257, 258, 259}  # EOS, padding and the markers of turns
    assert held_out - ids  # something that only other parts hold


def test_the_parts_of_the_record_are_those_of_the_split(head: Path, case: Case) -> None:
    parts, record = split(texts_of(case.opened)), read_training(head)
    assert {part: getattr(record.units, part) for part in PARTS} == parts.units
    assert set(results(head)) == {*parts.units[STOP], *parts.units[TEST]}


def test_the_loss_falls_and_the_best_step_is_that_of_the_stop_part(case: Case, tmp_path: Path) -> None:
    record = read_training(trained(case, tmp_path / "long", steps=60))
    looks = record.progress
    assert sum(looks[-1].loss) < 0.7 * sum(looks[1].loss)
    assert looks[-1].agreement[0] > looks[0].agreement[0]
    assert record.best_step in [look.step for look in looks]


def test_a_head_is_scored_as_the_trainer_computes_it(head: Path, case: Case, target: Model) -> None:
    """The logits of the trainer's forward, on states that it recorded, are right where the run that tested it says so."""
    draft, run = draft_in(head, case, target), Run.open(head / TESTED)
    texts = {text.prompt.tobytes(): text for text in held_out(case).values()}
    features = Features(target, draft.network.layers, list(texts.values()), head.parent, 512)
    features.fill(lambda _: None)
    tested = {text.document: text for text in texts_of(run)}
    for shard in run.shards:
        for number, rows in run.positions("head", shard.index).to_pandas().groupby("document"):
            batch = features.batch([list(texts).index(tested[int(number)].prompt.tobytes())])
            for depth, (row, at, logits) in enumerate(logits_by_depth(draft.network, batch, 3), 1):
                top = draft.network.ids[logits.argmax(-1)]
                right = int((top == batch.whole[row, at]).sum())
                logged = rows["draft_top"] == rows["token"] if depth == 1 else rows[f"agrees_{depth}"]
                assert right == logged.fillna(False).sum()


def test_the_files_hold_what_was_trained(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Model) -> None:
    """Read again by the loader of profiles, the logits are those of the network in the trainer, to the last bit."""
    kept: list[Trainer] = []
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, *given: (kept.append(self), run(self, *given))[1])
    out = trained(case, tmp_path / "head")
    (trainer,) = kept
    draft = draft_in(out, case, target)
    assert draft.network.wiring == trainer.network.wiring
    batch = trainer.stop.batch([0, 1])
    with torch.no_grad():
        pairs = zip(logits_by_depth(trainer.network, batch, 3), logits_by_depth(draft.network, batch, 3), strict=True)
        for (*_, ours), (*_, theirs) in pairs:
            assert torch.equal(ours, theirs)


def test_real_decoding_has_the_rounds_of_replay(head: Path, case: Case, target: Model) -> None:
    """Every round of every stop and test document."""
    draft, tested, total = draft_in(head, case, target), results(head), 0
    for unit, text in held_out(case).items():
        for gamma in (1, 2, 3):
            decoded = Speculation(target, draft, parse_rule("strict"), gamma).decode(text.prompt, 20)
            assert decoded.ids.tolist() == text.ids.tolist()
            counts = tested[unit].counts(gamma)
            assert len(decoded.drafted) == counts.rounds[0]
            reached = [int((decoded.accepted >= depth).sum()) for depth in range(1, gamma + 1)]
            assert reached == counts.accepted[0].tolist()
            total += len(decoded.drafted)
    assert total > 120


def test_sampled_texts_are_tested_by_the_rule_that_the_decision_asks_for(sampled: Case, tmp_path: Path) -> None:
    out = trained(sampled, tmp_path / "head")
    run = Run.open(out / TESTED)
    totals, rules = decoded_totals(run, "head", run.documents(), run.manifest.profile.decision.rule)
    assert set(rules) == {"lossless"}
    assert set(run.documents()["continuation"].to_pylist()) == {"sampled"}
    assert (totals["rounds_1"] <= totals["tokens"]).all()
    assert "| sampled | lossless |" in (out / "README.md").read_text()


class Killed(BaseException):
    """A process ends here."""


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Has the training end at the n-th of its updates, looks and written files, these half-written."""
    seen = 0

    def maybe() -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            raise Killed

    for owner, name in ((Trainer, "update"), (Trainer, "tested"), (LocalStorage, "put")):
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(self: Any, *given: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
            maybe()
            result = original(self, *given, **named)
            maybe()
            return result

        monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_a_training_that_was_killed_goes_on_to_the_same_weights_and_record(
    case: Case, head: Path, tmp_path: Path, seed: int
) -> None:
    """At random moments, until it comes to its end."""
    rng, out, times = np.random.default_rng(seed), tmp_path / "head", 0
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, int(rng.integers(1, 40)))
        try:
            trained(case, out)
        except Killed:
            times += 1
    while not (out / TRAINING).is_file() or read_training(out).status != "complete":
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, int(rng.integers(10, 60)))
            try:
                trained(case, out, resume=True)
            except Killed:
                times += 1
    trained(case, out, resume=True)  # cleans up after a kill at the very end
    assert times > 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in head.iterdir())
    assert (out / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    assert (out / "config.json").read_bytes() == (head / "config.json").read_bytes()
    ours, theirs = read_training(out), read_training(head)
    assert ours.identity == theirs.identity
    strip = [dataclasses.replace(look, seconds=0) for look in ours.progress]
    assert strip == [dataclasses.replace(look, seconds=0) for look in theirs.progress]
    assert ours.best_step == theirs.best_step


def test_changed_options_and_texts_are_another_training(
    case: Case, head: Path, made: Callable[..., Case], tmp_path: Path
) -> None:
    for changes in ({"steps": 13}, {"ttt": 2}, {"split_seed": 1}):
        with pytest.raises(RunMismatch, match=next(iter(changes))):
            trained(case, head, resume=True, **changes)
    with pytest.raises(RunMismatch, match="other texts"):
        trained(made(28), head, resume=True)
    trained(case, head, resume=True)


def test_what_lies_in_the_folder_is_never_overwritten(case: Case, head: Path, tmp_path: Path) -> None:
    with pytest.raises(RunExists, match=r"holds a training\.json"):
        trained(case, head)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(RunExists, match="holds files but no"):
            trained(case, tmp_path / "other", resume=resume)


def test_a_loss_that_is_none_keeps_the_best_weights(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, count, original = tmp_path / "head", 0, training.TargetLaw.__call__

    def poisoned(self: Any, last: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return original(self, last) * (torch.nan if count > 4 else 1)

    monkeypatch.setattr(training.TargetLaw, "__call__", poisoned)
    with pytest.raises(LogitsNotFinite, match="not finite") as caught:
        trained(case, out)
    assert str(out) in caught.value.hint
    assert all(weight.isfinite().all() for weight in load_file(out / "model.safetensors").values())
    monkeypatch.undo()
    assert (out / CHECKPOINT).is_file()
    trained(case, tmp_path / "next", init=str(out), steps=2)


def test_a_damaged_checkpoint_is_named(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "head"
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, 30)
        with pytest.raises(Killed):
            trained(case, out)
    path = out / CHECKPOINT
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(HeadRecordUnreadable, match=path.name):
        trained(case, out, resume=True)
    path.unlink()
    trained(case, out, resume=True)


def test_a_split_by_time_goes_from_the_data_to_the_card(timed: Case, tmp_path: Path) -> None:
    """What is tested was asked last, and all that the head has learnt before anything that it was stopped by."""
    texts = texts_of(timed.opened)
    assert [text.time for text in texts] == sorted((text.time for text in texts if text.time), reverse=True)
    out = trained(timed, tmp_path / "head", split="time", steps=2)
    record = read_training(out)
    asked = {text.unit: text.time for text in texts}
    times = {part: [asked[unit] for unit in getattr(record.units, part)] for part in PARTS}
    begins = {part: f"2026-03-{day}T06:00:00+00:00" for part, day in ((STOP, 25), (TEST, 28))}
    assert {part: min(each for each in times[part] if each).isoformat() for part in (STOP, TEST)} == begins
    assert max(each for each in times[TRAIN] if each) < min(each for each in times[STOP] if each)
    assert record.settings["begins"] == begins
    assert set(record.units.test) == {text.unit for text in texts[:3]}
    assert set(results(out)) == {text.unit for text in texts[:6]}
    page = (out / "README.md").read_text()
    assert "| split | by time: test part from 2026-03-28T06:00:00+00:00, stop part from 2026-03-25T06" in page
    for asked_for in ("random", "time"):
        with pytest.raises(RunMismatch if asked_for == "random" else RunExists):
            trained(timed, out, resume=asked_for == "random", split=asked_for, steps=2)
    with pytest.raises(PartsOverlap, match="was trained on") as caught:
        trained(timed, tmp_path / "next", init=str(out), steps=1)
    assert "--split," in caught.value.hint
    trained(timed, tmp_path / "same", init=str(out), split="time", steps=1)


def test_training_goes_on_from_another_head(case: Case, head: Path, tmp_path: Path) -> None:
    out = trained(case, tmp_path / "more", init=str(head), steps=4)
    before, after = read_training(head), read_training(out)
    assert after.progress[0].agreement == next(look.agreement for look in before.progress if look.step == before.best_step)
    assert after.vocabulary == before.vocabulary
    wider = trained(case, tmp_path / "wider", init=str(head), steps=1, draft_vocab=200)
    assert read_training(wider).vocabulary.size == 200
    weights, old = load_file(wider / "model.safetensors"), load_file(head / "model.safetensors")
    assert weights["lm_head.weight"].shape[0] == 200
    assert old["lm_head.weight"].shape[0] < 200


def test_a_head_that_has_learnt_the_test_texts_is_refused(case: Case, head: Path, tmp_path: Path) -> None:
    with pytest.raises(PartsOverlap, match="was trained on"):
        trained(case, tmp_path / "a", init=str(head), split_seed=1)
    other = tmp_path / "unknown"
    shutil.copytree(head, other)
    (other / TRAINING).unlink()
    out = trained(case, tmp_path / "b", init=str(other), split_seed=1, steps=2)
    assert "may include test texts" in (out / "README.md").read_text()


def test_what_a_head_learnt_before_goes_with_the_heads_that_begin_with_it(case: Case, head: Path, tmp_path: Path) -> None:
    """Two trainings on: neither units of the first one nor that nobody knows them is forgotten."""
    second = trained(case, tmp_path / "second", init=str(head), steps=1)
    record = read_training(second)
    few = dataclasses.replace(record.size, units=1), dataclasses.replace(record.units, train=record.units.train[:1])
    write_training(second, dataclasses.replace(record, size=few[0], units=few[1]))
    with pytest.raises(PartsOverlap, match="was trained on"):
        trained(case, tmp_path / "third", init=str(second), split_seed=1)
    write_training(second, dataclasses.replace(record, settings=record.settings | {"learnt": None}))
    out = trained(case, tmp_path / "unknown", init=str(second), steps=1)
    assert "may include test texts" in (out / "README.md").read_text()


def test_bad_input_is_refused(case: Case, made: Callable[..., Case], tmp_path: Path) -> None:
    with pytest.raises(DataEmpty, match="0 to stop"):
        trained(made(2), tmp_path / "a")
    corpus = made(40, continuation={"kind": "text", "prompt_tokens": 4, "max_new_tokens": 20})
    with pytest.raises(DataEmpty, match="no text by the target"):
        trained(corpus, tmp_path / "a")
    with pytest.raises(DataEmpty, match="longer than the 16 trained depths"):
        trained(made(6, continuation={"kind": "greedy", "max_new_tokens": 8}), tmp_path / "a", ttt=16)
    with pytest.raises(OptionInvalid, match="no room"):
        trained(case, tmp_path / "a", draft_vocab=3)
    other = case.options.model_copy(update={"target": case.options.target.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(RunMismatch, match="another target, dtype or tokenizer"):
        train(other, str(case.run), tmp_path / "a", ASKED, Silent())
    assert not (tmp_path / "a").exists()


def test_the_command_trains_and_says_what_is_next(case: Case, tmp_path: Path, console_script: Runner) -> None:
    out = tmp_path / "it's a head"
    gone = "data=[{domain: words, path: gone.jsonl, prompt: '{prompt}'}]"  # the run holds the texts
    given = ("train", case.profile, "--from", case.run, "--out", out, "--steps", 3, "--batch-tokens", 60, "--set", gone)
    given += ("--set", "drafts={gone: {kind: model, model: ./gone}}")  # nor does it need any draft
    code, answer, told = console_script(*given)
    assert code == 0
    assert "3 steps" in answer
    assert "loss by depth" in told
    text = (out / "README.md").read_text()
    assert "norm_before_residual" not in text
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["drafts"]["head"]["model"] == str(out)
    assert json.dumps(str(out)) in text.split("```bash\n")[1].replace("'\"'\"'", "'")
    code, _, told = console_script(*given)
    assert (code, len(told.splitlines())) == (6, 2)


def test_steps_take_every_text_once_a_pass_and_do_not_depend_on_where_a_training_began() -> None:
    sizes = [5, 9, 3, 12, 7, 4, 8]
    found = steps_of(sizes, 10, seed=3)
    taken = [next(found) for _ in range(40)]
    flat = [index for step in taken for index in step]
    assert all(sorted(flat[start : start + 7]) == list(range(7)) for start in range(0, len(flat) - 7, 7))
    assert all(sum(sizes[index] for index in step) >= 10 for step in taken)
    assert all(sum(sizes[index] for index in step[:-1]) < 10 for step in taken)
    again = steps_of(sizes, 10, seed=3)
    assert [next(again) for _ in range(40)] == taken
    assert [next(steps_of(sizes, 10, seed=4)) for _ in range(1)] != taken[:1]
