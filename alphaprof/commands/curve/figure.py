"""The figure of a learning curve: measured sizes, heads beside them, and the band ahead."""

from __future__ import annotations

from collections.abc import Sequence

from plotly.graph_objects import Figure

from alphaprof.commands.curve.model import CurvePoint, ForecastRow
from alphaprof.render.html.figures import COLOURS, TEMPLATE, band, errors, hover_text, label, points
from alphaprof.report import format as fmt

OWN, BESIDE = COLOURS[0], (COLOURS[1], COLOURS[2])
HEIGHT = 420  # pixels


def curve_figure(
    sizes: Sequence[CurvePoint], beside: Sequence[CurvePoint], forecast: Sequence[ForecastRow], gamma: int
) -> Figure:
    """Draw tokens per round over training units, on a logarithmic axis."""
    figure = Figure(
        layout={"template": TEMPLATE, "height": HEIGHT, "showlegend": True, "legend": {"orientation": "h", "y": 1.08}}
    )
    ahead = [float(each.units) for each in forecast]
    figure.add_traces(band(ahead, [each.tokens_per_round for each in forecast], OWN, name="forecast"))
    for side, words in (("low", "saturates"), ("high", "goes on as before")) if forecast else ():
        y = [getattr(each.tokens_per_round, side) for each in forecast]
        hover = [hover_text(words, f"{each.units:,} units: {value:.2f}") for each, value in zip(forecast, y, strict=True)]
        line = {"color": OWN, "dash": "dot", "width": 1.5}
        figure.add_trace(points(ahead, y, hover, "lines", name=words, line=line, showlegend=False))
    known = [(point, point.tokens_per_round) for point in sizes if point.tokens_per_round is not None and point.units]
    x = [float(point.units or 0) for point, _ in known]
    hover = [hover_text(label(point.label), label(fmt.interval(tokens))) for point, tokens in known]
    bars = errors([tokens for _, tokens in known], OWN)
    y = [tokens.value for _, tokens in known]
    figure.add_trace(points(x, y, hover, name="measured", line={"color": OWN}, error_y=bars))
    ends = [min(x), max([*x, *ahead])]
    for colour, point in zip(BESIDE, beside, strict=False):
        if (level := point.tokens_per_round) is not None:
            hover = [hover_text(label(point.label), label(fmt.interval(level)))] * 2
            line = {"color": colour, "dash": "dash"}
            figure.add_trace(points(ends, [level.value] * 2, hover, "lines", name=label(point.label), line=line))
    ticks = [*x, *ahead[1:]]
    figure.update_xaxes(
        title_text="training units", type="log", tickvals=ticks, ticktext=[fmt.count(round(at)) for at in ticks]
    )
    return figure.update_yaxes(title_text=f"tokens per round at γ = {gamma}")
