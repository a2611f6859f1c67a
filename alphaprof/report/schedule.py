"""The gamma to draft with by load, from the rounds of a run: one draft on a traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import without_draft
from alphaprof.costs.speedup import Decoded, Mix
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

    def schedule(self, start: int, best: int) -> Schedule | None:
        """Return the gamma by concurrency, 0 to draft nothing: the `best` one, of the decision at `start`, and others from
        where they clearly differ from it. None if none does. A server drafts as many as the largest asks for. If two differ,
        bisection with interpolated step times finds the place of the change.
        """
        known = [size for size in self.costs.concurrencies if self.draft in self.costs.times(size)]
        if len(known) < 2:
            return None
        found, stack = {start: self.told_apart(start, best)}, list[tuple[int, int]]()
        for side in ([size for size in known if size > start], [size for size in reversed(known) if size < start]):
            for near, far in pairwise([start, *side]):
                found[far] = self.told_apart(far, found[near])
                stack.append((near, far))
        while stack:
            near, far = stack.pop()
            if abs(far - near) > 1 and found[near] != found[far]:
                middle = (near + far) // 2
                found[middle] = self.told_apart(middle, found[near])
                stack += [(near, middle), (middle, far)]
        if set(found.values()) == {best}:
            return None
        groups = [(list(sizes), gamma) for gamma, sizes in groupby(sorted(found), key=found.__getitem__)]
        return tuple((sizes[0] if number else 1, sizes[-1], gamma) for number, (sizes, gamma) in enumerate(groups))

    def told_apart(self, concurrency: int, present: int) -> int:
        """Return the fastest gamma at a concurrency, 0 for no drafts, of those that are faster than the `present` one by the
        lower bound of their gain, each at its share of what may be wrong; else the present one.
        """
        if (times := self.costs.times(concurrency).get(self.draft)) is None:
            return present

        def decoded(gamma: int) -> list[Decoded]:
            if gamma == 0:
                return [without_draft(pool.counts(self.gammas[0]), times) for pool in self.pools]
            return self.mix.decoded([pool.counts(gamma) for pool in self.pools], times)

        others = [gamma for gamma in (0, *self.gammas) if gamma != present]
        tail, gains, now = (1 - self.confidence) / len(others), dict[int, float](), decoded(present)
        for gamma in others:
            gain = self.mix.gain(now, decoded(gamma))
            if gain is not None and gain.deciding(tail)[0] > 1:
                gains[gamma] = gain.value
        return max(gains, key=gains.__getitem__, default=present)
