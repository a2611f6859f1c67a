"""Per-position statistics on a GPU: what `statistics` computes, from few reads of the logits and without a copy of them.

A target's row is read once, and once more for each draft and lookup; a draft's row twice. One program has one row: with
fewer rows than multiprocessors (132 on an H100) some of them have nothing to do. Nothing here waits for the device.

The largest probabilities (certificates) stay with `torch.topk`: a running top 64 would sort every block of a row inside the
kernels' loops. Columns of several draws need the whole row again after each draw, and stay in `statistics` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from alphaprof.profiling.scoring import gpu_kernels as kernels
from alphaprof.profiling.scoring.statistics import Columns, ProcessedLogits

# Fixed, not tuned where they run: results must not depend on the machine. A thread has 8 ids of a block, which are 16 bytes
# of bfloat16, the widest load; eight warps leave an H100's registers room for several rows on a multiprocessor.
BLOCK = 2048
WARPS = 8


class _Rows(NamedTuple):
    """A `ProcessedLogits` for kernels. No truncation and a temperature of 1 are None, for which they compile nothing."""

    logits: torch.Tensor
    stride: int
    width: int
    temperature: float | None
    least: torch.Tensor | None


class _Found(NamedTuple):
    """What a kernel writes of each row: `floats` [n, FLOATS] float32, `integers` [n, INTEGERS] int64."""

    floats: torch.Tensor
    integers: torch.Tensor


class _Measured(NamedTuple):
    """A side and what its own kernel has found."""

    rows: _Rows
    found: _Found


def measured(
    target: ProcessedLogits, drafts: Sequence[ProcessedLogits], token: torch.Tensor, proposals: Sequence[torch.Tensor]
) -> list[Columns]:
    """Columns [n] of the target, of each draft beside it, and of the target at each proposal (int64 [n]; what stands where
    it proposes nothing, -1, means nothing), as in `target_columns`, `draft_columns` and `proposal_columns`.

    `token` int64 [n]: what came next. Cuts in `least` must be logits divided by the temperature with correct rounding: that
    is not what torch does on a GPU with a number as divisor (it multiplies by the inverse).
    """
    index = target.logits.device.index if target.logits.is_cuda else -1  # kernels start on the current device; -1: leave it
    with torch.cuda.device(index):
        ours = _one_side(target, token, ranked=False)
        columns = [_target_columns(ours)]
        for side in drafts:
            theirs = _one_side(side, token, ranked=True)
            columns.append(_draft_columns(theirs, _two_sides(ours, theirs)))
        columns += [_proposal_columns(_one_id(ours, ids)) for ids in proposals]
    return columns


def _one_side(side: ProcessedLogits, chosen: torch.Tensor, ranked: bool) -> _Measured:
    temperature = None if side.temperature == 1.0 else side.temperature
    rows = _Rows(side.logits, side.logits.stride(0), side.logits.shape[1], temperature, side.least)
    found = _empty(side.logits)
    kernels.one_side[(len(side.logits),)](rows, chosen, found, BLOCK, ranked, num_warps=WARPS)
    return _Measured(rows, found)


def _two_sides(target: _Measured, draft: _Measured) -> _Found:
    found = _empty(target.rows.logits)
    kernels.two_sides[(len(target.rows.logits),)](target, draft, found, BLOCK, num_warps=WARPS)
    return found


def _one_id(target: _Measured, chosen: torch.Tensor) -> _Found:
    found = _empty(target.rows.logits)
    kernels.one_id[(len(target.rows.logits),)](target, chosen, found, BLOCK, num_warps=WARPS)
    return found


def _empty(logits: torch.Tensor) -> _Found:
    count, device = len(logits), logits.device
    return _Found(
        torch.empty((count, kernels.FLOATS.value), dtype=torch.float32, device=device),
        torch.empty((count, kernels.INTEGERS.value), dtype=torch.int64, device=device),
    )


def _target_columns(side: _Measured) -> Columns:
    floats, integers = side.found
    return {
        "target_top": integers[:, kernels.TOP.value],
        "target_top_prob": floats[:, kernels.TOP_PROB.value],
        "target_second_prob": floats[:, kernels.SECOND_PROB.value],
        "target_margin": floats[:, kernels.MARGIN.value],
        "target_entropy": floats[:, kernels.ENTROPY.value],
        "target_token_prob": floats[:, kernels.PROB.value],
    }


def _draft_columns(side: _Measured, pair: _Found) -> Columns:
    floats, integers = side.found
    return {
        "draft_top": integers[:, kernels.TOP.value],
        "draft_top_prob": floats[:, kernels.TOP_PROB.value],
        "draft_margin": floats[:, kernels.MARGIN.value],
        "draft_entropy": floats[:, kernels.ENTROPY.value],
        "draft_token_prob": floats[:, kernels.PROB.value],
        **_proposal_columns(pair),
        "draft_rank_of_token": integers[:, kernels.RANK.value],
        "overlap": pair.floats[:, kernels.OVERLAP.value],
        "kl_target_draft": pair.floats[:, kernels.FORWARD.value],
        "kl_draft_target": pair.floats[:, kernels.BACKWARD.value],
        "js": pair.floats[:, kernels.JS.value],
    }


def _proposal_columns(found: _Found) -> Columns:
    return {
        "target_prob_of_draft_top": found.floats[:, kernels.PROB.value],
        "target_rank_of_draft_top": found.integers[:, kernels.RANK.value],
    }
