"""Prediction against the clock: a run's rounds and step times beside real decoding of the same documents.

Filled here, shown by `validation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.commands.validate.timings import (
    ClockError,
    Decodings,
    DecodingTimes,
    Generated,
    Outcome,
    RelativeError,
    TimedGroup,
    TimedPair,
    clock_error,
    together,
)
from alphaprof.costs.cost_model import open_costs
from alphaprof.costs.speedup import Speedup, StepTimes, free_draft, speedup, time_shares, time_spent
from alphaprof.errors import CheckUndecided, OutsideTolerance, StepsNotTimed
from alphaprof.log.store import Run
from alphaprof.report.speeds import tokens_interval
from alphaprof.stats.estimate import Interval
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents, mean_context
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, pools
from alphaprof.totals.replay import RoundCounts

Array = np.ndarray[Any, Any]
EXACT_DTYPE = "float32"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PredictedMeasured:
    """A number as it was predicted and as it was measured."""

    predicted: float | None  # None: no step times
    measured: float | None  # None: nothing was decoded


@dataclass(frozen=True)
class RoundTime:
    """Where the mean round goes, in ms. Predicted, `other` is what taking tokens out of the caches was timed to take."""

    draft: float  # all draft steps of a round
    verify: float  # verification by the target
    other: float  # the rest of a round


@dataclass(frozen=True)
class Cell:
    """One draft on one kind of text at one gamma. Speedups are of decoding, prefill excluded.

    `timing_error`: relative standard error that the step times give the predicted speedup. `error`, `cpu_error`: predicted /
    measured - 1, with the interval that documents, repeats and step times give it, at 97.5 %. `decode_ms`: a plain decode
    step. `same_text`, `same_rounds`: documents whose text is the profiled one, and whose rounds are those of the replay;
    None where both are a matter of chance. `prefill_ms`: mean over documents. `predicted_tokens`: tokens per round with
    the interval that documents give it, at 95 %.
    """

    draft: str
    domain: str
    continuation: str
    sampling: dict[str, float] | None
    rule: str
    gamma: int
    documents: int
    tokens_per_round: PredictedMeasured  # tokens emitted per round, over all rounds
    predicted_tokens: Interval | None
    predicted_speedup: float | None  # from the rounds of the replay and the step times of the run
    timing_error: float | None
    wall_speedup: float | None  # measured by the wall clock
    cpu_speedup: float | None  # measured in CPU time of the process; None on a GPU, of which that says nothing
    error: RelativeError | None
    cpu_error: RelativeError | None
    same_text: int | None
    same_rounds: int | None
    decode_ms: PredictedMeasured
    predicted_round_ms: RoundTime | None  # None: no step times
    measured_round_ms: RoundTime | None  # None: no rounds
    prefill_ms: float
    plain_prefill_ms: float  # the same without the draft


@dataclass(frozen=True)
class AgainstGenerate:
    """Whole calls, prefill included, of transformers' `generate` beside the same texts by the loop that is predicted.

    `loop_speedup`, `generate_speedup`: time without / with the draft, by the wall clock. `added_ms`: what a round takes
    longer by `generate` than by the loop (a draft model is called through a `generate` of its own in every round);
    `plain_added_ms`: the same of a token without a draft.
    """

    draft: str
    gamma: int
    documents: int
    loop_speedup: float
    generate_speedup: float
    added_ms: float
    plain_added_ms: float
    same_text: int  # documents whose text is that of the loop


@dataclass(frozen=True)
class Validation:
    """The whole comparison. `plain_same_text`: of all `documents`, those whose plain decoding is the profiled text.

    `exact`: all models run in float32, so every text and every round should be equal. `contexts`: tokens in the cache while
    steps were timed, between which times are interpolated; `mean_context`: of the documents. `outcome`: whether the median
    absolute error of the speedup is within the tolerance, outside of it, or too noisy to tell; on a CPU by the wall clock
    and by CPU time together: outside where both say so, within where one does and the other does not say outside. None
    where no speedup was predicted.
    """

    run: str | None
    target: str
    device: str
    dtype: str
    exact: bool
    repeats: int  # how often every text was decoded in every way
    documents: int
    short: int  # documents left out: fewer than two tokens
    foreign: int  # documents left out: the target did not write their text
    plain_same_text: int
    contexts: tuple[int, ...]
    mean_context: float
    tolerance: float  # the largest median error that passes
    outcome: Outcome | None
    wall: ClockError | None  # by the wall clock; None: no speedup was predicted
    cpu: ClockError | None  # by the CPU time of the process; None: on a GPU too
    cells: tuple[Cell, ...]  # one for each draft, domain, kind of text and gamma
    generate: tuple[AgainstGenerate, ...]  # one for each draft and gamma, where it was asked for
    not_generated: tuple[str, ...]  # what was asked for and left out there, and why


def within_interval(cell: Cell) -> bool | None:
    """Whether the measured tokens per round lie within the predicted interval; None where one of them is not known."""
    held, measured = cell.predicted_tokens, cell.tokens_per_round.measured
    return None if held is None or measured is None else held.low <= measured <= held.high


@dataclass(frozen=True)
class _MeasuredGroup:
    """Documents of one kind of text: their places among the measured ones, and what the log says of them."""

    domain: str
    rule: str
    rows: Array
    pool: DocumentTotals


def build_validation(run: Run, measured: DecodingTimes, tolerance: float, kept: bool) -> Validation:
    """Hold a run against decodings of its documents. `kept`: whether the run stays, and is worth naming."""
    manifest = run.manifest
    documents = run.documents()
    numbers = pa.array(measured.documents, documents["document"].type)
    documents = documents.filter(pc.is_in(documents["document"], value_set=numbers))
    context = mean_context(documents) or 0.0
    book = open_costs(run, manifest.config["costs"], context)
    times = book.times(1) if book else {}
    on_cpu = manifest.target.device == "cpu"
    cells = []
    for draft in manifest.drafts:
        for group in _groups(run, draft, documents, measured):
            found = [way for way in measured.drafted if way.draft == draft]
            cells += [_cell(group, way, measured.plain, times.get(draft), on_cpu) for way in found]
    wall = clock_error([cell.error for cell in cells if cell.error], tolerance)
    cpu = clock_error([cell.cpu_error for cell in cells if cell.cpu_error], tolerance)
    return Validation(
        run=str(run.path) if kept else None,
        target=manifest.target.reference,
        device=manifest.target.device,
        dtype=manifest.target.dtype,
        exact={facts.dtype for facts in (manifest.target, *manifest.drafts.values())} == {EXACT_DTYPE},
        repeats=len(measured.plain.wall_s),
        documents=len(measured.documents),
        short=measured.short,
        foreign=measured.foreign,
        plain_same_text=int(measured.plain.same_text.sum()),
        contexts=book.table.contexts(1) if book else (),
        mean_context=context,
        tolerance=tolerance,
        outcome=together([clock.outcome for clock in (wall, cpu) if clock]) if wall else None,
        wall=wall,
        cpu=cpu,
        cells=tuple(cells),
        generate=tuple(_against(found) for found in measured.generated),
        not_generated=measured.not_generated,
    )


def require_within(validation: Validation, undecided_fails: bool) -> None:
    """Raise `OutsideTolerance`, `StepsNotTimed` where nothing was predicted, or `CheckUndecided` where that is asked for."""
    if validation.outcome is None:
        raise StepsNotTimed("nothing to judge: no steps were timed, or nothing was decoded", "the lines above say why")
    if validation.outcome == "outside":
        raise OutsideTolerance(
            f"the predicted speedup is outside the tolerance: {verdict_reason(validation)}",
            "the round times show where the time goes; alphaprof latency times the steps again",
        )
    if validation.outcome == "too_noisy" and undecided_fails:
        raise CheckUndecided(f"too noisy to tell: {verdict_reason(validation)}", narrowing(validation))


def verdict_reason(validation: Validation) -> str:
    """Why the outcome is what it is, in words."""
    clocks = ((validation.wall, "by the wall clock"), (validation.cpu, "by CPU time"))
    medians = []
    for clock, by in clocks:
        if clock is not None:
            high = f"{100 * clock.high:.1f}%" if math.isfinite(clock.high) else "inf"
            medians.append(f"{100 * clock.median:.1f}% [{100 * clock.low:.1f}%, {high}] {by}")
    return f"median error {', '.join(medians)} (95 % intervals); tolerance {100 * validation.tolerance:.4g}%"


def narrowing(validation: Validation) -> str:
    """What would make the intervals of an outcome that is too noisy narrower."""
    if validation.repeats < 2:
        return "one repeat does not show how repeats differ: --repeats 3"
    if 2 * sum(cell.documents < 2 for cell in validation.cells) >= len(validation.cells):
        return "one document of a domain does not show how documents differ: --documents 4"
    if {clock.outcome for clock in (validation.wall, validation.cpu) if clock} == {"within", "outside"}:
        return "the two clocks disagree, as on a machine that does something else as well: use an idle one"
    return "use an idle machine, more --documents and --repeats, or a higher costs.budget"


def _groups(run: Run, draft: str, documents: pa.Table, measured: DecodingTimes) -> Iterator[_MeasuredGroup]:
    """The measured documents by kind of text, each under the rule that it was decoded by."""
    rules = list(dict.fromkeys(measured.rules))
    totals = read_totals(run, draft, TotalsRequest(rules, run.gammas))
    measured_documents = Documents.of(documents)
    for rule in rules:
        found = pools([totals], measured_documents, rule, run.gammas)
        for group, (domain, pool) in zip(measured_documents.groups, found, strict=True):
            if measured.rules[group.rows[0]] == rule:
                yield _MeasuredGroup(domain, rule, group.rows, pool)


def _cell(group: _MeasuredGroup, way: Decodings, plain: Decodings, times: StepTimes | None, on_cpu: bool) -> Cell:
    pool, rows, counts = group.pool, group.rows, group.pool.counts(way.gamma)
    free = speedup([counts], [1.0], free_draft(way.gamma))
    faster = speedup([counts], [1.0], times) if times is not None else None
    tokens, plain_tokens = way.tokens[rows], plain.tokens[rows]
    wall = TimedPair(plain.wall_s[:, rows], way.wall_s[:, rows], plain_tokens, tokens)
    cpu = TimedPair(plain.cpu_s[:, rows], way.cpu_s[:, rows], plain_tokens, tokens) if on_cpu else None
    by_chance = bool(counts.control.any())
    rounds = way.rounds[rows].sum()
    steps = plain_tokens.sum()
    return Cell(
        draft=str(way.draft),
        domain=group.domain,
        continuation=pool.continuation,
        sampling=pool.sampling,
        rule=group.rule,
        gamma=way.gamma,
        documents=len(rows),
        tokens_per_round=PredictedMeasured(free.value if free else None, float(tokens.sum() / rounds) if rounds else None),
        predicted_tokens=tokens_interval(free, way.gamma, CONFIDENCE),
        predicted_speedup=faster.value if faster else None,
        timing_error=faster.timing_error if faster else None,
        wall_speedup=wall.speedup(),
        cpu_speedup=cpu.speedup() if cpu else None,
        error=_error(wall, faster, counts, times),
        cpu_error=_error(cpu, faster, counts, times),
        same_text=None if by_chance else int(way.same_text[rows].sum()),
        same_rounds=None if by_chance else _same_rounds(way, rows, pool),
        decode_ms=PredictedMeasured(
            times.decode.ms if times else None, _typical(plain.wall_s, rows) / float(steps) if steps else None
        ),
        predicted_round_ms=_predicted_round(counts, times) if times else None,
        measured_round_ms=_measured_round(way, rows) if rounds else None,
        prefill_ms=_typical(way.prefill_s, rows) / len(rows),
        plain_prefill_ms=_typical(plain.prefill_s, rows) / len(rows),
    )


def _error(
    pair: TimedPair | None, predicted: Speedup | None, counts: RoundCounts, times: StepTimes | None
) -> RelativeError | None:
    if pair is None or predicted is None or times is None:
        return None
    timing = TimedGroup(predicted.timing_error**2, predicted.timing_freedom)
    return pair.error(predicted.value, time_spent(counts, times) / np.maximum(counts.tokens, 1), timing)


def _against(found: Generated) -> AgainstGenerate:
    """Medians over repeats, summed over documents."""
    loop, plain_loop, drafted, plain = (
        float(np.median(seconds, axis=0).sum())
        for seconds in (found.loop_s, found.plain_loop_s, found.generate_s, found.plain_generate_s)
    )
    return AgainstGenerate(
        draft=found.draft,
        gamma=found.gamma,
        documents=len(found.rounds),
        loop_speedup=plain_loop / loop,
        generate_speedup=plain / drafted,
        added_ms=1e3 * (drafted - loop) / float(found.rounds.sum()),
        plain_added_ms=1e3 * (plain - plain_loop) / float(found.tokens.sum()),
        same_text=int(found.same_text.sum()),
    )


def _same_rounds(way: Decodings, rows: Array, pool: DocumentTotals) -> int:
    """Documents whose rounds were as many as replayed, and drafted and accepted as many tokens at every depth."""
    same = way.rounds[rows] == pool[f"rounds_{way.gamma}"]
    for name, counts in (("drafted", way.drafted), ("accepted", way.accepted)):
        same &= (counts[rows] == pool[f"{name}_depths_{way.gamma}"]).all(1)
    return int(same.sum())


def _typical(seconds: Array, rows: Array) -> float:
    """Ms that some documents take: the median over repeats of each, summed."""
    return 1e3 * float(np.median(seconds[:, rows], axis=0).sum())


def _predicted_round(counts: RoundCounts, times: StepTimes) -> RoundTime:
    rounds = float(counts.rounds.sum())
    *verify, draft, after_full, lookup, bookkeeping = time_spent(counts, times).sum() * time_shares(counts, times)
    unit = times.decode.ms / rounds
    return RoundTime(float(draft + after_full + lookup) * unit, float(sum(verify)) * unit, float(bookkeeping) * unit)


def _measured_round(way: Decodings, rows: Array) -> RoundTime:
    rounds = float(way.rounds[rows].sum())
    parts = (way.draft_s, way.verify_s, way.wall_s - way.draft_s - way.verify_s)
    return RoundTime(*(_typical(seconds, rows) / rounds for seconds in parts))
