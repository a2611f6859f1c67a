"""Acceptance for simulators and for synthetic acceptance in engines, as one JSON. docs/exports.md says who reads what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from alphaprof.commands.export.formats import LENGTHS, PROFILE, RATES, Artefact
from alphaprof.render.format import short, visible
from alphaprof.render.json import render_json
from alphaprof.report.rates import GammaRates, rates_at
from alphaprof.report.scope import scope_of
from alphaprof.rules import parse_rule
from alphaprof.run.reader import RunDraft

MODES = ("thinking_on", "thinking_off")  # of InferenceX's curves


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


def export_profile(
    side: RunDraft, *, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> Artefact:
    """Return the acceptance of one draft as ModelOpt's speculation_profile.json, which travels with a draft's checkpoint:
    schema 1.0 of its benchmark, from which Dynamo's simulator takes `conditional_accept_rates` and vLLM's synthetic
    acceptance `marginal_accept_rates`. Its other producer, ar_validate, leaves out `method` and all lengths but one. Means
    and rates are over all rounds; intervals, which the schema lacks, stand in fields of their own. `gamma`: that of the
    vectors, else the largest of the run. Raises what `export_rates` raises.
    """
    whole = scope_of(side, PROFILE, rule, gamma, domain)
    manifest, blocks = side.run.manifest, any(parse_rule(each).rule.blocks for each in whole.rules.split(" and "))
    facts, names = manifest.drafts[side.draft], (manifest.drafts[side.draft].own_model, manifest.target.reference)
    draft, target = ("/".join(Path(name).parts[-2:]) if name else None for name in names)  # no folders of this machine
    by_gamma = {each: rates_at(whole, each) for each in (side.gammas if gamma is None else [gamma])}
    most = max(by_gamma)
    chosen = by_gamma[most]
    parts = {name: rates_at(scope_of(side, PROFILE, rule, most, name), most) for name in whole.pools}
    chain = facts.has_steps and not facts.in_one_step and "block" not in facts.settings

    def ends(rates: GammaRates) -> list[float]:
        return [rates.acceptance_length_all.low, rates.acceptance_length_all.high]

    profile = {
        "schema_version": "1.0",
        "measured": True,
        "producer": "alphaprof",
        "method": facts.kind,
        "draft_checkpoint": {"name": draft},
        "target_model": {"name": target},
        "num_speculative_tokens": most,
        "block_size": facts.settings.get("block"),
        "max_supported_k": most,
        "verification_method": "block" if blocks else "longest_prefix",
        "conditional_accept_rates": None if blocks else chosen.conditional_all,
        "marginal_accept_rates": None if blocks else chosen.marginal_all,
        "mean_accept_length": chosen.acceptance_length_all.value,
        "mean_accept_length_interval": ends(chosen),
        "accept_length_model": "chain_analytic" if chain else "measured_per_k",
        "accept_length_by_k": {str(each): rates.acceptance_length_all.value for each, rates in by_gamma.items()},
        "accept_length_by_k_intervals": {str(each): ends(rates) for each, rates in by_gamma.items()},
        "per_category": {
            name: {"mean_accept_length": rates.acceptance_length_all.value, "mean_accept_length_interval": ends(rates)}
            for name, rates in parts.items()
        },
        "measurement_conditions": {
            "rule": whole.rules,
            "documents": whole.documents,
            "confidence": whole.question.confidence,
        },
    }
    return Artefact(json.dumps(profile, indent=2) + "\n", (whole.about,), whole.incomplete)
