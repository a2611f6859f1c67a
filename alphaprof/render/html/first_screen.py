"""The first screen as HTML, without a template or script: above the page, and by itself in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from alphaprof.render.first_screen import ALONE, WORDS, first_screen
from alphaprof.render.html.templates import resource
from alphaprof.report import format as fmt
from alphaprof.report.build import Report

WHOLE_NAME = 1_000  # characters of a domain's name that are shown under the pointer


def first_screen_fragment(report: Report) -> str:
    """Returns the first screen with its style, for notebooks: it needs no package and no script."""
    return f"<style>{resource('first_screen.css')}</style>\n{first_screen_html(report)}"


def first_screen_html(report: Report) -> str:
    """Returns what the terminal's first screen says, in the same order; its style is `first_screen.css`."""
    screen = first_screen(report)
    rows = [_row(screen.columns, cells, item.domain) for cells, item in zip(screen.rows, report.domains, strict=True)]
    total = f"<tfoot>{_row(screen.columns, screen.total, screen.total[0])}</tfoot>" if screen.total else ""
    heads = "".join(
        f'<th scope="col"{_class(name)}>{_text(text)}</th>'
        for name, text in zip(screen.columns, screen.headings, strict=True)
    )
    parts = (
        f"<p>{_text(screen.run)}</p>",
        *_lines(
            (_verdict(screen.verdict), _paragraphs(screen.about)),
            ("ROUTE", _paragraphs(screen.route)),
            ("Times", _paragraphs([screen.times])),
        ),
        _table("Domains", f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>{total}"),
        _paragraphs(screen.below),
        *_lines(
            ("Load", _load(screen.load) + _paragraphs([screen.pays]) if screen.load else ""),
            ("Notes", _list(screen.notes)),
            ("Serve", "".join(_command(*each) for each in screen.serve)),
            ("More", _paragraphs([screen.more])),
        ),
    )
    return "\n".join(('<div class="alphaprof-screen">', *filter(None, parts), "</div>"))


def _text(text: str) -> str:
    return escape(fmt.visible(text))


def _verdict(name: str) -> str:
    return f'<b class="alphaprof-verdict {name.rstrip(ALONE).lower()}">{name}</b>'


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{_text(text)}</p>" for text in texts)


def _command(command: str, remark: str) -> str:
    return f"<p>{f'<code>{_text(command)}</code> ' if command else ''}{_text(remark)}</p>"


def _list(texts: Sequence[str]) -> str:
    return f"<ol>{''.join(f'<li>{_text(text)}</li>' for text in texts)}</ol>" if texts else ""


def _lines(*lines: tuple[str, str]) -> list[str]:
    """Markup beside its labels, both escaped; a label without markup is left out."""
    return [f'<div class="alphaprof-line"><div>{label}</div><div>{markup}</div></div>' for label, markup in lines if markup]


def _table(name: str, markup: str) -> str:
    return f'<div class="wide alphaprof-wide"><table aria-label="{name}">{markup}</table></div>'


def _class(column: str) -> str:
    return ' class="name"' if column in WORDS else ""


def _row(columns: Sequence[str], cells: Sequence[str], name: str) -> str:
    """The row of a domain, whose name may be cut in its first cell."""
    whole = name if len(name) <= WHOLE_NAME else f"{name[:WHOLE_NAME]}\N{HORIZONTAL ELLIPSIS}"
    first, *others = cells
    markup = [f'<th scope="row" class="name" title="{_text(whole)}">{_text(first)}</th>']
    for column, text in zip(columns[1:], others, strict=True):
        cell = _verdict(text) if column == "verdict" else _text(text)
        markup.append(f"<td{_class(column)}>{cell}</td>")
    return f"<tr>{''.join(markup)}</tr>"


def _load(rows: Sequence[Sequence[str]]) -> str:
    """The best speedups by concurrency, which is the first row."""
    heads, *body = (
        f'<tr><th scope="row" class="name">{_text(name)}</th>'
        f"{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"
        for tag, (name, *cells) in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True)
    )
    return _table("Load", f"<thead>{heads}</thead><tbody>{''.join(body)}</tbody>")
