"""`alphaprof curve` on heads that were trained here: their records are read, and without them they are tested again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from alphaprof.log.training import CURVE, TEST_COLUMNS, TESTS, TRAINING, head_digest, read_tests
from alphaprof.profiling.training.train import TrainingOptions, train, train_curve
from tests.conftest import Runner
from tests.profiling.test_speculation import Silent
from tests.profiling.training.conftest import Case

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def heads(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curve of heads that have hardly learnt anything."""
    out = tmp_path_factory.mktemp("heads") / "curve"
    train_curve(case.options, str(case.run), out, TrainingOptions(steps=1, batch_tokens=60), Silent())
    return out


def test_the_folder_of_a_curve_is_all_that_the_command_needs(heads: Path, console_script: Runner) -> None:
    code, text, errors = console_script("curve", heads, "--format", "json")
    assert (code, errors) == (0, "")
    answer = json.loads(text)
    assert [(point["label"], point["heads"]) for point in answer["points"]] == [("1/8", 3), ("1/4", 3), ("1/2", 3), ("1", 1)]
    units = [point["units"] for point in answer["points"]]
    assert units == sorted(units)
    assert answer["gamma_from"] in ("stop", "test")
    assert answer["reason"] == "there are too few independent test units to know the noise"


def test_heads_without_a_record_are_tested_as_training_did(
    heads: Path, case: Case, tmp_path: Path, console_script: Runner
) -> None:
    """The same head under another name, without its records: the same rows, which lie beside the list."""
    shutil.copytree(heads / "heads" / "1-0", tmp_path / "elsewhere")
    for name in (TESTS, TRAINING):
        (tmp_path / "elsewhere" / name).unlink()
    before = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    entries = [{"head": str(heads / "heads" / "1-2-0")}, {"head": "./elsewhere", "units": 999, "order": 0}]
    (tmp_path / CURVE).write_text(yaml.safe_dump({"heads": entries}))
    code, _, errors = console_script("curve", tmp_path, "--from", case.run)
    assert code == 6
    assert "hint: give the profile of the run, and they are tested: --profile PROFILE" in errors
    code, text, errors = console_script("curve", tmp_path, "--from", case.run, "--profile", case.profile, "--format", "json")
    assert code == 0, errors
    assert "testing elsewhere" in errors
    (file,) = (tmp_path / "tested").iterdir()
    tested, known = read_tests(file), read_tests(heads / "heads" / "1-0" / TESTS)
    for column in TEST_COLUMNS:
        np.testing.assert_array_equal(getattr(tested, column.name), getattr(known, column.name), column.name)
    assert tested.head == head_digest(tmp_path / "elsewhere")
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == before
    assert json.loads(text)["points"][-1]["units"] == 999
    code, again, errors = console_script("curve", tmp_path, "--from", case.run, "--format", "json")
    assert (code, again, errors) == (0, text, "")


def test_a_head_that_was_trained_elsewhere_on_a_split_by_time_is_tested_on_it(
    timed: Case, tmp_path: Path, console_script: Runner
) -> None:
    """The list says it where nothing else does: on a random part the head would know what it is tested on."""
    asked = TrainingOptions(steps=1, batch_tokens=60, split="time")
    train(timed.options, str(timed.run), tmp_path / "own", asked, Silent())
    shutil.copytree(tmp_path / "own", tmp_path / "elsewhere")
    for name in (TESTS, TRAINING):
        (tmp_path / "elsewhere" / name).unlink()
    rows = {}
    for way in ("time", "random"):
        (tmp_path / CURVE).write_text(yaml.safe_dump({"heads": [{"head": "./elsewhere", "units": 24}], "split": way}))
        code, _, errors = console_script("curve", tmp_path, "--from", timed.run, "--profile", timed.profile)
        assert code == 0, errors
        (file,) = set((tmp_path / "tested").iterdir()) - set(rows)
        rows[file] = set(read_tests(file).unit)
    by_time, at_random = rows.values()
    assert by_time == set(read_tests(tmp_path / "own" / TESTS).unit) != at_random
    (tmp_path / CURVE).write_text(yaml.safe_dump({"heads": [{"head": "./own"}, {"head": "./elsewhere", "units": 24}]}))
    code, _, errors = console_script("curve", tmp_path, "--from", timed.run, "--profile", timed.profile)
    assert (code, "were tested on other documents" in errors) == (12, True)


def test_another_target_tests_nothing(
    heads: Path, case: Case, made: Callable[..., Case], tmp_path: Path, console_script: Runner
) -> None:
    other = made(12, continuation={"kind": "greedy", "max_new_tokens": 12})
    code, _, errors = console_script("curve", heads, "--from", other.run)
    assert code == 12
    assert len(errors.splitlines()) == 2
    assert "is of texts that" in errors


def test_another_run_of_the_target_tests_no_head_on_the_texts_of_a_record(
    heads: Path, made: Callable[..., Case], tmp_path: Path, console_script: Runner
) -> None:
    """The record names parts that the other run does not hold."""
    other = made(12, data=[{"domain": "words", "path": "prompts.jsonl", "prompt": "{prompt} {prompt}"}])
    shutil.copytree(heads / "heads" / "1-0", tmp_path / "elsewhere")
    for name in (TESTS, TRAINING):
        (tmp_path / "elsewhere" / name).unlink()
    entries = [{"head": str(heads / "heads" / "1-2-0")}, {"head": "./elsewhere", "units": 999, "order": 0}]
    (tmp_path / CURVE).write_text(yaml.safe_dump({"heads": entries}))
    code, _, errors = console_script("curve", tmp_path, "--from", other.run, "--profile", other.profile)
    assert code == 12
    assert "holds none of the test texts of the heads that have a record" in errors
