"""Runs of a tiny random target, whose texts heads are trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alphaprof.config.load import load_profile
from alphaprof.config.profile import ProfileOptions
from alphaprof.run.reader import Run
from tests.runs import run_of_prompts


@dataclasses.dataclass(frozen=True)
class Case:
    """A profile, and the complete run that it made."""

    profile: Path
    run: Path

    @classmethod
    def of(cls, run: Run) -> Case:
        return cls(Path(run.path).parent / "profile.yaml", Path(run.path))

    @property
    def options(self) -> ProfileOptions:
        return load_profile(self.profile, [])

    @property
    def opened(self) -> Run:
        return Run.open(self.run)


@pytest.fixture(scope="session")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Makes a run of some documents."""

    def make(*given: Any, **changes: Any) -> Case:
        return Case.of(run_of_prompts(tmp_path_factory.mktemp("training"), tiny, *given, **changes))

    return make


@pytest.fixture(scope="session")
def case(lookup_run: Run) -> Case:
    """Greedy texts of 30 prompts."""
    return Case.of(lookup_run)


@pytest.fixture(scope="session")
def sampled(made: Callable[..., Case]) -> Case:
    """Texts that were drawn, for which the decision is about drafts that are drawn too."""
    drawn = {"kind": "sampled", "max_new_tokens": 16, "temperature": 0.7, "top_k": 20}
    return made(continuation=drawn, decision={"rule": "lossless"})
