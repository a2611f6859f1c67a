"""alphaprof as it is installed: its version, which packages an extra lacks, and the line that installs them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__version__ = "0.3.0"
NAME = "alphaprof"
EXTRAS = ("profile", "gguf", "html", "multi-device", "peft", "ray")  # for users; test and dev are for a checkout


def install_line(extra: str) -> str:
    """Return the line that installs what is missing of an extra: the packages by name, wherever alphaprof came from.

    alphaprof[extra] would make pip look for alphaprof itself, which a checkout, a wheel or a git URL does not answer.
    """
    return " ".join(["pip install", *(f"'{each}'" for each in missing(extra) or requirements(extra))])


def missing(extra: str) -> list[Requirement]:
    """Return the requirements of an extra that are not installed, or in another version than it needs."""
    return [each for each in requirements(extra) if not _is_met(each)]


def requirements(extra: str) -> list[Requirement]:
    """Return the requirements of an extra without alphaprof's own; bounds of a package are together."""
    found: dict[str, Requirement] = {}
    for declared in _declared(extra):
        own = declared.name == NAME
        for each in [inner for name in declared.extras for inner in requirements(name)] if own else [declared]:
            if each.name in found:
                found[each.name].specifier &= each.specifier
            else:
                found[each.name] = each
    return list(found.values())


def _declared(extra: str) -> list[Requirement]:
    """Return the requirements of an extra: of the installed package, or of a checkout that is not installed."""
    from packaging.requirements import Requirement

    try:
        every = [Requirement(line) for line in requires(NAME) or []]
    except PackageNotFoundError:
        import tomllib  # which only this needs

        project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
        return [Requirement(line) for line in tomllib.loads(project)["project"]["optional-dependencies"][extra]]
    found = [each for each in every if each.marker is not None and each.marker.evaluate({"extra": extra})]
    for each in found:
        each.marker = None  # pip takes it without
    return found


def _is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version_of(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False
