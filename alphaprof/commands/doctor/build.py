"""What a bug report needs to know of this machine: versions, devices and extras. More: python -m torch.utils.collect_env."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

from rich.console import Console
from rich.text import Text

from alphaprof.commands.doctor.facts import DeviceFacts, ExtraFacts
from alphaprof.report.format import data_size, many, number, visible
from alphaprof.version import EXTRAS, __version__, install_line, missing, requirements

PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "numba", "pydantic", "typer", "rich")
LABEL = 10  # columns of what stands before a line


@dataclass(frozen=True)
class Doctor:
    """What was found. None: not there."""

    format: ClassVar[str] = "alphaprof-doctor"
    version: ClassVar[str] = "1.0"

    alphaprof: str  # its version
    python: str  # version
    platform: str  # operating system
    packages: dict[str, str | None]  # version by name
    torch_threads: int | None  # of torch
    torch_problem: str | None  # why torch cannot be used
    devices: tuple[DeviceFacts, ...]  # with their speed
    extras: tuple[ExtraFacts, ...]  # what is missing for which

    def terminal(self, console: Console) -> None:
        """Prints plain lines, which are not cut: they are pasted into a bug report."""
        for label, text in _lines(self):
            console.print(Text(f"{label:{LABEL}}{visible(text)}"), soft_wrap=True)


def build_doctor() -> Doctor:
    """Look at this machine. What cannot be found out is None; only a bug raises."""
    devices: tuple[DeviceFacts, ...] = ()
    torch_threads = None
    problem: str | None = "torch is not installed: models cannot run here; reports can"
    if find_spec("torch") is not None:
        try:
            from alphaprof.commands.doctor import measure

            devices, torch_threads, problem = measure.devices(), measure.threads(), None
        except Exception as error:  # a broken installation, a driver that does not fit: that is what is looked for
            problem = f"torch cannot be used: {next(iter(str(error).splitlines()), type(error).__name__)}"
    names = [*PACKAGES, *(each.name for extra in EXTRAS for each in requirements(extra)), "triton"]
    return Doctor(
        alphaprof=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in dict.fromkeys(names)},
        torch_threads=torch_threads,
        torch_problem=problem,
        devices=devices,
        extras=tuple(_extra(name) for name in EXTRAS),
    )


def _lines(doctor: Doctor) -> Iterator[tuple[str, str]]:
    """Yields a label and a text for each line."""
    yield "alphaprof", doctor.alphaprof
    yield "python", f"{doctor.python}, {doctor.platform}"
    yield "packages", ", ".join(f"{name} {found}" for name, found in doctor.packages.items() if found is not None)
    if absent := [name for name, found in doctor.packages.items() if found is None]:
        yield "", f"not installed: {', '.join(absent)}"
    if doctor.torch_problem is not None:
        yield "speed", doctor.torch_problem
    for device in doctor.devices:
        rates = ", ".join(f"{name} {number(rate, 0 if rate >= 10 else 1)}" for name, rate in device.gflops.items())
        free = many(doctor.torch_threads or 1, "thread") if device.free is None else f"{data_size(device.free)} free"
        alone = " by one thread" if device.device == "cpu" else ""
        yield "speed", f"{device.device} ({free}): {rates} GFLOP/s in a matrix product{alone}; {_auto(device)}"
    for extra in doctor.extras:
        state = "complete" if extra.install is None else f"{', '.join(extra.missing)} missing: {extra.install}"
        yield "extra", f"{extra.extra}: {state}"


def _auto(device: DeviceFacts) -> str:
    others = [stored for stored, chosen in device.auto.items() if chosen != stored]
    kept = [stored for stored, chosen in device.auto.items() if chosen == stored]
    told = f"dtype auto keeps {' and '.join(kept)}"
    return told + (f", and measures {' and '.join(others)} in float32" if others else "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _extra(name: str) -> ExtraFacts:
    lacking = tuple(map(str, missing(name)))
    return ExtraFacts(name, lacking, install_line(name) if lacking else None)
