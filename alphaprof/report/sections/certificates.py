"""The certificates of a run: what its thresholds say about its drafts, with intervals over documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from alphaprof.report.model import Certificate, Certificates, Decile, LosslessBounds
from alphaprof.theory.bounds import budget, mean_beta_bound
from alphaprof.theory.certified import LosslessTally, Tally, inexact_share, lossless_tally, tallies
from alphaprof.totals.log_sample import LogPart
from alphaprof.totals.texts import Text, kinds

Array = np.ndarray[Any, Any]


def certificates(part: LogPart, confidence: float) -> Certificates | None:
    """What the log of a run says; None where it holds no thresholds, or no complete shard yet."""
    run, every = part.run, part.texts
    if not run.log_rules.certified or not run.shards or not run.has_log:
        return None
    found: list[Certificate] = []
    deciles: list[Decile] = []
    bounds: list[LosslessBounds] = []
    for draft in run.manifest.drafts:
        lossless = lossless_tally(run, draft)
        if lossless is None:  # no distribution, hence no divergence
            continue
        for rule, tally in tallies(run, draft, part.edges).items():
            for text in every:
                found += _certificate(text, draft, rule, tally, confidence)
            for text in kinds(every):
                for axis, edges in part.edges.items():
                    deciles += _deciles(text, (draft, rule, axis), tally.by[axis], edges, confidence)
        bounds += [item for text in every for item in _lossless(text, draft, lossless, confidence)]
    return Certificates(tuple(found), tuple(deciles), tuple(bounds), inexact_share(run))


def _certificate(text: Text, draft: str, rule: str, tally: Tally, confidence: float) -> Iterator[Certificate]:
    """One domain's certificate under one rule; nothing where nothing was judged."""
    certified = text.share(tally.certified, tally.judged, confidence)
    accepted = text.share(tally.accepted, tally.judged, confidence)
    beyond = text.share(tally.accepted - tally.both, tally.judged, confidence)
    if certified is None or accepted is None or beyond is None:
        return
    positions = tally.judged[text.rows].sum()
    mean = float(tally.divergence[text.rows].sum() / positions)
    mine = np.zeros(len(tally.judged), dtype=bool)
    mine[text.rows] = True
    thresholds = tally.thresholds[np.repeat(mine, tally.judged.astype(np.int64))]
    yield Certificate(
        domain=text.domain,
        draft=draft,
        rule=rule,
        continuation=text.continuation,
        sampling=text.sampling,
        on_policy=text.on_policy,
        documents=text.documents(tally.judged),
        positions=int(positions),
        certified=certified,
        accepted=accepted,
        accepted_not_certified=beyond,
        contradicted=int((tally.certified - tally.both)[text.rows].sum()),
        mean_divergence=mean,
        rejected_at_most=budget(thresholds, mean),
    )


def _deciles(text: Text, key: tuple[str, str, str], counts: Array, edges: Array, confidence: float) -> Iterator[Decile]:
    """The tenths of one draft, rule and axis; `counts` [documents, bins, 3] as in `Tally.by`."""
    draft, rule, axis = key
    bounds = [None, *map(float, edges), None]
    for place in range(counts.shape[1]):
        judged, certified, accepted = counts[:, place].T
        yield Decile(
            draft=draft,
            rule=rule,
            continuation=text.continuation,
            sampling=text.sampling,
            on_policy=text.on_policy,
            axis=axis,
            place=place + 1,
            low=bounds[place],
            high=bounds[place + 1],
            positions=int(judged[text.rows].sum()),
            certified=text.share(certified, judged, confidence),
            accepted=text.share(accepted, judged, confidence),
        )


def _lossless(text: Text, draft: str, tally: LosslessTally, confidence: float) -> Iterator[LosslessBounds]:
    beta, sharp = (text.share(values, tally.positions, confidence) for values in (tally.beta, tally.sharp))
    if beta is None or sharp is None:
        return
    positions = tally.positions[text.rows].sum()
    mean = float(tally.divergence[text.rows].sum() / positions)
    yield LosslessBounds(
        domain=text.domain,
        draft=draft,
        continuation=text.continuation,
        sampling=text.sampling,
        on_policy=text.on_policy,
        documents=text.documents(tally.positions),
        positions=int(positions),
        beta=beta,
        sharp=sharp,
        mean_divergence=mean,
        from_mean=mean_beta_bound(np.array([mean])),
    )
