"""From the position log to totals: a row per document and rule, everything that reports read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.analysis.replay import Flavour, Rounds, Trace, expected_replay, replay, run_lengths
from alphaprof.analysis.rule_names import rules_of
from alphaprof.analysis.rules import GREEDY, SAMPLED
from alphaprof.errors import OptionInvalid
from alphaprof.log.manifest import ModelFacts
from alphaprof.log.schema import DEPTH_COUNTS, PAIR_COUNTS, arrow_schema, totals_columns
from alphaprof.log.store import Run

Array = np.ndarray[Any, Any]
READ = (
    "token",
    "target_top",
    "draft_top",
    "target_top_prob",
    "target_second_prob",
    "target_entropy",
    "target_token_prob",
    "draft_token_prob",
    "target_prob_of_draft_top",
    "target_rank_of_draft_top",
    "draft_rank_of_token",
    "overlap",
    "proposed",
    "accepted_run",
)


@dataclass(frozen=True)
class Request:
    """What totals are asked for: ids of rules, speculation lengths, flavour of rounds."""

    rules: Sequence[str]
    gammas: Sequence[int]
    flavour: Flavour = "engine"


@dataclass(frozen=True)
class Shape:
    """Where the documents of a shard lie in its positions: `start`, `stop`, `limit` and ids [documents].

    `policy` [documents]: how the target chose the tokens, greedy or sampled; empty where it did not choose them. `plain`
    [documents]: whether p and q are the plain softmax.
    """

    document: Array
    start: Array
    stop: Array
    limit: Array
    policy: Array
    plain: Array

    @classmethod
    def of(cls, documents: pa.Table) -> Shape:
        """From rows of the documents table, whose positions follow each other in the same order."""
        length = documents["continuation_tokens"].to_numpy()
        stop = np.cumsum(length).astype(np.int64)
        limit = documents["max_new_tokens"].fill_null(np.iinfo(np.int32).max).to_numpy().astype(np.int64)
        plain = ~documents["temperature"].is_valid().to_numpy()
        return cls(documents["document"].to_numpy(), stop - length, stop, limit, policies(documents), plain)

    def sums(self, values: Array) -> Array:
        """Sums [documents] of values [positions]."""
        running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])  # float32 sums drift within a shard
        return np.asarray(running[self.stop] - running[self.start])

    def each(self, values: Array) -> Array:
        """Values [documents] repeated for every position."""
        return np.repeat(values, self.stop - self.start)


def policies(documents: pa.Table) -> Array:
    """How the target chose the tokens of each document, [documents]: greedy, sampled, or empty where it did not."""
    on_policy = documents["on_policy"].to_numpy(zero_copy_only=False).astype(bool)
    sampled = documents["temperature"].is_valid().to_numpy()
    return np.where(on_policy, np.where(sampled, SAMPLED, GREEDY), "")


def shard_totals(
    positions: pa.Table, documents: pa.Table, target: ModelFacts, draft: ModelFacts, request: Request
) -> pa.Table:
    """Totals of one shard of one draft's log.

    Rounds are null where no replay is exact: for a lossy rule, and on text that the rule's own decoding would not emit.
    """
    shape = Shape.of(documents)
    columns = _columns(positions, shape, columns_of(request.rules))
    shared = _shared_counts(columns, shape, target.measured_noise)
    tables = []
    for rule in rules_of(list(request.rules)):
        accept = np.where(columns["proposed"] > 0, rule.accept(columns), 0.0)
        kept = rule.emitted(columns)
        data = shared | {"rule": [rule.id] * len(shape.document), "accepted": shape.sums(accept)}
        data["thinking_accepted"] = _thinking(columns, shape, accept)
        defined = np.isin(shape.policy, rule.rule.policies) & (kept is not None)
        per_gamma: dict[int, Rounds] = {}
        if kept is None:
            data |= {name: pa.nulls(len(shape.document)) for name in ("emitted", *PAIR_COUNTS)}
        else:
            kept = np.where(columns["proposed"] > 0, kept, 0.0)
            data |= {"emitted": shape.sums(kept)} | _pairs(columns["proposed"] > 0, kept, shape)
            trace = trace_of(columns, shape, kept, target, draft)
            per_gamma = rounds_of(some_documents(trace, defined), kept, accept, request)
        tables.append(_table(data, per_gamma, defined, request.gammas))
    return pa.concat_tables(tables)


def _pairs(proposed: Array, kept: Array, shape: Shape) -> dict[str, Array]:
    """PAIR_COUNTS [documents]: neighbouring positions of one document that both have a proposal, and what was kept there."""
    paired = proposed & np.roll(proposed, -1)
    paired[shape.stop - 1] = False  # the next position is another document's
    following = np.roll(kept, -1)
    sums = (paired, *(np.where(paired, values, 0.0) for values in (kept, following, kept * following)))
    return {name: shape.sums(values) for name, values in zip(PAIR_COUNTS, sums, strict=True)}


def trace_of(columns: dict[str, Array], shape: Shape, kept: Array, target: ModelFacts, draft: ModelFacts) -> Trace:
    """What replay reads. The runs of prompt lookup are stored, since its proposals depend on where a round starts."""
    looked_up = draft.kind == "prompt_lookup"
    run = columns["accepted_run"] if looked_up else run_lengths(kept == 1, shape.start, shape.stop)
    # Hugging Face stops the draft at the target's EOS ids; prompt lookup never proposes them.
    ends = np.isin(columns["draft_top"], target.eos) & (columns["proposed"] > 0)
    proposed = columns["proposed"].astype(np.int64)
    return Trace(run.astype(np.int64), proposed, shape.start, shape.stop, shape.limit, ends, looked_up)


def some_documents(trace: Trace, chosen: Array) -> Trace:
    """The trace with some of its documents only."""
    parts = {name: getattr(trace, name)[chosen] for name in ("start", "stop", "limit")}
    return dataclasses.replace(trace, **parts)


def rounds_of(trace: Trace, kept: Array, accept: Array, request: Request) -> dict[int, Rounds]:
    """Rounds of the trace's documents by gamma: facts of the log where acceptance is one, else expectations."""
    if ((kept == 0) | (kept == 1)).all():
        return {gamma: replay(trace, gamma, request.flavour) for gamma in request.gammas}
    return {gamma: expected_replay(trace, kept, accept, gamma, request.flavour) for gamma in request.gammas}


def columns_of(rules: Sequence[str]) -> list[str]:
    """Columns of the log that these rules and replay read."""
    logged = [rule.id for rule in rules_of(list(rules)) if rule.rule.logged]
    return [*READ, *(f"{name}_{rule}" for rule in logged for name in ("accept", "emitted"))]


def _columns(positions: pa.Table, shape: Shape, names: Sequence[str]) -> dict[str, Array]:
    """The columns that rules and replay read, as arrays; nulls (no proposal, no distribution) become -1 or NaN."""
    columns: dict[str, Array] = {}
    for name in names:
        column = positions[name]
        columns[name] = (column.fill_null(-1) if pa.types.is_integer(column.type) else column).to_numpy()
    columns["accepted_run"] = np.maximum(columns["accepted_run"], 0)
    columns["greedy"] = shape.each(shape.policy == GREEDY)
    phase = positions["phase"].cast(pa.string())
    if phase.null_count == 0:
        columns["thinking"] = pc.equal(phase, "thinking").to_numpy().astype(bool)
    return columns


def _thinking(columns: dict[str, Array], shape: Shape, values: Array) -> pa.Array:
    """Sums [documents] of values over positions in the phase thinking; null without phases."""
    if "thinking" not in columns:
        return pa.nulls(len(shape.document))
    return pa.array(shape.sums(np.where(columns["thinking"], values, 0)))


def _shared_counts(columns: dict[str, Array], shape: Shape, noise: float) -> dict[str, Any]:
    """Counts that do not depend on the rule."""
    greedy = columns["greedy"]
    # On the plain softmax the log of a ratio of probabilities is the difference of the logits.
    with np.errstate(divide="ignore"):
        gap = np.log(columns["target_top_prob"]) - np.log(columns["target_second_prob"])
    tied = shape.each(shape.plain) & (gap <= noise * (1 + 1e-3))  # a gap of just one step of the dtype comes back rounded
    odd = (columns["token"] != columns["target_top"]) & greedy
    impossible = (columns["target_token_prob"] == 0) & shape.each(shape.policy == SAMPLED)
    return {
        "document": shape.document,
        "positions": shape.stop - shape.start,
        "proposals": shape.sums(columns["proposed"] > 0).astype(np.int64),
        "thinking_positions": _thinking(columns, shape, np.ones(len(greedy))),
        "thinking_proposals": _thinking(columns, shape, columns["proposed"] > 0),
        "impossible": shape.sums(impossible).astype(np.int64),
        "mismatches": shape.sums(odd).astype(np.int64),
        "clear_mismatches": shape.sums(odd & ~tied).astype(np.int64),
        "near_ties": shape.sums(tied).astype(np.int64),
    }


def _table(data: dict[str, Any], per_gamma: dict[int, Rounds], defined: Array, gammas: Sequence[int]) -> pa.Table:
    """One rule's rows as a table in the declared schema; rounds are null where `defined` is False."""

    def spread(values: Array) -> Array:
        whole = np.zeros((len(defined), *values.shape[1:]))
        whole[defined] = values
        return whole

    for gamma in gammas:
        found = per_gamma.get(gamma) or Rounds.none(int(defined.sum()), gamma)
        data["tokens"] = pa.array(spread(found.tokens), mask=~defined)
        data[f"rounds_{gamma}"] = pa.array(spread(found.rounds), mask=~defined)
        data[f"drafted_{gamma}"] = pa.array(spread(found.drafted.sum(1)), mask=~defined)
        data[f"control_{gamma}"] = pa.array(spread(found.control), mask=~defined)
        for name in DEPTH_COUNTS:
            counts = pa.array(spread(getattr(found, name)).ravel())
            data[f"{name}_depths_{gamma}"] = pa.FixedSizeListArray.from_arrays(counts, gamma, mask=pa.array(~defined))
    schema = arrow_schema(totals_columns(gammas))
    return pa.table({name: data[name] for name in schema.names}).cast(schema)


def compute_totals(run: Run, draft: str, index: int, request: Request) -> pa.Table:
    """Totals of one shard, from its position log."""
    manifest = run.manifest
    needed = [*columns_of(request.rules), "phase"]
    positions, documents = run.positions(draft, index, needed), run.continuations(index)
    return shard_totals(positions, documents, manifest.target, manifest.drafts[draft], request)


def write_totals(run: Run) -> None:
    """Compute and write the totals that complete shards lack."""
    request = Request(run.rules, run.gammas)
    for draft in run.manifest.drafts:
        for shard in run.shards:
            if not run.part("totals", shard.index, draft).exists():
                run.write_totals(compute_totals(run, draft, shard.index, request), shard.index, draft)


def read_totals(run: Run, draft: str, request: Request, columns: Sequence[str] | None = None) -> pa.Table:
    """Totals of all complete shards, with rows for the rules that `request` names at least; some columns, or all.
    What is not stored is computed
    from the log and not written: of an interrupted run, in the `hf` flavour, of a rule that the profile did not ask for, or
    where another version of alphaprof stored other columns. Raises `OptionInvalid` for a rule that the log cannot tell of.
    """
    if unknown := [
        rule.id for rule in rules_of(list(request.rules)) if rule.rule.logged and rule.id not in run.log_rules.emitted
    ]:
        raise OptionInvalid(
            f"the log of {run.path} cannot tell of {', '.join(unknown)}, which needs whole distributions",
            "name the rule in the profile's rules and profile again; --reuse-continuations keeps the text",
        )
    schema = arrow_schema(run.totals_columns)
    tables = []
    for shard in run.shards:
        stored = run.totals(draft, shard.index) if request.flavour == "engine" else None
        usable = stored is not None and stored.schema.names == schema.names
        known = set(run.rules) if usable else set()
        if missing := [rule for rule in request.rules if rule not in known]:
            tables.append(compute_totals(run, draft, shard.index, dataclasses.replace(request, rules=missing)).cast(schema))
        if usable and stored is not None:
            tables.append(stored.cast(schema))
    whole = pa.concat_tables(tables) if tables else schema.empty_table()
    return whole if columns is None else whole.select(columns)
