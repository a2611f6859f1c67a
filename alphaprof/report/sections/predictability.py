"""Is a domain worth a draft at all? What the target alone says, with intervals over documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaprof.costs.rounds import free_draft
from alphaprof.costs.speedup import speedup
from alphaprof.report.model import Result
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import GREEDY, parse_rule
from alphaprof.run.manifest import Manifest
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval, by_cluster, distinct, mean_interval, quantile_interval, ratio, share_interval
from alphaprof.theory.certificates import strict_thresholds
from alphaprof.totals.count import Shape
from alphaprof.totals.documents import TextGroup
from alphaprof.totals.log_sample import LogPart, shards
from alphaprof.totals.replay import RoundCounts, Rounds, Trace, replay, run_lengths

Array = np.ndarray[Any, Any]
TARGET = ("target_top_prob", "target_second_prob", "target_margin", "target_entropy")
QUANTILES = (0.1, 0.5, 0.9)
STILL_CERTAIN = (0.5, 0.9, 0.99)
EPSILONS = (0.01, 0.03, 0.1, 0.3)  # nats


@dataclass(frozen=True)
class Budget:
    """One rule: the KL(p||q) below which half, 90% and 99% of the positions stay certain; infinite: never rejected."""

    rule: str
    half: Interval  # nats, at which half of the positions are certain
    ninety: Interval  # 90% of them
    ninety_nine: Interval  # 99% of them


@dataclass(frozen=True)
class CertainRun:
    """One rule: what is certain of any draft whose KL is at most `epsilon` everywhere."""

    rule: str
    epsilon: float  # nats
    certain: Interval  # share of positions
    mean_run: Interval  # certain tokens from a position on, on average over positions
    gamma: int
    tokens_per_round: Interval | None  # at least, at gamma; None: rounds are not defined on this text


@dataclass(frozen=True)
class FreeDraft:
    """What a draft that runs no model reaches in a domain under the rule that a verdict would concern."""

    draft: str
    rule: str
    coverage: float | None  # share of positions with a proposal
    alpha: Interval | None  # acceptance pooled over positions with a proposal
    gamma: int | None  # of the most tokens per round
    tokens_per_round: Interval | None  # at gamma


@dataclass(frozen=True)
class Predictability:
    """What the target alone says about a domain. Quantiles: the tenth, the median, the ninetieth percentile."""

    domain: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    documents: int
    positions: int
    entropy: tuple[Interval, ...]  # of the target, in nats
    margin: tuple[Interval, ...]  # of the target's two largest probabilities
    top_prob: Interval  # mean; the ceiling of one_hot for any draft, if this text was sampled
    budgets: tuple[Budget, ...]  # by rule: how close in KL a draft would have to come
    runs: tuple[CertainRun, ...]  # by rule and KL: runs of certain tokens
    free: tuple[FreeDraft, ...]  # what drafts that run no model reach


@dataclass(frozen=True)
class TargetLog:
    """The target's columns [positions] of all complete shards in corpus order, and the number of positions of each document.

    `thresholds`: by id of the rule; that of strict follows from the two largest probabilities, so that every log has it.
    """

    columns: dict[str, Array]
    thresholds: dict[str, Array]
    lengths: Array

    @classmethod
    def of(cls, run: Run) -> TargetLog | None:
        """From the log of any draft: all hold the same. None for a run without a complete shard."""
        logged = {rule: f"threshold_{rule}" for rule in run.log_rules.certified}
        parts = list(shards(run, next(iter(run.manifest.drafts)), [*TARGET, *logged.values()]))
        if not parts:
            return None
        columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in (*TARGET, *logged.values())}
        thresholds = {rule: columns.pop(name) for rule, name in logged.items()}
        if "strict" not in thresholds:
            pair = columns["target_top_prob"], columns["target_second_prob"]
            thresholds = {"strict": strict_thresholds(*pair)} | thresholds
        return cls(columns, thresholds, np.concatenate([shape.stop - shape.start for _, shape in parts]))

    def part(self, chosen: Array) -> TargetLog:
        """Return the positions of some documents, chosen by number."""
        mask = np.isin(np.arange(len(self.lengths)), chosen)
        rows = np.repeat(mask, self.lengths)
        columns = {name: values[rows] for name, values in self.columns.items()}
        thresholds = {rule: values[rows] for rule, values in self.thresholds.items()}
        return TargetLog(columns, thresholds, self.lengths[mask])


def certain_runs(thresholds: Array, lengths: Array, epsilon: float, gamma: int) -> tuple[Array, Array, Rounds]:
    """Return what is certain of any draft whose divergences are at most `epsilon`, from thresholds [positions]: sums over
    positions of whether it is accepted and of the run from there, [documents], and the rounds of nothing else.
    """
    stop = np.cumsum(lengths).astype(np.int64)
    shape = Shape(np.arange(len(stop)), stop - lengths, stop, np.array([]), np.array([]))
    certain = thresholds > epsilon
    run = run_lengths(certain, shape.start, shape.stop)
    trace = Trace(run, np.full(len(run), gamma), shape.start, shape.stop)
    return shape.sums(certain), shape.sums(run), replay(trace, gamma)


def predictability(part: LogPart, results: Sequence[Result], confidence: float) -> tuple[Predictability, ...]:
    """By domain and kind of text; nothing for runs that compare draft models and hold no thresholds, or hold no log."""
    run = part.run
    models = [draft for draft, facts in run.manifest.drafts.items() if facts.has_steps]
    if not run.has_log or (models and not run.log_rules.certified) or (log := TargetLog.of(run)) is None:
        return ()
    return tuple(
        _of_text(text, log.part(text.rows), max(run.gammas), tuple(_free(text, results, run.manifest)), confidence)
        for text in part.documents.groups
    )


def _of_text(text: TextGroup, log: TargetLog, gamma: int, free: tuple[FreeDraft, ...], confidence: float) -> Predictability:
    """Return what the target's columns at the positions of a text say. `free`: what drafts without a model reach."""

    def at(values: Array, probabilities: Sequence[float]) -> tuple[Interval, ...]:
        return tuple(quantile_interval(values, log.lengths, text.cluster, p, confidence) for p in probabilities)

    # At the divergence that a tenth of the thresholds does not exceed, 90% of the positions are still certain.
    rests = [1 - share for share in STILL_CERTAIN]
    tops = np.add.reduceat(log.columns["target_top_prob"].astype(np.float64), np.cumsum(log.lengths) - log.lengths)
    margins = at(log.columns["target_margin"], QUANTILES)
    return Predictability(
        domain=text.domain,
        continuation=text.continuation,
        sampling=text.sampling,
        on_policy=text.on_policy,
        documents=distinct(text.cluster),
        positions=int(log.lengths.sum()),
        entropy=at(log.columns["target_entropy"], QUANTILES),
        margin=tuple(replace(margin, high=min(1.0, margin.high)) for margin in margins),
        top_prob=share_interval(ratio(*by_cluster(text.cluster, tops, log.lengths)), confidence),
        budgets=tuple(Budget(rule, *at(thresholds, rests)) for rule, thresholds in log.thresholds.items()),
        runs=tuple(
            _certain_run(text, rule, log, epsilon, gamma, confidence) for rule in log.thresholds for epsilon in EPSILONS
        ),
        free=free,
    )


def _certain_run(text: TextGroup, rule: str, log: TargetLog, epsilon: float, gamma: int, confidence: float) -> CertainRun:
    *sums, rounds = certain_runs(log.thresholds[rule], log.lengths, epsilon, gamma)
    longest = (float(log.lengths.max()) + 1) / 2  # the mean run of a text that is certain throughout
    shares, runs = (ratio(*by_cluster(text.cluster, each, log.lengths)) for each in sums)
    mean, tokens = mean_interval(runs, confidence), None
    # A lossy rule may accept another token than the text's, and what follows then was not measured.
    if text.policy == GREEDY and not parse_rule(rule).rule.lossy:
        counted = RoundCounts.of(rounds, text.cluster)
        tokens = tokens_interval(speedup([counted], [1.0], free_draft(gamma)), gamma, confidence)
    share = share_interval(shares, confidence)
    return CertainRun(rule, epsilon, share, replace(mean, high=min(longest, mean.high)), gamma, tokens)


def _free(text: TextGroup, results: Sequence[Result], manifest: Manifest) -> Iterator[FreeDraft]:
    """Yield what drafts that run no model (prompt lookup) reach on a text, under the rules that verdicts concern."""
    mine = (text.domain, text.continuation, text.sampling, text.on_policy)
    for result in results:
        same = (result.domain, result.continuation, result.sampling, result.own) == mine
        facts = manifest.drafts.get(result.draft)  # a hybrid is not a draft of the log
        if not same or result.verdict is None or facts is None or facts.has_steps:
            continue
        tokens = {item.gamma: item.tokens_per_round for item in result.gammas if item.tokens_per_round is not None}
        gamma = max(tokens, key=lambda gamma: tokens[gamma].value, default=None)
        best = tokens[gamma] if gamma is not None else None
        yield FreeDraft(result.draft, result.rule, result.coverage, result.alpha, gamma, best)
