"""Totals of one draft and rule, by domain, in the form in which estimates read them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
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
    stops: str = ""

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
    totals: pa.Table,
    documents: Documents,
    rule: str,
    gammas: Sequence[int],
    shared: Sequence[Mapping[str, Array]] = (),
    stops: str = "",
) -> list[tuple[str, DocumentTotals]]:
    """Return the pool of each group of some documents of the run, with its domain, in the order in which these occur.
    `totals` have the columns of `pooled_columns`, those at gammas only where the rule has rounds; documents of a rule
    ascend. `shared`: the SHARED columns of the same groups, where they were read for another rule; `stops`: of
    `DocumentTotals`. Raises `RunUnreadable` if one of the documents is not in the totals.
    """
    totals = of_rule(totals, rule)
    known = totals["document"].to_numpy()
    place = np.searchsorted(known, documents.numbers)
    if (place == len(known)).any() or not np.array_equal(known[place], documents.numbers):
        raise RunUnreadable("the run's totals do not match its documents", "delete its totals/ folder: it is rebuilt")
    names = {"document", *SHARED, *OWN, *(f"{name}_{gamma}" for gamma in gammas for name in SINGLE)}
    single = {name: totals[name].to_numpy() for name in totals.column_names if name in names}
    found = list[tuple[str, DocumentTotals]]()
    for index, group in enumerate(documents.groups):
        columns = {name: values[place[group.rows]] for name, values in single.items()}
        columns |= {"prompt_tokens": documents.prompt_tokens[group.rows], **(shared[index] if shared else {})}
        units = documents.units.take(group.rows)
        kind = group.continuation, group.policy, group.sampling
        found.append((group.domain, DocumentTotals(columns, units, *kind, stops)))
    defined = [(pool, group.rows) for (_, pool), group in zip(found, documents.groups, strict=True) if pool.defined]
    for gamma, name in itertools.product(gammas if defined else (), DEPTH_COUNTS):  # read once for all groups
        counts = np.array([totals[column].to_numpy() for column in depth_names(name, gamma)], dtype=np.float64)
        for pool, rows in defined:
            pool.columns[f"{name}_depths_{gamma}"] = counts[:, place[rows]].T
    return found


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
    found = {rule: [pool for _, pool in pools(totals, documents, rule, run.gammas)] for rule in set(rules)}
    whole = merged([found[rule][place] for place, rule in enumerate(rules)])
    order = np.argsort(np.concatenate([group.rows for group in documents.groups]))
    names = np.concatenate([np.full(len(group.rows), rule) for group, rule in zip(documents.groups, rules, strict=True)])
    return whole.rows(order), names[order]
