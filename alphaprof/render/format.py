"""One formatter per quantity: nothing is rounded into a claim that the value does not make."""

from __future__ import annotations

import math

from alphaprof.errors import visible as visible
from alphaprof.stats.estimate import Interval

NAME = 40  # characters of a domain's name that are shown


class Number(str):
    """A quantity as text that still knows its value and its interval, `low` to `high`, which drawers put beside the value or
    below it; `head`: the text without it.
    """

    value: float | None
    low: float | None
    high: float | None
    head: str

    def __new__(cls, head: str, interval: str = "", values: Interval | float | None = None) -> Number:
        """Return the text of a value, and of its interval if it has one; `values`: both as numbers."""
        found = super().__new__(cls, f"{head} {interval}" if interval else head)
        found.head = head
        found.value, found.low, found.high = (
            (values.value, values.low, values.high) if isinstance(values, Interval) else (values, None, None)
        )
        return found

    @property
    def interval(self) -> str:
        """Its interval as text; empty without one."""
        return self[len(self.head) + 1 :]

    @property
    def stacked(self) -> str:
        """The text with the interval below the value."""
        return f"{self.head}\n{self.interval}" if self.interval else str(self)

    def marked(self, mark: str, at_end: bool = False) -> Number:
        """Return the same with a mark behind the value, or behind everything."""
        found = Number(self.head, self.interval + mark) if at_end else Number(self.head + mark, self.interval)
        found.value, found.low, found.high = self.value, self.low, self.high
        return found


NOTHING = Number("n/a")
UNKNOWN = Number("not known")  # of a value whose interval says nothing


def share(value: float | None, digits: int = 3) -> Number:
    """Return a share in [0, 1]; 0.9996 is not written as 1.000, and 0.0004 not as 0.000."""
    if value is None:
        return NOTHING
    text = f"{value:.{digits}f}"
    if 0 < value < 1 and float(text) in (0.0, 1.0):
        edge = 10.0**-digits
        text = f"<{edge:.{digits}f}" if value < 0.5 else f">{1 - edge:.{digits}f}"
    return Number(text, values=value)


def share_with_interval(interval: Interval | None) -> Number:
    """Return a share with its interval."""
    if interval is None:
        return NOTHING
    return Number(share(interval.value), f"[{share(interval.low, 2)}, {share(interval.high, 2)}]", interval)


def number(value: float | None, digits: int = 2, unit: str = "") -> Number:
    """Return a quantity, 0 or above; infinity is written as such, and 0.004 not as 0.00."""
    if value is None:
        return NOTHING
    text = "inf" if math.isinf(value) else f"{value:.{digits}f}"
    if value > 0 and float(text) == 0:
        text = f"<{10.0**-digits:.{digits}f}"
    return Number(text + unit, values=value)


def interval(value: Interval | None, unit: str = "", digits: int = 2) -> Number:
    """Return a quantity with its interval."""
    if value is None:
        return NOTHING
    if value.low <= 0 and math.isinf(value.high):
        return UNKNOWN
    return Number(number(value.value, digits, unit), f"[{number(value.low, digits)}, {number(value.high, digits)}]", value)


def difference(value: Interval | None, digits: int) -> Number:
    """Return a signed quantity with its interval."""
    if value is None:
        return NOTHING
    return Number(f"{value.value:+.{digits}f}", f"[{value.low:+.{digits}f}, {value.high:+.{digits}f}]", value)


def text_kind(continuation: str, sampling: dict[str, float] | None) -> str:
    """Return what a text is: its kind, and the settings that it was drawn with."""
    if sampling is None:
        return continuation
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    others = "".join(f", {name} {value:g}" for name, value in sampling.items() if name in off and value != off[name])
    return f"{continuation} at temperature {sampling['temperature']:g}{others}"


def is_cut(sampling: dict[str, float] | None) -> bool:
    """Return whether sampling left out the less probable tokens."""
    return sampling is not None and (sampling["top_k"] > 0 or sampling["top_p"] < 1 or sampling["min_p"] > 0)


def percent(value: float) -> str:
    """Return a share as a whole percentage; 0.996 is not written as 100%, and 0.004 not as 0%."""
    text = f"{100 * value:.0f}"
    if 0 < value < 1 and text in ("0", "100"):
        return "<1%" if value < 0.5 else ">99%"
    return f"{text}%"


def slots(without: float, with_draft: float) -> str:
    """Return the tokens that a KV cache has room for without and with a draft, of which engines keep some memory back."""
    less = percent(1 - with_draft / without)
    return f"the KV cache has room for {without:,.0f} tokens at most, {with_draft:,.0f} with the draft ({less} less)"


def documents(rows: int, clusters: int) -> str:
    """Return how many documents; if some depend on each other, how many independent ones they amount to."""
    return count(rows) if clusters == rows else f"{count(clusters)} of {count(rows)}"


def mark(on_policy: bool, lossy: bool) -> str:
    """Return what stands beside an alpha that is not of the rule's own decoding: * off-policy, ~ lossy."""
    return "*" if not on_policy else "~" if lossy else ""


def signed_percent(value: float) -> str:
    """Return a relative error as a whole percentage with its sign; 0.004 is not written as +0%."""
    text = f"{100 * value:+.0f}%"
    return f"{100 * value:+.1f}%" if text in ("+0%", "-0%") and abs(value) >= 0.0005 else text


def level(confidence: float) -> str:
    """Return a confidence level, with the digits it was given with."""
    return f"{100 * confidence:g}%"


def duration(seconds: float) -> str:
    """Return a rough time: two digits say enough."""
    if seconds < 1:
        return "less than a second"
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= size)
    return f"{float(f'{seconds / size:.2g}'):g} {unit}"


def data_size(size: float) -> str:
    """Return a rough number of bytes."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{float(f'{size / unit:.3g}'):g} {name}"
    return f"{size:.0f} bytes"


def count(value: int) -> str:
    """Return a whole number with thousands separators."""
    return f"{value:,}"


def many(value: int, what: str) -> str:
    """Return how many of what: 1 document, 2 documents."""
    return f"{count(value)} {what}" + ("" if value == 1 else "s")


def sentence(text: str) -> str:
    """Return a sentence as it begins a line."""
    return text[:1].upper() + text[1:]


def short(name: str, most: int = NAME) -> str:
    """Return a name cut to `most` characters, the last of them an ellipsis then."""
    return name if len(name) <= most else f"{name[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
