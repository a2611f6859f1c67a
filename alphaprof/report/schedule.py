"""The gamma to draft with by load, from the rounds of a run: one draft on a traffic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import StepTimes
from alphaprof.costs.speedup import Decoded, Mix
from alphaprof.report.loads import CONTEXTS, AtLoad, Place
from alphaprof.report.speeds import deciding_interval, of_requests
from alphaprof.stats.estimate import Interval
from alphaprof.totals.pool import DocumentTotals

Schedule = tuple[tuple[int, int, int], ...]  # first and last concurrency, and the gamma there; 0: no gamma is faster


@dataclass(frozen=True)
class GammaByLoad:
    """One draft on a traffic, whose gamma follows the load. `pools`: of the domains of `mix`, in their order; `gammas`: what
    may be chosen. A bound misses with a probability of 1 - `confidence`.
    """

    draft: str
    pools: Sequence[DocumentTotals]
    mix: Mix
    costs: CostModel
    gammas: Sequence[int]
    confidence: float

    @cached_property
    def timed(self) -> set[int]:
        """The contexts that there are times at."""
        return {row.context for row in self.costs.table.rows if row.step != "prefill"}

    @cached_property
    def context(self) -> int:
        """The traffic's own context, or the nearest that there are times for."""
        return round(min(max(self.costs.context, min(self.timed)), max(self.timed)))

    @cached_property
    def concurrencies(self) -> list[int]:
        """What the draft was timed at."""
        return [size for size in self.costs.concurrencies if self.draft in self.costs.times(size)]

    def schedule(self, start: int, best: int) -> Schedule | None:
        """Return the gamma by concurrency at the traffic's own context, 0 to draft nothing: at `start` the `best` one of the
        decision, elsewhere the fastest. None if all are the same. A server drafts as many as the largest asks for. If two
        differ, bisection with interpolated step times finds the place of the change.
        """
        context = self.context
        if len(self.concurrencies) < 2:
            return None
        found = {size: self.fastest((size, context)) for size in self.concurrencies if self._times((size, context))}
        found[start] = best if found.get(start, best) else 0
        stack = [*pairwise(sorted(found))]
        while stack:
            low, high = stack.pop()
            if high - low > 1 and found[low] != found[high]:
                middle = (low + high) // 2
                found[middle] = self.fastest((middle, context))
                stack += [(low, middle), (middle, high)]
        if set(found.values()) == {best}:
            return None
        groups = [(list(sizes), gamma) for gamma, sizes in groupby(sorted(found), key=found.__getitem__)]
        return tuple((sizes[0] if number else 1, sizes[-1], gamma) for number, (sizes, gamma) in enumerate(groups))

    def at_loads(self, start: int, best: int, judged: Interval | None, *, everywhere: bool) -> Iterator[AtLoad]:
        """Yield the gamma and what it brings by concurrency, at the traffic's own context or `everywhere`: at every context
        that was timed, of a roofline at `CONTEXTS` too. `judged`: the speedup of the decision, which took `best` at `start`.
        """
        timed = CONTEXTS if isinstance(self.costs.options, RooflineCosts) else self.timed
        contexts = sorted({self.context, *timed}) if everywhere else [self.context]
        longest = max(float((pool["prompt_tokens"] + pool["tokens"]).max()) for pool in self.pools)
        for place in sorted(itertools.product({start, *self.concurrencies}, contexts)):
            if (times := self._times(place)) is None:
                continue
            decided = place == (start, self.context)
            gamma = best if decided else self.fastest(place)
            faster = self.mix.routed(self._decoded(times, gamma)) if gamma and not decided else None
            speedup = judged if decided else deciding_interval(faster, self.confidence)
            if gamma and speedup is None:  # times that do not tell
                continue
            if speedup is None or speedup.value < 1:
                yield AtLoad(*place, 0, None, None, beyond=place[1] > longest)
            else:
                costs, longer = self._costs(place[1]), place[1] - self.context  # and prompts by as much
                whole = of_requests(speedup, self.pools, self.mix.weights, costs, self.draft, place[0], longer)
                yield AtLoad(*place, gamma, speedup, whole, beyond=place[1] > longest)

    def fastest(self, place: Place) -> int:
        """Return the fastest gamma at a load, by the value; 0 where decoding without a draft is faster."""
        values = {0: 1.0}
        if (times := self._times(place)) is not None:
            covered = [gamma for gamma in self.gammas if times.covers(gamma)]
            values |= {gamma: self.mix.value(self._decoded(times, gamma)) or 0.0 for gamma in covered}
        return max(values, key=values.__getitem__)

    def _decoded(self, times: StepTimes, gamma: int) -> list[Decoded]:
        return self.mix.decoded([pool.counts(gamma) for pool in self.pools], times)

    def _costs(self, context: int) -> CostModel:
        if context not in self._known:
            self._known[context] = self.costs if context == self.context else self.costs.at(context)
        return self._known[context]

    @cached_property
    def _known(self) -> dict[int, CostModel]:
        return {}

    def _times(self, place: Place) -> StepTimes | None:
        """Return the step times at a load; None beyond the contexts that this concurrency was timed at, or the memory, and
        if they are of no gamma.
        """
        concurrency, context = place
        costs = self._costs(context)
        timed = costs.table.contexts(concurrency) or (context,)
        known = timed[0] <= context <= timed[-1] and costs.fits(concurrency, context)
        times = costs.times(concurrency).get(self.draft) if known else None
        return times if times is not None and any(map(times.covers, self.gammas)) else None
