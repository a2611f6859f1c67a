"""The figure of a learning curve: measured sizes, heads beside them, and the band ahead."""

from __future__ import annotations

from collections.abc import Sequence

from alphaprof.commands.curve.model import CurvePoint, ForecastRow
from alphaprof.render.html.figures import COLOURS, Figure, Trace, axis, band, errors, hover_text, label, layout, points
from alphaprof.report import format as fmt

OWN, BESIDE, BAND = COLOURS[0], (COLOURS[1], COLOURS[2]), "rgba(0,114,178,0.15)"
HEIGHT = 420  # pixels


def curve_figure(
    sizes: Sequence[CurvePoint], beside: Sequence[CurvePoint], forecast: Sequence[ForecastRow], gamma: int
) -> Figure:
    """Tokens per round over training units, on a logarithmic axis."""
    traces = list[Trace]()
    if forecast:
        x = [float(each.units) for each in forecast]
        traces += band(x, [each.tokens_per_round for each in forecast], BAND, {"name": "forecast", "showlegend": True})
        for side, words in (("low", "saturates"), ("high", "goes on as before")):
            y = [getattr(each.tokens_per_round, side) for each in forecast]
            hover = [
                hover_text(words, f"{each.units:,} units: {value:.2f}") for each, value in zip(forecast, y, strict=True)
            ]
            line = {"color": OWN, "dash": "dot", "width": 1.5}
            traces.append(points(x, y, hover, "lines", name=words, line=line, showlegend=False))
    known = [(point, point.tokens_per_round) for point in sizes if point.tokens_per_round is not None and point.units]
    x = [float(point.units or 0) for point, _ in known]
    hover = [hover_text(label(point.label), label(fmt.interval(tokens))) for point, tokens in known]
    line = {"color": OWN, "width": 2}
    traces.append(points(x, [tokens.value for _, tokens in known], hover, name="measured", line=line))
    for place, (_, tokens) in zip(x, known, strict=True):
        bar = errors(tokens, OWN)
        marker = {"color": OWN, "size": 1}
        traces.append(points([place], [tokens.value], [""], "markers", error_y=bar, marker=marker, showlegend=False))
    ends = [min(x), max([*x, *(float(each.units) for each in forecast)])]
    for colour, point in zip(BESIDE, beside, strict=False):
        if (level := point.tokens_per_round) is not None:
            hover = [hover_text(label(point.label), label(fmt.interval(level)))] * 2
            line = {"color": colour, "dash": "dash", "width": 2}
            traces.append(points(ends, [level.value] * 2, hover, "lines", name=label(point.label), line=line))
    ticks = [*x, *(float(each.units) for each in forecast[1:])]
    marks = {"tickmode": "array", "tickvals": ticks, "ticktext": [fmt.count(round(tick)) for tick in ticks]}
    axes = {"xaxis": axis("training units", type="log", **marks), "yaxis": axis(f"tokens per round at γ = {gamma}")}
    legend = {"orientation": "h", "y": 1.08}
    return Figure("curve", traces, layout(HEIGHT, showlegend=True, legend=legend, **axes), HEIGHT)
