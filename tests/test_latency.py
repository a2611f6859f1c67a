"""Step times: the timed step is the right one, and leaves the cache as it found it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphaprof.config import CostOptions
from alphaprof.profiling import lookup
from alphaprof.profiling.latency import Stepper, measure, timed_repeats
from alphaprof.profiling.lookup import PromptLookup
from alphaprof.profiling.models import Model
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


def test_every_length_and_draft_is_timed_and_a_short_context_is_respected() -> None:
    target = llama()
    short = noisy(target, 0.1)
    short.config.max_position_embeddings = 24
    drafts = [Model("a", noisy(target, 0.1), "model", "a"), Model("b", short, "model", "b")]
    costs = CostOptions(context=40, repeats=3)
    ticks: list[int] = []
    table = measure(Model("target", target, "model", "t"), drafts, TEXT, [1, 3], costs, lambda: ticks.append(1))
    rows = table.to_pylist()
    assert [(row["model"], row["step"], row["tokens"], row["context"]) for row in rows] == [
        ("target", "decode", 1, 40),
        ("target", "verify", 2, 40),
        ("target", "verify", 3, 40),
        ("target", "verify", 4, 40),
        ("a", "draft", 1, 40),
        ("b", "draft", 1, 20),
    ]
    assert len(ticks) == timed_repeats(costs)
    assert all(row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] and row["repeats"] == 3 for row in rows)


def test_ids_that_a_draft_does_not_have_do_not_stop_the_clock() -> None:
    small = Model("small", llama(vocabulary=250, pad_token_id=249, eos_token_id=248), "model", "s")
    text = np.full(20, 259, dtype=np.int32)
    table = measure(
        Model("target", llama(), "model", "t"), [small], text, [1], CostOptions(context=8, repeats=3), lambda: None
    )
    assert table["model"].to_pylist() == ["target", "target", "small"]


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
    costs = CostOptions(context=24, repeats=3)
    table = measure(Model("target", llama(), "model", "t"), drafts, TEXT, [2], costs, lambda: None)
    rows = [row for row in table.to_pylist() if row["model"] != "target"]
    assert [(row["model"], row["step"], row["tokens"], row["context"]) for row in rows] == [
        ("first", "lookup", 1, 24),
        ("second", "lookup", 1, 24),
    ]
    assert all(row["repeats"] == 3 and row["median_ms"] >= 0 for row in rows)
    assert searched == [np.resize(TEXT, 24).tolist()] * (2 * timed_repeats(costs))
