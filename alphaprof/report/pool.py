"""Totals of one draft and rule, by domain, in the form in which estimates read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.analysis.speedup import RoundCounts
from alphaprof.log.schema import DEPTH_COUNTS

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pool:
    """Totals of several documents, one array [documents] a column; depth counts are [documents, gamma].

    `on_policy`: rounds are defined for these documents (they are null otherwise, and then no method on rounds may be used).
    """

    columns: dict[str, Array]
    cluster: Array
    continuation: str
    on_policy: bool

    def __getitem__(self, name: str) -> Array:
        """One column."""
        return self.columns[name]

    def counts(self, gamma: int) -> RoundCounts:
        """Rounds at one gamma."""
        return RoundCounts(self["tokens"], self[f"rounds_{gamma}"], self[f"drafted_depths_{gamma}"], self.cluster)


def pools(
    totals: pa.Table, documents: pa.Table, independent: Array, rule: str, gammas: list[int]
) -> Iterator[tuple[str, Pool]]:
    """The pool of each domain, in the order in which domains occur. `documents` are all documents of the run, `independent`
    their `units`.

    Kinds of continuation are kept apart: a domain that has several yields a pool for each.
    """
    chosen = totals.filter(pc.equal(totals["rule"].cast(pa.string()), rule))
    for (domain, kind, on_policy), rows in _groups(documents):
        part = chosen.take(rows)
        numbers = documents["document"].to_numpy()[rows]
        if not np.array_equal(part["document"].to_numpy(), numbers):
            raise ValueError("totals and documents are not in the same order")  # a bug: both are written by shard
        yield domain, Pool(_arrays(part, gammas), independent[rows], kind, on_policy)


def units(documents: pa.Table) -> Array:
    """The independent unit that each document belongs to, [documents], named after a prompt in it.

    Documents of one cluster belong together, and so do equal prompts, the same observation twice: what is connected through
    either is one unit.
    """
    prompts = documents["prompt_hash"].to_pylist()
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    for prompt, cluster in zip(prompts, documents["cluster"].to_pylist(), strict=True):
        if cluster is not None:
            parent[root(f"cluster {cluster}")] = root(prompt)
    return np.array([root(prompt) for prompt in prompts], dtype=object)


def merged(parts: Sequence[Pool]) -> Pool:
    """Several pools of one domain as one; its kind of continuation is that of the first."""
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns}
    cluster = np.concatenate([part.cluster for part in parts])
    return Pool(columns, cluster, parts[0].continuation, all(part.on_policy for part in parts))


def _groups(documents: pa.Table) -> Iterator[tuple[tuple[str, str, bool], Array]]:
    keys = list(
        zip(
            documents["domain"].cast(pa.string()).to_pylist(),
            documents["continuation"].cast(pa.string()).to_pylist(),
            documents["on_policy"].to_pylist(),
            strict=True,
        )
    )
    rows: dict[tuple[str, str, bool], list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    for key, indices in rows.items():
        yield key, np.array(indices)


def _arrays(part: pa.Table, gammas: list[int]) -> dict[str, Array]:
    plain = ["positions", "proposals", "accepted", "mismatches", "clear_mismatches", "near_ties", "tokens"]
    plain += [f"rounds_{gamma}" for gamma in gammas]
    arrays = {name: part[name].to_numpy() for name in plain}
    for gamma in gammas:
        for name in DEPTH_COUNTS:
            column = part[f"{name}_depths_{gamma}"].combine_chunks()
            defined = column.is_valid().to_numpy(zero_copy_only=False)
            values = np.full((len(part), gamma), np.nan)
            values[defined] = column.flatten().to_numpy().reshape(-1, gamma)
            arrays[f"{name}_depths_{gamma}"] = values
    return arrays
