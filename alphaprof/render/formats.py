"""The JSON that commands write with `--format json`: one published JSON Schema a format, shipped with the package."""

from __future__ import annotations

import re
from importlib.resources import files

from alphaprof.errors import OptionInvalid, shown

PREFIX = "alphaprof-"


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
        raise OptionInvalid(f"no JSON is called {shown(name)}", f"choose one of {', '.join(known)}, or leave --of out")
    return files("alphaprof.render").joinpath("schemas", known[name]).read_text(encoding="utf-8")
