"""Build the report of a run: totals and step times in, answers out. Sections are computed when they are first asked for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from alphaprof.costs.cost_model import Cost
from alphaprof.errors import AlphaprofError
from alphaprof.render.blocks import Block, Figure
from alphaprof.render.format import text_kind
from alphaprof.report.answer import Answer, Conditions, DomainAnswer, DraftAnswer, Note, Result, RunFacts, Traffic
from alphaprof.report.asked import Asked, DraftPool
from alphaprof.report.judge import Judge
from alphaprof.report.notes import report_notes
from alphaprof.report.result import ResultKey, build_result
from alphaprof.report.stopping import settled
from alphaprof.run.reader import Run
from alphaprof.totals.documents import Documents, mean_context
from alphaprof.totals.files import DraftTotals
from alphaprof.totals.log_sample import LogPart, limit_of
from alphaprof.version import __version__

# What a section may raise without taking the answers down; in tests nothing.
CAUGHT: tuple[type[Exception], ...] = (Exception,)


@dataclass(frozen=True)
class Failed:
    """What stands in place of a section that could not be computed."""

    error: str
    hint: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """From what a section raised."""
        if isinstance(error, AlphaprofError):
            return cls(error.message, error.hint)
        return cls(repr(error), "no answer depends on this section; please report this as a bug")


@dataclass(frozen=True)
class Report:
    """The answers, and what they rest on."""

    format: ClassVar[str] = "alphaprof-report"
    version: ClassVar[str] = "2.0"

    answer: Answer  # for the whole traffic: one draft, one rule, one gamma
    traffic: Traffic  # what else is said of the whole traffic
    domains: tuple[DomainAnswer, ...]  # what to use for each domain by itself, the largest share first
    drafts: tuple[DraftAnswer, ...]  # every draft by itself on the whole traffic, the fastest first
    conditions: Conditions  # what the answers hold for
    confidence: float
    times: Cost | None  # where step times come from; None: there are none
    run: RunFacts
    notes: tuple[Note, ...]
    alphaprof: str
    sections: dict[str, Any] = field(default_factory=dict)  # values by name, of the sections that were asked for


class RunReport(Report):
    """The report of a run that can still be asked for its sections. No answer depends on one; what cannot be computed says
    so in its place.
    """

    asked: Asked
    part: LogPart  # of the position log that sections read
    judge: Judge
    others: Sequence[str]  # ids of the other rules to report on

    @classmethod
    def of(cls, report: Report, **source: Any) -> RunReport:
        """Return a report with what its sections are computed from."""
        found = cls(**vars(report))
        for name, value in source.items():
            object.__setattr__(found, name, value)
        return found

    def section(self, name: str) -> Any:
        """Return the value of a section, which `compute` in the module of its name returns; None if it has none."""
        compute = getattr(import_module(f"alphaprof.report.sections.{name}"), "compute", None)
        if name not in self.sections and compute is not None:
            try:
                self.sections[name] = compute(self)
            except CAUGHT as error:
                self.sections[name] = Failed.of(error)
        return self.sections.get(name)

    def drawn(self, name: str) -> tuple[str, list[Block], bool]:
        """Return the title of a section, its blocks, and whether it has nothing to show, in which case a line says why."""
        module, value = import_module(f"alphaprof.report.sections.{name}"), self.section(name)
        try:
            blocks = list(module.draw(self)) if not isinstance(value, Failed) else []
        except CAUGHT as error:
            value = self.sections[name] = Failed.of(error)
        if isinstance(value, Failed):
            return module.TITLE, [f"error: {value.error}", f"hint: {value.hint}"], False
        if not all(isinstance(block, Figure) for block in blocks):
            read, of = self.part.run.manifest.documents, self.run.documents
            if getattr(module, "READS_LOG", False) and read < of:
                blocks.append(f"read from the log: {read} of {of} documents, in shards spread over it (--whole-log: all)")
            return module.TITLE, blocks, False
        metrics = f"the run was imported from {self.run.imported}, whose metrics hold rounds but no tokens"
        why = getattr(module, "EMPTY", "") if self.run.imported is None else metrics
        return module.TITLE, [f"nothing to show: {why}"], True

    def failures(self) -> list[tuple[str, Failed]]:
        """Return the sections that were asked for and could not be computed."""
        return [(name, value) for name, value in self.sections.items() if isinstance(value, Failed)]

    @cached_property
    def results(self) -> tuple[Result, ...]:
        """One for each draft, domain and kind of text under the rules of the verdict."""
        return tuple(self.results_of(self.judge.pools))

    def results_of(self, pools: Iterable[DraftPool]) -> Iterator[Result]:
        """Yield the result of each pool; several are worked out at a time."""
        run, costs = self.asked.run, self.asked.costs

        def result(item: DraftPool) -> Result:
            key = ResultKey(item.domain, item.draft, item.rule, run.manifest.drafts[item.draft], costs, self.asked.untold)
            judged = self.judge.known(item.domain, item.draft, item.pool)
            return build_result(key, item.pool, self.asked.question, run.gammas, judged)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            yield from threads.map(result, pools)


def build_report(
    run: Run,
    config: Mapping[str, Any] | None = None,
    rules: Sequence[str] | None = None,
    whole_log: bool = False,
    changes: Sequence[str] = (),
) -> RunReport:
    """Return the report of a run, complete or not. Raises `RunUnreadable`, `CostsUnreadable` for others' step
    times, and for rules that the run cannot tell of `OptionInvalid` or `NoPositionLog`.

    `config`: the profile with another decision or other costs than the run's own; `rules`: ids of the rules to report on
    beside those of the verdict (None: the profile's); `whole_log`: sections that read the position log read all of it;
    `changes`: what led to `config`, as `--set` takes it.
    """
    profile = dataclasses.replace(run.manifest, config=dict(config)).profile if config else run.manifest.profile
    asked = settled(Asked.of(run, profile))
    for draft in asked.run.manifest.drafts if rules else ():  # not only when their section is shown
        DraftTotals(asked.run, draft).require(rules or ())
    part = LogPart.of(run, asked.documents, None if whole_log else limit_of(run))
    question, run, documents = asked.question, asked.run, asked.documents
    judge = Judge.of(asked, list(run.manifest.drafts))
    cost = asked.cost
    if judge.untold:  # as if none had been taken: they rank no draft and no gamma
        asked = dataclasses.replace(asked, costs=None, untold=judge.untold)
        judge = Judge(asked, judge.pools, list(run.manifest.drafts))
    answer, traffic = judge.traffic()
    facts = _run_facts(run, documents, part)
    report = Report(
        answer=answer,
        traffic=traffic,
        domains=judge.domains(),
        drafts=judge.drafts(),
        conditions=Conditions(
            concurrency=question.concurrency,
            p_min=float(question.p_min),
            changes=tuple(changes),
        ),
        confidence=question.confidence,
        times=cost,
        run=facts,
        notes=report_notes(run, facts, judge.pools, answer, traffic, cost, asked.source),
        alphaprof=__version__,
    )
    others = tuple(rule for rule in dict.fromkeys(rules or run.rules) if rule not in asked.deciding)
    return RunReport.of(report, asked=asked, part=part, judge=judge, others=others)


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
