"""The JSON rendering of a report, and the published JSON Schemas of all answers."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from importlib.resources import files
from typing import Any

from alphaprof.errors import OptionInvalid, shown
from alphaprof.report.model import Report

FORMAT = "alphaprof-report"
VERSION = 1
PREFIX = "alphaprof-"


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


def published() -> dict[str, str]:
    """File names of the schemas by what they describe: report -> alphaprof-report-1.json; the latest version of each."""
    found: dict[str, tuple[int, str]] = {}
    for path in files("alphaprof.render").joinpath("schemas").iterdir():
        if named := re.fullmatch(rf"{PREFIX}(\w+)-(\d+)\.json", path.name):
            found[named[1]] = max(found.get(named[1], (0, "")), (int(named[2]), path.name))
    return {name: file for name, (_, file) in sorted(found.items())}


def json_schema(name: str) -> str:
    """The JSON Schema (draft 2020-12) of a format, as text. Raises `OptionInvalid` for a format that does not exist."""
    known = published()
    if name not in known:
        raise OptionInvalid(
            f"there is no JSON Schema called {shown(name)}", f"choose one of {', '.join(known)}, or leave --of out"
        )
    return files("alphaprof.render").joinpath("schemas", known[name]).read_text(encoding="utf-8")
