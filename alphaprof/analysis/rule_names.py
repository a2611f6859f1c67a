"""Rules as users write them: names, parameters and their ids."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from alphaprof.analysis.rules import NOT_MODELLED, RULES, BoundRule, Parameter
from alphaprof.errors import VALUE, cut, shown


def parse_rule(specification: object) -> BoundRule:
    """A rule from `strict`, `additive_0p1`, `additive:0.1`, `typical:0.09,0.3`, `{additive: 0.1}` or
    `{typical: {epsilon: 0.09, delta: 0.3}}`. Raises `ValueError` with what is known.
    """
    if isinstance(specification, BoundRule):
        return specification
    if isinstance(specification, Mapping) and len(specification) == 1:
        ((name, given),) = specification.items()
        return _bound(str(name), given)
    if not isinstance(specification, str):
        raise ValueError(f"{shown(specification)} is no rule; write a name, or {{name: value}}; {_known_rules()}")
    name, colon, given = specification.partition(":")
    if colon:
        return _bound(name.strip(), [_number(part) for part in given.split(",")])
    for known in sorted(RULES, key=len, reverse=True):
        if name == known or name.startswith(f"{known}_"):
            return _bound(known, [_number(part.replace("p", ".")) for part in name[len(known) :].split("_")[1:]])
    return _bound(name, [])


def rules_of(ids: list[str]) -> list[BoundRule]:
    """Rules from their ids."""
    return [parse_rule(name) for name in ids]


def _bound(name: str, given: object) -> BoundRule:
    if name in NOT_MODELLED:
        raise ValueError(f"the rule {name!r} is not modelled; {_known_rules()}")
    if name not in RULES:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), RULES, n=1)
        raise ValueError(f"unknown rule {shown(name)}{f' (did you mean {near[0]}?)' if near else ''}; {_known_rules()}")
    parameters = RULES[name].parameters
    names = [parameter.name for parameter in parameters]
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ValueError(
                f"{name} has the parameters {', '.join(names) or 'none'} (not {cut(', '.join(map(str, given)), VALUE)})"
            )
        values = [given[parameter] for parameter in names]
    else:
        values = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(values) != len(names):
        count = f"{len(names)} parameter{'' if len(names) == 1 else 's'}"
        raise ValueError(f"{name} has {count} and got {len(values)}: write {spelling(name)}")
    return BoundRule(name, tuple(_checked(name, item, value) for item, value in zip(parameters, values, strict=True)))


def _checked(rule: str, parameter: Parameter, value: object) -> float:
    if isinstance(value, str):  # YAML reads 1e-3 as a text
        value = _number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{rule}: {parameter.name} is no number: {shown(value)}")
    if not parameter.low <= value <= parameter.high or (parameter.whole and value != int(value)):
        kind = "a whole number" if parameter.whole else "a number"
        raise ValueError(
            f"{rule}: {parameter.name} must be {kind} from {parameter.low:g} to {parameter.high:g}, not {shown(value)}"
        )
    return int(value) if parameter.whole else float(value) + 0.0  # no negative zero: additive_-0 is no column name


def _number(text: str) -> float:
    try:
        return float(text if "_" not in text else "no number")  # Python reads 0_1 as 1
    except ValueError:
        raise ValueError(f"{shown(text)} is no number; {_known_rules()}") from None


def spelling(name: str) -> str:
    """How a rule is written on the command line: typical:epsilon,delta."""
    return ":".join([name, ",".join(item.name for item in RULES[name].parameters)]).rstrip(":")


def _known_rules() -> str:
    return "known: " + ", ".join(map(spelling, RULES))
