"""The sections of a report, in the order in which they stand, and how users name them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from alphaprof.errors import OptionInvalid, shown
from alphaprof.render.sections import causes, certificates, drafts, facts, legend, load, predictability, verdict
from alphaprof.render.sections.blocks import Block
from alphaprof.report.build import Report

ALL = "all"


def _never_empty(report: Report) -> str:
    return ""


@dataclass(frozen=True)
class Section:
    """A part of a report: `blocks` writes it, and `why_empty` says in a sentence why it is empty, or nothing where it is
    not.
    """

    name: str  # as in --show
    title: str
    blocks: Callable[[Report], Iterator[Block]]
    why_empty: Callable[[Report], str]

    def written(self, report: Report) -> list[Block]:
        """Returns the section's blocks, or why there are none."""
        reason = self.why_empty(report)
        return [f"nothing to show: {reason}"] if reason else list(self.blocks(report))


SECTIONS = (
    Section("verdict", "will it pay on the whole traffic, and why", verdict.verdict, _never_empty),
    Section("drafts", "every draft by domain, at its best gamma", drafts.drafts, drafts.why_no_drafts),
    Section("gammas", "tokens per round and speedup at every gamma", drafts.gammas, drafts.why_no_gammas),
    Section("rules", "acceptance under other rules, and by phase", drafts.rules, drafts.why_no_rules),
    Section("causes", "why drafted tokens are rejected, and what would help", causes.causes, causes.why_no_causes),
    Section("load", "speedup by sequences decoded at a time", load.load, load.why_no_load),
    Section("requests", "whole requests with their prefill, and single documents", load.requests, load.why_no_requests),
    Section(
        "certificates",
        "acceptance that divergences guarantee",
        certificates.certificates,
        certificates.why_no_certificates,
    ),
    Section(
        "predictability",
        "what the target alone says: how predictable the texts are",
        predictability.predictability,
        predictability.why_no_predictability,
    ),
    Section(
        "difficulty",
        "acceptance by how sure the target is",
        certificates.difficulty,
        certificates.why_no_difficulty,
    ),
    Section("times", "step times, and where they come from", facts.times, facts.why_no_times),
    Section("wiring", "how the files of draft heads were read", facts.wiring, facts.why_no_wiring),
    Section("documents", "the documents that a draft serves worst and best", facts.documents, facts.why_no_documents),
    Section("notes", "what to know before believing the numbers", facts.notes, facts.why_no_notes),
    Section("legend", "what the columns, words and marks mean", legend.legend, _never_empty),
)
NAMES = tuple(section.name for section in SECTIONS)


def known_sections(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names as they are. Raises `OptionInvalid` for one that no section has, with a near one."""
    for name in names:
        if name not in (*NAMES, ALL):
            near = difflib.get_close_matches(name.lower(), (*NAMES, ALL), n=1)
            advice = f"did you mean {near[0]}? " if near else ""
            raise OptionInvalid(
                f"--show: a report has no section {shown(name)}",
                f"{advice}sections: {', '.join(NAMES)}; {ALL} shows them all",
            )
    return tuple(names)


def chosen(names: Sequence[str], report: Report) -> list[Section]:
    """Returns the sections of these names in the order of the table; of `all` those that are not empty."""
    if ALL in names:
        return [section for section in SECTIONS if section.name in names or not section.why_empty(report)]
    return [section for section in SECTIONS if section.name in names]
