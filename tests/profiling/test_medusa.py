"""Medusa heads: both layouts against a plain computation from their tensors, at work, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

from alphaprof.config.options import MedusaDraft, TargetOptions
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.medusa import load_medusa
from alphaprof.profiling.models.load import Model
from alphaprof.report.serving import paste_formats
from tests.profiling.modules import VOCABULARY, agrees, features_of, replayed, rounds, target

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
HEADS, BLOCKS, HIDDEN = 3, 2, 32
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def network() -> Any:
    return target("llama")


def tensors() -> Tensors:
    """Heads in FasterDecoding's layout."""
    torch.manual_seed(5)
    drawn: Tensors = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            drawn[f"{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN) * 0.4
            drawn[f"{head}.{block}.linear.bias"] = torch.randn(HIDDEN) * 0.4
        drawn[f"{head}.{BLOCKS}.weight"] = torch.randn(VOCABULARY, HIDDEN)
    return drawn


def for_vllm(theirs: Tensors, **others: torch.Tensor) -> Tensors:
    """The same heads in vLLM's layout."""
    drawn = {}
    for name, tensor in theirs.items():
        head, layer, part = name.split(".", 2)
        place = (
            f"blocks.{head}.layers.{layer}.{part.removeprefix('linear.')}" if "linear" in part else f"lm_heads.{head}.weight"
        )
        drawn[place] = tensor
    return drawn | others


def load(folder: Path, network: Any, stored: Tensors, gammas: tuple[int, ...] = (3,), **config: Any) -> HeadDraft:
    """The heads with these tensors and config, as a profile has them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    profile: Any = SimpleNamespace(target=TargetOptions(model="t", dtype="float32"), gammas=list(gammas))
    served = Model("target", network, "model", "t")
    return load_medusa("medusa", MedusaDraft(kind="medusa", model=str(folder)), profile, served, None)  # type: ignore[arg-type]


def plain(theirs: Tensors, features: torch.Tensor, head: int) -> torch.Tensor:
    """Logits of a head by the definition."""
    for block in range(BLOCKS):
        name = f"{head}.{block}.linear"
        features = features + silu(features @ theirs[f"{name}.weight"].T + theirs[f"{name}.bias"])
    return features @ theirs[f"{head}.{BLOCKS}.weight"].T


@pytest.mark.parametrize("layout", ["FasterDecoding's", "with a prefix", "vLLM's"])
def test_each_depth_is_its_own_head_on_the_last_state(layout: str, network: Any, tmp_path: Path) -> None:
    theirs, ids = tensors(), torch.randint(0, VOCABULARY, (2, 30))
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in theirs.items()}
    stored = {"vLLM's": for_vllm(theirs), "with a prefix": prefixed}.get(layout, theirs)
    draft = load(tmp_path, network, stored, medusa_num_heads=HEADS, medusa_num_layers=BLOCKS)
    features = features_of(network, ids)
    for head, states in enumerate(draft.network.states(ids, features, HEADS, 4)):
        logits = draft.network.logits(states.flatten(0, 1), head + 1)
        torch.testing.assert_close(logits, plain(theirs, features[:, 4:], head).flatten(0, 1))
    assert draft.depths == draft.network.most == HEADS
    assert paste_formats(draft.facts(), "one_hot") == ("vllm-config",)
    assert paste_formats(draft.facts(), "lossless") == ()
    assert draft.reading["layout"] == ("vLLM's" if layout == "vLLM's" else "FasterDecoding's")


def test_heads_at_work_draft_as_over_the_text(network: Any, tmp_path: Path) -> None:
    draft, total = load(tmp_path, network, tensors()), 0
    for seed in range(4):
        torch.manual_seed(seed)
        text = torch.randint(0, VOCABULARY, (1, 60))
        features = features_of(network, text)
        for gamma in (1, 3):
            made = rounds(draft.network, text, features, 3, gamma)
            assert all(agrees(made, replayed(draft.network, text, features, HEADS), text[0].tolist()))
            total += len(made)
    assert total >= 300


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_reduced_vocabulary(is_cut: bool, network: Any, tmp_path: Path) -> None:
    theirs, kept = tensors(), torch.tensor([5, 0, 3, 2])
    stored = for_vllm(theirs, token_map=kept)
    if is_cut:
        stored |= {name: tensor[kept] for name, tensor in stored.items() if name.startswith("lm_heads.")}
    draft = load(tmp_path, network, stored, truncated_vocab_size=4, logit_scale=0.5)
    ids = torch.randint(0, VOCABULARY, (1, 9))
    features = features_of(network, ids)
    assert draft.network.ids is not None
    assert draft.network.ids.tolist() == [0, 2, 3, 5]
    states = list(draft.network.states(ids, features, HEADS, 0))
    for head in range(HEADS):
        expected = plain(theirs, features[0], head)[:, [0, 2, 3, 5]] * 0.5
        torch.testing.assert_close(draft.network.logits(states[head][0], head + 1), expected)


def test_one_lm_head_for_all(network: Any, tmp_path: Path) -> None:
    theirs = tensors()
    stored = for_vllm(theirs)
    for head in range(1, HEADS):
        theirs[f"{head}.{BLOCKS}.weight"] = stored.pop(f"lm_heads.{head}.weight").copy_(theirs[f"0.{BLOCKS}.weight"])
    draft = load(tmp_path, network, stored, original_lm_head=True)
    features = torch.randn(1, 5, HIDDEN)
    last = list(draft.network.states(torch.zeros(1, 5, dtype=torch.long), features, HEADS, 0))[-1]
    torch.testing.assert_close(draft.network.logits(last[0], HEADS), plain(theirs, features[0], HEADS - 1))
    assert draft.reading["LM heads"] == "one for all heads"


Fault = tuple[dict[str, torch.Tensor | None], dict[str, Any], str]
BAD: dict[str, Fault] = {  # tensors that are changed or missing, settings, and words of the error
    "missing": ({"1.0.linear.weight": None}, {}, "1.0.linear.weight|blocks.1.0.weight"),
    "misshapen": ({"0.0.linear.weight": torch.zeros(HIDDEN, 64)}, {}, r"0.0.linear.weight \[32, 64\] for \[32, 32\]"),
    "another vocabulary": ({f"1.{BLOCKS}.weight": torch.zeros(9, HIDDEN)}, {}, r"\[9, 32\] for \[7, 32\]"),
    "nan": ({"2.1.linear.bias": torch.full((HIDDEN,), torch.nan)}, {}, "2.1.linear.bias has NaN"),
    "other blocks in config": ({}, {"medusa_num_layers": 1}, "hold 3 heads of 2 blocks, but its config.json says otherwise"),
    "gamma": ({}, {"gammas": (2, 4)}, "has 3 depths, but 4 are needed"),
}


@pytest.mark.parametrize("name", BAD)
def test_heads_that_do_not_fit_are_refused(name: str, network: Any, tmp_path: Path) -> None:
    changes, config, words = BAD[name]
    stored = {key: tensor for key, tensor in (tensors() | changes).items() if tensor is not None}
    with pytest.raises(ModelUnloadable, match=words):
        load(tmp_path, network, stored, **config)
