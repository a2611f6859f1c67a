"""Step times: the timed step is the right one, and leaves the cache as it found it."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from alphaprof.config.options import MeasuredCosts
from alphaprof.profiling.models.kinds import DraftModel, PromptLookup
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.private import CACHE
from alphaprof.profiling.timing import latency, steppers
from alphaprof.profiling.timing.latency import WARM_UP, BudgetSpent, Subjects, measure
from alphaprof.profiling.timing.steppers import NotTimed, Stepper, stepper
from tests.loops import each
from tests.tiny import llama, noisy

pytestmark = pytest.mark.models
TEXT = np.arange(10, dtype=np.int32)


def watched(network: Any, patch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Texts and tokens that each pass of a network is given from now on, and the tokens in its cache by then."""
    seen, forward = list[tuple[int, int, int]](), network.forward

    def spy(**arguments: Any) -> Any:
        seen.append((*arguments["input_ids"].shape, arguments[CACHE].get_seq_length()))
        return forward(**arguments)

    patch.setattr(network, "forward", spy)
    return seen


def test_a_step_feeds_its_tokens_on_top_of_the_context_and_takes_them_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    network = llama()
    seen = watched(network, monkeypatch)
    with torch.inference_mode():
        found = Stepper(DraftModel("target", network, "model", "t"), np.resize(TEXT, 32))
        for tokens in (1, 5, 2, 1):
            assert found.step(tokens) > 0
    assert seen == [(1, 32, 0), (1, 1, 32), (1, 5, 32), (1, 2, 32), (1, 1, 32)]
    assert found.cache.get_seq_length() == 32


def steps(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Which steps were timed."""
    return [tuple(row[name] for name in ("model", "step", "tokens", "batch", "context")) for row in rows]


def ignored(share: float) -> None:
    """Progress that nobody watches."""


def test_every_length_and_draft_is_timed_and_a_short_context_is_respected() -> None:
    target = llama()
    short = noisy(target, 0.1)
    short.config.max_position_embeddings = 24
    drafts = [DraftModel("a", noisy(target, 0.1), "model", "a"), DraftModel("b", short, "model", "b")]
    costs = MeasuredCosts(context=40, repeats=5)
    ticks: list[float] = []
    timed = measure(Subjects(DraftModel("target", target, "model", "t"), drafts, TEXT, 3), costs, ticks.append)
    rows = timed.table.to_pylist()
    assert timed.left_out == ()
    assert steps(rows) == [
        ("target", "decode", 1, 1, 40),
        ("target", "verify", 2, 1, 40),
        ("target", "verify", 3, 1, 40),
        ("target", "verify", 4, 1, 40),
        ("target", "bookkeeping", 1, 1, 40),
        ("a", "draft", 1, 1, 40),
        ("a", "draft", 2, 1, 40),
        ("a", "bookkeeping", 1, 1, 40),
        ("b", "draft", 1, 1, 20),
        ("b", "draft", 2, 1, 20),
        ("b", "bookkeeping", 1, 1, 20),
        ("target", "prefill", 16, 1, 0),
        ("target", "prefill", 40, 1, 0),
        ("a", "prefill", 16, 1, 0),
        ("a", "prefill", 40, 1, 0),
        ("b", "prefill", 16, 1, 0),
        ("b", "prefill", 23, 1, 0),
    ]
    assert sum(ticks) == pytest.approx(1)
    assert min(ticks) >= 0
    assert all(row["p10_ms"] <= row["p90_ms"] for row in rows)
    assert [row["repeats"] for row in rows[:11]] == [5] * 11
    assert {row["repeats"] for row in rows[11:]} == {5}
    assert all(len(row["rounds_ms"]) == row["repeats"] for row in rows)


def test_batches_and_contexts_are_timed_crosswise_with_as_many_texts_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    logits = Stepper.logits

    def spy(self: Stepper, tokens: int) -> torch.Tensor:
        seen.add((self.input_ids.shape[0], self.cache.get_seq_length(), tokens))
        return logits(self, tokens)

    monkeypatch.setattr(Stepper, "logits", spy)
    costs = MeasuredCosts(context=[12, 8], concurrency=[3, 1], repeats=3)
    table = measure(Subjects(DraftModel("target", llama(), "model", "t"), [], TEXT, 1), costs, ignored).table
    cells = [(1, 8), (1, 12), (3, 8), (3, 12)]
    decodes = [row for row in steps(table.to_pylist()) if row[1] == "decode"]
    assert decodes == [("target", "decode", 1, batch, context) for batch, context in cells]
    assert seen == {(batch, context, tokens) for batch, context in cells for tokens in (1, 2)}


class Clockwork:
    """A clock that steps move on: `step_s` seconds a token, with noise of `noise` by step. The thread that runs them waits
    for a processor for `waiting` of the time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float, noise: float = 0.0, waiting: float = 0.0) -> None:
        self.now, self.order = 0.0, list[tuple[str, int]]()
        self.rng = np.random.default_rng(0)
        monkeypatch.setattr(latency.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Subjects, "waited_s", lambda _: waiting * self.now)

        def step(timed: Stepper, tokens: int) -> float:
            taken = step_s * tokens * float(np.exp(noise * self.rng.standard_normal()))
            self.now += taken
            self.order.append((timed.model.name, tokens))
            timed.crop_s = tokens / 1e3
            return taken

        def read(model: Model, text: object) -> float:
            self.now += step_s
            self.order.append((model.name, 0))
            return step_s

        monkeypatch.setattr(Stepper, "step", step)
        monkeypatch.setattr(steppers, "prefill", read)


def subjects_of_two_tokens() -> Subjects:
    """A target with steps of one and two tokens, and a draft: rounds of six tokens, and of eight with decode thrice."""
    return Subjects(DraftModel("target", llama(), "model", "t"), [DraftModel("a", llama(), "model", "a")], TEXT, 1)


def timed_by_clockwork(
    monkeypatch: pytest.MonkeyPatch, costs: MeasuredCosts, step_s: float, noise: float = 0.0
) -> tuple[list[dict[str, Any]], list[str], Clockwork]:
    """Rows, what was said, and the clock."""
    clock, said = Clockwork(monkeypatch, step_s, noise), list[str]()
    ticks: list[float] = []
    rows = measure(subjects_of_two_tokens(), costs, ticks.append, said.append).table.to_pylist()
    assert sum(ticks) == pytest.approx(1)
    assert min(ticks) >= 0
    return rows, said, clock


@pytest.mark.parametrize(
    ("step_s", "noise", "costs", "rounds", "why"),
    [
        (0.001, 0.0, MeasuredCosts(context=8), 6, "%"),  # sure at once
        (0.01, 0.3, MeasuredCosts(context=8, repeats=9), 9, "(repeats reached)"),
        (0.1, 0.3, MeasuredCosts(context=8, budget=8), 7, "(budget spent)"),  # 0.8 s a round, 3 of them to warm up
        (1.0, 0.3, MeasuredCosts(context=8, budget=40), 3, "(budget spent)"),  # 8 s a round: one to warm up
    ],
)
def test_rounds_end_when_they_are_sure_or_the_budget_is_spent(
    monkeypatch: pytest.MonkeyPatch, step_s: float, noise: float, costs: MeasuredCosts, rounds: int, why: str
) -> None:
    rows, said, _ = timed_by_clockwork(monkeypatch, costs, step_s, noise)
    assert {row["repeats"] for row in rows if row["step"] != "prefill"} == {rounds}
    assert said[-1].startswith(f"1 sequence of 8 tokens: {rounds} rounds in ")
    assert said[-1].endswith(why)


@each("step_s", [0.02, 0.9, 11.0, 200.0])
@each("budget", [0, 5, 60])
def test_no_step_begins_after_the_budget(step_s: float, budget: float) -> None:
    """The longest step takes two tokens' time. What has no three rounds by then has no time, and says so."""
    costs = MeasuredCosts(context=[8, 12], concurrency=[1, 2], budget=budget)
    ticks: list[float] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(BudgetSpent):
        clock = Clockwork(patch, step_s, 0.0)
        timed = measure(subjects_of_two_tokens(), costs, ticks.append)
        cells = {(row["batch"], row["context"]) for row in timed.table.to_pylist() if row["step"] != "prefill"}
        assert len(cells) + sum("sequence" in reason for reason in timed.late) == 4
        assert min(row["repeats"] for row in timed.table.to_pylist() if row["step"] != "prefill") >= 3
    assert clock.now < budget + 2 * step_s or clock.now == 0
    assert sum(ticks) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("budget", "cells", "prefills", "late"),
    [
        (10_000, [(1, 8, 100), (1, 12, 100), (2, 8, 100), (2, 12, 100)], True, 0),
        (120, [(1, 8, 8)], True, 3),  # the first cell gets most of it
        (40, [(1, 8, 3)], True, 3),
        (37, [(1, 8, 3)], False, 4),
    ],
)
def test_a_short_budget_gives_up_rounds_then_larger_batches_then_longer_contexts_and_says_so(
    monkeypatch: pytest.MonkeyPatch, budget: float, cells: list[tuple[int, int, int]], prefills: bool, late: int
) -> None:
    """Rounds of 8 s. `cells`: batch size, context and rounds; `late`: what there was no time for, prefills among them."""
    Clockwork(monkeypatch, 1.0, 0.3)
    costs = MeasuredCosts(context=[8, 12], concurrency=[1, 2], budget=budget)
    timed = measure(subjects_of_two_tokens(), costs, ignored)
    rows = timed.table.to_pylist()
    assert [(row["batch"], row["context"], row["repeats"]) for row in rows if row["step"] == "decode"] == cells
    assert any(row["step"] == "prefill" for row in rows) == prefills
    assert len(timed.late) == late
    assert all("costs.budget" in reason for reason in timed.late)


def test_the_batch_size_that_decides_is_timed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    Clockwork(monkeypatch, 1.0, 0.3)
    costs = MeasuredCosts(context=8, concurrency=[1, 4, 16], budget=40)
    timed = measure(subjects_of_two_tokens(), costs, ignored, first=4)
    assert {row["batch"] for row in timed.table.to_pylist() if row["step"] == "decode"} == {4}
    assert [reason.split(":")[0] for reason in timed.late] == ["1 sequence of 8 tokens", "16 sequences of 8 tokens"]


@each("waiting", [0.0, 0.5, math.nan])
def test_the_share_of_the_time_that_timing_waits_for_a_processor(waiting: float) -> None:
    """None where the system does not count it."""
    with pytest.MonkeyPatch.context() as patch:
        Clockwork(patch, 0.01, waiting=waiting)
        found = measure(subjects_of_two_tokens(), MeasuredCosts(context=8), ignored).waiting
    assert found == (None if math.isnan(waiting) else pytest.approx(waiting))


@pytest.mark.parametrize("forgotten", [3, 0])
def test_a_cache_that_a_step_changes_is_refused(monkeypatch: pytest.MonkeyPatch, forgotten: int) -> None:
    """One that stays longer than it was, and one as long as it was that holds something else."""
    crop = DynamicCache.crop

    def changed(self: DynamicCache, tokens_to_remove: int) -> None:
        crop(self, tokens_to_remove + forgotten)
        for layer in self.layers:
            layer.values[:, :, -1] += 0.1

    monkeypatch.setattr(DynamicCache, "crop", changed)
    model = DraftModel("target", llama(), "model", "t")
    with torch.inference_mode(), pytest.raises(NotTimed, match=r"target \(.*\) cannot undo steps"):
        stepper(model, np.resize(TEXT, 32), 1, 5)


def test_a_batch_that_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Stepper.logits

    def full(self: Stepper, tokens: int) -> torch.Tensor:
        """The longest step of the larger batch finds no room."""
        if self.batch * tokens > 4:
            raise torch.OutOfMemoryError("out of memory")
        return logits(self, tokens)

    monkeypatch.setattr(Stepper, "logits", full)
    costs = MeasuredCosts(context=8, concurrency=[1, 4], repeats=3)
    subjects = Subjects(DraftModel("target", llama(), "model", "t"), [], TEXT, 1)
    timed = measure(subjects, costs, ignored)
    assert timed.left_out == ("4 sequences of 8 tokens do not fit into memory",)
    assert {row["batch"] for row in timed.table.to_pylist()} == {1}
    with pytest.raises(NotTimed, match="4 sequences of 8 tokens do not fit"):
        measure(subjects, MeasuredCosts(context=8, concurrency=4, repeats=3), ignored)
    longer = Subjects(DraftModel("target", llama(), "model", "t"), [], TEXT, 5)
    with pytest.raises(torch.OutOfMemoryError):
        measure(longer, MeasuredCosts(context=8, repeats=3), ignored)


def test_a_batch_is_filled_by_reading_its_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its texts are equal. Reading each would take as much memory as the longest prompt times the batch."""
    network = llama()
    seen = watched(network, monkeypatch)
    with torch.inference_mode():
        found = Stepper(DraftModel("target", network, "model", "t"), np.resize(TEXT, 32), 3)
        assert seen == [(1, 32, 0)]
        assert found.cache.get_seq_length() == 32
        for layer in found.cache.layers:
            assert layer.keys.shape[0] == layer.values.shape[0] == 3
            assert layer.keys.is_contiguous()  # each text has keys of its own in memory, as those of a server have
            assert torch.equal(layer.keys[0], layer.keys[2])
        found.step(2)
    assert seen[1:] == [(3, 2, 32)]


def test_a_search_of_prompt_lookup_is_timed_on_as_many_tokens_as_the_target_has_in_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[list[int]] = []
    search = PromptLookup.search

    def spy(self: PromptLookup, tokens: list[int]) -> float:
        searched.append(tokens)
        return search(self, tokens)

    monkeypatch.setattr(PromptLookup, "search", spy)
    drafts = [PromptLookup(name, 3, (256,), 260, "float32") for name in ("first", "second")]
    costs = MeasuredCosts(context=24, repeats=3, concurrency=[1, 2])
    table = measure(Subjects(DraftModel("target", llama(), "model", "t"), drafts, TEXT, 2), costs, ignored).table
    rows = [row for row in table.to_pylist() if row["model"] != "target"]
    assert steps(rows) == [(name, "lookup", 1, batch, 24) for batch in (1, 2) for name in ("first", "second")]
    assert all(row["repeats"] == 3 and row["median_ms"] >= 0 for row in rows)
    # Two drafts, one search for a batch of one and two for a batch of two.
    assert searched == [np.resize(TEXT, 24).tolist()] * (2 * 3 * (WARM_UP + 3))
