"""Prediction against the clock: a run's rounds and step times beside real decoding of the same documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.commands.validate.answer import AgainstGenerate, Cell, PredictedMeasured, RoundTime, Validation
from alphaprof.commands.validate.timings import (
    Decodings,
    DecodingTimes,
    Generated,
    RelativeError,
    TimedGroup,
    TimedPair,
    clock_error,
    together,
)
from alphaprof.costs.cost_model import open_costs
from alphaprof.costs.speedup import Speedup, StepTimes, free_draft, speedup, time_shares, time_spent
from alphaprof.log.store import Run
from alphaprof.report.speeds import tokens_interval
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents, mean_context
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, pools
from alphaprof.totals.replay import RoundCounts

Array = np.ndarray[Any, Any]
EXACT_DTYPE = "float32"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class _MeasuredGroup:
    """Documents of one kind of text: their places among the measured ones, and what the log says of them."""

    domain: str
    rule: str
    rows: Array
    pool: DocumentTotals


def build_validation(run: Run, measured: DecodingTimes, tolerance: float, kept: bool) -> Validation:
    """Compares a run with decodings of its documents. `kept`: whether the run stays, and is worth naming."""
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
            ways = [way for way in measured.drafted if way.draft == draft]
            cells += [_cell(group, way, measured.plain, times.get(draft), on_cpu) for way in ways]
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
        generate=tuple(_against(calls) for calls in measured.generated),
        not_generated=measured.not_generated,
    )


def _groups(run: Run, draft: str, documents: pa.Table, measured: DecodingTimes) -> Iterator[_MeasuredGroup]:
    """The measured documents by kind of text, each under the rule that it was decoded by."""
    rules = list(dict.fromkeys(measured.rules))
    totals = read_totals(run, draft, TotalsRequest(rules, run.gammas))
    measured_documents = Documents.of(documents)
    for rule in rules:
        each = pools([totals], measured_documents, rule, run.gammas)
        for group, (domain, pool) in zip(measured_documents.groups, each, strict=True):
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


def _against(calls: Generated) -> AgainstGenerate:
    """Medians over repeats, summed over documents."""
    loop, plain_loop, drafted, plain = (
        float(np.median(seconds, axis=0).sum())
        for seconds in (calls.loop_s, calls.plain_loop_s, calls.generate_s, calls.plain_generate_s)
    )
    return AgainstGenerate(
        draft=calls.draft,
        gamma=calls.gamma,
        documents=len(calls.rounds),
        loop_speedup=plain_loop / loop,
        generate_speedup=plain / drafted,
        added_ms=1e3 * (drafted - loop) / float(calls.rounds.sum()),
        plain_added_ms=1e3 * (plain - plain_loop) / float(calls.tokens.sum()),
        same_text=int(calls.same_text.sum()),
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
