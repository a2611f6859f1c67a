"""The answer of a command in every format: as text for standard output, or as a file by its suffix."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Protocol, cast

from rich.console import Console

from alphaprof.render import markdown, terminal
from alphaprof.render.blocks import Block
from alphaprof.render.json import Published, render_json

PLAIN_WIDTH = 150  # columns of what is not printed on a terminal


class Answer(Protocol):
    """What a command answers. Its dataclass fields are its JSON (`Published`), its blocks its text; the outcome comes first.

    An answer that draws a format by itself has a method without arguments that returns it and is named like the format, such
    as `junit`, `csv` or `png`; so has `ReportAnswer` for all of them.
    """

    def blocks(self) -> Iterator[Block]:
        """Yield the answer's lines, tables, figures and footnotes."""


def answer_text(answer: Answer, output: str, to_file: bool = False) -> str:
    """Return an answer in the format `output`: `terminal`, `json`, `md`, `html`, or another that it has a method for.

    `terminal` is colored and as wide as the terminal if the standard output is one and the text does not go `to_file`.
    """
    if output == "terminal":
        colored = sys.stdout.isatty() and not to_file
        width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns  # COLUMNS, if that is set
        width = PLAIN_WIDTH if to_file and "COLUMNS" not in os.environ else width
        buffer = io.StringIO()
        console = Console(file=buffer, force_terminal=colored, width=width)
        own = getattr(answer, output, None)
        own(console) if own else terminal.draw(answer.blocks(), console)
        return buffer.getvalue()
    if own := getattr(answer, output, None):
        return str(own())
    if output == "json":
        return render_json(cast(Published, answer)) + "\n"
    if output == "md":
        return markdown.text(answer.blocks())
    from alphaprof.render.html.page import plain_page  # and with it what a report says

    return plain_page(cast(Published, answer).format, list(answer.blocks()))


def answer_file(answer: Answer, output: str) -> bytes:
    """Return an answer as a file in the format `output`."""
    if output == "png":
        return bytes(getattr(answer, output)())
    return answer_text(answer, output, to_file=True).encode("utf-8", "backslashreplace")
