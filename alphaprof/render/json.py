"""The JSON of every answer. `commands/schema.py` has the schemas that describe it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, ClassVar, Protocol

PREFIX = "alphaprof-"


class Published(Protocol):
    """A dataclass whose fields are a published JSON format. In `version`, MAJOR.MINOR, the first number rises where a field
    goes or changes its meaning, and the second where one comes.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    format: ClassVar[str]
    version: ClassVar[str]


def render_json(value: Published) -> str:
    """Return the fields as JSON, after the name and version of their format.

    Unknown values are null, an infinite bound is the string "inf". Raises `ValueError` for NaN, which no answer holds.
    """
    content = {"format": value.format, "schema_version": value.version} | plain_values(dataclasses.asdict(value))
    return json.dumps(content, indent=2, allow_nan=False)


def plain_values(value: Any) -> Any:
    """Return values as JSON can hold them: an infinite bound becomes the string "inf"."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
