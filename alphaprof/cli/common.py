"""What commands share: how one is declared, common options, how an answer is shown, what Ctrl-C says."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from typer import Argument, BadParameter, Exit, Option, Typer
from typer.core import TyperCommand, TyperOption

from alphaprof.errors import DiskFull, OptionInvalid, cut
from alphaprof.run.manifest import MANIFEST

if TYPE_CHECKING:
    from alphaprof.render.answer import Answer

Function = TypeVar("Function", bound=Callable[..., Any])
OLD_S = 3600  # seconds after which nobody writes a temporary file any more
INTERRUPTED, TERMINATED = 130, 143  # exit codes of shells for SIGINT and SIGTERM
ASKED, HOW, OUTPUT, SERVED, TEXTS = "Question", "Method", "Output", "How it was served", "Prompts and answers alone"
PANELS = (SERVED, ASKED, HOW, TEXTS, OUTPUT)  # of options in `--help`, from top to bottom; an option is ASKED by default
how, output, served, texts = (partial(Option, rich_help_panel=panel) for panel in (HOW, OUTPUT, SERVED, TEXTS))

EVERY = ("terminal", "md", "html", "json")  # formats of every answer
SUFFIXES = {
    ".txt": "terminal",
    ".md": "md",
    ".html": "html",
    ".json": "json",
    ".csv": "csv",
    ".xml": "junit",
    ".svg": "svg",
    ".png": "png",
}
FROM_RUNS = ("report", "check", "compare", "export", "merge")  # commands that load no model and no data


class Command(TyperCommand):
    """A command whose `--help` groups its options in panels."""

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        for option in self.params:
            if isinstance(option, TyperOption):
                option.rich_help_panel = option.rich_help_panel or ASKED
                option.metavar = "" if option.is_flag else option.metavar
        self.params.sort(key=lambda param: PANELS.index(getattr(param, "rich_help_panel", None) or ASKED))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; without pandas if it answers from runs."""
        with without_pandas() if self.name in FROM_RUNS else contextlib.nullcontext():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what was typed; a value that is none of several names the one that was meant."""
        try:
            return list(super().parse_args(ctx, args))
        except BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            given, *known = re.findall("'([^']*)'", error.message) if " is not one of " in error.message else ("",)
            names = {part: name for name in known for part in (name, name.partition("-")[0])}
            if near := difflib.get_close_matches(given, names, n=1):
                error.message = f"{error.message.removesuffix('.')}. Did you mean {names[near[0]]}?"
            raise

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option `--help`, which is in the last panel."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel, option.metavar = OUTPUT, ""
        return option


def command(group: Typer, *examples: str, name: str | None = None) -> Callable[[Function], Function]:
    """Add a function to a group as a command whose `--help` ends with examples."""
    heading = "Examples:" if len(examples) > 1 else "Example:"
    return group.command(name, cls=Command, epilog="\n\n".join((heading, *examples)))


class _Hidden:
    """A module finder that hides what pyarrow and scipy load though nothing here needs it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in ("pandas", "charset_normalizer"):
            raise ModuleNotFoundError(f"{name} is hidden on purpose", name=name)


@contextlib.contextmanager
def without_pandas() -> Iterator[None]:
    """Keep pyarrow from loading pandas at its first conversion, which takes as long as a report, and scipy from what guesses
    the encoding of Fortran.
    """
    sys.meta_path.insert(0, _Hidden)
    try:
        yield
    finally:
        sys.meta_path.remove(_Hidden)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems and containers send."""


@contextlib.contextmanager
def interruptible(out: str | None) -> Iterator[None]:
    """End the command on Ctrl-C, and on SIGTERM unless something else handles it: with the shells' exit code, and a message
    about what is left (`out` None: nothing to resume).
    """

    def stop(*_: object) -> None:
        raise _Terminated

    terminable = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if terminable:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if terminable:  # a second one ends the process, even if the next lines block
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        begun = out is not None and has_begun(out)
        hint = f"{out} keeps what is complete: run the same command with --resume"
        nothing = "nothing written: start again" if out is not None else "start again, with a new --out if you gave one"
        print(f"interrupted\nhint: {one_line(hint if begun else nothing)}", file=sys.stderr)
        print_notes(interrupt)
        raise Exit(TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED) from None
    finally:
        if terminable:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def has_begun(out: str) -> bool:
    """Return whether a run or a training has visibly begun in a place."""
    from alphaprof.run.manifest import MANIFEST
    from alphaprof.run.place import TRAINING
    from alphaprof.run.storage import storage_of

    with contextlib.suppress(Exception):  # it is asked while something else ends the command
        return any(map(storage_of(out).has, (MANIFEST, TRAINING)))
    return False


@contextlib.contextmanager
def run_directory(out: Path | None) -> Iterator[Path]:
    """Yield a directory for a new run: `out`, or if that is None one that is removed in the end."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="alphaprof-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "run"


def print_notes(error: BaseException) -> None:
    """Say what else went wrong."""
    for note in getattr(error, "__notes__", ()):
        print(f"note: {one_line(note)}", file=sys.stderr)


def asked_formats(form: str | None, out: list[Path] | None) -> list[tuple[str, Path | None]]:
    """Return each format that is asked for, and its file (None: standard output). A file has the format of its suffix;
    standard output gets `form` if there are no files, if one of them is -, or if no file has that format.
    """
    files = {path: SUFFIXES[path.suffix.lower()] for path in out or () if str(path) != "-"}
    asked: list[tuple[str, Path | None]] = [(own, path) for path, own in files.items()]
    if len(files) < len(out or ()) or not files or form not in (None, *files.values()):
        asked.append((form or "terminal", None))
    return asked


def show(answer: Answer, form: str | None, out: list[Path] | None = None) -> None:
    """Write an answer to each file of `out`, and print it as `asked_formats` says. Raises `DiskFull`."""
    from alphaprof.render.answer import answer_file, answer_text

    for output, path in asked_formats(form, out):
        if path is None:
            sys.stdout.write(answer_text(answer, output))
        else:
            write_file(answer_file(answer, output), path)


def print_text(text: str, path: Path | None) -> None:
    """Print text, or replace a file with it. Raises `DiskFull`."""
    if path is None:
        sys.stdout.write(text)
    else:
        write_file(text.encode("utf-8", "backslashreplace"), path)


def write_file(content: bytes, path: Path) -> None:
    """Replace a file atomically. Raises `DiskFull`."""
    target = path.resolve()  # keeps a symlink
    temporary = target.with_name(f".alphaprof-{os.getpid()}.tmp")
    for left in target.parent.glob(".alphaprof-*.tmp"):  # by processes that were killed
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - OLD_S:
                left.unlink()
    try:
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _unwritable(path: Path, reason: str | None) -> DiskFull:
    return DiskFull(f"cannot write {cut(str(path))}: {reason}", "choose another --out, in a directory you can write to")


def _out_place(path: Path | None) -> Path | None:
    """Return the path that `print_text` writes to; None for -. Raises `DiskFull` early, before hours of work."""
    if path is None or str(path) == "-":
        return None
    try:
        if not path.parent.is_dir():
            raise _unwritable(path, f"the directory {cut(str(path.parent))} does not exist")
        if path.exists() and not path.is_file():
            raise _unwritable(path, "it is not a file (use - for standard output)")
        if any((folder / MANIFEST).is_file() for folder in path.resolve().parents):
            raise _unwritable(path, "it lies inside a run, whose files are its own")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise _unwritable(path, f"{os.strerror(errno.EACCES)} in {cut(str(path.parent))}")
    except OSError as error:  # a name that is too long
        raise _unwritable(path, error.strerror) from None
    return path


def formats(*more: str, about: str = "What standard output gets") -> Any:
    """Return the option --format of an answer; `more`: formats that it has beside those of every answer."""
    known = ["terminal", "json", "md", "html", *more]
    return output("--format", help=f"{about}: {', '.join(known[:-1])} or {known[-1]}.")


def files(*more: str, about: str = "") -> Any:
    """Return the option --out of an answer's files, of which it checks before hours of work that they can be written
    (`DiskFull`) and that each has the suffix of a format (`OptionInvalid`). `more`: formats beside those of every answer;
    `about`: what the help says of these.
    """

    def checked(paths: list[Path] | None) -> list[Path] | None:
        known = [suffix for suffix, form in SUFFIXES.items() if form in (*EVERY, *more)]
        for path in paths or ():
            if _out_place(path) is not None and path.suffix.lower() not in known:
                why = f"this command writes no {path.suffix} files" if path.suffix else "the suffix decides the format"
                raise OptionInvalid(
                    f"cannot write {cut(str(path))}: {why}", f"end the name in {', '.join(known[:-1])} or {known[-1]}"
                )
        return paths

    text = f"Write to this file, in the format of its suffix: .txt, .md, .html, .json{about} (repeatable)."
    return output("--out", metavar="FILE", callback=checked, readable=False, help=text)


# Options of several commands. Not `readable`: our own errors say in two lines what cannot be read.
RunFolder = Annotated[Path, Argument(metavar="RUN", readable=False, help="Directory of a run.")]
RunOfDraft = Annotated[str, Argument(metavar="RUN[:DRAFT]", help="A run, and one of its drafts if it has several.")]
ProfileFile = Annotated[
    Path, Argument(metavar="PROFILE", readable=False, help="Profile file (YAML), or a run: its profile.")
]
ProfileChanges = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override an option: target.dtype=float32, costs.concurrency=[1,8]."),
]
QuestionChanges = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change the question (decision.min_speedup=1.2) or the step times (costs.source=roofline) (repeatable).",
    ),
]
DecisiveRule = Annotated[str | None, Option(help="The acceptance rule; default: the decision's rule.")]
Format = Annotated[Literal["terminal", "json", "md", "html"] | None, formats()]
OutFiles = Annotated[list[Path] | None, files()]
Undecided = Annotated[
    Literal["pass", "fail"], how(help="If undecided or too noisy to tell: pass (exit code 0) or fail (11).")
]
OutFile = Annotated[
    Path | None, output(callback=_out_place, readable=False, help="Write to this file instead of standard output (-).")
]
Resume = Annotated[bool, how("--resume", help="Continue an interrupted --out, or start it.")]


def one_line(text: str) -> str:
    """Return text that may quote data without line breaks, control or direction characters."""
    return "".join(char if char.isprintable() else " " for char in text)
