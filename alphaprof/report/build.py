"""Build the `Report` value of a run: totals and step times in, estimates, speedups and verdicts out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof import __version__
from alphaprof.analysis.costs import TARGET
from alphaprof.analysis.replay import Flavour
from alphaprof.analysis.rule_names import rules_of
from alphaprof.analysis.totals import Request, policies, read_totals, write_totals
from alphaprof.log.store import Run
from alphaprof.report.certificates import certificates
from alphaprof.report.costs import CostBook, cost_of, open_costs
from alphaprof.report.format import text_kind
from alphaprof.report.model import Report, Result, RunFacts
from alphaprof.report.pool import SETTINGS, Pool, merged, pools, sampling_of, units
from alphaprof.report.predictability import predictability
from alphaprof.report.result import Subject, build_result, contradiction
from alphaprof.report.traffic import Evidence, judge_traffic
from alphaprof.report.verdict import Question, not_defined, order_of
from alphaprof.report.warnings import report_warnings


def build_report(
    run: Run, flavour: Flavour = "engine", config: Mapping[str, Any] | None = None, rules: Sequence[str] | None = None
) -> Report:
    """The report of a run, complete or not. Raises `RunUnreadable`, and `CostsUnreadable` for step times from elsewhere.

    `config`: the profile with another decision or other costs than the run's own; `rules`: ids of the rules to report on
    beside those of the verdict, where they are not the profile's. What the log was not written with is evaluated on it.
    """
    manifest = run.manifest
    config = config or manifest.config
    question = dataclasses.replace(Question.of(config), order=order_of(manifest))
    documents = run.documents()
    book = open_costs(run, config["costs"], mean_context(documents))
    independent = units(documents)
    policy = np.unique(policies(documents)).tolist()
    shown = list(dict.fromkeys([*(question.rule_for(name) for name in policy), *(rules or run.rules)]))
    results: list[Result] = []
    by_draft: dict[str, dict[str, Pool]] = {}
    undefined: dict[str, str] = {}
    for draft in manifest.drafts:
        totals = read_totals(run, draft, Request(shown, run.gammas, flavour))
        decisive: list[tuple[str, Pool]] = []
        for rule in rules_of(shown):
            for domain, pool in pools(totals, documents, independent, rule.id, run.gammas):
                results.append(build_result(Subject(domain, draft, rule, book), pool, question, run.gammas))
                if question.rule_for(pool.policy) == rule.id:
                    doubt = contradiction(pool) if pool.defined else not_defined(rule.id, pool.policy)
                    decisive += [] if doubt else [(domain, pool)]
                    undefined |= {domain: doubt} if doubt else {}
        by_draft[draft] = _by_domain(decisive)
    deciding = list(dict.fromkeys(question.rule_for(name) for name in policy if name))
    evidence = Evidence(deciding, by_draft, undefined, observed_weights(documents))
    report = Report(
        alphaprof=__version__,
        confidence=question.confidence,
        replay=flavour,
        run=_facts(run, documents),
        cost=cost_of(book, question.concurrency, _beyond_prefill(book, documents)) if book else None,
        traffic=judge_traffic(evidence, book, question, run.gammas),
        results=tuple(results),
        certificates=certificates(run, documents, independent, question.confidence),
        predictability=predictability(run, documents, independent, results, question.confidence),
        warnings=(),
    )
    return report_warnings(report, manifest)


def settled(run: Run) -> str | None:
    """Why a run in random order needs no more documents: its verdict is sure; None where it is not.

    Domains are judged as well in the report, each by itself; the run stops for the whole traffic.
    """
    write_totals(run)
    traffic = build_report(run).traffic
    available = (run.manifest.sequential or {}).get("available", 0)
    if traffic.verdict == "UNDECIDED":
        return None
    done = run.manifest.documents
    return f"{traffic.verdict} after {done} of {available} documents: the other {available - done} are not needed"


def _facts(run: Run, documents: pa.Table) -> RunFacts:
    manifest = run.manifest
    return RunFacts(
        path=str(run.path),
        complete=manifest.status == "complete",
        documents=manifest.documents,
        positions=manifest.positions,
        target=manifest.target.reference,
        drafts=tuple(manifest.drafts),
        dtype=manifest.target.dtype,
        texts=_texts(documents),
        created=manifest.created,
        cut=_cut(documents),
        mean_context=mean_context(documents),
        skipped=manifest.skipped,
        truncated=manifest.truncated,
    )


def _texts(documents: pa.Table) -> tuple[str, ...]:
    """The kinds of text of a run, in the order in which they occur."""
    kinds = documents["continuation"].cast(pa.string()).to_pylist()
    settings = zip(*(documents[name].to_pylist() for name in SETTINGS), strict=True)
    found = dict.fromkeys(zip(kinds, documents["on_policy"].to_pylist(), settings, strict=True))
    return tuple(
        text_kind(kind, sampling_of(values)) + ("" if on_policy else " (off-policy)") for kind, on_policy, values in found
    )


def _by_domain(found: Sequence[tuple[str, Pool]]) -> dict[str, Pool]:
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
    tokens: dict[str, int] = {}
    domains = documents["domain"].cast(pa.string()).to_pylist()
    for domain, count in zip(domains, documents["continuation_tokens"].to_pylist(), strict=True):
        tokens[domain] = tokens.get(domain, 0) + count
    return {domain: count / sum(tokens.values()) for domain, count in tokens.items()}


def _beyond_prefill(book: CostBook, documents: pa.Table) -> float | None:
    """The share of prompts that are longer than any whose prefill was timed; None where none was."""
    found = book.table.prefill_ms(TARGET, documents["prompt_tokens"].to_numpy())
    return found[1] if found is not None else None


def mean_context(documents: pa.Table) -> float | None:
    """Tokens before a position, on average over positions: the prompt and half of the continuation."""
    prompt, length = (documents[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
    return float(((prompt + length / 2) * length).sum() / length.sum()) if len(length) else None
