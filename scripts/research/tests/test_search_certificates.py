"""The search that tries to break certificates: it finds nothing in the library, and what is wrong when something is."""

from __future__ import annotations

import re
import runpy

import pytest

from alphaprof.theory.certificates import ACCEPTED
from tests.conftest import ROOT
from tests.reference import DIVERGENCES

SEARCH = runpy.run_path(str(ROOT / "scripts" / "research" / "search_certificates.py"))
Found = dict[tuple[str, str], tuple[int, int]]


def found(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Found]:
    """The exit code, and how many cases of which rule and divergence were tried and broken."""
    code = SEARCH["main"](["--draws", "100", *options])
    rows = re.findall(r"^(\S+) +(kl|tv) +([\d,]+) +([\d,]+) ", capsys.readouterr().out, re.MULTILINE)
    return code, {
        (rule, kind): (int(tried.replace(",", "")), int(broken.replace(",", ""))) for rule, kind, tried, broken in rows
    }


def test_the_search_tries_every_rule_and_divergence_and_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = found(capsys)
    assert set(cases) == {(rule, divergence) for rule in ACCEPTED for divergence in DIVERGENCES}
    assert min(tried for tried, _ in cases.values()) > 200
    assert sum(broken for _, broken in cases.values()) == code == 0


def test_thresholds_that_are_a_twentieth_too_large_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, cases = found(capsys, "--scale", "1.05")
    assert code == 1
    assert [case for case, (_, broken) in cases.items() if not broken] == []
