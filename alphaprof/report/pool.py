"""Totals of one draft and rule, by domain, in the form in which estimates read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.analysis.speedup import RoundCounts
from alphaprof.analysis.totals import policies
from alphaprof.log.schema import DEPTH_COUNTS, depth_names, totals_columns

Array = np.ndarray[Any, Any]
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Pool:
    """Totals of several documents of one kind of text, one array [documents] a column; depth counts are [documents, gamma].

    `policy`: how the target chose the tokens, greedy or sampled; empty where it did not. `sampling`: the settings that p and
    q were processed with; None: the plain softmax. Where rounds are not `defined` no method on them may be used.
    """

    columns: dict[str, Array]
    cluster: Array
    continuation: str
    policy: str
    sampling: dict[str, float] | None

    @property
    def defined(self) -> bool:
        """Whether the rule has rounds on this text."""
        return not np.isnan(self.columns["tokens"]).any()

    @property
    def observed(self) -> bool:
        """Whether every position is known: alpha, coverage, near-ties. An engine's metrics tell of rounds alone."""
        return not np.isnan(self.columns["proposals"]).any()

    def __getitem__(self, name: str) -> Array:
        """One column."""
        return self.columns[name]

    def counts(self, gamma: int) -> RoundCounts:
        """Rounds at one gamma."""
        rounds, drafted, control = (self[f"{name}_{gamma}"] for name in ("rounds", "drafted_depths", "control"))
        full = self[f"accepted_depths_{gamma}"][:, -1]
        return RoundCounts(self["tokens"], rounds, drafted, full, control, self.cluster)


def accepted_of(pool: Pool, gamma: int | None) -> tuple[Array, Array]:
    """Accepted positions and those with a proposal; at a gamma, accepted drafts and rounds that had any."""
    if gamma is None:
        return pool["accepted"], pool["proposals"]
    return pool[f"accepted_depths_{gamma}"].sum(1), pool[f"drafted_depths_{gamma}"][:, 0]


def proposes_nothing(pool: Pool, gamma: int | None) -> bool:
    """Whether no position has a proposal; at a gamma, no round."""
    return not accepted_of(pool, gamma)[1].sum()


def pools(
    totals: pa.Table, documents: pa.Table, independent: Array, rule: str, gammas: list[int]
) -> Iterator[tuple[str, Pool]]:
    """The pool of each domain, in the order in which domains occur, for some documents of the run and their `units`.

    Kinds of text are kept apart: a domain that has several, or one with several sampling settings, yields a pool for each.
    """
    chosen = totals.filter(pc.equal(totals["rule"].cast(pa.string()), rule))
    known = chosen["document"].to_numpy()  # ascending: shards and their documents are in corpus order
    for (domain, kind, policy, settings), rows in groups(documents):
        numbers = documents["document"].to_numpy()[rows]
        places = np.searchsorted(known, numbers)
        if len(known) == 0 or not np.array_equal(known[np.minimum(places, len(known) - 1)], numbers):
            raise ValueError("totals lack documents")  # a bug: both are written by shard
        part = chosen.take(places)
        arrays = _arrays(part, gammas) | {"document": numbers, "prompt_tokens": documents["prompt_tokens"].to_numpy()[rows]}
        yield domain, Pool(arrays, independent[rows], kind, policy, sampling_of(settings))


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
    return dataclasses.replace(parts[0], columns=columns, cluster=cluster)


def sampling_of(settings: Sequence[float | None]) -> dict[str, float] | None:
    """Values of SETTINGS in a documents table as what a text was drawn with; None: the plain softmax."""
    return None if settings[0] is None else {key: value or 0.0 for key, value in zip(SETTINGS, settings, strict=True)}


def groups(documents: pa.Table) -> Iterator[tuple[tuple[str, str, str, tuple[float | None, ...]], Array]]:
    """Domain, kind of text, policy and SETTINGS of each group of documents that belong together, and its rows."""
    settings = zip(*(documents[name].to_pylist() for name in SETTINGS), strict=True)
    names = [documents[name].cast(pa.string()).to_pylist() for name in ("domain", "continuation")]
    rows: dict[tuple[str, str, str, tuple[float | None, ...]], list[int]] = {}
    for index, key in enumerate(zip(*names, policies(documents).tolist(), settings, strict=True)):
        rows.setdefault(key, []).append(index)
    for key, indices in rows.items():
        yield key, np.array(indices)


def _arrays(part: pa.Table, gammas: list[int]) -> dict[str, Array]:
    plain = [column.name for column in totals_columns(gammas) if column.name not in ("document", "rule")]
    arrays = {name: part[name].to_numpy() for name in plain}
    for gamma in gammas:
        for name in DEPTH_COUNTS:
            by_depth = [arrays.pop(column).astype(np.float64) for column in depth_names(name, gamma)]
            arrays[f"{name}_depths_{gamma}"] = np.stack(by_depth, axis=1)
    return arrays
