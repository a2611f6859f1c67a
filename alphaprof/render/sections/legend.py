"""What the columns, words and marks of a report mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from alphaprof.render.blocks import Block
from alphaprof.render.sections.drafts import MARKS
from alphaprof.report.build import Report


@cache
def glossary() -> dict[str, Any]:
    """Return the words of the glossary by key, each with its `name` and `meaning`."""
    return dict(json.loads((files("alphaprof.render.html") / "glossary.json").read_text(encoding="utf-8")))


def legend(report: Report) -> Iterator[Block]:
    """Yield the glossary, a line per word, then the marks."""
    yield from (f"{word['name']}: {word['meaning']}" for word in glossary().values())
    yield f"marks: {'; '.join(MARKS.values())}."
