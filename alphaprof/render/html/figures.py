"""The figures of the page, from a `Report`: acceptance, speedup, depth, bursts, causes, difficulty, times; and what they
share: colours, hover texts, axes, grids of small panels. A figure is plotly's JSON, as plain dicts. They compute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alphaprof.log.manifest import DraftFacts
from alphaprof.render.wording import FEW, alpha_name, by_kind, by_text, reached, text_name, uncertified
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import GammaResult, Result
from alphaprof.report.sections.attribution import CAUSES, Attribution, Cause
from alphaprof.report.sections.difficulty import Decile
from alphaprof.stats.estimate import Interval

Trace = dict[str, Any]
# Okabe and Ito's for all eyes, then more: a run has few drafts.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000", "#8C564B", "#6A3D9A",
           "#B2DF8A", "#A6761D")  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "bowtie")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
INK, GRID = "#1f2933", "#e4e7eb"
PANEL = 240  # pixels that a row of panels takes
RED = "#b42318"
BAR = 38  # pixels that a row of points takes
# In pairs of light and dark, so that neighbours in a bar differ for all eyes; hues apart from those of drafts say nothing.
CAUSE_COLOURS = (
    "#bfc5cc",
    "#9aa5b1",
    "#f2cf63",
    "#b5838d",
    "#8d6cab",
    "#4fb3a5",
    "#3a7ca5",
    "#e39774",
    "#a63d40",
    "#5f7161",
)
CAUSE_BAR, GAP, TOP, BOTTOM = 26, 64, 84, 30  # pixels that a bar takes, what lies between panels, above and below them
AXES = {"margin": "target's margin, p₁ − p₂", "entropy": "target's entropy, nats"}


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


def hover_text(*lines: str) -> str:
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
            up = self.y if column == 0 else self.y | {"title": ""}  # that of the first panel is read for the row
            axes[f"yaxis{y[1:]}"] = axis(**up) | {"domain": [max(0.0, top - tall), top], "anchor": x}
            titles.append(panel_title(x, title, left, top))
        return Figure(name, self.traces, layout(height, annotations=titles, shapes=self.shapes, **axes), height)


def axes_of(panel: int) -> tuple[str, str]:
    """What plotly calls the axes of a panel: the first ones have no number."""
    number = "" if panel == 0 else str(panel + 1)
    return f"x{number}", f"y{number}"


def panel_title(axis_name: str, text: str, left: float, top: float) -> dict[str, Any]:
    """A panel's title above its upper left corner; the page finds it by the panel's x axis."""
    place = {"x": left, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return place | {
        "name": axis_name,
        "text": f"<b>{label(text)}</b>",
        "showarrow": False,
        "font": {"size": 12 if len(text) <= 26 else 9},
    }


def who(result: Result, name: str) -> str:
    """The first line of a hover text: the text, the draft and the rule."""
    return f"<b>{label(name)}</b>, {label(result.draft)}, {result.rule}"


def acceptance(report: Report, style: Style) -> Figure:
    """Alpha by domain, a point a draft and rule."""
    texts = by_text(report.results)
    height = BAR * len(texts) + 90
    traces: list[Trace] = []
    for place, (name, results) in enumerate(texts.items()):
        for item in results:
            if item.alpha is not None:
                point = _point(
                    item, place, item.alpha.value, _alpha_said(item, name, alpha_name(report.run, item.draft)), style
                )
                point["marker"]["symbol"] = style.symbol(item.rule, item.on_policy and not item.lossy)
                traces.append(point | {"error_x": errors(item.alpha, style.colour(item.draft))})
    axes = {"xaxis": axis("acceptance (α)", range=[0, 1.02]), "yaxis": axis(**categories(list(texts)))}
    return Figure("acceptance", traces, layout(height, **axes), height)


def _point(item: Result, place: int, x: float, text: str, style: Style) -> Trace:
    """The point of a result, beside the place that its text has on an axis of names."""
    mark = {"color": style.colour(item.draft), "size": 8, "symbol": style.symbol(item.rule)}
    y = place + style.offset(item.draft, item.rule)
    return points([x], [y], [text], "markers", marker=mark, meta=meta(item.draft, item.rule))


def _alpha_said(item: Result, name: str, alpha: str) -> str:
    off = "" if item.on_policy else "off-policy: the rule's own decoding would not emit this text"
    lossy = "lossy: one step at a time along the target's own text" if item.lossy else ""
    covered = f"coverage {fmt.share(item.coverage)}" if item.coverage is not None and item.coverage < 1 else ""
    counted = f"{fmt.documents(item.documents, item.clusters)} documents, {fmt.count(item.positions)} positions"
    return hover_text(who(item, name), f"{alpha} {fmt.share_with_interval(item.alpha)}", covered, counted, off, lossy)


def speedups(report: Report, style: Style) -> Figure:
    """Speedup (without step times: tokens per round) against gamma, a panel a domain."""
    timed = any(item.speedup is not None for result in report.results for item in result.gammas)
    shown = by_text([item for item in report.results if item.gammas])
    y = {"title": "speedup" if timed else "tokens per round", "rangemode": "tozero" if timed else "normal"}
    grid = Grid(list(shown), {"title": "γ", "dtick": 1}, y)
    for panel, (name, results) in enumerate(shown.items()):
        if timed:
            grid.line(panel, 1.0, RED, "dash")
            grid.line(panel, report.traffic.min_speedup, INK, "dot")
        for result in results:
            for trace in _against_gamma(result, name, timed, style):
                grid.add(panel, trace)
    return grid.figure("speedups")


def _against_gamma(result: Result, name: str, timed: bool, style: Style) -> Iterator[Trace]:
    """A curve with the ground of its intervals. Where some of them have no end it has no ground, and open points."""
    about = {"meta": meta(result.draft, result.rule)}
    values = [(item, item.speedup if timed else item.tokens_per_round) for item in result.gammas]
    known = [(item, value) for item, value in values if value is not None]
    if not known:
        return
    x = [item.gamma for item, _ in known]
    yield from band(x, [value for _, value in known], style.faint(result.draft), about)
    marks = {
        "size": [9 if item.gamma == result.best_gamma else 5 for item, _ in known],
        "symbol": [style.symbol(result.rule, math.isfinite(value.high)) for _, value in known],
        "opacity": 1,
    }
    y, text = [value.value for _, value in known], [_speed_said(result, name, item) for item, _ in known]
    yield points(x, y, text, line=style.line(result.draft, result.rule), marker=marks) | about


def _speed_said(result: Result, name: str, item: GammaResult) -> str:
    best = " (best here)" if item.gamma == result.best_gamma else ""
    breaks = f"faster from {fmt.number(item.break_even_length)} on" if item.break_even_length is not None else ""
    cost = f"c {fmt.number(item.draft_cost)}, v {fmt.number(item.verify_cost)}" if item.verify_cost is not None else ""
    return hover_text(
        f"{who(result, name)}, γ {item.gamma}{best}",
        f"speedup {fmt.interval(item.speedup, 'x')}" if item.speedup else "",
        f"whole requests {fmt.interval(item.request_speedup, 'x')}" if item.request_speedup else "",
        f"tokens per round {fmt.interval(item.tokens_per_round)}",
        breaks,
        cost,
    )


def depths(report: Report, style: Style) -> Figure:
    """Acceptance by depth at the largest gamma, conditional and marginal, a panel a domain."""
    shown = by_text([item for item in report.results if item.gammas and None not in item.gammas[-1].reached])
    grid = Grid(list(shown), {"title": "depth in the round", "dtick": 1}, {"title": "accepted", "range": [0, 1.02]})
    for panel, (name, results) in enumerate(shown.items()):
        for result in results:
            last = max(result.gammas, key=lambda item: item.gamma)
            grid.add(panel, _by_depth(result, name, "conditional", last, style))
            grid.add(panel, _by_depth(result, name, "marginal", last, style))
    return grid.figure("depths")


def _by_depth(result: Result, name: str, kind: str, last: GammaResult, style: Style) -> Trace:
    """A curve over depths; conditional shares of few drafts are open points."""
    conditional = kind == "conditional"
    values = last.conditional if conditional else last.marginal
    text = []
    for depth, (value, drafts) in enumerate(zip(values, last.reached, strict=True), 1):
        of = f"{fmt.number(drafts, 0)} drafts that were reached" if conditional else "all rounds with a proposal"
        text.append(hover_text(who(result, name), f"depth {depth}: {kind} {fmt.share(value)}", f"of {of}"))
    symbols = [style.symbol(result.rule, not conditional or (reached or 0) >= FEW) for reached in last.reached]
    line = style.line(result.draft, dash="solid" if conditional else "dot")
    marks, about = {"size": 5, "symbol": symbols}, meta(result.draft, result.rule)
    return points(range(1, len(values) + 1), values, text, line=line, marker=marks, meta=about)


def bursts(report: Report, style: Style) -> Figure:
    """Burstiness, and what the textbook formula gets wrong, by domain. Draft heads have neither: neighbouring positions are
    of different depths of a round.
    """
    of_one_depth = [item for item in report.results if not report.run.draft_models[item.draft].by_depth]
    texts = by_text([item for item in of_one_depth if item.burstiness is not None and item.gammas])
    height = BAR * len(texts) + 110
    traces: list[Trace] = []
    for place, (name, results) in enumerate(texts.items()):
        for item in results:
            if item.burstiness is not None:
                text = hover_text(who(item, name), f"burstiness {fmt.difference(item.burstiness, 2)}")
                point = _point(item, place, item.burstiness.value, text, style)
                traces.append(point | {"error_x": errors(item.burstiness, style.colour(item.draft))})
            wrong, words = _textbook(item)
            if wrong is not None:
                point = _point(item, place, wrong, hover_text(who(item, name), words), style)
                traces.append(point | {"xaxis": "x2", "yaxis": "y2"})
    rows = categories(list(texts))
    zero = {"zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1}
    axes = {
        "xaxis": axis("burstiness", domain=[0, 0.47], **zero),
        "yaxis": axis(**rows),
        "xaxis2": axis("error of the formula", domain=[0.53, 1], tickformat="+.1~%", **zero),
        "yaxis2": axis(**rows) | {"anchor": "x2", "showticklabels": False, "matches": "y"},
    }
    return Figure("bursts", traces, layout(height, **axes), height)


def _textbook(item: Result) -> tuple[float | None, str]:
    """By what share the textbook formula is too high at the best gamma (else at the largest), and that in words."""
    wanted = item.best_gamma or max(each.gamma for each in item.gammas)
    best = next(each for each in item.gammas if each.gamma == wanted)
    if best.iid_error is None:
        return None, ""
    side = "high" if best.iid_error >= 0 else "low"
    promised = f"the textbook formula promises {fmt.number(best.iid_tokens_per_round)} tokens per round at γ {wanted}"
    return best.iid_error, hover_text(promised, f"that is {fmt.signed_percent(abs(best.iid_error)).lstrip('+')} too {side}")


def step_times(report: Report, style: Style) -> Figure | None:
    """What a target step takes by the tokens that it verifies, and a draft step."""
    cost = report.times
    if cost is None or not cost.target_ms:
        return None
    tokens = list(cost.target_ms)
    text = [f"target over {count} tokens: {fmt.number(ms, 2)} ms" for count, ms in cost.target_ms.items()]
    line = {"color": INK, "width": 2}
    traces = [points(tokens, list(cost.target_ms.values()), text, line=line, name="target, one step")]
    steps = {
        draft: (ms, "a later step" if cost.draft_first_ms.get(draft) else "one step") for draft, ms in cost.draft_ms.items()
    }
    steps |= {draft: (ms, "one search") for draft, ms in cost.lookup_ms.items()}
    for draft, (ms, what) in steps.items():
        name, line = f"{label(draft)}, {what}", style.line(draft, dash="dash")
        text = [f"{name}: {fmt.number(ms, 3)} ms"] * 2
        traces.append(points([tokens[0], tokens[-1]], [ms, ms], text, "lines", line=line, name=name, meta=meta(draft)))
    for draft, first in cost.draft_first_ms.items():
        name = f"{label(draft)}, first step of a round"
        text = [f"{name}, over {fmt.many(count, 'token')}: {fmt.number(ms, 3)} ms" for count, ms in first.items()]
        line = style.line(draft, dash="dot")
        traces.append(points(list(first), list(first.values()), text, line=line, name=name, meta=meta(draft)))
    axes = {"xaxis": axis("tokens in the step", dtick=1), "yaxis": axis("ms", rangemode="tozero")}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    return Figure("steps", traces, layout(320, showlegend=True, legend=legend, **axes), 320)


def causes(report: Report, style: Style) -> Figure:
    """What is lost under the rules of the verdict, in shares of the positions; causes in the order in which they apply."""
    judged = {(item.draft, item.rule) for item in report.results if item.verdict is not None}
    groups: dict[tuple[str, str], list[Attribution]] = {}
    for item in report.causes:
        if (item.draft, item.rule) in judged:
            groups.setdefault((item.draft, item.rule), []).append(item)
    known = {cause.name for items in groups.values() for item in items for cause in item.causes}
    names = [name for name in CAUSES if name in known]
    inner = sum(CAUSE_BAR * len(items) + GAP for items in groups.values()) - GAP
    axes: dict[str, Any] = {}
    traces: list[Trace] = []
    titles, top = [], 1.0
    for panel, ((draft, rule), items) in enumerate(groups.items()):
        across, up = axes_of(panel)
        tall = CAUSE_BAR * len(items) / inner
        places = categories([text_name(item, items, not item.on_policy) for item in items])
        axes[f"yaxis{up[1:]}"] = axis(**places) | {"domain": [max(0.0, top - tall), top], "anchor": across}
        axes[f"xaxis{across[1:]}"] = axis(range=[0, 1], tickformat=".0%") | {"anchor": up}
        titles.append(panel_title(across, f"{draft}, {rule}", 0, top))
        for name in names:
            about = {"meta": meta(draft, rule), "legendgroup": name, "showlegend": False}
            bars = _bars(items, name, report) | about | {"xaxis": across, "yaxis": up}
            traces += [bars] if bars["y"] else []
        top -= tall + GAP / inner
    # The legend is of bars of no length, which belong to no draft: it stays when drafts are hidden.
    traces[:0] = [
        _bars([], name, report) | {"x": [None], "y": [None], "legendgroup": name, "meta": {"legend": True}} for name in names
    ]
    legend = {"orientation": "h", "y": 1 + 24 / inner, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    about = {"barmode": "stack", "bargap": 0.25, "showlegend": True, "legend": legend, "annotations": titles}
    height, margin = inner + TOP + BOTTOM, {"l": 56, "r": 16, "t": TOP, "b": BOTTOM}
    return Figure("causes", traces, layout(height, **about, **axes) | {"margin": margin}, height)


def _bars(items: Sequence[Attribution], name: str, report: Report) -> Trace:
    """The bars of one cause; nothing where a domain loses nothing to it."""
    bars = [(place, item, cause) for place, item in enumerate(items) for cause in item.causes if cause.name == name]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [place for place, _, _ in bars],
        "x": [cause.share.value for _, _, cause in bars],
        "text": [_cause_said(item, cause, report.run.draft_models[item.draft]) for _, item, cause in bars],
        "textposition": "none",
        "hoverinfo": "text",
        "marker": {"color": CAUSE_COLOURS[CAUSES.index(name)]},
    }


def _cause_said(item: Attribution, cause: Cause, draft: DraftFacts) -> str:
    now, then = reached(item.tokens_per_round, item.speedup), reached(cause.tokens_per_round, cause.speedup)
    what = "speedup" if cause.speedup is not None else "tokens per round"
    most = "" if draft.by_depth else "at most "
    gained = f"{what} at γ {item.gamma}: {now} now, {most}{then} with it" if then != fmt.NOTHING else ""
    return hover_text(
        f"<b>{label(fmt.short(item.domain))}</b>, {label(item.draft)}, {item.rule}: {cause.name}",
        f"{fmt.share_with_interval(cause.share)} of the positions; lost in all {fmt.share_with_interval(item.lost)}",
        gained,
        f"remedy: {label(cause.remedy)}",
    )


def difficulty(report: Report, style: Style) -> Figure:
    """Acceptance in tenths of the positions, a panel for the margin and one for the entropy."""
    kinds = by_kind(report.difficulty)
    grid = Grid(
        [f"{what}{kind}" for kind in kinds for what in AXES.values()],
        {"title": "tenths of the positions (fewer where values tie), lowest first", "dtick": 1},
        {"title": "accepted", "range": [0, 1.02]},
        columns=2,
    )
    for row, items in enumerate(kinds.values()):
        for column, measure in enumerate(AXES):
            curves: dict[tuple[str, str], list[Decile]] = {}
            for item in items:
                if item.axis == measure and item.accepted is not None:
                    curves.setdefault((item.draft, item.rule), []).append(item)
            for (draft, rule), mine in curves.items():
                curve, accepted = _curve(mine, "accepted"), [item.accepted for item in mine if item.accepted is not None]
                about = {"meta": meta(draft, rule)}
                for trace in band(curve["x"], accepted, style.faint(draft), about):
                    grid.add(2 * row + column, trace)
                grid.add(2 * row + column, curve | about | {"line": style.line(draft, rule)})
    return grid.figure("difficulty")


def certified(report: Report, style: Style) -> Figure:
    """What was certain beside what was accepted, in tenths by the margin, a panel a rule."""
    panels: dict[str, dict[str, list[Decile]]] = {}
    margins = [item for item in report.difficulty if item.axis == "margin"]
    nothing = uncertified(report)
    certain = {(item.draft, item.rule) for item in margins if item.certified is not None and item.draft not in nothing}
    for kind, items in by_kind([item for item in margins if (item.draft, item.rule) in certain]).items():
        for item in items:
            curves = panels.setdefault(f"{item.rule}{kind}", {})
            if item.certified is not None and item.draft not in nothing:
                curves.setdefault(item.draft, []).append(item)
    titles = {"title": "tenths by margin, lowest first", "dtick": 1}
    grid = Grid(list(panels), titles, {"title": "share", "range": [0, 1.02]})
    for panel, drafts in enumerate(panels.values()):
        for draft, items in drafts.items():
            for share, dash in (("certified", "solid"), ("accepted", "dot")):
                grid.add(panel, _curve(items, share) | {"line": style.line(draft, dash=dash), "meta": meta(draft)})
    return grid.figure("certified")


def _curve(items: Sequence[Decile], share: str) -> Trace:
    """A share of tenths, `accepted` or `certified`, of one draft and rule; every hover text says both."""
    values = [item.certified if share == "certified" else item.accepted for item in items]
    y = [value.value if value is not None else None for value in values]
    return points([item.place for item in items], y, [_decile_said(item) for item in items], marker={"size": 5})


def _decile_said(item: Decile) -> str:
    low = "" if item.low is None else f"from {item.low:.3g} "
    high = "" if item.high is None else f"below {item.high:.3g}"
    return hover_text(
        f"{label(item.draft)}, {item.rule}",
        f"{item.axis} {low}{high}, {fmt.count(item.positions)} positions",
        f"certified {fmt.share_with_interval(item.certified)}" if item.certified is not None else "",
        f"accepted {fmt.share_with_interval(item.accepted)}",
    )


# In the order of the page; `captions.py` has their headings and sections.
FIGURES = (acceptance, speedups, depths, bursts, causes, certified, difficulty, step_times)
