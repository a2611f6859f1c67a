"""From the position log to totals: a row per document and rule, everything that reports read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from alphaprof.rules import GREEDY, SAMPLED, BoundRule, ratio, rules_of
from alphaprof.run.manifest import DraftFacts, ModelFacts
from alphaprof.run.schema import DEPTH_COUNTS, PAIR_COUNTS, Column, arrow_schema, deeper_names, depth_names
from alphaprof.stats.estimate import Array
from alphaprof.totals.hybrid import BY_LOOKUP
from alphaprof.totals.replay import (
    KNOWN,
    UNTIL_WRONG,
    RoundList,
    Rounds,
    Trace,
    listed_rounds,
    replays,
    run_lengths,
    runs_by_depth,
)

Columns = dict[str, Array]  # by name; NaN or no column: null
Counts = dict[str, Columns]  # of one shard, by rule
SHAPED = ("document", "continuation_tokens", "on_policy", "temperature")  # what a `Shape` is made from
READ = (
    *("token", "target_top", "draft_top", "target_top_prob", "target_second_prob", "target_entropy", "target_token_prob"),
    *("draft_token_prob", "target_prob_of_draft_top", "target_rank_of_draft_top", "draft_rank_of_token", "overlap"),
    *("proposed", "accepted_run"),
)


@dataclass(frozen=True)
class TotalsRequest:
    """What totals are asked for: ids of rules, speculation lengths, and the top probability below which a draft stops."""

    rules: Sequence[str]
    gammas: Sequence[int]
    p_min: float = 0.0

    @property
    def stored(self) -> bool:
        """Whether a finished run holds such totals."""
        return not self.p_min

    def stops(self, draft: DraftFacts) -> str:
        """Return what the log says of rounds that stop at p_min, see `replay.RoundCounts.of`."""
        return (KNOWN if draft.by_depth else UNTIL_WRONG) if self.p_min > 0 and stops(draft) else ""


@dataclass(frozen=True)
class Shape:
    """Where the documents of a shard lie in its positions: `start`, `stop` and ids [documents].

    `policy` [documents]: how the target chose the tokens, greedy or sampled; empty if it did not choose them. `plain`
    [documents]: whether p and q are the plain softmax.
    """

    document: Array
    start: Array
    stop: Array
    policy: Array
    plain: Array

    @classmethod
    def of(cls, documents: pa.Table) -> Shape:
        """From rows of the documents table, whose positions follow each other in the same order."""
        length = documents["continuation_tokens"].to_numpy()
        stop = np.cumsum(length).astype(np.int64)
        plain = ~documents["temperature"].is_valid().to_numpy()
        return cls(documents["document"].to_numpy(), stop - length, stop, policies(documents), plain)

    def sums(self, values: Array) -> Array:
        """Return sums [documents] of values [positions]; no document is empty."""
        return np.asarray(np.add.reduceat(values, self.start, dtype=np.float64))  # float32 sums drift within a shard

    def each(self, values: Array) -> Array:
        """Return values [documents] repeated for every position."""
        return np.repeat(values, self.stop - self.start)


@dataclass(frozen=True)
class Spans:
    """Where spans of documents lie in the positions of a shard: `start` of each run of positions of one span, and the `row`
    that it belongs to, [runs]; document and name of each row, [rows], by document.
    """

    start: Array
    row: Array
    document: Array
    name: Array

    @classmethod
    def of(cls, positions: pa.Table, shape: Shape) -> Spans:
        """From the log and its documents; positions without a span are in no row."""
        encoded = positions["span"].cast(pa.string()).combine_chunks().dictionary_encode()
        names, codes = encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy()
        rank = np.argsort(np.argsort(names, kind="stable"), kind="stable")  # rows are the same whichever comes first
        codes = np.append(rank, -1)[codes]
        place = shape.each(np.arange(len(shape.document)))
        start = np.flatnonzero((np.diff(codes, prepend=-2) != 0) | (np.diff(place, prepend=-1) != 0))
        key = np.where(codes[start] < 0, -1, place[start] * max(len(names), 1) + codes[start])
        keys, row = np.unique(key, return_inverse=True)
        empty = int(len(keys) > 0 and keys[0] < 0)
        document, name = np.divmod(keys[empty:], max(len(names), 1))
        return cls(start, row - empty, shape.document[document], np.array(sorted(names), dtype=object)[name])

    def sums(self, values: Array) -> Array:
        """Return sums [rows] of values [positions]."""
        each, held = np.add.reduceat(values, self.start, dtype=np.float64), self.row >= 0
        return np.bincount(self.row[held], each[held], len(self.name))

    def of_each(self, positions: int) -> Array:
        """Return the row of each position, [positions]; -1: it is in none."""
        return np.repeat(self.row, np.diff(self.start, append=positions))


def policies(documents: pa.Table) -> Array:
    """Return how the target chose the tokens of each document, [documents]: greedy, sampled, or empty if it did not."""
    on_policy = documents["on_policy"].to_numpy(zero_copy_only=False).astype(bool)
    return np.where(on_policy, np.where(documents["temperature"].is_valid().to_numpy(), SAMPLED, GREEDY), "")


def counts(
    positions: pa.Table, documents: pa.Table, models: tuple[ModelFacts, DraftFacts], request: TotalsRequest
) -> Counts:
    """Return totals of some shards of one draft's log; `models`: target and draft. Rounds are missing where no replay is
    exact: for a lossy rule, and on text that the rule's own decoding would not emit.
    """
    (target, draft), shape = models, Shape.of(documents)
    request = dataclasses.replace(request, gammas=draft.lengths(request.gammas))
    columns = _columns(positions, shape, request, draft)
    ready, flags = columns["proposed"] > 0, _flags(columns, shape, target.measured_noise)
    shared = {"document": shape.document} | {name: shape.sums(flag).astype(np.int64) for name, flag in flags.items()}
    by_rule: Counts = {}
    for rule in rules_of(request.rules):
        accept, emitted = np.where(ready, rule.accept(columns), 0.0), rule.emitted(columns)
        data = by_rule[rule.id] = shared | {"accepted": shape.sums(accept)}
        if emitted is None:
            continue
        kept = np.where(ready, emitted, 0.0)
        data |= {"emitted": shape.sums(kept)} | _pairs(ready, kept, shape)
        defined = np.isin(shape.policy, rule.rule.policies)
        if defined.any() and has_rounds(rule, draft):
            trace, chances = _traced(rule, columns, shape, (kept, accept), draft, request)
            own = some_documents(trace, defined)
            data |= _round_columns(replays(own, request.gammas, chances, rule.rule.blocks), defined)
            if draft.hybrid is not None:
                data |= _step_columns(own, ~columns[BY_LOOKUP], request, defined)
    return by_rule


def _traced(
    rule: BoundRule,
    columns: dict[str, Array],
    shape: Shape,
    chances: tuple[Array, Array],
    draft: DraftFacts,
    request: TotalsRequest,
) -> tuple[Trace, tuple[Array, Array] | None]:
    """Return the trace, and a_t and beta_t if rounds are expectations; None if the log determines the rounds."""
    if rule.rule.blocks:  # verified together, which takes ratios in place of a_t
        chances = np.where(columns["proposed"] > 0, ratio(columns), 0.0), chances[1]
    if deeper := depth_columns(rule, draft):
        chances = _chances_by_depth(deeper, columns, chances)
    trace = _trace_of(columns, shape, chances[0], draft, request.p_min)
    return trace, chances if by_chance(rule, draft) else None


@dataclass(frozen=True)
class Traced:
    """Some shards of a draft's log under one rule: their documents, the trace of these, and a_t and beta_t if rounds are
    expectations. [positions]: whether the draft `proposed`, a_t as `kept` (of facts whether the token is what it proposed),
    and what is `accepted`; `defined` [documents]: which have rounds.
    """

    shape: Shape
    trace: Trace
    chances: tuple[Array, Array] | None
    blocks: bool
    proposed: Array
    kept: Array
    accepted: Array
    defined: Array

    @classmethod
    def of(cls, positions: pa.Table, documents: pa.Table, draft: DraftFacts, request: TotalsRequest) -> Traced:
        """From some shards under the one rule of `request`."""
        (rule,), shape = rules_of(request.rules), Shape.of(documents)
        columns = _columns(positions, shape, request, draft)
        ready, emitted = columns["proposed"] > 0, rule.emitted(columns)
        kept = np.where(ready, 0.0 if emitted is None else emitted, 0.0)
        accepted = np.where(ready, rule.accept(columns), 0.0)
        trace, chances = _traced(rule, columns, shape, (kept, accepted), draft, request)
        return cls(shape, trace, chances, rule.rule.blocks, ready, kept, accepted, np.isin(shape.policy, rule.rule.policies))

    @property
    def own(self) -> Trace:
        """The trace of the documents that have rounds."""
        return some_documents(self.trace, self.defined)

    def rounds(self, gamma: int) -> RoundList:
        """Return all rounds that there are, or may be, at a gamma."""
        return listed_rounds(self.own, gamma, self.chances, self.blocks)


def _pairs(proposed: Array, kept: Array, shape: Shape) -> dict[str, Array]:
    """PAIR_COUNTS of each document, [documents], from positions whose next one has a proposal too."""
    paired = proposed & np.roll(proposed, -1)
    paired[shape.stop - 1] = False  # the next position is another document's
    following = np.roll(kept, -1)
    sums = (paired, *(np.where(paired, values, 0.0) for values in (kept, following, kept * following)))
    return {name: shape.sums(values) for name, values in zip(PAIR_COUNTS, sums, strict=True)}


def has_rounds(rule: BoundRule, draft: DraftFacts) -> bool:
    """Return whether the log of a draft holds what rounds of a rule are made of: that of a head has no ranks by depth."""
    return not (draft.by_depth and rule.rule.by_token)


def needs_log(rule: BoundRule, draft: DraftFacts) -> bool:
    """Return whether only a log that was written with the rule has its values for a draft: those of heads are needed by
    depth.
    """
    return draft.by_depth and by_chance(rule, draft)


def depth_columns(rule: BoundRule, draft: DraftFacts) -> list[str]:
    """Return columns of a head's log that hold a_t at depth 2 and beyond, then beta_t; none if `accepted_run` says
    enough.
    """
    if not needs_log(rule, draft):
        return []
    return [name for kind in ("emitted", "accept") for name in deeper_names(f"{kind}_{rule.id}", draft.depths)]


def _chances_by_depth(deeper: Sequence[str], columns: dict[str, Array], chances: tuple[Array, Array]) -> tuple[Array, Array]:
    """a_t and beta_t [positions, depths] of a head, from those of depth 1 and `depth_columns`; what no round drafts is 0."""
    kept, accept = np.split(np.stack([np.nan_to_num(columns[name]) for name in deeper], 1), 2, axis=1)
    return np.column_stack([chances[0], kept]), np.column_stack([chances[1], accept])


def odds_columns(draft: DraftFacts) -> list[str]:
    """Return the columns of a head's log that say how sure it is of each draft behind the first of its own rounds."""
    return deeper_names("draft_log_odds", draft.depths) if draft.own_path else []


def stops(draft: DraftFacts) -> bool:
    """Return whether the log says where a draft would stop at a p_min: of heads if these read their own drafts."""
    return draft.has_distribution and (draft.own_path or not draft.by_depth)


def _trace_of(columns: dict[str, Array], shape: Shape, kept: Array, draft: DraftFacts, p_min: float) -> Trace:
    """Return what replay reads. Where a draft's proposals depend on where a round starts, the log holds what they get
    accepted, or `kept` does by depth, [positions, depths].
    """
    proposed = np.maximum(columns["proposed"].astype(np.int64), 0)  # rounds of fewer would never end
    if kept.ndim > 1:
        run = runs_by_depth(kept == 1, proposed, shape.start, shape.stop)
    elif draft.starts_matter:
        run = columns["accepted_run"]
    else:
        run = run_lengths(kept == 1, shape.start, shape.stop)
    unsure = None
    if p_min and stops(draft) and draft.by_depth:  # what a round drafts is known, behind a wrong draft too
        odds = [columns[name].astype(np.float64) >= math.log(p_min / (1 - p_min)) for name in odds_columns(draft)]
        sure = np.column_stack([columns["draft_top_prob"] >= p_min, *odds])
        proposed = np.minimum(proposed, np.logical_and.accumulate(sure, axis=1).sum(1))
    elif p_min and stops(draft):
        unsure = columns["draft_top_prob"] < p_min  # NaN, of no proposal, is not
    return Trace(run.astype(np.int64), proposed, shape.start, shape.stop, unsure)


def some_documents(trace: Trace, chosen: Array) -> Trace:
    """Return the trace with some of its documents only."""
    return dataclasses.replace(trace, start=trace.start[chosen], stop=trace.stop[chosen])


def by_chance(rule: BoundRule, draft: DraftFacts) -> bool:
    """Return whether rounds of a draft are expectations, and not facts of the log. The rule and the draft decide: control
    variates are needed where a_t happened to be 0 or 1 throughout as well.
    """
    return rule.rule.drawn and rule.rule.chained and draft.has_distribution


def columns_of(request: TotalsRequest, draft: DraftFacts) -> list[str]:
    """Return columns of a draft's log that rules and replay read."""
    bound = rules_of(request.rules)
    more = ["draft_top_prob", *odds_columns(draft)] if request.p_min else []
    more += [BY_LOOKUP] if draft.hybrid else []
    return [*READ, *more, *dict.fromkeys(name for rule in bound for name in depth_columns(rule, draft))]


def array_of(column: pa.ChunkedArray) -> Array:
    """Return a column of the log as an array; nulls (no proposal, no distribution) become -1 or NaN, or False."""
    if pa.types.is_boolean(column.type):
        return np.asarray(column.fill_null(False).to_numpy())
    return np.asarray((column.fill_null(-1) if pa.types.is_integer(column.type) else column).to_numpy())


def _columns(positions: pa.Table, shape: Shape, request: TotalsRequest, draft: DraftFacts) -> dict[str, Array]:
    """Return the columns that rules and replay read."""
    columns = {name: array_of(positions[name]) for name in columns_of(request, draft)}
    columns["accepted_run"] = np.maximum(columns["accepted_run"], 0)
    columns["greedy"] = shape.each(shape.policy == GREEDY)
    return columns


def _flags(columns: dict[str, Array], shape: Shape, noise: float) -> dict[str, Array]:
    """Return which positions are counted whatever the rule, by column of the totals, [positions]."""
    greedy = columns["greedy"]
    # On the plain softmax the log of a ratio of probabilities is the difference of the logits.
    with np.errstate(divide="ignore"):
        gap = np.log(columns["target_top_prob"]) - np.log(columns["target_second_prob"])
    tied = shape.each(shape.plain) & (gap <= noise * (1 + 1e-3))  # a gap of just one step of the dtype comes back rounded
    odd = (columns["token"] != columns["target_top"]) & greedy
    return {
        "positions": np.ones(len(greedy), dtype=bool),
        "proposals": columns["proposed"] > 0,
        "impossible": (columns["target_token_prob"] == 0) & shape.each(shape.policy == SAMPLED),
        "mismatches": odd,
        "clear_mismatches": odd & ~tied,
        "near_ties": tied,
    }


def _round_columns(by_gamma: dict[int, Rounds], defined: Array) -> dict[str, Array]:
    """Return rounds of the documents where they are `defined` as columns of all documents, NaN elsewhere."""

    def spread(values: Array) -> Array:
        whole = np.full((len(defined), *values.shape[1:]), np.nan)
        whole[defined] = values
        return whole

    columns = {"tokens": spread(next(iter(by_gamma.values())).tokens)}
    for gamma, rounds in by_gamma.items():
        columns[f"rounds_{gamma}"] = spread(rounds.rounds)
        columns[f"drafted_{gamma}"] = spread(rounds.drafted.sum(1))
        columns[f"control_{gamma}"] = spread(rounds.control)
        for name in DEPTH_COUNTS:
            columns |= zip(depth_names(name, gamma), spread(getattr(rounds, name)).T, strict=True)
    return columns


def _step_columns(trace: Trace, stepped: Array, request: TotalsRequest, defined: Array) -> dict[str, Array]:
    """Draft steps of a hybrid's documents, rounds that run any, and what their first steps read beyond one token; `stepped`
    [positions]: rounds that begin there run draft steps.

    A first step reads what was written since the last one: all tokens of rounds without draft steps, and of the round with
    them the accepted drafts (a head) or the last draft if all were accepted (a model, which has read the others), beside
    the target's own token. So each of them is read once, unless no first step follows in the document.
    """
    columns, places = {}, np.flatnonzero(defined)
    for gamma in request.gammas:
        found = listed_rounds(trace, gamma)
        run = np.where(stepped[found.at], found.drafted, 0)
        last = np.zeros(len(places), dtype=np.int64)
        np.maximum.at(last, found.document, np.where(run > 0, np.arange(len(run)), 0))
        follows = np.arange(len(run)) < last[found.document]
        left = {"head": found.accepted, "model": found.accepted == found.drafted}
        read = {
            f"read_by_{name}": np.where(follows, np.where(run > 0, kept, found.emitted), 0) for name, kept in left.items()
        }
        for name, counted in {"steps": run, "started": run > 0, **read}.items():
            columns[f"{name}_{gamma}"] = np.full(len(defined), np.nan)
            columns[f"{name}_{gamma}"][places] = np.bincount(found.document, counted, len(places))
    return columns


def table_of(found: Counts, columns: Iterable[Column]) -> pa.Table:
    """Return counts as a table of some columns of totals, by rule: null where a rule does not have them, or NaN."""
    schema, tables = arrow_schema(columns), []
    for rule, counted in found.items():
        size = len(counted["document"])
        arrays = {"rule": pa.DictionaryArray.from_arrays(np.zeros(size, dtype=np.int32), [rule])}
        for field in schema:
            if field.name in counted:
                arrays[field.name] = pa.array(counted[field.name], from_pandas=field.nullable).cast(field.type)
            elif field.name != "rule":
                arrays[field.name] = pa.nulls(size, field.type)
        tables.append(pa.table(arrays, schema=schema))
    return pa.concat_tables(tables) if tables else schema.empty_table()
