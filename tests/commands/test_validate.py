"""`alphaprof validate`: hand values of the comparison, a whole run on tiny models, and refusals in two lines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaprof.cli.common import run_directory
from alphaprof.commands.validate.validation import (
    TAIL,
    ClockError,
    Decodings,
    DecodingTimes,
    TimedPair,
    Validation,
    build_validation,
    clock_error,
    require_within,
)
from alphaprof.errors import (
    CheckUndecided,
    DataEmpty,
    OutOfMemory,
    OutsideTolerance,
    StepsNotTimed,
)
from alphaprof.render.answer import answer_text
from alphaprof.run.reader import Run
from alphaprof.run.schema import depth_names
from alphaprof.stats.estimate import Interval
from alphaprof.stats.student import quantile
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.files import read_totals
from tests.cli.test_cli_errors import profile
from tests.conftest import Runner, slow
from tests.synthetic import Recipe, write_run

GAMMA = 2


def pair(plain: Any, drafted: Any, plain_tokens: Any = None, drafted_tokens: Any = None) -> TimedPair:
    """A pair of decodings, of a token each unless it says otherwise."""
    one = np.ones(np.shape(plain)[1])
    return TimedPair(
        np.asarray(plain, dtype=float),
        np.asarray(drafted, dtype=float),
        one if plain_tokens is None else np.array(plain_tokens),
        one if drafted_tokens is None else np.array(drafted_tokens),
    )


def test_a_speedup_takes_the_median_of_each_document_and_divides_last() -> None:
    plain = [[3.0, 10.0], [4.0, 20.0], [50.0, 12.0]]  # medians 4 and 12
    drafted = [[1.0, 6.0], [2.0, 6.0], [9.0, 2.0]]  # medians 2 and 6
    assert pair(plain, drafted, [5, 7], [5, 7]).speedup() == 2.0


def test_texts_of_different_length_are_compared_by_the_token() -> None:
    assert pair([[6.0]], [[3.0]], [12], [4]).speedup() == pytest.approx((6 / 12) / (3 / 4))


def test_without_tokens_or_ticks_of_the_clock_there_is_no_speedup() -> None:
    zero = np.zeros((2, 1))
    assert pair(zero, zero, [0], [0]).speedup() is None
    assert pair(zero, zero + 1).speedup() is None
    assert pair(zero, zero + 1).error(1.0, np.ones(1), (0.0, math.inf)) is None


def tail_of_one_degree(tail: float) -> float:
    """The quantile of Student's t with one degree of freedom (Cauchy)."""
    return math.tan(math.pi * (0.5 - tail))


def test_the_interval_of_an_error_over_documents_by_hand() -> None:
    """Rounds were predicted to cost the same, and the second document's took 1.2 times as long as the first's."""
    found = pair(np.ones((2, 2)), [[1.0, 1.2], [1.0, 1.2]]).error(1.0, np.ones(2), (0.0, math.inf))
    half = tail_of_one_degree(TAIL) * 0.1 / 1.1  # residuals of 0.1 on a mean of 1.1
    assert found.value == pytest.approx(0.1)
    assert (1 + found.low, 1 + found.high) == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)))


def test_documents_that_were_predicted_to_differ_are_no_source_of_error() -> None:
    found = pair(np.ones((2, 2)), [[1.0, 3.0], [1.0, 3.0]]).error(0.5, np.array([1.0, 3.0]), (0.0, math.inf))
    assert (found.value, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-12)


def test_the_interval_of_an_error_over_repeats_and_step_times_by_hand() -> None:
    slower = pair(np.ones((2, 2)), [[1.0, 1.0], [math.exp(0.2)] * 2])  # logs of the speedup 0 and -0.2: variance 0.02
    found = slower.error(1.0, np.ones(2), (0.0, math.inf))
    half = tail_of_one_degree(TAIL) * math.sqrt(0.02 / 2)
    assert math.log((1 + found.high) / (1 + found.value)) == pytest.approx(half)
    timed_too = slower.error(1.0, np.ones(2), (0.01, math.inf))  # as much again, known: 4 degrees of freedom
    assert math.log((1 + timed_too.high) / (1 + timed_too.value)) == pytest.approx(quantile(1 - TAIL, 4) * math.sqrt(0.02))


@pytest.mark.parametrize("shape", [(1, 4), (3, 1)])
def test_one_repeat_or_one_document_says_nothing(shape: tuple[int, int]) -> None:
    found = pair(np.ones(shape), np.full(shape, 9.0)).error(1.0, np.ones(shape[1]), (0.0, math.inf))
    assert found == Interval(pytest.approx(8.0), -1.0, math.inf)
    assert clock_error([found], 0.1) == ClockError(pytest.approx(8.0), 0.0, math.inf, pytest.approx(8.0), "too_noisy")


def test_the_median_error_lies_between_the_medians_of_the_ends() -> None:
    errors = [Interval(0.3, 0.2, 0.4), Interval(-0.05, -0.15, 0.05), Interval(-0.2, -0.3, -0.1)]
    for tolerance, outcome in ((0.0999, "outside"), (0.1, "too_noisy"), (0.2999, "too_noisy"), (0.3, "within")):
        found = clock_error(errors, tolerance)
        assert (found.median, found.low, found.high, found.worst) == pytest.approx((0.2, 0.1, 0.3, 0.3))
        assert found.outcome == outcome
    assert clock_error([], 0.1) is None


Noise = Callable[[np.random.Generator, int, int], np.ndarray]
REPEATS, DOCUMENTS = 3, 4
CLOCKS: dict[str, Noise] = {  # how much longer than it should a decoding takes, [repeats, documents]
    "quiet": lambda rng, repeats, documents: np.exp(rng.normal(0, 0.01, (repeats, documents))),
    "restless": lambda rng, repeats, documents: np.exp(rng.normal(0, 0.04, (repeats, documents))),
    "every decoding": lambda rng, repeats, documents: np.exp(rng.normal(0, 0.3, (repeats, documents))),
    "some decodings": lambda rng, repeats, documents: (
        1 + (rng.random((repeats, documents)) < 0.3) * rng.exponential(1, (repeats, documents))
    ),
    "whole repeats": lambda rng, repeats, documents: (
        np.exp(rng.normal(0, 0.2, (repeats, 1))) * np.exp(rng.normal(0, 0.05, (repeats, documents)))
    ),
}


def simulated(rng: np.random.Generator, noise: Noise, truth: float, timing: float = 0.02) -> ClockError:
    """Two domains at four gammas, which share plain decodings and step times; predictions are off by `truth`."""
    off = (1 + truth) * math.exp(rng.normal(0, timing))
    errors = []
    for _ in range(2):
        tokens = rng.integers(40, 97, DOCUMENTS)
        plain = tokens * noise(rng, REPEATS, DOCUMENTS)
        for _ in range(4):
            cost = rng.uniform(0.5, 1.1, DOCUMENTS)
            timed = TimedPair(plain, tokens * cost * noise(rng, REPEATS, DOCUMENTS), tokens, tokens)
            errors.append(timed.error(off * tokens.sum() / (tokens * cost).sum(), cost, (timing**2, math.inf)))
    found = clock_error([error for error in errors if error], 0.1)
    assert found is not None
    return found


OTHERS = ("restless", "every decoding", "whole repeats")


@pytest.mark.parametrize(
    "clock", ["quiet", "some decodings", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_prediction_without_error_is_hardly_ever_called_outside(clock: str) -> None:
    rng = np.random.default_rng(11)
    runs = [simulated(rng, CLOCKS[clock], 0.0) for _ in range(200)]
    assert sum(run.outcome == "outside" for run in runs) <= 10
    assert sum(run.outcome == "within" for run in runs) >= (180 if clock == "quiet" else 0)
    if clock not in ("quiet", "restless"):  # one number above the tolerance, the rule that intervals replace
        assert sum(run.median > 0.1 for run in runs) > 60


def test_an_error_at_the_tolerance_is_rarely_decided_and_one_of_30_percent_is_outside() -> None:
    rng = np.random.default_rng(12)
    edge = [simulated(rng, CLOCKS["quiet"], 0.1).outcome for _ in range(200)]
    assert edge.count("outside") <= 10
    assert edge.count("within") <= 10
    assert [simulated(rng, CLOCKS["quiet"], 0.3).outcome for _ in range(50)] == ["outside"] * 50


def synthetic(folder: Path) -> Run:
    """A run of one draft, without models."""
    write_run(folder / "run", Recipe(drafts={"small": 0.0}))
    return Run.open(folder / "run")


def timed(run_: Run, factor: float, rule: str = "strict") -> DecodingTimes:
    """Decodings whose rounds are those of the replay, and which are `factor` times as fast as predicted.

    With a lossy rule the same decodings again by that rule, which give up .05 nats in all but the first document.
    """
    documents = run_.documents()
    numbers = documents["document"].to_numpy()
    totals = read_totals(run_, "small", TotalsRequest(["strict"], run_.gammas)).to_pydict()
    rows = [index for index, rule in enumerate(totals["rule"]) if rule == "strict"]

    def column(name: str) -> Any:
        return np.array([totals[name][row] for row in rows])

    depths = {
        name: np.stack([column(each) for each in depth_names(name, GAMMA)], axis=1) for name in ("drafted", "accepted")
    }
    rounds, tokens = column(f"rounds_{GAMMA}"), column("tokens")
    times = {(row["model"], row["step"], row["tokens"]): row["median_ms"] / 1e3 for row in run_.latency().to_pylist()}
    exactly = np.column_stack([rounds, depths["drafted"]]) - np.column_stack([depths["drafted"], 0 * rounds])
    verify = sum(times["target", "verify" if m else "decode", m + 1] * exactly[:, m] for m in range(GAMMA + 1))
    draft = times["small", "draft", 1] * depths["drafted"].sum(1)
    spent = (verify + draft) / factor
    same = np.ones(len(numbers), dtype=bool)
    nothing = np.zeros((len(numbers), 0))

    def twice(values: Any) -> Any:
        return np.array([values, values])

    def way(name: str | None, gamma: int, wall: Any, share: tuple[Any, Any], counts: Any) -> Decodings:
        seconds = [twice(values) for values in (wall, *share)]
        return Decodings(name, name and "strict", gamma, np.arange(len(numbers)), *seconds, tokens, *counts, same)

    plain = way(None, 0, tokens * times["target", "decode", 1], (0 * tokens, 0 * tokens), (tokens, nothing, nothing))
    counts = (rounds, depths["drafted"], depths["accepted"])
    drafted = way("small", GAMMA, spent, (draft / factor, verify / factor), counts)
    if rule == "strict":
        return DecodingTimes(numbers, plain, (drafted,), 0, 0)
    lost = np.where(numbers == numbers[0], 0.0, 0.05)
    lossy = dataclasses.replace(drafted, rule=rule, regret=lost, same_text=lost == 0)
    return DecodingTimes(numbers, dataclasses.replace(plain, regret=0 * lost), (drafted, lossy), 0, 0)


def compared(folder: Path, factor: float = 1.0, tolerance: float = 0.1, rule: str = "strict") -> Validation:
    found = synthetic(folder)
    return build_validation(found, timed(found, factor, rule), tolerance, kept=True)


def test_a_lossy_rule_is_measured_beside_the_exact_one_and_does_not_touch_the_outcome(tmp_path: Path) -> None:
    exact, found = compared(tmp_path / "exact"), compared(tmp_path / "both", rule="additive_0p1")
    assert (found.outcome, found.wall) == (exact.outcome, exact.wall)
    assert tuple(cell for cell in found.cells if not cell.lossy) == exact.cells
    for cell in (cell for cell in found.cells if cell.lossy):
        assert (cell.tokens_per_round.predicted, cell.predicted_speedup, cell.error, cell.same_rounds) == (None,) * 4
        (twin,) = [each for each in exact.cells if (each.domain, each.continuation) == (cell.domain, cell.continuation)]
        assert (cell.wall_speedup, cell.tokens_per_round.measured) == (twin.wall_speedup, twin.tokens_per_round.measured)
        assert cell.excess_regret.low <= cell.excess_regret.value <= cell.excess_regret.high
    assert sum(cell.same_text or 0 for cell in found.cells if cell.lossy) == 1
    assert answer_text(found, "terminal").count("additive_0p1") == len(exact.cells)


def test_times_as_predicted_have_no_error(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.outcome == "within"
    assert (found.wall.median, found.wall.worst) == pytest.approx((0, 0), abs=1e-9)
    for cell in found.cells:
        assert cell.tokens_per_round.predicted == pytest.approx(cell.tokens_per_round.measured)
        assert cell.same_text == cell.same_rounds == cell.documents
        assert cell.decode_ms.predicted == pytest.approx(cell.decode_ms.measured)
        assert cell.measured_round_ms.draft == pytest.approx(cell.predicted_round_ms.draft)
        assert cell.measured_round_ms.verify == pytest.approx(cell.predicted_round_ms.verify)
        assert cell.measured_round_ms.other == pytest.approx(0, abs=1e-9)
    assert sum(cell.documents for cell in found.cells) == found.documents == found.plain_same_text


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_the_error_is_predicted_over_measured(tmp_path: Path, factor: float) -> None:
    found = compared(tmp_path, factor)
    for cell in found.cells:
        assert cell.error.value == pytest.approx(1 / factor - 1)
        assert cell.error.low < cell.error.value < cell.error.high
    assert found.outcome == "outside"
    assert (found.wall.median, found.wall.worst) == pytest.approx((abs(1 / factor - 1),) * 2)
    with pytest.raises(OutsideTolerance, match=r"median error 2[05]\.0% \[.*\] \(95% interval\); tolerance 10%"):
        require_within(found, undecided_fails=False)
    require_within(compared(tmp_path / "wider", factor, tolerance=0.5), undecided_fails=True)


def test_step_times_with_an_error_widen_the_interval(tmp_path: Path) -> None:
    """Decodings show no noise: all of the interval is that of the step times, of which the prediction is made."""
    (cell,) = {cell for cell in compared(tmp_path).cells if cell.domain == "code"}
    assert cell.timing_error > 0
    assert math.log(1 + cell.error.high) == pytest.approx(quantile(1 - TAIL, math.inf) * cell.timing_error)


def test_what_was_not_predicted_has_no_outcome(tmp_path: Path) -> None:
    run_ = synthetic(tmp_path)
    measured = timed(run_, 1.0)
    (times,) = run_.path.glob("latency.*")
    times.unlink()
    found = build_validation(run_, measured, 9.0, kept=True)
    assert (found.outcome, found.wall) == (None, None)
    with pytest.raises(StepsNotTimed, match="nothing to judge: no steps were timed"):
        require_within(found, undecided_fails=False)


def test_a_clock_that_others_disturbed_does_not_decide(tmp_path: Path) -> None:
    """One repeat of the drafted way takes three times as long: far off, and repeats differ."""
    run_ = synthetic(tmp_path)
    measured = timed(run_, 1.0)
    (way,) = measured.drafted
    seconds = way.wall_s.copy()
    seconds[0] *= 3
    busy = dataclasses.replace(measured, drafted=(dataclasses.replace(way, wall_s=seconds),))
    found = build_validation(run_, busy, 0.1, kept=True)
    assert found.wall.median > 0.5
    assert found.outcome == "too_noisy"
    require_within(found, undecided_fails=False)
    with pytest.raises(CheckUndecided, match="too noisy to tell: median error") as caught:
        require_within(found, undecided_fails=True)
    assert "idle machine" in caught.value.hint


def test_plain_decoding_in_turn_with_a_draft_is_what_it_is_compared_with(tmp_path: Path) -> None:
    measured = timed(synthetic(tmp_path), 1.0)
    (way,) = measured.drafted
    slower = dataclasses.replace(way, wall_s=2 * way.wall_s, plain_s=2 * measured.plain.wall_s)
    found = build_validation(synthetic(tmp_path / "again"), dataclasses.replace(measured, drafted=(slower,)), 0.1, kept=True)
    assert found.wall.median == pytest.approx(0.0, abs=1e-9)


def test_other_rounds_and_texts_are_counted(tmp_path: Path) -> None:
    whole = synthetic(tmp_path)
    measured = timed(whole, 1.0)
    (way,) = measured.drafted
    accepted, same = way.accepted.copy(), way.same_text.copy()
    accepted[0, -1] += 1
    same[:2] = False
    odd = dataclasses.replace(measured, drafted=(dataclasses.replace(way, accepted=accepted, same_text=same),))
    found = build_validation(whole, odd, 0.1, kept=False)
    assert sum(cell.documents - (cell.same_rounds or 0) for cell in found.cells) == 1
    assert sum(cell.documents - (cell.same_text or 0) for cell in found.cells) == 2
    assert found.run is None


def test_a_run_that_nobody_keeps_is_removed(tmp_path: Path) -> None:
    with run_directory(tmp_path / "kept") as kept, run_directory(None) as lost:
        kept.mkdir()
        lost.mkdir()
    assert kept.exists()
    assert not lost.parent.exists()


def tiny_profile(folder: Path, tiny: Path, **changes: Any) -> Path:
    """The drafts that pipelines are tested with, and prompt lookup, on two domains."""
    from tests.runs import profile_file

    drafts = {
        "close": {"kind": "model", "model": str(tiny / "draft")},
        "skip": {"kind": "layer_skip", "drop_layers": [2]},
        "ngram": {"kind": "prompt_lookup"},
    }
    costs = {"context": 16, "repeats": 3, "budget": 5}
    return profile_file(folder, tiny, **({"drafts": drafts, "costs": costs} | changes))


def validated(
    path: Path, out: Path, documents: int = 3, gammas: list[int] | None = None, rules: tuple[str, ...] = ()
) -> Validation:
    from alphaprof.commands.validate.measure import validate
    from alphaprof.config.load import load_profile
    from tests.runs import Silent

    run_, measured = validate(load_profile(path, None, documents), out, gammas, 2, Silent(), rules=rules)
    return build_validation(run_, measured, 0.1, kept=True)


def witnessed(path: Path, draft: str, rule: str, domain: str) -> tuple[float, float, int]:
    """Tokens per round, excess regret and texts that are the target's own, from rounds and whole forward passes."""
    import torch

    from alphaprof.config.load import load_profile
    from alphaprof.profiling.decoding.speculative import DecodingSetup, decode
    from alphaprof.profiling.profile import load
    from alphaprof.rules import parse_rule
    from tests.runs import Silent

    loaded = load(load_profile(path, None, 3), Silent())
    (drafting,) = [DecodingSetup(item, parse_rule(rule), GAMMA) for item in loaded.drafts if item.name == draft]
    regret, tokens, emitted, rounds, same = [0.0, 0.0], [0, 0], 0, 0, 0
    for document in [item for item in loaded.documents if item.domain == domain]:
        texts = [decode(loaded, document, way) for way in (None, drafting)]
        for index, text in enumerate(texts):
            ids = torch.from_numpy(np.concatenate([document.prompt, text.ids]).astype(np.int64))[None]
            with torch.inference_mode():
                logits = loaded.target.network(input_ids=ids).logits[0, len(document.prompt) - 1 : -1]
            logs = torch.log_softmax(logits.double(), 1).numpy()
            regret[index] += float((logs.max(1) - logs[np.arange(len(text.ids)), text.ids]).sum())
            tokens[index] += len(text.ids)
        emitted, rounds = emitted + len(texts[1].ids) - 1, rounds + len(texts[1].drafted)
        same += np.array_equal(texts[0].ids, texts[1].ids)
    return emitted / rounds, regret[1] / tokens[1] - regret[0] / tokens[0], same


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
def test_what_lossy_rules_gain_and_give_up_is_what_rounds_and_forward_passes_say(tmp_path: Path, tiny: Path) -> None:
    """Additive with epsilon 0 keeps the top token alone, and with epsilon 1 every draft."""
    path = tiny_profile(tmp_path, tiny)
    found = validated(path, tmp_path / "run", 3, [GAMMA], ("additive_0p3", "additive_0", "additive_1"))
    cells = {(cell.draft, cell.rule, cell.domain): cell for cell in found.cells}
    assert {rule for _, rule, _ in cells} == {"strict", "additive_0p3", "additive_0", "additive_1"}
    for domain in ("long", "short"):
        for draft in ("close", "skip", "ngram"):
            strict, narrow = cells[draft, "strict", domain], cells[draft, "additive_0", domain]
            assert narrow.tokens_per_round.measured == strict.tokens_per_round.measured
            assert (narrow.same_text, strict.excess_regret) == (3, None)
            assert narrow.excess_regret.value == pytest.approx(0, abs=1e-6)
        lossy, wide = cells["close", "additive_0p3", domain], cells["close", "additive_1", domain]
        expected = witnessed(path, "close", "additive_0p3", domain)
        assert (lossy.tokens_per_round.measured, lossy.excess_regret.value, lossy.same_text) == pytest.approx(
            expected, abs=1e-5
        )
        assert lossy.excess_regret.value > 0
        assert (wide.tokens_per_round.measured or 0) > GAMMA + 1 - 0.5  # the last round of a text may be cut


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
def test_each_kind_of_text_is_decoded_by_the_rules_that_belong_to_it(tmp_path: Path, tiny: Path) -> None:
    given = {"kind": "given", "column": "response", "on_policy": True, "max_new_tokens": 8}
    sampling = {"kind": "sampled", "temperature": 1.2, "top_p": 0.95, "seed": 3, "max_new_tokens": 24}
    data = [
        {"domain": "long", "path": "long.jsonl", "prompt": "{text}", "continuation": sampling},
        {"domain": "short", "path": "short.jsonl", "prompt": "{text}"},
        {"domain": "logged", "path": "short.jsonl", "prompt": "{text}", "continuation": given},
    ]
    path = tiny_profile(tmp_path, tiny, data=data)
    found = validated(path, tmp_path / "run", 3, [GAMMA], ("top_m_3", "lossless"))
    rules = {(cell.domain, cell.rule) for cell in found.cells}
    assert rules == {
        ("long", "one_hot"),
        ("long", "lossless"),
        ("long", "top_m_3"),
        ("short", "strict"),
        ("short", "top_m_3"),
    }
    assert (found.documents, found.foreign) == (6, 3)
    (lossy,) = [cell for cell in found.cells if (cell.draft, cell.domain, cell.rule) == ("close", "long", "top_m_3")]
    assert lossy.same_text is None
    assert lossy.excess_regret.value == pytest.approx(witnessed(path, "close", "top_m_3", "long")[1], abs=1e-5)


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "documents", "gammas"), [("greedy", 2, [2]), *slow([("sampled", 3, [1, 2])])])
def test_texts_and_rounds_of_tiny_models_are_those_of_the_run(
    tmp_path: Path, tiny: Path, kind: str, documents: int, gammas: list[int]
) -> None:
    path = tiny_profile(tmp_path, tiny, continuation={"kind": kind, "max_new_tokens": 24})
    found = validated(path, tmp_path / "run", documents, gammas)
    assert found.exact
    assert found.documents == found.plain_same_text == 2 * documents
    assert {(cell.draft, cell.domain, cell.gamma) for cell in found.cells} == {
        (draft, domain, gamma) for draft in ("close", "skip", "ngram") for domain in ("long", "short") for gamma in gammas
    }
    for cell in found.cells:
        assert cell.rule == ("strict" if kind == "greedy" else "one_hot")
        assert cell.same_text == cell.same_rounds == cell.documents == documents
        assert cell.tokens_per_round.measured == pytest.approx(cell.tokens_per_round.predicted)
        assert cell.error is not None
        assert cell.wall_speedup > 0
        assert cell.measured_round_ms is not None
    assert max(cell.tokens_per_round.measured or 0 for cell in found.cells) > 1.2
    assert Run.open(tmp_path / "run").manifest.status == "complete"
    json.loads(answer_text(found, "json"), parse_constant=pytest.fail)


@pytest.mark.models
def test_lossless_texts_are_not_held_against_those_of_the_run(tmp_path: Path, tiny: Path) -> None:
    """At a gamma that the profile lacks, which is added."""
    changes = {"continuation": {"kind": "sampled", "max_new_tokens": 16}, "decision": {"rule": "lossless"}}
    found = validated(tiny_profile(tmp_path, tiny, **changes), tmp_path / "run", 2, [3])
    assert {(cell.rule, cell.same_text) for cell in found.cells if cell.draft == "close"} == {("lossless", None)}
    assert {cell.gamma for cell in found.cells} == {3}
    assert Run.open(tmp_path / "run").gammas == [1, 2, 3, 4]


@pytest.mark.models
def test_texts_of_one_token_are_left_out(tmp_path: Path, tiny: Path) -> None:
    path = tiny_profile(tmp_path, tiny, continuation={"kind": "greedy", "max_new_tokens": 1})
    with pytest.raises(DataEmpty, match="no text has a second token"):
        validated(path, tmp_path / "short")


@pytest.mark.models
def test_running_out_of_memory_while_decoding_is_said_so(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alphaprof.profiling.decoding.speculative import Speculation

    def full(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Speculation, "decode", full)
    with pytest.raises(OutOfMemory, match="do not fit into memory"):
        validated(tiny_profile(tmp_path, tiny), tmp_path / "run", 1, [1])


@pytest.mark.models
def test_one_repeat_is_too_noisy_to_tell(tmp_path: Path, tiny: Path, console_script: Runner) -> None:
    line = ["validate", tiny_profile(tmp_path, tiny), "--documents", 1, "--gamma", 1, "--repeats", 1, "--format", "json"]
    ended, output, errors = console_script(*line, "--undecided", "fail")
    content = json.loads(output, parse_constant=pytest.fail)
    assert ended == 11
    assert (content["outcome"], content["run"], content["wall"]["high"]) == ("too_noisy", None, "inf")
    assert "error: too noisy to tell: median error" in errors


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.5, 13)])
def test_the_command_ends_with_what_the_interval_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console_script: Runner, factor: float, code: int
) -> None:
    from alphaprof.commands.validate import engine as profiling

    run_ = synthetic(tmp_path)
    monkeypatch.setattr(profiling, "validate_by", lambda *_: (run_, timed(run_, factor)))
    folder = profile(tmp_path / "place")
    ended, output, errors = console_script("validate", str(folder / "profile.yaml"))
    assert ended == code
    assert output.startswith("OUTSIDE: " if code else "WITHIN: ")
    assert ("error: the predicted speedup is outside the tolerance: median error" in errors) is (code == 13)


@pytest.mark.models
def test_steps_of_a_run_are_timed_at_the_contexts_of_its_documents(tmp_path: Path, tiny: Path) -> None:
    """The draft `brief` ends at 24 tokens, which the longest documents exceed."""
    drafts = {
        "close": {"kind": "model", "model": str(tiny / "draft")},
        "brief": {"kind": "model", "model": str(tiny / "short")},
    }
    path = tiny_profile(tmp_path, tiny, drafts=drafts, costs={"context": 200, "repeats": 3, "budget": 10})
    found = validated(path, tmp_path / "run", 2, [1])
    run_ = Run.open(tmp_path / "run")
    documents = run_.documents()
    contexts = documents["prompt_tokens"].to_numpy() + documents["continuation_tokens"].to_numpy() / 2
    assert found.contexts == (round(contexts.min()), round(contexts.max()))
    assert found.contexts[0] <= found.mean_context <= found.contexts[1]
    assert run_.manifest.config["costs"]["context"] == list(found.contexts)
    latency = run_.latency().to_pylist()
    assert {row["context"] for row in latency if row["model"] == "close" and row["step"] == "draft"} == set(found.contexts)
    assert max(row["context"] for row in latency if row["model"] == "brief") < 24 < found.contexts[1]
