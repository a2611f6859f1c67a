"""Student's t and the normal distribution, for one number at a time: `scipy.special` has both, and importing it takes a
sixth of a report's time.

The tail of t above v, with f degrees of freedom, is I_x(f / 2, 1 / 2) / 2 with x = f / (f + v^2), the regularized
incomplete beta function by a continued fraction (Didonato and Morris 1992, doi:10.1145/131766.131776).
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

NORMAL = NormalDist()
SERIES = 20.0  # from here on gamma functions are divided by a series


@lru_cache(maxsize=4096)
def quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t, with infinite `freedom` of the normal distribution; infinite without a degree of freedom."""
    if freedom <= 0 or not 0 < probability < 1:
        return -math.inf if freedom > 0 and probability <= 0 else math.inf
    if math.isinf(freedom):
        return NORMAL.inv_cdf(probability)
    if probability == 0.5:
        return 0.0
    sought = min(probability, 1 - probability)
    low, value = 0.0, max(1.0, -NORMAL.inv_cdf(sought))
    while _tail(value, freedom) > sought:
        low, value = value, 2 * value
    high = value
    for _ in range(200):  # Newton's steps on the logarithm of the tail, halving where one leaves what is known
        found = _tail(value, freedom)
        low, high = (value, high) if found > sought else (low, value)
        density = _ratio(freedom / 2) / math.sqrt(math.pi * freedom) * _power(value, freedom, freedom / 2 + 0.5)
        step = value + found / density * math.log(found / sought)
        step = step if low < step < high else (low + high) / 2
        if abs(step - value) <= 1e-15 * abs(step):
            break
        value = step
    return math.copysign(value, probability - 0.5)


def probability(value: float, freedom: float) -> float:
    """Return the probability that Student's t is at most `value`, with infinite `freedom` the normal one; 0 without any."""
    if math.isinf(freedom):
        return math.erfc(-value / math.sqrt(2)) / 2
    if freedom <= 0:
        return 0.0
    above = _tail(abs(value), freedom)
    return above if value < 0 else 1 - above


def _tail(value: float, freedom: float) -> float:
    """Return the probability that t is above a value of at least 0."""
    if value == 0 or math.isinf(value):
        return 0.0 if value else 0.5
    half, square = freedom / 2, value * value
    x, y = freedom / (freedom + square), square / (freedom + square)
    front = _power(value, freedom, half) * math.sqrt(y / math.pi) * _ratio(half)
    if x < (half + 1) / (half + 2.5):  # where the fraction converges fast
        return front / _fraction(half, 0.5, x, y) / 2
    return 0.5 - front / _fraction(0.5, half, y, x) / 2


def _power(value: float, freedom: float, exponent: float) -> float:
    """Return (1 + value^2 / freedom) to the power -exponent."""
    return math.exp(-exponent * math.log1p(value * value / freedom))


def _ratio(a: float) -> float:
    """Return gamma(a + 1/2) / gamma(a)."""
    if a < SERIES:
        return math.gamma(a + 0.5) / math.gamma(a)
    b = 1 / (a * a)
    return math.sqrt(a) * math.exp((-1 / 8 + b * (1 / 192 + b * (-1 / 640 + b * (17 / 14336 - b * 31 / 18432)))) / a)


def _fraction(a: float, b: float, x: float, y: float) -> float:
    """Return x^a y^b / B(a, b) / I_x(a, b), with y = 1 - x, by Lentz's method: all parts of the fraction add up, so that no
    digit is lost where a is large and x is nearly 1.
    """
    lead = a * y - b * x + 1  # a - (a + b) x + 1
    found = c = a * lead / (a + 1)
    d = 0.0
    for n in range(1, 10_000):
        odd = a + 2 * n - 1
        part = (a + n - 1) * (a + b + n - 1) * n * (b - n) * (x / odd) ** 2
        whole = n + n * (b - n) * x / odd + (a + n) * (lead + n * (1 + y)) / (odd + 2)
        d, c = 1 / (whole + part * d), whole + part / c
        found *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return found
