"""The mixing matrix: how often rounds run each kind of step, for everything that they are counted by.

Times of documents are counts @ M @ ms. `counts` [documents, 2 gamma + 7]: rounds that draft exactly m = 0..gamma tokens;
rounds that get exactly a = 0..gamma drafts accepted; draft steps whose token is discarded; and of a hybrid its draft steps,
the rounds that run any and those that run none, and the tokens beyond one that first steps read. `ms` [kinds]: the times of
verifications of 1..gamma + 1 tokens, of a later draft step, of first steps that take another time (a head's over 1..gamma +
1 verified tokens, or a draft model's over two), of a search, of bookkeeping.

Sequences of a batch share every step: one forward pass verifies the tokens of all of them, and rounds begin and end
together. A sequence that drafts m tokens waits for a verification of its own m + 1 tokens and of those of the other
sequences, each of which drafts as any round of the traffic does. Times are known by tokens per sequence, T(n), and linear in
between: S tokens of a batch of B take T(S / B). So the expected time of a round is a weighted sum of T(1) .. T(gamma + 1),
and its draft steps are as many as the sequence needs that drafts most (docs/research/theory.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from alphaprof.stats.estimate import Array

ROUNDING = 1e-12  # a smaller share of rounds is none
DEAREST_FIRST, SEARCH, BOOKKEEPING = -3, -2, -1  # columns behind those of verifications, a draft step and first steps


class Apart(NamedTuple):
    """What rounds are counted by beside their depths, or something of each: how often, a row, a cost. None: it is not
    counted. All but the first are a hybrid's, `started` beside it also those of a draft that stops.
    """

    unused: Any  # draft steps whose token is discarded
    steps: Any  # draft steps
    started: Any  # rounds that run any, or discard the token of the only one
    idle: Any  # rounds that run none, and wait for those of others
    read: Any  # tokens beyond one that first steps read


class Counted(NamedTuple):
    """Everything that rounds are counted by, as above, with something of each: rows of a matrix, costs in decode steps."""

    rounds: Array  # that draft m = 0..gamma tokens
    accepted: Array  # that get a = 0..gamma accepted: what the first step of the next round takes longer
    apart: Apart

    @classmethod
    def of(cls, every: Array) -> Counted:
        """Return the parts of an array [2 gamma + 7, ...], as views."""
        rounds, accepted, apart = np.split(every, [(len(every) - len(Apart._fields)) // 2, -len(Apart._fields)])
        return cls(rounds, accepted, Apart(*apart))


@dataclass(frozen=True)
class Drafting:
    """What rounds of a traffic draft: `chances` [gamma + 1] of drafting exactly m = 0..gamma tokens. `discards`: a round of
    fewer than gamma tokens runs one more draft step, whose token is discarded. Of a hybrid, `starts`: the chance that a
    round runs draft steps, and `steps`: how many it then runs.
    """

    chances: Array
    discards: bool = False
    starts: float = 0.0
    steps: float = 0.0


def mixing(gamma: int, head: bool, hybrid: bool = False, batch: int = 1, others: Drafting | None = None) -> Array:
    """Return how often each kind of step runs for everything that rounds are counted by, [2 gamma + 7, kinds], as above.

    `head`: the first step of a round is one of its own, over the tokens that were verified; what it takes longer for
    accepted drafts is counted with the round that accepted them. `hybrid`: rounds draft without draft steps, which are
    counted apart. `others`: how each other sequence of the batch drafts, by itself; None: as much as this one.
    """
    draft, first = gamma + 1, gamma + 2  # columns
    found = np.zeros((2 * gamma + 7, first + (gamma + 1 if head else 1) + 2))
    rounds, after, (unused, steps, started, idle, read) = Counted.of(found)
    drafted = np.arange(gamma + 1)
    rounds[drafted, drafted] = rounds[:, SEARCH] = rounds[1:, BOOKKEEPING] = 1.0
    if hybrid:
        steps[draft] = 1.0
        if head:
            started[[draft, first]] = -1.0, 1.0
        tokens = gamma if head else 1  # more tokens than these were not timed: each is taken to cost the same
        read[first if head else draft], read[DEAREST_FIRST] = -1 / tokens, 1 / tokens
    else:
        rounds[:, draft], unused[draft] = drafted, 1.0
        if head:
            rounds[1:, first], rounds[1:, draft] = 1.0, drafted[1:] - 1
            started[[draft, first]] = -1.0, 1.0
            after[:, first:SEARCH] = np.eye(gamma + 1)
            after[:, first] -= 1.0
        elif gamma:
            after[gamma, [draft, first]] = -1.0, 1.0
    if others is None or batch == 1:
        return found

    chances = np.where(others.chances < ROUNDING, 0.0, others.chances)
    if not chances[:-1].any():
        return found
    rounds[:, : gamma + 1] = _verified(chances, batch)
    rounds[0, BOOKKEEPING] = elsewhere = 1 - float(chances[0]) ** (batch - 1)  # chance that any other sequence drafts
    if hybrid:  # rounds without steps of their own wait for those of others
        idle += (1 - (1 - others.starts) ** (batch - 1)) * (others.steps * steps + started)
        return found
    if head and not others.discards:
        rounds[0, first], rounds[0, draft] = elsewhere, -elsewhere
    needed = drafted + (others.discards & (drafted < gamma))
    most = np.diff(np.cumsum(chances) ** (batch - 1), prepend=0.0)  # of what the sequence drafts that drafts most
    rounds[:, draft] += np.maximum(needed - needed[:, None], 0) @ most
    return found


def _verified(chances: Array, batch: int) -> Array:
    """Return the weights of T(1) .. T(gamma + 1) in a verification, [gamma + 1, gamma + 1], by the tokens that a sequence
    drafts; `chances`: those of what each of the others drafts.
    """
    gamma, size = len(chances) - 1, (batch - 1) * (len(chances) - 1) + 1
    others = np.maximum(np.fft.irfft(np.fft.rfft(chances, size) ** (batch - 1), size), 0.0)  # chances of their sum
    others /= others.sum()
    weights = np.empty((gamma + 1, gamma + 1))
    for drafted in range(gamma + 1):
        each = (drafted + np.arange(size)) / batch  # drafted tokens per sequence
        below = np.minimum(each.astype(int), gamma - 1)
        share = each - below
        low, high = (np.bincount(below, others * part, gamma + 1) for part in (1 - share, share))
        weights[drafted] = low + np.roll(high, 1)
    return weights
