"""Step times from files: the three formats by example, the overhead, and what is refused."""

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
DECODE = {"mode": "decode", "context_len": 512, "input_len": 1, "batch_size": 8, "iteration": 128, "endpoint": "x"}


def read(folder: Path, content: Any, overhead_ms: float | None = None, name: str | None = None) -> tuple[StepRow, ...]:
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
    one = {key: value for key, value in rows[2].items() if key != "model"}
    assert read(tmp_path, [*rows[:2], {"model": "small", "results": [one]}]) == EXPECTED


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
    """Its first step of a round by name, as a draft step over several tokens, and as vLLM's prefill onto a context; the
    same rows of a draft model are refused, are its step over two tokens, and are not used.
    """

    def onto(tokens: int, ms: float) -> dict[str, Any]:
        return DECODE | {"mode": "prefill", "input_len": tokens, "latency_per_iter_ms": ms}

    named = [{"model": "small", "step": "draft_first", "tokens": 1, "ms": 1.5}, {"model": "small", "tokens": 2, "ms": 2.0}]
    engine = {"model": "small", "results": [DECODE | {"latency_per_iter_ms": 1.0}, onto(5, 3.0)]}
    path = tmp_path / "costs.json"
    rows = [{"model": "target", "tokens": n, "ms": 10.0} for n in (1, 2)]
    path.write_text(json.dumps([*rows, *named, engine]))
    assert read_engine_table(path, ["small"], [], 0.0, ["small"]).rows[2:] == (
        StepRow("small", "draft_first", 1, 1, 0, 1.5),
        StepRow("small", "draft_first", 2, 1, 0, 2.0),
        StepRow("small", "draft", 1, 8, 512, 1.0),
        StepRow("small", "draft_first", 5, 8, 512, 3.0),
    )
    with pytest.raises(CostsUnreadable, match="small has no step 'draft_first'"):
        read_engine_table(path, ["small"], [], 0.0)
    path.write_text(json.dumps([*rows, named[1], engine]))
    assert [(row.step, row.tokens) for row in read_engine_table(path, ["small"], [], 0.0).rows[2:]] == [
        ("draft", 2),
        ("draft", 1),
        ("prefill", 5),
    ]


def test_overhead_is_added_to_steps_of_the_target_only(tmp_path: Path) -> None:
    more = "target,128,1,0,40,prefill,\nngram,1,1,0,0.2,,\n"
    text = "\n".join(line + (",step,relative_error" if line.startswith("model") else ",,0.1") for line in CSV.splitlines())
    plain, slow = (read(tmp_path, f"{text}\n{more}", overhead) for overhead in (None, 2.5))
    assert [late.ms - row.ms for row, late in zip(plain, slow, strict=True)] == [2.5, 2.5, 0, 0, 0]
    assert slow[0].relative_error == pytest.approx(0.1 * 10 / 12.5)  # the overhead is taken as exact
    assert slow[2].relative_error == 0.1


@each("time", ["latency_per_iter_ms", "server_latency_per_iter_ms"])
def test_what_vllm_writes(tmp_path: Path, time: str) -> None:
    def onto(context: int, tokens: int, ms: float) -> dict[str, Any]:
        return DECODE | {"mode": "prefill", "context_len": context, "input_len": tokens, "iteration": 1, time: ms}

    decode = {"results": [DECODE | {time: 10.0}], "timestamp": "2026-01-01 00:00:00"}
    prefill = {"results": [onto(0, 512, 40.0), onto(512, 5, 12.0), onto(512, 65, 15.0)], "timestamp": ""}
    draft = {"model": "small", "results": [DECODE | {time: 1.0}, onto(512, 2, 1.5), onto(512, 3, 1.6)]}
    assert read(tmp_path, [decode, prefill, draft, {"model": "ngram", "tokens": 1, "batch": 8, "ms": 0.1}], 2.0) == (
        StepRow("target", "decode", 1, 8, 512, 12.0),
        StepRow("target", "prefill", 512, 8, 0, 40.0),
        StepRow("target", "verify", 5, 8, 512, 14.0),
        StepRow("target", "prefill", 65, 8, 512, 15.0),
        StepRow("small", "draft", 1, 8, 512, 1.0),
        StepRow("small", "draft", 2, 8, 512, 1.5),
        StepRow("small", "prefill", 3, 8, 512, 1.6),
        StepRow("ngram", "lookup", 1, 8, 0, 0.1),
    )


def test_the_servers_clock_goes_before_the_clients(tmp_path: Path) -> None:
    times = {"latency_per_iter_ms": 99.0, "client_latency_per_iter_ms": 98.0, "server_latency_per_iter_ms": 10.0}
    verify = DECODE | {"mode": "prefill", "input_len": 2, "latency_per_iter_ms": 11.0}
    assert [row.ms for row in read(tmp_path, [DECODE | times, verify], 0.0)] == [10.0, 11.0]


ENTRY = {"results": [DECODE | {"latency_per_iter_ms": 10.0}]}
REFUSED: dict[str, tuple[Any, float | None, str]] = {
    "text": (f"{CSV}target,3,1,256,fast", None, "line 5: ms is 'fast'"),
    "no time at all": (f"{CSV}target,3,1,256,0", None, "line 5: ms is 0, but a step takes time"),
    "missing time": (f"{CSV}target,3,1,256,", None, "line 5: ms is missing"),
    "tokens": (f"{CSV}target,,1,256,12", None, "line 5: tokens is missing"),
    "a column twice": (CSV.replace("context,ms", "ms,ms"), None, "a column occurs twice"),
    "semicolons": (CSV.replace(",", ";"), None, "model;tokens"),
    "a prefill of no length": (
        {"results": [DECODE | {"mode": "prefill", "input_len": 0, "latency_per_iter_ms": 9.0}]},
        0.0,
        "input_len is missing",
    ),
    "batch": (f"{CSV}target,3,0,256,12", None, "line 5: batch is '0'"),
    "another time": (f"{CSV}target,2,1,256,12", None, "line 5: this step takes 12 ms, but 11 ms in another row"),
    "wrong column": (CSV.replace("ms", "milliseconds"), None, "line 2: "),
    "no decode step": (CSV.replace("target,1,1,256,10\n", ""), None, "no decode step of the target"),
    "no overhead": (ENTRY, None, "row 1: times of vLLM's bench need overhead_ms"),
    "no verification": (ENTRY, 0.0, "no verify step"),
    "a search of vLLM": (ENTRY | {"model": "ngram"}, 0.0, "row 1: ngram searches the text"),
}


@each(("content", "overhead", "problem"), REFUSED.values())
def test_rows_and_files_that_cannot_be_meant_are_refused(
    tmp_path: Path, content: Any, overhead: float | None, problem: str
) -> None:
    with pytest.raises(CostsUnreadable) as caught:
        read(tmp_path, content, overhead)
    assert str(tmp_path) in caught.value.message
    assert problem in caught.value.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"PK\x03\x04\xff\xfe")
    (tmp_path / "half.json").write_text("{")
    for name in ("nowhere.csv", ".", "binary.csv", "half.json"):
        with pytest.raises(CostsUnreadable, match="cannot be read"):
            read_engine_table(tmp_path / name, ["small"], [], None)


def test_rows_of_other_models_are_named_and_not_read(tmp_path: Path) -> None:
    """One table for several runs: even rows that would be wrong here, such as a search of a draft of another run."""
    path = tmp_path / "steps.csv"
    path.write_text(f"{CSV}big,1,1,256,12\nother,2,1,256,3\nbig,2,1,256,13\n")
    assert read_engine_table(path, ["small"], ["ngram"], None) == (EXPECTED, ("big", "other"))
    (tmp_path / "steps.json").write_text(json.dumps([{**DECODE, "latency_per_iter_ms": 5.0, "model": "big"}]))
    with pytest.raises(CostsUnreadable, match="no decode or verify step of the target"):
        read_engine_table(tmp_path / "steps.json", ["small"], [], None)


def test_the_times_of_another_run_are_a_table(tmp_path: Path) -> None:
    """With their rounds; of a run that timed nothing, or a folder that is no run, there are none."""
    run = write_run(tmp_path / "run", Recipe(drafts={"small": 0.0, "large": 0.0}, gammas=(1, 2)))
    rows, others = read_engine_table(Path(run.path), ["small"], [], None)
    assert others == ("large",)
    latency = [row for row in run.latency().to_pylist() if row["model"] != "large"]
    assert rows == tuple(replace(row, redrawn=False) for row in measured_rows(latency))
    with pytest.raises(CostsUnreadable, match="cannot be read"):
        read_engine_table(tmp_path, ["small"], [], None)


PAGE = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()


@each("kind", ["csv", "json"])
def test_the_examples_of_the_page_are_read(tmp_path: Path, kind: str) -> None:
    (example,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    table = StepTable(read(tmp_path, example, name=f"costs.{kind}"))
    times = table.times("small", 4, 1, 1024)
    assert (times.decode.ms, times.target[5].ms, times.draft.ms) == (7.1, 7.5, 1.1)
