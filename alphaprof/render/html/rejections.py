"""The figures that say why tokens are rejected: by margin and entropy, and where a certificate held."""

from __future__ import annotations

from collections.abc import Sequence

from alphaprof.render.html.plots import Figure, Grid, Style, Trace, band, label, meta, said
from alphaprof.report import format as fmt
from alphaprof.report.model import Decile, Report
from alphaprof.report.model_difficulty import Tenth

AXES = {"margin": "target's margin, p₁ − p₂", "entropy": "target's entropy, nats"}


def difficulty(report: Report, style: Style) -> Figure | None:
    """Acceptance in tenths of the positions, a panel for the margin and one for the entropy."""
    if not report.difficulty:
        return None
    kinds = _kinds(report.difficulty)
    titles = [f"{what}{kind}" for kind in kinds for what in AXES.values()]
    grid = Grid(
        titles,
        {"title": "tenths of the positions (fewer where values tie), lowest first", "dtick": 1},
        _accepted(),
        columns=2,
    )
    for row, key in enumerate(kinds.values()):
        for column, measure in enumerate(AXES):
            mine = [item for item in report.difficulty if item.axis == measure and _kind(item) == key]
            for draft, rule in dict.fromkeys((item.draft, item.rule) for item in mine):
                chosen = [item for item in mine if (item.draft, item.rule) == (draft, rule) and item.accepted is not None]
                for trace in _curve(chosen, draft, rule, style):
                    grid.add(2 * row + column, trace)
    return grid.figure("difficulty")


def _accepted() -> dict[str, object]:
    return {"title": "accepted", "range": [0, 1.02]}


def _kind(item: Tenth | Decile) -> tuple[str, str, bool]:
    return item.continuation, str(item.sampling), item.on_policy


def _kinds(items: Sequence[Tenth] | Sequence[Decile]) -> dict[str, tuple[str, str, bool]]:
    """Kinds of text by what a title adds for them: nothing where there is one."""

    def told(item: Tenth | Decile) -> str:
        return fmt.text_kind(item.continuation, item.sampling) + ("" if item.on_policy else ", not the target's own")

    found = {told(item): _kind(item) for item in items}
    return {f" ({name})" if len(found) > 1 else "": key for name, key in found.items()}


def _curve(items: Sequence[Tenth], draft: str, rule: str, style: Style) -> list[Trace]:
    known = [item.accepted for item in items if item.accepted is not None]
    x = [item.place for item in items if item.accepted is not None]
    about = {"meta": meta(draft, rule)}
    text = [said(f"{label(draft)}, {rule}", _range(item), f"accepted {fmt.share_interval(item.accepted)}") for item in items]
    line = {"type": "scatter", "mode": "lines+markers", "x": x, "y": [item.value for item in known], **about}
    line |= {"line": style.line(draft, rule), "marker": {"size": 5}, "text": text, "hoverinfo": "text"}
    return [*band(x, known, style.faint(draft), about), line]


def _range(item: Tenth | Decile) -> str:
    low = "" if item.low is None else f"from {item.low:.3g} "
    high = "" if item.high is None else f"below {item.high:.3g}"
    return f"{item.axis} {low}{high}, {fmt.count(item.positions)} positions"


def certified(report: Report, style: Style) -> Figure | None:
    """What was certain beside what was accepted, in tenths by the margin, a panel a rule."""
    if report.certificates is None:
        return None
    deciles = [item for item in report.certificates.deciles if item.axis == "margin"]
    kinds = _kinds(deciles)
    keys = [(rule, key, kind) for kind, key in kinds.items() for rule in dict.fromkeys(item.rule for item in deciles)]
    if not keys:
        return None
    titles = [f"{rule}{kind}" for rule, _, kind in keys]
    grid = Grid(titles, {"title": "tenths by margin, smallest first", "dtick": 1}, {"title": "share", "range": [0, 1.02]})
    for panel, (rule, key, _) in enumerate(keys):
        mine = [item for item in deciles if item.rule == rule and _kind(item) == key]
        for draft in dict.fromkeys(item.draft for item in mine):
            known = [item for item in mine if item.draft == draft and item.certified is not None]
            if known:
                grid.add(panel, _tenths(known, "certified", style))
                grid.add(panel, _tenths(known, "accepted", style))
    return grid.figure("certified")


def _tenths(items: Sequence[Decile], name: str, style: Style) -> Trace:
    values = [item.certified if name == "certified" else item.accepted for item in items]
    draft = items[0].draft
    text = [
        said(
            f"{label(draft)}, {item.rule}",
            _range(item),
            f"certified {fmt.share_interval(item.certified)}",
            f"accepted {fmt.share_interval(item.accepted)}",
        )
        for item in items
    ]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [item.place for item in items],
        "y": [value.value if value is not None else None for value in values],
        "marker": {"size": 4},
        "line": {"color": style.colour(draft), "width": 2, "dash": "solid" if name == "certified" else "dot"},
        "text": text,
        "hoverinfo": "text",
        "meta": meta(draft),
    }
