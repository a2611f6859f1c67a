"""The report of the run of each file."""

from __future__ import annotations

import pytest

from alphaprof.log.run import Run
from alphaprof.report.build import Report, build_report


@pytest.fixture(scope="module")
def report(run: Run) -> Report:
    """The report of the fixture `run`."""
    return build_report(run)
