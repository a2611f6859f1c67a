"""Do accepted tokens come in runs? The lag-1 autocorrelation of acceptance, which the textbook formula takes to be 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alphaprof.stats.estimate import Estimate, by_cluster, quantile

Array = np.ndarray[Any, Any]


def autocorrelation(clusters: Array, sums: tuple[Array, Array, Array, Array], confidence: float) -> Estimate | None:
    """Pearson's correlation of acceptance at neighbouring positions, pooled over documents; `clusters` [documents] are the
    independent units and `sums` the columns PAIR_COUNTS of totals, each [documents].

    A domain whose documents differ in their alpha is bursty for that alone: rounds meet it all the same. The interval is
    that of the delete-one jackknife over units, cut to [-1, 1]; all of that where there are fewer than two units, or where
    leaving one out leaves nothing to correlate. None where there is no pair, or where acceptance never or always happens.
    """
    pairs, *rest = by_cluster(clusters, *sums)
    kept = pairs > 0
    columns = np.stack([pairs, *rest])[:, kept]
    whole = columns.sum(1)
    value = float(_correlation(whole[:, None])[0])
    if not math.isfinite(value):
        return None
    units = columns.shape[1]
    others = _correlation(whole[:, None] - columns)
    if units < 2 or not np.isfinite(others).all():
        return Estimate(value, -1.0, 1.0, units)
    stderr = math.sqrt((units - 1) / units * float(((others - others.mean()) ** 2).sum()))
    half = quantile((1 + confidence) / 2, units - 1) * stderr
    return Estimate(value, max(-1.0, value - half), min(1.0, value + half), units)


def _correlation(columns: Array) -> Array:
    """Pearson's correlations from sums [4, n]; NaN where nothing varies."""
    pairs, first, second, both = columns
    with np.errstate(invalid="ignore", divide="ignore"):
        first, second, both = first / pairs, second / pairs, both / pairs
        spread = first * (1 - first) * second * (1 - second)
        varied = np.where(spread > 1e-12, spread, np.nan)  # what rounding leaves of 0
        return np.asarray((both - first * second) / np.sqrt(varied))
