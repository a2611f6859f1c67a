"""The first screen as HTML, without a template or script: above the page, and by itself in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from alphaprof.render.blocks import Table
from alphaprof.render.first_screen import ALONE, first_screen
from alphaprof.report import format as fmt
from alphaprof.report.build import Report

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
    serve = (
        f"<p>{command and f'<code>{_escaped(command)}</code> '}{_escaped(remark)}</p>" for command, remark in screen.serve
    )
    parts = (
        f"<p>{_escaped(screen.run)}</p>",
        _labelled(_verdict(screen.verdict), _paragraphs(screen.about)),
        _labelled("ROUTE", _paragraphs(screen.route)),
        _labelled("Times", _paragraphs([screen.times])),
        _table_markup(screen.table, [item.domain for item in report.domains]),
        _paragraphs(screen.table.below),
        _labelled("Load", load),
        _labelled("Notes", notes and f"<ol>{notes}</ol>"),
        _labelled("Serve", "".join(serve)),
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
    """A table, and under the pointer the whole names of its rows, which may be cut in their first cells."""
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
    return ' class="name"' if column in table.left else ""


def _row_markup(table: Table, name: str, cells: Mapping[str, str], title: str = "") -> str:
    markup = (
        f"<td{_class(table, column)}>{_verdict(cells[column]) if column == 'verdict' else _escaped(cells[column])}</td>"
        for column in table.columns
    )
    return f'<tr><th scope="row" class="name"{title}>{_escaped(name)}</th>{"".join(markup)}</tr>'
