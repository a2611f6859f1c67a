"""Tests heads that have no record of it: runs the target and each head over the texts of the stop and test parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from alphaprof.commands.curve.collect import Tester
from alphaprof.config.load import load_profile


def tester_of(profile: Path) -> Tester:
    """What tests heads with the target of a profile. Raises `ProfileInvalid`."""
    options = load_profile(profile)

    def test(files: Mapping[Path, Path]) -> None:
        raise NotImplementedError(options, files)

    return test
