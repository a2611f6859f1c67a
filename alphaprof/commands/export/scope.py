"""What of a run is exported: one draft under one rule at one gamma, on one domain or all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.commands.export.formats import EXPORTS
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.speedup import UNTIMED, Mix, StepTimes
from alphaprof.errors import OptionInvalid
from alphaprof.log.manifest import CHAIN, DraftFacts
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.split import SplitBy
from alphaprof.report.decision import Decision
from alphaprof.report.format import many, short, text_kind, visible
from alphaprof.report.inputs import ReportInputs, draft_pools, evidence_of
from alphaprof.report.traffic import why_undecidable
from alphaprof.report.verdict import Evidence, Question, judge, no_decision, not_defined
from alphaprof.rules import parse_rule
from alphaprof.totals.count import by_chance
from alphaprof.totals.pool import DocumentTotals

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ExportRequest:
    """What is asked for beside a format; None: what the run's own decision says. `split`: of texts."""

    rule: str | None = None
    gamma: int | None = None
    domain: str | None = None
    split: SplitBy | None = None


@dataclass(frozen=True)
class ExportScope:
    """What is exported: pools of one draft by domain, all kinds of text as one, with their weights (shares of output tokens;
    `given`: by the profile, and not as observed) and how these put domains together (`mix`), under `rules`, at one gamma.
    `label`: which traffic, in words. `texts`: kinds of text. `exact`: rounds are facts, and not expectations. `truncated`:
    some of the text was sampled without the less probable tokens. `decision`: the verdict on this draft at that gamma.
    """

    side: RunDraft
    question: Question
    book: CostModel | None
    pools: Mapping[str, DocumentTotals]
    weights: Mapping[str, float]
    given: bool
    mix: Mix
    label: str
    rules: str
    texts: tuple[str, ...]
    exact: bool
    truncated: bool
    gamma: int
    decision: Decision

    def scaled(self) -> dict[str, float]:
        """By domain, what its counts are multiplied with: 1 as observed; else what gives it its share of the tokens."""
        if not self.given:
            return dict.fromkeys(self.pools, 1.0)
        tokens = {domain: float(pool["tokens"].sum()) for domain, pool in self.pools.items()}
        return {domain: self.weights[domain] * sum(tokens.values()) / tokens[domain] for domain in self.pools}

    def times(self, concurrency: int) -> StepTimes | None:
        """Step times of the draft; None where there are none."""
        return self.book.times(concurrency).get(self.side.draft) if self.book else None

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return sum(len(pool.cluster) for pool in self.pools.values())


def named(domain: str) -> str:
    """A domain in words that a person reads: data may call it anything."""
    return f"'{short(visible(domain))}'"


def _traffic(domain: str | None, domains: int, given: bool) -> str:
    if domain is not None:
        return f"domain {named(domain)}"
    return f"whole traffic ({many(domains, 'domain')} {'by decision.weights' if given else 'as observed'})"


def scope_of(side: RunDraft, to: str, wanted: ExportRequest) -> ExportScope:
    """What to export. Raises `OptionInvalid`."""
    run, domain, gammas = side.run, wanted.domain, _gammas(side, to, wanted)
    if (drafting := run.manifest.drafting) != CHAIN:
        problem = f"{run.path} was served with drafting {drafting}, and {to} needs rates by depth"
        raise OptionInvalid(problem, "import requests that drafted chains: --speculative-eagle-topk 1")
    asked = {"draft": side.draft, "rule": wanted.rule, "gamma": wanted.gamma}
    decision = run.manifest.config["decision"] | {name: value for name, value in asked.items() if value is not None}
    inputs = ReportInputs.of(run, "engine", run.manifest.config | {"decision": decision})
    for rule in inputs.deciding:
        _require_chain(rule, to, run.manifest.drafts[side.draft])
    decisive, question = list(draft_pools(inputs, inputs.deciding, [side.draft])), inputs.question
    evidence = evidence_of(inputs, decisive)
    weights = {domain: 1.0} if domain is not None else question.weights or dict(evidence.observed)
    pools, weights = _pools(side, evidence, weights, domain), _shares(weights)
    given = domain is None and question.weights is not None
    used = [item for item in decisive if item.domain in pools and question.rule_for(item.pool.policy) == item.rule.id]
    scope = ExportScope(
        side=side,
        question=question,
        book=inputs.book,
        pools=pools,
        weights=weights,
        given=given,
        mix=Mix.of(weights) if given or domain is not None else Mix(tuple(pools), None, inputs.strata),
        label=_traffic(domain, len(pools), given),
        rules=" and ".join(dict.fromkeys(item.rule.id for item in used)),
        texts=tuple(dict.fromkeys(text_kind(item.pool.continuation, item.pool.sampling) for item in used)),
        exact=not any(by_chance(item.rule, run.manifest.drafts[side.draft]) for item in used),
        truncated=any(item.pool.sampling and _truncates(item.pool.sampling) for item in used),
        gamma=0,
        decision=no_decision(""),
    )
    return _judged(scope, gammas)


def _truncates(sampling: Mapping[str, float]) -> bool:
    return sampling["top_k"] > 0 or sampling["top_p"] < 1 or sampling["min_p"] > 0


def _gammas(side: RunDraft, to: str, wanted: ExportRequest) -> list[int]:
    """Gammas that the run has and the reader takes. Raises `OptionInvalid` for another one that is asked for."""
    run, most = side.run, EXPORTS[to].most
    gamma = wanted.gamma or run.manifest.config["decision"]["gamma"]
    gammas = [known for known in run.gammas if most is None or known <= most]
    if not gammas or (gamma != "auto" and gamma not in gammas):
        limit = most is not None and (gamma == "auto" or gamma > most)
        why = f"{to} takes at most {most} drafts a round" if limit else f"{run.path} was not replayed at it"
        hint = f"--gamma {' or '.join(map(str, gammas))}" if gammas else "profile with smaller gammas"
        raise OptionInvalid(f"gamma {gamma} cannot be exported: {why}", hint)
    return gammas


def _pools(
    side: RunDraft, evidence: Evidence, weights: Mapping[str, float], domain: str | None
) -> dict[str, DocumentTotals]:
    """The pools to export by domain, in the order of their weights. Raises `OptionInvalid` where they have no rounds."""
    pools = evidence.candidates[side.draft]
    if domain is not None and domain not in evidence.observed:
        known = ", ".join(map(named, evidence.observed))
        raise OptionInvalid(f"{side.run.path} has no domain {named(domain)}", f"it has: {known}")
    whole = domain is None
    reason = why_undecidable(weights, evidence, pools) if whole else evidence.undefined.get(str(domain), "")
    empty = [name for name, pool in pools.items() if not pool["tokens"].sum()]
    if brief := [name for name in _shares(weights) if name in empty and not reason]:
        reason = f"no text of {', '.join(map(named, brief))} is longer than the one token of its prefill"
    if reason:
        sound = [named(name) for name in pools if name not in evidence.undefined and name not in empty]
        hint = "alphaprof report says which rule has rounds on which text: --rule names one"
        if whole and sound:
            hint = f"export one domain, --domain {' or '.join(sound)}, or leave others out by decision.weights"
        elif brief:
            other = f", or export another domain, --domain {' or '.join(sound)}" if sound else ""
            hint = f"profile longer answers{other}"
        raise OptionInvalid(f"nothing to export of {side.label}: {reason}", hint)
    return {name: pools[name] for name in _shares(weights)}


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    return {domain: share for domain, share in weights.items() if share > 0}


def _require_chain(rule: str, to: str, draft: DraftFacts) -> None:
    """Raise `OptionInvalid` for a rule whose rounds a chain's rates cannot tell of."""
    bound = parse_rule(rule)
    if bound.rule.lossy:
        raise OptionInvalid(
            not_defined(rule, "", draft),
            "alphaprof validate --rule measures lossy ones; export strict, one_hot or lossless",
        )
    if not bound.rule.timed:
        hint = "alphaprof trees replays trees; or export strict, one_hot or lossless"
        raise OptionInvalid(f"{rule} drafts trees, and {to} describes chains", hint)


def _judged(scope: ExportScope, gammas: Sequence[int]) -> ExportScope:
    """The scope at the gamma of the decision, or at the one that it would choose for this draft. Raises `OptionInvalid`."""
    question, draft = scope.question, scope.side.draft
    timing = scope.book.timing(question.concurrency) if scope.book else UNTIMED
    best, decision = judge({draft: scope.pools}, timing, scope.mix, question, gammas)
    if best is None:
        problem = f"no gamma is known to be the best for {scope.side.label}: {decision.reason}"
        raise OptionInvalid(problem, f"name one: --gamma {' or '.join(map(str, gammas))}")
    return dataclasses.replace(scope, gamma=best[1], decision=decision)
