"""The parts of the `Report` value that show where a draft is right, and for whom. See `model.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alphaprof.stats.estimate import Interval


@dataclass(frozen=True)
class Tenth:
    """Acceptance in one tenth of all positions of a draft, by the target's margin or entropy, under one rule."""

    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    axis: str  # margin (p1 - p2) or entropy (nats)
    place: int  # 1 for the lowest values; there are fewer than ten where values tie
    low: float | None  # at least, less than; None: unbounded
    high: float | None  # less than this
    positions: int  # with a proposal
    accepted: Interval | None  # share that the rule accepts


@dataclass(frozen=True)
class DocumentResult:
    """One of the documents that a draft serves worst or best, at the gamma that is best for its domain."""

    domain: str
    draft: str
    rule: str
    gamma: int
    document: int  # its number in documents.parquet
    source: int  # place in the profile's data, from 0
    source_row: int  # row there, from 0
    prompt_hash: str  # SHA-256 of the prompt's token ids
    tokens: int  # of its continuation
    alpha: float | None  # acceptance over its positions with a proposal; None: it has none
    tokens_per_round: float  # over all of its rounds
    speedup: float | None  # None: no step times
