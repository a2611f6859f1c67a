"""What is measured of a text does not depend on which texts it shares batches with."""

from __future__ import annotations

import numpy as np
import pytest

from alphaprof.profiling.models.draft import Arrays
from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring.scorer import Scorer, by_document
from alphaprof.profiling.texts.continuations import Continuation, fed, scoring_batches
from alphaprof.profiling.texts.corpus import Document
from tests.tiny import llama, noisy

LENGTHS = [3, 41, 8, 30, 5, 12, 22, 60, 9, 4]


def texts(ids: int, settings: Processing | None = None, lengths: list[int] = LENGTHS) -> list[Continuation]:
    """Random texts, about half of each the prompt."""
    found = []
    for number, length in enumerate(lengths):
        text = np.random.default_rng(number).integers(0, ids, length).astype(np.int32)
        cut = length // 2
        item = Document(number, "a", None, 0, number, text[:cut], text[cut:], True, None, "given", True, settings)
        found.append(Continuation(item, text[cut:], "length"))
    return found


def scored(scorer: Scorer, continuations: list[Continuation], budget: int) -> dict[int, Arrays]:
    """Columns of the only draft by document; budget 1: every document alone."""
    found: dict[int, Arrays] = {}
    for batch in scoring_batches(continuations, budget):
        (arrays,) = scorer.score(batch).values()
        found |= by_document(batch, arrays)
    return found


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("settings", [None, Processing(0.8, 0, 0.9)], ids=["greedy", "sampled"])
def test_documents_scored_alone_and_in_batches_have_the_same_columns(settings: Processing | None) -> None:
    """In float32: probabilities and logits within 1e-3, top tokens and ranks equal."""
    network = llama(seed=7)
    models = DraftModel("target", network, "model", "t"), DraftModel("draft", noisy(network, 0.05), "model", "d")
    scorer = Scorer(models[0], [models[1]], 260)
    continuations = texts(250, settings)
    alone = scored(scorer, continuations, 1)
    for budget in (64, 200, 10_000):
        together = scored(scorer, continuations, budget)
        assert together.keys() == alone.keys()
        for number, columns in alone.items():
            for name, values in columns.items():
                if np.issubdtype(values.dtype, np.floating):
                    np.testing.assert_allclose(together[number][name], values, atol=1e-3, rtol=1e-3, err_msg=name)
                else:
                    np.testing.assert_array_equal(together[number][name], values, err_msg=name)


def test_little_of_what_is_scored_is_padding_whatever_the_lengths() -> None:
    """Texts from 20 to 400 tokens: without a limit a third would be padding."""
    lengths = np.random.default_rng(0).integers(20, 400, 64).tolist()
    shares = []
    for chosen in (scoring_batches, lambda items, budget: [items]):
        counts = sum(fed([item.tokens - 1 for item in batch]) for batch in chosen(texts(250, lengths=lengths), 8192))
        shares.append(counts[1] / counts.sum())
    assert shares[0] < 0.1 < 1 / 3 < shares[1]
