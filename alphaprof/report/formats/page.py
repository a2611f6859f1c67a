"""The page of a report, and the first screen as markup: what the terminal says, in the same order, with figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from alphaprof.errors import OptionInvalid
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Table, Verdict
from alphaprof.render.html.page import TERMS, Part, page, require_html, resource
from alphaprof.render.json import plain_values
from alphaprof.report.build import Report, RunReport
from alphaprof.report.formats.first_screen import LESS, first_screen
from alphaprof.report.sections import NAMES

if TYPE_CHECKING:
    from alphaprof.report.formats.figures import Drawing

UNFOLDED = ("verdict", "drafts", "gammas", "notes")  # sections that are open at first
WHOLE_NAME = 1_000  # characters of a domain's name that are shown under the pointer


def render_html(report: RunReport) -> str:
    """Return the page of a report. Raises `ExtraMissing` if the packages that draw it are missing."""
    require_html("the HTML report", "jinja2", "matplotlib")
    from markupsafe import Markup

    from alphaprof.report.formats.figures import FIGURES, draft_color

    drawn = {name: drawing for name, draw in FIGURES.items() if (drawing := draw(report))}
    parts: list[Part] = []
    for name in (name for name in NAMES if name != "trees"):  # which few ask for
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
        first_screen=Markup(first_screen_html(report, _first_figure(drawn.get("answer")))),  # noqa: S704  it escapes
        figures={name: (drawing, Markup(drawing.svg())) for name, drawing in drawn.items()},  # noqa: S704  it escapes
        colors={draft: f"var(--{draft_color(place)})" for place, draft in enumerate(report.run.drafts)},
        unfolded=UNFOLDED,
        profile=_pretty(report.run.profile),
        environment=_pretty(report.run.environment),
        terms=TERMS,
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


def _first_figure(drawing: Drawing | None) -> str:
    """Return the figure of the first screen as markup, with its caption."""
    return f"<figure>{drawing.svg()}<figcaption>{_escaped(drawing.caption)}</figcaption></figure>" if drawing else ""


def _title(reference: str) -> str:
    """Return a model as its users call it: of a local path only what it ends in."""
    return fmt.visible(reference.rstrip("/").rsplit("/", 1)[-1] if reference.startswith(("/", ".")) else reference)


def _pretty(value: Mapping[str, Any]) -> str:
    lines = json.dumps(plain_values(value), indent=2, ensure_ascii=False).split("\n")
    return "\n".join(map(fmt.visible, lines))


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
        _labelled(_marked(screen.verdict), _paragraphs(screen.about)),
        _labelled("Times", _paragraphs([screen.times])),
        figure,
        _table_markup(screen.table, [str(item.answer.domain) for item in report.domains]),
        _paragraphs(screen.table.below),
        _labelled("Load", load),
        _labelled("Notes", notes and f"<ol>{notes}</ol>"),
        _labelled("Serve", serve),
        _labelled("More", "" if figure else _paragraphs([screen.more])),
    )
    return "\n".join(('<div class="alphaprof-screen">', *filter(None, parts), "</div>"))


def _escaped(text: str) -> str:
    return escape(fmt.visible(text))


def _marked(cell: str) -> str:
    """Return a cell; a verdict has its color."""
    if not isinstance(cell, Verdict):
        return _escaped(cell)
    return f'<b class="alphaprof-verdict {cell.kind}">{_escaped(cell)}</b>'


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
    markup = (f"<td{_class(table, column)}>{_marked(cells[column])}</td>" for column in table.columns)
    return f'<tr><th scope="row" class="name"{title}>{_escaped(name)}</th>{"".join(markup)}</tr>'
