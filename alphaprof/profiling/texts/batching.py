"""Which documents share a batch: a pure function of their lengths, so that a resumed run makes the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from alphaprof.errors import OutOfMemory
from alphaprof.profiling.models.load import is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")
LEAST = 1 / 16


def batches(lengths: Sequence[int], budget: int, padding: float = 1.0) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first: the padded size of a batch stays within `budget` tokens.

    A text longer than the budget makes a batch of its own. `padding`: the largest share of a batch that may be padding,
    where it has `LEAST` of the budget without the next text; a smaller one costs more than padding does.
    """
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batch:
            longest = max(1, lengths[batch[0]])
            size = (len(batch) + 1) * longest
            loose = size - tokens - lengths[index] > padding * size and len(batch) * longest >= LEAST * budget
            if size > budget or loose:
                yield batch
                batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


@dataclass(frozen=True)
class Fed:
    """Tokens of texts that went through a model in padded batches, and the padding that went with them."""

    tokens: int = 0
    padding: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Fed:
        """One batch of texts, each padded to the longest."""
        return cls(sum(lengths), len(lengths) * max(lengths) - sum(lengths))

    @property
    def size(self) -> int:
        """All of it."""
        return self.tokens + self.padding

    @property
    def share(self) -> float:
        """The share of it that was padding, 0 to 1."""
        return self.padding / self.size

    def __add__(self, other: Fed) -> Fed:
        return Fed(self.tokens + other.tokens, self.padding + other.padding)


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
