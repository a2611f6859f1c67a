"""What stands first on the page: the answer, on one screen."""

from __future__ import annotations

from alphaprof.render.html.templates import filled
from alphaprof.report.build import Report


def first_screen_html(report: Report) -> str:
    """Returns the verdict, its reason and the traffic that it is about, as the markup of the page's first section."""
    return filled("first_screen.html.j2", report=report, traffic=report.traffic)
