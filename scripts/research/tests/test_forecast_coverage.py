"""The coverage of forecasts at full size: 1,000 curves of the family keep both promises."""

from __future__ import annotations

from scripts.research.forecast_coverage import family, outcomes


def test_a_thousand_curves_of_the_family() -> None:
    found = [each for each in outcomes(family, 1000, 1) if each.made]
    assert len(found) > 700
    assert sum(each.held for each in found) >= 0.95 * len(found)
    assert sum(each.above for each in found) <= 0.05 * len(found)
