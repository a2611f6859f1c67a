"""What commands share: formats, output, what a missing package or Ctrl-C says."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

import typer

from alphaprof.errors import DiskFull, ExtraMissing


class ReportFormat(StrEnum):
    """Renderings of everything else."""

    terminal = "terminal"
    json = "json"


class PageFormat(StrEnum):
    """Renderings of a report."""

    terminal = "terminal"
    json = "json"
    md = "md"
    html = "html"


class CheckFormat(StrEnum):
    """Renderings of a check."""

    terminal = "terminal"
    json = "json"
    md = "md"
    junit = "junit"


class TableFormat(StrEnum):
    """Renderings of a table."""

    terminal = "terminal"
    json = "json"
    csv = "csv"


class Undecided(StrEnum):
    """What becomes of a check that could not tell."""

    passes = "pass"
    fails = "fail"


@contextlib.contextmanager
def interruptible(out: Path | None) -> Iterator[None]:
    """Ctrl-C ends the command with a word about what is left (None: nothing to go on with), and the shells' exit code."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        begun = out is not None and (out / "manifest.json").exists()
        hint = f"complete shards are in {out}: finish with the same line and --resume"
        nothing = "nothing was written yet" if out is not None else "start again, with another --out if one was named"
        print(f"interrupted\nhint: {one_line(hint if begun else nothing)}", file=sys.stderr)
        print_notes(interrupt)
        raise typer.Exit(130) from None


def print_notes(error: BaseException) -> None:
    """Say what else went wrong."""
    for note in getattr(error, "__notes__", ()):
        print(f"note: {one_line(note)}", file=sys.stderr)


class _Without:
    """Says of one module that it is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """What the import system asks every finder."""
        if name == self._name:
            raise ModuleNotFoundError(f"{name} is not looked for here", name=name)


@contextlib.contextmanager
def without_pandas() -> Iterator[None]:
    """Keep pyarrow from loading pandas at its first conversion, which takes as long as a report: nothing here is pandas'."""
    finder = _Without("pandas")
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def print_text(text: str, path: Path | None) -> None:
    """Print the answer, or write it to a file. Raises `DiskFull`."""
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskFull(f"cannot write {path}: {error.strerror}", "choose another --out, in an existing directory") from None


def require_place(path: Path | None) -> None:
    """Raise `DiskFull` where `print_text` could not write: better known before hours of work."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise DiskFull(f"cannot write {path}", "choose another --out, in an existing directory")


def require_packages(*names: str) -> None:
    """Raise `ExtraMissing` where packages that run models are not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ExtraMissing(f"profiling needs {', '.join(missing)}", "pip install 'alphaprof[profile]'")


def one_line(text: str) -> str:
    """Text that may quote data: without line breaks, control or direction characters."""
    return "".join(char if char.isprintable() else " " for char in text)
