"""MTP modules: chains against transformers' own decoding, reused modules against a decoder that recomputes everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.generation import candidate_generator

from alphaprof.config.options import MtpDraft, TargetOptions
from alphaprof.profiling.heads import attention
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.mtp import ChainedModules, ReusedModule, load_mtp
from alphaprof.profiling.models.load import load_model
from tests.conftest import slow
from tests.profiling.modules import (
    DEEPSEEK,
    GLM,
    HYBRID,
    NEEDS_MTP,
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

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread"), NEEDS_MTP]
NEW_TOKENS = 40


def their_rounds(network: Any, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Base and drafts of every round of `generate(use_mtp=True)`."""
    made, get = [], candidate_generator.MTPCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: torch.Tensor, *given: Any, **named: Any) -> Any:
        candidates, logits = get(self, input_ids, *given, **named)
        length = input_ids.shape[1]
        if candidates.shape[1] > length:
            made.append((length - 2, candidates[0, length:].tolist()))
        return candidates, logits

    with monkeypatch.context() as patch:
        patch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", spy)
        network.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, use_mtp=True
        )
    return made


def greedy(network: Any, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    text: torch.Tensor = network.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return text


@pytest.mark.parametrize(("kind", "settings", "seeds"), [*slow([("glm4_moe", GLM, 8)]), ("deepseek_v3", DEEPSEEK, 2)])
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
REUSED = [
    ("glm4_moe", GLM | ONE, False, None, True),
    ("glm4_moe", GLM | ONE, False, None, False),
    ("deepseek_v3", DEEPSEEK | ONE, True, None, True),
    ("mellum", MELLUM, False, 8, True),
]


@dataclass(frozen=True)
class Parts:
    """A module in parts: what embeddings, states and output are normalised by, and what joins the first two."""

    embedding_norm: Callable[[torch.Tensor], torch.Tensor]
    state_norm: Callable[[torch.Tensor], torch.Tensor]
    projection: torch.Tensor
    state_first: bool
    block: Any
    norm: Callable[[torch.Tensor], torch.Tensor]
    blind: bool = False
    window: int | None = None
    normed: bool = True
    rope: dict[str, str] = field(default_factory=dict)

    def run(self, embeddings: torch.Tensor, states: torch.Tensor, rotary: Any) -> torch.Tensor:
        """States before the final norm, of a whole sequence from place 0."""
        pair = [self.embedding_norm(embeddings), self.state_norm(states)]
        joined = torch.cat(pair[::-1] if self.state_first else pair, dim=-1) @ self.projection.T
        length = embeddings.shape[1]
        places = torch.arange(length)
        distance = places[:, None] - places[None]
        hidden = (distance < 0) | (distance >= (self.window or length))
        mask = torch.zeros(length, length).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        turns = rotary(embeddings, position_ids=places[None], **self.rope)
        output: torch.Tensor = self.block(joined, position_embeddings=turns, attention_mask=mask, position_ids=places[None])
        return output


def recomputed(parts: Parts, network: Any, ids: torch.Tensor, base: int, drafted: list[int]) -> torch.Tensor:
    """Logits of a round's next draft from a decoder without a cache: the true pairs of the bases up to the round's, then a
    pair for each draft so far, as one sequence that is run anew for every draft.
    """
    features = features_of(network, ids[:, : base + 1])
    embeddings = network.get_input_embeddings()(ids[:, 1 : base + 2]).clone()
    if parts.blind:
        embeddings[:, 0] = 0.0
    for token in [*drafted, None]:
        states = parts.run(embeddings, features, network.base_model.rotary_emb)
        normed = parts.norm(states)
        if token is not None:
            embeddings = torch.cat([embeddings, network.get_input_embeddings()(torch.tensor([[token]]))], dim=1)
            features = torch.cat([features, (normed if parts.normed else states)[:, -1:]], dim=1)
    logits: torch.Tensor = network.lm_head(normed[0, -1])
    return logits


def step_by_step(parts: Parts, network: Any, ids: torch.Tensor, base: int, gamma: int) -> list[int]:
    """Drafts of a round from that decoder."""
    drafts: list[int] = []
    while len(drafts) < gamma:
        drafts.append(int(recomputed(parts, network, ids, base, drafts).argmax()))
    return drafts


def parts_of(modules: Any, **how: Any) -> Parts:
    """The first module, with the attention that transformers chose."""
    layer = modules.layers[0]
    block = copy.deepcopy(layer.mtp_block)
    return Parts(layer.enorm, layer.hnorm, layer.eh_proj.weight, False, block, layer.post_norm, **how)


def check_rounds(head: Any, parts: Parts, network: Any, seed: int, gammas: tuple[int, ...] = (2, 5)) -> int:
    """Compares the rounds of a head at work with the head over the text and with the decoder without a cache."""
    torch.manual_seed(seed)
    text = greedy(network, torch.randint(0, VOCABULARY, (1, 5)), 60)
    features = features_of(network, text)
    first, count = 3, 0
    tops = replayed(head, text, features, max(gammas), first)
    for gamma in gammas:
        made = rounds(head, text, features, 5, gamma)
        assert all(agrees(made, tops, text[0].tolist(), first))
        with torch.inference_mode():
            assert made == [(base, step_by_step(parts, network, text, base, gamma)) for base, _ in made]
        count += len(made)
    return count


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings", "blind", "window", "normed"), REUSED)
def test_a_reused_module_drafts_as_a_decoder_that_recomputes_everything(
    kind: str,
    settings: dict[str, Any],
    blind: bool,
    window: int | None,
    normed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "SCORE_BYTES", 4000)  # several chunks a depth
    total = 0
    for seed in range(3):
        network = target(kind, seed, **settings)
        modules = modules_of(network, 1, seed)
        rope = {"layer_type": "sliding_attention"} if window else {}
        parts = parts_of(modules, blind=blind, window=window, normed=normed, rope=rope)
        total += check_rounds(ReusedModule(modules, VOCABULARY, blind, normed), parts, network, seed)
    assert total >= 120


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


def loaded(folder: Path, reuse: bool | None = None, gammas: tuple[int, ...] = (1, 5), **settings: Any) -> HeadDraft:
    """The modules of a checkpoint, as a profile has them."""
    options = TargetOptions(model=str(folder))
    profile: Any = SimpleNamespace(target=options, gammas=list(gammas))
    draft = MtpDraft(kind="mtp", reuse=reuse, **settings)
    return load_mtp("mtp", draft, profile, load_model("target", options, "float32"), None)  # type: ignore[arg-type]


def rms(weight: torch.Tensor, offset: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A norm with this weight above an offset."""
    return lambda rows: rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (offset + weight)


def of_layer(folder: Path, layer: int, place: str) -> dict[str, torch.Tensor]:
    """The tensors of a target's layer, named as those of a module."""
    start = f"model.layers.{layer}."
    tensors = load_file(folder / "model.safetensors")
    return {place + name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}


def random_parts(names: list[str]) -> dict[str, torch.Tensor]:
    """Weights of a projection, of the norms before it, and of the final norm."""
    projection, *norms = names
    return {projection: torch.randn(32, 64) * 0.4, **{name: torch.rand(32) for name in norms}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("qwen3_next", {}), ("qwen3_5_text", {"mtp_num_hidden_layers": 1}), ("qwen3_5_moe_text", {"mtp_num_hidden_layers": 1})],
)
def test_modules_of_hybrid_targets(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    total = 0
    for seed in range(2):
        network = target(kind, seed, rms_norm_eps=1e-6, **HYBRID | settings)
        folder = tmp_path / str(seed)
        network.save_pretrained(folder)
        names = [f"mtp.{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
        own = random_parts(names)
        save(network, folder, own | of_layer(folder, 3, "mtp.layers.0."))
        draft = loaded(folder)
        norms = [rms(own[name], 1.0) for name in names[1:]]
        parts = Parts(norms[0], norms[1], own[names[0]], False, network.model.layers[3], norms[2])
        total += check_rounds(draft.network, parts, draft.target.network, seed)
        assert draft.reading["layout"] == "mtp.*"
    assert total >= 70


def test_modules_of_mimo(tmp_path: Path) -> None:
    total = 0
    for seed in range(2):
        network = target("qwen2", seed, rms_norm_eps=1e-6, num_nextn_predict_layers=1)
        folder, place = tmp_path / str(seed), "model.mtp_layers.0."
        network.save_pretrained(folder)
        names = [
            f"{place}{name}.weight" for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        ]
        own = random_parts((names[0], names[1], names[2], names[3]))
        save(network, folder, own | of_layer(folder, 1, place))
        draft = loaded(folder)
        norms = [rms(own[name], 0.0) for name in names[1:]]
        parts = Parts(norms[0], norms[1], own[names[0]], True, network.model.layers[1], norms[2], blind=True)
        total += check_rounds(draft.network, parts, draft.target.network, seed)
    assert total >= 70


@pytest.mark.parametrize("is_chain", [True, False])
def test_states_do_not_depend_on_the_batch(is_chain: bool) -> None:
    network = target("glm4_moe", num_nextn_predict_layers=3, **GLM)
    modules = modules_of(network, 3)
    head: Any = ChainedModules(modules, VOCABULARY) if is_chain else ReusedModule(modules, VOCABULARY, blind=True)
    lengths = [9, 4, 14]
    ids = torch.randint(1, VOCABULARY, (3, 14))
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    together = list(head.states(ids, features_of(network, ids), 3, 1))
    assert all(states.isfinite().all() for states in together)
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, :length]
        for depth, states in enumerate(head.states(own, features_of(network, own), 3, 1), 1):
            known = length - depth - 1  # bases from 1 on whose token lies in the text
            torch.testing.assert_close(together[depth - 1][row, :known], states[0, :known], atol=1e-4, rtol=1e-4)


def test_all_depths_of_short_texts_are_finite() -> None:
    network = target("glm4_moe", num_nextn_predict_layers=3, **GLM)
    modules = modules_of(network, 3)
    for length in (1, 2):
        ids = torch.zeros(1, length, dtype=torch.long)
        for head in (ChainedModules(modules, VOCABULARY), ReusedModule(modules, VOCABULARY)):
            states = list(head.states(ids, features_of(network, ids), 3, 0))
            assert [each.shape for each in states] == [(1, length, 32)] * 3
            assert all(each.isfinite().all() for each in states)
