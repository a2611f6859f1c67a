"""Point estimates with intervals from per-document totals. Documents (or clusters of them) are the sampling unit.

Positions of one document depend on each other; an interval that treats them as independent is several times too narrow.
Sums are divided last: an estimate is sum(totals) / sum(counts), never a mean of per-document ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.stats.student import probability, quantile

Array = np.ndarray[Any, Any]
CONTROL_DOCUMENTS = 10  # fewest documents for which a control variate is fitted
SPARSE = 16  # numbers up to this multiple of their count are counted in a table
MISSED = 0.05  # of samples may contain no document of another kind, although there are some
NO_SPREAD = 1e-6  # relative standard error below which documents agree within the precision of float32 columns


@dataclass(frozen=True)
class Interval:
    """A point estimate with a two-sided interval at the report's confidence; `high` may be infinite."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """sum(totals) / sum(counts) with its standard error over documents (infinite for fewer than two) and the degrees of
    freedom that the standard error was estimated with. `third`: third central moment of the estimate; above 0 if a few
    documents lie far above the others.
    """

    value: float
    stderr: float
    documents: int
    freedom: float
    third: float = 0.0

    @property
    def skewness(self) -> float:
        """The third central moment over the variance, in units of the value; 0 if nothing is known of either."""
        variance = self.stderr**2
        return self.third / variance if 0 < variance < math.inf else 0.0


def ratio(totals: Array, counts: Array, strata: Array | None = None, sizes: Array | None = None) -> Ratio:
    """Ratio of sums and its linearised standard error; inputs [documents].

    SE^2 = k * sum((A_d - r n_d)^2) / (sum n_d)^2, the ratio estimator for cluster samples with Bell and McCaffrey's
    correction k and degrees of freedom (2002, "Bias reduction in standard errors for linear regression with multi-stage
    samples"): D / (D - 1) and D - 1 where all documents are of one length, more and fewer where some are much longer.
    `strata` [documents]: numbers of the strata that documents were drawn from, a fixed number from each. What strata differ
    by is then no sampling error (Cochran, "Sampling Techniques", 1977, section 6.11): residuals are centred in each stratum,
    which has a correction of its own, and the degrees of freedom are Satterthwaite's. None: one stratum. Where what is
    sampled are clusters, `sizes` has the number of documents in each: their sum is what is fixed, so residuals are taken
    against the sizes. None: one each.
    Documents without counts carry no information and are left out; at least one has to have some.
    """
    kept = counts > 0
    if not kept.all():
        totals, counts = totals[kept], counts[kept]
        strata, sizes = (None if each is None else each[kept] for each in (strata, sizes))
    documents, value = len(counts), float(totals.sum()) / float(counts.sum())
    if documents == 1:
        return Ratio(value, math.inf, 1, 0.0)
    errors, freedom = _influences(totals, counts, strata, sizes)
    effective = float(counts.sum()) ** 2 / float(np.square(counts, dtype=np.float64).sum())  # Kish's number of documents
    squares = errors * errors
    third = float((squares * errors).sum()) * effective / max(effective - 2, 0.5)
    return Ratio(value, math.sqrt(float(squares.sum())), documents, freedom, third)


def small_sample(counts: Array) -> tuple[float, float]:
    """Bell and McCaffrey's correction and degrees of freedom for a ratio over documents of sizes `counts`, all positive.

    With h = n / sum n and y the documents' own ratios, the squared residuals add up to y' M y with
    M = (I - 1 h')' diag(h^2) (I - 1 h'); were the documents alike, the correction sum h^2 / tr M would make that unbiased,
    with (tr M)^2 / tr M^2 degrees of freedom. M_ij = h_i h_j (s - h_i - h_j), on the diagonal with h_i^2 added and
    s = sum h^2, so both traces are sums over documents. What the longest one has in them stands apart: where it is nearly
    everything, terms of size 1 would have to cancel.
    """
    place = int(np.argmax(counts))
    shares = counts / counts.sum()
    rest, longest = np.delete(shares, place), float(shares[place])
    powers = rest.copy()
    sums = [float(powers.sum())]
    for _ in range(4):
        powers *= rest
        sums.append(float(powers.sum()))
    p1, p2, p3, p4, p5 = sums
    s = longest**2 + p2
    own = longest**2 * (p1**2 + p2)
    lead = longest * p1 - p2  # M of the longest and of document j is -h_j longest (lead + h_j)
    across = longest**2 * (lead**2 * p2 + 2 * lead * p3 + p4)
    among = (1 + 2 * s) * p4 - 4 * p5 + (s * p2 - 2 * p3) ** 2 + 2 * (p2 * p4 - p3**2)
    trace = own + (1 + s) * p2 - 2 * p3
    return s / trace, trace**2 / (own**2 + 2 * across + among)


def influences(totals: Array, counts: Array) -> Array:
    """Return what each document contributes to the error of `ratio`, [documents]: the squares add up to SE^2, the values to
    0.

    0 for documents without counts. Needs two documents with counts.
    """
    kept = counts > 0
    errors = np.zeros(len(counts))
    errors[kept], _ = _influences(totals[kept], counts[kept], None)
    return errors


def weighted_sum(weights: Sequence[float], ratios: Sequence[Ratio], sides: Sequence[tuple[Array, Array, Array]]) -> Ratio:
    """Return the sum of weights x ratios with its error. `sides`: totals and counts that `ratio` made each of, [documents],
    and the different clusters that these are sums of, which may lie in several.

    Errors add up as independent ones, except for such clusters, whose covariance counts if it is above 0: that errors cancel
    is too much to conclude from a few. The degrees of freedom are Welch and Satterthwaite's; at most the sum of all, less
    the share of it that clusters in several count more than once.
    """
    variances = [(weight * one.stderr) ** 2 for weight, one in zip(weights, ratios, strict=True)]
    thirds = [weight**3 * one.third for weight, one in zip(weights, ratios, strict=True)]
    value, variance, third = (
        sum(weight * one.value for weight, one in zip(weights, ratios, strict=True)),
        sum(variances),
        sum(thirds),
    )
    documents = distinct(np.concatenate([clusters[counts > 0] for _, counts, clusters in sides]))
    if documents < sum(one.documents for one in ratios):
        third = sum(map(math.cbrt, thirds)) ** 3
        if math.isfinite(variance):
            errors = [weight * influences(*side[:2]) for weight, side in zip(weights, sides, strict=True)]
            (joint,) = by_cluster(np.concatenate([clusters for _, _, clusters in sides]), np.concatenate(errors))
            variance += max(0.0, float((joint**2).sum()) - sum(float((each**2).sum()) for each in errors))
    freedom = 0.0
    if math.isfinite(variance):
        moments = sum(each**2 / one.freedom for each, one in zip(variances, ratios, strict=True) if each > 0)
        once = (documents - 1) / sum(one.documents - 1 for one in ratios)
        freedom = once * sum(one.freedom for one in ratios)
        freedom = min(sum(variances) ** 2 / moments, freedom) if moments > 0 else freedom
    return Ratio(value, math.sqrt(variance), documents, freedom, third)


def _influences(totals: Array, counts: Array, strata: Array | None, sizes: Array | None = None) -> tuple[Array, float]:
    """Return the influences of two or more documents that all have counts, and the degrees of freedom of their squares'
    sum.
    """
    size = counts.sum()
    errors = (totals - totals.sum() / size * counts) / size
    codes = None if strata is None else without_single(strata)
    if codes is None or not codes.any():
        correction, freedom = small_sample(counts)
        return np.asarray(errors * math.sqrt(correction)), freedom
    variances, freedoms = [], []
    for stratum in range(codes.max() + 1):
        rows = codes == stratum
        size = np.ones(rows.sum()) if sizes is None else sizes[rows]
        correction, freedom = small_sample(counts[rows])
        errors[rows] = math.sqrt(correction) * (errors[rows] - errors[rows].sum() / size.sum() * size)
        variances.append(float((errors[rows] ** 2).sum()))
        freedoms.append(freedom)
    moments = sum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return errors, sum(variances) ** 2 / moments if moments > 0 else sum(freedoms)


def without_single(strata: Array) -> Array:
    """Return the strata of units as numbers from 0 without a gap, those of one unit put together; if a single unit is left
    over, it goes to the smallest of the others. [units]
    """
    _, codes = np.unique(strata, return_inverse=True)
    sizes = np.bincount(codes)
    single = np.flatnonzero(sizes == 1)
    if len(single) == 1 and len(sizes) > 1:
        sizes[single] = len(codes) + 1
        codes[codes == single] = np.argmin(sizes)
    elif len(single):
        codes[np.isin(codes, single)] = single[0]
    return np.unique(codes, return_inverse=True)[1]


def controlled(totals: Array, counts: Array, control: Array) -> Array | None:
    """Return totals less what a control variate explains of their error, [documents]; None if there is nothing to gain.

    `control` has mean 0 whatever the totals, so subtracting a multiple of it changes no expectation. The multiple of each
    document is the least-squares slope of residuals over all *other* documents: a slope fitted to a document's own error
    would make the ratio too small and its interval too narrow. With few documents fitting costs more than it gains.
    """
    kept = counts > 0
    if kept.sum() < CONTROL_DOCUMENTS or not control[kept].any():
        return None
    y, n, c = (np.asarray(values[kept], dtype=np.float64) for values in (totals, counts, control))

    def others(values: Array) -> Array:
        return np.asarray(values.sum() - values)

    share, drift = others(y) / others(n), others(c) / others(n)
    together = others(y * c) - share * others(n * c) - drift * others(y * n) + share * drift * others(n * n)
    spread = others(c * c) - 2 * drift * others(c * n) + drift**2 * others(n * n)
    slope = np.divide(together, spread, out=np.zeros_like(spread), where=spread > 1e-9 * others(c * c))
    adjusted = np.array(totals, dtype=np.float64)
    adjusted[kept] -= slope * c
    return adjusted


def unseen(documents: int) -> float:
    """Return the share of documents that a bound takes to be of another kind than all that were seen: the largest that goes
    unseen in 5% of samples, 1 - 0.05^(1 / documents) (Clopper-Pearson at none of them; about 3 / documents).

    No bound may be nearer than what that share at the far end of what is possible would make of it. Agreement is
    not certainty, and one document that differs is not a gain (docs/decisions/020).
    """
    return float(1 - MISSED ** (1 / documents))


def distances(stderr: float, freedom: float, skewness: float, tail: float) -> tuple[float, float, float]:
    """Return how far a bound that misses with probability `tail` lies from an estimate by t alone, and how much farther it
    lies below and above where the estimate is skewed; all in units of the estimate.

    A skewed bound is higher by skewness / 6 (1 + 2 t^2), `skewness` as `Ratio.skewness` (Johnson 1978, "Modified t tests and
    confidence intervals for asymmetrical populations").
    """
    t = quantile(1 - tail, freedom)
    skew = skewness / 6 * (1 + 2 * t**2) if skewness else 0.0
    return t * stderr if stderr > 0 else 0.0, max(-skew, 0.0), max(skew, 0.0)


def nearest_mixture(columns: Array, wanted: Array) -> Array:
    """Return weights from 0 on [columns] whose sum of `columns` [rows, columns] is nearest to `wanted` [rows] by least
    squares. The first row counts a thousand times as much: if it is all 1, the weights add up to 1.
    """
    from scipy.optimize import nnls  # which takes long to import

    rows = np.array([1e3, *np.ones(len(wanted) - 1)])
    return np.asarray(nnls(columns * rows[:, None], wanted * rows)[0])


def by_cluster(clusters: Array, *columns: Array) -> tuple[Array, ...]:
    """Return each column summed over equal clusters, [documents] -> [clusters] in ascending order. Numbers take no sorting,
    and where each has one document in that order there is nothing to add up.
    """
    if _one_each(clusters):
        return tuple(np.asarray(column, dtype=np.float64) for column in columns)
    if not _counts(clusters):
        _, clusters = np.unique(clusters, return_inverse=True)
    places = np.flatnonzero(np.bincount(clusters))
    return tuple(np.bincount(clusters, weights=column).take(places) for column in columns)


def present(clusters: Array) -> Array:
    """Return the different clusters, ascending."""
    if _one_each(clusters):
        return clusters
    return np.flatnonzero(np.bincount(clusters)) if _counts(clusters) else np.unique(clusters)


def distinct(clusters: Array) -> int:
    """Return how many different clusters there are."""
    return len(present(clusters))


def _one_each(clusters: Array) -> bool:
    """Return whether clusters are numbers that ascend: no two documents are of one."""
    return bool(clusters.dtype.kind == "i" and np.all(clusters[1:] > clusters[:-1]))


def _counts(clusters: Array) -> bool:
    """Return whether clusters are numbers that a table of all of them is made for as soon as they are sorted."""
    return bool(clusters.dtype.kind == "i" and clusters.min() >= 0 and clusters.max() < SPARSE * len(clusters))


def rank_correlation(first: Array, second: Array) -> tuple[float, float]:
    """Spearman's rank correlation of two columns [n] and its two-sided p-value by t; 0 and 1 if there is none to tell."""
    both = zip([np.sort(each) for each in (first, second)], (first, second), strict=True)
    ranks = np.array([np.searchsorted(row, each, "left") + np.searchsorted(row, each, "right") for row, each in both])
    if len(first) < 4 or not np.ptp(ranks, axis=1).all():
        return 0.0, 1.0
    value, freedom = float(np.corrcoef(ranks)[0, 1]), len(first) - 2
    t = abs(value) * math.sqrt(freedom / max(1 - value**2, NO_SPREAD))
    return value, 2 * probability(-t, freedom)


def share_interval(estimate: Ratio, confidence: float) -> Interval:
    """Return the t interval of a share, clipped to [0, 1]. If all documents agree, there is no spread to estimate from:
    the interval is then what documents that differ could make of it, at the most of them that the sample
    allows (Clopper-Pearson at D of D).
    """
    tail = (1 - confidence) / 2
    if estimate.stderr <= NO_SPREAD * estimate.value:
        agree = tail ** (1 / estimate.documents)
        return Interval(estimate.value, estimate.value * agree, 1 - (1 - estimate.value) * agree)
    half = quantile(1 - tail, estimate.freedom) * estimate.stderr
    return Interval(estimate.value, max(0.0, estimate.value - half), min(1.0, estimate.value + half))


def pooled_share(cluster: Array, totals: Array, counts: Array, confidence: float) -> Interval | None:
    """Return the interval over clusters of the share sum(totals) / sum(counts), [documents]; None if nothing was counted."""
    if counts.sum() <= 0:
        return None
    return share_interval(ratio(*by_cluster(cluster, totals, counts)), confidence)


def mean_interval(estimate: Ratio, confidence: float) -> Interval:
    """Return interval of a mean of quantities that are 0 or above and have no upper end: linear t, cut at 0. Where documents
    leave no spread to estimate from, nothing bounds what another one would have: infinity.
    """
    spread = estimate.documents > 1 and estimate.stderr > NO_SPREAD * estimate.value
    half = quantile((1 + confidence) / 2, estimate.freedom) * estimate.stderr if spread else math.inf
    return Interval(estimate.value, max(0.0, estimate.value - half), estimate.value + half)


def quantile_interval(values: Array, counts: Array, clusters: Array, probability: float, confidence: float) -> Interval:
    """Return the quantile of values [positions], 0 or above, with Woodruff's interval (1952): the quantiles at both ends of
    the interval of the share of values up to it (for the lower end: of those below it, which are fewer where values tie),
    over documents or clusters. Beyond what the sample can tell, 0 and infinity.

    `counts`, `clusters` [documents]: how many of the values, of which there is one at least and which come document by
    document, are of each.
    """
    ordered = np.sort(values)
    value = _at(ordered, probability)
    stops = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def reach(chosen: Array) -> float:
        """Return how far the share of chosen values can be off: the longer side of its interval; infinite if both are
        cut.
        """
        running = np.concatenate([[0.0], np.cumsum(chosen, dtype=np.float64)])
        sums = by_cluster(clusters, running[stops[1:]] - running[stops[:-1]], counts)
        share = share_interval(ratio(*sums), confidence)
        return math.inf if share.low <= 0 and share.high >= 1 else max(share.value - share.low, share.high - share.value)

    least, most = probability - reach(values < value), probability + reach(values <= value)
    return Interval(value, _at(ordered, least) if least > 0 else 0.0, _at(ordered, most) if most < 1 else math.inf)


def _at(ordered: Array, probability: float) -> float:
    """Return the least of ascending values that a share of at least `probability` does not exceed."""
    rank = math.ceil(probability * len(ordered) - NO_SPREAD)
    return float(ordered[min(max(rank, 1), len(ordered)) - 1])


def log_interval(value: float, relative_error: float, freedom: float, tail: float) -> tuple[float, float]:
    """Return lower and upper bound of a positive quantity on the log scale, each missing the truth with probability
    `tail`.
    """
    half = quantile(1 - tail, freedom) * relative_error
    if not math.isfinite(half):
        return 0.0, math.inf
    return value * math.exp(-half), value * math.exp(half)


def autocorrelation(clusters: Array, sums: tuple[Array, Array, Array, Array], confidence: float) -> Interval | None:
    """Pearson's correlation of acceptance at neighbouring positions, pooled over documents; `clusters` [documents] are the
    independent units and `sums` the columns PAIR_COUNTS of totals, each [documents].

    A domain whose documents differ in their alpha is bursty for that alone: rounds meet it all the same. The interval is
    that of the delete-one jackknife over units, cut to [-1, 1]; all of that where there are fewer than two units, or where
    leaving one unit out leaves nothing to correlate. None if there is no pair, or if all or no proposals are accepted.
    """
    pairs, *rest = by_cluster(clusters, *sums)
    columns = np.stack([pairs, *rest])[:, pairs > 0]
    whole, units = columns.sum(1, keepdims=True), columns.shape[1]
    value = float(_correlation(whole)[0])
    if not math.isfinite(value):
        return None
    others = _correlation(whole - columns)
    if units < 2 or not np.isfinite(others).all():
        return Interval(value, -1.0, 1.0)
    stderr = math.sqrt((units - 1) / units * float(((others - others.mean()) ** 2).sum()))
    half = quantile((1 + confidence) / 2, units - 1) * stderr
    return Interval(value, max(-1.0, value - half), min(1.0, value + half))


def _correlation(columns: Array) -> Array:
    """Pearson's correlations from sums [4, n]; NaN if nothing varies."""
    pairs, first, second, both = columns
    with np.errstate(invalid="ignore", divide="ignore"):
        first, second, both = first / pairs, second / pairs, both / pairs
        spread = first * (1 - first) * second * (1 - second)
        varied = np.where(spread > 1e-12, spread, np.nan)  # what rounding leaves of 0
        return np.asarray((both - first * second) / np.sqrt(varied))
