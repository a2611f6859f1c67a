"""What the columns, words and marks of a report mean."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from alphaprof.render import wording
from alphaprof.render.sections.blocks import Block
from alphaprof.render.sections.drafts import MARKS
from alphaprof.report import format as fmt
from alphaprof.report.build import Report


def legend(report: Report) -> Iterator[Block]:
    """Yields a definition for each word that this report uses."""
    yield from _acceptance(report)
    yield from _time()
    yield from _of_causes({report.run.draft_models[item.draft].by_depth for item in report.causes})
    if any(result.load for result in report.results):
        yield (
            "by concurrency: the gamma of each is the best one of all documents, which can be another than the chosen one "
            "of the other tables, and too high on average."
        )
    if any(result.estimator == "expected" for result in report.results):
        yield "lossless: rounds are exact expectations given the texts; accept and reject are not drawn at random."
    if any(result.rule.startswith("tree") for result in report.results):
        yield "tree: gamma is the depth of a full tree, w + w^2 + ... + w^gamma nodes; its verification was not timed."
    yield f"marks: {'; '.join(MARKS.values())}."


def _acceptance(report: Report) -> Iterator[str]:
    yield (
        f"alpha: acceptance over all positions with a proposal. Brackets: {fmt.level(report.confidence)} intervals over "
        "documents."
    )
    yield "inf in brackets: too little data for a bound. n/a: not known, or not defined on this text."
    if any(facts.by_depth for facts in report.run.draft_models.values()):
        yield f"accept@1: {wording.ACCEPT_AT_1}"
        yield (
            "A full round of a head costs first(1) + (gamma - 1) c + v: its first step reads one token after a round of "
            "which nothing was accepted."
        )
    yield "docs: documents, the units of every interval. 12 of 16: equal prompts or one cluster make 16 worth 12."
    yield "coverage: share of positions where the draft proposes anything."
    yield "tokens/round: tokens emitted per verification, the target's own included. gamma: drafted tokens per round."
    yield (
        "tokens/round is over all rounds, those without a proposal too: what time depends on. Acceptance length, which "
        "engines show, is 1 + accepted / rounds that had a proposal."
    )
    yield (
        "accepted by depth d: conditional, of the drafts at depth d that were reached / marginal, rounds with a proposal "
        "whose first d drafts were all accepted."
    )
    yield "iid formula: tokens/round if acceptance were independent from position to position; by how much that is too high."


def _time() -> Iterator[str]:
    yield (
        "break-even: tokens/round from which decoding is faster, the mean cost of a round in decode steps. A full round "
        "costs gamma c + v, a search and clearing the caches; c = T_draft/T(1), v = T(gamma+1)/T(1)."
    )
    yield (
        "speedup: decode time without the draft / with it, prefill excluded; whole requests: prefill of target and draft "
        "included. Slower: share of documents that a draft slows down."
    )
    yield "Speedups hold for the step times of section times, which names engine and hardware; tokens/round on any engine."
    yield (
        "GO: the lower bound of the speedup reaches what is wanted. NO-GO: the upper bound stays below it. UNDECIDED: "
        "neither, or something is unknown; the reason says what, and where documents are too few, how many would settle it."
    )
    yield (
        "verdict: where draft or gamma is auto, one half of the documents chooses and the other half is tested. The speedup "
        "of a domain is that of the tested half; of all: over all documents, too high on average if some chose gamma."
    )


def _of_causes(heads: Collection[bool]) -> Iterator[str]:
    """Yields what the words about causes mean. `heads`: whether drafts with causes have depths."""
    if not heads:
        return
    yield (
        "lost: share of positions whose token was not an accepted draft. Each has one cause: the first one, from left "
        "to right, that applies."
    )
    limits = (
        ": at most that; below 1x its remedy alone makes nothing faster. Trees and prompt lookup held the token for "
        "a fact; the other remedies count as always right."
    )
    same = "with it: speedup (t: tokens/round) with nothing lost to that cause, at the same gamma and cost of a round"
    yield same + (limits if False in heads else ".")
    if True in heads:
        yield f"causes of a draft head: {wording.CAUSES_OF_HEADS}"
