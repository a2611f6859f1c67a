"""The documents of a run with their ranks, and the halves of them that trees are chosen and tested on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from alphaprof.log.store import Run
from alphaprof.report.decision import held_out
from alphaprof.stats.estimate import Array
from alphaprof.theory.trees import Mask, RankCounts, rank_counts
from alphaprof.totals.documents import Documents, TextGroup, observed_weights, strata_of


@dataclass(frozen=True)
class TreeSample:
    """The documents of a run. `cluster`, `choosing`, `tested` [documents]: the independent unit of each, and the halves that
    trees are chosen and tested on; where nothing is chosen all are tested. Text that the target did not choose is in
    neither. `weights`: shares of output tokens of the domains that have other text, adding up to 1; `weights_observed`: not
    from the profile; `strata` [units]: see `strata_of`.
    """

    texts: tuple[TextGroup, ...]
    cluster: Array
    ranks: RankCounts
    choosing: Mask
    tested: Mask
    weights: dict[str, float]
    weights_observed: bool
    strata: Array

    def domain(self, name: str, chosen: Mask) -> Array:
        """The chosen documents that lie in a domain."""
        rows = np.concatenate([text.rows for text in self.texts if text.domain == name])
        return np.asarray(rows[chosen[rows]])

    def pooled(self, chosen: Mask) -> Array | None:
        """b_r of the traffic from the chosen documents, [width]: domains by their weights. None without such documents."""
        rows = {domain: self.domain(domain, chosen) for domain, weight in self.weights.items() if weight > 0}
        counted = {domain: self.weights[domain] for domain in rows if len(rows[domain])}
        parts = [weight * self.ranks.shares(rows[domain]) for domain, weight in counted.items()]
        return np.asarray(sum(parts) / sum(counted.values())) if parts else None


def tree_sample(run: Run, draft: str, width: int, chooses: bool) -> TreeSample:
    """The documents of complete shards, ranks 1 to `width`; `chooses`: one half chooses trees. Raises as `rank_counts`."""
    table = run.documents()
    documents = Documents.of(table)
    own = np.zeros(len(table), dtype=bool)
    for text in documents.groups:
        own[text.rows] = text.on_policy
    tested = own.copy()
    if chooses:  # no cluster lies in both halves
        rows = {f"{text.domain} {text.continuation} {text.sampling}": text.rows for text in documents.groups if text.policy}
        for name, mask in held_out({name: documents.units.take(part).lots for name, part in rows.items()}).items():
            tested[rows[name]] = mask
    observed = observed_weights(table.filter(pa.array(own)))
    weights = run.manifest.config["decision"]["weights"]
    total = 0.0
    if weights is not None and set(weights) == {text.domain for text in documents.groups}:
        total = sum(weights[domain] for domain in observed)
    return TreeSample(
        documents.groups,
        documents.units.codes,
        rank_counts(run, draft, width),
        own & ~tested,
        tested,
        {domain: weights[domain] / total for domain in observed} if total > 0 else observed,
        total <= 0,
        strata_of(documents, run.manifest),
    )
