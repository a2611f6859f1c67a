"""Read a profile file and its overrides into `ProfileOptions`, with errors that name the key and suggest the next step."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from alphaprof.config import ProfileOptions
from alphaprof.errors import ProfileInvalid


class UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key that occurs twice, instead of dropping the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Like the base class, after a check for duplicates."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_profile(path: Path, overrides: list[str] | None = None, limit: int | None = None) -> ProfileOptions:
    """The validated profile in `path`, with `KEY=VALUE` overrides applied, a limit put on every source and paths resolved.

    Raises `ProfileInvalid` for a file that is missing or malformed, and for keys or values that do not exist.
    """
    tree = read_tree(path)
    for override in overrides or []:
        apply_override(tree, override)
    if limit is not None:
        for source in tree.get("data") or []:
            if isinstance(source, dict):
                source["limit"] = min(limit, source.get("limit") or limit)
    return validate(tree, str(path)).resolved(path.parent)


def read_tree(path: Path) -> dict[str, Any]:
    """The profile file as plain data. Raises `ProfileInvalid`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ProfileInvalid(f"cannot read the profile {path}: {reason}", "give the path of a YAML profile file") from None
    try:
        tree = UniqueKeyLoader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ProfileInvalid(f"{path}{where}: {problem}", "mend the YAML there; quote text that holds ': ' or '{'") from None
    if not isinstance(tree, dict):
        raise ProfileInvalid(f"{path} holds no profile", "start from a file in profiles/: it needs target, drafts and data")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value in place: `target.dtype=float32`, `data.0.limit=5`, `data.code.limit=5`. Values are YAML."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ProfileInvalid(f"--set {override!r} is not KEY=VALUE", "write for example --set target.dtype=float32")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ProfileInvalid(f"--set {path}: {text!r} is not a YAML value", "quote it for YAML and for the shell") from None
    node: Any = tree
    for depth, key in enumerate(keys):
        place = ".".join(keys[: depth + 1])
        last = depth == len(keys) - 1
        if isinstance(node, list):
            index: Any = _element(node, key, place)
        elif isinstance(node, dict):
            index = key
        else:
            raise ProfileInvalid(f"--set {path}: {place} lies below a plain value", "name an option of the profile")
        if last:
            node[index] = value
        elif isinstance(node, dict):
            node = node.setdefault(index, {})
        else:
            node = node[index]


def _element(items: list[Any], key: str, place: str) -> int:
    """The index of a list element that is named by its index or, for a source, by its domain."""
    if key.isdigit() and int(key) < len(items):
        return int(key)
    domains = [item.get("domain") if isinstance(item, dict) else None for item in items]
    if domains.count(key) == 1:
        return domains.index(key)
    known = ", ".join(dict.fromkeys(str(domain) for domain in domains if isinstance(domain, str)))
    raise ProfileInvalid(
        f"--set {place}: no single element {key!r} in a list of {len(items)}",
        f"use an index from 0 to {len(items) - 1}" + (f" or a domain that one source has ({known})" if known else ""),
    )


def validate(tree: dict[str, Any], origin: str) -> ProfileOptions:
    """`ProfileOptions` from plain data; raises `ProfileInvalid` with the first problem and a suggestion."""
    try:
        return ProfileOptions.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        place = ".".join(str(part) for part in first["loc"]) or "profile"
        if first["type"] == "extra_forbidden":
            raise ProfileInvalid(f"{origin}: unknown key {place}{more}", _suggestion(first["loc"])) from None
        problem = first["msg"].removeprefix("Value error, ")
        raise ProfileInvalid(f"{origin}: {place}: {problem}{more}", _advice(first)) from None


def _advice(error: Any) -> str:
    if error["type"] == "missing":
        return "add this key; the files in profiles/ show a complete profile"
    if isinstance(error["input"], bool) and error["type"] == "string_type":
        return "YAML reads on, off, yes and no as true and false: quote the word"
    return "correct the value in the profile, or override it with --set KEY=VALUE"


def _suggestion(location: tuple[str | int, ...]) -> str:
    """A hint for an unknown key: the nearest option of the group that it stands in."""
    key, groups = str(location[-1]), _groups_at(location)
    names = sorted({name for group in groups for name in group.model_fields})
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"remove it; known here: {', '.join(names)}"


def _groups_at(location: tuple[str | int, ...]) -> set[type[BaseModel]]:
    """The option groups that pydantic's error location may mean; it mixes keys, indices and tags of unions."""
    groups: set[type[BaseModel]] = {ProfileOptions}
    for part in location[:-1]:
        fields = [group.model_fields[str(part)] for group in groups if str(part) in group.model_fields]
        inner = {group for field in fields for group in _groups_in(field.annotation)}
        tagged = {group for group in groups if part in _tags(group)}
        groups = inner or tagged or groups
    return groups


def _groups_in(annotation: Any) -> set[type[BaseModel]]:
    """All option groups inside an annotation, through lists, dicts, unions and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {group for argument in get_args(annotation) for group in _groups_in(argument)}


def _tags(group: type[BaseModel]) -> tuple[Any, ...]:
    kind = group.model_fields.get("kind")
    return (group.__name__, *(get_args(kind.annotation) if kind else ()))
