"""What is measured of a text does not depend on which texts it shares batches with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaprof.config.options import TargetOptions
from alphaprof.profiling.models.draft import Arrays
from alphaprof.profiling.models.kinds import DraftModel, layer_skip
from alphaprof.profiling.models.load import NOISE, load_model, load_tokenizer
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring.scorer import Scorer, by_document
from alphaprof.profiling.texts.continuations import Continuation, Fed, scoring_batches
from alphaprof.profiling.texts.corpus import Document
from tests.tiny import llama, noisy

ROOT = Path(__file__).parents[2]
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
        fed = Fed()
        for batch in chosen(texts(250, lengths=lengths), 8192):
            fed += Fed.of([item.tokens - 1 for item in batch])
        shares.append(fed.padding / fed.size)
    assert shares[0] < 0.1 < 1 / 3 < shares[1]


def logit_gap(columns: Arrays, model: str) -> np.ndarray:
    """Between the two largest logits of a model."""
    top = columns[f"{model}_top_prob"].astype(float)
    second = np.maximum(top - columns[f"{model}_margin"], 1e-30)
    return np.asarray(np.log(top / second))


def parts_of_prompts(model: Path) -> list[Continuation]:
    """The first tokens of one prompt of each of the demo's files: a quarter as prompt, the rest as the text behind it."""
    tokenizer = load_tokenizer(TargetOptions(model=str(model)))
    found, files = [], sorted((ROOT / "profiles" / "prompts").glob("*.jsonl"))
    for number, file in enumerate(file for file in files if not file.stem.startswith("stories")):
        prompt = json.loads(file.read_text().splitlines()[0])["prompt"]
        ids = np.asarray(tokenizer(prompt)["input_ids"][: 24 + 4 * number], dtype=np.int32)
        cut = len(ids) // 4
        item = Document(number, file.stem, None, 0, number, ids[:cut], ids[cut:], True, None, "given", False)
        found.append(Continuation(item, ids[cut:], "length"))
    return found


@pytest.mark.slow
@pytest.mark.demo_model
def test_acceptance_and_divergence_of_the_demo_model_hang_on_the_batch_by_no_more_than_noise(demo_model: Path) -> None:
    """On real text in bfloat16, where batches round differently, at each position of it.

    Strict acceptance differs only within `NOISE` of a tie, so alpha by no more than the share of such positions (seen: 1 of
    536 positions differed, 12 % were that near). KL: where the difference of any two logits moves by at most n (each by n/2
    beside a shift, which changes nothing), the draft's move KL by at most n TV, and the target's by n/2 times the mean
    deviation of log(p / q) under p, at most 2 KL + 2 TV. In all n (KL + 2 TV) <= n (KL + 2): log(KL + 2) moves by n at most.
    Logits of unlikely ids move by more than `NOISE` (0.24 seen), but count by their probability: 0.03 of 0.125 was seen.
    """
    target = load_model("target", TargetOptions(model=str(demo_model)), "bfloat16")
    scorer = Scorer(target, [layer_skip("skip", target, [10, 13, 16])], target.vocabulary)
    continuations = parts_of_prompts(demo_model)
    assert len(continuations) == 7
    noise = NOISE[torch.bfloat16]
    joined = [
        {name: np.concatenate([found[number][name] for number in sorted(found)]) for name in found[0]}
        for found in (scored(scorer, continuations, 1), scored(scorer, continuations, 4096))
    ]
    gaps = [logit_gap(columns, model) for columns in joined for model in ("target", "draft")]
    tied = np.minimum.reduce(gaps) < noise
    assert tied.mean() < 0.5  # or the next line would speak of few positions
    kept = [columns["draft_top"] == columns["target_top"] for columns in joined]
    assert not (kept[0] != kept[1])[~tied].any()
    alone, together = (np.log(columns["kl_target_draft"].astype(float) + 2) for columns in joined)
    assert abs(alone - together).max() <= noise
