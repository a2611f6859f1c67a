"""The kinds of text of a run by domain: what certificates, predictability and trees are told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaprof.stats.estimate import Interval, distinct, share
from alphaprof.totals.documents import Documents

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Text:
    """Documents of one kind of text: `rows` of the documents table, and the independent unit of each [rows].

    `policy`: how the target chose the tokens, greedy or sampled; empty where it did not.
    """

    domain: str
    continuation: str
    policy: str
    sampling: dict[str, float] | None
    rows: Array
    cluster: Array

    @property
    def on_policy(self) -> bool:
        """Whether the target produced it."""
        return bool(self.policy)

    def share(self, totals: Array, counts: Array, confidence: float) -> Interval | None:
        """Ratio of sums [documents of the table] over this text as a share; None where nothing was counted."""
        return share(self.cluster, totals[self.rows], counts[self.rows], confidence)

    def documents(self, counts: Array) -> int:
        """Independent units with counts."""
        return distinct(self.cluster[counts[self.rows] > 0])


def texts(documents: Documents) -> list[Text]:
    """The kinds of text of a run by domain, in the order in which they occur."""
    codes = documents.units.codes
    return [
        Text(group.domain, group.continuation, group.policy, group.sampling, group.rows, codes[group.rows])
        for group in documents.groups
    ]


def kinds(every: Sequence[Text]) -> list[Text]:
    """The kinds of text over all domains."""
    parts: dict[tuple[str, str, str], list[Text]] = {}
    for text in every:
        parts.setdefault((text.continuation, text.policy, str(text.sampling)), []).append(text)
    return [
        replace(
            same[0],
            domain="",
            rows=np.concatenate([text.rows for text in same]),
            cluster=np.concatenate([text.cluster for text in same]),
        )
        for same in parts.values()
    ]
