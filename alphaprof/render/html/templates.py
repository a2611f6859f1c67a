"""The templates of the page (Jinja): they escape all that is put into them, and share names, formats and the glossary."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from alphaprof.errors import ExtraMissing
from alphaprof.render.blocks import OUTCOMES, outcome_of
from alphaprof.render.sections.legend import glossary
from alphaprof.report import format as fmt
from alphaprof.version import install_line

if TYPE_CHECKING:
    from jinja2 import Environment
    from plotly.graph_objects import Figure

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


def resource(name: str) -> str:
    """Returns the text of a file beside this one."""
    return (files("alphaprof.render.html") / name).read_text(encoding="utf-8")


def filled(name: str, **values: Any) -> str:
    """Returns the template `name` with its values, each of them escaped unless it is markup of another template."""
    return str(_environment().get_template(name).render(**values))


def require_html() -> None:
    """Raise `ExtraMissing` where the plotting library or the template language is not installed."""
    if missing := [name for name in ("jinja2", "plotly") if find_spec(name) is None]:
        raise ExtraMissing(f"the HTML report needs {', '.join(missing)}", install_line("html"))


def filled_page(name: str, drawn: Mapping[str, Figure], **values: Any) -> str:
    """Returns a whole page, which extends base.html.j2: with style and scripts, whose digests its content security policy
    names, and the figures that are `drawn` as data that are not executed. `values`: `outcome`, `title`, `version` and what
    the template `name` asks for.
    """
    from plotly.offline import get_plotlyjs

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
    return filled(name, **frame, **values)


def _embedded(value: Mapping[str, Any]) -> str:
    """JSON inside of a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(resource)
    )
    environment.filters |= {
        "visible": fmt.visible,
        "sentence": lambda text: fmt.visible(fmt.sentence(text)),
    }
    environment.globals |= {
        "fmt": fmt,
        "terms": TERMS,
        "outcomes": OUTCOMES,
        "outcome_of": outcome_of,
        "glossary": glossary(),
    }
    return environment
