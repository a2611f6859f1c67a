"""What torch says of its devices, and how fast they multiply."""

from __future__ import annotations

import torch

from alphaprof.commands.doctor.facts import DeviceFacts
from alphaprof.profiling.models.dtype import DTYPES, is_fast, speeds


def devices() -> tuple[DeviceFacts, ...]:
    """Returns the CPU and every GPU, with its speed in each dtype."""
    places = [torch.device("cpu")]
    if torch.cuda.is_available():
        places += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return tuple(_facts(place) for place in places)


def threads() -> int:
    """Returns the number of threads that torch computes with."""
    return torch.get_num_threads()


def _facts(device: torch.device) -> DeviceFacts:
    rates = speeds(list(DTYPES.values()), device)
    auto = {name: name if name == "float32" or is_fast(name, device)[0] else "float32" for name in DTYPES}
    gflops = {name: round(rate / 1e9, 1) for name, rate in zip(DTYPES, rates, strict=True)}
    if device.type == "cpu":
        return DeviceFacts("cpu", None, gflops, auto)
    free, total = torch.cuda.mem_get_info(device)
    name = f"{device}: {torch.cuda.get_device_name(device)}, {total / 1e9:.0f} GB"
    return DeviceFacts(name, free, gflops, auto)
