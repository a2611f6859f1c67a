"""What commands share: how one is declared, options of several, how an answer is shown, what Ctrl-C says."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from typer import Argument, Exit, Option, Typer
from typer.core import TyperCommand, TyperOption

from alphaprof.errors import DiskFull, cut

if TYPE_CHECKING:
    from alphaprof.render.answer import Answer

Function = TypeVar("Function", bound=Callable[..., Any])
INTERRUPTED, TERMINATED = 130, 143  # what shells say of SIGINT and SIGTERM
ASKED, HOW, OUTPUT, SERVED = "What is asked", "How", "Output", "How it was served"
PANELS = (SERVED, ASKED, HOW, OUTPUT)  # of options in `--help`, from top to bottom; an option is ASKED unless it says so
how, output, served = (partial(Option, rich_help_panel=panel) for panel in (HOW, OUTPUT, SERVED))


class Command(TyperCommand):
    """A command whose `--help` groups its options in panels."""

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        for option in self.params:
            if isinstance(option, TyperOption):
                option.rich_help_panel = option.rich_help_panel or ASKED
                option.metavar = "" if option.is_flag else option.metavar
        self.params.sort(key=lambda param: PANELS.index(getattr(param, "rich_help_panel", None) or ASKED))

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option `--help`, which stands in the last panel."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel, option.metavar = OUTPUT, ""
        return option


def command(group: Typer, *examples: str, name: str | None = None) -> Callable[[Function], Function]:
    """Add a function to a group as a command, whose `--help` ends with examples."""
    heading = "Examples:" if len(examples) > 1 else "Example:"
    return group.command(name, cls=Command, epilog="\n\n".join((heading, *examples)))


class _NoPandas:
    """A finder of modules that lets nobody find pandas."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"{name} is not looked for here", name=name)


@contextlib.contextmanager
def without_pandas() -> Iterator[None]:
    """Keep pyarrow from loading pandas at its first conversion, which takes as long as a report: nothing here is pandas'."""
    sys.meta_path.insert(0, _NoPandas)
    try:
        yield
    finally:
        sys.meta_path.remove(_NoPandas)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems and containers send."""


@contextlib.contextmanager
def interruptible(out: str | None) -> Iterator[None]:
    """Ctrl-C and SIGTERM, unless something else handles it, end the command with the shells' exit code and a word about what
    is left (None: nothing to go on with).
    """

    def stop(*_: object) -> None:
        raise _Terminated

    terminable = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if terminable:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if terminable:  # a second one ends the process, whatever the next lines wait for
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        begun = out is not None and has_begun(out)
        hint = f"what is complete is in {out}: finish with the same command and --resume"
        nothing = "nothing was written yet" if out is not None else "start again, with another --out if you gave one"
        print(f"interrupted\nhint: {one_line(hint if begun else nothing)}", file=sys.stderr)
        print_notes(interrupt)
        raise Exit(TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED) from None
    finally:
        if terminable:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def has_begun(out: str) -> bool:
    """Whether a run, a training or a curve has begun in a place, as far as that can be seen."""
    from alphaprof.log.manifest import MANIFEST
    from alphaprof.log.storage import storage_of
    from alphaprof.log.training import CURVE, TRAINING

    with contextlib.suppress(Exception):  # it is asked where something else ends a command
        return any(map(storage_of(out).has, (MANIFEST, TRAINING, CURVE)))
    return False


def print_notes(error: BaseException) -> None:
    """Say what else went wrong."""
    for note in getattr(error, "__notes__", ()):
        print(f"note: {one_line(note)}", file=sys.stderr)


def show(answer: Answer, output: str, out: Path | None = None) -> None:
    """Print an answer in the format `output`, or writes it to the file `out`. Raises `DiskFull`."""
    from alphaprof.render.answer import answer_text

    print_text(answer_text(answer, output, to_file=out is not None), out)


def print_text(text: str, path: Path | None) -> None:
    """Print the answer, or write it to a file, which has the old content or the new one whole. Raises `DiskFull`."""
    if path is None:
        sys.stdout.write(text)
        return
    target = path.resolve()  # a link stays one
    temporary = target.with_name(f".alphaprof-{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, target)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _unwritable(path: Path, reason: str | None) -> DiskFull:
    return DiskFull(f"cannot write {cut(str(path))}: {reason}", "choose another --out, in a directory that you may write")


def _out_place(path: Path | None) -> Path | None:
    """Return where `print_text` writes; None for -. Raises `DiskFull` if it cannot: better known before hours of work."""
    if path is None or str(path) == "-":
        return None
    reason = None
    try:
        if not path.parent.is_dir():
            reason = f"there is no directory {cut(str(path.parent))}"
        elif path.exists() and not path.is_file():
            reason = "it is not a file (- is the standard output)"
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            reason = f"{os.strerror(errno.EACCES)} in {cut(str(path.parent))}"
    except OSError as error:  # a name that is too long
        reason = error.strerror
    if reason:
        raise _unwritable(path, reason)
    return path


# What several commands take. Not `readable`: our own errors say in two lines what cannot be read.
RunFolder = Annotated[Path, Argument(metavar="RUN", readable=False, help="Directory of a run.")]
RunOfDraft = Annotated[str, Argument(metavar="RUN[:DRAFT]", help="A run, and one of its drafts where it has several.")]
ProfileFile = Annotated[Path, Argument(metavar="PROFILE", readable=False, help="Profile file (YAML).")]
ProfileChanges = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override an option: target.dtype=float32, costs.concurrency=[1,8]."),
]
QuestionChanges = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change the question, decision.min_speedup=1.2, or the step times, costs.source=roofline (repeatable).",
    ),
]
DecisiveRule = Annotated[str | None, Option(help="The acceptance rule; default: that of the run's decision.")]
Format = Annotated[Literal["terminal", "json", "md", "html"], output("--format", help="terminal, json, md or html.")]
Undecided = Annotated[
    Literal["pass", "fail"], how(help="Whether undecided, or too noisy to tell, passes (exit code 0) or fails (11).")
]
SplitWay = Literal["random", "time"]
SPLIT = how("--split", help="random, or time: what is held out is what was asked last (data.time of the profile).")
OutFile = Annotated[
    Path | None, output(callback=_out_place, readable=False, help="Write to this file instead of the standard output (-).")
]
Resume = Annotated[bool, how("--resume", help="Continue what was interrupted in --out, or start it.")]


def one_line(text: str) -> str:
    """Text that may quote data: without line breaks, control or direction characters."""
    return "".join(char if char.isprintable() else " " for char in text)
