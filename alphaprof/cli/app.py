"""The list of commands, and how the program ends: exit codes of errors, and their two lines on stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Annotated

from typer import Exit, Option, Typer

from alphaprof.cli import answering, exchange, measuring, tools
from alphaprof.cli.common import one_line, print_notes
from alphaprof.errors import AlphaprofError, DiskFull, OptionInvalid, cut, require_utf8
from alphaprof.version import __version__

# What disks and their permissions do, wherever a command meets it; other errors of the system are bugs.
DISK = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}
DISK |= {errno.EBUSY, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENXIO}

app = Typer(
    help="Will speculative decoding pay: for which traffic, which draft, how many speculative tokens? How sure is "
    "the answer? Before you serve: profile and report, then validate. If a server speculates: diagnose says whether it "
    "does as a run predicts, and import reads what it logged.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for group in (measuring.group, answering.group, measuring.heads_group, exchange.group, tools.group):  # as `--help` has them
    app.registered_commands += group.registered_commands
COMMANDS = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback is not None}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"alphaprof {__version__}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the console script: the one place that prints the errors a user can cause, as two lines on stderr."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller, such as a daemon
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 (until the program ends)
    escape_characters()
    try:
        _run_command()
    except AlphaprofError as error:
        print(f"error: {one_line(error.message)}\nhint: {one_line(error.hint)}", file=sys.stderr)
        print_notes(error)
        sys.exit(error.exit_code)


def _run_command() -> None:
    """Run the command, then flush standard output. Raises disk errors as `DiskFull`."""
    for argument in sys.argv[1:]:
        require_utf8(argument)
    if sys.argv[1:] and sys.argv[1].startswith("-") and COMMANDS.intersection(sys.argv[2:]):
        raise OptionInvalid(
            f"{cut(sys.argv[1])} stands before the command",
            "options stand behind the command: alphaprof report RUN --set KEY=VALUE",
        )
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
        if error.errno not in DISK:  # a bug
            raise
        raise DiskFull(
            f"{error.filename or 'a file or the standard output'} cannot be read or written: {os.strerror(error.errno)}",
            "check the disk and permissions, free some space, or use another folder",
        ) from error


def escape_characters() -> None:
    """Make the standard streams escape characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Drop what is still buffered for standard output, which cannot be written, so that Python exits quietly."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
