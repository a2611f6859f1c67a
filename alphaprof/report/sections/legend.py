"""What the columns, words and marks mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from alphaprof.render.blocks import Block
from alphaprof.report.build import RunReport

TITLE = "what the columns, words and marks mean"
EMPTY = ""


@cache
def glossary() -> dict[str, Any]:
    """Return the words of the glossary by key, each with its `name` and `meaning`."""
    return dict(json.loads((files("alphaprof.render.html") / "glossary.json").read_text(encoding="utf-8")))


def draw(report: RunReport) -> Iterator[Block]:
    """Yield the glossary, a line per word."""
    yield from (f"{word['name']}: {word['meaning']}" for word in glossary().values())
