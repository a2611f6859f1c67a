"""`alphaprof rules`: the acceptance rules in words. docs/rules.md is written from the same table."""

from __future__ import annotations

from collections.abc import Iterator

from alphaprof.rules import NOT_MODELLED, RULES, spelling


def rules_text() -> str:
    """Return each rule with what it keeps, who uses it, and its parameters; and rules that are not modeled."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for name, rule in RULES.items():
        text = " and ".join(rule.policies) + " text"
        yield f"{spelling(name):28} {'lossy' if rule.lossy else 'exact'}, on {text}\n    {rule.about}"
        if rule.used_by:
            yield f"    used by {rule.used_by}"
        for parameter in rule.parameters:
            more = "larger" if parameter.relaxes > 0 else "smaller"
            yield f"    {parameter.name}: {parameter.low:g} to {parameter.high:g}; {more} values accept more"
    yield "\nnot modeled:"
    for name, about in NOT_MODELLED.items():
        yield f"{name:28} {about}"
