"""What a round runs in a batch, whose sequences share every step: one forward pass verifies the tokens of all of them.

Rounds of a batch begin and end together. A sequence that drafts m tokens waits for a verification of its own m + 1 tokens
and of those of the other sequences, each of which drafts as any round of the traffic does. Times are known by tokens per
sequence, T(n), and linear in between: S tokens of a batch of B take T(S / B). So the expected time of a round is a weighted
sum of T(1) .. T(gamma + 1), and its draft steps are as many as the sequence needs that drafts most (docs/theory.md, part 6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alphaprof.stats.estimate import Array

ROUNDING = 1e-12  # a smaller share of rounds is none


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


@dataclass(frozen=True)
class SharedSteps:
    """What a round that itself drafts m = 0..gamma tokens is expected to run: `verify` [gamma + 1, gamma + 1], the weights
    of T(1) .. T(gamma + 1) in its verification; `waits` [gamma + 1], draft steps beyond its own, which other sequences need;
    `others_draft`, the chance that another sequence drafts anything. Of a hybrid, `starts`: the chance that another sequence
    runs draft steps, and `steps`: how many it then runs.
    """

    verify: Array
    waits: Array
    others_draft: float = 0.0
    starts: float = 0.0
    steps: float = 0.0

    @classmethod
    def alone(cls, gamma: int, padded: bool = False) -> SharedSteps:
        """A round that waits for no other: of one sequence, or of a batch that drafts as much as it does. `padded`: every
        sequence is verified over gamma + 1 tokens, whatever it drafts.
        """
        verify = np.eye(gamma + 1)
        return cls(verify[[gamma] * (gamma + 1)] if padded else verify, np.zeros(gamma + 1))

    @classmethod
    def expected(cls, drafting: Drafting, batch: int, padded: bool = False) -> SharedSteps:
        """Return the same in a batch whose other sequences draft as `drafting` says, each by itself."""
        chances = np.where(drafting.chances < ROUNDING, 0.0, drafting.chances)
        gamma, others = len(chances) - 1, batch - 1
        shared = cls.alone(gamma, padded)
        if not others or not chances[:-1].any():
            return shared
        drafted = np.arange(gamma + 1)
        steps = drafted + (drafting.discards & (drafted < gamma))
        most = np.diff(np.cumsum(chances) ** others, prepend=0.0)  # chances of what the sequence drafts that drafts most
        return cls(
            verify=shared.verify if padded else _verified(_sums(chances, others), gamma, batch),
            waits=np.maximum(steps - steps[:, None], 0) @ most,
            others_draft=1 - float(chances[0]) ** others,
            starts=1 - (1 - drafting.starts) ** others,
            steps=drafting.steps,
        )


def _sums(chances: Array, number: int) -> Array:
    """Return the chances of the sums 0, 1, ... of `number` independent draws."""
    size = number * (len(chances) - 1) + 1
    sums = np.maximum(np.fft.irfft(np.fft.rfft(chances, size) ** number, size), 0.0)
    return np.asarray(sums / sums.sum())


def _verified(others: Array, gamma: int, batch: int) -> Array:
    """Return the weights of T(1) .. T(gamma + 1) in a verification, [gamma + 1, gamma + 1], by the tokens that a sequence
    drafts; `others`: chances of what all others draft.
    """
    weights = np.empty((gamma + 1, gamma + 1))
    for drafted in range(gamma + 1):
        each = (drafted + np.arange(len(others))) / batch  # drafted tokens per sequence
        below = np.minimum(each.astype(int), gamma - 1)
        share = each - below
        low, high = (np.bincount(below, others * part, gamma + 1) for part in (1 - share, share))
        weights[drafted] = low + np.roll(high, 1)
    return weights
