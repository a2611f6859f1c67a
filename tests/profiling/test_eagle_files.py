"""Files of EAGLE heads: three layouts, how engines take them, logits of speculators, EAGLE-1, and files that are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from alphaprof.config.options import ModelOptions
from alphaprof.errors import AlphaprofError, ModelUnloadable, VocabularyMismatch
from alphaprof.profiling.heads.attention import Reach
from alphaprof.profiling.heads.dflash import DFlash
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.eagle import EMBEDDING, LM_HEAD, Wiring
from alphaprof.profiling.heads.eagle_files import eagle3_format, is_guessed, wiring_as
from alphaprof.profiling.heads.files import files_of
from alphaprof.profiling.heads.network import MaskRows
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.teacher_forced import FINAL
from tests import tiny
from tests.eagle import (
    BLOCKS,
    HIDDEN,
    IDS,
    VOCABULARY,
    Recomputing,
    Tensors,
    config,
    converted,
    loaded,
    target,
    tensors,
    written,
)

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
GOLDEN = Path(__file__).parent.parent / "golden" / "eagle3_speculators.safetensors"
with safe_open(GOLDEN, framework="pt") as opened:
    CONFIGS: dict[str, Any] = json.loads(opened.metadata()["configs"])


@pytest.fixture(scope="module")
def model() -> Model:
    return target()


def states(draft: HeadDraft, features: torch.Tensor, depths: int = 4) -> torch.Tensor:
    """States [depth, base, hidden] of a fixed text."""
    ids = torch.arange(features.shape[1])[None] * 5 % VOCABULARY
    with torch.inference_mode():
        return torch.stack([rows[0] for rows in draft.network.states(ids, features, depths, 2)])


FEATURES = torch.randn(1, 20, 3 * HIDDEN, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("variant", CONFIGS)
def test_logits_are_those_of_speculators(tmp_path: Path, variant: str) -> None:
    """Within 1e-5 at depths 1 to 5, from the files that speculators wrote."""
    golden = load_file(GOLDEN)
    weights = {name.split("/")[1]: tensor for name, tensor in golden.items() if name.startswith(f"{variant}/")}
    expected, described = weights.pop("logits"), CONFIGS[variant]
    embedding, ids = golden["embed_tokens.weight"], golden["ids"]
    model = target(vocab_size=len(embedding))
    model.network.get_input_embeddings().weight.data = embedding
    network = loaded(written(tmp_path, described, weights), model).network
    features = golden["features"][..., : weights["fc.weight"].shape[1]]
    features = torch.cat([features, features[:, :1]], 1)  # no round begins after the last token
    compared = 0
    with torch.inference_mode():
        for row in range(len(ids)):
            passes = network.states(ids[row : row + 1], features[row : row + 1], 5, 0)
            for depth, rows in enumerate(passes):
                known = ~expected[depth, row].isnan().any(-1)
                made = network.logits(rows[0, :-1], depth + 1)
                torch.testing.assert_close(made[known], expected[depth, row][known], atol=1e-5, rtol=0)
                compared += int(known.sum())
    assert compared == len(ids) * (14 + 13 + 12 + 11 + 10)


@pytest.mark.parametrize("layout", ["SafeAILab", "SpecForge"])
def test_the_same_head_in_other_layouts_gives_the_same_states(tmp_path: Path, model: Model, layout: str) -> None:
    """Tensors under their names, ids as outputs of layers or by the rule of those who write none."""
    described = config(**{IDS: [2, 3, 4]})
    model = target(num_hidden_layers=7)  # 2, 7 // 2, 7 - 3
    weights = tensors(described)
    first = loaded(written(tmp_path / "first", described, weights), model)
    other = loaded(written(tmp_path / "other", *converted(described, weights, layout)), model)
    assert first.network.layers == other.network.layers == (2, 3, 4)
    assert torch.equal(states(first, FEATURES), states(other, FEATURES))
    assert (first.reading["layout"], other.reading["layout"]) == ("speculators", layout)
    assert (first.facts().foreign, other.facts().foreign) == (("SGLang",), ())  # it finds no model_type


@pytest.mark.parametrize("kept", [{"model_type": "phi3"}, {"model_type": "qwen2"}, {"num_hidden_layers": 36}])
@pytest.mark.parametrize("layout", ["SafeAILab", "SpecForge"])
def test_what_trainers_keep_of_the_target_changes_nothing(
    tmp_path: Path, model: Model, layout: str, kept: dict[str, Any]
) -> None:
    """The architecture says what its layers are, and the files how many there are."""
    described, weights = converted(config(), tensors(config()), layout)
    described |= {IDS: [1, 2, 4]}
    first = loaded(written(tmp_path / "first", described, weights), model)
    other = loaded(written(tmp_path / "other", described | kept, weights), model)
    assert torch.equal(states(first, FEATURES), states(other, FEATURES))
    assert first.facts() == dataclasses.replace(other.facts(), reference=first.reference)


def test_specforges_p_eagle_is_that_of_speculators_in_other_words(tmp_path: Path, model: Model) -> None:
    """Settings at the top, an architecture for the type, and no mask token: its trainer takes one from the tokenizer."""
    described = config(layer={"num_hidden_layers": 2}, speculators_model_type="peagle", mask_token_id=1)
    weights = tensors(described) | {"mask_hidden": torch.linspace(-1, 1, 3 * HIDDEN)[None, None]}
    first = loaded(written(tmp_path / "first", described, weights), model, kind="p_eagle")
    flat = dict(described["transformer_layer_config"]) | {"draft_vocab_size": 5, "norm_before_residual": False}
    flat |= {"architectures": ["PEagleDraftModel"], "eagle_config": {IDS: [0, 2, 3]}}
    named = loaded(written(tmp_path / "named", flat | {"mask_token_id": 1}, weights), model, kind="p_eagle")
    assert (first.engines, named.engines, named.reading["layout"], named.doubts) == (("vLLM",), (), "SpecForge", ())
    assert torch.equal(states(first, FEATURES), states(named, FEATURES))
    small = tiny.tokenizer()
    small.pad_token, small.eos_token = None, small.convert_ids_to_tokens(4)
    folder = written(tmp_path / "unnamed", flat, weights)
    unnamed = loaded(folder, model, kind="p_eagle", words=small)
    assert (unnamed.reading["mask token"], len(unnamed.doubts)) == ("4", 1)
    assert "default for this tokenizer is 4" in unnamed.doubts[0]["message"]
    small.eos_token = None
    with pytest.raises(ModelUnloadable, match="has no valid mask token: None"):
        loaded(folder, model, kind="p_eagle", words=small)


def test_older_names_of_norms_and_layers_are_read(tmp_path: Path, model: Model) -> None:
    """`use_aux_norm` with `aux_norm_low` and so on, as SGLang reads them."""
    described = config(fc_norm=True)
    weights = tensors(described)
    flat, renamed = converted(described, weights, "SpecForge")
    names = {f"fc_norm.{place}": f"aux_norm_{word}" for place, word in enumerate(("low", "mid", "high"))}
    older = {re.sub(r"^fc_norm\.\d", lambda match: names[match[0]], name): weight for name, weight in renamed.items()}
    first = loaded(written(tmp_path / "first", described, weights), model)
    other = loaded(written(tmp_path / "other", flat | {"use_aux_norm": True}, older), model)
    assert torch.equal(states(first, FEATURES), states(other, FEATURES))


def test_a_single_state_enters_as_it_is(tmp_path: Path, model: Model) -> None:
    """`use_aux_hidden_state: false`: the state after the final norm, without fc, even where the files hold one."""
    described = config()
    flat, weights = converted(described, tensors(described), "SafeAILab")
    flat["eagle_config"] = {"use_aux_hidden_state": False}
    unused = loaded(written(tmp_path / "unused", flat, weights), model)
    del weights["fc.weight"]
    draft = loaded(written(tmp_path / "none", flat, weights), model)
    assert draft.network.layers == unused.network.layers == (FINAL,)
    own = FEATURES[..., :HIDDEN].contiguous()
    assert torch.equal(states(draft, own), states(unused, own))
    weights["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)], 1)
    del flat["eagle_config"]
    deeper = target(num_hidden_layers=7)
    deeper.network.set_input_embeddings(model.network.get_input_embeddings())
    identity = loaded(written(tmp_path / "identity", flat, weights), deeper)
    torch.testing.assert_close(states(draft, own), states(identity, FEATURES), atol=1e-5, rtol=1e-5)


def test_the_targets_lm_head_stands_in_for_one_that_is_missing(tmp_path: Path, model: Model) -> None:
    described = config(draft_vocab_size=VOCABULARY)
    weights = tensors(described, None)
    own = loaded(written(tmp_path / "own", described, weights), model)
    del weights["lm_head.weight"]
    shared = loaded(written(tmp_path / "shared", described, weights), model)
    rows = torch.randn(3, HIDDEN)
    normed = own.network.norm(rows)  # type: ignore[attr-defined]
    torch.testing.assert_close(shared.network.logits(rows, 1), model.network.lm_head(normed))
    assert own.facts().parameters == (shared.facts().parameters or 0) + VOCABULARY * HIDDEN


def test_a_head_in_several_files_is_one(tmp_path: Path, model: Model) -> None:
    described = config()
    weights = tensors(described)
    whole = loaded(written(tmp_path / "whole", described, weights), model)
    parts = written(tmp_path / "parts", described, dict(list(weights.items())[:5]))
    (parts / "model.safetensors").rename(parts / "model-00001-of-00002.safetensors")
    save_file(dict(list(weights.items())[5:]), parts / "model-00002-of-00002.safetensors")
    assert torch.equal(states(whole, FEATURES), states(loaded(parts, model), FEATURES))


# Layout, settings in config.json, target, and which states are read as the files mean it, for vLLM and for SGLang.
SPECULATORS, SPECFORGE, SAFEAILAB, VLLM = "speculators", "SpecForge", "SafeAILab", "vLLM"
READERS = ("checkpoint", "vLLM", "SGLang")
GUESS, TWELVE = (2, 6, 9), {"num_hidden_layers": 12, "model_type": "llama"}
DEEPSEEK, GPT_OSS = (TWELVE | {"model_type": kind} for kind in ("deepseek_v3", "gpt_oss"))
STATES = [
    (SPECULATORS, {IDS: [9, 2, 6]}, TWELVE, (9, 2, 6), (2, 6, 9), (3, 7, 10)),
    (SPECULATORS, {}, TWELVE, GUESS, GUESS, GUESS),
    (SPECFORGE, {"eagle_config": {IDS: [1, 5, 8]}}, TWELVE, (2, 6, 9), (1, 5, 8), (2, 6, 9)),
    (SPECFORGE, {"eagle_config": {IDS: [2, 6, 9]}}, DEEPSEEK, (3, 7, 10), (2, 6, 9), (2, 6, 9)),
    (SPECFORGE, {"eagle_config": {IDS: [1, 5, 8]}}, DEEPSEEK, (2, 6, 9), (1, 5, 8), (2, 6, 9)),
    (SPECFORGE, {"eagle_config": {IDS: [8, 10, 12]}}, GPT_OSS, (8, 10, 12), (8, 10, 12), (8, 10, 12)),
    (SPECFORGE, {"eagle_config": {IDS: [1, 5, 8]}}, GPT_OSS, (2, 6, 9), (1, 5, 8), (2, 6, 9)),
    (SPECFORGE, {IDS: [1, 5, 8]}, TWELVE, (2, 6, 9), (1, 5, 8), GUESS),
    (SAFEAILAB, {}, TWELVE, GUESS, GUESS, GUESS),
    (VLLM, {"eagle_config": {IDS: [1, 5, 8]}}, TWELVE, (1, 5, 8), (1, 5, 8), (2, 6, 9)),
]
ARCHITECTURES = {SPECFORGE: "LlamaForCausalLMEagle3", SAFEAILAB: "LlamaForCausalLM", VLLM: "Eagle3LlamaForCausalLM"}


def described_as(layout: str, folder: Path, changes: dict[str, Any], weights: Tensors | None = None) -> Any:
    """What the files of a head in a layout say."""
    described = config()
    weights = tensors(described) if weights is None else weights
    if layout == SPECULATORS:
        del described[IDS], described["norm_before_residual"]
    else:
        described, weights = converted(described, weights, SAFEAILAB)
        described["architectures"] = [ARCHITECTURES[layout]]
    folder = written(folder, described | changes, weights)
    return eagle3_format(files_of("head", ModelOptions(model=str(folder))))


@pytest.mark.parametrize(("layout", "changes", "of", "checkpoint", "vllm", "sglang"), STATES)
def test_states_are_read_as_the_files_mean_it_or_as_an_engine_takes_them(
    tmp_path: Path, layout: str, changes: Any, of: Any, checkpoint: Any, vllm: Any, sglang: Any
) -> None:
    head = described_as(layout, tmp_path, changes)
    made = [wiring_as(reader, head, SimpleNamespace(**of)) for reader in READERS]
    assert [reading.layers for reading in made] == [checkpoint, vllm, sglang]
    assert is_guessed(head) == (not changes)


# Layout, settings, and where the residual is taken as the files mean it, for vLLM and for SGLang: after the norm?
RESIDUALS = [
    (SPECULATORS, {}, (False, True, False)),
    (SPECULATORS, {"norm_before_residual": True}, (True, True, False)),
    (SPECULATORS, {"norm_before_residual": False}, (False, False, False)),
    (SPECFORGE, {}, (False, False, False)),
    (SPECFORGE, {"norm_before_residual": True}, (True, True, False)),
]


@pytest.mark.parametrize(("layout", "changes", "expected"), RESIDUALS)
def test_the_residual_is_where_each_reader_takes_it(tmp_path: Path, layout: str, changes: Any, expected: Any) -> None:
    head = described_as(layout, tmp_path, changes)
    made = [wiring_as(reader, head, SimpleNamespace(**TWELVE)) for reader in READERS]
    assert tuple(reading.norm_before_residual for reading in made) == expected


def test_a_norm_before_fc_that_the_config_does_not_name_is_left_out_by_engines(tmp_path: Path, model: Model) -> None:
    """The files hold its weight: they mean it. Engines read the flag alone."""
    described = config(norm_before_fc=True)
    weights = tensors(described)
    flat, moved = converted(described, weights, "SpecForge")
    folder = written(tmp_path / "unnamed", flat, moved)
    draft = loaded(folder, model)
    named = loaded(written(tmp_path / "first", described, weights), model)
    assert torch.equal(states(draft, FEATURES), states(named, FEATURES))
    flat["eagle_config"]["norm_before_fc"] = True
    nested = written(tmp_path / "nested", flat, moved)
    for place, expected in ((folder, [True, False, False]), (nested, [True] * 3)):
        head = eagle3_format(files_of("head", ModelOptions(model=str(place))))
        of = model.network.config
        assert [wiring_as(reader, head, of).norm_before_fc for reader in READERS] == expected


def test_other_readings_are_listed_with_what_asks_for_them_and_who_reads_so(tmp_path: Path, model: Model) -> None:
    draft = loaded(written(tmp_path, config(), tensors(config())), model)
    found = {each.changed: each for each in draft.alternatives}
    assert draft.engines == ("vLLM",)
    assert {words: (each.network.wiring, each.depth, each.engines) for words, each in found.items()} == {  # type: ignore[attr-defined]
        "states of the target one layer later": (Wiring((2, 4, 5)), 1, ("SGLang",)),
        "states of the target one layer earlier": (Wiring((0, 2, 3)), 1, ()),
        "the residual taken after the norm": (Wiring((1, 3, 4), norm_before_residual=True), 1, ()),
        "states fed back after the norm": (Wiring((1, 3, 4), norm_output=True), 2, ()),
    }
    assert found["states of the target one layer later"].setting == (
        f"set {IDS}: [2, 4, 5] ([1, 3, 4] for SGLang) in its config.json"
    )
    assert found["the residual taken after the norm"].setting == "set norm_before_residual: true in its config.json"
    assert draft.doubts == ()
    described = config(norm_before_residual=True)  # which SGLang does not have
    draft = loaded(written(tmp_path / "normed", described, tensors(described)), model)
    assert {each.changed for each in draft.alternatives if "SGLang" in each.engines} == {
        "states of the target one layer later",
        "the residual taken before the norm",
    }


def test_files_without_layer_ids_are_doubted(tmp_path: Path) -> None:
    described = config(**{IDS: None})
    draft = loaded(written(tmp_path, described, tensors(described)), target(num_hidden_layers=8))
    assert draft.network.layers == (2, 4, 5)
    assert draft.engines == ("vLLM", "SGLang")
    assert len(draft.doubts) == 1


def test_options_reach_the_draft(tmp_path: Path, model: Model) -> None:
    folder = written(tmp_path, config(), tensors(config()))
    draft = loaded(folder, model, gammas=(1, 4))
    assert (draft.depths, draft.context, draft.kind) == (4, 128, "eagle3")
    draft = loaded(folder, model, gammas=(1, 4), depths=6)
    assert (draft.depths, draft.facts().reduced_vocabulary) == (6, True)


def test_names_below_model_and_positions_by_layer_type_are_read(tmp_path: Path, model: Model) -> None:
    """As another prefix, and as one rope_theta, would be."""
    described, weights = config(), tensors(config())
    plain = loaded(written(tmp_path / "plain", described, weights), model)
    prefixed = loaded(written(tmp_path / "model", described, {f"model.{key}": each for key, each in weights.items()}), model)
    ropes = {"rope_type": "default", "rope_theta": 77.0}, {"rope_type": "default", "rope_theta": 1e4}
    described["transformer_layer_config"]["rope_parameters"] = {"full_attention": ropes[0], "sliding_attention": ropes[1]}
    turned = loaded(written(tmp_path / "turned", described, weights), model)
    expected = states(plain, FEATURES)
    assert torch.equal(states(prefixed, FEATURES), expected)
    assert turned.network.config.rope_parameters["rope_theta"] == 77.0
    assert not torch.equal(states(turned, FEATURES), expected)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_positions_in_three_sections_are_plain_ones_in_text(tmp_path: Path, model: Model, name: str) -> None:
    described = config()
    weights = tensors(described)
    plain = loaded(written(tmp_path / "plain", described, weights), model)
    described["transformer_layer_config"][name] = {"rope_type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    read = loaded(written(tmp_path / "sections", described, weights), model)
    assert read.network.config.rope_parameters["rope_type"] == "default"
    assert torch.equal(states(read, FEATURES), states(plain, FEATURES))


# Bad input: what is done to config and tensors, and words of the error.
Change = Callable[[dict[str, Any], Tensors], object]


def layer(**changes: Any) -> Change:
    return lambda described, weights: described["transformer_layer_config"].update(changes)


def top(**changes: Any) -> Change:
    return lambda described, weights: described.update(changes)


def weight(name: str, value: torch.Tensor) -> Change:
    return lambda described, weights: weights.update({name: value})


def without(name: str) -> Change:
    return lambda described, weights: weights.pop(name)


def flat(**changes: Any) -> Change:
    """As files of another layout, with settings changed."""

    def change(described: dict[str, Any], weights: Tensors) -> None:
        other, renamed = converted(described, weights, "SpecForge")
        described.clear()
        weights.clear()
        described.update(other | changes)
        weights.update(renamed)

    return change


def as_eagle1(described: dict[str, Any], weights: Tensors) -> None:
    flat(architectures=["LlamaForCausalLM"])(described, weights)
    for name in ("lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight", "d2t", "t2d"):
        weights.pop(name)
    weights.update({name.replace("midlayer.", "layers.0."): weights.pop(name) for name in list(weights)})


BAD = {
    "another width": (top(target_hidden_size=48), "needs state width 48 and 7 ids, but tiny has 32 and 7"),
    "another vocabulary": (
        lambda described, weights: (layer(vocab_size=9)(described, weights), weights.pop("t2d")),
        "needs state width 32 and 9 ids, but tiny has 32 and 7",
    ),
    "another number of states": (top(**{IDS: [1, 3]}), "3 states, but config.json names states after 1, 3 of 6 layers"),
    "another architecture": (
        top(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/name"}}),
        "it was trained for Qwen3ForCausalLM, but tiny is a LlamaForCausalLM",
    ),
    "a tensor of another shape": (weight("lm_head.weight", torch.zeros(6, HIDDEN)), "lm_head.weight [6, 32] for [5, 32]"),
    "NaN": (weight("norm.weight", torch.full((HIDDEN,), torch.nan)), "norm.weight has NaN or infinite weights in float32"),
    "fp8": (weight("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN).to(torch.float8_e4m3fn)), "fc.weight (F8_E4M3)"),
    "a flag that is none": (
        top(norm_before_residual="false"),
        "norm_before_residual in its config.json is 'false', not true",
    ),
    "layers that are no list": (top(**{IDS: "1,3,4"}), "in its config.json is '1,3,4'"),
    "layers below the first": (flat(**{IDS: [-1, 2, 3]}), "in its config.json is a list"),
    "layers of words": (top(**{IDS: ["1", "3", "4"]}), "in its config.json is a list"),
    "a config that is no object": (top(eagle_config=["x"]), "eagle_config in its config.json is not an object"),
    "an unknown type": (layer(model_type="llama4_text"), "an unknown kind: eagle3 with layers of 'llama4_text'"),
    "layers of Llama 4": (flat(architectures=["Eagle3Llama4ForCausalLM"]), "unknown kind: Eagle3Llama4ForCausalLM"),
    "latent attention": (
        weight("layers.0.self_attn.kv_a_proj_with_mqa.weight", torch.zeros(2, 2)),
        "its tensors are those of EAGLE-3 with latent attention (MLA), which cannot be measured here",
    ),
    "experts": (
        weight("layers.0.mlp.experts.0.up_proj.weight", torch.zeros(2, 2)),
        "its tensors are those of EAGLE-3 with experts in its layers",
    ),
    "parallel heads of ModelOpt": (flat(eagle_config={"parallel_draft_step": 4}), "config.json has parallel_draft_step: 4"),
    "no layers, on a small target": (
        top(**{IDS: None}),
        f"config.json has no {IDS}, and those that engines guess for 6 layers (2, 3, 3) do not fit",
    ),
    "a layer that is partly there": (
        lambda described, weights: (
            layer(num_hidden_layers=4)(described, weights),
            weight("layers.1.mlp.up_proj.weight", torch.zeros(40, HIDDEN))(described, weights),
        ),
        "its files lack layers.1.input_layernorm.weight, layers.1.mlp.down_proj.weight",
    ),
    "EAGLE-1": (as_eagle1, "its tensors are those of EAGLE-1 or EAGLE-2"),
    "P-EAGLE by its type": (top(speculators_model_type="peagle"), "its config.json is that of P-EAGLE"),
    "P-EAGLE": (weight("mask_hidden", torch.zeros(1, 1, 3 * HIDDEN)), "its tensors are those of P-EAGLE"),
    "DFlash": (top(speculators_model_type="dflash"), "an unknown kind: dflash"),
    "d2t and t2d": (weight("d2t", torch.tensor([0, 0, 1, 2, 2])), "do not name 5 different tokens"),
    "no d2t": (without("d2t"), "it proposes 5 of 7 tokens, but its files lack d2t"),
    "a size that is missing": (layer(num_attention_heads=None), "its config.json lacks num_attention_heads"),
    "a sliding window of no size": (
        layer(layer_types=["sliding_attention"]),
        "has unsupported settings: sliding_window 0",
    ),
    "attention in chunks": (
        layer(layer_types=["chunked_attention"]),
        "has unsupported settings: layer_types chunked_attention",
    ),
    "positions by layer type": (
        layer(rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        "differ by layer type, or lack full_attention",
    ),
    "positions that depend on the length": (
        layer(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "unsupported settings: positions of type 'dynamic'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_refused(tmp_path: Path, model: Model, name: str) -> None:
    change, words = BAD[name]
    described = config()
    weights = tensors(described)
    change(described, weights)
    with pytest.raises(ModelUnloadable) as caught:
        loaded(written(tmp_path, described, weights), model)
    assert words in caught.value.message
    assert caught.value.message.startswith("draft head (")
    assert caught.value.hint


def test_a_pickle_is_refused_with_the_lines_that_convert_it(tmp_path: Path, model: Model) -> None:
    """The lines work: what they write is the head."""
    described = config()
    weights = tensors(described)
    expected = states(loaded(written(tmp_path / "first", described, weights), model), FEATURES)
    folder = written(tmp_path / "pickled", described, {})
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelUnloadable, match="pickles only") as caught:
        loaded(folder, model)
    code = caught.value.hint.partition("run python: ")[2]
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    assert torch.equal(states(loaded(folder, model), FEATURES), expected)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, model: Model) -> None:
    folder = written(tmp_path / "head", config(), tensors(config()))
    whole = (folder / "model.safetensors").read_bytes()
    save_file({"norm.weight": torch.ones(HIDDEN)}, folder / "more.safetensors")
    with pytest.raises(ModelUnloadable, match=r"holds norm.weight in model.safetensors and in more.safetensors"):
        loaded(folder, model)
    (folder / "more.safetensors").unlink()
    index = {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors", "fc.weight": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelUnloadable, match=r"index.json names gone.safetensors, which is missing"):
        loaded(folder, model)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelUnloadable, match=r"model.safetensors cannot be read"):
        loaded(folder, model)
    (folder / "config.json").unlink()
    with pytest.raises(ModelUnloadable, match=r"has no config.json"):
        loaded(folder, model)


def test_a_head_for_a_target_with_another_tokenizer_is_refused(tmp_path: Path, model: Model) -> None:
    """Where the named target lies here."""
    for name, shift in (("same", 0), ("other", 5)):
        LlamaConfig().save_pretrained(tmp_path / name)
        tiny.tokenizer(shift).save_pretrained(tmp_path / name)
    described = config()
    weights = tensors(described)
    named = {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(tmp_path / "same")}}
    loaded(written(tmp_path / "head", described | {"speculators_config": named}, weights), model)
    other = copy.deepcopy(named)
    other["verifier"]["name_or_path"] = str(tmp_path / "other")
    with pytest.raises(VocabularyMismatch, match="has another vocabulary"):
        loaded(written(tmp_path / "head", described | {"speculators_config": other}, weights), model)


def test_files_of_the_hub_are_fetched_without_pickles_and_folders(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By id and revision; what the hub says is passed on."""
    folder = written(tmp_path / "models--a--b" / "snapshots" / "c", config(), tensors(config()))
    asked: list[Any] = []

    def snapshot(reference: str, **how: Any) -> str:
        asked.append((reference, how))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("alphaprof.profiling.heads.files.require_model", lambda *_: None)
    draft = loaded(Path("a/b"), model, revision="v2")
    ((reference, how),) = asked
    assert (reference, how.pop("revision")) == ("a/b", "v2")
    held = ["config.json", "model.safetensors", "model.bin", "checkpoint-5/model.safetensors", "a/b/config.json"]
    assert list(filter_repo_objects(held, **how)) == ["config.json", "model.safetensors"]
    assert draft.reference == "a/b"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(AlphaprofError, match="a/b cannot be downloaded: division by zero"):
        loaded(Path("a/b"), model)


class Eagle1Recomputing(Recomputing):
    """As SafeAILab's first heads: `fc` joins embedding and state at every depth, the target's LM head reads its output."""

    def logits(self, text: Any, features: torch.Tensor, drafted: Any) -> torch.Tensor:
        own = features
        for depth in range(1, len(drafted) + 2):
            tokens = [*text[1:], *drafted][: len(text) + depth - 2]
            states = self.projected("fc", torch.cat([self.embedding[tokens], own], 1))
            for index in range(self.layer["num_hidden_layers"]):
                inputs = self.norm(f"layers.{index}.input_layernorm.weight", states) if index else states
                states = self.block(index, inputs, states)
            own = torch.cat([own, states[-1:]])
        return self.weights["target's head"] @ own[-1]


def eagle1_files(layers: int, bias: bool) -> tuple[dict[str, Any], Tensors]:
    """Random files of EAGLE-1, with an embedding of their own."""
    described = config(layer={"num_hidden_layers": layers})
    weights = tensors(described)
    gone = ("lm_head", "norm", "layers.0.hidden_norm", "layers.0.input_layernorm")
    for name in ("d2t", "t2d", *(f"{each}.weight" for each in gone)):
        del weights[name]
    for name in "qkv":
        key = f"layers.0.self_attn.{name}_proj.weight"
        weights[key] = weights[key][:, :HIDDEN]
    weights["fc.weight"] = weights["fc.weight"][:, : 2 * HIDDEN]
    weights["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(8))
    if bias:
        weights["fc.bias"] = torch.linspace(-0.1, 0.1, HIDDEN)
    flat = dict(described["transformer_layer_config"]) | {"architectures": ["LlamaForCausalLM"]}
    return flat, weights


@pytest.mark.parametrize(("layers", "bias"), [(1, False), (1, True), (2, True)])
def test_heads_of_eagle_1_draft_as_one_that_recomputes(tmp_path: Path, model: Model, layers: int, bias: bool) -> None:
    """Logits at every depth of rounds on a text, by the pass and by the cache, with an LM head in the files or without.
    Both compute in float64: five depths through random layers magnify a processor's rounding of float32. The files say how
    many layers there are, whatever trainers keep of the target.
    """
    model = dataclasses.replace(model, network=copy.deepcopy(model.network))
    flat, weights = eagle1_files(layers, bias)
    files = flat | {"num_hidden_layers": 8}, weights | {"lm_head.weight": torch.ones(2, 2)}
    draft = loaded(written(tmp_path, *files), model, kind="eagle1")
    assert (draft.network.layers, draft.kind, draft.network.ids) == ((FINAL,), "eagle1", None)
    draft.network.double()
    model.network.double()
    naive = Eagle1Recomputing({"transformer_layer_config": flat}, weights, torch.empty(0))
    naive.weights = {name: weight.double() for name, weight in weights.items()}
    naive.weights |= {"target's head": model.network.lm_head.weight}
    naive.embedding = naive.embedding.double()
    text = torch.randint(VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(5))
    ids = text[0].tolist()
    features = model.network.model(text).last_hidden_state
    with torch.inference_mode():
        passes = list(draft.network.states(text, features, 5, 3))
        cache, read = draft.network.cache(), 0
        for start in (6, 7, 12):
            state = cache.extend(text[:, read + 1 : start], features[:, read : start - 1])
            read = start - 1
            for depth in range(1, 6):
                path = ids[start : start + depth - 1]
                if depth > 1:
                    state = cache.deepen(torch.tensor(path[-1:]), state, depth)
                expected = naive.logits(ids[:start], features[0, : start - 1], path)
                one = draft.network.logits(passes[depth - 1][0, start - 5], depth)
                torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(draft.network.logits(state, depth)[0], expected, atol=1e-5, rtol=1e-5)


def test_the_config_that_vllm_wrote_for_eagle_1_is_that_of_its_model(tmp_path: Path, model: Model) -> None:
    flat, weights = eagle1_files(1, False)
    plain = loaded(written(tmp_path / "plain", flat, weights), model, kind="eagle1")
    nested = {"model_type": "eagle", "eagle_fc_bias": False, "model": flat}
    other = loaded(written(tmp_path / "nested", nested, weights), model, kind="eagle1")
    assert other.reading["layout"] == "vLLM"
    assert other.network.config.to_dict() == plain.network.config.to_dict()


EAGLE1_BAD: dict[str, tuple[Change, str]] = {
    "EAGLE-3": (weight("layers.0.hidden_norm.weight", torch.ones(HIDDEN)), "its tensors are those of EAGLE-3"),
    "a missing tensor": (without("fc.weight"), "its files lack fc.weight"),
}


@pytest.mark.parametrize("name", EAGLE1_BAD)
def test_files_that_are_no_eagle_1_head_of_this_target_are_refused(tmp_path: Path, model: Model, name: str) -> None:
    change, words = EAGLE1_BAD[name]
    flat, weights = eagle1_files(1, False)
    change(flat, weights)
    with pytest.raises(ModelUnloadable) as caught:
        loaded(written(tmp_path, flat, weights), model, kind="eagle1")
    assert words in caught.value.message


def gemma() -> Model:
    """A random Gemma of the size of `target`, whose module multiplies embeddings by the root of their width."""
    shape = {"num_hidden_layers": BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    size = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "pad_token_id": 0}
    torch.manual_seed(0)
    return Model("target", Gemma3ForCausalLM(Gemma3TextConfig(**shape | size)).eval().requires_grad_(False), "model", "tiny")


@torch.inference_mode()
@pytest.mark.parametrize(("made", "scale"), [(gemma, HIDDEN**0.5), (target, 1.0)])
def test_a_drafter_reads_embeddings_as_its_target_scales_them(
    made: Callable[[], Model], scale: float, tmp_path: Path
) -> None:
    model, layer = made(), config(layer={"model_type": "qwen3"})["transformer_layer_config"]
    of_qwen = Qwen3Config(**{**layer, "rope_theta": 100.0})
    shared = {EMBEDDING: model.network.get_input_embeddings(), LM_HEAD: model.network.lm_head}
    network = DFlash(of_qwen, (1, 2), masks=MaskRows(3, 3), reach=(Reach(False),), target=shared)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    flat = layer | {"architectures": ["DFlashDraftModel"], "block_size": 4, "is_causal": False}
    flat |= {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}}
    weights = {name.replace("blocks.", "layers."): each for name, each in network.state_dict().items()}
    draft = loaded(written(tmp_path, flat, weights), model, kind="dflash", gamma=3)
    ids, like = torch.arange(VOCABULARY), torch.zeros(1)
    plain = model.network.get_input_embeddings().weight
    torch.testing.assert_close(draft.network.embedded(ids, like), plain * scale)
    others = [way for way in draft.alternatives if way.changed == "the target's embedding not scaled"]
    assert [way.engines for way in others] == ([] if scale == 1 else [("vLLM",)])
    assert draft.engines == (("vLLM", "SGLang") if scale == 1 else ("SGLang",))
    for way in others:
        torch.testing.assert_close(way.network.embedded(ids, like), plain)
