"""Acceptance, rounds and time by span of the texts, such as thinking, tool calls, code and answer.

Each of the n tokens of a round takes 1/n of it and of its time, so that spans add up to their texts exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alphaprof.costs.rounds import StepTimes, free_draft, time_spent
from alphaprof.costs.speedup import ALL
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, table_by_columns
from alphaprof.report.build import RunReport
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.report.wording import alpha_name
from alphaprof.rules import parse_rule
from alphaprof.stats.estimate import Array, Interval, distinct, pooled_share
from alphaprof.totals.count import Spans, TotalsRequest, Traced, by_chance, columns_of, has_rounds
from alphaprof.totals.log_sample import LogPart, gathered, tables
from alphaprof.totals.replay import RoundCounts, Rounds

TITLE = "acceptance, rounds and time by span: thinking, tool calls, code, answer"
EMPTY = "the profile tells no spans apart (spans: auto)"
READS_LOG = True


@dataclass(frozen=True)
class SpanRounds:
    """What lies in the spans of one name, of texts that have rounds."""

    units: int  # independent documents that have it
    tokens: float  # that rounds emitted there
    rounds: float  # each counted by the share of its tokens that lie there
    share: Interval | None  # of the tokens of all spans; None: these are all
    alpha: Interval | None  # acceptance over positions with a proposal
    tokens_per_round: Interval | None
    speedup: Interval | None  # of decoding, in batches of all spans; None: there are no step times
    time: Interval | None  # share of the decode time with the draft; None: these are all


@dataclass(frozen=True)
class DraftSpans:
    """One draft by span at one γ, under the rules of the verdict, on text that these would emit."""

    draft: str
    gamma: int
    expected: bool  # rounds are expectations, before their control variate
    spans: dict[str, SpanRounds]  # by name, the most tokens first
    whole: SpanRounds  # all of them together


def compute(report: RunReport) -> tuple[DraftSpans, ...]:
    """Return every draft that has rounds by span."""
    asked, part, found = report.asked, report.part, list[DraftSpans]()
    chosen = {item.answer.draft: item.answer.gamma for item in report.drafts}
    for draft, facts in part.run.manifest.drafts.items() if part.run.has_log else ():
        rules = [rule for rule in map(parse_rule, asked.decisive) if rule.rule.timed and not rule.rule.lossy]
        rules = [rule for rule in rules if has_rounds(rule, facts)]
        gamma = chosen.get(draft) or max(facts.lengths(part.run.gammas))
        if (rows := SpanRows.read(part, draft, [asked.request([rule.id]) for rule in rules], gamma)) is None:
            continue
        times = asked.timing.times.get(draft)
        times = times.mixed([rows.rounds]) if times is not None and times.covers(gamma) else None
        spans = {name: rows.of(rows.name == name, times, report.confidence) for name in np.unique(rows.name)}
        found.append(
            DraftSpans(
                draft=draft,
                gamma=gamma,
                expected=any(by_chance(rule, facts) for rule in rules),
                spans=dict(sorted(spans.items(), key=lambda item: -item[1].tokens)),
                whole=replace(rows.of(rows.name != "", times, report.confidence), share=None, time=None),
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class SpanRows:
    """Spans of documents, [rows]: name, positions with a proposal, acceptance under the rule of the rounds, and rounds."""

    name: Array
    proposals: Array
    accepted: Array
    rounds: RoundCounts

    @classmethod
    def read(cls, part: LogPart, draft: str, requests: Sequence[TotalsRequest], gamma: int) -> SpanRows | None:
        """From the log of a draft, the one rule of each request on its own text; None: there are no such spans."""
        facts = part.run.manifest.drafts[draft]

        def of_shards(request: TotalsRequest) -> Iterator[dict[int, Array]]:
            for positions, texts in tables(part.run, draft, [*columns_of(request, facts), "span"]):
                traced = Traced.of(positions, texts, facts, request)
                if positions["span"].null_count or not traced.defined.any():
                    continue
                spans = Spans.of(positions, traced.shape)
                own = traced.defined[np.searchsorted(traced.shape.document, spans.document)]
                units = part.documents.units_of(spans.document)
                sums = spans.sums(traced.proposed), spans.sums(traced.accepted)
                rounds = traced.rounds(gamma).parts(spans.of_each(len(positions)), len(spans.name), gamma)
                yield {place: each[own] for place, each in enumerate([spans.name, units, *sums, *vars(rounds).values()])}

        found = gathered(itertools.chain.from_iterable(map(of_shards, requests)))
        if not found:
            return None
        name, units, proposals, accepted, *counts = found.values()
        return cls(name, proposals, accepted, RoundCounts.of(Rounds(*counts), units, requests[0].stops(facts)))

    def of(self, chosen: Array, times: StepTimes | None, confidence: float) -> SpanRounds:
        """Return what lies in some of the rows, [rows] a mask. `times`: of batches of all of them."""
        rounds, tokens, units = self.rounds.rows(chosen), self.rounds.tokens, self.rounds.cluster
        gamma, spent = rounds.drafted.shape[1], None if times is None else time_spent(self.rounds, times)
        return SpanRounds(
            units=distinct(rounds.cluster),
            tokens=float(rounds.tokens.sum()),
            rounds=float(rounds.rounds.sum()),
            share=pooled_share(units, tokens * chosen, tokens, confidence),
            alpha=pooled_share(rounds.cluster, self.accepted[chosen], self.proposals[chosen], confidence),
            tokens_per_round=tokens_interval(ALL.speedup([rounds], free_draft(gamma)), gamma, confidence),
            speedup=None if times is None else speedup_interval(ALL.routed([(rounds, times)]), confidence),
            time=None if spent is None else pooled_share(units, spent * chosen, spent, confidence),
        )


def draw(report: RunReport) -> Iterator[Block]:
    """Yield the spans of each draft."""
    found: Sequence[DraftSpans] = report.section("spans")
    for item in found:
        name = alpha_name(report.run, item.draft)
        rows = [(fmt.short(span), _cells(each, name)) for span, each in item.spans.items()]
        below = ["  a round across a border is counted by its tokens: spans add up to all"]
        below += ["  expected rounds, without the control variate of other sections"] if item.expected else []
        below += ["  of documents as measured: decision.weights do not count here"] if report.asked.question.weights else []
        title, footer = f"draft {item.draft}, gamma {item.gamma}, by span", [("all", _cells(item.whole, name))]
        yield table_by_columns(title, rows, named="span", footer=footer, below=below, draft=item.draft)


def _cells(span: SpanRounds, alpha: str) -> dict[str, str]:
    cells = {
        "docs": str(span.units),
        "of tokens": fmt.share_with_interval(span.share) if span.share else "",
        alpha: fmt.share_with_interval(span.alpha),
        "tokens/round": fmt.interval(span.tokens_per_round),
    }
    if span.speedup is not None:
        time = fmt.share_with_interval(span.time) if span.time else ""
        cells |= {"speedup": fmt.interval(span.speedup, "x"), "of time": time}
    return cells
