"""Documents in random order, so that a run may stop as soon as its verdict is sure (`profile --until-decided`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alphaprof.config.profile import AUTO, ProfileOptions
from alphaprof.errors import ProfileInvalid
from alphaprof.log.manifest import RandomOrder
from alphaprof.profiling.models.hub import is_local
from alphaprof.profiling.texts.corpus import Corpus, Document

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
        """Reads the whole corpus. Raises `ProfileInvalid` where documents depend on each other, where weights ask for a
        mixture of domains that the data does not have, or where a corpus on the hub has no limit.
        """
        if any(source.cluster for source in options.data):
            raise ProfileInvalid(
                "--until-decided takes documents to be independent, and this profile groups them by cluster",
                "profile without --until-decided, or without cluster where groups are single documents",
            )
        if options.decision.weights is not None:
            raise ProfileInvalid(
                "--until-decided takes documents as the data has them, and decision.weights asks for another mixture",
                "leave weights out and set the mixture by limit of each source, or profile without --until-decided",
            )
        if endless := [source.path for source in options.data if source.limit is None and not is_local(source.path)]:
            hint = "give this source a limit, or use --limit"
            raise ProfileInvalid(f"--until-decided draws from all documents, and {endless[0]} on the hub has no limit", hint)
        documents = list(corpus)
        order = np.random.default_rng(SEED).permutation(len(documents)).tolist()
        drawn = [replace(documents[place], document=number) for number, place in enumerate(order)]
        return cls(drawn, corpus.skipped, corpus.truncated)

    def __iter__(self) -> Iterator[Document]:
        """The documents, numbered in this order."""
        return iter(self.documents)

    def facts(self, options: ProfileOptions) -> RandomOrder:
        """What a verdict must know before it sees any of them: see `report.verdict.Order`; and `shard_documents`."""
        choices = (options.drafts, options.decision.draft), (options.gammas, options.decision.gamma)
        chooses = any(len(given) > 1 and decided == AUTO for given, decided in choices)
        reach: dict[str, int] = {}
        for document in self.documents:
            longest = len(document.given) if document.given is not None else document.max_new_tokens or 0
            reach[document.domain] = max(reach.get(document.domain, 1), longest - 1)
        return {
            "choosing": CHOOSING if chooses else 0,
            "available": len(self.documents),
            "reach": reach,
            "shard_documents": min(SHARD, options.shard_documents),
        }
