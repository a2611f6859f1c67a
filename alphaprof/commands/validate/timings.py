"""What a clock says of real decoding: times of the same documents with and without a draft, the speedup in them, and how far
off a predicted speedup is, with an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from alphaprof.rules import default_rule, parse_rule
from alphaprof.stats.estimate import influences, log_interval, small_sample

Array = np.ndarray[Any, Any]
Outcome = Literal["within", "outside", "too_noisy"]
TAIL = 0.0125  # with which an end of a row's interval misses; see `clock_error`
SHORTEST_CONTEXT = 8  # tokens; `costs.context` takes no fewer


@dataclass(frozen=True)
class Decodings:
    """The same documents decoded in one way: with a draft at one gamma, or plainly (`draft` None, `gamma` 0).

    Seconds [repeats, documents]: `wall_s` and `cpu_s` of everything behind the first token, `prefill_s` (wall) of what
    comes before, `draft_s` and `verify_s` (wall) the parts of `wall_s` that drafting and verification took. Counts of
    the first repeat: `tokens` emitted by rounds, `rounds` [documents]; `drafted`, `accepted` [documents, gamma] rounds
    whose first d = 1..gamma tokens were drafted, and accepted. `same_text` [documents]: the text is the profiled one.
    """

    draft: str | None
    gamma: int
    wall_s: Array
    cpu_s: Array
    prefill_s: Array
    draft_s: Array
    verify_s: Array
    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    same_text: Array


@dataclass(frozen=True)
class Generated:
    """A few documents decoded by transformers' `generate` beside the loop that is predicted, with one draft at one gamma.

    Seconds [repeats, documents] of whole calls, prefill included, with the draft and plainly; `rounds` of the loop, `tokens`
    of its plain text, and `same_text`: whether both wrote the same with the draft, [documents].
    """

    draft: str
    gamma: int
    loop_s: Array
    plain_loop_s: Array
    generate_s: Array
    plain_generate_s: Array
    rounds: Array
    tokens: Array
    same_text: Array


@dataclass(frozen=True)
class DecodingTimes:
    """Real decoding of some documents of a run. `documents` [documents]: their numbers, ascending; `rules` [documents]: id
    of the rule that each was verified by; `short`: documents of fewer than two tokens, which have no decode time, and
    `foreign`: documents whose text the target did not write here; both are left out. `generated`, where it was asked for:
    the same by `generate`; `not_generated`: what was left out of that, and why.
    """

    documents: Array
    rules: tuple[str, ...]
    plain: Decodings
    drafted: tuple[Decodings, ...]
    short: int
    foreign: int
    generated: tuple[Generated, ...] = ()
    not_generated: tuple[str, ...] = ()


def decoded_rule(decision: str, policy: str) -> str:
    """The rule that text of a policy is decoded by: that of the decision, where it keeps such text as it is, its rounds
    are chains and it can be decoded; else what engines do by default.
    """
    if decision != "auto":
        rule = parse_rule(decision).rule
        if rule.chained and not rule.logged and policy in rule.policies:
            return decision
    return default_rule(policy)


def by_depth(counts: Array, gamma: int) -> Array:
    """How many of some rounds [rounds] reached a depth of d = 1..gamma, [gamma]."""
    return np.asarray((np.arange(1, gamma + 1) <= counts[:, None]).sum(0))


def contexts_of(prompt_tokens: Array, continuation_tokens: Array) -> list[int]:
    """The smallest and the largest mean context of some documents [documents], in tokens: where steps are to be timed.

    A document's mean context is its prompt and half of its continuation. One context where both are the same.
    """
    contexts = prompt_tokens + continuation_tokens / 2
    return sorted({max(SHORTEST_CONTEXT, round(float(context))) for context in (contexts.min(), contexts.max())})


@dataclass(frozen=True)
class TimedGroup:
    """One source of error: the variance that it gives the logarithm of a speedup, and the degrees of freedom with which that
    was estimated (infinite where it is known).
    """

    variance: float
    freedom: float


@dataclass(frozen=True)
class RelativeError:
    """Predicted / measured - 1 of a speedup with its interval. `low` is -1 or above; `high` may be infinite."""

    value: float
    low: float
    high: float

    def absolute(self) -> tuple[float, float, float]:
        """The absolute error with the ends of its interval, (value, low, high)."""
        return abs(self.value), max(0.0, self.low, -self.high), max(-self.low, self.high)


@dataclass(frozen=True)
class TimedPair:
    """The same documents decoded plainly and with a draft, by one clock: seconds [repeats, documents] and the tokens that
    were decoded in them [documents].
    """

    plain: Array
    drafted: Array
    plain_tokens: Array
    drafted_tokens: Array

    def speedup(self) -> float | None:
        """Plain decode time per token / that with the draft; None where nothing was decoded.

        The median over repeats of each document, summed over documents. Where the texts are equal, as in float32, this is
        the ratio of the times.
        """
        if not (self.plain_tokens.sum() > 0 and self.drafted_tokens.sum() > 0):
            return None
        if not (self.plain.sum(1).all() and self.drafted.sum(1).all()):  # a clock whose ticks are longer than that
            return None
        ratio = np.median(self.plain, axis=0).sum() / np.median(self.drafted, axis=0).sum()
        return float(ratio * self.drafted_tokens.sum() / self.plain_tokens.sum())

    def error(self, predicted: float, cost_per_token: Array, timing: TimedGroup) -> RelativeError | None:
        """How far a predicted speedup is off, None where nothing was decoded.

        `cost_per_token` [documents]: the predicted time per token with the draft, in units of a plain one; `timing`: the
        error of the step times in the prediction. The variances of documents, repeats and step times add up, with Welch and
        Satterthwaite's degrees of freedom. That of documents holds most of the clock's noise too, and is added to that of
        repeats nevertheless: repeats alone show what disturbs all documents at once.
        """
        measured = self.speedup()
        if measured is None:
            return None
        parts = [self._by_documents(cost_per_token), self._by_repeats(), timing]
        variance = sum(part.variance for part in parts)
        moments = sum(part.variance**2 / part.freedom for part in parts if part.variance > 0 and part.freedom > 0)
        known = math.isfinite(variance)
        freedom = 0.0 if not known else variance**2 / moments if moments > 0 else math.inf
        low, high = log_interval(predicted / measured, math.sqrt(variance), freedom, TAIL)
        return RelativeError(predicted / measured - 1, low - 1, high - 1)

    def _by_documents(self, cost_per_token: Array) -> TimedGroup:
        """What documents contribute: how much slower than predicted each was with the draft, less the same without.

        Their rounds stand on both sides, so these residuals are of the time that a round takes and of the clock. Fewer than
        two documents say nothing.
        """
        kept = (self.plain_tokens > 0) & (self.drafted_tokens > 0)
        if kept.sum() < 2:
            return TimedGroup(math.inf, 0.0)
        base, spent = self.plain_tokens[kept], (self.drafted_tokens * cost_per_token)[kept]
        plain, drafted = (np.median(seconds[:, kept], axis=0) for seconds in (self.plain, self.drafted))
        slower = influences(drafted, spent) * (spent.sum() / drafted.sum())
        slower -= influences(plain, base) * (base.sum() / plain.sum())
        return TimedGroup(float((slower**2).sum()), small_sample(base)[1])

    def _by_repeats(self) -> TimedGroup:
        """What repeats contribute: how the speedup of all documents differs between them. One repeat says nothing.

        The variance of a median is up to pi / 2 times that of the mean.
        """
        repeats = len(self.plain)
        if repeats < 2:
            return TimedGroup(math.inf, 0.0)
        each = np.log(self.plain.sum(1) / self.drafted.sum(1))
        median = math.pi / 2 if repeats > 2 else 1.0
        return TimedGroup(float(each.var(ddof=1)) * median / repeats, repeats - 1)


@dataclass(frozen=True)
class ClockError:
    """Absolute error of predicted speedups by one clock: the median over rows with its 95 % interval, and the largest."""

    median: float  # over rows
    low: float
    high: float
    worst: float  # the largest of all rows
    outcome: Outcome  # by this clock alone


def clock_error(errors: Sequence[RelativeError], tolerance: float) -> ClockError | None:
    """What the rows say together, by one clock; None without rows.

    The interval of the median goes from the median of the rows' lower ends to that of their upper ends. Rows share step
    times and plain decodings, so nothing is gained from their number. Where no row is off by more than the tolerance, one
    lies outside with a probability of at most 2 TAIL, and half of them at once with at most 4 TAIL = 5 %, however they
    depend on each other (Markov's inequality; Rueger 1978: twice the median of p-values is a p-value). Where every row is
    off by more than the tolerance, `within` is as rare.
    """
    if not errors:
        return None
    values = np.array([error.absolute() for error in errors])
    median, low, high = (float(value) for value in np.median(values, axis=0))
    outcome: Outcome = "outside" if low > tolerance else "within" if high <= tolerance else "too_noisy"
    return ClockError(median, low, high, float(values[:, 0].max()), outcome)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """What several clocks say: outside where all do, within where some do and none says outside."""
    if set(outcomes) == {"outside"}:
        return "outside"
    return "within" if "within" in outcomes and "outside" not in outcomes else "too_noisy"
