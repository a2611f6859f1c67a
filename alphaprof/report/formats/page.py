"""The page of a report: what the terminal says, in the same order, with figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from alphaprof.errors import OptionInvalid
from alphaprof.render import format as fmt
from alphaprof.render.html.page import Part, glossary, page, require_html
from alphaprof.render.json import plain_values
from alphaprof.report.build import RunReport
from alphaprof.report.formats.first_screen import LESS, first_screen
from alphaprof.report.sections import NAMES

if TYPE_CHECKING:
    from alphaprof.report.formats.figures import Drawing

UNFOLDED = ("verdict", "drafts", "gammas", "notes")  # sections that are open at first


def render_html(report: RunReport) -> str:
    """Return the page of a report. Raises `ExtraMissing` if the packages that draw it are missing."""
    require_html("the HTML report", "jinja2", "matplotlib")
    from markupsafe import Markup

    from alphaprof.report.formats.figures import FIGURES, draft_color

    drawn = {name: drawing for name, draw in FIGURES.items() if (drawing := draw(report))}
    parts: list[Part] = []
    for name in NAMES:
        title, blocks, empty = report.drawn(name)
        parts.append((name, title, [] if empty and name != "legend" else blocks))
    run = f"Run {report.run.path}, begun {report.run.created}. Rounds as engines run them."
    parts.insert(-1, ("run", "what was run", [run]))  # before the legend
    return page(
        parts,
        outcome=str(report.answer.verdict),
        title=_title(report.run.target),
        version=report.alphaprof,
        report=report,
        screen=first_screen(report),
        domains=[str(item.answer.domain) for item in report.domains],
        less=LESS,
        figures={
            name: (drawing, Markup("".join(drawing.svg(width=width) for width in drawing.widths)))  # noqa: S704  it escapes
            for name, drawing in drawn.items()
        },
        colors={draft: f"var(--{draft_color(place)})" for place, draft in enumerate(report.run.drafts)},
        unfolded=UNFOLDED,
        profile=_pretty(report.run.profile),
        environment=_pretty(report.run.environment),
        terms={heading: key for key, word in glossary().items() for heading in word.get("headings", ())},
    )


def answer_figure(report: RunReport) -> Drawing:
    """Return the figure of the first screen, for a file. Raises `ExtraMissing` without the package that draws it, and
    `OptionInvalid` if the run has nothing to draw yet.
    """
    require_html("a figure", "matplotlib")
    from alphaprof.report.formats.figures import answer

    if (drawing := answer(report)) is None:
        raise OptionInvalid(
            "there is nothing to draw: no domain has tokens per round yet",
            "see alphaprof report RUN, which says why; --out report.md writes it to a file",
        )
    return drawing


def _title(reference: str) -> str:
    """Return a model as its users call it: of a local path only what it ends in."""
    return fmt.visible(reference.rstrip("/").rsplit("/", 1)[-1] if reference.startswith(("/", ".")) else reference)


def _pretty(value: Mapping[str, Any]) -> str:
    lines = json.dumps(plain_values(value), indent=2, ensure_ascii=False).split("\n")
    return "\n".join(map(fmt.visible, lines))
