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


def faulty(change: str) -> tuple[Tensors, dict[str, Any], tuple[int, ...]]:
    """Tensors, config and gammas with one fault."""
    stored, config, gammas = tensors(), {}, (3,)
    if change == "missing":
        del stored["1.0.linear.weight"]
    elif change == "unused":
        stored["9.norm.weight"] = torch.zeros(3)
    elif change == "misshapen":
        stored["0.0.linear.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    elif change == "another vocabulary":
        stored = {
            name: torch.zeros(9, HIDDEN) if name.endswith(f"{BLOCKS}.weight") else each for name, each in stored.items()
        }
    elif change == "nan":
        stored["2.1.linear.bias"][3] = float("nan")
    elif change == "more heads in config":
        config = {"medusa_num_heads": 4}
    elif change == "other blocks in config":
        config = {"medusa_num_layers": 1}
    elif change == "gamma":
        gammas = (2, 4)
    elif change == "no heads":
        stored = {"fc.weight": torch.zeros(3, 3)}
    elif change == "two LM heads":
        stored["0.5.weight"] = torch.zeros(VOCABULARY, HIDDEN)
    elif change == "map":
        stored["token_map"] = torch.tensor([1, 1])
    return stored, config, gammas


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "1.0.linear.weight|blocks.1.0.weight"),
        ("unused", "9.norm.weight"),
        ("misshapen", r"0.0.linear.weight is \[32, 64\].*\[32, 32\]"),
        ("another vocabulary", r"\[9, 32\].*\[7, 32\]"),
        ("nan", "2.1.linear.bias has NaN"),
        ("more heads in config", "medusa_num_heads 4, and its files hold 3"),
        ("other blocks in config", "medusa_num_layers 1, and its files hold 2"),
        ("gamma", "has 3 depths, and 4 are asked for"),
        ("no heads", "no Medusa heads"),
        ("two LM heads", "two LM heads"),
        ("map", "different ids of the target, 0 to 6"),
    ],
)
def test_heads_that_do_not_fit_are_refused(change: str, words: str, network: Any, tmp_path: Path) -> None:
    stored, config, gammas = faulty(change)
    with pytest.raises(ModelUnloadable, match=words):
        load(tmp_path, network, stored, gammas, **config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_scale", "x"), ("logit_scale", float("nan")), ("logit_scale", 0), ("original_lm_head", "false")],
)
def test_a_setting_of_another_kind_is_refused(name: str, value: object, network: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelUnloadable, match=f"{name} in its config.json is {value!r}, not "):
        load(tmp_path, network, tensors(), **{name: value})


def test_a_scale_of_logits_is_kept_and_null_is_none(network: Any, tmp_path: Path) -> None:
    scales = {"null": None, "half": 0.5}
    drafts = {name: load(tmp_path / name, network, tensors(), logit_scale=scale) for name, scale in scales.items()}
    states = torch.randn(2, HIDDEN)
    logits = {name: draft.network.logits(states, 1) for name, draft in drafts.items()}
    torch.testing.assert_close(logits["half"], logits["null"] * 0.5)
    torch.testing.assert_close(logits["null"], states @ tensors()[f"0.{BLOCKS}.weight"].T)


def test_pickles_are_refused_with_their_conversion(network: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(tensors(), tmp_path / "medusa_lm_head.pt")
    profile: Any = SimpleNamespace(target=TargetOptions(model="t"), gammas=[1])
    draft = MedusaDraft(kind="medusa", model=str(tmp_path))
    with pytest.raises(ModelUnloadable, match=r"medusa_lm_head\.pt") as caught:
        load_medusa("m", draft, profile, Model("target", network, "model", "t"), None)  # type: ignore[arg-type]
    assert "save_file" in caught.value.hint
