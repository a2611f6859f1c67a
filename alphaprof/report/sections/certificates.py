"""Certificates of a run: where acceptance was certain, what was accepted without that, what divergences promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.rules import GREEDY, BoundRule, rules_of
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval
from alphaprof.theory.certificates import beta_bound, budget
from alphaprof.totals.count import READ, Shape
from alphaprof.totals.documents import TextGroup
from alphaprof.totals.log_sample import LogPart, shards

Array = np.ndarray[Any, Any]
SLACK = 1e-5  # nats that rounding of float32 sums over a vocabulary can take from a divergence


@dataclass(frozen=True)
class Certificate:
    """One domain, draft and rule: where the divergence of the draft made acceptance certain (see `docs/theory.md`)."""

    domain: str
    draft: str
    rule: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    documents: int
    positions: int  # judged: with a proposal of a distribution (a tree: on the target's own greedy text)
    certified: Interval  # share of them whose KL(p||q) is below the threshold
    accepted: Interval  # share that the rule accepts
    accepted_not_certified: Interval  # share that was accepted without having to be
    contradicted: int  # certified and yet rejected: never, unless something is wrong
    mean_divergence: float  # mean KL(p||q), nats; infinite if q gives 0 to what p can emit
    rejected_at_most: float  # largest share that any draft with this mean divergence can have rejected


@dataclass(frozen=True)
class LosslessBounds:
    """Lossless sampling: beta, and lower bounds of it from the smaller KL of each position (but for `from_mean`)."""

    domain: str
    draft: str
    continuation: str
    sampling: dict[str, float] | None
    on_policy: bool  # the target produced this text
    documents: int
    positions: int
    beta: Interval  # mean of sum min(p, q)
    sharp: Interval  # the best bound that a KL allows (Fedotov, Harremoes, Topsoe)
    mean_divergence: float  # mean over positions of the smaller KL, nats
    from_mean: float  # the best bound where only the mean of that KL is known


@dataclass(frozen=True)
class Certificates:
    """What thresholds say about the drafts of a run. `inexact`: share of positions where one of them is a lower bound;
    `unknown`: rules of the run for which no threshold is known.
    """

    certificates: tuple[Certificate, ...]  # by domain, draft and rule
    lossless: tuple[LosslessBounds, ...]  # by domain and draft: what KL promises of lossless sampling
    inexact: float
    unknown: tuple[str, ...]


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
    """Count what the log says of every rule that it holds thresholds of, by id of the rule."""
    rules = rules_of(list(run.log_rules.certified))
    parts: dict[str, list[Tally]] = {rule.id: [] for rule in rules}
    for columns, shape in shards(run, draft, [*READ, *columns_of_certificates(rules)]):
        for rule in rules:
            parts[rule.id].append(_tally(rule, columns, shape))
    return {
        rule: Tally(*map(np.concatenate, zip(*(vars(part).values() for part in shards_of_rule), strict=True)))
        for rule, shards_of_rule in parts.items()
        if shards_of_rule
    }


def columns_of_certificates(rules: Sequence[BoundRule]) -> list[str]:
    """Name the columns of the log that certificates of these rules read beside READ."""
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
    """Return which positions have a certificate, where a draft proposes from a distribution, and at which acceptance is
    certain; both [positions]. What a tree accepts is known where the target's top token was emitted, on greedy text.
    """
    judged = (columns["proposed"] > 0) & ~np.isnan(columns["kl_target_draft"])
    if rule.rule.by_token:
        judged &= (columns["token"] == columns["target_top"]) & shape.each(shape.policy == GREEDY)
    return judged, judged & (np.maximum(columns["kl_target_draft"], 0) + SLACK < columns[f"threshold_{rule.id}"])


def lossless_tally(run: Run, draft: str) -> LosslessTally | None:
    """Return what divergences promise about lossless sampling, and what it is; None for a draft without a distribution."""
    parts = []
    for columns, shape in shards(run, draft, ["overlap", "kl_target_draft", "kl_draft_target"]):
        known = ~np.isnan(columns["overlap"])
        divergence = np.maximum(0, np.minimum(columns["kl_target_draft"], columns["kl_draft_target"]))
        values = [known, columns["overlap"], beta_bound(divergence)]
        parts.append([_sums(value, known, shape) for value in (*values, divergence)])
    joined = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
    return LosslessTally(*joined) if joined and joined[0].any() else None


def _sums(values: Array, chosen: Array, shape: Shape) -> Array:
    """Return sum [documents] of chosen values, infinite ones included."""
    chosen_values = np.where(chosen, values, 0.0)
    finite = np.isfinite(chosen_values)
    infinite = shape.sums(~finite) > 0
    return np.where(infinite, np.inf, shape.sums(np.where(finite, chosen_values, 0.0)))


def build_certificates(part: LogPart, confidence: float) -> Certificates | None:
    """Return what the log of a run says; None if it holds no thresholds, or no complete shard yet."""
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
            each = (_certificate(text, draft, rule, tally, confidence) for text in groups)
            certificates += [certificate for certificate in each if certificate is not None]
        promised = (_lossless_bounds(text, draft, lossless, confidence) for text in groups)
        bounds += [bound for bound in promised if bound is not None]
    unknown = tuple(rule for rule in run.rules if rule not in run.log_rules.certified)
    return Certificates(tuple(certificates), tuple(bounds), inexact_share(run), unknown)


def _certificate(text: TextGroup, draft: str, rule: str, tally: Tally, confidence: float) -> Certificate | None:
    """Return one domain's certificate under one rule; None if nothing was judged."""
    shares = (tally.certified, tally.accepted, tally.accepted - tally.both)
    certified, accepted, beyond = (text.share(values, tally.judged, confidence) for values in shares)
    if certified is None or accepted is None or beyond is None:
        return None
    mine = np.isin(np.arange(len(tally.judged)), text.rows)
    thresholds = tally.thresholds[np.repeat(mine, tally.judged.astype(np.int64))]
    facts = _about_text(text, draft, tally.judged, tally.divergence)
    return Certificate(
        rule=rule,
        certified=certified,
        accepted=accepted,
        accepted_not_certified=beyond,
        contradicted=int((tally.certified - tally.both)[text.rows].sum()),
        rejected_at_most=budget(thresholds, facts["mean_divergence"]),
        **facts,
    )


def _lossless_bounds(text: TextGroup, draft: str, tally: LosslessTally, confidence: float) -> LosslessBounds | None:
    beta, sharp = (text.share(values, tally.positions, confidence) for values in (tally.beta, tally.sharp))
    if beta is None or sharp is None:
        return None
    facts = _about_text(text, draft, tally.positions, tally.divergence)
    return LosslessBounds(beta=beta, sharp=sharp, from_mean=float(beta_bound(facts["mean_divergence"])), **facts)


def _about_text(text: TextGroup, draft: str, counts: Array, divergence: Array) -> dict[str, Any]:
    """Return what certificates and bounds say of their text; `counts`, `divergence` [documents]: positions, and sums over
    them.
    """
    positions = counts[text.rows].sum()
    return {
        "domain": text.domain,
        "draft": draft,
        "continuation": text.continuation,
        "sampling": text.sampling,
        "on_policy": text.on_policy,
        "documents": text.documents(counts),
        "positions": int(positions),
        "mean_divergence": float(divergence[text.rows].sum() / positions),
    }
