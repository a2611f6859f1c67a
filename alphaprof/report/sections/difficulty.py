"""Acceptance by how hard a position is for the target, and the documents that a draft serves best and worst."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.costs.rounds import StepTimes, time_spent
from alphaprof.report.inputs import DraftPool
from alphaprof.report.sections.certificates import certified_positions, columns_of_certificates
from alphaprof.rules import GREEDY, BoundRule, rules_of
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from alphaprof.totals.count import TotalsRequest, columns_of
from alphaprof.totals.documents import Documents, over_domains
from alphaprof.totals.log_sample import AXES, LogPart, shards

Array = np.ndarray[Any, Any]
EXTREMES = 5  # documents at either end
SHORTEST = 16  # tokens: the rounds of shorter texts are too few to rank them


@dataclass(frozen=True)
class Decile:
    """One tenth of all positions of a draft, by the target's margin or entropy, under one rule."""

    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    axis: str  # margin (p1 - p2) or entropy (nats)
    place: int  # 1 for the lowest values; there are fewer than ten if values tie
    low: float | None  # at least, less than; None: unbounded
    high: float | None  # less than this
    positions: int  # with a proposal
    accepted: Interval | None  # share of them that the rule accepts
    certified: Interval | None  # share of those with a certificate that is certain to be accepted; None: there is none


@dataclass(frozen=True)
class DocumentResult:
    """One of the documents that a draft serves worst or best, at the gamma that is best for its domain."""

    domain: str
    draft: str
    rule: str
    gamma: int
    document: int  # its number in the run's documents/
    source: int  # place in the profile's data, from 0
    source_row: int  # row there, from 0
    prompt_hash: str  # SHA-256 of the prompt's token ids
    tokens: int  # of its continuation
    alpha: float | None  # acceptance over its positions with a proposal; None: it has none
    tokens_per_round: float  # over all of its rounds
    speedup: float | None  # None: no step times


def decile_counts(
    run: Run, draft: str, rules: Sequence[BoundRule], edges: Mapping[str, Array]
) -> dict[tuple[str, str], Array]:
    """Count a draft's positions by id of the rule and axis, [documents, bins, 4]: those with a proposal, the sum of beta_t
    over them, those that have a certificate, and those of them that are certified. Nothing if the run has no complete shard.

    `edges`: see `log_sample.decile_edges`.
    """
    thresholds = [rule for rule in rules if rule.id in run.log_rules.certified]
    request = TotalsRequest([rule.id for rule in rules], ())
    names = [*columns_of(request, run.manifest.drafts[draft]), *AXES.values()]
    names += columns_of_certificates(thresholds) if thresholds else []
    parts: dict[tuple[str, str], list[Array]] = {}
    for columns, shape in shards(run, draft, list(dict.fromkeys(names))):
        columns["greedy"] = shape.each(shape.policy == GREEDY)
        proposed = columns["proposed"] > 0
        nowhere = np.zeros(len(proposed), dtype=bool)
        documents = len(shape.document)
        document = shape.each(np.arange(documents))
        counted = {}
        for rule in rules:
            certified = certified_positions(rule, columns, shape) if rule in thresholds else (nowhere, nowhere)
            counted[rule.id] = (proposed, np.where(proposed, rule.accept(columns), 0.0), *certified)
        for axis, column in AXES.items():
            size = len(edges[axis]) + 1
            cell = document * size + np.searchsorted(edges[axis], columns[column], side="right")
            for name, each in counted.items():
                counts = [np.bincount(cell, values, documents * size) for values in each]
                parts.setdefault((name, axis), []).append(np.stack(counts, axis=-1).reshape(documents, size, 4))
    return {key: np.concatenate(counts) for key, counts in parts.items()}


def deciles(part: LogPart, rules: Sequence[str], confidence: float) -> tuple[Decile, ...]:
    """Build the tenths of all positions of every draft under some rules; none without a complete shard or a log."""
    run = part.run
    if not run.has_log or not run.shards:
        return ()
    texts = over_domains(part.documents.groups)
    return tuple(
        Decile(
            draft=draft,
            rule=rule,
            continuation=text.continuation,
            sampling=text.sampling,
            on_policy=text.on_policy,
            axis=axis,
            place=place,
            low=low,
            high=high,
            positions=int(proposed[text.rows].sum()),
            accepted=text.share(accepted, proposed, confidence),
            certified=text.share(certified, judged, confidence),
        )
        for draft in run.manifest.drafts
        for (rule, axis), counts in decile_counts(run, draft, rules_of(rules), part.edges).items()
        for text in texts
        for place, (low, high) in enumerate(itertools.pairwise([None, *map(float, part.edges[axis]), None]), 1)
        for proposed, accepted, judged, certified in [counts[:, place - 1].T]
    )


def extremes(
    pools: Sequence[tuple[DraftPool, int]], times: Mapping[str, StepTimes], documents: Documents
) -> tuple[DocumentResult, ...]:
    """Return the EXTREMES documents of every draft and rule at either end, the slowest first; all of them if they are
    few.

    By speedup, or by tokens per round if the draft has no step times. Texts of fewer than SHORTEST tokens are left out.
    `pools`: each with the gamma that is best for it; `times`: by draft.
    """
    by_rule: dict[tuple[str, str], list[DocumentResult]] = {}
    for item, gamma in pools:
        either_end = _ends(item, gamma, times.get(item.draft), documents)
        by_rule.setdefault((item.draft, item.rule.id), []).extend(either_end)
    chosen: list[DocumentResult] = []
    for ends in by_rule.values():
        ends.sort(key=lambda item: item.tokens_per_round if item.speedup is None else item.speedup)
        chosen += ends if len(ends) <= 2 * EXTREMES else [*ends[:EXTREMES], *ends[-EXTREMES:]]
    return tuple(chosen)


def _ends(item: DraftPool, gamma: int, times: StepTimes | None, documents: Documents) -> Iterator[DocumentResult]:
    """Yield the documents of one pool that can be among those at either end."""
    pool, counts = item.pool, item.pool.counts(gamma)
    eligible = np.flatnonzero((pool["positions"] >= SHORTEST) & (counts.rounds > 0))
    tokens = counts.tokens / np.maximum(counts.rounds, 1e-300)
    spent = time_spent(counts, times.mixed([counts])) if times is not None else None
    speeds = counts.tokens / np.maximum(spent, 1e-300) if spent is not None else None
    order = eligible[np.argsort((tokens if speeds is None else speeds)[eligible], kind="stable")]
    if len(order) > 2 * EXTREMES:
        order = np.concatenate([order[:EXTREMES], order[-EXTREMES:]])
    rows = np.searchsorted(documents.numbers, pool["document"])
    for place in order:
        proposals = float(pool["proposals"][place])
        about = {name: documents.table[name][int(rows[place])].as_py() for name in ("source", "source_row", "prompt_hash")}
        yield DocumentResult(
            domain=item.domain,
            draft=item.draft,
            rule=item.rule.id,
            gamma=gamma,
            document=int(pool["document"][place]),
            **about,
            tokens=int(pool["positions"][place]),
            alpha=float(pool["accepted"][place]) / proposals if proposals > 0 else None,
            tokens_per_round=float(tokens[place]),
            speedup=float(speeds[place]) if speeds is not None else None,
        )
