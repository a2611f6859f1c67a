"""From rounds and step times to speedup: decode time without the draft, divided by decode time with it.

A round that drafts m tokens costs m draft steps and one verification of m + 1 tokens; a round without a proposal costs
one decode step. Prefill is the same on both sides and left out. Times are in ms; `cost` means units of a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.analysis.estimate import Ratio, bounded_ratio, by_cluster, influences, log_interval

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StepTime:
    """The time of one kind of step in ms, with the relative standard error of its median."""

    ms: float
    relative_error: float


@dataclass(frozen=True)
class StepTimes:
    """Step times of target and one draft. `target[n]` verifies n tokens (n = 1: plain decoding)."""

    target: Mapping[int, StepTime]
    draft: StepTime

    @property
    def decode(self) -> StepTime:
        """One decode step of the target: the unit of cost."""
        return self.target[1]

    def c(self) -> float:
        """Cost of one draft step."""
        return self.draft.ms / self.decode.ms

    def v(self, gamma: int) -> float:
        """Cost of verifying gamma drafts."""
        return self.target[gamma + 1].ms / self.decode.ms

    def break_even(self, gamma: int) -> float:
        """Tokens a round must emit for the draft to pay: gamma c + v, when every round drafts gamma tokens."""
        return gamma * self.c() + self.v(gamma)


def free_draft(gamma: int) -> StepTimes:
    """Times in which drafting and verification of several tokens cost nothing extra: the speedup is tokens per round."""
    return StepTimes({n: StepTime(1.0, 0.0) for n in range(1, gamma + 2)}, StepTime(0.0, 0.0))


@dataclass(frozen=True)
class RoundCounts:
    """Rounds of several documents at one gamma: `tokens`, `rounds` [documents], `drafted` [documents, gamma] (rounds that
    drafted at least d tokens), `cluster` [documents].
    """

    tokens: Array
    rounds: Array
    drafted: Array
    cluster: Array

    def exactly(self) -> Array:
        """Rounds that drafted exactly m = 0..gamma tokens, [documents, gamma + 1]."""
        at_least = np.column_stack([self.rounds, self.drafted])
        return np.asarray(at_least - np.column_stack([self.drafted, np.zeros(len(self.rounds))]))

    def rows(self, chosen: Array) -> RoundCounts:
        """Some of the documents."""
        return RoundCounts(self.tokens[chosen], self.rounds[chosen], self.drafted[chosen], self.cluster[chosen])


@dataclass(frozen=True)
class Speedup:
    """Speedup with the relative standard errors that document sampling and step times give it.

    `freedom` are the degrees of freedom of the sampling error; `documents` the number of independent documents (clusters).
    """

    value: float
    sampling_error: float
    timing_error: float
    freedom: float
    documents: int

    @property
    def relative_error(self) -> float:
        """Both errors together."""
        return math.hypot(self.sampling_error, self.timing_error)

    def bounds(self, tail: float) -> tuple[float, float]:
        """Log-scale t bounds, each missing with probability `tail`."""
        return log_interval(self.value, self.relative_error, self.freedom, tail)


def round_costs(times: StepTimes, gamma: int) -> Array:
    """Cost of a round that drafts m = 0..gamma tokens, [gamma + 1]: m c + T(m + 1) / T(1)."""
    return np.array([m * times.c() + times.target[m + 1].ms / times.decode.ms for m in range(gamma + 1)])


def spent_and_base(counts: RoundCounts, times: StepTimes) -> tuple[Array, Array]:
    """Decode time with the draft and without, in units of a decode step; [clusters], in the order of their names."""
    cost = round_costs(times, counts.drafted.shape[1])
    spent, base = by_cluster(counts.cluster, counts.exactly() @ cost, counts.tokens)
    return spent, base


def relative_time(counts: RoundCounts, times: StepTimes) -> Ratio:
    """Decode time with the draft divided by decode time without, over documents or clusters.

    It lies between that of the best round with every draft accepted and that of the dearest round for every single token.
    """
    cost = round_costs(times, counts.drafted.shape[1])
    best = float((cost / np.arange(1, len(cost) + 1)).min())
    return bounded_ratio(*spent_and_base(counts, times), best, float(cost.max()))


def time_shares(counts: RoundCounts, times: StepTimes) -> tuple[Array, float]:
    """Shares of the decode time with the draft: verification of n = 1..gamma+1 tokens [gamma + 1], and draft steps."""
    exactly = counts.exactly().sum(0)
    verify = np.array([times.target[n + 1].ms * count for n, count in enumerate(exactly)])
    draft = float((exactly * np.arange(len(exactly))).sum()) * times.draft.ms
    total = verify.sum() + draft
    return verify / total, draft / total


def speedup(domains: Sequence[RoundCounts], weights: Sequence[float], times: StepTimes) -> Speedup | None:
    """Speedup of traffic whose output tokens fall on domains with `weights`; None where a domain has no tokens.

    1 / sum(w_d r_d) with r_d the relative time of a domain: shares of tokens weigh times, not speedups. Sampling errors
    of domains add up as independent ones, except for clusters that lie in several of them; Welch-Satterthwaite degrees of
    freedom. A domain of weight 0 does not matter.
    """
    domains = [counts for counts, weight in zip(domains, weights, strict=True) if weight > 0]
    weights = [weight for weight in weights if weight > 0]
    if not domains or any(counts.tokens.sum() == 0 for counts in domains):
        return None
    ratios = [relative_time(counts, times) for counts in domains]
    parts = [weight * found.value for weight, found in zip(weights, ratios, strict=True)]
    time = sum(parts)
    variances = [(weight * found.stderr) ** 2 for weight, found in zip(weights, ratios, strict=True)]
    shares = [time_shares(counts, times) for counts in domains]
    verify = sum(part / time * share[0] for part, share in zip(parts, shares, strict=True))
    draft = sum(part / time * share[1] for part, share in zip(parts, shares, strict=True))
    documents = len(np.unique(np.concatenate([counts.cluster[counts.tokens > 0] for counts in domains])))
    return Speedup(
        value=1 / time,
        sampling_error=math.sqrt(sum(variances) + _covariance(domains, weights, times)) / time,
        timing_error=_timing_error(np.asarray(verify), draft, times),
        freedom=_freedom(variances, ratios, documents),
        documents=documents,
    )


def _covariance(domains: Sequence[RoundCounts], weights: Sequence[float], times: StepTimes) -> float:
    """What clusters with documents in several domains add to the variance of the weighted time; 0 without such clusters.

    Never negative: that errors cancel is too much to conclude from a few clusters.
    """
    errors, clusters = [], []
    for counts, weight in zip(domains, weights, strict=True):
        spent, base = spent_and_base(counts, times)
        if (base > 0).sum() < 2:
            return 0.0  # the variance is infinite as it is
        errors.append(weight * influences(spent, base))
        clusters.append(np.unique(counts.cluster))
    each = np.concatenate(errors)
    (joint,) = by_cluster(np.concatenate(clusters), each)
    return max(0.0, float((joint**2).sum() - (each**2).sum()))


def _timing_error(verify: Array, draft: float, times: StepTimes) -> float:
    """Relative error that step times give a speedup: the derivative of its logarithm by each of them.

    The decode step stands in the numerator too, so its derivative is one minus its share of the time with the draft.
    """
    errors = [(1 - verify[0]) * times.decode.relative_error, draft * times.draft.relative_error]
    errors += [share * times.target[n].relative_error for n, share in enumerate(verify[1:], start=2)]
    return math.sqrt(sum(error**2 for error in errors))


def _freedom(variances: Sequence[float], ratios: Sequence[Ratio], documents: int) -> float:
    """Welch and Satterthwaite's degrees of freedom of a sum of domains with `documents` different clusters in all.

    At most the sum over domains, less the share of it that clusters in several of them count more than once.
    """
    if not all(math.isfinite(variance) for variance in variances):
        return 0
    moments = sum(variance**2 / found.freedom for variance, found in zip(variances, ratios, strict=True) if variance > 0)
    once = (documents - 1) / sum(found.documents - 1 for found in ratios)
    most = once * sum(found.freedom for found in ratios)
    return min(sum(variances) ** 2 / moments, most) if moments > 0 else 0
