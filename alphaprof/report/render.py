"""A report in one of its renderings, as text."""

from __future__ import annotations

import io
import shutil
import sys

from rich.console import Console

from alphaprof.report.json import render_json
from alphaprof.report.model import Report
from alphaprof.report.terminal import render_terminal

PLAIN_WIDTH = 150


def render(report: Report, output: str, to_file: bool = False) -> str:
    """The report as text: `terminal` (coloured and as wide as the terminal where stdout is one) or `json`."""
    if output == "json":
        return render_json(report) + "\n"
    colour = sys.stdout.isatty() and not to_file
    width = shutil.get_terminal_size().columns if colour else PLAIN_WIDTH
    buffer = io.StringIO()
    render_terminal(report, Console(file=buffer, force_terminal=colour, width=max(width, 100)))
    return buffer.getvalue()
