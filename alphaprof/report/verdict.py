"""GO, NO-GO or UNDECIDED: a one-sided bound against the least speedup that is worth it.

From pools of totals to a verdict, for a domain and for the whole traffic. What is `auto` is cross-fitted: each half of the
documents and timing rounds chooses, and is tested as the other half chose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from alphaprof.config.profile import DecisionOptions
from alphaprof.costs.rounds import MORE_ROUNDS, UNTIMED, StepTimes, Timing
from alphaprof.costs.speedup import FEWEST, Decoded, Domain, Mix, Speedup, total_times
from alphaprof.costs.timing import GO_ROUNDS
from alphaprof.rules import default_rule, parse_rule
from alphaprof.run.manifest import DraftFacts
from alphaprof.stats.estimate import Array, Interval, distinct
from alphaprof.stats.student import probability
from alphaprof.totals.count import has_rounds
from alphaprof.totals.pool import DocumentTotals

SLOW_BASELINE = 0.97  # v below it says more about the baseline than about the draft
Pair = tuple[str, int]  # a draft and a gamma
Pools = Mapping[str, Mapping[str, DocumentTotals]]  # by draft, then domain
Mask = np.ndarray[Any, np.dtype[np.bool_]]
VerdictName = Literal["GO", "NO-GO", "UNDECIDED"]
MIDDLE = "middle of what the log allows"  # of a value with a `Speedup.doubt`
UNLIKE = "profile more documents: the halves of these do not choose alike"
MANY = 1_000_000
LIKELY = 0.8  # chance that the number of documents which is asked for settles a verdict


class Question(DecisionOptions):
    """The profile's decision, and what else the verdict depends on. `measured_dtype`: the target's, of a run that was
    profiled; None: an engine's own. `chose_p_min`: half of the documents chose p_min, so that the other half tests.
    """

    measured_dtype: str | None = None
    chose_p_min: bool = False

    @property
    def stand_in(self) -> str:
        """Why rounds of the target that was measured decide nothing about the one that is served; empty if they do."""
        if self.served_dtype is None or self.measured_dtype in (None, self.served_dtype):
            return ""
        return f"the target in {self.measured_dtype} stands in for the one served in {self.served_dtype}"

    def rule_for(self, policy: str) -> str:
        """Return the id of the rule that the verdict concerns on text of a policy."""
        return default_rule(policy) if self.rule == "auto" else self.rule

    def chooses(self, options: Sequence[Pair]) -> bool:
        """Return whether draft, γ or p_min are chosen on these documents."""
        return self.chose_p_min or len(options) > 1

    def options(self, candidates: Pools, known: Sequence[int], timing: Timing = UNTIMED) -> list[Pair]:
        """Return each draft with each γ that the verdict may choose, the draft has rounds of, and its step times cover."""
        gammas = self.gammas(known)
        each = ((draft, gamma) for draft in candidates for gamma in gammas)
        each = ((draft, gamma) for draft, gamma in each if timing.covers(draft, gamma))
        return [(draft, gamma) for draft, gamma in each if all(pool.has(gamma) for pool in candidates[draft].values())]

    def gammas(self, known: Sequence[int]) -> list[int]:
        """Return the lengths that the verdict may choose from."""
        return list(known) if self.gamma == "auto" else [int(self.gamma)]


def without_times(rules: Sequence[str], missing: str | None = None) -> str:
    """Return why tokens per round of rules cannot be turned into speedup; `missing`: what step times lack."""
    if untimed := [rule for rule in rules if not parse_rule(rule).rule.timed]:
        return f"verification under {', '.join(untimed)} was not timed, so tokens per round cannot be turned into speedup"
    return f"{missing or 'no step times were measured'}, so acceptance cannot be turned into speedup"


def not_defined(rule: str, policy: str, draft: DraftFacts) -> str:
    """Return why a rule has no rounds on text of a policy."""
    bound = parse_rule(rule)
    if bound.rule.lossy:
        return f"{rule} is lossy: its rounds leave the measured text; use alphaprof validate --rule"
    if policy in bound.rule.policies and not has_rounds(bound, draft):
        return f"{rule} of a head is known for first drafts only (accept@1), so it has no rounds"
    if not policy:
        return f"rounds of {rule} are not defined on text that the target did not produce"
    return f"rounds of {rule} are not defined on the target's {policy} text: the rule would emit other text"


def no_decision(reason: str) -> Decision:
    """Return UNDECIDED, for a reason that more documents would not mend."""
    return Decision("UNDECIDED", reason, None, 0.0, math.inf, None)


def pooled_speedup(candidates: Pools, option: Pair, times: Mapping[str, StepTimes], mix: Mix) -> Speedup | None:
    """Return speedup of one draft and gamma on all documents."""
    return mix.routed(decoded(candidates, option, times, mix))


def decoded(
    candidates: Pools, option: Pair, times: Mapping[str, StepTimes], mix: Mix, rows: Mapping[str, Mask] | None = None
) -> list[Decoded]:
    """Return how each domain is decoded with one draft and gamma, on some of its documents (None: on all)."""
    draft, gamma = option
    counts = [candidates[draft][domain].counts(gamma) for domain in mix.domains]
    if rows is not None:
        counts = [each.rows(rows[domain]) for domain, each in zip(mix.domains, counts, strict=True)]
    return mix.decoded(counts, times[draft])


@dataclass(frozen=True)
class Halves:
    """Both halves of the documents, each with its half of the timing rounds. What one half chooses, the other tests."""

    candidates: Pools
    timing: Timing
    mix: Mix
    rows: tuple[Mapping[str, Mask], Mapping[str, Mask]]

    @classmethod
    def of(cls, candidates: Pools, timing: Timing, mix: Mix) -> Halves:
        """Divide the documents; the halves follow from the names of their clusters."""
        pools = next(iter(candidates.values()))
        second = held_out({domain: pools[domain].units.lots for domain in mix.domains})
        return cls(candidates, timing, mix, ({domain: ~mask for domain, mask in second.items()}, second))

    def decoded(self, options: tuple[Pair, Pair]) -> list[list[Decoded]]:
        """Return how each domain is decoded if each half has its own draft and gamma."""
        times = self.timing.halves or (self.timing.times, self.timing.times)
        for place, option in enumerate(options):
            if (place, option) not in self._known:
                self._known[place, option] = decoded(self.candidates, option, times[place], self.mix, self.rows[place])
        sides = (self._known[place, option] for place, option in enumerate(options))
        return [list(parts) for parts in zip(*sides, strict=True)]

    @cached_property
    def _known(self) -> dict[tuple[int, Pair], list[Decoded]]:
        return {}

    def chosen(self, options: Sequence[Pair]) -> Choice | None:
        """Return what each half makes fastest, and all documents by all timing rounds; None if no speedup is known. Rounds
        of which the log does not tell all that they drafted count at the slower end.
        """
        both = {option: self.decoded((option, option)) for option in options}
        ways = [{option: [parts[place] for parts in both[option]] for option in options} for place in range(2)]
        ways.append({option: decoded(self.candidates, option, self.timing.times, self.mix) for option in options})

        def fastest(way: Mapping[Pair, Sequence[Decoded]]) -> Pair | None:
            values = {
                option: self.mix.value_of([total_times(counts.ends[1], times) for counts, times in domains])
                for option, domains in way.items()
            }
            known = {option: value for option, value in values.items() if value is not None}
            return max(known, key=lambda option: known[option], default=None)

        first, second, every = map(fastest, ways)
        return Choice(every, (first, second)) if first and second and every else None


@dataclass(frozen=True)
class Choice:
    """The draft and gamma that all documents prefer, and what each half does by itself."""

    pair: Pair
    halves: tuple[Pair, Pair]


@dataclass(frozen=True)
class CrossFit:
    """What a verdict rests on: how the documents of each domain are decoded, and the speedup of that. What was chosen is
    cross-fitted: each half of the documents is decoded as the other half chose, by timing rounds that did not choose either.

    `own`: the speedup of the named draft and gamma on all documents by all timing rounds, which is what they get if they are
    asked for by name; None if that is `speedup`, since nothing was chosen or both halves chose them. Else neither number
    carries a verdict alone: a mean over two choices says nothing of one of them, and the named one was chosen on the
    documents of its own number. `close`: that lies within the interval of `speedup`, which is then shown. `rows`: the
    documents of both halves, the parts of each domain; None if these are whole. `domains` is empty, and speedups None, if no
    speedup is known.
    """

    domains: Sequence[Domain]
    speedup: Speedup | None
    choice: Choice | None = None
    own: Speedup | None = None
    close: bool = True
    rows: tuple[Mapping[str, Mask], Mapping[str, Mask]] | None = None

    @property
    def named(self) -> Speedup | None:
        """The speedup of the named draft and gamma on all documents."""
        return self.own or self.speedup

    @property
    def shown(self) -> Speedup | None:
        """The speedup whose value is shown."""
        return self.speedup if self.close else self.own

    def beside(self, other: Speedup | None, confidence: float) -> Interval | None:
        """Return another gamma of the named draft as it stands beside the value that is shown: that value times what all
        documents gain by the other, since what made the choice lucky did as much for its neighbors.
        """
        if other is None or self.shown is None or self.named is None:
            return None
        share = self.shown.value / self.named.value
        return Interval(*(share * each for each in (other.value, *other.deciding(1 - confidence))))

    def deciding(self, tail: float) -> tuple[float, float]:
        """Return the bounds that decide, each missing with probability `tail`."""
        each = [one.deciding(tail) for one in (self.speedup, self.own) if one is not None]
        return (min(low for low, _ in each), max(high for _, high in each)) if each else (0.0, math.inf)

    def astride(self, min_speedup: float) -> bool:
        """Return whether one of the speedups that have to clear the threshold is above it and the other below."""
        if self.own is None or self.speedup is None:
            return False
        return (self.own.value < min_speedup) != (self.speedup.value < min_speedup)

    def documents_needed(self, min_speedup: float, confidence: float) -> int | None:
        """Return what `documents_needed` does, for all the speedups that have to clear the threshold; None if that would be
        on different sides of it.
        """
        if self.astride(min_speedup):
            return None
        each = [documents_needed(one, min_speedup, confidence) for one in (self.speedup, self.own) if one is not None]
        return None if None in each else max(number for number in each if number is not None)

    @classmethod
    def of(
        cls, candidates: Pools, timing: Timing, mix: Mix, options: Sequence[Pair], chooses: bool, tail: float
    ) -> CrossFit:
        """Choose among options and test the choice; `chooses`: whether anything is chosen at all."""
        if not chooses:
            fixed = decoded(candidates, options[0], timing.times, mix)
            return cls(fixed, mix.routed(fixed))
        halves = Halves.of(candidates, timing, mix)
        if (choice := halves.chosen(options)) is None:
            return cls([], None)
        first, second = choice.halves
        domains, named = halves.decoded((second, first)), decoded(candidates, choice.pair, timing.times, mix)
        speedup, own = mix.routed(domains), mix.routed(named)
        if first == second == choice.pair or speedup is None or own is None:
            return cls(named, own, choice)
        low, high = speedup.bounds(tail)
        return cls(domains, speedup, choice, own, low <= own.value <= high, halves.rows)


def judge(
    candidates: Pools, timing: Timing, mix: Mix, question: Question, gammas: Sequence[int]
) -> tuple[Pair | None, Decision]:
    """Return the chosen draft and gamma, and the verdict on them: the one home of choosing and testing, for the traffic, a
    domain, a draft alone, at any concurrency.
    """
    options = question.options(candidates, gammas, timing)
    if not options and not question.options(candidates, gammas):
        return None, no_decision(f"no draft has rounds of {question.gamma} speculative tokens")
    if not options:
        least = min(question.gammas(gammas))
        return None, no_decision(f"step times do not reach gamma {least}: that takes steps over {least + 1} tokens")
    chooses = question.chooses(options)
    if lacking := timing.lacks(candidates):
        return (None if chooses else options[0]), no_decision(without_times([], lacking))
    tested = CrossFit.of(candidates, timing, mix, options, chooses, 1 - question.confidence)
    best = options[0] if not chooses else tested.choice.pair if tested.choice else None
    pools = [next(iter(candidates.values()))[domain] for domain in mix.domains]
    there = distinct(np.concatenate([pool.cluster[pool["tokens"] > 0] for pool in pools]))
    decision = decide(tested, question.min_speedup, question.confidence, there, timing.surer)
    if best is not None and decision.verdict == "GO" and 0 < (rounds := timing.times[best[0]].rounds) < GO_ROUNDS:
        needed = f"GO needs step times of at least {GO_ROUNDS} rounds, but there are {rounds}"
        decision = replace(decision, verdict="UNDECIDED", reason=needed, remedy=timing.surer)
    # A verdict says first whose step times it rests on: they may be those of another engine than the one that will serve.
    few = decision.verdict == "UNDECIDED" and (decision.speedup is None or not decision.speedup.tells)
    remedy = f"{decision.remedy}; " if decision.remedy and not question.stand_in else ""  # first: a screen cuts what is long
    reason = remedy + (decision.reason if few else f"{timing.basis}: {decision.reason}")
    if question.stand_in:
        decision = replace(decision, verdict="UNDECIDED", documents_needed=None)
        reason = f"{question.stand_in}; {reason}"
    if best is not None and decision.verdict == "GO" and (v := timing.times[best[0]].v(best[1])) < SLOW_BASELINE:
        reason += f"; but decoding is slow here (v = {v:.2f} < 1), which favors every draft"
    return best, replace(decision, reason=reason)


@dataclass(frozen=True)
class Decision:
    """A verdict with the speedup and one-sided bounds that it rests on; `tested`: where these come from.

    `documents_needed`: of how many independent documents a new run would settle it with a chance of 80%; None if it is
    settled, or no number has that chance. `remedy`: what would settle it, in words; empty if it is settled, or the reason
    says so. `untold`: why step times do not tell how fast it is; empty if they do.
    """

    verdict: VerdictName
    reason: str
    speedup: Speedup | None
    low: float
    high: float
    documents_needed: int | None
    tested: CrossFit | None = None
    remedy: str = ""
    untold: str = ""

    @property
    def bounds(self) -> Interval | None:
        """The speedup with the one-sided bounds that decide; None if it has none, or step times do not tell it."""
        return Interval(self.speedup.value, self.low, self.high) if self.speedup and math.isfinite(self.high) else None

    @property
    def disagreement(self) -> str:
        """What each half of the documents chose, in words, if these are other drafts, or gammas of clearly other speed; else
        empty.
        """
        if self.tested is None or self.tested.own is None or self.tested.choice is None:
            return ""
        choice = self.tested.choice
        if self.tested.close and len({draft for draft, _ in (*choice.halves, choice.pair)}) == 1:
            return ""
        one, other, both = (f"{draft} with {gamma}" for draft, gamma in (*choice.halves, choice.pair))
        if one == other:
            return f"each half of the documents prefers {one} speculative tokens, both together {both}"
        return f"one half of the documents prefers {one} speculative tokens, the other {other}"


def decide(
    tested: CrossFit, min_speedup: float, confidence: float, documents: int = 0, surer: str = MORE_ROUNDS
) -> Decision:
    """GO when the lower bound at `confidence` is at or above `min_speedup`, NO-GO when the upper bound is below it.

    If there are too few documents to speak for others, the bounds are those that step times allow, whatever is accepted.
    `documents`: independent ones that there are, for the case that no speedup is known. `surer`: see `Timing`.
    """
    speedup = tested.shown
    if speedup is None:
        return Decision("UNDECIDED", _too_few(documents), None, 0.0, math.inf, None)
    low, high = tested.deciding(1 - confidence)
    verdict: VerdictName = "GO" if low >= min_speedup else "NO-GO" if high < min_speedup else "UNDECIDED"
    if verdict == "UNDECIDED" and (untold := speedup.untold(1 - confidence)):
        untold += " (each half of the rounds counts by itself)" if tested.own and math.isinf(speedup.timing_error) else ""
        return Decision(verdict, untold, speedup, 0.0, math.inf, None, tested=tested, remedy=surer, untold=untold)
    needed = tested.documents_needed(min_speedup, confidence) if verdict == "UNDECIDED" else None
    remedy = ""
    level, lower, upper = f"{100 * confidence:g}%", beside(low, min_speedup), beside(high, min_speedup)
    middle = f" ({MIDDLE})" if speedup.doubt else ""
    on = f"speedup {speedup.value:.2f}x{middle} on {speedup.documents} independent documents"
    if not speedup.tells:
        side = "above" if verdict == "GO" else "below"  # which needs no document
        reason = f"at any acceptance, these step times keep the speedup {side} {min_speedup:g}"
        reason = _too_few(speedup.documents) if verdict == "UNDECIDED" else reason
    elif verdict == "GO":
        reason = f"{on}, and its {level} lower bound {lower} reaches {min_speedup:g}"
    elif verdict == "NO-GO":
        reason = f"{on}, and its {level} upper bound {upper} is below {min_speedup:g}"
    else:
        reason = f"{on}, {level} bounds {lower} and {upper} enclose {min_speedup:g}"
        remedy = UNLIKE if tested.astride(min_speedup) else _remedy(needed, speedup, surer)
    decision = Decision(verdict, reason, speedup, low, high, needed, tested, remedy)
    if speedup.tells and decision.disagreement:
        decision = replace(decision, reason=f"{reason}; {decision.disagreement}")
    return decision


def _too_few(documents: int) -> str:
    """Return why `documents` independent documents are too few to decide, and what to do."""
    advice = f"profile {FEWEST} or more"
    if documents >= FEWEST:
        return f"weights need at least two independent documents longer than one token in every domain: {advice}"
    have = "1 independent document" if documents == 1 else f"{documents} independent documents"
    return f"only {have} longer than one token, {FEWEST} needed: {advice}"


def beside(bound: float, threshold: float, digits: int = 3) -> str:
    """Return a bound with `digits` decimals, or as many as it takes to stand on its side of the threshold: 1.0996 is not
    1.100.
    """
    texts = (f"{bound:.{more}f}" for more in range(digits, 17))
    return next((text for text in texts if (float(text) < threshold) == (bound < threshold)), repr(bound))


def _remedy(needed: int | None, speedup: Speedup, surer: str) -> str:
    if needed is not None:
        return f"a new run of {needed} independent documents would settle it with a chance of {LIKELY:.0%}"
    timing = max(speedup.timing_error, speedup.waited)
    if 0 < timing < speedup.sampling_error:
        return f"profile more documents, and {surer}"
    if timing > 0:
        return f"{surer} (more documents alone would not settle it)"
    return "choose another min_speedup: this one is too close for more documents to settle it"


def documents_needed(speedup: Speedup, min_speedup: float, confidence: float) -> int | None:
    """Return the smallest number of documents like these whose bound clears the threshold with a chance of `LIKELY`; None if
    no number up to a million has it.
    """

    def settles(documents: int) -> bool:
        return chance_of_settling(speedup, documents, min_speedup, confidence) >= LIKELY

    if not settles(MANY):
        return None
    least = max(speedup.documents, FEWEST)
    return least + bisect_left(range(least, MANY), True, key=settles)


def chance_of_settling(speedup: Speedup, documents: int, min_speedup: float, confidence: float) -> float:
    """Return the chance that a new run of `documents` documents clears the threshold on either side.

    The truth is not the estimate: on the log scale what the new run finds is around it by t, with the variance of this
    sample, that of the new one, which is 1 / documents of it, and the error of step times twice if they are timed again (a
    predictive distribution).
    """
    one = speedup.at(documents)
    low, high = one.bounds(1 - confidence)
    lead = math.log(speedup.value / min_speedup)
    below = math.log(speedup.value / low) if low > 0 else math.inf
    above = math.log(high / speedup.value)
    spread = math.hypot(speedup.sampling_error, one.sampling_error, math.sqrt(2) * speedup.timing_error * speedup.redrawn)
    if spread == 0:
        return float(lead >= below or -lead > above)
    freedom = speedup.freedom
    return probability((lead - below) / spread, freedom) + probability((-lead - above) / spread, freedom)


def held_out(lots: Mapping[str, Array]) -> dict[str, Mask]:
    """Return which documents of each domain are held out to test what the others chose; [documents] each.

    `lots` [documents]: a pseudo-random number made from the name of each document's cluster (`totals.documents.lots_of`).
    Clusters in the order of their lots fall alternately on the two halves, domain by domain: every second one is held out,
    whatever order the data had. A cluster is never divided, not even if it lies in several domains.
    """
    if not lots:
        return {}
    domains = sorted(lots)
    drawn, cluster = np.unique(np.concatenate([lots[domain] for domain in domains]), return_inverse=True)
    home = np.repeat(np.arange(len(domains)), [len(lots[domain]) for domain in domains])
    pairs = np.sort(cluster * len(domains) + home)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # `np.unique` hashes numbers, which takes longer than sorting them
    places, homes = pairs // len(domains), pairs % len(domains)
    first, several = homes[np.diff(places, prepend=-1) > 0], np.bincount(places, minlength=len(drawn)) > 1
    sets: dict[int, tuple[int, ...]] = {}
    for place, number in zip(places[several[places]].tolist(), homes[several[places]].tolist(), strict=True):
        sets[place] = (*sets.get(place, ()), number)
    combinations = sorted({(number,) for number in range(len(domains))} | set(sets.values()))
    ranks = {combination: rank for rank, combination in enumerate(combinations)}
    rank = np.array([ranks[number,] for number in range(len(domains))], dtype=np.int64)[first]
    for place, combination in sets.items():
        rank[place] = ranks[combination]
    kept_back = np.zeros(len(drawn), dtype=bool)
    kept_back[np.argsort(rank, kind="stable")[1::2]] = True
    sides = np.split(kept_back[cluster], np.cumsum([len(lots[domain]) for domain in domains])[:-1])
    return dict(zip(domains, sides, strict=True))
