"""From rounds and step times to speedup: decode time without the draft, divided by decode time with it.

A round that drafts m tokens costs m draft steps, one verification of m + 1 tokens, and what it takes to put the caches in
order again; a round without a proposal costs one decode step. After a round that was accepted in full a draft model has two
tokens to read in its first step: its own last one and the target's. Prompt lookup has no draft steps, but searches the text
once a round. Prefill is the same on both sides and left out. Times are in ms; `cost` means units of a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.analysis.estimate import (
    Ratio,
    bounded_ratio,
    by_cluster,
    controlled,
    distinct,
    influences,
    log_interval,
    present,
)
from alphaprof.analysis.replay import Rounds
from alphaprof.analysis.timing import median_error

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StepTime:
    """The time of one kind of step in ms. `rounds`: its times in interleaved rounds, where it was measured so; round i of
    all steps is one unit. Without them `relative_error`, a standard error of its own, counts.
    """

    ms: float
    relative_error: float
    rounds: tuple[float, ...] = ()


NOTHING = StepTime(0.0, 0.0)


@dataclass(frozen=True)
class StepTimes:
    """Step times of target and one draft. `target[n]` verifies n tokens (n = 1: plain decoding); `lookup`: what a round
    costs before its first draft step, whether it proposes anything or not (the search of prompt lookup). `draft_after_full`:
    the draft's first step after a round that was accepted in full, over two tokens (None: it takes no longer than another).
    `bookkeeping`: once a round that drafts anything.
    """

    target: Mapping[int, StepTime]
    draft: StepTime
    lookup: StepTime = NOTHING
    draft_after_full: StepTime | None = None
    bookkeeping: StepTime = NOTHING

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

    def after_full(self) -> float:
        """What the step over two tokens that follows a round accepted in full costs more than another draft step."""
        return (self.draft_after_full.ms - self.draft.ms) / self.decode.ms if self.draft_after_full else 0.0


def free_draft(gamma: int) -> StepTimes:
    """Times in which drafting and verification of several tokens cost nothing extra: the speedup is tokens per round."""
    return StepTimes({n: StepTime(1.0, 0.0) for n in range(1, gamma + 2)}, NOTHING)


@dataclass(frozen=True)
class RoundCounts:
    """Rounds of several documents at one gamma: `tokens`, `rounds` [documents], `drafted` [documents, gamma] (rounds that
    drafted at least d tokens), `full` [documents] (rounds whose gamma tokens were all accepted), `control` (control variate
    of expected rounds, else 0) and `cluster` [documents].
    """

    tokens: Array
    rounds: Array
    drafted: Array
    full: Array
    control: Array
    cluster: Array

    @classmethod
    def of(cls, found: Rounds, cluster: Array) -> RoundCounts:
        """From replayed rounds of documents, and the cluster of each."""
        full = found.accepted[:, -1] if found.accepted.shape[1] else np.zeros(len(found.rounds))  # a tree may have no nodes
        return cls(found.tokens, found.rounds, found.drafted, full, found.control, cluster)

    @property
    def exactly(self) -> Array:
        """Rounds of all documents that drafted exactly m = 0..gamma tokens, [gamma + 1]."""
        at_least = np.array([self.rounds.sum(), *self.drafted.sum(0), 0.0])
        return np.asarray(at_least[:-1] - at_least[1:])

    def rows(self, chosen: Array) -> RoundCounts:
        """Some of the documents."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        drafted = np.empty((len(places), self.drafted.shape[1]), order="F")
        for depth, rounds in enumerate(self.drafted.T):
            drafted[:, depth] = rounds.take(places)
        single = ("tokens", "rounds", "full", "control", "cluster")
        return RoundCounts(drafted=drafted, **{name: getattr(self, name).take(places) for name in single})

    def spent(self, times: StepTimes) -> Array:
        """Decode time with the draft in units of a decode step, [documents].

        A text that ends with a full round has no step behind it: at most one step of a document is counted too many.
        """
        costs = round_costs(times, self.drafted.shape[1])
        found = self.rounds * costs[0]
        for rounds, more in zip(self.drafted.T, np.diff(costs), strict=True):  # a matrix product would spin on all cores
            if more:  # what one more token costs, in every round that drafts as many
                found += rounds * more
        if times.draft_after_full:
            found += self.full * times.after_full()
        return np.asarray(found)


@dataclass(frozen=True)
class Speedup:
    """Speedup with the relative standard errors that document sampling and step times give it.

    `freedom`, `timing_freedom` are the degrees of freedom of the two; `documents` the number of independent documents
    (clusters).
    """

    value: float
    sampling_error: float
    timing_error: float
    freedom: float
    documents: int
    timing_freedom: float = math.inf

    @property
    def relative_error(self) -> float:
        """Both errors together."""
        return math.hypot(self.sampling_error, self.timing_error)

    @property
    def total_freedom(self) -> float:
        """Welch and Satterthwaite's degrees of freedom of both errors together; 0 where one of them is infinite."""
        if not math.isfinite(self.relative_error):
            return 0.0
        if self.timing_error == 0 or self.freedom <= 0:
            return self.freedom
        share = (self.sampling_error / self.relative_error) ** 2
        moments = share**2 / self.freedom + (1 - share) ** 2 / self.timing_freedom
        return 1 / moments if moments > 0 else math.inf

    def bounds(self, tail: float) -> tuple[float, float]:
        """Log-scale t bounds, each missing with probability `tail`."""
        return log_interval(self.value, self.relative_error, self.total_freedom, tail)


def round_costs(times: StepTimes, gamma: int) -> Array:
    """Cost of a round that drafts m = 0..gamma tokens, [gamma + 1]: m c + T(m + 1) / T(1), the search, and bookkeeping where
    it drafts at all.
    """
    steps = [m * times.draft.ms + times.target[m + 1].ms + (m > 0) * times.bookkeeping.ms for m in range(gamma + 1)]
    return (np.array(steps) + times.lookup.ms) / times.decode.ms


def cost_bounds(times: StepTimes, gamma: int) -> tuple[float, float]:
    """The least and the most that a token can cost with the draft, both above 0: in the best round with all drafts accepted,
    and in the dearest round for every single token.

    A round accepted in full has the step over two tokens that follows it in its cost; it stands for one of its draft steps.
    """
    cost = round_costs(times, gamma)
    full = float(cost[gamma]) + times.after_full()
    most = np.maximum(1, np.minimum(np.arange(gamma + 1) + 1, gamma))  # tokens of a round that is not accepted in full
    return min(float((cost / most).min()), full / (gamma + 1)), max(float(cost.max()), full)


def spent_and_base(counts: RoundCounts, times: StepTimes) -> tuple[Array, Array]:
    """Decode time with the draft and without, in units of a decode step; [clusters], in the order of their names.

    Where rounds are expectations, a control variate has sharpened the time with the draft.
    """
    if not counts.control.any():
        spent, base = by_cluster(counts.cluster, counts.spent(times), counts.tokens)
        return spent, base
    spent, base, control = by_cluster(counts.cluster, counts.spent(times), counts.tokens, counts.control)
    adjusted = controlled(spent, base, control)
    return (spent if adjusted is None else adjusted), base


def relative_time(counts: RoundCounts, times: StepTimes, sums: tuple[Array, Array]) -> Ratio:
    """Decode time with the draft divided by decode time without, over documents or clusters; `sums`: `spent_and_base`."""
    return bounded_ratio(*sums, *cost_bounds(times, counts.drafted.shape[1]))


def time_shares(counts: RoundCounts, times: StepTimes) -> Array:
    """Shares of the decode time with the draft: verification of n = 1..gamma+1, draft steps, those after full rounds,
    searches, bookkeeping; [gamma + 5].
    """
    exactly = counts.exactly
    verify = [times.target[n + 1].ms * count for n, count in enumerate(exactly)]
    two = times.draft_after_full or times.draft
    steps, full = float((exactly * np.arange(len(exactly))).sum()), float(counts.full.sum())
    searches, settled = float(exactly.sum()) * times.lookup.ms, float(exactly[1:].sum()) * times.bookkeeping.ms
    parts = np.array([*verify, (steps - full) * times.draft.ms, full * two.ms, searches, settled])
    return np.asarray(parts / parts.sum())


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
    sums = [spent_and_base(counts, times) for counts in domains]
    ratios = [relative_time(counts, times, found) for counts, found in zip(domains, sums, strict=True)]
    parts = [weight * found.value for weight, found in zip(weights, ratios, strict=True)]
    time = sum(parts)
    variances = [(weight * found.stderr) ** 2 for weight, found in zip(weights, ratios, strict=True)]
    shares = sum(part / time * time_shares(counts, times) for part, counts in zip(parts, domains, strict=True))
    documents = distinct(np.concatenate([counts.cluster[counts.tokens > 0] for counts in domains]))
    timing_error, timing_freedom = _timing_error(np.asarray(shares), times)
    apart = documents == sum(found.documents for found in ratios)
    return Speedup(
        value=1 / time,
        sampling_error=math.sqrt(sum(variances) + (0.0 if apart else _covariance(domains, weights, sums))) / time,
        timing_error=timing_error,
        freedom=_freedom(variances, ratios, documents),
        documents=documents,
        timing_freedom=timing_freedom,
    )


def with_prefill(counts: RoundCounts, times: StepTimes, target: Array, draft: Array) -> Speedup | None:
    """Speedup of whole requests: the target reads the prompt on both sides, and with the draft a draft model does as well.

    `target`, `draft` [documents]: what that takes, in units of a decode step; its own error is not in the result's. None
    where there are no tokens.
    """
    if counts.tokens.sum() == 0:
        return None
    prompts, more = by_cluster(counts.cluster, target, draft)
    spent, base = spent_and_base(counts, times)
    best, worst = cost_bounds(times, counts.drafted.shape[1])
    slowest = max(worst, 1 + float((more / np.maximum(prompts, 1e-9)).max()))
    found = bounded_ratio(spent + prompts + more, base + prompts, min(best, 1.0), slowest)
    decoding = spent.sum() / (spent + prompts + more).sum()
    base_share = base.sum() / (base + prompts).sum()
    timing_error, timing_freedom = _timing_error(decoding * time_shares(counts, times), times, base_share)
    return Speedup(
        value=1 / found.value,
        sampling_error=found.stderr / found.value,
        timing_error=timing_error,
        freedom=found.freedom,
        documents=found.documents,
        timing_freedom=timing_freedom,
    )


def _covariance(domains: Sequence[RoundCounts], weights: Sequence[float], sums: Sequence[tuple[Array, Array]]) -> float:
    """What clusters with documents in several domains add to the variance of the weighted time.

    `sums`: `spent_and_base` of each domain. Never negative: that errors cancel is too much to conclude from a few clusters.
    """
    errors, clusters = [], []
    for counts, weight, (spent, base) in zip(domains, weights, sums, strict=True):
        if (base > 0).sum() < 2:
            return 0.0  # the variance is infinite as it is
        errors.append(weight * influences(spent, base))
        clusters.append(present(counts.cluster))
    each = np.concatenate(errors)
    (joint,) = by_cluster(np.concatenate(clusters), each)
    return max(0.0, float((joint**2).sum() - (each**2).sum()))


def _timing_error(shares: Array, times: StepTimes, base: float = 1.0) -> tuple[float, float]:
    """Relative error that step times give a speedup, and its degrees of freedom. `shares`: of the time with the draft, as in
    `time_shares`; `base`: the share that decode steps have of the time without.

    Times of interleaved rounds give a speedup for each round, whose median has an interval. Times with an error of their own
    are independent: the derivative of the speedup's logarithm by each, times its error, add up as squares. The decode step
    stands in the numerator too, so its derivative is its share there minus that of the time with the draft.
    """
    parts = [times.target[n] for n in range(1, len(shares) - 3)]
    parts += [times.draft, times.draft_after_full or times.draft, times.lookup, times.bookkeeping]
    if times.draft_after_full is None:  # one time, and one error
        shares = np.concatenate([shares[:-4], [shares[-4] + shares[-3], 0.0], shares[-2:]])
    used = [(share, part) for share, part in zip(shares.tolist(), parts, strict=True) if share > 0]
    rounds = min(len(part.rounds) for part in (times.decode, *(part for _, part in used)))
    if rounds:
        decode = _relative(times.decode, rounds)
        spent = sum(share * _relative(part, rounds) for share, part in used)
        return median_error(np.log1p(base * decode) - np.log1p(spent))
    errors = [(base - float(shares[0])) * times.decode.relative_error]
    errors += [share * part.relative_error for share, part in zip(shares[1:], parts[1:], strict=True)]
    return math.sqrt(sum(error**2 for error in errors)), math.inf


def _relative(time: StepTime, rounds: int) -> Array:
    """What a step took more in each of the first rounds than it is said to take, as a share, [rounds]."""
    return np.array(time.rounds[:rounds]) / time.ms - 1


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
