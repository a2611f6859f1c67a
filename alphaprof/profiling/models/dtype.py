"""The dtype that a target is measured in where its profile says auto, and how fast a device multiplies in a dtype."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from alphaprof.config.model_files import ModelFiles, stored_dtype
from alphaprof.config.options import ModelOptions
from alphaprof.profiling.models.hub import files_in, is_local

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKED = "bfloat16"  # what weights of 8 bits and fewer are dequantised to: 16 bits hold them
# Rows, inputs and outputs of the product that is timed: large enough for the matrix instructions of a processor, and a few
# milliseconds where it has none for a dtype.
ROWS, WIDTH = 32, 1024
ON_GPU = 2048  # rows and widths there
FASTER = 1.2  # times the speed of float32 from which a CPU is faster in a dtype: see `cpu_ratio`
LEAST, PATIENCE = 3, 0.2  # products of each dtype that are timed at least, and seconds after which no more are


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that `auto` stands for."""

    chosen: str
    stored: str | None  # of the checkpoint; None: its files do not say
    reason: str  # why it was chosen


def choose_dtype(options: ModelOptions, device: torch.device, files: ModelFiles | None = None) -> DtypeChoice:
    """Return the checkpoint's own dtype where the device is made for it or multiplies faster in it than in float32, else
    float32. `files`: of the checkpoint, if they are read already.
    """
    stored, origin = _stored(options, files or files_in(options))
    if stored not in ("bfloat16", "float16"):
        return DtypeChoice("float32", stored, f"float32: {origin}")
    fast, speed = is_fast(stored, device)
    chosen = stored if fast else "float32"
    return DtypeChoice(chosen, stored, f"{chosen}: {origin}, {speed}")


def _stored(options: ModelOptions, files: ModelFiles | None) -> tuple[str | None, str]:
    """Return the dtype of a checkpoint by its files, and where that comes from in words."""
    if files is None:  # the reader of GGUF files takes seconds for a vocabulary
        return PACKED, f"a .gguf file's weights are unpacked to {PACKED}"
    stored = files.declared_dtype
    if stored is None and (path := _weights(options, files)).is_file():
        stored = stored_dtype(path)
    return stored, f"the checkpoint is in {stored}" if stored else "the files of the checkpoint do not say their dtype"


def _weights(options: ModelOptions, files: ModelFiles) -> Path:
    """Return a file of a checkpoint's weights, fetched from the hub where the cache lacks it, if it is there."""
    path = files.named[0]
    if not is_local(options.model) and not path.is_file():
        from huggingface_hub import hf_hub_download

        with contextlib.suppress(Exception):  # loading the model says what is wrong
            return Path(hf_hub_download(options.model, str(path.relative_to(files.folder)), revision=options.revision))
    return path


def is_fast(name: str, device: torch.device) -> tuple[bool, str]:
    """Return whether a GPU computes in a 16-bit dtype, or a CPU faster than in float32, and how that is known, in words."""
    if device.type == "cuda":
        fast = name == "float16" or torch.cuda.is_bf16_supported(including_emulation=False)
        return fast, f"in which this GPU {'computes' if fast else 'does not compute'}"
    ratio = cpu_ratio(name)
    fast = ratio >= FASTER
    speed = "faster" if fast else "not clearly faster"
    return fast, f"in which this CPU is {speed} ({ratio:.2f} times the speed of float32)"


@cache
def cpu_ratio(name: str) -> float:
    """Return the speed of this CPU's products in a dtype over that in float32.

    Measured rather than read from flags: which instructions torch uses depends on its build, on the processor and on the
    environment (ONEDNN_MAX_CPU_ISA). With instructions for a dtype the ratio is 2 and more, without them 0.4 and less.
    `FASTER` lies between: at 1 the noise of a measurement could decide, and a CPU that is hardly faster gains nothing for
    what 16 bits cost in precision.
    """
    other, single = speeds([DTYPES[name], torch.float32], torch.device("cpu"))
    return other / single


def speeds(dtypes: Sequence[torch.dtype], device: torch.device) -> list[float]:
    """Return the FLOPs a second of a matrix product in each dtype: of the fastest of several that take turns.

    On a CPU one thread multiplies: several wait for each other where other work takes a processor, and the ratio of dtypes
    must not depend on that.
    """
    rows, width = (ON_GPU, ON_GPU) if device.type == "cuda" else (ROWS, WIDTH)
    generator = torch.Generator().manual_seed(0)
    operands = [
        [torch.randn(size, width, generator=generator).to(device, dtype) for size in (rows, width)] for dtype in dtypes
    ]
    best = [float("inf")] * len(dtypes)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        begun = time.perf_counter()
        for turn in itertools.count():
            if turn > LEAST and time.perf_counter() - begun >= PATIENCE:
                break
            for index, (states, weight) in enumerate(operands):
                seconds = _seconds(states, weight)
                if turn:  # the first one prepares
                    best[index] = min(best[index], seconds)
    finally:
        torch.set_num_threads(threads)
    return [2.0 * rows * width * width / seconds for seconds in best]


def _seconds(states: torch.Tensor, weight: torch.Tensor) -> float:
    if states.device.type == "cuda":
        torch.cuda.synchronize(states.device)
    begun = time.perf_counter()
    torch.nn.functional.linear(states, weight)
    if states.device.type == "cuda":
        torch.cuda.synchronize(states.device)
    return time.perf_counter() - begun
