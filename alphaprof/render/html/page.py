"""One self-contained HTML file from a `Report`: it opens offline, and nothing in it comes from anywhere else.

Text of the dataset is untrusted. Jinja escapes what goes into the page, `figures.label` what goes into figures, data travel
as JSON that the page does not execute, and a content security policy lets no other script run than the two of this file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from alphaprof.render.blocks import Block
from alphaprof.render.html.captions import captions
from alphaprof.render.html.first_screen import first_screen_html
from alphaprof.render.html.templates import filled_page, require_html
from alphaprof.render.json import plain_values
from alphaprof.render.sections.contents import SECTIONS
from alphaprof.report import format as fmt
from alphaprof.report.build import Report


def render_html(report: Report) -> str:
    """The page. Raises `ExtraMissing` where the plotting library or the template language is not installed."""
    require_html()
    from markupsafe import Markup

    from alphaprof.render.html.figures import FIGURES, Style

    style = Style(report.run.drafts, list(dict.fromkeys(item.rule for item in report.results)))
    drawn = {name: figure for name, draw in FIGURES.items() if (figure := draw(report, style)).data}
    words = captions(report)
    values = {
        "report": report,
        "outcome": report.traffic.verdict,
        "title": _title(report.run.target),
        "version": report.alphaprof,
        "style": style,
        "first_screen": Markup(first_screen_html(report)),  # noqa: S704  it escapes
        "figures": drawn,
        "captions": words,
        "sections": _parts(report, {words[name].section for name in drawn}),
        "profile": _pretty(report.run.profile),
        "environment": _pretty(report.run.environment),
        "judged": list(dict.fromkeys(item.rule for item in report.results if item.verdict is not None)),
    }
    return filled_page("page.html.j2", drawn, **values)


def _parts(report: Report, drawn: Collection[str]) -> list[tuple[str, str, Sequence[Block]]]:
    """Returns name, title and blocks of each section that has blocks, or figures, which are `drawn` in it. What was run
    comes before the legend, whose words are those of the glossary.
    """
    parts: list[tuple[str, str, Sequence[Block]]] = []
    for section in SECTIONS:
        if section.name == "legend":
            parts += [("run", "what was run", ()), (section.name, section.title, ())]
        elif (blocks := list(section.blocks(report))) or section.name in drawn:
            parts.append((section.name, section.title, blocks))
    return parts


def _title(reference: str) -> str:
    """A model as its users call it: of a local path only what it ends in."""
    return fmt.visible(reference.rstrip("/").rsplit("/", 1)[-1] if reference.startswith(("/", ".")) else reference)


def _pretty(value: Mapping[str, Any]) -> str:
    lines = json.dumps(plain_values(value), indent=2, ensure_ascii=False).split("\n")
    return "\n".join(map(fmt.visible, lines))
