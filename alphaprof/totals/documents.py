"""The documents of a run: their independent units, and which of them are of one kind of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.log.manifest import Manifest
from alphaprof.totals.count import policies
from alphaprof.totals.units import Units

Array = np.ndarray[Any, Any]
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Group:
    """Documents of one domain and kind of text: their `rows` in the documents table, ascending.

    `policy`: how the target chose the tokens, greedy or sampled; empty where it did not. `settings`: values of SETTINGS.
    """

    domain: str
    continuation: str
    on_policy: bool
    policy: str
    settings: tuple[float | None, ...]
    rows: Array

    @property
    def sampling(self) -> dict[str, float] | None:
        """The settings that p and q were processed with; None: the plain softmax."""
        if self.settings[0] is None:
            return None
        return {name: value or 0.0 for name, value in zip(SETTINGS, self.settings, strict=True)}


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
        """Some of them."""
        return Documents(self.table.take(pa.array(rows)), self.units.take(rows))

    @cached_property
    def numbers(self) -> Array:
        """The number of each document, [documents]."""
        return np.asarray(self.table["document"].to_numpy())

    @cached_property
    def prompt_tokens(self) -> Array:
        """The length of each prompt, [documents]."""
        return np.asarray(self.table["prompt_tokens"].to_numpy())

    def strata(self, limits: Mapping[int, int]) -> Array:
        """The stratum that each independent unit was drawn from, as a number, [units].

        `limits`: by source, the number of documents at which it ends. A source that has them all is a stratum; all others
        are one together. A unit with documents from several strata belongs to the stratum of that set.
        """
        strata = np.zeros(len(self.units.names.values), dtype=np.int64)
        source = self.table["source"].to_numpy() if limits else strata
        full = [place for place, limit in limits.items() if (source == place).sum() >= limit]
        if not full:
            return strata
        stratum = np.where(np.isin(source, full), source.astype(np.int64), -1)
        several = int(source.max(initial=0)) + 2
        unit, drawn = np.divmod(np.unique(self.units.codes * several + stratum + 1), several)
        strata[unit] = drawn
        sets: dict[tuple[int, ...], int] = {}
        starts = np.flatnonzero(np.diff(unit, prepend=-1))
        for start, size in zip(starts.tolist(), np.diff(starts, append=len(unit)).tolist(), strict=True):
            if size > 1:
                strata[unit[start]] = several + sets.setdefault(tuple(drawn[start : start + size].tolist()), len(sets))
        return strata

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in the order in which they occur. A domain that has several kinds of text, or one with several
        sampling settings, has a group for each.
        """
        return tuple(_groups(self.table))


def _groups(table: pa.Table) -> Iterator[Group]:
    names = [table[name].cast(pa.string()) for name in ("domain", "continuation")]
    columns = [*names, table["on_policy"], *(table[name] for name in SETTINGS)]
    code = np.zeros(len(table), dtype=np.int64)
    for column in columns:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) > 1:
            mixed = code * len(encoded.dictionary) + encoded.indices.to_numpy()
            code = np.unique(mixed, return_inverse=True)[1]
    order = np.argsort(code, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(code[order])) + 1) if len(order) else []
    for rows in sorted(parts, key=lambda part: int(part[0])):
        domain, kind, on_policy, *settings = (column[int(rows[0])].as_py() for column in columns)
        (policy,) = policies(table.slice(int(rows[0]), 1)).tolist()
        yield Group(domain, kind, on_policy, policy, tuple(settings), rows)


def strata_of(documents: Documents, manifest: Manifest) -> Array:
    """The stratum of each independent unit of a run, [units]. A source that ended at its `limit` is one: its number of
    documents is no matter of chance. Sources that were read to their end are one together, and so are all documents of an
    imported run or of one in random order.
    """
    sources = manifest.config.get("data", []) if manifest.sequential is None else []
    return documents.strata({place: source["limit"] for place, source in enumerate(sources) if source.get("limit")})


def observed_weights(documents: pa.Table) -> dict[str, float]:
    """Shares of tokens by domain, in the order in which domains occur."""
    domains = documents["domain"].cast(pa.string()).combine_chunks().dictionary_encode()
    tokens = np.bincount(domains.indices.to_numpy(), documents["continuation_tokens"].to_numpy())
    return {
        domain: float(count / tokens.sum()) for domain, count in zip(domains.dictionary.to_pylist(), tokens, strict=True)
    }


def mean_context(documents: pa.Table) -> float | None:
    """Tokens before a position, on average over positions: the prompt and half of the continuation."""
    prompt, length = (documents[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
    return float(((prompt + length / 2) * length).sum() / length.sum()) if len(length) else None
