"""The learning curve of a draft head, and what more data would bring: a band between two scenarios, and its backtest.

The miss rate falls with the number of training units N as m(N) = e + A N^-b, with floor <= e, A >= 0 and b > 0. Three
parameters are not identified by four sizes: a curve that saturates soon (e near the present miss rate, b large) and one that
goes on as before (e at the floor, b small) fit alike. So there is no one forecast. The band at a size holds what every curve
predicts that the measurements do not contradict (profile likelihood over e and b), and its two ends are the scenarios.

Noise is that of test units, which all heads share, so that most of it cancels between sizes, and that of training: heads of
one size that were trained on other units of the same traffic, from other random numbers, differ by the seeds' spread. Both
are sums over units, so their covariance is known without drawing samples (the linearised paired bootstrap of `estimate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import fdtri

from alphaprof.stats.estimate import Array, Interval, quantile
from alphaprof.stats.formulas import alpha_for, tokens_per_round

FEWEST_SIZES = 3  # of which the largest is hidden from its backtest
FEWEST_UNITS = 5  # independent test units without which noise is not known
FACTORS = (2, 4)  # of the largest size: no forecast goes beyond
EXPONENTS = np.geomspace(0.01, 2.0, 200)  # b: nearly a straight line over log N, to nearly saturated after a doubling
ROUNDING = 1e-9  # by which e and A may lie below their least
SMALLEST = 1e-9  # variance of a measurement that seems to have none, as a share of the largest
FITS = 0.93  # level of `fits`: by simulation it withholds at most 5% of the forecasts inside the family, on average


@dataclass(frozen=True)
class Measured:
    """The miss rate of one head, in [0, 1], and what each test unit contributes to its error, [units]."""

    miss: float
    influences: Array


@dataclass(frozen=True)
class LearningCurve:
    """Mean miss rates by ascending size, [sizes], with the covariance of their errors, [sizes, sizes], and its degrees of
    freedom. `spread`: standard deviation between heads of one size; `floor`: the least miss rate that is possible.
    """

    sizes: Array
    miss: Array
    covariance: Array
    freedom: float
    spread: float
    floor: float

    @classmethod
    def of(cls, heads: Sequence[tuple[int, Sequence[Measured]]], floor: float) -> LearningCurve:
        """From the heads of each size (training units), all measured on the same test units. The spread is pooled over
        sizes, since the largest often has one head. Raises `ValueError` if no size has two, or for too few test units.
        """
        ordered = sorted(heads, key=lambda each: each[0])
        values = [np.array([head.miss for head in same]) for _, same in ordered]
        repeats = sum(len(same) - 1 for same in values)
        units = len(ordered[0][1][0].influences)
        if not repeats or units < FEWEST_UNITS:
            raise ValueError("noise is not known")
        spread = math.sqrt(sum(float(((same - same.mean()) ** 2).sum()) for same in values) / repeats)
        errors = np.array([np.mean([head.influences for head in same], axis=0) for _, same in ordered])
        of_training = np.diag([spread**2 / len(same) for same in values])
        covariance = errors @ errors.T + of_training
        covariance += np.eye(len(ordered)) * max(float(covariance.max()), SMALLEST) * SMALLEST
        means = np.array([same.mean() for same in values])
        sizes = np.array([size for size, _ in ordered], dtype=np.float64)
        return cls(sizes, means, covariance, min(units - 1, repeats), spread, floor)

    def without_largest(self) -> LearningCurve:
        """Return the curve up to its last size but one."""
        return LearningCurve(
            self.sizes[:-1], self.miss[:-1], self.covariance[:-1, :-1], self.freedom, self.spread, self.floor
        )

    @property
    def ratios(self) -> Array:
        """Sizes as shares of the largest."""
        return np.asarray(self.sizes / self.sizes[-1])

    @property
    def last_gain(self) -> float:
        """By how much the miss rate fell from the last size but one to the largest."""
        return float(self.miss[-2] - self.miss[-1])


@dataclass(frozen=True)
class Scenarios:
    """Miss rates that a curve allows at a size. `value`: mean over curves, weighted by their likelihood; `low` ("goes on as
    before") and `high` ("saturates"): ends of the band.
    """

    size: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Backtest:
    """The largest size as it was predicted from all smaller ones, and as it was measured; miss rates."""

    predicted: Scenarios
    measured: float

    @property
    def inside(self) -> bool:
        """Whether the band held what was measured."""
        return self.predicted.low <= self.measured <= self.predicted.high


def scenarios(curve: LearningCurve, size: float, confidence: float) -> Scenarios:
    """Return the miss rate of traffic like this that heads trained on `size` units would have."""
    return _band(curve, size, None, confidence)


def backtest(curve: LearningCurve, confidence: float) -> Backtest:
    """Hide the largest size and predict it, on the same test units and for as many heads as it has: what test units have
    in common does not count against the forecast.
    """
    seen, joint = curve.without_largest(), curve.covariance
    weights = np.linalg.solve(seen.covariance, joint[:-1, -1])
    variance = float(joint[-1, -1] - weights @ joint[:-1, -1])
    predicted = _band(seen, float(curve.sizes[-1]), (weights, max(variance, 0.0)), confidence)
    return Backtest(predicted, float(curve.miss[-1]))


def fits(curve: LearningCurve) -> bool:
    """Return whether a curve of the family passes the measured sizes as closely as their joint errors say. A learning curve
    that bends otherwise (one that speeds up, or stops) has no forecast. Chi^2 of the best fit against F, whose first degrees
    of freedom are what three parameters leave over; at least 1, since limits on e, A and b contradict three sizes as well.
    """
    over = max(len(curve.sizes) - 3, 1)
    return bool(_best_fit(_faces(curve, EXPONENTS))[0].min() <= over * fdtri(over, curve.freedom, FITS))


def _band(curve: LearningCurve, size: float, measured: tuple[Array, float] | None, confidence: float) -> Scenarios:
    """Profile likelihood of the miss rate at a size over e, A and b. `measured`: of a size that was, how its error follows
    from those of the others, [sizes], and the variance of the rest; None: the truth is asked for.

    Given b the curve is linear in e and A, so that what fits is an ellipse, cut where e is at the floor and where A is 0. A
    prediction, linear too, has its ends on the ellipse or on the ellipses of these cuts.
    """
    room = quantile((1 + confidence) / 2, curve.freedom) ** 2
    b, faces = EXPONENTS, _faces(curve, EXPONENTS)
    fits = np.flatnonzero(_best_fit(faces)[0] <= room + float(_best_fit(faces)[0].min()))
    b = np.geomspace(b[max(fits[0] - 1, 0)], b[min(fits[-1] + 1, len(b) - 1)], len(b))  # as fine where the noise is small
    faces = _faces(curve, b)
    chi2, best = _best_fit(faces)
    weights, variance = measured or (np.zeros(len(curve.sizes)), 0.0)
    ahead = _basis(np.array([size / curve.sizes[-1]]), b)[:, 0] - np.einsum("bsk,s->bk", _basis(curve.ratios, b), weights)
    base = float(curve.miss @ weights)
    low, high = (base + _end(faces, ahead, room + float(chi2.min()), variance, sign) for sign in (-1.0, 1.0))
    likely = np.exp((chi2.min() - chi2) / 2)
    value = base + float(((best * ahead).sum(axis=1) * likely).sum() / likely.sum())
    least = curve.floor if measured is None else 0.0
    return Scenarios(size, *(min(max(miss, least), 1.0) for miss in (value, low, high)))


@dataclass(frozen=True)
class _Face:
    """Curves with some of (e, A) free, the others at their `least`, for every exponent: the best of them, [exponents, 2],
    which may lie below the least, its chi^2, [exponents], and the inverse of the information on what is free.
    """

    free: list[int]
    best: Array
    chi2: Array
    inverse: Array
    least: Array

    @property
    def allowed(self) -> Array:
        """Chi^2 of the best where it is not below the least, else infinite."""
        return np.where((self.best < self.least).any(axis=1), np.inf, self.chi2)


def _basis(ratios: Array, exponents: Array) -> Array:
    """Return what e and A contribute at sizes that are given as shares of the largest, [exponents, sizes, 2]."""
    powers = ratios ** -exponents[:, None]
    return np.stack([np.ones_like(powers), powers], axis=2)


def _faces(curve: LearningCurve, exponents: Array) -> list[_Face]:
    """Fit e and A, each alone, and neither."""
    precision, least = np.linalg.inv(curve.covariance), np.array([curve.floor, 0.0])
    basis, faces = _basis(curve.ratios, exponents), []
    for free in ([0, 1], [1], [0], []):
        best, part = np.tile(least, (len(basis), 1)), basis[:, :, free]
        inverse = np.linalg.inv(np.einsum("bsk,st,btl->bkl", part, precision, part))
        best[:, free] += np.einsum("bkl,bsl,st,bt->bk", inverse, part, precision, curve.miss - basis @ least)
        off = curve.miss - np.einsum("bsk,bk->bs", basis, best)
        chi2 = np.einsum("bs,st,bt->b", off, precision, off)
        faces.append(_Face(free, best, chi2, inverse, least))
    return faces


def _best_fit(faces: Sequence[_Face]) -> tuple[Array, Array]:
    """Return the least chi^2 for every exponent, [exponents], and the (e, A) that has it, [exponents, 2]."""
    every = np.stack([face.allowed for face in faces])
    which = np.argmin(every, axis=0)
    return every.min(axis=0), np.stack([face.best for face in faces])[which, np.arange(len(which))]


def _end(faces: Sequence[_Face], ahead: Array, most: float, variance: float, sign: float) -> float:
    """Return the least (`sign` -1) or the largest (1) prediction of curves whose chi^2 is at most `most`. `ahead`
    [exponents, 2]: what e and A contribute to it; `variance` of what is added to it, whose own chi^2 counts as well.
    """
    found = []
    for face in faces:
        toward = np.einsum("bkl,bl->bk", face.inverse, ahead[:, face.free])
        length = np.sqrt(np.maximum((toward * ahead[:, face.free]).sum(axis=1) + variance, np.finfo(float).tiny))
        room = np.sqrt(np.maximum(most - face.chi2, 0.0))
        place = face.best.copy()
        place[:, face.free] += sign * (room / length)[:, None] * toward
        allowed = (face.chi2 <= most) & (place >= face.least - ROUNDING).all(axis=1)
        ends = np.einsum("bk,bk->b", face.best, ahead) + sign * room * length
        found.append(np.where(allowed, sign * ends, -np.inf))
    return sign * float(np.max(found))


def miss_of_tokens(tokens: float, gamma: int) -> float:
    """Return the miss rate at which independent positions would have `tokens` per round: the scale on which tokens per round
    are extrapolated, since they end at gamma + 1 and a power law does not.
    """
    alpha = alpha_for(min(max(tokens, 1.0), gamma + 1.0), gamma)
    return 1.0 - (1.0 if alpha is None else alpha)


def tokens_of_miss(miss: float, gamma: int) -> float:
    """Inverse of `miss_of_tokens`."""
    return float(tokens_per_round(1.0 - min(max(miss, 0.0), 1.0), gamma))


def measured_tokens(tokens: float, influences: Array, gamma: int) -> Measured:
    """Return tokens per round of a head, and what each unit contributes to their error, as a miss rate."""
    miss, step = miss_of_tokens(tokens, gamma), 1e-4
    slope = (tokens_of_miss(min(miss + step, 1.0), gamma) - tokens_of_miss(max(miss - step, 0.0), gamma)) / (
        min(miss + step, 1.0) - max(miss - step, 0.0)
    )
    return Measured(miss, influences / slope)


def tokens_floor(share: float, gamma: int) -> float:
    """Return the least miss rate, on the scale of tokens per round, where a `share` of tokens can never be proposed: each of
    them ends a round, so that no more than 1 / share tokens come from one, however they lie.
    """
    return miss_of_tokens(1 / share, gamma) if share * (gamma + 1) > 1 else 0.0


def as_tokens(found: Scenarios, gamma: int) -> Interval:
    """Return tokens per round of both scenarios and between them."""
    return Interval(*(tokens_of_miss(miss, gamma) for miss in (found.value, found.high, found.low)))


def first_size(curve: LearningCurve, reached: Callable[[Scenarios], bool], confidence: float) -> float | None:
    """Return the least of the measured largest size and its multiples up to the last of FACTORS at which a band satisfies a
    condition that more data make easier; None if none does.
    """
    largest = float(curve.sizes[-1])
    for factor in np.geomspace(1, FACTORS[-1], 25):
        if reached(scenarios(curve, largest * float(factor), confidence)):
            return largest * float(factor)
    return None
