"""Why drafts are rejected: each position that is lost has one cause, and rounds are replayed without the losses of a cause.

A position without a proposal loses all; any other loses 1 - a_t, the probability that its token was not an accepted draft
(1 - beta_t where the rule's own decoding would not emit the text, and for lossy rules). The whole of it goes to the first
of CAUSES that applies to the token that the draft should have proposed: the emitted one, or the target's top token where
acceptance does not hang on the emitted one. What costs least to mend comes first, so that the last holds what nothing but
a better draft mends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from alphaprof.log.manifest import DraftFacts, ModelFacts
from alphaprof.log.schema import CONTINUATION_COLUMNS, PROPOSED_LIMIT
from alphaprof.log.store import Run
from alphaprof.rules import GREEDY, SAMPLED, BoundRule
from alphaprof.theory.bounds import strict_thresholds
from alphaprof.totals.count import (
    Shape,
    TotalsRequest,
    by_chance,
    columns_of,
    proposed_in,
    rounds_of,
    some_documents,
    trace_of,
)
from alphaprof.totals.log_sample import columns_at
from alphaprof.totals.lookup import first_proposals
from alphaprof.totals.replay import Flavour, Rounds, Trace, run_lengths

Array = np.ndarray[Any, Any]
WIDTH = 4  # of the tree that a cause speaks of
UNSURE = 0.1  # nats: where a smaller KL(p||q) allows a rejection, even good drafts are not safe
NO_PROPOSAL, BEYOND, TIE, SPECIAL, LOOKUP, RANK, UNCERTAIN, DRAFT = CAUSES = (
    "no proposal",
    "beyond context",
    "numerical tie",
    "special tokens",
    "prompt lookup",
    f"rank 2 to {WIDTH}",
    "target uncertain",
    "draft",
)
SILENT = 2  # the first of them, whose positions have no proposal


@dataclass(frozen=True)
class LossQuestion:
    """One draft and rule; `gamma` [documents of the run]: at which rounds are replayed, 0 where they are not defined."""

    draft: str
    rule: BoundRule
    gamma: Array


@dataclass(frozen=True)
class Losses:
    """What a draft loses under a rule, summed per document of the run.

    `lost` [documents]: positions less what the rule accepts, as alpha counts it; `split` [documents, causes]: what
    happened to the emitted tokens, by cause: the same on average over texts; `top` [documents]: the target's largest
    probabilities. `unchanged`, `recovered` by cause, and
    `perfect`, nothing lost at all: rounds [documents] at each document's gamma, depth counts as wide as the largest; nothing
    counted where gamma is 0.
    """

    positions: Array
    lost: Array
    split: Array
    top: Array
    unchanged: Rounds
    recovered: tuple[Rounds, ...]
    perfect: Rounds


@dataclass(frozen=True)
class ShardTexts:
    """One shard's documents: `reach` [positions]: tokens that a draft has to read to propose there; `looked_up` [positions]:
    what prompt lookup proposes first.
    """

    shape: Shape
    reach: Array
    looked_up: Array


def losses(run: Run, jobs: Sequence[LossQuestion], flavour: Flavour) -> list[Losses]:
    """What each of some drafts and rules loses, in one pass over the log; [jobs]."""
    found: list[list[Losses]] = [[] for _ in jobs]
    at = 0
    for shard, texts in zip(run.shards, _texts(run), strict=True):
        rows = slice(at, at + len(texts.shape.document))
        for job, parts in zip(jobs, found, strict=True):
            columns = _columns(run, job, shard.index, texts.shape, flavour)
            parts.append(_losses(run, ShardColumns(job, columns, texts, job.gamma[rows]), flavour))
        at = rows.stop
    return [_joined(parts) for parts in found]


def _texts(run: Run) -> Iterator[ShardTexts]:
    """The shards of a run, with what prompt lookup with its default settings would propose in them."""
    for shard in run.shards:
        table = run.continuations(shard.index, [column.name for column in CONTINUATION_COLUMNS])
        shape = Shape.of(table)
        prompts = table["prompt_tokens"].to_numpy()
        place = np.arange(shape.stop[-1] if len(shape.stop) else 0) - shape.each(shape.start)
        yield ShardTexts(shape, shape.each(prompts) + place - 1, _looked_up(table, prompts, shape))


def _looked_up(table: Any, prompts: Array, shape: Shape) -> Array:
    """Prompt lookup's first proposals at the positions of a shard, from its token ids."""
    ids = [table[name].combine_chunks().flatten().to_numpy() for name in ("prompt_ids", "continuation_ids")]
    lengths = shape.stop - shape.start
    start = np.cumsum(prompts + lengths) - prompts - lengths
    tokens = np.zeros(len(ids[0]) + len(ids[1]), dtype=np.int64)
    inside = np.repeat(start + prompts, lengths) + np.arange(len(ids[1])) - shape.each(shape.start)
    continued = np.zeros(len(tokens), dtype=bool)
    continued[inside] = True
    tokens[continued], tokens[~continued] = ids[1], ids[0]
    return first_proposals(tokens, start)[continued]


def _columns(run: Run, job: LossQuestion, index: int, shape: Shape, flavour: Flavour) -> dict[str, Array]:
    """What rules, replay and causes read of one shard; nulls become -1 or NaN, and `proposed` is that of the flavour."""
    columns = columns_at(run, job.draft, index, columns_of([job.rule.id], flavour))
    columns["proposed"] = proposed_in(flavour, columns)
    columns["accepted_run"] = np.maximum(columns["accepted_run"], 0)
    columns["greedy"] = shape.each(shape.policy == GREEDY)
    return columns


@dataclass(frozen=True)
class ShardColumns:
    """One shard under a job: `columns` [positions], its texts, and `gamma` [documents of the shard]."""

    job: LossQuestion
    columns: dict[str, Array]
    texts: ShardTexts
    gamma: Array


def _losses(run: Run, part: ShardColumns, flavour: Flavour) -> Losses:
    """The losses of one shard."""
    job, columns, texts = part.job, part.columns, part.texts
    shape, rule, facts = texts.shape, job.rule, run.manifest.drafts[job.draft]
    ready = columns["proposed"] > 0
    accept = np.where(ready, rule.accept(columns), 0.0).astype(np.float64)
    own = shape.each(np.isin(shape.policy, rule.rule.policies)) & (not rule.rule.lossy)
    emitted = rule.emitted(columns)
    kept = accept if emitted is None else np.where(ready, emitted, 0.0)
    mass = np.maximum(0.0, 1.0 - np.where(own, kept, accept))
    cause = causes(rule, columns, texts, own, (run.manifest.target, facts))
    split = np.stack([shape.sums(np.where(cause == number, mass, 0.0)) for number in range(len(CAUSES))], axis=1)
    trace = trace_of(columns, shape, kept, run.manifest.target, facts)
    source = ReplaySource(trace, shape, kept, accept if by_chance(rule, facts) else None)
    sizes = part.gamma, int(job.gamma.max(initial=1)), flavour
    replayed = partial(_replayed, source, *sizes)
    unchanged = replayed(np.zeros(len(mass), dtype=bool))
    to_each = [(cause == number) & (mass > 0) for number in range(len(CAUSES))]
    return Losses(
        positions=(shape.stop - shape.start).astype(np.float64),
        lost=shape.sums(1.0 - accept),
        split=split,
        top=shape.sums(columns["target_top_prob"]),
        unchanged=unchanged,
        recovered=tuple(replayed(changed) if changed.any() else unchanged for changed in to_each),
        perfect=_replayed(dataclasses.replace(source, accept=None), *sizes, np.ones(len(mass), dtype=bool)),
    )


@dataclass(frozen=True)
class ReplaySource:
    """What rounds of one shard are replayed from: its trace, a_t (`kept`) and beta_t (`accept`), both [positions].

    `accept`: None where rounds are facts.
    """

    trace: Trace
    shape: Shape
    kept: Array
    accept: Array | None


def _replayed(source: ReplaySource, gamma: Array, widest: int, flavour: Flavour, changed: Array) -> Rounds:
    """Rounds of a shard with the drafts of changed positions accepted; `gamma` [documents], 0: none are wanted.

    Expectations keep a control variate: a_t - beta_t of the text at all positions, the changed ones too, since those are
    chosen by the token that came, and over a choice like that its mean is not 0.
    """
    found = Rounds.none(len(gamma), widest)
    kept = np.where(changed, 1.0, source.kept)
    chances = None if source.accept is None else (kept, source.accept + (kept - source.kept))
    for length in np.unique(gamma[gamma > 0]).tolist():
        trace = some_documents(_granted(source, changed, length), gamma == length)
        part = rounds_of(trace, chances, TotalsRequest((), (length,), flavour))[length]
        for name, values in vars(part).items():
            place = (gamma == length,) if values.ndim == 1 else (gamma == length, slice(length))
            getattr(found, name)[place] = values
    return found


def causes(
    rule: BoundRule, columns: dict[str, Array], texts: ShardTexts, own: Array, models: tuple[ModelFacts, DraftFacts]
) -> Array:
    """The cause [positions] that a loss at each position has, as its number in CAUSES. `models`: target and draft.

    `own` [positions]: the rule's own decoding would emit the text, and acceptance hangs on the emitted token.
    """
    target, draft = models
    shape, token, guess = texts.shape, columns["token"], columns["draft_top"]
    wanted = np.where(own, token, columns["target_top"])
    known = np.where(own, columns["target_token_prob"], columns["target_top_prob"])
    missed = (guess != wanted) | own
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.log(columns["target_top_prob"])
        gap = np.maximum(top - np.log(columns["target_prob_of_draft_top"]), top - np.log(known))
    ordered = GREEDY in rule.rule.policies  # the target takes its top token; by lot a tie is what the text is, not noise
    rank = columns["draft_rank_of_token"]
    silent = columns["proposed"] == 0
    found = {
        BEYOND: silent & (draft.context is not None) & (texts.reach >= (draft.context or 0)),
        NO_PROPOSAL: silent,
        TIE: (guess != wanted) & shape.each(shape.plain) & ordered & (gap <= target.measured_noise * (1 + 1e-3)),
        SPECIAL: missed & np.isin(wanted, (*target.eos, *(target.special or ()))),
        LOOKUP: missed & draft.has_steps & (texts.looked_up == wanted),
        RANK: missed & (token == wanted) & (rank >= 2) & (rank <= WIDTH),
        UNCERTAIN: _uncertain(rule, columns, shape, own, guess != wanted),
    }
    numbers = [CAUSES.index(name) for name in found]
    return np.asarray(np.select(list(found.values()), numbers, default=CAUSES.index(DRAFT)))


def _uncertain(rule: BoundRule, columns: dict[str, Array], shape: Shape, own: Array, wrong: Array) -> Array:
    """Where no draft could count on the token that was wanted, [positions]."""
    if rule.rule.drawn:
        return np.zeros(len(own), dtype=bool)
    close = strict_thresholds(columns["target_top_prob"], columns["target_second_prob"]) < UNSURE
    by_lot = own & shape.each(shape.policy == SAMPLED)
    # Not wrong and yet lost: the rule keeps what it should by lot, whoever proposes it.
    return np.asarray(np.where(by_lot, columns["token"] != columns["target_top"], close | ~wrong))


def _granted(source: ReplaySource, changed: Array, gamma: int) -> Trace:
    """The trace with the drafts of changed positions accepted, and proposed where there were none."""
    trace, shape = source.trace, source.shape
    place = np.arange(len(changed))
    stop = shape.each(trace.stop)
    behind = place + trace.proposed  # a draft that fell silent there
    beyond = np.minimum(behind, len(changed) - 1)
    open_ended = (behind < stop) & changed[beyond] & (trace.proposed[beyond] == 0)
    if trace.looked_up:  # its proposals end for other reasons
        open_ended &= trace.proposed == 0
    proposed = np.where(open_ended & (trace.proposed < PROPOSED_LIMIT), PROPOSED_LIMIT, trace.proposed)
    if not trace.looked_up:
        run = run_lengths(changed | (source.kept == 1), shape.start, shape.stop)
        return dataclasses.replace(trace, run=run, proposed=proposed)
    # A round that fails at a changed position goes on as one that starts behind it would.
    last = len(changed) - 1
    run, begin, going = trace.run.copy(), place, np.ones(len(changed), dtype=bool)
    for _ in range(gamma):
        end = begin + trace.run[begin]
        going = going & (trace.run[begin] < proposed[begin]) & (end < stop) & changed[np.minimum(end, last)]
        if not going.any():
            break
        begin = np.where(going, np.minimum(end + 1, last), begin)
        inside = end + 1 < stop
        run = np.where(going, run + 1 + np.where(inside, trace.run[begin], 0), run)
        going &= inside
    return dataclasses.replace(trace, run=run, proposed=proposed)


def rounds_at(found: Rounds, rows: Array, gamma: int) -> Rounds:
    """Rounds of some documents that were all replayed at one gamma."""
    parts = {name: values[rows] for name, values in vars(found).items()}
    return Rounds(**{name: values if values.ndim == 1 else values[:, :gamma] for name, values in parts.items()})


def _joined(parts: Sequence[Losses]) -> Losses:
    """The losses of several shards as one; there is a shard at least."""

    def rounds(several: Sequence[Rounds]) -> Rounds:
        return Rounds(**{name: np.concatenate([getattr(one, name) for one in several]) for name in vars(several[0])})

    return Losses(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in ("positions", "lost", "split", "top")},
        unchanged=rounds([part.unchanged for part in parts]),
        recovered=tuple(rounds(several) for several in zip(*(part.recovered for part in parts), strict=True)),
        perfect=rounds([part.perfect for part in parts]),
    )
