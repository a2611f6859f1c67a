"""A dry run as text: the terminal's table (rich), or JSON."""

from __future__ import annotations

import dataclasses
import json

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphaprof.commands.preflight.build import Preflight
from alphaprof.commands.preflight.findings import NOTE, OK, PROBLEM
from alphaprof.render.json import plain_values
from alphaprof.render.tables import plain
from alphaprof.report.format import many

FORMAT = "alphaprof-preflight"
VERSION = 1
STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


def preflight_json(preflight: Preflight) -> str:
    """The checks and the facts behind them as JSON. Unknown values are null."""
    content = {"format": FORMAT, "version": VERSION} | plain_values(dataclasses.asdict(preflight))
    return json.dumps(content, indent=2, allow_nan=False)


def preflight_terminal(preflight: Preflight, console: Console) -> None:
    """Print every check with its cause and remedy, and what follows."""
    facts = preflight.seen.target.facts
    drafts = many(len(preflight.seen.drafts), "draft")
    console.print(plain(f"{facts.architecture} in {facts.dtype} on {facts.device}, {drafts}"))
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, width in (("check", 14), ("of", 20), ("result", 7)):
        table.add_column(name, overflow="fold", max_width=width)
    table.add_column("what was found, and what to do", overflow="fold", ratio=1)
    last = None
    for check in preflight.checks:
        found = plain(check.cause)
        if check.remedy is not None:
            found.append("\n").append_text(Text("-> ", "dim")).append_text(plain(check.remedy))
        table.add_row(
            "" if check.name == last else check.name, plain(check.subject), Text(check.level, STYLES[check.level]), found
        )
        last = check.name
    console.print(table)
    console.print(preflight.conclusion, highlight=False, markup=False)
