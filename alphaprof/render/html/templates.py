"""The templates of the page (Jinja): they escape all that is put into them, and share names, formats and the glossary."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from alphaprof.report import format as fmt

if TYPE_CHECKING:
    from jinja2 import Environment

VERDICTS = ("GO", "NO-GO", "UNDECIDED")
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
    "iid would have said": "burstiness",
    "break-even": "breakeven",
    "speedup": "speedup",
    "of all": "speedup",
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
        "verdicts": VERDICTS,
        "glossary": json.loads(resource("glossary.json")),
    }
    return environment
