#!/usr/bin/env python3
"""JSON Schemas (draft 2020-12) of what the commands write with `--format json`, from the dataclasses that they write.

A field's description is the comment behind it, what the class's docstring says of it, or the glossary below: a new field
needs no edit here, as long as one of them tells what it is. make_reference.py writes the files; a test holds that they are
up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import json
import re
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

import pyarrow as pa

from alphaprof.commands.check import Check
from alphaprof.commands.compare import Comparison
from alphaprof.commands.doctor import Doctor
from alphaprof.commands.dry_run import DryRun
from alphaprof.commands.importing.counters import Counters
from alphaprof.commands.latency import Latency
from alphaprof.commands.predict import Prediction
from alphaprof.commands.trees import TreesReport
from alphaprof.commands.validate.validation import Validation
from alphaprof.render.json import Published
from alphaprof.report.build import Report
from alphaprof.run.schema import LATENCY_COLUMNS, Column

FOLDER = Path(__file__).parent.parent / "alphaprof" / "render" / "schemas"
ANSWERS: tuple[type[Published], ...] = (
    *(Report, Check, Comparison, TreesReport, Prediction, Validation, Latency, DryRun),
    *(Counters, Doctor),
)
NUMBER = {"$ref": "#/$defs/Number"}
NUMBER_DEFINITION = {
    "description": 'A number; an infinite one is the string "inf" or "-inf".',
    "anyOf": [{"type": "number"}, {"enum": ["inf", "-inf"]}],
}
PLAIN: dict[Any, Any] = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
GLOSSARY = {  # what a name means wherever it stands; CLASS.NAME goes first
    "alphaprof": "version of alphaprof that wrote this",
    "clusters": "independent units of the intervals: documents, those of one cluster or with equal prompts as one",
    "complete": "false: the run was interrupted, and these are its first documents",
    "confidence": "of every interval that says nothing else",
    "continuation": "kind of text: greedy, sampled, given or text",
    "created": "when the run began, ISO 8601",
    "device": "that the target ran on",
    "documents": "number of documents",
    "documents_needed": "independent documents of a new run that would settle it with an even chance; None: none would",
    "domain": "name of the domain, as the data has it",
    "draft": "name of the draft, as the profile has it",
    "drafts": "names of the drafts",
    "dtype": "of the target",
    "engine": "whose step times these are",
    "estimator": "exact, expected or one-step",
    "gamma": "drafted tokens per round; engines: num_speculative_tokens",
    "high": "upper end of the interval",
    "lossy": "whether the rule changes the text itself",
    "low": "lower end of the interval",
    "name": "what it is called elsewhere in this file",
    "on_policy": "the rule's own decoding would emit this text",
    "path": "directory of the run",
    "positions": "number of positions",
    "reason": "why, in words",
    "remedy": "what to do about it",
    "rounds": "number of rounds",
    "rule": "id of the acceptance rule",
    "run": "the run",
    "sampling": "settings that p and q were processed with; None: the plain softmax",
    "speedup": "of decoding: time without the draft / with it",
    "skipped": "documents left out, by reason",
    "target": "the target as the profile names it: hub id, directory or file",
    "texts": "one for each domain and kind of text",
    "truncated": "texts or prompts that were cut, by which of them and why",
    "value": "the point estimate",
    "verdict": "GO, NO-GO or UNDECIDED",
    "notes": "what to know before believing the numbers",
    "weights": "shares of output tokens by domain",
    "weights_observed": "true: the weights are the shares that the run has, none were given",
}


def pages() -> Iterable[tuple[Path, str]]:
    """All schemas with their paths."""
    for answer in ANSWERS:
        yield FOLDER / f"{answer.format}-{answer.version.split('.')[0]}.json", json.dumps(schema_of(answer), indent=1) + "\n"


def schema_of(answer: type[Published]) -> dict[str, Any]:
    """The schema of one format."""
    definitions: dict[str, Any] = {"Number": NUMBER_DEFINITION}
    root = of_dataclass(answer, definitions)
    given = {
        "format": {"const": answer.format, "description": "name of the format"},
        "schema_version": {
            "const": answer.version,
            "description": "of the format, MAJOR.MINOR: the first number rises where a field goes or changes its meaning",
        },
    }
    root["properties"] = given | root["properties"] | extras(answer)
    root["required"] = list(root["properties"])
    name = f"{answer.format}, version {answer.version}"
    heading = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name}
    return heading | root | {"$defs": dict(sorted(definitions.items()))}


def extras(answer: type[Published]) -> dict[str, Any]:
    """What a format holds that is no plain field of its dataclass."""
    if answer is Latency:
        rows = closed({column.name: of_column(column) for column in LATENCY_COLUMNS})
        return {"steps": {"type": "array", "items": rows, "description": comments(Latency)["steps"]}}
    return {}


def of_dataclass(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """An object with exactly the fields of a dataclass; dataclasses within it go into the definitions."""
    hints = typing.get_type_hints(kind, localns=typing_names(inspect.getmodule(kind)))
    said = comments(kind)
    fields = {
        field.name: of_type(hints[field.name], definitions)
        | ({"description": said[field.name]} if field.name in said else {})
        for field in dataclasses.fields(kind)
    }
    return {"description": in_json(inspect.getdoc(kind) or "")} | closed(fields)


def closed(fields: dict[str, Any]) -> dict[str, Any]:
    """An object that has all of these fields and no other."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def of_type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """A type as `plain_values` writes it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint is float:
        return dict(NUMBER)
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if dataclasses.is_dataclass(hint):
        return reference(typing.cast(type, hint), definitions)
    if origin in (Union, types.UnionType):
        return either([of_type(item, definitions) for item in arguments])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (dict, Mapping):
        keys = {"propertyNames": {"pattern": "^[0-9]+$"}} if arguments[0] is int else {}
        return {"type": "object", "additionalProperties": of_type(arguments[1], definitions)} | keys
    if origin in (tuple, list):
        return of_sequence(arguments, definitions)
    raise TypeError(f"no JSON is known for {hint}")


def of_sequence(arguments: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    """A tuple: of any length, or of so many items."""
    if len(arguments) == 1 or arguments[1:] == (...,):
        return {"type": "array", "items": of_type(arguments[0], definitions)}
    items = [of_type(item, definitions) for item in arguments]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def either(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One of several schemas; plain types as a list of types."""
    if all(list(choice) == ["type"] for choice in choices):
        return {"type": [choice["type"] for choice in choices]}
    return {"anyOf": choices}


def reference(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to a dataclass among the definitions, by its name: no two classes of the product share one."""
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # a class may hold itself
        definitions[kind.__name__] |= of_dataclass(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def of_column(column: Column) -> dict[str, Any]:
    """A column of a table as a field."""
    several = pa.types.is_list(column.type)
    value = column.type.value_type if several else column.type
    whole, real = pa.types.is_integer(value), pa.types.is_floating(value)
    kind = "integer" if whole else "number" if real else "string"
    limits = {"minimum": column.low} if column.low is not None else {}
    if several:
        limits, kind = {"items": {"type": kind} | limits}, "array"
    return {"type": [kind, "null"] if column.nullable else kind, "description": column.doc} | limits


@cache
def comments(kind: type) -> dict[str, str]:
    """What is said about each field: behind it, in the docstring of its class, or in the glossary."""
    mentioned: dict[str, str] = {}
    behind: dict[str, str] = {}
    for owner in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):  # fields are inherited
        source = inspect.getsource(typing.cast(types.ModuleType, inspect.getmodule(owner)))
        mentioned |= dict(mentions(inspect.getdoc(owner) or ""))
        behind |= dict(trailing(source, owner.__name__))
    found = {}
    for field in dataclasses.fields(kind):
        names = (f"{kind.__name__}.{field.name}", field.name)
        texts = (behind.get(field.name), mentioned.get(field.name), *(GLOSSARY.get(name) for name in names))
        if text := next((text for text in texts if text), None):
            found[field.name] = in_json(text)
    return found


def trailing(source: str, name: str) -> Iterator[tuple[str, str]]:
    """Fields of a class with the comment behind them, which may stand on any line of the field."""
    said = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    for field in (item for node in classes for item in node.body if isinstance(item, ast.AnnAssign)):
        lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
        if text := " ".join(said[line] for line in lines if line in said):
            yield ast.unparse(field.target), text


def mentions(docstring: str) -> Iterator[tuple[str, str]]:
    """Fields that a docstring explains: `name`: text, `name` is text, or `name`, `other[d-1]`: text; to the next stop."""
    flat = " ".join(docstring.split())
    starts = list(re.finditer(r"((?:`\w+(?:\[[^`]*\])?`(?:, | and )?)+)(?:: | is | lists )", flat))
    ends = [item.start() for item in starts[1:]] + [len(flat)]
    for start, end in zip(starts, ends, strict=bool(starts)):
        text = re.split(r"\. (?=[A-Z`])", flat[start.end() : end])[0].rstrip(" .;,")
        for name in re.findall(r"`(\w+)", start.group(1)):
            yield name, text


def in_json(text: str) -> str:
    """A text about Python values, on JSON ones."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split()))


def typing_names(module: Any) -> dict[str, Any]:
    """What a module imports for its annotations alone."""
    blocks = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    imported = [
        item
        for block in blocks
        if ast.unparse(block.test) == "TYPE_CHECKING"
        for item in block.body
        if isinstance(item, ast.ImportFrom)
    ]
    return {
        alias.asname or alias.name: getattr(importlib.import_module(item.module or ""), alias.name)
        for item in imported
        for alias in item.names
    }


def undescribed() -> list[str]:
    """Fields that say nothing about themselves."""
    silent = []
    for answer in ANSWERS:
        schema = schema_of(answer)
        for name, part in {answer.__name__: schema, **schema["$defs"]}.items():
            fields = part.get("properties", {}).items()
            silent += [f"{name}.{field}" for field, value in fields if "description" not in value]
    return sorted(set(silent))
