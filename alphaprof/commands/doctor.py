"""`alphaprof doctor`: versions, devices and what is missing, for a bug report. More: python -m torch.utils.collect_env."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import ClassVar

from alphaprof.render.blocks import Block
from alphaprof.version import EXTRAS, __version__, install_line, missing, requirements

PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "numba", "pydantic", "typer", "rich", "triton")
LABEL = 10  # columns of what stands before a line


@dataclass(frozen=True)
class Doctor:
    """What was found. `packages`: versions of those that are installed; `devices`: that models can run on, in words;
    `problem`: why models cannot run here; `extras`: lines that install what is missing of each (None: nothing).
    """

    format: ClassVar[str] = "alphaprof-doctor"
    version: ClassVar[str] = "2.0"

    alphaprof: str
    python: str
    platform: str
    packages: dict[str, str]
    devices: tuple[str, ...]
    problem: str | None
    extras: dict[str, str | None]

    def blocks(self) -> Iterator[Block]:
        """Yield lines to paste into a bug report."""
        packages = textwrap.wrap(" ".join(map("==".join, self.packages.items())), break_on_hyphens=False)
        lines = [("python", f"{self.python}, {self.platform}")]
        lines += zip(["packages", *[""] * len(packages)], packages, strict=False)
        lines += [("device", device) for device in self.devices]
        lines += [("problem", self.problem)] if self.problem else []
        lines += [("extra", f"{name}: {f'missing: {line}' if line else 'complete'}") for name, line in self.extras.items()]
        yield f"{'alphaprof':{LABEL}}{self.alphaprof}"
        yield from (f"{label:{LABEL}}{text}" for label, text in lines)


def build_doctor() -> Doctor:
    """Look at this machine. A broken torch is what is looked for, and no error."""
    names = dict.fromkeys([*PACKAGES, *(each.name for extra in EXTRAS for each in requirements(extra))])
    devices, problem = list[str](), "torch is not installed: models cannot run here, but reports can"
    if find_spec("torch") is not None:
        try:
            import torch

            devices, problem = [f"cpu, {torch.get_num_threads()} threads of torch"], ""
            devices += [str(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
        except Exception as error:  # a driver that does not fit, a library that is missing
            problem = f"torch cannot be used: {next(iter(str(error).splitlines()), type(error).__name__)}"
    found = {each.name.lower(): each.version for each in distributions()}
    packages = {name: found[name] for name in names if name in found}
    extras = {name: install_line(name) if missing(name) else None for name in EXTRAS}
    system = __version__, platform.python_version(), platform.platform()
    return Doctor(*system, packages, tuple(devices), problem or None, extras)
