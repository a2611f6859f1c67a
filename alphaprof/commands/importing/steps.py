"""Which rounds of a request drafted how many tokens: told by round, by length, or by counts that leave no choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alphaprof.commands.importing.lines import LeftOut, Line
from alphaprof.errors import shown

Array = np.ndarray[Any, Any]
BY_LENGTH, BY_STEP = "acceptance_histogram_by_draft_length", ("per_step_accepted", "per_step_drafted")


def joint_of(metrics: Line, histogram: Array, drafted: int) -> Array:
    """Rounds by drafted and by accepted tokens, [gamma + 1, gamma + 1]. Raises `LeftOut` where the metrics do not tell."""
    given = [found for found in (_by_length(metrics, histogram), _by_step(metrics, histogram)) if found is not None]
    size = len(histogram)
    for found in given:
        told = int((np.arange(size)[:, None] * found).sum())
        if told != drafted or not np.array_equal(found.sum(0), histogram) or not np.array_equal(found, given[0]):
            raise metrics.refuse(
                f"num_draft_tokens is {drafted} and the histogram {histogram.tolist()}; by round they are {told} and "
                f"{found.sum(0).tolist()}",
                "the metrics of a request must agree with each other",
            )
    if given:
        return given[0]
    joint = np.zeros((size, size), dtype=np.int64)
    if drafted == histogram.sum() * (size - 1):  # every round drafted gamma tokens
        joint[-1] = histogram
    elif drafted == (np.arange(size) * histogram).sum():  # none drafted more than it accepted
        joint[np.arange(size), np.arange(size)] = histogram
    elif size == 2:
        joint[1] = drafted - histogram[1], histogram[1]
        joint[0, 0] = histogram.sum() - drafted
    else:
        lacking = [name for name in BY_STEP if metrics.fields.get(name) is None]
        partner = f"; {lacking[0]} is missing" if len(lacking) == 1 else ""
        raise LeftOut(
            f"{int(histogram.sum())} rounds drafted {drafted} tokens, and not which of them fewer than {size - 1}{partner}",
            "start vLLM with --per-request-spec-decode-metrics detailed: summary is too little for drafts of several "
            "lengths, as prompt lookup makes them",
            kind="drafts of several lengths, in metrics that are not detailed",
        )
    return joint


def _by_length(metrics: Line, histogram: Array) -> Array | None:
    """From a histogram of accepted tokens for each number of drafted ones."""
    name, size = BY_LENGTH, len(histogram)
    rows = metrics.group(name)
    if rows is None:
        return None
    joint, lengths = np.zeros((size, size), dtype=np.int64), {str(length): length for length in range(size)}
    for key, row in rows.fields.items():
        counts = rows.wholes(f"{name}[{shown(key)}]", row)
        if key not in lengths or len(counts) != lengths[key] + 1:
            raise metrics.refuse(
                f"{name} has {len(counts)} entries for the length {shown(key)}",
                f"lengths are 0 to {size - 1}, each with one entry more",
            )
        joint[lengths[key], : len(counts)] = counts
    return joint


def _by_step(metrics: Line, histogram: Array) -> Array | None:
    """From what each round accepted and drafted; None where only one of them is told."""
    lists = {name: metrics.wholes(name, metrics.fields[name]) for name in BY_STEP if metrics.fields.get(name) is not None}
    if len(lists) < 2:
        _require_half(metrics, histogram, lists)
        return None
    accepted, drafted = (lists[name] for name in BY_STEP)
    if len(accepted) != len(drafted) or any(not a <= d < len(histogram) for a, d in zip(accepted, drafted, strict=True)):
        raise metrics.refuse(
            f"{BY_STEP[0]} ({len(accepted)}) and {BY_STEP[1]} ({len(drafted)}) do not fit each other",
            f"one entry a round: accepted, of drafted ones, of at most {len(histogram) - 1}",
        )
    joint = np.zeros((len(histogram), len(histogram)), dtype=np.int64)
    np.add.at(joint, (_array(drafted), _array(accepted)), 1)
    return joint


def _require_half(metrics: Line, histogram: Array, lists: Mapping[str, list[int]]) -> None:
    """Raise `DataUnreadable` where one list alone contradicts the other counts."""
    for name, counts in lists.items():
        agree = max(counts, default=0) < len(histogram)  # before counting: a log may hold any number
        if name == BY_STEP[0]:
            other = f"acceptance_histogram {histogram.tolist()}"
            agree = agree and np.array_equal(np.bincount(_array(counts), minlength=len(histogram)), histogram)
        else:
            drafted = metrics.required("num_draft_tokens")
            other = f"{histogram.sum()} rounds drafted {drafted} tokens"
            agree = agree and (len(counts), sum(counts)) == (histogram.sum(), drafted)
        if not agree:
            raise metrics.refuse(f"{name} and {other} differ", "the metrics of a request must agree with each other")


def _array(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int64)
