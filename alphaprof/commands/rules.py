"""`alphaprof rules`: the acceptance rules in words. docs/rules.md is written from the same table."""

from __future__ import annotations

from alphaprof.config.engines import used_by
from alphaprof.rules import NOT_MODELLED, RULES, spelling


def rules_text() -> str:
    """Return each rule with what it keeps, who uses it, and its parameters; and rules that are not modeled."""
    lines = []
    for name, rule in RULES.items():
        text = " and ".join(rule.policies) + " text"
        lines.append(f"{spelling(name):28} {'lossy' if rule.lossy else 'exact'}, on {text}\n    {rule.about}")
        users = ", ".join(filter(None, (used_by(name), rule.used_by)))
        lines += [f"    used by {users}"] if users else []
        for parameter in rule.parameters:
            more = "larger" if parameter.relaxes > 0 else "smaller"
            lines.append(f"    {parameter.name}: {parameter.low:g} to {parameter.high:g}; {more} values accept more")
    lines += ["\nnot modeled:", *(f"{name:28} {about}" for name, about in NOT_MODELLED.items())]
    return "\n".join(lines) + "\n"
