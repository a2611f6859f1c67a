"""Compiled loops over rows of logits on a CPU: statistics of a target's softmax, and of a draft's beside it.

A row is read several times while it lies in the cache. Terms are float32; their sums are float32 within a block and float64
over blocks, so that they are as good as their terms at any vocabulary. All of it stands in one file: what numba keeps on
disk is made anew when this file changes, and not when another one does. The names of columns come from another one all the
same: they are part of a signature.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from alphaprof.profiling.scoring.columns import DRAFT, PROPOSAL, TARGET, record
from alphaprof.stats.compiled import bits_of, float_of, inlined, matrix_row, value_of, vectorised

Array = np.ndarray[Any, Any]
BLOCK = 2048
F = np.float32
LOWEST = F(-87)  # exp of it is the last before subnormal numbers, which would be slow
VANISHED = F(-150 * math.log(2))  # exp of it rounds to 0
LN_2, LOG2_E = F(math.log(2)), F(1 / math.log(2))
ZERO, HALF, ONE, NOTHING = F(0), F(0.5), F(1), F(-np.inf)  # a float64 anywhere would make loops half as fast
# What is known of one distribution: first index of the maximum, its probability, ..., sum of weights, maximum.
OF_ONE = TOP, TOP_PROB, SECOND_PROB, MARGIN, ENTROPY, TOTAL, LARGEST = tuple(range(7))


def _polynomial(function: Any, low: float, high: float, degree: int) -> tuple[np.float32, ...]:
    """Coefficients, highest power first, of the polynomial that equals `function` at the Chebyshev points of an interval."""
    return tuple(map(F, Chebyshev.interpolate(function, degree, [low, high]).convert(kind=Polynomial).coef[::-1]))


EXP = _polynomial(np.exp, -math.log(2) / 2, math.log(2) / 2, 5)  # within 1e-7 of itself


@inlined
def exp32(x: Any) -> Any:
    """exp(x) for x <= 0 within 3e-7 of itself: 2^n times a polynomial. For anything below -87 exp(-87), 1e-38."""
    x = x if x > LOWEST else LOWEST
    n = np.int32(x * LOG2_E - HALF)  # to the nearest, as x is at most 0
    r = x - F(n) * LN_2
    y = EXP[0]
    for coefficient in EXP[1:]:
        y = y * r + coefficient
    return y * float_of(np.int32((n + 127) << 23))


@vectorised
def _scaled(row: Array, temperature: Any, out: Array) -> Any:
    """Return logits of a row (bfloat16 as its bits) over the temperature, and a sum that is NaN exactly where one is not
    finite.
    """
    bad = ZERO
    if temperature == ONE:
        for i in range(len(row)):
            value = value_of(row[i])
            out[i] = value
            bad += value * ZERO
    else:
        for i in range(len(row)):
            value = value_of(row[i]) / temperature
            out[i] = value
            bad += value * ZERO
    return bad


@vectorised
def _largest(values: Array) -> Any:
    """Return the maximum of finite values, as integers with the order of floats: vector instructions for those need no care
    for NaN.
    """
    found = np.int32(-(2**31))
    for i in range(len(values)):
        bits = bits_of(values[i])
        key = np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))
        if key > found:
            found = key
    return float_of(np.int32(found ^ ((found >> 31) & 0x7FFFFFFF)))


@vectorised
def _top(z: Array) -> tuple[int, Any, Any]:
    """First index of the maximum, the maximum, and the largest of all other values (minus infinity: there is none)."""
    blocks = (len(z) + BLOCK - 1) // BLOCK
    highest, second, home = NOTHING, NOTHING, 0
    for block in range(blocks):
        value = _largest(z[block * BLOCK : (block + 1) * BLOCK])
        if value > highest:
            highest, second, home = value, highest, block
        elif value > second:
            second = value
    index, end = home * BLOCK, min(len(z), (home + 1) * BLOCK)
    while index < end - 1 and z[index] != highest:
        index += 1
    if index > home * BLOCK:
        second = max(second, _largest(z[home * BLOCK : index]))
    if index + 1 < end:
        second = max(second, _largest(z[index + 1 : end]))
    return index, highest, second


@vectorised
def _weigh(z: Array, top: Any, least: Any, weights: Array) -> tuple[Any, Any]:
    """exp(z - top) where z is not below `least`, else 0, into `weights`; their sum, and that of them times z - top."""
    total, product = ZERO, ZERO
    for i in range(len(z)):
        shifted = z[i] - top
        weight = exp32(shifted)
        weight = weight if z[i] >= least else ZERO
        weights[i] = weight
        total += weight
        product += weight * shifted
    return total, product


@vectorised
def _softmax(z: Array, top: Any, least: Any, weights: Array) -> tuple[float, float]:
    """`_weigh` over a whole row. What a float32 rounds to 0 is 0."""
    total, product = 0.0, 0.0
    least = max(least, top + VANISHED)
    for start in range(0, len(z), BLOCK):
        part = slice(start, start + BLOCK)
        one, other = _weigh(z[part], top, least, weights[part])
        total += one
        product += other
    return total, product


@vectorised
def _meet(zp: Array, wp: Array, top_p: Any, share_p: Any, zq: Array, wq: Array, top_q: Any, share_q: Any) -> Any:
    """Return sums over ids that both have: min(p, q), p and q times how far logits are apart. `share_p` is 1 / total of the
    row. Of equal rows both divergences are exactly 0: a budget may depend on it.
    """
    overlap, p_apart, q_apart = ZERO, ZERO, ZERO
    for i in range(len(zp)):
        p, q = wp[i] * share_p, wq[i] * share_q
        overlap += p if p < q else q
        apart = (zp[i] - top_p) - (zq[i] - top_q)
        p_apart += p * apart
        q_apart += q * apart
    return overlap, p_apart, q_apart


@vectorised
def _lone(w: Array, inverse: Any) -> Any:
    """Return probability of ids that the other side lacks."""
    outside = ZERO
    for i in range(len(w)):
        outside += w[i] * inverse
    return outside


@vectorised
def _cut_off(w: Array, z: Array, least: Any) -> Any:
    """Weight of ids whose logit on the other side is below `least`."""
    outside = ZERO
    for i in range(len(w)):
        outside += w[i] if z[i] < least else ZERO
    return outside


@vectorised
def _rank(z: Array, index: int) -> int:
    """1 + values that are larger + equal ones with a lower index; index + 1 beyond the row. float32 counts up to 2^24."""
    if index >= len(z):
        return index + 1
    before, value, after, ahead = z[:index], z[index], z[index:], ONE
    for i in range(len(before)):
        ahead += ONE if before[i] >= value else ZERO
    for i in range(len(after)):
        ahead += ONE if after[i] > value else ZERO
    return int(ahead)


@vectorised
def _weight_of(z: Array, index: int, top: Any, least: Any) -> float:
    """Return the weight of one id, however small; 0 beyond the row."""
    return math.exp(z[index] - top) if index < len(z) and z[index] >= least else 0.0


@vectorised
def _side(row: Array, temperature: Any, least: Any, z: Array, w: Array, out: Array) -> None:
    """What is known of one distribution: OF_ONE into `out`, scaled logits and weights into `z` and `w`."""
    bad = _scaled(row, temperature, z)
    index, top, second = _top(z)
    total, product = _softmax(z, top, least, w)
    runner_up = math.exp(second - top) if second >= least else 0.0
    out[TOP], out[TOP_PROB], out[SECOND_PROB], out[MARGIN] = index, 1 / total, runner_up / total, (1 - runner_up) / total
    out[ENTROPY], out[TOTAL], out[LARGEST] = max(0.0, math.log(total) - product / total) + bad, total, top


@vectorised
def _pair(p: Any, q: Any, out: Any) -> None:
    """Divergences of a target and a draft, into `out`; each is (scaled logits, weights, least kept logit, OF_ONE)."""
    zp, wp, least_p, of_p = p
    zq, wq, least_q, of_q = q
    shared = min(len(zp), len(zq))
    top_p, top_q, share_p, share_q = F(of_p[LARGEST]), F(of_q[LARGEST]), F(1 / of_p[TOTAL]), F(1 / of_q[TOTAL])
    overlap, p_apart, q_apart = 0.0, 0.0, 0.0
    p_outside, q_outside = 0.0, 0.0
    for start in range(0, shared, BLOCK):
        part = slice(start, min(shared, start + BLOCK))
        sums = _meet(zp[part], wp[part], top_p, share_p, zq[part], wq[part], top_q, share_q)
        overlap, p_apart, q_apart = overlap + sums[0], p_apart + sums[1], q_apart + sums[2]
        if least_q > -np.inf:
            p_outside += _cut_off(wp[part], zq[part], least_q)
        if least_p > -np.inf:
            q_outside += _cut_off(wq[part], zp[part], least_p)
    for start in range(shared, len(zp), BLOCK):
        p_outside += _lone(wp[start : start + BLOCK], share_p)
    for start in range(shared, len(zq), BLOCK):
        q_outside += _lone(wq[start : start + BLOCK], share_q)
    out.overlap = min(1.0, overlap)
    out.kl_target_draft = np.inf if p_outside > 0 else max(0.0, p_apart + math.log(of_q[TOTAL] / of_p[TOTAL]))
    out.kl_draft_target = np.inf if q_outside > 0 else max(0.0, math.log(of_p[TOTAL] / of_q[TOTAL]) - q_apart)


@vectorised
def measure(
    places: Array, like: Array, temperatures: Array, least: Array, token: Array, proposals: Array, out: tuple[Any, Any, Any]
) -> None:
    """Statistics of n rows into the records `out`: of the target [n], of the drafts beside it [n, drafts], and of the target
    at `proposals` [k, n], as [n, k] (see `columns.record`).

    `places` [models, 3]: where the logits of the target and of drafts lie (see `matrix_row`), all of the dtype of `like`:
    float32, or bfloat16 as uint16; `least` [models, n]; `token` [n]. Places rather than arrays, so that one loop serves any
    number of drafts.
    """
    # Slices of flat arrays are known to be without gaps, which vector instructions need.
    zp, wp, of_p = np.empty(places[0, 2], F), np.empty(places[0, 2], F), np.empty(len(OF_ONE))
    z, w, of_q = np.empty(places[:, 2].max(), F), np.empty(places[:, 2].max(), F), np.empty(len(OF_ONE))
    for i in range(len(token)):
        _side(matrix_row(places[0], i, like), temperatures[0], least[0, i], zp, wp, of_p)
        ours = out[0][i]
        ours.target_top, ours.target_top_prob, ours.target_second_prob = of_p[TOP], of_p[TOP_PROB], of_p[SECOND_PROB]
        ours.target_margin, ours.target_entropy = of_p[MARGIN], of_p[ENTROPY]
        ours.target_token_prob = _weight_of(zp, token[i], of_p[LARGEST], least[0, i]) / of_p[TOTAL]
        for model in range(1, len(places)):
            zq, wq, cut, theirs = z[: places[model, 2]], w[: places[model, 2]], least[model, i], out[1][i, model - 1]
            _side(matrix_row(places[model], i, like), temperatures[model], cut, zq, wq, of_q)
            index = int(of_q[TOP])
            theirs.draft_top, theirs.draft_top_prob = index, of_q[TOP_PROB]
            theirs.draft_margin, theirs.draft_entropy = of_q[MARGIN], of_q[ENTROPY]
            theirs.draft_token_prob = _weight_of(zq, token[i], of_q[LARGEST], cut) / of_q[TOTAL]
            theirs.target_prob_of_draft_top = _weight_of(zp, index, of_p[LARGEST], least[0, i]) / of_p[TOTAL]
            theirs.target_rank_of_draft_top, theirs.draft_rank_of_token = _rank(zp, index), _rank(zq, token[i])
            _pair((zp, wp, least[0, i], of_p), (zq, wq, cut, of_q), theirs)
        for place, proposal in enumerate(proposals[:, i]):
            out[2][i, place].target_prob_of_draft_top = _weight_of(zp, proposal, of_p[LARGEST], least[0, i]) / of_p[TOTAL]
            out[2][i, place].target_rank_of_draft_top = _rank(zp, proposal)


def rows_for(n: int, drafts: int, proposals: int) -> tuple[Array, Array, Array]:
    """Return what `measure` writes n rows into."""
    target, beside = np.empty(n, record(TARGET)), np.empty((n, drafts), record(DRAFT))
    return target, beside, np.empty((n, proposals), record(PROPOSAL))


def compile_all() -> None:
    """Compile `measure` for both dtypes, or load it."""
    for dtype in (np.uint16, np.float32):
        row = np.zeros(1, dtype)
        places = np.array([[row.ctypes.data, 0, 1]] * 2)
        ids = np.zeros((1, 1), np.int64)
        measure(places, row[:0], np.ones(2, F), np.zeros((2, 1), F), ids[0], ids, rows_for(1, 1, 1))
