"""Speedup: decode time without the draft, divided by decode time with it (`costs/rounds.py`), and how sure it is.

Two errors make it unsure: documents are a sample, and step times are measured or computed. Prefill is the same on both sides
and left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from alphaprof.costs.mixing import ROUNDING
from alphaprof.costs.rounds import (
    NOTHING,
    StepTime,
    StepTimes,
    cost_bounds,
    doubtful_time,
    time_by_step,
    time_spent,
)
from alphaprof.costs.timing import LEAST_ROUNDS, mean_error, median_error, unheld
from alphaprof.stats.estimate import (
    Array,
    Ratio,
    by_cluster,
    controlled,
    distances,
    distinct,
    present,
    ratio,
    unseen,
    weighted_sum,
)
from alphaprof.stats.paired import FAR
from alphaprof.stats.student import quantile
from alphaprof.totals.replay import RoundCounts

FEWEST = 5  # independent documents without which only step times can decide
OWN_ERROR = 0.115  # of each computed step alone, as a share of the error that all of them have together
LARGEST = 600.0  # of a logarithm that is turned into a number
Decoded = tuple[RoundCounts, StepTimes]  # how documents are decoded, and what the steps take
# How the documents of a domain are decoded: all in one way, or parts of them, which share no cluster, each in its own way.
Domain = Decoded | list[Decoded]


class TimingError(NamedTuple):
    """What step times make uncertain of a ratio of two times: a relative standard error and its degrees of freedom; and as
    in `Speedup`, `flattered`, `waited`, `redrawn`, `tail` and `mean_error`.
    """

    error: float
    freedom: float
    flattered: float
    waited: float
    redrawn: bool
    tail: float = 0.0
    mean_error: float = 0.0


@dataclass(frozen=True)
class Speedup:
    """Speedup with the relative standard errors that document sampling and step times give it.

    `freedom`, `timing_freedom`: their degrees of freedom; `documents`: the number of independent documents (clusters).
    `least`, `most`: the speedups between which these step times keep every document, whatever is accepted. `skewness`: third
    central moment of the relative time over its variance (`Ratio.skewness`), above 0 if a few documents are much slower
    than the others. `unseen_slower`, `unseen_faster`: shares of the time that documents of a kind that was not sampled could
    add, and take away (`estimate.unseen`). `flattered`: the share of itself by which the time would grow if verification
    took at least as long as decoding; the lower bound counts it. `waited`: the least distance of a bound, as a logarithm,
    if the processor was busy while steps were timed (`timing.unheld`). `doubt`: the largest relative error of the time that
    comes from unknown numbers of drafted tokens (`RoundCounts.doubt`). `redrawn`: whether a new run times the steps again;
    the error of a table or a roofline is the same in every run. `tail`: the share of itself by which the time would grow if
    means of timing rounds counted in place of medians (below 0: by which it would fall), and `mean_error` its relative
    standard error: the lower bound holds by means too.
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
    flattered: float = 0.0
    waited: float = 0.0
    doubt: float = 0.0
    redrawn: bool = True
    tail: float = 0.0
    mean_error: float = 0.0

    @classmethod
    def of(
        cls,
        time: Ratio,
        bounds: Sequence[tuple[float, float]],
        timing: TimingError,
        doubt: float,
        apart: tuple[Sequence[Ratio], Sequence[float]] | None = None,
    ) -> Speedup:
        """From the relative `time`, the least and the most that a token can cost in each domain, and the error of step
        times. `apart`: of domains with given weights, the time of each by itself and what part it takes of the whole.
        """
        best, worst = min(least for least, _ in bounds), max(most for _, most in bounds)
        times, parts = apart or ([time], [1.0])
        ends = bounds if apart else [(best, worst)]
        shares = [part * unseen(one.documents) for part, one in zip(parts, times, strict=True)]
        more = [share * max(most / one.value - 1, 0.0) for share, one, (_, most) in zip(shares, times, ends, strict=True)]
        less = [share * max(1 - least / one.value, 0.0) for share, one, (least, _) in zip(shares, times, ends, strict=True)]
        # The same documents may lie far out in all domains.
        together = time.documents < sum(one.documents for one in times)
        return cls(
            value=1 / time.value,
            sampling_error=time.stderr / time.value,
            timing_error=timing.error,
            timing_freedom=timing.freedom,
            flattered=timing.flattered,
            waited=timing.waited,
            redrawn=timing.redrawn,
            tail=timing.tail,
            mean_error=timing.mean_error,
            freedom=time.freedom,
            documents=time.documents,
            least=1 / worst,
            most=1 / best,
            skewness=time.skewness / time.value,
            unseen_slower=sum(more) if together else math.hypot(*more),
            unseen_faster=sum(less) if together else math.hypot(*less),
            doubt=doubt,
        )

    def bounds(self, tail: float) -> tuple[float, float]:
        """Return lower and upper bound, each missing with probability `tail`, inside what step times allow.

        Documents: t on the log scale of the time, farther out on the side where it is skewed, and never nearer than `unseen`
        documents allow. Step times: t on the log scale. Both distances add up as squares (Zou and Donner, 2008).
        """
        (timing, by_means), (low, high) = self._timing(tail), self.possible(tail)
        spread, less, more = distances(self.sampling_error, self.freedom, self.skewness, tail)
        slower = math.log(max(_stretched(spread) + more, 1 + self.unseen_slower))
        least_time = min(math.exp(-spread) - less, 1 - self.unseen_faster)
        faster = -math.log(least_time) if least_time > 0 else math.inf
        below = math.hypot(faster, timing)
        above = max(_stretched(math.hypot(slower, timing)), (1 + self.tail) * _stretched(math.hypot(slower, by_means)))
        fastest = self.value / (1 - self.doubt) * math.exp(below) if below < LARGEST else math.inf
        slowest = self.value / (1 + self.doubt) / (1 + self.flattered) / above
        return max(low, slowest), min(high, fastest)

    def possible(self, tail: float) -> tuple[float, float]:
        """Return the bounds that step times alone give, each missing with probability `tail`."""
        timing, by_means = self._timing(tail)
        if max(timing, by_means) > LARGEST:
            return 0.0, math.inf
        return self.least / max(math.exp(timing), (1 + self.tail) * math.exp(by_means)), self.most * math.exp(timing)

    @property
    def tells(self) -> bool:
        """Whether there are enough documents to speak for others."""
        return self.documents >= FEWEST and math.isfinite(self.sampling_error)

    def untold(self, tail: float) -> str:
        """Return why step times that were taken in rounds do not tell how fast it is, within a factor of two either way;
        empty if they do.
        """
        if math.isinf(self.timing_error):
            return f"step times of fewer than {LEAST_ROUNDS} rounds have no bounds"
        if max(self.waited, (known := self._timing(tail)[0]) * self.redrawn) <= math.log(2):
            return ""
        if self.waited > math.log(2):
            return f"steps waited {-math.expm1(-self.waited):.0%} of their time for a core"
        return f"step times are known to a factor of {math.exp(known):.1f} only"

    def hidden_by_times(self, tail: float) -> bool:
        """Return whether step times that a new run takes again alone could make this ratio 1."""
        return self.redrawn and abs(math.log(self.value)) <= self._timing(tail)[0]

    def deciding(self, tail: float) -> tuple[float, float]:
        """Return the bounds of a verdict: those of step times alone where there are too few documents to speak for
        others.
        """
        return self.bounds(tail) if self.tells else self.possible(tail)

    def at(self, documents: int) -> Speedup:
        """Return the same speedup from another number of documents like these: their variance falls as 1 / documents."""
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

    def _timing(self, tail: float) -> tuple[float, float]:
        """Return how far off step times may be, as logarithms: medians of rounds, and means."""
        errors = (self.timing_error, self.mean_error)
        medians, means = (quantile(1 - tail, self.timing_freedom) * each if each > 0 else 0.0 for each in errors)
        return max(medians, self.waited), max(means, self.waited)


def _stretched(distance: float) -> float:
    """Return the exponential function, from 1 on its tangent: the bound of a time then never falls when all documents get
    slower by the same, however much their times vary.
    """
    return math.exp(distance) if distance < 1 else math.e * distance


class Sums(NamedTuple):
    """Time with a draft and without, in decode steps, and the clusters, [clusters] each; and the time with the draft of each
    part of the domain.
    """

    spent: Array
    base: Array
    clusters: Array
    parts: tuple[float, ...]

    @classmethod
    def of(cls, domain: Domain) -> Sums:
        """Of all parts of a domain."""
        each = [(*spent_and_base(*part), present(part[0].cluster)) for part in parts_of(domain)]
        spent, base, clusters = each[0] if len(each) == 1 else map(np.concatenate, zip(*each, strict=True))
        return cls(spent, base, clusters, tuple(float(part.sum()) for part, _, _ in each))


def parts_of(domain: Domain) -> list[Decoded]:
    """Return the parts of a domain; one if it is all decoded in one way."""
    return domain if isinstance(domain, list) else [domain]


def spent_and_base(counts: RoundCounts, times: StepTimes) -> tuple[Array, Array]:
    """Decode time with the draft and without, in units of a decode step; [clusters], in the order of their names.

    Where rounds are expectations, a control variate has sharpened the time with the draft.
    """
    control = (counts.control,) if counts.control.any() else ()
    spent, base, *controls = by_cluster(counts.cluster, time_spent(counts, times), counts.tokens, *control)
    adjusted = controlled(spent, base, *controls) if controls else None
    return (spent if adjusted is None else adjusted), base


def total_times(counts: RoundCounts, times: StepTimes) -> tuple[float, float]:
    """Return what `spent_and_base` gives, of all documents together."""
    if counts.control.any():
        spent, base = spent_and_base(counts, times)
        return float(spent.sum()), float(base.sum())
    return float(time_spent(counts, times).sum()), float(counts.tokens.sum())


def speedup(domains: Sequence[RoundCounts], weights: Sequence[float], times: StepTimes) -> Speedup | None:
    """Return the speedup of traffic whose output tokens fall on domains with known `weights`, which share the steps of a
    batch; None if one has no tokens. Tables and gates use it; the verdict's way is `Mix`.
    """
    return Mix((), tuple(weights)).speedup(domains, times)


def _covered(domains: Sequence[Domain]) -> bool:
    """Return whether there are times of all these rounds."""
    return all(times.covers(counts.drafted.shape[1]) for domain in domains for counts, times in parts_of(domain))


def _doubt(domains: Sequence[Domain]) -> float:
    """Return what `doubtful_time` is of the time of some documents."""
    parts = [part for domain in domains for part in parts_of(domain)]
    doubts = sum(doubtful_time(*part) for part in parts)
    return doubts / sum(float(time_spent(*part).sum()) for part in parts) if doubts else 0.0


def _token_bounds(domain: Domain) -> tuple[float, float]:
    """Return the least and the most that a token can cost in a domain."""
    each = [cost_bounds(times, counts.drafted.shape[1]) for counts, times in parts_of(domain)]
    return min(least for least, _ in each), max(most for _, most in each)


def _gain_bounds(first: Domain, second: Domain) -> tuple[float, float]:
    """Return the least and the most that a token can take the second way, in units of what it takes the first way."""
    bounds = [(1.0, 1.0)]
    for one, two in zip(parts_of(first), parts_of(second), strict=True):
        if one is not two:
            (least, most), (low, high) = _token_bounds(one), _token_bounds(two)
            bounds.append((low / most, high / least))
    return min(low for low, _ in bounds), max(high for _, high in bounds)


@dataclass(frozen=True)
class Mix:
    """How the domains of a traffic are put together: by given `weights` (shares of output tokens), or, where these are None,
    as the documents of `domains` were drawn, from `strata` [units]: the stratum of each cluster, by its
    number; a fixed number of documents was drawn from each (None: all were drawn from one).
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
        """Return the speedup of the traffic from the rounds of each domain, in their order."""
        return self.routed(self.decoded(counts, times))

    def decoded(self, counts: Sequence[RoundCounts], times: StepTimes) -> list[Decoded]:
        """Return how the domains are decoded together: what is in a batch with what follows from their mixture."""
        times = times.mixed(counts, self.weights)
        return [(each, times) for each in counts]

    def routed(self, domains: Sequence[Domain]) -> Speedup | None:
        """Return the speedup where each domain, or each part of one, is decoded in its own way; None if there are no tokens
        (of given weights: if any domain has none), or no times of its rounds.

        By given weights it is 1 / sum(w_d r_d) with r_d the relative time of a domain: shares of tokens weigh times, not
        speedups. As drawn it is one ratio over all documents, whose error includes that of the domains' shares.
        """
        weights, (domains,) = self._counted(domains)
        if not weights:
            return None
        sums = [Sums.of(domain) for domain in domains]
        bases = [float(each.base.sum()) if self.weights else 1.0 for each in sums]
        scale = [weight / base for weight, base in zip(weights, bases, strict=True)]
        bounds, timing = [_token_bounds(domain) for domain in domains], _timing_error(_spent_on(domains, sums, scale))
        if not self.weights:
            return Speedup.of(self._as_drawn(domains, sums), bounds, timing, _doubt(domains))
        ratios = [ratio(each.spent, each.base) for each in sums]
        time = weighted_sum(weights, ratios, [each[:3] for each in sums])
        parts = [weight * one.value / time.value for weight, one in zip(weights, ratios, strict=True)]
        doubt = sum(part * _doubt([domain]) for part, domain in zip(parts, domains, strict=True))
        return Speedup.of(time, bounds, timing, doubt, (ratios, parts))

    def _counted(self, *ways: Sequence[Domain]) -> tuple[list[float], list[list[Domain]]]:
        """Return the weights of the domains that count (1 each, as drawn), and how these are decoded each way; no weights if
        no speedup is known.
        """
        given = self.weights or (1.0,) * len(ways[0])
        seen = [any(counts.tokens.sum() > 0 for counts, _ in parts_of(domain)) for domain in ways[0]]
        kept = [place for place, weight in enumerate(given) if weight > 0 and seen[place]]
        every = [[way[place] for place in kept] for way in ways]
        lacking = self.weights and len(kept) < sum(weight > 0 for weight in given)
        known = not lacking and all(map(_covered, every))
        return [given[place] for place in kept] if known else [], every

    def _as_drawn(self, domains: Sequence[Domain], sums: Sequence[Sums]) -> Ratio:
        """Return the ratio of what all domains spent to what they would spend without a draft."""
        spent, base, clusters = (np.concatenate([each[side] for each in sums]) for side in range(3))
        if np.bincount(clusters).max() > 1:  # else there is nothing to add up
            (spent, base), clusters = by_cluster(clusters, spent, base), present(clusters)
        if self.strata is None or not self.strata.any():
            return ratio(spent, base)
        documents = [counts.cluster for domain in domains for counts, _ in parts_of(domain)]
        sizes = np.bincount(np.concatenate(documents))[clusters]
        return ratio(spent, base, self.strata[clusters], sizes.astype(np.float64))

    def value(self, domains: Sequence[Domain]) -> float | None:
        """Return the value of `routed` alone, which takes a fraction of its time."""
        if not _covered(domains):
            return None
        totals = ([total_times(*part) for part in parts_of(domain)] for domain in domains)
        return self.value_of([tuple(map(sum, zip(*parts, strict=True))) for parts in totals])

    def value_of(self, sums: Sequence[tuple[float, ...]]) -> float | None:
        """Return the same from what each domain spends with the draft and without, [domains]."""
        if self.weights is None:
            spent, base = map(sum, zip(*sums, strict=True))
            return base / spent if base > 0 else None
        if any(base == 0 for (_, base), weight in zip(sums, self.weights, strict=True) if weight > 0):
            return None
        return 1 / sum(weight * spent / base for (spent, base), weight in zip(sums, self.weights, strict=True) if weight > 0)

    def gain(self, first: Sequence[Domain], second: Sequence[Domain]) -> Speedup | None:
        """Return how many times as fast the `second` way to decode the documents is as the `first`; None if there are no
        tokens. Both ways have the same parts of each domain.

        With T = sum(w_d spent_d / base_d) of each way and R = T_2 / T_1, the error of R is that of
        sum(w_d (spent_2d - R spent_1d) / base_d) / T_1: what a document costs either way cancels out.
        """
        weights, ways = self._counted(first, second)
        if not weights:
            return None
        first, second = ways
        one, two = ([Sums.of(domain) for domain in way] for way in ways)
        bases = [float(each.base.sum()) for each in one]
        scale = [weight / (base if self.weights else sum(bases)) for weight, base in zip(weights, bases, strict=True)]
        parts = [[each * float(sums.spent.sum()) for each, sums in zip(scale, way, strict=True)] for way in (one, two)]
        whole, time = sum(parts[0]), sum(parts[1]) / sum(parts[0])
        off = [Sums(after.spent - time * before.spent, *before[1:]) for before, after in zip(one, two, strict=True)]
        if self.weights:
            error = weighted_sum(weights, [ratio(*each[:2]) for each in off], [each[:3] for each in off])
        else:
            error = self._as_drawn(first, off)
        relative = Ratio(time, error.stderr / whole, error.documents, error.freedom, error.third / whole**3)
        bounds = [_gain_bounds(*pair) for pair in zip(first, second, strict=True)]
        timing = _timing_error(_spent_on(second, two, scale), _spent_on(first, one, scale))
        alone = [
            Ratio(float(after.spent.sum() / before.spent.sum()), 0.0, distinct(before.clusters[before.base > 0]), 0.0)
            for before, after in zip(one, two, strict=True)
        ]
        apart = (alone, [part / sum(parts[1]) for part in parts[1]]) if self.weights else None
        gain = Speedup.of(relative, bounds, timing, sum(map(_doubt, ways)), apart)
        # A document can be at the far end either way, hardly at both: decisions/019.
        return replace(gain, unseen_slower=FAR * gain.unseen_slower, unseen_faster=FAR * gain.unseen_faster)


ALL = Mix(("",), None)  # some documents as they were drawn, whatever their domains


class Spent(NamedTuple):
    """What rounds of up to `gamma` drafts spend on each kind of step, as shares of some whole time, [kinds]."""

    shares: Array
    gamma: int
    times: StepTimes


def _spent_on(domains: Sequence[Domain], sums: Sequence[Sums], scale: Sequence[float]) -> list[Spent]:
    """Return what the time with the draft is spent on. `scale`: by which a domain's time in decode steps counts in the
    whole.
    """
    found, whole = list[Spent](), sum(each * sum(one.parts) for each, one in zip(scale, sums, strict=True))
    for domain, each, one in zip(domains, scale, sums, strict=True):
        for (counts, times), part in zip(parts_of(domain), one.parts, strict=True):
            if counts.tokens.sum() > 0:
                steps = time_by_step(counts, times)
                found.append(Spent(each * part / whole * steps / steps.sum(), counts.drafted.shape[1], times))
    return found


def _plain(spent: Sequence[Spent]) -> list[Spent]:
    """Return the same parts of a time that is spent on decode steps alone."""
    times = [StepTimes(each.times.target, NOTHING, half=each.times.half) for each in spent]
    return [Spent(np.array([each.shares.sum(), 0, 0, 0, 0]), 0, one) for each, one in zip(spent, times, strict=True)]


def _timing_error(spent: Sequence[Spent], base: Sequence[Spent] = ()) -> TimingError:
    """Return the error that step times give the ratio of two times: of what it is `spent` on with the draft, and of the
    `base` (none: decode steps alone). A step of both, or of several parts, has one error.

    Times of interleaved rounds give a ratio for each round, whose median has an interval, and whose mean has an error; the
    errors of two halves of the rounds are independent. Times with an error of their own are independent: the derivative of
    the ratio's logarithm by each, its share of one time less that of the other, times its error, add up as squares. An error
    that steps share adds up before it is squared: over all steps if the other way is plain decoding, else over the rounds of
    each draft alone, since nothing says that two drafts are off by the same. Of such steps each has an error of its own
    besides, `OWN_ERROR` of the shared one, or two gammas of a draft would have none.
    """
    base = base or _plain(spent)
    halves = list(dict.fromkeys(part.times.half for part in spent))
    if len(halves) > 1:
        cut = ([[part for part in side if part.times.half == half] for side in (spent, base)] for half in halves)
        each = [_timing_error(*sides) for sides in cut]
        squares, freedom = [one.error**2 for one in each], 0.0  # a half of too few rounds has no error
        if math.isfinite(sum(squares)):
            moments = sum(square**2 / one.freedom for square, one in zip(squares, each, strict=True) if square > 0)
            freedom = sum(squares) ** 2 / moments if moments > 0 else math.inf
        return TimingError(
            error=math.sqrt(sum(squares)),
            freedom=freedom,
            flattered=_flattered(spent, base),
            waited=max(one.waited for one in each),
            redrawn=any(one.redrawn for one in each),
            tail=sum(one.tail for one in each),
            mean_error=math.hypot(*(one.mean_error for one in each)),
        )
    kinds: dict[int, tuple[StepTime, list[float]]] = {}  # each step once, with its shares of both times
    shared: dict[int, float] = {}  # errors that the steps of one draft share
    for side, parts in enumerate((base, spent)):
        for shares, gamma, times in parts:
            verified, owner = gamma + 1, id(times.target)
            for place, (share, step) in enumerate(zip(shares.tolist(), times.steps(gamma), strict=True)):
                key = place if place < verified else id(step)  # a verification is the same step with any draft
                kinds.setdefault(key, (step, [0.0, 0.0]))[1][side] += share
                shared[owner] = shared.get(owner, 0.0) + (share if side else -share) * step.shared_error
    used = [(step, shares) for step, shares in kinds.values() if max(map(abs, shares)) > ROUNDING]
    if not used:  # an engine did not tell what its rounds drafted: only steps without any error have none
        sure = all(step.relative_error == step.shared_error == 0 and not step.rounds for step, _ in kinds.values())
        return TimingError(0.0 if sure else math.inf, math.inf, 0.0, 0.0, redrawn=False)
    steps, (before, after) = [step for step, _ in used], np.array([shares for _, shares in used]).T
    doubts = _flattered(spent, base), max(unheld(step.waiting) for step in steps), any(step.redrawn for step in steps)
    if rounds := min(len(step.rounds) for step in steps):
        ms = np.array([step.rounds[:rounds] for step in steps]).T / [step.ms for step in steps]  # [timing rounds, kinds]
        plain, with_draft = (1 + (ms - 1) @ shares for shares in (before, after))
        r = max(step.autocorrelation for step in steps)
        error, freedom = median_error(np.log(plain) - np.log(with_draft), r)
        tail, of_mean = mean_error(plain, with_draft, r)
        return TimingError(error, freedom, *doubts, tail, of_mean)
    exact = all(step.shared_error == 0 for _, gamma, times in base for step in times.steps(gamma))
    alike = sum(shared.values()) if exact else math.hypot(*shared.values())
    own = [math.hypot(step.relative_error, OWN_ERROR * step.shared_error) for step in steps]
    return TimingError(math.hypot(alike, *((after - before) * own)), math.inf, *doubts)


def _flattered(spent: Sequence[Spent], base: Sequence[Spent]) -> float:
    """By what share of itself the time with the draft would grow more than the other if every verification took at least as
    long as a decode step.
    """
    more = [1.0, 1.0]
    for side, parts in enumerate((base, spent)):
        for shares, gamma, times in parts:
            verified = slice(gamma + 1)
            more[side] += float(shares[verified] @ np.maximum(times.decode.ms / times.ms(gamma)[verified] - 1, 0.0))
    return max(more[1] / more[0] - 1, 0.0)
