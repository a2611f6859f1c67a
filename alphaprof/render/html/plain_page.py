"""A page about an answer that is no report: its lines, figures and tables, in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Sequence

from alphaprof.render.html.figures import Figure
from alphaprof.render.html.templates import filled_page, require_html

Titled = tuple[str, str, Sequence[str], Sequence[Sequence[str]]]  # a table: its name in a word, title, heading and rows


def plain_page(
    title: str,
    version: str,
    lines: Sequence[str],
    figures: Sequence[tuple[Figure, str, str]],
    tables: Sequence[Titled],
    below: Sequence[str],
) -> str:
    """The page: the first of the `lines` is the outcome; `figures` with their headings and captions; what stands `below`.
    Raises `ExtraMissing` where the plotting library or the template language is not installed.
    """
    require_html()
    words = {"lines": lines, "figures": figures, "tables": tables, "below": below}
    return filled_page(
        "plain.html.j2", [figure for figure, _, _ in figures], outcome=lines[0], title=title, version=version, **words
    )
