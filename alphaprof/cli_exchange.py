"""The command that hands a run's acceptance to other tools. Heavy imports stay inside it."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from alphaprof.cli_support import one_line, print_text
from alphaprof.report.export_formats import EXPORTS

ExportFormat = StrEnum("ExportFormat", list(EXPORTS))  # type: ignore[misc]


def export(
    run: Annotated[str, typer.Argument(metavar="RUN[:DRAFT]", help="A run, and one of its drafts where it has several.")],
    to: Annotated[
        ExportFormat,
        typer.Option(help="; ".join(f"{name}: {form.about}" for name, form in EXPORTS.items()) + "."),
    ],
    rule: Annotated[str | None, typer.Option(help="The acceptance rule; default: that of the run's decision.")] = None,
    gamma: Annotated[
        int | None,
        typer.Option(min=1, help="Drafted tokens per round (sequoia: levels); default: the decision's, or the best."),
    ] = None,
    domain: Annotated[
        str | None, typer.Option(metavar="NAME", help="One domain; default: the whole traffic, by the decision's weights.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, max=512, help="Nodes of a tree (sequoia); default: 16.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Decide otherwise, or by other step times: costs.source=roofline."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the standard output.")] = None,
) -> None:
    """Acceptance as engines and simulators read it. stdout is the file; what it assumes is said on stderr."""
    from alphaprof.loader import changed_question, known_rules
    from alphaprof.report.compare import side_of
    from alphaprof.report.export import export as exported
    from alphaprof.report.export_scope import Wanted

    side = side_of(run)
    if overrides:
        side = side.asked(changed_question(side.run.manifest.config, overrides))
    named = known_rules([rule], "--rule")[0] if rule else None
    found = exported(side, to.value, Wanted(named, gamma, domain, nodes))
    print_text(found.text, out)
    for kind, lines in (("note", found.notes), ("warning", found.warnings)):
        for line in lines:
            print(f"{kind}: {one_line(line)}", file=sys.stderr)
