"""The learning curve and its forecast: the value that `alphaprof curve` answers with, and its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from alphaprof.commands.curve.model import CurveBacktest, CurveCost, CurvePoint, ForecastRow
from alphaprof.render.blocks import Block, Figure, Small, Table
from alphaprof.report import format as fmt
from alphaprof.stats.estimate import Interval

REACHED = {"every": "in every scenario", "some": "in some scenarios", "none": "in no scenario"}
DEPTHS = 3  # whose acceptance tables show


@dataclass(frozen=True)
class CurveReport:
    """What heads of several sizes reach, and what more data would bring. `forecast` is empty where there is none, which
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
    reason: str  # why there is no forecast; empty where there is one
    points: tuple[CurvePoint, ...]  # the smallest size first
    beside: tuple[CurvePoint, ...]  # the published head, and that head trained further
    forecast: tuple[ForecastRow, ...]  # at the largest measured size, 2 and 4 times as much
    costs: tuple[CurveCost, ...]  # empty where no record says what training took
    notes: tuple[str, ...]

    def blocks(self) -> Iterator[Block]:
        """Yield the answer in five lines, the figure, then the measured curve, the forecast and its costs."""
        yield from answer_lines(self)
        yield ""
        yield f"alphaprof {self.alphaprof}   run {self.run}"
        yield Figure("curve", *CAPTION, self._figure)
        for title, (named, *columns), rows in tables(self):
            cells = [(name, dict(zip(columns, others, strict=True))) for name, *others in rows]
            yield Table(title, columns, cells, named)
        yield from (f"note: {note}" for note in self.notes)
        yield from map(Small, definitions(self))

    def _figure(self) -> Any:
        from alphaprof.commands.curve.figure import curve_figure

        return curve_figure(self.points, self.beside, self.forecast, self.gamma)


CAPTION = (
    "Tokens per round by training units",
    "Points are sizes as they were measured, with intervals over test units. The band begins at the largest size: its lower "
    "edge is the scenario that saturates, its upper edge the one that goes on as before.",
)


def answer_lines(report: CurveReport) -> list[str]:
    """The five lines that decide: the outcome, the backtest, the forecast, what was measured, and what to do next."""
    following = f"next: {'; '.join([report.verdict, *report.instead[:1]])}"
    return [report.outcome, _backtest_line(report), _forecast_line(report), _measured_line(report), following]


def _backtest_line(report: CurveReport) -> str:
    backtest = report.backtest
    if backtest is None:
        return f"backtest: none, {report.reason}"
    predicted = backtest.predicted
    return (
        f"backtest: from {backtest.seen[0]} to {backtest.seen[-1]} it predicted {fmt.number(predicted.value)} "
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
        speed = f" ({_band(each.speedup, 'x')})" if each.speedup is not None else ""
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


def tables(report: CurveReport) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield title, heading and rows of every table; the first cell of a row is its name."""
    every = (*report.points, *report.beside)
    tested = f"{fmt.count(report.test_units)} independent test units, {fmt.count(report.test_tokens)} tokens"
    yield f"measured on {tested}, at gamma {report.gamma}", HEAD, [_cells(point) for point in every]
    if any(len(point.domains) > 1 for point in every):
        places = range(len(report.points[-1].domains))
        yield "by domain", DOMAIN_HEAD, [_domain_cells(point, place) for place in places for point in every]
    if report.forecast:
        heads = [name.format(f"{report.min_speedup:g}") for name in FORECAST_HEAD]
        title = "forecast, from the scenario that saturates to the one that goes on as before"
        yield title, heads, [_forecast_cells(each) for each in report.forecast]
    if report.costs:
        title = "what that takes beyond what there is, as measured for the largest size"
        yield title, COST_HEAD, [_cost_cells(each) for each in report.costs]


HEAD = ("size", "units", "tokens", "heads", "accept@1", "deeper", "tokens/round", "spread", "more than before", "speedup")
DOMAIN_HEAD = ("domain", "size", "accept@1", "tokens/round", "more than before", "speedup")
FORECAST_HEAD = ("data", "units", "accept@1", "tokens/round", "speedup", "reaches {}x")
COST_HEAD = ("data", "prompts to log", "tokens to generate", "device time a head", "device")


def _cells(point: CurvePoint) -> list[str]:
    count = [fmt.count(number) if number is not None else fmt.NOTHING for number in (point.units, point.tokens)]
    deeper = " ".join(fmt.share(share, 2) for share in point.accepted[1:DEPTHS]) or fmt.NOTHING
    spread = f"{point.spread:.3f}" if point.spread is not None else fmt.NOTHING
    numbers = [str(point.heads), fmt.share(point.alpha), deeper, fmt.interval(point.tokens_per_round), spread]
    return [point.label, *count, *numbers, fmt.difference(point.difference, 2), fmt.interval(point.speedup, "x")]


def _domain_cells(point: CurvePoint, place: int) -> list[str]:
    each = point.domains[place]
    rounds = [fmt.interval(each.tokens_per_round), fmt.difference(each.difference, 2)]
    return [fmt.short(each.domain), point.label, fmt.share(each.alpha), *rounds, fmt.interval(each.speedup, "x")]


def _forecast_cells(row: ForecastRow) -> list[str]:
    reached = REACHED[row.reached] if row.reached else fmt.NOTHING
    bands = [_band(row.alpha), _band(row.tokens_per_round), _band(row.speedup, "x")]
    return [f"x {row.factor:g}", fmt.count(row.units), *bands, reached]


def _band(value: Interval | None, unit: str = "") -> str:
    return fmt.NOTHING if value is None else f"{fmt.number(value.low)} to {fmt.number(value.high, 2, unit)}"


def _cost_cells(cost: CurveCost) -> list[str]:
    return [f"x {cost.factor:g}", fmt.count(cost.prompts), fmt.count(cost.tokens), fmt.duration(cost.seconds), cost.device]


def definitions(report: CurveReport) -> Iterator[str]:
    """Yields what columns mean, and what is not promised."""
    yield (
        f"Brackets: {fmt.level(report.confidence)} intervals over test units. accept@1: share of positions whose first "
        "draft is accepted. deeper: share of rounds that accepted 2 and 3 drafts, at the largest gamma. "
        "spread: between heads of one size. more than before: paired by unit."
    )
    if report.forecast:
        yield (
            "Forecast: all curves 1 - alpha = e + A N^-b that the measurements do not contradict; for tokens per round, by "
            "the alpha of independent positions. A curve that stops or steepens is not among them (docs/curve.md)."
        )
