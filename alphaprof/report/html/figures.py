"""The figures of the page, from a `Report`: acceptance, speedup, depth, bursts, step times. They compute nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaprof.report import format as fmt
from alphaprof.report.html.plots import (
    GRID,
    INK,
    Figure,
    Grid,
    Style,
    Trace,
    axis,
    band,
    categories,
    errors,
    label,
    layout,
    meta,
    panels,
    said,
)
from alphaprof.report.model import GammaResult, Report, Result

RED = "#b42318"


def acceptance(report: Report, style: Style) -> Figure:
    """Alpha by domain, a point a draft and rule."""
    domains = list(panels(report.results))
    pairs = list(dict.fromkeys((result.draft, result.rule) for result in report.results))
    traces: list[Trace] = []
    for draft, rule in pairs:
        mine = [item for item in report.results if (item.draft, item.rule) == (draft, rule) and item.alpha is not None]
        offset = 0.5 * ((style.drafts.index(draft) + 0.5) / len(style.drafts) - 0.5)
        filled = [item.on_policy and not item.lossy for item in mine]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [domains.index(item.domain) + offset for item in mine],
                "y": [item.alpha.value if item.alpha else None for item in mine],
                "error_y": errors([item.alpha for item in mine]) | {"color": style.colour(draft)},
                "marker": {
                    "color": style.colour(draft),
                    "size": 8,
                    "symbol": ["circle" if whole else "circle-open" for whole in filled],
                },
                "text": [_alpha_said(item) for item in mine],
                "hoverinfo": "text",
                "meta": meta(draft, rule),
            }
        )
    axes = {"xaxis": axis(**categories(domains)), "yaxis": axis("acceptance (α)", range=[0, 1.02])}
    return Figure("acceptance", traces, layout(360, **axes), 360)


def _alpha_said(item: Result) -> str:
    off = "" if item.on_policy else "off-policy: the rule's own decoding would not emit this text"
    lossy = "lossy: one step at a time along the target's own text" if item.lossy else ""
    covered = f"coverage {fmt.share(item.coverage)}" if item.coverage < 1 else ""
    counted = f"{fmt.documents(item.documents, item.clusters)} documents, {fmt.count(item.positions)} positions"
    who = f"<b>{label(item.domain)}</b>, {label(item.draft)}, {item.rule}"
    return said(who, f"α {fmt.share_interval(item.alpha)}", covered, counted, off, lossy)


def speedups(report: Report, style: Style) -> Figure | None:
    """Speedup (without step times: tokens per round) against gamma, a panel a domain; None where no rounds are defined."""
    timed = any(item.speedup is not None for result in report.results for item in result.gammas)
    shown = panels([item for item in report.results if item.gammas])
    if not shown:
        return None
    y = {"title": "speedup" if timed else "tokens per round", "rangemode": "tozero" if timed else "normal"}
    grid = Grid(list(shown), {"title": "γ", "dtick": 1}, y)
    for panel, results in enumerate(shown.values()):
        if timed:
            grid.line(panel, 1.0, RED, "dash")
            grid.line(panel, report.traffic.min_speedup, INK, "dot")
        for result in results:
            for trace in _against_gamma(result, timed, style):
                grid.add(panel, trace)
    return grid.figure("speedups")


def _against_gamma(result: Result, timed: bool, style: Style) -> Iterator[Trace]:
    about = {"meta": meta(result.draft, result.rule)}
    points = [(item, item.speedup if timed else item.tokens_per_round) for item in result.gammas]
    known = [(item, value) for item, value in points if value is not None]
    if not known:
        return
    x = [item.gamma for item, _ in known]
    yield from band(x, [value for _, value in known], style.faint(result.draft), about)
    yield {
        "type": "scatter",
        "mode": "lines+markers",
        "x": x,
        "y": [value.value for _, value in known],
        "line": style.line(result.draft, result.rule),
        "marker": {"size": [9 if item.gamma == result.best_gamma else 5 for item, _ in known], "opacity": 1},
        "text": [_speed_said(result, item) for item, _ in known],
        "hoverinfo": "text",
        **about,
    }


def _speed_said(result: Result, item: GammaResult) -> str:
    best = " (best here)" if item.gamma == result.best_gamma else ""
    breaks = f"pays from {fmt.number(item.break_even_length)} on" if item.break_even_length is not None else ""
    cost = f"c {fmt.number(item.draft_cost)}, v {fmt.number(item.verify_cost)}" if item.verify_cost is not None else ""
    return said(
        f"<b>{label(result.domain)}</b>, {label(result.draft)}, {result.rule}, γ {item.gamma}{best}",
        f"speedup {fmt.interval(item.speedup, 'x')}" if item.speedup else "",
        f"whole requests {fmt.interval(item.request_speedup, 'x')}" if item.request_speedup else "",
        f"tokens per round {fmt.interval(item.tokens_per_round)}",
        breaks,
        cost,
    )


def depths(report: Report, style: Style) -> Figure | None:
    """Acceptance by depth at the largest gamma, conditional and marginal, a panel a domain."""
    shown = panels([item for item in report.results if item.gammas])
    if not shown:
        return None
    grid = Grid(list(shown), {"title": "depth in the round", "dtick": 1}, {"title": "accepted", "range": [0, 1.02]})
    for panel, results in enumerate(shown.values()):
        for result in results:
            last = max(result.gammas, key=lambda item: item.gamma)
            for name, values in (("conditional", last.conditional), ("marginal", last.marginal)):
                grid.add(panel, _by_depth(result, name, values, style))
    return grid.figure("depths")


def _by_depth(result: Result, name: str, values: Sequence[float | None], style: Style) -> Trace:
    what = {"conditional": "of the drafts that were reached", "marginal": "of all rounds with a proposal"}[name]
    who = f"<b>{label(result.domain)}</b>, {label(result.draft)}, {result.rule}"
    line = {"color": style.colour(result.draft), "width": 2, "dash": "solid" if name == "conditional" else "dot"}
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(range(1, len(values) + 1)),
        "y": list(values),
        "line": line,
        "marker": {"size": 5},
        "text": [said(who, f"depth {depth + 1}: {name} {fmt.share(value)}", what) for depth, value in enumerate(values)],
        "hoverinfo": "text",
        "meta": meta(result.draft, result.rule),
    }


def bursts(report: Report, style: Style) -> Figure | None:
    """Burstiness, and what the textbook formula gets wrong, by domain."""
    results = [item for item in report.results if item.burstiness is not None and item.gammas]
    domains = list(panels(results))
    if not results:
        return None
    height = max(260, 34 * len(domains) + 110)
    traces: list[Trace] = []
    for draft, rule in dict.fromkeys((item.draft, item.rule) for item in results):
        mine = [item for item in results if (item.draft, item.rule) == (draft, rule)]
        offset = 0.5 * ((style.drafts.index(draft) + 0.5) / len(style.drafts) - 0.5)
        common = {"type": "scatter", "mode": "markers", "hoverinfo": "text", "meta": meta(draft, rule)}
        common |= {"marker": {"color": style.colour(draft), "size": 8}}
        places = [domains.index(item.domain) + offset for item in mine]
        values = [item.burstiness.value if item.burstiness else None for item in mine]
        whole = [f"<b>{label(item.domain)}</b>, {label(draft)}, {rule}" for item in mine]
        spread = errors([item.burstiness for item in mine]) | {"color": style.colour(draft)}
        text = [said(who, f"burstiness {fmt.difference(item.burstiness, 2)}") for who, item in zip(whole, mine, strict=True)]
        traces.append(common | {"x": values, "y": places, "error_x": spread, "text": text})
        wrong = [_textbook(item) for item in mine]
        text = [said(who, told) for who, (_, told) in zip(whole, wrong, strict=True)]
        traces.append(common | {"x": [value for value, _ in wrong], "y": places, "text": text, "xaxis": "x2", "yaxis": "y2"})
    names = categories(domains) | {"autorange": "reversed", "range": None}
    zero = {"zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1}
    axes = {
        "xaxis": axis("burstiness (lag-1 autocorrelation)", domain=[0, 0.47], **zero),
        "yaxis": axis(**names),
        "xaxis2": axis("textbook formula: too high by", domain=[0.53, 1], tickformat="+.1~%", **zero),
        "yaxis2": axis(**names) | {"anchor": "x2", "showticklabels": False},
    }
    return Figure("bursts", traces, layout(height, **axes), height)


def _textbook(item: Result) -> tuple[float | None, str]:
    """By what share the textbook formula is too high at the best gamma (else at the largest), and that in words."""
    wanted = item.best_gamma or max(found.gamma for found in item.gammas)
    found = next(found for found in item.gammas if found.gamma == wanted)
    if found.iid_error is None:
        return None, ""
    promised = f"it promises {fmt.number(found.iid_tokens_per_round)} tokens per round at γ {wanted}"
    return found.iid_error, said(promised, f"that is {fmt.signed_percent(found.iid_error)} too high")


def step_times(report: Report, style: Style) -> Figure | None:
    """What a target step takes by the tokens that it verifies, and a draft step."""
    cost = report.cost
    if cost is None or not cost.target_ms:
        return None
    tokens = list(cost.target_ms)
    text = [f"target over {count} tokens: {fmt.number(ms, 2)} ms" for count, ms in cost.target_ms.items()]
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": tokens,
            "y": list(cost.target_ms.values()),
            "text": text,
            "hoverinfo": "text",
            "line": {"color": INK, "width": 2},
            "name": "target, one step",
        }
    ]
    steps = {draft: (ms, "one step") for draft, ms in cost.draft_ms.items()}
    steps |= {draft: (ms, "one search") for draft, ms in cost.lookup_ms.items()}
    for draft, (ms, what) in steps.items():
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [tokens[0], tokens[-1]],
                "y": [ms, ms],
                "line": {"color": style.colour(draft), "width": 2, "dash": "dash"},
                "text": [f"{label(draft)}, {what}: {fmt.number(ms, 3)} ms"] * 2,
                "hoverinfo": "text",
                "name": f"{label(draft)}, {what}",
                "meta": meta(draft),
            }
        )
    axes = {"xaxis": axis("tokens in the step", dtick=1), "yaxis": axis("ms", rangemode="tozero", gridcolor=GRID)}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    return Figure("steps", traces, layout(320, showlegend=True, legend=legend, **axes), 320)
