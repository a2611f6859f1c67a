"""Step times from files: the formats by example, the overhead, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alphaprof.costs.cost_model import measured_rows
from alphaprof.costs.engine_table import COLUMNS, read_engine_table
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.errors import CostsUnreadable
from tests.loops import each
from tests.synthetic import Recipe, write_run

CSV = """model,tokens,batch,context,ms
target,1,1,256,10
target,2,1,256,11
small,1,1,256,1
"""
EXPECTED = (
    StepRow("target", "decode", 1, 1, 256, 10.0),
    StepRow("target", "verify", 2, 1, 256, 11.0),
    StepRow("small", "draft", 1, 1, 256, 1.0),
)


def read(folder: Path, content: Any, overhead_ms: float = 0.0, name: str | None = None) -> tuple[StepRow, ...]:
    path = folder / (name or ("costs.csv" if isinstance(content, str) else "costs.json"))
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_engine_table(path, ["small"], ["ngram"], overhead_ms).rows


def test_a_csv_file(tmp_path: Path) -> None:
    assert read(tmp_path, CSV) == EXPECTED
    assert read(tmp_path, "\ufeff" + CSV.replace(",", " , ")) == EXPECTED


def test_json_rows_in_a_list_under_results_and_nested(tmp_path: Path) -> None:
    rows = [{key: getattr(row, key) for key in COLUMNS if key != "step"} for row in EXPECTED]
    for content in (rows, {"results": rows, "engine": "mine"}, [{"results": rows[:1]}, *rows[1:]], [rows[:2], rows[2:]]):
        assert read(tmp_path, content) == EXPECTED


def test_steps_are_inferred_or_given_and_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    text = """model,step,tokens,ms,relative_error
target,,1,10,0.01
target,verify,3,12,
target,prefill,128,40,
target,bookkeeping,,0.5,
small,draft,2,1.5,
small,prefill,128,4,
small,bookkeeping,1,0,
ngram,,1,0,
"""
    assert read(tmp_path, text) == (
        StepRow("target", "decode", 1, 1, 0, 10.0, 0.01),
        StepRow("target", "verify", 3, 1, 0, 12.0),
        StepRow("target", "prefill", 128, 1, 0, 40.0),
        StepRow("target", "bookkeeping", 1, 1, 0, 0.5),
        StepRow("small", "draft", 2, 1, 0, 1.5),
        StepRow("small", "prefill", 128, 1, 0, 4.0),
        StepRow("small", "bookkeeping", 1, 1, 0, 0.0),
        StepRow("ngram", "lookup", 1, 1, 0, 0.0),
    )


def test_steps_of_a_head(tmp_path: Path) -> None:
    """Its first step of a round by name, and as a draft step over several tokens; of a draft model the first is refused,
    and the second is its step over two tokens.
    """
    named = [{"model": "small", "step": "draft_first", "tokens": 1, "ms": 1.5}, {"model": "small", "tokens": 2, "ms": 2.0}]
    path = tmp_path / "costs.json"
    rows = [{"model": "target", "tokens": n, "ms": 10.0} for n in (1, 2)]
    path.write_text(json.dumps([*rows, *named]))
    assert read_engine_table(path, ["small"], [], 0.0, ["small"]).rows[2:] == (
        StepRow("small", "draft_first", 1, 1, 0, 1.5),
        StepRow("small", "draft_first", 2, 1, 0, 2.0),
    )
    with pytest.raises(CostsUnreadable, match="small has no step 'draft_first'"):
        read_engine_table(path, ["small"], [], 0.0)
    path.write_text(json.dumps([*rows, named[1]]))
    assert [(row.step, row.tokens) for row in read_engine_table(path, ["small"], [], 0.0).rows[2:]] == [("draft", 2)]


def test_overhead_is_added_to_steps_of_the_target_only(tmp_path: Path) -> None:
    more = "target,128,1,0,40,prefill,\nngram,1,1,0,0.2,,\n"
    text = "\n".join(line + (",step,relative_error" if line.startswith("model") else ",,0.1") for line in CSV.splitlines())
    plain, slow = (read(tmp_path, f"{text}\n{more}", overhead) for overhead in (0.0, 2.5))
    assert [late.ms - row.ms for row, late in zip(plain, slow, strict=True)] == [2.5, 2.5, 0, 0, 0]
    assert slow[0].relative_error == pytest.approx(0.1 * 10 / 12.5)  # the overhead is taken as exact
    assert slow[2].relative_error == 0.1


REFUSED: dict[str, tuple[str, str]] = {
    "text": (f"{CSV}target,3,1,256,fast", "line 5: ms is 'fast'"),
    "no time at all": (f"{CSV}target,3,1,256,0", "line 5: ms is 0, but a step takes time"),
    "missing time": (f"{CSV}target,3,1,256,", "line 5: ms is missing"),
    "tokens": (f"{CSV}target,,1,256,12", "line 5: tokens is missing"),
    "a column twice": (CSV.replace("context,ms", "ms,ms"), "a column occurs twice"),
    "semicolons": (CSV.replace(",", ";"), "model;tokens"),
    "batch": (f"{CSV}target,3,0,256,12", "line 5: batch is '0'"),
    "another time": (f"{CSV}target,2,1,256,12", "line 5: this step takes 12 ms, but 11 ms in another row"),
    "wrong column": (CSV.replace("ms", "milliseconds"), "line 2: "),
    "no decode step": (CSV.replace("target,1,1,256,10\n", ""), "no decode step of the target"),
    "no verification": (CSV.replace("target,2,1,256,11\n", ""), "no verify step of the target"),
}


@each(("content", "problem"), REFUSED.values())
def test_rows_and_files_that_cannot_be_meant_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(CostsUnreadable) as caught:
        read(tmp_path, content)
    assert str(tmp_path) in caught.value.message
    assert problem in caught.value.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"PK\x03\x04\xff\xfe")
    (tmp_path / "half.json").write_text("{")
    for name in ("nowhere.csv", ".", "binary.csv", "half.json"):
        with pytest.raises(CostsUnreadable, match="cannot be read"):
            read_engine_table(tmp_path / name, ["small"], [], 0.0)


def test_rows_of_other_models_are_named_and_not_read(tmp_path: Path) -> None:
    """One table for several runs: even rows that would be wrong here, such as a search of a draft of another run."""
    path = tmp_path / "steps.csv"
    path.write_text(f"{CSV}big,1,1,256,12\nother,2,1,256,3\nbig,2,1,256,13\n")
    assert read_engine_table(path, ["small"], ["ngram"], 0.0) == (EXPECTED, ("big", "other"))
    (tmp_path / "steps.json").write_text(json.dumps([{"model": "big", "tokens": 1, "ms": 5.0}]))
    with pytest.raises(CostsUnreadable, match="no decode or verify step of the target"):
        read_engine_table(tmp_path / "steps.json", ["small"], [], 0.0)


def test_the_times_of_another_run_are_a_table(tmp_path: Path) -> None:
    """With their rounds; of a run that timed nothing, or a folder that is no run, there are none."""
    run = write_run(tmp_path / "run", Recipe(drafts={"small": 0.0, "large": 0.0}, gammas=(1, 2)))
    rows, others = read_engine_table(Path(run.path), ["small"], [], 0.0)
    assert others == ("large",)
    latency = [row for row in run.latency().to_pylist() if row["model"] != "large"]
    assert rows == tuple(replace(row, redrawn=False) for row in measured_rows(latency))
    with pytest.raises(CostsUnreadable, match="cannot be read"):
        read_engine_table(tmp_path, ["small"], [], 0.0)


PAGE = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()


@each("kind", ["csv", "json"])
def test_the_examples_of_the_page_are_read(tmp_path: Path, kind: str) -> None:
    example, *_ = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    table = StepTable(read(tmp_path, example, name=f"costs.{kind}"))
    times = table.times("small", 4, 1, 1024)
    assert (times.decode.ms, times.target[5].ms, times.draft.ms) == (7.1, 7.5, 1.1)
