"""`alphaprof curve`: what heads of several sizes reach on test texts, and what more data would bring.

From top to bottom: the answer and its blocks; the heads of a list, read from their runs; what they reach; the forecast with
its backtest. Training is `alphaprof train`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from alphaprof.config.load import HeadBeside, HeadEntry, HeadsBeside, HeadsOptions, changed_question
from alphaprof.costs.cost_model import open_costs
from alphaprof.costs.speedup import LARGEST, Mix, StepTimes, free_draft, spent_and_base
from alphaprof.errors import NotComparable, ProfileInvalid
from alphaprof.log.manifest import DecisionAsked
from alphaprof.log.run import Run, RunDraft, side_of
from alphaprof.log.split import STOP, TEST, unit_of
from alphaprof.log.training import TrainingRecord, learnt, read_training, split_words
from alphaprof.render.blocks import Block, Figure, Row, Small, table_by_columns
from alphaprof.report import format as fmt
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct, influences, present, quantile
from alphaprof.stats.learning import (
    FACTORS,
    FEWEST_SIZES,
    LearningCurve,
    Measured,
    Scenarios,
    as_tokens,
    backtest,
    first_size,
    fits,
    measured_tokens,
    scenarios,
    tokens_floor,
)
from alphaprof.stats.paired import weighted_inverse_difference
from alphaprof.totals.documents import mean_context
from alphaprof.totals.pool import DocumentTotals, decoded_totals
from alphaprof.totals.replay import RoundCounts
from alphaprof.version import __version__

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as PlotlyFigure

Reached = Literal["every", "some", "none"]
REACHED = {"every": "in every scenario", "some": "in some scenarios", "none": "in no scenario"}
DEPTHS = 3  # whose acceptance tables show
HEIGHT = 420  # pixels of the figure
CAPTION = (
    "Tokens per round by training units",
    "Points are measured sizes, with intervals over test units. The band is the forecast from the largest size: its lower "
    "edge saturates, its upper edge continues as before.",
)
SAME = ("domain", "prompt_hash", "continuation", "continuation_tokens")  # of documents that heads are compared on
ONE_SPLIT = "use heads with the same target, run and train/test split"
ORDER = ("prompt_hash", "domain", "continuation", "document")
TOP_TOKEN = ("strict", "one_hot")  # rules that keep a draft only if it is the token that the target drew
NOTABLE = 0.02  # share of tokens outside the vocabulary, and of speed that another gamma adds, that are worth a word
STALLED = "the last gain is smaller than the spread between heads of one size"
Speedups = Callable[[Interval], Interval]  # of tokens per round
BySize = Sequence[tuple[int, Sequence[Measured]]]


@dataclass(frozen=True)
class CurveDomain:
    """One domain on test texts."""

    domain: str
    alpha: float  # share of positions whose first draft is accepted
    tokens_per_round: Interval | None  # over all rounds; None: no tokens
    speedup: Interval | None  # None: no step times
    difference: Interval | None  # tokens per round less those of the size before (beside the curve: of the largest), paired


@dataclass(frozen=True)
class CurvePoint:
    """The heads of one size together, or a head beside the curve. `difference`: tokens per round less those of the size
    before, paired by test unit; of a head beside the curve: less those of the largest size.
    """

    label: str  # "1/8" of the training units, their number if no fraction is known, or published, tuned
    units: int | None  # independent units that it was trained on; None: not known
    tokens: int | None  # tokens of continuations that it was trained on; None: not known
    heads: int  # that were trained on as much, in other orders
    alpha: float  # share of positions whose first draft is accepted
    accepted: tuple[float, ...]  # share of rounds that accepted at least 1, 2, ... drafts, at the largest gamma
    tokens_per_round: Interval | None  # at `gamma`, mean over heads; the interval is over test units
    spread: float | None  # standard deviation of tokens per round between these heads; None: a single one
    speedup: Interval | None  # predicted at `concurrency`; None: no step times
    difference: Interval | None  # None: the smallest size
    domains: tuple[CurveDomain, ...]  # by share of the tokens, the largest first


@dataclass(frozen=True)
class CurveBacktest:
    """The largest size as all smaller ones predicted it, in tokens per round."""

    seen: tuple[str, ...]  # labels of the sizes that it was predicted from
    predicted: Interval  # between both scenarios
    measured: float  # tokens per round of the largest size
    error: float  # measured / predicted - 1
    inside: bool  # the band held what was measured


@dataclass(frozen=True)
class ForecastRow:
    """What heads would reach with `factor` times the training units. In intervals `low` is the scenario that saturates,
    `high` the one that goes on as before, `value` lies between.
    """

    factor: float  # 1: as measured, with what the whole curve says about it
    units: int  # independent units to train on
    tokens_per_round: Interval  # at `gamma`
    alpha: Interval  # share of positions whose first draft is right
    speedup: Interval | None  # at the cost of a round that was predicted for the largest size; None: no step times
    reached: Reached | None  # scenarios in which min_speedup is reached; None: no step times


@dataclass(frozen=True)
class CurveCost:
    """What heads with `factor` times the training units would need, from what the largest size needed."""

    factor: float  # times the training units of the largest size
    prompts: int  # further independent units to log, those of the stop and test parts included
    tokens: int  # further tokens to generate, those of the stop and test parts included
    seconds: float  # of the device for one head: features, training and tests, on as many passes over the texts
    device: str  # that the largest size was trained on


@dataclass(frozen=True)
class CurveReport:
    """What heads of several sizes reach, and what more data would bring. `forecast` is empty if there is none, which
    `reason` explains; the measured points hold anyway.
    """

    format: ClassVar[str] = "alphaprof-curve"
    version: ClassVar[str] = "1.0"

    alphaprof: str
    run: str  # that tested the heads
    confidence: float
    min_speedup: float  # that serving a head is worth
    concurrency: int  # sequences decoded at a time
    gamma: int
    gamma_from: Literal["decision", "stop", "test"]  # what chose gamma: the profile, the stop part, or the test part itself
    times: str  # what step times are, or why there are none
    test_units: int  # independent units of the intervals
    test_tokens: int  # that rounds emit on them
    floor: (
        float | None
    )  # share of the traffic's tokens that no head of this vocabulary can propose; None: vocabularies differ
    outcome: str  # the answer in a few words
    verdict: str  # which amount of data reaches min_speedup, in words
    instead: tuple[str, ...]  # what else would help, by what was measured
    backtest: CurveBacktest | None  # None: too few sizes
    reason: str  # why there is no forecast; empty if there is one
    points: tuple[CurvePoint, ...]  # the smallest size first
    beside: tuple[CurvePoint, ...]  # the published head, and that head trained further
    forecast: tuple[ForecastRow, ...]  # at the largest measured size, 2 and 4 times as much
    costs: tuple[CurveCost, ...]  # empty if no record says what training took
    notes: tuple[str, ...]

    def blocks(self) -> Iterator[Block]:
        """Yield the answer in five lines, the figure, then the measured curve, the forecast and its costs."""
        yield from answer_lines(self)
        yield ""
        yield f"alphaprof {self.alphaprof}   run {self.run}"
        yield Figure("curve", *CAPTION, lambda: curve_figure(self))
        every = (*self.points, *self.beside)
        tested = f"{fmt.count(self.test_units)} independent test units, {fmt.count(self.test_tokens)} tokens"
        title = f"measured on {tested}, at gamma {self.gamma}"
        yield table_by_columns(title, list(map(_measured_row, every)), named="size")
        if any(len(point.domains) > 1 for point in every):
            places = range(len(self.points[-1].domains))
            rows = [_points_of_domain(point, place) for place in places for point in every]
            yield table_by_columns("by domain", rows)
        if self.forecast:
            title = "forecast, from saturating to continuing as before"
            yield table_by_columns(title, [_forecast_row(each, self.min_speedup) for each in self.forecast], named="data")
        if self.costs:
            title = "additional cost of that data, scaled from the largest size"
            yield table_by_columns(title, list(map(_cost_row, self.costs)), named="data")
        yield from (f"note: {note}" for note in self.notes)
        yield from map(Small, _footnotes(self))


def answer_lines(report: CurveReport) -> list[str]:
    """Return the five lines that decide: the outcome, the backtest, the forecast, what was measured, and what to do next."""
    following = f"next: {'; '.join([report.verdict, *report.instead[:1]])}"
    return [report.outcome, _backtest_line(report), _forecast_line(report), _measured_line(report), following]


def _backtest_line(report: CurveReport) -> str:
    backtest = report.backtest
    if backtest is None:
        return f"backtest: none, {report.reason}"
    predicted = backtest.predicted
    return (
        f"backtest: sizes {backtest.seen[0]} to {backtest.seen[-1]} predicted {fmt.number(predicted.value)} "
        f"[{fmt.number(predicted.low)}, {fmt.number(predicted.high)}] tokens per round at full size; measured "
        f"{fmt.number(backtest.measured)} ({fmt.signed_percent(backtest.error)}); "
        f"inside its band: {'yes' if backtest.inside else 'no'}"
    )


def _forecast_line(report: CurveReport) -> str:
    if not report.forecast:
        return f"no forecast: {report.reason}"
    parts = []
    for each in report.forecast[1:]:
        band = each.tokens_per_round
        speed = f" ({_band_text(each.speedup, 'x')})" if each.speedup is not None else ""
        parts.append(f"{fmt.number(band.low)} to {fmt.number(band.high)}{speed} with {each.factor:g} times the data")
    return f"forecast: tokens per round {', '.join(parts)}"


def _measured_line(report: CurveReport) -> str:
    point = report.points[-1]
    speed = f", {fmt.interval(point.speedup, 'x')} predicted" if point.speedup else ""
    what = f"{fmt.count(point.units)} units" if point.units else "the largest size"
    more = "".join(
        f"; {each.label} head {fmt.number(each.tokens_per_round.value)}" for each in report.beside if each.tokens_per_round
    )
    return (
        f"measured: {fmt.interval(point.tokens_per_round)} tokens per round at gamma {report.gamma} with {what}{speed}{more}"
    )


def _measured_row(point: CurvePoint) -> Row:
    return point.label, {
        "units": fmt.NOTHING if point.units is None else fmt.count(point.units),
        "tokens": fmt.NOTHING if point.tokens is None else fmt.count(point.tokens),
        "heads": str(point.heads),
        "accept@1": fmt.share(point.alpha),
        "deeper": " ".join(fmt.share(share, 2) for share in point.accepted[1:DEPTHS]) or fmt.NOTHING,
        "tokens/round": fmt.interval(point.tokens_per_round),
        "spread": fmt.NOTHING if point.spread is None else f"{point.spread:.3f}",
        "gain": fmt.difference(point.difference, 2),
        "speedup": fmt.interval(point.speedup, "x"),
    }


def _points_of_domain(point: CurvePoint, place: int) -> Row:
    each = point.domains[place]
    return fmt.short(each.domain), {
        "size": point.label,
        "accept@1": fmt.share(each.alpha),
        "tokens/round": fmt.interval(each.tokens_per_round),
        "gain": fmt.difference(each.difference, 2),
        "speedup": fmt.interval(each.speedup, "x"),
    }


def _forecast_row(row: ForecastRow, least: float) -> Row:
    return f"x {row.factor:g}", {
        "units": fmt.count(row.units),
        "accept@1": _band_text(row.alpha),
        "tokens/round": _band_text(row.tokens_per_round),
        "speedup": _band_text(row.speedup, "x"),
        f"reaches {least:g}x": REACHED[row.reached] if row.reached else fmt.NOTHING,
    }


def _cost_row(cost: CurveCost) -> Row:
    return f"x {cost.factor:g}", {
        "prompts to log": fmt.count(cost.prompts),
        "tokens to generate": fmt.count(cost.tokens),
        "device time per head": fmt.duration(cost.seconds),
        "device": cost.device,
    }


def _band_text(value: Interval | None, unit: str = "") -> str:
    return fmt.NOTHING if value is None else f"{fmt.number(value.low)} to {fmt.number(value.high, 2, unit)}"


def _footnotes(report: CurveReport) -> Iterator[str]:
    """Yield what columns mean, and what is not promised."""
    yield (
        f"Brackets: {fmt.level(report.confidence)} intervals over test units. accept@1: share of positions whose first "
        "draft is accepted. deeper: share of rounds that accepted at least 2 and 3 drafts, at the largest gamma. "
        "spread: between heads of one size. gain: over the previous size, paired by unit."
    )
    if report.forecast:
        yield (
            "Forecast: all curves 1 - alpha = e + A N^-b that fit the measurements; tokens per round are converted to "
            "alpha for independent positions. Curves that stop or steepen are not covered (docs/curve.md)."
        )


def curve_figure(report: CurveReport) -> PlotlyFigure:
    """Draw tokens per round over training units, on a logarithmic axis: sizes, heads beside them, the band ahead."""
    from plotly.graph_objects import Figure as PlotlyFigure

    from alphaprof.render.html.figures import COLOURS, TEMPLATE, band, errors, hover_text, label, points

    own, forecast = COLOURS[0], report.forecast
    figure = PlotlyFigure(
        layout={"template": TEMPLATE, "height": HEIGHT, "showlegend": True, "legend": {"orientation": "h", "y": 1.08}}
    )
    ahead = [float(each.units) for each in forecast]
    figure.add_traces(band(ahead, [each.tokens_per_round for each in forecast], own, name="forecast"))
    for side, words in (("low", "saturates"), ("high", "goes on as before")) if forecast else ():
        y = [getattr(each.tokens_per_round, side) for each in forecast]
        hover = [hover_text(words, f"{each.units:,} units: {value:.2f}") for each, value in zip(forecast, y, strict=True)]
        line = {"color": own, "dash": "dot", "width": 1.5}
        figure.add_trace(points(ahead, y, hover, "lines", name=words, line=line, showlegend=False))
    known = [
        (point, point.tokens_per_round) for point in report.points if point.tokens_per_round is not None and point.units
    ]
    x = [float(point.units or 0) for point, _ in known]
    hover = [hover_text(label(point.label), label(fmt.interval(tokens))) for point, tokens in known]
    bars = errors([tokens for _, tokens in known], own)
    y = [tokens.value for _, tokens in known]
    figure.add_trace(points(x, y, hover, name="measured", line={"color": own}, error_y=bars))
    ends = [min(x), max([*x, *ahead])]
    for colour, point in zip(COLOURS[1:], report.beside, strict=False):
        if (level := point.tokens_per_round) is not None:
            hover = [hover_text(label(point.label), label(fmt.interval(level)))] * 2
            line = {"color": colour, "dash": "dash"}
            figure.add_trace(points(ends, [level.value] * 2, hover, "lines", name=label(point.label), line=line))
    ticks = [*x, *ahead[1:]]
    figure.update_xaxes(
        title_text="training units", type="log", tickvals=ticks, ticktext=[fmt.count(round(at)) for at in ticks]
    )
    return figure.update_yaxes(title_text=f"tokens per round at γ = {report.gamma}")


@dataclass(frozen=True, eq=False)
class CurveHead:
    """A head with its totals on the documents of its run, in the order of these. `record`: None if nothing says how it was
    trained.
    """

    draft: str
    record: TrainingRecord | None
    totals: DocumentTotals
    depths: int  # of its rounds, at most
    units: int  # that it was trained on; 0: beside the curve, and not known
    tokens: int | None
    order: int | None


@dataclass(frozen=True)
class CurveHeads:
    """The heads of a curve by ascending size, and those beside it by their part in the list.

    `documents`: those of the run that a head may be tested on; `part`, `rule` [documents]: the part of each one's unit, and
    the rule that its text is decoded by.
    """

    run: Run
    documents: pa.Table
    part: Array
    rule: Array
    sizes: tuple[tuple[CurveHead, ...], ...]
    beside: Mapping[str, CurveHead]

    @property
    def every(self) -> list[CurveHead]:
        """All heads of the curve, the smallest first."""
        return [head for same in self.sizes for head in same]

    @property
    def largest(self) -> CurveHead:
        """The first head of the largest size."""
        return self.sizes[-1][0]


def collected(options: HeadsOptions, file: Path, run: Run) -> CurveHeads:
    """Return the heads of a list, under the decision of its run.

    Raises `RunUnreadable`, `OptionInvalid` for a draft that a run lacks, `HeadRecordUnreadable`, `ProfileInvalid` for a head
    whose size is not known, and `NotComparable` for heads of other targets or texts.
    """
    entries: list[HeadEntry] = list(options.heads)
    others = {name: each for name in HeadsBeside.model_fields if (each := getattr(options.beside, name)) is not None}
    every: list[HeadBeside] = [*entries, *others.values()]
    named = [f"{each.run or options.run}:{each.draft}" for each in every]
    if twice := [name for name, times in Counter(named).items() if times > 1]:
        raise ProfileInvalid(f"{file}: {twice[0]} is listed twice", "list every head once")
    records = [None if each.head is None else read_training(Path(each.head)) for each in every]
    for entry, record in zip(entries, records, strict=False):
        if record is None and entry.units is None:
            hint = "set head to the folder of its training.json, or set units and tokens"
            raise ProfileInvalid(f"{file}: the amount of training data of {entry.draft} is not known", hint)
    known = next((record for record in records if record is not None), None)
    documents, part = _held_out(run, known)
    heads, rules = [], np.empty(0)
    for each, name, record in zip(every, named, records, strict=True):
        side = side_of(name)
        own, _ = _held_out(side.run, known)
        totals, rules = decoded_totals(side.run, side.draft, own, run.manifest.profile.decision.rule)
        heads.append(head := _curve_head(each, side, record, totals))
        same = side.run.manifest.target.fingerprint == run.manifest.target.fingerprint
        if not same or not documents.select(SAME).equals(own.select(SAME)):
            raise NotComparable(f"{name} was tested on other documents than {run.path}", ONE_SPLIT)
        if problem := next(_why_not_testable(head, run, documents, part == TEST), ""):
            raise NotComparable(f"{side.draft} was {problem}", ONE_SPLIT)
    by_size: dict[tuple[str, str], list[CurveHead]] = {}
    for head in heads[: len(entries)]:
        by_size.setdefault(_size_key(head), []).append(head)
    sizes = tuple(tuple(by_size[key]) for key in sorted(by_size, key=lambda key: units_of(by_size[key])))
    return CurveHeads(run, documents, part, rules, sizes, dict(zip(others, heads[len(entries) :], strict=True)))


def _held_out(run: Run, record: TrainingRecord | None) -> tuple[pa.Table, Array]:
    """Return the documents of the stop and test part of a training, by their prompts, and the part of each; without a record
    every text of the target's own is a test. Raises `NotComparable` if the run holds no test text.
    """
    table = run.documents()
    table = table.filter(table["on_policy"])
    keys = list(zip(*(table[name].to_pylist() for name in ORDER), strict=True))
    table = table.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))
    units = [unit_of(*row) for row in zip(*(table[name].to_pylist() for name in ("cluster", "prompt_hash")), strict=True)]
    parts = dict.fromkeys(units, TEST)
    if record is not None:
        parts = dict.fromkeys(record.units.stop, STOP) | dict.fromkeys(record.units.test, TEST)
    found = np.array([parts.get(unit, "") for unit in units], dtype=object)
    if not (found == TEST).any():
        problem = f"no document of {run.path} is a test text of the heads"
        raise NotComparable(problem, "give the run in which alphaprof train tested them")
    return table.filter(pa.array(found != "")), found[found != ""]


def units_of(heads: Sequence[CurveHead]) -> int:
    """Return the training units of heads of one size: their mean, since near-copies stay together, and orders differ a
    little.
    """
    return round(sum(head.units for head in heads) / len(heads))


def _size_key(head: CurveHead) -> tuple[str, str]:
    """Return what heads of one size share: the fraction of the texts of one run, or the number of units."""
    return (head.record.run.digest, head.record.size.fraction) if head.record else ("", str(head.units))


def _curve_head(entry: HeadBeside, side: RunDraft, record: TrainingRecord | None, totals: DocumentTotals) -> CurveHead:
    depths = side.run.manifest.drafts[side.draft].depths or max(side.run.gammas)
    size = record.size if record else entry if isinstance(entry, HeadEntry) else HeadEntry(draft=side.draft)
    return CurveHead(side.draft, record, totals, depths, size.units or 0, size.tokens, size.order)


def _why_not_testable(head: CurveHead, run: Run, documents: pa.Table, test: Array) -> Iterator[str]:
    """Yield why a head says nothing on the documents that `test` marks."""
    tested = documents.filter(pa.array(test))
    units = set(map(unit_of, tested["cluster"].to_pylist(), tested["prompt_hash"].to_pylist()))
    if (record := head.record) is not None:
        if record.status != "complete":
            yield "not fully trained (alphaprof train --resume)"
        if record.target.fingerprint != run.manifest.target.fingerprint:
            yield f"trained for target {record.target.model}, not for the target of {run.path}"
        if seen := (learnt(record) or frozenset(record.units.train)) & units:
            yield f"trained on {len(seen)} of the units that it is tested on"
    if not head.totals["proposals"][test].sum():
        yield "not tested on any token of the test part"


def _not_nested(sizes: Sequence[Sequence[CurveHead]]) -> Iterator[str]:
    """Yield what is not nested, in words."""
    for head in chain(*sizes):
        if head.record is None and head.order is None:
            yield f"give {head.draft} an order if larger heads have seen its data"
    for place, same in enumerate(sizes[:-1]):
        larger = list(chain(*sizes[place + 1 :]))
        for small in same:
            mine = [head for head in larger if head.order == small.order] or sizes[-1]
            for head in mine if small.record else ():
                if head.record and small.record and not set(small.record.units.train) <= set(head.record.units.train):
                    yield f"{small.draft} has seen units that {head.draft} has not"


@dataclass(frozen=True)
class TestTraffic:
    """How the documents of a part make up the traffic. `rows` of each domain; `weights`: shares of tokens, None: as they
    are. `cluster` [all rows]: numbers of units.
    """

    __test__ = False  # no test of pytest

    rows: Mapping[str, Array]
    weights: Mapping[str, float] | None
    cluster: Array

    @property
    def mix(self) -> Mix:
        """The domains as they make up the traffic."""
        return Mix.of(self.weights) if self.weights else Mix(tuple(self.rows), None)

    @property
    def parts(self) -> list[tuple[Array, float]]:
        """Rows that are one ratio, with their weight: of every domain with one, or all of them together."""
        if self.weights is None:
            return [(np.concatenate(list(self.rows.values())), 1.0)]
        return [(self.rows[domain], weight) for domain, weight in self.weights.items() if weight > 0]


@dataclass(frozen=True)
class CurveInputs:
    """What the answer rests on: heads, the decision of the run, step times of the largest head (None: `basis` says why), and
    documents of the test part.
    """

    heads: CurveHeads
    decision: DecisionAsked
    times: StepTimes | None
    basis: str  # what step times are
    gammas: Sequence[int]  # that every head was tested with
    traffic: TestTraffic
    gamma: int
    gamma_from: Literal["decision", "stop", "test"]


def build_curve(options: HeadsOptions, file: Path, changes: list[str]) -> CurveReport:
    """Return the answer about the heads of a list; `changes` to the decision and the costs of its run as in a report. Raises
    `ProfileInvalid`, `RunUnreadable`, `HeadRecordUnreadable`, `NotComparable` and `CostsUnreadable`.
    """
    run = Run.open(options.run)
    config = changed_question(run.manifest.config, changes) if changes else run.manifest.config
    heads = collected(options, file, run.view(dataclasses.replace(run.manifest, config=config)))
    inputs = _curve_inputs(heads)
    before = (None, *heads.sizes[:-1])
    points = tuple(_point(inputs, label_of(same), same, one) for same, one in zip(heads.sizes, before, strict=True))
    beside = tuple(
        _point(inputs, name, [head], heads.sizes[-1], known=head.units > 0) for name, head in heads.beside.items()
    )
    outlook, tested = outlook_of(inputs, points), heads.part == TEST
    outlook["instead"] = (*_measured_ways(inputs, beside), *outlook["instead"])
    outlook["notes"] += tuple(_caveats(inputs))
    return CurveReport(
        alphaprof=__version__,
        run=str(run.path),
        confidence=inputs.decision.confidence,
        min_speedup=inputs.decision.min_speedup,
        concurrency=inputs.decision.concurrency,
        gamma=inputs.gamma,
        gamma_from=inputs.gamma_from,
        times=inputs.basis,
        test_units=distinct(inputs.traffic.cluster[tested]),
        test_tokens=int(heads.largest.totals["tokens"][tested].sum()),
        points=points,
        beside=beside,
        costs=costs_of(heads),
        **outlook,
    )


def _curve_inputs(heads: CurveHeads) -> CurveInputs:
    """Return what was asked, with gamma chosen if the decision leaves it open."""
    decision, run = heads.run.manifest.profile.decision, heads.run
    shallow = min((*heads.every, *heads.beside.values()), key=lambda head: head.depths)
    tested = [gamma for gamma in run.gammas if gamma <= shallow.depths]
    allowed = [gamma for gamma in tested if decision.gamma in ("auto", gamma)]
    if not allowed:
        hint = "train with a larger --ttt, or set a smaller gamma: --set decision.gamma=N"
        raise NotComparable(f"{shallow.draft} was tested with {shallow.depths} drafts a round, fewer than asked for", hint)
    (times, basis), cluster = _steps(heads), heads.largest.totals.cluster
    test = _traffic(heads, TEST, decision.weights, cluster)
    if len(allowed) == 1:
        return CurveInputs(heads, decision, times, basis, tested, test, allowed[0], "decision")
    chooses = STOP if (heads.part == STOP).any() else TEST
    traffic = _traffic(heads, chooses, decision.weights, cluster)
    gamma = max(allowed, key=lambda each: _mean_speed(heads.sizes[-1], traffic, each, times))
    return CurveInputs(heads, decision, times, basis, tested, test, gamma, "stop" if chooses == STOP else "test")


def _steps(heads: CurveHeads) -> tuple[StepTimes | None, str]:
    """Return the step times of the first head of the largest size, at the concurrency of the decision, and what they are, or
    why there are none. Raises `CostsUnreadable`.
    """
    run, draft, profile = heads.run, heads.largest.draft, heads.run.manifest.profile
    costs = open_costs(run, profile.costs, mean_context(run.documents()))
    if costs is None:
        return None, "this run measured no step times, and costs names no other source"
    timing = costs.timing(profile.decision.concurrency)
    times = timing.times.get(draft)
    return times, costs.basis if times else timing.missing.get(draft, "no step times were measured")


def _traffic(heads: CurveHeads, part: str, weights: Mapping[str, float] | None, cluster: Array) -> TestTraffic:
    """Return the documents of a part by domain, the largest first. Weights count if every domain that has one has
    documents.
    """
    domain, tokens = np.array(heads.documents["domain"].to_pylist()), heads.largest.totals["tokens"]
    rows = {str(name): np.flatnonzero((heads.part == part) & (domain == name)) for name in np.unique(domain)}
    rows = {
        name: rows[name] for name in sorted(rows, key=lambda name: -tokens[rows[name]].sum()) if tokens[rows[name]].sum() > 0
    }
    known = weights is not None and all(name in rows for name, weight in weights.items() if weight > 0)
    return TestTraffic(rows, weights if known else None, cluster)


def _mean_speed(heads: Sequence[CurveHead], traffic: TestTraffic, gamma: int, times: StepTimes | None) -> float:
    """Return the speedup of a size, or its tokens per round without step times."""
    rows = [traffic.rows[domain] for domain in traffic.mix.domains]
    decoded = [(_mean_rounds(heads, each, gamma), times or free_draft(gamma)) for each in rows]
    return traffic.mix.value(decoded) or 0.0


def _mean_rounds(heads: Sequence[CurveHead], rows: Array, gamma: int) -> RoundCounts:
    """Return rounds of some documents, the mean of some heads."""
    counts = [head.totals.counts(gamma).rows(rows) for head in heads]
    names = ("tokens", "rounds", "drafted", "accepted", "control")
    means = {name: np.mean([getattr(each, name) for each in counts], axis=0) for name in names}
    return RoundCounts(**means, cluster=counts[0].cluster)


def label_of(heads: Sequence[CurveHead]) -> str:
    """Return a size in a word: its fraction of the training units if all records agree, else its units."""
    fractions = {head.record.size.fraction for head in heads if head.record}
    return fractions.pop() if len(fractions) == 1 and all(head.record for head in heads) else f"{units_of(heads)} units"


def _point(
    inputs: CurveInputs,
    label: str,
    heads: Sequence[CurveHead],
    before: Sequence[CurveHead] | None,
    known: bool = True,
) -> CurvePoint:
    """Return what heads of one size reach; `before`: what they are compared with."""
    traffic = inputs.traffic
    each = [_mean_speed([head], traffic, inputs.gamma, None) for head in heads]
    return CurvePoint(
        label=label,
        units=units_of(heads) if known else None,
        tokens=_tokens_of(heads),
        heads=len(heads),
        accepted=_accepted(inputs, heads, traffic),
        spread=float(np.std(each, ddof=1)) if len(each) > 1 else None,
        domains=tuple(
            CurveDomain(domain, **_reached_on(inputs, heads, before, TestTraffic({domain: rows}, None, traffic.cluster)))
            for domain, rows in traffic.rows.items()
        ),
        **_reached_on(inputs, heads, before, traffic),
    )


def _reached_on(
    inputs: CurveInputs, heads: Sequence[CurveHead], before: Sequence[CurveHead] | None, traffic: TestTraffic
) -> dict[str, Any]:
    """Return what heads of one size reach on a traffic, all of it or one domain."""
    counts = [_mean_rounds(heads, rows, inputs.gamma) for rows in traffic.rows.values()]
    free, times, confidence = free_draft(inputs.gamma), inputs.times, inputs.decision.confidence
    return {
        "alpha": _alpha(heads, traffic),
        "tokens_per_round": tokens_interval(_traffic_speedup(traffic, counts, free), inputs.gamma, confidence),
        "speedup": speedup_interval(_traffic_speedup(traffic, counts, times), confidence) if times else None,
        "difference": _paired_difference(inputs, before, heads, traffic) if before else None,
    }


def _alpha(heads: Sequence[CurveHead], traffic: TestTraffic) -> float:
    """Return the share of positions whose first draft is accepted."""
    sums = [
        [sum(head.totals[name][rows].sum() for head in heads) for name in ("accepted", "proposals")]
        for rows, _ in traffic.parts
    ]
    return float(sum(weight * right / max(of, 1.0) for (_, weight), (right, of) in zip(traffic.parts, sums, strict=True)))


def _accepted(inputs: CurveInputs, heads: Sequence[CurveHead], traffic: TestTraffic) -> tuple[float, ...]:
    """Return the share of rounds at the largest gamma that accepted at least 1, 2, ... drafts, weighted by tokens."""
    gamma = max(inputs.gammas)
    counts = [(_mean_rounds(heads, rows, gamma), weight) for rows, weight in traffic.parts]
    counts = [(each, weight / max(each.tokens.sum(), 1.0)) for each, weight in counts]
    reached = sum(each.accepted.sum(0) * weight for each, weight in counts)
    rounds = sum(float(each.rounds.sum()) * weight for each, weight in counts)
    return tuple((np.asarray(reached) / max(rounds, 1e-12)).tolist())


def _tokens_of(heads: Sequence[CurveHead]) -> int | None:
    """Return tokens that heads of one size were trained on, on average; None if one does not say."""
    known = [head.tokens for head in heads if head.tokens is not None]
    return round(sum(known) / len(known)) if len(known) == len(heads) else None


def _timing(inputs: CurveInputs) -> float:
    """Return how far step times alone may be off, on the log scale of the speedup of the largest size; 0 if there are
    none.
    """
    if inputs.times is None:
        return 0.0
    rows = inputs.traffic.rows.values()
    counts = [_mean_rounds(inputs.heads.sizes[-1], each, inputs.gamma) for each in rows]
    found = _traffic_speedup(inputs.traffic, counts, inputs.times)
    at = (1 + inputs.decision.confidence) / 2
    return quantile(at, found.timing_freedom) * found.timing_error if found.timing_error else 0.0


def _traffic_speedup(traffic: TestTraffic, counts: Sequence[RoundCounts], times: StepTimes) -> Any:
    """Return the speedup of a traffic from the rounds of its domains."""
    places = list(traffic.rows)
    return traffic.mix.speedup([counts[places.index(domain)] for domain in traffic.mix.domains], times)


def _paired_difference(
    inputs: CurveInputs, first: Sequence[CurveHead] | None, second: Sequence[CurveHead], traffic: TestTraffic
) -> Interval | None:
    """Return tokens per round of the second heads less those of the first, paired by unit."""
    free, weights = free_draft(inputs.gamma), [weight for _, weight in traffic.parts]
    counts = [[_mean_rounds(heads, rows, inputs.gamma) for rows, _ in traffic.parts] for heads in (first or (), second)]
    if any(part.tokens.sum() == 0 for part in counts[1]):
        return None
    one, two = ([spent_and_base(part, free) for part in side] for side in counts)
    units = [present(part.cluster) for part in counts[1]]
    return weighted_inverse_difference(one, two, units, weights, inputs.decision.confidence, inputs.gamma)[2]


def _miss_rates(inputs: CurveInputs, of: Callable[[CurveInputs, CurveHead], Measured]) -> BySize:
    """Return the miss rates of every head by size."""
    return [(units_of(same), [of(inputs, head) for head in same]) for same in inputs.heads.sizes]


def _measured_rounds(inputs: CurveInputs, head: CurveHead) -> Measured:
    """Return tokens per round of a head on the traffic, as a miss rate."""
    gamma, free = inputs.gamma, free_draft(inputs.gamma)
    parts = [(_mean_rounds([head], rows, gamma), weight) for rows, weight in inputs.traffic.parts]
    share, errors = _weighted_ratio(
        inputs, [(*spent_and_base(counts, free), counts.cluster, weight) for counts, weight in parts]
    )
    return measured_tokens(1 / share, -errors / share**2, gamma)


def _measured_firsts(inputs: CurveInputs, head: CurveHead) -> Measured:
    """Return the share of positions whose first draft is wrong."""
    parts = []
    for rows, weight in inputs.traffic.parts:
        cluster, starts = inputs.traffic.cluster[rows], head.totals["proposals"][rows]
        wrong, places = by_cluster(cluster, starts - head.totals["accepted"][rows], starts)
        parts.append((wrong, places, cluster, weight))
    return Measured(*_weighted_ratio(inputs, parts))


def _weighted_ratio(inputs: CurveInputs, parts: Sequence[tuple[Array, Array, Array, float]]) -> tuple[float, Array]:
    """sum(w sum(totals) / sum(counts)), and what each unit of the test part contributes to its error. `parts`: totals and
    counts [units of the part], the cluster of its rows, and its weight.
    """
    places = np.unique(np.concatenate([rows for rows, _ in inputs.traffic.parts]))
    units = present(np.sort(inputs.traffic.cluster[places]))
    value, errors = 0.0, np.zeros(len(units))
    for totals, counts, cluster, weight in parts:
        value += weight * float(totals.sum() / counts.sum())
        if (counts > 0).sum() > 1:
            errors[np.searchsorted(units, present(cluster))] += weight * influences(totals, counts)
    return value, errors


def _measured_ways(inputs: CurveInputs, beside: Sequence[CurvePoint]) -> Iterator[str]:
    """Yield what was measured to help besides more data: a head trained further, another gamma."""
    for point in beside:
        if (more := point.difference) is not None and more.low > 0:
            yield f"the {point.label} head has {more.value:.2f} more tokens per round than the largest size"
    heads, times = inputs.heads, inputs.times
    if times is None:
        return
    speeds = {gamma: _mean_speed(heads.sizes[-1], inputs.traffic, gamma, times) for gamma in inputs.gammas}
    best = max(speeds, key=speeds.__getitem__)
    if speeds[best] > (1 + NOTABLE) * speeds[inputs.gamma]:
        here = f"{speeds[inputs.gamma]:.2f}x at gamma {inputs.gamma}"
        yield f"gamma {best}: {speeds[best]:.2f}x with the largest size, and {here}"


def _caveats(inputs: CurveInputs) -> Iterator[str]:
    """Yield what to know before trusting the numbers."""
    heads = inputs.heads
    if inputs.gamma_from == "test":
        yield f"gamma {inputs.gamma} was chosen on the test texts themselves, so the largest size looks better than it is"
    if inputs.times is None:
        yield f"no speedup: {inputs.basis}"
    if inputs.decision.weights is not None and inputs.traffic.weights is None:
        yield "a domain of decision.weights has no test text: domains are weighted by their test texts"
    every = (*heads.every, *heads.beside.values())
    if foreign := [head.draft for head in every if head.record is None or learnt(head.record) is None]:
        yield f"the training data of {', '.join(foreign)} is not known: it may include the test texts"
    if len({head.record.run.digest for head in heads.every if head.record}) > 1:
        yield "heads were trained on the texts of different runs"
    if record := next((head.record for head in heads.every if head.record), None):
        yield f"texts are split {split_words(record)}"


def outlook_of(inputs: CurveInputs, points: Sequence[CurvePoint]) -> dict[str, Any]:
    """Return what is said about more data, by fields of the report: a forecast, if the measured sizes allow it."""
    heads, parts, gamma = inputs.heads, inputs.traffic.parts, inputs.gamma
    rounds, firsts = _miss_rates(inputs, _measured_rounds), _miss_rates(inputs, _measured_firsts)
    floor = _vocabulary_floor(heads, parts)
    notes = () if floor is not None else ("draft vocabularies differ or are unknown, so no floor is assumed",)
    tested, reason = None, _why_none(heads, rounds)
    if not reason:
        share = max(floor or 0.0, uncertainty(heads, parts))
        curve = LearningCurve.of(rounds, min(tokens_floor(share, gamma), rounds[-1][1][0].miss))
        tested, reason = _backtested(curve, points, inputs)
    last, least = points[-1], inputs.decision.min_speedup
    others = tuple(_other_ways(last, floor, least))
    found = {"floor": floor, "backtest": tested, "reason": reason, "notes": notes}
    if reason:
        instead = () if last.speedup is not None and last.speedup.low >= least else others
        verdict = _verdict_as_measured(last.speedup, least, reason)
        return found | {"outcome": f"NO FORECAST: {reason}", "verdict": verdict, "instead": instead, "forecast": ()}
    curve_of_firsts = LearningCurve.of(firsts, min(share, firsts[-1][1][0].miss))
    speed = _speedups_at_cost(last, _timing(inputs))
    rows = tuple(_forecast_rows(curve, curve_of_firsts, inputs, speed))
    outcome, verdict = _verdict_ahead(rows, curve, inputs, speed)
    instead = () if rows[0].reached == "every" else others
    return found | {"outcome": outcome, "verdict": verdict, "instead": instead, "forecast": rows}


def _backtested(curve: LearningCurve, points: Sequence[CurvePoint], inputs: CurveInputs) -> tuple[CurveBacktest, str]:
    """Return how the smaller sizes predicted the largest, and why that rules out a forecast (empty if it does not)."""
    found, reason = backtest(curve, inputs.decision.confidence), ""
    predicted = as_tokens(found.predicted, inputs.gamma)
    now = as_tokens(Scenarios(0.0, found.measured, found.measured, found.measured), inputs.gamma).value
    if not found.inside:
        reason = "the largest size lies outside the prediction of the smaller ones"
    elif curve.last_gain <= curve.spread:
        reason = STALLED
    elif not fits(curve):
        reason = "no curve 1 - alpha = e + A N^-b fits the measured sizes"
    seen = tuple(point.label for point in points[:-1])
    return CurveBacktest(seen, predicted, now, now / predicted.value - 1, found.inside), reason


def _why_none(heads: CurveHeads, measured: BySize) -> str:
    """Return what stands against any forecast; empty if nothing does."""
    if len(measured) < FEWEST_SIZES:
        sizes = "there is one size only" if len(measured) == 1 else f"there are {len(measured)} sizes"
        return f"{sizes}, and a testable forecast needs {FEWEST_SIZES}"
    if torn := next(_not_nested(heads.sizes), ""):  # more than their size tells them apart
        return f"sizes are not nested: {torn}"
    if max(len(same) for _, same in measured) < 2:
        return "no size has two heads, so the variation of training is not known"
    try:
        LearningCurve.of(measured, 0.0)
    except ValueError:
        return "too few independent test units to estimate the noise"
    return ""


def _vocabulary_floor(heads: CurveHeads, parts: Sequence[tuple[Array, float]]) -> float | None:
    """Return the share of the traffic's tokens that no head of the curve can propose; None if vocabularies differ."""
    records = [head.record for head in heads.every]
    if any(record is None or record.floor is None for record in records):
        return None
    if len({record.vocabulary.digest for record in records if record}) > 1:
        return None
    return records[-1].floor if _unweighted(heads, parts) and records[-1] is not None else 0.0


def uncertainty(heads: CurveHeads, parts: Sequence[tuple[Array, float]]) -> float:
    """Return the share of test tokens that no draft can foresee, since the target draws them: of sampled text, under rules
    that keep one token alone. 0 if domains are weighted: it is known of all of them together.
    """
    run, test = heads.run, heads.part == TEST
    drawn = test & heads.documents["temperature"].is_valid().to_numpy() & np.isin(heads.rule, TOP_TOKEN)
    if not drawn.any() or not _unweighted(heads, parts):
        return 0.0
    numbers, missed = set(heads.documents["document"].to_numpy()[drawn].tolist()), 0.0
    for shard in run.shards:
        top = run.positions(heads.largest.draft, shard.index, ["document", "target_top_prob"])
        for document, probability in zip(*(top[name].to_pylist() for name in top.column_names), strict=True):
            missed += (1 - probability) * (document in numbers)
    return float(missed / heads.largest.totals["positions"][test].sum())


def _unweighted(heads: CurveHeads, parts: Sequence[tuple[Array, float]]) -> bool:
    """Return whether the traffic is all test documents together."""
    return len(parts[0][0]) == int((heads.part == TEST).sum())


def _speedups_at_cost(point: CurvePoint, timing: float) -> Speedups | None:
    """Return what makes speedups of tokens per round, at the cost of a round that was predicted for the largest size; None
    without step times. Distances by tokens per round and by step times (`timing`) add up as squares, on the log scale.
    """
    if point.speedup is None or point.tokens_per_round is None:
        return None
    cost = point.tokens_per_round.value / point.speedup.value

    def speedup_of(tokens: Interval) -> Interval:
        value, ratios = tokens.value / cost, (tokens.value / tokens.low, tokens.high / tokens.value)
        below, above = (math.hypot(math.log(ratio), timing) for ratio in ratios)
        return Interval(value, value * math.exp(-below), value * math.exp(above) if above < LARGEST else math.inf)

    return speedup_of


def _forecast_rows(
    curve: LearningCurve, firsts: LearningCurve, inputs: CurveInputs, speed: Speedups | None
) -> Iterator[ForecastRow]:
    """Yield what the measured largest size and its multiples would reach."""
    least, confidence = inputs.decision.min_speedup, inputs.decision.confidence
    for factor in (1, *FACTORS):
        size = factor * float(curve.sizes[-1])
        tokens, first = as_tokens(scenarios(curve, size, confidence), inputs.gamma), scenarios(firsts, size, confidence)
        alpha = Interval(1 - first.value, 1 - first.high, 1 - first.low)
        faster = speed(tokens) if speed else None
        reached = _reached_in(faster, least) if faster else None
        yield ForecastRow(factor, round(size), tokens, alpha, faster, reached)


def _reached_in(speedup: Interval, least: float) -> Reached:
    return "every" if speedup.low >= least else "some" if speedup.high >= least else "none"


def _verdict_ahead(
    rows: Sequence[ForecastRow],
    curve: LearningCurve,
    inputs: CurveInputs,
    speed: Speedups | None,
) -> tuple[str, str]:
    """Return the outcome of a forecast in a few words, and the verdict."""
    largest, goal = curve.sizes[-1], f"{inputs.decision.min_speedup:g}x"
    most = f"{FACTORS[-1]} times the data"
    if speed is None:
        band = rows[-1].tokens_per_round
        gain = f"{fmt.number(band.low)} to {fmt.number(band.high)} tokens per round with {most}"
        return f"FORECAST: {gain}", "measure step times to see if that pays"
    if rows[0].reached == "every":
        outcome = f"REACHED: {goal} in every scenario with the present data"
        return outcome, "serve the largest head; more data is not needed"

    if (every := _first_size_at(curve, inputs, speed, "every")) is not None:
        units = f"about {_rough(every)} training units ({every / largest:.1f} times)"
        return f"MORE DATA: {units} reach {goal} in every scenario", f"collect {units}, and train again"
    if (some := _first_size_at(curve, inputs, speed, "every", "some")) is not None:
        units = "the present size"
        if some > largest:
            units = f"about {_rough(some)} training units ({some / largest:.1f} times)"
        maybe = f"{goal} in some scenarios from {units} on, but not in every scenario up to {most}"
        advice = "collect twice the data and repeat (each new size narrows the band), or do what helps more"
        return f"OPEN: {maybe}", advice
    return f"NOT BY DATA: {goal} in no scenario up to {most}", "do not collect data for this"


def _first_size_at(curve: LearningCurve, inputs: CurveInputs, speed: Speedups, *enough: Reached) -> float | None:
    """Return from how many units on the least speedup is reached in some or all scenarios."""

    def reaches(band: Scenarios) -> bool:
        return _reached_in(speed(as_tokens(band, inputs.gamma)), inputs.decision.min_speedup) in enough

    return first_size(curve, reaches, inputs.decision.confidence)


def _verdict_as_measured(speed: Interval | None, least: float, reason: str) -> str:
    """Return the verdict without a forecast: what was measured stands."""
    if speed is None:
        verdict = "no step times: judge by the measured tokens per round"
    elif speed.low >= least:
        verdict = f"the largest size reaches {least:g}x as measured"
    elif speed.high < least:
        verdict = f"the largest size does not reach {least:g}x as measured"
    else:
        verdict = f"the largest size does not clearly differ from {least:g}x: test on more units"
    return f"{verdict}; more data did not help measurably" if reason == STALLED else verdict


def _rough(units: float) -> str:
    """Return a number of units, rounded up to two digits: the forecast is not more precise than that."""
    step = 10 ** max(len(str(int(units))) - 2, 0)
    return fmt.count(math.ceil(units / step) * step)


def _other_ways(last: CurvePoint, floor: float | None, least: float) -> Iterator[str]:
    """Yield what would help besides data, as measured on the largest size."""
    fast = [domain for domain in last.domains if domain.speedup is not None and domain.speedup.low >= least]
    if fast and len(last.domains) > 1:
        yield f"other traffic: {least:g}x or more on {', '.join(fmt.short(domain.domain) for domain in fast[:3])}"
    if floor is not None and floor >= NOTABLE:
        yield f"a larger --draft-vocab: the heads cannot propose {fmt.percent(floor)} of the test tokens"


def costs_of(heads: CurveHeads) -> tuple[CurveCost, ...]:
    """Return what 2 and 4 times the data would take, from the record of the largest size; nothing without one."""
    record = heads.largest.record
    if record is None or not record.size.documents:
        return ()
    parts = sum(map(len, (record.units.train, record.units.stop, record.units.test)))
    tokens = record.size.tokens * parts / max(len(record.units.train), 1)
    seconds = record.seconds
    return tuple(
        CurveCost(
            factor=factor,
            prompts=round((factor - 1) * parts),
            tokens=round((factor - 1) * tokens),
            seconds=factor * (seconds.features + seconds.training + seconds.testing),
            device=record.device,
        )
        for factor in FACTORS
    )
