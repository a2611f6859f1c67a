"""One self-contained HTML file from an answer: it opens offline, and nothing in it comes from anywhere else.

Text of the dataset is untrusted. Jinja escapes what goes into the page, `figures.label` what goes into figures, data travel
as JSON that the page does not execute, and a content security policy lets no other script run than the two of this file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from alphaprof.errors import ExtraMissing
from alphaprof.render import format as fmt
from alphaprof.render.blocks import OUTCOMES, Block, Figure, Table, outcome_of
from alphaprof.render.json import PREFIX, plain_values
from alphaprof.report.build import Report
from alphaprof.report.draw import SECTIONS, glossary
from alphaprof.report.first_screen import ALONE, LESS, first_screen
from alphaprof.version import __version__, install_line

if TYPE_CHECKING:
    from jinja2 import Template


Part = tuple[str, str, Sequence[Block]]  # a section's name, its title if it has a heading, and its blocks
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
    "pays up to": "concurrency",
    "margin": "margin",
    "entropy": "margin",
    "entropy, nats": "margin",
    "beta": "beta",
    "bound": "beta",
    "mean top probability": "budget",
}
UNFOLDED = ("verdict", "drafts", "gammas", "notes")  # sections that are open at first


def plain_page(format_name: str, blocks: Sequence[Block]) -> str:
    """Return the page of an answer of a format such as alphaprof-trees. Raises `ExtraMissing` without the packages that
    draw it.
    """
    _require_html()
    outcome, title = outcome_of(str(blocks[0])) or "answer", format_name.removeprefix(PREFIX)
    about = {"outcome": outcome, "title": title, "version": __version__}
    return _page([("answer", "", blocks)], **about, report=None, style=None, terms={})


def render_html(report: Report) -> str:
    """Return the page of a report. Raises `ExtraMissing` if the packages that draw it are missing."""
    _require_html()
    from markupsafe import Markup

    from alphaprof.render.html.figures import Style

    parts: list[Part] = [(section.name, section.title, list(section.blocks(report))) for section in SECTIONS]
    run = f"Run {report.run.path}, begun {report.run.created}. Rounds as engines run them."
    parts.insert(-1, ("run", "what was run", [run]))  # before the legend
    return _page(
        parts,
        outcome=report.traffic.verdict,
        title=_title(report.run.target),
        version=report.alphaprof,
        report=report,
        first_screen=Markup(first_screen_html(report)),  # noqa: S704  it escapes
        style=Style.of(report),
        unfolded=UNFOLDED,
        judged={item.rule for item in report.results if item.verdict is not None},
        profile=_pretty(report.run.profile),
        environment=_pretty(report.run.environment),
        terms=TERMS,
    )


def _require_html() -> None:
    """Raise `ExtraMissing` if the plotting library or the template language is not installed."""
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
    digests = [hashlib.sha256(text.encode()) for text in (plotly, script)]
    frame = {
        "data": _embedded({key: figure.to_plotly_json() for key, figure in drawn.items()}),
        "css": resource("page.css") + resource("first_screen.css"),
        "script": script,
        "plotly": base64.b64encode(zlib.compress(plotly.encode(), 9)).decode(),
        "hashes": " ".join(f"'sha256-{base64.b64encode(digest.digest()).decode()}'" for digest in digests),
    }
    return str(_template().render(parts=[part for part in shown if part[2]], figures=drawn, **frame, **values))


def _embedded(value: Mapping[str, Any]) -> str:
    """JSON inside of a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _template() -> Template:
    """Return the template of the page, which escapes all that is put into it."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"visible": fmt.visible, "sentence": lambda text: fmt.visible(fmt.sentence(text))}
    environment.globals |= {"fmt": fmt, "outcomes": OUTCOMES, "outcome_of": outcome_of, "glossary": glossary()}
    return environment.from_string(resource("page.html.j2"))


def _title(reference: str) -> str:
    """Return a model as its users call it: of a local path only what it ends in."""
    return fmt.visible(reference.rstrip("/").rsplit("/", 1)[-1] if reference.startswith(("/", ".")) else reference)


def _pretty(value: Mapping[str, Any]) -> str:
    lines = json.dumps(plain_values(value), indent=2, ensure_ascii=False).split("\n")
    return "\n".join(map(fmt.visible, lines))


WHOLE_NAME = 1_000  # characters of a domain's name that are shown under the pointer


def resource(name: str) -> str:
    """Return the text of a file beside this one."""
    return (files("alphaprof.render.html") / name).read_text(encoding="utf-8")


def first_screen_fragment(report: Report) -> str:
    """Return the first screen with its style, for notebooks: it needs no package and no script."""
    return f"<style>{resource('first_screen.css')}</style>\n{first_screen_html(report)}"


def first_screen_html(report: Report) -> str:
    """Return what the terminal's first screen says, in the same order; its style is `first_screen.css`."""
    screen = first_screen(report)
    load = _table_markup(screen.load) + _paragraphs([screen.pays]) if screen.load else ""
    notes = "".join(f"<li>{_escaped(note)}</li>" for note in screen.notes)
    serve = ""
    if screen.serve:
        command, remark = map(_escaped, screen.serve)
        serve = f"<p>{command and f'<code>{command}</code> '}{remark}</p>"
    parts = (
        f"<p>{_escaped(screen.run)}</p>",
        _labelled(_verdict(screen.verdict), _paragraphs(screen.about)),
        _labelled("Times", _paragraphs([screen.times])),
        _table_markup(screen.table, [item.domain for item in report.domains]),
        _paragraphs(screen.table.below),
        _labelled("Load", load),
        _labelled("Notes", notes and f"<ol>{notes}</ol>"),
        _labelled("Serve", serve),
        _labelled("More", _paragraphs([screen.more])),
    )
    return "\n".join(('<div class="alphaprof-screen">', *filter(None, parts), "</div>"))


def _escaped(text: str) -> str:
    return escape(fmt.visible(text))


def _verdict(name: str) -> str:
    return f'<b class="alphaprof-verdict {name.rstrip(ALONE).lower()}">{name}</b>'


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{_escaped(text)}</p>" for text in texts)


def _labelled(label: str, markup: str) -> str:
    """Markup beside its label, both escaped; nothing without markup."""
    return markup and f'<div class="alphaprof-line"><div>{label}</div><div>{markup}</div></div>'


def _table_markup(table: Table, whole_names: Sequence[str] = ()) -> str:
    """Return a table, and under the pointer the whole names of its rows, which may be cut in their first cells."""
    heads = "".join(f'<th scope="col"{_class(table, name)}>{_escaped(name)}</th>' for name in table.columns)
    names = [
        *(f' title="{_escaped(_shortened(name))}"' for name in whole_names),
        *("" for _ in table.rows[len(whole_names) :]),
    ]
    body = "".join(_row_markup(table, *row, title) for row, title in zip(table.rows, names, strict=True))
    foot = "".join(_row_markup(table, *row) for row in table.footer)
    return (
        f'<div class="wide alphaprof-wide"><table aria-label="{table.title}"><thead><tr>'
        f'<th scope="col" class="name">{_escaped(table.named)}</th>{heads}</tr></thead><tbody>{body}</tbody>'
        f"{foot and f'<tfoot>{foot}</tfoot>'}</table></div>"
    )


def _shortened(name: str) -> str:
    return name if len(name) <= WHOLE_NAME else f"{name[:WHOLE_NAME]}\N{HORIZONTAL ELLIPSIS}"


def _class(table: Table, column: str) -> str:
    classes = ["name"] * (column in table.left) + ["less"] * (column in LESS)
    return f' class="{" ".join(classes)}"' if classes else ""


def _row_markup(table: Table, name: str, cells: Mapping[str, str], title: str = "") -> str:
    markup = (
        f"<td{_class(table, column)}>{_verdict(cells[column]) if column == 'verdict' else _escaped(cells[column])}</td>"
        for column in table.columns
    )
    return f'<tr><th scope="row" class="name"{title}>{_escaped(name)}</th>{"".join(markup)}</tr>'
