"""Other architectures than Llama, tiny and random: logits in chunks, skipped layers, and a cache that steps leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.models.kinds import DraftModel, layer_skip
from alphaprof.profiling.models.private import RELEASE
from alphaprof.profiling.models.teacher_forced import TeacherForced, recorded
from alphaprof.profiling.timing.steppers import NotTimed, Stepper, stepper
from tests.conftest import slow
from tests.loops import each
from tests.profiling.modules import SIZES, spread

pytestmark = pytest.mark.models

COMMON = SIZES | {"vocab_size": 260, "intermediate_size": 64, "num_hidden_layers": 4}
COMMON |= {"eos_token_id": 256, "pad_token_id": 257}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"vocab_size": 260, "n_positions": 256, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": None}
NEOX = {name: COMMON[name] for name in COMMON if name != "num_key_value_heads"}
OPT = {"vocab_size": 260, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Config": COMMON | {"head_dim": 8},
    "MistralConfig": COMMON | {"sliding_window": 16},
    "Gemma2Config": COMMON | {"head_dim": 8, "sliding_window": 16, "final_logit_softcapping": 3.0},
    "Gemma3TextConfig": COMMON | {"head_dim": 8, "sliding_window": 16},
    "Phi3Config": COMMON,
    "MixtralConfig": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": COMMON | EXPERTS,
    "CohereConfig": COMMON | {"logit_scale": 0.3},
    "GraniteConfig": COMMON | {"logits_scaling": 4.0},
    "GPTNeoXConfig": NEOX,
    "GPT2Config": GPT2,
    "OPTConfig": OPT | {"max_position_embeddings": 256, "word_embed_proj_dim": 16},
}
NOT_CHUNKED = {"OPTConfig"}  # projects between decoder and head: the full forward serves
NOT_SKIPPABLE = {"GPT2Config", "OPTConfig"}


def network(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**CONFIGS[name] | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_chosen_rows_are_those_of_the_full_forward(name: str) -> None:
    net = network(name)
    head = TeacherForced(DraftModel("target", net, "model", name))
    assert head.chunked == (name not in NOT_CHUNKED)
    ids, row, column = torch.randint(0, 250, (2, 40)), torch.tensor([0, 0, 1]), torch.tensor([3, 39, 20])
    with torch.inference_mode():
        expected = net(input_ids=ids, use_cache=False).logits[row, column]
        assert torch.allclose(head.logits(head.rows(ids, row, column)), expected, atol=1e-5)


SOME = ("Qwen3Config", "Gemma2Config", "MixtralConfig", "GPT2Config")  # plain; windows and a cap; experts; learned positions
OTHERS = [name for name in CONFIGS if name not in SOME]


@pytest.mark.parametrize("name", [*SOME[:3], *slow((name,) for name in OTHERS if name not in NOT_SKIPPABLE)])
def test_a_skipping_draft_is_the_model_of_the_kept_layers(name: str) -> None:
    net = network(name)
    # Layers 0 and 2: where kinds of layers alternate, two of one kind.
    draft = layer_skip("skip", DraftModel("target", net, "model", name), [1, 3]).network
    kinds = getattr(net.config, "layer_types", None)
    separate = network(name, num_hidden_layers=2, **({"layer_types": [kinds[0], kinds[2]]} if kinds else {}))
    kept = {"0": "0", "2": "1"}
    state = {}
    for key, value in net.state_dict().items():
        parts = key.split(".")
        if parts[1] == "layers":
            if parts[2] not in kept:
                continue
            parts[2] = kept[parts[2]]
        state[".".join(parts)] = value
    separate.load_state_dict(state)
    ids = torch.randint(0, 250, (2, 40))
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        assert torch.equal(draft(input_ids=ids).logits, separate(input_ids=ids).logits)
        written = [model.generate(input_ids=ids, **how) for model in (draft, separate)]
    assert torch.equal(*written)  # with a KV cache: layer indices are those of the cache
    theirs = {parameter.data_ptr() for parameter in net.parameters()}
    assert {parameter.data_ptr() for parameter in draft.parameters()} <= theirs
    assert net.config.num_hidden_layers == 4


@each("dropped", [[1, 3], [2], [3]], ids=str)
@each("name", [name for name in CONFIGS if name not in NOT_SKIPPABLE])
def test_a_skipping_draft_goes_on_from_the_layers_that_it_shares(name: str, dropped: list[int]) -> None:
    """To the last bit what the whole draft computes, and the draft itself is left as it was."""
    target = DraftModel("target", network(name), "model", name)
    head = TeacherForced(layer_skip("skip", target, dropped), TeacherForced(target))
    assert head.rest is not None
    assert head.rest.count == dropped[0]
    ids, row, column = torch.randint(0, 250, (2, 40)), torch.tensor([0, 0, 1]), torch.tensor([3, 39, 20])
    whole = head.rows(ids, row, column)
    with torch.inference_mode(), recorded(target.network.base_model, [dropped[0]]) as known:
        target.network(input_ids=ids)
    assert torch.equal(head.rows(ids, row, column, known), whole)
    assert not torch.equal(head.rows(ids, row, column, {dropped[0]: torch.zeros_like(known[dropped[0]])}), whole)
    assert torch.equal(head.rows(ids, row, column), whole)


def test_drafts_that_share_no_layer_from_the_first_on_run_whole() -> None:
    """One without the first layer, one with weights of its own, and the target itself."""
    target = DraftModel("target", network("Qwen3Config"), "model", "t")
    copy = DraftModel("copy", network("Qwen3Config"), "model", "t")
    for draft in (layer_skip("skip", target, [0]), copy, target):
        assert TeacherForced(draft, TeacherForced(target)).rest is None


def test_layers_of_other_models_cannot_be_skipped() -> None:
    for name in NOT_SKIPPABLE:
        with pytest.raises(ModelUnloadable, match="layers cannot be left out"):
            layer_skip("skip", DraftModel("target", network(name), "model", name), [1])


@pytest.mark.parametrize("name", [*SOME, *slow((name,) for name in OTHERS)])
def test_steps_leave_the_cache_as_it_was_sliding_windows_included(name: str) -> None:
    seen = list[torch.Tensor]()
    with torch.inference_mode():
        steps = stepper(DraftModel("target", network(name), "model", name), np.arange(60, dtype=np.int32), 2, 9)
        for tokens in (1, 5, 1, 9, 1):
            seen.append(steps.logits(tokens)[0, 0].clone())
            steps.take_back(tokens)
    assert all(torch.allclose(logits, seen[0], atol=1e-5) for logits in seen)
    assert steps.cache.get_seq_length() == 60


HYBRIDS: dict[str, dict[str, Any]] = {
    "FalconH1Config": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "Qwen3NextConfig": EXPERTS
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "NemotronHConfig": {"hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8}
    | {"n_groups": 1},
}


OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
NEEDS_STATES = pytest.mark.skipif(OLD, reason="this transformers keeps recurrent states otherwise: hybrids are refused")


@NEEDS_STATES
@pytest.mark.parametrize("name", HYBRIDS)
def test_steps_of_hybrids_verify_the_text_and_leave_recurrent_states_as_they_were(name: str) -> None:
    """The logits of steps after the context are those of a pass over the whole text: after every other step, in a batch."""
    torch.manual_seed(0)
    config = getattr(transformers, name)(**COMMON | {"head_dim": 8} | HYBRIDS[name])
    net = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    text = np.random.default_rng(0).integers(0, 250, 30).astype(np.int32)
    with torch.inference_mode():
        steps = stepper(DraftModel("target", net, "model", name), text, 3, 9)
        assert len(steps._recurrent) >= 2
        whole = net(input_ids=torch.cat([torch.from_numpy(text).expand(3, -1), steps.input_ids], 1), use_cache=False).logits
        for tokens in (1, 5, 1, 9, 2):
            torch.testing.assert_close(steps.logits(tokens), whole[:, 30 : 30 + tokens], atol=1e-5, rtol=0)
            steps.take_back(tokens)
            steps.step(9)


@NEEDS_STATES
def test_a_recurrent_state_that_is_not_taken_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has its old length all the same."""
    torch.manual_seed(0)
    config = transformers.FalconH1Config(**COMMON | {"head_dim": 8} | HYBRIDS["FalconH1Config"])
    net = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    spread(net)  # else states hardly matter
    monkeypatch.setattr(Stepper, "take_back", lambda self, tokens: self.cache.crop(-tokens))
    with torch.inference_mode(), pytest.raises(NotTimed, match="cannot undo steps: the next one has other logits"):
        stepper(DraftModel("target", net, "model", "t"), np.arange(30, dtype=np.int32), 1, 5)


@pytest.mark.skipif(RELEASE >= (5, 24), reason="takes steps back since")
def test_a_model_without_attention_is_not_timed() -> None:
    net = transformers.AutoModelForCausalLM.from_config(transformers.MambaConfig(hidden_size=32, num_hidden_layers=2)).eval()
    with torch.inference_mode(), pytest.raises(NotTimed, match=r"target \(MambaForCausalLM\) cannot undo steps"):
        stepper(DraftModel("target", net, "model", "t"), np.arange(30, dtype=np.int32), 1, 5)
