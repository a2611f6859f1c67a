"""How much of a text a draft with a reduced vocabulary can propose at all: the ceiling of its acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alphaprof.stats.estimate import Interval
from alphaprof.totals.log_sample import LogPart, shards


@dataclass(frozen=True)
class VocabularyCoverage:
    """The tokens of a domain's text that a draft has in its vocabulary: no rule that keeps the text accepts any other."""

    domain: str
    draft: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    documents: int
    positions: int
    proposable: Interval  # share of the positions whose token the draft can propose: at depth 1 as at every other


def vocabulary_coverage(part: LogPart, confidence: float) -> tuple[VocabularyCoverage, ...]:
    """Of every draft with a reduced vocabulary, by domain and kind of text; nothing without a position log."""
    if not part.run.has_log or not part.run.shards:
        return ()
    rows: list[VocabularyCoverage] = []
    for draft, facts in part.run.manifest.drafts.items():
        if not facts.reduced_vocabulary:
            continue
        sums = [
            (shape.sums(columns["in_draft_vocabulary"]), shape.stop - shape.start)
            for columns, shape in shards(part.run, draft, ["in_draft_vocabulary"])
        ]
        known, positions = (np.concatenate(values) for values in zip(*sums, strict=True))
        for text in part.documents.groups:
            share = text.share(known, positions, confidence)
            if share is not None:
                rows.append(
                    VocabularyCoverage(
                        domain=text.domain,
                        draft=draft,
                        continuation=text.continuation,
                        sampling=text.sampling,
                        on_policy=text.on_policy,
                        documents=text.documents(positions),
                        positions=int(positions[text.rows].sum()),
                        proposable=share,
                    )
                )
    return tuple(rows)
