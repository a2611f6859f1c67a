"""What a report reads of a large position log: whole shards, spread over the run, every kind of text among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from alphaprof.render.json import render_json
from alphaprof.report import build
from alphaprof.report.build import RunReport, build_report
from alphaprof.run.reader import Run
from alphaprof.totals.documents import Documents
from alphaprof.totals.log_sample import ENOUGH, LogPart, shards
from tests.loops import each
from tests.reporting import as_terminal, codes
from tests.synthetic import Domain, Recipe, write_run

ROOT = Path(__file__).parents[2]
RARE = Domain(documents=3, alpha=0.9)
RECIPE = Recipe(
    domains={"code": Domain(documents=70), "chat": Domain(documents=70, alpha=0.4), "rare": RARE},
    sources=[("code", Domain(documents=5, temperature=1.0, continuation="sampled"))],
    rules=("strict", "one_hot"),
    certificates=True,
    lookups=("lookup",),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("part") / "run", RECIPE)


def part_of(run: Run, limit: int | None) -> LogPart:
    return LogPart.of(run, Documents.of(run.documents()), limit)


@each("limit", [1, 500, 2000, 5000])
def test_a_part_has_documents_of_every_kind_of_text(run: Run, limit: int) -> None:
    """ENOUGH of each, or all there are; in whole shards, and not many more of them than the limit holds."""
    whole, part = part_of(run, None), part_of(run, limit)
    assert 0 < len(part.run.shards) < len(run.shards)
    for group in whole.documents.groups:
        (mine,) = [
            other
            for other in part.documents.groups
            if (other.domain, other.continuation, other.sampling) == (group.domain, group.continuation, group.sampling)
        ]
        assert len(mine.rows) >= min(ENOUGH, len(group.rows))
    numbers = [number for shard in part.run.shards for number in run.continuations(shard.index)["document"].to_pylist()]
    assert part.documents.numbers.tolist() == numbers
    assert part.run.manifest.documents == len(numbers)


def test_shards_without_a_document_that_is_asked_for_are_not_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, read = {0, 1, run.manifest.documents - 1}, []
    whole = run.positions
    monkeypatch.setattr(run, "positions", lambda draft, index, columns: read.append(index) or whole(draft, index, columns))
    numbers = [shape.document.tolist() for _, shape in shards(run, "lookup", ["token"], asked)]
    assert read == [
        shard.index for shard in run.shards if asked & set(run.continuations(shard.index)["document"].to_pylist())
    ]
    assert asked <= {number for each in numbers for number in each}


def test_a_part_is_spread_over_the_run(run: Run) -> None:
    """Also where every kind of text has enough documents: neither end of the data is left out."""
    alone = write_run(run.path.parent / "alone", Recipe(domains={"code": Domain(documents=200)}))
    places = [shard.index for shard in part_of(alone, alone.manifest.positions // 5).run.shards]
    assert len(places) == pytest.approx(len(alone.shards) / 5, abs=1)
    assert np.ptp(np.diff(places)) <= 1
    assert places[0] <= 5
    assert places[-1] >= len(alone.shards) - 6


@pytest.fixture(scope="module")
def reports(run: Run) -> tuple[RunReport, RunReport, RunReport]:
    """Of the run as it is, of a part of its log, and of its whole log where a part is read otherwise."""
    small = build_report(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "limit_of", lambda _: 500)
        return small, build_report(run), build_report(run, whole_log=True)


def test_a_whole_log_is_told_as_it_always_was(reports: tuple[RunReport, RunReport, RunReport]) -> None:
    small, _, whole = reports
    assert render_json(small) == render_json(whole)
    assert small.run.log_documents == small.run.documents
    assert "part_of_log" not in codes(small)


def test_results_do_not_hang_on_how_much_of_the_log_is_read(reports: tuple[RunReport, RunReport, RunReport]) -> None:
    """Verdicts and results rest on totals."""
    _, part, whole = reports
    for name in ("answer", "traffic", "domains", "drafts", "results", "times"):
        assert getattr(part, name) == getattr(whole, name)


def test_what_is_told_from_a_part_says_so(reports: tuple[RunReport, RunReport, RunReport]) -> None:
    """The documents and positions of every such value are those of the part, and its section names the remedy."""
    _, part, whole = reports
    told = part.run.log_documents
    assert told < part.run.documents
    said = f"read from the log: {told} of {part.run.documents} documents, in shards spread over it (--whole-log: all)"
    for name in ("causes", "context", "target"):
        assert said in as_terminal(part, 150, name)
        assert "read from the log" not in as_terminal(whole, 150, name)
    assert "read from the log" not in as_terminal(part, 150, "drafts")
    assert len(part.section("causes")) == len(whole.section("causes")) > 0
    for mine, other in zip(part.section("causes"), whole.section("causes"), strict=True):
        assert mine.documents <= other.documents
        assert (mine.positions < other.positions) == (mine.documents < other.documents)
    assert sum(item.positions for item in part.section("target").tenths) < sum(
        item.positions for item in whole.section("target").tenths
    )


def test_losses_of_a_part_are_those_of_its_documents(run: Run, reports: tuple[RunReport, RunReport, RunReport]) -> None:
    """A run of these shards alone loses as much, at the same gamma."""
    part = part_of(run, 500)
    chosen = set(part.documents.numbers.tolist())
    (found,) = [
        item
        for item in reports[1].section("causes")
        if (item.domain, item.draft, item.rule, item.continuation) == ("chat", "small", "strict", "greedy")
    ]
    lost = positions = 0.0
    for shard in run.shards:
        log = run.positions("small", shard.index).to_pandas()
        mine = log[log["document"].isin(chosen) & (log["domain"] == "chat")]
        lost += float((1 - mine["accept_strict"] * (mine["proposed"] > 0)).sum())
        positions += len(mine)
    assert found.positions == positions
    assert found.lost.value == pytest.approx(lost / positions)


def test_the_flag_reads_everything(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from alphaprof.cli.app import app

    monkeypatch.setattr(build, "limit_of", lambda _: 500)
    with pytest.raises(SystemExit):
        app(["report", str(run.path), "--format", "json", "--whole-log"])
    assert json.loads(capsys.readouterr().out)["run"]["log_documents"] == run.manifest.documents


LOADED = """
import sys
from alphaprof.cli.app import app
try:
    app(["report", *sys.argv[1:]])
except SystemExit as end:
    assert not end.code
heavy = {"torch", "transformers", "datasets", "pandas", "scipy.optimize", "matplotlib", "charset_normalizer"}
heavy |= {"scipy"} if len(sys.argv) == 2 else set()  # the first screen alone
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""


@pytest.mark.parametrize("options", [(), ("--format", "json"), ("--out", "report.json")])
def test_a_report_loads_nothing_that_takes_longer_than_itself(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Not even what is installed: pandas, which pyarrow looks for, would double the time of a small run."""
    written = [str(tmp_path / each) if each.endswith(".json") else each for each in options]
    command = [sys.executable, "-c", LOADED, str(run.path), *written]
    result = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
