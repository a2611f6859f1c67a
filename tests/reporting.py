"""What tests of reports share: reports of synthetic runs, their renderings, and rounds counted again, token by token."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from alphaprof.report.answer import Result
from alphaprof.report.build import RunReport, build_report
from alphaprof.report.formats.text import ReportAnswer
from alphaprof.run.reader import Run
from tests.synthetic import Recipe, write_run

# Names as data may hold them.
HOSTILE = {
    "markup": "[red]x[/] [bold]",
    "html": "<script>alert(1)</script>",
    "newline": "two\nlines\r\n\tand a tab",
    "escape": "\x1b[31mred\x1b]0;title\x07",
    "direction": "\u202eevil\u200f\u2066",
    "emoji code": ":skull: \\[x]",
    "long": "x" * 10_000,
    "empty": "",
    "wide": "\u6f22\u5b57" * 30,
}


def reported(path: Path, recipe: Recipe | None = None) -> RunReport:
    """The report of a new synthetic run."""
    return build_report(write_run(path / "run", recipe))


def asked(run: Run, **decision: Any) -> RunReport:
    """The report of a run under another decision."""
    config = run.manifest.config
    return build_report(run, config=config | {"decision": config["decision"] | decision})


def only(report: RunReport, domain: str, draft: str = "small", rule: str | None = None) -> Result:
    """The one result of a domain and draft (and rule, where the report holds several)."""
    mine = [result for result in every(report) if (result.domain, result.draft) == (domain, draft)]
    (found,) = [result for result in mine if rule in (None, result.rule)]
    return found


def every(report: RunReport) -> list[Result]:
    """The results under all rules."""
    return [*report.results, *report.section("rules")]


def changed(report: RunReport, **values: Any) -> RunReport:
    """The report with other values, whose sections are worked out again."""
    found = copy.copy(report)
    vars(found).update(values, sections={})
    return found


def codes(report: RunReport) -> set[str]:
    """The codes of its notes."""
    return {note.code for note in report.notes}


def as_terminal(report: RunReport, width: int = 100, *show: str) -> str:
    """What a terminal of that width gets: the sections of these names, by default all."""
    return _drawn(report, width, show or ("all",))


def as_first_screen(report: RunReport, width: int = 100) -> str:
    """What a terminal of that width gets by itself."""
    return _drawn(report, width, ())


def as_markdown(report: RunReport, *show: str) -> str:
    """What it is as Markdown, with the sections of these names."""
    return ReportAnswer(report, show).md()


def _drawn(report: RunReport, width: int, show: Sequence[str]) -> str:
    buffer = io.StringIO()
    ReportAnswer(report, show).terminal(Console(file=buffer, width=width))
    return buffer.getvalue()


def as_json(report: RunReport) -> Any:
    """The parsed JSON; anything but standard JSON is an error."""
    return json.loads(ReportAnswer(report).json(), parse_constant=pytest.fail)


def log_of(run: Run) -> pd.DataFrame:
    """The position log as its users read it."""
    return pd.read_parquet(run.path / "positions").sort_values(["draft", "document", "position"])


def rows_of(positions: pd.DataFrame, domain: str, draft: str) -> pd.DataFrame:
    return positions[(positions["domain"] == domain) & (positions["draft"] == draft)]


def engine(runs: Sequence[int], proposed: Sequence[int], gamma: int) -> dict[str, Any]:
    """Rounds of one document as an engine runs them after a prefill that emits the first token.

    `runs`: tokens that a round starting there would get right if it drafted without end.
    """
    counts = {"rounds": 0, "tokens": 0, "with": 0, "drafted": 0, "by_depth": np.zeros(gamma), "tested": np.zeros(gamma)}
    counts["of"] = np.zeros(gamma + 1)  # rounds by the number of tokens that they drafted
    place = 1
    while place < len(runs):
        ready, left = min(gamma, proposed[place]), len(runs) - place
        accepted = min(ready, runs[place])
        counts["rounds"] += 1
        counts["with"] += ready > 0
        counts["drafted"] += ready
        counts["of"][ready] += 1
        counts["by_depth"][:accepted] += 1
        counts["tested"][: min(ready, accepted + 1, left)] += 1
        emitted = min(accepted + 1, left)
        counts["tokens"] += emitted
        place += emitted
    return counts


def runs_of(agrees: Sequence[bool]) -> list[int]:
    """From every position on, how many agreements follow each other."""
    found = [0] * (len(agrees) + 1)
    for place in reversed(range(len(agrees))):
        found[place] = found[place + 1] + 1 if agrees[place] else 0
    return found[:-1]


def recounted(rows: pd.DataFrame, gamma: int, looked_up: bool = False) -> dict[str, Any]:
    """Rounds of the documents of some rows of the log, where the draft's top token is right or wrong."""
    total: dict[str, Any] = {}
    for _, document in rows.groupby("document"):
        agrees = (document["draft_top"] == document["token"]) & (document["proposed"] > 0)
        runs = document["accepted_run"].fillna(0).astype(int).tolist() if looked_up else runs_of(agrees.tolist())
        for name, count in engine(runs, document["proposed"].tolist(), gamma).items():
            total[name] = total.get(name, 0) + count
    return total


def rounds_of_head(log: pd.DataFrame, gamma: int) -> tuple[int, int, Any, Any]:
    """Tokens and rounds of a head on the texts of a log, token by token; how many drafts were tested and kept by depth."""
    tokens = rounds = 0
    tested, kept = np.zeros(gamma), np.zeros(gamma)
    for _, text in log.groupby("document"):
        rows, at = text.to_dict("records"), 1
        while at < len(rows):
            depth = 0
            while depth < min(gamma, rows[at]["proposed"], len(rows) - at):
                row = rows[at + depth]
                tested[depth] += 1
                if not (row[f"agrees_{depth + 1}"] if depth else row["draft_top"] == row["token"]):
                    break
                kept[depth] += 1
                depth += 1
            at, rounds = at + depth + 1, rounds + 1
        tokens += len(rows) - 1
    return tokens, rounds, tested, kept


def expected_rounds_of(kept: Sequence[float], proposed: Sequence[int], gamma: int) -> float:
    """The expected number of rounds of one document whose drafted tokens are kept with these probabilities.

    By the definition: a round tests drafts until one is rejected or it has no more; the target adds a token, and the next
    round begins behind that.
    """

    @cache
    def begun(place: int) -> float:
        return 1 + tested(place, min(gamma, proposed[place])) if place < len(kept) else 0.0

    @cache
    def tested(place: int, left: int) -> float:
        if place >= len(kept) or left == 0:
            return begun(place + 1)
        return kept[place] * tested(place + 1, left - 1) + (1 - kept[place]) * begun(place + 1)

    return begun(1)
