"""What formats of engines and simulators are written from: rounds by depth, and shares of ranks. No dicts of theirs yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, Literal

Over = Literal["proposing", "all"]
PROPOSING: Over = "proposing"
ALL: Over = "all"


@dataclass(frozen=True)
class Depths:
    """Rounds at one gamma: all, those that had a proposal (`ready`), those that drafted gamma tokens (`full`), and for
    d = 1, ..., gamma those whose d-th draft was `tested` (there was one, all before it were accepted, and the text had not
    ended) and those that `accepted` at least d drafts. Counts; expectations where acceptance is a matter of chance, and
    scaled where domains have weights. Some round has a proposal.
    """

    rounds: float
    ready: float
    full: float
    tested: tuple[float, ...]
    accepted: tuple[float, ...]

    def over(self, which: Over) -> float:
        """The rounds that rates are of."""
        return self.ready if which == PROPOSING else self.rounds

    def marginal(self, over: Over) -> tuple[float, ...]:
        """P(first d drafts all accepted) for d = 1, ..., gamma; never increasing.

        Over all rounds: shares of these, so that they add up to the mean. Over proposing rounds: of a proposal that has d
        drafts, as products of conditional rates, since the reader proposes fewer by itself where the log did.
        """
        if over == PROPOSING:
            return tuple(accumulate(self.conditional(over), mul))
        return tuple(count / self.rounds for count in self.accepted)

    def conditional(self, over: Over) -> tuple[float, ...]:
        """P(draft d accepted | the first d - 1 were), 0 where none is reached. Over proposing rounds: of the drafts that
        were tested. Over all rounds: quotients of marginals, so that products give these again.
        """
        if over == PROPOSING:
            return tuple(min(1.0, a / t) if t > 0 else 0.0 for a, t in zip(self.accepted, self.tested, strict=True))
        steps = pairwise((1.0, *self.marginal(over)))
        return tuple(after / before if before > 0 else 0.0 for before, after in steps)

    def length(self, over: Over) -> float:
        """Acceptance length: 1 + accepted drafts / rounds."""
        return 1 + sum(self.accepted) / self.over(over)

    def lengths(self) -> tuple[float, ...]:
        """Rounds that emitted 1, ..., gamma + 1 tokens (but for the end of a text)."""
        return tuple(before - after for before, after in pairwise((self.rounds, *self.accepted, 0.0)))


@dataclass(frozen=True)
class Acceptance:
    """What formats of chains are written from: one draft of a run under one rule, on one domain or on the whole traffic.

    `kind`, `model`: of the draft, as the profile names them (`model` None: it has none of its own); `max_ngram` of prompt
    lookup. `depths`: by gamma, of every gamma of the run. `per_request`: mean over documents of their acceptance length, all
    rounds counted, and `per_domain` the same by domain; None where rounds are expectations. `schedule`: first and last
    concurrency, and the best gamma there (0: the draft does not pay); None where fewer than two were timed.
    `conditions`: what was measured, and how.
    """

    kind: str
    model: str | None
    max_ngram: int | None
    gamma: int
    depths: Mapping[int, Depths]
    per_request: float | None
    per_domain: Mapping[str, float] | None
    schedule: tuple[tuple[int, int, int], ...] | None
    conditions: Mapping[str, Any]

    @property
    def chosen(self) -> Depths:
        """Rounds at the exported gamma."""
        return self.depths[self.gamma]


@dataclass(frozen=True)
class RankAcceptance:
    """What formats of trees are written from. `shares`: of positions whose token has rank 1, 2, ... in the draft's
    distribution; `paths`: nodes of a tree by ranks from the root, shallow ones first, then by rank.
    """

    shares: tuple[float, ...]
    paths: tuple[tuple[int, ...], ...]
