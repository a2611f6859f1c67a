"""What to know before trusting the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render.blocks import Block, Verdict
from alphaprof.report.build import RunReport

TITLE = "what to know before trusting the numbers"
EMPTY = "this run has no notes"


def draw(report: RunReport) -> Iterator[Block]:
    """Yield what is to know, and what to do about it."""
    for note in report.notes:
        yield Verdict("note", f": {note.message}")
        yield f"      {note.remedy}"
