"""A page about an answer that is no report: its lines, figures and tables, in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from alphaprof.render.html.templates import filled_page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Titled = tuple[str, str, Sequence[str], Sequence[Sequence[str]]]  # a table: its name in a word, title, heading and rows


def plain_page(
    title: str,
    version: str,
    lines: Sequence[str],
    figures: Mapping[str, tuple[Figure, str, str]],
    tables: Sequence[Titled],
    below: Sequence[str],
) -> str:
    """Return the page: the first of the `lines` is the outcome; `figures` with their headings and captions; what stands
    `below`.
    """
    words = {"lines": lines, "figures": figures, "tables": tables, "below": below}
    drawn = {name: figure for name, (figure, _, _) in figures.items()}
    return filled_page("plain.html.j2", drawn, outcome=lines[0], title=title, version=version, **words)
