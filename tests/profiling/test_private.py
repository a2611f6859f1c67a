"""What transformers keeps to itself: each use of it does what it should, and stands in one module."""

from __future__ import annotations

import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alphaprof.profiling.models import private
from tests.profiling import modules
from tests.test_architecture import MODULES

NAMES = re.compile(r"_attn_implementation|_keep_in_fp32|_project_to_logits|get_init_context|convert_and_load_state_dict")


def test_only_one_module_uses_it() -> None:
    assert [path.name for path in MODULES if NAMES.search(path.read_text())] == ["private.py"]


def test_layers_attend_by_the_name_that_is_set() -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=8)
    called = []

    def attend(module: object, query: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        called.append(query.shape)
        return torch.zeros_like(query).transpose(1, 2), None

    network = LlamaForCausalLM(config)
    before = private.attention_of(network.config)
    ALL_ATTENTION_FUNCTIONS.register("test_private", attend)
    private.attend_by(network.config, "test_private")
    network(torch.tensor([[1, 2, 3]]))
    assert (before != "test_private", private.attention_of(network.config), called) == (True, "test_private", [(1, 2, 3, 4)])


def test_modules_that_stay_in_float32_are_those_that_a_class_names() -> None:
    network = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1))
    assert private.kept_in_float32(network) == set()
    network._keep_in_fp32_modules, network._keep_in_fp32_modules_strict = ["norm"], ["lm_head"]  # type: ignore[assignment]
    assert private.kept_in_float32(network) == {"norm", "lm_head"}


@modules.NEEDS_MTP
def test_logits_of_mtp_modules_are_those_of_the_targets_head() -> None:
    network = modules.target("glm4_moe", num_nextn_predict_layers=1, **modules.GLM)
    parts, states = modules.modules_of(network, 1), torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(private.mtp_logits(parts, states), states @ network.lm_head.weight.T)
