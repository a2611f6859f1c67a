"""The figures of a report, by matplotlib: SVG for the page and for pull requests, and PNG. They compute nothing.

Text stays text: it takes the font of the page and can be searched. Colors are those of colors.css: drawn in light, and in
SVG replaced by its variables, so that a figure is light, dark or printed as its page is.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from rich.cells import cell_len, set_cell_size

from alphaprof.render import format as fmt
from alphaprof.report.build import RunReport
from alphaprof.report.formats.first_screen import ALONE, TOTAL, first_screen, speedup_text
from alphaprof.report.wording import FEW, by_text, timed
from alphaprof.stats.estimate import Interval

STYLE = (files("alphaprof.render.html") / "colors.css").read_text(encoding="utf-8")
COLORS: dict[str, str] = dict(re.findall(r"--([\w-]+): (#\w{6});", STYLE.split("@media")[0]))
NAMES = {color: name for name, color in COLORS.items()}
INK, DIM, GRID, PAPER = COLORS["ink"], COLORS["dim"], COLORS["line"], COLORS["page"]
MARKERS = "osD^vPXp"  # of drafts, in their order
VERDICTS = {"GO": "o", "NO-GO": "X", "UNDECIDED": "D"}
WIDTH, WIDE = 420, 840  # units: pixels at the size that a figure is drawn for, on a phone and on a screen
LINE = 15  # units from one line of text to the next
CELL = 6.9  # units that a letter takes at most; a wide one takes two
MARGIN = 14  # units around a figure that is a file of its own
DPI = 200  # pixels of a PNG in 72 units
LOOK: dict[Any, Any] = {
    "axes.unicode_minus": False,
    "font.sans-serif": ["DejaVu Sans"],  # which matplotlib brings along, wider than most: text never takes more room
    "font.size": 12,
    "lines.linewidth": 1.6,
    "lines.markersize": 6.5,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
}


def draft_color(place: int) -> str:
    """Return the variable of colors.css for a draft, by its place among those of the run."""
    return f"draft-{place % len(MARKERS)}"


@dataclass(frozen=True)
class Drawing:
    """A figure and what stands beside it. `said`: what it shows, in words; `paint` draws it on a sheet of `height` units."""

    name: str
    heading: str
    caption: str  # what to see in it
    said: Sequence[str]
    height: float
    paint: Callable[[Sheet], None]
    word: str = ""  # what the glossary calls what it shows
    basis: str = ""  # what its numbers rest on; beside it on the page, and thus only written in a file
    widths: Sequence[int] = (WIDTH,)  # that a page has it in: it shows the widest that fits

    def svg(self, alone: bool = False, width: int = WIDTH) -> str:
        """Return it as SVG, equal for equal reports. `alone`: as a file, with heading, caption and colors of its own."""
        file, unsigned = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with self._painted(alone, width) as figure:
            figure.savefig(file, format="svg", metadata=unsigned)
            size = [round(72 * inches, 1) for inches in figure.get_size_inches()]
        whole = file.getvalue()
        drawn = re.sub(r"<[^>]+>\s*", _on_a_page, whole[whole.index("</defs>") + len("</defs>") :])  # without its style
        about = {
            "xmlns": "http://www.w3.org/2000/svg",
            "xmlns:xlink": "http://www.w3.org/1999/xlink",
            **({"width": f"{1.5 * size[0]:g}", "height": f"{1.5 * size[1]:g}"} if alone else {"class": f"w{width}"}),
            "viewBox": f"0 0 {size[0]:g} {size[1]:g}",
            "preserveAspectRatio": "xMinYMin",
            "stroke-linejoin": "round",
            "font-family": "system-ui, sans-serif",
            "role": "img",
            "aria-label": escape(fmt.visible(f"{self.heading}: {'; '.join(self.said)}")),
        }
        head = " ".join(f'{name}="{value}"' for name, value in about.items())
        return f"<svg {head}>{f'<style>{STYLE}</style>' if alone else ''}{drawn}"

    def png(self) -> bytes:
        """Return it as PNG in light colors, with heading and caption."""
        file = io.BytesIO()
        with self._painted(alone=True) as figure:
            figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
        return file.getvalue()

    @contextmanager
    def _painted(self, alone: bool, width: int = WIDTH) -> Iterator[Figure]:
        """Yield the figure, whatever a matplotlibrc of the user's says."""
        with warnings.catch_warnings(), matplotlib.rc_context():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # where the page has a font for it, it is drawn
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(LOOK | {"svg.hashsalt": f"{self.name} {width}"})
            heads = [(line, INK, "bold") for line in textwrap.wrap(fmt.visible(self.heading), 52)] if alone else []
            heads += [(line, DIM, "normal") for line in textwrap.wrap(f"{self.caption} {self.basis}", 60)] if alone else []
            sheet = Sheet(self.height, MARGIN if alone else 0, LINE * len(heads) + 6 if alone else 0, width)
            for row, (line, color, weight) in enumerate(heads):
                sheet.text(0, LINE * (row + 0.8) - sheet.top, line, color=color, weight=weight)
            self.paint(sheet)
            yield sheet.figure


def _on_a_page(tag: re.Match[str]) -> str:
    """Return a tag of an SVG with the page's colors and font, without a name that other figures of the page have too."""
    text = re.sub(r'<g id="[^"]*"|font-family: [^;"]*; ', lambda found: "<g" if found[0][0] == "<" else "", tag[0])
    text = text.replace("'DejaVu Sans', sans-serif", "system-ui, sans-serif")
    text = re.sub(r'(?<=\.\d\d)\d+| transform="rotate\(-0 [^"]*"|(?<=\n) +', "", text)  # what changes nothing that is seen
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{NAMES[found[0]]})" if found[0] in NAMES else found[0], text)


class Sheet:
    """A figure of `width` by `height` units, counted from its top left corner; `top` units above are for its heading."""

    def __init__(self, height: float, margin: float, top: float, width: float = WIDTH) -> None:
        self.margin, self.top, self.width = margin, top, width
        self.size = width + 2 * margin, height + top + 2 * margin
        self.figure = Figure(figsize=(self.size[0] / 72, self.size[1] / 72))
        self.figure.set_facecolor(PAPER if margin else "none")

    def _place(self, x: float, y: float) -> tuple[float, float]:
        return (x + self.margin) / self.size[0], 1 - (y + self.top + self.margin) / self.size[1]

    def text(self, x: float, y: float, text: str, **look: Any) -> None:
        """Write text that begins (or ends, by `ha`) at x, on the line y."""
        ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5} if text else None  # no line runs through it
        self.figure.text(*self._place(x, y), text, va="baseline", bbox=ground, **look)

    def axes(self, top: float, height: float, left: float = 0, width: float = WIDTH) -> Axes:
        """Return axes without a frame, with grid lines behind."""
        x, y = self._place(left, top + height)
        axes = self.figure.add_axes((x, y, width / self.size[0], height / self.size[1]), facecolor="none", axisbelow=True)
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelcolor=DIM, labelsize=11)
        return axes

    def legend(self, entries: Sequence[tuple[str, str, str]]) -> float:
        """Draw (marker, color, text) beside each other at the top, and return the height that it takes."""
        x, y = 0.0, 10.0
        for marker, color, text in entries:
            size = 20 + CELL * cell_len(text)
            if x and x + size > self.width:
                x, y = 0.0, y + LINE
            across, up = self._place(x + 5, y - 4)
            self.figure.add_artist(Line2D([across], [up], marker=marker, color=color, linestyle="none"))
            self.text(x + 14, y, text)
            x += size + 10
        return y + 8


def _cut(name: str, cells: int) -> str:
    """Return a name that fits into `cells` columns; one that was cut ends in an ellipsis."""
    name = fmt.visible(name)
    return name if cell_len(name) <= cells else f"{set_cell_size(name, cells - 1).rstrip()}\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class Mark:
    """A value with its interval."""

    interval: Interval
    marker: str
    color: str
    filled: bool = True


@dataclass(frozen=True)
class Row:
    """What is named on the left and said on the right, with a word that stands out in its color; below it its marks."""

    name: str
    marks: Sequence[Mark]
    beside: str = ""
    value: str = ""
    verdict: str = ""
    apart: bool = False  # from the rows above, by a line


PITCH = 9  # units from one mark to the next
NAMES_END = 200  # units that the names of rows take at most


def _rows_height(rows: Sequence[Row]) -> float:
    return sum(LINE + PITCH * len(row.marks) + 6 for row in rows)


def _draw_rows(
    sheet: Sheet, top: float, rows: Sequence[Row], ends: tuple[float, float], unit: str = "", line: float | None = None
) -> None:
    """Draw rows below each other on one scale from `ends[0]` to `ends[1]`; `line`: the threshold, dashed. Names and values
    stand above the marks, and on a wide sheet beside them.
    """
    height, wide = _rows_height(rows), sheet.width > WIDTH
    words, values = (max(map(len, texts)) for texts in zip(*((row.verdict, row.value) for row in rows), strict=True))
    verdicts = 9 * words + 8 if words else 0
    left, right = (NAMES_END, verdicts + CELL * values + 16) if wide else (6, 6)
    scale, first = sheet.width - left - right, (LINE + PITCH + 6) / 2 if wide else LINE + 6  # of a row, its first mark
    if line is not None:
        place = (line - ends[0]) / (ends[1] - ends[0])
        sheet.text(left + place * scale, top + 11, f"threshold {line:g}x", ha="left" if place < 0.6 else "right", size=11)
        top += LINE
    axes, above = (sheet.axes(top, height, left, scale) for _ in range(2))  # below the text, and above it
    for each in (axes, above):
        each.set(xlim=ends, ylim=(height, 0), yticks=[])
    above.set(xticks=[], zorder=5)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{unit}")
    upright: list[tuple[float, dict[str, Any]]] = [(1, {"color": DIM, "linewidth": 1})] if unit else []
    upright += [(line, {"color": INK, "linewidth": 1.2, "linestyle": (0, (3, 1.5))})] if line is not None else []
    names = any(row.beside for row in rows)
    y = 0.0
    for row in rows:
        below = y + _rows_height([row])
        base = top + ((y + below) / 2 + 4 if wide else y + LINE - 1)
        if row.apart:
            axes.axhline(y + 1, color=DIM, linewidth=0.8)
        sheet.text(0, base, _cut(row.name, 16 if names else 23), weight="bold")
        sheet.text(130, base, _cut(row.beside, 9), color=DIM)
        sheet.text(sheet.width - verdicts, base, row.value, ha="right")
        if row.verdict:
            color = COLORS[row.verdict.rstrip(ALONE).lower()]
            sheet.text(sheet.width, base, row.verdict, ha="right", color=color, weight="bold")
        for value, look in upright:  # beside the marks alone, and through no word
            axes.plot([value, value], [y if wide else y + LINE + 2, below - 1], **look)
        for place, mark in enumerate(row.marks):
            _draw_mark(above, y + first + PITCH * place, mark, ends)
        y = below


def _draw_mark(axes: Axes, y: float, mark: Mark, ends: tuple[float, float]) -> None:
    """Draw a value and its interval; an end beyond the scale is an arrow."""
    low, high = max(mark.interval.low, ends[0]), min(mark.interval.high, ends[1])
    axes.plot([low, high], [y, y], color=mark.color, linewidth=2.2, clip_on=False)
    if mark.interval.low < ends[0]:
        axes.plot([low], [y], marker="<", color=mark.color, clip_on=False)
    if mark.interval.high > ends[1]:
        axes.plot([high], [y], marker=">", color=mark.color, clip_on=False)
    if ends[0] <= mark.interval.value <= ends[1]:
        face = mark.color if mark.filled else PAPER
        axes.plot([mark.interval.value], [y], mark.marker, color=mark.color, markerfacecolor=face, clip_on=False, zorder=3)


def _scale(intervals: Sequence[Interval], *marked: float) -> tuple[float, float]:
    """Return the ends of a scale for what is marked and these values; an end of an interval that is far off lies beyond."""
    values = [*marked, *(each.value for each in intervals if math.isfinite(each.value))]
    least, most = min(values), max(values)
    room = max(most - least, 0.1)
    lows, highs = ([getattr(each, end) for each in intervals] for end in ("low", "high"))
    low, high = max(min([least, *lows]), least - 1.5 * room), min(max([most, *highs]), most + 1.5 * room)
    return max(low - 0.04 * (high - low), 0), high + 0.04 * (high - low)


def answer(report: RunReport) -> Drawing | None:
    """Draw the speedup of each domain's best draft with its bounds, then that of all traffic; without step times tokens per
    round.
    """
    screen, with_times = first_screen(report), timed(report)
    asked = report.traffic.min_speedup if with_times else None
    answers = [(str(item.answer.domain), item.answer, item.answer.verdict != item.adjusted) for item in report.domains]
    total = next((item.answer for item in report.drafts if item.answer.draft == report.answer.draft), None)
    if total is not None and len(answers) > 1:
        answers.append((TOTAL, total, False))
    several = len({each.draft for _, each, _ in answers}) > 1
    rows, intervals = list[Row](), list[Interval]()
    for domain, best, alone in answers:
        known = best.speedup if with_times else best.tokens_per_round
        color, marker = COLORS[str(best.verdict).lower()], VERDICTS[str(best.verdict)]
        intervals += [known] if known else []
        rows.append(
            Row(
                domain,
                [Mark(known, marker, color, best.verdict != "UNDECIDED")] if known else [],
                str(best.draft) if several and best.draft else "",
                fmt.interval(known) if asked is None else speedup_text(known, asked, "x"),
                str(best.verdict) + (ALONE if alone else ""),
                apart=best is total,
            )
        )
    if not intervals:
        return None
    ends = _scale(intervals, 1, *([] if asked is None else [asked]))

    what = "Speedup by domain" if with_times else "Tokens per round by domain"
    about = screen.about[0] if screen.about else ""
    bounds = "the bounds that decide, each" if with_times else "intervals"
    caption = f"{what}, each with its best draft. Bars: {bounds} at {fmt.level(report.confidence)}."
    if any(alone for _, _, alone in answers):
        caption += f" {ALONE}: not certain for all {len(report.domains)} domains together (Holm)."
    return Drawing(
        "answer",
        f"{report.answer.verdict}: {about}",
        caption,
        [" ".join(filter(None, (fmt.short(row.name), row.beside, row.value, row.verdict))) for row in rows],
        _rows_height(rows) + (LINE if asked is not None else 0) + 20,
        lambda sheet: _draw_rows(sheet, 0, rows, ends, "x" if with_times else "", asked),
        basis=f"Times: {screen.times}." if with_times else f"{fmt.sentence(screen.times)}.",
        widths=(WIDTH, WIDE),
    )


def _look(report: RunReport, draft: str) -> tuple[str, str]:
    """Return the marker and the color of a draft."""
    place = report.run.drafts.index(draft)
    return MARKERS[place % len(MARKERS)], COLORS[draft_color(place)]


def _legend(report: RunReport, drafts: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return how each of several drafts is drawn; nothing for one."""
    return [(*_look(report, draft), _cut(draft, 24)) for draft in drafts] if len(drafts) > 1 else []


def acceptance(report: RunReport) -> Drawing | None:
    """Draw alpha by domain, a mark for each draft under the rule of the verdict."""
    texts = by_text([item for item in report.results if item.verdict is not None and item.alpha is not None])
    drafts = [draft for draft in report.run.drafts if any(item.draft == draft for same in texts.values() for item in same)]
    rows, said = list[Row](), list[str]()
    for name, results in texts.items():
        values = [(item, item.alpha) for item in results if item.alpha is not None]
        marks = [Mark(alpha, *_look(report, item.draft), item.on_policy and not item.lossy) for item, alpha in values]
        value = fmt.share_with_interval(results[0].alpha) if len(drafts) == 1 else ""
        rows.append(Row(name, marks, value=value))
        said += [f"{name} {item.draft} {fmt.share_with_interval(alpha)}" for item, alpha in values]
    legend = _legend(report, drafts)

    def paint(sheet: Sheet) -> None:
        _draw_rows(sheet, sheet.legend(legend) if legend else 0, rows, (0, 1))

    caption = (
        "The share of proposed tokens that the target keeps (α): the further to the right, the better the draft. If the "
        "bars of two drafts overlap, they may be equally good."
    )
    if any(report.run.draft_models[draft].by_depth for draft in drafts):
        caption += " Of a draft head: its first drafts alone (accept@1)."
    if not all(mark.filled for row in rows for mark in row.marks):
        caption += " Hollow: the rule would write another text."
    height = _rows_height(rows) + _legend_height(legend) + 20
    return Drawing("acceptance", "Acceptance by domain", caption, said, height, paint, "alpha") if rows else None


def _legend_height(entries: Sequence[tuple[str, str, str]]) -> float:
    return Sheet(1, 0, 0).legend(entries) if entries else 0


@dataclass(frozen=True)
class Curve:
    """Values of a draft; `large`: the x of a point that stands out."""

    draft: str
    points: Sequence[tuple[float, float]]
    bounds: Sequence[Interval] = ()
    dotted: bool = False
    large: float | None = None


def _draw_curves(axes: Axes, report: RunReport, curves: Sequence[Curve]) -> None:
    """Draw curves, and behind those with `bounds` the ground between finite ones."""
    for curve in curves:
        marker, color = _look(report, curve.draft)
        x, y = [point[0] for point in curve.points], [point[1] for point in curve.points]
        axes.plot(x, y, color=color, linestyle=":" if curve.dotted else "-")
        if curve.bounds and all(math.isfinite(each.high) for each in curve.bounds):
            low, high = [each.low for each in curve.bounds], [each.high for each in curve.bounds]
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        for size, shown in ((4.5, curve.points), (9, [point for point in curve.points if point[0] == curve.large])):
            if shown and not curve.dotted:
                axes.plot(*zip(*shown, strict=True), marker, color=color, markersize=size, clip_on=False, zorder=3)


def gammas(report: RunReport) -> Drawing | None:
    """Draw tokens per round, and with step times the speedup, of the whole traffic against gamma, a curve for each draft."""
    answers = [item for item in report.drafts if item.answer.draft is not None and item.by_gamma]
    tokens, speedups, said = list[Curve](), list[Curve](), list[str]()
    for item in answers:
        draft = str(item.answer.draft)
        tokens.append(Curve(draft, [(at.gamma, at.tokens_per_round) for at in item.by_gamma], large=item.answer.gamma))
        known = [(at.gamma, at.speedup) for at in item.by_gamma if at.speedup is not None]
        bounds = [speedup for _, speedup in known] if draft == report.answer.draft else []
        speedups += (
            [Curve(draft, [(at, faster.value) for at, faster in known], bounds, large=item.answer.gamma)] if known else []
        )
        for at in (item.by_gamma[0], item.by_gamma[-1]):
            faster = f", speedup {fmt.interval(at.speedup, 'x')}" if at.speedup else ""
            said.append(f"{draft} at γ {at.gamma} {fmt.number(at.tokens_per_round)} tokens per round{faster}")
    legend = _legend(report, [str(item.answer.draft) for item in answers])
    first, asked = _legend_height(legend), report.traffic.min_speedup

    def paint(sheet: Sheet) -> None:
        sheet.legend(legend)
        _panel(sheet, report, first, "tokens per round", tokens)
        if speedups:
            axes = _panel(sheet, report, first + PANEL, "speedup", speedups)
            axes.axhline(1, color=DIM, linewidth=1)
            axes.axhline(asked, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        sheet.text(WIDTH, first + PANEL * (2 if speedups else 1) + 5, "γ, drafted tokens per round", ha="right", color=DIM)

    caption = (
        "A round emits the accepted drafts and one token of the target: its tokens grow with γ until the draft is rarely "
        "right that deep. "
    )
    if speedups:
        heading = "Tokens per round and speedup by γ"
        caption += (
            f"Below: decoding gets faster while they grow by more than checking costs. Dashed: the threshold {asked:g}x; "
            "under the line at 1 the draft slows decoding down. Large: the chosen γ, as judged; shaded: the bounds of "
            f"{fmt.short(str(report.answer.draft))}."
        )
    else:
        heading = "Tokens per round by γ"
        caption += "Decoding is faster if a round costs less than that many plain decode steps."
    height = first + PANEL * (2 if speedups else 1) + 10
    return Drawing("gammas", heading, caption, said, height, paint, "speedup" if speedups else "tokens") if answers else None


MOST_PANELS = 24  # of a figure; each takes .05 s to draw
PANEL = 165  # units that a panel takes with its title above and the numbers below


def _panel(
    sheet: Sheet, report: RunReport, top: float, title: str, curves: Sequence[Curve], left: float = 0, width: float = WIDTH
) -> Axes:
    """Draw curves below a title, and return their axes."""
    sheet.text(left, top + 12, title, weight="bold")
    axes = sheet.axes(top + LINE + 8, PANEL - LINE - 34, left + 30, width - 44)
    _draw_curves(axes, report, curves)
    axes.xaxis.set_major_locator(MaxNLocator(8 if width == WIDTH else 5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    return axes


def depths(report: RunReport) -> Drawing | None:
    """Draw acceptance by depth at the largest gamma, of the drafts reached (solid) and of all rounds (dotted); a panel for
    each domain.
    """
    judged = [item for item in report.results if item.verdict is not None and item.gammas and item.gammas[-1].gamma > 1]
    texts = by_text([item for item in judged if None not in item.gammas[-1].reached])
    panels, said = list[tuple[str, list[Curve]]](), list[str]()
    for name, results in texts.items():
        curves = list[Curve]()
        for item in results:
            last = max(item.gammas, key=lambda found: found.gamma)
            enough = list(itertools.takewhile(lambda reached: (reached or 0) >= FEW, last.reached))
            kept = [(depth, share or 0.0) for depth, share in enumerate(last.conditional[: max(len(enough), 1)], 1)]
            curves.append(Curve(item.draft, kept))
            if item.draft == report.answer.draft:
                right = [(depth, share or 0.0) for depth, share in enumerate(last.marginal, 1)]
                curves.append(Curve(item.draft, right, dotted=True))
            ends = dict((kept[0], kept[-1]))
            said.append(f"{name} {item.draft} {', '.join(f'{share:.2f} at depth {depth}' for depth, share in ends.items())}")
        panels.append((name, curves))
    left_out, panels = len(panels) - MOST_PANELS, panels[:MOST_PANELS]
    drafts = [draft for draft in report.run.drafts if any(item.draft == draft for same in texts.values() for item in same)]
    legend = _legend(report, drafts)
    first, columns = _legend_height(legend), 2 if len(panels) > 1 else 1
    width = (WIDTH + 12) / columns - 12
    height = first + PANEL * math.ceil(len(panels) / columns)

    def paint(sheet: Sheet) -> None:
        sheet.legend(legend)
        for place, (name, curves) in enumerate(panels):
            row, column = divmod(place, columns)
            title = _cut(name, int(width / CELL) - 2)
            axes = _panel(sheet, report, first + PANEL * row, title, curves, column * (width + 12), width)
            axes.set(ylim=(0, 1), yticks=[0, 0.5, 1])

    caption = (
        "Solid: the share kept of the drafts reached at each depth in the round; a line that falls means that the draft is "
        f"right at first and wrong later. It ends where fewer than {FEW} drafts were reached."
    )
    if left_out > 0:
        caption += f" {fmt.many(left_out, 'more domain')}: see the JSON report."
    if report.answer.draft in drafts:
        mine = fmt.short(str(report.answer.draft))
        caption += (
            f" Dotted: the share of the rounds of {mine} that were right up to there; near 0, a larger γ gains nothing."
        )
    return Drawing("depths", "Acceptance by depth", caption, said, height, paint, "depth") if panels else None


def context(report: RunReport) -> Drawing | None:
    """Draw the speedup (without step times: tokens per round) against the context, a curve for each draft."""
    with_times = any(item.speedup is not None for axis in report.section("context") for item in axis.ranges)
    what, unit = ("speedup", "x") if with_times else ("tokens per round", "")
    curves, said = list[Curve](), list[str]()
    for axis in report.section("context"):
        values = [(item.context, item.speedup if with_times else item.tokens_per_round) for item in axis.ranges]
        known = [(at, value) for at, value in values if value is not None]
        bounds = [value for _, value in known] if axis.draft == report.answer.draft else []
        curves += [Curve(axis.draft, [(at, value.value) for at, value in known], bounds)] if known else []
        said += [f"{axis.draft} at {at:.0f} tokens {fmt.interval(value, unit)}" for at, value in (known[:1] + known[-1:])]
    legend = _legend(report, [curve.draft for curve in curves])
    first = _legend_height(legend)

    def paint(sheet: Sheet) -> None:
        sheet.legend(legend)
        axes = _panel(sheet, report, first, what, curves)
        axes.set_xscale("log", base=2)
        places = [at for curve in curves for at, _ in curve.points]
        powers = [2**power for power in range(math.floor(math.log2(min(places))), math.ceil(math.log2(max(places))) + 1)]
        axes.set_xticks(powers[:: math.ceil(len(powers) / 8)], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        if with_times:
            axes.axhline(1, color=DIM, linewidth=1)
        sheet.text(WIDTH, first + PANEL + 5, "tokens of context", ha="right", color=DIM)

    caption = (
        f"The {what} by tokens of context so far. A curve may fall because longer documents differ: the lines below the "
        "tables say what happens within documents."
    )
    if with_times:
        caption += " Under the line at 1 the draft slows decoding down. Each length takes its own best γ."
    if any(curve.bounds for curve in curves):
        caption += f" Shaded: the bounds of {fmt.short(str(report.answer.draft))}."
    heading, word = f"{fmt.sentence(what)} by length of context", "speedup" if with_times else "tokens"
    return Drawing("context", heading, caption, said, first + PANEL + 10, paint, word) if curves else None


FIGURES = {"answer": answer, "acceptance": acceptance, "gammas": gammas, "depths": depths, "context": context}
