"""From logits to the sampled distribution: equal to transformers' own processors, in their order, for every setting."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import GenerationConfig
from transformers.generation import logits_process

from alphaprof.config.options import SampledContinuation
from alphaprof.errors import ProfileInvalid
from alphaprof.profiling.models import processing
from alphaprof.profiling.models.processing import (
    NOT_MODELLED,
    NUCLEUS_FIRST,
    PLAIN,
    Processing,
    not_modelled,
    processed,
    resolved,
    weights_of,
)
from tests import reference
from tests.loops import each
from tests.tiny import llama

TEMPERATURES = (0.3, 1.0, 1.7)
TOP_K = (0, 1, 7, 10_000)
TOP_P = (1.0, 0.9, 0.5, 0.05)
MIN_P = (0.0, 0.05, 0.5)
ALL = [Processing(*values) for values in itertools.product(TEMPERATURES, TOP_K, TOP_P, MIN_P)]
# Width and spread of random logits; the flat ones hold top_p in more tokens than are sorted first.
LOGITS = {"peaked": (1000, 4.0), "wide": (300, 1.5), "flat": (5000, 0.3), "narrow": (9, 1.0), "two": (2, 1.0)}


def random_logits(kind: str, rows: int = 4) -> torch.Tensor:
    """Float32 logits [rows, width] of one kind."""
    width, spread = LOGITS[kind]
    return spread * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


def probabilities(logits: torch.Tensor, chosen: Processing) -> torch.Tensor:
    """Our processed distribution, in float64."""
    scaled, kept = processed(logits, chosen)
    return (
        scaled.double()
        .masked_fill(torch.zeros(scaled.shape, dtype=torch.bool) if kept is None else ~kept, -math.inf)
        .softmax(1)
    )


def warped(logits: torch.Tensor, chosen: Processing) -> torch.Tensor:
    """Logits after transformers' processors, in the order in which `generate` applies them."""
    steps: list[Any] = [logits_process.TemperatureLogitsWarper(chosen.temperature)]
    if chosen.top_k:
        steps.append(logits_process.TopKLogitsWarper(chosen.top_k))
    if chosen.top_p < 1:
        steps.append(logits_process.TopPLogitsWarper(chosen.top_p))
    steps.append(logits_process.MinPLogitsWarper(chosen.min_p))
    for step in steps:
        logits = step(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return logits


@each("kind", LOGITS)
@each("chosen", ALL, ids=lambda chosen: "-".join(f"{value:g}" for value in vars(chosen).values()))
def test_the_processed_distribution_is_that_of_transformers(chosen: Processing, kind: str) -> None:
    logits = random_logits(kind)
    theirs = warped(logits, chosen)
    ours = probabilities(logits, chosen)
    assert torch.equal(ours > 0, theirs.isfinite())
    assert torch.allclose(ours, theirs.double().softmax(1), rtol=0, atol=1e-6)


@pytest.mark.models
def test_the_order_of_the_filters_is_that_in_which_generate_builds_them() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=7, top_p=0.9, min_p=0.05, eos_token_id=256)
    network = llama(layers=1)
    network._prepare_special_tokens(config, False, device="cpu")
    built = network._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    assert [type(step).__name__ for step in built] == [
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]
    logits = random_logits("wide")
    found = built(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    assert torch.equal(found, warped(logits, Processing(0.7, 7, 0.9, 0.05)))


@pytest.mark.parametrize("chosen", [Processing(top_p=0.9), Processing(1.7, 0, 0.5, 0.05), Processing(1.0, 2000, 0.9)])
def test_a_nucleus_beyond_the_tokens_that_are_sorted_first_is_found_whole(
    chosen: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, peaked = random_logits("flat", 3), torch.zeros(1, 5000)
    peaked[0, 17] = 30.0
    logits = torch.cat([flat[:2], peaked, flat[2:]])
    found = probabilities(logits, chosen) > 0
    assert (found[[0, 1, 3]].sum(1) > NUCLEUS_FIRST).all()
    assert found[2].nonzero().flatten().tolist() == [17]
    monkeypatch.setattr(processing, "NUCLEUS_FIRST", None)  # as on a GPU: all sorted at once
    assert torch.equal(probabilities(logits, chosen) > 0, found)


tied = hnp.arrays(np.float32, (1, 9), elements=st.integers(-3, 3).map(float))
any_settings = st.builds(
    Processing,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 10),
    st.sampled_from([0.07, 0.33, 0.61, 0.93, 1.0]),
    st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)


@given(tied, any_settings)
def test_ties_at_a_cut_are_all_kept_as_one_filter_after_the_other_leaves_them(
    logits: np.ndarray, chosen: Processing
) -> None:
    found = probabilities(torch.from_numpy(logits), chosen)[0].numpy()
    assert (found > 0).tolist() == reference.support(logits[0], chosen).tolist()
    assert found == pytest.approx(reference.processed(logits[0], chosen), abs=1e-6)
    for value in np.unique(logits):
        assert len(set((found > 0)[logits[0] == value])) == 1


def test_a_nucleus_ends_where_exact_sums_say_also_in_flat_distributions() -> None:
    """In float32 a sum of 40,000 probabilities may be off by more than the smallest of them: here in the last row."""
    logits = 1.5 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(5))
    kept = processed(logits, Processing(top_p=0.95))[1]
    assert kept is not None
    weights = np.sort(weights_of(logits, PLAIN).double().numpy(), 1)[:, ::-1]
    for row, count in zip(weights, kept.sum(1).tolist(), strict=True):
        share = [math.fsum(row[:end]) / math.fsum(row) for end in (count - 1, count)]
        assert share[0] < 0.95 <= share[1]


@each(("top_p", "kept"), [(0.25, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (0.99, 4)])
def test_tokens_that_hold_top_p_exactly_are_enough(top_p: float, kept: int) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()  # powers of 2: no rounding
    assert (probabilities(logits, Processing(top_p=top_p)) > 0).tolist() == [[place < kept for place in range(4)]]


@each("top_p", [0.99999, 0.9999999, 1 - 2**-40])
@each("top_k", [7, 300, 2000])
@each("kind", ["peaked", "flat"])
def test_top_p_just_below_one_brings_nothing_back_that_top_k_removed(kind: str, top_k: int, top_p: float) -> None:
    logits = random_logits(kind, rows=40)
    alone = probabilities(logits, Processing(top_k=top_k)) > 0
    assert not ((probabilities(logits, Processing(top_k=top_k, top_p=top_p)) > 0) & ~alone).any()


def sampled(**values: Any) -> SampledContinuation:
    return SampledContinuation(kind="sampled", **values)


SERVED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "eos_token_id": [1, 2], "do_sample": True}
RESOLVED = [
    ({}, {}, PLAIN),
    ({}, SERVED, Processing(0.6, 20, 0.95, 0.1)),
    ({"temperature": 1.3, "top_k": 0}, SERVED, Processing(1.3, 0, 0.95, 0.1)),
    ({"top_p": 1.0, "min_p": 0.0}, SERVED, Processing(0.6, 20, 1.0, 0.0)),
    ({"top_k": 5}, {"temperature": None, "top_p": 0.5}, Processing(1.0, 5, 0.5)),
    ({"temperature": 2}, {"top_k": 50.0, "top_p": 1}, Processing(2.0, 50, 1.0)),
]


@each(("options", "served", "expected"), RESOLVED)
def test_what_a_profile_leaves_unset_comes_from_the_models_own_settings(
    options: dict[str, Any], served: dict[str, Any], expected: Processing
) -> None:
    found = resolved(sampled(**options), served)
    assert found == expected
    assert [type(value) for value in vars(found).values()] == [float, int, float, float]


def test_a_model_that_is_served_greedily_is_refused_as_sampled() -> None:
    with pytest.raises(ProfileInvalid, match="temperature 0") as caught:
        resolved(sampled(), {"temperature": 0.0})
    assert "kind: greedy" in caught.value.hint
    assert resolved(sampled(temperature=0.4), {"temperature": 0.0}) == Processing(0.4)


def test_a_setting_that_changes_the_distribution_and_is_not_modelled_is_told() -> None:
    """And no neutral value of any, as transformers' own defaults have them."""
    served = {"temperature": 0.6, "eos_token_id": 2}
    for name, value in (
        ("repetition_penalty", 1.1),
        ("no_repeat_ngram_size", 3),
        ("forced_bos_token_id", 0),
        ("top_h", 0.4),
    ):
        assert not_modelled(served | {name: value}) == [f"{name}: {value}"]
    assert not_modelled(GenerationConfig(**served).to_dict()) == []
    assert not_modelled({name: value for name, neutral in NOT_MODELLED.items() for value in neutral}) == []
