"""From the position log to totals: a row per document and rule, everything that reports read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.analysis.replay import Flavour, Rounds, Trace, replay
from alphaprof.analysis.rules import RULES
from alphaprof.log.manifest import ModelFacts
from alphaprof.log.schema import DEPTH_COUNTS, arrow_schema, totals_columns
from alphaprof.log.store import Run

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shape:
    """Where the documents of a shard lie in its positions: `start`, `stop`, `limit`, `on_policy` and ids [documents]."""

    document: Array
    start: Array
    stop: Array
    limit: Array
    on_policy: Array

    @classmethod
    def of(cls, documents: pa.Table) -> Shape:
        """From rows of the documents table, whose positions follow each other in the same order."""
        length = documents["continuation_tokens"].to_numpy()
        stop = np.cumsum(length).astype(np.int64)
        limit = documents["max_new_tokens"].fill_null(np.iinfo(np.int32).max).to_numpy().astype(np.int64)
        on_policy = documents["on_policy"].to_numpy(zero_copy_only=False)
        return cls(documents["document"].to_numpy(), stop - length, stop, limit, on_policy)

    def sums(self, values: Array) -> Array:
        """Sums [documents] of values [positions]."""
        running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])  # float32 sums drift within a shard
        return np.asarray(running[self.stop] - running[self.start])


def shard_totals(
    positions: pa.Table,
    documents: pa.Table,
    target: ModelFacts,
    rules: Sequence[str],
    gammas: Sequence[int],
    flavour: Flavour = "engine",
) -> pa.Table:
    """Totals of one shard of one draft's log.

    Rounds are null where the rule's replay is not exact: on text that the target did not produce greedily.
    """
    shape = Shape.of(documents)
    columns = _columns(positions, shape)
    shared = _shared_counts(columns, shape, target.noise)
    # Hugging Face stops the draft at the target's EOS ids.
    draft_ends = np.isin(columns["draft_top"], target.eos) & (columns["proposed"] > 0)
    tables = []
    for name in rules:
        accepted = np.where(columns["proposed"] > 0, columns[f"accept_{name}"], 0.0)
        emitted = np.where(columns["proposed"] > 0, RULES[name].emitted(columns), 0.0)
        trace = Trace(emitted, columns["proposed"].astype(np.int64), shape.start, shape.stop, shape.limit, draft_ends)
        per_gamma = {gamma: replay(trace, gamma, flavour) for gamma in gammas}
        data = shared | {"rule": [name] * len(shape.document), "accepted": shape.sums(accepted)}
        tables.append(_table(data, per_gamma, shape.on_policy, gammas))
    return pa.concat_tables(tables)


def _columns(positions: pa.Table, shape: Shape) -> dict[str, Array]:
    """The columns that rules and replay read, as arrays; nulls (no proposal) become -1 or NaN."""
    columns: dict[str, Array] = {}
    for name in ("token", "target_top", "draft_top", "target_top_prob", "target_second_prob", "proposed"):
        column = positions[name]
        columns[name] = (column.fill_null(-1) if pa.types.is_integer(column.type) else column).to_numpy()
    for name in positions.column_names:
        if name.startswith("accept_"):
            columns[name] = positions[name].to_numpy()
    columns["greedy"] = np.repeat(shape.on_policy, shape.stop - shape.start)
    return columns


def _shared_counts(columns: dict[str, Array], shape: Shape, noise: float) -> dict[str, Array]:
    """Counts that do not depend on the rule."""
    # On the plain softmax the log of a ratio of probabilities is the difference of the logits.
    with np.errstate(divide="ignore"):
        gap = np.log(columns["target_top_prob"]) - np.log(columns["target_second_prob"])
    tied = gap <= noise * (1 + 1e-3)  # a gap of just one step of the dtype comes back rounded
    odd = (columns["token"] != columns["target_top"]) & columns["greedy"]
    return {
        "document": shape.document,
        "positions": shape.stop - shape.start,
        "proposals": shape.sums(columns["proposed"] > 0).astype(np.int64),
        "mismatches": shape.sums(odd).astype(np.int64),
        "clear_mismatches": shape.sums(odd & ~tied).astype(np.int64),
        "near_ties": shape.sums(tied).astype(np.int64),
    }


def _table(data: dict[str, Any], per_gamma: dict[int, Rounds], defined: Array, gammas: Sequence[int]) -> pa.Table:
    """One rule's rows as a table in the declared schema; rounds are null where `defined` is False."""
    data["tokens"] = pa.array(per_gamma[gammas[0]].tokens, mask=~defined)
    for gamma, rounds in per_gamma.items():
        data[f"rounds_{gamma}"] = pa.array(rounds.rounds, mask=~defined)
        data[f"drafted_{gamma}"] = pa.array(rounds.drafted.sum(1), mask=~defined)
        for name in DEPTH_COUNTS:
            counts = pa.array(getattr(rounds, name).ravel())
            lists = pa.FixedSizeListArray.from_arrays(counts, gamma, mask=pa.array(~defined))
            data[f"{name}_depths_{gamma}"] = lists
    schema = arrow_schema(totals_columns(gammas))
    return pa.table({name: data[name] for name in schema.names}).cast(schema)


def compute_totals(run: Run, draft: str, index: int, flavour: Flavour = "engine") -> pa.Table:
    """Totals of one shard, from its position log."""
    manifest = run.manifest
    return shard_totals(
        run.positions(draft, index),
        run.continuations(index),
        manifest.target,
        run.rules,
        run.gammas,
        flavour,
    )


def write_totals(run: Run) -> None:
    """Compute and write the totals that complete shards lack."""
    for draft in run.manifest.drafts:
        for shard in run.shards:
            if not run.part("totals", shard.index, draft).exists():
                run.write_totals(compute_totals(run, draft, shard.index), shard.index, draft)


def read_totals(run: Run, draft: str, flavour: Flavour = "engine") -> pa.Table:
    """Totals of all complete shards. What is not stored is computed from the log and not written: of an interrupted run, in
    the `hf` flavour, or where another version of alphaprof stored other columns.
    """
    schema = arrow_schema(totals_columns(run.gammas))
    tables = []
    for shard in run.shards:
        table = run.totals(draft, shard.index) if flavour == "engine" else None
        if table is None or table.schema.names != schema.names:
            table = compute_totals(run, draft, shard.index, flavour)
        tables.append(table.cast(schema))
    return pa.concat_tables(tables) if tables else schema.empty_table()
