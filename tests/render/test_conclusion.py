"""The sentence that opens a report: made of the values below it, for every verdict."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from alphaprof.report.build import RunReport, build_report
from alphaprof.report.formats.conclusion import conclusion
from alphaprof.stats.estimate import Interval
from tests.reporting import changed
from tests.synthetic import Domain, Recipe, write_run

RECIPE = Recipe(
    domains={name: Domain(documents=16, alpha=0.8) for name in ("code", "chat", "math", "poems", "sql", "letters")},
    draft_ms=1.0,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return build_report(write_run(tmp_path_factory.mktemp("conclusion") / "run", RECIPE))


def saying(report: RunReport, domains: str = "GGGGGG", **answer: Any) -> str:
    """The conclusion of the report with another answer, and these verdicts by domain."""
    kinds = {"G": "GO", "N": "NO-GO", "U": "UNDECIDED"}
    found = tuple(
        dataclasses.replace(item, answer=dataclasses.replace(item.answer, verdict=kinds[letter], domain=name))
        for item, letter, name in zip(report.domains, domains, RECIPE.domains, strict=True)
    )
    known = {"draft": "small", "gamma": 3, "speedup": Interval(1.336, 1.2549, 1.4561), "remedy": "", "reason": "why"}
    return conclusion(
        changed(
            report, domains=found, answer=dataclasses.replace(report.answer, **known | {"documents_needed": None} | answer)
        )
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"verdict": "GO"}, "Turn on small with 3 speculative tokens: about 1.34 times as fast (95% lower bound 1.25)."),
        (
            {"verdict": "GO", "domains": "GGNUUG", "gamma": 1},
            "Turn on small with 1 speculative token: about 1.34 times as fast (95% lower bound 1.25). It pays for code, "
            "chat and letters; it does not pay for math; it is not settled for poems and sql.",
        ),
        (
            {"verdict": "NO-GO", "domains": "NNNNNG", "speedup": Interval(0.8, 0.7, 0.9)},
            "Leave speculative decoding off: the best, small with 3 speculative tokens, is about 0.80 times as fast (95% "
            "upper bound 0.90); 1.1 was asked for. It pays for letters; it does not pay for code, chat, math and 2 more.",
        ),
        (
            {"verdict": "UNDECIDED", "documents_needed": 1200, "speedup": Interval(1.2, 1.09996, 1.3)},
            "Not decided: small with 3 speculative tokens is about 1.20 times as fast, from 1.09996 to 1.30; 1.1 was asked "
            "for. Next: profile 1,200 documents for an 80% chance of a verdict.",
        ),
        (
            {"verdict": "UNDECIDED", "remedy": "time more rounds"},
            "Not decided: small with 3 speculative tokens is about 1.34 times as fast, from 1.25 to 1.46; 1.1 was asked "
            "for. Next: time more rounds.",
        ),
        (
            {"verdict": "UNDECIDED", "draft": None, "gamma": None, "speedup": None, "remedy": "time again"},
            "Not known whether it pays: why; small breaks even where a round costs 3.03 plain decode steps. "
            "Next: time again.",
        ),
        (
            {"verdict": "UNDECIDED", "speedup": Interval(1.2, 0.0, math.inf)},
            "Not known whether it pays: why; small breaks even where a round costs 3.03 plain decode steps.",
        ),
    ],
)
def test_the_conclusion_of_every_verdict(report: RunReport, answer: dict[str, Any], expected: str) -> None:
    assert saying(report, **answer) == expected


def test_a_run_without_rounds_says_why(tmp_path: Path, report: RunReport) -> None:
    none = changed(report, drafts=())
    assert saying(none, verdict="UNDECIDED", speedup=None) == "Not known whether it pays: why."
