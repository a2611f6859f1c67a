"""The sections of a report: a module each, found by its name and imported when it is asked for.

A section has `TITLE`; `compute(report)`, which returns its value, unless it draws nothing but answers; `draw(report)`, which
yields its blocks; and `EMPTY`, what is said if these are none. Its value is `report.section(name)`, and so it stands in the
JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, get_type_hints

from alphaprof.errors import OptionInvalid, shown

ALL = "all"
NAMES = (
    *("verdict", "drafts", "gammas", "rules", "spans", "causes", "load", "context", "requests", "target", "times"),
    *("wiring", "notes", "legend"),
)


def known_sections(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names as they are. Raises `OptionInvalid` for one that no section has."""
    for name in names:
        if name not in (*NAMES, ALL):
            raise OptionInvalid(f"--show: a report has no section {shown(name)}", f"choose from {', '.join(NAMES)}, {ALL}")
    return tuple(names)


def value_types() -> dict[str, Any]:
    """Return the type of the value of each section that has one, by name: what its `compute` says that it returns."""
    modules = {name: import_module(f"{__name__}.{name}") for name in NAMES}
    return {name: get_type_hints(module.compute)["return"] for name, module in modules.items() if hasattr(module, "compute")}
