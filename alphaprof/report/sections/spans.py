"""Acceptance, rounds and time by span of the texts, such as thinking, tool calls, code and answer.

Each of the n tokens of a round takes 1/n of it and of its time, so that spans add up to their texts exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alphaprof.costs.rounds import StepTimes, free_draft, time_spent
from alphaprof.costs.speedup import Mix
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Row, Small, table_by_columns, table_of
from alphaprof.report.answer import Result
from alphaprof.report.build import Failed, RunReport
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.report.wording import MARKS, alpha_name
from alphaprof.rules import BoundRule, Rule, parse_rule
from alphaprof.run.schema import THINKING
from alphaprof.stats.estimate import Array, Interval, distinct, pooled_share
from alphaprof.totals.count import SHAPED, Spans, TotalsRequest, Traced, by_chance, columns_of, has_rounds
from alphaprof.totals.log_sample import LogPart
from alphaprof.totals.replay import RoundCounts, Rounds

ALL = Mix(("",), None)
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
class RelaxedThinking:
    """Acceptance with a lossy rule in thinking alone and the verdict's elsewhere, position by position along the target's
    own text. Rounds of thinking are not defined then, since what the rule accepts leads to other text.
    """

    rule: str  # in thinking
    thinking: Interval | None  # alpha of thinking
    alpha: Interval | None  # of all spans


@dataclass(frozen=True)
class DraftSpans:
    """One draft by span at one γ, under the rules of the verdict, on text that these would emit."""

    draft: str
    gamma: int
    expected: bool  # rounds are expectations, before their control variate
    spans: dict[str, SpanRounds]  # by name, the most tokens first
    whole: SpanRounds  # all of them together
    relaxed: tuple[RelaxedThinking, ...]  # by lossy rules of the report


def compute(report: RunReport) -> tuple[DraftSpans, ...]:
    """Return every draft that has rounds by span."""
    asked, part, found = report.asked, report.part, list[DraftSpans]()
    chosen = {item.answer.draft: item.answer.gamma for item in report.drafts}
    for draft, facts in part.run.manifest.drafts.items() if part.run.has_log else ():
        rules = [rule for rule in map(parse_rule, asked.decisive) if rule.rule.timed and not rule.rule.lossy]
        rules = [rule for rule in rules if has_rounds(rule, facts)]
        lossy = [rule for rule in report.others if _relaxes(parse_rule(rule).rule, rules)]
        gamma = chosen.get(draft) or max(facts.lengths(part.run.gammas))
        requests = [replace(asked.request([rule.id, *lossy]), spans=True) for rule in rules]
        if (rows := SpanRows.read(part, draft, requests, gamma)) is None:
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
                relaxed=tuple(rows.relaxed(lossy, report.confidence)) if THINKING in spans else (),
            )
        )
    return tuple(found)


def _relaxes(other: Rule, rules: Sequence[BoundRule]) -> bool:
    """Return whether a lossy rule can stand in for others on all their texts: some decode sampled text alone."""
    return other.lossy and all(set(rule.rule.policies) <= set(other.policies) for rule in rules)


@dataclass(frozen=True)
class SpanRows:
    """Spans of documents, [rows]: name, positions with a proposal, rounds; `accepted` [rows, rules]: acceptance under the
    rule of the rounds, and others.
    """

    name: Array
    proposals: Array
    accepted: Array
    rounds: RoundCounts

    @classmethod
    def read(cls, part: LogPart, draft: str, requests: Sequence[TotalsRequest], gamma: int) -> SpanRows | None:
        """From the log of a draft, the first rule of each request on its own text; None: there are no such spans."""
        run, facts, found, first = part.run, part.run.manifest.drafts[draft], list[list[Array]](), 0
        for shard in run.shards:
            texts = run.continuations(shard.index, SHAPED)
            for request in requests:
                columns = columns_of(replace(request, rules=request.rules[:1]), facts)
                positions = run.positions(draft, shard.index, columns)
                traced = Traced.of(positions, texts, facts, request)
                if positions["span"].null_count or not traced.defined.any():
                    continue
                spans = Spans.of(positions, traced.shape)
                rounds = traced.rounds(gamma).parts(spans.of_each(len(positions)), len(spans.name), gamma)
                places = np.searchsorted(traced.shape.document, spans.document)
                units = part.documents.units.codes[first + places]
                sums = spans.sums(traced.proposed), np.stack([*map(spans.sums, traced.accepted.values())], 1)
                found.append([each[traced.defined[places]] for each in (spans.name, units, *sums, *vars(rounds).values())])
            first += len(texts)
        if not found:
            return None
        name, units, proposals, accepted, *counts = map(np.concatenate, zip(*found, strict=True))
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
            alpha=pooled_share(rounds.cluster, self.accepted[chosen, 0], self.proposals[chosen], confidence),
            tokens_per_round=tokens_interval(ALL.speedup([rounds], free_draft(gamma)), gamma, confidence),
            speedup=None if times is None else speedup_interval(ALL.routed([(rounds, times)]), confidence),
            time=None if spent is None else pooled_share(units, spent * chosen, spent, confidence),
        )

    def relaxed(self, rules: Sequence[str], confidence: float) -> Iterator[RelaxedThinking]:
        """Yield what each of the other rules accepts in thinking alone."""
        units, thinks = self.rounds.cluster, self.name == THINKING
        for rule, accepted in zip(rules, self.accepted.T[1:], strict=True):
            thinking = pooled_share(units[thinks], accepted[thinks], self.proposals[thinks], confidence)
            mixed = np.where(thinks, accepted, self.accepted[:, 0])
            yield RelaxedThinking(rule, thinking, pooled_share(units, mixed, self.proposals, confidence))


def draw(report: RunReport) -> Iterator[Block]:
    """Yield the spans of each draft, a relaxed rule in thinking alone, and alpha by span of every text and rule."""
    under_others = report.section("rules")
    every = [*report.results, *(() if isinstance(under_others, Failed) else under_others)]
    found: Sequence[DraftSpans] = report.section("spans")
    for item in found:
        name = alpha_name(report.run, item.draft)
        rows = [(fmt.short(span), _cells(each, name)) for span, each in item.spans.items()]
        below = ["  a round across a border is counted by its tokens: spans add up to all"]
        below += ["  expected rounds, without the control variate of other sections"] if item.expected else []
        below += ["  of documents as measured: decision.weights do not count here"] if report.asked.question.weights else []
        title, footer = f"draft {item.draft}, gamma {item.gamma}, by span", [("all", _cells(item.whole, name))]
        yield table_by_columns(title, rows, named="span", footer=footer, below=below, draft=item.draft)
        relaxed: list[Row] = [
            (
                f"{each.rule}~",
                {"thinking": fmt.share_with_interval(each.thinking), "all": fmt.share_with_interval(each.alpha)},
            )
            for each in item.relaxed
        ]
        if relaxed:
            title = f"draft {item.draft}: {name} with another rule in thinking only"
            below = [f"  {MARKS['~']}", "  so thinking has no rounds and no speedup then; other spans keep theirs"]
            yield table_by_columns(title, relaxed, named="rule", below=below, draft=item.draft)
        elif THINKING in item.spans:
            yield Small("With --rules trtllm:10,0.6 this section shows what a relaxed rule in thinking only would accept.")
    for draft in report.run.drafts:
        shown = [result for result in every if result.draft == draft and result.spans]
        names = dict.fromkeys(name for result in shown for name in result.spans)
        columns = {"rule": lambda item: item.rule + (fmt.mark(item.on_policy, item.lossy) or " ")}
        columns |= {name: _alpha_in(name) for name in names}
        title = f"draft {draft}: {alpha_name(report.run, draft)} by text, rule and span"
        yield from table_of(title, shown, columns, among=(), left=("rule",))


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


def _alpha_in(name: str) -> Callable[[Result], str]:
    return lambda result: fmt.share_with_interval(result.spans[name].alpha) if name in result.spans else ""
