"""The sections of a report, in the order in which they stand, and how users name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from alphaprof.errors import OptionInvalid, shown
from alphaprof.render.blocks import Block
from alphaprof.render.sections import certificates, drafts, facts, legend, load, predictability, verdict
from alphaprof.report.build import Report
from alphaprof.report.sections.difficulty import SHORTEST

ALL = "all"


@dataclass(frozen=True)
class Section:
    """A part of a report: `blocks` writes it, and yields nothing where it is empty."""

    name: str  # as in --show
    title: str
    blocks: Callable[[Report], Iterator[Block]]
    empty: str = ""  # what is said where there are no blocks

    def is_empty(self, report: Report) -> bool:
        """Return whether the section has nothing to show."""
        return next(self.blocks(report), None) is None

    def written(self, report: Report) -> list[Block]:
        """Return the section's blocks, or one that says why there are none."""
        imported = report.run.imported
        why = f"the run was imported from {imported}, whose metrics hold rounds and no tokens" if imported else self.empty
        return list(self.blocks(report)) or [f"nothing to show: {why}"]


SECTIONS = (
    Section("verdict", "will it pay on the whole traffic, and why", verdict.verdict),
    Section("drafts", "every draft by domain, at its best gamma", drafts.drafts, "no document is complete yet"),
    Section("gammas", "tokens per round and speedup at every gamma", drafts.gammas, "no text has rounds"),
    Section(
        "rules",
        "acceptance under other rules, and by phase",
        drafts.rules,
        "the run has no rules beside those of the verdict: report --rules additive:0.2 adds one (alphaprof rules)",
    ),
    Section(
        "causes",
        "why drafted tokens are rejected, and what would help",
        drafts.causes,
        "it needs the position log (positions/), and text under a rule of the verdict",
    ),
    Section(
        "load",
        "speedup by sequences decoded at a time",
        load.load,
        "it needs step times of several concurrencies: set costs.concurrency, or give a table of your engine's",
    ),
    Section(
        "requests",
        "whole requests with their prefill, and single documents",
        load.requests,
        "it needs step times, and a gamma that was chosen (see --show drafts)",
    ),
    Section(
        "certificates",
        "acceptance that divergences guarantee",
        certificates.certificates,
        "it needs a position log with thresholds (certificates: true), and a draft with a distribution",
    ),
    Section(
        "predictability",
        "what the target alone says: how predictable the texts are",
        predictability.predictability,
        "it needs the position log, and with a draft model its thresholds (certificates: true)",
    ),
    Section(
        "difficulty",
        "acceptance by how sure the target is",
        certificates.difficulty,
        "it needs the position log, and text under a rule of the verdict or one with certificates",
    ),
    Section("times", "step times, and where they come from", facts.times, "there are no step times (see --show notes)"),
    Section("wiring", "how the files of draft heads were read", facts.wiring, "there is no draft head"),
    Section(
        "documents",
        "the documents that a draft serves worst and best",
        facts.documents,
        f"it needs a gamma that was chosen (see --show drafts), and documents of {SHORTEST} tokens or more",
    ),
    Section("notes", "what to know before believing the numbers", facts.notes, "no note applies to this run"),
    Section("legend", "what the columns, words and marks mean", legend.legend),
)
NAMES = tuple(section.name for section in SECTIONS)


def known_sections(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names as they are. Raises `OptionInvalid` for one that no section has."""
    for name in names:
        if name not in (*NAMES, ALL):
            raise OptionInvalid(
                f"--show: a report has no section {shown(name)}", f"sections: {', '.join(NAMES)}; {ALL} shows them all"
            )
    return tuple(names)


def chosen(names: Sequence[str], report: Report) -> list[Section]:
    """Returns the sections of these names in the order of the table; of `all` those that are not empty."""
    if ALL in names:
        return [section for section in SECTIONS if section.name in names or not section.is_empty(report)]
    return [section for section in SECTIONS if section.name in names]
