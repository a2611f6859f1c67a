"""The figure of what is lost, by cause: a panel a draft and rule, a bar a domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alphaprof.render.html.plots import (
    Figure,
    Style,
    Trace,
    axes_of,
    axis,
    categories,
    label,
    layout,
    meta,
    said,
    title_text,
)
from alphaprof.render.wording import domain_of, reached
from alphaprof.report import format as fmt
from alphaprof.report.model import Report
from alphaprof.report.model_causes import Attribution, Cause
from alphaprof.report.sections.losses import CAUSES

# In pairs of light and dark, so that neighbours in a bar differ for all eyes; hues apart from those of drafts say nothing.
COLOURS = ("#bfc5cc", "#9aa5b1", "#f2cf63", "#8d6cab", "#4fb3a5", "#3a7ca5", "#e39774", "#a63d40", "#5f7161")
BAR, GAP, TOP, BOTTOM = 26, 64, 84, 30  # pixels that a bar takes, what lies between panels, above and below them


def causes(report: Report, style: Style) -> Figure | None:
    """What is lost under the rules of the verdict, in shares of the positions; causes in the order in which they are looked
    for. None where nothing is known.
    """
    judged = {(item.draft, item.rule) for item in report.results if item.verdict is not None}
    groups: dict[tuple[str, str], list[Attribution]] = {}
    for item in report.attribution:
        if (item.draft, item.rule) in judged:
            groups.setdefault((item.draft, item.rule), []).append(item)
    known = {cause.name for items in groups.values() for item in items for cause in item.causes}
    names = [name for name in CAUSES if name in known]
    inner = sum(BAR * len(items) + GAP for items in groups.values()) - GAP
    axes: dict[str, Any] = {}
    traces: list[Trace] = []
    titles, top = [], 1.0
    for panel, ((draft, rule), items) in enumerate(groups.items()):
        across, up = axes_of(panel)
        tall = BAR * len(items) / inner
        places = categories([domain_of(item, items) for item in items])
        axes[f"yaxis{up[1:]}"] = axis(**places) | {"domain": [max(0.0, top - tall), top], "anchor": across}
        axes[f"xaxis{across[1:]}"] = axis(range=[0, 1], tickformat=".0%") | {"anchor": up}
        title = {"x": 0, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        titles.append(title | title_text(across, f"{draft}, {rule}"))
        for name in names:
            about = {"meta": meta(draft, rule), "legendgroup": name, "showlegend": False}
            bars = _bars(items, name) | about | {"xaxis": across, "yaxis": up}
            traces += [bars] if bars["y"] else []
        top -= tall + GAP / inner
    if not traces:
        return None
    # The legend is of bars of no length, which belong to no draft: it stays when drafts are hidden.
    traces[:0] = [
        _bars([], name) | {"x": [None], "y": [None], "legendgroup": name, "meta": {"legend": True}} for name in names
    ]
    legend = {"orientation": "h", "y": 1 + 24 / inner, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    about = {"barmode": "stack", "bargap": 0.25, "showlegend": True, "legend": legend, "annotations": titles}
    height, margin = inner + TOP + BOTTOM, {"l": 56, "r": 16, "t": TOP, "b": BOTTOM}
    return Figure("causes", traces, layout(height, **about, **axes) | {"margin": margin}, height)


def _bars(items: Sequence[Attribution], name: str) -> Trace:
    """The bars of one cause; nothing where a domain loses nothing to it."""
    found = [(place, item, cause) for place, item in enumerate(items) for cause in item.causes if cause.name == name]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [place for place, _, _ in found],
        "x": [cause.share.value for _, _, cause in found],
        "text": [_told(item, cause) for _, item, cause in found],
        "textposition": "none",
        "hoverinfo": "text",
        "marker": {"color": COLOURS[CAUSES.index(name)]},
    }


def _told(item: Attribution, cause: Cause) -> str:
    now, then = reached(item.tokens_per_round, item.speedup), reached(cause.tokens_per_round, cause.speedup)
    what = "speedup" if cause.speedup is not None else "tokens per round"
    gained = f"{what} at γ {item.gamma}: {now} now, at most {then} with it" if then != fmt.NOTHING else ""
    return said(
        f"<b>{label(fmt.short(item.domain))}</b>, {label(item.draft)}, {item.rule}: {cause.name}",
        f"{fmt.share_interval(cause.share)} of the positions; lost in all {fmt.share_interval(item.lost)}",
        gained,
        f"remedy: {cause.remedy}",
    )
