"""What a head is trained for, and how often it is right: over the drafts of rounds that begin anywhere in a continuation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from alphaprof.profiling.heads.eagle import Eagle3
from alphaprof.profiling.training.features import TargetLaw, TextBatch

DECAY = 0.8  # the weight of a depth's loss as a share of that of the depth before it


@dataclass(frozen=True)
class DepthRows:
    """Where a batch has drafts of one depth: text `row`, base `base` and drafted position `at` [n]: in a round that begins
    in the continuation, of a token that belongs to it.
    """

    row: torch.Tensor
    base: torch.Tensor
    at: torch.Tensor


def rows_of(batch: TextBatch, depth: int) -> DepthRows:
    """The drafts of a depth. Base b of depth d drafts position b + d + 1, and its round begins at b + 2."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for number, (prompt, size) in enumerate(zip(batch.prompt.tolist(), batch.size.tolist(), strict=True)):
        places = np.arange(max(prompt + depth - 1, depth + 1), size)
        found.append((np.full(len(places), number), places))
    row, at = (torch.from_numpy(np.concatenate(parts)).to(batch.ids.device) for parts in zip(*found, strict=True))
    return DepthRows(row, at - depth - 1, at)


def drafts(prompt: int, size: int, depth: int) -> int:
    """How many drafts of a depth a text has."""
    return max(0, size - max(prompt + depth - 1, depth + 1))


def logits_by_depth(network: Eagle3, batch: TextBatch, depths: int) -> Iterator[tuple[DepthRows, torch.Tensor]]:
    """Yields for depth 1, 2, ... `depths` the drafts and their logits [n, ids]: the same pass that scores a head."""
    first = max(0, int(batch.prompt.min()) - 2)
    for depth, states in enumerate(network.states(batch.ids, batch.states, depths, first), 1):
        rows = rows_of(batch, depth)
        yield rows, network.logits(states[rows.row, rows.base - first], depth)


def losses(network: Eagle3, batch: TextBatch, law: TargetLaw, depths: int) -> list[torch.Tensor]:
    """For each depth the sum over its drafts of KL(p || q): p the target's law over the head's ids, q the head's."""
    sums = []
    every = rows_of(batch, 1)  # deeper drafts are of some of these positions
    place = torch.full(batch.whole.shape, -1, device=batch.ids.device)
    place[every.row, every.at] = torch.arange(len(every.row), device=batch.ids.device)
    known = law(batch.last[every.row, every.at - 1])
    for drafted, logits in logits_by_depth(network, batch, depths):
        p = known[place[drafted.row, drafted.at]]
        sums.append((p.exp() * (p - logits.float().log_softmax(-1))).sum())
    return sums


@torch.no_grad()
def right(network: Eagle3, batch: TextBatch, depths: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By depth [depths]: how many drafts are the text's token, how many drafts there are, and in how many rounds of those
    that begin anywhere all drafts up to the depth are.
    """
    agree, starts, prefix = (np.zeros(depths, dtype=np.int64) for _ in range(3))
    going = torch.ones(batch.whole.shape, dtype=torch.bool, device=batch.ids.device)
    for depth, (drafted, logits) in enumerate(logits_by_depth(network, batch, depths)):
        top = logits.argmax(-1)
        hit = (top if network.ids is None else network.ids[top]) == batch.whole[drafted.row, drafted.at]
        agree[depth], starts[depth] = int(hit.sum()), len(hit)
        reached = torch.zeros_like(going)
        reached[drafted.row, drafted.base] = hit & going[drafted.row, drafted.base]
        going = reached
        prefix[depth] = int(going.sum())
    return agree, starts, prefix
