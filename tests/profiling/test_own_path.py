"""Heads that read their own drafts: whole rounds, also those that stop at a p_min, are those of a loop that drafts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast

from alphaprof.config.options import TargetOptions
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.mtp import ChainedModules, ReusedModule
from alphaprof.profiling.models.draft import Arrays
from alphaprof.profiling.models.kinds import DraftModel
from alphaprof.profiling.models.load import Model, load_model, load_tokenizer
from alphaprof.profiling.scoring.scorer import Extras, Scorer, position_table
from alphaprof.profiling.texts.continuations import Continuation, continuation_table
from alphaprof.profiling.texts.corpus import Document
from alphaprof.profiling.timing.steppers import read
from alphaprof.run.schema import LogRules
from alphaprof.totals.count import TotalsRequest, Traced
from tests.eagle import VOCABULARY, Recomputing, config, loaded, target, tensors, written
from tests.loops import each
from tests.profiling import modules
from tests.profiling.test_golden_head import GOLDEN, SIZE, TEXTS
from tests.profiling.test_huggingface import recorded_rounds
from tests.profiling.test_mtp import greedy, parts_of, recomputed

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
ROUNDING = 2e-4  # of log-odds in the log, near those of these p_min
P_MINS = (0.0, 0.4, 0.6, 0.8)
Next = Callable[[int, list[int]], torch.Tensor]  # start of a round and its drafts so far -> logits of the next one
Rounds = list[tuple[int, int, int]]  # where each starts, what it drafted, and what it got accepted of the text


def really(following: Next, ids: Sequence[int] | None, text: list[int], prompt: int, gamma: int, p_min: float) -> Rounds:
    """Rounds of a loop that drafts token by token, until γ or until it is unsure. They end before one that is as close to
    p_min as the log's rounding.
    """
    start, rounds = prompt + 1, []
    while start < len(text):
        drafted: list[int] = []
        while len(drafted) < gamma:
            law = following(start, drafted).double().softmax(0)
            top = float(law.max())
            if p_min and abs(math.log(top / float(law.sum() - top)) - math.log(p_min / (1 - p_min))) < ROUNDING:
                return rounds
            if top < p_min:
                break
            best = int(law.argmax())
            drafted.append(best if ids is None else ids[best])
        pairs = enumerate(zip(drafted, text[start:], strict=False))
        right = next((place for place, (left, token) in pairs if left != token), min(len(drafted), len(text) - start))
        rounds.append((start - prompt, len(drafted), right))
        start += right + 1
    return rounds


def of_eagle(folder: Path, model: Model, known: list[int], features: torch.Tensor, dtype: torch.dtype) -> tuple[Next, Any]:
    """A decoder of a head's files that computes in a dtype, and the ids of its logits."""
    described, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    own = {name: each.to(dtype) if each.is_floating_point() else each for name, each in weights.items()}
    naive = Recomputing(described, own, model.network.get_input_embeddings().weight.to(dtype))
    made = dict[tuple[int, ...], torch.Tensor]()

    def following(start: int, drafted: list[int]) -> torch.Tensor:
        key = (start, *drafted)
        if key not in made:
            made[key] = naive.logits(known[:start], features[: start - 1].to(dtype), drafted)
        return made[key]

    return following, naive.ids


def scored(draft: HeadDraft, text: list[int], prompt: int) -> tuple[Continuation, Arrays]:
    """A greedy text and its columns."""
    ids = np.array(text, dtype=np.int32)
    document = Document(0, "a", None, 0, 0, ids[:prompt], None, False, len(text), "greedy", True, None, 7)
    item = Continuation(document, ids[prompt:], "length")
    scorer = Scorer(draft.target, [draft], draft.vocabulary, extras=Extras.of(["strict"], certificates=False))
    return item, scorer.score([item])[draft.name]


def logged(draft: HeadDraft, item: Continuation, rows: Arrays, gamma: int, p_min: float) -> Rounds:
    """The same by the log of the head."""
    facts = draft.facts()
    table = position_table([item], {0: rows}, LogRules(("strict",)).of(facts), draft.name, starts_matter=True)
    found = Traced.of(table, continuation_table([item]), facts, TotalsRequest(["strict"], [gamma], p_min)).rounds(gamma)
    accepted = np.minimum(found.accepted, len(item.ids) - found.at)
    return list(zip(found.at.tolist(), found.drafted.tolist(), accepted.tolist(), strict=True))


def compared(draft: HeadDraft, following: Next, ids: Any, known: list[int], prompt: int, gammas: Sequence[int]) -> Rounds:
    """The rounds of the loop at all p_min, of which no more than two end early, once those of the log are found the same."""
    every, whole, columns = [], 0, scored(draft, known, prompt)
    for p_min, gamma in itertools.product(P_MINS, gammas):
        rounds, found = really(following, ids, known, prompt, gamma, p_min), logged(draft, *columns, gamma, p_min)
        assert found[: len(rounds)] == rounds
        every, whole = every + rounds, whole + (len(found) == len(rounds))
    assert whole >= len(P_MINS) * len(gammas) - 2
    return every


@torch.inference_mode()
def test_rounds_of_eagle_3_that_stop_are_those_of_a_decoder_that_recomputes(tmp_path: Path) -> None:
    """Of seven ids, so that random heads are right and sure often; the decoder computes in float64."""
    every: Rounds = []
    for seed in range(6):
        model, described = target(seed), config()
        folder = written(tmp_path / str(seed), described, tensors(described, seed=seed + 1))
        draft, text = loaded(folder, model, (5,)), greedy(model.network, torch.tensor([[seed, 1, 3, 2, 5]]), 40)
        states = model.network(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in draft.network.layers], -1)
        known = text[0].tolist()
        every += compared(draft, *of_eagle(folder, model, known, features, torch.float64), known, 5, (2, 5))
    assert len(every) > 1000
    assert sum(drafted < 2 for _, drafted, _ in every) > 200
    # Stopped on a path of their own, which the text's tokens would not have known.
    assert sum(accepted + 1 < drafted < 5 for _, drafted, accepted in every) > 20


class Assistant(LlamaForCausalLM):
    """A head as Hugging Face's assisted generation takes a draft: a causal language model. `begun`: the tokens so far where
    candidates were asked for; `path`: the drafts since then (None: it was not run).
    """

    following: Next
    ids: list[int]
    begun: int
    path: list[int] | None = None

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        logits = torch.full((1, 1, VOCABULARY), -torch.inf)
        self.path = [] if self.path is None else [*self.path, int(input_ids[0, -1])]
        logits[0, 0, self.ids] = self.following(self.begun, self.path).float()
        return CausalLMOutputWithPast(logits=logits)  # type: ignore[arg-type]


@torch.inference_mode()
def test_rounds_that_stop_are_those_of_assisted_generation_with_the_head_as_assistant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ends a round after the token that is less probable than its threshold."""
    model, described, limit, prompt = target(2), config(), 40, 5
    folder = written(tmp_path, described, tensors(described, seed=3))
    draft, known = loaded(folder, model, (5,)), greedy(model.network, torch.tensor([[2, 1, 3, 2, 5]]), limit)[0].tolist()
    states = model.network(torch.tensor([known]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer][0] for layer in draft.network.layers], -1)
    assistant = Assistant(model.network.config)
    assistant.following, assistant.ids = of_eagle(folder, model, known, features, torch.float32)
    item, rows = scored(draft, known, prompt)
    get = AssistedCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: torch.Tensor, **named: Any) -> Any:
        assistant.begun, assistant.path = input_ids.shape[1], None
        return get(self, input_ids, **named)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", spy)
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: False)  # it would adapt the threshold
    odds = np.log(rows["draft_top_prob"]) - np.log1p(-rows["draft_top_prob"])
    odds = np.stack([odds, *(rows[f"draft_log_odds_{depth}"].astype(float) for depth in range(2, 6))], 1)
    stopped = behind = 0
    for p_min in P_MINS[1:]:
        settings = {"assistant_confidence_threshold": p_min, "num_assistant_tokens_schedule": "constant"}
        assistant.generation_config = GenerationConfig(num_assistant_tokens=5, use_cache=False, pad_token_id=0, **settings)
        text, rounds = recorded_rounds(
            model.network, item.document, AssistedCandidateGenerator, limit, assistant_model=assistant
        )
        assert text == known[prompt:]
        at, expected = 0, []
        while at < limit:
            sure = [*(odds[at] >= math.log(p_min / (1 - p_min))).tolist(), False].index(False)
            drafted = min(5, limit - at - 1, sure + 1)
            right = min(int(rows["accepted_run"][at]), drafted)
            expected.append((drafted, min(right, limit - at - 1)))
            stopped, behind = stopped + (sure < 4), behind + (right + 1 < drafted <= sure + 1 < 5)
            at += right + 1
        assert rounds == expected
    assert stopped > 20
    assert behind > 3


@modules.NEEDS_MTP
@torch.inference_mode()
@each("normed", (True, False))
def test_rounds_of_a_reused_module_that_stop_are_those_of_a_decoder_that_recomputes(normed: bool) -> None:
    every: Rounds = []
    for seed in range(1 + normed):
        network = modules.target("glm4_moe", seed, **modules.GLM, num_nextn_predict_layers=1)
        made = modules.modules_of(network, 1, seed)
        parts, model = parts_of(made, normed=normed), DraftModel("target", network, "model", "t")
        draft = HeadDraft("head", ReusedModule(made, modules.VOCABULARY, normed=normed), model, "mtp", "t", 5)
        text = greedy(network, torch.tensor([[seed, 1, 3, 2, 5]]), 40)
        following = partial(lambda *given: recomputed(*given[:3], given[3] - 2, given[4]), parts, network, text)
        every += compared(draft, following, None, text[0].tolist(), 5, (5,))
    assert len(every) > 70


@modules.NEEDS_MTP
def test_a_chain_of_modules_reads_the_text() -> None:
    network = modules.target("glm4_moe", **modules.GLM, num_nextn_predict_layers=2)
    chain = ChainedModules(modules.modules_of(network, 2), modules.VOCABULARY)
    facts = HeadDraft("head", chain, DraftModel("target", network, "model", "t"), "mtp", "t", 2).facts()
    assert not facts.own_path
    assert all("odds" not in column.name for column in LogRules(("strict",)).of(facts).columns)


@pytest.mark.demo_model
@torch.inference_mode()
def test_rounds_of_a_trained_head_that_stop_are_those_of_a_decoder_that_recomputes(stories15m: Path) -> None:
    model = load_model("target", TargetOptions(model=str(stories15m)), "float32")
    draft = loaded(GOLDEN, model, (5,), load_tokenizer(TargetOptions(model=str(stories15m))))
    for text in TEXTS[:1]:
        prompt, known = len(text["prompt"]), [*text["prompt"], *text["text"]]
        _, features = read(model, draft.network, np.array(known, dtype=np.int32))
        every = compared(draft, *of_eagle(GOLDEN, model, known, features, torch.float32), known, prompt, (5,))
        unstopped = [[at, accepted] for at, drafted, accepted in every[: len(text["rounds"]["5"])]]
        assert unstopped == [[at, min(accepted, SIZE - at)] for at, accepted in text["rounds"]["5"]]
