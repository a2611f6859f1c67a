"""Bytes of quantized weights by the names of modules, as the files of publishers declare them."""

from __future__ import annotations

from typing import Any

import pytest

from alphaprof.costs.quantization import quantization_of
from alphaprof.costs.shapes import ModelShape
from tests.loops import each

INT4 = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
LAYERS = {
    "model.language_model.layers.0.linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
    "model.language_model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
}
BESIDE = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
ATTENTION, DENSE = "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"
EXPERTS, SHARED, HEAD = "layers.0.mlp.experts.up_proj", "layers.0.mlp.shared_experts.up_proj", "lm_head"
CASES: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"quant_method": "fp8"}, {ATTENTION: 1, EXPERTS: 1, HEAD: 2, "embed_tokens": 2}),
    ({"quant_method": "fp8", "modules_to_not_convert": ["gate", "model.layers.0.self_attn"]}, {ATTENTION: 2, DENSE: 1}),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, {ATTENTION: 0.515625, HEAD: 2}),
    ({"quant_method": "gptq", "bits": 8}, {ATTENTION: 1, HEAD: 2}),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1, "lm_head": True}, {ATTENTION: 0.5, HEAD: 0.5}),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {ATTENTION: 0.515625, HEAD: 2}),
    ({"quant_method": "compressed-tensors", "ignore": IGNORED} | INT4, {ATTENTION: 2, DENSE: 2, SHARED: 2, EXPERTS: 0.5625}),
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        {ATTENTION: 2, EXPERTS: 0.53125, HEAD: 2},
    ),
    (BESIDE | {"exclude_modules": ["lm_head"]}, {ATTENTION: 0.5625, HEAD: 2}),
    (
        BESIDE | {"exclude_modules": ["language_model.model.layers.0*", "head"]},
        {DENSE: 2, "layers.10.mlp.up_proj": 0.5625, HEAD: 2},
    ),
    (BESIDE | {"ignore": ["backbone.layers.0.mixer.q_proj"]}, {ATTENTION: 2, "layers.0.self_attn.k_proj": 0.5625}),
    (BESIDE | {"ignore": ["model.layers.0.block_sparse_moe.gate"]}, {EXPERTS: 0.5625, DENSE: 0.5625}),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS},
        {"layers.0.linear_attn.in_proj_qkv": 1, EXPERTS: 0.5625, HEAD: 0.5625, ATTENTION: 2},
    ),
    (
        {
            "quant_method": "fp8",
            "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4"}},
            "ignore": ["*.attn.*"],
        },
        {EXPERTS: 0.5625, SHARED: 1, ATTENTION: 1, HEAD: 2},
    ),
]


@each(("declared", "wanted"), CASES)
def test_a_module_has_the_bytes_that_its_model_declares(declared: dict[str, Any], wanted: dict[str, float]) -> None:
    found = quantization_of({"quantization_config": declared})
    assert found is not None
    assert {module: found.bytes_of(module) for module in wanted} == wanted


def test_experts_may_have_a_dtype_of_their_own() -> None:
    found = quantization_of({"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"})
    assert found is not None
    assert [found.bytes_of(module) for module in (EXPERTS, SHARED)] == [0.53125, 1]


@each(
    ("declared", "size"),
    [
        ({"kv_cache_quant_algo": "FP8"}, 1),
        ({"kv_cache_quant_algo": None}, None),
        ({"kv_cache_scheme": "FP8"}, 1),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"kv_cache_quant_algo": "NVFP4"}, 0.5625),
    ],
)
def test_the_cache_has_the_bytes_that_a_model_declares(declared: dict[str, Any], size: float | None) -> None:
    found = quantization_of({"quantization_config": BESIDE | declared})
    assert found is not None
    assert found.kv_bytes == size


@each(
    "declared", [{"quant_method": "hqq"}, {"quant_method": "modelopt", "quant_algo": "NEW"}, {"quantized_layers": {"x": {}}}]
)
def test_bytes_that_are_not_known_are_asked_for(declared: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match="whose bytes are not known: give --weight-bytes"):
        quantization_of({"quantization_config": declared})
    assert quantization_of({}) is None


def test_steps_read_the_bytes_of_each_part() -> None:
    """A mixture whose experts are quantised, whose attention is not, and whose head and cache have bytes of their own."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "moe_intermediate_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "quantization_config": BESIDE | {"ignore": ["*self_attn*", "lm_head"], "kv_cache_quant_algo": "FP8"},
    }
    shape = ModelShape.from_config(config)
    attention, expert, head = 2 * 4 * 8 * 8, 2 * 3 * 8 * 4, 10 * 8
    assert shape.read_bytes(1) == 2 * attention + 0.5625 * expert + 2 * head
    assert shape.total_weight_bytes == 2 * attention + 0.5625 * 4 * expert + 2 * 2 * head
    assert shape.cache_bytes(3) == 3 * 2 * 2 * 8
    assert ModelShape.from_config(config, 1.0, 2.0).read_bytes(1) == attention + expert + head


@each("ignored", ["mtp.layers.0*", "model.layers.2*"])
def test_an_mtp_module_has_the_bytes_of_its_layer_and_of_the_targets_output_head(ignored: str) -> None:
    """Whose name in the files is its own, or that of the layer behind the last."""
    sizes = {"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 10}
    config = sizes | {"num_attention_heads": 2, "quantization_config": BESIDE | {"ignore": ["lm_head"]}}
    module = ModelShape.of_mtp(config, ModelShape.from_config(config))
    matrices = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 * 8
    assert module.read_bytes(0) == 0.5625 * matrices + 2 * 10 * 8
    config["quantization_config"] = BESIDE | {"ignore": ["lm_head", ignored]}
    assert ModelShape.of_mtp(config, ModelShape.from_config(config)).read_bytes(0) == 2 * matrices + 2 * 10 * 8
