"""What draft trees are chosen on and tested on: the texts of a run with their ranks, halves and weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.costs.speedup import Mix
from alphaprof.log.store import Run
from alphaprof.report.decision import held_out
from alphaprof.theory.ranks import Mask, RankCounts, rank_counts
from alphaprof.totals.documents import Documents, observed_weights, strata_of
from alphaprof.totals.texts import Text, texts
from alphaprof.totals.units import Units

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sample:
    """The documents of a run. `cluster`, `choosing`, `tested` [documents]: the independent unit of each, and the halves that
    trees are chosen and tested on; where nothing is chosen all are tested. Text that the target did not choose is in
    neither. `weights`: shares of output tokens of the domains that have other text, adding up to 1; `weights_observed`: not
    from the profile; `strata` [units]: see `strata_of`.
    """

    texts: tuple[Text, ...]
    cluster: Array
    ranks: RankCounts
    choosing: Mask
    tested: Mask
    weights: dict[str, float]
    weights_observed: bool
    strata: Array

    def mix(self, domains: Collection[str]) -> Mix:
        """How some of its domains are put together: by the profile's weights, or as they were drawn."""
        if self.weights_observed:
            return Mix(tuple(domains), None, self.strata)
        return Mix.of({domain: self.weights[domain] for domain in domains})

    def domain(self, name: str, chosen: Mask) -> Array:
        """Those of the chosen documents that lie in a domain."""
        rows = np.concatenate([text.rows for text in self.texts if text.domain == name])
        return np.asarray(rows[chosen[rows]])

    def pooled(self, chosen: Mask) -> Array | None:
        """b_r of the traffic from the chosen documents, [width]: domains by their weights. None without such documents."""
        rows = {domain: self.domain(domain, chosen) for domain, weight in self.weights.items() if weight > 0}
        counted = {domain: self.weights[domain] for domain in rows if len(rows[domain])}
        parts = [weight * self.ranks.shares(rows[domain]) for domain, weight in counted.items()]
        return np.asarray(sum(parts) / sum(counted.values())) if parts else None


def sample_of(run: Run, draft: str, width: int, chooses: bool) -> Sample:
    """The documents of complete shards, with ranks 1 to `width` counted. `chooses`: trees are to be chosen on one half.

    Raises as `rank_counts`.
    """
    documents = run.documents()
    grouped = Documents.of(documents)
    found = tuple(texts(grouped))
    own = np.zeros(len(documents), dtype=bool)
    for text in found:
        own[text.rows] = bool(text.policy)
    tested = _tested(found, grouped.units) if chooses else own
    observed = observed_weights(documents.filter(pa.array(own)))
    weights = _given(run.manifest.config["decision"]["weights"], observed, {text.domain for text in found})
    return Sample(
        found,
        grouped.units.codes,
        rank_counts(run, draft, width),
        own & ~tested,
        tested,
        weights or observed,
        weights is None,
        strata_of(grouped, run.manifest),
    )


def _tested(every: tuple[Text, ...], units: Units) -> Mask:
    """The held-out half [documents] of the text that the target chose; no cluster lies in both halves."""
    members = {
        f"{text.domain} {text.continuation} {text.sampling}": (text.rows, units.take(text.rows).lots)
        for text in every
        if text.policy
    }
    tested = np.zeros(len(units.codes), dtype=bool)
    for name, mask in held_out({name: found for name, (_, found) in members.items()}).items():
        tested[members[name][0]] = mask
    return tested


def _given(weights: Mapping[str, float] | None, observed: Mapping[str, float], domains: set[str]) -> dict[str, float] | None:
    """The profile's weights of the observed domains, made to add up to 1; None where they do not fit the data."""
    if weights is None or set(weights) != domains:
        return None
    total = sum(weights[domain] for domain in observed)
    return {domain: weights[domain] / total for domain in observed} if total > 0 else None
