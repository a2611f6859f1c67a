"""Step times from bytes and FLOPs: by hand, by direction, against random routing, known sizes and published ratios."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from alphaprof.config.hardware import ACCELERATORS, PRESETS, Accelerator
from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import fits, roofline_ms, roofline_rows, shape_of
from alphaprof.costs.roofline import (
    Efficiency,
    Load,
    attention_flops,
    cache_moved,
    cache_slots,
    experts_touched,
    matrix_flops,
    step_ms,
    weights_moved,
)
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.errors import CostsUnreadable
from tests.loops import each
from tests.synthetic import facts

DENSE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA = DENSE | {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": False, "architectures": ["X"]}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,  # not hidden / heads
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MIXTRAL = DENSE | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": None,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,  # of no layer
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek",
    "hidden_size": 2048,
    "intermediate_size": 10944,  # of the first layer
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
TOY = ModelShape(parameters=1000, layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
SLOW = Accelerator("slow", bandwidth=1000, peak=10000, memory=1e6)
HALF = Efficiency(memory=0.5, compute=0.25)
MOE = dataclasses.replace(TOY, experts=4, experts_per_token=2, expert_parameters=200)
H100 = ACCELERATORS["h100-sxm"]


def test_a_step_of_a_toy_model_by_hand() -> None:
    # 960 parameters but for the embedding, 2 bytes each; 16 bytes of cache a token; 3 tokens of 2 sequences, context 5.
    load = Load(tokens=3, batch=2, context=5)
    assert (weights_moved(TOY, load), cache_moved(TOY, load)) == (960 * 2, 2 * 5 * 16)
    assert (matrix_flops(TOY, load), attention_flops(TOY, load)) == (6 * 2 * 960, 6 * 4 * 2 * 2 * 2 * 5)
    assert step_ms(TOY, SLOW, HALF, 3, 2, 5) == pytest.approx(1000 * (2080 / 500 + 12480 / 2500))
    overlapping = 1000 * (math.hypot(1920 / 500, 11520 / 2500) + math.hypot(160 / 500, 960 / 2500))
    assert step_ms(TOY, SLOW, dataclasses.replace(HALF, overlap=2.0), 3, 2, 5) == pytest.approx(overlapping)


@given(
    st.sampled_from((TOY, MOE, *map(ModelShape.from_config, (LLAMA, QWEN3, QWEN3_MOE)))),
    st.sampled_from(sorted(ACCELERATORS)),
    *(st.integers(1, most) for most in (64, 256, 100_000, 8)),
)
def test_without_overlap_times_of_bytes_and_flops_are_added(
    shape: ModelShape, name: str, tokens: int, batch: int, context: int, tp: int
) -> None:
    """As the formula was before kernels overlapped them; the larger p is, the nearer to the longer of the two."""
    accelerator, efficiency, load = ACCELERATORS[name], Efficiency(0.8, 0.66, expert_reuse=0.7), Load(tokens, batch, context)
    moved = weights_moved(shape, load, tp, 0.7) + cache_moved(shape, load, tp)
    computed = matrix_flops(shape, load, tp) + attention_flops(shape, load, tp)
    added = 1000 * (moved / (accelerator.bandwidth * 0.8) + computed / (accelerator.peak * 0.66))
    for p in (1.0, 1 + 1e-12):
        overlapping = dataclasses.replace(efficiency, overlap=p)
        assert step_ms(shape, accelerator, overlapping, tokens, batch, context, tp) == pytest.approx(added, rel=1e-9)
    less = [
        step_ms(shape, accelerator, dataclasses.replace(efficiency, overlap=p), tokens, batch, context, tp)
        for p in (1, 2.5, 9)
    ]
    assert less == sorted(less, reverse=True)
    assert less[-1] >= 1000 * max(moved / (accelerator.bandwidth * 0.8), computed / (accelerator.peak * 0.66)) * (1 - 1e-9)


def test_tied_embeddings_are_read_as_the_output_head() -> None:
    tied = dataclasses.replace(TOY, tied=True)
    assert weights_moved(tied, Load()) == 2000
    assert matrix_flops(tied, Load()) == 2000


def test_tensor_parallelism_divides_weights_and_flops_and_the_cache_by_its_heads() -> None:
    load = Load(tokens=3, batch=2, context=5)
    assert weights_moved(TOY, load, tp=2) == 960
    assert cache_moved(TOY, load, tp=2) == 160  # one KV head: both devices hold it
    assert cache_moved(dataclasses.replace(TOY, kv_heads=2), load, tp=2) == 160  # two: twice the cache, one each
    assert matrix_flops(TOY, load, tp=2) + attention_flops(TOY, load, tp=2) == 12480 / 2
    alone, together = (step_ms(TOY, SLOW, HALF, 3, 2, 5, tp) for tp in (1, 2))
    assert together == pytest.approx(1000 * (1120 / 500 + 6240 / 2500))
    exchanging = dataclasses.replace(HALF, all_reduce_ms=7.0)
    assert step_ms(TOY, SLOW, exchanging, 3, 2, 5, 2) == pytest.approx(together + 2 * 7)
    assert step_ms(TOY, SLOW, exchanging, 3, 2, 5, 1) == alone


def test_steps_of_a_head_by_hand() -> None:
    """1,000 parameters, 300 of which join states in the first step alone and 200 make logits of the last token.
    Of its own it has 1,200, an embedding among them, but not the logits.
    """
    parts = {"first_parameters": 300, "last_parameters": 200, "stored_parameters": 1200}
    head = dataclasses.replace(TOY, layers=1, tied=True, **parts)
    load = Load(tokens=3, batch=2, context=5)
    assert (weights_moved(head, load), cache_moved(head, load)) == (1000 * 2, 2 * 5 * 8)
    assert (matrix_flops(head, load), attention_flops(head, load)) == (6 * 2 * 800 + 2 * 2 * 200, 6 * 4 * 2 * 2 * 5)
    assert weights_moved(head.later, Load(batch=2)) == 700 * 2
    assert matrix_flops(head.later, Load(batch=2)) == 2 * (2 * 500 + 2 * 200)
    assert (head.total_weight_bytes, TOY.total_weight_bytes) == (1200 * 2, 1000 * 2)
    assert TOY.later == TOY


def test_an_output_head_of_other_bytes_is_read_and_stored_as_such() -> None:
    """40 of the 1,000 parameters, and as many of the embedding, which is stored only."""
    quantised = dataclasses.replace(TOY, weight_bytes=0.5, head_bytes=2.0)
    assert weights_moved(quantised, Load()) == 920 * 0.5 + 40 * 2
    assert quantised.total_weight_bytes == 920 * 0.5 + 80 * 2
    assert dataclasses.replace(quantised, tied=True).total_weight_bytes == 960 * 0.5 + 40 * 2


def test_packed_weights_are_read_and_multiplied_slower_but_for_the_head() -> None:
    packed = dataclasses.replace(HALF, packed_memory=0.8, packed_compute=0.5)
    quantised = dataclasses.replace(TOY, weight_bytes=0.5, head_bytes=2.0)
    expected = 1000 * ((920 * 0.5 / 0.8 + 40 * 2) / 500 + 2 * 960 / 2500 / 0.5)
    assert step_ms(quantised, SLOW, packed) == pytest.approx(expected)
    for bytes_ in (1.0, 2.0):
        whole = dataclasses.replace(TOY, weight_bytes=bytes_)
        assert step_ms(whole, SLOW, packed) == step_ms(whole, SLOW, HALF)


def test_an_accelerator_has_shares_of_its_own() -> None:
    """Of the peak where the engine names none, and of the bandwidth at which the cache is read."""
    own = dataclasses.replace(HALF, compute=None, own_cache=True)
    measured = dataclasses.replace(SLOW, compute_share=0.4, cache_share=0.8)
    assert step_ms(TOY, measured, own, 3, 2, 5) == pytest.approx(1000 * (1920 / 500 + 160 / 800 + 12480 / 4000))
    assert step_ms(TOY, SLOW, own, 3, 2, 5) == pytest.approx(1000 * (1920 / 500 + 160 / 950 + 12480 / 5000))
    assert step_ms(TOY, measured, HALF, 3, 2, 5) == step_ms(TOY, SLOW, HALF, 3, 2, 5)


def test_a_verification_on_ampere_takes_longer_to_read_the_cache() -> None:
    """A multiple of what decoding takes, and at least a time for each layer and token of context, whatever the batch."""
    slow, ampere = dataclasses.replace(HALF, verify_cache=3.0), dataclasses.replace(SLOW, ampere=True)
    decode, verify = (step_ms(TOY, ampere, slow, tokens, 2, 5) for tokens in (1, 2))
    assert decode == step_ms(TOY, SLOW, HALF, 1, 2, 5)
    assert verify == pytest.approx(step_ms(TOY, SLOW, HALF, 2, 2, 5) + 2 * 1000 * 160 / 500)
    waiting = dataclasses.replace(slow, verify_context_ns=1e9)  # 2 layers, 5 tokens
    assert step_ms(TOY, ampere, waiting, 2, 2, 5) == pytest.approx(verify - 3 * 1000 * 160 / 500 + 10_000)
    assert step_ms(TOY, SLOW, waiting, 2, 2, 5) == step_ms(TOY, SLOW, HALF, 2, 2, 5)


def test_quantised_weights_and_caches_move_fewer_bytes() -> None:
    small = dataclasses.replace(TOY, weight_bytes=0.5, kv_bytes=1)
    assert (weights_moved(small, Load()), cache_moved(small, Load(batch=2, context=5))) == (960 * 0.5, 80)
    assert matrix_flops(small, Load()) == matrix_flops(TOY, Load())


@each(("experts", "used", "tokens"), [(8, 2, 1), (8, 2, 5), (64, 6, 12), (4, 4, 3)])
def test_touched_experts_are_those_of_random_routing(experts: int, used: int, tokens: int) -> None:
    shape = dataclasses.replace(MOE, experts=experts, experts_per_token=used, expert_parameters=1)
    draw = np.random.default_rng(5)
    routed = draw.random((4000, tokens, experts)).argsort(2)[:, :, :used]
    touched = [len(np.unique(step)) for step in routed]
    assert experts_touched(shape, tokens) == pytest.approx(np.mean(touched), rel=0.01)


def test_a_mixture_reads_what_is_touched_and_computes_what_is_active() -> None:
    assert (MOE.shared_parameters, MOE.active_parameters) == (200, 600)
    assert weights_moved(MOE, Load()) == pytest.approx((200 - 40 + 2 * 200) * 2)
    assert weights_moved(MOE, Load(tokens=2)) == pytest.approx((160 + 3 * 200) * 2)  # 4 (1 - 1/4) experts
    assert weights_moved(MOE, Load(batch=2)) == weights_moved(MOE, Load(tokens=2))
    assert matrix_flops(MOE, Load(tokens=2)) == 2 * 2 * 560
    assert experts_touched(TOY, 9) == 0


SIZES = {
    "Llama-3.1-8B": (LLAMA, 8.03e9, 8.03e9, 131072),
    "Qwen3-0.6B": (QWEN3, 0.596e9, 0.596e9, 114688),
    "Mixtral-8x7B": (MIXTRAL, 46.7e9, 12.9e9, 131072),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30.5e9, 3.35e9, 98304),
    "Qwen2-57B-A14B": (QWEN2_MOE, 57.4e9, 14.2e9, 57344),
    "deepseek-moe-16b": (DEEPSEEK, 16.4e9, 2.83e9, 229376),
}


@each(("config", "total", "active", "cache"), SIZES.values(), ids=list(SIZES))
def test_the_sizes_of_known_models(config: dict[str, Any], total: float, active: float, cache: int) -> None:
    shape = ModelShape.from_config(config)
    assert shape.parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.01)
    assert shape.kv_bytes_per_token == cache
    assert shape.total_weight_bytes == 2 * shape.parameters
    halved = ModelShape.from_config(config, weight_bytes=1, kv_bytes=1)
    assert (halved.total_weight_bytes, halved.kv_bytes_per_token) == (shape.parameters, cache / 2)


def test_layers_without_experts_are_found() -> None:
    def experts(**changes: Any) -> float:
        return ModelShape.from_config(QWEN3_MOE | changes).expert_parameters / (3 * 2048 * 768)

    assert experts() == 48
    assert experts(mlp_only_layers=[0, 47]) == 46
    assert experts(decoder_sparse_step=2) == 24
    assert experts(decoder_sparse_step=2, num_hidden_layers=47) == 23  # the second, the fourth, ...
    assert experts(model_type="deepseek", first_k_dense_replace=3) == 45
    assert experts(model_type="deepseek", moe_layer_freq=2) == 24


def test_a_config_that_is_not_counted_is_refused() -> None:
    for config in (LLAMA | {"model_type": "gpt2"}, DEEPSEEK | {"model_type": "deepseek_v3", "kv_lora_rank": 512}):
        with pytest.raises(KeyError):
            ModelShape.from_config(config)


PUBLISHED = {1: 1.01, 8: 1.08, 32: 1.26, 64: 1.41, 256: 1.75}  # T(4) / T(1), Llama-3.1-8B on an H100, context 1024
ENDS = [(Load(4, batch, 1024), PUBLISHED[batch]) for batch in (1, 256)]


def test_the_usual_efficiencies_give_published_ratios() -> None:
    shape, efficiency = ModelShape.from_config(LLAMA), PRESETS["none"].efficiency
    for batch, ratio in PUBLISHED.items():
        verify, decode = (step_ms(shape, H100, efficiency, tokens, batch, 1024) for tokens in (4, 1))
        assert verify / decode == pytest.approx(ratio, rel=0.15 if batch in (8, 32, 64) else 0.01)
        assert verify / decode == pytest.approx(ratio, rel=0.03)  # what it reaches


def test_the_ratio_of_efficiencies_in_the_docs_is_the_least_squares_fit_to_published_ends() -> None:
    shape = ModelShape.from_config(LLAMA)

    def misfit(log_weight: float) -> float:
        efficiency, total = Efficiency(0.5, 0.5 / math.exp(log_weight)), 0.0
        for load, ratio in ENDS:
            verify, decode = (step_ms(shape, H100, efficiency, tokens, load.batch, 1024) for tokens in (4, 1))
            total += math.log(verify / decode / ratio) ** 2
        return total

    fit = minimize_scalar(misfit, bounds=(-0.5, 0.69), method="bounded", options={"xatol": 1e-9})
    assert math.exp(fit.x) == pytest.approx(1.2203, abs=5e-5)


def test_what_a_draft_takes_of_the_targets_memory_by_hand() -> None:
    target = dataclasses.replace(TOY, kv_bytes=4)  # 2000 bytes of weights, 32 a token
    # Of 4000 bytes that are left the draft's weights take 1000.
    assert cache_slots(target, dataclasses.replace(TOY, parameters=500), 6000) == (125, 3000 / 48)
    # With one KV head both devices hold it.
    assert cache_slots(target, TOY, 6000, tp=2) == (10000 / 64, 8000 / 96)
    assert cache_slots(target, dataclasses.replace(TOY, parameters=5000), 6000) == (125, 0)
    assert cache_slots(target, TOY, 6000, shares_weights=True) == (125, 4000 / 48)
    assert cache_slots(dataclasses.replace(TOY, parameters=3000), TOY, 6000) is None


def test_memory_holds_all_that_is_kept_on_every_device_that_keeps_it() -> None:
    """Also what a step does not read of a sparse cache, and a copy on each device beyond the number of KV heads."""
    sparse = dataclasses.replace(TOY, token_elements=1.0, window=4, window_elements=3.0, kept_elements=3.0)
    assert (sparse.cache_bytes(100), sparse.stored_bytes(100)) == (2 * (100 + 4 * 3), 2 * 4 * 100)
    sliding = dataclasses.replace(sparse, kept_elements=0.0, state_bytes=10.0)
    assert (sliding.cache_bytes(100), sliding.stored_bytes(100)) == (2 * (100 + 4 * 3) + 10, 2 * (100 + 4 * 3) + 5)
    two = dataclasses.replace(TOY, parameters=1e11, token_elements=1e5, kv_heads=2)  # 200 GB, and 0.2 MB a token
    four, place = RooflineCosts(source="roofline", accelerator="h200", tp=4), (1, 1_500_000)
    assert fits(four, dataclasses.replace(two, kv_heads=4), *place)  # 300 of 364 GB
    assert not fits(four, two, *place)


TARGET, SMALL = ModelShape.from_config(LLAMA), ModelShape.from_config(QWEN3)
DRAFTS = {"small": SMALL, "ngram": None}
PLAIN = RooflineCosts(source="roofline", accelerator="h100-sxm")


def rows(setting: RooflineCosts = PLAIN, gamma: int = 2) -> dict[tuple[str, str, int, int, int], StepRow]:
    found = roofline_rows(TARGET, DRAFTS, setting, gamma, (1, 8), (0, 1024), (128, 512))
    keyed = {(row.model, row.step, row.tokens, row.batch, row.context): row for row in found}
    assert len(keyed) == len(found)
    return keyed


def test_every_step_that_a_table_needs_is_there() -> None:
    places = [(batch, context) for batch in (1, 8) for context in (0, 1024)]
    steps = [("target", "decode", 1), ("target", "verify", 2), ("target", "verify", 3)]
    steps += [("small", "draft", 1), ("small", "draft", 2), ("ngram", "lookup", 1)]
    prefill = {(model, "prefill", tokens, 1, 0) for model in ("target", "small") for tokens in (128, 512)}
    assert set(rows()) == {(*step, *place) for step in steps for place in places} | prefill


def test_a_head_has_first_steps_over_every_number_of_verified_tokens_and_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which goes without the parameters of the first, and alone has the overhead of a draft's step."""
    shape = dataclasses.replace(SMALL, first_parameters=1e8)
    monkeypatch.setitem(PRESETS, "own", dataclasses.replace(PRESETS["none"], draft_ms=0.25))
    setting = PLAIN.model_copy(update={"preset": "own"})
    found = roofline_rows(TARGET, {"eagle": shape}, setting, 2, (8,), (512,), (), ["eagle"])
    times = {(row.step, row.tokens): row.ms for row in found if row.model == "eagle"}
    assert set(times) == {("draft", 1), *(("draft_first", n) for n in (1, 2, 3))}
    for tokens in (1, 2, 3):
        assert times["draft_first", tokens] == pytest.approx(roofline_ms(PLAIN, shape, False, tokens, 8, 512))
    joining = 1000 * (2e8 / (0.8 * 3.35e12) + 8 * 2e8 / (0.66 * 989e12))
    assert times["draft_first", 1] - times["draft", 1] == pytest.approx(joining - 0.25)
    steps = StepTable(found).times("eagle", 2, 8, 512)
    assert list(steps.draft_first) == [1, 2, 3]


def test_a_head_in_one_pass_runs_over_the_rows_that_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those that were verified, as a model's step in an engine; none of its later steps takes time."""
    monkeypatch.setitem(PRESETS, "own", dataclasses.replace(PRESETS["none"], draft_ms=0.25, layer_us=10.0))
    shape = SMALL.at_once()
    setting = PLAIN.model_copy(update={"preset": "own"})
    found = roofline_rows(TARGET, {"dflash": shape}, setting, 4, (8,), (512,), (), ["dflash"])
    times = {(row.step, row.tokens): row.ms for row in found if row.model == "dflash"}
    assert times["draft", 1] == 0
    for tokens in (1, 5):
        kernels = roofline_ms(PLAIN, shape, False, tokens + 3, 8, 512)
        assert times["draft_first", tokens] == pytest.approx(kernels + 0.25 + 28 * 0.01)


def test_a_prompt_needs_the_logits_of_its_last_token_alone() -> None:
    """Of a target, of a draft model and of what drafts in one pass."""
    body = TARGET.parameters - 2 * 128256 * 4096
    for shape in (TARGET, TARGET.at_once()):
        found = roofline_rows(TARGET, {"draft": shape}, PLAIN, 1, (1,), (0,), (4096,), ["draft"])
        (ms,) = (row.ms for row in found if (row.model, row.step) == ("draft", "prefill"))
        computing = 2 * (4096 * body + 128256 * 4096) / (0.66 * 989e12)
        assert ms == pytest.approx(1000 * (computing + 2 * (body + 128256 * 4096) / (0.8 * 3.35e12)), rel=1e-6)


def test_a_decode_step_by_hand() -> None:
    # All parameters but for the input embedding: 2 bytes each at 0.8 of 3.35 TB/s, 2 FLOPs each at 0.66 of 989 TFLOP/s.
    parameters = TARGET.parameters - 128256 * 4096
    expected = 1000 * (2 * parameters / (0.8 * 3.35e12) + 2 * parameters / (0.66 * 989e12))
    assert rows()["target", "decode", 1, 1, 0].ms == pytest.approx(expected)
    assert expected == pytest.approx(5.62, abs=0.01)


def test_overheads_are_added_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "own", dataclasses.replace(PRESETS["none"], draft_ms=0.5))
    plain, slow = rows(), rows(PLAIN.model_copy(update={"overhead_ms": 3.0, "preset": "own"}))
    added = {(place[0], place[1]): slow[place].ms - plain[place].ms for place in plain}
    assert added == pytest.approx(
        {
            ("target", "decode"): 3.0,
            ("target", "verify"): 3.0,
            ("target", "prefill"): 0.0,
            ("small", "draft"): 0.5,
            ("small", "prefill"): 0.0,
            ("ngram", "lookup"): 0.0,
        }
    )


def test_a_target_has_overheads_of_a_step_and_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(PRESETS["none"], step_ms=0.5, sequence_ms=0.25)
    monkeypatch.setitem(PRESETS, "own", own)
    plain, slow = rows(), rows(PLAIN.model_copy(update={"preset": "own"}))
    for model, step, tokens, batch, context in plain:
        place, more = (model, step, tokens, batch, context), 0.5 + batch * 0.25
        added = more if model == "target" and step != "prefill" else 0.0
        assert slow[place].ms - plain[place].ms == pytest.approx(added), place


def test_a_prompt_fills_matrix_units_whatever_a_verification_reaches() -> None:
    """Its share of the peak is 0.66, and that of the accelerator if it is larger."""
    parameters = TARGET.parameters - 128256 * 4096
    for name, share in (("h100-sxm", 0.66), ("a10", 0.66), ("h20", 1.0)):
        accelerator = ACCELERATORS[name]
        setting = RooflineCosts(source="roofline", accelerator=name, preset="vllm-0.11")
        reading, computing = 2 * parameters / accelerator.bandwidth / 0.79, 2 * parameters * 2048 / accelerator.peak / share
        expected = 1000 * (reading**2.5 + computing**2.5) ** 0.4
        assert roofline_ms(setting, TARGET, True, 2048, 1, 0, prefill=True) == pytest.approx(expected)


def test_target_and_draft_have_their_own_devices() -> None:
    plain, both = rows(), rows(PLAIN.model_copy(update={"tp": 2}))
    apart = rows(PLAIN.model_copy(update={"tp": 2, "draft_tp": 1}))
    decode, draft = ("target", "decode", 1, 8, 1024), ("small", "draft", 1, 8, 1024)
    assert both[decode].ms == pytest.approx(plain[decode].ms / 2)
    assert both[draft].ms == pytest.approx(plain[draft].ms / 2)
    assert apart[decode].ms == pytest.approx(plain[decode].ms / 2)
    assert apart[draft].ms == pytest.approx(plain[draft].ms)


@given(st.integers(1, 64), st.integers(0, 4096))
def test_interpolation_meets_the_roofline_of_a_dense_model(batch: int, context: int) -> None:
    # Bytes and FLOPs are linear in batch for a context, and the other way round: two batches and two contexts tell all.
    table = StepTable(roofline_rows(TARGET, DRAFTS, PLAIN, 3, (1, 64), (0, 4096), ()))
    times = table.times("small", 3, batch, context)
    for tokens, found in times.target.items():
        assert found.ms == pytest.approx(roofline_ms(PLAIN, TARGET, True, tokens, batch, context), rel=1e-9)


def test_a_model_of_an_unknown_shape_is_refused_with_what_to_do() -> None:
    known = dataclasses.replace(facts("small"), shape=dataclasses.asdict(SMALL))
    assert shape_of("small", known) == SMALL
    with pytest.raises(CostsUnreadable, match="the shape of target, but Synthetic has no known shape") as caught:
        shape_of("target", facts("target"))
    assert "source: table" in caught.value.hint
