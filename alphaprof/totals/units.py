"""Independent units: documents that share a prompt or a cluster belong together; as numbers, their names beside them."""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, Any]
HASH = re.compile("[0-9a-fA-F]{64}")
HASH_WIDTH = 64
WORD = 8  # bytes that are taken as a number
MIXING = np.uint64(0x9E3779B97F4A7C15)  # any odd number with many digits


@dataclass(frozen=True)
class Names:
    """The different names of units, in the order in which they occur."""

    values: pa.Array

    @cached_property
    def lots(self) -> Array:
        """What is drawn for each of them, `lots_of`: worked out once, where it is asked for."""
        return lots_of(self.values)


@dataclass(frozen=True)
class Units:
    """The unit of each document: `codes` [documents] are places in `names`. Where no unit has two documents they ascend, and
    there is nothing to add up.
    """

    codes: Array
    names: Names

    @classmethod
    def named(cls, names: Iterable[str]) -> Units:
        """From the name of each document's unit."""
        distinct, codes = numbered(pa.array(list(names), pa.string()))
        return cls(codes, Names(distinct))

    @classmethod
    def of(cls, documents: pa.Table) -> Units:
        """From rows of the documents table. A unit is named after a prompt in it.

        Documents of one cluster belong together, and so do equal prompts, the same observation twice: what is connected
        through either is one unit.
        """
        distinct, prompts = numbered(documents["prompt_hash"].combine_chunks())
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


def lots_of(names: pa.Array | Iterable[str]) -> Array:
    """What each name draws, [names]: the first eight bytes of its SHA-256, or of itself where it is one, as the names of
    prompts are. The same in every run and process, whatever the other names.
    """
    names = names if isinstance(names, pa.Array) else pa.array(list(names), pa.string())
    if _width(names) == HASH_WIDTH:
        with contextlib.suppress(binascii.Error):  # as soon as one of them is no hash
            words = np.frombuffer(binascii.unhexlify(_letters(names).tobytes()), dtype=">u8")
            return words.reshape(len(names), -1)[:, 0].astype(np.uint64)
    drawn = [name if HASH.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest() for name in names.to_pylist()]
    return np.array([int(name[:16], 16) for name in drawn], dtype=np.uint64)


def numbered(names: pa.Array) -> tuple[pa.Array, Array]:
    """The different names in the order in which they occur, and the place of each name among them."""
    if _surely_differ(names):
        return names, np.arange(len(names))
    encoded = names.dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy().astype(np.int64)


def _surely_differ(names: pa.Array) -> bool:
    """Whether a number made of each name differs from all others, which takes a fraction of the time of comparing names."""
    width = _width(names)
    if not width or width % WORD:
        return False
    words = _letters(names).view(np.uint64).reshape(len(names), -1)
    numbers = np.sort(words @ MIXING ** np.arange(words.shape[1], dtype=np.uint64))
    return bool((numbers[1:] != numbers[:-1]).all())


def _width(names: pa.Array) -> int:
    """How many bytes each name has; 0 where they differ in that, or where there is none."""
    widths = np.diff(_ends(names))
    return int(widths[0]) if len(names) and (widths == widths[0]).all() else 0


def _letters(names: pa.Array) -> Array:
    """The bytes of all names, one after the other."""
    ends = _ends(names)
    return np.frombuffer(names.buffers()[2], dtype=np.uint8, count=int(ends[-1] - ends[0]), offset=int(ends[0]))


def _ends(names: pa.Array) -> Array:
    """Where each name begins in the buffer of letters, and where the last one ends."""
    return np.frombuffer(names.buffers()[1], dtype=np.int32)[names.offset : names.offset + len(names) + 1]


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
