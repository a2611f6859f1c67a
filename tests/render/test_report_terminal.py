"""The terminal rendering of reports with many rules: every number is there, whole, and says what it is."""

from __future__ import annotations

import re

import pytest

from alphaprof.render import format as fmt
from alphaprof.report.answer import Result
from alphaprof.report.build import RunReport
from tests.reference import LOGGED_RULES
from tests.reporting import as_terminal, every, reported
from tests.synthetic import Domain, Recipe

STORY = Domain(alpha=0.5, temperature=0.7, continuation="sampled")
RULES = (*LOGGED_RULES, "tree_2")
RECIPE = Recipe(
    domains={
        "code": Domain(documents=5, alpha=0.8),
        "story": STORY,
        "wiki": Domain(documents=5, on_policy=False, continuation="text"),
    },
    drafts={"small": 0.0, "large": 0.1},
    lookups=("lookup",),
    rules=RULES,
    lookup_ms=0.0234,
)
DRAFTS = ("small", "large", "lookup")
LOSSY = {rule for rule in RULES if rule not in ("strict", "lossless", "one_hot", "tree_2")}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return reported(tmp_path_factory.mktemp("terminal"), RECIPE)


def of_draft(text: str, draft: str) -> str:
    """What a section says about a draft, in all of its tables."""
    tables = re.split(r"^(?=draft )", text, flags=re.MULTILINE)
    return "".join(table for table in tables if table.startswith((f"draft {draft},", f"draft {draft}:")))


def cell(text: str, column: str, domain: str) -> str:
    """What stands in a row below the end of a column's name, in the first table that has both."""
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if column in line.split() and "domain" in line.split())
    end = lines[head].index(f" {column} ") + 1 + len(column)
    row = next(line for line in lines[head + 1 :] if line.split()[:1] == [domain])
    return row[:end].split()[-1] if row[end - 1] != " " else ""


def mark(result: Result) -> str:
    if (
        (result.domain == "wiki")
        or (result.rule == "strict")
        or (result.rule in ("one_hot", "lossless") and result.domain == "code")
    ):
        return "*"
    return "~" if result.rule in LOSSY else ""


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_rule_shows_its_alpha_with_what_it_is_worth(report: RunReport, draft: str) -> None:
    """In the row of its domain and the column of its rule: * off-policy, ~ lossy."""
    others = of_draft(as_terminal(report, 200, "rules"), draft)
    for result in (found for found in every(report) if found.draft == draft and found.verdict is None):
        assert cell(others, result.rule, result.domain) == fmt.share(result.alpha.value) + mark(result)
        assert f"[{fmt.share(result.alpha.low, 2)}, {fmt.share(result.alpha.high, 2)}]" in others
