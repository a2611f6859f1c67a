"""The report of the run of each file."""

from __future__ import annotations

import pytest

from alphaprof.report.build import RunReport, build_report
from alphaprof.run.reader import Run


@pytest.fixture(scope="module")
def report(run: Run) -> RunReport:
    """The report of the fixture `run`."""
    return build_report(run)
