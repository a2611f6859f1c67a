"""EAGLE-3 networks: one pass over a text, and a cache, draft what a decoder drafts that runs over all tokens again."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaprof.profiling.heads import attention
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import recorded
from tests.conftest import slow
from tests.eagle import HIDDEN, IDS, VOCABULARY, Recomputing, Tensors, config, loaded, target, tensors, written

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
PROMPT, NEW, GAMMAS = 9, 28, (1, 2, 3, 5)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EMBEDDING = torch.randn(VOCABULARY, 24, generator=torch.Generator().manual_seed(3))
WINDOWS = {"layer_types": ["sliding_attention", "sliding_attention"]}
KNOWN = [0, 2, 3, 5, 6]
Variant = tuple[dict[str, Any], list[int] | None, Tensors]  # changes of the config, ids that it can draft, more tensors


def variant(ids: list[int] | None = KNOWN, more: Tensors | None = None, **changes: Any) -> Variant:
    return changes, ids, more or {}


def windowed(size: int, **layer: Any) -> Variant:
    return variant(layer=WINDOWS | {"sliding_window": size, "num_hidden_layers": 2} | layer)


OWN = "own embedding, narrower than the target"
DEEP = {"num_hidden_layers": 3}
VARIANTS: dict[str, Variant] = {
    "plain": variant(),
    "norm before the residual": variant(norm_before_residual=True),
    "norm before fc": variant(norm_before_fc=True),
    "a norm for each state": variant(fc_norm=True),
    "fed back after the norm": variant(norm_output=True),
    "two states": variant(**{IDS: [2, 5]}),
    "five states, the embedding among them": variant(**{IDS: [0, 1, 2, 4, 5]}),
    "three layers": variant(layer=DEEP),
    "three layers, all norms": variant(norm_before_residual=True, norm_before_fc=True, norm_output=True, layer=DEEP),
    "biases and wide heads": variant(layer={"attention_bias": True, "head_dim": 12}),
    "linear positions": variant(layer={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "positions of Llama 3": variant(layer={"rope_scaling": LLAMA3}),
    "qwen3": variant(layer={"model_type": "qwen3"}),
    "a sliding window": variant(layer={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}),
    "windows shorter than a round": windowed(3),
    "qwen3 with windows": windowed(6, model_type="qwen3", use_sliding_window=True),
    "all tokens": variant(None, draft_vocab_size=VOCABULARY),
    "a mapping that does not ascend": variant([5, 0, 6, 2, 3]),
    OWN: variant(KNOWN, {"embed_tokens.weight": EMBEDDING}, target_hidden_size=HIDDEN, layer={"hidden_size": 24}),
}


class Case:
    """A random head on the text of a random target: its files, the product's network, and the decoder that recomputes."""

    def __init__(self, folder: Path, variant: str, seed: int = 0) -> None:
        changes, ids, more = VARIANTS[variant]
        self.model = target(seed)
        described = config(**changes)
        weights = tensors(described, ids, seed + 1) | more
        self.draft: HeadDraft = loaded(written(folder, described, weights), self.model, GAMMAS)
        self.network = self.draft.network
        self.text = text(self.model, seed)
        states = self.model.network(torch.tensor([self.text]), output_hidden_states=True).hidden_states
        self.features = torch.cat([states[layer][0] for layer in described[IDS]], -1)
        self.known: dict[int, list[tuple[int, list[int]]]] = {}
        self.naive = Recomputing(described, weights, self.model.network.get_input_embeddings().weight)

    def accepted(self, drafted: list[int], start: int) -> int:
        """How many drafts of a round are what the text goes on with."""
        pairs = zip(drafted, self.text[start:], strict=False)
        return next((count for count, (left, right) in enumerate(pairs) if left != right), len(drafted))

    def rounds(self, gamma: int) -> list[tuple[int, list[int]]]:
        """Rounds of the decoder that recomputes: where each starts, and what it drafts."""
        if gamma in self.known:
            return self.known[gamma]
        start, rounds = PROMPT + 1, self.known.setdefault(gamma, [])
        while start < PROMPT + NEW:
            drafted = self.naive.proposal(self.text[:start], self.features[: start - 1], gamma)
            rounds.append((start, drafted))
            start += self.accepted(drafted, start) + 1
        return rounds


def text(model: Model, seed: int) -> list[int]:
    """A random prompt and its greedy continuation, somewhat longer than the rounds go."""
    ids = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
    for _ in range(NEW + max(GAMMAS) + 1):
        ids = torch.cat([ids, model.network(ids).logits[:, -1:].argmax(-1)], 1)
    return [int(token) for token in ids[0]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The case of a variant, made once; each has a target of its own."""
    return cache(lambda variant: Case(tmp_path_factory.mktemp("head"), variant, list(VARIANTS).index(variant)))


def depths(case: Case, first: int = 0, most: int = max(GAMMAS)) -> list[torch.Tensor]:
    """Logits [bases from `first` on, logits] at every depth, by one pass over states that the product records."""
    ids = torch.tensor([case.text])
    with torch.inference_mode(), recorded(case.model.network.model, case.network.layers) as states:
        case.model.network.model(ids)
        features = torch.cat([states[layer] for layer in case.network.layers], -1)
        return [case.network.logits(rows[0], 1) for rows in case.network.states(ids, features, most, first)]


def tokens(case: Case, logits: torch.Tensor) -> list[int]:
    best = logits.argmax(-1)
    return (best if case.network.ids is None else case.network.ids[best]).tolist()


DISTINCT = ("plain", "a norm for each state", "two states", "three layers, all norms", "qwen3", "all tokens", OWN)


@pytest.mark.parametrize("variant", [*DISTINCT, *slow((name,) for name in VARIANTS if name not in DISTINCT)])
def test_every_round_is_that_of_a_decoder_that_recomputes_everything(case: Any, variant: str) -> None:
    """Drafts up to and with the first wrong one by the pass, and all of them by the cache."""
    this = case(variant)
    by_depth = [tokens(this, logits) for logits in depths(this, PROMPT - 1)]
    for gamma in GAMMAS:
        cache, read = this.network.cache(), 0
        for start, drafted in this.rounds(gamma):
            seen = drafted[: this.accepted(drafted, start) + 1]
            assert [by_depth[depth][start - 2 - (PROMPT - 1)] for depth in range(len(seen))] == seen
            fed = torch.tensor([this.text[read + 1 : start]])
            state, made = cache.extend(fed, this.features[None, read : start - 1]), []
            read = start - 1
            for depth in range(1, gamma + 1):
                if depth > 1:
                    state = cache.deepen(torch.tensor(made[-1:]), state, depth)
                made += tokens(this, this.network.logits(state, depth))
            assert made == drafted


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_recomputing(case: Any, variant: str) -> None:
    """At every depth of some rounds on the text's own path, in the order of the target's ids."""
    this = case(variant)
    order = range(VOCABULARY) if this.naive.ids is None else sorted(range(5), key=this.naive.ids.__getitem__)
    made = depths(this)
    for start in (2, PROMPT, 20):
        for depth in range(1, 6):
            path = this.text[start : start + depth - 1]
            expected = this.naive.logits(this.text[:start], this.features[: start - 1], path)[list(order)]
            torch.testing.assert_close(made[depth - 1][start - 2], expected, atol=2e-5, rtol=1e-4)
    assert this.network.ids is None or this.network.ids.tolist() == sorted(this.naive.ids)


def test_a_text_does_not_depend_on_its_batch(case: Any) -> None:
    """Alone, and padded beside a longer one; states of padding are finite."""
    this = case("plain")
    short = len(this.text) - 12
    ids = torch.tensor([this.text, [*this.text[3 : 3 + short], *[0] * 12]])
    features = torch.stack([this.features, torch.cat([this.features[3 : 3 + short], torch.full((12, 96), 1e4)])])
    with torch.inference_mode():
        together = list(this.network.states(ids, features, 5, 4))
        alone = [list(this.network.states(ids[:1], features[:1], 5, 4))]
        alone.append(list(this.network.states(ids[1:, :short], features[1:, :short], 5, 4)))
    for depth in range(5):
        assert bool(together[depth].isfinite().all())
        for row, length in enumerate((len(this.text), short)):
            known = length - 4 - depth  # bases whose token at this depth is in the text
            torch.testing.assert_close(together[depth][row, :known], alone[row][depth][0, :known], atol=1e-5, rtol=1e-5)


def test_a_cache_of_several_texts_is_that_of_each(case: Any) -> None:
    this = case("three layers, all norms")
    starts, caches = (0, 5), [this.network.cache() for _ in range(3)]
    fed = torch.tensor([this.text[start + 1 : start + 21] for start in starts])
    features = torch.stack([this.features[start : start + 20] for start in starts])
    for part in (slice(0, 11), slice(11, 20)):
        both = caches[0].extend(fed[:, part], features[:, part])
        apart = [one.extend(fed[row, None, part], features[row, None, part]) for row, one in enumerate(caches[1:])]
        for depth in (2, 3, 4):
            torch.testing.assert_close(both, torch.cat(apart), atol=1e-5, rtol=1e-5)
            token = fed[:, depth]
            both = caches[0].deepen(token, both, depth)
            apart = [
                one.deepen(token[row, None], state, depth)
                for row, (one, state) in enumerate(zip(caches[1:], apart, strict=True))
            ]


def test_rows_in_chunks_are_the_same(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one row and of a few rows, from the first base on and from a later one."""
    this = case("three layers")
    whole = depths(this), depths(this, 7)
    for size in (1, 2000):
        monkeypatch.setattr(attention, "SCORE_BYTES", size)
        for expected, made in zip(whole, (depths(this), depths(this, 7)), strict=True):
            torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close([logits[7:] for logits in whole[0]], whole[1], atol=1e-5, rtol=1e-5)


def test_a_cache_grows_beyond_its_first_size(case: Any) -> None:
    """A hundred tokens one at a time, as all at once."""
    this = case("plain")
    ids = torch.randint(VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(9))
    features = torch.randn(1, 100, 96, generator=torch.Generator().manual_seed(10))
    step, whole = this.network.cache(), this.network.cache()
    for place in range(100):
        state = step.extend(ids[:, place : place + 1], features[:, place : place + 1])
        step.deepen(ids[:, 0], step.deepen(ids[:, 0], state, 2), 3)
    torch.testing.assert_close(state, whole.extend(ids, features), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(tmp_path: Path, dtype: torch.dtype) -> None:
    """States and logits in the head's own dtype, near those in float32."""
    this = Case(tmp_path / "full", "plain")
    name = str(dtype).removeprefix("torch.")
    half = loaded(tmp_path / "full", this.model, dtype=name).network
    ids = torch.tensor([this.text])
    with torch.inference_mode():
        pairs = zip(*(n.states(ids, this.features[None], 4, 2) for n in (this.network, half)), strict=True)
        for exact, rough in pairs:
            assert rough.dtype == half.logits(rough[0], 1).dtype == dtype
            error = (exact - rough.float()).norm() / exact.norm()
            assert error < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_what_is_read_and_shared(case: Any) -> None:
    """Another reading has the same tensors; the target's embedding is none of the head's own."""
    this = case("plain")
    twin = this.network.with_wiring(this.draft.alternatives[0].network.wiring)
    assert twin.layers == (2, 4, 5)
    assert this.network.layers == (1, 3, 4)
    pairs = zip(twin.parameters(), this.network.parameters(), strict=True)
    assert all(left is right for left, right in pairs)
    assert not any("embed" in name for name in this.network.state_dict())
    assert this.draft.facts().parameters == sum(
        weight.numel() for name, weight in this.naive.weights.items() if name not in ("d2t", "t2d")
    )
