"""`alphaprof doctor`: versions, devices and extras, as text for a bug report. More: python -m torch.utils.collect_env."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from alphaprof.render.blocks import Block, Verbatim
from alphaprof.render.format import data_size, many, number
from alphaprof.version import EXTRAS, __version__, install_line, missing, requirements

if TYPE_CHECKING:
    import torch

PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "numba", "pydantic", "typer", "rich")
LABEL = 10  # columns of what stands before a line


@dataclass(frozen=True)
class DeviceFacts:
    """A device that models can run on."""

    device: str  # cpu, or a GPU by number and name
    free: int | None  # bytes of its own memory that are free; None: it uses the machine's
    gflops: dict[str, float]  # billions of operations a second in a matrix product, by dtype
    auto: dict[str, str]  # dtype that `dtype: auto` measures in, by that of the checkpoint


@dataclass(frozen=True)
class ExtraFacts:
    """An extra of alphaprof."""

    extra: str  # its name
    missing: tuple[str, ...]  # requirements that are not met
    install: str | None  # the line that installs them; None: nothing is missing


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

    def blocks(self) -> Iterator[Block]:
        """Yield lines that are not cut: they are pasted into a bug report."""
        first, *others = (f"{label:{LABEL}}{text}" for label, text in _facts_by_label(self))
        yield first
        yield Verbatim(others)


def build_doctor() -> Doctor:
    """Look at this machine. What cannot be found out is None; only a bug raises."""
    devices: tuple[DeviceFacts, ...] = ()
    threads = None
    problem: str | None = "torch is not installed: models cannot run here, but reports can"
    if find_spec("torch") is not None:
        try:
            devices, threads = _torch_facts()
            problem = None
        except Exception as error:  # a broken installation, a driver that does not fit: that is what is looked for
            problem = f"torch cannot be used: {next(iter(str(error).splitlines()), type(error).__name__)}"
    names = [*PACKAGES, *(each.name for extra in EXTRAS for each in requirements(extra)), "triton"]
    return Doctor(
        alphaprof=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _installed_version(name) for name in dict.fromkeys(names)},
        torch_threads=threads,
        torch_problem=problem,
        devices=devices,
        extras=tuple(_extra_facts(name) for name in EXTRAS),
    )


def _torch_facts() -> tuple[tuple[DeviceFacts, ...], int]:
    """Return the CPU and every GPU, each with its speed by dtype, and the number of threads that torch computes with."""
    import torch

    places = [torch.device("cpu")]
    if torch.cuda.is_available():
        places += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return tuple(map(_device_facts, places)), torch.get_num_threads()


def _device_facts(device: torch.device) -> DeviceFacts:
    import torch

    from alphaprof.profiling.models.dtype import DTYPES, is_fast, speeds

    rates = speeds(list(DTYPES.values()), device)
    auto = {name: name if name == "float32" or is_fast(name, device)[0] else "float32" for name in DTYPES}
    gflops = {name: round(rate / 1e9, 1) for name, rate in zip(DTYPES, rates, strict=True)}
    if device.type == "cpu":
        return DeviceFacts("cpu", None, gflops, auto)
    free, total = torch.cuda.mem_get_info(device)
    name = f"{device}: {torch.cuda.get_device_name(device)}, {total / 1e9:.0f} GB"
    return DeviceFacts(name, free, gflops, auto)


def _facts_by_label(doctor: Doctor) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each line."""
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
        yield "speed", f"{device.device} ({free}): {rates} GFLOP/s in a matrix product{alone}; {_auto_dtype(device)}"
    for extra in doctor.extras:
        state = "complete" if extra.install is None else f"{', '.join(extra.missing)} missing: {extra.install}"
        yield "extra", f"{extra.extra}: {state}"


def _auto_dtype(device: DeviceFacts) -> str:
    others = [stored for stored, chosen in device.auto.items() if chosen != stored]
    kept = [stored for stored, chosen in device.auto.items() if chosen == stored]
    text = f"dtype auto keeps {' and '.join(kept)}"
    return text + (f", and measures {' and '.join(others)} in float32" if others else "")


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _extra_facts(name: str) -> ExtraFacts:
    lacking = tuple(map(str, missing(name)))
    return ExtraFacts(name, lacking, install_line(name) if lacking else None)
