"""From rounds and step times to speedup: decode time without the draft, divided by decode time with it.

A round that drafts m tokens costs m draft steps, one verification of m + 1 tokens, and what it takes to put the caches in
order again; a round without a proposal costs one decode step. After a round that was accepted in full a draft model has two
tokens to read in its first step: its own last one and the target's. A draft head reads in its first step what the target has
verified: the accepted tokens of the round before and the target's own. Prompt lookup has no draft steps, but searches the
text once a round. Sequences of a batch share these steps (`costs/batch.py`). Prefill is the same on both sides and left
out. Times are in ms; `cost` means units of a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from alphaprof.costs.batch import Drafting, SharedSteps
from alphaprof.costs.timing import SLOW_TAIL, median_error, unheld
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

T = TypeVar("T")
FEWEST = 5  # independent documents without which only step times can decide
MORE_ROUNDS = "time more rounds on an idle machine, or use your engine's own times"
OWN_ERROR = 0.115  # of each computed step alone, as a share of the error that all of them have together
LARGEST = 600.0  # of a logarithm that is turned into a number


@dataclass(frozen=True)
class StepTime:
    """The time of one kind of step in ms. `rounds`: its times in each timing round, which runs all steps in turn (nothing to
    do with rounds of drafting) and is one unit of their sampling; `autocorrelation`: that of the rounds; `waiting`: the
    share of their time in which the steps waited for a CPU. Without rounds `relative_error`, a standard error, counts, and
    `shared_error`, that of all computed steps together. `redrawn`: whether a new run times the step again.
    """

    ms: float
    relative_error: float
    rounds: tuple[float, ...] = ()
    autocorrelation: float = 0.0
    waiting: float = 0.0
    shared_error: float = 0.0
    redrawn: bool = False


NOTHING = StepTime(0.0, 0.0)


class Share(NamedTuple):
    """A part of a time: its fraction of the whole, a key for the step, the step's time, whose rounds of drafting it belongs
    to, and the half of the timing rounds that timed it (`StepTimes.half`).
    """

    fraction: float
    step: object
    time: StepTime
    owner: object
    half: int | None


@dataclass(frozen=True)
class StepTimes:
    """Step times of target and one draft. `target[n]` verifies n tokens (n = 1: plain decoding); `lookup`: what a round
    costs before its first draft step, whether it proposes anything or not (the search of prompt lookup). `draft_after_full`:
    the draft's first step after a round that was accepted in full, over two tokens (None: it takes no longer than another).
    `draft_first[n]`: the first step of a round where it always is a step of its own, over the n tokens that were verified:
    the accepted drafts of the round before and one more (empty: it is none); `draft` is then a later one.
    `bookkeeping`: once a round that drafts anything. `optional`: rounds may draft without draft steps, as those of a hybrid.
    `half`: which half of the timing rounds these are of, whose errors are independent of the other's (None: all of them, or
    no rounds).

    `batch`: sequences in each step; `padded`: the engine verifies gamma + 1 tokens of each, whatever it drafts; `shared`:
    what a round runs in a batch of some traffic (`mixed`). None: every sequence of the batch does the same.
    """

    target: Mapping[int, StepTime]
    draft: StepTime
    lookup: StepTime = NOTHING
    draft_after_full: StepTime | None = None
    bookkeeping: StepTime = NOTHING
    draft_first: Mapping[int, StepTime] = field(default_factory=dict)
    optional: bool = False
    half: int | None = None
    batch: int = 1
    padded: bool = False
    shared: SharedSteps | None = None

    def mixed(self, domains: Sequence[RoundCounts], weights: Sequence[float] | None = None) -> StepTimes:
        """Return the same where the sequences of a batch are in rounds of some domains, each drawn by itself. `weights`: the
        domains' shares of output tokens; None: as the documents have them.
        """
        if self.batch == 1:
            return self
        shares = [1.0] * len(domains)
        if weights is not None:
            shares = [share / max(float(each.tokens.sum()), 1.0) for share, each in zip(weights, domains, strict=True)]
        exactly = sum((share * each.exactly for share, each in zip(shares, domains, strict=True)), np.zeros(1))
        if not exactly.sum():
            return self
        starts = steps = 0.0
        for share, each in zip(shares, domains, strict=True):
            if each.steps is not None and each.started is not None:
                starts, steps = starts + share * float(each.started.sum()), steps + share * float(each.steps.sum())
        rounds = float(exactly.sum())
        discards = any(each.unused is not None for each in domains)
        drafting = Drafting(exactly / rounds, discards, starts / rounds, steps / starts if starts else 0.0)
        return replace(self, shared=SharedSteps.expected(drafting, self.batch, self.padded))

    @property
    def unshared(self) -> StepTimes:
        """The same where every sequence of the batch does the same."""
        return self if self.shared is None else replace(self, shared=None)

    def steps_of(self, gamma: int) -> SharedSteps:
        """What rounds that draft up to gamma tokens run."""
        return self.shared or SharedSteps.alone(gamma, self.padded)

    @property
    def decode(self) -> StepTime:
        """One decode step of the target: the unit of cost."""
        return self.target[1]

    @property
    def rounds(self) -> int:
        """Rounds that the decode step was timed in; 0: not known."""
        return len(self.decode.rounds)

    def covers(self, gamma: int) -> bool:
        """Return whether there are times of a round of gamma drafts. Without them no speedup is known."""
        return gamma + 1 in self.target

    def c(self) -> float:
        """Return cost of one draft step, a later one where the first is a step of its own."""
        return self.draft.ms / self.decode.ms

    def v(self, gamma: int) -> float:
        """Return cost of verifying gamma drafts."""
        return self.target[gamma + 1].ms / self.decode.ms

    @cached_property
    def _by_gamma(self) -> dict[tuple[str, int], Any]:
        """What `_known_by_gamma` keeps, by function and gamma."""
        return {}

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

    def reading(self, gamma: int) -> float:
        """Return the cost of each token beyond one that a hybrid's first step reads: the mean rise of a head's first step up
        to gamma + 1 tokens, or that of a draft model's to two. More tokens were not timed and are taken to cost the same.
        """
        first, last, tokens = self.draft, self.draft_after_full or self.draft, 1
        if self.draft_first:
            first, last, tokens = self.draft_first[1], self.draft_first[gamma + 1], gamma
        return max(last.ms - first.ms, 0.0) / tokens / self.decode.ms

    def read(self, counts: RoundCounts) -> Array:
        """Return the tokens beyond one that first steps of a hybrid read, [documents]."""
        found = counts.read_by_head if self.draft_first else counts.read_by_model
        return np.zeros(len(counts.tokens)) if found is None else found

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
    times of each half of the timing rounds: what one half chooses, the other tests (None: both as all are).
    `surer`: how to get more precise ones, as the beginning of a sentence.
    """

    times: Mapping[str, StepTimes]
    basis: str
    missing: Mapping[str, str]
    halves: tuple[Mapping[str, StepTimes], Mapping[str, StepTimes]] | None = None
    surer: str = MORE_ROUNDS

    def covers(self, draft: str, gamma: int) -> bool:
        """Return whether the times of a draft, if it has any, are those of rounds of gamma drafts as well."""
        return draft not in self.times or self.times[draft].covers(gamma)

    def lacks(self, drafts: Iterable[str]) -> str | None:
        """Return why one of some drafts has no times; None if all have them."""
        without = next((draft for draft in drafts if draft not in self.times), None)
        return None if without is None else self.missing.get(without, "no step times were measured")


UNTIMED = Timing({}, "", {})
Decoded = tuple[RoundCounts, StepTimes]  # how documents are decoded, and what the steps take
# How the documents of a domain are decoded: all in one way, or parts of them, which share no cluster, each in its own way.
Domain = Decoded | list[Decoded]


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
    comes from unknown numbers of drafted tokens (`RoundCounts.doubt`). `redrawn`: whether a new run times the steps again;
    the error of a table or a roofline is the same in every run. `tail`: the share of itself by which the time would grow if
    means of timing rounds counted in place of medians, if that is much; the lower bound counts it.
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
        slowest = self.value / (1 + self.doubt) / (1 + self.flattered) / (1 + self.tail) / _stretched(above)
        return max(low, slowest), min(high, fastest)

    def possible(self, tail: float) -> tuple[float, float]:
        """Return the bounds that step times alone give, each missing with probability `tail`."""
        timing = self._timing(tail)
        if timing > LARGEST:
            return 0.0, math.inf
        return self.least / (1 + self.tail) * math.exp(-timing), self.most * math.exp(timing)

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


def _known_by_gamma(function: Callable[[StepTimes, int], T]) -> Callable[[StepTimes, int], T]:
    """Work out a value of step times and gamma once."""

    @wraps(function)
    def known(times: StepTimes, gamma: int) -> T:
        key = function.__name__, gamma
        if key not in times._by_gamma:
            times._by_gamma[key] = function(times, gamma)
        return cast("T", times._by_gamma[key])

    return known


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
        shared = times.steps_of(gamma)
        waiting = (counts.rounds - counts.started) * shared.starts  # rounds without steps of their own, for those of others
        steps, started = counts.steps + waiting * shared.steps, counts.started + waiting
        spent = spent + steps * whole.c() + started * (whole.first_ms - whole.draft.ms) / whole.decode.ms
        spent = spent + whole.read(counts) * whole.reading(gamma)
    for depths, more in zip((counts.drafted, counts.accepted), _rises(times, gamma), strict=True):
        if more.any():
            spent += np.einsum("dg,g->d", depths, more)  # a product by BLAS would spin on all cores
    if counts.unused is not None:
        spent += counts.unused * times.c()
    return np.asarray(spent)


def doubtful_time(counts: RoundCounts, times: StepTimes) -> float:
    """Return how far the decode time of all documents may be off for what rounds drafted, in units of a decode step: half of
    the way between `RoundCounts.ends`. In a batch the others draft as many tokens more or less, and all wait for each other.
    """
    if counts.doubt is None:
        return 0.0
    least, most = (float(time_spent(end, times).sum()) for end in counts.ends)
    others = 0.0
    if times.shared is not None:
        doubt = counts.doubt.sum(0)
        others = float(doubt @ np.diff(round_costs(times, len(doubt))))
        if counts.unused is not None:  # a full round discards no token: that step is its own
            others -= float(doubt[-1]) * times.c()
    return abs(most - least) / 2 + (times.batch - 1) * max(others, 0.0)


@_known_by_gamma
def round_costs(times: StepTimes, gamma: int) -> Array:
    """Return cost of a round that drafts m = 0..gamma tokens, [gamma + 1]: m c + T(m + 1) / T(1), the search, and
    bookkeeping where it drafts at all. Where the first draft step is one of its own, it is that over one token. In a batch
    of some traffic (`StepTimes.mixed`) it is what the round is expected to cost by what other sequences draft.
    """
    once = times.bookkeeping.ms
    if times.draft_first:
        once += times.draft_first[1].ms - times.draft.ms
    shared = times.steps_of(gamma)
    verify = shared.verify @ [times.target[n].ms for n in range(1, gamma + 2)]
    drafted = np.arange(gamma + 1)
    steps = (drafted + shared.waits) * times.draft.ms + verify + np.where(drafted > 0, 1.0, shared.others_draft) * once
    costs = np.asarray((steps + times.lookup.ms) / times.decode.ms)
    costs.flags.writeable = False
    return costs


@_known_by_gamma
def _rises(times: StepTimes, gamma: int) -> tuple[Array, Array]:
    """Return what one more token costs in every round that drafts, and accepts, as many: [gamma] each."""
    return np.diff(round_costs(times, gamma)), np.diff(times.catching_up(gamma))


def full_round_costs(times: StepTimes, gamma: int) -> Array:
    """Return cost of a round that drafts m = 0..gamma tokens after one that got as many accepted, [gamma + 1]: what an
    engine pays that runs a head's first step over all rows of the verification before.
    """
    return round_costs(times, gamma) + times.catching_up(gamma)


@_known_by_gamma
def cost_bounds(times: StepTimes, gamma: int) -> tuple[float, float]:
    """Return the least and the most that a token can cost with the draft, both above 0: in the best round with all drafts
    accepted, and in the dearest round for every single token.

    What the first step of the next round takes longer for the drafts that a round got accepted is part of that round's cost.
    In the dearest round verification takes at least as long as decoding. A hybrid's draft may read all that a round emitted,
    or nothing of it. In a batch the other sequences may draft as they are expected to, or all do the same: that bounds what
    all of them cost together, whatever they draft.
    """
    later = soonest = times.catching_up(gamma).tolist()
    cheap = times.without_steps if times.optional else times
    if times.optional:
        later = [max(more, (n + 1) * times.reading(gamma)) for n, more in enumerate(later)]
        soonest = [min(more, 0.0) for more in soonest]
    places = [(m, accepted) for m in range(gamma + 1) for accepted in range(m + 1)]
    cost = np.minimum(round_costs(cheap, gamma), round_costs(cheap.unshared, gamma)).tolist()
    clipped = round_costs(times.unshared.clipped, gamma).tolist()
    least = min((cost[m] + soonest[accepted]) / (accepted + 1) for m, accepted in places)
    return least, max(clipped[m] + later[accepted] for m, accepted in places)


class Sums(NamedTuple):
    """Time with a draft and without, in decode steps, and the clusters, [clusters] each; and the time with the draft of each
    part of the domain.
    """

    spent: Array
    base: Array
    clusters: Array
    parts: tuple[float, ...]


def parts_of(domain: Domain) -> list[Decoded]:
    """Return the parts of a domain; one if it is all decoded in one way."""
    return domain if isinstance(domain, list) else [domain]


def _sums(domain: Domain) -> Sums:
    each = [(*spent_and_base(*part), present(part[0].cluster)) for part in parts_of(domain)]
    parts = tuple(float(spent.sum()) for spent, _, _ in each)
    if len(each) == 1:
        return Sums(*each[0], parts)
    spent, base, clusters = (np.concatenate(side) for side in zip(*each, strict=True))
    return Sums(spent, base, clusters, parts)


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


def time_shares(counts: RoundCounts, times: StepTimes) -> Array:
    """Return shares of the decode time with the draft, as `_time_parts` names them, [parts]. First steps are counted with
    the round before them, as in `time_spent`.
    """
    exactly, gamma = counts.exactly, counts.drafted.shape[1]
    shared = times.steps_of(gamma)
    verify = [times.target[n + 1].ms * count for n, count in enumerate(exactly @ shared.verify)]
    joined = float(exactly[0]) * shared.others_draft  # rounds that draft nothing while others do
    after = counts.after.tolist()
    after[0] += joined
    first = [(after[accepted], time.ms) for accepted, time in times.first_steps(gamma).items()]
    later = float((exactly * (np.arange(gamma + 1) + shared.waits)).sum()) - sum(count for count, _ in first)
    later += 0.0 if counts.unused is None else float(counts.unused.sum())
    if counts.steps is not None and counts.started is not None:
        # What first steps read is the difference of two timed steps, so one of them may have a share below 0.
        waiting = float((counts.rounds - counts.started).sum()) * shared.starts
        read = float(times.read(counts).sum()) / (gamma if times.draft_first else 1) if times.reading(gamma) else 0.0
        begun = float(counts.started.sum()) + waiting if times.draft_first else read
        number = {0: begun - read, gamma: read}
        first = [(number.get(accepted, 0.0), time.ms) for accepted, time in times.first_steps(gamma).items()]
        later = float(counts.steps.sum()) + waiting * shared.steps - begun
    searches = float(exactly.sum()) * times.lookup.ms
    bookkeeping = (float(exactly[1:].sum()) + joined) * times.bookkeeping.ms
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


def _spent_on(domains: Sequence[Domain], sums: Sequence[Sums], scale: Sequence[float]) -> tuple[list[Share], list[Share]]:
    """Return what the time with the draft is spent on, and the time without, decode steps alone. `scale`: by which a
    domain's time in decode steps counts in the whole.
    """
    shares, plain = list[Share](), dict[int | None, Share]()
    whole = sum(each * sum(one.parts) for each, one in zip(scale, sums, strict=True))
    for domain, each, one in zip(domains, scale, sums, strict=True):
        for (counts, times), spent in zip(parts_of(domain), one.parts, strict=True):
            if counts.tokens.sum() > 0:
                part = each * spent / whole
                shares += _shares(counts, times, part)
                before = plain[times.half].fraction if times.half in plain else 0.0
                plain[times.half] = Share(before + part, 1, times.decode, None, times.half)
    return shares, list(plain.values())


def _shares(counts: RoundCounts, times: StepTimes, part: float) -> list[Share]:
    """Return what documents that take `part` of the whole time spend it on."""
    fractions = (part * time_shares(counts, times)).tolist()
    steps = zip(fractions, _time_parts(times, counts.drafted.shape[1]), strict=True)
    return [Share(fraction, *step, id(times.target), times.half) for fraction, step in steps]


def _covered(domains: Sequence[Domain]) -> bool:
    """Return whether there are times of all these rounds."""
    return all(times.covers(counts.drafted.shape[1]) for domain in domains for counts, times in parts_of(domain))


def without_draft(counts: RoundCounts, times: StepTimes) -> Decoded:
    """Return the same documents decoded without a draft: a decode step for every token."""
    nothing = np.zeros((len(counts.tokens), 0))
    plain = RoundCounts(counts.tokens, counts.tokens, nothing, nothing, np.zeros(len(counts.tokens)), counts.cluster)
    return plain, StepTimes(times.target, NOTHING, half=times.half)


def speedup(domains: Sequence[RoundCounts], weights: Sequence[float], times: StepTimes) -> Speedup | None:
    """Return the speedup of traffic whose output tokens fall on domains with known `weights`, which share the steps of a
    batch; None if one has no tokens. Tables and gates use it; the verdict's way is `Mix`.
    """
    times = times.mixed(domains, weights)
    return _by_weights([(counts, times) for counts in domains], weights)


def _by_weights(domains: Sequence[Domain], weights: Sequence[float]) -> Speedup | None:
    """Return speedup of traffic whose output tokens fall on domains with known `weights`; None if a domain has no tokens.

    1 / sum(w_d r_d) with r_d the relative time of a domain: shares of tokens weigh times, not speedups. Sampling errors
    of domains add up as independent ones, except for clusters that lie in several of them; Welch-Satterthwaite degrees of
    freedom. A domain of weight 0 does not matter.
    """
    domains = [domain for domain, weight in zip(domains, weights, strict=True) if weight > 0]
    weights = [weight for weight in weights if weight > 0]
    sums = [_sums(domain) for domain in domains] if _covered(domains) else []
    if not sums or any(each.base.sum() == 0 for each in sums):
        return None
    ratios = [ratio(each.spent, each.base) for each in sums]
    parts = [weight * one.value for weight, one in zip(weights, ratios, strict=True)]
    time = sum(parts)
    whole = _sum_of_ratios(weights, sums, ratios, time)
    scale = [weight / float(each.base.sum()) for weight, each in zip(weights, sums, strict=True)]
    traffic = _from_time(whole, _token_bounds(domains), _timing_error(*_spent_on(domains, sums, scale)))
    each = [_from_time(one, _token_bounds([domain]), EXACT) for one, domain in zip(ratios, domains, strict=True)]
    slower, faster = _unseen_apart(each, [part / time for part in parts], whole.documents)
    doubts = sum(part * _doubt([domain]) for part, domain in zip(parts, domains, strict=True))
    return replace(traffic, unseen_slower=slower, unseen_faster=faster, doubt=doubts / time)


def _doubt(domains: Sequence[Domain]) -> float:
    """Return what `doubtful_time` is of the time of some documents."""
    parts = [part for domain in domains for part in parts_of(domain)]
    doubts = sum(doubtful_time(*part) for part in parts)
    return doubts / sum(float(time_spent(*part).sum()) for part in parts) if doubts else 0.0


def _unseen_apart(domains: Sequence[Speedup], parts: Sequence[float], documents: int) -> tuple[float, float]:
    """Return what unseen documents of domains with given weights could add to the time and take away, as shares of it.
    `parts`: what each domain takes of it; `documents`: how many different ones all have together.
    """
    apart = documents == sum(one.documents for one in domains)
    together = math.hypot if apart else lambda *shares: sum(shares)  # the same documents may lie far out in all domains
    slower = together(*(part * one.unseen_slower for part, one in zip(parts, domains, strict=True)))
    return slower, together(*(part * one.unseen_faster for part, one in zip(parts, domains, strict=True)))


def _sum_of_ratios(weights: Sequence[float], sums: Sequence[Sums], ratios: Sequence[Ratio], value: float) -> Ratio:
    """Return the weighted sum of the ratios of domains, which is `value`, with its error."""
    variances = [(weight * one.stderr) ** 2 for weight, one in zip(weights, ratios, strict=True)]
    documents = distinct(np.concatenate([each.clusters[each.base > 0] for each in sums]))
    apart = documents == sum(one.documents for one in ratios)
    variance = sum(variances) + (0.0 if apart else _covariance(weights, sums))
    thirds = [weight**3 * one.third for weight, one in zip(weights, ratios, strict=True)]
    third = sum(thirds) if apart else sum(map(math.cbrt, thirds)) ** 3
    return Ratio(value, math.sqrt(variance), documents, _freedom(variances, ratios, documents), third)


def _as_sampled(domains: Sequence[Domain], strata: Array | None) -> Speedup | None:
    """Return speedup of the traffic that all these documents were drawn from: one ratio over them, whose error includes that
    of the domains' shares. None if there are no tokens.

    `strata` [units]: the stratum of each cluster, by its number; a fixed number of documents was drawn from each. None: all
    were drawn from one.
    """
    domains = [domain for domain in domains if any(counts.tokens.sum() > 0 for counts, _ in parts_of(domain))]
    if not domains or not _covered(domains):
        return None
    sums = [_sums(domain) for domain in domains]
    time = _ratio_of_all(domains, sums, strata)
    timing = _timing_error(*_spent_on(domains, sums, [1.0] * len(domains)))
    return replace(_from_time(time, _token_bounds(domains), timing), doubt=_doubt(domains))


def _ratio_of_all(domains: Sequence[Domain], sums: Sequence[Sums], strata: Array | None) -> Ratio:
    """Return the ratio of what all domains spent to what they would spend without a draft. `strata`: those of all clusters,
    by their numbers.
    """
    spent, base, clusters = (np.concatenate([each[side] for each in sums]) for side in range(3))
    if np.bincount(clusters).max() > 1:  # else there is nothing to add up
        (spent, base), clusters = by_cluster(clusters, spent, base), present(clusters)
    if strata is None or not strata.any():
        return ratio(spent, base)
    documents = [counts.cluster for domain in domains for counts, _ in parts_of(domain)]
    sizes = np.bincount(np.concatenate(documents))[clusters]
    return ratio(spent, base, strata[clusters], sizes.astype(np.float64))


def _token_bounds(domains: Sequence[Domain]) -> tuple[float, float]:
    """Return the least and the most that a token can cost in any of some domains."""
    parts = [part for domain in domains for part in parts_of(domain)]
    each = [cost_bounds(times, counts.drafted.shape[1]) for counts, times in parts]
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
        return self.routed(self.decoded(counts, times))

    def decoded(self, counts: Sequence[RoundCounts], times: StepTimes) -> list[Decoded]:
        """Return how the domains are decoded together: what is in a batch with what follows from their mixture."""
        times = times.mixed(counts, self.weights)
        return [(each, times) for each in counts]

    def routed(self, domains: Sequence[Domain]) -> Speedup | None:
        """Return the same where each domain, or each part of one, is decoded in its own way."""
        if self.weights is None:
            return _as_sampled(domains, self.strata)
        return _by_weights(domains, self.weights)

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

    def slowest(self, domains: Sequence[Decoded]) -> float | None:
        """Return `value` if rounds drafted the most that the log allows (`RoundCounts.ends`). p_min and γ are chosen by it,
        since the middle favors the p_min at which the log tells least.
        """
        return self.value([(counts.ends[1], times) for counts, times in domains])

    def fastest(self, domains: Sequence[Decoded]) -> float | None:
        """Return `value` if rounds drafted the least that the log allows."""
        return self.value([(counts.ends[0], times) for counts, times in domains])

    def gain(self, first: Sequence[Domain], second: Sequence[Domain]) -> Speedup | None:
        """Return how many times as fast the `second` way to decode the documents is as the `first`; None if there are no
        tokens. Both ways have the same parts of each domain.

        With T = sum(w_d spent_d / base_d) of each way and R = T_2 / T_1, the error of R is that of
        sum(w_d (spent_2d - R spent_1d) / base_d) / T_1: what a document costs either way cancels out.
        """
        given = self.weights or (1.0,) * len(first)
        seen = [any(counts.tokens.sum() > 0 for counts, _ in parts_of(domain)) for domain in first]
        kept = [place for place, weight in enumerate(given) if weight > 0 and seen[place]]
        if not kept or not _covered([*first, *second]) or (self.weights and len(kept) < sum(weight > 0 for weight in given)):
            return None
        weights, ways = [given[place] for place in kept], [[way[place] for place in kept] for way in (first, second)]
        one, two = ([_sums(domain) for domain in way] for way in ways)
        bases = [float(each.base.sum()) for each in one]
        scale = [weight / (base if self.weights else sum(bases)) for weight, base in zip(weights, bases, strict=True)]
        parts = [[each * float(sums.spent.sum()) for each, sums in zip(scale, way, strict=True)] for way in (one, two)]
        whole, time = sum(parts[0]), sum(parts[1]) / sum(parts[0])
        off = [Sums(after.spent - time * before.spent, *before[1:]) for before, after in zip(one, two, strict=True)]
        if self.weights:
            error = _sum_of_ratios(weights, off, [ratio(*each[:2]) for each in off], 0.0)
        else:
            error = _ratio_of_all(ways[0], off, self.strata)
        relative = Ratio(time, error.stderr / whole, error.documents, error.freedom, error.third / whole**3)
        before, after = (_spent_on(way, sums, scale)[0] for way, sums in zip(ways, (one, two), strict=True))
        gain = _from_time(relative, _gain_bounds(*ways), _timing_error(after, before))
        slower, faster, doubt = gain.unseen_slower, gain.unseen_faster, sum(map(_doubt, ways))
        if self.weights:
            apart = [part / sum(parts[1]) for part in parts[1]]
            slower, faster = _unseen_apart([_gain_alone(*pair) for pair in zip(*ways, strict=True)], apart, gain.documents)
        # A document can be at the far end either way, hardly at both: decisions/019.
        return replace(gain, unseen_slower=FAR * slower, unseen_faster=FAR * faster, doubt=doubt)


def _gain_alone(first: Domain, second: Domain) -> Speedup:
    """Return how many times as fast the second way is in one domain, without an error: for what unseen documents make of
    it.
    """
    before, after = _sums(first), _sums(second)
    documents = distinct(before.clusters[before.base > 0])
    time = Ratio(float(after.spent.sum() / before.spent.sum()), 0.0, documents, 0.0)
    return _from_time(time, _gain_bounds([first], [second]), EXACT)


def _gain_bounds(first: Sequence[Domain], second: Sequence[Domain]) -> tuple[float, float]:
    """Return the least and the most that a token can take the second way, in units of what it takes the first way."""
    bounds, sides = [(1.0, 1.0)], ([part for domain in way for part in parts_of(domain)] for way in (first, second))
    for one, two in zip(*sides, strict=True):
        if one is not two:
            (least, most), (low, high) = _token_bounds([one]), _token_bounds([two])
            bounds.append((low / most, high / least))
    return min(low for low, _ in bounds), max(high for _, high in bounds)


class TimingError(NamedTuple):
    """What step times make uncertain of a ratio of two times: a relative standard error and its degrees of freedom; and as
    in `Speedup`, `flattered`, `waited`, `redrawn` and `tail`, here also if it is small.
    """

    error: float
    freedom: float
    flattered: float = 0.0
    waited: float = 0.0
    redrawn: bool = False
    tail: float = 0.0


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
        redrawn=timing.redrawn,
        tail=timing.tail if timing.tail > SLOW_TAIL else 0.0,  # of both halves of the rounds together
        freedom=time.freedom,
        documents=time.documents,
        least=1 / worst,
        most=1 / best,
        skewness=time.skewness / time.value,
        unseen_slower=share * max(worst / time.value - 1, 0.0),
        unseen_faster=share * max(1 - best / time.value, 0.0),
    )


def with_prefill(domain: Domain, prefill: Sequence[tuple[Array, Array]]) -> Speedup | None:
    """Return speedup of whole requests: the target reads the prompt on both sides, and with the draft a draft model does as
    well.

    `prefill` [parts]: what that takes target and draft, in units of a decode step, [documents] each; its own error is not in
    the result's. None where there are no tokens.
    """
    if not _covered([domain]):
        return None
    parts, sums = parts_of(domain), _sums(domain)
    spent, base = sums.spent, sums.base
    if base.sum() == 0:
        return None
    read = [by_cluster(counts.cluster, *each) for (counts, _), each in zip(parts, prefill, strict=True)]
    prompts, more = (np.concatenate(side) for side in zip(*read, strict=True))
    best, worst = _token_bounds([domain])
    slowest = max(worst, 1 + float((more / np.maximum(prompts, 1e-9)).max()))
    time = ratio(spent + prompts + more, base + prompts)
    decoding = float(spent.sum() / (spent + prompts + more).sum())
    shares, plain = _spent_on([domain], [sums], [1.0])
    before = float(base.sum() / (base + prompts).sum())
    scaled = [each._replace(fraction=decoding * each.fraction) for each in shares]
    timing = _timing_error(scaled, [each._replace(fraction=before * each.fraction) for each in plain])
    whole = _from_time(time, (min(best, 1.0), slowest), timing)
    return replace(whole, doubt=decoding * _doubt([domain]))


def _covariance(weights: Sequence[float], sums: Sequence[Sums]) -> float:
    """Return what clusters with documents in several domains add to the variance of the weighted time. Never negative: that
    errors cancel is too much to conclude from a few clusters.
    """
    errors = []
    for weight, (spent, base, _, _) in zip(weights, sums, strict=True):
        if (base > 0).sum() < 2:
            return 0.0  # the variance is infinite as it is
        errors.append(weight * influences(spent, base))
    each = np.concatenate(errors)
    (joint,) = by_cluster(np.concatenate([each.clusters for each in sums]), each)
    return max(0.0, float((joint**2).sum() - (each**2).sum()))


def _timing_error(spent: Sequence[Share], base: Sequence[Share]) -> TimingError:
    """Return the error that step times give the ratio of two times: of what it is `spent` on with the draft, and of the
    `base`, decode steps. A step that has several shares has one error.

    Times of interleaved rounds give a ratio for each round, whose median has an interval; the errors of two halves of the
    rounds are independent. Times with an error of their own are independent: the derivative of the ratio's logarithm by
    each, its share of one time less that of the other, times its error, add up as squares. An error that steps share adds up
    before it is squared: over all steps if the other way is plain decoding, else over the rounds of each draft alone, since
    nothing says that two drafts are off by the same. Of such steps each has an error of its own besides, `OWN_ERROR` of the
    shared one, or two gammas of a draft would have none.
    """
    halves = list(dict.fromkeys(share.half for share in spent))
    if len(halves) > 1:
        of_halves = [
            _timing_error(*([share for share in side if share.half == half] for side in (spent, base))) for half in halves
        ]
        squares = [one.error**2 for one in of_halves]
        freedom = 0.0  # a half of too few rounds has no error
        if math.isfinite(sum(squares)):
            moments = sum(square**2 / one.freedom for square, one in zip(squares, of_halves, strict=True) if square > 0)
            freedom = sum(squares) ** 2 / moments if moments > 0 else math.inf
        return TimingError(
            error=math.sqrt(sum(squares)),
            freedom=freedom,
            flattered=_more_flattered(spent, base),
            waited=max(one.waited for one in of_halves),
            redrawn=any(one.redrawn for one in of_halves),
            tail=sum(one.tail for one in of_halves),
        )
    sums: dict[object, tuple[StepTime, list[float]]] = {}
    shared: dict[object, float] = {}
    for side, each in enumerate((base, spent)):
        for fraction, key, time, owner, _ in each:
            shared[owner] = shared.get(owner, 0.0) + (fraction if side else -fraction) * time.shared_error
            sums.setdefault(key, (time, [0.0, 0.0]))[1][side] += fraction
    used = [item for item in sums.values() if any(item[1])]
    doubts = (
        _more_flattered(spent, base),
        max(unheld(time.waiting) for time, _ in used),
        any(time.redrawn for time, _ in used),
    )
    if rounds := min(len(time.rounds) for time, _ in used):
        before, after = (
            np.log1p(np.sum([shares[side] * _relative(time, rounds) for time, shares in used], axis=0)) for side in (0, 1)
        )
        error, freedom = median_error(before - after, max(time.autocorrelation for time, _ in used))
        tail = float(np.exp(after).mean() / np.exp(before).mean()) - 1
        return TimingError(error, freedom, *doubts, tail)
    alike = sum(shared.values()) if all(share.time.shared_error == 0 for share in base) else math.hypot(*shared.values())
    own = [math.hypot(time.relative_error, OWN_ERROR * time.shared_error) for time, _ in used]
    apart = [(after - before) * error for error, (_, (before, after)) in zip(own, used, strict=True)]
    return TimingError(math.hypot(alike, *apart), math.inf, *doubts)


def _more_flattered(spent: Sequence[Share], base: Sequence[Share]) -> float:
    """By what share of itself the time with the draft would grow more than the other if every verification took at least as
    long as a decode step.
    """
    after, before = (_flattered(each) for each in (spent, base))
    return max((1 + after) / (1 + before) - 1, 0.0)


def _flattered(shares: Sequence[Share]) -> float:
    decode = {share.half: share.time.ms for share in shares if share.step == 1}
    verify = [share for share in shares if isinstance(share.step, int) and share.time.ms < decode[share.half]]
    return sum(share.fraction * (decode[share.half] / share.time.ms - 1) for share in verify)


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
