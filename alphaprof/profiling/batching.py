"""Which documents share a batch: a pure function of their lengths, so that a resumed run makes the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from alphaprof.errors import OutOfMemory

Item = TypeVar("Item")
Result = TypeVar("Result")
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first: the padded size of a batch stays within `budget` tokens.

    A text longer than the budget makes a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    start = 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


def halving(
    run: Callable[[list[Item]], list[Result]], items: list[Item], describe: Callable[[Item], str]
) -> tuple[list[Result], int]:
    """`run(items)`, in halves when memory runs out, and how many times a batch was halved.

    Raises `OutOfMemory` when a single item does not fit.
    """
    try:
        return run(items), 0
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block, where the traceback no longer keeps the tensors of the failed attempt alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(items) == 1:
        raise OutOfMemory(
            f"out of memory on {describe(items[0])} alone",
            "lower max_new_tokens, use a smaller dtype, or --set a device_map",
        )
    middle = len(items) // 2
    first, halved_first = halving(run, items[:middle], describe)
    second, halved_second = halving(run, items[middle:], describe)
    return first + second, 1 + halved_first + halved_second


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, by its type or in one of the many wordings of torch and its backends."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(words in str(error) for words in OUT_OF_MEMORY)  # allocators without an error of their own
