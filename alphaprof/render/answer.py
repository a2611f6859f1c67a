"""The answer of a command, and its text in the format that `--format` names."""

from __future__ import annotations

import io
import os
import shutil
import sys
from typing import Protocol

from rich.console import Console

from alphaprof.render.json import Published, render_json

PLAIN_WIDTH = 150  # columns of what is not printed on a terminal


class Answer(Published, Protocol):
    """What a command answers. Its dataclass fields are its JSON.

    An answer with further texts has a method without arguments for each, which returns the text and is named as
    `--format` names it: `md`, `html`, `junit`, `csv`.
    """

    def terminal(self, console: Console) -> None:
        """Prints the answer as tables and sentences."""


def answer_text(answer: Answer, output: str, to_file: bool = False) -> str:
    """Returns an answer in the format `output`: `terminal`, `json`, or another that it has a method for.

    `terminal` is coloured and as wide as the terminal where the standard output is one, and the text does not go `to_file`.
    """
    if output == "json":
        return render_json(answer) + "\n"
    if output != "terminal":
        return str(getattr(answer, output)())
    colour = sys.stdout.isatty() and not to_file
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns  # COLUMNS, where that is set
    width = PLAIN_WIDTH if to_file and "COLUMNS" not in os.environ else width
    buffer = io.StringIO()
    answer.terminal(Console(file=buffer, force_terminal=colour, width=width))
    return buffer.getvalue()
