"""What a dry run says that a run takes of memory at most, against what it takes: every allocation of torch is counted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from alphaprof.commands.preflight import memory
from alphaprof.commands.preflight.facts import MemoryNeeds
from alphaprof.commands.preflight.memory import Cells, needed
from alphaprof.commands.preflight.trial import length
from alphaprof.costs.roofline import mlp_elements
from alphaprof.profiling.models.drafts import DraftModel, PromptLookup, layer_skip
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring.extras import Extras
from alphaprof.profiling.scoring.scorer import Scorer
from alphaprof.profiling.texts.continuations import generate
from alphaprof.profiling.texts.corpus import Document
from alphaprof.profiling.timing import latency
from alphaprof.rules import DEFAULT_RULES
from scripts.gpu.memory import most_allocated
from scripts.gpu.setting import documents, random_head, random_texts
from tests.tiny import llama

CPU = torch.device("cpu")
ALL = Extras.of([*DEFAULT_RULES, "multi_draft_2"], certificates=True)
HIDDEN = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "layers": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "layers": 2}
HEADS = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 8, "head_dim": 16}
WORDS = SMALL | {"vocabulary": 8000}
TOP_P = Processing(0.8, 0, 0.9)
# Shapes of the models; documents, tokens of a prompt and new ones; how they are sampled; what is measured beside.
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, int, int], Processing | None, Extras]] = {
    "hidden": (HIDDEN, (6, 60, 8), None, Extras()),
    "vocabulary": (WORDS, (8, 24, 40), None, Extras()),
    "batch": (SMALL, (64, 24, 8), None, Extras()),
    "long prompts": (SMALL, (6, 300, 4), None, Extras()),
    "heads": (HEADS, (4, 60, 24), None, ALL),
    "drawn": (WORDS, (32, 10, 6), Processing(0.8, 20), Extras()),
    "top_p": (WORDS, (32, 10, 6), TOP_P, Extras()),
    "whole": (WORDS, (16, 20, 8), None, ALL),
    "whole, cut": (WORDS, (16, 20, 8), TOP_P, ALL),
}


def model(name: str, seed: int, **shape: Any) -> Model:
    """A model whose text does not end before its last token."""
    network = llama(seed, initializer_range=0.02, eos_token_id=None, pad_token_id=0, **shape)
    network.generation_config = GenerationConfig(pad_token_id=0)
    return DraftModel(name, network.requires_grad_(False), "model", name)


def promised(scorer: Scorer, asked: list[Document], cells: Cells | None = None) -> MemoryNeeds:
    """What a dry run says of documents that make one batch."""
    return needed(scorer, asked, len(asked) * max(map(length, asked)), len(asked), cells)


@pytest.mark.models
@pytest.mark.parametrize("name", SHAPES)
def test_generation_and_scoring_take_what_was_promised_within_8_percent(name: str) -> None:
    shape, (count, prompt, new), settings, extras = SHAPES[name]
    target, draft = model("target", 0, **shape), model("draft", 1, **shape)
    asked = documents(count, (prompt - min(7, prompt - 1), prompt), new, settings)
    scorer = Scorer(
        target, [draft, PromptLookup("ngram", 2, (), target.vocabulary, "float32")], target.vocabulary, extras=extras
    )
    found = promised(scorer, asked)
    assert found.generation is not None
    assert found.scoring is not None
    scorer.score(random_texts(asked)[:1])
    assert 0.92 < found.generation / most_allocated(CPU, lambda: generate(target, asked, scorer.width)) < 1.08
    assert 0.92 < found.scoring / most_allocated(CPU, lambda: scorer.score(random_texts(asked))) < 1.08


@pytest.mark.models
def test_a_layer_skip_takes_the_states_that_it_goes_on_from_and_no_weights() -> None:
    target = model("target", 0, **HIDDEN | {"layers": 3})
    skip = layer_skip("skip", target, [1])
    asked = documents(6, (35, 40), 12)
    scorer = Scorer(target, [skip], target.vocabulary)
    assert scorer.drafts[0].rest is not None
    found = promised(scorer, asked)
    assert found.weights == sum(4 * item.numel() for item in target.network.parameters())
    scorer.score(random_texts(asked)[:1])
    assert 0.92 < (found.scoring or 0) / most_allocated(CPU, lambda: scorer.score(random_texts(asked))) < 1.08
    alone = promised(Scorer(target, [], target.vocabulary), asked)
    assert (found.scoring or 0) > (alone.scoring or 0)


WIDE = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
# Shapes of the target; of a head: logits and depths; documents, tokens of a prompt and new ones; how they are sampled.
HEAD_SHAPES: dict[str, tuple[dict[str, Any], tuple[int | None, int], tuple[int, int, int], Processing | None, Extras]] = {
    "features": (HIDDEN | {"intermediate_size": 32}, (None, 1), (6, 120, 8), None, Extras()),
    "depths": (WIDE, (None, 8), (6, 16, 100), None, Extras()),
    "scores": (HEADS, (None, 2), (2, 10, 400), None, Extras()),
    "some ids": (WORDS, (2000, 4), (8, 24, 40), None, Extras()),
    "drawn": (WORDS, (2000, 4), (8, 24, 40), Processing(0.8, 20), Extras.of(["lossless"], certificates=False)),
}


@pytest.mark.models
@pytest.mark.parametrize("name", HEAD_SHAPES)
def test_a_head_takes_what_was_promised_within_8_percent(name: str) -> None:
    shape, (logits, depths), (count, prompt, new), settings, extras = HEAD_SHAPES[name]
    target = model("target", 0, **shape)
    head = random_head(target, (1, 2), logits, depths)
    asked = documents(count, (prompt, prompt), new, settings)
    scorer = Scorer(target, [head], target.vocabulary, extras=extras)
    found = promised(scorer, asked)
    parameters = [*target.network.parameters(), *head.network.parameters()]
    assert found.weights == sum(4 * item.numel() for item in parameters)
    scorer.score(random_texts(asked)[:1])
    assert 0.92 < (found.scoring or 0) / most_allocated(CPU, lambda: scorer.score(random_texts(asked))) < 1.08


@pytest.mark.models
def test_timing_a_head_takes_its_cache_twice() -> None:
    target = model("target", 0, **SMALL)
    head = random_head(target, (1, 2), depths=4, num_attention_heads=16, num_key_value_heads=16, head_dim=32)
    scorer = Scorer(target, [head], target.vocabulary)
    found = promised(scorer, documents(1, (8, 8), 1), Cells([1, 4], [16, 64], 5, False))
    costs: Any = SimpleNamespace(concurrency=[1, 4], context=[16, 64], repeats=3, budget=1e4, mode="auto")
    subjects = latency.Subjects(target, [head], np.arange(64, dtype=np.int32), 4)
    taken = most_allocated(CPU, lambda: latency.measure(subjects, costs, lambda _: None))
    assert 0.92 < (found.timing or 0) / taken < 1.08


@pytest.mark.models
def test_a_head_of_an_unknown_shape_has_weights_and_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model("target", 0, **SMALL)
    head = random_head(target, (1, 2))
    monkeypatch.setattr(type(head.network), "shape", lambda _: None)
    found = promised(Scorer(target, [head], target.vocabulary), documents(2, (7, 8), 4))
    assert dataclasses.astuple(found)[1:-1] == (None,) * 5
    assert found.weights > 0


@pytest.mark.models
def test_timing_takes_the_caches_of_its_largest_cell() -> None:
    target, draft = model("target", 0, **HIDDEN), model("draft", 1, **SMALL)
    scorer = Scorer(target, [draft], target.vocabulary)
    found = promised(scorer, documents(1, (8, 8), 1), Cells([1, 4], [16, 64], 5, False))
    costs: Any = SimpleNamespace(concurrency=[1, 4], context=[16, 64], repeats=3, budget=1e4, mode="auto")
    subjects = latency.Subjects(target, [draft], np.arange(64, dtype=np.int32), 4)
    taken = most_allocated(CPU, lambda: latency.measure(subjects, costs, lambda _: None))
    assert 0.92 < (found.timing or 0) / taken < 1.08
    assert found.peak == found.weights + max(found.generation or 0, found.scoring or 0, found.timing or 0)
    assert found.least == found.peak  # a CPU halves nothing


@pytest.mark.models
def test_batches_of_one_document_are_the_least_where_batches_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, here imitated by the name of its kind, one document and one sequence are what a run cannot do without."""
    target, draft = model("target", 0, **SMALL), model("draft", 1, **SMALL)
    scorer = Scorer(target, [draft], target.vocabulary)
    asked = documents(8, (33, 40), 20)
    monkeypatch.setattr(Model, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(memory, "free", lambda _: 10**9)
    monkeypatch.setattr(memory.dispatch, "why_unavailable", lambda _: None)
    monkeypatch.setattr(memory, "_spread", lambda *_: False)
    full, one = promised(scorer, asked, Cells([1, 8], [64], 5, True)), promised(scorer, asked[:1], Cells([1], [64], 5, True))
    assert full.least == one.peak
    assert (full.peak or 0) > 4 * (one.peak or 0) - 3 * full.weights


@pytest.mark.models
def test_models_of_an_unknown_shape_have_weights_and_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model("target", 0, **SMALL)
    scorer = Scorer(target, [], target.vocabulary)
    monkeypatch.setattr(memory, "shape_of", lambda _: None)
    found = promised(scorer, documents(2, (7, 8), 4))
    assert dataclasses.astuple(found)[1:-1] == (None,) * 5
    assert found.weights > 0


def test_a_mixture_of_experts_holds_those_that_a_token_uses() -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 10, "intermediate_size": 100, "model_type": "llama"}
    assert mlp_elements(shape) == 300
    assert mlp_elements(shape | {"num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"}) == 2 * 410
    sparse = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 30}
    assert mlp_elements(shape | sparse) == 4 * 130
    assert mlp_elements(shape | sparse | {"mlp_only_layers": [0], "num_experts_per_tok": 1}) == 300  # of the dense layer
