"""The figures of the page, drawn with plotly from a `Report`: acceptance, speedup, depths, difficulty. They compute nothing.

plotly is an extra, and slow to import: import this module only to write a page.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from plotly.graph_objects import Figure, Scatter
from plotly.subplots import make_subplots

from alphaprof.render import format as fmt
from alphaprof.report.answer import GammaResult, Result
from alphaprof.report.build import Report
from alphaprof.report.sections.target import Decile
from alphaprof.report.wording import FEW, alpha_name, by_kind, by_text, timed, uncertified
from alphaprof.stats.estimate import Interval

# Okabe and Ito's for all eyes, then more: a run has few drafts.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000", "#8C564B", "#6A3D9A",
           "#B2DF8A", "#A6761D")  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "bowtie")
INK, GRID, RED, CLEAR = "#1f2933", "#e4e7eb", "#b42318", "rgba(0,0,0,0)"  # page.css replaces the first three in the dark
COLUMNS, PANEL = 3, 240  # small panels in a row, and the pixels that a row of them takes
BAR = 38  # pixels that a row of points takes
AXIS = {
    "title": {"standoff": 6},
    "gridcolor": GRID,
    "linecolor": GRID,
    "tickcolor": GRID,
    "showline": True,
    "ticks": "outside",
    "zeroline": False,
    "automargin": True,
    "fixedrange": True,
}
TEMPLATE = {
    "layout": {
        "margin": {"l": 56, "r": 16, "t": 28, "b": 44},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"size": 12}},
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": AXIS,
        "yaxis": AXIS,
    }
}


@dataclass(frozen=True)
class Style:
    """How drafts and rules look in every figure: a draft has a colour, a rule a mark."""

    drafts: Sequence[str]
    rules: Sequence[str]

    @classmethod
    def of(cls, report: Report) -> Style:
        """Return the style of all figures of a report."""
        return cls(report.run.drafts, list(dict.fromkeys(item.rule for item in report.results)))

    def colour(self, draft: str) -> str:
        """Return the colour of a draft."""
        return COLOURS[self.drafts.index(draft) % len(COLOURS)]

    def symbol(self, rule: str, filled: bool = True) -> str:
        """Return the mark of a rule."""
        return SYMBOLS[self.rules.index(rule) % len(SYMBOLS)] + ("" if filled else "-open")

    def offset(self, draft: str, rule: str) -> float:
        """Return how far beside its place on an axis of names a draft stands under a rule, so that no two coincide."""
        middle = (self.drafts.index(draft) + 0.5) / len(self.drafts) - 0.5
        return 0.6 * middle + 0.4 * self.rules.index(rule) / len(self.rules) / len(self.drafts)


def label(text: str) -> str:
    """Escape untrusted text for plotly, which reads HTML tags and entities in labels and hover texts.

    It is not shortened: that is for the caller, who knows which part of it may be long.
    """
    return fmt.visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def hover_text(*lines: str) -> str:
    """Join the lines of a hover text; empty ones are left out."""
    return "<br>".join(line for line in lines if line)


def points(x: Sequence[float], y: Sequence[Any], text: Sequence[str], mode: str = "lines+markers", **more: Any) -> Scatter:
    """Return points with their hover texts, and the lines between them."""
    return Scatter(x=x, y=y, text=text, mode=mode, hoverinfo="text", **more)


def errors(intervals: Sequence[Interval], colour: str) -> dict[str, Any]:
    """Return the error bars of points; an infinite side has none, and the hover text says so."""
    above, below = [item.high - item.value for item in intervals], [item.value - item.low for item in intervals]
    array, arrayminus = ([size if math.isfinite(size) else 0.0 for size in sizes] for sizes in (above, below))
    sides = {"type": "data", "symmetric": False, "array": array, "arrayminus": arrayminus}
    return sides | {"thickness": 1.2, "width": 3, "color": colour}


def band(x: Sequence[float], intervals: Sequence[Interval], colour: str) -> list[Scatter]:
    """Return the ground between the ends of intervals; nothing if one of them is infinite."""
    if len(x) < 2 or not all(math.isfinite(item.low) and math.isfinite(item.high) for item in intervals):
        return []
    ends = [*(item.high for item in intervals), *(item.low for item in reversed(intervals))]
    look = {"fill": "toself", "fillcolor": colour, "opacity": 0.15, "line": {"width": 0}, "mode": "lines"}
    return [Scatter(x=[*x, *reversed(x)], y=ends, hoverinfo="skip", **look)]


def panels(titles: Collection[str], x: str, y: str, **axis: Any) -> Figure:
    """Return an empty figure of small panels: their titles, and the titles of the axes that all have. `axis`: what is set on
    every y axis.
    """
    columns = min(COLUMNS, len(titles)) or 1
    rows = math.ceil(len(titles) / columns) or 1
    height = PANEL * rows + 60
    names = [f"<b>{label(title)}</b>" for title in titles]
    gaps = {"horizontal_spacing": 0.07, "vertical_spacing": 76 / height}
    figure = make_subplots(rows, columns, subplot_titles=names, **gaps)
    figure.update_layout(template=TEMPLATE, height=height)
    figure.update_annotations(font_size=12 if all(len(title) * columns <= 84 for title in titles) else 9)
    figure.update_xaxes(title_text=x, dtick=1)
    figure.update_yaxes(**axis)
    return figure.update_yaxes(title_text=y, col=1)


def place(item: Result | Decile, panel: int = 0) -> dict[str, Any]:
    """Return where a trace stands, and what the page's buttons show and hide it by."""
    return {"xaxis": f"x{panel + 1}", "yaxis": f"y{panel + 1}", "meta": {"draft": item.draft, "rule": item.rule}}


def who(result: Result, name: str) -> str:
    """Return the first line of a hover text: the text, the draft and the rule."""
    return f"<b>{label(name)}</b>, {label(result.draft)}, {result.rule}"


def acceptance(report: Report) -> Figure:
    """Draw alpha by domain, a point for each draft and rule."""
    texts, style = by_text(report.results), Style.of(report)
    figure = Figure(layout={"template": TEMPLATE, "height": BAR * len(texts) + 90})
    for row, (name, results) in enumerate(texts.items()):
        for item in results:
            if item.alpha is None:
                continue
            colour, symbol = style.colour(item.draft), style.symbol(item.rule, item.on_policy and not item.lossy)
            point = points(
                [item.alpha.value],
                [row + style.offset(item.draft, item.rule)],
                [_alpha_said(item, name, alpha_name(report.run, item.draft))],
                "markers",
                marker={"color": colour, "size": 8, "symbol": symbol},
                error_x=errors([item.alpha], colour),
            )
            figure.add_trace(point.update(place(item)))
    figure.update_xaxes(title_text="acceptance (α)", range=[0, 1.02])
    # Names are ticks at places from 0 on, so that equal, numeric or empty ones are nothing but names.
    names = {"tickvals": list(range(len(texts))), "ticktext": [label(name) for name in texts]}
    return figure.update_yaxes(**names, autorange="reversed")


def _alpha_said(item: Result, name: str, alpha: str) -> str:
    return hover_text(
        who(item, name),
        f"{alpha} {fmt.share_with_interval(item.alpha)}",
        f"coverage {fmt.share(item.coverage)}" if item.coverage is not None and item.coverage < 1 else "",
        f"{fmt.documents(item.documents, item.clusters)} documents, {fmt.count(item.positions)} positions",
        "" if item.on_policy else "off-policy: the rule's own decoding would not emit this text",
        "lossy: measured per step on the target's own text" if item.lossy else "",
    )


def speedups(report: Report) -> Figure:
    """Draw the speedup (without step times: tokens per round) against gamma, a panel for each domain."""
    what, mode = ("speedup", "tozero") if timed(report) else ("tokens per round", "normal")
    texts, style = by_text([item for item in report.results if item.gammas]), Style.of(report)
    figure = panels(texts, "γ", what, rangemode=mode)
    for panel, (name, results) in enumerate(texts.items()):
        for result in results:
            for trace in _gamma_curve(result, name, timed(report), style):
                figure.add_trace(trace.update(place(result, panel)))
    if timed(report):
        figure.add_hline(1.0, line={"color": RED, "width": 1.2, "dash": "dash"})
        figure.add_hline(report.traffic.min_speedup, line={"color": INK, "width": 1.2, "dash": "dot"})
    return figure


def _gamma_curve(result: Result, name: str, with_times: bool, style: Style) -> list[Scatter]:
    """Return a curve and the ground of its intervals; without ground and with an open point if one has no end."""
    values = [(item, item.speedup if with_times else item.tokens_per_round) for item in result.gammas]
    known = [(item, value) for item, value in values if value is not None]
    x, intervals, colour = [item.gamma for item, _ in known], [value for _, value in known], style.colour(result.draft)
    marks = {
        "size": [9 if gamma == result.best_gamma else 5 for gamma in x],
        "symbol": [style.symbol(result.rule, math.isfinite(value.high)) for value in intervals],
        "opacity": 1,
    }
    y, text = [value.value for value in intervals], [_speed_said(result, name, item) for item, _ in known]
    curve = points(x, y, text, line={"color": colour}, marker=marks)
    return [*band(x, intervals, colour), curve] if known else []


def _speed_said(result: Result, name: str, item: GammaResult) -> str:
    return hover_text(
        f"{who(result, name)}, γ {item.gamma}{' (best here)' if item.gamma == result.best_gamma else ''}",
        f"speedup {fmt.interval(item.speedup, 'x')}" if item.speedup else "",
        f"whole requests {fmt.interval(item.request_speedup, 'x')}" if item.request_speedup else "",
        f"tokens per round {fmt.interval(item.tokens_per_round)}",
    )


def depths(report: Report) -> Figure:
    """Draw acceptance by depth at the largest gamma, conditional (solid) and marginal (dotted), a panel for each domain."""
    texts = by_text([item for item in report.results if item.gammas and None not in item.gammas[-1].reached])
    style = Style.of(report)
    figure = panels(texts, "depth in the round", "accepted", range=[0, 1.02])
    for panel, (name, results) in enumerate(texts.items()):
        for result in results:
            for conditional in (True, False):
                figure.add_trace(_depth_curve(result, name, conditional, style).update(place(result, panel)))
    return figure


def _depth_curve(result: Result, name: str, conditional: bool, style: Style) -> Scatter:
    """Return a curve over depths; conditional shares of few drafts are open points."""
    last = max(result.gammas, key=lambda item: item.gamma)
    kind, values, dash = ("conditional", last.conditional, "solid") if conditional else ("marginal", last.marginal, "dot")
    text = []
    for depth, (value, drafts) in enumerate(zip(values, last.reached, strict=True), 1):
        of = f"{fmt.number(drafts, 0)} drafts that were reached" if conditional else "all rounds with a proposal"
        text.append(hover_text(who(result, name), f"depth {depth}: {kind} {fmt.share(value)}", f"of {of}"))
    symbols = [style.symbol(result.rule, not conditional or (drafts or 0) >= FEW) for drafts in last.reached]
    line, marks = {"color": style.colour(result.draft), "dash": dash}, {"size": 5, "symbol": symbols}
    return points(list(range(1, len(values) + 1)), values, text, line=line, marker=marks)


def context(report: Report) -> Figure:
    """Draw the speedup (without step times: tokens per round) against the context, a curve for each draft."""
    style, what = Style.of(report), "speedup" if timed(report) else "tokens per round"
    figure = panels(["whole traffic"], "tokens of context", what)
    for axis in report.context:
        values = [(item, item.speedup if timed(report) else item.tokens_per_round) for item in axis.ranges]
        known = [(item.context, value) for item, value in values if value is not None]
        x, intervals, colour = [at for at, _ in known], [value for _, value in known], style.colour(axis.draft)
        text = [hover_text(label(axis.draft), f"context {at:.0f}", f"{what} {fmt.interval(value)}") for at, value in known]
        curve = points(x, [item.value for item in intervals], text, line={"color": colour})
        for trace in [*band(x, intervals, colour), curve] if known else []:
            figure.add_trace(trace.update(meta={"draft": axis.draft}))
    if timed(report):
        figure.add_hline(1.0, line={"color": RED, "width": 1.2, "dash": "dash"})
    return figure.update_xaxes(type="log", dtick=None)


def difficulty(report: Report) -> Figure:
    """Draw acceptance in tenths of the positions by the target's margin, and what of it was certain (dotted); a panel for
    each kind of text.
    """
    nothing, style = uncertified(report), Style.of(report)
    kinds = by_kind([item for item in report.difficulty if item.axis == "margin"])
    titles = [f"target's margin{kind}" for kind in kinds]
    figure = panels(titles, "tenths of the positions, lowest first", "accepted", range=[0, 1.02])
    for panel, items in enumerate(kinds.values()):
        for draft, rule in dict.fromkeys((item.draft, item.rule) for item in items):
            mine = [item for item in items if (item.draft, item.rule) == (draft, rule)]
            accepted = [(item, item.accepted) for item in mine if item.accepted is not None]
            certified = [(item, item.certified) for item in mine if item.certified is not None and draft not in nothing]
            for shares, dash in ((accepted, "solid"), (certified, "dot")):
                for trace in _tenth_curve(shares, style.colour(draft), dash, style.symbol(rule)):
                    figure.add_trace(trace.update(place(mine[0], panel)))
    return figure


def _tenth_curve(shares: Sequence[tuple[Decile, Interval]], colour: str, dash: str, symbol: str) -> list[Scatter]:
    """Return a curve over tenths, with the ground of its intervals if it is solid."""
    x, intervals = [item.place for item, _ in shares], [share for _, share in shares]
    y, text = [share.value for share in intervals], [_decile_said(item) for item, _ in shares]
    curve = points(x, y, text, line={"color": colour, "dash": dash}, marker={"size": 5, "symbol": symbol})
    return [*(band(x, intervals, colour) if dash == "solid" else []), curve] if shares else []


def _decile_said(item: Decile) -> str:
    low = "" if item.low is None else f"from {item.low:.3g} "
    high = "" if item.high is None else f"below {item.high:.3g}"
    return hover_text(
        f"{label(item.draft)}, {item.rule}",
        f"{item.axis} {low}{high}, {fmt.count(item.positions)} positions",
        f"certified {fmt.share_with_interval(item.certified)}" if item.certified is not None else "",
        f"accepted {fmt.share_with_interval(item.accepted)}",
    )


# By name; the sections that they stand in say what there is to see in them.
FIGURES = {"acceptance": acceptance, "speedups": speedups, "depths": depths, "difficulty": difficulty, "context": context}
