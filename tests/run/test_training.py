"""The records of a trained head: what is written is read again, and what cannot be is refused in two lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from alphaprof.errors import HeadRecordUnreadable
from alphaprof.run.reader import Run
from alphaprof.run.training import TRAINING, read_training, texts_digest
from tests.heads import training_record, write_training
from tests.synthetic import Recipe, write_anew


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = training_record()
    write_training(tmp_path, record)
    assert read_training(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [TRAINING]


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
        (("schema",), "alphaprof-training-9", "schema: Input should be"),
        (("units", "test"), None, r"units\.test: Field required"),
        (("size", "units"), "many", r"size\.units: Input should be a valid integer"),
        (("seconds", "cpu"), None, r"seconds\.cpu: Field required"),
    ],
)
def test_what_a_record_cannot_say_is_refused(tmp_path: Path, keys: tuple[str, ...], value: Any, words: str) -> None:
    write_training(tmp_path, training_record())
    _edited(tmp_path / TRAINING, *keys, value=value)
    with pytest.raises(HeadRecordUnreadable, match=words) as refused:
        read_training(tmp_path)
    assert refused.value.hint


def test_a_record_of_version_3_is_read_without_what_it_has_more(tmp_path: Path) -> None:
    record = training_record()
    write_training(tmp_path, record)
    for keys, value in ((("size", "fraction"), "1/8"), (("size", "order"), 2), (("floor",), 0.05)):
        _edited(tmp_path / TRAINING, *keys, value=value)
    _edited(tmp_path / TRAINING, "schema", value="alphaprof-training-3")
    assert read_training(tmp_path) == dataclasses.replace(record, schema="alphaprof-training-3")


def test_texts_are_known_by_their_content_and_not_by_who_wrote_them(tmp_path: Path) -> None:
    """A run that is profiled again on the same texts, with another head, can test heads of the first one."""
    recipes = {"one": Recipe(), "two": Recipe(drafts={"head": 0.1}), "other": Recipe(seed=1)}
    for name, recipe in recipes.items():
        write_anew(tmp_path / name, recipe)
    one, two, other = (Run.open(tmp_path / name).manifest for name in ("one", "two", "other"))
    assert one.files != two.files
    assert texts_digest(one) == texts_digest(two) != texts_digest(other)
    target = dataclasses.replace(one.target, fingerprint="f" * 64)
    assert texts_digest(dataclasses.replace(one, target=target)) != texts_digest(one)
