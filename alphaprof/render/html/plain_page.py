"""A page about an answer that is not a report: its blocks, in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Sequence

from alphaprof.render.blocks import Block, Figure, outcome_of
from alphaprof.render.html.templates import filled_page, require_html
from alphaprof.render.json import PREFIX
from alphaprof.version import __version__


def plain_page(format_name: str, blocks: Sequence[Block]) -> str:
    """Return the page of an answer of a format such as alphaprof-curve. Raises `ExtraMissing` without the packages that
    draw it.
    """
    require_html()
    drawn = {block.name: block.draw() for block in blocks if isinstance(block, Figure)}
    title = format_name.removeprefix(PREFIX)
    outcome = outcome_of(str(blocks[0])) or "answer"
    words = {"outcome": outcome, "title": title, "version": __version__, "blocks": blocks, "figures": drawn, "terms": {}}
    return filled_page("plain.html.j2", drawn, **words)
