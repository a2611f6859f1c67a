"""Differences of two drafts on the same documents: what the documents share cancels out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alphaprof.analysis.estimate import Estimate, Ratio, influences, quantile, ratio

Array = np.ndarray[Any, Any]


def share_difference(first: tuple[Array, Array], second: tuple[Array, Array], confidence: float) -> Estimate:
    """Second share less the first, each sum(totals) / sum(counts) over the same units, [units] in the same order.

    Raises `ValueError` where a side has no count.
    """
    one, two = ratio(*first), ratio(*second)
    return _difference(two.value - one.value, _errors(second, two) - _errors(first, one), (one, two), confidence, 1.0)


def inverse_difference(first: tuple[Array, Array], second: tuple[Array, Array], confidence: float, reach: float) -> Estimate:
    """Second quotient less the first, each sum(counts) / sum(totals): tokens per round from (rounds, tokens).

    `reach`: how far two such quotients can lie apart at all.
    """
    one, two = ratio(*first), ratio(*second)
    errors = _errors(first, one) / one.value**2 - _errors(second, two) / two.value**2  # d(1/r) = -dr / r^2
    return _difference(1 / two.value - 1 / one.value, errors, (one, two), confidence, reach)


def _errors(side: tuple[Array, Array], found: Ratio) -> Array:
    """What each unit contributes to the error of a side; with fewer than two there is nothing to tell it from."""
    return influences(*side) if found.documents > 1 else np.zeros(len(side[0]))


def _difference(value: float, errors: Array, sides: tuple[Ratio, Ratio], confidence: float, reach: float) -> Estimate:
    """A difference with its t interval. Where all units agree perfectly there is no spread to estimate from: the interval is
    then what units that differ could make of it, at the most of them that so many agreeing ones allow (Clopper-Pearson
    at D of D).
    """
    documents = min(side.documents for side in sides)
    tail = (1 - confidence) / 2
    if documents < 2:
        return Estimate(value, -reach, reach, documents)
    stderr = math.sqrt(float((errors**2).sum()))
    half = quantile(1 - tail, min(side.freedom for side in sides)) * stderr
    if stderr <= 1e-9 * reach:
        half = reach * (1 - tail ** (1 / documents))
    return Estimate(value, max(-reach, value - half), min(reach, value + half), documents)
