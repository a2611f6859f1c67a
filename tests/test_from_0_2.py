"""docs/from-0.2.md is true: what it calls an error names the replacement, and what it calls gone or new is so."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaprof.cli import app
from alphaprof.cli.removed import REMOVED
from alphaprof.commands.schema import json_schema
from alphaprof.config.load import validate
from alphaprof.config.options import CONSTANTS, REMOVED_KINDS
from alphaprof.config.options import REMOVED as REMOVED_KEYS
from alphaprof.config.paths import REMOVED_SCHEMES
from alphaprof.errors import ProfileInvalid
from alphaprof.rules import REMOVED as REMOVED_RULES
from alphaprof.run.notes import NOTES, REMARKS
from alphaprof.run.schema import HEAD_COLUMNS, LogRules, totals_columns
from alphaprof.version import EXTRAS
from tests.test_docs import fields

PAGE = (Path(__file__).parent.parent / "docs" / "from-0.2.md").read_text()
PROFILE = {
    "target": "m",
    "drafts": {"ngram": {"kind": "prompt_lookup"}},
    "data": [{"domain": "code", "path": "data.jsonl", "prompt": "{text}"}],
}
ROOFLINE = {"source": "roofline", "accelerator": "h200"}


def rows(heading: str) -> list[tuple[str, str]]:
    """The rows of the table whose first column has this heading: old, and new."""
    (table,) = re.findall(rf"^\| {re.escape(heading)} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in table.splitlines()]


def each_old(heading: str) -> list[tuple[str, str]]:
    """Every code of the first column, with the cell that says what there is now."""
    return [(old, new) for cell, new in rows(heading) for old in re.findall(r"`([^`]+)`", cell)]


def named(cell: str) -> list[str]:
    """What a cell names in code."""
    return re.findall(r"`([^`]+)`", cell)


TYPED, WRITTEN = each_old("0.2: commands, options, values"), each_old("0.2: in a profile")


@pytest.mark.parametrize(("old", "new"), TYPED, ids=[old for old, _ in TYPED])
def test_what_the_page_calls_an_error_is_one_that_names_the_replacement(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["report", f"{old}bucket/run"] if old.endswith("://") else old.split()
    monkeypatch.setattr(sys, "argv", ["alphaprof", *words])
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == 2
    problem, hint = capsys.readouterr().err.splitlines()
    assert problem == f"error: {old if old.endswith('://') else f'alphaprof {old}'} was removed"
    codes = [code for code in named(new) if code not in ("--tree", "--nodes", "--depth")]  # which went with their command
    assert [code for code in codes if code not in hint] == []
    assert codes or "leave it out" in hint or "train on a quarter" in hint


@pytest.mark.parametrize(("old", "new"), WRITTEN, ids=[old for old, _ in WRITTEN])
def test_keys_that_the_page_calls_an_error_are_one_that_names_the_replacement(old: str, new: str) -> None:
    changes: dict[str, Any] = yaml.safe_load(old)
    if "costs" in changes:
        changes["costs"] |= ROOFLINE
        validate(PROFILE | {"costs": ROOFLINE}, "my.yaml")
    with pytest.raises(ProfileInvalid) as caught:
        validate(PROFILE | changes, "my.yaml")
    error = f"{caught.value.message}\n{caught.value.hint}"
    assert re.search(r"unknown key|was removed", error)
    codes = [code for code in named(new) if not code.startswith("on for")]
    assert [code for code in codes if code not in error] == []
    assert re.search(r"leave it out|remove it|use |set |write ", error)


def test_the_page_has_everything_that_was_removed() -> None:
    typed = {old for old, _ in TYPED}
    assert typed == {*REMOVED} | {f"{scheme}://" for scheme in REMOVED_SCHEMES}
    written = " ".join(old for old, _ in WRITTEN)
    assert [key for key in (*REMOVED_KEYS, *REMOVED_KINDS, *REMOVED_RULES) if key not in written] == []
    assert {*CONSTANTS} <= {*re.findall(r"\w+", written)}


def test_fields_of_the_report_that_the_page_names_are_gone_and_there() -> None:
    schema = json_schema("report")
    there = {*fields(schema, schema)}
    table = rows("report 1")
    assert len(table) > 12
    assert [old for cell, _ in table for old in named(cell) if old in there] == []
    assert [new for _, cell in table for new in named(cell) if new not in there] == []
    assert [path for path in re.findall(r"`(sections\.[a-z.\[\]]+)`", PAGE) if path not in there] == []
    for name, version in re.findall(r"(report|check|predict)(?:'s JSON has schema version|`'s) (\d\.\d)", PAGE):
        assert json_schema(name)["properties"]["schema_version"] == {"const": version}


def test_columns_that_the_page_names_are_gone_and_there() -> None:
    log = LogRules(("strict",), ("strict",)).columns
    columns = {column.name for column in (*log, *HEAD_COLUMNS, *totals_columns([4]))}
    table = [(old, new) for old, new in rows("0.2: file, column") if old.startswith(("log:", "totals:"))]
    assert len(table) == 5
    assert [old for cell, _ in table for old in named(cell) if old in columns] == []
    assert [new for _, cell in table for new in named(cell) if new not in columns] == []


def test_notes_and_extras_that_the_page_names_are_gone_and_there() -> None:
    for cell, new in rows("0.2: code"):
        table = REMARKS if new.startswith("said once") else None
        assert [code for code in named(cell) if code in NOTES or (code in REMARKS) != (table is REMARKS)] == []
    extras = rows("0.2: extra")
    assert {*named(extras[0][0]), *named(extras[1][0])}.isdisjoint(EXTRAS)
    assert {name for _, cell in extras for name in named(cell)} == {"ray", "html"} <= {*EXTRAS}
