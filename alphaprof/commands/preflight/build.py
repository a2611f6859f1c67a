"""A dry run's report: findings, each ok, note or problem with its cause and a remedy; and its text (rich)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.text import Text

from alphaprof import errors
from alphaprof.commands.preflight.facts import PreflightFacts
from alphaprof.commands.preflight.findings import NOTE, OK, PROBLEM, Finding, model_checks, place_of, warned, work_checks
from alphaprof.render.tables import empty_table, plain
from alphaprof.report.format import many

ORDER = (
    "vocabulary",
    "chat template",
    "bos",
    "context",
    "trial",
    "self-draft",
    "noise floor",
    "data",
    "costs",
    "time",
    "disk",
    "memory",
)
STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


@dataclass(frozen=True)
class Preflight:
    """All checks, and the facts that they are about."""

    format: ClassVar[str] = "alphaprof-preflight"
    version: ClassVar[int] = 1

    checks: tuple[Finding, ...]  # by name, in the order of the docs
    stops: bool  # whether the run would stop
    conclusion: str  # what follows, in words
    seen: PreflightFacts  # the facts

    def terminal(self, console: Console) -> None:
        """Prints every check with its cause and remedy, and what follows."""
        facts = self.seen.target.facts
        drafts = many(len(self.seen.drafts), "draft")
        console.print(plain(f"{facts.architecture} in {facts.dtype} on {facts.device}, {drafts}"))
        table = empty_table()
        for name, width in (("check", 14), ("of", 20), ("result", 7)):
            table.add_column(name, overflow="fold", max_width=width)
        table.add_column("what was found, and what to do", overflow="fold", ratio=1)
        last = None
        for check in self.checks:
            cause = plain(check.cause)
            if check.remedy is not None:
                cause.append("\n").append_text(Text("-> ", "dim")).append_text(plain(check.remedy))
            table.add_row(
                "" if check.name == last else check.name, plain(check.subject), Text(check.level, STYLES[check.level]), cause
            )
            last = check.name
        console.print(table)
        console.print(self.conclusion, highlight=False, markup=False)


def build_preflight(seen: PreflightFacts) -> Preflight:
    """Returns the checks of what a dry run has found."""
    refused = [Finding(item.check, item.subject, PROBLEM, item.message, item.hint, stops=True) for item in seen.refusals]
    findings = [*model_checks(seen), *work_checks(seen)]
    shown = {check.name for check in findings}
    others = dict.fromkeys(place_of(warning) for warning in seen.warnings if place_of(warning) not in shown)
    findings += [check for name in others for check in warned(seen, name)]
    checks = sorted([*findings, *refused], key=lambda check: ORDER.index(check.name) if check.name in ORDER else len(ORDER))
    return Preflight(tuple(checks), bool(refused), _conclusion(checks), seen)


def _conclusion(checks: Sequence[Finding]) -> str:
    """What follows, in a line."""
    stopping = sum(check.stops for check in checks)
    problems, notes = (sum(check.level == level for check in checks) for level in (PROBLEM, NOTE))
    counts = f"{many(problems, 'problem')} and {many(notes, 'note')}"
    if stopping:
        return f"{counts}, of which {stopping} would stop the run. Nothing was written."
    return f"{counts}, none of which stops the run. Nothing was written."


def require_clear(preflight: Preflight) -> None:
    """Raise the first error that would stop the run, as the run would."""
    if refusals := preflight.seen.refusals:
        first = refusals[0]
        raise getattr(errors, first.kind)(first.message, first.hint)
