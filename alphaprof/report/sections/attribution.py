"""Why drafts are rejected, and what it would bring to mend each cause: losses of the log as values of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.costs.speedup import StepTimes, Timing, free_draft, spent_and_base
from alphaprof.log.manifest import DraftFacts
from alphaprof.log.store import Run
from alphaprof.report.model import Attribution, Cause, Result
from alphaprof.report.sections.losses import (
    BEYOND,
    CAUSES,
    DRAFT,
    LOOKUP,
    NO_PROPOSAL,
    RANK,
    SILENT,
    SPECIAL,
    TIE,
    UNCERTAIN,
    WIDTH,
    Losses,
    LossQuestion,
    losses,
    rounds_at,
)
from alphaprof.rules import SAMPLED, BoundRule
from alphaprof.stats.estimate import Interval, pooled_share
from alphaprof.totals.documents import TextGroup
from alphaprof.totals.log_sample import LogPart
from alphaprof.totals.replay import Flavour, RoundCounts, Rounds

Array = np.ndarray[Any, Any]
REMEDIES = {
    NO_PROPOSAL: "a draft that proposes there: one with the target's vocabulary",
    BEYOND: "a draft with a longer context",
    TIE: "none by a better draft: the target itself may go either way; profile in the dtype that is served",
    SPECIAL: "a draft that knows the target's chat template and where texts end",
    LOOKUP: "prompt lookup beside this draft",
    RANK: f"a tree that holds the draft's {WIDTH} most probable tokens; its rounds cost more than these",
    UNCERTAIN: "none by a better draft: the target itself is undecided there",
    DRAFT: "a better draft: another one, or this one trained on the target's own texts",
}
WITHOUT_MODEL = {  # of drafts that run none, and so can but copy
    NO_PROPOSAL: "a draft model where the text so far holds nothing to copy",
    SPECIAL: "none: prompt lookup never proposes the end of a text, and copies other markers from where they occurred",
    DRAFT: "a draft model: what followed there before is not what follows here",
}
BY_CHANCE = "none by a better draft: the target draws another token than its likeliest"
WITHOUT_REMEDY = (TIE, UNCERTAIN)


@dataclass(frozen=True)
class ResultOnText:
    """A result, and the documents that its losses come from."""

    result: Result
    rule: BoundRule
    text: TextGroup


@dataclass(frozen=True)
class Basis:
    """What losses follow from: what is read of the log, how rounds are replayed, step times, and the confidence of
    intervals.
    """

    part: LogPart
    flavour: Flavour
    timing: Timing
    confidence: float


def attribution(basis: Basis, judged: Sequence[ResultOnText]) -> tuple[Attribution, ...]:
    """Attributes what is lost under the rules that verdicts concern, and under chains that keep the text where it is theirs.
    Returns nothing without a position log.
    """
    run, timing = basis.part.run, basis.timing
    if not run.has_log:
        return ()
    chosen = [
        item for item in judged if item.result.verdict is not None or (item.result.on_policy and item.rule.rule.chained)
    ]
    groups: dict[tuple[str, str], list[ResultOnText]] = {}
    for item in chosen:
        groups.setdefault((item.result.draft, item.rule.id), []).append(item)
    jobs = [_job(items, len(basis.part.documents.numbers)) for items in groups.values()]
    found = dict(zip(groups, losses(run, jobs, basis.flavour), strict=True)) if run.shards else {}
    return tuple(
        _attribution(
            item,
            found[item.result.draft, item.rule.id],
            Setting(run, timing.times.get(item.result.draft) if item.rule.rule.timed else None, basis.confidence),
        )
        for item in chosen
    )


def _job(items: Sequence[ResultOnText], documents: int) -> LossQuestion:
    """One draft and rule: the texts of a domain are replayed at its best gamma."""
    gamma = np.zeros(documents, dtype=np.int64)
    for item in items:
        if item.result.gammas and item.result.best_gamma:
            gamma[item.text.rows] = item.result.best_gamma
    return LossQuestion(items[0].result.draft, items[0].rule, gamma)


@dataclass(frozen=True)
class Setting:
    """What a draft's losses are worked out with; `times`: None where its steps were not timed."""

    run: Run
    times: StepTimes | None
    confidence: float


def _attribution(item: ResultOnText, found: Losses, setting: Setting) -> Attribution:
    result, cluster, rows = item.result, item.text.cluster, item.text.rows
    gamma = result.best_gamma if result.gammas else None
    split, positions = scaled(found.split[rows], found.lost[rows], item.rule), found.positions[rows]
    draft = setting.run.manifest.drafts[result.draft]

    def speeds(rounds: Rounds) -> tuple[float | None, float | None]:
        return _speeds(rounds_at(rounds, rows, gamma), cluster, setting.times) if gamma else (None, None)

    causes = []
    for number, name in enumerate(CAUSES):
        part = pooled_share(cluster, split[:, number], positions, setting.confidence)
        if part is not None and part.value > 0:
            causes.append(Cause(name, part, *speeds(found.recovered[number]), _remedy(name, draft, item)))
    tokens, faster = speeds(found.unchanged)
    whole = pooled_share(cluster, found.lost[rows], positions, setting.confidence)
    return Attribution(
        domain=result.domain,
        draft=result.draft,
        rule=result.rule,
        continuation=result.continuation,
        sampling=result.sampling,
        on_policy=result.on_policy,
        documents=len(rows),
        positions=int(positions.sum()),
        lost=whole or Interval(1.0, 0.0, 1.0),
        ceiling=float(found.top[rows].sum() / positions.sum()) if item.rule.rule.at_most_top else None,
        gamma=gamma,
        tokens_per_round=tokens,
        speedup=faster,
        causes=tuple(causes),
        perfect_speedup=speeds(found.perfect)[1],
        best=_best([cause for cause in causes if _helps(cause.name, draft)], faster or tokens),
    )


def scaled(split: Array, lost: Array, rule: BoundRule) -> Array:
    """What is lost by cause [documents, causes], adding up to what alpha says is lost.

    Positions without a proposal are facts. Of the others alpha counts the probability of a rejection before the token is
    known, and causes are those of the tokens that came: all are scaled alike, by a factor that is 1 on average over texts
    (and always 1 where acceptance is a fact).
    """
    happened, expected = split[:, SILENT:].sum(), max(0.0, float(lost.sum() - split[:, :SILENT].sum()))
    result = np.array(split, dtype=np.float64)
    if happened > 0:
        result[:, SILENT:] *= expected / happened
    elif expected > 0:  # no token of these texts was rejected, and some could have been
        result[:, CAUSES.index(DRAFT if rule.rule.drawn else UNCERTAIN)] += lost - split[:, :SILENT].sum(1)
    return result


def _speeds(found: Rounds, cluster: Array, times: StepTimes | None) -> tuple[float | None, float | None]:
    """Tokens per round and speedup, the points that results have; None without tokens."""
    counts = RoundCounts.of(found, cluster)

    def point(steps: StepTimes) -> float:
        spent, base = spent_and_base(counts, steps)
        return float(1 / (spent[base > 0].sum() / base[base > 0].sum()))

    if counts.tokens.sum() == 0:
        return None, None
    return point(free_draft(found.drafted.shape[1])), (point(times) if times is not None else None)


def _remedy(name: str, draft: DraftFacts, item: ResultOnText) -> str:
    if name == UNCERTAIN and item.result.on_policy and item.text.policy == SAMPLED:
        return BY_CHANCE
    return REMEDIES[name] if draft.has_steps else WITHOUT_MODEL.get(name, REMEDIES[name])


def _helps(name: str, draft: DraftFacts) -> bool:
    """Whether anything can be done about a cause."""
    return name not in WITHOUT_REMEDY and (name != SPECIAL or draft.has_steps)


def _best(causes: Sequence[Cause], now: float | None) -> str | None:
    """The cause that it would bring most to mend, by speedup where there are step times, else by tokens per round."""
    gains = {cause.name: (cause.speedup or cause.tokens_per_round or 0.0) - (now or 0.0) for cause in causes}
    name = max(gains, key=lambda name: gains[name], default=None)
    return name if name is not None and gains[name] > 0 else None
