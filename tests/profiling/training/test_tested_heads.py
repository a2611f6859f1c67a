"""`alphaprof curve` on heads that were trained here: it reads their records, and the runs that tested them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from alphaprof.config.load import load_profile
from alphaprof.errors import DataEmpty, RunExists
from alphaprof.log.manifest import Trained
from alphaprof.log.run import Run
from alphaprof.log.training import CURVE, read_training
from alphaprof.profiling.heads.eagle_files import trained_of
from alphaprof.profiling.run import profile as profiling
from alphaprof.profiling.training.train import TrainingOptions, train_curve
from tests.conftest import Runner
from tests.profiling.training.conftest import Case
from tests.runs import Silent

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
ASKED = TrainingOptions(steps=1, batch_tokens=60)


@pytest.fixture(scope="module")
def heads(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curve of heads that have hardly learnt anything."""
    out = tmp_path_factory.mktemp("heads") / "curve"
    train_curve(case.options, str(case.run), out, ASKED, Silent())
    return out


def test_a_curve_has_heads_of_nested_sizes_with_one_vocabulary(heads: Path, case: Case) -> None:
    listed = yaml.safe_load((heads / CURVE).read_text())
    assert Run.open(heads / listed["run"]).manifest.reused == str(case.run)
    folders = [heads / each["head"] for each in listed["heads"]]
    assert len(folders) == 10
    records = [read_training(folder) for folder in folders]
    by_size = {(record.size.fraction, record.size.order): set(record.units.train) for record in records}
    for order in range(3):
        assert by_size["1/8", order] < by_size["1/4", order] < by_size["1/2", order] < by_size["1", 0]
    assert len({record.vocabulary.digest for record in records}) == 1
    assert len({(record.units.stop, record.units.test, record.settings["steps"], record.floor) for record in records}) == 1
    assert len({frozenset(units) for units in by_size.values()}) == 10
    sizes = [record.size for record in records]
    assert [trained_of(folder) for folder in folders] == [Trained(size.units, size.tokens, str(heads)) for size in sizes]


def test_a_curve_is_resumed_and_not_overwritten(heads: Path, case: Case, made: Callable[..., Case], tmp_path: Path) -> None:
    with pytest.raises(RunExists, match="holds a curve"):
        train_curve(case.options, str(case.run), heads, ASKED, Silent())
    files, known = list(heads.glob("heads/*/model.safetensors")), (heads / CURVE).read_text()
    before = [file.stat().st_mtime_ns for file in files]
    (heads / CURVE).write_text(beside := known + "beside: {published: {head: ./published}}\n")
    train_curve(case.options, str(case.run), heads, ASKED, Silent(), resume=True)
    assert before == [file.stat().st_mtime_ns for file in files]
    assert (heads / CURVE).read_text() == beside
    (heads / CURVE).write_text(known)
    with pytest.raises(DataEmpty, match="too few independent units"):
        train_curve((few := made(7)).options, str(few.run), tmp_path / "curve", ASKED, Silent())


def test_the_folder_of_a_curve_is_all_that_the_command_needs(heads: Path, console_script: Runner) -> None:
    code, text, errors = console_script("curve", heads, "--format", "json")
    assert (code, errors) == (0, "")
    answer = json.loads(text)
    assert [(point["label"], point["heads"]) for point in answer["points"]] == [("1/8", 3), ("1/4", 3), ("1/2", 3), ("1", 1)]
    units = [point["units"] for point in answer["points"]]
    assert units == sorted(units)
    assert answer["gamma_from"] in ("stop", "test")
    assert answer["reason"] == "too few independent test units to estimate the noise"


def test_a_profile_of_all_documents_tests_a_head_on_those_held_out(
    heads: Path, case: Case, tmp_path: Path, console_script: Runner
) -> None:
    """The same head, measured by a profile of the user's own that reuses the texts: the same numbers."""
    tree = yaml.safe_load(case.profile.read_text())
    tree["drafts"] = {"mine": {"kind": "eagle3", "model": str(heads / "heads" / "1-0")}}
    profile = case.profile.parent / "mine.yaml"
    profile.write_text(yaml.safe_dump(tree))
    profiling.profile(load_profile(profile, []), tmp_path / "run", Silent(), reuse=case.run)
    known = yaml.safe_load((heads / CURVE).read_text())
    entry = {"draft": "mine", "run": str(tmp_path / "run")}
    (heads / "beside.yaml").write_text(yaml.safe_dump(known | {"beside": {"tuned": entry}}))
    code, text, errors = console_script("curve", heads / "beside.yaml", "--format", "json")
    assert code == 0, errors
    answer = json.loads(text)
    largest, (mine,) = answer["points"][-1], answer["beside"]
    for name in ("alpha", "accepted", "tokens_per_round"):
        assert mine[name] == largest[name]
