"""What rounds of drafting cost: the step times of a draft, and how often rounds run each step (`costs/mixing.py`).

A round that drafts m tokens costs m draft steps, one verification of m + 1 tokens, and what it takes to put the caches in
order again; a round without a proposal costs one decode step. After a round that was accepted in full a draft model has two
tokens to read in its first step: its own last one and the target's. A draft head reads in its first step what the target has
verified: the accepted tokens of the round before and the target's own. Prompt lookup has no draft steps, but searches the
text once a round. Times are in ms; `cost` and `price` mean units of a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from alphaprof.costs.mixing import Apart, Counted, Drafting, mixing
from alphaprof.stats.estimate import Array
from alphaprof.totals.replay import RoundCounts

MORE_ROUNDS = "time more rounds on an idle machine"


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

    `batch`: sequences in each step; `others`: what each other sequence of a batch drafts (`mixed`). None: as much as this
    one.
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
    others: Drafting | None = None

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
        if not (rounds := float(exactly.sum())):
            return self
        starts = steps = 0.0
        for share, each in zip(shares, domains, strict=True):
            if each.steps is not None and each.started is not None:
                starts, steps = starts + share * float(each.started.sum()), steps + share * float(each.steps.sum())
        discards = any(each.unused is not None for each in domains)
        return replace(self, others=Drafting(exactly / rounds, discards, starts / rounds, steps / starts if starts else 0.0))

    @cached_property
    def alone(self) -> StepTimes:
        """The same where every sequence of the batch does the same."""
        return self if self.others is None else replace(self, others=None)

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

    def steps(self, gamma: int) -> list[StepTime]:
        """Return each kind of step of rounds of up to gamma drafts, in the order of `mixing`'s columns."""
        tokens, after_full = range(1, gamma + 2), self.draft_after_full or self.draft
        first = [self.draft_first[n] for n in tokens] if self.draft_first else [after_full]
        return [*(self.target[n] for n in tokens), self.draft, *first, self.lookup, self.bookkeeping]

    def ms(self, gamma: int) -> Array:
        """Return the times of these steps, [kinds]."""
        return np.array([step.ms for step in self.steps(gamma)])

    def mixing(self, gamma: int, hybrid: bool = False) -> Array:
        """Return how often rounds run each of these steps, as `mixing.mixing` does. `hybrid`: draft steps are counted apart
        from drafted tokens. Noise can make a step over more tokens the shorter one: reading is free then.
        """
        return self._priced(gamma, hybrid)[0]

    def prices(self, gamma: int, hybrid: bool = False) -> Counted:
        """Return what everything costs that rounds are counted by, in decode steps."""
        return self._priced(gamma, hybrid)[1]

    def _priced(self, gamma: int, hybrid: bool) -> tuple[Array, Counted]:
        if (gamma, hybrid) not in self._known:
            found, ms = mixing(gamma, bool(self.draft_first), hybrid, self.batch, self.others), self.ms(gamma)
            read = Counted.of(found).apart.read
            read *= read @ ms > 0
            each = found @ ms / self.decode.ms
            each.flags.writeable = False
            self._known[gamma, hybrid] = found, Counted.of(each)
        return self._known[gamma, hybrid]

    @cached_property
    def _known(self) -> dict[tuple[int, bool], tuple[Array, Counted]]:
        """Worked out once, by gamma and whether rounds are a hybrid's."""
        return {}


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


def free_draft(gamma: int) -> StepTimes:
    """Return times in which drafting and verification of several tokens cost nothing extra: the speedup is tokens per
    round.
    """
    return StepTimes({n: StepTime(1.0, 0.0) for n in range(1, gamma + 2)}, NOTHING)


def without_draft(counts: RoundCounts, times: StepTimes) -> tuple[RoundCounts, StepTimes]:
    """Return the same documents decoded without a draft: a decode step for every token."""
    nothing = np.zeros((len(counts.tokens), 0))
    plain = RoundCounts(counts.tokens, counts.tokens, nothing, nothing, np.zeros(len(counts.tokens)), counts.cluster)
    return plain, StepTimes(times.target, NOTHING, half=times.half)


def _counted_apart(counts: RoundCounts, times: StepTimes) -> Apart:
    """Return what is counted beside the depths of rounds, [documents] each."""
    idle = None if counts.started is None else counts.rounds - counts.started
    read = counts.read_by_head if times.draft_first else counts.read_by_model
    return Apart(counts.unused, counts.steps, counts.started, idle, read)


def time_spent(counts: RoundCounts, times: StepTimes) -> Array:
    """Decode time with the draft in units of a decode step, [documents].

    What the first step of a round takes longer for the drafts that were accepted before it is counted with the round that
    accepted them. A text's last round has no step after it: of a document at most that much is counted too much.
    """
    prices = times.prices(counts.drafted.shape[1], counts.steps is not None)
    spent = counts.rounds * prices.rounds[0]
    for depths, each in ((counts.drafted, prices.rounds), (counts.accepted, prices.accepted)):
        if (more := np.diff(each)).any():
            spent += np.einsum("dg,g->d", depths, more)  # a product by BLAS would spin on all cores
    for column, price in zip(_counted_apart(counts, times), prices.apart, strict=True):
        if column is not None and price:
            spent += column * price
    return np.asarray(spent)


def time_by_step(counts: RoundCounts, times: StepTimes) -> Array:
    """Return what all documents together spend on each kind of step, as `StepTimes.steps` has them, in units of a decode
    step, [kinds]: it adds up to what `time_spent` does. What a hybrid's first steps read is the difference of two timed
    steps, so one of them may be below 0.
    """
    gamma = counts.drafted.shape[1]
    accepted = np.array([0.0, *np.einsum("dg->g", counts.accepted), 0.0])  # after none a first step takes no longer
    apart = [0.0 if column is None else float(column.sum()) for column in _counted_apart(counts, times)]
    counted = np.concatenate([counts.exactly, accepted[:-1] - accepted[1:], apart])
    return np.asarray(counted @ times.mixing(gamma, counts.steps is not None) * times.ms(gamma) / times.decode.ms)


def doubtful_time(counts: RoundCounts, times: StepTimes) -> float:
    """Return how far the decode time of all documents may be off for what rounds drafted, in units of a decode step: half of
    the way between `RoundCounts.ends`. In a batch the others draft as many tokens more or less, and all wait for each other.
    """
    if counts.doubt is None:
        return 0.0
    doubt = counts.doubt.sum(0)
    prices = times.prices(len(doubt), counts.steps is not None)
    more = float(doubt @ np.diff(prices.rounds))
    if counts.unused is not None:  # a full round discards no token: that step is its own
        more -= float(doubt[-1]) * prices.apart.unused
    return abs(more) + (0.0 if times.others is None else (times.batch - 1) * max(more, 0.0))


def round_costs(times: StepTimes, gamma: int) -> Array:
    """Return cost of a round that drafts m = 0..gamma tokens, [gamma + 1]: m c + T(m + 1) / T(1), the search, and
    bookkeeping where it drafts at all. Where the first draft step is one of its own, it is that over one token. In a batch
    of some traffic (`StepTimes.mixed`) it is what the round is expected to cost by what other sequences draft.
    """
    return times.prices(gamma).rounds


def full_round_costs(times: StepTimes, gamma: int) -> Array:
    """Return cost of a round that drafts m = 0..gamma tokens after one that got as many accepted, [gamma + 1]: what an
    engine pays that runs a head's first step over all rows of the verification before.
    """
    prices = times.prices(gamma)
    return prices.rounds + prices.accepted


def cost_bounds(times: StepTimes, gamma: int) -> tuple[float, float]:
    """Return the least and the most that a token can cost with the draft, both above 0: in the best round with all drafts
    accepted, and in the dearest round for every single token.

    What the first step of the next round takes longer for the drafts that a round got accepted is part of that round's cost.
    In the dearest round verification takes at least as long as decoding: what says otherwise is noise, or a decode step that
    the engine runs slower than it need. A hybrid's draft may read all that a round emitted, or nothing of it. In a batch the
    other sequences may draft as they are expected to, or all do the same: that bounds what all of them cost together,
    whatever they draft.
    """
    ms, emitted = times.ms(gamma), np.arange(1, gamma + 2)
    later = soonest = times.prices(gamma).accepted
    if times.optional:
        later = np.maximum(later, emitted * times.prices(gamma, hybrid=True).apart.read)
        soonest = np.minimum(soonest, 0.0)
    possible = np.tri(gamma + 1, dtype=bool)  # drafted, accepted
    cheap = np.minimum(*(each.prices(gamma, times.optional).rounds for each in (times, times.alone)))
    least = ((cheap[:, None] + soonest) / emitted)[possible].min()
    ms[: gamma + 1] = np.maximum(ms[: gamma + 1], times.decode.ms)
    dearest = Counted.of(times.alone.mixing(gamma)).rounds @ ms / times.decode.ms
    return float(least), float((dearest[:, None] + later)[possible].max())
