"""Build the `Report` value of a run: totals and step times in, estimates, speedups and verdicts out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof import __version__
from alphaprof.analysis.replay import Flavour
from alphaprof.analysis.rule_names import rules_of
from alphaprof.analysis.rules import BoundRule
from alphaprof.analysis.totals import Request, by_chance
from alphaprof.analysis.totals_files import Held, write_totals
from alphaprof.log.manifest import Manifest
from alphaprof.log.store import Run
from alphaprof.report.attribution import Basis, Judged, attribution
from alphaprof.report.certificates import certificates
from alphaprof.report.costs import CostBook, beyond_prefill, cost_of, open_costs
from alphaprof.report.difficulty import Played, extremes, tenths
from alphaprof.report.documents import Documents
from alphaprof.report.format import text_kind
from alphaprof.report.log_part import LIMIT, LogPart
from alphaprof.report.model import Report, Result, RunFacts
from alphaprof.report.pool import SHARED, Pool, columns_of, merged, pools
from alphaprof.report.predictability import predictability
from alphaprof.report.result import Subject, build_result, contradiction
from alphaprof.report.traffic import Evidence, judge_traffic
from alphaprof.report.verdict import UNTIMED, Question, not_defined, order_of
from alphaprof.report.warnings import report_warnings

Array = np.ndarray[Any, Any]
AHEAD = 8  # pools that are read before the first of them is judged
FIRST = 16  # documents that step times are taken for, where documents come one after the other


def build_report(
    run: Run,
    flavour: Flavour = "engine",
    config: Mapping[str, Any] | None = None,
    rules: Sequence[str] | None = None,
    whole_log: bool = False,
) -> Report:
    """The report of a run, complete or not. Raises `RunUnreadable`, and `CostsUnreadable` for step times from elsewhere.

    `config`: the profile with another decision or other costs than the run's own; `rules`: ids of the rules to report on
    beside those of the verdict, where they are not the profile's. What the log was not written with is evaluated on it.
    `whole_log`: parts that read the position log read all of it, however large it is.
    """
    inquiry = Inquiry.of(run, flavour, config or run.manifest.config)
    question, book, documents = inquiry.question, inquiry.book, inquiry.documents
    shown = list(dict.fromkeys([*inquiry.deciding, *(rules or run.rules)]))
    part = LogPart.of(run, documents, None if whole_log else LIMIT)
    of_log = {(text.domain, text.continuation, text.policy, str(text.sampling)): text for text in part.texts}
    found: list[Found] = []
    judged: list[Judged] = []
    for item, result in _results(inquiry, shown):
        pool = item.pool
        judged.append(Judged(result, item.rule, of_log[item.domain, pool.continuation, pool.policy, str(pool.sampling)]))
        if question.rule_for(pool.policy) == item.rule.id:  # the others are not needed again, and large
            found.append(item)
    results = [item.result for item in judged]
    timing = book.timing(question.concurrency) if book else UNTIMED
    basis = Basis(part, flavour, timing, question.confidence)
    report = Report(
        alphaprof=__version__,
        confidence=question.confidence,
        replay=flavour,
        run=_facts(run, documents, part),
        cost=cost_of(book, question.concurrency, beyond_prefill(book, documents.prompt_tokens)) if book else None,
        traffic=judge_traffic(evidence_of(inquiry, found), book, question, run.gammas),
        results=tuple(results),
        attribution=attribution(basis, judged),
        difficulty=tenths(part, shown, question.confidence),
        documents=extremes(_played(inquiry, found, [item for item in results if item.verdict is not None]), documents),
        certificates=certificates(part, question.confidence),
        predictability=predictability(part, results, question.confidence),
        warnings=(),
    )
    return report_warnings(report, run.manifest, run.has_log)


def settled(run: Run) -> str | None:
    """Why a run in random order needs no more documents: its verdict is sure; None where it is not.

    The run stops for the whole traffic; its report judges every domain by itself as well.
    """
    write_totals(run)
    inquiry = Inquiry.of(run, "engine", run.manifest.config)
    evidence = evidence_of(inquiry, list(found_pools(inquiry, inquiry.deciding)))
    verdict = judge_traffic(evidence, inquiry.book, inquiry.question, run.gammas).verdict
    if verdict == "UNDECIDED" or inquiry.question.order is None:
        return None
    done, available = run.manifest.documents, inquiry.question.order.available
    return f"{verdict} after {done} of {available} documents: the other {available - done} are not needed"


@dataclass(frozen=True)
class Inquiry:
    """What every part of a report rests on. `policies`: those of its texts, the empty one (text that the target
    did not produce) included.
    """

    run: Run
    flavour: Flavour
    question: Question
    documents: Documents
    policies: tuple[str, ...]
    book: CostBook | None

    @classmethod
    def of(cls, run: Run, flavour: Flavour, config: Mapping[str, Any]) -> Inquiry:
        """From a run and what is asked of it."""
        order = order_of(run.manifest, flavour)
        question = dataclasses.replace(Question.of(config), order=order)
        documents = run.documents()
        # Step times must not hang on documents that they are held against, where these come one after the other.
        first = documents.slice(0, max(order.choosing, FIRST)) if order else documents
        book = open_costs(run, config["costs"], mean_context(first))
        grouped = Documents.of(documents)
        found = tuple(sorted({group.policy for group in grouped.groups}))
        return cls(run, flavour, question, grouped, found, book)

    def stored(self, rules: Sequence[str]) -> bool:
        """Whether the totals of some rules lie in files."""
        run = self.run
        return self.flavour == "engine" and run.manifest.status == "complete" and set(rules) <= set(run.rules)

    def request(self, rules: Sequence[BoundRule]) -> Request:
        """What is asked of totals."""
        return Request([rule.id for rule in rules], self.run.gammas, self.flavour)

    def has_rounds(self, rule: BoundRule) -> bool:
        """Whether a rule has rounds on some text of the run: a lossy one has none."""
        return not rule.rule.lossy and any(policy in rule.rule.policies for policy in self.policies)

    @property
    def deciding(self) -> list[str]:
        """Ids of the rules that the verdict concerns, on any text of the run."""
        return list(dict.fromkeys(map(self.question.rule_for, self.policies)))

    @property
    def decisive(self) -> list[str]:
        """Those of them on text that the target produced: there alone they can have rounds, and a verdict."""
        return list(dict.fromkeys(self.question.rule_for(policy) for policy in self.policies if policy))


@dataclass(frozen=True)
class Found:
    """The pool of one draft, rule and domain."""

    draft: str
    rule: BoundRule
    domain: str
    pool: Pool


def _results(inquiry: Inquiry, rules: Sequence[str]) -> Iterator[tuple[Found, Result]]:
    """The result of every pool. Another thread works them out while this one reads what comes next."""

    def result(item: Found) -> Result:
        expected = by_chance(item.rule, inquiry.run.manifest.drafts[item.draft])
        subject = Subject(item.domain, item.draft, item.rule, expected, inquiry.book)
        return build_result(subject, item.pool, inquiry.question, inquiry.run.gammas)

    with ThreadPoolExecutor(1) as thread:
        waiting: deque[tuple[Found, Future[Result]]] = deque()
        for item in found_pools(inquiry, rules):
            waiting.append((item, thread.submit(result, item)))
            if len(waiting) > AHEAD:
                first, coming = waiting.popleft()
                yield first, coming.result()
        for first, coming in waiting:
            yield first, coming.result()


def found_pools(inquiry: Inquiry, rules: Sequence[str], drafts: Sequence[str] | None = None) -> Iterator[Found]:
    """The pools of every draft (or of some), rule and domain."""
    gammas, bound = inquiry.run.gammas, rules_of(list(rules))
    for draft in drafts or inquiry.run.manifest.drafts:
        # What is stored is read rule by rule, which takes the memory of one; what is not is computed once for all of them.
        held, shared = Held(inquiry.run, draft), list[dict[str, Array]]()
        computed = None if inquiry.stored(rules) else held.read(inquiry.request(bound), columns_of(gammas))
        for rule in bound:
            columns = columns_of(gammas if inquiry.has_rounds(rule) else (), own=bool(shared))
            totals = held.read(inquiry.request([rule]), columns) if computed is None else computed
            of_first = not shared
            for domain, pool in pools(totals, inquiry.documents, rule.id, gammas, () if of_first else shared):
                if of_first:
                    shared.append({name: pool[name] for name in SHARED})
                yield Found(draft, rule, domain, pool)


def _played(inquiry: Inquiry, found: Sequence[Found], results: Sequence[Result]) -> list[Played]:
    """The pools whose results carry a verdict, at the gamma that is best for each, with its draft's step times."""
    times = inquiry.book.times(inquiry.question.concurrency) if inquiry.book else {}
    return [
        Played(item.domain, item.draft, item.rule.id, result.best_gamma, item.pool, times.get(item.draft))
        for item, result in zip(found, results, strict=True)
        if result.best_gamma is not None and item.pool.defined
    ]


def evidence_of(inquiry: Inquiry, found: Sequence[Found]) -> Evidence:
    """What of it the verdict on the traffic rests on."""
    decisive: dict[str, list[tuple[str, Pool]]] = {draft: [] for draft in inquiry.run.manifest.drafts}
    undefined: dict[str, str] = {}
    for item in found:
        if inquiry.question.rule_for(item.pool.policy) != item.rule.id:
            continue
        if doubt := contradiction(item.pool) if item.pool.defined else not_defined(item.rule.id, item.pool.policy):
            undefined[item.domain] = doubt
        else:
            decisive[item.draft].append((item.domain, item.pool))
    by_draft = {draft: by_domain(parts) for draft, parts in decisive.items()}
    return Evidence(inquiry.decisive, by_draft, undefined, observed_weights(inquiry.documents.table))


def _asked(manifest: Manifest) -> dict[str, Any]:
    """Every option of a profile; of an imported run, which has none, where it comes from and what it is asked."""
    if manifest.imported is None:
        return manifest.config
    asked = {name: manifest.config[name] for name in ("costs", "decision")}
    return {"imported": dataclasses.asdict(manifest.imported)} | asked


def _facts(run: Run, documents: Documents, part: LogPart) -> RunFacts:
    manifest, table = run.manifest, documents.table
    return RunFacts(
        path=str(run.path),
        complete=manifest.status == "complete",
        documents=manifest.documents,
        positions=manifest.positions,
        log_documents=part.run.manifest.documents if run.has_log else None,
        target=manifest.target.reference,
        drafts=tuple(manifest.drafts),
        dtype=manifest.target.dtype,
        texts=_texts(documents),
        created=manifest.created,
        cut=_cut(table),
        mean_context=mean_context(table),
        skipped=manifest.skipped,
        truncated=manifest.truncated,
        imported=manifest.imported.engine if manifest.imported else None,
        target_model=manifest.target,
        draft_models=manifest.drafts,
        environment=manifest.environment,
        profile=_asked(manifest),
    )


def _texts(documents: Documents) -> tuple[str, ...]:
    """The kinds of text of a run, in the order in which they occur."""
    kinds = {(group.continuation, group.on_policy, group.settings): group for group in documents.groups}
    return tuple(
        text_kind(group.continuation, group.sampling) + ("" if group.on_policy else " (off-policy)")
        for group in kinds.values()
    )


def by_domain(found: Sequence[tuple[str, Pool]]) -> dict[str, Pool]:
    """By domain, the pools of all its kinds of text as one."""
    parts: dict[str, list[Pool]] = {}
    for domain, pool in found:
        parts.setdefault(domain, []).append(pool)
    return {domain: merged(several) for domain, several in parts.items()}


def _cut(documents: pa.Table) -> float | None:
    """The share of the texts that the target wrote in this run which ended at max_new_tokens; None: it wrote none."""
    written = documents.filter(pc.is_in(documents["continuation"].cast(pa.string()), pa.array(["greedy", "sampled"])))
    if len(written) == 0:
        return None
    return float(pc.equal(written["finish"].cast(pa.string()), "length").to_numpy().mean())


def observed_weights(documents: pa.Table) -> dict[str, float]:
    """Shares of tokens by domain, in the order in which domains occur."""
    domains = documents["domain"].cast(pa.string()).combine_chunks().dictionary_encode()
    tokens = np.bincount(domains.indices.to_numpy(), documents["continuation_tokens"].to_numpy())
    return {
        domain: float(count / tokens.sum()) for domain, count in zip(domains.dictionary.to_pylist(), tokens, strict=True)
    }


def mean_context(documents: pa.Table) -> float | None:
    """Tokens before a position, on average over positions: the prompt and half of the continuation."""
    prompt, length = (documents[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
    return float(((prompt + length / 2) * length).sum() / length.sum()) if len(length) else None
