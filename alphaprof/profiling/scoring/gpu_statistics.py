"""Per-position statistics on a GPU: what `statistics` computes, from few reads of the logits and without a copy of them.

A target's row is read once, and once more for each draft and lookup; a draft's row twice. One program has one row: with
fewer rows than multiprocessors (132 on an H100) some of them have nothing to do. Nothing here waits for the device.

The largest probabilities (certificates) stay with `torch.topk`: a running top 64 would sort every block of a row inside the
kernels' loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from alphaprof.profiling.scoring import columns as declared
from alphaprof.profiling.scoring import gpu_kernels as kernels
from alphaprof.profiling.scoring.statistics import Columns, ProcessedLogits

# Fixed, not tuned where they run: results must not depend on the machine. A thread has 8 ids of a block, which are 16 bytes
# of bfloat16, the widest load; eight warps leave an H100's registers room for several rows on a multiprocessor.
BLOCK = 2048
WARPS = 8
# Where kernels write columns: ids and ranks among the integers, others among the floats.
TARGET = {
    "target_top": kernels.TOP,
    "target_top_prob": kernels.TOP_PROB,
    "target_second_prob": kernels.SECOND_PROB,
    "target_margin": kernels.MARGIN,
    "target_entropy": kernels.ENTROPY,
    "target_token_prob": kernels.PROB,
}
DRAFT = {
    "draft_top": kernels.TOP,
    "draft_top_prob": kernels.TOP_PROB,
    "draft_margin": kernels.MARGIN,
    "draft_entropy": kernels.ENTROPY,
    "draft_token_prob": kernels.PROB,
    "draft_rank_of_token": kernels.RANK,
}
PROPOSAL = {"target_prob_of_draft_top": kernels.PROB, "target_rank_of_draft_top": kernels.RANK}
PAIR = {
    **PROPOSAL,
    "overlap": kernels.OVERLAP,
    "kl_target_draft": kernels.FORWARD,
    "kl_draft_target": kernels.BACKWARD,
}


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
    """Return columns [n] of the target, of each draft beside it, and of the target at each proposal (int64 [n]; what stands
    where it proposes nothing, -1, means nothing), as `statistics.columns` has them.

    `token` int64 [n]: what came next. Cuts in `least` must be logits divided by the temperature with correct rounding: that
    is not what torch does on a GPU with a number as divisor (it multiplies by the inverse).
    """
    index = target.logits.device.index if target.logits.is_cuda else -1  # kernels start on the current device; -1: leave it
    with torch.cuda.device(index):
        ours = _one_side(target, token, ranked=False)
        columns = [_columns(ours.found, TARGET)]
        for side in drafts:
            theirs = _one_side(side, token, ranked=True)
            pair = _run(kernels.two_sides, target.logits, ours, theirs)
            both = _columns(theirs.found, DRAFT) | _columns(pair, PAIR)
            columns.append({name: both[name] for name in declared.DRAFT})
        columns += [_columns(_run(kernels.one_id, target.logits, ours, ids), PROPOSAL) for ids in proposals]
    return columns


def _one_side(side: ProcessedLogits, chosen: torch.Tensor, ranked: bool) -> _Measured:
    temperature = None if side.temperature == 1.0 else side.temperature
    rows = _Rows(side.logits, side.logits.stride(0), side.logits.shape[1], temperature, side.least)
    return _Measured(rows, _run(kernels.one_side, side.logits, rows, chosen, ranked=ranked))


def _run(kernel: Any, logits: torch.Tensor, *given: Any, **flags: bool) -> _Found:
    """Return what a kernel finds about each row of logits."""
    count, device = len(logits), logits.device
    floats = torch.empty((count, kernels.FLOATS.value), dtype=torch.float32, device=device)
    integers = torch.empty((count, kernels.INTEGERS.value), dtype=torch.int64, device=device)
    kernel[(count,)](*given, found := _Found(floats, integers), BLOCK, num_warps=WARPS, **flags)
    return found


def _columns(found: _Found, places: Mapping[str, Any]) -> Columns:
    return {
        name: (found.integers if name in declared.IDS else found.floats)[:, place.value] for name, place in places.items()
    }
