"""`alphaprof schema`: the columns of the position log, and JSON Schemas, from the dataclasses that are written."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from typing import Any

from pydantic import TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from alphaprof.errors import OptionInvalid, shown
from alphaprof.report.build import Failed
from alphaprof.report.sections import value_types
from alphaprof.run.schema import HEAD_COLUMNS, LogRules

PUBLISHED = {  # the class of each answer whose JSON others may rely on
    "report": "alphaprof.report.build:Report",
    "check": "alphaprof.commands.check:Check",
    "compare": "alphaprof.commands.compare.comparison:Comparison",
    "validate": "alphaprof.commands.validate.validation:Validation",
    "diagnose": "alphaprof.commands.diagnose:Diagnosis",
    "predict": "alphaprof.commands.predict:Prediction",
    "rates": "alphaprof.commands.export.rates:Rates",
}
COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)


class AnswerSchema(GenerateJsonSchema):
    """The schema of dataclasses as `render.json` writes them: every field is there, an infinite number is a string, and a
    field's description is the comment behind it.
    """

    def field_is_required(self, *_: Any, **__: Any) -> bool:
        """Return whether a field has to be there: all are written, those with a default too."""
        return True

    def field_title_should_be_set(self, *_: Any) -> bool:
        """Return whether a field has a title: none says more than the name."""
        return False

    def float_schema(self, _: core_schema.FloatSchema) -> JsonSchemaValue:
        """Return the schema of a number."""
        return {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf"]}]}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        """Return the schema of a dataclass, with descriptions."""
        content = super().dataclass_schema(schema)
        for owner in filter(dataclasses.is_dataclass, reversed(schema["cls"].__mro__)):
            for name, text in COMMENT.findall(inspect.getsource(owner)):
                if name in content["properties"]:
                    content["properties"][name]["description"] = re.sub(r"\bNone\b", "null", text)
        return content


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an answer. Raises `OptionInvalid` for an unknown one."""
    if name not in PUBLISHED:
        raise OptionInvalid(f"no schema is published for {shown(name)}", f"choose one of {', '.join(PUBLISHED)}")
    module, _, answer = PUBLISHED[name].partition(":")
    kind = getattr(importlib.import_module(module), answer)
    schema = TypeAdapter(kind).json_schema(schema_generator=AnswerSchema)
    if name == "report":  # the values of its sections are declared in their modules
        values: dict[str, Any] = {section: (value | Failed, ...) for section, value in value_types().items()}
        sections = TypeAdapter(create_model("Sections", **values)).json_schema(schema_generator=AnswerSchema)
        schema["$defs"] |= sections.pop("$defs")
        sections["required"] = []  # those that were asked for are there
        schema["properties"]["sections"] |= sections | {"additionalProperties": False}
    properties = {"format": {"const": kind.format}, "schema_version": {"const": kind.version}} | schema["properties"]
    return {"$schema": AnswerSchema.schema_dialect} | schema | {"properties": properties, "required": list(properties)}


def schema_text(name: str | None) -> str:
    """Return the schema of an answer as text; None: the columns of the position log with type, unit and meaning. Raises
    `OptionInvalid`.
    """
    if name is not None:
        return json.dumps(json_schema(name), indent=1) + "\n"
    lines, beside = [], "additional columns of a draft head, per depth and per rule that samples drafts (here: depth 2):"
    for heading, columns in (("", LogRules(("RULE",), ("RULE",)).columns), (beside, HEAD_COLUMNS)):
        lines += ["", heading] if heading else []
        for column in columns:
            unit = f" [{column.unit}]" if column.unit else ""
            lines.append(f"{column.name:26} {column.type_name}{unit}\n    {column.doc}")
    return "\n".join(lines) + "\n"
