"""The terminal rendering of reports with many rules: every number is there, whole, and says what it is."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from alphaprof.render import format as fmt
from alphaprof.render.json import render_json
from alphaprof.report.answer import Result
from alphaprof.report.build import RunReport
from tests.reference import LOGGED_RULES
from tests.reporting import HOSTILE, as_terminal, every, only, reported
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
WIDTHS = [100, 200]


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


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_rule_shows_its_alpha_with_what_it_is_worth(report: RunReport, draft: str, width: int) -> None:
    """In the row of its domain and the column of its rule: * off-policy, ~ lossy."""
    others = of_draft(as_terminal(report, width, "rules"), draft)
    for result in (found for found in every(report) if found.draft == draft and found.verdict is None):
        assert cell(others, result.rule, result.domain) == fmt.share(result.alpha.value) + mark(result)
        assert f"[{fmt.share(result.alpha.low, 2)}, {fmt.share(result.alpha.high, 2)}]" in others


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_rules_of_the_verdict_have_a_table_of_their_own(report: RunReport, draft: str, width: int) -> None:
    text = of_draft(as_terminal(report, width, "drafts"), draft)
    for domain, rule in (("code", "strict"), ("story", "one_hot")):
        table = text[text.index(f"draft {draft}, rule {rule}: by domain") :]
        result = only(report, domain, draft, rule)
        best = next(item for item in result.gammas if item.gamma == result.gamma)
        assert cell(table, "gamma", domain) == str(result.gamma)
        row = next(line for line in table.splitlines() if line.split()[:1] == [domain])
        assert str(result.verdict) in row.split()
        assert result.alpha is not None
        assert best.tokens_per_round is not None
        speedup = fmt.interval(result.speedup, "x")
        for part in (fmt.share_with_interval(result.alpha), fmt.interval(best.tokens_per_round), speedup):
            value, bounds = part.split(" ", maxsplit=1)
            assert value in row.split()
            assert (part in row) if width >= 140 else (bounds in table)
        assert cell(table, "break-even", domain) == fmt.number(best.break_even_length)


def test_names_from_the_data_are_harmless_in_every_table_and_note(tmp_path: Path) -> None:
    """Sampled and off-policy text, text that is not what it claims, spans, and a reason that names domains."""
    drawn = dataclasses.replace(STORY, documents=4, uniform=True)
    domains = dict.fromkeys(HOSTILE.values(), drawn)
    domains |= {f"{name} ": Domain(documents=2, on_policy=False, continuation="text") for name in HOSTILE.values()}
    recipe = Recipe(domains=domains, rules=("strict", "one_hot", "lossless", "additive_0p1"), thinking=0.5)
    found = reported(tmp_path, recipe)
    assert "off_policy_sample" in {warning.code for warning in found.notes}
    text = as_terminal(found)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert max(map(cell_len, text.splitlines())) <= 100
    rendered = render_json(found)
    assert rendered.isascii()
    assert {result["domain"] for result in json.loads(rendered)["sections"]["drafts"]} == set(domains)
