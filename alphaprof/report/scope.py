"""Which rounds of a run an export or a diagnosis is about: one draft under one rule, on a domain or the whole traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from alphaprof.config.profile import AUTO
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.speedup import Mix
from alphaprof.errors import OptionInvalid
from alphaprof.render.format import count, is_cut, many, short, text_kind, visible
from alphaprof.report.asked import Asked, Evidence
from alphaprof.report.judge import Judge
from alphaprof.report.stopping import settled
from alphaprof.report.verdict import Question
from alphaprof.rules import parse_rule
from alphaprof.run.manifest import CHAIN
from alphaprof.run.reader import RunDraft
from alphaprof.stats.estimate import distinct
from alphaprof.totals.count import by_chance
from alphaprof.totals.pool import DocumentTotals


@dataclass(frozen=True)
class Scope:
    """Rounds of one draft: pools by domain, all kinds of text as one, with their weights (shares of output tokens;
    `given`: by the profile, and not as observed) and how these put domains together (`mix`), under `rules`, at one of the
    run's `gammas`. `label`: which traffic, in words. `texts`: kinds of text. `exact`: rounds are facts, and not
    expectations. `truncated`: some of the text was sampled without the less probable tokens.
    """

    side: RunDraft
    question: Question
    costs: CostModel | None
    pools: Mapping[str, DocumentTotals]
    weights: Mapping[str, float]
    given: bool
    mix: Mix
    label: str
    rules: str
    texts: tuple[str, ...]
    exact: bool
    truncated: bool
    gammas: tuple[int, ...]

    @property
    def scales(self) -> dict[str, float]:
        """By what the counts of each domain are multiplied before they are added up, so that it has its share of tokens."""
        tokens = {domain: float(pool["tokens"].sum()) for domain, pool in self.pools.items()}
        if not self.given:
            return dict.fromkeys(tokens, 1.0)
        return {domain: self.weights[domain] * sum(tokens.values()) / own for domain, own in tokens.items()}

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return sum(len(pool.cluster) for pool in self.pools.values())

    @property
    def about(self) -> str:
        """These rounds, in words."""
        clusters = distinct(np.concatenate([pool.cluster for pool in self.pools.values()]))
        return (
            f"{self.side.label}, rule {self.rules}, {self.label}, {many(self.documents, 'document')} "
            f"({count(clusters)} independent), text: {', '.join(self.texts)}"
        )

    @property
    def incomplete(self) -> tuple[str, ...]:
        """The warning about a run that is not complete; empty if it is."""
        done = self.side.run.manifest.status == "complete"
        return () if done else (f"{self.side.run.path} is not complete: {many(self.documents, 'document')} so far",)


def scope_of(
    side: RunDraft, use: str, rule: str | None = None, gamma: int | None = None, domain: str | None = None
) -> Scope:
    """Return the rounds for some `use`; `rule`, `gamma` and `domain`: None for what the run's own decision says. Raises
    `OptionInvalid` if they are not defined, and `RunUnreadable`.
    """
    run = side.run
    if run.manifest.documents == 0:
        raise OptionInvalid(f"no document of {run.path} is complete yet", "finish the run, or give another one")
    named = gamma or run.manifest.profile.decision.gamma
    if named not in (AUTO, *side.gammas):
        raise OptionInvalid(f"gamma {named} was not replayed in {run.path}", f"--gamma {' or '.join(map(str, side.gammas))}")
    if (drafting := run.manifest.drafting) != CHAIN:
        raise OptionInvalid(
            f"{run.path} was served with {drafting} drafting, but {use} needs rounds of draft chains",
            "import requests with chain drafting: --speculative-eagle-topk 1",
        )
    asked = settled(Asked.of(run, run.manifest.profile.deciding(side.draft, rule, gamma)))
    for bound in map(parse_rule, asked.deciding):
        if bound.rule.lossy or not bound.rule.timed:
            raise OptionInvalid(
                f"{bound.id} has no rounds of draft chains, which {use} needs",
                "name strict, one_hot, lossless or block as the rule; for lossy rules use validate --rule",
            )
    judge, question = Judge.of(asked), asked.question
    weights = {domain: 1.0} if domain is not None else judge.weights
    pools = _pools_of(side, use, judge.evidence, weights, domain)
    weights = {name: weights[name] for name in pools}
    given = domain is None and question.weights is not None
    used = [item for item in judge.pools if item.domain in pools and question.rule_for(item.pool.policy) == item.rule.id]
    traffic = f"whole traffic ({many(len(pools), 'domain')} {'by decision.weights' if given else 'as observed'})"
    return Scope(
        side=side,
        question=question,
        costs=asked.costs.of_domain(domain) if asked.costs and domain is not None else asked.costs,
        pools=pools,
        weights=weights,
        given=given,
        mix=judge.mix if domain is None else Mix.of(weights),
        label=traffic if domain is None else f"domain {_quoted(domain)}",
        rules=" and ".join(dict.fromkeys(item.rule.id for item in used)),
        texts=tuple(dict.fromkeys(text_kind(item.pool.continuation, item.pool.sampling) for item in used)),
        exact=not any(by_chance(item.rule, run.manifest.drafts[side.draft]) for item in used),
        truncated=any(is_cut(item.pool.sampling) for item in used),
        gammas=tuple(side.gammas) if gamma is None else (gamma,),
    )


def _quoted(domain: str) -> str:
    """Return a domain in words that a person reads: data may call it anything."""
    return f"'{short(visible(domain))}'"


def _pools_of(
    side: RunDraft, use: str, evidence: Evidence, weights: Mapping[str, float], domain: str | None
) -> dict[str, DocumentTotals]:
    """Return the pools by domain, in the order of their weights. Raises `OptionInvalid` if they have no rounds."""
    pools = evidence.candidates[side.draft]
    if domain is not None and domain not in evidence.observed:
        known = ", ".join(map(_quoted, evidence.observed))
        raise OptionInvalid(f"{side.run.path} has no domain {_quoted(domain)}", f"it has: {known}")
    reason = evidence.lacks(weights, side.draft) if domain is None else evidence.undefined.get(domain, "")
    shared = [name for name, share in weights.items() if share > 0]
    brief = [name for name in shared if name in pools and not pools[name]["tokens"].sum()]
    if brief and not reason:
        reason = f"no text of {', '.join(map(_quoted, brief))} goes beyond its first token (prefill)"
    if reason:
        raise OptionInvalid(
            f"{side.label} has no rounds for {use}: {reason}",
            "name one --domain, or a rule that has rounds on this text (alphaprof report lists them)",
        )
    return {name: pools[name] for name in shared}
