"""Replayed rounds against live Hugging Face assisted generation, and our greedy text against theirs, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from alphaprof.analysis.replay import Trace, replay, walk
from alphaprof.profiling.continuations import Continuation, generate_greedy, generation_batches
from alphaprof.profiling.corpus import Document
from alphaprof.profiling.models import Model
from alphaprof.profiling.record import by_document
from alphaprof.profiling.scoring import Scorer
from tests.tiny import llama, noisy

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
NEW_TOKENS = 40


def document(number: int, length: int) -> Document:
    ids = np.random.default_rng(100 + number).integers(0, 250, length).astype(np.int32)
    return Document(number, "a", None, 0, number, ids, None, False, NEW_TOKENS, "greedy", True)


DOCUMENTS = [document(number, length) for number, length in enumerate([3, 17, 8, 30, 5, 12])]


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    """A target and a draft that agree on about half of the tokens, both ready to end a text."""
    target = llama(seed=7)
    with torch.no_grad():
        target.lm_head.weight[256] *= 2.0  # EOS turns up, so that ends are tested too
    draft = noisy(target, 0.04)
    return Model("target", target, "model", "t"), Model("draft", draft, "model", "d")


def recorded_rounds(
    pair: tuple[Model, Model], item: Document, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[tuple[int, int]]]:
    """Text and rounds (drafted, matched) of one assisted generation."""
    target, draft = (model.network for model in pair)
    rounds: list[tuple[int, int]] = []
    drafted: list[int] = []
    get, update = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy

    def spy_get(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        found = get(self, input_ids, **kwargs)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    def spy_update(self: Any, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        rounds.append((drafted[-1], int(num_matches)))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", spy_get)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", spy_update)
    draft.generation_config = GenerationConfig(
        eos_token_id=256,
        pad_token_id=257,
        num_assistant_tokens=gamma,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    ids = torch.from_numpy(item.prompt.astype(np.int64))[None]
    output = target.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return output[0, ids.shape[1] :].tolist(), rounds


def profiled(pair: tuple[Model, Model]) -> list[tuple[Continuation, dict[str, np.ndarray]]]:
    """Continuations and columns of all documents, as a run makes them: in padded batches."""
    target, draft = pair
    continuations = [item for batch in generation_batches(DOCUMENTS, 120) for item in generate_greedy(target, batch)]
    scored = by_document(continuations, Scorer(target, [draft], 260).score(continuations)["draft"])
    return [(item, scored[item.document.document]) for item in continuations]


def test_replayed_rounds_equal_those_of_assisted_generation(
    pair: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = ended = 0
    for item, columns in profiled(pair):
        agrees = columns["draft_top"] == columns["token"]
        ended += item.finish == "eos"
        one = Trace(
            agrees,
            columns["proposed"].astype(np.int64),
            np.array([0]),
            np.array([len(item.ids)]),
            np.array([NEW_TOKENS]),
            columns["draft_top"] == 256,
        )
        for gamma in (1, 2, 3, 5, 8):
            text, rounds = recorded_rounds(pair, item.document, gamma, monkeypatch)
            monkeypatch.undo()
            assert text == item.ids.tolist()
            found = [(int(step.drafted[0]), int(step.accepted[0])) for step in walk(one, gamma, "hf")]
            assert [matched for _, matched in found] == [matched for _, matched in rounds]
            for (drafted, _), (expected, matched) in zip(found, rounds, strict=True):
                # A draft may end after its first wrong token, which a teacher-forced pass cannot see.
                assert drafted == expected or drafted > expected > matched
            accepted += sum(matched for _, matched in rounds)
    assert accepted > 50  # the pair agrees often enough for the comparison to mean something
    assert ended > 0


def test_batched_greedy_text_equals_each_document_alone(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    for item, _ in profiled(pair):
        ids = torch.from_numpy(item.document.prompt.astype(np.int64))[None]
        output = target.network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert output[0, ids.shape[1] :].tolist() == item.ids.tolist()
        assert (item.finish == "eos") == (item.ids[-1] == 256)
        assert 256 not in item.ids[:-1]


def test_the_greedy_token_is_the_scoring_pass_own_top(pair: tuple[Model, Model]) -> None:
    assert all(np.array_equal(columns["target_top"], item.ids) for item, columns in profiled(pair))


def test_a_draft_that_is_the_target_is_always_accepted(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    for item, columns in profiled((target, Model("draft", target.network, "model", "t"))):
        size = len(item.ids)
        agrees = columns["draft_top"] == columns["token"]
        assert agrees.all()
        one = Trace(
            agrees, columns["proposed"].astype(np.int64), np.array([0]), np.array([size]), np.array([NEW_TOKENS]), agrees
        )
        assert replay(one, 4).rounds[0] == -(-(size - 1) // 5)


def test_a_draft_with_shuffled_logits_is_hardly_ever_accepted(pair: tuple[Model, Model]) -> None:
    target, _ = pair
    shuffled = noisy(target.network, 0.0)
    with torch.no_grad():
        shuffled.lm_head.weight.copy_(
            shuffled.lm_head.weight[torch.randperm(260, generator=torch.Generator().manual_seed(3))]
        )
    columns = [found for _, found in profiled((target, Model("draft", shuffled, "model", "s")))]
    agreed = np.concatenate([found["draft_top"] == found["token"] for found in columns])
    assert agreed.mean() < 0.05
