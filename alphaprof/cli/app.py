"""The list of commands, and how the program ends: the exit codes of errors, and their two lines on stderr."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from alphaprof.cli.answering import check, compare, doctor, predict, report, rules, schema, trees
from alphaprof.cli.common import discard_output, disk_failure, escape_characters, one_line, print_notes
from alphaprof.cli.exchange import export, import_app
from alphaprof.cli.heads import curve, train
from alphaprof.cli.help import Command
from alphaprof.cli.measuring import latency, profile, validate
from alphaprof.cli.runs import runs_app
from alphaprof.errors import AlphaprofError
from alphaprof.version import __version__

app = typer.Typer(
    help="Will speculative decoding pay: for which traffic, which draft, how many speculative tokens? And how sure is "
    "the answer?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(profile, report, check, compare, trees, train, curve, export),
    *(latency, validate, predict, schema, rules, doctor),
):
    app.command(cls=Command)(command)
app.add_typer(import_app, name="import")
app.add_typer(runs_app, name="runs")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"alphaprof {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


def main() -> None:
    """The console script: the one place that prints the errors a user can cause, as two lines on stderr."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by who calls, such as a daemon
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 (until the program ends)
    escape_characters()
    try:
        _run()
    except AlphaprofError as error:
        print(f"error: {one_line(error.message)}\nhint: {one_line(error.hint)}", file=sys.stderr)
        print_notes(error)
        sys.exit(error.exit_code)


def _run() -> None:
    """Run the command, and write what it left in the buffer of the standard output. Raises errors of disks as `DiskFull`."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # nobody reads the answer any more
        discard_output()
        sys.exit(1)
    except OSError as error:
        discard_output()
        raise disk_failure(error) from error
