"""From rounds and step times to speedup: decode time without the draft, divided by decode time with it.

A round that drafts m tokens costs m draft steps, one verification of m + 1 tokens, and what it takes to put the caches in
order again; a round without a proposal costs one decode step. After a round that was accepted in full a draft model has two
tokens to read in its first step: its own last one and the target's. A draft head reads in its first step what the target has
verified: the accepted tokens of the round before and the target's own. Prompt lookup has no draft steps, but searches the
text once a round. Prefill is the same on both sides and left out. Times are in ms; `cost` means units of a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alphaprof.costs.timing import median_error
from alphaprof.stats.estimate import (
    Array,
    Ratio,
    by_cluster,
    controlled,
    distances,
    distinct,
    influences,
    present,
    quantile,
    ratio,
    unseen,
)
from alphaprof.totals.replay import RoundCounts

FEWEST = 5  # independent documents without which only step times can decide
LARGEST = 600.0  # of a logarithm that is turned into a number


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
    `draft_first[n]`: the first step of a round where it always is a step of its own, over the n tokens that were verified:
    the accepted drafts of the round before and one more (empty: it is none); `draft` is then a later one.
    `bookkeeping`: once a round that drafts anything.
    """

    target: Mapping[int, StepTime]
    draft: StepTime
    lookup: StepTime = NOTHING
    draft_after_full: StepTime | None = None
    bookkeeping: StepTime = NOTHING
    draft_first: Mapping[int, StepTime] = field(default_factory=dict)

    @property
    def decode(self) -> StepTime:
        """One decode step of the target: the unit of cost."""
        return self.target[1]

    def c(self) -> float:
        """Cost of one draft step, a later one where the first is a step of its own."""
        return self.draft.ms / self.decode.ms

    def v(self, gamma: int) -> float:
        """Cost of verifying gamma drafts."""
        return self.target[gamma + 1].ms / self.decode.ms

    def first_steps(self, gamma: int) -> dict[int, StepTime]:
        """By the accepted drafts of the round before: the times of first steps that may take other than `draft`."""
        if self.draft_first:
            return {accepted: self.draft_first[accepted + 1] for accepted in range(gamma + 1)}
        return {gamma: self.draft_after_full or self.draft}

    def catching_up(self, gamma: int) -> Array:
        """What a first step costs more after a round that got 0 .. gamma drafts accepted than after none, [gamma + 1]."""
        least = self.draft_first.get(1, self.draft).ms
        times = self.first_steps(gamma)
        return np.array([(times[n].ms - least) / self.decode.ms if n in times else 0.0 for n in range(gamma + 1)])


@dataclass(frozen=True)
class Timing:
    """Step times by draft; `basis`: what they are, as a reason begins; `missing`: by draft, why it has none."""

    times: Mapping[str, StepTimes]
    basis: str
    missing: Mapping[str, str]

    def only(self, draft: str) -> Timing:
        """Returns the step times of one draft."""
        times = {draft: self.times[draft]} if draft in self.times else {}
        return Timing(times, self.basis, {draft: self.missing[draft]} if draft in self.missing else {})

    def lacks(self, drafts: Iterable[str]) -> str | None:
        """Why one of some drafts has no times; None where all have them."""
        without = next((draft for draft in drafts if draft not in self.times), None)
        return None if without is None else self.missing.get(without, "no step times were measured")


UNTIMED = Timing({}, "", {})


def free_draft(gamma: int) -> StepTimes:
    """Times in which drafting and verification of several tokens cost nothing extra: the speedup is tokens per round."""
    return StepTimes({n: StepTime(1.0, 0.0) for n in range(1, gamma + 2)}, NOTHING)


@dataclass(frozen=True)
class Speedup:
    """Speedup with the relative standard errors that document sampling and step times give it.

    `freedom`, `timing_freedom`: their degrees of freedom; `documents`: the number of independent documents (clusters).
    `least`, `most`: the speedups between which these step times keep every document, whatever is accepted. `skewness`: third
    central moment of the relative time over its variance (`Ratio.skewness`), above 0 where a few documents are much slower
    than the others. `unseen_slower`, `unseen_faster`: shares of the time that documents of a kind that was not sampled could
    add, and take away (`estimate.unseen`).
    """

    value: float
    sampling_error: float
    timing_error: float
    freedom: float
    documents: int
    least: float = 0.0
    most: float = math.inf
    skewness: float = 0.0
    unseen_slower: float = 0.0
    unseen_faster: float = 0.0
    timing_freedom: float = math.inf

    def bounds(self, tail: float) -> tuple[float, float]:
        """Lower and upper bound, each missing with probability `tail`, inside what step times allow.

        Documents: t on the log scale of the time, farther out on the side where it is skewed, and never nearer than `unseen`
        documents allow. Step times: t on the log scale. Both distances add up as squares (Zou and Donner, 2008).
        """
        timing, (low, high) = self._timing(tail), self.possible(tail)
        spread, less, more = distances(self.sampling_error, self.freedom, self.skewness, tail)
        slower = math.log(max(_stretched(spread) + more, 1 + self.unseen_slower))
        least_time = min(math.exp(-spread) - less, 1 - self.unseen_faster)
        faster = -math.log(least_time) if least_time > 0 else math.inf
        above, below = math.hypot(slower, timing), math.hypot(faster, timing)
        fastest = self.value * math.exp(below) if below < LARGEST else math.inf
        return max(low, self.value / _stretched(above)), min(high, fastest)

    def possible(self, tail: float) -> tuple[float, float]:
        """The bounds that step times alone give, each missing with probability `tail`."""
        timing = self._timing(tail)
        if timing > LARGEST:
            return 0.0, math.inf
        return self.least * math.exp(-timing), self.most * math.exp(timing)

    @property
    def tells(self) -> bool:
        """Whether there are enough documents to speak for others."""
        return self.documents >= FEWEST and math.isfinite(self.sampling_error)

    def deciding(self, tail: float) -> tuple[float, float]:
        """The bounds of a verdict: those of step times alone where there are too few documents to speak for others."""
        return self.bounds(tail) if self.tells else self.possible(tail)

    def at(self, documents: int) -> Speedup:
        """The same speedup from another number of documents like these: their variance falls as 1 / documents."""
        share, seen = self.documents / documents, unseen(documents) / unseen(self.documents)
        return replace(
            self,
            sampling_error=self.sampling_error * math.sqrt(share),
            freedom=self.freedom / share,
            documents=documents,
            skewness=self.skewness * share,
            unseen_slower=self.unseen_slower * seen,
            unseen_faster=self.unseen_faster * seen,
        )

    def _timing(self, tail: float) -> float:
        return quantile(1 - tail, self.timing_freedom) * self.timing_error if self.timing_error > 0 else 0.0


def _stretched(distance: float) -> float:
    """The exponential function, from 1 on its tangent: the bound of a time then never falls when all documents get slower by
    the same, however much their times vary.
    """
    return math.exp(distance) if distance < 1 else math.e * distance


def time_spent(counts: RoundCounts, times: StepTimes) -> Array:
    """Decode time with the draft in units of a decode step, [documents].

    What the first step of a round takes longer for the drafts that were accepted before it is counted with the round that
    accepted them. A text's last round has no step after it: of a document at most that much is counted too much.
    """
    gamma = counts.drafted.shape[1]
    costs = round_costs(times, gamma)
    spent = counts.rounds * costs[0]
    for depths, each in ((counts.drafted, costs), (counts.accepted, times.catching_up(gamma))):
        for rounds, more in zip(depths.T, np.diff(each), strict=True):  # a matrix product would spin on all cores
            if more:  # what one more token costs, in every round that drafts or accepts as many
                spent += rounds * more
    return np.asarray(spent)


def round_costs(times: StepTimes, gamma: int) -> Array:
    """Cost of a round that drafts m = 0..gamma tokens, [gamma + 1]: m c + T(m + 1) / T(1), the search, and bookkeeping where
    it drafts at all. Where the first draft step is one of its own, it is that over one token.
    """
    once = times.bookkeeping.ms
    if times.draft_first:
        once += times.draft_first[1].ms - times.draft.ms
    steps = [m * times.draft.ms + times.target[m + 1].ms + (m > 0) * once for m in range(gamma + 1)]
    return (np.array(steps) + times.lookup.ms) / times.decode.ms


def cost_bounds(times: StepTimes, gamma: int) -> tuple[float, float]:
    """The least and the most that a token can cost with the draft, both above 0: in the best round with all drafts accepted,
    and in the dearest round for every single token.

    What the first step of the next round takes longer for the drafts that a round got accepted is part of that round's cost.
    """
    cost, later = round_costs(times, gamma).tolist(), times.catching_up(gamma).tolist()
    outcomes = [(cost[m] + later[accepted], accepted) for m in range(gamma + 1) for accepted in range(m + 1)]
    return min(spent / (accepted + 1) for spent, accepted in outcomes), max(spent for spent, _ in outcomes)


def spent_and_base(counts: RoundCounts, times: StepTimes) -> tuple[Array, Array]:
    """Decode time with the draft and without, in units of a decode step; [clusters], in the order of their names.

    Where rounds are expectations, a control variate has sharpened the time with the draft.
    """
    control = (counts.control,) if counts.control.any() else ()
    spent, base, *controls = by_cluster(counts.cluster, time_spent(counts, times), counts.tokens, *control)
    adjusted = controlled(spent, base, *controls) if controls else None
    return (spent if adjusted is None else adjusted), base


def time_shares(counts: RoundCounts, times: StepTimes) -> Array:
    """Shares of the decode time with the draft, as `_parts` names them, [parts]. First steps are counted with the round
    before them, as in `time_spent`.
    """
    exactly, gamma = counts.exactly, counts.drafted.shape[1]
    verify = [times.target[n + 1].ms * count for n, count in enumerate(exactly)]
    after = counts.after.tolist()
    first = [(after[accepted], time.ms) for accepted, time in times.first_steps(gamma).items()]
    later = float((exactly * np.arange(len(exactly))).sum()) - sum(count for count, _ in first)
    searches, settled = float(exactly.sum()) * times.lookup.ms, float(exactly[1:].sum()) * times.bookkeeping.ms
    drafting = [later * times.draft.ms, *(count * ms for count, ms in first)]
    parts = np.array([*verify, *drafting, searches, settled])
    return np.asarray(parts / parts.sum())


def _parts(times: StepTimes, gamma: int) -> list[StepTime]:
    """What a round's time consists of: verification of n = 1..gamma+1, draft steps, first ones of their own, searches,
    bookkeeping.
    """
    verify = [times.target[n] for n in range(1, gamma + 2)]
    return [*verify, times.draft, *times.first_steps(gamma).values(), times.lookup, times.bookkeeping]


def speedup(domains: Sequence[RoundCounts], weights: Sequence[float], times: StepTimes) -> Speedup | None:
    """Speedup of traffic whose output tokens fall on domains with known `weights`; None where a domain has no tokens.

    1 / sum(w_d r_d) with r_d the relative time of a domain: shares of tokens weigh times, not speedups. Sampling errors
    of domains add up as independent ones, except for clusters that lie in several of them; Welch-Satterthwaite degrees of
    freedom. A domain of weight 0 does not matter.
    """
    domains = [counts for counts, weight in zip(domains, weights, strict=True) if weight > 0]
    weights = [weight for weight in weights if weight > 0]
    if not domains or any(counts.tokens.sum() == 0 for counts in domains):
        return None
    sums = [spent_and_base(counts, times) for counts in domains]
    ratios = [ratio(*each) for each in sums]
    parts = [weight * one.value for weight, one in zip(weights, ratios, strict=True)]
    time = sum(parts)
    variances = [(weight * one.stderr) ** 2 for weight, one in zip(weights, ratios, strict=True)]
    shares = sum(part / time * time_shares(counts, times) for part, counts in zip(parts, domains, strict=True))
    documents = distinct(np.concatenate([counts.cluster[counts.tokens > 0] for counts in domains]))
    apart = documents == sum(one.documents for one in ratios)
    variance = sum(variances) + (0.0 if apart else _covariance(domains, weights, sums))
    thirds = [weight**3 * one.third for weight, one in zip(weights, ratios, strict=True)]
    third = sum(thirds) if apart else sum(map(math.cbrt, thirds)) ** 3
    whole = Ratio(time, math.sqrt(variance), documents, _freedom(variances, ratios, documents), third)
    gamma = domains[0].drafted.shape[1]
    bounds = cost_bounds(times, gamma)
    each = [_speedup(one, bounds, (0.0, math.inf)) for one in ratios]
    slower = [part / time * one.unseen_slower for part, one in zip(parts, each, strict=True)]
    faster = [part / time * one.unseen_faster for part, one in zip(parts, each, strict=True)]
    together = math.hypot if apart else lambda *shares: sum(shares)  # the same documents may lie far out in all domains
    traffic = _speedup(whole, bounds, _timing_error(np.asarray(shares), times, gamma))
    return replace(traffic, unseen_slower=together(*slower), unseen_faster=together(*faster))


def speedup_as_sampled(domains: Sequence[RoundCounts], times: StepTimes, strata: Array | None) -> Speedup | None:
    """Speedup of the traffic that all these documents were drawn from: one ratio over them, whose error includes that of the
    domains' shares. None where there are no tokens.

    `strata` [units]: the stratum of each cluster, by its number; a fixed number of documents was drawn from each. None: all
    were drawn from one.
    """
    domains = [counts for counts in domains if counts.tokens.sum() > 0]
    if not domains:
        return None
    sums = [spent_and_base(counts, times) for counts in domains]
    clusters = np.concatenate([present(counts.cluster) for counts in domains])
    spent, base = (np.concatenate(side) for side in zip(*sums, strict=True))
    if len(domains) > 1 and np.bincount(clusters).max() > 1:  # else there is nothing to add up
        (spent, base), clusters = by_cluster(clusters, spent, base), present(clusters)
    time = ratio(spent, base, strata[clusters] if strata is not None and strata.any() else None)
    parts = [each.sum() / spent.sum() for each, _ in sums]
    shares = sum(part * time_shares(counts, times) for part, counts in zip(parts, domains, strict=True))
    gamma = domains[0].drafted.shape[1]
    return _speedup(time, cost_bounds(times, gamma), _timing_error(np.asarray(shares), times, gamma))


@dataclass(frozen=True)
class Mix:
    """How the domains of a traffic are put together: by given `weights` (shares of output tokens), or, where these are None,
    as the documents of `domains` were drawn, from `strata` (see `speedup_as_sampled`).
    """

    domains: tuple[str, ...]
    weights: tuple[float, ...] | None
    strata: Array | None = None

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Mix:
        """From given weights; domains of weight 0 do not matter."""
        counted = {domain: weight for domain, weight in weights.items() if weight > 0}
        return cls(tuple(counted), tuple(counted.values()))

    def speedup(self, counts: Sequence[RoundCounts], times: StepTimes) -> Speedup | None:
        """The speedup of the traffic from the rounds of each domain, in their order."""
        if self.weights is None:
            return speedup_as_sampled(counts, times, self.strata)
        return speedup(counts, self.weights, times)


def _speedup(time: Ratio, bounds: tuple[float, float], timing: tuple[float, float]) -> Speedup:
    """The speedup from the relative `time`, the least and the most that a token can cost, and the error of step times with
    its degrees of freedom.
    """
    (best, worst), share = bounds, unseen(time.documents)
    return Speedup(
        value=1 / time.value,
        sampling_error=time.stderr / time.value,
        timing_error=timing[0],
        timing_freedom=timing[1],
        freedom=time.freedom,
        documents=time.documents,
        least=1 / worst,
        most=1 / best,
        skewness=time.skewness / time.value,
        unseen_slower=share * max(worst / time.value - 1, 0.0),
        unseen_faster=share * max(1 - best / time.value, 0.0),
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
    gamma = counts.drafted.shape[1]
    best, worst = cost_bounds(times, gamma)
    slowest = max(worst, 1 + float((more / np.maximum(prompts, 1e-9)).max()))
    time = ratio(spent + prompts + more, base + prompts)
    decoding = spent.sum() / (spent + prompts + more).sum()
    shares, before = decoding * time_shares(counts, times), base.sum() / (base + prompts).sum()
    return _speedup(time, (min(best, 1.0), slowest), _timing_error(shares, times, gamma, before))


def _covariance(domains: Sequence[RoundCounts], weights: Sequence[float], sums: Sequence[tuple[Array, Array]]) -> float:
    """What clusters with documents in several domains add to the variance of the weighted time. Never negative: that errors
    cancel is too much to conclude from a few clusters.
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


def _timing_error(shares: Array, times: StepTimes, gamma: int, base: float = 1.0) -> tuple[float, float]:
    """Relative error that step times give a speedup, and its degrees of freedom. `shares`: of the time with the draft, as in
    `time_shares`; `base`: the share that decode steps have of the time without. A time that stands for several parts has one
    error.

    Times of interleaved rounds give a speedup for each round, whose median has an interval. Times with an error of their own
    are independent: the derivative of the speedup's logarithm by each, times its error, add up as squares. The decode step
    stands in the numerator too, so its derivative is its share there minus that of the time with the draft.
    """
    sums: dict[int, tuple[float, StepTime]] = {}
    for share, part in zip(shares.tolist(), _parts(times, gamma), strict=True):
        sums[id(part)] = (sums[id(part)][0] + share if id(part) in sums else share), part
    used = [(share, part) for share, part in sums.values() if share > 0]
    rounds = min(len(part.rounds) for part in (times.decode, *(part for _, part in used)))
    if rounds:
        decode = _relative(times.decode, rounds)
        spent = sum(share * _relative(part, rounds) for share, part in used)
        return median_error(np.log1p(base * decode) - np.log1p(spent))
    errors = [(base - float(shares[0])) * times.decode.relative_error]
    errors += [share * part.relative_error for share, part in used if part is not times.decode]
    return math.sqrt(sum(error**2 for error in errors)), math.inf


def _relative(time: StepTime, rounds: int) -> Array:
    """By how much the first rounds took longer than the step's time, as a share of it, [rounds]."""
    return np.array(time.rounds[:rounds]) / time.ms - 1


def _freedom(variances: Sequence[float], ratios: Sequence[Ratio], documents: int) -> float:
    """Welch and Satterthwaite's degrees of freedom of a sum of domains with `documents` different clusters in all; at most
    the sum over domains, less the share of it that clusters in several of them count more than once.
    """
    if not all(math.isfinite(variance) for variance in variances):
        return 0
    moments = sum(variance**2 / one.freedom for variance, one in zip(variances, ratios, strict=True) if variance > 0)
    once = (documents - 1) / sum(one.documents - 1 for one in ratios)
    most = once * sum(one.freedom for one in ratios)
    return min(sum(variances) ** 2 / moments, most) if moments > 0 else most
