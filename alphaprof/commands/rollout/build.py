"""Rollouts: what decoding by a rule gave, for each kind of text, draft, rule and gamma; and their text (rich)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from alphaprof.commands.validate.build import by_depth
from alphaprof.costs.speedup import free_draft, speedup
from alphaprof.log.manifest import ModelFacts
from alphaprof.render.tables import named_table, plain, show
from alphaprof.render.wording import text_name
from alphaprof.report import format as fmt
from alphaprof.report.speeds import tokens_interval
from alphaprof.rules import GREEDY, parse_rule
from alphaprof.stats.estimate import Array, Interval, by_cluster, distinct, mean_interval, pooled_share, ratio
from alphaprof.stats.paired import mean_difference
from alphaprof.totals.documents import Documents, TextGroup
from alphaprof.totals.replay import RoundCounts

MOST = 2  # ways that the answer names
SAME = -1  # in place of the place where a text departs: it does not


@dataclass(frozen=True)
class Rolled:
    """Documents decoded in one way: with a draft by a rule at one gamma, or plainly ("", "", 0).

    `rows` [texts]: which documents. Of each text: its `tokens`, `rounds`, the sum of its tokens' `regret` in nats (see
    `speculative.Decoded`), whether it `ended` by itself, and the place of the first token that plain decoding does not have
    there (`departs`; `SAME`). `drafted`, `tested`, `accepted` [texts, gamma]: see `depth_counts`.
    """

    draft: str
    rule: str
    gamma: int
    rows: Array
    tokens: Array
    rounds: Array
    drafted: Array
    tested: Array
    accepted: Array
    regret: Array
    ended: Array
    departs: Array


@dataclass(frozen=True)
class Rollouts:
    """Documents decoded plainly and by rules. `documents`: their rows, as a run's documents have them; `foreign`:
    documents that are left out, because the target does not write their text.
    """

    target: ModelFacts
    documents: pa.Table
    plain: Rolled
    ways: tuple[Rolled, ...]
    foreign: int


def depth_counts(tokens: int, drafted: Array, accepted: Array, gamma: int) -> tuple[Array, Array, Array]:
    """Rounds of a text [rounds] that drafted, tested and accepted a token at depth d = 1..gamma, each [gamma].

    A draft is tested where all earlier ones of its round were accepted, and where the text of `tokens` tokens has not ended
    before its place.
    """
    starts = np.cumsum(accepted + 1) - accepted  # of each round; the first token of a text is that of the prefill
    tested = np.minimum(np.minimum(drafted, accepted + 1), tokens - starts)
    return by_depth(drafted, gamma), by_depth(tested, gamma), by_depth(accepted, gamma)


def departure(text: Array, own: Array) -> int:
    """The first place at which a text is not the other one; `SAME` where there is none."""
    shared = min(len(text), len(own))
    differing = np.flatnonzero(text[:shared] != own[:shared])
    if len(differing):
        return int(differing[0])
    return SAME if len(text) == len(own) else shared


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
class RolloutWay:
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
class RolloutText:
    """One domain and kind of text: the target's own, and what became of it. `clusters`: independent documents."""

    domain: str
    continuation: str
    sampling: dict[str, float] | None
    documents: int
    clusters: int
    own: OwnText  # plain decoding
    ways: tuple[RolloutWay, ...]  # one for each draft, rule and gamma


@dataclass(frozen=True)
class Rollout:
    """Everything that was decoded. `foreign`: documents whose text the target did not write, left out. `exact`: the target
    runs in float32, so that a rule that keeps its greedy text should keep every token.
    """

    format: ClassVar[str] = "alphaprof-rollout"
    version: ClassVar[str] = "1.0"

    target: str
    device: str
    dtype: str
    exact: bool
    confidence: float
    documents: int
    foreign: int
    texts: tuple[RolloutText, ...]

    def terminal(self, console: Console) -> None:
        """Prints what the rules gain and give up, a table for each draft, and what its numbers are."""
        for line in _answer(self):
            console.print(plain(line), highlight=False)
        console.print()
        console.print(plain(f"{self.target} in {self.dtype} on {self.device}, batch 1"))
        foreign = f"; left out: {fmt.count(self.foreign)} with text that the target did not write" if self.foreign else ""
        console.print(f"{fmt.many(self.documents, 'document')}{foreign}", highlight=False)
        console.print()
        for draft in dict.fromkeys(way.draft for text in self.texts for way in text.ways):
            show(_table(self, draft), f"draft {draft}", console)
        for line in _notes(self):
            console.print(line, style="dim", highlight=False, markup=False)


def build_rollout(rolled: Rollouts, confidence: float) -> Rollout:
    """Estimates with intervals over independent documents, for each kind of text apart."""
    texts = []
    for group in Documents.of(rolled.documents).groups:
        own = _part(rolled.plain, group.rows)
        text = RolloutText(
            domain=group.domain,
            continuation=group.continuation,
            sampling=group.sampling,
            documents=len(group.rows),
            clusters=distinct(group.cluster),
            own=OwnText(_regret(group, own, False, confidence), float(own.tokens.mean()), int(own.ended.sum())),
            ways=tuple(
                _way(group, _part(way, group.rows), own, confidence)
                for way in rolled.ways
                if group.policy in parse_rule(way.rule).rule.policies
            ),
        )
        texts.append(text)
    facts = rolled.target
    return Rollout(
        target=facts.reference,
        device=facts.device,
        dtype=facts.precision,
        exact=facts.is_exact,
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


def _way(group: TextGroup, way: Rolled, own: Rolled, confidence: float) -> RolloutWay:
    lossy, every = parse_rule(way.rule).rule.lossy, np.ones(len(way.tokens))
    counts = RoundCounts(way.tokens - 1, way.rounds, way.drafted, way.accepted, 0 * every, group.cluster)
    drafted, tested, accepted = (depths.sum(0) for depths in (way.drafted, way.tested, way.accepted))
    departs = way.departs[way.departs != SAME]
    greedy = group.policy == GREEDY
    return RolloutWay(
        draft=way.draft,
        rule=way.rule,
        lossy=lossy,
        gamma=way.gamma,
        tested=int(tested.sum()),
        rounds=int(way.rounds.sum()),
        alpha=pooled_share(group.cluster, way.accepted.sum(1), way.tested.sum(1), confidence),
        tokens_per_round=tokens_interval(speedup([counts], [1.0], free_draft(way.gamma)), way.gamma, confidence),
        acceptance_length=float(1 + accepted.sum() / drafted[0]) if drafted[0] else None,
        conditional=tuple(float(a / t) if t else None for a, t in zip(accepted, tested, strict=True)),
        regret=_regret(group, way, lossy, confidence),
        excess=mean_difference(_summed(group, own), _summed(group, way), confidence) if lossy else None,
        departed=pooled_share(group.cluster, way.departs != SAME, every, confidence) if greedy else None,
        departed_at=float(np.median(departs)) if greedy and len(departs) else None,
        mean_tokens=float(way.tokens.mean()),
        ended=int(way.ended.sum()),
    )


def _regret(group: TextGroup, way: Rolled, lossy: bool, confidence: float) -> Interval:
    """Mean regret per token. Greedy text of the target's own has none by definition, whatever the sample."""
    mean = ratio(*_summed(group, way))
    if group.policy == GREEDY and not lossy:
        return Interval(mean.value, mean.value, mean.value)
    return mean_interval(mean, confidence)


def _summed(group: TextGroup, way: Rolled) -> tuple[Array, Array]:
    """Regret and tokens by independent document."""
    regret, tokens = by_cluster(group.cluster, way.regret, way.tokens)
    return regret, tokens


def _answer(rollout: Rollout) -> Iterator[str]:
    """Yields the ways with the most tokens per round, what their texts give up, and what that is not."""
    rows = [(text, way) for text in rollout.texts for way in text.ways if way.tokens_per_round is not None]
    rows.sort(key=lambda row: -row[1].tokens_per_round.value if row[1].tokens_per_round is not None else 0.0)
    if not rows:
        yield "NOTHING WAS DECODED WITH A DRAFT: no rule belongs to this text, or no text is longer than one token"
    for text, way in rows[:MOST]:
        emits = f"{fmt.interval(way.tokens_per_round)} tokens per round at gamma {way.gamma}"
        lost = "keeps the target's law" if way.excess is None else f"{fmt.difference(way.excess, 3)} nats regret per token"
        where = f"{text_name(text, rollout.texts)}, {fmt.documents(text.documents, text.clusters)} documents"
        yield f"{fmt.short(way.draft)} by {way.rule}: {emits}; {lost} ({where})"
    if len(rows) > MOST:
        yield f"{fmt.many(len(rows) - MOST, 'more row')} with fewer tokens per round: in the tables"
    yield "A lossy rule writes its own text, not the target's: its worth is not measured here, and no verdict follows."
    yield "next: judge such texts by your own task; decoding is faster if a round costs fewer decode steps than its tokens"


def _table(rollout: Rollout, draft: str) -> Table:
    columns = ("docs", "rule", "gamma", "alpha", "tokens/round", "regret", "excess", "departed", "length")
    table = named_table("domain", *columns, left=("rule",), wrapped=("rule",))
    rows = [(text, way) for text in rollout.texts for way in text.ways if way.draft == draft]
    for text, way in rows:
        departed = fmt.NOTHING if way.departed is None else fmt.percent(way.departed.value)
        table.add_row(
            plain(text_name(text, rollout.texts)),
            fmt.documents(text.documents, text.clusters),
            way.rule,
            str(way.gamma),
            fmt.share_with_interval(way.alpha),
            fmt.interval(way.tokens_per_round),
            f"{fmt.number(way.regret.value, 3)} | {fmt.number(text.own.regret.value, 3)}",
            fmt.difference(way.excess, 3),
            departed if way.departed_at is None else f"{departed} at {way.departed_at:g}",
            f"{way.mean_tokens:.0f} | {text.own.mean_tokens:.0f}",
        )
    return table


def _notes(rollout: Rollout) -> Iterator[str]:
    """What the columns are."""
    yield f"[a, b]: {fmt.level(rollout.confidence)} interval over documents."
    yield "alpha: accepted / tested drafts along the rule's own text. Tested: all earlier ones of the round were accepted,"
    yield "and the text had not ended; gamma matters only to which positions these are. A report's one-step alpha is over"
    yield "all positions of the target's own text."
    yield "tokens/round: decoding is faster on an engine where a round costs less than that many plain decode steps."
    yield "regret: mean log p(top) - log p(token) in nats per token, plain softmax: the rule's text | the target's own;"
    yield "excess: their difference, paired."
    yield "departed: texts that are not the target's own, and the median place of their first other token."
    yield "length: mean tokens of the rule's texts | of the target's own."
    if not rollout.exact:
        yield (
            f"In {rollout.dtype} near-ties fall either way: some texts depart for that reason alone; --rule strict "
            "shows how many."
        )
    if any(text.sampling is not None for text in rollout.texts):
        yield "On sampled text another draw is no departure."
