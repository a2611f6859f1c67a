"""Step times: the timed step is the right one, and leaves the cache as it found it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from alphaprof.options import MeasuredCosts
from alphaprof.profiling import lookup, steppers
from alphaprof.profiling.latency import WARM_UP, Subjects, measure, timed_repeats
from alphaprof.profiling.lookup import PromptLookup
from alphaprof.profiling.models import Model
from alphaprof.profiling.steppers import GraphStepper, NotTimed, Stepper, common_mode
from tests.tiny import llama, noisy

pytestmark = pytest.mark.models
TEXT = np.arange(10, dtype=np.int32)


def test_a_step_feeds_its_tokens_on_top_of_the_context_and_takes_them_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        stepper = Stepper(Model("target", llama(), "model", "t"), np.resize(TEXT, 32))
        seen = []
        forward = stepper.model.network.forward

        def spy(**arguments: object) -> object:
            seen.append((arguments["input_ids"].shape[1], arguments["past_key_values"].get_seq_length()))
            return forward(**arguments)

        monkeypatch.setattr(stepper.model.network, "forward", spy)
        for tokens in (1, 5, 2, 1):
            assert stepper.step(tokens) > 0
    assert seen == [(1, 32), (5, 32), (2, 32), (1, 32)]
    assert stepper.cache.get_seq_length() == 32


def steps(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Which steps were timed."""
    return [tuple(row[name] for name in ("model", "step", "tokens", "batch", "context")) for row in rows]


def test_every_length_and_draft_is_timed_and_a_short_context_is_respected() -> None:
    target = llama()
    short = noisy(target, 0.1)
    short.config.max_position_embeddings = 24
    drafts = [Model("a", noisy(target, 0.1), "model", "a"), Model("b", short, "model", "b")]
    costs = MeasuredCosts(context=40, repeats=5)
    ticks: list[int] = []
    timed = measure(Subjects(Model("target", target, "model", "t"), drafts, TEXT, 3), costs, lambda: ticks.append(1))
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
    assert len(ticks) == timed_repeats(costs)
    assert all(row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] and row["mode"] == "eager" for row in rows)
    assert [row["repeats"] for row in rows] == [5] * 11 + [3] * 6


def test_batches_and_contexts_are_timed_crosswise_with_as_many_texts_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    choose = Stepper._choose

    def spy(self: Stepper, tokens: int) -> None:
        seen.add((self.next.shape[0], self.length(), tokens))
        choose(self, tokens)

    monkeypatch.setattr(Stepper, "_choose", spy)
    costs = MeasuredCosts(context=[12, 8], concurrency=[3, 1], repeats=3)
    table = measure(Subjects(Model("target", llama(), "model", "t"), [], TEXT, 1), costs, lambda: None).table
    cells = [(1, 8), (1, 12), (3, 8), (3, 12)]
    decodes = [row for row in steps(table.to_pylist()) if row[1] == "decode"]
    assert decodes == [("target", "decode", 1, batch, context) for batch, context in cells]
    assert seen == {(batch, context, tokens) for batch, context in cells for tokens in (1, 2)}


def test_a_batch_that_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Stepper._choose

    def full(self: Stepper, tokens: int) -> None:
        """The longest step of the larger batch finds no room."""
        if self.batch * tokens > 4:
            raise torch.OutOfMemoryError("out of memory")
        choose(self, tokens)

    monkeypatch.setattr(Stepper, "_choose", full)
    costs = MeasuredCosts(context=8, concurrency=[1, 4], repeats=3)
    subjects = Subjects(Model("target", llama(), "model", "t"), [], TEXT, 1)
    timed = measure(subjects, costs, lambda: None)
    assert timed.left_out == ("4 sequences of 8 tokens do not fit into memory",)
    assert {row["batch"] for row in timed.table.to_pylist()} == {1}
    with pytest.raises(NotTimed, match="4 sequences of 8 tokens do not fit"):
        measure(subjects, MeasuredCosts(context=8, concurrency=4, repeats=3), lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        measure(dataclasses.replace(subjects, gamma=5), MeasuredCosts(context=8, repeats=3), lambda: None)


def test_a_static_cache_chooses_what_a_growing_one_does_and_is_cut_back_alike() -> None:
    """What CUDA graphs record: the same logits, step after step."""
    model = Model("target", llama(), "model", "t")
    text = np.resize(TEXT, 32)
    with torch.inference_mode():
        for tokens in (1, 5, 2):
            logits = []
            for kind in (Stepper, GraphStepper):
                found = kind(model, text, 2)
                found.step(3)
                output = model.network(input_ids=found.next[:, :tokens], past_key_values=found.cache, use_cache=True)
                logits.append(output.logits)
                found._take_back(tokens)
                assert found.length() == 32
            assert torch.allclose(*logits, atol=1e-5)


def test_all_models_are_run_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU eagerly, whatever is asked for; on a GPU as graphs where every model can, and eagerly where one cannot."""
    target, draft = (Model(name, llama(), "model", name) for name in ("target", "draft"))
    assert common_mode([target, draft], TEXT, "auto") == "eager"
    monkeypatch.setattr(Model, "device", property(lambda self: torch.device("cuda")))
    refused: list[str] = []

    def tried(self: GraphStepper, model: Model, text: object, batch: int = 1) -> None:
        if model.name in refused:
            raise NotTimed("layers with a window of their own")

    monkeypatch.setattr(GraphStepper, "__init__", tried)
    monkeypatch.setattr(steppers, "_tried", lambda found, longest: found)
    assert common_mode([target, draft], TEXT, "auto") == "cuda_graph"
    assert common_mode([target, draft], TEXT, "eager") == "eager"
    refused.append("draft")
    assert common_mode([target, draft], TEXT, "auto") == "eager"


def test_ids_that_a_draft_does_not_have_do_not_stop_the_clock() -> None:
    small = Model("small", llama(vocabulary=250, pad_token_id=249, eos_token_id=248), "model", "s")
    text = np.full(20, 259, dtype=np.int32)
    subjects = Subjects(Model("target", llama(), "model", "t"), [small], text, 1)
    table = measure(subjects, MeasuredCosts(context=8, repeats=3), lambda: None).table
    assert {row[:3] for row in steps(table.to_pylist())} >= {("small", "draft", 1), ("small", "draft", 2)}


def test_a_search_of_prompt_lookup_is_timed_on_as_many_tokens_as_the_target_has_in_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[list[int]] = []
    search = PromptLookup.search

    def spy(self: PromptLookup, tokens: list[int]) -> float:
        searched.append(tokens)
        return search(self, tokens)

    monkeypatch.setattr(lookup.PromptLookup, "search", spy)
    drafts = [PromptLookup(name, 3, (256,), 260, "float32") for name in ("first", "second")]
    costs = MeasuredCosts(context=24, repeats=3, concurrency=[1, 2])
    table = measure(Subjects(Model("target", llama(), "model", "t"), drafts, TEXT, 2), costs, lambda: None).table
    rows = [row for row in table.to_pylist() if row["model"] != "target"]
    assert steps(rows) == [(name, "lookup", 1, batch, 24) for batch in (1, 2) for name in ("first", "second")]
    assert all(row["repeats"] == 3 and row["median_ms"] >= 0 for row in rows)
    # Two drafts, one search for a batch of one and two for a batch of two.
    assert searched == [np.resize(TEXT, 24).tolist()] * (2 * 3 * (WARM_UP + 3))
