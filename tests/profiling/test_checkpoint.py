"""Files of models that are edited, damaged or hostile: refused in two lines, most of them before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from alphaprof.config.options import TargetOptions
from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.files import files_of
from alphaprof.profiling.models.hub import require_model
from alphaprof.profiling.models.load import load_model, load_tokenizer, without_advice
from tests.loops import each
from tests.tiny import edited, llama

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A model that a test may change: 4 layers in 39 tensors."""
    return Path(shutil.copytree(tiny / "target", tmp_path / "model"))


def options(path: Path) -> TargetOptions:
    return TargetOptions(model=str(path), dtype="float32")


def load(model: TargetOptions, name: str = "target") -> None:
    load_model(name, model, "float32")


def refusal(path: Path, read: Callable[[TargetOptions, str], object] = require_model) -> ModelUnloadable:
    """The failure of a model, by its files alone or by loading it."""
    with pytest.raises(ModelUnloadable) as caught:
        read(options(path), "target")
    assert len(caught.value.message) < 400 + 2 * len(str(path))
    assert caught.value.hint
    return caught.value


def split(model: Path, **names: str) -> None:
    """Replace the weights of a model by an index that says in which files they are."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "part.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "part.safetensors") | names}))


@each("content", [b'{"eos_token_id": 256', b"[1]", b"\xff\xfe\x00", DEEP.encode()])
def test_a_damaged_description_is_named(model: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    assert str(model / "config.json") in refusal(model).message


@each("change", [{"num_hidden_layers": 10**7}, {"text_config": {"n_layer": 10**30}}])
def test_layers_without_end_are_refused_before_they_are_made(model: Path, change: dict[str, Any]) -> None:
    edited(model / "config.json", **change)
    assert "config.json cannot be right" in refusal(model).message


@pytest.mark.models
@each("eos", [["x", {}], "x", 1.5, True, [[1]], [True], 10**30])
def test_ids_that_are_none_do_not_end_texts(model: Path, eos: Any) -> None:
    edited(model / "config.json", eos_token_id=eos)
    edited(model / "generation_config.json", eos_token_id=eos)
    refusal(model, load)


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        ("pytorch_model-00001.bin", "names weights that are not safetensors: 'pytorch_model-00001.bin'"),
        ("../part.safetensors", "names weights outside its folder"),
        ("/etc/part.safetensors", "names weights outside its folder"),
    ],
)
def test_weights_that_are_pickles_or_lie_outside_are_refused(model: Path, shard: str, problem: str) -> None:
    """By the index, and by the config."""
    split(model, **{"lm_head.weight": shard})
    assert problem in refusal(model).message
    edited(model / "config.json", transformers_weights=shard)
    assert f"config.json {problem}" in refusal(model).message


def test_a_lora_adapter_is_named_with_how_to_give_it(model: Path) -> None:
    """As a model and as a head, by its files alone; a model that has one beside it is a model."""
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    require_model(options(model), "target")
    (model / "config.json").unlink()
    for read in (require_model, lambda given, name: files_of(name, given)):
        error = refusal(model, read)
        assert f"{model} is a LoRA adapter, not a model" in error.message
        assert "{model: BASE, adapter: FOLDER}" in error.hint


def test_one_part_of_a_split_gguf_file_is_named_with_how_to_join_them(tmp_path: Path) -> None:
    for name in ("m-00001-of-00003.gguf", "M-00002-of-00003.GGUF"):
        (tmp_path / name).write_bytes(b"GGUF")
        error = refusal(tmp_path / name)
        assert "is one part of a split GGUF file" in error.message
        assert "llama-gguf-split --merge" in error.hint
    (tmp_path / "m-00001-of-00001.gguf").write_bytes(b"GGUF")
    require_model(options(tmp_path / "m-00001-of-00001.gguf"), "target")


def test_a_gguf_file_that_is_cut_is_called_incomplete_wherever_it_ends(tmp_path: Path) -> None:
    """Its suffix may be in capitals. A whole one of an unknown architecture is refused for that."""
    gguf = pytest.importorskip("gguf")  # not with the oldest packages
    path = tmp_path / "Model.GGUF"
    writer = gguf.GGUFWriter(path, "nothing-known")
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = path.read_bytes()
    assert "nothing-known" in refusal(path, lambda given, _: load_tokenizer(given)).message
    for size in (0, 2, 40, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:size])
        assert "the file is incomplete" in refusal(path, lambda given, _: load_tokenizer(given)).message


def test_pickles_are_refused_unless_safetensors_lie_beside_them(model: Path) -> None:
    (model / "pytorch_model.bin").write_text("{}")
    require_model(options(model), "target")
    (model / "model.safetensors").unlink()
    assert "holds its weights as pickles only" in refusal(model).message


@pytest.mark.models
@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.norm2.weight", "model.layers.4.eh_proj.weight"],
)
def test_a_weight_without_a_place_is_an_error(model: Path, name: str) -> None:
    add(model, name)
    assert f"does not use: {name}" in refusal(model, load).message


# What published checkpoints carry beside their text: LLaVA, Llama 4, MiMo, TRL, Medusa, and masks of old versions.
CARRIED = (
    "model.vision_tower.vision_model.encoder.layers.6.mlp.fc1.bias",
    "vision_model.model.layers.0.mlp.fc1.weight",
    "multi_modal_projector.linear_1.weight",
    "model.mm_projector.0.weight",
    "model.image_newline",
    "model.mtp_layers.0.input_proj.weight",
    "mtp.layers.0.mlp.gate.weight",
    "v_head.summary.weight",
    "medusa_head.0.1.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "transformer.h.0.attn.attention.masked_bias",
    "transformer.h.0.attn.attention.bias",
)


def test_what_transformers_advises_its_callers_is_not_printed() -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    assert before < logging.ERROR
    with without_advice():
        assert logging.get_verbosity() == logging.ERROR
    assert logging.get_verbosity() == before


@pytest.mark.models
def test_what_published_checkpoints_carry_beside_their_text_is_left_out(model: Path) -> None:
    add(model, *CARRIED)
    load(options(model))
    edited(model / "config.json", num_hidden_layers=3, num_nextn_predict_layers=1)  # the last layer predicts several tokens
    load(options(model))
    edited(model / "config.json", num_nextn_predict_layers=0)
    assert "does not use: model.layers.3" in refusal(model, load).message


@pytest.mark.models
def test_biases_of_zeros_and_cache_scales_of_quantisers_are_left_out(model: Path) -> None:
    add(model, "model.layers.0.mlp.up_proj.bias", "model.layers.0.self_attn.k_scale")
    assert "does not use" in refusal(model, load).message
    edited(model / "config.json", quantization_config={"quant_method": "fp8"})
    load(options(model))
    add(model, **{"model.layers.1.mlp.up_proj.bias": torch.tensor([0.0, 1e-3])})
    assert "does not use: model.layers.1.mlp.up_proj.bias" in refusal(model, load).message


@pytest.mark.models
def test_layers_that_an_architecture_declares_as_ignorable_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 is published with a layer 61 that predicts a second token."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 260}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    config = transformers.DeepseekV3Config(**sizes, **ranks, **experts, num_key_value_heads=4)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    add(tmp_path, "model.layers.61.eh_proj.weight")
    load(options(tmp_path))
    add(tmp_path, "model.layers.5.eh_proj.weight")
    assert "does not use: model.layers.5.eh_proj.weight" in refusal(tmp_path, load).message


@pytest.mark.models
def test_a_tied_head_that_was_saved_as_well_is_no_unused_weight(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    add(tmp_path, **{"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    load(options(tmp_path))


def add(model: Path, *names: str, **tensors: torch.Tensor) -> None:
    """Write more weights into a checkpoint."""
    weights = load_file(model / "model.safetensors") | {name: torch.zeros(2) for name in names} | tensors
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("files", "own"),
    [(["tekken.json", "tokenizer.json"], True), (["tokenizer.json"], True), (["tekken.json"], False)],
)
def test_a_target_has_its_own_tokenizer_where_mistral_common_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], own: bool
) -> None:
    """transformers takes Mistral's where it can, which knows no chat template."""
    asked = {}

    def loaded(where: str, **arguments: Any) -> Any:
        asked.update(arguments)
        return lambda text: text

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", loaded)
    for name in ("config.json", *files):
        (tmp_path / name).write_text("{}")
    load_tokenizer(TargetOptions(model=str(tmp_path)))
    assert asked.get("mistral_format") is (False if own else None)


def test_a_tokenizer_of_sentencepiece_names_the_package_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphaprof.profiling.models.load.find_spec", lambda _: None)
    for name in ("config.json", "tokenizer.model"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelUnloadable, match=r"tokenizer\.model alone") as caught:
        load_tokenizer(TargetOptions(model=str(tmp_path)))
    assert caught.value.hint == "pip install sentencepiece"
