"""The parts of the `Report` value that say why drafts are rejected. See `docs/report.md` for every cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alphaprof.stats.estimate import Interval


@dataclass(frozen=True)
class Cause:
    """One cause of what is lost, and what it would bring to lose nothing to it, all else as it was: at the same gamma and
    cost of a round, so that it is the most that the remedy can bring.
    """

    name: str  # see the table of causes in docs/report.md
    share: Interval  # of the positions
    tokens_per_round: float | None  # with it recovered; None: rounds are not defined
    speedup: float | None  # with it recovered; None: rounds are not defined, or there are no step times
    remedy: str  # what would mend it, or why nothing would


@dataclass(frozen=True)
class Attribution:
    """What one draft loses in a domain under a rule, split into causes that exclude each other and add up to it."""

    domain: str
    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the rule's own decoding (for a lossy rule: the target's) would emit this text
    documents: int
    positions: int
    lost: Interval  # share of all positions whose token is not an accepted draft: 1 - alpha times coverage
    ceiling: float | None  # the largest alpha of any draft that proposes one token; None: a perfect draft loses nothing
    gamma: int | None  # of the rounds that are replayed: the result's best one
    tokens_per_round: float | None  # as things are
    speedup: float | None  # as things are
    causes: tuple[Cause, ...]  # those that something is lost to, in the order in which they are looked for
    perfect_speedup: float | None  # with nothing lost at all, at this gamma and cost of a round
    best: str | None  # name of the cause whose remedy could bring most; None: none brings anything, or nothing is known
    unknown: tuple[str, ...]  # what the run does not say, so that a cause may hold too little
