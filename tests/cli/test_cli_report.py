"""`alphaprof report` and `alphaprof rules`: another question or rule is answered from the log, and nothing is written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from alphaprof.cli.common import OLD_S, write_file
from alphaprof.report.build import build_report
from alphaprof.rules import NOT_MODELLED, RULES
from alphaprof.run.reader import Run
from tests.conftest import Runner
from tests.reporting import as_json, as_terminal, log_of, rows_of
from tests.synthetic import Domain, Recipe, contents, flipped, write_run

STORY = Domain(temperature=0.7, continuation="sampled")
SMALL = Recipe(domains={"code": Domain(), "story": STORY}, lookups=("lookup",), rules=("strict", "one_hot"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of greedy and sampled text, without the rules that it is asked about."""
    return write_run(tmp_path_factory.mktemp("cli") / "run", SMALL)


def answered(console_script: Runner, *arguments: object) -> Any:
    """The JSON report that a command line prints, with nothing said beside it."""
    code, output, errors = console_script("report", *arguments, "--format", "json")
    assert (code, errors) == (0, "")
    return json.loads(output, parse_constant=pytest.fail)


def test_a_report_is_that_of_the_library(run: Run, console_script: Runner) -> None:
    assert answered(console_script, run.path) == as_json(build_report(run))


@pytest.mark.parametrize("spelling", ["additive:0.2", "additive_0p2"])
def test_a_rule_that_was_not_profiled_is_evaluated_on_the_log(run: Run, console_script: Runner, spelling: str) -> None:
    before, log = contents(run), log_of(run)
    content = answered(console_script, run.path, "--rules", spelling)
    assert contents(run) == before
    found = [result for result in content["sections"]["rules"] if result["rule"] == "additive_0p2"]
    assert [(result["domain"], result["draft"]) for result in found] == [
        (domain, draft) for draft in ("small", "lookup") for domain in ("code", "story")
    ]
    for result in found:
        rows = rows_of(log, result["domain"], result["draft"])
        rows = rows[rows["proposed"] > 0]
        kept = rows["target_prob_of_draft_top"].astype(float) >= rows["target_top_prob"].astype(float) - 0.2
        assert result["alpha"]["value"] == pytest.approx(kept.mean())
        assert (result["lossy"], result["verdict"], result["gammas"]) == (True, None, [])


def test_damage_is_an_error_and_missing_totals_are_counted_again(tmp_path: Path, console_script: Runner) -> None:
    """From the log, with a note; --verify looks at every byte."""
    run = write_run(tmp_path / "run", Recipe())
    expected = answered(console_script, run.path, "--verify")
    totals = "totals/draft=small/part-00000.parquet"
    for name in ("documents.parquet", totals):
        whole = (run.path / name).read_bytes()
        (run.path / name).write_bytes(flipped(run.path / name, 8 * 50))
        code, output, errors = console_script("report", run.path)
        assert (code, output) == (6, "")
        assert f"{name} is damaged: its content has changed" in errors
        assert "hint: write it again with alphaprof profile --resume" in errors
        (run.path / name).write_bytes(whole)
    for name in ("positions/draft=small/part-00001.parquet", "continuations/part-00001.parquet"):
        (run.path / name).write_bytes(flipped(run.path / name, 8 * 50))
    code, output, errors = console_script("report", run.path, "--verify")
    assert (code, output) == (6, "")
    assert f"is damaged: its content has changed (and 1 more of {len(run.manifest.files)} files)" in errors
    assert "hint: write it again with alphaprof profile --resume" in errors
    run = write_run(tmp_path / "run", Recipe())
    (run.path / totals).unlink()
    found = answered(console_script, run.path)
    assert found["notes"][0]["code"] == "recounted"
    assert found | {"notes": found["notes"][1:]} == expected


def test_the_list_of_rules_names_every_rule_and_what_is_not_modelled(console_script: Runner) -> None:
    code, output, errors = console_script("rules")
    assert (code, errors) == (0, "")
    modelled, others = output.split("\nnot modeled:\n")
    named = [line.split()[0].split(":")[0] for line in modelled.splitlines() if not line.startswith(" ")]
    assert named == list(RULES)
    assert all(rule.about in modelled and rule.used_by in modelled for rule in RULES.values())
    assert [line.split(maxsplit=1)[0] for line in others.splitlines()] == list(NOT_MODELLED)


def test_the_command_prints_the_sections_in_the_order_of_the_table(tmp_path: Path, console_script: Runner) -> None:
    run: Run = write_run(tmp_path / "run")
    code, printed, _ = console_script("report", run.path, "--show", "notes", "--show", "drafts")
    assert code == 0
    assert printed == as_terminal(build_report(run), 150, "notes", "drafts")
    assert printed.index("drafts: ") < printed.index("notes: ")


def test_what_a_killed_process_left_beside_an_answer_goes_with_the_next_one(tmp_path: Path) -> None:
    """Once no process can be writing it any more."""
    old, young = tmp_path / ".alphaprof-1.tmp", tmp_path / ".alphaprof-2.tmp"
    for left in (old, young):
        left.write_text("half an answer")
    os.utime(old, (time.time() - OLD_S - 1,) * 2)
    write_file(b"answer", tmp_path / "report.md")
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, "report.md"]
