"""Build the `Report` value of a run: totals and step times in, estimates, speedups and verdicts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphaprof import __version__
from alphaprof.analysis.replay import Flavour
from alphaprof.analysis.rule_names import rules_of
from alphaprof.analysis.speedup import NOTHING, StepTime, StepTimes
from alphaprof.analysis.totals import Request, policies, read_totals
from alphaprof.log.manifest import Manifest
from alphaprof.log.store import Run
from alphaprof.report.certificates import certificates
from alphaprof.report.format import text_kind
from alphaprof.report.model import Cost, Report, Result, RunFacts
from alphaprof.report.pool import SETTINGS, Pool, merged, pools, sampling_of, units
from alphaprof.report.predictability import predictability
from alphaprof.report.result import Subject, build_result, contradiction
from alphaprof.report.traffic import Evidence, judge_traffic
from alphaprof.report.verdict import Question, not_defined
from alphaprof.report.warnings import report_warnings


def build_report(
    run: Run, flavour: Flavour = "engine", question: Question | None = None, rules: Sequence[str] | None = None
) -> Report:
    """The report of a run, complete or not. Raises `RunUnreadable`.

    `question`: what the verdict is about, where it is not what the profile asked; `rules`: ids of the rules to report on
    beside those of the verdict, where they are not the profile's. What the log was not written with is evaluated on it.
    """
    manifest = run.manifest
    question = question or Question.of(manifest.config)
    documents = run.documents()
    latency = run.latency()
    steps = latency.to_pylist() if latency is not None else []
    times = step_times(steps)
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
                results.append(build_result(Subject(domain, draft, rule, times.get(draft)), pool, question, run.gammas))
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
        cost=_cost(steps, manifest) if steps else None,
        traffic=judge_traffic(evidence, times, question, run.gammas),
        results=tuple(results),
        certificates=certificates(run, documents, independent, question.confidence),
        predictability=predictability(run, documents, independent, results, question.confidence),
        warnings=(),
    )
    return report_warnings(report, manifest)


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
        mean_context=_mean_context(documents),
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


def _mean_context(documents: pa.Table) -> float | None:
    """Tokens before a position, on average over positions: the prompt and half of the continuation."""
    prompt, length = (documents[name].to_numpy() for name in ("prompt_tokens", "continuation_tokens"))
    return float(((prompt + length / 2) * length).sum() / length.sum()) if len(length) else None


def step_times(rows: Sequence[Mapping[str, Any]]) -> dict[str, StepTimes]:
    """Step times by draft, from rows of the latency table; empty where none were measured."""
    timed = {(row["model"], row["step"], row["tokens"]): StepTime(row["median_ms"], row["relative_error"]) for row in rows}
    target = {tokens: time for (model, _, tokens), time in timed.items() if model == "target"}
    drafts = dict.fromkeys(model for model, _, _ in timed if model != "target")
    return {
        draft: StepTimes(target, timed.get((draft, "draft", 1), NOTHING), timed.get((draft, "lookup", 1), NOTHING))
        for draft in drafts
    }


def _cost(rows: Sequence[Mapping[str, Any]], manifest: Manifest) -> Cost:
    environment = manifest.environment
    return Cost(
        source=manifest.config["costs"]["source"],
        engine=f"transformers {environment['packages']['transformers']}",
        device=manifest.target.device,
        dtype=manifest.target.dtype,
        concurrency=1,
        context=rows[0]["context"],
        threads=environment["torch_threads"] if manifest.target.device == "cpu" else None,
        overhead_ms=None,
        target_ms={row["tokens"]: row["median_ms"] for row in rows if row["model"] == "target"},
        draft_ms={row["model"]: row["median_ms"] for row in rows if row["step"] == "draft"},
        lookup_ms={row["model"]: row["median_ms"] for row in rows if row["step"] == "lookup"},
    )
