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


def pools(totals: pa.Table, documents: pa.Table, rule: str, gammas: list[int]) -> Iterator[tuple[str, Pool]]:
    """The pool of each domain, in the order in which domains occur. `documents` are all documents of the run.

    Kinds of continuation are kept apart: a domain that has several yields a pool for each.
    """
    chosen = totals.filter(pc.equal(totals["rule"].cast(pa.string()), rule))
    for (domain, kind, on_policy), rows in _groups(documents):
        part = chosen.take(rows)
        numbers = documents["document"].to_numpy()[rows]
        if not np.array_equal(part["document"].to_numpy(), numbers):
            raise ValueError("totals and documents are not in the same order")  # a bug: both are written by shard
        # Documents without a cluster stand alone, except that equal prompts are the same observation twice.
        cluster = pc.coalesce(documents["cluster"], documents["prompt_hash"]).take(rows).to_numpy()
        yield domain, Pool(_arrays(part, gammas), cluster, kind, on_policy)


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
    plain = ["positions", "proposals", "accepted", "mismatches", "near_ties", "tokens"]
    plain += [f"{name}_{gamma}" for name in ("rounds", "drafted") for gamma in gammas]
    arrays = {name: part[name].to_numpy() for name in plain}
    for gamma in gammas:
        for name in DEPTH_COUNTS:
            column = part[f"{name}_depths_{gamma}"].combine_chunks()
            defined = column.is_valid().to_numpy(zero_copy_only=False)
            values = np.full((len(part), gamma), np.nan)
            values[defined] = column.flatten().to_numpy().reshape(-1, gamma)
            arrays[f"{name}_depths_{gamma}"] = values
    return arrays
