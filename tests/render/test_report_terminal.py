"""The terminal rendering of reports with many rules: every number is there, whole, and says what it is."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from alphaprof.render.json import render_json
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.report.build import Report, build_report
from alphaprof.report.model import Result
from alphaprof.rules import DEFAULT_RULES
from tests.reporting import HOSTILE, as_first_screen, as_terminal, only, reported
from tests.synthetic import Domain, Recipe, write_run

STORY = Domain(alpha=0.5, temperature=0.7, continuation="sampled")
RULES = (*DEFAULT_RULES, "tree_2")
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
WIDTHS = [100, 150, 200]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
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
def test_every_rule_shows_its_alpha_with_what_it_is_worth(report: Report, draft: str, width: int) -> None:
    """In the row of its domain and the column of its rule: * off-policy, ~ lossy."""
    others = of_draft(as_terminal(report, width, "rules"), draft)
    for result in (found for found in report.results if found.draft == draft and found.verdict is None):
        assert result.alpha is not None
        assert cell(others, result.rule, result.domain) == fmt.share(result.alpha.value) + mark(result)
        assert f"[{fmt.share(result.alpha.low, 2)}, {fmt.share(result.alpha.high, 2)}]" in others


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_rules_of_the_verdict_have_a_table_of_their_own(report: Report, draft: str, width: int) -> None:
    text = of_draft(as_terminal(report, width, "drafts"), draft)
    for domain, rule in (("code", "strict"), ("story", "one_hot")):
        table = text[text.index(f"draft {draft}, rule {rule}: by domain") :]
        result = only(report, domain, draft, rule)
        best = next(item for item in result.gammas if item.gamma == result.best_gamma)
        assert cell(table, "gamma", domain) == str(result.best_gamma)
        row = next(line for line in table.splitlines() if line.split()[:1] == [domain])
        assert str(result.verdict) in row.split()
        assert result.alpha is not None
        assert best.tokens_per_round is not None
        assert best.speedup is not None
        if width >= 140:
            assert cell(table, "all", domain) == fmt.number(best.speedup.value, unit="x")  # of all documents
        speedup = fmt.interval(result.speedup, "x")
        for part in (fmt.share_with_interval(result.alpha), fmt.interval(best.tokens_per_round), speedup):
            value, bounds = part.split(" ", maxsplit=1)
            assert value in row.split()
            assert (part in row) if width >= 140 else (bounds in table)
        assert cell(table, "break-even", domain) == fmt.number(best.break_even_length)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_off(report: Report, width: int) -> None:
    text = as_terminal(report, width)
    assert max(map(len, text.splitlines())) <= width
    first = as_first_screen(report, width)
    assert text.startswith(first)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text.removeprefix(first)
    cut = [line for line in first.splitlines() if "\N{HORIZONTAL ELLIPSIS}" in line]
    assert all(re.search(r"\N{HORIZONTAL ELLIPSIS} \(--show (verdict|drafts|notes)\)$", line) for line in cut)
    for result in report.results:
        shown = of_draft(as_terminal(report, width, "gammas"), result.draft)
        for item in result.gammas:
            assert item.tokens_per_round is not None
            faster = f" / {fmt.number(item.speedup.value)}" if item.speedup else ""
            assert f" {fmt.number(item.tokens_per_round.value)}{faster} " in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_a_draft_that_is_not_always_ready_shows_its_coverage(report: Report, width: int) -> None:
    text = as_terminal(report, width, "drafts")
    for domain, rule in (("code", "strict"), ("story", "one_hot")):
        for draft in DRAFTS:
            table = of_draft(text, draft).split(f"rule {rule}: by domain", 1)[1].split(", rule ")[0]
            assert ("coverage" in table) == (draft == "lookup")
            if draft == "lookup":
                assert cell(table, "coverage", domain) == fmt.share(only(report, domain, draft, rule).coverage)


@pytest.mark.parametrize("width", WIDTHS)
def test_terminals_show_what_the_textbook_formula_would_have_said(report: Report, width: int) -> None:
    """Not of prompt lookup, which has no proposal at some positions."""
    text = as_terminal(report, width, "drafts")
    for draft in ("small", "large"):
        mine = of_draft(text, draft)
        assert "iid formula" in mine
        for domain, rule in (("code", "strict"), ("story", "one_hot")):
            result = only(report, domain, draft, rule)
            best = next(item for item in result.gammas if item.gamma == result.best_gamma)
            assert best.iid_error is not None
            assert f"{best.iid_tokens_per_round:.2f} ({fmt.signed_percent(best.iid_error)})" in mine
    assert "iid formula" not in of_draft(text, "lookup")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.124, "+12%"), (-0.04, "-4%"), (0.004, "+0.4%"), (-0.004, "-0.4%"), (0.0, "+0%"), (0.0004, "+0%"), (2.5, "+250%")],
)
def test_errors_carry_their_sign_and_are_not_rounded_to_none(value: float, text: str) -> None:
    assert fmt.signed_percent(value) == text


def test_the_search_of_a_lookup_draft_has_its_time(report: Report) -> None:
    lines = as_terminal(report).splitlines()
    assert "  lookup, ms a search, once a round: 0.023" in lines
    assert "  small, ms a step: 1.0  (c = 0.10)" in lines
    assert not any(line.startswith("  lookup, ms a step") for line in lines)
    assert "ms a search" not in as_terminal(dataclasses.replace(report, times=None))


MARKS = {"*": "* off-policy:", "~": "~ lossy:"}


@pytest.mark.parametrize(
    ("domains", "rules", "marks"),
    [
        ({"code": Domain()}, ("strict", "additive_0p1"), "~"),
        ({"code": Domain()}, ("strict", "lossless"), "*"),
        ({"code": Domain()}, ("strict", "tree_2"), ""),
        ({"story": STORY}, ("lossless", "one_hot"), ""),
        ({"story": STORY}, ("strict", "top_m_3"), "*~"),
        ({"wiki": RECIPE.domains["wiki"]}, ("additive_0p1",), "*"),  # off-policy is the worse news
    ],
)
def test_marks_are_explained_where_they_occur(
    tmp_path: Path, domains: dict[str, Domain], rules: tuple[str, ...], marks: str
) -> None:
    text = as_terminal(reported(tmp_path, Recipe(domains=domains, rules=rules)), 100, "rules")
    assert {sign for sign, words in MARKS.items() if words in text} == set(marks)


def test_rules_with_the_rounds_of_the_verdicts_own_are_not_told_twice(report: Report) -> None:
    """Prompt lookup has no distribution: lossless is one_hot; a model's lossless rounds are a table of their own."""
    text = as_terminal(report, 100, "gammas")
    assert "rule lossless: tokens per" not in of_draft(text, "lookup")
    assert "rule lossless: tokens" in of_draft(text, "small")
    assert "rule tree_2: tokens" in of_draft(text, "small")


def test_a_tree_shows_no_cost_of_a_chain(report: Report) -> None:
    mine = of_draft(as_terminal(report, 100, "gammas"), "small")
    table = mine[mine.index("rule tree_2: tokens") :]
    assert "gamma c + v" not in table
    assert "/" not in table


def test_a_report_without_step_times_shows_what_needs_none(tmp_path: Path) -> None:
    text = as_terminal(reported(tmp_path, dataclasses.replace(RECIPE, latency=False)), 150)
    assert "gamma c + v" not in text[: text.index("alpha: acceptance over")]
    assert not re.search("(?<!no )step times:", text)
    assert "no step times were measured" in text


def test_the_definition_of_expected_rounds_stands_where_there_are_some(tmp_path: Path, report: Report) -> None:
    assert "lossless: rounds are exact expectations" in as_terminal(report)
    greedy = reported(tmp_path, Recipe(rules=DEFAULT_RULES))
    assert "lossless: rounds are exact expectations" not in as_terminal(greedy)


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_names_from_the_data_are_harmless_in_every_table_and_note(tmp_path: Path, name: str) -> None:
    """Sampled and off-policy text, text that is not what it claims, phases, and a reason that names domains."""
    domains = {
        name: dataclasses.replace(STORY, documents=12, uniform=True),
        f"{name} ": Domain(on_policy=False, continuation="text"),
        "code": Domain(),
    }
    recipe = Recipe(domains=domains, rules=("strict", "one_hot", "lossless", "additive_0p1"), thinking=0.5)
    found = build_report(write_run(tmp_path / "run", recipe))
    assert "off_policy_sample" in {warning.code for warning in found.notes}
    text = as_terminal(found)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert max(map(cell_len, text.splitlines())) <= 100
    assert len(text) < 35_000
    rendered = render_json(found)
    assert rendered.isascii()
    assert {result["domain"] for result in json.loads(rendered)["results"]} == set(domains)


@pytest.mark.parametrize(("documents", "said"), [(1, "1 document, "), (2, "2 documents, ")])
def test_a_single_document_is_said_in_the_singular(tmp_path: Path, documents: int, said: str) -> None:
    assert said in as_terminal(reported(tmp_path, Recipe(domains={"code": Domain(documents=documents)})))


def text(domain: str, continuation: str, *settings: float) -> SimpleNamespace:
    sampling = dict(zip(("temperature", "top_k", "top_p"), settings, strict=False)) if settings else None
    return SimpleNamespace(domain=domain, continuation=continuation, sampling=sampling)


GREEDY, COLD, WARM, CUT = (
    text("code", *rest) for rest in (["greedy"], ["sampled", 0.5, 0, 1], ["sampled", 0.7, 0, 1], ["sampled", 0.7, 0, 0.9])
)


@pytest.mark.parametrize(
    ("items", "off_policy", "expected"),
    [
        ([COLD, text("chat", "greedy")], False, "code"),  # another domain's kinds do not matter
        ([COLD], True, "code (sampled, off-policy)"),
        ([COLD, GREEDY], False, "code (sampled at 0.5)"),
        ([COLD, WARM], True, "code (sampled at 0.5, off-policy)"),
        ([COLD, WARM, CUT], False, "code (sampled at 0.5, top_p 1)"),
        ([GREEDY, COLD], False, "code (greedy)"),
    ],
)
def test_a_text_is_named_by_what_sets_it_apart(items: list[SimpleNamespace], off_policy: bool, expected: str) -> None:
    assert text_name(items[0], items, off_policy) == expected


def test_a_text_without_rounds_has_no_textbook_formula(tmp_path: Path) -> None:
    """Its alpha would give one, for rounds that there are none of."""
    short = Domain(documents=6, shortest=1, longest=1)
    run = write_run(tmp_path / "run", Recipe(domains={"code": short}, decision={"gamma": 2, "draft": "small"}))
    report = build_report(run)
    row = next(line.split() for line in as_terminal(report, 160, "drafts").splitlines() if line.split()[:1] == ["code"])
    assert report.results[0].gammas[1].iid_tokens_per_round is not None
    assert row[row.index("2") + 1 :] == ["n/a", "n/a", "UNDECIDED", "n/a", "n/a"]  # the last two: break-even, formula
