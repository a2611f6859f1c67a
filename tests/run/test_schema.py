"""The declared columns, what they generate, what contradicts them, and the manifest."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from alphaprof.errors import RunUnreadable
from alphaprof.run.manifest import VERSION, File, Hybrid, Manifest, Shard, digest_of, read_manifest
from alphaprof.run.schema import (
    Column,
    LogRules,
    violations,
)
from alphaprof.run.storage import storage_of
from tests import synthetic
from tests.loops import each
from tests.reference import LOGGED_RULES
from tests.synthetic import Recipe

CERTIFIED = ("strict", "additive_0p1", "multiplicative_0p3", "top_m_3", "typical_0p09_0p3", "trtllm_10_0p6")
HELD = LogRules(LOGGED_RULES, CERTIFIED)


SHARE = Column("share", pa.float32(), "A share.", "ratio", 0, 1)


MAYBE = dataclasses.replace(SHARE, nullable=True)
COUNT = Column("count", pa.int32(), "A count.", "tokens", 1, 256)
WORDS = Column("words", pa.string(), "Words.")
PAIRS = Column("pairs", pa.list_(pa.float64(), 2), "Pairs.", "rounds", 0, nullable=True)
OPEN = Column("open", pa.float32(), "Unbounded.", nullable=True)


@each(
    ("column", "values", "said"),
    [
        (SHARE, [0.0, 0.5, 1.0], []),
        (SHARE, [1.0 + 5e-7], []),  # float32 rounding of a sum of probabilities
        (SHARE, [math.inf], ["share holds inf, above 1"]),
        (SHARE, [None, math.nan, -1.0, 2.0], ["share has 1 nulls", "share holds NaN", "below 0", "above 1"]),
        (MAYBE, [None, 0.5], []),
        (MAYBE, [None, math.nan], ["share holds NaN"]),
        (COUNT, [1, 256], []),
        (COUNT, [0], ["count holds 0, below 1"]),
        (WORDS, [None], ["words has 1 nulls"]),
        (OPEN, [math.inf, -math.inf, None], []),
        (PAIRS, [[0.0, 1.0], None], []),
        (PAIRS, [[0.0, None]], ["nulls inside lists"]),
    ],
)
def test_violations(column: Column, values: list[Any], said: list[str]) -> None:
    table = pa.table({column.name: pa.array(values, column.type)})
    problems = violations(table, [column])
    assert len(problems) == len(said)
    assert all(part in problem for part, problem in zip(said, problems, strict=True))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pa.table({"share": pa.array([0.5])}), "share has type double instead of float"),
        (pa.table({"shares": pa.array([0.5], pa.float32())}), "columns ['shares'] instead of ['share']"),
        (pa.table({"share": pa.array([0.5], pa.float32()), "more": [1]}), "columns ['share', 'more'] instead of ['share']"),
    ],
)
def test_other_columns_and_types_are_violations(table: pa.Table, said: str) -> None:
    assert violations(table, [SHARE]) == [said]


DOCUMENTS, TIMES = "documents.parquet", "latency.parquet"


def manifest() -> Manifest:
    return dataclasses.replace(
        synthetic.manifest(Recipe()),
        status="complete",
        shards=(Shard(0, 4, 100, "ab", 1), Shard(1, 3, 50, "cd")),
        staged=2,
        files={DOCUMENTS: File(7, "ab"), TIMES: File(8, "ef")},
        skipped={"too long": 2},
        truncated={"responses cut": 1},
        warnings=({"code": "a", "message": "b", "remedy": "c"},),
        certified=HELD.certified,
    )


def edited(folder: Path, change: Callable[[dict[str, Any]], object], signed: bool = True) -> None:
    """Write the manifest with a change; `signed`: with a digest that is right for it."""
    data = json.loads(manifest().to_json())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data | ({"digest": digest_of(data)} if signed else {})))


def test_a_manifest_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest().to_json())
    assert read_manifest(storage_of(tmp_path)) == manifest()
    assert (manifest().documents, manifest().positions) == (7, 150)


def test_the_manifest_of_a_run_that_goes_on_leaves_shards_to_their_records(tmp_path: Path) -> None:
    """Else it would be written for every one of them, and grow."""
    running = dataclasses.replace(manifest(), status="running")
    (tmp_path / "manifest.json").write_text(running.to_json())
    found = read_manifest(storage_of(tmp_path))
    assert found == dataclasses.replace(running, shards=(), files={TIMES: running.files[TIMES]})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", "\xff\xfe"),
        '{"format": "alphaprof-run"}',
        f'{{"format": "alphaprof-run", "version": {VERSION - 1}}}',
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunUnreadable):
        read_manifest(storage_of(tmp_path))


def test_a_manifest_has_no_unknown_fields(tmp_path: Path) -> None:
    """Those of another version are told by its number."""
    known = {"first": "ngram", "then": "large"}
    edited(tmp_path, lambda data: data["drafts"]["small"].update(hybrid=known))
    assert read_manifest(storage_of(tmp_path)).drafts["small"].hybrid == Hybrid("ngram", "large")
    edited(tmp_path, lambda data: data["drafts"]["small"].update(hybrid=known | {"texts": "runs/a"}))
    with pytest.raises(RunUnreadable, match=r"is damaged: drafts\.small\.hybrid\.texts is 'runs/a'"):
        read_manifest(storage_of(tmp_path))


def test_an_edited_manifest_is_known_by_its_digest(tmp_path: Path) -> None:
    """What it says may be possible all the same. Order and white space are not its content."""
    edited(tmp_path, lambda data: data["shards"][0].update(documents=5), signed=False)
    with pytest.raises(RunUnreadable, match="is damaged: its content does not match its digest"):
        read_manifest(storage_of(tmp_path))
    data = json.loads(manifest().to_json())
    (tmp_path / "manifest.json").write_text(json.dumps(dict(reversed(data.items()))))
    assert read_manifest(storage_of(tmp_path)) == manifest()


def test_no_run_at_all_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match=r"no manifest\.json") as caught:
        read_manifest(storage_of(tmp_path / "nothing"))
    assert "profile --out" in caught.value.hint
