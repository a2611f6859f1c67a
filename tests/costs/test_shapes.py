"""Shapes from configs: against models of transformers on meta tensors, published sizes, and caches that models keep."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from alphaprof.config.heads import draft_form
from alphaprof.costs.layers import EXPERTS, first_of
from alphaprof.costs.shapes import KNOWN, ModelShape
from alphaprof.profiling.models.identity import shape_of
from alphaprof.profiling.models.private import CACHE
from tests.loops import each

# Of families that transformers has no config of: its own code, or the decoder's words are those of another.
ELSEWHERE = {"deepseek", "deepseek_ref", "kimi_k2", "mimo", "minimax_m1", "minimax_text_01"}
ELSEWHERE |= {"step3p5", "step3p7"}
DELTA = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}
DELTA |= {"kda_layers": [layer for layer in range(1, 27) if layer % 4]}
SIZES = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}  # where defaults do not make a model
NEEDED: dict[str, dict[str, Any]] = {
    "nemotron": SIZES,
    "kimi_linear": {"linear_attn_config": DELTA, "layer_types": None},
    "nemotron_h": {"moe_latent_size": 1024},
    "mimo_v2_flash": {"swa_num_key_value_heads": 8},
}


def on_meta(family: str, **settings: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """The config of a family's decoder, and the size of each of its matrices but for that of the logits."""
    config = CONFIG_MAPPING[family](**settings).get_text_config()
    with torch.device("meta"):
        network = AutoModel.from_config(config)
    parameters = {name: weight for name, weight in network.named_parameters() if not name.endswith("bias")}
    return config.to_dict() | settings, {name: weight.numel() for name, weight in parameters.items() if weight.dim() > 1}


@each("family", sorted(KNOWN - ELSEWHERE))
def test_a_family_is_counted_as_transformers_builds_it(family: str) -> None:
    name = f"{family}_text" if f"{family}_text" in CONFIG_MAPPING else family
    config, matrices = on_meta(name, **NEEDED.get(family, {}))
    shape = ModelShape.from_config(config)
    head = 0 if shape.tied else shape.vocabulary * shape.hidden
    assert shape.parameters == pytest.approx(sum(matrices.values()) + head, rel=0.005)
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    assert shape.experts * shape.expert_parameters == pytest.approx(experts, rel=1e-6)
    routers = sum(size for name, size in matrices.items() if name.endswith(".gate.weight") or ".router." in name)
    always = sum(matrices.values()) + head - shape.looked_up - experts - routers  # what a step reads beside its experts
    assert shape.parameters - shape.looked_up - experts == pytest.approx(always, rel=0.006)
    assert shape.experts == (first_of(config, *EXPERTS) if experts else 0)


PUBLISHED = {  # billions of parameters, all and those of a token, where the name does not say them
    "MiniMaxAI/MiniMax-Text-01": (456, 45.9),
    "MiniMaxAI/MiniMax-M2.5": (229, 10),
    "XiaomiMiMo/MiMo-7B-Base": (7.83, None),  # with its MTP layer
    "XiaomiMiMo/MiMo-V2-Flash": (309, 15),
    "deepseek-ai/DeepSeek-R1": (671, 37),
    "deepseek-ai/DeepSeek-V3.2": (671, 37),
    "deepseek-ai/DeepSeek-V4-Flash": (284, 13),
    "deepseek-ai/DeepSeek-V4-Pro": (1600, 49),
    "google/gemma-4-26B-A4B": (25.2, 3.8),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (400, 17),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (109, 17),
    "mistralai/Mixtral-8x22B-v0.1": (141, 39),
    "mistralai/Mixtral-8x7B-v0.1": (46.7, 12.9),
    "moonshotai/Kimi-K2-Instruct": (1000, 32),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.6),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (31.6, 3.6),
    "openai/gpt-oss-120b": (117, 5.1),
    "openai/gpt-oss-20b": (20.9, 3.6),
    "sgl-project/DeepSeek-V4-Flash-FP8": (284, 13),
    "sgl-project/DeepSeek-V4-Pro-FP8": (1600, 49),
    "stepfun-ai/Step-3.7-Flash": (196, 11),
    "zai-org/GLM-5": (744, 40),
}
ROWS = [json.loads(line) for line in (Path(__file__).parent / "shapes.jsonl").read_text().splitlines()]
ROWS_BY_MODEL = {model: row["config"] for row in ROWS for model in row["models"]}


@each("models", [row["models"] for row in ROWS])
def test_a_published_config_has_the_published_size(models: list[str]) -> None:
    shape = ModelShape.from_config(ROWS_BY_MODEL[models[0]])
    named = re.search(r"(\d+(?:\.\d+)?)B(?:-A(\d+)B)?", models[0].replace("8x", ""))
    known = PUBLISHED.get(models[0])
    total, active = known or (tuple(each and float(each) for each in named.groups()) if named else (None, None))
    if total is not None:
        assert shape.parameters / 1e9 == pytest.approx(total, rel=0.03, abs=0.0 if known else 0.8)
    if active is not None:  # rounded to a billion; some publishers leave out the input embedding
        used = (shape.active_parameters / 1e9, (shape.active_parameters - shape.looked_up) / 1e9)
        assert any(each == pytest.approx(active, rel=0.03, abs=0.6) for each in used)


def test_an_mtp_module_is_read_where_layers_are_listed_and_not_numbered() -> None:
    """That of Nemotron-3-Ultra: an attention layer and one with experts, and what joins embedding and state."""
    published = ROWS_BY_MODEL["nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"]
    config = published | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}
    assert "num_hidden_layers" not in config
    assert draft_form(config, config, config).module
    target = ModelShape.from_config(config)
    module = ModelShape.of_mtp(config, target)
    assert (module.layers, module.experts) == (1, target.experts)
    assert module.expert_parameters == target.expert_parameters / config["layers_block_type"].count("moe")


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_conv_kernel_dim": 4}
CACHES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4} | FEW_EXPERTS,
    "qwen3_next": LINEAR | FEW_EXPERTS | {"full_attention_interval": 4},
    "mistral": {"sliding_window": 4},
    "llama4_text": {"attention_chunk_size": 4, "intermediate_size_mlp": 48} | FEW_EXPERTS,
}
LEFT_OUT = (
    "layer_types",
    "no_rope_layers",
    "moe_layers",
    "per_layer_config",
)  # what transformers adds to a published config


@each(("family", "settings"), list(CACHES.items()))
def test_a_cache_grows_as_that_of_transformers(family: str, settings: dict[str, Any]) -> None:
    """Keys and values that are kept of 3 tokens, all within the window, and how many more of each token far beyond it."""
    config = CONFIG_MAPPING[family](**TINY | settings)
    network = AutoModel.from_config(config).eval()
    published = {key: value for key, value in config.to_dict().items() if key not in LEFT_OUT}
    shape = ModelShape.from_config(published | settings)

    def kept(tokens: int) -> int:
        with torch.inference_mode():
            cache = getattr(network(torch.ones(1, tokens, dtype=torch.long), use_cache=True), CACHE)
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        return sum(layer.keys.numel() + layer.values.numel() for layer in layers)

    assert 3 * (shape.token_elements + shape.window_elements) == kept(3)
    assert shape.token_elements == kept(33) - kept(32)
    assert shape.window == (4 if shape.window_elements else 0)


def test_what_is_read_of_a_cache_by_hand() -> None:
    """Two layers that read all of the context and one that reads 8 tokens of it."""
    shape = ModelShape.from_config(TINY | {"model_type": "gemma3", "sliding_window": 8, "sliding_window_pattern": 3})
    each_layer = 2 * 2 * 8  # keys and values of two heads
    assert shape.cache_bytes(100) == 2 * each_layer * (2 * 100 + 4 * 8)
    assert shape.cache_bytes(5) == 2 * each_layer * 6 * 5
    assert shape.attention_flops(100) == 4 * 4 * 8 * (2 * 100 + 4 * 8)
    assert shape.kv_bytes_per_token == 2 * each_layer * 2
    linear = ModelShape.from_config(TINY | LINEAR | {"model_type": "qwen3_next", "full_attention_interval": 3})
    state = 4 * 4 * (4 * 8 * 8)  # of four layers, in float32
    assert linear.cache_bytes(100) == 2 * each_layer * 2 * 100 + 2 * state  # read and written
    assert linear.cache_bytes(0) == 2 * state


@each("family", ["llama", "qwen3_moe", "glm4_moe"])
def test_a_network_of_an_unknown_family_is_counted_as_a_known_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its parameters and the names of its experts; norms, biases and routers count too."""
    mixture = {} if family == "llama" else FEW_EXPERTS
    settings = TINY | mixture | {"sliding_window": None}
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
    known = shape_of(network)
    with monkeypatch.context() as patch:
        patch.setattr("alphaprof.costs.shapes.KNOWN", ())
        counted = shape_of(network)
    assert known is not None
    assert counted is not None
    known, counted = ModelShape(**known), ModelShape(**counted)
    assert counted.parameters == sum(weight.numel() for weight in network.parameters())
    assert counted.parameters == pytest.approx(known.parameters, rel=0.1)
    fields = ("experts", "experts_per_token", "expert_parameters", "tied", "looked_up", "kv_bytes_per_token")
    assert [getattr(counted, field) for field in fields] == [getattr(known, field) for field in fields]
    assert (counted.cache_bytes(9), counted.attention_flops(9)) == (known.cache_bytes(9), known.attention_flops(9))


def test_what_is_not_counted_has_no_shape() -> None:
    for family, settings in {"gpt2": {}, "opt": {"num_hidden_layers": 2}, "mamba": {}, "recurrent_gemma": {}}.items():
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
        assert (shape_of(network) is None) == (family in ("mamba", "recurrent_gemma")), family
    assert (
        ModelShape.from_config(TINY | {"model_type": "llama", "text_config": TINY | {"model_type": "qwen3"}}).parameters > 0
    )
    with pytest.raises(KeyError, match="cannot count the parameters of gpt2"):
        ModelShape.from_config({"model_type": "gpt2"})
