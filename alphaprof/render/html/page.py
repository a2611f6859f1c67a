"""One self-contained HTML file from an answer: it opens offline, and nothing in it comes from anywhere else.

Text of the dataset is untrusted. Jinja escapes what goes into the page, `figures.label` what goes into figures, data travel
as JSON that the page does not execute, and a content security policy lets no other script run than the two of this file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from alphaprof.errors import ExtraMissing
from alphaprof.render.blocks import OUTCOMES, Block, Figure, outcome_of
from alphaprof.render.html.first_screen import first_screen_html, resource
from alphaprof.render.json import PREFIX, plain_values
from alphaprof.render.sections import SECTIONS, glossary
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.version import __version__, install_line

if TYPE_CHECKING:
    from jinja2 import Template

Part = tuple[str, str, Sequence[Block]]  # a section's name, its title if it has a heading, and its blocks
ROUNDS = {"engine": "engines run them", "llamacpp": "llama.cpp runs them", "hf": "Hugging Face runs them"}
# What the glossary calls the headings of tables.
TERMS = {
    "alpha": "alpha",
    "accept@1": "first",
    "free draft: alpha": "alpha",
    "gamma": "gamma",
    "docs": "document",
    "document": "document",
    "coverage": "coverage",
    "verdict": "verdict",
    "tokens/round": "tokens",
    "iid formula": "burstiness",
    "break-even": "breakeven",
    "speedup": "speedup",
    "whole requests": "speedup",
    "slower": "slower",
    "rule": "rule",
    "lost": "causes",
    "most to gain": "causes",
    "with it": "causes",
    "pays up to": "concurrency",
    "margin": "margin",
    "entropy": "margin",
    "entropy, nats": "margin",
    "beta": "beta",
    "bound": "beta",
    "mean top probability": "budget",
}


def plain_page(format_name: str, blocks: Sequence[Block]) -> str:
    """Return the page of an answer of a format such as alphaprof-curve. Raises `ExtraMissing` without the packages that
    draw it.
    """
    _require_html()
    outcome, title = outcome_of(str(blocks[0])) or "answer", format_name.removeprefix(PREFIX)
    about = {"outcome": outcome, "title": title, "version": __version__}
    return _page([("answer", "", blocks)], **about, report=None, style=None, terms={})


def render_html(report: Report) -> str:
    """Return the page of a report. Raises `ExtraMissing` where the packages that draw it are missing."""
    _require_html()
    from markupsafe import Markup

    from alphaprof.render.html.figures import Style

    parts: list[Part] = [(section.name, section.title, list(section.blocks(report))) for section in SECTIONS]
    run = f"Run {report.run.path}, begun {report.run.created}. Rounds as {ROUNDS[report.replay]}."
    parts.insert(-1, ("run", "what was run", [run]))  # before the legend
    return _page(
        parts,
        outcome=report.traffic.verdict,
        title=_title(report.run.target),
        version=report.alphaprof,
        report=report,
        first_screen=Markup(first_screen_html(report)),  # noqa: S704  it escapes
        style=Style.of(report),
        judged={item.rule for item in report.results if item.verdict is not None},
        profile=_pretty(report.run.profile),
        environment=_pretty(report.run.environment),
        terms=TERMS,
    )


def _require_html() -> None:
    """Raise `ExtraMissing` where the plotting library or the template language is not installed."""
    if missing := [name for name in ("jinja2", "plotly") if find_spec(name) is None]:
        raise ExtraMissing(f"the HTML report needs {', '.join(missing)}", install_line("html"))


def _page(parts: Sequence[Part], **values: Any) -> str:
    """Return a page of `parts`, without those that have nothing to show: with style and scripts, whose digests its content
    security policy names, and figures as data that are not executed. Every value is escaped unless it is markup.
    """
    from plotly.offline import get_plotlyjs

    figures = [block for _, _, blocks in parts for block in blocks if isinstance(block, Figure)]
    drawn = {block.name: figure for block in figures if (figure := block.draw()).data}
    shown = [
        (name, title, [block for block in blocks if not isinstance(block, Figure) or block.name in drawn])
        for name, title, blocks in parts
    ]
    plotly, script = get_plotlyjs() if drawn else "", resource("page.js")
    if "</script" in plotly.lower():
        raise ValueError("the plotting library would end the element that holds it")  # none does: 7.1 was read
    digests = [hashlib.sha256(text.encode()) for text in (plotly, script)]
    frame = {
        "data": _embedded({key: figure.to_plotly_json() for key, figure in drawn.items()}),
        "css": resource("page.css") + resource("first_screen.css"),
        "script": script,
        "plotly": plotly,
        "hashes": " ".join(f"'sha256-{base64.b64encode(digest.digest()).decode()}'" for digest in digests),
    }
    return str(_template().render(parts=[part for part in shown if part[2]], figures=drawn, **frame, **values))


def _embedded(value: Mapping[str, Any]) -> str:
    """JSON inside of a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _template() -> Template:
    """The template of the page, which escapes all that is put into it."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"visible": fmt.visible, "sentence": lambda text: fmt.visible(fmt.sentence(text))}
    environment.globals |= {"fmt": fmt, "outcomes": OUTCOMES, "outcome_of": outcome_of, "glossary": glossary()}
    return environment.from_string(resource("page.html.j2"))


def _title(reference: str) -> str:
    """A model as its users call it: of a local path only what it ends in."""
    return fmt.visible(reference.rstrip("/").rsplit("/", 1)[-1] if reference.startswith(("/", ".")) else reference)


def _pretty(value: Mapping[str, Any]) -> str:
    lines = json.dumps(plain_values(value), indent=2, ensure_ascii=False).split("\n")
    return "\n".join(map(fmt.visible, lines))
