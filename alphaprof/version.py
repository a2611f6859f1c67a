"""alphaprof as it is installed: its version, which packages an extra lacks, and the line that installs them."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as version_of
from pathlib import Path

__version__ = "0.1.0"
NAME = "alphaprof"
EXTRAS = ("profile", "gguf", "html", "multi-device", "remote", "cluster")  # for users; test and dev are for a checkout


def install_line(extra: str) -> str:
    """Returns the line that installs what is missing of an extra: the packages by name, wherever alphaprof came from.

    alphaprof[extra] would make pip look for alphaprof itself, which a checkout, a wheel or a git URL does not answer.
    """
    return " ".join(["pip install", *(f"'{each}'" for each in missing(extra) or requirements(extra))])


def missing(extra: str) -> list[str]:
    """Returns the requirements of an extra that are not installed, or in another version than it needs."""
    return [each for each in requirements(extra) if not _is_met(each)]


def requirements(extra: str) -> list[str]:
    """Returns the requirements of an extra as pip takes them, without alphaprof's own; bounds of a package are together."""
    found: dict[str, str] = {}
    for requirement in _declared().get(extra, []):
        own = re.fullmatch(rf"{NAME}\[([\w-]+)\]", requirement)
        for each in requirements(own[1]) if own else [requirement]:
            name = package(each)
            found[name] = found[name] + f",{each.removeprefix(name)}" if name in found else each
    return list(found.values())


def package(requirement: str) -> str:
    """Returns the name of the package that a requirement is about."""
    match = re.match(r"[\w.-]+", requirement)
    return match[0] if match else requirement


@cache
def _declared() -> dict[str, list[str]]:
    """The requirements by extra: of the installed package, or of a checkout that is not installed."""
    found: dict[str, list[str]] = {}
    try:
        lines = requires(NAME) or []
    except PackageNotFoundError:
        project = Path(__file__).parent.parent / "pyproject.toml"
        if not project.is_file():
            return {}
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        return {extra: list(map(str, lines)) for extra, lines in declared.items()}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if match := re.search(r"""extra == ['"]([\w-]+)['"]""", marker):
            found.setdefault(match[1], []).append(requirement.strip())
    return found


def _is_met(requirement: str) -> bool:
    try:
        installed = _numbers(version_of(package(requirement)))
    except PackageNotFoundError:
        return False
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", requirement)
    return all(installed >= _numbers(bound) if sign == ">=" else installed < _numbers(bound) for sign, bound in bounds)


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
