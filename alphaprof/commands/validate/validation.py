"""A run's rounds and step times beside real decoding of the same documents: the value that `alphaprof validate` answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.costs.cost_model import open_costs, timed_with
from alphaprof.costs.rounds import StepTimes, free_draft, time_by_step, time_spent
from alphaprof.costs.speedup import speedup
from alphaprof.errors import CheckUndecided, OutsideTolerance, StepsNotTimed
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, OfText, Small, Table, Verdict, table_of_rows, text_name
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import GREEDY, parse_rule
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Array, Interval, by_cluster, influences, log_interval, small_sample
from alphaprof.stats.paired import mean_difference
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents, TextGroup, mean_context
from alphaprof.totals.files import read_totals
from alphaprof.totals.pool import DocumentTotals, pools

Outcome = Literal["within", "outside", "too_noisy"]
WORDS = {"within": "WITHIN", "outside": "OUTSIDE", "too_noisy": "TOO NOISY TO TELL"}
# The variance that one source of error gives the logarithm of a speedup, and the degrees of freedom with which that was
# estimated (infinite if it is known).
ErrorPart = tuple[float, float]
CONFIDENCE = 0.95
TAIL = 0.0125  # with which an end of a row's interval misses; see `clock_error`
SHORTEST_CONTEXT = 8  # tokens; `costs.context` takes no fewer


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

    @property
    def whole(self) -> float:
        """All of it."""
        return self.draft + self.verify + self.other


@dataclass(frozen=True)
class Cell(OfText):
    """One draft on one kind of text at one gamma. Speedups are of decoding, prefill excluded.

    `timing_error`: relative standard error that the step times give the predicted speedup. `error`: predicted / measured
    - 1, with the interval that documents, repeats and step times give it, at 97.5%. `decode_ms`: a plain decode step.
    `same_text`, `same_rounds`: documents whose text is the profiled one, and whose rounds are those of the replay; None
    if both are a matter of chance. `predicted_tokens`: tokens per round with the interval that documents give it, at 95
    %. A lossy rule writes its own text, so nothing is predicted of it. `excess_regret`: mean log p(top) - log p(token)
    of its text, p the target's plain softmax, less that of the target's own text, in nats per token, paired by document,
    at 95 %.
    """

    draft: str
    rule: str
    gamma: int
    documents: int
    tokens_per_round: PredictedMeasured  # tokens emitted per round, over all rounds
    predicted_tokens: Interval | None
    predicted_speedup: float | None  # from the rounds of the replay and the step times of the run
    timing_error: float | None
    wall_speedup: float | None  # measured
    error: Interval | None
    same_text: int | None
    same_rounds: int | None
    decode_ms: PredictedMeasured
    predicted_round_ms: RoundTime | None  # None: no step times
    measured_round_ms: RoundTime | None  # None: no rounds
    excess_regret: Interval | None  # None: the rule keeps the target's distribution

    @property
    def lossy(self) -> bool:
        """Whether its rule writes another text than the target."""
        return parse_rule(self.rule).rule.lossy


@dataclass(frozen=True)
class ClockError:
    """Absolute error of predicted speedups: the median over rows with its 95% interval, and the largest."""

    median: float  # over rows
    low: float
    high: float
    worst: float  # the largest of all rows
    outcome: Outcome


@dataclass(frozen=True)
class Validation:
    """The whole comparison. `plain_same_text`: of all `documents`, those whose plain decoding is the profiled text.

    `exact`: all models run in float32, so every text and every round should be equal. `contexts`: tokens in the cache while
    steps were timed, between which times are interpolated; `mean_context`: of the documents. `outcome`: whether the median
    absolute error of the speedup is within the tolerance, outside of it, or too noisy to tell; None if no speedup was
    predicted.
    """

    format: ClassVar[str] = "alphaprof-validate"
    version: ClassVar[str] = "2.0"

    run: str | None
    target: str
    device: str
    dtype: str
    exact: bool
    engine: str  # what decoded, and timed its steps
    concurrency: int  # sequences decoded at a time
    repeats: int  # how often every text was decoded in every way
    documents: int
    short: int  # documents left out: fewer than two tokens
    foreign: int  # documents left out: the target did not write their text
    plain_same_text: int
    contexts: tuple[int, ...]
    mean_context: float
    tolerance: float  # the largest median error that passes
    outcome: Outcome | None
    wall: ClockError | None  # None: no speedup was predicted
    cells: tuple[Cell, ...]  # one for each draft, domain, kind of text and gamma

    @property
    def in_engine(self) -> bool:
        """Whether the user's engine decoded."""
        return self.engine.startswith("vLLM")

    def blocks(self) -> Iterator[Block]:
        """Yield how far off the prediction is, what was predicted and measured, and where the time of a round went."""
        yield from _how_far_off(self)
        yield ""
        yield f"{self.target} in {self.dtype} on {self.device}, batch {self.concurrency}, {self.engine}"
        facts = f"{fmt.many(self.documents, 'document')}, {fmt.many(self.repeats, 'repeat')}"
        facts += f"; left out: {fmt.count(self.short)} with fewer than two tokens" if self.short else ""
        yield facts + (
            f"; left out: {fmt.count(self.foreign)} with text that the target did not write" if self.foreign else ""
        )
        if self.contexts:
            timed = f"steps were timed at {' and '.join(map(fmt.count, self.contexts))} tokens of context"
            yield f"{timed}; these documents have {self.mean_context:.0f} on average"
        if self.run is not None:
            yield f"the prediction comes from the run {self.run}"
        yield ""
        exact, lossy = ([cell for cell in self.cells if cell.lossy is changes] for changes in (False, True))
        yield _cells_table("predicted | measured", exact, SPEEDUPS)
        if lossy:
            yield _cells_table("lossy rules, measured: gains and losses of their text", lossy, LOSSY)
        if not self.in_engine:
            yield _cells_table("where the time goes, in ms: predicted | measured", self.cells, ROUNDS)
        yield from _what_was_equal(self)
        loop = "in the engine" if self.in_engine else "in alphaprof's own loop (transformers)"
        yield Small(f"speedup: decode time without / with a draft, no prefill, {loop}.")
        yield Small("error: predicted / measured - 1 [97.5% interval over documents, repeats and step times].")
        if not self.in_engine:
            yield Small("other: removing rejected tokens from the caches (predicted); everything between steps (measured).")
        if lossy:
            regret = "excess regret: nats per token lost compared to the target's decoding; check on your own task"
            yield from map(Small, (regret, "whether that is good enough."))


def require_within(validation: Validation, undecided_fails: bool) -> None:
    """Raise `OutsideTolerance`, `StepsNotTimed` if nothing was predicted, or `CheckUndecided` if that is asked for."""
    if validation.outcome is None:
        raise StepsNotTimed("nothing to judge: no steps were timed, or nothing was decoded", "fix the cause named above")
    if validation.outcome == "outside":
        raise OutsideTolerance(
            f"the predicted speedup is outside the tolerance: {verdict_reason(validation)}", next_step(validation)
        )
    if validation.outcome == "too_noisy" and undecided_fails:
        raise CheckUndecided(f"too noisy to tell: {verdict_reason(validation)}", next_step(validation))


def verdict_reason(validation: Validation) -> str:
    """Return why the outcome is what it is, in words."""
    clock = validation.wall
    if clock is None:
        return ""
    high = f"{100 * clock.high:.1f}%" if math.isfinite(clock.high) else "inf"
    median = f"median error {100 * clock.median:.1f}% [{100 * clock.low:.1f}%, {high}] (95% interval)"
    return f"{median}; tolerance {100 * validation.tolerance:.4g}%"


def _how_far_off(validation: Validation) -> Iterator[str]:
    """Yield the outcome, the row that is farthest off, and what to do next."""
    if validation.outcome is None:
        yield Verdict("NOT PREDICTED", ": no steps were timed, so there is no speedup to compare with the clock")
        return
    yield Verdict(WORDS[validation.outcome], f": {verdict_reason(validation)}")
    known = [(abs(cell.error.value), cell) for cell in validation.cells if cell.error is not None]
    if known:
        _, worst = max(known, key=lambda pair: pair[0])
        where = f"{fmt.short(worst.draft)} in {text_name(worst, validation.cells)} at gamma {worst.gamma}"
        speeds = f"{fmt.number(worst.predicted_speedup, unit='x')}, measured {fmt.number(worst.wall_speedup, unit='x')}"
        yield f"largest error: {where}, predicted {speeds}, {_off_by(worst.error)}"
    yield f"next: {next_step(validation)}"


def next_step(validation: Validation) -> str:
    """Return what to do about an outcome."""
    if validation.outcome == "within":
        here = "this engine on this machine" if validation.in_engine else "alphaprof's loop here, not for an engine"
        return f"run alphaprof profile and report: their speedups hold for {here}"
    if validation.outcome == "outside":
        return "see the table of round times, or repeat on an idle machine with more --repeats"
    if validation.repeats < 2:
        return "one repeat does not show variation: use --repeats 3"
    if 2 * sum(cell.documents < 2 for cell in validation.cells) >= len(validation.cells):
        return "one document per domain does not show variation: use --documents 4"
    return "use an idle machine, more --documents and --repeats, or a higher costs.budget"


def _what_was_equal(validation: Validation) -> Iterator[str]:
    """Yield what was equal, text by text: in float32 everything should be."""
    exact = [cell for cell in validation.cells if not cell.lossy]
    fixed = [(cell.documents, cell.same_text, cell.same_rounds or 0) for cell in exact if cell.same_text is not None]
    texts, same, rounds = (sum(counts) for counts in zip(*fixed, strict=True)) if fixed else (0, 0, 0)
    yield (
        f"plain texts equal to the profiled ones: {validation.plain_same_text} of {validation.documents}; "
        f"with a draft: {same} of {texts}; rounds equal to the replay: {rounds} of {texts}"
    )
    if fixed and not validation.exact:
        yield f"in {validation.dtype}, near-ties can go either way; tokens per round refer to the decoded text"
    elif fixed and (same < texts or rounds < texts):
        yield "in float32 all should be equal: check for near-ties, or a draft that proposes less than expected"
    if by_chance := [cell for cell in exact if cell.same_text is None]:
        pairs = [(cell.predicted_tokens, cell.tokens_per_round.measured) for cell in by_chance]
        within = sum(1 for expected, found in pairs if expected and found and expected.low <= found <= expected.high)
        yield f"sampled drafts change texts: tokens per round in the predicted 95% interval: {within} of {len(pairs)} rows"


CellColumns = Mapping[str, Callable[[Cell], str]]  # how each heading writes a cell
SPEEDUPS: CellColumns = {
    "rule": lambda cell: cell.rule,
    "gamma": lambda cell: str(cell.gamma),
    "tokens/round": lambda cell: _both(cell.tokens_per_round),
    "speedup": lambda cell: fmt.number(cell.predicted_speedup, unit="x"),
    "wall": lambda cell: fmt.number(cell.wall_speedup, unit="x"),
    "error": lambda cell: _off_by(cell.error),
}
LOSSY: CellColumns = {
    "rule": lambda cell: cell.rule,
    "gamma": lambda cell: str(cell.gamma),
    "tokens/round": lambda cell: fmt.number(cell.tokens_per_round.measured),
    "wall": lambda cell: fmt.number(cell.wall_speedup, unit="x"),
    "excess regret": lambda cell: fmt.difference(cell.excess_regret, 3),
    "same text": lambda cell: fmt.NOTHING if cell.same_text is None else f"{cell.same_text} of {cell.documents}",
}
ROUNDS: CellColumns = {
    "gamma": lambda cell: str(cell.gamma),
    "plain step": lambda cell: _both(cell.decode_ms),
    "drafting": lambda cell: _part_of_round(cell, lambda time: time.draft),
    "verification": lambda cell: _part_of_round(cell, lambda time: time.verify),
    "other": lambda cell: _part_of_round(cell, lambda time: time.other),
    "round": lambda cell: _part_of_round(cell, lambda time: time.whole),
}


def _cells_table(title: str, cells: Sequence[Cell], columns: CellColumns) -> Table:
    rows = ((cell.draft, text_name(cell, cells), *(write(cell) for write in columns.values())) for cell in cells)
    return table_of_rows(title, ("draft", "domain", *columns), rows, left=("domain", "rule"), wrapped=("domain",))


def _both(both: PredictedMeasured) -> str:
    return f"{fmt.number(both.predicted)} | {fmt.number(both.measured)}"


def _part_of_round(cell: Cell, part: Callable[[RoundTime], float]) -> str:
    times = (cell.predicted_round_ms, cell.measured_round_ms)
    return _both(PredictedMeasured(*(None if time is None else part(time) for time in times)))


def _off_by(error: Interval | None) -> fmt.Number:
    if error is None:
        return fmt.NOTHING
    high = fmt.signed_percent(error.high) if math.isfinite(error.high) else "inf"
    return fmt.Number(fmt.signed_percent(error.value), f"[{fmt.signed_percent(error.low)}, {high}]", error)


@dataclass(frozen=True)
class Decodings:
    """Documents decoded in one way: with a draft by a rule at one gamma, or plainly (`draft` and `rule` None, `gamma` 0).

    `rows` [documents]: their places among all that were decoded, ascending. Seconds [repeats, documents]: `wall_s` of
    everything after the first token, `draft_s` and `verify_s` the parts of it that drafting and verification took (NaN: not
    known), `plain_s` of plain decoding in turn with it (None: that of `DecodingTimes.plain` counts). Counts of the first
    repeat: `tokens` emitted by rounds, `rounds` [documents]; `drafted`, `accepted` [documents, gamma] rounds whose first
    d = 1..gamma tokens were drafted, and accepted. `same_text` [documents]: the text is the profiled one. `regret`
    [documents], of lossy rules and of plain decoding beside them: sum over the text of log p(top) - log p(token), p the
    target's plain softmax, in nats.
    """

    draft: str | None
    rule: str | None
    gamma: int
    rows: Array
    wall_s: Array
    draft_s: Array
    verify_s: Array
    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    same_text: Array
    regret: Array | None = None
    plain_s: Array | None = None

    def of(self, rows: Array) -> Decodings:
        """Return the decodings of some of its documents, given by their places among all."""
        places = np.searchsorted(self.rows, rows)
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        chosen = {name: value[:, places] if name.endswith("_s") else value[places] for name, value in arrays.items()}
        return Decodings(**vars(self) | chosen)


@dataclass(frozen=True)
class DecodingTimes:
    """Real decoding of some documents of a run. `documents` [documents]: their numbers, ascending; `short`: documents of
    fewer than two tokens, which have no decode time, and `foreign`: documents whose text the target did not write here;
    both are left out.
    """

    documents: Array
    plain: Decodings
    drafted: tuple[Decodings, ...]
    short: int
    foreign: int


def by_depth(counts: Array, gamma: int) -> Array:
    """Return how many of some rounds [rounds] reached a depth of d = 1..gamma, [gamma]."""
    return np.asarray((np.arange(1, gamma + 1) <= counts[:, None]).sum(0))


def contexts_of(prompt_tokens: Array, continuation_tokens: Array) -> list[int]:
    """Return the smallest and the largest mean context of some documents [documents], in tokens: where steps are to be
    timed.

    A document's mean context is its prompt and half of its continuation. One context if both are the same.
    """
    contexts = prompt_tokens + continuation_tokens / 2
    return sorted({max(SHORTEST_CONTEXT, round(float(context))) for context in (contexts.min(), contexts.max())})


@dataclass(frozen=True)
class TimedPair:
    """The same documents decoded plainly and with a draft: seconds [repeats, documents], tokens [documents]."""

    plain: Array
    drafted: Array
    plain_tokens: Array
    drafted_tokens: Array

    def speedup(self) -> float | None:
        """Plain decode time per token / that with the draft; None if nothing was decoded.

        The median over repeats of each document, summed over documents. If the texts are equal, as in float32, this is
        the ratio of the times.
        """
        sums = (self.plain_tokens.sum(), self.drafted_tokens.sum(), *self.plain.sum(1), *self.drafted.sum(1))
        if not all(sums):  # nothing was decoded, or by a clock whose ticks are longer than that
            return None
        ratio = np.median(self.plain, axis=0).sum() / np.median(self.drafted, axis=0).sum()
        return float(ratio * self.drafted_tokens.sum() / self.plain_tokens.sum())

    def error(self, predicted: float, cost_per_token: Array, timing: ErrorPart) -> Interval | None:
        """Return how far a predicted speedup is off, None if nothing was decoded.

        `cost_per_token` [documents]: the predicted time per token with the draft, in units of a plain one; `timing`: the
        error of the step times in the prediction. The variances of documents, repeats and step times add up, with Welch and
        Satterthwaite's degrees of freedom. That of documents holds most of the clock's noise too, and is added to that of
        repeats nevertheless: repeats alone show what disturbs all documents at once.
        """
        measured = self.speedup()
        if measured is None:
            return None
        parts = [self._by_documents(cost_per_token), self._by_repeats(), timing]
        variance = sum(part for part, _ in parts)
        moments = sum(part**2 / freedom for part, freedom in parts if part > 0 and freedom > 0)
        freedom = 0.0 if math.isinf(variance) else variance**2 / moments if moments > 0 else math.inf
        low, high = log_interval(predicted / measured, math.sqrt(variance), freedom, TAIL)
        return Interval(predicted / measured - 1, low - 1, high - 1)

    def _by_documents(self, cost_per_token: Array) -> ErrorPart:
        """Return the part of documents: how much slower than predicted each was with the draft, less the same without."""
        # Their rounds stand on both sides, so these residuals are of the time that a round takes and of the clock.
        kept = (self.plain_tokens > 0) & (self.drafted_tokens > 0)
        if kept.sum() < 2:
            return math.inf, 0.0
        base, spent = self.plain_tokens[kept], (self.drafted_tokens * cost_per_token)[kept]
        plain, drafted = (np.median(seconds[:, kept], axis=0) for seconds in (self.plain, self.drafted))
        slower = influences(drafted, spent) * (spent.sum() / drafted.sum())
        slower -= influences(plain, base) * (base.sum() / plain.sum())
        return float((slower**2).sum()), small_sample(base)[1]

    def _by_repeats(self) -> ErrorPart:
        """Return what repeats contribute: how the speedup of all documents differs between them."""
        repeats = len(self.plain)
        if repeats < 2:
            return math.inf, 0.0
        each = np.log(self.plain.sum(1) / self.drafted.sum(1))
        median = math.pi / 2 if repeats > 2 else 1.0  # its variance is up to this multiple of that of the mean
        return float(each.var(ddof=1)) * median / repeats, repeats - 1


def clock_error(errors: Sequence[Interval], tolerance: float) -> ClockError | None:
    """Return what the rows say together; None without rows.

    The interval of the median goes from the median of the rows' lower ends to that of their upper ends. Rows share step
    times and plain decodings, so nothing is gained from their number. If no row is off by more than the tolerance, one
    lies outside with a probability of at most 2 TAIL, and half of them at once with at most 4 TAIL = 5%, however they
    depend on each other (Markov's inequality; Rueger 1978: twice the median of p-values is a p-value). If every row is
    off by more than the tolerance, `within` is as rare.
    """
    if not errors:
        return None
    values = np.array([(abs(each.value), max(0.0, each.low, -each.high), max(-each.low, each.high)) for each in errors])
    median, low, high = (float(value) for value in np.median(values, axis=0))
    outcome: Outcome = "outside" if low > tolerance else "within" if high <= tolerance else "too_noisy"
    return ClockError(median, low, high, float(values[:, 0].max()), outcome)


def build_validation(run: Run, measured: DecodingTimes, tolerance: float, kept: bool, concurrency: int = 1) -> Validation:
    """Compare a run with decodings of its documents, `concurrency` at a time. `kept`: whether the run stays, and is worth
    naming.
    """
    manifest, documents = run.manifest, run.documents()
    numbers = pa.array(measured.documents, documents["document"].type)
    documents = documents.filter(pc.is_in(documents["document"], value_set=numbers))
    context = mean_context(documents) or 0.0
    costs = open_costs(run, manifest.profile.costs, context)
    times = costs.times(concurrency) if costs else {}
    cells = [
        _compared_cell(group, pool, way.of(group.rows), measured.plain.of(group.rows), times.get(draft))
        for draft in manifest.drafts
        for way, group, pool in _ways_by_text(run, draft, documents, measured)
    ]
    wall = clock_error([cell.error for cell in cells if cell.error], tolerance)
    return Validation(
        run=str(run.path) if kept else None,
        target=manifest.target.reference,
        device=manifest.target.device,
        dtype=manifest.target.precision,
        exact=all(facts.is_exact for facts in (manifest.target, *manifest.drafts.values())),
        repeats=len(measured.plain.wall_s),
        documents=len(measured.documents),
        short=measured.short,
        foreign=measured.foreign,
        plain_same_text=int(measured.plain.same_text.sum()),
        concurrency=concurrency,
        engine=timed_with(manifest),
        contexts=costs.table.contexts(concurrency) if costs else (),
        mean_context=context,
        tolerance=tolerance,
        outcome=wall.outcome if wall else None,
        wall=wall,
        cells=tuple(cells),
    )


def _ways_by_text(
    run: Run, draft: str, table: pa.Table, measured: DecodingTimes
) -> Iterator[tuple[Decodings, TextGroup, DocumentTotals | None]]:
    """Yield the decodings with a draft by kind of text, with the totals of the rounds; None for a lossy rule, whose text is
    not the one in the log.
    """
    ways = [way for way in measured.drafted if way.draft == draft]
    exact = list(dict.fromkeys(str(way.rule) for way in ways if not parse_rule(way.rule).rule.lossy))
    totals = read_totals(run, draft, TotalsRequest(exact, run.gammas)) if exact else None
    documents = Documents.of(table)
    known = {rule: [pool for _, pool in pools(totals, documents, rule, run.gammas)] for rule in exact}
    for rule in dict.fromkeys(str(way.rule) for way in ways):
        for index, group in enumerate(documents.groups):
            if group.policy in parse_rule(rule).rule.policies:
                pool = known[rule][index] if rule in known else None
                yield from ((way, group, pool) for way in ways if way.rule == rule and group.rows[0] in way.rows)


def _compared_cell(
    group: TextGroup, pool: DocumentTotals | None, way: Decodings, plain: Decodings, times: StepTimes | None
) -> Cell:
    counts = pool.counts(way.gamma) if pool is not None else None
    times = times if times is not None and times.covers(way.gamma) else None
    free = faster = predicted_round = measured_round = same_rounds = excess = None
    if counts is not None:
        free = speedup([counts], [1.0], free_draft(way.gamma))
    if counts is not None and times is not None:
        times = times.mixed([counts])
        faster = speedup([counts], [1.0], times)
        *parts, other = time_by_step(counts, times).tolist()
        unit, verified = times.decode.ms / float(counts.rounds.sum()), counts.drafted.shape[1] + 1
        predicted_round = RoundTime(sum(parts[verified:]) * unit, sum(parts[:verified]) * unit, other * unit)

    plain_s = plain.wall_s if way.plain_s is None else way.plain_s
    wall, error = TimedPair(plain_s, way.wall_s, plain.tokens, way.tokens), None
    if faster is not None and counts is not None and times is not None:
        timing = (faster.timing_error**2, faster.timing_freedom)
        error = wall.error(faster.value, time_spent(counts, times) / np.maximum(counts.tokens, 1), timing)
    rounds, steps = float(way.rounds.sum()), float(plain.tokens.sum())
    emitted = float(way.tokens.sum()) / rounds if rounds else None
    if rounds and not np.isnan(way.draft_s).any():
        seconds = (way.draft_s, way.verify_s, way.wall_s - way.draft_s - way.verify_s)
        measured_round = RoundTime(*(_typical(each) / rounds for each in seconds))
    by_chance = counts.control.any() if counts is not None else group.policy != GREEDY
    if pool is not None and not by_chance:  # as many rounds, which drafted and accepted as many tokens at every depth
        same = way.rounds == pool[f"rounds_{way.gamma}"]
        for name, found in (("drafted", way.drafted), ("accepted", way.accepted)):
            same &= (found == pool[f"{name}_depths_{way.gamma}"]).all(1)
        same_rounds = int(same.sum())
    if way.regret is not None and plain.regret is not None:  # greedy text has none by definition
        own = np.zeros(len(plain.regret)) if group.policy == GREEDY else plain.regret
        texts = [by_cluster(group.cluster, regret, side.tokens + 1.0) for regret, side in ((own, plain), (way.regret, way))]
        (one, length), (two, other_length) = texts
        excess = mean_difference((one, length), (two, other_length), CONFIDENCE)
    return Cell(
        draft=str(way.draft),
        domain=group.domain,
        continuation=group.continuation,
        sampling=group.sampling,
        rule=str(way.rule),
        gamma=way.gamma,
        documents=len(group.rows),
        tokens_per_round=PredictedMeasured(free.value if free else None, emitted),
        predicted_tokens=tokens_interval(free, way.gamma, CONFIDENCE),
        predicted_speedup=faster.value if faster else None,
        timing_error=faster.timing_error if faster else None,
        wall_speedup=wall.speedup(),
        error=error,
        same_text=None if by_chance else int(way.same_text.sum()),
        same_rounds=same_rounds,
        decode_ms=PredictedMeasured(times.decode.ms if times else None, _typical(plain_s) / steps if steps else None),
        predicted_round_ms=predicted_round,
        measured_round_ms=measured_round,
        excess_regret=excess,
    )


def _typical(seconds: Array) -> float:
    """Ms that documents take [repeats, documents]: the median over repeats of each, summed."""
    return 1e3 * float(np.median(seconds, axis=0).sum())
