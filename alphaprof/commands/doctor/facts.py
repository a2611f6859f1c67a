"""What is known of a device, and of an extra."""

from __future__ import annotations

from dataclasses import dataclass


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
