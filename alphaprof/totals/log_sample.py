"""How much of the position log a report reads: all of it, or whole shards that are spread over a large run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import pyarrow as pa

from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Array
from alphaprof.stats.grouping import grouped
from alphaprof.totals.count import SHAPED, Shape, array_of
from alphaprof.totals.documents import Documents

LEAST, SHARE, MOST = 32_768, 30, 250_000  # positions of a draft that are read of a large log, but for what texts need
ENOUGH = 20  # documents of every kind of text, or all where there are fewer
MARGIN = "target_margin"  # what makes a position easy or hard
SAMPLE = 1_000_000  # positions that deciles are taken from, at most: every n-th one
Name = TypeVar("Name")


@dataclass(frozen=True)
class LogPart:
    """What is read of a position log: `run` has the shards of it alone, `documents` those that lie in them.

    Intervals are over the documents of whole shards, so that fewer of them make them wider, and not wrong.
    """

    run: Run
    documents: Documents

    @classmethod
    def of(cls, run: Run, documents: Documents, limit: int | None) -> LogPart:
        """Of a run with its documents. `limit`: positions; None: all there are. What is read of a part stays in memory, for
        the sections that read it again.
        """
        if limit is None or not run.has_log:
            return cls(run, documents)
        if run.manifest.positions <= limit:
            return cls(run.view(run.manifest, keep=True), documents)
        chosen = _chosen(run, documents, limit)
        shards = tuple(run.shards[place] for place in chosen)
        view = run.view(dataclasses.replace(run.manifest, shards=shards), keep=True)
        return cls(view, documents.take(np.flatnonzero(np.isin(_shard_of(run), chosen))))

    @cached_property
    def edges(self) -> Array:
        """Between tenths of all positions. They follow from the target alone, which the log of every draft holds."""
        return decile_edges(self.run, next(iter(self.run.manifest.drafts)))


def limit_of(run: Run) -> int:
    """Return positions that a report reads of a run's log: all of a small one, a share of a large one, at most `MOST`."""
    return min(MOST, max(LEAST, run.manifest.positions // SHARE))


def _shard_of(run: Run) -> Array:
    """Return the place of the shard that each document lies in, [documents]."""
    return np.repeat(np.arange(len(run.shards)), [shard.documents for shard in run.shards])


def _chosen(run: Run, documents: Documents, limit: int) -> Array:
    """Return places of the shards to read, ascending: as many as `limit` holds at equal distances, and more for kinds of
    text that have fewer than ENOUGH documents in them; these at equal distances among the shards that have any.
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
    """Return `wanted` of `size` places at equal distances; all of them where there are fewer."""
    wanted = min(wanted, size)
    return np.asarray((2 * np.arange(wanted) + 1) * size // (2 * wanted))


def tables(
    run: Run, draft: str, names: Sequence[str], texts: Sequence[str] = (), only: Set[int] | None = None
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield columns of the log of a draft and its documents, of each complete shard. `texts`: columns of documents beside
    those of a `Shape`. `only`: shards that hold none of these documents are not read.
    """
    for shard in run.shards:
        documents = run.continuations(shard.index, [*SHAPED, *texts])
        if only is None or not only.isdisjoint(documents["document"].to_pylist()):
            yield run.positions(draft, shard.index, names), documents


def shards(
    run: Run, draft: str, names: Sequence[str], only: Set[int] | None = None
) -> Iterator[tuple[dict[str, Array], Shape]]:
    """Yield the same as arrays, and where the documents lie; nulls become -1 or NaN. A column may be named twice."""
    for positions, documents in tables(run, draft, list(dict.fromkeys(names)), only=only):
        yield {name: array_of(positions[name]) for name in positions.column_names}, Shape.of(documents)


def gathered(parts: Iterable[Mapping[Name, Array]]) -> dict[Name, Array]:
    """Return arrays of shards, joined by name; nothing without a shard."""
    found = grouped(named for part in parts for named in part.items())
    return {name: np.concatenate(values) for name, values in found.items()}


def decile_edges(run: Run, draft: str) -> Array:
    """Return the nine margins between deciles, over all positions: each is the least one of the tenth above it. Fewer where
    some of them are equal, or equal to the least of all, below which there is nothing.
    """
    stride = 1 + run.manifest.positions // SAMPLE
    values = gathered({MARGIN: columns[MARGIN][::stride]} for columns, _ in shards(run, draft, [MARGIN]))[MARGIN]
    between = np.unique(np.quantile(values, np.arange(1, 10) / 10, method="higher"))
    return np.asarray(between[between > values.min()])
