"""What alphaprof finds on this machine: versions, devices, threads, room, the hub, compiled loops, extras; and its text."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.text import Text

from alphaprof.commands.doctor.facts import DeviceFacts, ExtraFacts
from alphaprof.profiling.models import hub
from alphaprof.report.format import data_size, number, visible
from alphaprof.version import EXTRAS, __version__, install_line, missing, package, requirements

PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "numba", "pydantic", "typer", "rich")
# What changes threads, devices, instructions, caches and the network; none of them holds a secret.
VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "NUMBA_CACHE_DIR", "HF_HUB_OFFLINE", "HF_HOME"),
)
LABEL = 10  # columns of what stands before a line


@dataclass(frozen=True)
class Doctor:
    """What was found; `~` stands for the user's home in every text. None: not known, or not there."""

    format: ClassVar[str] = "alphaprof-doctor"
    version: ClassVar[str] = "1.0"

    alphaprof: str  # its version
    location: str  # folder of the package
    python: str  # version
    platform: str  # operating system
    packages: dict[str, str | None]  # version by name
    processor: str | None  # model of the CPU
    cores: int | None  # of the machine
    usable: int | None  # that this process may run on
    cpu_limit: float | None  # cores' worth of time that the control group allows
    torch_threads: int | None  # of torch
    torch_problem: str | None  # why torch cannot be used
    devices: tuple[DeviceFacts, ...]  # with their speed
    variables: dict[str, str]  # of the environment, those that matter here
    memory_free: int | None  # bytes of the machine that are available
    memory_limit: int | None  # bytes that the control group allows
    disk_free: int | None  # bytes in the working directory
    hub_cache: str | None  # where models of the hub are kept
    hub_cache_free: int | None  # bytes there
    hub_cache_writable: bool | None  # whether models can be downloaded to it
    hub: str  # whether the hub answers, in words
    loops: str  # whether loops can be compiled and where they are kept, in words
    extras: tuple[ExtraFacts, ...]  # what is missing for which

    def terminal(self, console: Console) -> None:
        """Prints plain lines, which are not cut: they are pasted into a bug report."""
        for label, text in _lines(self):
            console.print(Text(f"{label:{LABEL}}{visible(text)}"), soft_wrap=True)


def build_doctor() -> Doctor:
    """Looks at this machine. What cannot be found out is None; only a bug raises."""
    devices: tuple[DeviceFacts, ...] = ()
    torch_threads = None
    problem: str | None = "torch is not installed: models cannot run here; reports can"
    if find_spec("torch") is not None:
        try:
            from alphaprof.commands.doctor import measure

            devices, torch_threads, problem = measure.devices(), measure.threads(), None
        except Exception as error:  # a broken installation, a driver that does not fit: that is what is looked for
            problem = _without_home(f"torch cannot be used: {hub.first_line(error)}")
    cache = _hub_cache()
    return Doctor(
        alphaprof=__version__,
        location=_without_home(str(Path(__file__).parents[2])),
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in _package_names()},
        processor=_processor(),
        cores=os.cpu_count(),
        usable=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        cpu_limit=_cpu_limit(),
        torch_threads=torch_threads,
        torch_problem=problem,
        devices=devices,
        variables={name: _without_home(os.environ[name]) for name in VARIABLES if name in os.environ},
        memory_free=_memory_free(),
        memory_limit=_number(Path("/sys/fs/cgroup/memory.max")),
        disk_free=_disk_free(Path()),
        hub_cache=None if cache is None else _without_home(str(cache)),
        hub_cache_free=None if cache is None else _disk_free(cache),
        hub_cache_writable=None if cache is None else _is_writable(cache),
        hub=_without_home(_hub()),
        loops=_without_home(_loops()),
        extras=tuple(_extra(name) for name in EXTRAS),
    )


def _lines(doctor: Doctor) -> Iterator[tuple[str, str]]:
    """Yields a label and a text for each line."""
    yield "alphaprof", f"{doctor.alphaprof} in {doctor.location}"
    yield "python", f"{doctor.python}, {doctor.platform}"
    yield "packages", ", ".join(f"{name} {found}" for name, found in doctor.packages.items() if found is not None)
    if absent := [name for name, found in doctor.packages.items() if found is None]:
        yield "", f"not installed: {', '.join(absent)}"
    limit = "" if doctor.cpu_limit is None else f"; the control group allows the time of {number(doctor.cpu_limit, 1)}"
    usable = "" if doctor.usable is None else f", {doctor.usable} of them for this process"
    yield "cpu", f"{doctor.processor or 'unknown'}, {doctor.cores} cores{usable}{limit}"
    threads = "" if doctor.torch_threads is None else f"torch computes with {doctor.torch_threads}"
    variables = ", ".join(f"{name}={value}" for name, value in doctor.variables.items())
    yield "threads", "; ".join(filter(None, [threads, variables])) or "not known"
    if doctor.torch_problem is not None:
        yield "speed", doctor.torch_problem
    for device in doctor.devices:
        rates = ", ".join(f"{name} {number(rate, 0 if rate >= 10 else 1)}" for name, rate in device.gflops.items())
        free = "" if device.free is None else f" ({data_size(device.free)} free)"
        alone = " by one thread" if device.device == "cpu" else ""
        yield "speed", f"{device.device}{free}: {rates} GFLOP/s in a matrix product{alone}; {_auto(device)}"
    allowed = "" if doctor.memory_limit is None else f"; the control group allows {data_size(doctor.memory_limit)}"
    yield "memory", f"{_size(doctor.memory_free)} available{allowed}"
    yield "disk", f"{_size(doctor.disk_free)} free in the working directory"
    if doctor.hub_cache is not None:
        access = "" if doctor.hub_cache_writable else ", which cannot be written: set HF_HOME to another folder"
        yield "", f"{_size(doctor.hub_cache_free)} free in {doctor.hub_cache}{access}"
    yield "hub", doctor.hub
    yield "loops", doctor.loops
    for extra in doctor.extras:
        state = "complete" if extra.install is None else f"{', '.join(extra.missing)} missing: {extra.install}"
        yield "extra", f"{extra.extra}: {state}"


def _auto(device: DeviceFacts) -> str:
    others = [stored for stored, chosen in device.auto.items() if chosen != stored]
    kept = [stored for stored, chosen in device.auto.items() if chosen == stored]
    told = f"dtype auto keeps {' and '.join(kept)}"
    return told + (f", and measures {' and '.join(others)} in float32" if others else "")


def _size(size: int | None) -> str:
    return "unknown" if size is None else data_size(size)


def _package_names() -> list[str]:
    return list(dict.fromkeys([*PACKAGES, *(package(each) for extra in EXTRAS for each in requirements(extra)), "triton"]))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _extra(name: str) -> ExtraFacts:
    lacking = tuple(missing(name))
    return ExtraFacts(name, lacking, install_line(name) if lacking else None)


def _processor() -> str | None:
    """The model of the CPU as Linux names it."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def _cpu_limit() -> float | None:
    """The cores' worth of time that the control group (version 2) of this process allows."""
    quota, _, period = _text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() and int(period) else None


def _memory_free() -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """The content of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _existing(path: Path) -> Path:
    return next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which may have to be made itself."""
    place = _existing(folder)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _disk_free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(path)).free
    except OSError:
        return None


def _without_home(text: str) -> str:
    """A text with `~` for the user's home, which has their name: what is printed here is made public."""
    home = os.path.expanduser("~")
    for place in {home, os.path.realpath(home)} - {"~", "/"}:
        text = re.sub(rf"(?<![\w.-]){re.escape(place.rstrip('/'))}(?![\w.-])", "~", text)
    return text


def _hub_cache() -> Path | None:
    """Where models of the hub are kept; None where huggingface_hub is not there or broken, as `_hub` says."""
    with contextlib.suppress(Exception):
        return hub.cache_folder()
    return None


def _hub() -> str:
    """Whether the hub answers. An address is shown without a user's name and password."""
    if find_spec("huggingface_hub") is None:
        return "huggingface_hub is not installed: local models only"
    try:
        endpoint = hub.endpoint()
    except Exception as error:  # a broken installation
        return f"huggingface_hub cannot be used: {hub.first_line(error)}"
    if hub.is_offline():
        return "not asked, since HF_HUB_OFFLINE is set: local and downloaded models only"
    address = urlsplit(endpoint)
    where = f"{address.scheme}://{address.netloc.rpartition('@')[2]}"
    if hub.hub_answers():
        return f"{where} answers"
    return f"{where} does not answer: local and downloaded models only"


def _loops() -> str:
    """Whether loops are compiled here, tried with one that replays rounds, and where they are kept."""
    try:
        from alphaprof.stats.compiled import loops_folder
        from alphaprof.totals.replay_loops import one_round

        one = np.array([1])
        one_round((one, one, one), 0, 1, 1, False)
    except Exception as error:  # numba and LLVM fail in ways of their own on processors and systems they do not know
        return f"cannot be compiled: {hub.first_line(error)}"
    folder = loops_folder()
    if folder is None:
        return "compiled anew by every process, since the cache folder cannot be written: set NUMBA_CACHE_DIR"
    return f"compiled; {len(list(folder.rglob('*.nbi')))} are kept in {folder}"
