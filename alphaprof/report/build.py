"""Build the `Report` value of a run: totals and step times in, estimates, speedups and verdicts out."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.costs.cost_model import Cost, CostModel
from alphaprof.report.format import text_kind
from alphaprof.report.inputs import DraftPool, DraftTotalsReader, ReportInputs, evidence_of
from alphaprof.report.model import Conditions, DomainAnswer, DraftAnswer, Note, Result, RunFacts, Traffic
from alphaprof.report.result import ResultKey, build_result
from alphaprof.report.sections.attribution import Attribution, ResultOnText, attribution
from alphaprof.report.sections.certificates import Certificates, build_certificates
from alphaprof.report.sections.context import ContextAxis, context_axes, context_notes
from alphaprof.report.sections.difficulty import Decile, DocumentResult, deciles, extremes
from alphaprof.report.sections.hybrids import HybridCurve, hybrid_curves
from alphaprof.report.sections.predictability import Predictability, predictability
from alphaprof.report.sections.stopping import StopSurface, answered_p_min, stop_surfaces
from alphaprof.report.sections.vocabulary import VocabularyCoverage, vocabulary_coverage
from alphaprof.report.traffic import Judged, Parts, judge_parts, judge_traffic
from alphaprof.report.verdict import Evidence, Question, VerdictName
from alphaprof.report.warnings import report_warnings, timing_notes
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from alphaprof.totals.documents import Documents, mean_context
from alphaprof.totals.log_sample import LogPart, limit_of
from alphaprof.version import __version__

AHEAD = 8  # results that other threads may work out while the next pool is read


@dataclass(frozen=True)
class Report:
    """The answer."""

    format: ClassVar[str] = "alphaprof-report"
    version: ClassVar[str] = "2.0"

    verdict: VerdictName
    draft: str | None  # that the verdict concerns
    gamma: int | None
    speedup: Interval | None  # over the documents that the verdict rests on
    tokens_per_round: Interval | None  # over all documents
    conditions: Conditions  # what the verdict holds for
    alphaprof: str
    confidence: float
    run: RunFacts
    times: Cost | None  # where step times come from; None: there are none
    traffic: Traffic  # the verdict on all domains together
    domains: tuple[DomainAnswer, ...]  # what to use for each domain by itself, the largest share first
    drafts: tuple[DraftAnswer, ...]  # every draft by itself on the whole traffic, the fastest first
    results: tuple[Result, ...]  # one for each domain, kind of text, draft and rule
    stopping: tuple[StopSurface, ...]  # by γ and p_min, of drafts whose probabilities the log holds
    hybrids: tuple[HybridCurve, ...]  # by min_match, of drafts that are made of two others
    context: tuple[ContextAxis, ...]  # by draft; empty if all contexts are about as long
    causes: tuple[Attribution, ...]  # why drafts are rejected, under the rules of the verdict and those that keep the text
    certificates: Certificates | None  # None: the log holds no thresholds
    vocabulary: tuple[VocabularyCoverage, ...]  # of drafts that cannot propose every token of the target
    difficulty: tuple[Decile, ...]  # by tenths of the positions; empty without a complete shard
    documents: tuple[DocumentResult, ...]  # worst and best under the rules of the verdict, by draft, the slowest first
    predictability: tuple[Predictability, ...]  # empty if a draft model was measured and the log holds no thresholds
    notes: tuple[Note, ...]


def build_report(
    run: Run,
    config: Mapping[str, Any] | None = None,
    rules: Sequence[str] | None = None,
    whole_log: bool = False,
    surfaces: bool = True,
) -> Report:
    """Return the report of a run, complete or not. Raises `RunUnreadable`, and `CostsUnreadable` for others' step times.

    `config`: the profile with another decision or other costs than the run's own; `rules`: ids of the rules to report on
    beside those of the verdict (None: the profile's); `whole_log`: parts that read the position log read all of it;
    `surfaces`: speedups at every p_min are worked out, a quarter of a small report's time.
    """
    profile = dataclasses.replace(run.manifest, config=dict(config)).profile if config else run.manifest.profile
    inputs = answered_p_min(ReportInputs.of(run, profile))
    question, documents = inputs.question, inputs.documents
    shown = list(dict.fromkeys([*inputs.deciding, *(rules or run.rules)]))
    part = LogPart.of(run, documents, None if whole_log else limit_of(run))
    judged, pools, traffic, parts = _judged_pools(inputs, shown, part)
    results = [item.result for item in judged]
    facts, certificates = _run_facts(inputs.run, documents, part), build_certificates(part, question.confidence)
    axes = context_axes(inputs, part, traffic.gamma)
    drift = next((axis.drift for axis in axes if axis.draft == traffic.draft), None)
    more = [*timing_notes(inputs.timing, traffic.draft, traffic.gamma), *context_notes(axes, traffic.draft)]
    return Report(
        verdict=traffic.verdict,
        draft=traffic.draft,
        gamma=traffic.gamma,
        speedup=traffic.speedup,
        tokens_per_round=traffic.tokens_per_round,
        conditions=_conditions(question, facts, traffic, inputs.cost),
        alphaprof=__version__,
        confidence=question.confidence,
        run=facts,
        times=inputs.cost,
        traffic=traffic,
        **vars(parts),
        results=tuple(results),
        stopping=stop_surfaces(inputs, whole_log) if surfaces else (),
        hybrids=hybrid_curves(inputs, parts.drafts),
        context=axes,
        causes=attribution(part, judged, question.confidence),
        vocabulary=vocabulary_coverage(part, question.confidence),
        difficulty=deciles(part, shown, question.confidence),
        documents=extremes(_at_best(pools, results), inputs.timing.times, documents),
        certificates=certificates,
        predictability=predictability(part, results, question.confidence),
        notes=report_warnings(run, facts, results, traffic, certificates, inputs.cost, profile.costs.source, more, drift),
    )


def answered(inputs: ReportInputs) -> tuple[Traffic, tuple[Note, ...]]:
    """Return the verdict on the traffic and the notes of a report, without what needs the position log."""
    part = LogPart(inputs.run, inputs.documents)
    judged, _, traffic, _ = _judged_pools(inputs, inputs.deciding, part)
    facts, results = _run_facts(inputs.run, inputs.documents, part), [item.result for item in judged]
    source = inputs.costs.options.source if inputs.costs else inputs.run.manifest.profile.costs.source
    return traffic, report_warnings(inputs.run, facts, results, traffic, None, inputs.cost, source)


def _judged_pools(
    inputs: ReportInputs, shown: Sequence[str], part: LogPart
) -> tuple[list[ResultOnText], list[DraftPool], Traffic, Parts]:
    """Return the result of every pool, the pools that verdicts rest on, and the answers for the traffic and its parts.
    Results are computed in threads while the next pool is read; the pools of verdicts are read first.
    """
    question, costs, gammas = inputs.question, inputs.costs, inputs.run.gammas
    of_log = {(text.domain, text.continuation, text.policy, str(text.sampling)): text for text in part.documents.groups}
    readers = [DraftTotalsReader(inputs, draft, shown, spans=True) for draft in inputs.run.manifest.drafts]
    deciding = inputs.deciding  # what is shown begins with these
    waiting: deque[tuple[DraftPool, Future[Result]]] = deque()
    judged: list[ResultOnText] = []
    decisive: list[DraftPool] = []

    def collect(left: int) -> None:
        while len(waiting) > left:
            item, result = waiting.popleft()
            text = of_log[item.domain, item.pool.continuation, item.pool.policy, str(item.pool.sampling)]
            judged.append(ResultOnText(result.result(), item.rule, text))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for rules in (deciding, shown[len(deciding) :]):
            for item in (item for reader in readers for rule in rules for item in reader.pools(rule)):
                key = ResultKey(item.domain, item.draft, item.rule, inputs.run.manifest.drafts[item.draft], costs)
                waiting.append((item, threads.submit(build_result, key, item.pool, item.spans, question, gammas)))
                if question.rule_for(item.pool.policy) == item.rule.id:  # the others are not needed again, and large
                    decisive.append(item)
                collect(AHEAD)
            if rules is deciding:
                evidence, counts = evidence_of(inputs, decisive), Counter[str]()
                for group in inputs.documents.groups:
                    counts[group.domain] += len(group.rows)
                traffic = threads.submit(judge_traffic, evidence, costs, question, gammas)
                parts = threads.submit(_parts_of, traffic, evidence, costs, question, gammas, counts)
        collect(0)
    order = {(reader.draft, rule): place for place, (reader, rule) in enumerate(itertools.product(readers, shown))}
    judged.sort(key=lambda item: order[item.result.draft, item.rule.id])
    return judged, decisive, traffic.result()[0], parts.result()


def _parts_of(
    traffic: Future[tuple[Traffic, Judged]],
    evidence: Evidence,
    costs: CostModel | None,
    question: Question,
    gammas: Sequence[int],
    documents: Mapping[str, int],
) -> Parts:
    """Return the answers for parts of the traffic, once that for the whole of it is there."""
    return judge_parts(evidence, costs, question, gammas, documents, traffic.result()[1])


def _at_best(pools: Sequence[DraftPool], results: Sequence[Result]) -> list[tuple[DraftPool, int]]:
    """Return each pool with the best gamma of its result: those of results with a verdict, which come in the same order."""
    decided = zip(pools, (result for result in results if result.verdict is not None), strict=True)
    return [(pool, result.best_gamma) for pool, result in decided if result.best_gamma and pool.pool.defined]


def _conditions(question: Question, facts: RunFacts, traffic: Traffic, cost: Cost | None) -> Conditions:
    return Conditions(
        concurrency=question.concurrency,
        context=cost.context if cost else None,
        engine=cost.engine if cost else None,
        device=cost.device if cost else None,
        dtype=facts.dtype,
        rule=traffic.rule,
        p_min=float(question.p_min),
    )


def _run_facts(run: Run, documents: Documents, part: LogPart) -> RunFacts:
    manifest, table, profile = run.manifest, documents.table, run.manifest.config
    if manifest.imported is not None:  # such a run has no profile: where it comes from, and what it is asked
        asked = {name: profile[name] for name in ("costs", "decision")}
        profile = {"imported": dataclasses.asdict(manifest.imported)} | asked
    written = table.filter(pc.is_in(table["continuation"].cast(pa.string()), pa.array(["greedy", "sampled"])))
    lengths, limits = table["continuation_tokens"], table["max_new_tokens"]
    kinds = {(group.continuation, group.on_policy, str(group.sampling)): group for group in documents.groups}
    return RunFacts(
        path=str(run.path),
        complete=manifest.status == "complete",
        documents=manifest.documents,
        positions=manifest.positions,
        log_documents=part.run.manifest.documents if run.has_log else None,
        target=manifest.target.reference,
        drafts=tuple(manifest.drafts),
        dtype=manifest.target.precision,
        texts=tuple(
            text_kind(group.continuation, group.sampling) + ("" if group.on_policy else " (off-policy)")
            for group in kinds.values()
        ),
        created=manifest.created,
        cut=float(pc.equal(written["finish"].cast(pa.string()), "length").to_numpy().mean()) if len(written) else None,
        mean_length=float(pc.mean(lengths).as_py()) if len(table) else None,
        longest=max(pc.max(limits).as_py() or 0, pc.max(lengths).as_py()) if len(table) else None,
        mean_context=mean_context(table),
        skipped=manifest.skipped,
        truncated=manifest.truncated,
        imported=manifest.imported.engine if manifest.imported else None,
        target_model=manifest.target,
        draft_models=manifest.drafts,
        environment=dict(manifest.environment),
        profile=profile,
    )
