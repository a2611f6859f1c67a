"""Training from a run to a head: what is written, that it is tested as any draft is, and that a killed training goes on."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from alphaprof.config.options import Eagle3Draft
from alphaprof.errors import DataEmpty, HeadRecordUnreadable, LogitsNotFinite, RunExists, RunMismatch
from alphaprof.profiling import training
from alphaprof.profiling.decoding.speculative import Speculation
from alphaprof.profiling.models.kinds import load_draft
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.training import (
    CHECKPOINT,
    TESTED,
    States,
    TrainingRecord,
    logits_by_depth,
    steps_of,
    train,
)
from alphaprof.rules import parse_rule
from alphaprof.run.place import TRAINING
from alphaprof.run.reader import Run
from alphaprof.run.split import PARTS, STOP, TEST, TRAIN, RunText, split, texts_of, unit_of
from alphaprof.run.storage import LocalStorage
from alphaprof.totals.pool import DocumentTotals, decoded_totals
from tests.conftest import Runner
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
    """Texts of the test part by their units."""
    texts = texts_of(case.opened)
    return {text.unit: text for text in split(texts).of(texts, TEST)}


def results(head: Path) -> dict[str, DocumentTotals]:
    """The totals of each unit in the run that tested a head."""
    run = Run.open(head / TESTED)
    table = run.documents()
    totals, _ = decoded_totals(run, "head", table, run.manifest.profile.decision.rule)
    units = map(unit_of, table["cluster"].to_pylist(), table["prompt_hash"].to_pylist())
    return {unit: totals.rows(np.array([row])) for row, unit in enumerate(units)}


def test_the_folder_of_a_head_holds_what_engines_and_readers_need(head: Path, case: Case) -> None:
    assert sorted(path.name for path in head.iterdir()) == [
        *("config.json", "model.safetensors", "tested", "training.json"),
    ]
    described, weights = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    assert described["norm_before_residual"] is False
    assert described["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    offsets, flags = weights["d2t"], weights["t2d"]
    ids = torch.arange(len(offsets)) + offsets
    assert flags.nonzero().flatten().tolist() == ids.tolist()
    assert len(ids) == described["draft_vocab_size"] == weights["lm_head.weight"].shape[0]
    record, texts = TrainingRecord.read(head), texts_of(case.opened)
    assert record.steps == record.options["steps"] == record.progress[-1]["step"] == 12
    assert record.best_step == max(record.progress, key=lambda look: sum(look["accepted"]))["step"]
    assert record.target == case.opened.manifest.target.fingerprint
    assert record.tokens == sum(len(each.ids) for each in texts if each.unit in record.units[TRAIN])
    assert record.learned == record.units[TRAIN]


def test_the_vocabulary_never_sees_what_it_is_stopped_by_or_held_out(head: Path, case: Case) -> None:
    texts = texts_of(case.opened)
    parts = split(texts)
    weights = load_file(head / "model.safetensors")
    ids = set((torch.arange(len(weights["d2t"])) + weights["d2t"]).tolist())
    seen = {token for each in parts.of(texts, TRAIN) for token in each.ids.tolist()}
    held_out = {token for part in (STOP, TEST) for each in parts.of(texts, part) for token in each.ids.tolist()}
    assert ids == seen | {256, 257, 258, 259}  # EOS, padding and the markers of turns
    assert held_out - ids  # something that only other parts hold


def test_the_parts_of_the_record_are_those_of_the_split(head: Path, case: Case) -> None:
    parts, record = split(texts_of(case.opened)), TrainingRecord.read(head)
    assert {part: tuple(units) for part, units in record.units.items()} == parts.units
    assert set(results(head)) == {*parts.units[TEST]}


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_the_loss_falls_and_more_is_accepted(case: Case, tmp_path: Path, loss: str) -> None:
    looks = TrainingRecord.read(trained(case, tmp_path / "long", steps=60, loss=loss)).progress
    assert sum(looks[-1]["loss"]) < 0.7 * sum(looks[1]["loss"])
    assert looks[-1]["accepted"][0] > looks[0]["accepted"][0]


def test_the_best_weights_are_kept_not_the_last(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of looks at which less and less is accepted the first one has the weights; of a tie the earlier one."""
    found = iter([np.array([[5.0, 2, 1], [9.0, 9, 9]])] + [np.array([[4.0, 4, 0], [9.0, 9, 9]])] * 2)
    monkeypatch.setattr(training, "accepted", lambda *_: next(found))
    monkeypatch.setattr(training, "LOOKS", 2)
    written: list[str] = []
    put = LocalStorage.put
    monkeypatch.setattr(LocalStorage, "put", lambda self, name, *given: (written.append(name), put(self, name, *given))[1])
    record = TrainingRecord.read(trained(case, tmp_path / "head", steps=2))
    assert [look["step"] for look in record.progress] == [0, 1, 2]
    assert (record.best_step, written.count(training.WEIGHTS)) == (0, 1)


def test_a_head_is_scored_as_the_trainer_computes_it(head: Path, case: Case, target: Model) -> None:
    """The logits of the trainer's forward, on states that it recorded, are right where the run that tested it says so."""
    draft, run = draft_in(head, case, target), Run.open(head / TESTED)
    texts = {text.prompt.tobytes(): text for text in held_out(case).values()}
    states = States(target, draft.network.layers, list(texts.values()), head.parent, 512, Silent())
    tested = {text.document: text for text in texts_of(run)}
    for shard in run.shards:
        for number, rows in run.positions("head", shard.index).to_pandas().groupby("document"):
            batch = states.batch([list(texts).index(tested[int(number)].prompt.tobytes())])
            for depth, (drafted, logits) in enumerate(logits_by_depth(draft.network, batch, 3), 1):
                top = draft.network.ids[logits.argmax(-1)]
                right = int((top == batch.tokens[drafted]).sum())
                logged = rows["draft_top"] == rows["token"] if depth == 1 else rows[f"agrees_{depth}"]
                assert right == logged.fillna(False).sum()


def test_the_files_hold_what_was_trained(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Model) -> None:
    """Read again by the loader of profiles, the logits are those of the network in the trainer, to the last bit."""
    kept: list[list[torch.Tensor]] = []
    batches: list[Any] = []
    accepted, weights_content = training.accepted, training.weights_content

    def watched(network: Any, batch: Any, depths: int) -> Any:
        batches.append(batch)
        return accepted(network, batch, depths)

    def written(network: Any, dtype: torch.dtype) -> bytes:
        with torch.no_grad():
            kept.append([logits for _, logits in logits_by_depth(network, batches[-1], 3)])
        return weights_content(network, dtype)

    monkeypatch.setattr(training, "accepted", watched)
    monkeypatch.setattr(training, "weights_content", written)
    out = trained(case, tmp_path / "head")
    theirs = logits_by_depth(draft_in(out, case, target).network, batches[-1], 3)
    assert len(kept) > 1
    assert all(torch.equal(ours, theirs) for ours, (_, theirs) in zip(kept[-1], theirs, strict=True))


def test_real_decoding_has_the_rounds_of_replay(head: Path, case: Case, target: Model) -> None:
    """Every round of every test document."""
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
    assert total > 50


def test_sampled_texts_are_tested_by_the_rule_that_the_decision_asks_for(sampled: Case, tmp_path: Path) -> None:
    out = trained(sampled, tmp_path / "head")
    run = Run.open(out / TESTED)
    totals, rules = decoded_totals(run, "head", run.documents(), run.manifest.profile.decision.rule)
    assert set(rules) == {"lossless"}
    assert set(run.documents()["continuation"].to_pylist()) == {"sampled"}
    assert (totals["rounds_1"] <= totals["tokens"]).all()


class Killed(BaseException):
    """A process ends here."""


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Has the training end at the n-th of its steps, looks and written files: before or after it."""
    seen = 0

    def maybe() -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            raise Killed

    for owner, name in ((training, "backward"), (training, "accepted"), (LocalStorage, "put")):
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*given: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
            maybe()
            result = original(*given, **named)
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
    while not (out / TRAINING).is_file() or TrainingRecord.read(out).steps is None:
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
    assert TrainingRecord.read(out) == TrainingRecord.read(head)


def test_changed_options_and_texts_are_another_training(
    case: Case, head: Path, made: Callable[..., Case], tmp_path: Path
) -> None:
    for changes in ({"steps": 13}, {"ttt": 2}, {"loss": "lk"}):
        with pytest.raises(RunMismatch, match=rf"\(other {next(iter(changes))}\)"):
            trained(case, head, resume=True, **changes)
    with pytest.raises(RunMismatch, match="other tokens, units, learned"):
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


def test_a_loss_that_is_not_finite_keeps_the_best_weights(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert TrainingRecord.read(out).steps is None
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


def test_a_damaged_record_is_named(case: Case, head: Path, tmp_path: Path) -> None:
    for name, content in (("cut", '{"units"'), ("older", '{"schema": "alphaprof-training-4", "settings": {}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / TRAINING).write_text(content)
        with pytest.raises(HeadRecordUnreadable, match=r"training\.json cannot be read"):
            trained(case, tmp_path / "head", init=str(tmp_path / name))
    record = dataclasses.replace(TrainingRecord.read(head), schema="alphaprof-training-6")
    record.write(LocalStorage(tmp_path / "older"))
    with pytest.raises(HeadRecordUnreadable, match="has the schema alphaprof-training-6"):
        trained(case, tmp_path / "head", init=str(tmp_path / "older"))
    assert not (tmp_path / "head").exists()


def test_training_goes_on_from_another_head(case: Case, head: Path, tmp_path: Path) -> None:
    out = trained(case, tmp_path / "more", init=str(head), steps=4)
    before, after = TrainingRecord.read(head), TrainingRecord.read(out)
    best = next(look for look in before.progress if look["step"] == before.best_step)
    assert after.progress[0]["accepted"] == best["accepted"]
    assert after.units == before.units
    ours, theirs = load_file(out / "model.safetensors"), load_file(head / "model.safetensors")
    assert torch.equal(ours["d2t"], theirs["d2t"])


def test_a_head_is_not_tested_on_what_an_earlier_one_learned_from(
    case: Case, head: Path, made: Callable[..., Case], tmp_path: Path
) -> None:
    """Two trainings on, the texts of the first one are not forgotten, nor that nobody knows them."""
    more = made(60)  # the first 30 prompts are those of the head
    known = set(TrainingRecord.read(head).units[TRAIN])
    assert known & {unit for part in (STOP, TEST) for unit in split(texts_of(more.opened)).units[part]}  # of its own split
    second = TrainingRecord.read(trained(more, tmp_path / "second", init=str(head), steps=1))
    assert known < set(second.learned or ())
    assert not known & {*second.units[STOP], *second.units[TEST]}
    assert set(results(tmp_path / "second")) == set(second.units[TEST])
    dataclasses.replace(second, units={part: [] for part in PARTS}).write(LocalStorage(tmp_path / "second"))
    third = TrainingRecord.read(trained(more, tmp_path / "third", init=str(tmp_path / "second"), steps=1))
    assert third.learned == second.learned
    (tmp_path / "second" / TRAINING).unlink()
    for init, out in (("second", "fourth"), ("fourth", "fifth")):
        told = Silent()
        asked = dataclasses.replace(ASKED, steps=1, init=str(tmp_path / init))
        train(case.options, str(case.run), tmp_path / out, asked, told)
        assert TrainingRecord.read(tmp_path / out).learned is None
        assert [line for line in told.lines if "test texts may be among them" in line]
    learned = sorted({text.unit for text in texts_of(case.opened)})
    dataclasses.replace(second, learned=learned).write(LocalStorage(tmp_path / "second"))
    with pytest.raises(DataEmpty, match="0 to stop, 0 to test"):
        trained(case, tmp_path / "none", init=str(tmp_path / "second"))


def test_bad_input_is_refused(case: Case, made: Callable[..., Case], tmp_path: Path) -> None:
    with pytest.raises(DataEmpty, match="0 to stop"):
        trained(made(2), tmp_path / "a")
    corpus = made(40, continuation={"kind": "text", "prompt_tokens": 4, "max_new_tokens": 20})
    with pytest.raises(DataEmpty, match="no text by the target"):
        trained(corpus, tmp_path / "a")
    with pytest.raises(DataEmpty, match="longer than the 16 trained depths"):
        trained(made(6, continuation={"kind": "greedy", "max_new_tokens": 8}), tmp_path / "a", ttt=16)
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
    assert answer.startswith(f"{out}: 3 steps, best at step ")
    assert "% of first drafts accepted, " in answer
    assert f"Next: alphaprof report {shlex.quote(str(out / TESTED))}" in answer
    assert "training: 3 steps" in told
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
