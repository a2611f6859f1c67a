"""MTP modules: chains against transformers' own decoding, reused modules against a decoder that recomputes everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator

from alphaprof.profiling.heads import mtp
from alphaprof.profiling.heads.mtp import ChainedModules, ReusedModule
from tests.profiling.modules import (
    DEEPSEEK,
    GLM,
    VOCABULARY,
    accepted,
    agrees,
    features_of,
    modules_of,
    published,
    replayed,
    rounds,
    save,
    target,
)

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
NEW_TOKENS = 40


def their_rounds(network: Any, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Base and drafts of every round of `generate(use_mtp=True)`."""
    made, get = [], MTPCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: torch.Tensor, *given: Any, **named: Any) -> Any:
        candidates, logits = get(self, input_ids, *given, **named)
        length = input_ids.shape[1]
        if candidates.shape[1] > length:
            made.append((length - 2, candidates[0, length:].tolist()))
        return candidates, logits

    with monkeypatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", spy)
        network.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, use_mtp=True
        )
    return made


def greedy(network: Any, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    text: torch.Tensor = network.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return text


@pytest.mark.parametrize(("kind", "settings", "seeds"), [("glm4_moe", GLM, 8), ("deepseek_v3", DEEPSEEK, 2)])
def test_a_chain_drafts_as_transformers_does(
    kind: str, settings: dict[str, Any], seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    counts: dict[int, int] = {}
    for seed in range(seeds):
        for count in (1, 2, 3):
            fresh = target(kind, seed, num_nextn_predict_layers=count, **settings)
            modules = modules_of(fresh, count, seed)
            folder = save(fresh, tmp_path / f"{seed}-{count}", published(modules, 2))
            network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            network._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9]\."]  # where transformers finds modules
            torch.manual_seed(seed)
            prompt = torch.randint(0, VOCABULARY, (1, 7))
            text = greedy(network, prompt, NEW_TOKENS + 5)
            made = their_rounds(network, prompt, monkeypatch)
            tops = replayed(ChainedModules(modules, VOCABULARY), text, features_of(fresh, text), count)
            assert all(agrees(made, tops, text[0].tolist()))
            for base, drafts in made:
                right = accepted(drafts, text[0, base + 2 :].tolist())
                counts[right] = counts.get(right, 0) + 1
    assert sum(counts.values()) >= 40 * seeds
    assert sorted(counts) == [0, 1, 2, 3]


MELLUM = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["sparse", "sparse"],
    "num_nextn_predict_layers": 1,
}
ONE = {"num_nextn_predict_layers": 1}
REUSED = [("glm4_moe", GLM | ONE, False, None), ("deepseek_v3", DEEPSEEK | ONE, True, None), ("mellum", MELLUM, False, 8)]


def step_by_step(
    head: ReusedModule, network: Any, ids: torch.Tensor, base: int, gamma: int, window: int | None
) -> list[int]:
    """Drafts of a round from a decoder without a cache: the true pairs of the bases up to the round's, then a pair for each
    draft, as one sequence that is run anew for every draft.
    """
    modules = head.modules
    features = features_of(network, ids[:, : base + 1])
    embeddings = network.get_input_embeddings()(ids[:, 1 : base + 2]).clone()
    if head.blind:
        embeddings[:, 0] = 0.0
    drafts: list[int] = []
    while True:
        length = embeddings.shape[1]
        places = torch.arange(length)
        distance = places[:, None] - places[None]
        hidden = (distance < 0) | (distance >= (window or length))
        mask = torch.zeros(length, length).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        named = {"layer_type": "sliding_attention"} if modules.has_per_layer_rope else {}
        turns = modules.rotary_emb(embeddings, position_ids=places[None], **named)
        states = modules.layers[0](embeddings, features, turns, mask, places[None], None)
        drafts.append(int(network.lm_head(states[0, -1]).argmax()))
        if len(drafts) == gamma:
            return drafts
        embeddings = torch.cat([embeddings, network.get_input_embeddings()(torch.tensor([drafts[-1:]]))], dim=1)
        features = torch.cat([features, states[:, -1:]], dim=1)


@pytest.mark.parametrize(("kind", "settings", "blind", "window"), REUSED)
def test_a_reused_module_drafts_as_a_decoder_that_recomputes_everything(
    kind: str, settings: dict[str, Any], blind: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "ROWS", 7)  # several calls a depth
    total = 0
    for seed in range(4):
        network = target(kind, seed, **settings)
        head = ReusedModule(modules_of(network, 1, seed), VOCABULARY, blind, window)
        torch.manual_seed(seed)
        text = greedy(network, torch.randint(0, VOCABULARY, (1, 5)), 60)
        ids, features = text[0].tolist(), features_of(network, text)
        first = 3
        tops = replayed(head, text, features, 5, first)
        for gamma in (2, 5):
            made = rounds(head, text, features, 5, gamma)
            assert all(agrees(made, tops, ids, first))
            with torch.inference_mode():
                assert made == [(base, step_by_step(head, network, text, base, gamma, window)) for base, _ in made]
            total += len(made)
    assert total >= 150


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_chain_at_work_drafts_as_over_the_text(count: int) -> None:
    total = 0
    for seed in range(4):
        network = target("glm4_moe", seed, num_nextn_predict_layers=count, **GLM)
        head = ChainedModules(modules_of(network, count, seed), VOCABULARY)
        torch.manual_seed(seed)
        text = greedy(network, torch.randint(0, VOCABULARY, (1, 2 + seed)), 60)
        features = features_of(network, text)
        for gamma in range(1, count + 1):
            made = rounds(head, text, features, 2 + seed, gamma)
            assert all(agrees(made, replayed(head, text, features, count), text[0].tolist()))
            total += len(made)
    assert total >= 100
