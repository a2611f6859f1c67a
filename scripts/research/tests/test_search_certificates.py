"""The search that tries to break certificates: it finds nothing in the library, and what is wrong when something is."""

from __future__ import annotations

import re
import runpy
from typing import Any

import numpy as np
import pytest

from alphaprof.rules import BoundRule
from alphaprof.theory.certificates import ACCEPTED, DIVERGENCES
from tests.conftest import ROOT

SEARCH = runpy.run_path(str(ROOT / "scripts" / "research" / "search_certificates.py"))
Found = dict[tuple[str, str, str], tuple[int, int]]


def found(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Found]:
    """The exit code, and how many cases of which rule, claim and divergence were tried and broken."""
    code = SEARCH["main"](["--draws", "100", *options])
    lines = capsys.readouterr().out.splitlines()
    rows = [re.fullmatch(r"(\S+) +([a-z ]+?) +(\S+) +([\d,]+) +([\d,]+) +\S+ +\S+", line) for line in lines[1:-1]]
    cases = {row.group(1, 2, 3): tuple(int(count.replace(",", "")) for count in row.group(4, 5)) for row in rows if row}
    assert len(cases) == len(lines) - 2
    tried, broken = (sum(counts) for counts in zip(*cases.values(), strict=True))
    assert lines[-1] == f"{tried:,} cases, {broken:,} broken"
    return code, cases  # type: ignore[return-value]


def test_the_search_tries_every_rule_and_divergence_and_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = found(capsys)
    claims = {(rule, claim) for rule in ACCEPTED for claim in ("threshold", "margin bound")} | {("tree", "coverage bound")}
    assert set(cases) == {(*claim, divergence) for claim in claims for divergence in DIVERGENCES}
    assert min(tried for tried, _ in cases.values()) > 200
    assert {case: broken for case, (_, broken) in cases.items() if broken} == {}
    assert code == 0


def test_thresholds_and_bounds_that_are_a_twentieth_too_large_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = found(capsys, "--scale", "1.05")
    assert code == 1
    assert [case for case, (_, broken) in cases.items() if case[1] == "threshold" and not broken] == []
    for divergence in DIVERGENCES:
        assert sum(broken for case, (_, broken) in cases.items() if case[1:] == ("margin bound", divergence)) > 0


@pytest.mark.parametrize(
    ("rule", "width", "q", "expected"),
    [
        (BoundRule("strict"), 1, [0.40, 0.40, 0.20], True),  # of equal ones the worst
        (BoundRule("strict"), 1, [0.41, 0.39, 0.20], False),
        (BoundRule("tree", (2,)), 2, [0.30, 0.35, 0.35], True),
        (BoundRule("tree", (2,)), 2, [0.30, 0.60, 0.10], False),
        (BoundRule("additive", (0.25,)), 1, [0.30, 0.39, 0.31], False),
        (BoundRule("additive", (0.25,)), 1, [0.30, 0.35, 0.35], True),
        (BoundRule("top_m", (2,)), 2, [0.10, 0.10, 0.80], False),  # there is but one rejected token
    ],
)
def test_a_draft_is_rejected_where_its_top_tokens_all_are(rule: BoundRule, width: int, q: Any, expected: bool) -> None:
    batch = SEARCH["Batch"].of(rule, width, np.array([[0.5, 0.3, 0.2]]))
    assert batch.rejects(np.array([q])).tolist() == [expected]


@pytest.mark.parametrize("name", ACCEPTED)
def test_drafts_are_pushed_until_they_are_rejected(name: str) -> None:
    rng = np.random.default_rng(3)
    rejected = 0
    for size in (2, 3, 8, 30):
        rule = BoundRule(name, SEARCH["PARAMETERS"][name](rng))
        for width in (1, 3):
            p = SEARCH["targets"](50, size, rng)
            batch = SEARCH["Batch"].of(rule, width, p)
            batch = SEARCH["Batch"].of(rule, width, p[batch.rejectable])
            q = batch.pushed(rng.dirichlet(np.ones(size), len(batch.p)), batch.drafted(batch.p), rng.random(len(batch.p)))
            assert q.sum(1) == pytest.approx(1)
            assert batch.rejects(q).all()
            rejected += len(q)
    assert rejected > 50
