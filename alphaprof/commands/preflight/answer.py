"""A dry run's answer: checks, each ok, note or problem, with its cause and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.console import Console
from rich.text import Text

from alphaprof.render.tables import empty_table, plain
from alphaprof.report.format import many

Level = Literal["ok", "note", "problem"]
STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str  # of the check (docs/preflight.md)
    subject: str  # model, source or domain that it is about; run: all of it
    level: Level  # problem: the run's numbers would not be those of your traffic
    cause: str  # what was found
    remedy: str | None = None  # what to do about it; None: nothing

    @classmethod
    def of(cls, name: str, subject: str, cause: str, remedy: str | None = None) -> Finding:
        """A note, or ok where there is nothing to do."""
        return cls(name, subject, "ok" if remedy is None else "note", cause, remedy)


@dataclass(frozen=True)
class Needs:
    """What the run will take at most, roughly; None: the number of documents is not known before all are read."""

    documents: int | None
    positions: int | None
    seconds: float | None  # to generate and score, at the trial's speed
    disk: int | None  # bytes of the position log


@dataclass(frozen=True)
class Preflight:
    """All checks, and what the run takes."""

    format: ClassVar[str] = "alphaprof-preflight"
    version: ClassVar[str] = "2.0"

    checks: tuple[Finding, ...]  # by name, in the order of the docs
    estimate: Needs  # of time and disk
    conclusion: str  # what follows, in words

    @classmethod
    def of(cls, checks: tuple[Finding, ...], estimate: Needs) -> Preflight:
        """The answer that some checks lead to."""
        problems, notes = (sum(check.level == level for check in checks) for level in ("problem", "note"))
        found = f"{many(problems, 'problem')} and {many(notes, 'note')}"
        return cls(checks, estimate, f"{found}, none of which stops the run. Nothing was written.")

    def terminal(self, console: Console) -> None:
        """Prints what follows from the checks, and every check with its cause and remedy."""
        console.print(self.conclusion, highlight=False, markup=False, style="bold")
        table = empty_table()
        for name, width in (("check", 14), ("of", 20), ("result", 7)):
            table.add_column(name, overflow="fold", max_width=width)
        table.add_column("what was found, and what to do", overflow="fold", ratio=1)
        last = None
        for check in self.checks:
            cause = plain(check.cause)
            if check.remedy is not None:
                cause.append("\n").append_text(Text("-> ", "dim")).append_text(plain(check.remedy))
            name = "" if check.name == last else check.name
            table.add_row(name, plain(check.subject), Text(check.level, STYLES[check.level]), cause)
            last = check.name
        console.print(table)
