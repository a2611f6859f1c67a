"""Totals of one draft and rule, by domain, in the form in which estimates read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.analysis.speedup import RoundCounts
from alphaprof.analysis.units import Units
from alphaprof.log.schema import DEPTH_COUNTS, PAIR_COUNTS, depth_names
from alphaprof.report.documents import Documents

Array = np.ndarray[Any, Any]
SHARED = (  # what pools hold of each document, the same under every rule
    *("positions", "proposals", "thinking_positions", "thinking_proposals"),
    *("impossible", "mismatches", "clear_mismatches", "near_ties"),
)
OWN = ("accepted", "emitted", *PAIR_COUNTS, "thinking_accepted", "tokens")  # and what a rule changes
SINGLE = ("rounds", "control")  # and at each gamma, where it has rounds


@dataclass(frozen=True)
class Pool:
    """Totals of several documents of one kind of text, one array [documents] a column; depth counts are [documents, gamma].

    `policy`: how the target chose the tokens, greedy or sampled; empty where it did not. `sampling`: the settings that p and
    q were processed with; None: the plain softmax. Where rounds are not `defined` no method on them may be used.
    """

    columns: dict[str, Array]
    units: Units
    continuation: str
    policy: str
    sampling: dict[str, float] | None

    @property
    def cluster(self) -> Array:
        """The unit of each document, as a number."""
        return self.units.codes

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
        if gamma not in self._counted:
            self._counted[gamma] = self._counts(gamma)
        return self._counted[gamma]

    @cached_property
    def _counted(self) -> dict[int, RoundCounts]:
        return {}

    def _counts(self, gamma: int) -> RoundCounts:
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


def columns_of(gammas: Sequence[int], own: bool = False) -> list[str]:
    """The columns of totals that pools are made of; without gammas, of rules that have no rounds; `own`: without SHARED."""
    single = [f"{name}_{gamma}" for gamma in gammas for name in SINGLE]
    depths = [column for gamma in gammas for name in DEPTH_COUNTS for column in depth_names(name, gamma)]
    return ["document", "rule", *(() if own else SHARED), *OWN, *single, *depths]


def pools(
    totals: pa.Table, documents: Documents, rule: str, gammas: Sequence[int], shared: Sequence[Mapping[str, Array]] = ()
) -> Iterator[tuple[str, Pool]]:
    """The pool of each group of some documents of the run, with its domain, in the order in which these occur. `totals` need
    the columns of `columns_of`, and those at gammas only where the rule has rounds. `shared`: the SHARED columns of the same
    groups, where they were read for another rule.
    """
    mine = pc.equal(totals["rule"].cast(pa.string()), rule)
    chosen = totals if pc.all(mine).as_py() else totals.filter(mine)
    known = chosen["document"].to_numpy()  # ascending: shards and their documents are in corpus order
    single = [*(() if shared else SHARED), *OWN, *(f"{name}_{gamma}" for gamma in gammas for name in SINGLE)]
    plain = {name: _values(chosen[name]) for name in single if name in chosen.column_names}
    places = _places(known, documents)
    defined = [not np.isnan(_at(plain["tokens"], rows)).any() for rows in places]
    depths = _depths(chosen, gammas, [rows for rows, some in zip(places, defined, strict=True) if some])
    for index, (group, rows) in enumerate(zip(documents.groups, places, strict=True)):
        arrays = {name: _at(values, rows) for name, values in plain.items()} | (next(depths) if defined[index] else {})
        arrays |= {"document": documents.numbers[group.rows], "prompt_tokens": documents.prompt_tokens[group.rows]}
        arrays |= {name: shared[index][name] for name in SHARED} if shared else {}
        units = documents.units.take(group.rows)
        yield group.domain, Pool(arrays, units, group.continuation, group.policy, group.sampling)


def _values(column: pa.ChunkedArray) -> Array:
    """A column as an array; where all of it is null, a single NaN that stands for as many."""
    return np.broadcast_to(np.nan, len(column)) if 0 < len(column) == column.null_count else np.asarray(column.to_numpy())


def _at(values: Array, rows: Array) -> Array:
    """Some of the values of a column."""
    return np.broadcast_to(values[0], len(rows)) if values.strides == (0,) else values.take(rows)


def _places(known: Array, documents: Documents) -> list[Array]:
    """Where the documents of each group lie among those that totals know."""
    if np.array_equal(known, documents.numbers):
        return [group.rows for group in documents.groups]
    places = np.searchsorted(known, documents.numbers)
    if len(known) == 0 or not np.array_equal(known[np.minimum(places, len(known) - 1)], documents.numbers):
        raise ValueError("totals lack documents")  # a bug: both are written by shard
    return [places[group.rows] for group in documents.groups]


def _depths(totals: pa.Table, gammas: Sequence[int], places: Sequence[Array]) -> Iterator[dict[str, Array]]:
    """Counts by depth at several sets of places that have rounds, [places, gamma] each; every column is read once."""
    sizes = {f"{name}_depths_{gamma}": gamma for gamma in gammas for name in DEPTH_COUNTS}
    found = [{name: np.empty((len(rows), gamma), order="F") for name, gamma in sizes.items()} for rows in places]
    for gamma in gammas if places else ():
        for name in DEPTH_COUNTS:
            for depth, column in enumerate(depth_names(name, gamma)):
                values = totals[column].to_numpy()
                for arrays, rows in zip(found, places, strict=True):  # they lie there: "clip" spares a copy
                    values.take(rows, out=arrays[f"{name}_depths_{gamma}"][:, depth], mode="clip")
    yield from found


def merged(parts: Sequence[Pool]) -> Pool:
    """Several pools of one domain as one; its kind of continuation is that of the first."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns}
    codes = np.concatenate([part.cluster for part in parts])
    return dataclasses.replace(parts[0], columns=columns, units=dataclasses.replace(parts[0].units, codes=codes))
