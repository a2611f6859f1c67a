"""Tests heads that have no record of it: runs the target and each head over the texts of the stop and test parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from alphaprof.commands.curve.collect import Tester
from alphaprof.config.load import load_profile
from alphaprof.log.store import Run
from alphaprof.log.training import TrainingRecord


def tester_of(profile: Path) -> Tester:
    """What tests heads with the target of a profile. Raises `ProfileInvalid`."""
    options = load_profile(profile)

    def test(run: Run, files: Mapping[Path, Path], record: TrainingRecord | None) -> None:
        raise NotImplementedError(options, run, files, record)

    return test
