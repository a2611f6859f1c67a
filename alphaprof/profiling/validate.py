"""Real speculative decoding of a run's documents against plain decoding, by the clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphaprof.analysis.measured import Decodings, Measured, by_depth, decoded_rule
from alphaprof.analysis.rule_names import parse_rule
from alphaprof.analysis.rules import GREEDY, SAMPLED
from alphaprof.analysis.totals_files import write_totals
from alphaprof.config import ProfileOptions
from alphaprof.errors import DataEmpty
from alphaprof.log.store import Run
from alphaprof.options import MeasuredCosts
from alphaprof.profiling.corpus import Document, Ids
from alphaprof.profiling.decoding import Drafting, chosen_gammas, decode, own_documents, require_own_text
from alphaprof.profiling.drafts import Draft
from alphaprof.profiling.pipeline import in_memory, profile_with_models
from alphaprof.profiling.shards import Plan, Progress
from alphaprof.profiling.speculation import Decoded


@dataclass(frozen=True)
class Way:
    """One way to decode: with a draft at one gamma, or plainly (None, 0)."""

    draft: Draft | None
    gamma: int


@dataclass(frozen=True)
class Text:
    """A document with the continuation that the run holds, and the id of the rule that it is decoded by."""

    document: Document
    ids: Ids
    rule: str


def validate(
    options: ProfileOptions, out: Path, gammas: Sequence[int] | None, repeats: int, progress: Progress
) -> tuple[Run, Measured]:
    """Profile into the new directory `out`, then decode the same documents for real, at batch 1.

    `gammas`: default: those of `USUAL_GAMMAS` that the profile has. Raises the errors of `errors.py`.
    """
    require_own_text(options)
    chosen = chosen_gammas(options.gammas, gammas)
    options = options.model_copy(update={"gammas": sorted({*options.gammas, *chosen}), "costs": as_decoded(options)})
    plan = profile_with_models(options, out, progress)
    write_totals(plan.run)
    with in_memory():
        return plan.run, _measure(plan, chosen, repeats, progress)


def as_decoded(options: ProfileOptions) -> MeasuredCosts:
    """How steps are timed that shall predict this decoder's: here, one text at a time, without graphs."""
    given = options.costs if isinstance(options.costs, MeasuredCosts) else MeasuredCosts()
    return given.model_copy(update={"concurrency": [1], "mode": "eager"})


def _measure(plan: Plan, gammas: Sequence[int], repeats: int, progress: Progress) -> Measured:
    """Every document in every way, all ways in turn, `repeats` times; the order rotates, so that none is always first."""
    texts, short, foreign = _texts(plan)
    ways = [Way(None, 0), *(Way(draft, gamma) for draft in plan.drafts for gamma in gammas)]
    progress.start("decoding", (1 + repeats * len(texts)) * len(ways), "texts")
    for way in ways:  # warm-up
        _decode(plan, way, texts[0])
        progress.advance(1)
    found: dict[tuple[int, int, int], Decoded] = {}
    for repeat, place in itertools.product(range(repeats), range(len(texts))):
        for step in range(len(ways)):
            index = (step + repeat + place) % len(ways)
            found[index, repeat, place] = _decode(plan, ways[index], texts[place])
            progress.advance(1, positions=len(found[index, repeat, place].ids))
    decodings = []
    for index, way in enumerate(ways):
        table = [[found[index, repeat, place] for place in range(len(texts))] for repeat in range(repeats)]
        decodings.append(_collected(way, table, texts))
    numbers = np.array([text.document.document for text in texts])
    return Measured(numbers, tuple(text.rule for text in texts), decodings[0], tuple(decodings[1:]), short, foreign)


def _texts(plan: Plan) -> tuple[list[Text], int, int]:
    """What is decoded; how many documents are too short, and how many have text that the target did not write here."""
    stored: dict[int, Ids] = {}
    for shard in plan.run.shards:
        table = plan.run.continuations(shard.index, ["document", "continuation_ids"])
        stored |= zip(table["document"].to_pylist(), map(np.array, table["continuation_ids"].to_pylist()), strict=True)
    decision = plan.options.decision.rule
    own, foreign = own_documents(plan)
    texts = [
        Text(document, stored[document.document], decoded_rule(decision, GREEDY if document.greedy else SAMPLED))
        for document in own
        if len(stored[document.document]) >= 2
    ]
    if not texts:
        raise DataEmpty("no text has a second token, so there is nothing to time", "raise max_new_tokens, or --documents")
    return texts, len(own) - len(texts), foreign


def _decode(plan: Plan, way: Way, text: Text) -> Decoded:
    drafting = None if way.draft is None else Drafting(way.draft, parse_rule(text.rule), way.gamma)
    return decode(plan, text.document, drafting)


def _collected(way: Way, table: list[list[Decoded]], texts: Sequence[Text]) -> Decodings:
    """The decodings [repeats][documents] of one way."""

    def seconds(name: str) -> np.ndarray[Any, Any]:
        return np.array([[getattr(found, name) for found in row] for row in table])

    first = table[0]
    return Decodings(
        draft=way.draft.name if way.draft is not None else None,
        gamma=way.gamma,
        wall_s=seconds("decode_s"),
        cpu_s=seconds("decode_cpu_s"),
        prefill_s=seconds("prefill_s"),
        draft_s=seconds("draft_s"),
        verify_s=seconds("verify_s"),
        tokens=np.array([len(found.ids) - 1 for found in first]),
        rounds=np.array([len(found.drafted) for found in first]),
        drafted=np.array([by_depth(found.drafted, way.gamma) for found in first]),
        accepted=np.array([by_depth(found.accepted, way.gamma) for found in first]),
        same_text=np.array([np.array_equal(found.ids, text.ids) for found, text in zip(first, texts, strict=True)]),
    )
