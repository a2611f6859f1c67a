"""A dry run's report: what was found as checks, each ok, note or problem with its cause and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaprof import errors
from alphaprof.commands.preflight.facts import Seen
from alphaprof.commands.preflight.findings import NOTE, PROBLEM, Check, model_checks, place_of, warned
from alphaprof.commands.preflight.work import work_checks
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


@dataclass(frozen=True)
class Preflight:
    """All checks, and the facts that they are about."""

    checks: tuple[Check, ...]  # by name, in the order of the docs
    stops: bool  # whether the run would stop
    conclusion: str  # what follows, in words
    seen: Seen  # the facts


def build_preflight(seen: Seen) -> Preflight:
    """The checks of what a dry run has found."""
    refused = [Check(item.check, item.subject, PROBLEM, item.message, item.hint, stops=True) for item in seen.refusals]
    found = [*model_checks(seen), *work_checks(seen)]
    shown = {check.name for check in found}
    others = dict.fromkeys(place_of(warning) for warning in seen.warnings if place_of(warning) not in shown)
    found += [check for name in others for check in warned(seen, name)]
    checks = sorted([*found, *refused], key=lambda check: ORDER.index(check.name) if check.name in ORDER else len(ORDER))
    return Preflight(tuple(checks), bool(refused), _conclusion(checks), seen)


def _conclusion(checks: Sequence[Check]) -> str:
    """What follows, in a line."""
    stopping = sum(check.stops for check in checks)
    problems, notes = (sum(check.level == level for check in checks) for level in (PROBLEM, NOTE))
    found = f"{many(problems, 'problem')} and {many(notes, 'note')}"
    if stopping:
        return f"{found}, of which {stopping} would stop the run. Nothing was written."
    return f"{found}, none of which stops the run. Nothing was written."


def require_clear(preflight: Preflight) -> None:
    """Raise the first error that would stop the run, as the run would."""
    if refusals := preflight.seen.refusals:
        first = refusals[0]
        raise getattr(errors, first.kind)(first.message, first.hint)
