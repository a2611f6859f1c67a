"""Choose what is `auto` and judge it: the bridge from pools of totals to a verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alphaprof.costs.speedup import Mix, Speedup, StepTimes, Timing
from alphaprof.errors import RunUnreadable
from alphaprof.log.manifest import Manifest
from alphaprof.report.decision import Decision, Mask, decide, held_out
from alphaprof.rules import default_rule, parse_rule
from alphaprof.totals.pool import Pool
from alphaprof.totals.replay import Flavour

SLOW_BASELINE = 0.97  # v below it says more about the baseline than about the draft
Pair = tuple[str, int]  # a draft and a gamma
Pools = Mapping[str, Mapping[str, Pool]]  # by draft, then domain


@dataclass(frozen=True)
class Order:
    """A run that came in random order, to stop as soon as it is decided. The first `choosing` documents choose what is auto,
    and the others are tested; `available`: documents there were; `seen`: those that the run holds; `reach`: the most tokens
    that rounds can emit in a document, by domain.
    """

    choosing: int
    available: int
    seen: int
    reach: Mapping[str, int]


def order_of(manifest: Manifest, flavour: Flavour) -> Order | None:
    """The order of a run's documents, where they came in a random one. Rounds of `hf` emit the first token too."""
    found = manifest.sequential
    if found is None:
        return None
    reach = {domain: most + (flavour == "hf") for domain, most in found["reach"].items()}
    return Order(found["choosing"], found["available"], manifest.documents, reach)


@dataclass(frozen=True)
class Question:
    """What the verdict is about: the profile's decision, as plain data, so that reports need no validation library.

    `rule` may be auto: what engines do by default, on greedy and on sampled text.
    """

    rule: str
    draft: str
    gamma: int | str
    min_speedup: float
    confidence: float
    weights: dict[str, float] | None
    concurrency: int = 1
    order: Order | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Question:
        """From the manifest's copy of the profile."""
        names = {field.name for field in dataclasses.fields(cls)} - {"order"}
        if {"concurrency", *config["decision"]} != names:
            raise RunUnreadable("the run was made by another version of alphaprof", "report with the version that wrote it")
        return cls(**config["decision"])

    def rule_for(self, policy: str) -> str:
        """The id of the rule that the verdict concerns on text of a policy."""
        return default_rule(policy) if self.rule == "auto" else self.rule

    def gammas(self, known: Sequence[int]) -> list[int]:
        """The lengths that the verdict may choose from."""
        return list(known) if self.gamma == "auto" else [int(self.gamma)]


def choose_and_decide(
    candidates: Pools,
    timing: Timing,
    mix: Mix,
    question: Question,
    gammas: Sequence[int],
) -> tuple[Pair | None, Decision]:
    """The chosen draft and gamma, and the verdict on them. What is `auto` is chosen on one half of the documents of every
    domain and tested on the other, so that the winner is not judged by the luck that made it win.
    """
    options = [(draft, gamma) for draft in candidates for gamma in question.gammas(gammas)]
    only = options[0] if len(options) == 1 else None
    times = timing.times
    if lacking := timing.lacks(candidates):
        return only, no_decision(without_times([], lacking))
    if only is not None:
        found = pooled_speedup(candidates, only, times, mix)
        decision = decide(found, question.min_speedup, question.confidence, held_out=False)
        return only, explained(decision, timing.basis, cheapness(times, only))
    testing = held_out({domain: next(iter(candidates.values()))[domain].units.lots for domain in mix.domains})
    choosing = {domain: ~mask for domain, mask in testing.items()}
    chosen = {option: pooled_speedup(candidates, option, times, mix, choosing) for option in options}
    known = {option: found.value for option, found in chosen.items() if found is not None}
    if not known:
        return None, explained(decide(None, question.min_speedup, question.confidence, held_out=True), timing.basis)
    best = max(known, key=lambda option: known[option])
    found = pooled_speedup(candidates, best, times, mix, testing)
    decision = decide(found, question.min_speedup, question.confidence, held_out=True)
    return best, explained(decision, timing.basis, cheapness(times, best))


def cheapness(times: Mapping[str, StepTimes], pair: Pair) -> float:
    """The v of a draft and gamma: below 1 decoding is slow, and every draft looks good."""
    return times[pair[0]].v(pair[1])


def without_times(rules: Sequence[str], missing: str | None = None) -> str:
    """Why tokens per round of rules cannot be turned into speedup; `missing`: what step times lack."""
    if untimed := [rule for rule in rules if not parse_rule(rule).rule.timed]:
        return f"verification under {', '.join(untimed)} was not timed, so tokens per round cannot be turned into speedup"
    return f"{missing or 'no step times were measured'}, so acceptance cannot be turned into speedup"


def not_defined(rule: str, policy: str) -> str:
    """Why a rule has no rounds on text of a policy."""
    if parse_rule(rule).rule.lossy:
        return f"{rule} is lossy: its rounds depart from the text that was measured, and need a rollout"
    if not policy:
        return f"rounds of {rule} are not defined on text that the target did not produce"
    return f"rounds of {rule} are not defined on the target's {policy} text: its own decoding would emit another one"


def no_decision(reason: str) -> Decision:
    """UNDECIDED for want of something else than documents."""
    return Decision("UNDECIDED", reason, None, 0.0, math.inf, None)


def explained(decision: Decision, basis: str, v: float = 1.0) -> Decision:
    """A verdict says first whose step times it rests on: they may be those of another engine than the one that will serve.

    And a GO that rests on verification being cheaper than decoding (`v` < 1) says so last.
    """
    reason = f"{basis}, {decision.reason}"
    if decision.verdict == "GO" and v < SLOW_BASELINE:
        reason += f"; but decoding is slow here (v = {v:.2f} < 1), which flatters every draft"
    return dataclasses.replace(decision, reason=reason)


def pooled_speedup(
    candidates: Pools,
    option: Pair,
    times: Mapping[str, StepTimes],
    mix: Mix,
    rows: Mapping[str, Mask] | None = None,
) -> Speedup | None:
    """Speedup of one draft and gamma on some documents of each domain (default: on all)."""
    draft, gamma = option
    counts = [candidates[draft][domain].counts(gamma) for domain in mix.domains]
    if rows is not None:
        counts = [each.rows(rows[domain]) for domain, each in zip(mix.domains, counts, strict=True)]
    return mix.speedup(counts, times[draft])
