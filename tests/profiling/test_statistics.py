"""Per-position statistics: worked out by hand, against float64, and their invariances."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from alphaprof.profiling.models.processing import PLAIN, Processing
from alphaprof.profiling.scoring import dispatch
from alphaprof.profiling.scoring.statistics import (
    ProcessedLogits,
    columns,
    distribution,
    processed_logits,
    rank_of,
    softmax,
    target_columns,
    top_probs,
)
from tests import reference
from tests.loops import each


def both(
    target: torch.Tensor, draft: torch.Tensor, token: torch.Tensor, chosen: Processing = PLAIN
) -> dict[str, torch.Tensor]:
    """All columns of a chunk, by the loops of this device; those in torch are the same, and held against them every time."""
    ours, theirs = dispatch.measured([target, draft], [chosen, chosen], token, [])
    found = ours | theirs
    in_torch = columns(processed_logits(target, chosen), [processed_logits(draft, chosen)], token, [])
    for name, values in (in_torch[0] | in_torch[1]).items():
        assert found[name].dtype == values.dtype
        assert torch.allclose(found[name].double(), values.double(), atol=1e-5, rtol=1e-5), name
    return found


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


@each("chosen", SETTINGS, ids=str)
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each(("vocabulary", "lacking"), [(2, 0), (17, 3), (1000, 0), (50_257, 0)])
def test_every_column_equals_float64_within_1e5(
    dtype: torch.dtype, vocabulary: int, lacking: int, chosen: Processing
) -> None:
    """Also of a draft that lacks the last ids: they have probability 0 there, and the last ranks."""
    generator = torch.Generator().manual_seed(vocabulary)
    target = (4 * torch.randn(6, vocabulary, generator=generator)).to(dtype)
    draft = (target.float() + torch.randn(6, vocabulary, generator=generator)).to(dtype)
    draft = draft[:, : vocabulary - lacking].contiguous()
    token = torch.randint(0, vocabulary, (6,), generator=generator)
    token[0] = vocabulary - 1
    found = both(target, draft, token, chosen)
    for row in range(6):
        logits = target[row].float().numpy(), draft[row].float().numpy()
        expected = reference.columns(*logits, int(token[row]), chosen, chosen)
        got = {name: float(values[row]) for name, values in found.items()}
        assert got == pytest.approx(expected, abs=1e-5, rel=1e-5)


@given(hnp.arrays(np.float32, (1, 9), elements=st.integers(-3, 3).map(float)), st.integers(0, 8))
def test_ties_go_to_the_lower_id(logits: np.ndarray, index: int) -> None:
    found = distribution(torch.from_numpy(logits))
    ids = torch.tensor([index])
    assert int(rank_of(found.scaled, ids)) == reference.rank(logits[0], index)
    assert int(rank_of(found.scaled, found.top)) == 1
    order = sorted(range(9), key=lambda place: (-logits[0, place], place))
    assert [int(rank_of(found.scaled, torch.tensor([place]))) for place in order] == list(range(1, 10))


TRUNCATED = [Processing(0.5), Processing(1.0, 5), Processing(1.0, 0, 0.9), Processing(1.0, 0, 1.0, 0.1)]


@each("chosen", [PLAIN, *TRUNCATED, Processing(1.5, 9, 0.8, 0.1)])
@each("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_logit_makes_the_entropy_of_its_row_not_a_number(bad: float, chosen: Processing) -> None:
    """By torch and by the loops of this device."""
    logits = torch.randn(3, 40)
    logits[1, 7] = bad
    assert distribution(logits, chosen).entropy.isfinite().tolist() == [True, False, True]
    ours, theirs = dispatch.measured([logits, logits.flip(0)], [chosen, chosen], torch.zeros(3, dtype=torch.long), [])
    assert ours["target_entropy"].isfinite().tolist() == [True, False, True]
    assert theirs["draft_entropy"].isfinite().tolist() == [True, False, True]


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
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


# The largest probabilities.


@each("chosen", SETTINGS)
@each(("vocabulary", "most"), [(50, 64), (64, 64), (300, 64), (300, 1)])
def test_the_largest_probabilities_come_in_order(vocabulary: int, most: int, chosen: Processing) -> None:
    """As many as there are, summing to what they hold of the whole, zeros where truncation leaves fewer."""
    logits = 3 * torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    given = processed_logits(logits, chosen)
    found = top_probs(given, target_columns(softmax(given), torch.zeros(5, dtype=torch.long)), most)
    whole = np.stack([reference.processed(row.numpy(), chosen) for row in logits])
    assert found.shape == (5, min(most, vocabulary))
    assert found.numpy() == pytest.approx(-np.sort(-whole)[:, :most], abs=1e-6)


def test_the_largest_probability_of_all_is_the_top_probability_to_the_last_bit() -> None:
    """So that a threshold and an acceptance that look at it never disagree."""
    given = processed_logits(torch.randn(200, 90, generator=torch.Generator().manual_seed(0)), Processing(0.7, 40))
    (found,) = dispatch.columns(given, [], torch.zeros(200, dtype=torch.long), [])
    top = top_probs(given, found, 64)
    assert torch.equal(top[:, 0], found["target_top_prob"])
    assert torch.equal(top[:, 1], found["target_second_prob"])


# The loops of this device.

TRUNCATIONS = [PLAIN, Processing(0.7), Processing(1.0, 5), Processing(1.3, 0, 0.8), Processing(1.0, 0, 1.0, 0.1)]


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits like those of a model, with ties in 16 bits, and those of a draft close to it."""
    generator = torch.Generator().manual_seed(seed + vocabulary)
    target = 3 * torch.randn(rows, vocabulary, generator=generator) + 15
    draft = target + torch.randn(rows, vocabulary, generator=generator) - 30
    return target.to(dtype), draft.to(dtype)


@each(("dtype", "vocabulary"), [(torch.float32, 32_000), (torch.bfloat16, 151_937), (torch.float16, 262_143)])
def test_rows_of_large_vocabularies_equal_float64_within_1e5(dtype: torch.dtype, vocabulary: int) -> None:
    """In a matrix that is wider than the vocabulary: what stands in its padding is not read."""
    padded = [torch.full((3, vocabulary + 77), math.nan, dtype=dtype) for _ in range(2)]
    for wide, values in zip(padded, logits_of(3, vocabulary, dtype), strict=True):
        wide[:, :vocabulary] = values
    target, draft = (wide[:, :vocabulary] for wide in padded)
    token = torch.tensor([0, vocabulary // 2, vocabulary - 1])
    guess = torch.tensor([vocabulary - 1, 3, 0])
    ours, theirs, proposed = dispatch.measured([target, draft], [PLAIN, PLAIN], token, [guess])
    for row in range(3):
        logits = target[row].float().numpy(), draft[row].float().numpy()
        expected = reference.columns(*logits, int(token[row]))
        got = {name: float(values[row]) for name, values in (ours | theirs).items()}
        assert got == pytest.approx(expected, abs=1e-5, rel=1e-5)
        exact = ("target_top", "draft_top", "target_rank_of_draft_top", "draft_rank_of_token")
        assert [got[name] for name in exact] == [expected[name] for name in exact]
        assert int(proposed["target_rank_of_draft_top"][row]) == reference.rank(logits[0], int(guess[row]))


@each("threads", [2, 3, 7])
@each("rows", [1, 5, 64])
def test_rows_are_the_same_on_any_number_of_threads(threads: int, rows: int) -> None:
    target, draft = logits_of(rows, 300, torch.bfloat16)
    token = torch.arange(rows)
    alone = dispatch.measured([target, draft, target], [PLAIN] * 3, token, [token])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        together = dispatch.measured([target, draft, target], [PLAIN] * 3, token, [token])
    assert all(torch.equal(one[name], other[name]) for one, other in zip(alone, together, strict=True) for name in one)


@given(
    hnp.arrays(np.float32, (2, 23), elements=st.floats(-200, 200, width=16)),
    st.sampled_from([PLAIN, *TRUNCATIONS]),
    st.integers(0, 30),
    st.tuples(st.integers(1, 23), st.integers(1, 23)),
)
@example(np.array([[40.0, -22.0], [0.0, 0.0]], np.float32), Processing(0.7), 0, (2, 1))
@example(np.array([[0.0, -1.0, -95.0], [0.0, -1.0, 0.0]], np.float32), PLAIN, 0, (3, 2))
@example(np.array([[0, -9.5, -9.6, -30], [0, -5, -1, -30]], np.float32), Processing(0.1, 2), 0, (4, 4))
def test_loops_and_torch_agree_on_any_logits(
    logits: np.ndarray, chosen: Processing, token: int, widths: tuple[int, int]
) -> None:
    """Of any widths, any truncation, and tokens that a side may not have."""
    target, draft = (torch.from_numpy(row[None, :width]) for row, width in zip(logits, widths, strict=True))
    both(target, draft, torch.tensor([token]), chosen)


@each("error", [RuntimeError("no C compiler\nat all"), torch.OutOfMemoryError("CUDA out of memory")])
def test_where_kernels_cannot_run_a_gpu_is_told_why(error: Exception) -> None:
    """A CPU needs no kernels; that memory ran out says nothing about them."""
    dispatch.why_unavailable.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *_, **__: (_ for _ in ()).throw(error))
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(torch.OutOfMemoryError):
                dispatch.why_unavailable(torch.device("cuda"))
        else:
            assert dispatch.why_unavailable(torch.device("cuda")) == "no C compiler"
    assert dispatch.why_unavailable(torch.device("cpu")) is None
    dispatch.why_unavailable.cache_clear()


def test_equal_rows_are_exactly_nothing_apart() -> None:
    """A mean divergence of rounding would be a budget to reject on."""
    target, _ = logits_of(20, 1000, torch.bfloat16)
    found = dispatch.columns(ProcessedLogits(target), [ProcessedLogits(target.clone())], torch.arange(20), [])[1]
    assert not found["kl_target_draft"].any()
    assert not found["kl_draft_target"].any()


@pytest.mark.slow
def test_the_process_that_compiles_computes_what_others_load(tmp_path: Path) -> None:
    """To the last bit, also where two compile at once: rows of a run must not depend on the process that computed them."""
    code = """
import torch
from alphaprof.profiling.scoring import cpu_loops, dispatch
print(dispatch.checksum(torch.device("cpu")), sum(cpu_loops.measure.stats.cache_hits.values()))
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate()[0].split() for each in both]
    said.append(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    assert "0" in {hits for _, hits in said[:2]}, "nobody has compiled"
    assert said[2][1] == "2", "both dtypes are loaded"
    assert len({digest for digest, _ in said}) == 1


def test_the_checksum_is_of_every_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """One last bit of one column makes it another one."""
    device, computed = torch.device("cpu"), dispatch.columns
    before = dispatch.checksum(device)
    for place, name in ((0, "target_entropy"), (1, "kl_draft_target"), (2, "target_prob_of_draft_top")):

        def changed(*given: Any, place: int = place, name: str = name) -> Any:
            found = computed(*given)
            found[place][name] = found[place][name].nextafter(torch.tensor(torch.inf))
            return found

        monkeypatch.setattr(dispatch, "columns", changed)
        assert dispatch.checksum(device) != before
    monkeypatch.setattr(dispatch, "columns", computed)
    assert dispatch.checksum(device) == before
