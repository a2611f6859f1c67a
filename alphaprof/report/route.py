"""The route: which domains go to which pool of servers, where a server has one speculative configuration, and its gain."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from alphaprof.costs.speedup import Decoded, Mix, StepTimes, Timing, spent_and_base, without_draft
from alphaprof.report.model import Route, ServerPool
from alphaprof.report.speeds import speedup_interval
from alphaprof.report.verdict import Mask, Pair, Pools, Question, halves
from alphaprof.stats.estimate import Array, Interval

MOST_POOLS = 3  # of one model: each pool needs its own spare servers
NO_GAIN = "no domain would gain by another pool"
Configuration = Pair | None  # of a server; None: no speculation


def find_route(
    candidates: Pools,
    timing: Timing,
    mix: Mix,
    question: Question,
    gammas: Sequence[int],
    weights: Mapping[str, float],
) -> Route | str:
    """The pools that half of the documents and of the timing rounds choose, and what they gain on the other half over one
    pool for all domains; or why there is one pool.

    A second pool is always tried; a third one only where it gains `question.min_route_gain` on the half that chooses.
    `weights`: the share of output tokens of each domain.
    """
    if question.route_by != "domain":
        return f"route.by is {question.route_by}"
    if len(mix.domains) < 2:
        return "there is one domain"
    if question.order is not None and question.weights is not None:
        return "documents came in another mixture of domains than the weights ask for"
    if missing := next((draft for draft in candidates if draft not in timing.times), None):
        return f"there are no step times for {missing}"
    parts = halves({domain: next(iter(candidates.values()))[domain] for domain in mix.domains}, question.order)
    if parts is None:
        return "the documents that would choose pools are not there"
    options = [None, *((draft, gamma) for draft in candidates for gamma in question.gammas(gammas))]
    halves_of_times = zip((timing.choosing, timing.testing), parts, strict=True)
    choosing, testing = (_Half(candidates, times, mix, rows, gammas[0]) for times, rows in halves_of_times)
    single, assigned = _assigned(*choosing.relative_times(options), options, question.min_route_gain)
    if len(set(assigned)) < 2:
        return NO_GAIN
    ways = [testing.decoded(configurations) for configurations in ([single] * len(assigned), assigned)]
    gain, whole = mix.gain(*ways), mix.routed(ways[1])
    faster, speedup = (speedup_interval(each, question.confidence) for each in (gain, whole))
    if gain is None or whole is None or faster is None or speedup is None:
        return "some domain has no tokens to test pools on"
    more = Interval(faster.value - 1, faster.low - 1, faster.high - 1)

    def pool(used: Configuration, domains: Sequence[str]) -> ServerPool:
        draft, gamma = used or (None, None)
        return ServerPool(draft, gamma, tuple(domains), sum(weights[domain] for domain in domains))

    pools = [
        pool(used, [domain for domain, each in zip(mix.domains, assigned, strict=True) if each == used])
        for used in dict.fromkeys(assigned)
    ]
    pools.sort(key=lambda each: -each.share)
    why_not = _why_not(gain.tells and whole.tells, more.low, speedup.low, question)
    return Route(tuple(pools), speedup, more, pool(single, mix.domains), gain.documents, why_not)


def _why_not(enough: bool, gain: float, speedup: float, question: Question) -> str:
    """What speaks against the pools of a route; empty where nothing does. `gain`, `speedup`: lower ends of the intervals."""
    if question.stand_in:
        return question.stand_in
    if question.order is not None:  # it stops where its luck takes it: an interval for a fixed number is no evidence
        return "a run that stops once one draft is sure cannot tell"
    if not enough:
        return "too few documents to tell"
    if gain < question.min_route_gain:
        return f"the lower end of the gain is below {100 * question.min_route_gain:g} %"
    if speedup < question.min_speedup:
        return f"the lower end of the speedup is below {question.min_speedup:g}x"
    return ""


@dataclass(frozen=True)
class _Half:
    """Some documents of each domain, decoded by any configuration. `gamma`: one that there are rounds for."""

    candidates: Pools
    times: Mapping[str, StepTimes]
    mix: Mix
    rows: Mapping[str, Mask]
    gamma: int
    known: dict[tuple[str, Configuration], Decoded] = field(default_factory=dict)

    def decoded(self, configurations: Sequence[Configuration]) -> list[Decoded]:
        """Each domain by its configuration; the same object for the same two."""
        return [self._decoded(domain, used) for domain, used in zip(self.mix.domains, configurations, strict=True)]

    def _decoded(self, domain: str, used: Configuration) -> Decoded:
        if (domain, used) not in self.known:
            draft, gamma = used or (next(iter(self.candidates)), self.gamma)
            counts, times = self.candidates[draft][domain].counts(gamma).rows(self.rows[domain]), self.times[draft]
            self.known[domain, used] = (counts, times) if used else without_draft(counts, times)
        return self.known[domain, used]

    def relative_times(self, options: Sequence[Configuration]) -> tuple[Array, Array]:
        """The time of each domain by each option in units of that without a draft, [domains, options], and the weight of
        each domain, [domains]. A domain without tokens has no weight, and the times of all others together.
        """
        sums = [
            [[float(part.sum()) for part in spent_and_base(*self._decoded(domain, used))] for used in options]
            for domain in self.mix.domains
        ]
        spent, base = np.moveaxis(np.array(sums), 2, 0)
        seen = base[:, 0] > 0
        weights = np.where(seen, base[:, 0] if self.mix.weights is None else self.mix.weights, 0.0)
        relative = np.divide(spent, base, out=np.ones_like(spent), where=base > 0)
        if seen.any():
            relative[~seen] = weights @ relative / weights.sum()
        return relative, weights


def _assigned(
    relative: Array, weights: Array, options: Sequence[Configuration], least_gain: float
) -> tuple[Configuration, list[Configuration]]:
    """The best option for all domains, and the option of each domain among the two that are best together, or three."""

    def time(places: tuple[int, ...]) -> float:
        return float(weights @ relative[:, places].min(1))

    every = range(len(options))
    single = min(every, key=lambda place: time((place,)))
    best: tuple[int, ...] = min(itertools.combinations(every, 2), key=time)
    while len(best) < MOST_POOLS:
        larger = min(((*best, place) for place in every), key=time)
        if time(best) < (1 + least_gain) * time(larger):
            break
        best = larger
    return options[single], [options[best[place]] for place in relative[:, best].argmin(1)]
