"""What decoding by a rule gave, text by text: rounds, what the target loses by them, and where texts part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.commands.validate.timings import by_depth
from alphaprof.log.manifest import ModelFacts

Array = np.ndarray[Any, Any]
SAME = -1  # in place of the place where a text departs: it does not


@dataclass(frozen=True)
class Rolled:
    """Documents decoded in one way: with a draft by a rule at one gamma, or plainly ("", "", 0).

    `rows` [texts]: which documents. Of each text: its `tokens`, `rounds`, the sum of its tokens' `regret` in nats (see
    `speculation.Decoded`), whether it `ended` by itself, and the place of the first token that plain decoding does not have
    there (`departs`; `SAME`). `drafted`, `tested`, `accepted` [texts, gamma]: see `depth_counts`.
    """

    draft: str
    rule: str
    gamma: int
    rows: Array
    tokens: Array
    rounds: Array
    drafted: Array
    tested: Array
    accepted: Array
    regret: Array
    ended: Array
    departs: Array


@dataclass(frozen=True)
class Rollouts:
    """Documents decoded plainly and by rules. `documents`: their rows, as a run's documents.parquet has them; `foreign`:
    documents that are left out, because the target does not write their text.
    """

    target: ModelFacts
    documents: pa.Table
    plain: Rolled
    ways: tuple[Rolled, ...]
    foreign: int


def depth_counts(tokens: int, drafted: Array, accepted: Array, gamma: int) -> tuple[Array, Array, Array]:
    """Rounds of a text [rounds] that drafted, tested and accepted a token at depth d = 1..gamma, each [gamma].

    A draft is tested where all earlier ones of its round were accepted, and where the text of so many `tokens` has not ended
    before its place.
    """
    starts = np.cumsum(accepted + 1) - accepted  # of each round; the first token of a text is that of the prefill
    tested = np.minimum(np.minimum(drafted, accepted + 1), tokens - starts)
    return by_depth(drafted, gamma), by_depth(tested, gamma), by_depth(accepted, gamma)


def departure(text: Array, own: Array) -> int:
    """The first place at which a text is not the other one; `SAME` where there is none."""
    shared = min(len(text), len(own))
    differing = np.flatnonzero(text[:shared] != own[:shared])
    if len(differing):
        return int(differing[0])
    return SAME if len(text) == len(own) else shared
