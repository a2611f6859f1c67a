"""Sampled text: it follows the processed distribution, and depends on seed and document alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import PLAIN, Processing, Sampler, uniforms
from alphaprof.profiling.texts.continuations import Continuation, generate, generation_batches, scoring_batches
from alphaprof.profiling.texts.corpus import Document
from tests import reference
from tests.tiny import ending, llama

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
IDS = 260
NEW_TOKENS = 16
UNLIKELY = 1e-4  # p-value below which a fixed seed counts as evidence


def document(number: int, prompt: Any, settings: Processing | None = PLAIN, **changes: Any) -> Document:
    """A document that the target continues."""
    ids = np.asarray(prompt, dtype=np.int32)
    values = {"source_row": number, "max_new_tokens": NEW_TOKENS, "processing": settings, "seed": 0} | changes
    return Document(number, "a", None, 0, prompt=ids, given=None, cut=False, kind="sampled", on_policy=True, **values)


def prompt(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(500 + number).integers(0, 250, length)


DOCUMENTS = [
    document(number, prompt(number, length), Processing(1.2, 0, 0.95)) for number, length in enumerate([3, 17, 8, 30, 5, 12])
]


@pytest.fixture(scope="module")
def target() -> Model:
    """A target whose texts end now and then."""
    return DraftModel("target", ending(llama(seed=7), 2.5), "model", "t")


def texts(found: list[Continuation]) -> dict[int, list[int]]:
    """Token ids by document number."""
    return {item.document.document: item.ids.tolist() for item in found}


def alone(target: Model, documents: list[Document]) -> dict[int, list[int]]:
    """Texts of documents, each generated in a batch of its own."""
    return texts([item for document in documents for item in generate(target, [document], IDS)])


def assert_follows(counts: np.ndarray, expected: np.ndarray) -> None:
    """Counts of outcomes against their probabilities: a G-test over cells that are expected at least 5 times."""
    drawn = counts.sum()
    assert counts[expected == 0].sum() == 0
    large = expected * drawn >= 5
    pooled = [np.append(values[large], values[~large].sum()) for values in (counts, expected * drawn)]
    if pooled[1][-1] < 5:
        pooled = [np.append(values[:-2], values[-2:].sum()) for values in pooled]
    assert len(pooled[0]) > 2
    assert stats.power_divergence(*pooled, lambda_="log-likelihood").pvalue > UNLIKELY


def test_uniforms_are_a_function_of_seed_prompt_and_row_alone() -> None:
    ids = np.array([3, 1, 2], dtype=np.int32)
    found = uniforms(5, ids, 7, 20)
    assert np.array_equal(found, uniforms(5, ids.astype(np.int64), 7, 20))
    assert np.array_equal(found[:4], uniforms(5, ids, 7, 4))
    others = [uniforms(6, ids, 7, 20), uniforms(5, ids[::-1], 7, 20), uniforms(5, ids[:2], 7, 20), uniforms(5, ids, 8, 20)]
    assert all(not set(found) & set(other) for other in others)
    assert not set(uniforms(2**63 - 1, ids, 2**62, 20)) & set(found)


def test_uniforms_of_many_documents_are_uniform_and_independent_at_every_place() -> None:
    found = np.array([uniforms(0, np.array([row % 7]), row, 3) for row in range(4000)])
    assert all(stats.kstest(column, "uniform").pvalue > UNLIKELY for column in (*found.T, found.ravel()))
    assert all(abs(np.corrcoef(found, rowvar=False)[pair]) < 0.08 for pair in ((0, 1), (1, 2), (0, 2)))


def drawn(logits: torch.Tensor, settings: Processing, numbers: Any, width: int, place: int = 0) -> torch.Tensor:
    """Tokens that the sampler chooses from the same logits for each row of numbers [rows, places]."""
    rows = torch.as_tensor(np.asarray(numbers, dtype=np.float64))
    scores = Sampler(settings, rows, 4, width)(
        torch.zeros(len(rows), 4 + place, dtype=torch.long), logits.expand(len(rows), -1)
    )
    assert scores.shape == (len(rows), logits.shape[-1])
    assert (scores.isfinite().sum(1) == 1).all()
    return scores.argmax(1)


def test_tokens_by_hand() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    numbers = [[0.0, 0.9], [0.49, 0.1], [0.51, 0.6], [0.74, 0.0], [0.76, 0.8], [0.9999999, 0.5]]
    assert drawn(logits, PLAIN, numbers, 4).tolist() == [0, 0, 1, 1, 2, 3]
    assert drawn(logits, PLAIN, numbers, 4, place=1).tolist() == [3, 0, 1, 0, 2, 1]
    # Without the two small ones: 2/3 and 1/3.
    assert drawn(logits, Processing(top_k=2), numbers, 4).tolist() == [0, 0, 0, 1, 1, 1]
    assert drawn(logits, PLAIN, numbers, 2).tolist() == [0, 0, 0, 1, 1, 1]


SETTINGS = [
    PLAIN,
    Processing(0.5),
    Processing(1.7, 0, 0.9),
    Processing(1.0, 7),
    Processing(1.3, 20, 0.8, 0.05),
    Processing(2.0, 0, 1.0, 0.1),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_drawn_tokens_follow_the_processed_distribution_of_the_target(target: Model, settings: Processing) -> None:
    ids, width = prompt(1, 9), 250  # as if the last ids were padding of the embedding matrix
    with torch.inference_mode():
        logits = target.network(input_ids=torch.from_numpy(ids)[None]).logits[0, -1]
    logits = torch.cat([logits[:width], logits[width:] + 20])
    numbers = [uniforms(3, ids, row, 1) for row in range(8000)]
    tokens = drawn(logits, settings, numbers, width).numpy()
    expected = reference.processed(logits[:width].numpy(), settings)
    assert tokens.max() < width
    assert_follows(np.bincount(tokens, minlength=width), expected)


@pytest.mark.parametrize(
    "settings", [PLAIN, Processing(1.5, 4), Processing(2.0, 0, 0.8), Processing(1.0, 0, 1.0, 0.3)], ids=str
)
def test_whole_texts_follow_the_law_of_the_target(settings: Processing) -> None:
    network = llama(seed=4, vocabulary=8, layers=1, eos_token_id=5, pad_token_id=6, initializer_range=0.15)
    network.generation_config.eos_token_id, network.generation_config.pad_token_id = 5, 6
    small = DraftModel("target", network, "model", "t")
    rows = [document(row, [1, 2, 3], settings, max_new_tokens=2) for row in range(6000)]
    found = [tuple(item.ids.tolist()) for item in generate(small, rows, 7)]
    outcomes = [(5,), *itertools.product([token for token in range(7) if token != 5], range(7))]
    with torch.inference_mode():
        after = {
            text: reference.processed(
                network(input_ids=torch.tensor([[1, 2, 3, *text]])).logits[0, -1, :7].numpy(), settings
            )
            for text in [(), *((token,) for token in range(7))]
        }
    law = [math.prod(after[text[:place]][token] for place, token in enumerate(text)) for text in outcomes]
    assert sum(law) == pytest.approx(1)
    assert set(found) <= set(outcomes)
    assert_follows(np.array([found.count(text) for text in outcomes]), np.array(law))


def test_a_text_does_not_depend_on_its_batch(target: Model) -> None:
    by_itself = alone(target, DOCUMENTS)
    assert texts(generate(target, DOCUMENTS, IDS)) == by_itself
    assert texts(generate(target, DOCUMENTS[::-1], IDS)) == by_itself
    assert texts(generate(target, DOCUMENTS[1:4], IDS)) == {number: by_itself[number] for number in (1, 2, 3)}
    assert len({len(text) for text in by_itself.values()}) > 1  # some ended by themselves


def test_texts_of_other_settings_or_limits_are_not_in_one_batch() -> None:
    documents = [
        document(number, prompt(number, 4 + number), settings, max_new_tokens=limit)
        for number, (settings, limit) in enumerate(itertools.product([None, PLAIN, Processing(0.5)] * 2, [5, 9]))
    ]
    found = list(generation_batches(documents, 10_000))
    assert len(found) == 6
    assert sorted(item.document for batch in found for item in batch) == list(range(len(documents)))
    assert all(len({(item.max_new_tokens, item.processing) for item in batch}) == 1 for batch in found)
    written = [Continuation(item, prompt(item.document, 5).astype(np.int32), "length") for item in documents]
    scoring = list(scoring_batches(written, 10_000))
    assert sorted(item.document.document for batch in scoring for item in batch) == list(range(len(documents)))
    assert all(len({item.document.processing for item in batch}) == 1 for batch in scoring)
