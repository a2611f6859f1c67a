"""Certificates of a run: where acceptance was certain, what was accepted without that, what divergences promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.log.store import Run
from alphaprof.report.model import Certificate, Certificates, LosslessBounds
from alphaprof.rules import GREEDY, BoundRule, rules_of
from alphaprof.theory.bounds import beta_bound, budget, mean_beta_bound
from alphaprof.totals.count import READ, Shape
from alphaprof.totals.documents import TextGroup
from alphaprof.totals.log_sample import LogPart, shards

Array = np.ndarray[Any, Any]
SLACK = 1e-5  # nats that rounding of float32 sums over a vocabulary can take from a divergence


@dataclass(frozen=True)
class Tally:
    """One rule, summed per document: `judged` positions, those of them that are `certified`, `accepted`, both, and the
    sum of their `divergence` [documents]; `thresholds` [judged positions] in corpus order.
    """

    judged: Array
    certified: Array
    accepted: Array
    both: Array
    divergence: Array
    thresholds: Array


@dataclass(frozen=True)
class LosslessTally:
    """Sums per document over positions with a divergence: their number, beta = sum min(p, q), the best bound of it that
    the divergence gives (`sharp`), and the divergence itself, the smaller one of KL(p||q) and KL(q||p); all [documents].
    """

    positions: Array
    beta: Array
    sharp: Array
    divergence: Array


def tallies(run: Run, draft: str) -> dict[str, Tally]:
    """Counts what the log says of every rule that it holds thresholds of, by id of the rule."""
    rules = rules_of(list(run.log_rules.certified))
    parts: dict[str, list[Tally]] = {rule.id: [] for rule in rules}
    for columns, shape in shards(run, draft, [*READ, *columns_of_certificates(rules)]):
        for rule in rules:
            parts[rule.id].append(_tally(rule, columns, shape))
    return {rule: _joined(tallied) for rule, tallied in parts.items() if tallied}


def columns_of_certificates(rules: Sequence[BoundRule]) -> list[str]:
    """Names the columns of the log that certificates of these rules read beside READ."""
    return ["kl_target_draft", *(f"threshold_{rule.id}" for rule in rules)]


def inexact_share(run: Run) -> float:
    """Share of positions where the threshold of some rule is only a lower bound."""
    draft = next(iter(run.manifest.drafts))
    parts = [columns["thresholds_exact"] for columns, _ in shards(run, draft, ["thresholds_exact"])]
    return float(1 - np.concatenate(parts).mean())


def _tally(rule: BoundRule, columns: dict[str, Array], shape: Shape) -> Tally:
    judged, certified = certified_positions(rule, columns, shape)
    # A certificate is about the target's top token of the scoring pass, whatever rounding made the text's token.
    accepted = judged & (rule.accept(columns | {"greedy": np.zeros(len(judged), dtype=bool)}) > 0)
    return Tally(
        judged=shape.sums(judged),
        certified=shape.sums(certified),
        accepted=shape.sums(accepted),
        both=shape.sums(certified & accepted),
        divergence=_sums(np.maximum(columns["kl_target_draft"], 0), judged, shape),
        thresholds=columns[f"threshold_{rule.id}"][judged],
    )


def certified_positions(rule: BoundRule, columns: Mapping[str, Array], shape: Shape) -> tuple[Array, Array]:
    """Judges every position by its certificate: which positions have one, and at which of these acceptance is certain; both
    [positions]. `columns`: READ and `columns_of_certificates`.
    """
    judged = judged_positions(rule, columns, shape)
    return judged, judged & (np.maximum(columns["kl_target_draft"], 0) + SLACK < columns[f"threshold_{rule.id}"])


def judged_positions(rule: BoundRule, columns: Mapping[str, Array], shape: Shape) -> Array:
    """Where the draft proposes something and has a distribution, [positions]. What a tree accepts is known where the token
    that was emitted is the target's top one, and all there is to greedy text but for near-ties.
    """
    judged = (columns["proposed"] > 0) & ~np.isnan(columns["kl_target_draft"])
    if rule.rule.by_token:
        judged &= (columns["token"] == columns["target_top"]) & shape.each(shape.policy == GREEDY)
    return np.asarray(judged)


def lossless_tally(run: Run, draft: str) -> LosslessTally | None:
    """What divergences promise about lossless sampling, and what it is; None for a draft without a distribution."""
    parts = []
    for columns, shape in shards(run, draft, ["overlap", "kl_target_draft", "kl_draft_target"]):
        known = ~np.isnan(columns["overlap"])
        divergence = np.maximum(0, np.minimum(columns["kl_target_draft"], columns["kl_draft_target"]))
        values = [known, columns["overlap"], beta_bound(divergence)]
        parts.append([_sums(value, known, shape) for value in (*values, divergence)])
    joined = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
    return LosslessTally(*joined) if joined and joined[0].any() else None


def _sums(values: Array, chosen: Array, shape: Shape) -> Array:
    """Sums [documents] of chosen values, infinite ones included."""
    chosen_values = np.where(chosen, values, 0.0)
    finite = np.isfinite(chosen_values)
    infinite = shape.sums(~finite) > 0
    return np.where(infinite, np.inf, shape.sums(np.where(finite, chosen_values, 0.0)))


def _joined(parts: Sequence[Tally]) -> Tally:
    """The tallies of several shards as one."""
    names = ("judged", "certified", "accepted", "both", "divergence", "thresholds")
    return Tally(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def build_certificates(part: LogPart, confidence: float) -> Certificates | None:
    """What the log of a run says; None where it holds no thresholds, or no complete shard yet."""
    run, groups = part.run, part.documents.groups
    if not run.log_rules.certified or not run.shards or not run.has_log:
        return None
    certificates: list[Certificate] = []
    bounds: list[LosslessBounds] = []
    for draft in run.manifest.drafts:
        lossless = lossless_tally(run, draft)
        if lossless is None:  # no distribution, hence no divergence
            continue
        for rule, tally in tallies(run, draft).items():
            for text in groups:
                certificates += _certificate(text, draft, rule, tally, confidence)
        bounds += [item for text in groups for item in _lossless(text, draft, lossless, confidence)]
    unknown = tuple(rule for rule in run.rules if rule not in run.log_rules.certified)
    return Certificates(tuple(certificates), tuple(bounds), inexact_share(run), unknown)


def _certificate(text: TextGroup, draft: str, rule: str, tally: Tally, confidence: float) -> Iterator[Certificate]:
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


def _lossless(text: TextGroup, draft: str, tally: LosslessTally, confidence: float) -> Iterator[LosslessBounds]:
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
