"""Acceptance for simulators and for synthetic acceptance in engines, as one JSON. docs/exports.md says who reads what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from alphaprof.commands.export.formats import LENGTHS, RATES, Artefact
from alphaprof.costs.rounds import free_draft
from alphaprof.costs.speedup import speedup
from alphaprof.errors import OptionInvalid
from alphaprof.render.format import short, visible
from alphaprof.render.json import render_json
from alphaprof.report.result import counted
from alphaprof.report.scope import Scope, scope_of
from alphaprof.report.speeds import length_interval, tokens_interval
from alphaprof.run.reader import RunDraft
from alphaprof.stats.estimate import Array, Interval

DIGITS = 6  # of rates and lengths
MODES = ("thinking_on", "thinking_off")  # of InferenceX's curves


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


@dataclass(frozen=True)
class Rates:
    """One draft of a run under one rule."""

    format: ClassVar[str] = "alphaprof-rates"
    version: ClassVar[str] = "1.0"

    target: str  # reference of the target
    draft: str  # name of the draft in the run
    model: str | None  # the draft's own checkpoint; None: it has none
    rule: str
    traffic: str  # which domains, in words
    documents: int
    confidence: float  # of intervals, two-sided
    expected: bool  # rounds are exact expectations for the texts, not counts of real rounds
    gammas: tuple[GammaRates, ...]  # one for each gamma of the run, or the one that was named


def export_rates(
    side: RunDraft, *, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> Artefact:
    """Return the rates of one draft at every gamma of the run, or at one. Raises `OptionInvalid` if they are not defined,
    and `RunUnreadable`.
    """
    scope = scope_of(side, RATES, rule, gamma, domain)
    rates = Rates(
        target=side.run.manifest.target.reference,
        draft=side.draft,
        model=side.run.manifest.drafts[side.draft].own_model,
        rule=scope.rules,
        traffic=scope.label,
        documents=scope.documents,
        confidence=scope.question.confidence,
        expected=not scope.exact,
        gammas=tuple(rates_at(scope, each) for each in scope.gammas),
    )
    warnings = [*scope.incomplete]
    if not scope.exact:
        warnings.append("rounds are exact expectations for the texts, not counts of real rounds")
    if p_min := float(scope.question.p_min):
        warnings.append(f"drafts stopped at p_min {p_min:g}: most simulators draft gamma tokens in every round")
    return Artefact(render_json(rates) + "\n", (scope.about,), tuple(warnings))


def export_lengths(
    side: RunDraft, *, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> Artefact:
    """Return the acceptance length of one draft by domain and gamma, as YAML in the layout of InferenceX's golden curves: a
    model, its thinking modes (here: the run's domains), and in each a length by number of speculative tokens, 1 + accepted /
    rounds with drafts. Intervals stand beside them as comments. Raises what `export_rates` raises.
    """
    whole = scope_of(side, LENGTHS, rule, gamma, domain)
    manifest, level = side.run.manifest, whole.question.confidence
    model = manifest.drafts[side.draft].own_model
    lines = [
        f"# {whole.about}; intervals: {level:.0%}, two-sided",
        "# key = num_speculative_tokens; value = acceptance length, the target's own token counted",
        *(["_metadata:", f"  draft-model: {json.dumps(model)}"] if model else []),
        f"{json.dumps(manifest.target.reference)}:",
    ]
    warnings, idle = [*whole.incomplete], False
    for name in whole.pools:
        lines.append(f"  {json.dumps(name)}:")
        scope = scope_of(side, LENGTHS, rule, gamma, name)
        for each in whole.gammas:
            rates = rates_at(scope, each)
            every, low, high = (f"{end:.2f}" for end in vars(rates.acceptance_length_all).values())
            idle |= rates.drafting < 1
            beside = f"{low} to {high}" if rates.drafting == 1 else f"over all rounds: {every}, {low} to {high}"
            lines.append(f"    {each}: {rates.acceptance_length:.2f}  # {beside}")
    if idle:
        warnings.append("some rounds have no draft: a length counts the others alone, as vLLM's metrics do")
    if others := [name for name in whole.pools if name not in MODES]:
        names = short(", ".join(map(visible, others)))
        warnings.append(f"InferenceX reads curves named {' and '.join(MODES)}: name the domains so ({names})")
    return Artefact("\n".join(lines) + "\n", (whole.about,), tuple(warnings))


def rates_at(scope: Scope, gamma: int) -> GammaRates:
    """Return the rates at one gamma: counts of all domains are added up, and divided last. Raises `OptionInvalid` without a
    proposal.
    """
    rounds, drafted, tested, accepted = 0.0, np.zeros(gamma), np.zeros(gamma), np.zeros(gamma)
    for scale, pool in zip(scope.scales.values(), scope.pools.values(), strict=True):
        every, started, reached, passed = counted(pool, gamma, speedup([pool.counts(gamma)], [1.0], free_draft(gamma)))
        rounds, drafted = rounds + scale * every, drafted + scale * started
        tested, accepted = tested + scale * reached, accepted + scale * passed
    if not drafted[0]:
        problem = f"draft {scope.side.draft} proposes nothing in {scope.label}"
        raise OptionInvalid(problem, "export another draft or domain of this run")
    nested = np.minimum.accumulate(np.minimum(accepted, drafted[0]))  # sums of scaled counts may be off by rounding
    length = 1 + float(nested.sum()) / rounds
    free = scope.mix.speedup([pool.counts(gamma) for pool in scope.pools.values()], free_draft(gamma))
    emitted = tokens_interval(free, gamma, scope.question.confidence) or Interval(length, 1.0, gamma + 1.0)
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
