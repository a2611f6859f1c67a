"""Batches: every document once within the budget, and halves in order where memory runs out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphaprof.errors import OutOfMemory
from alphaprof.profiling.models.load import OUT_OF_MEMORY
from alphaprof.profiling.texts.continuations import LEAST, batches, fed, halving
from tests.loops import each

lengths_and_budget = given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 1000))


@lengths_and_budget
def test_every_index_is_in_exactly_one_batch_within_the_budget_longest_first(lengths: list[int], budget: int) -> None:
    found = list(batches(lengths, budget))
    order = list(itertools.chain(*found))
    assert order == sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget
    for batch in found[:-1]:  # full, since equal ones keep their order
        assert (len(batch) + 1) * max(1, *(lengths[index] for index in batch)) > budget


@lengths_and_budget
def test_padding_is_limited_where_a_batch_is_large_enough(lengths: list[int], budget: int) -> None:
    """At most the given share of a batch is padding, or it had less than the least part of the budget before its last."""
    found = list(batches(lengths, budget, 0.1))
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    assert list(itertools.chain(*found)) == list(itertools.chain(*batches(lengths, budget)))
    for batch in found:
        tokens, padding = fed([lengths[index] for index in batch])
        size, longest = tokens + padding, lengths[batch[0]]
        assert len(batch) == 1 or size <= budget
        assert padding <= 0.1 * size or (len(batch) - 1) * max(1, longest) < LEAST * budget


@lengths_and_budget
def test_a_batch_ends_only_where_the_next_text_would_not_fit_or_pad_too_much(lengths: list[int], budget: int) -> None:
    """No batch is smaller than it has to be: each costs a pass over the weights."""
    found = list(batches(lengths, budget, 0.1))
    for batch, following in itertools.pairwise(found):
        tokens, padding = fed([max(1, lengths[batch[0]]), *(lengths[index] for index in (*batch[1:], following[0]))])
        assert tokens + padding > budget or padding > 0.1 * (tokens + padding)


def test_padding_worked_out_by_hand() -> None:
    """20, 19, 18: 3 of 60 are padding; with 12 it would be 11 of 80. 20 alone is short of 1/16 of 640: 4 joins it."""
    assert list(batches([12, 20, 18, 19], 320, 0.1)) == [[1, 3, 2], [0]]
    assert list(batches([12, 20, 18, 19], 320)) == [[1, 3, 2, 0]]
    assert list(batches([4, 20], 320 * 2, 0.1)) == [[1, 0]]
    assert (fed([20, 19, 18]) + fed([12])).tolist() == [69, 3]


def memory_for(capacity: int, calls: list[int] | None = None) -> Callable[[list[int]], list[int]]:
    """A computation (tenfold) that runs out of memory above `capacity` items; `calls` collects the sizes that fitted."""

    def run(items: list[int]) -> list[int]:
        if len(items) > capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if calls is not None:
            calls.append(len(items))
        return [10 * item for item in items]

    return run


@each(("capacity", "halved"), [(8, 0), (7, 1), (4, 1), (3, 3), (2, 3), (1, 7)])
def test_halvings_of_eight_items_are_counted(capacity: int, halved: int) -> None:
    assert halving(memory_for(capacity), list(range(8)), str) == ([10 * item for item in range(8)], halved)


@given(st.lists(st.integers(), min_size=1, max_size=40), st.integers(1, 50))
def test_results_keep_their_order_and_each_halving_adds_one_part(items: list[int], capacity: int) -> None:
    calls: list[int] = []
    results, halved = halving(memory_for(capacity, calls), items, str)
    assert results == [10 * item for item in items]
    assert halved == len(calls) - 1


def test_a_single_item_that_does_not_fit_is_named() -> None:
    with pytest.raises(OutOfMemory, match="out of memory on item 3 alone"):
        halving(lambda items: memory_for(0)(items) if 3 in items else items, [1, 2, 3, 4], lambda item: f"item {item}")


def test_a_single_text_that_eager_attention_cannot_hold_needs_another_attention() -> None:
    eager, other = (SimpleNamespace(name=way, attn_implementation=way) for way in ("eager", "sdpa"))
    for models, hint in (([other], "lower max_new_tokens"), ([other, eager], "set attn_implementation of eager to flex_")):
        with pytest.raises(OutOfMemory) as caught:
            halving(memory_for(0), [1], str, models)  # type: ignore[arg-type]
        assert caught.value.hint.startswith(hint)


SHORTAGES = [MemoryError(), torch.OutOfMemoryError(), *(RuntimeError(f"device: {words} (12)") for words in OUT_OF_MEMORY)]


@each("shortage", SHORTAGES)
def test_every_way_of_running_out_of_memory_is_known(shortage: Exception) -> None:
    def run(items: list[int]) -> list[int]:
        if len(items) > 1:
            raise shortage
        return items

    assert halving(run, [1, 2], str) == ([1, 2], 1)


def test_a_shortage_is_known_by_an_error_that_it_led_to() -> None:
    def record(items: list[int]) -> list[int]:
        try:
            return memory_for(1)(items)
        finally:
            if len(items) > 1:
                raise RuntimeError("operation failed due to a previous error during capture")

    assert halving(record, [1, 2], str) == ([10, 20], 1)


def test_any_other_error_propagates_at_once() -> None:
    calls: list[list[int]] = []

    def run(items: list[int]) -> list[int]:
        calls.append(items)
        results = memory_for(2)(items)
        if 3 in items:
            raise RuntimeError("shapes cannot be multiplied")
        return results

    with pytest.raises(RuntimeError, match="shapes"):
        halving(run, [0, 1, 2, 3], str)
    assert calls == [[0, 1, 2, 3], [0, 1], [2, 3]]
