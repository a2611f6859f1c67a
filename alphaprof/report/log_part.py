"""How much of the position log a report reads: all of it, or whole shards that are spread over a large run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from alphaprof.analysis.certified import decile_edges
from alphaprof.log.store import Run
from alphaprof.report.documents import Documents
from alphaprof.report.texts import Text, texts

Array = np.ndarray[Any, Any]
LIMIT = 250_000  # positions of a draft that are read at most, but for what kinds of text need
ENOUGH = 20  # documents of every kind of text, where there are so many


@dataclass(frozen=True)
class LogPart:
    """What is read of a position log: `run` has the shards of it alone, `documents` those that lie in them.

    Intervals are over the documents of whole shards, so that fewer of them make them wider, and not wrong.
    """

    run: Run
    documents: Documents

    @classmethod
    def of(cls, run: Run, documents: Documents, limit: int | None) -> LogPart:
        """Of a run with its documents. `limit`: positions; None: all there are."""
        if limit is None or not run.has_log or run.manifest.positions <= limit:
            return cls(run, documents)
        chosen = _chosen(run, documents, limit)
        shards = tuple(run.shards[place] for place in chosen)
        view = Run(run.path, dataclasses.replace(run.manifest, shards=shards))
        return cls(view, documents.take(np.flatnonzero(np.isin(_shard_of(run), chosen))))

    @cached_property
    def texts(self) -> list[Text]:
        """The kinds of text by domain."""
        return texts(self.documents)

    @cached_property
    def edges(self) -> dict[str, Array]:
        """Between the tenths of all positions. They follow from the target alone, which the log of every draft holds."""
        return decile_edges(self.run, next(iter(self.run.manifest.drafts)))


def _shard_of(run: Run) -> Array:
    """The place of the shard that each document lies in, [documents]."""
    return np.repeat(np.arange(len(run.shards)), [shard.documents for shard in run.shards])


def _chosen(run: Run, documents: Documents, limit: int) -> Array:
    """Places of the shards to read, ascending: as many as `limit` holds at equal distances, and more for kinds of text that
    have fewer than ENOUGH documents in them; these at equal distances among the shards that have any.
    """
    home, size = _shard_of(run), len(run.shards)
    chosen = np.zeros(size, dtype=bool)
    chosen[_spread(size, max(1, limit * size // run.manifest.positions))] = True
    for group in documents.groups:
        count = np.bincount(home[group.rows], minlength=size)
        missing = min(ENOUGH, int(count.sum())) - int(count[chosen].sum())
        if missing > 0:
            others = np.flatnonzero((count > 0) & ~chosen)
            least = int(np.searchsorted(np.cumsum(np.sort(count[others])), missing)) + 1  # surely enough
            chosen[others[_spread(len(others), min(least, len(others)))]] = True
    return np.flatnonzero(chosen)


def _spread(size: int, wanted: int) -> Array:
    """So many of `size` places at equal distances."""
    wanted = min(wanted, size)
    return np.asarray((2 * np.arange(wanted) + 1) * size // (2 * wanted))
