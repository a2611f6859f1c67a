"""Acceptance by depth of one draft at one gamma, over the rounds of a scope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alphaprof.costs.rounds import free_draft
from alphaprof.costs.speedup import speedup
from alphaprof.errors import OptionInvalid
from alphaprof.report.result import counted
from alphaprof.report.scope import Scope
from alphaprof.report.speeds import length_interval, tokens_interval
from alphaprof.stats.estimate import Array, Interval

DIGITS = 6  # of rates and lengths


@dataclass(frozen=True)
class GammaRates:
    """Acceptance at one gamma (K): rates are lists by depth, of 1, ..., gamma drafts."""

    gamma: int  # drafted tokens per round at most: num_speculative_tokens
    tokens_per_round: Interval  # as a report has it: what the last round of a text accepts beyond its end is not emitted
    acceptance_length_all: Interval  # 1 + accepted drafts / rounds, over all rounds; the target's own token counts
    acceptance_length: float  # the same over rounds with a proposal, as vLLM's metrics count it
    marginal_all: tuple[float, ...]  # share of all rounds whose first d drafts were all accepted
    conditional_all: tuple[float, ...]  # share of those that accepted d - 1 drafts; products are `marginal_all`
    marginal_full: tuple[float, ...]  # products of `conditional`
    conditional: tuple[float, ...]  # share of the d-th drafts that were tested; a missing draft does not count
    drafted: float  # drafted tokens per round, over all rounds
    drafting: float  # share of rounds with a proposal


def rates_at(scope: Scope, gamma: int, confidence: float | None = None) -> GammaRates:
    """Return the rates at one gamma: counts of all domains are added up, and divided last; intervals at the question's
    confidence, or another. Raises `OptionInvalid` without a proposal.
    """
    rounds, drafted, tested, accepted = 0.0, np.zeros(gamma), np.zeros(gamma), np.zeros(gamma)
    for scale, pool in zip(scope.scales.values(), scope.pools.values(), strict=True):
        every, started, reached, passed = counted(pool, gamma, speedup([pool.counts(gamma)], [1.0], free_draft(gamma)))
        rounds, drafted = rounds + scale * every, drafted + scale * started
        tested, accepted = tested + scale * reached, accepted + scale * passed
    if not drafted[0]:
        raise OptionInvalid(
            f"draft {scope.side.draft} proposes nothing in {scope.label}", "export another draft or domain of this run"
        )
    nested = np.minimum.accumulate(np.minimum(accepted, drafted[0]))  # sums of scaled counts may be off by rounding
    length = 1 + float(nested.sum()) / rounds
    free = scope.mix.speedup([pool.counts(gamma) for pool in scope.pools.values()], free_draft(gamma))
    emitted = tokens_interval(free, gamma, confidence or scope.question.confidence) or Interval(length, 1.0, gamma + 1.0)
    return GammaRates(
        gamma=gamma,
        tokens_per_round=Interval(*(round(end, DIGITS) for end in vars(emitted).values())),
        acceptance_length_all=Interval(
            *(round(end, DIGITS) for end in vars(length_interval(length, emitted, gamma)).values())
        ),
        acceptance_length=round(1 + float(nested.sum() / drafted[0]), DIGITS),
        drafted=round(float(drafted.sum()) / rounds, DIGITS),
        drafting=round(float(drafted[0]) / rounds, DIGITS),
        **by_depth(rounds, tested, nested),
    )


def by_depth(rounds: float, tested: Array, accepted: Array) -> dict[str, tuple[float, ...]]:
    """Return the lists of `GammaRates` from rounds, and [gamma] those whose d-th draft was tested (there was one, all before
    it were accepted, and the text had not ended) and those that accepted at least d drafts.
    """
    marginal, before = accepted / rounds, np.concatenate([[rounds], accepted[:-1]])
    given = np.divide(accepted, before, out=np.zeros(len(accepted)), where=before > 0)
    conditional = np.minimum(1.0, np.divide(accepted, tested, out=np.zeros(len(accepted)), where=tested > 0))
    lists = {"marginal_all": marginal, "conditional_all": given, "marginal_full": conditional.cumprod()}
    lists |= {"conditional": conditional}
    return {name: tuple(np.round(values, DIGITS).tolist()) for name, values in lists.items()}
