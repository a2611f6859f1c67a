"""What a report asks of a run: its question, documents and step times, and the pools of totals that answer it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.config.profile import ProfileOptions
from alphaprof.costs.cost_model import Cost, CostModel, cost_of, open_costs
from alphaprof.costs.rounds import UNTIMED, Timing
from alphaprof.report.result import contradiction
from alphaprof.report.verdict import Evidence, Question, not_defined
from alphaprof.rules import BoundRule, rules_of
from alphaprof.run.manifest import Hybrid
from alphaprof.run.parquet import of_rule, of_spans, whole_documents
from alphaprof.run.reader import Run
from alphaprof.totals.count import TotalsRequest
from alphaprof.totals.documents import Documents, mean_context, observed_weights, require_weights, strata_of
from alphaprof.totals.files import DraftTotals
from alphaprof.totals.hybrid import with_hybrids
from alphaprof.totals.pool import SHARED, SPAN_COLUMNS, DocumentTotals, SpanTotals, merged, pooled_columns, pools, spans_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ReportInputs:
    """What every part of a report rests on. `policies`: those of its texts, the empty one (text that the target
    did not produce) included.
    """

    run: Run
    question: Question
    documents: Documents
    policies: tuple[str, ...]
    costs: CostModel | None
    source: str  # where step times were to come from

    @classmethod
    def of(cls, run: Run, profile: ProfileOptions) -> ReportInputs:
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
        return self.costs.timing(self.question.concurrency) if self.costs else UNTIMED

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
    """The pool of one draft, rule and domain, and of its `spans`, by name, if they were asked for."""

    draft: str
    rule: BoundRule
    domain: str
    pool: DocumentTotals
    spans: dict[str, SpanTotals] = field(default_factory=dict)


class DraftTotalsReader:
    """The pools of one draft, rule by rule of those that are `asked` for. What is stored is read rule by rule, in the
    memory of one; what is not is computed once for all of them. Columns that no rule changes are read once. `spans`: with
    those of spans.
    """

    def __init__(self, inputs: ReportInputs, draft: str, asked: Sequence[str], spans: bool = False) -> None:
        self.draft, self._facts = draft, inputs.run.manifest.drafts[draft]
        self._inputs, self._asked, self._totals = inputs, asked, DraftTotals(inputs.run, draft)
        self._shared: list[dict[str, Array]] = []
        self._spans = spans

    def pools(self, name: str) -> Iterator[DraftPool]:
        """Yield the pools of one rule, by its id, one for each domain and kind of text."""
        inputs, (rule,), shared = self._inputs, rules_of([name]), tuple(self._shared)
        gammas, spans = inputs.run.gammas, list[pa.Table]()

        def whole(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
            for table in tables:
                mine = of_rule(table, rule.id)
                spans.append(of_spans(mine).select(SPAN_COLUMNS))
                yield whole_documents(mine)

        def filled(tables: Iterable[pa.Table]) -> list[tuple[str, DocumentTotals]]:
            chosen = whole(tables) if self._spans else tables
            return list(pools(chosen, inputs.documents, rule.id, gammas, shared, inputs.request().stops(self._facts)))

        if self._computed is not None:
            by_domain = filled(self._computed)
        else:
            has_rounds = not rule.rule.lossy and any(policy in rule.rule.policies for policy in inputs.policies)
            columns = pooled_columns(gammas if has_rounds else (), own=bool(shared))
            by_domain = filled(self._tables([rule.id], columns))
        if not shared:
            self._shared += [{column: pool[column] for column in SHARED} for _, pool in by_domain]
        of_groups = spans_of(spans, inputs.documents)
        self._spans = any(of_groups)  # if one rule has none, no rule has
        for (domain, pool), mine in zip(by_domain, of_groups, strict=True):
            yield DraftPool(self.draft, rule, domain, pool, mine)

    def _tables(self, rules: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield columns of the totals of rules, and the rows of spans if they are asked for."""
        request = replace(self._inputs.request(rules), spans=self._spans)
        return self._totals.tables(request, [*columns, *SPAN_COLUMNS] if self._spans else columns)

    @cached_property
    def _computed(self) -> list[pa.Table] | None:
        """The totals of all rules that are asked for; None if they lie in files."""
        inputs, run = self._inputs, self._inputs.run
        request = inputs.request([rule.id for rule in rules_of(self._asked)])
        if request.stored and self._totals.stored is not None and set(self._asked) <= set(run.rules):
            return None
        return list(self._tables(request.rules, pooled_columns(run.gammas)))


def draft_pools(
    inputs: ReportInputs, rules: Sequence[str], drafts: Sequence[str] | None = None, spans: bool = False
) -> Iterator[DraftPool]:
    """Yield the pools of every draft (or of some), rule and domain; `spans`: with those of spans."""
    for draft in drafts or inputs.run.manifest.drafts:
        reader = DraftTotalsReader(inputs, draft, rules, spans)
        for rule in rules:
            yield from reader.pools(rule)


def evidence_of(inputs: ReportInputs, drafts: Sequence[DraftPool]) -> Evidence:
    """Return what the verdict on the traffic rests on, of pools of any rules."""
    decisive: dict[str, list[tuple[str, DocumentTotals]]] = {draft: [] for draft in inputs.run.manifest.drafts}
    undefined: dict[str, str] = {}
    for item in drafts:
        if inputs.question.rule_for(item.pool.policy) != item.rule.id:
            continue
        draft = inputs.run.manifest.drafts[item.draft]
        if doubt := contradiction(item.pool) if item.pool.defined else not_defined(item.rule.id, item.pool.policy, draft):
            undefined[item.domain] = doubt
        else:
            decisive[item.draft].append((item.domain, item.pool))
    by_draft = {draft: by_domain(parts) for draft, parts in decisive.items()}
    return Evidence(inputs.decisive, by_draft, undefined, observed_weights(inputs.documents.table), inputs.strata)


def by_domain(pools: Sequence[tuple[str, DocumentTotals]]) -> dict[str, DocumentTotals]:
    """By domain, the pools of all its kinds of text as one."""
    parts: dict[str, list[DocumentTotals]] = {}
    for domain, pool in pools:
        parts.setdefault(domain, []).append(pool)
    return {domain: merged(several) for domain, several in parts.items()}
