"""Point estimates with intervals from per-document totals. Documents (or clusters of them) are the sampling unit.

Positions of one document depend on each other; an interval that treats them as independent is several times too narrow.
Sums are divided last: an estimate is sum(totals) / sum(counts), never a mean of per-document ratios.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Estimate:
    """A value with a two-sided interval; `documents` is the number of independent units behind it."""

    value: float
    low: float
    high: float
    documents: int


@dataclass(frozen=True)
class Ratio:
    """sum(totals) / sum(counts) with its standard error over documents (infinite for fewer than two)."""

    value: float
    stderr: float
    documents: int


def ratio(totals: Array, counts: Array) -> Ratio:
    """Ratio of sums and its linearised standard error; inputs [documents].

    SE^2 = D / (D - 1) * sum((A_d - r n_d)^2) / (sum n_d)^2 (the ratio estimator for cluster samples). Documents without
    counts carry no information and are left out. Raises `ValueError` when nothing is left.
    """
    kept = counts > 0
    totals, counts = totals[kept].astype(float), counts[kept].astype(float)
    documents = len(counts)
    if documents == 0:
        raise ValueError("no document has a count")
    value = totals.sum() / counts.sum()
    if documents == 1:
        return Ratio(float(value), math.inf, 1)
    residuals = totals - value * counts
    stderr = math.sqrt(documents / (documents - 1) * float((residuals**2).sum())) / float(counts.sum())
    return Ratio(float(value), stderr, documents)


def bounded_ratio(totals: Array, counts: Array, low: float, high: float) -> Ratio:
    """`ratio` for documents whose own ratios lie between `low` and `high` by construction.

    Documents that all agree leave no spread to estimate from, which must not become certainty: the standard error is then
    that of one document in all of them lying at the far end of what is possible.
    """
    found = ratio(totals, counts)
    if found.documents > 1 and found.stderr <= 1e-12 * found.value:
        return Ratio(found.value, (high - low) / found.documents, found.documents)
    return found


def by_cluster(clusters: Array, *columns: Array) -> tuple[Array, ...]:
    """Each column summed over equal clusters: [documents] -> [clusters]."""
    _, index = np.unique(clusters, return_inverse=True)
    return tuple(np.bincount(index, weights=column) for column in columns)


def quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t; infinite without a degree of freedom."""
    return float(stdtrit(freedom, probability)) if freedom > 0 else math.inf


def share_interval(estimate: Ratio, confidence: float) -> Estimate:
    """Interval of a share in [0, 1]: linear t, cut to [0, 1]. Where all documents agree on 0 or on 1 there is no spread to
    estimate from; the interval is then exact for the share of documents that would differ (Clopper-Pearson at 0 or D).
    """
    tail = (1 - confidence) / 2
    if estimate.documents < 2:
        return Estimate(estimate.value, 0.0, 1.0, estimate.documents)
    if estimate.stderr == 0 and estimate.value in (0.0, 1.0):
        agreed = tail ** (1 / estimate.documents)
        low, high = (agreed, 1.0) if estimate.value == 1.0 else (0.0, 1 - agreed)
        return Estimate(estimate.value, low, high, estimate.documents)
    half = quantile(1 - tail, estimate.documents - 1) * estimate.stderr
    return Estimate(estimate.value, max(0.0, estimate.value - half), min(1.0, estimate.value + half), estimate.documents)


def log_interval(value: float, relative_error: float, freedom: float, tail: float) -> tuple[float, float]:
    """Lower and upper bound of a positive quantity on the log scale, each missing the truth with probability `tail`."""
    half = quantile(1 - tail, freedom) * relative_error
    if not math.isfinite(half):
        return 0.0, math.inf
    return value * math.exp(-half), value * math.exp(half)
