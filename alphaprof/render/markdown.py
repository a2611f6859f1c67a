"""How text is written in Markdown: untrusted text means nothing but itself, and a verdict has its sign."""

from __future__ import annotations

import re

from alphaprof.report.format import short, visible

SYMBOLS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>@:])")
SYMBOLS_IN_SENTENCES = re.compile(r"([\\`*_{}\[\]#|~>@])")
SIGNS = {"GO": "✅", "NO-GO": "❌", "UNDECIDED": "❔", "pass": "✅", "fail": "❌", "undecided": "❔"}


def escaped(text: str) -> str:
    """Untrusted text as Markdown that means nothing but itself: no markup, HTML, mentions, links or line breaks."""
    return _neutral(SYMBOLS, short(text))


def escaped_sentence(text: str) -> str:
    """A sentence of ours that may quote names: escaped whole, but for what sentences are made of."""
    return _neutral(SYMBOLS_IN_SENTENCES, text)


def _neutral(symbols: re.Pattern[str], text: str) -> str:
    return symbols.sub(r"\\\1", visible(text)).replace("&", "&amp;").replace("<", "&lt;")


def heading(outcome: str, about: str, reason: str) -> list[str]:
    """The first lines of an answer: its outcome, what that is about, and why."""
    return [f"## {SIGNS[outcome]} {outcome}: {about}", "", escaped_sentence(reason), ""]


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"
