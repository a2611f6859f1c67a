"""The documents of a run: their independent units, their kinds of text, and what a report weighs them by."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.errors import ProfileInvalid, shown
from alphaprof.run.manifest import Manifest
from alphaprof.stats.estimate import Array, Interval, distinct, pooled_share
from alphaprof.stats.grouping import grouped
from alphaprof.totals.count import policies

HASH = re.compile("[0-9a-fA-F]{64}")
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Names:
    """The different names of units, in the order in which they occur; shared by all pools of a run."""

    values: pa.Array

    @cached_property
    def lots(self) -> Array:
        """What each of them draws, `lots_of`: worked out once."""
        return lots_of(self.values.to_pylist())


@dataclass(frozen=True)
class Units:
    """The unit of each document: `codes` [documents] are places in `names`, the different names in the order in which they
    occur. Where no unit has two documents they ascend, and there is nothing to add up.
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
            prompts = _connected(prompts[clustered], clusters.drop_null().to_numpy(), len(distinct))[prompts]
        return cls(prompts, Names(distinct))

    def take(self, rows: Array | slice) -> Units:
        """Return the units of some of the documents."""
        return Units(self.codes[rows], self.names)

    @property
    def lots(self) -> Array:
        """What each document's unit draws, [documents]."""
        return np.asarray(self.names.lots[self.codes])


def lots_of(names: Iterable[str]) -> Array:
    """Return what each name draws, [names]: the first eight bytes of its SHA-256, or of itself where it is one, as the names
    of prompts are. The same in every run and process, whatever the other names.
    """
    hashes = [name if HASH.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest() for name in names]
    return np.array([int(name[:16], 16) for name in hashes], dtype=np.uint64)


def numbered(names: pa.Array) -> tuple[pa.Array, Array]:
    """Return the different names in the order in which they occur, and the place of each name among them."""
    encoded = names.dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy().astype(np.int64)


def _connected(prompts: Array, clusters: Array, size: int) -> Array:
    """For each of `size` prompts the one that its unit is named after; `prompts` and `clusters` of documents in order. A
    cluster whose prompts are in no other one is named after its last prompt that is new.
    """
    root = np.arange(size)
    first = np.sort(np.unique(clusters.astype(np.int64) * size + prompts, return_index=True)[1])
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


@dataclass(frozen=True)
class TextGroup:
    """Documents of one domain and kind of text: their `rows` in the documents table, ascending, and the independent unit of
    each of these rows, `cluster` [rows].

    `policy`: how the target chose the tokens, greedy or sampled; empty if it did not. `sampling`: the settings that p and
    q were processed with; None: the plain softmax.
    """

    domain: str
    continuation: str
    policy: str
    sampling: dict[str, float] | None
    rows: Array
    cluster: Array

    @property
    def on_policy(self) -> bool:
        """Whether the target produced the text."""
        return bool(self.policy)

    @property
    def named(self) -> dict[str, Any]:
        """What tells it from others."""
        return {name: getattr(self, name) for name in ("domain", "continuation", "sampling", "on_policy")}

    def share(self, totals: Array, counts: Array, confidence: float) -> Interval | None:
        """Estimates sum(totals) / sum(counts), [documents of the table], over this text as a share; None if nothing was
        counted.
        """
        return pooled_share(self.cluster, totals[self.rows], counts[self.rows], confidence)

    def documents(self, counts: Array) -> int:
        """Return counts the independent units that have counts [documents of the table]."""
        return distinct(self.cluster[counts[self.rows] > 0])


@dataclass(frozen=True)
class Documents:
    """Some documents of a run, with their `units`. What follows from them is worked out once."""

    table: pa.Table
    units: Units

    @classmethod
    def of(cls, table: pa.Table) -> Documents:
        """From rows of the documents table, units worked out from these alone."""
        return cls(table, Units.of(table))

    def take(self, rows: Array) -> Documents:
        """Return some of them."""
        return Documents(self.table.take(pa.array(rows)), self.units.take(rows))

    @cached_property
    def numbers(self) -> Array:
        """The number of each document, [documents]."""
        return np.asarray(self.table["document"].to_numpy())

    def units_of(self, numbers: Array) -> Array:
        """Return the unit of each of some documents by its number, [numbers]; documents of a run ascend."""
        return np.asarray(self.units.codes[np.searchsorted(self.numbers, numbers)])

    @cached_property
    def prompt_tokens(self) -> Array:
        """The length of each prompt, [documents]."""
        return np.asarray(self.table["prompt_tokens"].to_numpy())

    def strata(self, limits: Mapping[int, int]) -> Array:
        """Return the stratum that each independent unit was drawn from, as a number, [units].

        `limits`: by source, the number of documents of a domain at which it ends. A domain of a source that has them all is
        a stratum, and so is a source of one domain beside other sources; all others are one together. A unit with documents
        from several strata belongs to that set's stratum.
        """
        strata = np.zeros(len(self.units.names.values), dtype=np.int64)
        domain = self.table["domain"].cast(pa.string()).combine_chunks().dictionary_encode()
        domains = len(domain.dictionary) + 1
        pairs, place, count = np.unique(
            self.table["source"].to_numpy().astype(np.int64) * domains + domain.indices.to_numpy(),
            return_inverse=True,
            return_counts=True,
        )
        sources = pairs // domains
        fixed = count >= np.array([limits.get(source, math.inf) for source in sources.tolist()])
        if len(pairs) and sources[0] < sources[-1]:
            fixed |= np.bincount(sources)[sources] == 1
        if not fixed.any():
            return strata
        stratum, several = np.where(fixed[place], place, -1), len(pairs) + 1
        unit, drawn = np.divmod(np.unique(self.units.codes * several + stratum + 1), several)
        strata[unit] = drawn
        sets: dict[tuple[int, ...], int] = {}
        starts = np.flatnonzero(np.diff(unit, prepend=-1))
        for start, size in zip(starts.tolist(), np.diff(starts, append=len(unit)).tolist(), strict=True):
            if size > 1:
                strata[unit[start]] = several + sets.setdefault(tuple(drawn[start : start + size].tolist()), len(sets))
        return strata

    @cached_property
    def groups(self) -> tuple[TextGroup, ...]:
        """The groups, in the order in which they occur. A domain that has several kinds of text, or one with several
        sampling settings, has a group for each.
        """
        return tuple(self._groups())

    def _groups(self) -> Iterator[TextGroup]:
        table, units = self.table, self.units.codes
        names = [table[name].cast(pa.string()) for name in ("domain", "continuation")]
        columns = [*names, table["on_policy"], *(table[name] for name in SETTINGS)]
        code = np.zeros(len(table), dtype=np.int64)
        for column in columns:
            encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
            if len(encoded.dictionary) > 1:
                code = np.unique(code * len(encoded.dictionary) + encoded.indices.to_numpy(), return_inverse=True)[1]
        order = np.argsort(code, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(code[order])) + 1) if len(order) else []
        for rows in sorted(parts, key=lambda part: int(part[0])):
            domain, kind, _, *settings = (column[int(rows[0])].as_py() for column in columns)
            (policy,) = policies(table.slice(int(rows[0]), 1)).tolist()
            drawn = {name: value or 0.0 for name, value in zip(SETTINGS, settings, strict=True)}
            yield TextGroup(domain, kind, policy, None if settings[0] is None else drawn, rows, units[rows])


def strata_of(documents: Documents, manifest: Manifest) -> Array:
    """Return the stratum of each independent unit of a run, [units]. A domain of a source that ended at its `limit` is one,
    and so is a source that is one domain: how many documents it has is no chance. Several domains of a source that was read
    to its end are one together, and so are all documents of an imported run.
    """
    return documents.strata({place: source.limit for place, source in enumerate(manifest.profile.data) if source.limit})


def observed_weights(documents: pa.Table) -> dict[str, float]:
    """Return shares of tokens by domain, in the order in which domains occur."""
    domains = documents["domain"].cast(pa.string()).combine_chunks().dictionary_encode()
    tokens = np.bincount(domains.indices.to_numpy(), documents["continuation_tokens"].to_numpy())
    return dict(zip(domains.dictionary.to_pylist(), (tokens / tokens.sum()).tolist(), strict=True))


def require_weights(weights: Mapping[str, float] | None, domains: Iterable[str]) -> None:
    """Raise `ProfileInvalid` if given weights leave out a domain of the data."""
    if weights is not None and (missing := [domain for domain in domains if domain not in weights]):
        raise ProfileInvalid(
            f"decision.weights does not name domain {shown(missing[0])}, which the data has",
            "give it a share of the output tokens, or 0 to leave it out",
        )


def mean_context(documents: pa.Table) -> float | None:
    """Return tokens before a position, on average over positions: the prompt and half of the continuation."""
    prompt, length = (documents[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
    return float(((prompt + length / 2) * length).sum() / length.sum()) if len(length) else None


def over_domains(groups: Sequence[TextGroup]) -> list[TextGroup]:
    """Merges the groups of one kind of text over all domains; the domain of what it returns is empty."""
    kinds = grouped(((group.continuation, group.policy, str(group.sampling)), group) for group in groups)

    def merged(same: list[TextGroup]) -> TextGroup:
        rows, cluster = (np.concatenate(parts) for parts in zip(*((part.rows, part.cluster) for part in same), strict=True))
        return replace(same[0], domain="", rows=rows, cluster=cluster)

    return [merged(same) for same in kinds.values()]
