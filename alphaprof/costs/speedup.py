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
from functools import cached_property
from typing import NamedTuple

import numpy as np

from alphaprof.costs.timing import median_error, unheld
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
from alphaprof.stats.paired import FAR
from alphaprof.totals.replay import RoundCounts

FEWEST = 5  # independent documents without which only step times can decide
MORE_ROUNDS = "time more rounds on an idle machine, or use your engine's own times"
LARGEST = 600.0  # of a logarithm that is turned into a number


@dataclass(frozen=True)
class StepTime:
    """The time of one kind of step in ms. `rounds`: its times in each timing round, which runs all steps in turn (nothing to
    do with rounds of drafting) and is one unit of their sampling; `autocorrelation`: that of the rounds; `waiting`: the
    share of their time in which the steps waited for a CPU. Without rounds `relative_error`, a standard error, counts.
    """

    ms: float
    relative_error: float
    rounds: tuple[float, ...] = ()
    autocorrelation: float = 0.0
    waiting: float = 0.0
    shared_error: float = 0.0


NOTHING = StepTime(0.0, 0.0)
Sums = tuple[Array, Array]  # time with a draft and without, in decode steps, [clusters] each
# A part of a time: its fraction of the whole, a key for the step, the step's time, and whose rounds it belongs to.
Share = tuple[float, object, StepTime, object]


@dataclass(frozen=True)
class StepTimes:
    """Step times of target and one draft. `target[n]` verifies n tokens (n = 1: plain decoding); `lookup`: what a round
    costs before its first draft step, whether it proposes anything or not (the search of prompt lookup). `draft_after_full`:
    the draft's first step after a round that was accepted in full, over two tokens (None: it takes no longer than another).
    `draft_first[n]`: the first step of a round where it always is a step of its own, over the n tokens that were verified:
    the accepted drafts of the round before and one more (empty: it is none); `draft` is then a later one.
    `bookkeeping`: once a round that drafts anything. `optional`: rounds may draft without draft steps, as those of a hybrid.
    """

    target: Mapping[int, StepTime]
    draft: StepTime
    lookup: StepTime = NOTHING
    draft_after_full: StepTime | None = None
    bookkeeping: StepTime = NOTHING
    draft_first: Mapping[int, StepTime] = field(default_factory=dict)
    optional: bool = False

    @property
    def decode(self) -> StepTime:
        """One decode step of the target: the unit of cost."""
        return self.target[1]

    @property
    def rounds(self) -> int:
        """Rounds that the decode step was timed in; 0: not known."""
        return len(self.decode.rounds)

    def c(self) -> float:
        """Return cost of one draft step, a later one where the first is a step of its own."""
        return self.draft.ms / self.decode.ms

    def v(self, gamma: int) -> float:
        """Return cost of verifying gamma drafts."""
        return self.target[gamma + 1].ms / self.decode.ms

    @cached_property
    def clipped(self) -> StepTimes:
        """The same where verification takes at least as long as decoding. It does: what says otherwise is noise, or a decode
        step that the engine runs slower than it need.
        """
        least = self.decode.ms
        if all(time.ms >= least for time in self.target.values()):
            return self
        return replace(
            self, target={n: time if time.ms >= least else replace(time, ms=least) for n, time in self.target.items()}
        )

    @property
    def first_ms(self) -> float:
        """The first step of a round over one token."""
        return self.draft_first[1].ms if self.draft_first else self.draft.ms

    @cached_property
    def without_steps(self) -> StepTimes:
        """The same of rounds that run no draft steps."""
        return replace(self, draft=NOTHING, draft_first={}, draft_after_full=None)

    def first_steps(self, gamma: int) -> dict[int, StepTime]:
        """By the accepted drafts of the round before: the times of first steps that may take other than `draft`."""
        if self.draft_first:
            return {accepted: self.draft_first[accepted + 1] for accepted in range(gamma + 1)}
        return {gamma: self.draft_after_full or self.draft}

    def catching_up(self, gamma: int) -> Array:
        """Return what a first step costs more after a round that got 0 .. gamma drafts accepted than after none, [gamma +
        1].
        """
        least = self.draft_first.get(1, self.draft).ms
        times = self.first_steps(gamma)
        return np.array([(times[n].ms - least) / self.decode.ms if n in times else 0.0 for n in range(gamma + 1)])


@dataclass(frozen=True)
class Timing:
    """Step times by draft; `basis`: what they are, as a reason begins; `missing`: by draft, why it has none. `halves`: the
    times of every second timing round, of which the one chooses what is auto and the other tests it (None: as all are).
    `surer`: how to get more precise ones, as the beginning of a sentence.
    """

    times: Mapping[str, StepTimes]
    basis: str
    missing: Mapping[str, str]
    halves: tuple[Mapping[str, StepTimes], Mapping[str, StepTimes]] | None = None
    surer: str = MORE_ROUNDS

    @property
    def choosing(self) -> Mapping[str, StepTimes]:
        """The times that choose what is auto."""
        return self.halves[0] if self.halves else self.times

    @property
    def testing(self) -> Mapping[str, StepTimes]:
        """The times that test what others chose."""
        return self.halves[1] if self.halves else self.times

    def lacks(self, drafts: Iterable[str]) -> str | None:
        """Return why one of some drafts has no times; None if all have them."""
        without = next((draft for draft in drafts if draft not in self.times), None)
        return None if without is None else self.missing.get(without, "no step times were measured")


UNTIMED = Timing({}, "", {})
Decoded = tuple[RoundCounts, StepTimes]  # how the documents of a domain are decoded, and what the steps take


def free_draft(gamma: int) -> StepTimes:
    """Return times in which drafting and verification of several tokens cost nothing extra: the speedup is tokens per
    round.
    """
    return StepTimes({n: StepTime(1.0, 0.0) for n in range(1, gamma + 2)}, NOTHING)


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
    comes from unknown numbers of drafted tokens (`RoundCounts.doubt`).
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

    def bounds(self, tail: float) -> tuple[float, float]:
        """Return lower and upper bound, each missing with probability `tail`, inside what step times allow.

        Documents: t on the log scale of the time, farther out on the side where it is skewed, and never nearer than `unseen`
        documents allow. Step times: t on the log scale. Both distances add up as squares (Zou and Donner, 2008).
        """
        timing, (low, high) = self._timing(tail), self.possible(tail)
        spread, less, more = distances(self.sampling_error, self.freedom, self.skewness, tail)
        slower = math.log(max(_stretched(spread) + more, 1 + self.unseen_slower))
        least_time = min(math.exp(-spread) - less, 1 - self.unseen_faster)
        faster = -math.log(least_time) if least_time > 0 else math.inf
        above, below = math.hypot(slower, timing), math.hypot(faster, timing)
        fastest = self.value / (1 - self.doubt) * math.exp(below) if below < LARGEST else math.inf
        slowest = self.value / (1 + self.doubt) / (1 + self.flattered) / _stretched(above)
        return max(low, slowest), min(high, fastest)

    def possible(self, tail: float) -> tuple[float, float]:
        """Return the bounds that step times alone give, each missing with probability `tail`."""
        timing = self._timing(tail)
        if timing > LARGEST:
            return 0.0, math.inf
        return self.least * math.exp(-timing), self.most * math.exp(timing)

    @property
    def tells(self) -> bool:
        """Whether there are enough documents to speak for others."""
        return self.documents >= FEWEST and math.isfinite(self.sampling_error)

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

    def _timing(self, tail: float) -> float:
        by_rounds = quantile(1 - tail, self.timing_freedom) * self.timing_error if self.timing_error > 0 else 0.0
        return max(by_rounds, self.waited)


def _stretched(distance: float) -> float:
    """Return the exponential function, from 1 on its tangent: the bound of a time then never falls when all documents get
    slower by the same, however much their times vary.
    """
    return math.exp(distance) if distance < 1 else math.e * distance


def time_spent(counts: RoundCounts, times: StepTimes) -> Array:
    """Decode time with the draft in units of a decode step, [documents].

    What the first step of a round takes longer for the drafts that were accepted before it is counted with the round that
    accepted them. A text's last round has no step after it: of a document at most that much is counted too much.
    """
    gamma, whole = counts.drafted.shape[1], times
    if counts.steps is not None:
        times = times.without_steps
    costs = round_costs(times, gamma)
    spent = counts.rounds * costs[0]
    if counts.steps is not None and counts.started is not None:
        spent = spent + counts.steps * whole.c() + counts.started * (whole.first_ms - whole.draft.ms) / whole.decode.ms
    for depths, each in ((counts.drafted, costs), (counts.accepted, times.catching_up(gamma))):
        for rounds, more in zip(depths.T, np.diff(each), strict=True):  # a matrix product would spin on all cores
            if more:  # what one more token costs, in every round that drafts or accepts as many
                spent += rounds * more
    if counts.unused is not None:
        spent += counts.unused * times.c()
    return np.asarray(spent)


def doubtful_time(counts: RoundCounts, times: StepTimes) -> float:
    """Return how far the decode time of all documents may be off for what rounds drafted, in units of a decode step."""
    if counts.doubt is None:
        return 0.0
    return float(counts.doubt.sum(0) @ np.diff(round_costs(times, counts.doubt.shape[1])))


def round_costs(times: StepTimes, gamma: int) -> Array:
    """Return cost of a round that drafts m = 0..gamma tokens, [gamma + 1]: m c + T(m + 1) / T(1), the search, and
    bookkeeping where it drafts at all. Where the first draft step is one of its own, it is that over one token.
    """
    once = times.bookkeeping.ms
    if times.draft_first:
        once += times.draft_first[1].ms - times.draft.ms
    steps = [m * times.draft.ms + times.target[m + 1].ms + (m > 0) * once for m in range(gamma + 1)]
    return (np.array(steps) + times.lookup.ms) / times.decode.ms


def full_round_costs(times: StepTimes, gamma: int) -> Array:
    """Return cost of a round that drafts m = 0..gamma tokens after one that got as many accepted, [gamma + 1]: what an
    engine pays that runs a head's first step over all rows of the verification before.
    """
    return round_costs(times, gamma) + times.catching_up(gamma)


def cost_bounds(times: StepTimes, gamma: int) -> tuple[float, float]:
    """Return the least and the most that a token can cost with the draft, both above 0: in the best round with all drafts
    accepted, and in the dearest round for every single token.

    What the first step of the next round takes longer for the drafts that a round got accepted is part of that round's cost.
    In the dearest round verification takes at least as long as decoding.
    """
    later = times.catching_up(gamma).tolist()
    cheap = times.without_steps if times.optional else times
    places = [(m, accepted) for m in range(gamma + 1) for accepted in range(m + 1)]
    cost, clipped = (round_costs(each, gamma).tolist() for each in (cheap, times.clipped))
    least = min((cost[m] + later[accepted]) / (accepted + 1) for m, accepted in places)
    return least, max(clipped[m] + later[accepted] for m, accepted in places)


def spent_and_base(counts: RoundCounts, times: StepTimes) -> tuple[Array, Array]:
    """Decode time with the draft and without, in units of a decode step; [clusters], in the order of their names.

    Where rounds are expectations, a control variate has sharpened the time with the draft.
    """
    control = (counts.control,) if counts.control.any() else ()
    spent, base, *controls = by_cluster(counts.cluster, time_spent(counts, times), counts.tokens, *control)
    adjusted = controlled(spent, base, *controls) if controls else None
    return (spent if adjusted is None else adjusted), base


def time_shares(counts: RoundCounts, times: StepTimes) -> Array:
    """Return shares of the decode time with the draft, as `_time_parts` names them, [parts]. First steps are counted with
    the round before them, as in `time_spent`.
    """
    exactly, gamma = counts.exactly, counts.drafted.shape[1]
    verify = [times.target[n + 1].ms * count for n, count in enumerate(exactly)]
    after = counts.after.tolist()
    first = [(after[accepted], time.ms) for accepted, time in times.first_steps(gamma).items()]
    later = float((exactly * np.arange(len(exactly))).sum()) - sum(count for count, _ in first)
    later += 0.0 if counts.unused is None else float(counts.unused.sum())
    if counts.steps is not None:
        share = float(counts.steps.sum()) / max(later + sum(count for count, _ in first), 1e-300)
        later, first = later * share, [(count * share, ms) for count, ms in first]
    searches, bookkeeping = float(exactly.sum()) * times.lookup.ms, float(exactly[1:].sum()) * times.bookkeeping.ms
    drafting = [later * times.draft.ms, *(count * ms for count, ms in first)]
    parts = np.array([*verify, *drafting, searches, bookkeeping])
    return np.asarray(parts / parts.sum())


def _time_parts(times: StepTimes, gamma: int) -> list[tuple[object, StepTime]]:
    """Return what a round's time consists of, each part with what identifies its step: verification of n = 1..gamma+1, which
    is the same step with any draft, draft steps, first ones of their own, searches, bookkeeping.
    """
    verify = [(n, times.target[n]) for n in range(1, gamma + 2)]
    others = [times.draft, *times.first_steps(gamma).values(), times.lookup, times.bookkeeping]
    return [*verify, *((("step", id(time)), time) for time in others)]


def _spent_on(decoded: Decoded, part: float) -> list[Share]:
    """Return what a domain that takes `part` of the whole time spends it on."""
    counts, times = decoded
    shares = (part * time_shares(counts, times)).tolist()
    parts = zip(shares, _time_parts(times, counts.drafted.shape[1]), strict=True)
    return [(share, *each, id(times)) for share, each in parts]


def _decoding(times: StepTimes, part: float = 1.0) -> list[Share]:
    """Return what time without a draft is spent on: decode steps, for `part` of it."""
    return [(part, 1, times.decode, None)]


def without_draft(counts: RoundCounts, times: StepTimes) -> Decoded:
    """Return the same documents decoded without a draft: a decode step for every token."""
    nothing = np.zeros((len(counts.tokens), 0))
    plain = RoundCounts(counts.tokens, counts.tokens, nothing, nothing, np.zeros(len(counts.tokens)), counts.cluster)
    return plain, StepTimes(times.target, NOTHING)


def speedup(domains: Sequence[RoundCounts], weights: Sequence[float], times: StepTimes) -> Speedup | None:
    """Return the speedup of traffic whose output tokens fall on domains with known `weights`; None if one has no tokens.
    Tables and gates use it; the verdict's way is `Mix`.
    """
    return _by_weights([(counts, times) for counts in domains], weights)


def _by_weights(domains: Sequence[Decoded], weights: Sequence[float]) -> Speedup | None:
    """Return speedup of traffic whose output tokens fall on domains with known `weights`; None if a domain has no tokens.

    1 / sum(w_d r_d) with r_d the relative time of a domain: shares of tokens weigh times, not speedups. Sampling errors
    of domains add up as independent ones, except for clusters that lie in several of them; Welch-Satterthwaite degrees of
    freedom. A domain of weight 0 does not matter.
    """
    domains = [decoded for decoded, weight in zip(domains, weights, strict=True) if weight > 0]
    weights = [weight for weight in weights if weight > 0]
    if not domains or any(counts.tokens.sum() == 0 for counts, _ in domains):
        return None
    sums = [spent_and_base(*decoded) for decoded in domains]
    ratios = [ratio(*each) for each in sums]
    parts = [weight * one.value for weight, one in zip(weights, ratios, strict=True)]
    time = sum(parts)
    whole = _sum_of_ratios([counts for counts, _ in domains], weights, sums, ratios, time)
    shares = [share for part, decoded in zip(parts, domains, strict=True) for share in _spent_on(decoded, part / time)]
    traffic = _from_time(whole, _token_bounds(domains), _timing_error(shares, _decoding(domains[0][1])))
    each = [_from_time(one, _token_bounds([decoded]), EXACT) for one, decoded in zip(ratios, domains, strict=True)]
    slower, faster = _unseen_apart(each, [part / time for part in parts], whole.documents)
    doubts = sum(part * _doubt([decoded]) for part, decoded in zip(parts, domains, strict=True))
    return replace(traffic, unseen_slower=slower, unseen_faster=faster, doubt=doubts / time)


def _doubt(domains: Sequence[Decoded]) -> float:
    """Return what `doubtful_time` is of the time of some documents."""
    doubts = sum(doubtful_time(*decoded) for decoded in domains)
    return doubts / sum(float(time_spent(*decoded).sum()) for decoded in domains) if doubts else 0.0


def _unseen_apart(domains: Sequence[Speedup], parts: Sequence[float], documents: int) -> tuple[float, float]:
    """Return what unseen documents of domains with given weights could add to the time and take away, as shares of it.
    `parts`: what each domain takes of it; `documents`: how many different ones all have together.
    """
    apart = documents == sum(one.documents for one in domains)
    together = math.hypot if apart else lambda *shares: sum(shares)  # the same documents may lie far out in all domains
    slower = together(*(part * one.unseen_slower for part, one in zip(parts, domains, strict=True)))
    return slower, together(*(part * one.unseen_faster for part, one in zip(parts, domains, strict=True)))


def _sum_of_ratios(
    domains: Sequence[RoundCounts], weights: Sequence[float], sums: Sequence[Sums], ratios: Sequence[Ratio], value: float
) -> Ratio:
    """Return the weighted sum of the ratios of domains, which is `value`, with its error."""
    variances = [(weight * one.stderr) ** 2 for weight, one in zip(weights, ratios, strict=True)]
    documents = distinct(np.concatenate([counts.cluster[counts.tokens > 0] for counts in domains]))
    apart = documents == sum(one.documents for one in ratios)
    variance = sum(variances) + (0.0 if apart else _covariance(domains, weights, sums))
    thirds = [weight**3 * one.third for weight, one in zip(weights, ratios, strict=True)]
    third = sum(thirds) if apart else sum(map(math.cbrt, thirds)) ** 3
    return Ratio(value, math.sqrt(variance), documents, _freedom(variances, ratios, documents), third)


def _as_sampled(domains: Sequence[Decoded], strata: Array | None) -> Speedup | None:
    """Return speedup of the traffic that all these documents were drawn from: one ratio over them, whose error includes that
    of the domains' shares. None if there are no tokens.

    `strata` [units]: the stratum of each cluster, by its number; a fixed number of documents was drawn from each. None: all
    were drawn from one.
    """
    domains = [decoded for decoded in domains if decoded[0].tokens.sum() > 0]
    if not domains:
        return None
    sums = [spent_and_base(*decoded) for decoded in domains]
    spent, time = _ratio_of_all([counts for counts, _ in domains], sums, strata)
    parts = [float(each.sum() / spent) for each, _ in sums]
    shares = [share for part, decoded in zip(parts, domains, strict=True) for share in _spent_on(decoded, part)]
    whole = _from_time(time, _token_bounds(domains), _timing_error(shares, _decoding(domains[0][1])))
    return replace(whole, doubt=_doubt(domains))


def _ratio_of_all(domains: Sequence[RoundCounts], sums: Sequence[Sums], strata: Array | None) -> tuple[float, Ratio]:
    """Return the sum of what all domains spent, and its ratio to what they would spend without a draft. `strata`: those of
    all clusters, by their numbers.
    """
    clusters = np.concatenate([present(counts.cluster) for counts in domains])
    spent, base = (np.concatenate(side) for side in zip(*sums, strict=True))
    if len(domains) > 1 and np.bincount(clusters).max() > 1:  # else there is nothing to add up
        (spent, base), clusters = by_cluster(clusters, spent, base), present(clusters)
    if strata is None or not strata.any():
        return float(spent.sum()), ratio(spent, base)
    sizes = np.bincount(np.concatenate([counts.cluster for counts in domains]))[clusters]
    return float(spent.sum()), ratio(spent, base, strata[clusters], sizes.astype(np.float64))


def _token_bounds(domains: Sequence[Decoded]) -> tuple[float, float]:
    """Return the least and the most that a token can cost in any of some domains."""
    each = [cost_bounds(times, counts.drafted.shape[1]) for counts, times in domains]
    return min(least for least, _ in each), max(most for _, most in each)


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
        return self.routed([(each, times) for each in counts])

    def routed(self, domains: Sequence[Decoded]) -> Speedup | None:
        """Return the same where each domain is decoded in its own way."""
        if self.weights is None:
            return _as_sampled(domains, self.strata)
        return _by_weights(domains, self.weights)

    def value(self, domains: Sequence[Decoded]) -> float | None:
        """Return the value of `routed` alone, which takes a fraction of its time."""
        sums = [tuple(float(part.sum()) for part in spent_and_base(*decoded)) for decoded in domains]
        if self.weights is None:
            spent, base = map(sum, zip(*sums, strict=True))
            return base / spent if base > 0 else None
        if any(base == 0 for (_, base), weight in zip(sums, self.weights, strict=True) if weight > 0):
            return None
        return 1 / sum(weight * spent / base for (spent, base), weight in zip(sums, self.weights, strict=True) if weight > 0)

    def gain(self, first: Sequence[Decoded], second: Sequence[Decoded]) -> Speedup | None:
        """Return how many times as fast the `second` way to decode the documents is as the `first`; None if there are no
        tokens.

        With T = sum(w_d spent_d / base_d) of each way and R = T_2 / T_1, the error of R is that of
        sum(w_d (spent_2d - R spent_1d) / base_d) / T_1: what a document costs either way cancels out.
        """
        given = self.weights or (1.0,) * len(first)
        kept = [place for place, (counts, _) in enumerate(first) if given[place] > 0 and counts.tokens.sum() > 0]
        if not kept or (self.weights and len(kept) < sum(weight > 0 for weight in given)):
            return None
        weights, ways = [given[place] for place in kept], [[way[place] for place in kept] for way in (first, second)]
        one, two = ([spent_and_base(*decoded) for decoded in way] for way in ways)
        bases = [float(base.sum()) for _, base in one]
        scale = [weight / (base if self.weights else sum(bases)) for weight, base in zip(weights, bases, strict=True)]
        parts = [[each * float(spent.sum()) for each, (spent, _) in zip(scale, way, strict=True)] for way in (one, two)]
        whole, time = sum(parts[0]), sum(parts[1]) / sum(parts[0])
        off = [(after - time * before, base) for (before, base), (after, _) in zip(one, two, strict=True)]
        counts = [each for each, _ in ways[0]]
        if self.weights:
            error = _sum_of_ratios(counts, weights, off, [ratio(*each) for each in off], 0.0)
        else:
            _, error = _ratio_of_all(counts, off, self.strata)
        relative = Ratio(time, error.stderr / whole, error.documents, error.freedom, error.third / whole**3)
        before, after = (
            [share for part, decoded in zip(side, way, strict=True) for share in _spent_on(decoded, part / sum(side))]
            for side, way in zip(parts, ways, strict=True)
        )
        gain = _from_time(relative, _gain_bounds(*ways), _timing_error(after, before))
        slower, faster, doubt = gain.unseen_slower, gain.unseen_faster, sum(map(_doubt, ways))
        if self.weights:
            apart = [part / sum(parts[1]) for part in parts[1]]
            slower, faster = _unseen_apart([_gain_alone(*pair) for pair in zip(*ways, strict=True)], apart, gain.documents)
        # A document can be at the far end either way, hardly at both: decisions/019.
        return replace(gain, unseen_slower=FAR * slower, unseen_faster=FAR * faster, doubt=doubt)


def _gain_alone(first: Decoded, second: Decoded) -> Speedup:
    """Return how many times as fast the second way is in one domain, without an error: for what unseen documents make of
    it.
    """
    (spent, _), (after, _) = spent_and_base(*first), spent_and_base(*second)
    documents = distinct(first[0].cluster[first[0].tokens > 0])
    time = Ratio(float(after.sum() / spent.sum()), 0.0, documents, 0.0)
    return _from_time(time, _gain_bounds([first], [second]), EXACT)


def _gain_bounds(first: Sequence[Decoded], second: Sequence[Decoded]) -> tuple[float, float]:
    """Return the least and the most that a token can take the second way, in units of what it takes the first way."""
    bounds = [(1.0, 1.0)]
    for one, two in zip(first, second, strict=True):
        if one is not two:
            (least, most), (low, high) = _token_bounds([one]), _token_bounds([two])
            bounds.append((low / most, high / least))
    return min(low for low, _ in bounds), max(high for _, high in bounds)


class TimingError(NamedTuple):
    """What step times make uncertain of a ratio of two times: a relative standard error and its degrees of freedom; and as
    in `Speedup`, `flattered` and `waited`.
    """

    error: float
    freedom: float
    flattered: float = 0.0
    waited: float = 0.0


EXACT = TimingError(0.0, math.inf)


def _from_time(time: Ratio, bounds: tuple[float, float], timing: TimingError) -> Speedup:
    """Return the speedup from the relative `time`, the least and the most that a token can cost, and the error of step
    times.
    """
    (best, worst), share = bounds, unseen(time.documents)
    return Speedup(
        value=1 / time.value,
        sampling_error=time.stderr / time.value,
        timing_error=timing.error,
        timing_freedom=timing.freedom,
        flattered=timing.flattered,
        waited=timing.waited,
        freedom=time.freedom,
        documents=time.documents,
        least=1 / worst,
        most=1 / best,
        skewness=time.skewness / time.value,
        unseen_slower=share * max(worst / time.value - 1, 0.0),
        unseen_faster=share * max(1 - best / time.value, 0.0),
    )


def with_prefill(counts: RoundCounts, times: StepTimes, target: Array, draft: Array) -> Speedup | None:
    """Return speedup of whole requests: the target reads the prompt on both sides, and with the draft a draft model does as
    well.

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
    shares, before = _spent_on((counts, times), decoding), float(base.sum() / (base + prompts).sum())
    whole = _from_time(time, (min(best, 1.0), slowest), _timing_error(shares, _decoding(times, before)))
    return replace(whole, doubt=decoding * _doubt([(counts, times)]))


def _covariance(domains: Sequence[RoundCounts], weights: Sequence[float], sums: Sequence[tuple[Array, Array]]) -> float:
    """Return what clusters with documents in several domains add to the variance of the weighted time. Never negative: that
    errors cancel is too much to conclude from a few clusters.
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


def _timing_error(spent: Sequence[Share], base: Sequence[Share]) -> TimingError:
    """Return the error that step times give the ratio of two times: of what it is `spent` on with the draft, and of the
    `base`, decode steps. A step that has several shares has one error.

    Times of interleaved rounds give a ratio for each round, whose median has an interval. Times with an error of their own
    are independent: the derivative of the ratio's logarithm by each, its share of one time less that of the other, times
    its error, add up as squares. An error that steps share adds up before it is squared: over all steps if the other way is
    plain decoding, else over the rounds of each draft alone, since nothing says that two drafts are off by the same.
    """
    sums: dict[object, tuple[StepTime, list[float]]] = {}
    shared: dict[object, float] = {}
    for side, each in enumerate((base, spent)):
        for share, key, time, owner in each:
            shared[owner] = shared.get(owner, 0.0) + (share if side else -share) * time.shared_error
            sums.setdefault(key, (time, [0.0, 0.0]))[1][side] += share
    used = [item for item in sums.values() if max(item[1]) > 0]
    flattered = max((1 + _flattered(spent)) / (1 + _flattered(base)) - 1, 0.0)
    doubts = flattered, max(unheld(time.waiting) for time, _ in used)
    if rounds := min(len(time.rounds) for time, _ in used):
        before, after = (
            np.log1p(np.sum([shares[side] * _relative(time, rounds) for time, shares in used], axis=0)) for side in (0, 1)
        )
        return TimingError(*median_error(before - after, max(time.autocorrelation for time, _ in used)), *doubts)
    alike = sum(shared.values()) if all(time.shared_error == 0 for _, _, time, _ in base) else math.hypot(*shared.values())
    error = math.hypot(alike, *((before - after) * time.relative_error for time, (before, after) in used))
    return TimingError(error, math.inf, *doubts)


def _flattered(shares: Sequence[Share]) -> float:
    """By what share of itself a time would grow if every verification took at least as long as a decode step."""
    decode = next(time.ms for _, key, time, _ in shares if key == 1)
    return sum(share * (decode / time.ms - 1) for share, key, time, _ in shares if isinstance(key, int) and time.ms < decode)


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
