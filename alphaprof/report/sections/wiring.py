"""How the files of draft heads were read."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.render.blocks import Block
from alphaprof.report.build import RunReport
from alphaprof.report.wording import wiring_lines

TITLE = "how the files of draft heads were read"
EMPTY = "the run has no draft head"


def draw(report: RunReport) -> Iterator[Block]:
    """Yield how each head's files were read."""
    for draft, facts in report.run.draft_models.items():
        if lines := list(wiring_lines(facts)):
            yield f"draft {draft}: how its files were read"
            yield from (f"  {line}" for line in lines)
            yield ""
