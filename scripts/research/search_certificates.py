#!/usr/bin/env python3
"""Try to break the certificates of acceptance, with far more cases than the tests have.

    python scripts/research/search_certificates.py [--draws 100000] [--seed 0] [--scale 1]

For every rule with an accepted set: `draws` random targets p (V from 2 to 50; flat, peaked, with ties and zeros; a third of
them known by their largest probabilities alone), and for each p drafts q whose top tokens are all rejected: random ones, p
with rejected tokens lifted, the best pooled one (found by golden section, not by the library), and descents by random steps
in logits. What a rule keeps is asked of `rules`, token by token, and ties in q are broken in the worst way.

Counted are drafts with a divergence below the threshold: exit code 1 if there are any. How near it came by target:
divergence / threshold - 1 of the nearest draft. `--scale 1.05` multiplies thresholds, to see that the search finds what is
wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
from scipy.special import entr, rel_entr

from alphaprof.rules import BoundRule
from alphaprof.theory.certificates import ACCEPTED, Array, Divergence, Target, certify, draft_width
from alphaprof.theory.certificates import thresholds as thresholds_of

BATCH = 250  # targets that share V, width and the parameters of the rule
SECTIONS, DESCENT = 18, 12  # steps of each search
RELATIVE, ABSOLUTE = 1e-9, 4e-15  # rounding; the latter of probabilities, and of exp(-D)
SMALL, LARGE = 1e-6, 10.0  # thresholds that are far enough from rounding to say how near a search comes
GOLDEN = (5**0.5 - 1) / 2
STRICT = BoundRule("strict")
Random = np.random.Generator
PARAMETERS: dict[str, Callable[[Random], tuple[float, ...]]] = {
    "strict": lambda _: (),
    "additive": lambda rng: (rng.choice([0, 0.05, 0.3, rng.random()]),),
    "multiplicative": lambda rng: (rng.choice([0.1, 0.5, 1, rng.random()]),),
    "top_m": lambda rng: (int(rng.integers(1, 9)),),
    "typical": lambda rng: (rng.choice([0, 0.09, 0.3, rng.random()]), rng.choice([0.3, 0.55, 1, rng.random()])),
    "trtllm": lambda rng: (int(rng.integers(1, 9)), rng.choice([0.1, 0.6, rng.random()])),
    "tree": lambda rng: (int(rng.integers(1, 9)),),
}
DISTANCES: dict[Divergence, Callable[[Array, Array], Array]] = {  # by definition, over the last axis
    "kl": lambda p, q: rel_entr(p, q).sum(-1),
    "tv": lambda p, q: np.abs(p - q).sum(-1) / 2,
}


@dataclass
class Tally:
    """How often thresholds were tried and did not hold; `nearest`: by target, the least divergence over its threshold."""

    tried: int = 0
    broken: int = 0
    nearest: list[Array] = field(default_factory=list)

    def add(self, tried: Array, small: Array, large: Array) -> None:
        """Cases [n] in which `small` must not exceed `large`."""
        with np.errstate(invalid="ignore"):  # infinite - infinite: not exceeded
            slack = RELATIVE * large + ABSOLUTE * np.exp(np.minimum(large, 99.0))
            self.broken += int((tried & (small - large > slack)).sum())
        self.tried += int(tried.sum())

    def summary(self) -> str:
        """Cases, failures, and the ratios less 1: the worst one, and the median over targets."""
        beyond = np.sort(np.concatenate([*self.nearest, []])) - 1
        worst, median = (beyond[0], np.median(beyond)) if len(beyond) else (np.nan, np.nan)
        return f"{self.tried:12,}{self.broken:12,}{worst:11.1e}{median:11.1e}"


@dataclass(frozen=True)
class Batch:
    """Targets p [n, V], tokens in any order, and what a rule keeps of them [n, V]; a draft proposes `width` tokens."""

    rule: BoundRule
    width: int
    p: Array
    accepted: Array

    @classmethod
    def of(cls, rule: BoundRule, width: int, p: Array) -> Batch:
        """With what `rules` says of each token; for a tree, whether it is the target's top token."""
        n, size = p.shape
        top = np.repeat(p.argmax(1), size)
        columns = {
            "draft_top": np.tile(np.arange(size), n),
            "target_top": top,
            "token": top,
            "greedy": np.ones(n * size, dtype=bool),
            "target_top_prob": np.repeat(p.max(1), size),
            "target_prob_of_draft_top": p.ravel(),
            "target_rank_of_draft_top": 1 + np.argsort(np.argsort(-p, 1, kind="stable"), 1).ravel(),
            "target_entropy": np.repeat(entr(p).sum(1), size),
        }
        judge = STRICT if rule.name == "tree" else rule
        return cls(rule, width, p, judge.accept(columns).reshape(n, size) > 0)

    @property
    def rejectable(self) -> Array:
        """Where as many tokens are rejected as a draft proposes, [n]."""
        return np.asarray((~self.accepted).sum(1) >= self.width)

    def thresholds(self, divergence: Divergence, known: int) -> Array:
        """D* [n] by the library, from the `known` largest probabilities."""
        target = Target(-np.sort(-self.p, 1)[:, :known], self.p.shape[1], entr(self.p).sum(1))
        if self.width == draft_width(self.rule):
            return certify(self.rule, target, divergence).value
        accepted = ACCEPTED[self.rule.name](target, **self.rule.arguments)
        return thresholds_of(target, accepted, self.width, divergence).value

    def rejects(self, q: Array) -> Array:
        """Whether the `width` most probable tokens of q are all rejected, equal ones taken in the worst order, [n]."""
        place = q.shape[1] - self.width
        rejected = np.partition(np.where(self.accepted, -1.0, q), place, 1)[:, place]
        return np.asarray(rejected >= np.where(self.accepted, q, 0.0).max(1))

    def drafted(self, values: Array) -> Array:
        """The `width` rejected tokens with the largest values, as a mask [n, V]."""
        mask = np.zeros(values.shape, dtype=bool)
        order = np.argsort(np.where(self.accepted, np.inf, -values), 1)
        np.put_along_axis(mask, order[:, : self.width], True, 1)
        return mask

    def pushed(self, q: Array, drafted: Array, share: Array) -> Array:
        """Distributions with `drafted` tokens of q [n, V] ahead of the accepted ones: those in the way are set to one level,
        at a `share` [n] of the way from the smallest drafted one to the largest accepted one.
        """
        top = np.where(self.accepted, q, 0.0).max(1)
        low = np.minimum(np.where(drafted, q, np.inf).min(1), top)
        level = np.clip(low + share * (top - low), low, top)[:, None]
        moved = np.where(drafted, np.maximum(q, level), np.where(self.accepted, np.minimum(q, level), q))
        return np.asarray(moved / moved.sum(1, keepdims=True))


@dataclass
class Attack:
    """Drafts held against the thresholds [n] of one divergence at the targets of one batch; `nearest` [n] of them."""

    batch: Batch
    divergence: Divergence
    limits: Array
    tally: Tally
    nearest: Array

    def measured(self, q: Array) -> Array:
        """Divergences [n] of drafts whose tokens are all rejected; infinite for others."""
        wrong = self.batch.rejects(q)
        found = np.where(wrong, DISTANCES[self.divergence](self.batch.p, q), np.inf)
        self.tally.add(wrong, self.limits, found)
        self.nearest = np.minimum(self.nearest, found)
        return found

    def pooled(self, drafted: Array) -> Array:
        """The nearest draft that differs from p by one level of `drafted` and accepted tokens, by golden section."""
        p, low, high = self.batch.p, np.zeros(len(self.limits)), np.ones(len(self.limits))
        left, right = high - GOLDEN, low + GOLDEN
        at_left, at_right = (self.measured(self.batch.pushed(p, drafted, share)) for share in (left, right))
        for _ in range(SECTIONS):
            down = at_left < at_right
            low, high = np.where(down, low, left), np.where(down, right, high)
            inside, at_inside = np.where(down, left, right), np.where(down, at_left, at_right)
            fresh = low + high - inside
            at_fresh = self.measured(self.batch.pushed(p, drafted, fresh))
            left, right = np.where(down, fresh, inside), np.where(down, inside, fresh)
            at_left, at_right = np.where(down, at_fresh, at_inside), np.where(down, at_inside, at_fresh)
        return self.batch.pushed(p, drafted, np.where(at_left < at_right, left, right))

    def descend(self, q: Array, drafted: Array, rng: Random) -> None:
        """From drafts q to nearer ones by random steps in logits, the longer the better they fare."""
        best, size = self.measured(q), 10.0 ** rng.uniform(-4, -0.3, len(q))
        for _ in range(DESCENT):
            step = np.exp(size[:, None] * rng.standard_normal(q.shape))
            found = self.batch.pushed(q * step, drafted, rng.random(len(q)))
            value = self.measured(found)
            better = value < best
            q, best = np.where(better[:, None], found, q), np.where(better, value, best)
            size *= np.where(better, 1.4, 0.7)


def targets(n: int, size: int, rng: Random) -> Array:
    """Distributions of many shapes, [n, V]."""
    p = rng.standard_gamma(rng.choice([0.05, 0.3, 1.0, 5.0, 50.0], (n, 1)), (n, size)) + 1e-12
    kind, column, dust = rng.integers(0, 6, n), rng.integers(0, 6, (n, 1)), 10.0 ** -rng.uniform(1, 20, (n, 1))
    flat = np.where(np.arange(size) <= rng.integers(1, size, (n, 1)), 1 + dust * rng.random((n, size)), dust)
    zeros = np.where(rng.random((n, size)) < 0.5, p, 0.0)
    p = np.select([column == 0, column == 1, column == 2], [np.ceil(4 * p / p.max(1, keepdims=True)), zeros, flat], p)
    p[:, 0] = np.where(kind < 3, (p[:, 1:].sum(1) + 1e-9) * np.exp(rng.normal(0, 3, n)), p[:, 0] + 1e-12)
    p[:, 1] = np.where(kind == 5, p[:, 0] * (1 - 10.0 ** -rng.uniform(2, 12, n)), p[:, 1])
    return rng.permuted(p / p.sum(1, keepdims=True), axis=1)


def attack(batch: Batch, tallies: dict[Divergence, Tally], scale: float, rng: Random) -> None:
    """Drafts of all kinds against a batch of targets."""
    n, size = batch.p.shape
    known = int(rng.choice([size, size, rng.integers(1, size + 1)]))
    usual = rng.random((n, 1)) < 0.5
    cheapest, other = batch.drafted(batch.p), batch.drafted(rng.random((n, size)))
    either = np.where(usual, cheapest, other)
    anything = rng.standard_gamma(rng.choice([0.3, 1.0, 10.0], (n, 1)), (n, size)) + 1e-12
    noise = np.exp(10.0 ** rng.uniform(-6, 0.3, (n, 1)) * rng.standard_normal((n, size)))
    lifted = np.where(cheapest, batch.p.max(1, keepdims=True) * (1 + 1e-9), batch.p)  # just above, not beside
    starts = (anything, batch.p * noise, lifted, batch.p, batch.p + 1e-3 * anything)
    masks = (either, cheapest, cheapest, other, either)
    drafts = np.stack([batch.pushed(q, mask, rng.random(n)) for q, mask in zip(starts, masks, strict=True)])
    for divergence, tally in tallies.items():
        limits = batch.thresholds(divergence, known) * scale
        trial = Attack(batch, divergence, limits, tally, np.full(n, np.inf))
        best = np.stack([trial.measured(q) for q in drafts]).argmin(0)
        near = np.where(usual, trial.pooled(cheapest) * noise, drafts[best, np.arange(n)])
        trial.descend(batch.pushed(near, either, rng.random(n)), either, rng)
        if known == size:
            usable = (limits > SMALL) & (limits < LARGE)
            tally.nearest.append(trial.nearest[usable] / limits[usable])


def search(name: str, draws: int, scale: float, rng: Random) -> dict[Divergence, Tally]:
    """What `draws` targets tell of a rule's thresholds."""
    tallies = {kind: Tally() for kind in get_args(Divergence)}
    done, batch = 0, max(1, min(BATCH, draws // 5))
    while done < draws:
        rule, size = BoundRule(name, PARAMETERS[name](rng)), int(rng.integers(2, 51))
        width = draft_width(rule) if name == "tree" else int(rng.choice([1, 1, 2, 4]))
        p = targets(batch, size, rng)
        p = p[Batch.of(rule, width, p).rejectable]
        if len(p):
            attack(Batch.of(rule, width, p), tallies, scale, rng)
            done += len(p)
    return tallies


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print; 1 if something does not hold."""
    parser = argparse.ArgumentParser(description="Try to break certificates.")
    parser.add_argument("--draws", type=int, default=100_000, help="targets for each rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply thresholds by this")
    options = parser.parse_args(arguments)
    rng, tried, broken = np.random.default_rng(options.seed), 0, 0
    print(f"{'rule':16}{'D':4}{'tried':>12}{'broken':>12}{'worst':>11}{'median':>11}")
    for name in ACCEPTED:
        for divergence, tally in search(name, options.draws, options.scale, rng).items():
            print(f"{name:16}{divergence:4}{tally.summary()}", flush=True)
            tried, broken = tried + tally.tried, broken + tally.broken
    print(f"{tried:,} cases, {broken:,} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
