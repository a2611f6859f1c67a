"""Per-position statistics: worked out by hand, against float64, and their invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from alphaprof.profiling.processing import PLAIN, Processing
from alphaprof.profiling.statistics import (
    distribution,
    draft_columns,
    raw_draft_columns,
    raw_target_columns,
    target_columns,
)
from tests import reference


def both(
    target: torch.Tensor, draft: torch.Tensor, token: torch.Tensor, chosen: Processing = PLAIN
) -> dict[str, torch.Tensor]:
    """All columns of a chunk."""
    p, q = distribution(target, chosen), distribution(draft, chosen)
    raw, raw_draft = distribution(target), distribution(draft)
    ours = target_columns(p, token) | raw_target_columns(raw)
    return ours | draft_columns(p, q, token) | raw_draft_columns(raw, raw_draft)


def test_a_distribution_worked_out_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25, 0.0]]).clamp(min=1e-30).log()
    found = {name: float(value[0]) for name, value in both(p, q, torch.tensor([2])).items()}
    expected = {
        "target_top": 0,
        "target_top_prob": 0.5,
        "target_second_prob": 0.25,
        "target_margin": 0.25,
        "target_entropy": 1.75 * math.log(2),
        "target_token_prob": 0.125,
        "draft_top": 1,
        "draft_top_prob": 0.5,
        "draft_margin": 0.25,
        "draft_entropy": 1.5 * math.log(2),
        "draft_token_prob": 0.25,
        "target_prob_of_draft_top": 0.25,
        "target_rank_of_draft_top": 2,
        "draft_rank_of_token": 3,  # 0.25 twice: the lower id comes first
        "overlap": 0.25 + 0.25 + 0.125,
        # q log(q/p) = .25 log(1/2) + .5 log 2 + .25 log 2
        "kl_draft_target": 0.5 * math.log(2),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


SETTINGS = [PLAIN, Processing(0.6), Processing(1.4, 20, 0.9, 0.02)]


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 17, 1000, 50_257])
def test_every_column_equals_float64_within_1e5(dtype: torch.dtype, vocabulary: int, chosen: Processing) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    target = (4 * torch.randn(6, vocabulary, generator=generator)).to(dtype)
    draft = (target.float() + torch.randn(6, vocabulary, generator=generator)).to(dtype)
    token = torch.randint(0, vocabulary, (6,), generator=generator)
    found = both(target, draft, token, chosen)
    for row in range(6):
        logits = target[row].float().numpy(), draft[row].float().numpy()
        expected = reference.columns(*logits, int(token[row]), chosen, chosen)
        got = {name: float(values[row]) for name, values in found.items()}
        assert got == pytest.approx(expected, abs=1e-5, rel=1e-5)


@given(hnp.arrays(np.float32, (1, 9), elements=st.integers(-3, 3).map(float)), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_ties_go_to_the_lower_id(logits: np.ndarray, index: int) -> None:
    found = distribution(torch.from_numpy(logits))
    ids = torch.tensor([index])
    assert int(found.rank_of(ids)) == reference.rank(logits[0], index)
    assert int(found.rank_of(found.top)) == 1
    order = sorted(range(9), key=lambda place: (-logits[0, place], place))
    assert [int(found.rank_of(torch.tensor([place]))) for place in order] == list(range(1, 10))


@given(hnp.arrays(np.float32, (2, 12), elements=st.floats(-20, 20, width=32)))
@settings(max_examples=200, deadline=None)
def test_swapping_target_and_draft_swaps_the_divergences(logits: np.ndarray) -> None:
    p, q = torch.from_numpy(logits[:1]), torch.from_numpy(logits[1:])
    token = torch.tensor([0])
    there, back = both(p, q, token), both(q, p, token)
    assert float(there["kl_target_draft"]) == pytest.approx(float(back["kl_draft_target"]), abs=1e-5, rel=1e-5)
    for symmetric in ("overlap", "js"):
        assert float(there[symmetric]) == pytest.approx(float(back[symmetric]), abs=1e-6)
    assert float(there["target_token_prob"]) == pytest.approx(float(back["draft_token_prob"]), rel=1e-6)


@given(hnp.arrays(np.float32, (1, 12), elements=st.floats(-20, 20, width=32)), st.floats(-50, 50, width=32))
@settings(max_examples=100, deadline=None)
def test_adding_a_constant_to_the_logits_changes_nothing(logits: np.ndarray, shift: float) -> None:
    plain, shifted = distribution(torch.from_numpy(logits)), distribution(torch.from_numpy(logits).double() + shift)
    assert torch.allclose(plain.entropy, shifted.entropy, atol=1e-4)
    assert torch.allclose(plain.top_prob, shifted.top_prob, atol=1e-5)


def test_equal_distributions_have_overlap_one_and_divergence_zero() -> None:
    logits = torch.randn(5, 300)
    found = both(logits, logits.clone(), torch.zeros(5, dtype=torch.long))
    assert torch.allclose(found["overlap"], torch.ones(5), atol=1e-6)
    for name in ("kl_target_draft", "kl_draft_target", "js"):
        assert torch.all((found[name] >= 0) & (found[name] < 1e-5)), name


def test_disjoint_distributions_have_overlap_zero_and_js_log_two() -> None:
    p = torch.tensor([[100.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.0, 100.0]])
    found = both(p, q, torch.tensor([0]))
    assert float(found["overlap"]) == pytest.approx(0, abs=1e-6)
    assert float(found["js"]) == pytest.approx(math.log(2), abs=1e-6)


def test_ids_beyond_the_draft_have_probability_zero_and_the_last_rank() -> None:
    target, draft = torch.randn(1, 10), torch.randn(1, 7)
    found = both(target, draft, torch.tensor([8]))
    expected = reference.columns(target[0].numpy(), draft[0].numpy(), 8)
    assert float(found["draft_token_prob"]) == 0.0
    assert int(found["draft_rank_of_token"]) == 9
    assert float(found["kl_target_draft"]) == math.inf
    assert float(found["kl_draft_target"]) == pytest.approx(expected["kl_draft_target"], abs=1e-5)
    assert float(found["overlap"]) == pytest.approx(expected["overlap"], abs=1e-6)
    assert float(found["js"]) == pytest.approx(expected["js"], abs=1e-5)


TRUNCATED = [Processing(0.5), Processing(1.0, 5), Processing(1.0, 0, 0.9), Processing(1.0, 0, 1.0, 0.1)]


@pytest.mark.parametrize("chosen", [PLAIN, *TRUNCATED, Processing(1.5, 9, 0.8, 0.1)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_logit_makes_the_entropy_of_its_row_not_a_number(bad: float, chosen: Processing) -> None:
    logits = torch.randn(3, 40)
    logits[1, 7] = bad
    assert distribution(logits, chosen).entropy.isfinite().tolist() == [True, False, True]


def test_truncated_distributions_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    q = torch.tensor([[0.2, 0.1, 0.5, 0.2]]).log()
    found = {name: float(value[0]) for name, value in both(p, q, torch.tensor([1]), Processing(top_p=0.7)).items()}
    third = 1 / 3
    expected = {
        "target_top_prob": 2 * third,  # 1/2 and 1/4 are left
        "target_second_prob": third,
        "target_token_prob": third,
        "target_entropy": math.log(3) - 2 * third * math.log(2),
        "draft_top_prob": 5 / 9,  # 1/2, and both of 1/5
        "draft_token_prob": 0.0,
        "target_prob_of_draft_top": 0.0,
        "target_rank_of_draft_top": 3,
        "draft_rank_of_token": 4,
        "overlap": 2 / 9,
        "kl_target_draft": math.inf,
        "kl_draft_target": math.inf,
        "raw_target_margin": 0.25,
        "raw_target_entropy": 1.75 * math.log(2),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@given(hnp.arrays(np.float32, (2, 12), elements=st.floats(-20, 20, width=32)), st.sampled_from(TRUNCATED))
@settings(max_examples=200, deadline=None)
def test_columns_of_truncated_distributions_stay_in_their_ranges(logits: np.ndarray, chosen: Processing) -> None:
    found = both(torch.from_numpy(logits[:1]), torch.from_numpy(logits[1:]), torch.tensor([0]), chosen)
    probabilities = [value for name, value in found.items() if "prob" in name or name in ("overlap", "target_margin")]
    assert all(0 <= float(value) <= 1 for value in probabilities)
    assert all(float(value) >= 0 for name, value in found.items() if "kl" in name or "entropy" in name)
    assert 0 <= float(found["js"]) <= 0.6931472
    assert not any(value.isnan().any() for value in found.values())


def test_large_logits_do_not_overflow() -> None:
    found = distribution(torch.tensor([[3e4, -3e4, 2.9e4]]))
    assert float(found.top_prob) == 1.0
    assert float(found.entropy) == 0.0
