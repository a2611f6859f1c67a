"""Replayed rounds against live Hugging Face generation, assisted or by prompt lookup, and our greedy text against theirs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from alphaprof.profiling.models.kinds import DraftModel, PromptLookup
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.scoring.scorer import Scorer, by_document
from alphaprof.profiling.texts.continuations import Continuation, generate, generation_batches
from alphaprof.profiling.texts.corpus import Document
from alphaprof.rules import parse_rule
from tests.generators import before_eos, by_lookup, by_model
from tests.tiny import document, ending, llama, looping, noisy

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
NEW_TOKENS = 40
GAMMAS = (1, 2, 3, 5, 8)


DOCUMENTS = [document(number, length, NEW_TOKENS) for number, length in enumerate([3, 17, 8, 30, 5, 12])]


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    """A target and a draft that agree on about half of the tokens, both ready to end a text."""
    target = ending(llama(seed=7), 2.0)
    draft = noisy(target, 0.04)
    return DraftModel("target", target, "model", "t"), DraftModel("draft", draft, "model", "d")


def recorded_rounds(
    network: Any, item: Document, generator: type, limit: int, **how: Any
) -> tuple[list[int], list[tuple[int, int]]]:
    """Text and rounds (drafted, matched) of one live generation whose candidates come from `generator`."""
    rounds: list[tuple[int, int]] = []
    drafted: list[int] = []
    get, update = generator.get_candidates, generator.update_candidate_strategy

    def spy_get(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        found = get(self, input_ids, **kwargs)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    def spy_update(self: Any, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        rounds.append((drafted[-1], int(num_matches)))
        update(self, input_ids, scores, num_matches)

    ids = torch.from_numpy(item.prompt.astype(np.int64))[None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "get_candidates", spy_get)
        patch.setattr(generator, "update_candidate_strategy", spy_update)
        output = network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, **how
        )
    return output[0, ids.shape[1] :].tolist(), rounds


def assisted(
    pair: tuple[Model, Model], item: Document, gamma: int, p_min: float = 0.0
) -> tuple[list[int], list[tuple[int, int]]]:
    """Text and rounds of assisted generation with gamma drafted tokens a round, fewer after one less probable than p_min."""
    target, draft = (model.network for model in pair)
    draft.generation_config = GenerationConfig(
        eos_token_id=256,
        pad_token_id=257,
        num_assistant_tokens=gamma,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=p_min,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidate_generator, "is_sklearn_available", lambda: False)  # it would adapt the threshold
        return recorded_rounds(target, item, AssistedCandidateGenerator, NEW_TOKENS, assistant_model=draft)


def profiled(
    target: Model, draft: Model | PromptLookup, documents: list[Document] = DOCUMENTS
) -> list[tuple[Continuation, dict[str, np.ndarray]]]:
    """Continuations and columns of all documents, as a run makes them: in padded batches."""
    continuations = [item for batch in generation_batches(documents, 120) for item in generate(target, batch, 260)]
    scored = by_document(continuations, Scorer(target, [draft], 260).score(continuations)[draft.name])
    return [(item, scored[item.document.document]) for item in continuations]


def replayed(
    item: Continuation, columns: dict[str, np.ndarray], gamma: int, unsure: np.ndarray | None = None
) -> list[tuple[int, int]]:
    """Rounds of one document as (drafted, matched), as Hugging Face makes them, from columns of the log; EOS has id 256."""
    limit = item.document.max_new_tokens or 0
    return by_model(item.ids.tolist(), columns["draft_top"].tolist(), gamma, limit, (256,), unsure)


@pytest.fixture(scope="module")
def live(pair: tuple[Model, Model]) -> dict[tuple[int, int], tuple[list[int], list[tuple[int, int]]]]:
    """Text and rounds of assisted generation, by document and gamma."""
    return {(item.document, gamma): assisted(pair, item, gamma) for item in DOCUMENTS for gamma in GAMMAS}


@pytest.mark.parametrize("rule", ["strict", "one_hot"])
def test_replayed_rounds_equal_those_of_assisted_generation(pair: tuple[Model, Model], live: Any, rule: str) -> None:
    accepted = ended = 0
    for item, columns in profiled(*pair):
        kept = parse_rule(rule).emitted(columns)
        assert kept is not None
        ended += item.finish == "eos"
        assert np.array_equal(kept == 1, columns["draft_top"] == item.ids)
        for gamma in GAMMAS:
            text, rounds = live[item.document.document, gamma]
            assert text == item.ids.tolist()
            found = replayed(item, columns, gamma)
            assert [matched for _, matched in found] == [matched for _, matched in rounds]
            for (drafted, _), (expected, matched) in zip(found, rounds, strict=True):
                # A draft may end after its first wrong token, which a teacher-forced pass cannot see.
                assert drafted == expected or drafted > expected > matched
            accepted += sum(matched for _, matched in rounds)
    assert accepted > 50  # the pair agrees often enough for the comparison to mean something
    assert ended > 0


def with_ends(item: Document) -> Document:
    """The same prompt with an EOS at every fourth place, as between the turns of a chat."""
    return dataclasses.replace(item, prompt=np.where(np.arange(len(item.prompt)) % 4 == 3, 38, item.prompt).astype(np.int32))


LOOKED_UP = [  # over few tokens, which repeat themselves as well
    document(number, length, limit, largest=12)
    for number, (length, limit) in enumerate([(3, 40), (17, 40), (8, 7), (30, 40), (5, 12), (1, 23), (20, 2), (9, 1)])
]
LOOKED_UP += [with_ends(document(number, 30, 40, largest=12)) for number in (8, 9)]


@pytest.mark.parametrize(("seed", "max_ngram"), [(6, 3), (8, 1)])
def test_replayed_rounds_equal_those_of_live_prompt_lookup(seed: int, max_ngram: int) -> None:
    target = looping(seed)
    seen: set[str] = set()
    for item, columns in profiled(target, PromptLookup("ngram", max_ngram, target.eos, 40, "float32"), LOOKED_UP):
        limit = item.document.max_new_tokens or 0
        ends = before_eos(item.document.prompt.tolist(), item.ids.tolist(), max_ngram, target.eos)
        proposed = np.minimum(columns["proposed"], ends).tolist()
        for gamma in (1, 2, 4, 10):
            how = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": max_ngram}
            text, rounds = recorded_rounds(target.network, item.document, PromptLookupCandidateGenerator, limit, **how)
            assert text == item.ids.tolist()
            assert by_lookup(proposed, columns["accepted_run"].tolist(), gamma, limit) == rounds
            seen.add(item.finish)
            starts = np.cumsum([0, *(matched + 1 for _, matched in rounds)])
            pairs = list(zip(rounds, starts, strict=False))
            seen |= {"beyond the limit" for (drafted, _), start in pairs if drafted > limit - start}
            seen |= {"accepted" for drafted, matched in rounds if drafted > 1 and matched == drafted}
            seen |= {"rejected" for drafted, matched in rounds if drafted > matched > 0}
            seen |= {"nothing" for drafted, _ in rounds if drafted == 0}
            whole = columns["proposed"]
            seen |= {"cut before an EOS" for (drafted, _), start in pairs if 0 < drafted < min(gamma, whole[start])}
    assert seen == {"eos", "length", "accepted", "rejected", "nothing", "beyond the limit", "cut before an EOS"}


def test_the_greedy_token_is_the_scoring_pass_own_top(pair: tuple[Model, Model]) -> None:
    assert all(np.array_equal(columns["target_top"], item.ids) for item, columns in profiled(*pair))


def test_rounds_that_stop_when_unsure_are_those_of_assisted_generation(pair: tuple[Model, Model]) -> None:
    """With a fixed assistant_confidence_threshold: what is accepted, and what is drafted but after a wrong draft."""
    scored, stopped, rounds = profiled(*pair), 0, 0
    levels = np.quantile(np.concatenate([columns["draft_top_prob"] for _, columns in scored]), (0.2, 0.5, 0.8)).tolist()
    for (item, columns), p_min, gamma in itertools.product(scored, levels, (2, 3, 8)):
        text, live = assisted(pair, item.document, gamma, p_min)
        assert text == item.ids.tolist()
        ours = replayed(item, columns, gamma, columns["draft_top_prob"] < p_min)
        assert [accepted for _, accepted in live] == [accepted for _, accepted in ours]
        for (drafted, accepted), (most, _) in zip(live, ours, strict=True):
            assert min(most, accepted + 1) <= drafted <= most
            stopped += drafted == most < min(gamma, 3)
        rounds += len(ours)
    assert rounds > 500
    assert stopped > 50
