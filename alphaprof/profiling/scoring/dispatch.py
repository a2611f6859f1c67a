"""Statistics of a chunk of logits by the loops that are made for its device; the columns are those of `statistics.columns`.

On a CPU, compiled loops over single rows (`cpu_loops`), one thread a core; on a GPU, kernels (`gpu_statistics`) where
Triton is installed; else torch, a few rows at a time.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from alphaprof.profiling.models.hub import first_line
from alphaprof.profiling.models.load import is_out_of_memory
from alphaprof.profiling.models.processing import Processing
from alphaprof.profiling.scoring import statistics
from alphaprof.profiling.scoring.columns import IDS
from alphaprof.profiling.scoring.statistics import Columns, ProcessedLogits, processed_logits


def measured(
    logits: Sequence[torch.Tensor],
    settings: Sequence[Processing],
    token: torch.Tensor,
    proposals: Sequence[torch.Tensor],
    reduced: Sequence[bool] | None = None,
) -> list[Columns]:
    """`statistics.columns` of the logits [n, V] of a target and its drafts, processed with `settings` each. `reduced`: which
    of them lack ids (None: none does).
    """
    reduced = reduced or [False] * len(logits)
    target, *drafts = (processed_logits(*side) for side in zip(logits, settings, reduced, strict=True))
    return columns(target, drafts, token, proposals)


def columns(
    target: ProcessedLogits, drafts: Sequence[ProcessedLogits], token: torch.Tensor, proposals: Sequence[torch.Tensor]
) -> list[Columns]:
    """`statistics.columns`, fast."""
    kind = target.logits.device.type
    if kind == "cpu":
        return _by_rows(target, drafts, token, proposals)
    if kind == "cuda" and why_unavailable(target.logits.device) is None:
        from alphaprof.profiling.scoring.gpu_statistics import measured as by_kernels

        return by_kernels(target, drafts, token, proposals)
    parts = []
    size = statistics.rows_at_once(target.logits.device)
    for rows in statistics.chunks(len(token), size):
        first, *others = (
            ProcessedLogits(side.logits[rows], side.temperature, None if side.least is None else side.least[rows])
            for side in (target, *drafts)
        )
        parts.append(statistics.columns(first, others, token[rows], [ids[rows] for ids in proposals]))
    return [joined(pieces) for pieces in zip(*parts, strict=True)]


def warm_up(device: torch.device, say: Callable[[str], None]) -> None:
    """Have loops for a device compiled before they are needed, and `say` so where they are not kept yet."""
    if device.type == "cpu":
        from alphaprof.profiling.scoring import cpu_loops
        from alphaprof.stats.compiled import compiling

        if told := compiling(cpu_loops.measure):
            say(told)
        cpu_loops.compile_all()


def checksum(device: torch.device) -> str:
    """Return the SHA-256 of the statistics that this process computes of the same logits always, 64 bits of it."""
    logits = (torch.arange(6 * 3001) * 7919 % 4093 / 256).reshape(2, 3, 3001).to(device)
    token, digest = torch.arange(3, device=device), hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        target, draft = (ProcessedLogits(each) for each in logits.to(dtype))
        for found in columns(target, [draft], token, [token]):
            for values in found.values():
                digest.update(values.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@functools.cache
def why_unavailable(device: torch.device) -> str | None:
    """Return why kernels cannot run on a GPU, whose statistics are then those of torch: slower, and no others. None: they
    can, or the device is not a GPU. Triton needs a C compiler where it runs, which wheels do not bring.

    Raises the error where memory ran out, which says nothing about kernels.
    """
    if device.type != "cuda":
        return None
    try:
        from alphaprof.profiling.scoring.gpu_statistics import measured as by_kernels

        logits = torch.zeros((1, 8), device=device)
        by_kernels(ProcessedLogits(logits), [ProcessedLogits(logits)], torch.zeros(1, dtype=torch.long, device=device), [])
    except Exception as error:  # of Triton, of its compilers, of the driver
        if is_out_of_memory(error):
            raise
        return first_line(error)
    return None


def joined(pieces: Sequence[Columns]) -> Columns:
    """Return columns of chunks that follow each other as one."""
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _by_rows(
    target: ProcessedLogits, drafts: Sequence[ProcessedLogits], token: torch.Tensor, proposals: Sequence[torch.Tensor]
) -> list[Columns]:
    """By compiled loops, on as many threads as torch has."""
    from alphaprof.profiling.scoring import cpu_loops as loops

    sides = [target, *drafts]
    # Loops read bfloat16 or float32, of one kind, each row without gaps.
    dtypes = {side.logits.dtype for side in sides}
    logits = [side.logits if dtypes == {torch.bfloat16} else side.logits.float() for side in sides]
    logits = [each if each.stride(1) == 1 else each.contiguous() for each in logits]
    like = np.empty(0, np.uint16 if logits[0].dtype == torch.bfloat16 else np.float32)
    whole = np.array([[item.data_ptr(), item.stride(0) * item.itemsize, item.shape[1]] for item in logits])
    temperatures = np.array([item.temperature for item in sides], dtype=np.float32)
    nothing_cut = np.full(len(token), -np.inf, dtype=np.float32)
    least = np.stack([nothing_cut if item.least is None else item.least.numpy() for item in sides])
    guesses = np.array([item.clamp(min=0).numpy() for item in proposals], np.int64).reshape(len(proposals), len(token))
    out = loops.rows_for(len(token), len(drafts), len(proposals))

    def part(rows: slice) -> None:
        places = whole + [rows.start, 0, 0] * whole[:, 1:2]
        some = (np.ascontiguousarray(least[:, rows]), token.numpy()[rows], np.ascontiguousarray(guesses[:, rows]))
        loops.measure(places, like, temperatures, *some, (out[0][rows], out[1][rows], out[2][rows]))

    size = max(1, -(-len(token) // torch.get_num_threads()))
    first, *others = statistics.chunks(max(1, len(token)), size)
    waiting = [_executor(len(others)).submit(part, rows) for rows in others]
    try:
        part(first)
    finally:
        wait(waiting)  # loops read logits by their address: whatever happens, nobody may free them before
    for item in waiting:
        item.result()
    return [_columns(values) for values in (out[0], *np.moveaxis(out[1], 1, 0), *np.moveaxis(out[2], 1, 0))]


def _columns(values: np.ndarray[Any, Any]) -> Columns:
    """Return the fields of records [n] as columns."""
    fields = {name: torch.from_numpy(values[name]) for name in values.dtype.names or ()}
    return {name: field.long() if name in IDS else field.float() for name, field in fields.items()}


@functools.cache
def _executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="statistics")
