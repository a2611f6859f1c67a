"""Kernels of `gpu_statistics`: they read rows of logits and write what `statistics` defines for each.

A program has one row and a block of lanes. Every lane folds each BLOCK-th id of the row into a few registers, and lanes meet
once, at the end: a step of a loop needs no exchange between threads, and a sum has V / BLOCK terms before it becomes a tree,
so that its error stays near 1e-7. A maximum or minimum of NaN is the other number on a GPU: nothing relies on it.
"""

# Triton evaluates annotations of its functions, and takes none but its own.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32; not minus infinity, whose differences are NaN
FAR = tl.constexpr(1e30)  # bounds distances to it; -FAR is the logarithm of no probability: its exp is 0
LEAST_EXPONENT = tl.constexpr(-103.97208)  # log(2^-150): below it, exp is 0 in float32
# Columns of what is written of each row: `floats` [n, FLOATS] and `integers` [n, INTEGERS].
FLOATS, INTEGERS = tl.constexpr(8), tl.constexpr(2)
TOTAL, LARGEST, PROB = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOP_PROB, SECOND_PROB, MARGIN, ENTROPY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
OVERLAP, FORWARD, BACKWARD = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
RANK, TOP = tl.constexpr(0), tl.constexpr(1)


class _Row(NamedTuple):
    """One row of a side: its number, largest scaled logit, total weight (the largest has weight 1), and a chosen id with its
    scaled logit.
    """

    rows: Any
    number: Any
    largest: Any
    total: Any
    chosen: Any
    value: Any


class _Softmax(NamedTuple):
    """What lanes hold of the weights exp(x - largest) of kept ids: the largest and second largest x, the total weight, the
    total of weight times (x - largest), and the block of the first id that has the largest.
    """

    largest: Any
    second: Any
    total: Any
    weighted: Any
    block: Any


class _Pair(NamedTuple):
    """What lanes hold of p and q: the sums of min(p, q), p log(p / q) and q log(q / p); whether an id has p and no q (bit 0)
    or q and no p (bit 1); how many come before the chosen id.
    """

    overlap: Any
    forward: Any
    backward: Any
    apart: Any
    ahead: Any


@triton.jit
def _divided(rows, logits):
    """In float32, by the temperature. Rounded correctly (Triton's / is not), since truncation compares the result."""
    found = logits.to(tl.float32)
    if rows.temperature is not None:
        found = tl.div_rn(found, rows.temperature)
    return found


@triton.jit
def _values(rows, row, ids, whole: tl.constexpr):
    """Scaled logits of a block of ids and which are kept. A `whole` block lies within the width: without a mask its load is
    as wide as can be; ids beyond the width are LOWEST and not kept.
    """
    address = rows.logits + row * rows.stride + ids
    if whole:
        kept = tl.full(ids.shape, True, tl.int1)
        found = _divided(rows, tl.load(address))
    else:
        kept = ids < rows.width
        found = tl.where(kept, _divided(rows, tl.load(address, mask=kept, other=0.0)), LOWEST)
    if rows.least is not None:
        kept = kept & (found >= tl.load(rows.least + row))
    return found, kept


@triton.jit
def _value(rows, number, chosen):
    """The scaled logit of one id of a row; for -1 (nothing is chosen) and ids beyond the width that of the nearest id."""
    inside = tl.minimum(tl.maximum(chosen, 0), rows.width - 1)
    return _divided(rows, tl.load(rows.logits + number * rows.stride + inside))


@triton.jit
def _weights(side, number):
    """A row's largest scaled logit and total weight, which are known."""
    start = side.found.floats + number * FLOATS
    return tl.load(start + LARGEST), tl.load(start + TOTAL)


@triton.jit
def _ahead(row, values, ids):
    """1 for ids that come before the chosen one: larger, or equal and lower."""
    return ((values > row.value) | ((values == row.value) & (ids < row.chosen))).to(tl.int32)


@triton.jit
def _store_chosen(found, row, ahead):
    """Write the chosen id's probability and rank; beyond the width 0, and after everything with a lower id."""
    known = row.chosen < row.rows.width
    kept = known
    if row.rows.least is not None:
        kept = kept & (row.value >= tl.load(row.rows.least + row.number))
    prob = tl.where(kept, tl.div_rn(tl.exp(row.value - row.largest), row.total), 0.0)
    rank = tl.where(known, 1 + tl.sum(ahead, 0).to(tl.int64), row.chosen + 1)
    tl.store(found.floats + row.number * FLOATS + PROB, prob)
    tl.store(found.integers + row.number * INTEGERS + RANK, rank)


@triton.jit
def _folded(state, values, kept, block):
    """The state with one more id in each lane. Either the old sums or the new weight are rescaled: one exp does."""
    x = tl.where(kept, values, LOWEST)
    away = tl.minimum(tl.abs(x - state.largest), FAR)
    factor = tl.where(kept, tl.exp(-away), 0.0)
    above = x > state.largest
    weighted = tl.where(above, (state.weighted - away * state.total) * factor, state.weighted - away * factor)
    return _Softmax(
        tl.maximum(state.largest, x),
        tl.maximum(state.second, tl.minimum(state.largest, x)),
        tl.where(above, state.total * factor + 1.0, state.total + factor),
        weighted + values * 0.0,  # NaN where a logit is NaN or infinite, kept or not
        tl.where(above, block, state.block),
    )


@triton.jit
def _store_softmax(found, number, state, lanes):
    """Let the lanes meet, write a row's own columns, and return its largest scaled logit and total weight."""
    largest = tl.max(state.largest, 0)
    top = tl.min(tl.where(state.largest == largest, state.block + lanes, 2147483647), 0)
    others = tl.where(state.block + lanes == top, state.second, state.largest)
    away = tl.minimum(largest - state.largest, FAR)
    factor = tl.exp(-away)
    total = tl.sum(state.total * factor, 0)
    weighted = tl.sum((state.weighted - away * state.total) * factor, 0)
    second = tl.exp(tl.max(others, 0) - largest)
    entropy = tl.log(total) - tl.div_rn(weighted, total)
    start = found.floats + number * FLOATS
    tl.store(start + TOTAL, total)
    tl.store(start + LARGEST, largest)
    tl.store(start + TOP_PROB, tl.div_rn(1.0, total))
    tl.store(start + SECOND_PROB, tl.div_rn(second, total))
    tl.store(start + MARGIN, tl.div_rn(1.0 - second, total))
    tl.store(start + ENTROPY, tl.where(entropy < 0.0, 0.0, entropy))  # a maximum would hide NaN
    tl.store(found.integers + number * INTEGERS + TOP, top.to(tl.int64))
    return largest, total


@triton.jit(do_not_specialize_on_alignment=["chosen"])
def one_side(rows, chosen, found, BLOCK: tl.constexpr, ranked: tl.constexpr):  # noqa: N803
    """A side's own columns; probability and, where `ranked`, rank of a chosen id of each row."""
    number = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    id_ = tl.load(chosen + number)
    row = _Row(rows, number, 0.0, 0.0, id_, _value(rows, number, id_))
    lowest = tl.full([BLOCK], LOWEST, tl.float32)
    nothing, none = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    state, ahead = _Softmax(lowest, lowest, nothing, nothing, none), none
    whole = rows.width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        values, kept = _values(rows, number, start + lanes, True)
        state = _folded(state, values, kept, start)
        if ranked:
            ahead += _ahead(row, values, start + lanes)
    if whole < rows.width:
        values, kept = _values(rows, number, whole + lanes, False)
        state = _folded(state, values, kept, whole)
        if ranked:
            ahead += _ahead(row, values, whole + lanes)
    largest, total = _store_softmax(found, number, state, lanes)
    _store_chosen(found, _Row(rows, number, largest, total, id_, row.value), ahead)


@triton.jit
def _logs(row, values, kept):
    """Log probabilities of scaled logits, and for which of them the weight is not 0."""
    shifted = values - row.largest
    return tl.where(kept, shifted - tl.log(row.total), -FAR), kept & (shifted > LEAST_EXPONENT)


@triton.jit
def _compared(state, target, draft, ids, whole: tl.constexpr):
    """The state with one more id in each lane."""
    values, kept = _values(target.rows, target.number, ids, whole)
    theirs, also = _values(draft.rows, draft.number, ids, whole)
    log_p, has_p = _logs(target, values, kept)
    log_q, has_q = _logs(draft, theirs, also)
    apart = state.apart
    if (not whole) or (target.rows.least is not None) or (draft.rows.least is not None):
        apart = apart | tl.where(has_p & (also == 0), 1, 0) | tl.where(has_q & (kept == 0), 2, 0)
    over = log_q - log_p
    larger = tl.exp(tl.maximum(log_p, log_q))
    smaller = larger * tl.exp(-tl.abs(over))
    return _Pair(
        state.overlap + smaller,
        state.forward - tl.where(over > 0, smaller, larger) * over,
        state.backward + tl.where(over > 0, larger, smaller) * over,
        apart,
        state.ahead + _ahead(target, values, ids),
    )


@triton.jit
def _kl(total, apart):
    """A divergence: infinite if ids are apart, not below 0."""
    return tl.where(apart > 0, float("inf"), tl.where(total < 0.0, 0.0, total))


@triton.jit
def two_sides(target, draft, found, BLOCK: tl.constexpr):  # noqa: N803
    """Columns of a target and a draft, and probability and rank of the draft's top at the target."""
    number = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    chosen = tl.load(draft.found.integers + number * INTEGERS + TOP)
    largest, total = _weights(target, number)
    ours = _Row(target.rows, number, largest, total, chosen, _value(target.rows, number, chosen))
    largest, total = _weights(draft, number)
    theirs = _Row(draft.rows, number, largest, total, chosen, 0.0)
    nothing, none = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    state = _Pair(nothing, nothing, nothing, none, none)
    whole = tl.minimum(target.rows.width, draft.rows.width) // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        state = _compared(state, ours, theirs, start + lanes, True)
    for start in range(whole, tl.maximum(target.rows.width, draft.rows.width), BLOCK):
        state = _compared(state, ours, theirs, start + lanes, False)
    floats = found.floats + number * FLOATS
    tl.store(floats + OVERLAP, tl.minimum(tl.sum(state.overlap, 0), 1.0))
    tl.store(floats + FORWARD, _kl(tl.sum(state.forward, 0), tl.max(state.apart & 1, 0)))
    tl.store(floats + BACKWARD, _kl(tl.sum(state.backward, 0), tl.max(state.apart & 2, 0)))
    _store_chosen(found, ours, state.ahead)


@triton.jit(do_not_specialize_on_alignment=["chosen"])
def one_id(target, chosen, found, BLOCK: tl.constexpr):  # noqa: N803
    """Probability and rank of a chosen id of each row."""
    number = tl.program_id(0).to(tl.int64)
    largest, total = _weights(target, number)
    id_ = tl.load(chosen + number)
    row = _Row(target.rows, number, largest, total, id_, _value(target.rows, number, id_))
    ids = tl.arange(0, BLOCK)
    ahead = tl.zeros([BLOCK], tl.int32)
    whole = target.rows.width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        ahead += _ahead(row, _values(target.rows, number, start + ids, True)[0], start + ids)
    if whole < target.rows.width:
        ahead += _ahead(row, _values(target.rows, number, whole + ids, False)[0], whole + ids)
    _store_chosen(found, row, ahead)
