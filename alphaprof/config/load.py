"""Read a profile file with its overrides, with errors that name the key and suggest the next step."""

from __future__ import annotations

import copy
import datetime
import difflib
import json
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from alphaprof.config.options import (
    DRAFTS,
    STORED,
    UNKNOWN_KEY,
    ContinuationOptions,
    MeasuredCosts,
    Options,
    RooflineCosts,
    Sampling,
    TableCosts,
)
from alphaprof.config.profile import DecisionOptions, ExecutionOptions, ProfileOptions, SourceOptions
from alphaprof.errors import VALUE, ProfileInvalid, cut, shown
from alphaprof.rules import parse_rule

SET = "--set"  # where the values of a report's question come from
WHOLE = "profile"  # where a problem lies that concerns several options
MOST_NAMED = 6  # problems that an error names
LONGEST = 2**26  # characters of a profile, or of the manifest of a run
OFTEN_CALLED = {"ngram": "prompt_lookup", "eagle": "eagle3", "draft_model": "model"}  # kinds of drafts, by other names
WORDS = {  # for what pydantic finds, by its type of error
    "missing": "is missing",
    "union_tag_not_found": "{discriminator} is missing",
    "union_tag_invalid": "unknown {discriminator} {tag}; known: {expected_tags}",
    "literal_error": "{given} is not {expected}",
    "list_type": "expected a list, not {given}",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "expected a group of options, not {given}"),
    "string_type": "expected text, not {given}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected a whole number, not {given}"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number, not {given}"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false, not {given}"),
    "greater_than": "must be above {gt}, not {given}",
    "greater_than_equal": "must be at least {ge}, not {given}",
    "less_than": "must be below {lt}, not {given}",
    "less_than_equal": "must be at most {le}, not {given}",
    "string_pattern_mismatch": "{given} does not begin with http:// or https://",
    "too_short": "needs at least {min_length} entry",
}
# What PyYAML raises: its own errors, others for values that do not parse as they look (2024-99-99) or as they are tagged,
# and for text that is nested too deeply for Python.
BAD_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)


BOOL = "tag:yaml.org,2002:bool"
STARTING = "start from a file in profiles/: it needs target, drafts and data"


class UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key that occurs twice, instead of dropping the first, and for which on, off, yes and
    no are words, as in YAML 1.2: an option that is true or false takes them all the same.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as yaml.SafeLoader has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != BOOL]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose as the base class does, after a check for duplicates, before merge keys (`<<`) add theirs."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {shown(key.value)}", key.start_mark)
            seen.add(key.value)
        return node


UniqueKeyLoader.add_implicit_resolver(BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def load_profile(path: Path, overrides: list[str] | None = None, limit: int | None = None) -> ProfileOptions:
    """Return the validated profile in `path`, a file or a run that was made by it, with `KEY=VALUE` overrides and the limit
    of each source applied, and with absolute paths.

    Raises `ProfileInvalid` for a file that is missing or malformed, and for keys or values that do not exist.
    """
    tree = read_tree(path)
    for override in _source_first(overrides or []):
        apply_override(tree, override)
    options = validate(tree, cut(str(path))).resolved(path.parent)
    if limit is not None:
        data = [source.model_copy(update={"limit": min(limit, source.limit or limit)}) for source in options.data]
        options = options.model_copy(update={"data": data})
    return options


def changed_question(config: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return a run's profile from its manifest with the overrides that a report allows: `decision.KEY=VALUE`,
    `hybrids.NAME=VALUE`, and another source of step times, `costs.source=roofline` first. Relative paths start at the
    working directory.
    """
    stored = validate(config, "the run", STORED)
    tree = stored.model_dump(mode="json")
    for override in _source_first(overrides):
        if not override.startswith(("decision.", "costs.", "hybrids.")):
            problem = f"--set {cut(override, VALUE)}: a report can only change decision.*, costs.* and hybrids.*"
            near = _near(override.partition("=")[0].strip())
            raise ProfileInvalid(problem, f"did you mean {near}?" if near else "to change other options, profile again")
        apply_override(tree, override)
    options = validate(tree, SET)
    if isinstance(options.costs, MeasuredCosts) and options.costs != stored.costs:
        hint = "time them again: alphaprof profile ... --retime --set costs...; or name another source: costs.source=table"
        raise ProfileInvalid("--set costs: a report measures no step times", hint)
    return options.resolved(Path()).model_dump(mode="json")


def _near(key: str) -> str | None:
    """Return the option of a report's question that a key may stand for: one without its group, or one much like it."""
    named = [*map("decision.{}".format, DecisionOptions.model_fields)]
    named += [f"costs.{name}" for kind in (RooflineCosts, TableCosts) for name in kind.model_fields]
    alone = [name for name in named if name.partition(".")[2] == key]
    return next(iter(alone or difflib.get_close_matches(key, named, n=1, cutoff=0.8)), None)


def known_rules(specifications: list[str], option: str = "--rules") -> list[str]:
    """Return the ids of the rules that an option of a command names. Raises `ProfileInvalid`."""
    try:
        return list(dict.fromkeys(parse_rule(text).id for text in specifications))
    except ValueError as error:
        raise ProfileInvalid(f"{option}: {error}", "list them with alphaprof rules; for example: additive:0.2") from None


def read_tree(path: Path, what: str = "profile", start: str = STARTING) -> dict[str, Any]:
    """Return a profile, or another YAML file as its user calls it, as plain data; of a run the profile in its manifest.
    Raises `ProfileInvalid`; `start`: its hint where the file does not hold a mapping.
    """
    name, manifest = cut(str(path)), path / "manifest.json"
    of_run = manifest.is_file()
    try:
        with (manifest if of_run else path).open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in the path
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ProfileInvalid(f"cannot read the {what} {name}: {reason}", f"give the path of a YAML {what}") from None
    if len(text) > LONGEST:  # a device never ends
        raise ProfileInvalid(
            f"{name} is not a {what}: it is longer than {LONGEST:,} characters", f"give the path of a YAML {what}"
        )
    try:
        tree = json.loads(text)["config"] if of_run else UniqueKeyLoader(text).get_single_data()
    except BAD_YAML as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        problem = cut(getattr(error, "problem", None) or f"not YAML ({reason})")
        raise ProfileInvalid(
            f"{name}{where}: {problem}", "correct the YAML there; quote text that contains ': ' or '{'"
        ) from None
    if not isinstance(tree, dict):
        raise ProfileInvalid(f"{name} is not a {what}", start)
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value in place: `target.dtype=float32`, `data.0.limit=5`, `data.code.limit=5`. Values are YAML."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    option = f"--set {cut(path, VALUE)}"
    if not equals or not all(keys):
        raise ProfileInvalid(f"--set {shown(override)} is not KEY=VALUE", "for example: --set target.dtype=float32")
    try:
        value = UniqueKeyLoader(text).get_single_data()
    except BAD_YAML:
        raise ProfileInvalid(f"{option}: {shown(text)} is not a YAML value", "quote it for YAML and for the shell") from None
    if keys == ["costs", "source"]:
        costs = tree.get("costs")
        before = costs.get("source", "auto") if isinstance(costs, dict) else "auto"
        if before != value and (before, value) != ("auto", "measured"):
            tree["costs"] = {}  # options of another source mean nothing to this one
    drafts = tree.get("drafts")
    unknown = isinstance(drafts, dict) and keys[0] == "drafts" and len(keys) > 1 and keys[1] not in drafts
    if unknown and keys[2:] != ["kind"] and (near := difflib.get_close_matches(keys[1], map(str, drafts or ()), n=1)):
        raise ProfileInvalid(f"{option}: there is no draft {shown(keys[1])}", f"did you mean drafts.{near[0]}?")
    node: Any = tree
    for depth, key in enumerate(keys):
        place = cut(".".join(keys[: depth + 1]), VALUE)
        index: Any = _element(node, key, place) if isinstance(node, list) else key
        if depth == len(keys) - 1:
            node[index] = value
            return
        inner = node[index] if isinstance(node, list) else node.get(index)
        # A copy, since YAML anchors let two places share a group. A plain value that is given options is refused as a group.
        node[index] = copy.copy(inner) if isinstance(inner, (dict, list)) else {}
        node = node[index]


def _source_first(overrides: list[str]) -> list[str]:
    """Return the overrides, with the source of step times before its options."""
    return sorted(overrides, key=lambda override: not override.replace(" ", "").startswith("costs.source="))


def _element(items: list[Any], key: str, place: str) -> int:
    """Return the index of a list element, given its index or, for a source, its domain."""
    domains = [item.get("domain") if isinstance(item, dict) else None for item in items]
    for names in ([str(index) for index in range(len(items))], domains):
        if names.count(key) == 1:
            return names.index(key)
    hint = f"use an index from 0 to {len(items) - 1}" if items else "set the whole list; it is empty"
    if known := cut(", ".join(dict.fromkeys(domain for domain in domains if isinstance(domain, str)))):
        hint += f", or a domain that only one source has ({known})"
    raise ProfileInvalid(f"--set {place}: {shown(key)} does not name exactly one of {len(items)} list elements", hint)


def validate(tree: dict[str, Any], origin: str, context: str | None = None) -> ProfileOptions:
    """Return `ProfileOptions` from plain data. Raises `ProfileInvalid` with the first problem and a suggestion. `context`:
    STORED, or None.
    """
    try:
        return ProfileOptions.model_validate(tree, context=context)
    except ValidationError as error:
        raise _invalid(error, tree, origin) from None


def _invalid(error: ValidationError, tree: dict[str, Any], origin: str) -> ProfileInvalid:
    """Return the error that names every problem, with advice on the first; an unknown key comes first, since it often
    explains the others.
    """
    problems: dict[str, ErrorDetails] = {}
    for problem in sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != UNKNOWN_KEY):
        problems.setdefault(_place(problem, tree) or WHOLE, problem)
    # Pydantic reports every branch of a union; a problem deeper inside shows that an outer branch was not meant.
    places = [place for place in problems if not any(other.startswith(f"{place}.") for other in problems)]
    named = [_problem(problems[place], place) for place in places[:MOST_NAMED]]
    more = f"; and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    count = f"{len(places)} problems: " if len(places) > 1 else ""
    return ProfileInvalid(f"{origin}: {count}{'; '.join(named)}{more}", _advice(problems[places[0]], places[0], origin))


def _problem(error: Any, place: str) -> str:
    """Return a problem in our words, behind its place."""
    if error["type"] == UNKNOWN_KEY:
        return f"unknown key {cut(place, VALUE)}"
    context = {
        name: f"{value:g}" if isinstance(value, float) else str(value).replace("'", "")
        for name, value in error.get("ctx", {}).items()
    }
    words = WORDS.get(error["type"])
    text = words.format(given=shown(error["input"]), **context) if words else error["msg"].removeprefix("Value error, ")
    return text if place == WHOLE else f"{cut(place, VALUE)}: {text}"


def _place(problem: ErrorDetails, tree: Any) -> str:
    """Return where a problem is, by the keys of the file. Pydantic's location also holds tags of unions: the kind of a
    draft, a type. A tag follows its group, so the first `model` after a draft of this kind is a tag, the second one a key.
    """
    keys, node, tagged, location = [], tree, False, problem["loc"]
    for place, part in enumerate(location):
        if isinstance(node, dict) and not tagged and part in (node.get("kind"), node.get("source")):
            tagged = True
        elif (isinstance(node, list) and isinstance(part, int)) or (isinstance(node, dict) and part in node):
            node, tagged = node[part], False  # type: ignore[index]
            keys.append(str(part))
        elif problem["type"] == "missing" and place == len(location) - 1:
            keys.append(str(part))
    return ".".join([*keys, problem["ctx"]["key"]] if problem["type"] == UNKNOWN_KEY else keys)


def _advice(error: Any, place: str, origin: str) -> str:
    kind, given = error["type"], error["input"]
    if kind == UNKNOWN_KEY:
        return _advice_on_key(error["ctx"]["key"], error["ctx"]["hint"], place)
    if origin == SET and kind in ("missing", "union_tag_not_found"):
        return f"add --set {cut(place, VALUE)}=..."
    if kind == "missing":
        return "add this key; the files in profiles/ show a complete profile"
    if kind == "union_tag_not_found":
        choices = DRAFTS if place.startswith("drafts") else get_args(get_args(ContinuationOptions)[0])
        return f"add kind: {' or '.join(get_args(each.model_fields['kind'].annotation)[0] for each in choices)}"
    if kind == "union_tag_invalid":
        tag, known = error["ctx"]["tag"], error["ctx"]["expected_tags"].replace("'", "").split(", ")
        near = difflib.get_close_matches(OFTEN_CALLED.get(tag, tag), known, n=1)
        return f"did you mean {near[0]}?" if near else "use one of them"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        if isinstance(given, list) and place == "drafts":
            return "give each draft a name instead of -, for example small: {kind: model, model: NAME}"
        if isinstance(given, str) and place.startswith("drafts."):
            return f"write {{kind: model, model: {cut(given, VALUE)}}}"
        if isinstance(given, str) and place.endswith("continuation"):
            return f"write {{kind: {cut(given, VALUE)}}}"
        return "write a group of options: {key: value, ...}, or one key: value per line, indented"
    if kind == "list_type":
        return "begin each entry with -" if isinstance(given, dict) else f"write [{cut(str(given), VALUE)}]"
    if kind == "string_type" and isinstance(given, dict) and list(given.values()) == [None]:
        return f'quote it: "{{{cut(str(next(iter(given))), VALUE)}}}"'
    if kind == "string_type" and isinstance(given, bool):
        return "quote the word: YAML reads it as true or false"
    if kind == "string_type" and isinstance(given, (int, float, datetime.date)):
        return "quote it: YAML reads it as a number or a date"
    if kind == "int_type" and isinstance(given, str) and given.strip().isdigit():
        return "remove the quotes"
    if place == "target.dtype":
        return "use a dtype that this machine supports; set decision.served_dtype to the dtype that the engine serves"
    return "correct this value" if origin == SET else "correct the value in the profile, or override it with --set KEY=VALUE"


def _advice_on_key(key: str, hint: str, place: str) -> str:
    if ":" in key:
        return "write a space after the colon"
    groups: dict[str, type[Options]] = {
        "decision": DecisionOptions,
        "data.DOMAIN": SourceOptions,
        "execution": ExecutionOptions,
    }
    if inside := [name for name, group in groups.items() if place == key and key in group.model_fields]:
        return f"did you mean {inside[0]}.{key}?"
    return f"{key} needs kind: sampled" if key in Sampling.model_fields else hint
