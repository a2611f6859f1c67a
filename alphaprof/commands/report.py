"""`alphaprof report`: what its options ask of a run's report, which is built and drawn by `report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from alphaprof.errors import OptionInvalid
from alphaprof.report.build import build_report
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.report.sections import known_sections
from alphaprof.run.reader import Run

HELD = {"svg": "is one figure", "png": "is one figure"}  # other files: every section


def report(
    path: Path,
    sections: Sequence[str],
    asked: Sequence[tuple[str, Path | None]],
    overrides: list[str] | None,
    rules: list[str] | None,
    whole_log: bool,
    verify: bool,
) -> ReportAnswer:
    """Return the report of the run in `path`. `sections`: to show, several in one with commas; `asked`: formats and their
    files (None: standard output); `overrides`: what `--set` changes of the question; `verify`: read every byte first.

    Raises `OptionInvalid` for unknown sections and for formats that cannot show them or do not fit a terminal,
    `ProfileInvalid` and `RunUnreadable`.
    """
    if ("html", None) in asked and sys.stdout.isatty():
        raise OptionInvalid("the HTML page is markup, not for a terminal", "write it to a file: --out report.html")
    forms = [form for form, _ in asked]
    if sections and not {"terminal", "md", "json"} & {*forms}:
        raise OptionInvalid(
            f"--show chooses what terminal, md and json hold; {forms[0]} {HELD.get(forms[0], 'holds every section')}",
            "leave out --show, or ask for one of them",
        )
    shown = known_sections([each.strip() for name in sections for each in name.split(",")])
    run, config, ids = Run.open(path), None, None
    if verify:
        run.verify()
    if overrides or rules:
        from alphaprof.config.load import changed_question, known_rules  # what validates profiles takes a while to load

        config = changed_question(run.manifest.config, overrides) if overrides else None
        ids = known_rules(rules) if rules else None
    return ReportAnswer(build_report(run, config, ids, whole_log, overrides or ()), shown)
