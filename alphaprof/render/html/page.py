"""One self-contained HTML file from a `Report`: it opens offline, and nothing in it comes from anywhere else.

Text of the dataset is untrusted. Jinja escapes what goes into the page, `figures.label` what goes into figures, data travel
as JSON that the page does not execute, and a content security policy lets no other script run than the two of this file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from alphaprof.errors import ExtraMissing
from alphaprof.render.html import figures
from alphaprof.render.html.captions import INTRODUCTIONS, captions
from alphaprof.render.html.first_screen import first_screen_html
from alphaprof.render.html.tables import TABLES
from alphaprof.render.html.templates import filled, resource
from alphaprof.render.json import plain_values
from alphaprof.render.wording import times_lines, wiring_lines, without_mean_divergence
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.version import install_line

# The sections of a report in their order, with the titles of their parts of the page.
SECTIONS = (
    ("verdict", "Verdict"),
    ("drafts", "Drafts by domain"),
    ("gammas", "Speculation length (γ)"),
    ("rules", "Other acceptance rules"),
    ("causes", "Why tokens are rejected"),
    ("load", "Load"),
    ("requests", "Requests and single documents"),
    ("certificates", "Certificates"),
    ("predictability", "Predictability of the text"),
    ("difficulty", "Difficulty of positions"),
    ("times", "Step times"),
    ("wiring", "How draft heads were read"),
    ("documents", "Worst and best documents"),
    ("notes", "Notes"),
    ("legend", "What the words mean"),
)


def render_html(report: Report) -> str:
    """The page. Raises `ExtraMissing` where the plotting library or the template language is not installed."""
    if missing := [name for name in ("jinja2", "plotly") if find_spec(name) is None]:
        raise ExtraMissing(f"the HTML report needs {', '.join(missing)}", install_line("html"))
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    style = figures.Style(report.run.drafts, list(dict.fromkeys(item.rule for item in report.results)))
    drawn = [figure for draw in figures.FIGURES if (figure := draw(report, style)) and figure.traces]
    plotly, script = get_plotlyjs(), resource("page.js")
    if "</script" in plotly.lower():
        raise ValueError("the plotting library would end the element that holds it")  # none does: 7.1 was read
    digests = [hashlib.sha256(text.encode()) for text in (plotly, script)]  # for the content security policy
    values = _words(report) | {
        "report": report,
        "title": _title(report.run.target),
        "style": style,
        "first_screen": Markup(first_screen_html(report)),  # noqa: S704  of a template that escapes
        "figures": drawn,
        "captions": captions(report),
        "tables": {name: list(tables(report)) for name, tables in TABLES.items()},
        "judged": list(dict.fromkeys(item.rule for item in report.results if item.verdict is not None)),
        "data": _embedded({figure.name: {"data": figure.traces, "layout": figure.layout} for figure in drawn}),
        "css": resource("page.css"),
        "script": script,
        "plotly": plotly,
        "hashes": " ".join(f"'sha256-{base64.b64encode(digest.digest()).decode()}'" for digest in digests),
    }
    return filled("page.html.j2", sections=_sections(values), introductions=INTRODUCTIONS, **values)


def _words(report: Report) -> dict[str, Any]:
    """The parts of the page that are lines of text."""
    wiring = {name: list(wiring_lines(facts)) for name, facts in report.run.draft_models.items()}
    return {
        "wiring": {name: lines for name, lines in wiring.items() if lines},
        "times": list(times_lines(report.times, report.run.mean_context)) if report.times else [],
        "divergences": list(without_mean_divergence(report).values()),
        "notes": report.notes,
        "profile": _pretty(report.run.profile),
        "environment": _pretty(report.run.environment),
    }


def _sections(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the sections of which the page has something to show; what was run comes before the legend."""
    present = {"verdict", "legend"} | {name for name in ("wiring", "times", "notes") if values[name]}
    present |= {name for name, tables in values["tables"].items() if tables}
    present |= {values["captions"][figure.name].section for figure in values["figures"]}
    *shown, legend = [(name, title) for name, title in SECTIONS if name in present]
    return [*shown, ("run", "What was run"), legend]


def _title(reference: str) -> str:
    """A model as its users call it: of a local path only what it ends in."""
    return fmt.visible(reference.rstrip("/").rsplit("/", 1)[-1] if reference.startswith(("/", ".")) else reference)


def _pretty(value: Mapping[str, Any]) -> str:
    lines = json.dumps(plain_values(value), indent=2, ensure_ascii=False).split("\n")
    return "\n".join(map(fmt.visible, lines))


def _embedded(value: Mapping[str, Any]) -> str:
    """JSON inside of a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
