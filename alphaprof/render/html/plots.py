"""What all figures share: colours, hover texts, axes, grids of small panels. A figure is plotly's JSON, as plain dicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alphaprof.report import format as fmt
from alphaprof.report.model import Result
from alphaprof.stats.estimate import Interval

Trace = dict[str, Any]
# Okabe and Ito's for all eyes, then more: a run has few drafts.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000", "#8C564B", "#6A3D9A",
           "#B2DF8A", "#A6761D")  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "bowtie")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
INK, GRID = "#1f2933", "#e4e7eb"
PANEL = 240  # pixels that a row of panels takes


@dataclass(frozen=True)
class Figure:
    """One figure: its data and layout for plotly, and in how many pixels it is drawn. Without data it is not shown."""

    name: str
    traces: list[Trace]
    layout: dict[str, Any]
    height: int


@dataclass(frozen=True)
class Style:
    """How drafts and rules look in every figure: a draft has a colour, a rule a dash."""

    drafts: Sequence[str]
    rules: Sequence[str]

    def colour(self, draft: str) -> str:
        """The colour of a draft."""
        return COLOURS[self.drafts.index(draft) % len(COLOURS)]

    def line(self, draft: str, rule: str | None = None, dash: str = "") -> dict[str, Any]:
        """The line of a draft, with the dash of a rule or another one."""
        dash = dash if rule is None else DASHES[self.rules.index(rule) % len(DASHES)]
        return {"color": self.colour(draft), "dash": dash, "width": 2}

    def symbol(self, rule: str, filled: bool = True) -> str:
        """The mark of a rule."""
        return SYMBOLS[self.rules.index(rule) % len(SYMBOLS)] + ("" if filled else "-open")

    def offset(self, draft: str, rule: str) -> float:
        """How far beside its place on an axis of names a draft stands under a rule, so that no two coincide."""
        middle = (self.drafts.index(draft) + 0.5) / len(self.drafts) - 0.5
        return 0.6 * middle + 0.4 * self.rules.index(rule) / len(self.rules) / len(self.drafts)

    def faint(self, draft: str, share: float = 0.15) -> str:
        """The colour of a draft as the ground of something."""
        red, green, blue = (int(self.colour(draft)[place : place + 2], 16) for place in (1, 3, 5))
        return f"rgba({red},{green},{blue},{share})"


def label(text: str) -> str:
    """Untrusted text as a label: plotly reads HTML tags and entities in labels, and shows these as they are.

    It is not shortened: that is for whoever knows which part of it may be long.
    """
    return fmt.visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def points(x: Sequence[Any], y: Sequence[Any], text: Sequence[str], mode: str = "lines+markers", **more: Any) -> Trace:
    """Points with their hover texts, and the lines between them."""
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "text": list(text), "hoverinfo": "text", **more}


def said(*lines: str) -> str:
    """Lines of a hover text."""
    return "<br>".join(line for line in lines if line)


def meta(draft: str, rule: str | None = None) -> dict[str, str]:
    """What the page's buttons show and hide traces by."""
    return {"draft": draft} if rule is None else {"draft": draft, "rule": rule}


def errors(interval: Interval, colour: str) -> dict[str, Any]:
    """The error bar of a point with its interval; an infinite side has none, its hover text says so."""
    above, below = interval.high - interval.value, interval.value - interval.low
    sides = {"array": [above if math.isfinite(above) else 0.0], "arrayminus": [below if math.isfinite(below) else 0.0]}
    return sides | {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, "color": colour}


def band(x: Sequence[float], intervals: Sequence[Interval], colour: str, about: Mapping[str, Any]) -> Iterator[Trace]:
    """The ground between the ends of intervals; nothing where one of them is infinite."""
    if len(x) < 2 or not all(math.isfinite(item.low) and math.isfinite(item.high) for item in intervals):
        return
    yield {
        "type": "scatter",
        "x": [*x, *reversed(x)],
        "y": [*(item.high for item in intervals), *(item.low for item in reversed(intervals))],
        "fill": "toself",
        "fillcolor": colour,
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
        **about,
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis in the style of the page."""
    plain = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "ticks": "outside", "tickcolor": GRID}
    return plain | {"title": {"text": title, "standoff": 6}, "automargin": True, "fixedrange": True} | more


def categories(names: Sequence[str]) -> dict[str, Any]:
    """Names down an axis: places from 0 on, so that equal, numeric or empty names are nothing but names."""
    ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": [label(name) for name in names]}
    return ticks | {"autorange": "reversed"}


def layout(height: int, **more: Any) -> dict[str, Any]:
    """A figure's layout."""
    plain = {
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 28, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"size": 12}},
        "hovermode": "closest",
        "showlegend": False,
    }
    return plain | more


@dataclass
class Grid:
    """Small panels, three in a row, each with its own axes and title."""

    titles: Sequence[str]
    x: dict[str, Any]
    y: dict[str, Any]
    columns: int = 3
    traces: list[Trace] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, panel: int, trace: Trace) -> None:
        """A trace in a panel."""
        x, y = axes_of(panel)
        self.traces.append(trace | {"xaxis": x, "yaxis": y})

    def line(self, panel: int, y: float, colour: str, dash: str) -> None:
        """A level line across a panel."""
        across, up = axes_of(panel)
        shape = {"type": "line", "xref": f"{across} domain", "x0": 0, "x1": 1, "yref": up, "y0": y, "y1": y}
        self.shapes.append(shape | {"line": {"color": colour, "width": 1.2, "dash": dash}, "layer": "above"})

    def figure(self, name: str) -> Figure:
        """The panels as one figure."""
        rows = max(1, -(-len(self.titles) // self.columns))
        height = PANEL * rows + 60
        gap = 76 / height
        tall = (1 - gap * (rows - 1)) / rows
        wide = (1 - 0.07 * (self.columns - 1)) / self.columns
        axes: dict[str, Any] = {}
        titles = []
        for panel, title in enumerate(self.titles):
            row, column = divmod(panel, self.columns)
            left, top = column * (wide + 0.07), 1 - row * (tall + gap)
            x, y = axes_of(panel)
            axes[f"xaxis{x[1:]}"] = axis(**self.x) | {"domain": [left, left + wide], "anchor": y}
            axes[f"yaxis{y[1:]}"] = axis(**self.y) | {"domain": [max(0.0, top - tall), top], "anchor": x}
            titles.append(panel_title(x, title, left, top))
        return Figure(name, self.traces, layout(height, annotations=titles, shapes=self.shapes, **axes), height)


def axes_of(panel: int) -> tuple[str, str]:
    """What plotly calls the axes of a panel: the first ones have no number."""
    number = "" if panel == 0 else str(panel + 1)
    return f"x{number}", f"y{number}"


def panel_title(axis_name: str, text: str, left: float, top: float) -> dict[str, Any]:
    """A panel's title above its upper left corner; the page finds it by the panel's x axis."""
    place = {"x": left, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return place | {"name": axis_name, "text": f"<b>{label(text)}</b>", "showarrow": False, "font": {"size": 12}}


def who(result: Result, name: str) -> str:
    """The first line of a hover text: the text, the draft and the rule."""
    return f"<b>{label(name)}</b>, {label(result.draft)}, {result.rule}"
