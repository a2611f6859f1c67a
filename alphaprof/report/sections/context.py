"""Acceptance by length of context: whether it decays as a text grows, and from which length on no γ pays.

Each of the n tokens of a round takes 1/n of it, so that the rounds of all ranges of contexts add up to all rounds. Long
documents come from other domains than short ones: whether acceptance decays is asked within documents, by the slope of
rounds per token over the logarithm of the context, each document against its own mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import StepTimes, free_draft
from alphaprof.costs.speedup import ALL, FEWEST
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Figure, Table
from alphaprof.report.asked import Asked
from alphaprof.report.build import RunReport
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import NO_SPREAD, Array, Interval, by_cluster, distinct, pooled_share, ratio
from alphaprof.stats.student import quantile
from alphaprof.totals.count import TotalsRequest, Traced, by_chance, columns_of, has_rounds
from alphaprof.totals.log_sample import LogPart, gathered, tables
from alphaprof.totals.replay import RoundCounts, Trace, by_token, listed_rounds

ENOUGH = 20  # independent documents of a range; a smaller one is joined with the one before
TITLE = "acceptance and speedup by length of context"
EMPTY = f"it needs the position log, greedy or one_hot rounds, and two context ranges of {ENOUGH} documents"
READS_LOG = True


@dataclass(frozen=True)
class BestGamma:
    """The best γ of a draft for one load in a range of contexts."""

    concurrency: int  # sequences decoded at a time
    gamma: int  # 0: none is faster than decoding without the draft
    speedup: float  # at that gamma; 1 at 0


@dataclass(frozen=True)
class ContextRange:
    """Contexts of `low` tokens and more, below `high`."""

    low: int  # tokens before a position, the prompt's included
    high: int | None  # None: there are no longer ones
    context: float  # mean, in tokens
    units: int  # independent documents
    tokens: int  # that rounds emitted there
    alpha: Interval | None  # acceptance over positions with a proposal
    tokens_per_round: Interval | None  # at the gamma of the axis
    speedup: Interval | None  # at the best gamma here, by step times at this context if there are any
    best: tuple[BestGamma, ...]  # by concurrency; empty without step times


@dataclass(frozen=True)
class ContextAxis:
    """One draft by context, under those rules of the verdict whose rounds are facts of the log.

    `drift`: by what share a token takes more rounds with each doubling of the context, within documents; None: too few of
    them are long enough, or they do not differ.
    """

    draft: str
    gamma: int  # of `tokens_per_round` and `drift`
    ranges: tuple[ContextRange, ...]  # from the shortest contexts on
    drift: Interval | None
    pays_below: Interval | None  # tokens of context from which on no gamma pays; None: no such length was seen

    @property
    def decays(self) -> bool:
        """Whether acceptance surely falls as a text grows."""
        return self.drift is not None and self.drift.low > 0


def compute(report: RunReport) -> tuple[ContextAxis, ...]:
    """Return the axis of every draft with rounds in two ranges of contexts at least."""
    asked, part, gamma = report.asked, report.part, report.answer.gamma
    run, axes = part.run, list[ContextAxis]()
    for draft, facts in run.manifest.drafts.items() if run.has_log and run.shards else ():
        rules = [rule for rule in map(parse_rule, asked.decisive) if rule.rule.timed and not rule.rule.lossy]
        factual = [rule.id for rule in rules if has_rounds(rule, facts) and not by_chance(rule, facts)]
        if not factual:
            continue
        tokens = ContextTokens.read(part, draft, [asked.request([rule]) for rule in factual])
        axis = _axis(draft, tokens, asked, gamma if gamma in tokens.rounds else max(tokens.rounds))
        axes += [axis] if axis is not None else []
    return tuple(axes)


@dataclass(frozen=True)
class ContextTokens:
    """All tokens of rounds, [tokens]: the independent `unit` and the document of each, its context, its distance from both
    ends of its text, whether the draft `proposed` there and the target `kept` it; `rounds` by γ: what its round drafted,
    accepted and emitted, [3, tokens]. `stops`: as of `RoundCounts.of`.
    """

    unit: Array
    document: Array
    context: Array
    begun: Array
    left: Array
    proposed: Array
    kept: Array
    rounds: dict[int, Array]
    stops: str

    @classmethod
    def read(cls, part: LogPart, draft: str, requests: Sequence[TotalsRequest]) -> ContextTokens:
        """From the log of a draft, the one rule of each request on its own text."""
        facts = part.run.manifest.drafts[draft]
        gammas = facts.lengths(requests[0].gammas)

        def of_shards(request: TotalsRequest) -> Iterator[dict[Any, Array]]:
            for positions, texts in tables(part.run, draft, columns_of(request, facts), ["prompt_tokens"]):
                traced = Traced.of(positions, texts, facts, request)
                shape, place = traced.shape, np.arange(len(positions))
                begun, left = place - shape.each(shape.start), shape.each(shape.stop) - place
                at = np.flatnonzero(shape.each(traced.defined) & (begun >= 1))
                units, prompts = part.documents.units_of(shape.document), texts["prompt_tokens"].to_numpy()
                yield {
                    "unit": shape.each(units)[at],
                    "document": shape.each(shape.document)[at],
                    "context": (shape.each(prompts) + begun)[at],
                    "begun": begun[at],
                    "left": left[at],
                    "proposed": traced.proposed[at],
                    "kept": traced.kept[at],
                } | {gamma: _of_each_token(traced.own, gamma) for gamma in gammas}

        found = gathered(itertools.chain.from_iterable(map(of_shards, requests)))
        rounds = {gamma: found.pop(gamma).T for gamma in gammas}
        return cls(**found, rounds=rounds, stops=requests[0].stops(facts))

    def counts(self, gamma: int, chosen: Array) -> RoundCounts:
        """Return the shares of rounds that lie at some of the tokens, by document."""
        documents, first, row = np.unique(self.document[chosen], return_index=True, return_inverse=True)
        rounds = by_token(self.rounds[gamma][:, chosen], row, len(documents), gamma)
        return RoundCounts.of(rounds, self.unit[chosen][first], self.stops)

    def drift(self, gamma: int, confidence: float) -> Interval | None:
        """By what share a token takes more rounds with each doubling of the context, within documents; None: too few of them
        are long enough, or they do not differ, so that nothing says how sure it is.

        Where a text begins rounds begin with it, and where it ends they are cut: these tokens are left out, which may leave
        a short text without two tokens to compare.
        """
        chosen = (self.begun > 2 * gamma + 1) & (self.left > gamma + 1)
        document, context = self.document[chosen], np.log2(self.context[chosen])
        paid = 1.0 / self.rounds[gamma][2][chosen]
        off = context - (np.bincount(document, context) / np.maximum(np.bincount(document), 1))[document]
        totals, spread = by_cluster(self.unit[chosen], off * paid, off**2)
        if np.count_nonzero(spread) < FEWEST:
            return None
        slope, mean = ratio(totals, spread), float(paid.mean())
        if slope.stderr <= NO_SPREAD * mean:
            return None
        half = quantile((1 + confidence) / 2, slope.freedom) * slope.stderr
        return Interval(*((slope.value + side * half) / mean for side in (0, -1, 1)))


def _of_each_token(trace: Trace, gamma: int) -> Array:
    """Return what the round of every token drafted, accepted and emitted, [tokens, 3]."""
    found = listed_rounds(trace, gamma)
    return np.repeat(np.column_stack([found.drafted, found.accepted, found.emitted]), found.emitted, axis=0)


def edges_of(context: Array, unit: Array) -> list[int]:
    """Return where ranges of contexts begin: at powers of two, those with fewer than ENOUGH documents joined with one
    before.
    """
    powers = [2**power for power in range(int(math.log2(max(context.max(), 1))) + 1)]
    edges: list[int] = []
    for low in reversed(powers):
        high = edges[0] if edges else math.inf
        if distinct(unit[(context >= low) & (context < high)]) >= ENOUGH:
            edges.insert(0, low)
    return [0, *edges[1:]]


def _axis(draft: str, tokens: ContextTokens, asked: Asked, gamma: int) -> ContextAxis | None:
    edges = edges_of(tokens.context, tokens.unit) if len(tokens.context) else []
    if len(edges) < 2:
        return None
    confidence, ranges = asked.question.confidence, []
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        chosen = np.flatnonzero((tokens.context >= low) & (tokens.context < (high or math.inf)))
        unit, proposed = tokens.unit[chosen], tokens.proposed[chosen]
        mean = float(tokens.context[chosen].mean())
        counts = {each: tokens.counts(each, chosen) for each in tokens.rounds}
        best, faster = _best(draft, counts, asked.costs.at(mean) if asked.costs else None, asked)
        free = ALL.speedup([counts[gamma]], free_draft(gamma))
        ranges.append(
            ContextRange(
                low=low,
                high=high,
                context=mean,
                units=distinct(unit),
                tokens=len(chosen),
                alpha=pooled_share(unit, tokens.kept[chosen] * proposed, proposed, confidence),
                tokens_per_round=tokens_interval(free, gamma, confidence),
                speedup=faster,
                best=tuple(best),
            )
        )
    return ContextAxis(draft, gamma, tuple(ranges), tokens.drift(gamma, confidence), _pays_below(ranges))


def _best(
    draft: str, counts: Mapping[int, RoundCounts], costs: CostModel | None, asked: Asked
) -> tuple[list[BestGamma], Interval | None]:
    """Return the best γ at every concurrency, and the speedup at the best γ for that of the question."""
    question = asked.question
    gammas = [gamma for gamma in question.gammas(asked.run.gammas) if gamma in counts]

    def fastest(concurrency: int) -> tuple[int, float, StepTimes] | None:
        times = costs.times(concurrency).get(draft) if costs else None
        covered = [gamma for gamma in gammas if times is not None and times.covers(gamma)]
        if times is None or not covered:
            return None
        values = {gamma: ALL.value(ALL.decoded([counts[gamma]], times)) or 0.0 for gamma in covered}
        best = max(values, key=lambda gamma: values[gamma])
        return best, values[best], times

    each = [(size, found) for size in (costs.concurrencies if costs else ()) if (found := fastest(size)) is not None]
    best = [BestGamma(size, gamma if value > 1 else 0, max(value, 1.0)) for size, (gamma, value, _) in each]
    if (now := fastest(question.concurrency)) is None:
        return best, None
    return best, speedup_interval(ALL.speedup([counts[now[0]]], now[2]), question.confidence)


def _pays_below(ranges: Sequence[ContextRange]) -> Interval | None:
    """Return where the last ranges begin in which no γ pays: by the speedups, and from where on they may, and surely, do
    not.
    """

    def last(ends: Sequence[float]) -> int | None:
        """Return where the run of ranges at the end of `ends` begins that are not above 1; None: the last one is."""
        paying = [place for place, end in enumerate(ends) if end > 1]
        place = paying[-1] + 1 if paying else 0
        return ranges[place].low if place < len(ranges) else None

    known = [item.speedup for item in ranges if item.speedup is not None]
    if len(known) < len(ranges) or (value := last([item.value for item in known])) is None:
        return None
    low, high = last([item.low for item in known]), last([item.high for item in known])
    return Interval(float(value), float(low or 0), math.inf if high is None else float(high))


def draw(report: RunReport) -> Iterator[Block]:
    """Yield acceptance and speedup by length of context, and whether they fall as a text grows."""
    yield Figure("context")
    columns: dict[str, Callable[[ContextRange], str]] = {
        "docs": lambda item: str(item.units),
        "alpha": lambda item: fmt.share_with_interval(item.alpha),
        "tokens/round": lambda item: fmt.interval(item.tokens_per_round),
        "speedup": lambda item: fmt.interval(item.speedup, "x"),
        "gamma by load": lambda item: ", ".join(f"{best.concurrency}: {best.gamma}" for best in item.best),
    }
    for axis in report.section("context"):
        rows = [
            (
                f"from {fmt.count(item.low)}" if item.low else f"below {fmt.count(item.high or 0)}",
                {name: cell(item) for name, cell in columns.items()},
            )
            for item in axis.ranges
        ]
        shown = [name for name in columns if any(cells[name] not in ("", fmt.NOTHING) for _, cells in rows)]
        what = "speedup: the row's best, chosen on the same documents"
        title = f"draft {axis.draft}, gamma {axis.gamma} ({what}), by tokens of context"
        timed_at = report.times.contexts if report.times is not None else ()
        below = [f"  {line}" for line in _context_lines(axis, max(timed_at, default=None))]
        yield Table(title, shown, rows, named="context", below=below, draft=axis.draft)


def _context_lines(axis: ContextAxis, longest: int | None) -> Iterator[str]:
    """Yield what a longer context does within documents, and from where on no γ pays. `longest`: context that was timed."""
    if any(best.gamma == 0 for item in axis.ranges for best in item.best):
        yield "gamma by load: the best gamma at each number of sequences; 0: none beats plain decoding"
    if axis.drift is not None:
        low, high = (fmt.signed_percent(value) for value in (axis.drift.low, axis.drift.high))
        said = "acceptance decays" if axis.decays else "acceptance grows" if axis.drift.high < 0 else "no decay is shown"
        change = f"{fmt.signed_percent(axis.drift.value)} [{low}, {high}] rounds per token with each doubling of the context"
        yield f"within documents {said}: {change}"
    if (where := axis.pays_below) is not None:
        begins, low = fmt.count(int(where.value)), fmt.count(int(where.low))
        high = "longer than all of these" if math.isinf(where.high) else fmt.count(int(where.high))
        yield f"no gamma pays past {begins} tokens [{low}, {high}]" if where.value else "no gamma pays at any length"
    elif any(item.speedup for item in axis.ranges):
        yield "some gamma pays at every length seen"
    if longest is not None and axis.ranges[-1].context > 2 * longest:
        yield f"step times at up to {fmt.count(longest)} tokens of context stand in for longer contexts"
