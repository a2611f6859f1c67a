"""One self-contained HTML file from an answer, without a script: it opens offline, prints, and nothing in it comes from
anywhere else.

Text of the dataset is untrusted: Jinja escapes what goes into the page, matplotlib writes what goes into figures as
plain text, and a content security policy lets no script run at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from alphaprof.errors import ExtraMissing, OptionInvalid
from alphaprof.render.blocks import OUTCOMES, Block, Figure, Table, outcome_of
from alphaprof.render.first_screen import ALONE, LESS, first_screen
from alphaprof.render.json import PREFIX, plain_values
from alphaprof.render.sections import SECTIONS, glossary
from alphaprof.report import format as fmt
from alphaprof.report.build import Report
from alphaprof.version import __version__, install_line

if TYPE_CHECKING:
    from jinja2 import Template

    from alphaprof.render.html.figures import Drawing

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
    _require("an HTML page", "jinja2")
    outcome, title = outcome_of(str(blocks[0])) or "answer", format_name.removeprefix(PREFIX)
    parts: list[Part] = [("answer", "", blocks)]
    return _page(parts, outcome=outcome, title=title, version=__version__, report=None, colors={}, terms={}, figures={})


def render_html(report: Report) -> str:
    """Return the page of a report. Raises `ExtraMissing` if the packages that draw it are missing."""
    _require("the HTML report", "jinja2", "matplotlib")
    from markupsafe import Markup

    from alphaprof.render.html.figures import FIGURES, draft_color

    drawn = {name: drawing for name, draw in FIGURES.items() if (drawing := draw(report))}
    parts: list[Part] = [(section.name, section.title, list(section.blocks(report))) for section in SECTIONS]
    run = f"Run {report.run.path}, begun {report.run.created}. Rounds as engines run them."
    parts.insert(-1, ("run", "what was run", [run]))  # before the legend
    return _page(
        parts,
        outcome=report.traffic.verdict,
        title=_title(report.run.target),
        version=report.alphaprof,
        report=report,
        first_screen=Markup(first_screen_html(report, _first_figure(drawn.get("answer")))),  # noqa: S704  it escapes
        figures={name: (drawing, Markup(drawing.svg())) for name, drawing in drawn.items()},  # noqa: S704  it escapes
        colors={draft: f"var(--{draft_color(place)})" for place, draft in enumerate(report.run.drafts)},
        unfolded=UNFOLDED,
        profile=_pretty(report.run.profile),
        environment=_pretty(report.run.environment),
        terms=TERMS,
    )


def answer_figure(report: Report) -> Drawing:
    """Return the figure of the first screen, for a file. Raises `ExtraMissing` without the package that draws it, and
    `OptionInvalid` if the run has nothing to draw yet.
    """
    _require("a figure", "matplotlib")
    from alphaprof.render.html.figures import answer

    if (drawing := answer(report)) is None:
        raise OptionInvalid(
            "there is nothing to draw: no domain has tokens per round yet",
            "see alphaprof report RUN, which says why; --out report.md writes it to a file",
        )
    return drawing


def _first_figure(drawing: Drawing | None) -> str:
    """Return the figure of the first screen as markup, with its caption."""
    return f"<figure>{drawing.svg()}<figcaption>{_escaped(drawing.caption)}</figcaption></figure>" if drawing else ""


def _require(what: str, *packages: str) -> None:
    """Raise `ExtraMissing` if a package that draws `what` is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ExtraMissing(f"{what} needs {' and '.join(missing)}", install_line("html"))


def _page(parts: Sequence[Part], figures: Mapping[str, Any], **values: Any) -> str:
    """Return a page of `parts`, without those that have nothing to show, with its style. Every value is escaped unless it is
    markup.
    """
    shown = [
        (name, title, [block for block in blocks if not isinstance(block, Figure) or block.name in figures])
        for name, title, blocks in parts
    ]
    css = "".join(map(resource, ("colors.css", "page.css", "first_screen.css")))
    return str(_template().render(parts=[part for part in shown if part[2]], figures=figures, css=css, **values))


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


def first_screen_html(report: Report, figure: str = "") -> str:
    """Return what the terminal's first screen says, in the same order; its style is `first_screen.css`. `figure`: markup
    that stands before the table.
    """
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
        figure,
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
