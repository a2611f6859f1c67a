"""A trained EAGLE-3 head on stories15M, through a profile: its rounds are those that another decoder recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from alphaprof.config.load import load_profile
from alphaprof.log.store import Run
from alphaprof.profiling.run import pipeline
from alphaprof.totals.replay import Trace, steps
from tests.profiling.test_speculation import Silent

pytestmark = pytest.mark.demo_model
GOLDEN = Path(__file__).parent.parent / "golden" / "eagle3_stories15m"
GAMMAS = (1, 2, 3, 5)
TEXTS = json.loads((GOLDEN / "rounds.json").read_text())["texts"]
SIZE = len(TEXTS[0]["text"])


def profiled(folder: Path, target: Path, head: Path = GOLDEN, **changes: Any) -> Run:
    """A run on the recorded prompts, whose continuations the target writes anew."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"ids": text["prompt"]}) for text in TEXTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    tree = {
        "target": {"model": str(target), "dtype": "float32"},
        "drafts": {"head": {"kind": "eagle3", "model": str(head), **changes}},
        "data": [{"domain": "stories", "path": "prompts.jsonl", "prompt_ids": "ids"}],
        "continuation": {"kind": "greedy", "max_new_tokens": SIZE},
        "gammas": list(GAMMAS),
        "rules": ["strict"],
        "costs": {"source": "none"},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    return pipeline.profile(load_profile(folder / "profile.yaml", []), folder / "run", Silent())


@pytest.fixture(scope="module")
def run(stories15m: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return profiled(tmp_path_factory.mktemp("golden"), stories15m)


def rounds(run: Run, gamma: int) -> list[list[list[int]]]:
    """Rounds of each text: where they start, and what they accept of the text."""
    table = run.positions("head", 0)
    columns = {name: table[name].fill_null(0).to_numpy().astype(np.int64) for name in ("accepted_run", "proposed")}
    stop = np.cumsum([SIZE] * len(TEXTS))
    limit, ends = np.full(len(TEXTS), SIZE), np.zeros(stop[-1], dtype=bool)
    found = steps(Trace(columns["accepted_run"], columns["proposed"], stop - SIZE, stop, limit, ends), gamma)
    pairs = np.stack([found.at % SIZE, found.accepted], 1)
    return [pairs[found.document == number].tolist() for number in range(len(TEXTS))]


def recorded(text: dict[str, Any], gamma: int) -> list[list[int]]:
    """The recorded rounds, of which the last may accept a token after the end of the text."""
    return [[at, min(accepted, SIZE - at)] for at, accepted in text["rounds"][str(gamma)]]


def test_the_target_writes_the_recorded_texts(run: Run) -> None:
    written = run.continuations(0)["continuation_ids"].to_pylist()
    assert written == [text["text"] for text in TEXTS]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_every_round_is_the_recorded_one(run: Run, gamma: int) -> None:
    expected = [recorded(text, gamma) for text in TEXTS]
    assert rounds(run, gamma) == expected
    assert sum(map(len, expected)) > 350
