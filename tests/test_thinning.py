"""Batches that texts leave: the same texts as those of a batch that stays whole, on several architectures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

from alphaprof.profiling import thinning
from alphaprof.profiling.models import Model
from alphaprof.profiling.processing import Processing, Sampler
from alphaprof.profiling.thinning import generate_ids

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
EOS = (7, 20, 33, 41, 50, 62)
LIMIT = 40
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "eos_token_id": EOS[0],
    "pad_token_id": 0,
    "bos_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 9},
    "Gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8},
    "Gemma3Text": {"sliding_window": 9, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
}


def model(kind: str) -> Model:
    """A tiny random model of an architecture, which ends its texts after different numbers of tokens."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS.get(kind, {}))
    torch.manual_seed(3)
    of = "Gemma3" if kind == "Gemma3Text" else kind
    network = getattr(transformers, f"{of}ForCausalLM")(config).eval()
    network.generation_config = GenerationConfig(eos_token_id=list(EOS), pad_token_id=EOS[0])
    return Model("target", network, "model", "t")


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of different lengths, with their mask."""
    lengths = [3, 17, 8, 20, 5, 12, 9, 4, 15, 6, 11, 7]
    ids, mask = torch.zeros((2, len(lengths), max(lengths)), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.from_numpy(np.random.default_rng(row).integers(8, 64, length))
        mask[row, -length:] = 1
    return ids, mask


def sampler(width: int) -> Sampler:
    numbers = torch.from_numpy(np.random.default_rng(5).random((12, LIMIT)))
    return Sampler(Processing(1.5), numbers, width, 64)


def ended(new: torch.Tensor) -> list[list[int]]:
    """Texts up to their EOS."""
    ends = [[place for place, token in enumerate(row) if token in EOS] for row in new.tolist()]
    return [row[: end[0] + 1] if end else row for row, end in zip(new.tolist(), ends, strict=True)]


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [*KINDS, "Mamba"])
def test_texts_are_those_of_generate_and_fewer_go_through_the_model(
    kind: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal ids in float32, whatever leaves when; recurrent models keep their batch whole."""
    target = model(kind)
    ids, mask = prompts()
    fed: list[int] = []
    target.network.register_forward_pre_hook(lambda *found: fed.append(len(found[2]["input_ids"])), with_kwargs=True)
    counts, texts = [], []
    for share in (8, 1000, 1):
        monkeypatch.setattr(thinning, "SHARE", share)
        fed.clear()
        texts.append(ended(generate_ids(target, ids, mask, LIMIT, sampler(ids.shape[1]) if drawn else None)))
        counts.append(sum(fed))
    monkeypatch.setattr(thinning, "_divisible", lambda _: None)
    fed.clear()
    whole = ended(generate_ids(target, ids, mask, LIMIT, sampler(ids.shape[1]) if drawn else None))
    assert texts == [whole] * 3
    if drawn:
        assert len({len(text) for text in whole}) > 3
    if kind == "Mamba":
        assert counts == [sum(fed)] * 3
    elif len({len(text) for text in whole}) > 1:
        assert counts[1] < sum(fed)
        assert counts[1] <= counts[0] <= sum(fed)
