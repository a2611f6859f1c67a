"""One self-contained HTML file from a `Report`: it opens offline, and nothing in it comes from anywhere else.

Text of the dataset is untrusted. Jinja escapes what goes into the page, `figures.label` what goes into figures, data travel
as JSON that the page does not execute, and a content security policy lets no other script run than the two of this file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from alphaprof.errors import ExtraMissing
from alphaprof.render.html import figures
from alphaprof.render.json import plain_values
from alphaprof.render.wording import (
    any_engine,
    at_best,
    best_at,
    by_text,
    of_all,
    pays,
    reached,
    speedup_lines,
    text_name,
    times_lines,
    uncertified,
    wiring_lines,
    without_mean_divergence,
)
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.report.model import GammaResult, Result
from alphaprof.version import install_line

RESOURCES = ("page.html.j2", "page.css", "page.js", "glossary.json")


def render_html(report: Report) -> str:
    """The page. Raises `ExtraMissing` where the plotting library or the template language is not installed."""
    if missing := [name for name in ("jinja2", "plotly") if find_spec(name) is None]:
        raise ExtraMissing(f"the HTML report needs {', '.join(missing)}", install_line("html"))
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    here = files("alphaprof.render.html")
    texts = {name: (here / name).read_text(encoding="utf-8") for name in RESOURCES}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "visible": fmt.visible,
        "short": lambda text: fmt.visible(fmt.short(text)),
        "sentence": lambda text: fmt.visible(fmt.sentence(text)),
    }
    environment.globals |= {"fmt": fmt, "best_at": best_at, "of_all": of_all, "pays": pays, "reached": reached}
    environment.globals |= {"speedup_lines": speedup_lines, "any_engine": any_engine}
    style = figures.Style(report.run.drafts, list(dict.fromkeys(item.rule for item in report.results)))
    drawn = [figure for draw in figures.FIGURES if (figure := draw(report, style)) and figure.traces]
    plotly = get_plotlyjs()
    if "</script" in plotly.lower():
        raise ValueError("the plotting library would end the element that holds it")  # none does: 7.1 was read
    digests = [hashlib.sha256(script.encode()) for script in (plotly, texts["page.js"])]  # for the content security policy
    return environment.from_string(texts["page.html.j2"]).render(
        report=report,
        title=_title(report.run.target),
        style=style,
        figures=drawn,
        tables=list(_tables(report)),
        judged=list(dict.fromkeys(item.rule for item in report.results if item.verdict is not None)),
        others=list(_others(report.results)),
        heads={name for name, facts in report.run.draft_models.items() if facts.by_depth},
        vocabulary=[(text_name(item, report.vocabulary, not item.on_policy), item) for item in report.vocabulary],
        wiring={name: lines for name, facts in report.run.draft_models.items() if (lines := list(wiring_lines(facts)))},
        uncertified=[said for draft, said in without_mean_divergence(report).items() if draft in uncertified(report)],
        times=list(times_lines(report.times, report.run.mean_context)) if report.times else [],
        profile=_pretty(report.run.profile),
        environment=_pretty(report.run.environment),
        glossary=json.loads(texts["glossary.json"]),
        sources=_sources(report.run.profile),
        data=_embedded({figure.name: {"data": figure.traces, "layout": figure.layout} for figure in drawn}),
        css=texts["page.css"],
        script=texts["page.js"],
        plotly=plotly,
        hashes=" ".join(f"'sha256-{base64.b64encode(digest.digest()).decode()}'" for digest in digests),
    )


def _tables(report: Report) -> Iterator[tuple[str, str, list[tuple[str, Result, GammaResult | None]]]]:
    """Each draft and rule of the verdict: the name of each domain, its result, and that at its best gamma."""
    for draft in report.run.drafts:
        mine = [item for item in report.results if item.draft == draft]
        for rule in dict.fromkeys(item.rule for item in mine if item.verdict is not None):
            shown = [item for item in mine if item.rule == rule and item.verdict is not None]
            yield draft, rule, [(text_name(item, mine, not item.on_policy), item, at_best(item)) for item in shown]


def _others(results: Sequence[Result]) -> Iterator[tuple[str, list[str], dict[str, dict[str, Result]]]]:
    """Results of each draft that the verdict does not concern: its rules, and by the name of a text the results by rule."""
    for draft in dict.fromkeys(item.draft for item in results):
        mine = [item for item in results if item.draft == draft and item.verdict is None]
        if mine:
            rows = {name: {item.rule: item for item in same} for name, same in by_text(mine).items()}
            yield draft, list(dict.fromkeys(item.rule for item in mine)), rows


def _title(reference: str) -> str:
    """A model as its users call it: of a local path only what it ends in."""
    return fmt.visible(reference.rstrip("/").rsplit("/", 1)[-1] if reference.startswith(("/", ".")) else reference)


def _sources(profile: Mapping[str, Any]) -> dict[int, str]:
    """What the sources of a profile are called, by their place: the last part of their path."""
    return {
        place: str(source["path"]).rstrip("/").rsplit("/", 1)[-1] for place, source in enumerate(profile.get("data", []))
    }


def _pretty(value: Mapping[str, Any]) -> str:
    lines = json.dumps(plain_values(value), indent=2, ensure_ascii=False).split("\n")
    return "\n".join(map(fmt.visible, lines))


def _embedded(value: Mapping[str, Any]) -> str:
    """JSON inside of a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
