"""The gamma to draft with by load, from the rounds of a run: one draft on a traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import StepTimes
from alphaprof.costs.speedup import Decoded, Mix
from alphaprof.report.loads import CONTEXTS, AtLoad, Place, over_loads
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
        """Return the gamma by concurrency at the traffic's own context, 0 to draft nothing: the `best` one, of the decision
        at `start`, and others from where they clearly differ from it. None if none does. A server drafts as many as the
        largest asks for. If two differ, bisection with interpolated step times finds the place of the change.
        """
        context = self.context
        if len(self.concurrencies) < 2:
            return None
        chosen = over_loads(self.concurrencies, (), (start, context), best, self.told_apart)
        found = {size: self._served(place, gamma) for place, gamma in chosen.items() for size in place[:1]}
        stack = [*pairwise(sorted(found))]
        while stack:
            low, high = stack.pop()
            if high - low > 1 and found[low] != found[high]:
                middle, near = ((low + high) // 2, context), (low if low >= start else high, context)
                chosen[middle] = self.told_apart(middle, chosen[near])
                found[middle[0]] = self._served(middle, chosen[middle])
                stack += [(low, middle[0]), (middle[0], high)]
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
        chosen = over_loads(self.concurrencies, contexts, (start, self.context), best, self.told_apart)
        for place, gamma in sorted(chosen.items()):
            faster = self.mix.routed(self._decoded(times, gamma)) if (times := self._times(place)) is not None else None
            if faster is None:
                continue
            speedup = judged if place == (start, self.context) else deciding_interval(faster, self.confidence)
            if speedup is None or speedup.value < 1:
                yield AtLoad(*place, 0, None, None, beyond=place[1] > longest)
            else:
                costs, longer = self._costs(place[1]), place[1] - self.context  # and prompts by as much
                whole = of_requests(speedup, self.pools, self.mix.weights, costs, self.draft, place[0], longer)
                yield AtLoad(*place, gamma, speedup, whole, beyond=place[1] > longest)

    def told_apart(self, place: Place, present: int) -> int:
        """Return the fastest gamma at a load of those that are faster than the `present` one by the lower bound of their
        gain, each at its share of what may be wrong; else the present one, if it is not slower than decoding without a draft
        and there are times of it: then the fastest of all.
        """
        if (times := self._times(place)) is None:
            return present
        ways = {gamma: self._decoded(times, gamma) for gamma in (present, *self.gammas) if times.covers(gamma)}
        values = {gamma: self.mix.value(way) or 0.0 for gamma, way in ways.items()}
        if values.get(present, 0.0) < 1:
            return max(values, key=values.__getitem__, default=present)
        gains = {gamma: self.mix.gain(ways[present], way) for gamma, way in ways.items() if gamma != present}
        tail = (1 - self.confidence) / max(len(gains), 1)
        surely = [gamma for gamma, gain in gains.items() if gain is not None and gain.deciding(tail)[0] > 1]
        return max(surely, key=values.__getitem__, default=present)

    def _served(self, place: Place, gamma: int) -> int:
        """Return a gamma, or 0 where it is slower than decoding without a draft."""
        times = self._times(place)
        value = self.mix.value(self._decoded(times, gamma)) if times is not None else None
        return 0 if value is not None and value < 1 else gamma

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
        """Return the step times at a load; None beyond the contexts that this concurrency was timed at, or the memory."""
        concurrency, context = place
        costs = self._costs(context)
        timed = costs.table.contexts(concurrency) or (context,)
        known = timed[0] <= context <= timed[-1] and costs.fits(concurrency, context)
        return costs.times(concurrency).get(self.draft) if known else None
