"""alphaprof.open: the tables of a run with what is asked for pushed down, and the page that uses them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

import alphaprof
from alphaprof.errors import OptionInvalid, RunUnreadable
from alphaprof.report.build import build_report
from alphaprof.run.reader import Run
from tests.reporting import asked, every
from tests.synthetic import Recipe, contents, interrupted, write_run

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
RECIPE = Recipe(drafts={"small": 0.0, "poor": -0.3}, lookups=("ngram",), gammas=(1, 4))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("api") / "run", RECIPE)


def test_positions_are_those_of_the_files(stored: Run) -> None:
    run = alphaprof.open(stored.path)
    mine = run.positions().astype({"draft": str})
    theirs = pd.read_parquet(stored.path / "positions").astype({"draft": str})
    keys = ["draft", "document", "position"]
    assert run.drafts == ["small", "poor", "ngram"]
    pd.testing.assert_frame_equal(
        mine.sort_values(keys, ignore_index=True)[sorted(mine)], theirs.sort_values(keys, ignore_index=True)[sorted(mine)]
    )


def test_columns_and_conditions_are_what_comes_back(stored: Run) -> None:
    run = alphaprof.open(str(stored.path))
    part = run.positions(["draft", "target_margin"], [("draft", "==", "poor"), ("target_margin", "<", 0.2)])
    assert list(part) == ["draft", "target_margin"]
    assert set(part["draft"]) == {"poor"}
    whole = pd.read_parquet(stored.path / "positions")
    expected = whole[(whole["draft"] == "poor") & (whole["target_margin"] < 0.2)]
    assert len(part) == len(expected) > 0
    assert run.positions_arrow(["token"]).column_names == ["token"]


def test_totals_documents_and_report(stored: Run) -> None:
    run = alphaprof.open(stored.path)
    assert len(run.totals()) == 3 * len(run.documents())
    assert run.report() == build_report(stored)
    assert {result.rule for result in every(run.report(["additive:0.2"]))} == {"strict", "additive_0p2"}
    found, same = run.report(changes=["decision.min_speedup=9"]), asked(stored, min_speedup=9)
    assert found.conditions.changes == ("decision.min_speedup=9",)
    assert (found.answer, found.domains, found.drafts) == (same.answer, same.domains, same.drafts)
    assert run.manifest.target.reference == "synthetic/target"


def test_a_notebook_shows_the_first_screen_without_an_extra(stored: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    opened = alphaprof.open(stored.path)
    shown, report = opened._repr_markdown_(), opened.report()
    assert shown.startswith("**Turn on ")
    assert report.answer.verdict in shown.splitlines()[2]
    assert all(f"\n| {item.answer.domain} |" in shown for item in report.domains)


def test_what_is_not_complete_is_not_read(stored: Run, tmp_path: Path) -> None:
    copy = interrupted(stored, tmp_path / "copy", 1)
    before = contents(copy)
    run = alphaprof.open(copy.path)
    assert set(run.positions(["document"])["document"]) == set(run.documents()["document"])
    assert len(run.documents()) == 4
    assert contents(copy) == before
    with pytest.raises(RunUnreadable):
        alphaprof.open(tmp_path)


def test_totals_that_are_not_stored_are_worked_out(stored: Run, tmp_path: Path) -> None:
    """All of an interrupted run's complete shards have them, with the same columns, conditions, types and values."""
    copy = interrupted(stored, tmp_path / "copy")
    before = contents(copy)
    asked = ["draft", "document", "rule", "rounds_4"], [("draft", "==", "poor"), ("rule", "==", "strict")]
    keys = ["draft", "rule", "document"]
    for request in ((), asked):
        theirs, mine = (
            alphaprof.open(run.path).totals(*request).sort_values(keys, ignore_index=True) for run in (stored, copy)
        )
        assert len(mine) > 0
        pd.testing.assert_frame_equal(mine, theirs)
    assert contents(copy) == before
    part = interrupted(stored, tmp_path / "part", 1)
    assert set(alphaprof.open(part.path).totals()["document"]) == set(part.documents()["document"].to_pylist())


@pytest.mark.parametrize("where", [[("nope", "==", 1)], [("document", "~", 1)], [("document", "<", "x")], "document"])
def test_conditions_that_a_table_does_not_have_are_refused(stored: Run, where: Any) -> None:
    for read in (alphaprof.open(stored.path).positions, alphaprof.open(stored.path).totals):
        with pytest.raises(OptionInvalid, match=r"`where` do not fit the (positions|totals): "):
            read(where=where)


def test_columns_that_a_table_does_not_have_are_refused(stored: Run) -> None:
    with pytest.raises(OptionInvalid, match=r"do not fit the totals: .*rounds_") as caught:
        alphaprof.open(stored.path).totals(["rounds_"])
    assert "docs/columns" in caught.value.hint


def test_a_value_that_changed_in_the_log_is_found_where_it_is_read(stored: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stored.path, copy)
    (path,) = (copy / "positions" / "draft=small").glob("part-00000.*")
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    content[column.data_page_offset + column.total_compressed_size - 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunUnreadable, match=r"draft=small/part-00000.parquet is damaged: its content has changed"):
        alphaprof.open(copy).positions()


def test_drafts_that_are_left_out_are_not_read(stored: Run, tmp_path: Path) -> None:
    """The log of another one is destroyed, and nobody notices."""
    copy = tmp_path / "copy"
    shutil.copytree(stored.path, copy)
    request = (["draft", "token", "target_margin"], [("draft", "==", "small"), ("domain", "==", "code")])
    expected = alphaprof.open(copy).positions(*request)
    for path in (copy / "positions" / "draft=poor").iterdir():
        path.write_bytes(b"PAR1")
    run = alphaprof.open(copy)
    assert len(expected) > 0
    pd.testing.assert_frame_equal(run.positions(*request), expected)
    with pytest.raises(RunUnreadable):
        run.positions(["token"], [("draft", "==", "poor")])


def test_a_run_without_a_complete_shard_has_empty_tables(stored: Run, tmp_path: Path) -> None:
    run = alphaprof.open(interrupted(stored, tmp_path / "copy", 0).path)
    whole = alphaprof.open(stored.path)
    for name in ("positions", "totals", "documents"):
        none = getattr(run, name)()
        assert (len(none), list(none)) == (0, list(getattr(whole, name)()))
    assert len(run.positions(["document", "draft"])) == 0


def test_every_snippet_of_the_page_runs(stored: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    os.symlink(stored.path, tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    found = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(found) == 4
    for snippet in found:
        exec(snippet, names)  # noqa: S102  (our own page)
    assert names["worst"]["tokens_per_round"].is_monotonic_increasing
    assert set(names["ranks"]["rank"].dropna()) <= {1, 2, 3, 4, 5}


def test_opening_needs_no_torch() -> None:
    code = "import sys, alphaprof; alphaprof.open; sys.exit(bool({'torch', 'pandas', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
