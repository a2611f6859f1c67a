"""The JSON rendering of a report: version 1 of its format."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from alphaprof.report.model import Report

FORMAT = "alphaprof-report"
VERSION = 1


def render_json(report: Report) -> str:
    """The report as JSON. Unknown values are null, an infinite bound is the string "inf", NaN cannot occur."""
    content = {"format": FORMAT, "version": VERSION} | plain_values(dataclasses.asdict(report))
    return json.dumps(content, indent=2, allow_nan=False)


def plain_values(value: Any) -> Any:
    """Values as JSON can hold them: an infinite bound becomes the string "inf"."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
