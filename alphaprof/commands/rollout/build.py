"""Rollouts: what decoding by a rule gave, for each kind of text, draft, rule and gamma. Shown by `rollout_text.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.commands.rollout.decodings import SAME, Rolled, Rollouts
from alphaprof.commands.validate.build import EXACT_DTYPE
from alphaprof.costs.speedup import free_draft, speedup
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import GREEDY, parse_rule
from alphaprof.stats.estimate import Estimate, Interval, by_cluster, distinct, mean_interval, ratio, share
from alphaprof.stats.paired import mean_difference
from alphaprof.totals.documents import Documents
from alphaprof.totals.replay import RoundCounts

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class OwnText:
    """What the target writes by itself.

    `regret`: mean over tokens of log p(top) - log p(token), p the target's plain softmax, in nats; 0 on greedy text.
    `ended`: texts that end by themselves, the others at max_new_tokens.
    """

    regret: Interval
    mean_tokens: float  # mean length of the texts
    ended: int


@dataclass(frozen=True)
class Way:
    """One draft by one rule at one gamma, along the texts that this writes.

    `alpha`: accepted / `tested` drafts, those reached before their round broke off or the text ended; None where there was
    none. `tokens_per_round`, `acceptance_length`: as in a report. `conditional[d-1]`: the same as alpha at depth d alone.
    `regret`: as of the target's own text; `excess`: less that one, None for a rule that keeps the target's law. `departed`:
    share of texts that are not the target's own, and `departed_at` the median place of their first other token; None on
    sampled text, where another draw is no departure.
    """

    draft: str
    rule: str
    lossy: bool
    gamma: int
    tested: int  # drafts that were reached before their round broke off or the text ended
    rounds: int
    alpha: Interval | None
    tokens_per_round: Interval | None
    acceptance_length: float | None
    conditional: tuple[float | None, ...]
    regret: Interval
    excess: Interval | None
    departed: Interval | None
    departed_at: float | None  # median place, from 0, of the first other token
    mean_tokens: float  # mean length of the texts
    ended: int  # texts that end by themselves


@dataclass(frozen=True)
class Text:
    """One domain and kind of text: the target's own, and what became of it. `clusters`: independent documents."""

    domain: str
    continuation: str
    sampling: dict[str, float] | None
    documents: int
    clusters: int
    own: OwnText  # plain decoding
    ways: tuple[Way, ...]  # one for each draft, rule and gamma


@dataclass(frozen=True)
class Rollout:
    """Everything that was decoded. `foreign`: documents whose text the target did not write, left out. `exact`: the target
    runs in float32, so that a rule that keeps its greedy text should keep every token.
    """

    target: str
    device: str
    dtype: str
    exact: bool
    confidence: float
    documents: int
    foreign: int
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class _Group:
    """Documents of one kind of text: their rows, the independent unit of each, how their tokens are chosen."""

    rows: Array
    cluster: Array
    policy: str
    confidence: float


def build_rollout(rolled: Rollouts, confidence: float) -> Rollout:
    """Estimates with intervals over independent documents, for each kind of text apart."""
    documents = Documents.of(rolled.documents)
    texts = []
    for item in documents.groups:
        rows, policy = item.rows, item.policy
        group = _Group(rows, documents.units.codes[rows], policy, confidence)
        own = _part(rolled.plain, rows)
        ways = [_way(group, _part(way, rows), own) for way in rolled.ways if policy in parse_rule(way.rule).rule.policies]
        texts.append(
            Text(
                domain=item.domain,
                continuation=item.continuation,
                sampling=item.sampling,
                documents=len(rows),
                clusters=distinct(group.cluster),
                own=OwnText(_regret(group, own, lossy=False), float(own.tokens.mean()), int(own.ended.sum())),
                ways=tuple(ways),
            )
        )
    facts = rolled.target
    return Rollout(
        target=facts.reference,
        device=facts.device,
        dtype=facts.dtype,
        exact=facts.dtype == EXACT_DTYPE,
        confidence=confidence,
        documents=rolled.documents.num_rows,
        foreign=rolled.foreign,
        texts=tuple(texts),
    )


def _part(way: Rolled, rows: Array) -> Rolled:
    """The texts of some documents, all of which were decoded in this way."""
    places = np.searchsorted(way.rows, rows)
    arrays = {name: value[places] for name, value in vars(way).items() if isinstance(value, np.ndarray)}
    return Rolled(**vars(way) | arrays)


def _way(group: _Group, way: Rolled, own: Rolled) -> Way:
    lossy = parse_rule(way.rule).rule.lossy
    nothing = np.zeros(len(way.tokens))
    counts = RoundCounts(way.tokens - 1, way.rounds, way.drafted, way.accepted[:, -1], nothing, group.cluster)
    drafted, tested, accepted = (depths.sum(0) for depths in (way.drafted, way.tested, way.accepted))
    departs = way.departs[way.departs != SAME]
    greedy = group.policy == GREEDY
    return Way(
        draft=way.draft,
        rule=way.rule,
        lossy=lossy,
        gamma=way.gamma,
        tested=int(tested.sum()),
        rounds=int(way.rounds.sum()),
        alpha=share(group.cluster, way.accepted.sum(1), way.tested.sum(1), group.confidence),
        tokens_per_round=tokens_interval(speedup([counts], [1.0], free_draft(way.gamma)), way.gamma, group.confidence),
        acceptance_length=float(1 + accepted.sum() / drafted[0]) if drafted[0] else None,
        conditional=tuple(float(a / t) if t else None for a, t in zip(accepted, tested, strict=True)),
        regret=_regret(group, way, lossy),
        excess=_excess(group, way, own) if lossy else None,
        departed=share(group.cluster, way.departs != SAME, np.ones(len(way.departs)), group.confidence) if greedy else None,
        departed_at=float(np.median(departs)) if greedy and len(departs) else None,
        mean_tokens=float(way.tokens.mean()),
        ended=int(way.ended.sum()),
    )


def _regret(group: _Group, way: Rolled, lossy: bool) -> Interval:
    """Mean regret per token. Greedy text of the target's own has none by definition, whatever the sample."""
    found = ratio(*by_cluster(group.cluster, way.regret, way.tokens))
    if group.policy == GREEDY and not lossy:
        return Interval(found.value, found.value, found.value)
    return _interval(mean_interval(found, group.confidence))


def _excess(group: _Group, way: Rolled, own: Rolled) -> Interval:
    sides = [by_cluster(group.cluster, side.regret, side.tokens) for side in (own, way)]
    return _interval(mean_difference((sides[0][0], sides[0][1]), (sides[1][0], sides[1][1]), group.confidence))


def _interval(estimate: Estimate) -> Interval:
    return Interval(estimate.value, estimate.low, estimate.high)
