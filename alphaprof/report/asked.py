"""What is asked of a run: a question on its documents and step times, and the pools of totals that answer it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.config.profile import AUTO, ProfileOptions
from alphaprof.costs.cost_model import Cost, CostModel, cost_of, open_costs
from alphaprof.costs.rounds import UNTIMED, Timing
from alphaprof.render.format import short
from alphaprof.report.result import contradiction
from alphaprof.report.verdict import Pools, Question, not_defined
from alphaprof.rules import BoundRule, rules_of
from alphaprof.run.manifest import Hybrid
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Array
from alphaprof.stats.grouping import grouped
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents, mean_context, observed_weights, require_weights, strata_of
from alphaprof.totals.files import DraftTotals
from alphaprof.totals.hybrid import with_hybrids
from alphaprof.totals.pool import SHARED, DocumentTotals, merged, pooled_columns, pools


@dataclass(frozen=True)
class Asked:
    """What every answer about a run rests on. `policies`: those of its texts, the empty one (text that the target
    did not produce) included.
    """

    run: Run
    question: Question
    documents: Documents
    policies: tuple[str, ...]
    costs: CostModel | None
    source: str  # where step times were to come from
    untold: str = ""  # why step times that there are tell no speedup, so that nothing is worked out from them

    @classmethod
    def of(cls, run: Run, profile: ProfileOptions) -> Asked:
        """From a run and what is asked of it."""
        run = with_hybrids(run, {name: Hybrid(**vars(each)) for name, each in profile.hybrids.items()})
        measured = run.manifest.target.computes_in if run.scored else None
        question = Question(**vars(profile.decision), measured_dtype=measured)
        documents = run.documents()
        domains = documents["domain"].cast(pa.string())
        names = pc.unique(domains).to_pylist()
        require_weights(question.weights, names)
        contexts = {name: mean_context(documents.filter(pc.equal(domains, name))) or 0.0 for name in names}
        costs = open_costs(run, profile.costs, mean_context(documents), contexts)
        grouped = Documents.of(documents)
        policies = tuple(sorted({group.policy for group in grouped.groups}))
        return cls(run, question, grouped, policies, costs, profile.costs.source)

    def request(self, rules: Sequence[str] = ()) -> TotalsRequest:
        """Return the totals of rules, by their ids, that the question is about."""
        return TotalsRequest(rules, self.run.gammas, float(self.question.p_min))

    @cached_property
    def strata(self) -> Array:
        """The stratum of each independent unit, [units]."""
        return strata_of(self.documents, self.run.manifest)

    @cached_property
    def cost(self) -> Cost | None:
        """What a report says of its step times; None: there are none."""
        return cost_of(self.costs, self.question.concurrency, self.documents.prompt_tokens) if self.costs else None

    @property
    def timing(self) -> Timing:
        """Step times at the concurrency of the question."""
        if self.untold:
            return replace(UNTIMED, missing=dict.fromkeys(self.run.manifest.drafts, self.untold))
        return self.costs.timing(self.question.concurrency) if self.costs else UNTIMED

    @property
    def drafts(self) -> list[str]:
        """The drafts that the question is about."""
        return list(self.run.manifest.drafts) if self.question.draft == AUTO else [self.question.draft]

    @property
    def deciding(self) -> list[str]:
        """Ids of the rules that the verdict concerns, on any text of the run."""
        return list(dict.fromkeys(map(self.question.rule_for, self.policies)))

    @property
    def decisive(self) -> list[str]:
        """Those of them on text that the target produced: there alone they can have rounds, and a verdict."""
        return list(dict.fromkeys(self.question.rule_for(policy) for policy in self.policies if policy))


@dataclass(frozen=True)
class DraftPool:
    """The pool of one draft, rule and domain."""

    draft: str
    rule: BoundRule
    domain: str
    pool: DocumentTotals


class DraftTotalsReader:
    """The pools of one draft, rule by rule of some `rules`. What is stored is read rule by rule, in the
    memory of one; what is not is computed once for all of them. Columns that no rule changes are read once.
    """

    def __init__(self, asked: Asked, draft: str, rules: Sequence[str]) -> None:
        self.draft, self._facts = draft, asked.run.manifest.drafts[draft]
        self._asked, self._rules, self._totals = asked, rules, DraftTotals(asked.run, draft)
        self._shared: list[dict[str, Array]] = []

    def pools(self, name: str) -> Iterator[DraftPool]:
        """Yield the pools of one rule, by its id, one for each domain and kind of text."""
        asked, (rule,), shared = self._asked, rules_of([name]), self._shared
        gammas, totals = asked.run.gammas, self._computed
        if totals is None:
            has_rounds = not rule.rule.lossy and any(policy in rule.rule.policies for policy in asked.policies)
            columns = pooled_columns(gammas if has_rounds else (), own=bool(shared))
            totals = self._totals.read(asked.request([rule.id]), columns)
        by_domain = pools(totals, asked.documents, rule.id, gammas, shared, asked.request().stops(self._facts))
        if not shared:
            self._shared = [{column: pool[column] for column in SHARED} for _, pool in by_domain]
        for domain, pool in by_domain:
            yield DraftPool(self.draft, rule, domain, pool)

    @cached_property
    def _computed(self) -> pa.Table | None:
        """The totals of all rules that are asked for; None if they lie in files."""
        asked, run = self._asked, self._asked.run
        request = asked.request([rule.id for rule in rules_of(self._rules)])
        if request.stored and self._totals.stored is not None and set(self._rules) <= set(run.rules):
            return None
        return self._totals.read(request, pooled_columns(run.gammas))


def draft_pools(asked: Asked, rules: Sequence[str], drafts: Sequence[str] | None = None) -> Iterator[DraftPool]:
    """Yield the pools of every draft (or of some), rule and domain."""
    for draft in drafts or asked.run.manifest.drafts:
        reader = DraftTotalsReader(asked, draft, rules)
        for rule in rules:
            yield from reader.pools(rule)


@dataclass(frozen=True)
class Evidence:
    """What the verdict on the traffic rests on, all under the rules that it concerns.

    `candidates`: the pools that have rounds, by draft, then domain; `undefined`: why some text of a domain has none;
    `observed`: the share of tokens of each domain in the run.
    """

    candidates: Pools
    undefined: Mapping[str, str]
    observed: Mapping[str, float]

    @classmethod
    def of(cls, asked: Asked, pools: Sequence[DraftPool], drafts: Sequence[str]) -> Evidence:
        """From the pools of some drafts under the rules of the verdict, on any text."""
        decisive: dict[str, list[tuple[str, DocumentTotals]]] = {draft: [] for draft in drafts}
        undefined: dict[str, str] = {}
        for item in pools:
            if asked.question.rule_for(item.pool.policy) != item.rule.id:
                continue
            pool, facts = item.pool, asked.run.manifest.drafts[item.draft]
            if doubt := contradiction(pool) if pool.defined else not_defined(item.rule.id, pool.policy, facts):
                undefined[item.domain] = doubt
            else:
                decisive[item.draft].append((item.domain, pool))
        candidates = {draft: by_domain(parts) for draft, parts in decisive.items()}
        return cls(candidates, undefined, observed_weights(asked.documents.table))

    def lacks(self, weights: Mapping[str, float], draft: str) -> str:
        """Return what prevents a verdict on the whole traffic, mixed by some weights; empty if nothing does."""
        if not self.observed:
            return "no document is complete yet"
        if odd := sorted(set(weights) ^ set(self.observed)):
            return f"weights and data do not have the same domains ({', '.join(map(short, odd))})"
        # A domain is judged by all of its text or not at all: its weight is that of all of it.
        rounds = self.candidates[draft]
        without = {domain: "no rounds" for domain in weights if domain not in rounds} | dict(self.undefined)
        if undefined := [domain for domain in without if weights.get(domain, 0) > 0]:
            reasons = dict.fromkeys(without[domain] for domain in undefined)
            advice = ": weight 0 in decision.weights leaves it out" if rounds else ""
            return f"{'; '.join(reasons)} ({', '.join(map(short, undefined))}){advice}"
        return ""


def by_domain(pools: Sequence[tuple[str, DocumentTotals]]) -> dict[str, DocumentTotals]:
    """By domain, the pools of all its kinds of text as one."""
    return {domain: merged(several) for domain, several in grouped(pools).items()}
