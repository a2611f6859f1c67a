"""Compiled loops over rows of logits on a CPU: statistics of a target's softmax, and of a draft's beside it.

A row is read several times while it lies in the cache. Terms are float32; their sums are float32 within a block and float64
over blocks, so that they are as good as their terms at any vocabulary. A block is summed in LANES sums side by side, which
vector units need, in an order that the code says and no compiler changes: every process computes the same bits. All of it
stands in one file: what numba keeps on disk is made anew when this file changes, and not when another one does. The names
of columns come from another one all the same: they are part of a signature.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from alphaprof.profiling.scoring.columns import DRAFT, PROPOSAL, TARGET, record
from alphaprof.stats.compiled import bits_of, compiled, float_of, inlined, matrix_row, value_of

Array = np.ndarray[Any, Any]
BLOCK, LANES = 8192, 256
F = np.float32
LOWEST = F(-87)  # exp of it is the last before subnormal numbers, which would be slow
VANISHED = F(-150 * math.log(2))  # exp of it rounds to 0
LN_2, LOG2_E = F(math.log(2)), F(1 / math.log(2))
INFINITE = np.int32(0x7F800000)  # bits of infinity; those of NaN without a sign are more
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


@compiled
def _scaled(row: Array, temperature: Any, out: Array) -> Any:
    """Write logits of a row (bfloat16 as its bits) over the temperature, and return whether all of them are finite."""
    largest = np.int32(0)
    for i in range(len(row)):
        value = value_of(row[i])
        out[i] = value if temperature == ONE else value / temperature
        largest = max(largest, np.int32(bits_of(out[i]) & INFINITE))
    return largest < INFINITE


@compiled
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


@compiled
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


@compiled
def _sum(lanes: Array) -> float:
    """Return the sum of LANES sums, by halves."""
    half = LANES
    while half > 16:
        half //= 2
        for i in range(half):
            lanes[i] += lanes[half + i]
    total = 0.0
    for i in range(half):
        total += lanes[i]
    return total


@compiled
def _weigh(z: Array, top: Any, least: Any, weights: Array, lanes: Array) -> tuple[float, float]:
    """exp(z - top) where z is not below `least`, else 0, into `weights`; their sum, and that of them times z - top."""
    lanes[:2] = ZERO
    totals, products = lanes[0], lanes[1]
    for start in range(0, len(z), LANES):
        some, into = z[start : start + LANES], weights[start : start + LANES]
        for i in range(len(some)):
            shifted = some[i] - top
            weight = exp32(shifted)
            weight = weight if some[i] >= least else ZERO
            into[i] = weight
            totals[i] += weight
            products[i] += weight * shifted
    return _sum(totals), _sum(products)


@compiled
def _softmax(z: Array, top: Any, least: Any, weights: Array, lanes: Array) -> tuple[float, float]:
    """`_weigh` over a whole row. What a float32 rounds to 0 is 0."""
    total, product = 0.0, 0.0
    least = max(least, top + VANISHED)
    for start in range(0, len(z), BLOCK):
        part = slice(start, start + BLOCK)
        one, other = _weigh(z[part], top, least, weights[part], lanes)
        total += one
        product += other
    return total, product


@compiled
def _meet(
    zp: Array, wp: Array, top_p: Any, share_p: Any, zq: Array, wq: Array, top_q: Any, share_q: Any, lanes: Array
) -> tuple[float, float, float]:
    """Return sums over ids that both have: min(p, q), p and q times how far logits are apart. `share_p` is 1 / total of the
    row. Of equal rows both divergences are exactly 0: a budget may depend on it.
    """
    lanes[:] = ZERO
    overlap, p_apart, q_apart = lanes[0], lanes[1], lanes[2]
    for start in range(0, len(zp), LANES):
        part = slice(start, start + LANES)
        zps, wps, zqs, wqs = zp[part], wp[part], zq[part], wq[part]
        for i in range(len(zps)):
            p, q = wps[i] * share_p, wqs[i] * share_q
            overlap[i] += p if p < q else q
            apart = (zps[i] - top_p) - (zqs[i] - top_q)
            p_apart[i] += p * apart
            q_apart[i] += q * apart
    return _sum(overlap), _sum(p_apart), _sum(q_apart)


@compiled
def _any_cut_off(w: Array, z: Array, least: Any) -> Any:
    """Return whether ids whose logit on the other side is below `least` have weight."""
    found = np.int32(0)
    for i in range(len(w)):
        found |= bits_of(w[i]) if z[i] < least else np.int32(0)
    return found != 0


@compiled
def _rank(z: Array, index: int) -> int:
    """1 + values that are larger + equal ones with a lower index; index + 1 beyond the row."""
    if index >= len(z):
        return index + 1
    before, value, after, ahead = z[:index], z[index], z[index:], np.int32(1)
    for i in range(len(before)):
        ahead = np.int32(ahead + np.int32(before[i] >= value))
    for i in range(len(after)):
        ahead = np.int32(ahead + np.int32(after[i] > value))
    return int(ahead)


@compiled
def _weight_of(z: Array, index: int, top: Any, least: Any) -> float:
    """Return the weight of one id, however small; 0 beyond the row."""
    return math.exp(z[index] - top) if index < len(z) and z[index] >= least else 0.0


@compiled
def _side(row: Array, temperature: Any, least: Any, z: Array, w: Array, lanes: Array, out: Array) -> None:
    """What is known of one distribution: OF_ONE into `out`, scaled logits and weights into `z` and `w`."""
    finite = _scaled(row, temperature, z)
    index, top, second = _top(z)
    total, product = _softmax(z, top, least, w, lanes)
    runner_up = math.exp(second - top) if second >= least else 0.0
    out[TOP], out[TOP_PROB], out[SECOND_PROB], out[MARGIN] = index, 1 / total, runner_up / total, (1 - runner_up) / total
    entropy = max(0.0, math.log(total) - product / total)
    out[ENTROPY], out[TOTAL], out[LARGEST] = entropy if finite else np.nan, total, top


@compiled
def _pair(p: Any, q: Any, lanes: Array, out: Any) -> None:
    """Divergences of a target and a draft, into `out`; each is (scaled logits, weights, least kept logit, OF_ONE)."""
    zp, wp, least_p, of_p = p
    zq, wq, least_q, of_q = q
    shared = min(len(zp), len(zq))
    top_p, top_q, share_p, share_q = F(of_p[LARGEST]), F(of_q[LARGEST]), F(1 / of_p[TOTAL]), F(1 / of_q[TOTAL])
    overlap, p_apart, q_apart = 0.0, 0.0, 0.0
    p_outside = shared < len(zp) and _largest(wp[shared:]) > ZERO
    q_outside = shared < len(zq) and _largest(wq[shared:]) > ZERO
    for start in range(0, shared, BLOCK):
        part = slice(start, min(shared, start + BLOCK))
        sums = _meet(zp[part], wp[part], top_p, share_p, zq[part], wq[part], top_q, share_q, lanes)
        overlap, p_apart, q_apart = overlap + sums[0], p_apart + sums[1], q_apart + sums[2]
        if least_q > -np.inf:
            p_outside |= _any_cut_off(wp[part], zq[part], least_q)
        if least_p > -np.inf:
            q_outside |= _any_cut_off(wq[part], zp[part], least_p)
    out.overlap = min(1.0, overlap)
    out.kl_target_draft = np.inf if p_outside else max(0.0, p_apart + math.log(of_q[TOTAL] / of_p[TOTAL]))
    out.kl_draft_target = np.inf if q_outside else max(0.0, math.log(of_p[TOTAL] / of_q[TOTAL]) - q_apart)


@compiled
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
    lanes = np.empty((3, LANES), F)
    for i in range(len(token)):
        _side(matrix_row(places[0], i, like), temperatures[0], least[0, i], zp, wp, lanes, of_p)
        ours = out[0][i]
        ours.target_top, ours.target_top_prob, ours.target_second_prob = of_p[TOP], of_p[TOP_PROB], of_p[SECOND_PROB]
        ours.target_margin, ours.target_entropy = of_p[MARGIN], of_p[ENTROPY]
        ours.target_token_prob = _weight_of(zp, token[i], of_p[LARGEST], least[0, i]) / of_p[TOTAL]
        for model in range(1, len(places)):
            zq, wq, cut, theirs = z[: places[model, 2]], w[: places[model, 2]], least[model, i], out[1][i, model - 1]
            _side(matrix_row(places[model], i, like), temperatures[model], cut, zq, wq, lanes, of_q)
            index = int(of_q[TOP])
            theirs.draft_top, theirs.draft_top_prob = index, of_q[TOP_PROB]
            theirs.draft_margin, theirs.draft_entropy = of_q[MARGIN], of_q[ENTROPY]
            theirs.draft_token_prob = _weight_of(zq, token[i], of_q[LARGEST], cut) / of_q[TOTAL]
            theirs.target_prob_of_draft_top = _weight_of(zp, index, of_p[LARGEST], least[0, i]) / of_p[TOTAL]
            theirs.target_rank_of_draft_top, theirs.draft_rank_of_token = _rank(zp, index), _rank(zq, token[i])
            _pair((zp, wp, least[0, i], of_p), (zq, wq, cut, of_q), lanes, theirs)
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
