"""Documents in random order, so that a run may stop as soon as its verdict is sure (`profile --until-decided`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaprof.config import AUTO, ProfileOptions
from alphaprof.errors import ProfileInvalid
from alphaprof.profiling.corpus import Corpus, Document

CHOOSING = 32  # documents that choose what is auto
SHARD = 16  # documents between two looks: betting allows for any number of them
SEED = 0


@dataclass(frozen=True)
class InRandomOrder:
    """All documents of a corpus, drawn without replacement: the same order every time. Iterated like a `Corpus`."""

    documents: Sequence[Document]
    skipped: Counter[str]
    truncated: Counter[str]

    @classmethod
    def of(cls, corpus: Corpus, options: ProfileOptions) -> InRandomOrder:
        """Reads the whole corpus. Raises `ProfileInvalid` where documents depend on each other, or have no limit."""
        if any(source.cluster for source in options.data):
            raise ProfileInvalid(
                "--until-decided takes documents to be independent, and this profile groups them by cluster",
                "profile without --until-decided, or without cluster where groups are single documents",
            )
        found = list(corpus)
        order = np.random.default_rng(SEED).permutation(len(found))
        drawn = [replace(found[place], document=number) for number, place in enumerate(order.tolist())]
        return cls(drawn, corpus.skipped, corpus.truncated)

    def __iter__(self) -> Iterator[Document]:
        """The documents, numbered in this order."""
        return iter(self.documents)

    def facts(self, options: ProfileOptions) -> dict[str, Any]:
        """What a verdict must know before it sees any of them: see `report.verdict.Order`; and `shard_documents`."""
        decision = options.decision
        chooses = decision.weights is not None or AUTO in (decision.draft, decision.gamma)
        reach: dict[str, int] = {}
        for document in self.documents:
            longest = len(document.given) if document.given is not None else document.max_new_tokens or 0
            reach[document.domain] = max(reach.get(document.domain, 1), longest - 1)
        return {
            "choosing": CHOOSING if chooses else 0,
            "available": len(self.documents),
            "documents": dict(Counter(document.domain for document in self.documents)),
            "reach": reach,
            "shard_documents": min(SHARD, options.shard_documents),
        }
