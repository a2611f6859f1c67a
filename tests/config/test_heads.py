"""What a draft is, by its files: names of tensors, settings, and the formats that heads do not come in here."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaprof.config import heads
from alphaprof.config.heads import as_held, causal_layers, recognized, require_kind, unsupported
from alphaprof.config.model_files import ModelFiles, Stored, gguf_kind, stored_dtype
from alphaprof.config.starter import write_profile
from alphaprof.errors import ModelUnloadable
from tests.loops import each

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "vocab_size": 260}
WHOLE = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
EAGLE3 = ("fc.weight", "layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight")
EAGLE1 = ("fc.weight", "embed_tokens.weight", "layers.0.mlp.up_proj.weight")
DFLASH = ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.mlp.up_proj.weight")
FORMS: list[tuple[dict[str, Any], Sequence[str], heads.DraftForm]] = [
    (LLAMA, WHOLE, heads.MODEL),
    (LLAMA | {"pard_token": 5}, WHOLE, heads.PARD),
    # Trainers leave the target's names in a head's config, and any architecture may be EAGLE-3.
    (LLAMA, EAGLE3, heads.EAGLE3),
    (LLAMA, [f"model.{name}" for name in EAGLE3], heads.EAGLE3),
    (LLAMA, ["midlayer.mlp.up_proj.weight", "norm.weight"], heads.EAGLE3),
    ({"architectures": ["NewForCausalLM"]}, EAGLE3, heads.EAGLE3),
    (LLAMA | {"draft_vocab_size": 64}, EAGLE1, heads.EAGLE),
    (LLAMA | {"mask_token_id": 3, "draft_vocab_size": 64}, EAGLE3, heads.EAGLE3),
    (LLAMA, (*EAGLE3, "mask_hidden"), heads.P_EAGLE),
    (LLAMA, DFLASH, heads.DFLASH),
    (LLAMA, (*DFLASH, "markov_head.markov_w1.weight"), heads.DSPARK),
    ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, DFLASH, heads.DSPARK),
    (LLAMA, (*DFLASH, "candidate_selector.successor_codebook"), heads.DFLASH2),
    (LLAMA, ("pre_projection.weight", "post_projection.weight", "model.norm.weight"), heads.GEMMA),
    ({"model_type": "gemma4_unified_assistant"}, (), heads.GEMMA),
    (LLAMA, ("0.0.linear.weight", "0.1.weight"), heads.MEDUSA),
    # Where only config.json is here.
    (LLAMA, (), heads.MODEL),
    (LLAMA | {"draft_vocab_size": 64}, (), heads.EAGLE3),
    ({"architectures": ["DFlashDraftModel"]}, (), heads.DFLASH),
    ({"architectures": "EagleLlamaForCausalLM"}, (), heads.EAGLE),
]


@each(("config", "tensors", "form"), FORMS)
def test_tensors_tell_what_a_draft_is_and_config_where_they_do_not(
    config: dict[str, Any], tensors: Sequence[str], form: heads.DraftForm
) -> None:
    assert recognized(config, tensors) is form


@each("name", ["XPressModel", "DominoDraftModel", "LiLiCorrForCausalLM", "UnoDraftModel", "Eagle4ForCausalLM", "HydraModel"])
def test_drafters_that_are_not_measured_are_known_by_name(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / name, {"architectures": [name]}, EAGLE3)
    with pytest.raises(ModelUnloadable, match=r"its config\.json is that of .*, which is not measured here") as refused:
        require_kind("draft x", "eagle3", of(folder))
    assert "alphaprof import" in str(refused.value.hint)
    assert not recognized({"architectures": [name]}, ()).counted
    assert recognized({"architectures": ["UnoQwenForCausalLM", "Unobtainium"]}, ()).name == "uno"
    assert recognized({"architectures": ["UnobtainiumForCausalLM"]}, ()) is heads.MODEL


REFUSED: list[tuple[dict[str, Any], Sequence[str], str]] = [
    ({"dflash_config": {"attention_sink_bias": True}}, DFLASH, "attention sinks"),
    ({}, (*DFLASH, "layers.0.self_attn.sinks"), "attention sinks"),
    ({"attention_value_scale": 0.6}, DFLASH, "attention_value_scale"),
    ({"partial_rotary_factor": 0.5}, DFLASH, "partial_rotary_factor"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, EAGLE3, "partial_rotary_factor"),
    ({"is_neox_style": False}, DFLASH, "rotations in pairs of neighbors"),
    ({}, (*EAGLE3, "layers.0.self_attn.kv_a_proj_with_mqa.weight"), "latent attention"),
    ({}, (*EAGLE3, "layers.0.mlp.experts.0.up_proj.weight"), "experts"),
    ({"architectures": ["LagunaDFlashModel"]}, DFLASH, "Laguna"),
    ({"dspark_config": {}, "dspark_draft_topk": 4}, DFLASH, "dspark_draft_topk"),
]


@each(("config", "tensors", "words"), REFUSED)
def test_what_a_head_cannot_be_measured_with_is_named(config: dict[str, Any], tensors: Sequence[str], words: str) -> None:
    assert words in unsupported(config, tensors)
    assert unsupported(LLAMA | {"kv_lora_rank": 512, "attention_value_scale": 1}, EAGLE3) == ""


def written(folder: Path, config: dict[str, Any] | None, tensors: Sequence[str], name: str = "model.safetensors") -> Path:
    """A folder with a config.json, and tensors of one number under these names."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    offsets = {each: [4 * at, 4 * at + 4] for at, each in enumerate(tensors)}
    said = {each: {"dtype": "F32", "shape": [1], "data_offsets": place} for each, place in offsets.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}} | said).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * len(tensors)))
    return folder


def of(place: Path) -> ModelFiles | Path:
    return place if place.is_file() else ModelFiles.of(place)


def gguf(path: Path, **said: str) -> Path:
    """The beginning of a GGUF file with texts in its metadata."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(said))
    for key, value in said.items():
        key = f"general.{key}"
        content += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(value)) + value.encode()
    path.write_bytes(content + b"and so on")
    return path


def test_a_file_that_no_head_is_read_from_is_named_for_what_it_is(tmp_path: Path) -> None:
    imatrix, head = gguf(tmp_path / "i.gguf", type="imatrix"), gguf(tmp_path / "h.gguf", architecture="eagle3", type="model")
    model = gguf(tmp_path / "m.gguf", architecture="llama")
    assert [gguf_kind(path) for path in (imatrix, head, model)] == ["imatrix", "eagle3", "llama"]
    require_kind("draft x", "model", of(model))
    for kind, path, words in (
        ("model", imatrix, "an importance matrix"),
        ("model", head, r"a GGUF file of a head \(eagle3\)"),
        ("eagle3", head, "a GGUF file, which heads are not read from"),
        ("eagle3", written(tmp_path / "mistral", None, EAGLE3, "consolidated.safetensors"), "Mistral's own format"),
    ):
        (tmp_path / "mistral").mkdir(exist_ok=True)
        (tmp_path / "mistral" / "params.json").write_text("{}")
        with pytest.raises(ModelUnloadable, match=words):
            require_kind("draft x", kind, of(path))


def test_a_draft_of_another_kind_is_refused_with_its_own(tmp_path: Path) -> None:
    head, whole = written(tmp_path / "head", LLAMA, EAGLE3), written(tmp_path / "whole", LLAMA, WHOLE)
    pard = written(tmp_path / "pard", LLAMA | {"pard_token": 5}, WHOLE)
    require_kind("draft x", "eagle3", of(head))
    require_kind("draft x", "model", of(pard))
    for kind, folder, words, hint in (
        ("model", head, "its tensors are those of EAGLE-3", "use it as a draft of kind: eagle3"),
        ("dflash", head, "its tensors are those of EAGLE-3", "use kind: eagle3"),
        ("eagle3", pard, "its config.json is that of PARD", "use kind: pard"),
        ("eagle3", whole, "its tensors are those of a model by itself", "use kind: model"),
    ):
        with pytest.raises(ModelUnloadable, match=words) as refused:
            require_kind("draft x", kind, of(folder))
        assert refused.value.hint == hint
    (head / "mask_embedding.pt").touch()
    with pytest.raises(ModelUnloadable, match=r"mask_embedding\.pt"):
        require_kind("draft x", "eagle3", of(head))


def test_an_index_decides_which_files_are_read_and_without_one_all_but_mistrals_copies(tmp_path: Path) -> None:
    folder = written(tmp_path / "head", LLAMA, EAGLE3, "model-00001-of-00001.safetensors")
    written(folder, None, EAGLE3, "consolidated.safetensors")
    assert ModelFiles.of(folder).tensors.keys() == set(EAGLE3)
    written(folder, None, EAGLE3, "model-fp32.safetensors")
    with pytest.raises(ModelUnloadable, match=r"holds fc\.weight in model-00001"):
        _ = ModelFiles.of(folder).tensors
    index = {"weight_map": dict.fromkeys(EAGLE3, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    path = folder / "model-00001-of-00001.safetensors"
    assert ModelFiles.of(folder).tensors["fc.weight"] == Stored(path, "fc.weight", (1,), "F32")
    assert stored_dtype(path) == "float32"


@each(("named", "words"), [
    ("../x.safetensors", "outside its folder"), ("/x.safetensors", "outside its folder"),
    ("a\\\\x.safetensors", "outside its folder"), ("x.bin", "that are not safetensors"),
])  # fmt: skip
@each("file", ["config.json", "model.safetensors.index.json"])
def test_weights_that_a_model_names_lie_in_its_folder(named: str, words: str, file: str, tmp_path: Path) -> None:
    said = {"config.json": {"transformers_weights": named}, "model.safetensors.index.json": {"weight_map": {"a": named}}}
    for each_file, content in said.items():
        (tmp_path / each_file).write_text(json.dumps(content if each_file == file else {}))
    with pytest.raises(ModelUnloadable, match=f"{file} names weights {words}") as refused:
        _ = ModelFiles.of(tmp_path).named
    assert refused.value.hint.startswith("give the whole model as safetensors")


@each(
    "content", [b"", b"\x08" + bytes(7) + b"[1, 2]  ", bytes(8), struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"{} "]
)
def test_a_file_of_weights_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelUnloadable, match=r"model\.safetensors cannot be read"):
        _ = ModelFiles.of(tmp_path).tensors


def test_layers_and_experts_that_a_heads_files_do_not_hold_do_not_count() -> None:
    config = LLAMA | {"n_routed_experts": 8, "num_experts_per_tok": 2}
    assert as_held(config, EAGLE3) == LLAMA | {"num_hidden_layers": 1}
    assert as_held(config, ()) == config
    of_experts = (*EAGLE3, "layers.0.mlp.experts.0.up_proj.weight", "layers.1.mlp.experts.0.up_proj.weight")
    assert as_held(config, of_experts) == config | {"num_hidden_layers": 2}
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": config}
    assert as_held(nested, EAGLE3)["transformer_layer_config"] == LLAMA | {"num_hidden_layers": 1}
    with pytest.raises(KeyError, match="of experts, whose number its config does not say"):
        as_held(LLAMA, of_experts)


SLIDING, FULL = "sliding_attention", "full_attention"


@each(
    ("config", "causal"),
    [
        ({}, [True, False]),
        ({"is_causal": False, "dflash_config": {"causal": True}}, [False, False]),
        ({"is_causal": None, "dflash_config": {"causal": True}}, [True, True]),
        ({"dflash_config": {"causal": False}}, [False, False]),
        ({"speculators_model_type": "dflash", "dflash_config": {"causal": True}}, [True, False]),
        ({"speculators_model_type": "dflash", "sliding_window_non_causal": True}, [False, False]),
        ({"speculators_model_type": "dflash", "sliding_window_non_causal": False}, [True, False]),
    ],
)
def test_keys_say_which_layers_are_causal_in_their_order(config: dict[str, Any], causal: list[bool]) -> None:
    assert causal_layers(config, [SLIDING, FULL]) == causal


def test_a_starter_file_asks_for_a_gamma_where_rows_read_each_other(tmp_path: Path) -> None:
    layers = LLAMA | {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 12}
    mixed = written(tmp_path / "mixed", layers | {"layer_types": [SLIDING, FULL]}, DFLASH)
    causal = written(tmp_path / "causal", layers | {"layer_types": [SLIDING, SLIDING]}, DFLASH)
    source = {"path": str(tmp_path / "d.jsonl"), "prompt": "{x}"}
    write_profile("target", [str(mixed), str(causal)], {"d": source}, tmp_path / "p.yaml")
    found = yaml.safe_load((tmp_path / "p.yaml").read_text())
    assert found["drafts"]["dflash"] == {"kind": "dflash", "model": "mixed", "gamma": 11}
    assert found["drafts"]["dflash2"] == {"kind": "dflash", "model": "causal"}
    assert found["gammas"] == [1, 2, 3, 4, 5, 6, 7, 8, 11]
    written(tmp_path / "spark", {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 0}, DFLASH)
    hub = "deepseek-ai/dflash_qwen3_8b_block7"
    write_profile("target", [str(tmp_path / "spark"), hub], {"d": source}, tmp_path / "q.yaml")
    assert list(yaml.safe_load((tmp_path / "q.yaml").read_text())["drafts"].values())[:2] == [
        {"kind": "dspark", "model": "spark", "gamma": 7},
        {"kind": "dspark", "model": hub},
    ]
    medusa = written(tmp_path / "medusa", {"architectures": ["MedusaModel"]}, ())
    with pytest.raises(ModelUnloadable, match="Medusa, which is not measured here"):
        write_profile("target", [str(medusa)], {"d": source}, tmp_path / "r.yaml")
    assert not (tmp_path / "r.yaml").exists()
