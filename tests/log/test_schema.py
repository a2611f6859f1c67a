"""The declared columns, what they generate, what contradicts them, and the manifest."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.errors import RunUnreadable
from alphaprof.log.manifest import VERSION, File, Manifest, Shard, digest_of, read_manifest
from alphaprof.log.place import place_of
from alphaprof.log.schema import (
    CERTIFICATE_COLUMNS,
    CONTINUATION_COLUMNS,
    DOCUMENT_COLUMNS,
    LATENCY_COLUMNS,
    POSITION_COLUMNS,
    PROMPT_COLUMNS,
    SCHEMA_VERSION,
    Column,
    LogRules,
    arrow_schema,
    totals_columns,
    violations,
)
from alphaprof.rules import DEFAULT_RULES
from tests.loops import each
from tests.synthetic import Domain, Recipe, draft_facts, facts, write_run

RULES = (*DEFAULT_RULES, "multi_draft_2")
CERTIFIED = ("strict", "additive_0p1", "multiplicative_0p3", "top_m_3", "typical_0p09_0p3", "trtllm_10_0p6")
HELD = LogRules(RULES, ("multi_draft_2",), CERTIFIED)
TABLES = {
    "positions": HELD.columns,
    "totals": totals_columns([1, 4, 8]),
    "documents": DOCUMENT_COLUMNS,
    "continuations": CONTINUATION_COLUMNS,
    "latency": LATENCY_COLUMNS,
    "prompts": PROMPT_COLUMNS,
}
COLUMNS = [pytest.param(column, id=f"{table}-{column.name}") for table, columns in TABLES.items() for column in columns]


@each("column", COLUMNS)
def test_every_column_is_documented(column: Column) -> None:
    assert column.doc.endswith(".")
    assert len(column.doc) > 8
    assert column.name == column.name.lower()
    assert column.name.isidentifier()


@each("column", COLUMNS)
def test_a_range_is_a_range(column: Column) -> None:
    assert column.low is None or column.high is None or column.low < column.high


@pytest.mark.parametrize("columns", TABLES.values(), ids=TABLES)
def test_names_are_unique(columns: tuple[Column, ...]) -> None:
    names = [column.name for column in columns]
    assert len(set(names)) == len(names)


@each("column", COLUMNS)
def test_arrow_fields_carry_unit_and_meaning(column: Column) -> None:
    field = arrow_schema([column]).field(column.name)
    assert field.metadata == {b"unit": column.unit.encode(), b"doc": column.doc.encode()}
    assert (field.type, field.nullable) == (column.type, column.nullable)


def test_arrow_schemas_carry_their_version_and_notes() -> None:
    metadata = arrow_schema(DOCUMENT_COLUMNS, draft="small", rules=["strict"]).metadata
    assert {key.decode(): json.loads(value) for key, value in metadata.items()} == {
        "alphaprof_schema": SCHEMA_VERSION,
        "draft": "small",
        "rules": ["strict"],
    }


def names_of(rules: LogRules) -> list[str]:
    return [column.name for column in rules.columns]


def test_every_rule_has_a_column() -> None:
    assert names_of(LogRules(DEFAULT_RULES))[-len(DEFAULT_RULES) :] == [f"accept_{rule}" for rule in DEFAULT_RULES]


def test_columns_on_request_follow_those_of_every_log() -> None:
    """What happened to tokens, then thresholds; nothing of either where no rule has them."""
    fixed = [column.name for column in POSITION_COLUMNS] + [f"accept_{rule}" for rule in RULES]
    emitted, thresholds = ["emitted_multi_draft_2"], [f"threshold_{rule}" for rule in CERTIFIED]
    certificates = ["target_top_10_prob", "thresholds_exact", *thresholds]
    assert names_of(LogRules(RULES)) == fixed
    assert names_of(LogRules(RULES, ("multi_draft_2",))) == fixed + emitted
    assert names_of(LogRules(RULES, (), CERTIFIED)) == fixed + certificates
    assert names_of(HELD) == fixed + emitted + certificates


def test_a_threshold_may_be_infinite_and_is_never_unknown() -> None:
    """It belongs to the target: every position has one, with or without a proposal."""
    column = HELD.columns[-1]
    assert (column.name, column.unit, column.low, column.high) == ("threshold_trtllm_10_0p6", "nats", 0, None)
    for value, said in ((math.inf, 0), (0.0, 0), (-0.5, 1), (math.nan, 1), (None, 1)):
        assert len(violations(pa.table({column.name: pa.array([value], pa.float32())}), [column])) == said
    assert not any(column.nullable for column in (*CERTIFICATE_COLUMNS, column))


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of every kind, two kinds of draft, and phases: what may be null is null somewhere."""
    path = tmp_path_factory.mktemp("schema") / "run"
    domains = {
        "code": Domain(documents=2),
        "story": Domain(documents=2, temperature=0.7, continuation="sampled"),
        "wiki": Domain(documents=2, on_policy=False, continuation="text"),
    }
    lookup = Recipe(domains, gammas=(1, 4, 8), rules=RULES, lookups=("lookup",), thinking=0.5, shard_documents=6)
    write_run(path, dataclasses.replace(lookup, certificates=True))
    return path


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ("positions", "positions/draft=small/part-00000.*.parquet"),
        ("positions", "positions/draft=lookup/part-00000.*.parquet"),
        ("totals", "totals/draft=small/part-*.parquet"),
        ("totals", "totals/draft=lookup/part-*.parquet"),
        ("continuations", "continuations/part-00000.*.parquet"),
        ("documents", "documents/part-*.parquet"),
        ("latency", "latency.*.parquet"),
    ],
)
def test_files_hold_what_is_declared(run_path: Path, table: str, part: str) -> None:
    """Names, types, units and meanings survive the way through Parquet."""
    stored = pq.ParquetFile(next(run_path.glob(part))).read()
    assert violations(stored, TABLES[table]) == []
    for column in TABLES[table]:
        assert stored.schema.field(column.name).metadata[b"doc"] == column.doc.encode()
        assert stored.schema.field(column.name).metadata[b"unit"] == column.unit.encode()


def test_a_log_says_which_draft_and_rules_it_holds_and_what_their_columns_mean(run_path: Path) -> None:
    schema = pq.ParquetFile(next(run_path.glob("positions/draft=lookup/part-00000.*"))).schema_arrow
    notes = {key.decode(): json.loads(value) for key, value in schema.metadata.items() if key != b"ARROW:schema"}
    assert (notes["draft"], notes["rules"]) == ("lookup", list(RULES))
    kinds = {"accept": HELD.accepted, "emitted": HELD.emitted, "threshold": HELD.certified}
    for kind, rules in kinds.items():
        for rule in rules:
            assert rule in schema.field(f"{kind}_{rule}").metadata[b"doc"].decode()


def test_every_step_time_says_how_it_was_run_and_holds_its_rounds() -> None:
    assert not [column.name for column in LATENCY_COLUMNS if column.nullable]


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
        (SHARE, [0.5, None], ["share has 1 nulls"]),
        (SHARE, [0.5, math.nan], ["share holds NaN"]),
        (SHARE, [-0.5], ["share holds -0.5, below 0"]),
        (SHARE, [1.5], ["share holds 1.5, above 1"]),
        (SHARE, [math.inf], ["share holds inf, above 1"]),
        (SHARE, [None, math.nan, -1.0, 2.0], ["share has 1 nulls", "share holds NaN", "below 0", "above 1"]),
        (SHARE, [], []),
        (MAYBE, [None, 0.5], []),
        (MAYBE, [None, None], []),
        (MAYBE, [None, math.nan], ["share holds NaN"]),
        (COUNT, [1, 256], []),
        (COUNT, [0], ["count holds 0, below 1"]),
        (COUNT, [257], ["count holds 257, above 256"]),
        (WORDS, ["", "x"], []),
        (WORDS, [None], ["words has 1 nulls"]),
        (OPEN, [math.inf, -math.inf, None], []),
        (PAIRS, [[0.0, 1.0], None], []),
        (PAIRS, [[0.0, math.nan]], ["pairs holds NaN"]),
        (PAIRS, [[0.0, None]], ["nulls inside lists"]),
        (PAIRS, [[0.0, -1.0]], ["pairs holds -1.0, below 0"]),
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


DOCUMENTS, TIMES = "documents/part-00000-00001.0123abcd.parquet", "latency.0123abcd.parquet"


def manifest() -> Manifest:
    return Manifest(
        status="complete",
        alphaprof="0.1.0",
        created="2026-01-01T00:00:00+00:00",
        config={
            "rules": ["strict"],
            "gammas": [1],
            "drafts": {"small": {"kind": "model", "model": "small"}},
            "data": [],
            "costs": {"source": "measured"},
            "decision": {},
        },
        target=facts("target"),
        drafts={"small": draft_facts("small")},
        tokenizer="0" * 64,
        environment={"torch_threads": 1, "packages": {"transformers": "5.17.0"}},
        shards=(Shard(0, 4, 100, "ab", 1), Shard(1, 3, 50, "cd")),
        staged=(4, 3),
        files={DOCUMENTS: File(7, "ab", "cd"), TIMES: File(8, "ef", "01")},
        skipped={"too long": 2},
        truncated={"responses cut": 1},
        warnings=({"code": "a", "message": "b", "remedy": "c"},),
        emitted=HELD.emitted,
        certified=HELD.certified,
    )


def edited(folder: Path, change: Callable[[dict[str, Any]], object], signed: bool = True) -> None:
    """Write the manifest with a change; `signed`: with a digest that is right for it."""
    data = json.loads(manifest().to_json())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data | ({"digest": digest_of(data)} if signed else {})))


def test_a_manifest_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest().to_json())
    assert read_manifest(place_of(tmp_path)) == manifest()
    assert (manifest().documents, manifest().positions) == (7, 150)


def test_the_manifest_of_a_run_that_goes_on_leaves_shards_to_their_commits(tmp_path: Path) -> None:
    """Else it would be written for every one of them, and grow."""
    running = dataclasses.replace(manifest(), status="running")
    (tmp_path / "manifest.json").write_text(running.to_json())
    found = read_manifest(place_of(tmp_path))
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
        read_manifest(place_of(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "9" * 5_000 + "}"])
def test_json_that_python_cannot_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunUnreadable, match="cannot be read: it is not JSON") as caught:
        read_manifest(place_of(tmp_path))
    assert len(caught.value.message) < 200 + len(str(tmp_path))


def test_an_edited_manifest_is_known_by_its_digest(tmp_path: Path) -> None:
    """What it says may be possible all the same. Order and white space are not its content."""
    edited(tmp_path, lambda data: data["shards"][0].update(documents=5), signed=False)
    with pytest.raises(RunUnreadable, match="is damaged: its content is not what its digest says"):
        read_manifest(place_of(tmp_path))
    data = json.loads(manifest().to_json())
    (tmp_path / "manifest.json").write_text(json.dumps(dict(reversed(data.items()))))
    assert read_manifest(place_of(tmp_path)) == manifest()


FIELDS = [item.name for item in dataclasses.fields(Manifest)]
OPTIONAL = ("reused", "sequential", "imported")  # null: no other run's text, documents in order, profiled here
BROKEN = [(name, 7) for name in FIELDS] + [(name, None) for name in FIELDS if name not in OPTIONAL]


@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_a_damaged_manifest_is_refused(tmp_path: Path, name: str, broken: Any) -> None:
    edited(tmp_path, lambda data: data.update({name: broken}))
    with pytest.raises(RunUnreadable, match=f"damaged: the manifest.{name} is {json.dumps(broken)}"):
        read_manifest(place_of(tmp_path))


DEEP: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a text as a number": (lambda data: data["shards"][1].update(documents="3"), r'shards\[1\].documents is "3"'),
    "a truth as a number": (lambda data: data["shards"][0].update(positions=True), r"shards\[0\].positions is true"),
    "a missing field": (
        lambda data: data["target"].pop("dtype"),
        "the manifest.target has not the fields of ModelFacts: dtype",
    ),
    "an unknown field": (lambda data: data["drafts"]["small"].update(size=1), "has not the fields of DraftFacts: size"),
    "no list": (lambda data: data["target"].update(eos=2), "target.eos is 2"),
    "a list in a list": (lambda data: data["target"].update(eos=[[2]]), r"target.eos\[0\] is \[2\]"),
    "another number of shards": (lambda data: data["shards"].pop(0), "its shards are not numbered from 0"),
    "a negative count": (lambda data: data["shards"][0].update(positions=-1), "a count is negative"),
    "not a number": (lambda data: data["target"].update(noise=float("nan")), "target.noise is NaN"),
    "a negative noise": (lambda data: data["target"].update(noise=-1.0), "a number of a model is negative"),
    "no noise": (lambda data: data["target"].update(noise=None), "how noisy the logits"),
    "another draft": (lambda data: data["drafts"].update(other=data["drafts"]["small"]), "its drafts are not those"),
    "no packages": (lambda data: data["environment"].pop("packages"), "its environment lacks packages"),
    "packages without a version": (lambda data: data["environment"]["packages"].update(torch=2), "packages.torch is 2"),
    "half a warning": (lambda data: data["warnings"][0].pop("remedy"), "a warning is not code, message and remedy"),
    "no gammas": (lambda data: data["config"].pop("gammas"), "its profile has not the fields of Profile: gammas"),
    "gammas as text": (lambda data: data["config"].update(gammas=["1"]), r'its profile.gammas\[0\] is "1"'),
    "a file elsewhere": (lambda data: data["files"].update({"../x": data["files"][DOCUMENTS]}), "outside the run"),
    "a file without size": (lambda data: data["files"][DOCUMENTS].pop(), "not the fields of File: size, footer, whole"),
}


@pytest.mark.parametrize("case", DEEP)
def test_every_level_of_a_manifest_is_read_with_its_type(tmp_path: Path, case: str) -> None:
    change, message = DEEP[case]
    edited(tmp_path, change)
    with pytest.raises(RunUnreadable, match=message):
        read_manifest(place_of(tmp_path))


@pytest.mark.parametrize("name", ["status", "config", "target", "drafts", "shards", "environment"])
def test_an_incomplete_manifest_is_refused(tmp_path: Path, name: str) -> None:
    edited(tmp_path, lambda data: data.pop(name))
    with pytest.raises(RunUnreadable, match=f"damaged: the manifest has not the fields of Manifest: {name}"):
        read_manifest(place_of(tmp_path))


def test_no_run_at_all_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match=r"no manifest\.json") as caught:
        read_manifest(place_of(tmp_path / "nothing"))
    assert "profile --out" in caught.value.hint
