"""GO, NO-GO or UNDECIDED: a one-sided bound against the least speedup that is worth it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from alphaprof.costs.speedup import FEWEST, Speedup
from alphaprof.costs.timing import LEAST_ROUNDS
from alphaprof.stats.estimate import probability

Array = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
VerdictName = Literal["GO", "NO-GO", "UNDECIDED"]
MANY = 1_000_000
EVEN, LIKELY = 0.5, 0.8  # chances that a number of documents settles a verdict
SURER = "more timing rounds on an idle machine"


@dataclass(frozen=True)
class Decision:
    """A verdict with the speedup and one-sided bounds that it rests on.

    `documents_needed`, `documents_likely`: of how many independent documents a new run would settle it with a chance of 50
    and of 80 %; None if it is settled, or no number has that chance.
    """

    verdict: VerdictName
    reason: str
    speedup: Speedup | None
    low: float
    high: float
    documents_needed: int | None
    documents_likely: int | None = None


def decide(speedup: Speedup | None, min_speedup: float, confidence: float, held_out: bool) -> Decision:
    """GO when the lower bound at `confidence` is at or above `min_speedup`, NO-GO when the upper bound is below it.

    Where there are too few documents to speak for others, the bounds are those that step times allow, whatever is accepted.
    `held_out`: the speedup rests on half of the documents, because the other half chose draft or gamma.
    """
    if speedup is None:
        return Decision("UNDECIDED", _too_few(speedup, held_out), speedup, 0.0, math.inf, None)
    if math.isinf(speedup.timing_error):
        tests = "half of the timing rounds chose draft or gamma, and " if held_out else ""
        reason = f"{tests}step times of fewer than {LEAST_ROUNDS} rounds have no bounds: {SURER}"
        return Decision("UNDECIDED", reason, speedup, 0.0, math.inf, None)
    low, high = speedup.deciding(1 - confidence)
    verdict: VerdictName = "GO" if low >= min_speedup else "NO-GO" if high < min_speedup else "UNDECIDED"
    needed, likely = (
        documents_needed(speedup, min_speedup, confidence, wanted) if verdict == "UNDECIDED" else None
        for wanted in (EVEN, LIKELY)
    )
    needed, likely = needed and needed * (1 + held_out), likely and likely * (1 + held_out)
    on = f"speedup {speedup.value:.2f}x on {speedup.documents} independent {'held-out ' if held_out else ''}documents"
    level = f"{100 * confidence:g} %"
    lower, upper = beside(low, min_speedup), beside(high, min_speedup)
    if not speedup.tells:
        reason = _too_few(speedup, held_out) if verdict == "UNDECIDED" else by_times_alone(verdict, min_speedup)
    elif verdict == "GO":
        reason = f"{on}, and its {level} lower bound {lower} reaches {min_speedup:g}"
    elif verdict == "NO-GO":
        reason = f"{on}, and its {level} upper bound {upper} is below {min_speedup:g}"
    else:
        reason = f"{on}, {level} bounds {lower} and {upper} enclose {min_speedup:g}; {_remedy(needed, likely, speedup)}"
    return Decision(verdict, reason, speedup, low, high, needed, likely)


def by_times_alone(verdict: VerdictName, min_speedup: float) -> str:
    """Why a verdict needs no document."""
    side = "above" if verdict == "GO" else "below"
    return f"whatever is accepted, these step times keep the speedup {side} {min_speedup:g}"


def _too_few(speedup: Speedup | None, held_out: bool) -> str:
    """Why these documents decide nothing, and what to do."""
    documents = speedup.documents if speedup is not None else 0
    where, advice = "", ""
    if held_out:
        where, advice = " on the held-out half", f": profile {2 * FEWEST} or more, or fix decision.draft and decision.gamma"
    if documents >= FEWEST:
        return f"given weights need at least two independent documents of every domain{where}, longer than one token{advice}"
    have = "there is 1" if documents == 1 else f"there are {documents}"
    return f"a verdict needs at least {FEWEST} independent documents{where}, longer than one token; {have}{advice}"


def beside(bound: float, threshold: float, digits: int = 3) -> str:
    """A bound with `digits` decimals, or as many as it takes to stand on its side of the threshold: 1.0996 is not 1.100."""
    texts = (f"{bound:.{more}f}" for more in range(digits, 17))
    return next((text for text in texts if (float(text) < threshold) == (bound < threshold)), repr(bound))


def _remedy(needed: int | None, likely: int | None, speedup: Speedup) -> str:
    if needed is not None:
        sure = f"{likely} with 80 %" if likely is not None else "no number with 80 %"
        return f"a new run of {needed} independent documents would settle it with an even chance, {sure}"
    timing = max(speedup.timing_error, speedup.waited)
    if 0 < timing < speedup.sampling_error:
        return f"it takes both more documents and surer step times ({SURER})"
    if timing > 0:
        return f"more documents alone would not settle it: step times must be surer ({SURER})"
    return "it is too close to the threshold for any number of documents to settle it"


def documents_needed(speedup: Speedup, min_speedup: float, confidence: float, wanted: float) -> int | None:
    """The smallest number of documents like these whose bound clears the threshold with a chance of `wanted`; None if no
    number up to a million has it.
    """

    def settles(documents: int) -> bool:
        return chance_of_settling(speedup, documents, min_speedup, confidence) >= wanted

    if not settles(MANY):
        return None
    low, high = max(speedup.documents, FEWEST), MANY
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if settles(middle) else (middle + 1, high)
    return low


def chance_of_settling(speedup: Speedup, documents: int, min_speedup: float, confidence: float) -> float:
    """The chance that a new run of so many documents clears the threshold on either side.

    The truth is not the estimate: on the log scale what the new run finds is around it by t, with the variance of this
    sample, that of the new one, which is 1 / documents of it, and the error of step times twice (a predictive distribution).
    """
    one = speedup.at(documents)
    low, high = one.bounds(1 - confidence)
    lead = math.log(speedup.value / min_speedup)
    below = math.log(speedup.value / low) if low > 0 else math.inf
    above = math.log(high / speedup.value)
    spread = math.hypot(speedup.sampling_error, one.sampling_error, math.sqrt(2) * speedup.timing_error)
    if spread == 0:
        return float(lead >= below or -lead > above)
    freedom = speedup.freedom
    return probability((lead - below) / spread, freedom) + probability((-lead - above) / spread, freedom)


def held_out(lots: Mapping[str, Array]) -> dict[str, Mask]:
    """Which documents of each domain are held out to test what the others chose; [documents] each.

    `lots` [documents]: what each document's cluster drew (`units.lots_of` its name). Clusters in the order of their lots
    fall alternately on the two halves, domain by domain: every second one is held out, whatever order the data had. A
    cluster is never divided, not even where it lies in several domains.
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
