"""The records of a trained head: what is written is read again, and what cannot be is refused in two lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaprof.errors import HeadRecordUnreadable
from alphaprof.log.store import Run
from alphaprof.log.training import TEST_COLUMNS, TESTS, TRAINING, fraction_of, read_tests, read_training, texts_digest
from tests.heads import digests, head_tests, training_record, write_tests, write_training
from tests.synthetic import Recipe, write_anew


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = training_record(fraction="1/4", order=2)
    write_training(tmp_path, record)
    assert read_training(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [TRAINING]


def test_tests_are_read_as_they_were_written(tmp_path: Path) -> None:
    tests = head_tests(miss=0.5)
    write_tests(tmp_path / TESTS, tests)
    read = read_tests(tmp_path / TESTS)
    assert (read.target, read.texts, read.head) == (tests.target, tests.texts, tests.head)
    for column in TEST_COLUMNS:
        np.testing.assert_array_equal(getattr(read, column.name), getattr(tests, column.name))
    assert read.depths == tests.rounds.shape[1]


def _edited(path: Path, *keys: str, value: Any) -> None:
    data = json.loads(path.read_text())
    node = data
    for key in keys[:-1]:
        node = node[key]
    if value is None and keys[-1] in node:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("schema",), "alphaprof-training-9", "is not a record of a training"),
        (("size", "units"), "many", r"the record\.size\.units is"),
        (("size", "tokens"), -1, "is negative"),
        (("size", "fraction"), "3/2", "the fraction '3/2' is not like"),
        (("size", "units"), 3, "training units"),
        (("floor",), float("nan"), "the record.floor"),
        (("floor",), 1.5, "a share is not between 0 and 1"),
        (("vocabulary", "ceiling_test"), float("inf"), "ceiling_test is Infinity"),
        (("seconds", "cpu"), None, "has not the fields of TrainingSeconds: cpu"),
        (("more",), 1, "has not the fields of TrainingRecord: more"),
        (("units", "test"), list(digests("train", 1)), "a unit is in two of its parts"),
    ],
)
def test_what_a_record_cannot_say_is_refused(tmp_path: Path, keys: tuple[str, ...], value: Any, words: str) -> None:
    write_training(tmp_path, training_record())
    _edited(tmp_path / TRAINING, *keys, value=value)
    with pytest.raises(HeadRecordUnreadable, match=words) as refused:
        read_training(tmp_path)
    assert refused.value.hint


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "[" * 9999]
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / TRAINING).write_text(text)
    with pytest.raises(HeadRecordUnreadable):
        read_training(tmp_path)


def test_a_missing_record_names_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HeadRecordUnreadable, match=r"holds no training\.json") as refused:
        read_training(tmp_path)
    assert "units and tokens" in refused.value.hint
    with pytest.raises(HeadRecordUnreadable, match="does not exist"):
        read_tests(tmp_path / TESTS)


def _changed(name: str, change: Any) -> Any:
    def edit(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        field = table.schema.field(name)
        return table.set_column(place, field, pa.array(change(table[name].to_pylist()), field.type))

    return edit


def _first(value: Any) -> Any:
    return lambda rows: [value(rows[0]), *rows[1:]]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda table: table.drop_columns(["outside"]), "columns "),
        (lambda table: table.slice(0, 0), "it holds no document"),
        (lambda table: table.replace_schema_metadata({"format": "alphaprof-tests-9"}), "is not a record of tests"),
        (lambda table: table.replace_schema_metadata(None), "is not a record of tests"),
        (_changed("rounds", _first(lambda row: [float("nan"), *row[1:]])), "NaN"),
        (_changed("rounds", _first(lambda row: [float("inf"), *row[1:]])), "not finite"),
        (_changed("rounds", _first(lambda row: row[:-1])), "different lengths"),
        (_changed("rounds", lambda rows: [[] for _ in rows]), "depths"),
        (_changed("rounds", lambda rows: [row * 40 for row in rows]), "depths"),
        (_changed("rounds", _first(lambda row: [0.5, *row[1:]])), "rounds emit less than one token"),
        (_changed("agree", _first(lambda row: [1e9, *row[1:]])), "more positions are right"),
        (_changed("accepted", _first(lambda row: [*row[:-1], 1e9])), "more rounds accepted"),
        (_changed("outside", _first(lambda _: 10**9)), "outside the vocabulary"),
        (_changed("tokens", _first(lambda _: -1)), "below 0"),
        (_changed("part", _first(lambda _: "train")), "a part is train"),
    ],
)
def test_tests_that_cannot_be_are_refused(tmp_path: Path, edit: Any, words: str) -> None:
    path = tmp_path / TESTS
    write_tests(path, head_tests(miss=0.4))
    pq.write_table(edit(pq.read_table(path)), path)
    with pytest.raises(HeadRecordUnreadable, match=words):
        read_tests(path)


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / TESTS).write_bytes(b"PAR1 and more")
    with pytest.raises(HeadRecordUnreadable, match="cannot be read"):
        read_tests(tmp_path / TESTS)
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(HeadRecordUnreadable):
        read_tests(tmp_path / "folder.parquet")


def test_tests_that_contradict_themselves_are_not_written(tmp_path: Path) -> None:
    tests = head_tests(miss=0.4)
    with pytest.raises(ValueError, match="more positions are right"):
        write_tests(tmp_path / TESTS, dataclasses.replace(tests, agree=tests.starts + 1))


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("1/8", 0.125), ("3/4", 0.75)])
def test_fractions(text: str, value: float) -> None:
    assert fraction_of(text) == value


@pytest.mark.parametrize("text", ["", "0", "1/0", "-1/2", "2", "1/2/2", "half", "1e-3", "\u00bd", "1" * 30])
def test_what_is_no_fraction(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        fraction_of(text)


def test_texts_are_known_by_their_content_and_not_by_who_wrote_them(tmp_path: Path) -> None:
    """A run that is profiled again on the same texts, with another head, can test heads of the first one."""
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        write_anew(tmp_path / name, Recipe(seed=seed))
    one, two, other = (Run.open(tmp_path / name).manifest for name in ("one", "two", "other"))
    assert one.files.keys() != two.files.keys()
    assert texts_digest(one) == texts_digest(two) != texts_digest(other)
    target = dataclasses.replace(one.target, fingerprint="f" * 64)
    assert texts_digest(dataclasses.replace(one, target=target)) != texts_digest(one)
