"""What the columns, words and marks mean."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render.blocks import Block
from alphaprof.render.html.page import glossary
from alphaprof.report.build import RunReport

TITLE = "what the columns, words and marks mean"
EMPTY = ""


def draw(report: RunReport) -> Iterator[Block]:
    """Yield the glossary, a line per word."""
    yield from (f"{word['name']}: {word['meaning']}" for word in glossary().values())
