"""Attention of rounds inside a module of transformers: as the same module attends with a mask over each round alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from alphaprof.profiling.heads import attention
from alphaprof.profiling.heads.attention import Rounds, StepKeys, attend, use_rounds
from alphaprof.profiling.models.private import CACHE

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
TOKENS, FIRST, DEPTHS, HIDDEN = 14, 5, 5, 24


def modules(window: int | None) -> tuple[Any, Any, Any]:
    """An attention module with sinks and grouped keys as transformers computes it, the same in rounds, and its positions."""
    kind = "full_attention" if window is None else "sliding_attention"
    config = GptOssConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=[kind],
        sliding_window=window or 128,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    module = GptOssAttention(config, 0).eval().requires_grad_(False)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ours = copy.deepcopy(module)
    use_rounds([SimpleNamespace(self_attn=ours)], ours.config)
    return module, ours, GptOssRotaryEmbedding(config)


def run(module: Any, rotary: Any, rows: torch.Tensor, position_ids: torch.Tensor, mask: Any = None, **keys: Any) -> Any:
    turns = rotary(rows, position_ids[None])
    return module(rows, position_embeddings=turns, attention_mask=mask, **keys)[0]


def alone(module: Any, rotary: Any, rows: torch.Tensor, window: int | None) -> torch.Tensor:
    """A sequence at once, with a mask."""
    places = torch.arange(rows.shape[1])
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (window or len(places)))
    mask = torch.zeros(len(places), len(places)).masked_fill(hidden, -torch.inf)
    attended: torch.Tensor = run(module, rotary, rows, places, mask[None, None])
    return attended


@pytest.mark.parametrize("window", [None, 1, 2, 4, 7])
@pytest.mark.parametrize("room", [1, 1 << 20])
def test_rounds_attend_as_each_does_alone(window: int | None, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention sinks and windows shorter than a round among them."""
    monkeypatch.setattr(attention, "SCORE_BYTES", room)
    theirs, ours, rotary = modules(window)
    verified, drafted = torch.randn(2, TOKENS, HIDDEN), torch.randn(DEPTHS - 1, 2, TOKENS - FIRST, HIDDEN)
    rounds = Rounds(TOKENS - FIRST)
    made = [run(ours, rotary, verified, torch.arange(TOKENS), rounds=rounds)[:, FIRST:]]
    for depth, rows in enumerate(drafted, 2):
        made.append(run(ours, rotary, rows, torch.arange(FIRST, TOKENS) + depth - 1, rounds=rounds))
    for base in range(FIRST, TOKENS):
        round_alone = torch.cat([verified[:, : base + 1], drafted[:, :, base - FIRST].transpose(0, 1)], 1)
        expected = alone(theirs, rotary, round_alone, window)[:, base:]
        torch.testing.assert_close(torch.stack([rows[:, base - FIRST] for rows in made], 1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_a_text_that_grows_is_that_text_at_once(window: int | None) -> None:
    theirs, ours, rotary = modules(window)
    rows, keys, made = torch.randn(2, TOKENS, HIDDEN), StepKeys(), []
    expected = alone(theirs, rotary, rows, window)
    for start, end in ((0, 5), (5, 6), (6, 9), (9, TOKENS)):
        keys.start = start
        part, position_ids = rows[:, start:end], torch.arange(start, end)
        made.append(run(ours, rotary, part, position_ids, **{CACHE: keys}))
        keys.start = end
        run(ours, rotary, part.flip(1), position_ids + end - start, **{CACHE: keys})  # written over by the next
    torch.testing.assert_close(torch.cat(made, 1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["softcap", "position_bias"])
def test_attention_of_another_kind_is_refused(name: str) -> None:
    rows = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=name):
        attend(SimpleNamespace(layer_idx=0), rows, rows, rows, None, scaling=1.0, **{name: 30.0})
