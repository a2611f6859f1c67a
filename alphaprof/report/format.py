"""One formatter per quantity: nothing is rounded into a claim that the value does not make."""

from __future__ import annotations

import math

from alphaprof.report.model import Interval

NOTHING = "n/a"


def share(value: float | None, digits: int = 3) -> str:
    """A share in [0, 1]; 0.9996 is not written as 1.000, and 0.0004 not as 0.000."""
    if value is None:
        return NOTHING
    text = f"{value:.{digits}f}"
    if 0 < value < 1 and float(text) in (0.0, 1.0):
        edge = 10.0**-digits
        return f"<{edge:.{digits}f}" if value < 0.5 else f">{1 - edge:.{digits}f}"
    return text


def share_interval(interval: Interval | None) -> str:
    """A share with its interval."""
    if interval is None:
        return NOTHING
    return f"{share(interval.value)} [{share(interval.low, 2)}, {share(interval.high, 2)}]"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A positive quantity; infinity is written as such."""
    if value is None:
        return NOTHING
    return f"inf{unit}" if math.isinf(value) else f"{value:.{digits}f}{unit}"


def interval(value: Interval | None, unit: str = "") -> str:
    """A quantity with its interval."""
    if value is None:
        return NOTHING
    return f"{number(value.value)}{unit} [{number(value.low)}, {number(value.high)}]"


def count(value: int) -> str:
    """A whole number with thousands separators."""
    return f"{value:,}"
