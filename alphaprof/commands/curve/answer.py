"""The learning curve and its forecast: the value that `alphaprof curve` answers with, and its text (rich)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.commands.curve.model import CurveBacktest, CurveCost, CurvePoint, ForecastRow
from alphaprof.render.html.plain_page import plain_page
from alphaprof.render.html.templates import require_html
from alphaprof.render.markdown import escaped, escaped_sentence, row
from alphaprof.render.tables import named_table, plain, show
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

    def terminal(self, console: Console) -> None:
        """Prints the answer in five lines, then the measured curve, the forecast and its costs."""
        for index, line in enumerate(answer_lines(self)):
            console.print(Text(fmt.visible(line), "bold" if not index else ""), highlight=False)
        console.print()
        console.print(plain(f"alphaprof {self.alphaprof}   run {self.run}"))
        show(_points_table(self), points_title(self), console)
        if any(len(point.domains) > 1 for point in (*self.points, *self.beside)):
            show(_domains_table(self), "by domain", console)
        if self.forecast:
            show(_forecast_table(self), FORECAST_TITLE, console)
        if self.costs:
            show(_costs_table(self), COSTS_TITLE, console)
        for note in self.notes:
            console.print(Text("note: ", "yellow").append_text(plain(note)))
        for line in definitions(self):
            console.print(plain(line), style="dim", highlight=False)

    def md(self) -> str:
        """The same as Markdown, for a comment or a wiki."""
        lines = answer_lines(self)
        parts = [f"## {escaped_sentence(lines[0])}", "", *(f"- {escaped_sentence(line)}" for line in lines[1:]), ""]
        for _, title, head, rows in tables(self):
            parts += [f"**{escaped_sentence(title)}**", "", row(*head), f"|---|{'--:|' * (len(head) - 1)}"]
            parts += [row(escaped(cells[0]), *map(escaped_sentence, cells[1:])) for cells in rows]
            parts.append("")
        parts += [f"- {escaped_sentence(line)}" for line in (*self.notes, *definitions(self))]
        return "\n".join(parts) + "\n"

    def html(self) -> str:
        """The same as a page with the figure of the curve. Raises `ExtraMissing` without the packages that draw it."""
        require_html()
        from alphaprof.commands.curve.figure import curve_figure

        lines, below = answer_lines(self), [*self.notes, *definitions(self)]
        figures = {"curve": (curve_figure(self.points, self.beside, self.forecast, self.gamma), *CAPTION)}
        return plain_page("Learning curve", self.alphaprof, lines, figures, list(tables(self)), below)


CAPTION = (
    "Tokens per round by training units",
    "Points are sizes as they were measured, with intervals over test units. The band begins at the largest size: its lower "
    "edge is the scenario that saturates, its upper edge the one that goes on as before.",
)
FORECAST_TITLE = "forecast, from the scenario that saturates to the one that goes on as before"
COSTS_TITLE = "what that takes beyond what there is, as measured for the largest size"


def answer_lines(report: CurveReport) -> list[str]:
    """The five lines that decide: the outcome, the backtest, the forecast, what was measured, and what to do next."""
    return [report.outcome, _backtest_line(report), _forecast_line(report), _measured_line(report), _next_line(report)]


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


def _next_line(report: CurveReport) -> str:
    words = report.verdict
    if report.instead:
        words += f"; {report.instead[0]}"
    return f"next: {words}"


def points_title(report: CurveReport) -> str:
    """The title of the measured points."""
    return (
        f"measured on {fmt.count(report.test_units)} independent test units, {fmt.count(report.test_tokens)} tokens, "
        f"at gamma {report.gamma}"
    )


HEAD = ("units", "tokens", "heads", "accept@1", "deeper", "tokens/round", "spread", "more than before", "speedup")


def _cells(point: CurvePoint) -> list[str]:
    count = [fmt.count(number) if number is not None else fmt.NOTHING for number in (point.units, point.tokens)]
    deeper = " ".join(fmt.share(share, 2) for share in point.accepted[1:DEPTHS]) or fmt.NOTHING
    spread = f"{point.spread:.3f}" if point.spread is not None else fmt.NOTHING
    numbers = [fmt.share(point.alpha), deeper, fmt.interval(point.tokens_per_round), spread]
    return [*count, str(point.heads), *numbers, fmt.difference(point.difference, 2), fmt.interval(point.speedup, "x")]


def _points_table(report: CurveReport) -> Table:
    table = named_table("size", *HEAD)
    for point in (*report.points, *report.beside):
        table.add_row(plain(point.label), *map(Text, _cells(point)))
    return table


def _domain_rows(report: CurveReport) -> Iterator[tuple[str, list[str]]]:
    for place, of_largest in enumerate(report.points[-1].domains):
        for point in (*report.points, *report.beside):
            each = point.domains[place]
            rounds = [fmt.interval(each.tokens_per_round), fmt.difference(each.difference, 2)]
            yield (
                fmt.short(of_largest.domain),
                [point.label, fmt.share(each.alpha), *rounds, fmt.interval(each.speedup, "x")],
            )


DOMAIN_HEAD = ("size", "accept@1", "tokens/round", "more than before", "speedup")


def _domains_table(report: CurveReport) -> Table:
    table = named_table("domain", *DOMAIN_HEAD)
    for name, cells in _domain_rows(report):
        table.add_row(plain(name), *map(plain, cells))
    return table


FORECAST_HEAD = ("units", "accept@1", "tokens/round", "speedup", "reaches {}x")


def _forecast_rows(report: CurveReport) -> Iterator[tuple[str, list[str]]]:
    for each in report.forecast:
        reached = REACHED[each.reached] if each.reached else fmt.NOTHING
        bands = [_band(each.alpha), _band(each.tokens_per_round), _band(each.speedup, "x")]
        yield f"x {each.factor:g}", [fmt.count(each.units), *bands, reached]


def _band(value: Interval | None, unit: str = "") -> str:
    return fmt.NOTHING if value is None else f"{fmt.number(value.low)} to {fmt.number(value.high, 2, unit)}"


def _forecast_table(report: CurveReport) -> Table:
    table = named_table("data", *(name.format(f"{report.min_speedup:g}") for name in FORECAST_HEAD))
    for name, cells in _forecast_rows(report):
        table.add_row(name, *cells)
    return table


COST_HEAD = ("prompts to log", "tokens to generate", "the target's states", "device time a head", "device")


def _cost_rows(report: CurveReport) -> Iterator[tuple[str, list[str]]]:
    for each in report.costs:
        disk = fmt.data_size(each.feature_bytes) if each.feature_bytes is not None else fmt.NOTHING
        cells = [fmt.count(each.prompts), fmt.count(each.tokens), disk, fmt.duration(each.seconds), each.device]
        yield f"x {each.factor:g}", cells


def _costs_table(report: CurveReport) -> Table:
    table = named_table("data", *COST_HEAD)
    for name, cells in _cost_rows(report):
        table.add_row(name, *map(plain, cells))
    return table


def tables(report: CurveReport) -> Iterator[tuple[str, str, Sequence[str], list[list[str]]]]:
    """Yields name, title, heading and rows of every table, for Markdown and pages."""
    points = [[point.label, *_cells(point)] for point in (*report.points, *report.beside)]
    yield "measured", points_title(report), ("size", *HEAD), points
    if any(len(point.domains) > 1 for point in (*report.points, *report.beside)):
        yield "domains", "by domain", ("domain", *DOMAIN_HEAD), [[name, *cells] for name, cells in _domain_rows(report)]
    if report.forecast:
        heads = [name.format(f"{report.min_speedup:g}") for name in FORECAST_HEAD]
        yield "forecast", FORECAST_TITLE, ("data", *heads), [[name, *cells] for name, cells in _forecast_rows(report)]
    if report.costs:
        yield "costs", COSTS_TITLE, ("data", *COST_HEAD), [[name, *cells] for name, cells in _cost_rows(report)]


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
