"""A run of a tiny random target, whose texts heads are trained on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from alphaprof.config.load import load_profile
from alphaprof.config.profile import ProfileOptions
from alphaprof.log.store import Run
from alphaprof.profiling.run import pipeline
from tests.profiling.test_speculation import Silent

WORDS = ("the", "a", "red", "old", "bird", "fish", "tree", "ran", "sang", "saw", "under", "home", "again", "slowly", "but")


@dataclasses.dataclass(frozen=True)
class Case:
    """A profile, and the complete run that it made."""

    profile: Path
    run: Path

    @property
    def options(self) -> ProfileOptions:
        return load_profile(self.profile, [])

    @property
    def opened(self) -> Run:
        return Run.open(self.run)


def prompts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, int(rng.integers(4, 9)))) for _ in range(count)]


@pytest.fixture(scope="session")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Makes a run of some documents; `times`: when each was asked; `changes`: of the profile."""

    def make(documents: int = 30, times: Sequence[str] = (), **changes: Any) -> Case:
        folder = tmp_path_factory.mktemp("training")
        rows = [{"prompt": each} for each in prompts(documents)]
        rows = [row | {"asked": time} for row, time in zip(rows, times, strict=True)] if times else rows
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        source = {"domain": "words", "path": "prompts.jsonl", "prompt": "{prompt}"}
        tree = {
            "target": {"model": str(tiny / "target"), "dtype": "float32"},
            "drafts": {"ngram": {"kind": "prompt_lookup"}},
            "data": [source | ({"time": "asked"} if times else {})],
            "continuation": {"kind": "greedy", "max_new_tokens": 20},
            "gammas": [1, 2, 3],
            "rules": ["strict", "one_hot", "lossless"],
            "costs": {"source": "none"},
            "execution": {"threads": 1},
        }
        (folder / "profile.yaml").write_text(yaml.safe_dump(tree | changes))
        run = pipeline.profile(load_profile(folder / "profile.yaml", []), folder / "run", Silent())
        return Case(folder / "profile.yaml", Path(run.path))

    return make


@pytest.fixture(scope="session")
def case(made: Callable[..., Case]) -> Case:
    """Greedy texts of 30 prompts."""
    return made()


@pytest.fixture(scope="session")
def timed(made: Callable[..., Case]) -> Case:
    """Texts of 30 prompts, the first of them asked last, one a day."""
    return made(30, times=[f"2026-03-{30 - number:02}T08:00:00+02:00" for number in range(30)])


@pytest.fixture(scope="session")
def sampled(made: Callable[..., Case]) -> Case:
    """Texts that were drawn, for which the decision is about drafts that are drawn too."""
    drawn = {"kind": "sampled", "max_new_tokens": 16, "temperature": 0.7, "top_k": 20}
    return made(continuation=drawn, decision={"rule": "lossless"})
