"""Independent units: documents that share a prompt or a cluster belong together; as numbers, their names beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Array = np.ndarray[Any, Any]
WORD = 8  # bytes of a name that are compared at once


@dataclass(frozen=True)
class Names:
    """The different names of units, ascending."""

    values: pa.Array

    @cached_property
    def lots(self) -> Array:
        """What is drawn for each of them, `lots_of`: worked out once, where it is asked for."""
        return lots_of(self.values.to_pylist())


@dataclass(frozen=True)
class Units:
    """The unit of each document: `codes` [documents] are places in `names`, so that they sort as names do."""

    codes: Array
    names: Names

    @classmethod
    def named(cls, names: Iterable[str]) -> Units:
        """From the name of each document's unit."""
        distinct, codes = ranked(pa.array(list(names), pa.string()))
        return cls(codes, Names(distinct))

    @classmethod
    def of(cls, documents: pa.Table) -> Units:
        """From rows of the documents table. A unit is named after a prompt in it.

        Documents of one cluster belong together, and so do equal prompts, the same observation twice: what is connected
        through either is one unit.
        """
        distinct, prompts = ranked(documents["prompt_hash"].combine_chunks())
        clusters = documents["cluster"].combine_chunks().dictionary_encode().indices
        if clusters.null_count < len(clusters):
            clustered = clusters.is_valid().to_numpy(zero_copy_only=False)
            root = _connected(prompts[clustered], clusters.drop_null().to_numpy(), len(distinct))
            prompts = root[prompts]
        return cls(prompts, Names(distinct))

    def take(self, rows: Array | slice) -> Units:
        """Those of some of the documents."""
        return Units(self.codes[rows], self.names)

    @property
    def lots(self) -> Array:
        """What is drawn for each document's unit, [documents]."""
        return np.asarray(self.names.lots[self.codes])


def lots_of(names: Iterable[str]) -> Array:
    """What each name draws, the first eight bytes of its SHA-256: the same in every run and process."""
    drawn = b"".join([hashlib.sha256(name.encode()).digest()[:8] for name in names])
    return np.frombuffer(drawn, dtype=">u8").astype(np.uint64)


def ranked(names: pa.Array) -> tuple[pa.Array, Array]:
    """The different names, ascending, and the place of each name among them."""
    order, new = _order_of_hashes(names)
    if order is None:
        encoded = names.dictionary_encode()
        ascending = pc.sort_indices(encoded.dictionary)
        rank = np.empty(len(ascending), dtype=np.int64)
        rank[ascending.to_numpy()] = np.arange(len(ascending))
        return encoded.dictionary.take(ascending), rank[encoded.indices.to_numpy()]
    codes = np.empty(len(names), dtype=np.int64)
    codes[order] = np.cumsum(new) - 1
    return names.take(pa.array(order[new])), codes


def _order_of_hashes(names: pa.Array) -> tuple[Array | None, Array]:
    """The order of names of one width, and which of them in that order is not the one before: what a tenth of the time tells
    of hashes, which differ in their first word. None where names are of another kind.
    """
    ends = np.frombuffer(names.buffers()[1], dtype=np.int32)[names.offset : names.offset + len(names) + 1]
    width = int(ends[1] - ends[0]) if len(names) else 0
    if width < WORD or width % WORD or (np.diff(ends) != width).any():
        return None, np.empty(0, dtype=bool)
    words = np.frombuffer(names.buffers()[2], dtype=">u8", count=len(names) * width // WORD, offset=int(ends[0]))
    table = words.reshape(len(names), width // WORD)
    order = np.argsort(table[:, 0].astype(np.uint64), kind="stable")
    ordered = table[order]
    differs = ordered[1:] != ordered[:-1]
    new = np.concatenate([[True], differs.any(1)])
    return (None if (new[1:] & ~differs[:, 0]).any() else order), new


def _connected(prompts: Array, clusters: Array, size: int) -> Array:
    """For each of `size` prompts the one that its unit is named after; `prompts` and `clusters` of documents in order.

    Named after: each pair of a cluster and a prompt that comes puts what its cluster was connected to below what its prompt
    was. So a cluster whose prompts are in no other one is named after its last prompt that is new.
    """
    root = np.arange(size)
    pairs = np.unique(clusters.astype(np.int64) * size + prompts, return_index=True)[1]
    first = np.sort(pairs)
    prompts, clusters = prompts[first], clusters[first]
    shared = np.bincount(prompts, minlength=size) > 1
    tangled = np.zeros(int(clusters.max()) + 1, dtype=bool)
    tangled[clusters[shared[prompts]]] = True
    apart = ~tangled[clusters]
    last = np.zeros(len(tangled), dtype=np.int64)
    last[clusters[apart]] = prompts[apart]  # of several values for one place, numpy keeps the last
    root[prompts[apart]] = last[clusters[apart]]
    parent = list(range(size + len(tangled))) if tangled.any() else []

    def find(place: int) -> int:
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    for prompt, cluster in zip(prompts[~apart].tolist(), (clusters[~apart] + size).tolist(), strict=True):
        parent[find(cluster)] = find(prompt)
    for prompt in prompts[~apart].tolist():
        root[prompt] = find(prompt)
    return root
