"""Totals of one draft and rule, by domain, in the form in which estimates read them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from alphaprof.errors import RunUnreadable
from alphaprof.rules import decoded_rule
from alphaprof.run.parquet import of_rule
from alphaprof.run.reader import Run
from alphaprof.run.schema import DEPTH_COUNTS, PAIR_COUNTS, depth_names
from alphaprof.stats.estimate import Array
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents, Units
from alphaprof.totals.files import read_totals
from alphaprof.totals.replay import RoundCounts, Rounds

SHARED = (  # what pools hold of each document, the same under every rule
    *("positions", "proposals", "impossible", "mismatches", "clear_mismatches", "near_ties"),
)
OWN = ("accepted", "emitted", *PAIR_COUNTS, "tokens")  # and what a rule changes
HYBRID = ("steps", "started", "read_by_head", "read_by_model")
SINGLE = ("rounds", "control", *HYBRID)  # and at each gamma, where it has rounds


@dataclass(frozen=True)
class DocumentTotals:
    """Totals of several documents of one kind of text, one array [documents] a column; depth counts are [documents, gamma].

    `policy`, `sampling`: as of `TextGroup`. Where rounds are not `defined` no method on them may be used. Counts by depth
    are NaN if an engine drafted trees, or a number of tokens that adapts itself. `stops`: as of `RoundCounts.of`.
    """

    columns: dict[str, Array]
    units: Units
    continuation: str
    policy: str
    sampling: dict[str, float] | None
    stops: bool = False

    @property
    def cluster(self) -> Array:
        """The unit of each document, as a number."""
        return self.units.codes

    @property
    def defined(self) -> bool:
        """Whether the rule has rounds on this text."""
        return not np.isnan(self.columns["tokens"]).any()

    def has(self, gamma: int) -> bool:
        """Return whether there are rounds at one gamma."""
        return not np.isnan(self[f"rounds_{gamma}"]).any()

    @property
    def observed(self) -> bool:
        """Whether every position is known: alpha, coverage, near-ties. An engine's metrics tell of rounds alone."""
        return not np.isnan(self.columns["proposals"]).any()

    @property
    def scored(self) -> bool:
        """Whether the target scored every position: near-ties, mismatches. Texts alone do not tell."""
        return not np.isnan(self.columns["near_ties"]).any()

    def __getitem__(self, name: str) -> Array:
        """One column."""
        return self.columns[name]

    def rows(self, chosen: Array) -> DocumentTotals:
        """Return the same of some of the documents; `chosen` [documents]: a mask or places."""
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return dataclasses.replace(self, columns=columns, units=self.units.take(chosen))

    def counts(self, gamma: int) -> RoundCounts:
        """Return rounds at one gamma."""
        if gamma not in self._counted:
            names = ("rounds", "drafted_depths", "accepted_depths", "control")
            rounds, drafted, accepted, control = (self[f"{name}_{gamma}"] for name in names)
            tested = self[f"tested_depths_{gamma}"] if self.stops else drafted
            replayed = Rounds(rounds, self["tokens"], drafted, tested, accepted, control)
            counts = RoundCounts.of(replayed, self.cluster, self.stops)
            if f"steps_{gamma}" in self.columns:
                counts = dataclasses.replace(counts, **{name: self[f"{name}_{gamma}"] for name in HYBRID})
            self._counted[gamma] = counts
        return self._counted[gamma]

    @cached_property
    def _counted(self) -> dict[int, RoundCounts]:
        return {}


def accepted_of(pool: DocumentTotals, gamma: int | None) -> tuple[Array, Array]:
    """Accepted positions and those with a proposal; at a gamma, accepted drafts and rounds that had any."""
    if gamma is None:
        return pool["accepted"], pool["proposals"]
    return pool[f"accepted_depths_{gamma}"].sum(1), pool[f"drafted_depths_{gamma}"][:, 0]


def proposes_nothing(pool: DocumentTotals, gamma: int | None) -> bool:
    """Return whether no position has a proposal; at a gamma, no round."""
    return not accepted_of(pool, gamma)[1].sum()


def pooled_columns(gammas: Sequence[int], own: bool = False) -> list[str]:
    """Return the columns of totals that pools are made of; without gammas, of rules that have no rounds; `own`: without
    SHARED.
    """
    single = [f"{name}_{gamma}" for gamma in gammas for name in SINGLE]
    depths = [column for gamma in gammas for name in DEPTH_COUNTS for column in depth_names(name, gamma)]
    return ["document", "rule", *(() if own else SHARED), *OWN, *single, *depths]


def pools(
    totals: Iterable[pa.Table],
    documents: Documents,
    rule: str,
    gammas: Sequence[int],
    shared: Sequence[Mapping[str, Array]] = (),
    stops: bool = False,
) -> Iterator[tuple[str, DocumentTotals]]:
    """Yield the pool of each group of some documents of the run, with its domain, in the order in which these occur.
    `totals` come table by table, others in each, with the columns of `pooled_columns`; those at gammas only where the rule
    has rounds. `shared`: the SHARED columns of the same groups, where they were read for another rule; `stops`: of
    `DocumentTotals`.
    """
    groups = [_Filling(documents.numbers[group.rows]) for group in documents.groups]
    names = [*(() if shared else SHARED), *OWN, *(f"{name}_{gamma}" for gamma in gammas for name in SINGLE)]
    for table in totals:
        chosen = of_rule(table, rule)
        if len(chosen):
            _fill(groups, chosen, [name for name in names if name in chosen.column_names], gammas)
    for index, (group, filled) in enumerate(zip(documents.groups, groups, strict=True)):
        arrays = filled.columns() | {"prompt_tokens": documents.prompt_tokens[group.rows]}
        arrays |= {name: shared[index][name] for name in SHARED} if shared else {}
        units = documents.units.take(group.rows)
        yield group.domain, DocumentTotals(arrays, units, group.continuation, group.policy, group.sampling, stops)


def lacking() -> RunUnreadable:
    """Return the failure of totals that are not those of the documents."""
    return RunUnreadable("the run's totals do not match its documents", "delete its totals/ folder: it is rebuilt")


class _Filling:
    """The columns of a group of documents, of which one table after the other holds some."""

    def __init__(self, numbers: Array) -> None:
        self.defined = True  # so far: whether the rule has rounds
        ascending = bool((numbers[1:] > numbers[:-1]).all())
        self._order = None if ascending else np.argsort(numbers, kind="stable")
        self._numbers = numbers if self._order is None else numbers[self._order]
        self._missing = len(numbers)
        self._columns: dict[str, Array | None] = {}
        self._depths: dict[str, Array] = {}
        self._to, self._places = slice(0), np.empty(0, dtype=np.int64)

    def locate(self, known: Array) -> bool:
        """Turn to a table of documents, whose numbers ascend: whether it has any of these. Raises `RunUnreadable` if some
        that lie between them are not in it.
        """
        first, last = np.searchsorted(self._numbers, [known[0], known[-1] + 1])
        whole = known[-1] - known[0] == len(known) - 1  # no number is missing: the place follows from it
        mine = self._numbers[first:last]
        self._to, self._places = slice(first, last), mine - known[0] if whole else np.searchsorted(known, mine)
        if not np.array_equal(known.take(self._places, mode="clip"), mine):
            raise lacking()
        self._missing -= int(last - first)
        return bool(last > first)

    def put(self, name: str, values: Array | None, nullable: bool) -> None:
        """What the table has of one column; None: all of it is null."""
        if name == "tokens":
            self.defined &= values is not None and not np.isnan(values.take(self._places)).any()
        column = self._columns.setdefault(name, None)
        if values is None:
            return
        if column is None:
            size = len(self._numbers)
            column = self._columns[name] = np.full(size, np.nan) if nullable else np.empty(size, dtype=values.dtype)
        column[self._to] = values.take(self._places)

    def put_depth(self, name: str, gamma: int, depth: int, values: Array) -> None:
        """What it has of one count by depth."""
        if name not in self._depths:
            self._depths[name] = np.empty((len(self._numbers), gamma), order="F")
        values.take(self._places, out=self._depths[name][self._to, depth], mode="clip")  # they lie there: no copy

    def columns(self) -> dict[str, Array]:
        """Return all columns in the order of the group. Raises `RunUnreadable` if no table had some of its documents."""
        if self._missing:
            raise lacking()
        nothing = np.broadcast_to(np.nan, len(self._numbers))
        single = {name: nothing if values is None else values for name, values in self._columns.items()}
        columns = {"document": self._numbers} | single | (self._depths if self.defined else {})
        if self._order is None:
            return columns
        back = np.argsort(self._order)
        return {name: values[back] for name, values in columns.items()}


def _fill(groups: Sequence[_Filling], table: pa.Table, names: Sequence[str], gammas: Sequence[int]) -> None:
    """Put what a table holds of one rule into the groups. While it lies in the cache each column is read once."""
    known = table["document"].to_numpy()
    groups = [group for group in groups if group.locate(known)]
    for name in names:
        column = table[name]
        values = column.to_numpy() if column.null_count < len(column) else None
        for group in groups:
            group.put(name, values, table.schema.field(name).nullable)
    groups = [group for group in groups if group.defined]
    for gamma, name in itertools.product(gammas if groups else (), DEPTH_COUNTS):
        for depth, column in enumerate(depth_names(name, gamma)):
            values = table[column].to_numpy().astype(np.float64, copy=False)
            for group in groups:
                group.put_depth(f"{name}_depths_{gamma}", gamma, depth, values)


def merged(parts: Sequence[DocumentTotals]) -> DocumentTotals:
    """Several pools of one domain as one; its kind of continuation is that of the first."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns}
    codes = np.concatenate([part.cluster for part in parts])
    return dataclasses.replace(parts[0], columns=columns, units=dataclasses.replace(parts[0].units, codes=codes))


def decoded_totals(run: Run, draft: str, table: pa.Table, rule: str) -> tuple[DocumentTotals, Array]:
    """Return totals of a draft on the rows of a documents table, in their order, and the id of each one's rule, [documents].

    Every text is one that the target chose. `rule`: that of a decision. Raises `RunUnreadable`.
    """
    documents = Documents.of(table)
    rules = [decoded_rule(rule, group.policy) for group in documents.groups]
    totals = read_totals(run, draft, TotalsRequest(sorted(set(rules)), run.gammas))
    found = {rule: [pool for _, pool in pools([totals], documents, rule, run.gammas)] for rule in set(rules)}
    whole = merged([found[rule][place] for place, rule in enumerate(rules)])
    order = np.argsort(np.concatenate([group.rows for group in documents.groups]))
    names = np.concatenate([np.full(len(group.rows), rule) for group, rule in zip(documents.groups, rules, strict=True)])
    return whole.rows(order), names[order]
