"""What a command line asks of a check, as a check."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alphaprof.commands.check.baseline import check_baseline
from alphaprof.commands.check.build import EVERY, Check, CheckTarget, Measure, check_decision, check_thresholds
from alphaprof.errors import VALUE, OptionInvalid, cut, shown
from alphaprof.log.run_draft import side_of
from alphaprof.log.store import Run


@dataclass(frozen=True)
class CheckRequest:
    """The options of `alphaprof check`, as they were written; `minimums` by measure: X, or DOMAIN=X."""

    run: Path
    draft: str | None
    rule: str | None
    gamma: int | None
    minimums: Mapping[Measure, Sequence[str]]
    baseline: str | None
    margin: float
    target_change: bool


def minimums(
    alpha: Sequence[str] | None, length: Sequence[str] | None, speedup: Sequence[str] | None
) -> dict[Measure, Sequence[str]]:
    """Options by measure."""
    return {"alpha": alpha or [], "acceptance_length": length or [], "speedup": speedup or []}


def checked(asked: CheckRequest) -> Check:
    """The check that is asked for. Raises `OptionInvalid`, `NotComparable` and `RunUnreadable`."""
    thresholds = {measure: _thresholds(measure, texts) for measure, texts in asked.minimums.items() if texts}
    if asked.baseline is not None:
        if thresholds:
            raise OptionInvalid("thresholds and --baseline cannot be combined in one check", "run check once with each")
        new = side_of(f"{asked.run}:{asked.draft}" if asked.draft else str(asked.run))
        named = not os.path.exists(asked.baseline) and ":" in asked.baseline
        old = side_of(asked.baseline if named else f"{asked.baseline}:{new.draft}")
        return check_baseline(new, old, asked.rule, asked.margin, asked.target_change)
    run = Run.open(asked.run)
    if thresholds:
        return check_thresholds(run, CheckTarget(asked.draft, asked.rule, asked.gamma), thresholds)
    if asked.draft or asked.rule or asked.gamma:
        raise OptionInvalid(
            "--draft, --rule and --gamma need a threshold or a baseline",
            "add --min-acceptance-length, --min-alpha, --min-speedup or --baseline; without all of these the run's "
            "own decision is checked",
        )
    return check_decision(run)


def _thresholds(measure: Measure, texts: Sequence[str]) -> dict[str, float]:
    """Least values by domain. Raises `OptionInvalid` for what is no number, and for a domain that is named twice."""
    found: dict[str, float] = {}
    for text in texts:
        domain, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise OptionInvalid(
                f"{shown(text)} is not a threshold for {measure}", "write a number, or DOMAIN=NUMBER: code=0.6"
            )
        if domain in found:
            raise OptionInvalid(
                f"{measure} has two thresholds for {cut(domain, VALUE) or 'every domain'}", "remove one of them"
            )
        found[domain or EVERY] = value
    return found
