#!/usr/bin/env python3
"""Hold intervals and verdicts against documents whose truth is known, and errors of step times against known times.

    python scripts/interval_coverage.py [--intervals 4000] [--gates 2000] [--choices 2000] [--step-times 2000]
                                        [--members 400] [--seed 0]

Each kind of text is a pool of synthetic documents of 50 lengths (`members` of each), replayed by `analysis.replay`. The pool
*is* the population: a sample is drawn from it with replacement, and its alpha, tokens per round and speedup are the truth,
exactly. Everything that is held against them is computed by the product's own functions:

intervals: 95 % intervals of 20 and 50 documents; at 50 they must hold the truth 93 to 97 times in 100.
gate: the sequential verdict on up to 400 documents, the speedup exactly at the threshold: at most 5 % false GO and 5 % false
NO-GO. Beside it a verdict of fixed size that is asked again every 5 documents until it says something.
best of 20: drafts that are all exactly at the threshold; the best on one half of the documents, tested on the other: at most
5 % false GO, give or take three standard errors. Beside it the best on all documents, tested on the same ones.
step times: 95 % intervals that uncertain step times alone give a speedup, for timing noise of several kinds and sizes: after
5, 10 and 20 rounds, and under the rule that stops when they are sure. They must hold the truth 93 times in 100; 90 times
where the noise of a step goes on from one round to the next.

Exit code 1 where one of these is not so. With fewer than 2,000 repetitions three standard errors are granted throughout.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm, truncnorm

from alphaprof.analysis.costs import StepRow, StepTable
from alphaprof.analysis.decision import decide, held_out
from alphaprof.analysis.replay import Rounds, Trace, replay, run_lengths
from alphaprof.analysis.sequential import Bounds, decide_sequentially
from alphaprof.analysis.speedup import (
    RoundCounts,
    Speedup,
    StepTime,
    StepTimes,
    free_draft,
    round_costs,
    speedup,
    spent_and_base,
)
from alphaprof.analysis.timing import ORDERED_ROUNDS, SURE, largest_error, round_mixes, step_times
from alphaprof.analysis.units import lots_of
from alphaprof.options import MeasuredCosts
from alphaprof.report.result import share, speedup_interval, tokens_interval

Array = np.ndarray[Any, Any]
Random = np.random.Generator
GAMMA, CONFIDENCE, ERROR = 5, 0.95, 0.05
LEVELS, LONGEST = 50, 512  # lengths of documents in a pool
SIZES, JUDGED, BAND = (20, 50), 50, 0.02  # documents of an interval, where it is judged, how far coverage may be off
MOST, EVERY = 400, 5  # documents that a gate sees at most, and after how many each a fixed-size verdict is asked again
DRAFTS, CHOICE_SIZES = 20, (40, 100)
ENOUGH = 2000  # repetitions from which on noise is no excuse
TIMES = StepTimes({n: StepTime(10 + 0.3 * (n - 1), 0.0) for n in range(1, GAMMA + 2)}, StepTime(0.5, 0.0))
BURSTINESS = 0.6
HELD, HELD_IN_A_ROW = 0.93, 0.90  # what intervals of step times must hold at least
ROUNDS = (5, 10, 20)  # of step times, where nothing stops them earlier
SPREADS = (0.005, 0.01, 0.02)  # standard deviation of the logarithm of a step's time
OUTLIERS, DISTURBED = 0.05, 3.0  # share of steps that take three times as long
DRIFT, PERSISTENCE = 0.5, 0.5  # rise over all rounds, or over 20 of them; lag-1 autocorrelation
SHAKEN = 0.1  # spread of what falls on the whole machine
STEPS = [("target", "decode" if n == 1 else "verify", n) for n in range(1, GAMMA + 2)]
STEPS += [("target", "bookkeeping", 1), ("small", "draft", 1), ("small", "draft", 2), ("small", "bookkeeping", 1)]
TRUE_MS = np.array([*(10 + 0.3 * n for n in range(GAMMA + 1)), 0.1, 2.0, 2.2, 0.05])


@dataclass(frozen=True)
class Traffic:
    """A population of documents, those of one length in a row: their rounds, and how many positions were accepted."""

    counts: RoundCounts
    accepted: Array
    positions: Array

    def draw(self, rng: Random, size: int) -> Array:
        """Rows of independent documents."""
        return rng.integers(0, len(self.positions), size)

    def draw_drafts(self, rng: Random, size: int) -> Array:
        """The same for DRAFTS drafts on documents that have their lengths in common; [drafts, documents]."""
        members = len(self.positions) // LEVELS
        return np.asarray(rng.integers(0, LEVELS, size) * members + rng.integers(0, members, (DRAFTS, size)))

    def sample(self, rows: Array) -> RoundCounts:
        """Rounds of drawn documents, which are independent even where one was drawn twice."""
        return dataclasses.replace(self.counts.rows(rows), cluster=np.arange(len(rows)))

    def truths(self) -> dict[str, float]:
        """Of the whole population, by definition."""
        tokens, rounds = self.counts.tokens.sum(), self.counts.rounds.sum()
        cost = float(self.counts.exactly @ round_costs(TIMES, GAMMA))
        return {
            "alpha": float(self.accepted.sum() / self.positions.sum()),
            "tokens per round": float(tokens / rounds),
            "speedup": float(tokens) / cost,
        }


def lengths() -> Array:
    """LEVELS lengths, log-normal with median 128: the longest documents are thirty times as long as the shortest."""
    return np.asarray(
        np.clip(128 * np.exp(0.8 * norm.ppf((np.arange(LEVELS) + 0.5) / LEVELS)), 16, LONGEST).astype(np.int64)
    )


def documents_alphas(rng: Random, size: Array) -> Array:
    """An acceptance probability for each document: normal around 0.65, standard deviation 0.15, cut to [0.05, 0.98]."""
    return np.asarray(truncnorm.ppf(rng.random(len(size)), -4, 2.2, 0.65, 0.15))


def easier_with_length(rng: Random, size: Array) -> Array:
    """The same, from 0.2 lower for the shortest documents to 0.2 higher for the longest."""
    return np.clip(documents_alphas(rng, size) + 0.4 * (np.argsort(np.argsort(size)) / len(size) - 0.5), 0.05, 0.98)


Alphas = Callable[[Random, Array], Array]
SETTINGS: dict[str, tuple[Alphas, float]] = {
    "alike": (lambda _, size: np.full(len(size), 0.65), 0.0),
    "different": (documents_alphas, 0.0),
    "bursty": (documents_alphas, BURSTINESS),
    "easier if long": (easier_with_length, 0.0),
}


def agreements(rng: Random, alpha: Array, start: Array, burstiness: float) -> Array:
    """Whether each position is accepted: drawn anew with probability 1 - burstiness and at the start of a document, else
    what the position before is.
    """
    anew = rng.random(len(alpha)) >= burstiness
    anew[start] = True
    last = np.maximum.accumulate(np.where(anew, np.arange(len(alpha)), 0))
    return np.asarray((rng.random(len(alpha)) < alpha)[last])


def replayed(agrees: Array, start: Array, size: Array) -> Rounds:
    """Rounds of documents that follow each other."""
    stop = start + size
    always, never = np.full(len(agrees), LONGEST), np.zeros(len(agrees), dtype=bool)
    return replay(Trace(run_lengths(agrees, start, stop), always, start, stop, size, never), GAMMA)


def traffic(name: str, members: int, rng: Random) -> Traffic:
    """The population of a setting."""
    alphas, burstiness = SETTINGS[name]
    size = np.repeat(lengths(), members)
    start = np.cumsum(size) - size
    agrees = agreements(rng, np.repeat(alphas(rng, size), size), start, burstiness)
    found = replayed(agrees, start, size)
    accepted = np.add.reduceat(agrees.astype(float), start)
    counts = RoundCounts.of(found, np.arange(len(size)))
    return Traffic(counts, accepted, size.astype(float))


def noise(repetitions: int) -> float:
    """Three standard errors of a rate of 5 %."""
    return 3 * math.sqrt(ERROR * (1 - ERROR) / repetitions)


def grant(repetitions: int) -> float:
    """What a rate may be off by because there are few repetitions."""
    return 0.0 if repetitions >= ENOUGH else noise(repetitions)


@dataclass(frozen=True)
class Line:
    """One line of a table, and whether it is as promised; None: for information."""

    text: str
    rates: tuple[float, ...]
    met: bool | None

    def __str__(self) -> str:
        shown = "".join(f"{100 * rate:11.2f} %" for rate in self.rates)
        return f"{self.text}{shown}   {'' if self.met is None else 'met' if self.met else 'NOT MET'}".rstrip()


def found_intervals(population: Traffic, rows: Array) -> list[Any]:
    """The product's intervals of alpha, tokens per round and speedup on drawn documents."""
    counts = population.sample(rows)
    free, timed = (speedup([counts], [1.0], times) for times in (free_draft(GAMMA), TIMES))
    return [
        share(counts.cluster, population.accepted[rows], population.positions[rows], CONFIDENCE),
        tokens_interval(free, GAMMA, CONFIDENCE),
        speedup_interval(timed, CONFIDENCE),
    ]


def intervals(name: str, population: Traffic, repetitions: int, rng: Random) -> list[Line]:
    """How often intervals hold the truth, and on which side they miss it."""
    truths, lines = population.truths(), []
    for size in SIZES:
        drawn = [found_intervals(population, population.draw(rng, size)) for _ in range(repetitions)]
        for place, (quantity, truth) in enumerate(truths.items()):
            above = sum(one[place].low > truth for one in drawn) / repetitions
            below = sum(one[place].high < truth for one in drawn) / repetitions
            held = 1 - above - below
            met = abs(held - CONFIDENCE) <= BAND + grant(repetitions) if size == JUDGED else None
            text = f"{name:16}{quantity:18}{truth:8.3f}{size:11}"
            lines.append(Line(text, (held, above, below), met))
    return lines


def bounds_of_rounds() -> Bounds:
    """What is known of documents before they are seen."""
    cost = round_costs(TIMES, GAMMA)
    return Bounds(float((cost / np.arange(1, GAMMA + 2)).min()), float(cost.max()), float(LONGEST - 1))


def asked_again(counts: RoundCounts, threshold: float) -> str:
    """The first verdict of fixed size that is not UNDECIDED, asked after every few documents."""
    for size in range(EVERY, len(counts.tokens) + 1, EVERY):
        seen = speedup([counts.rows(np.arange(size))], [1.0], TIMES)
        if (verdict := decide(seen, threshold, CONFIDENCE, held_out=False).verdict) != "UNDECIDED":
            return verdict
    return "UNDECIDED"


def gate(name: str, population: Traffic, repetitions: int, rng: Random) -> list[Line]:
    """False verdicts of the sequential gate, and of asking again and again, at a speedup that is the threshold."""
    threshold, bounds = population.truths()["speedup"], bounds_of_rounds()
    sequential, peeking = [], []
    for _ in range(repetitions):
        counts = population.sample(population.draw(rng, MOST))
        spent, base = spent_and_base(counts, TIMES)
        sequential.append(decide_sequentially(base, spent, 1.0, bounds, threshold, CONFIDENCE).verdict)
        peeking.append(asked_again(counts, threshold))
    lines = []
    for kind, verdicts in (("sequential", sequential), ("asked again", peeking)):
        rates = tuple(verdicts.count(wrong) / repetitions for wrong in ("GO", "NO-GO"))
        met = max(rates) <= ERROR + grant(repetitions) if kind == "sequential" else None
        lines.append(Line(f"{name:16}{kind:20}{threshold:8.3f}", rates, met))
    return lines


def best(samples: Sequence[RoundCounts], rows: Array) -> tuple[int, Speedup]:
    """The draft with the highest speedup on some of the documents."""
    found = [one for counts in samples if (one := speedup([counts.rows(rows)], [1.0], TIMES)) is not None]
    index = max(range(len(found)), key=lambda draft: found[draft].value)
    return index, found[index]


def best_of_many(name: str, population: Traffic, repetitions: int, rng: Random) -> list[Line]:
    """False GO of the best of DRAFTS drafts, none of which is above the threshold: tested on the other half, or not."""
    threshold, lines = population.truths()["speedup"], []
    for size in CHOICE_SIZES:
        tested = held_out({name: lots_of(str(index) for index in range(size))})[name]
        halves = naive = 0
        for _ in range(repetitions):
            samples = [population.sample(rows) for rows in population.draw_drafts(rng, size)]
            chosen, _ = best(samples, ~tested)
            judged = speedup([samples[chosen].rows(tested)], [1.0], TIMES)
            halves += decide(judged, threshold, CONFIDENCE, held_out=True).verdict == "GO"
            _, winner = best(samples, np.full(size, True))
            naive += decide(winner, threshold, CONFIDENCE, held_out=False).verdict == "GO"
        met = halves / repetitions <= ERROR + noise(repetitions)
        lines.append(Line(f"{name:16}{'the other half':20}{threshold:8.3f}{size:11}", (halves / repetitions,), met))
        lines.append(Line(f"{name:16}{'the same documents':20}{threshold:8.3f}{size:11}", (naive / repetitions,), None))
    return lines


def persistent(rng: Random, shape: tuple[int, ...]) -> Array:
    """Normal noise along the first axis that keeps half of itself from one round to the next."""
    noise = rng.standard_normal(shape)
    for place in range(1, len(noise)):
        noise[place] = PERSISTENCE * noise[place - 1] + math.sqrt(1 - PERSISTENCE**2) * noise[place]
    return noise


def drifting(rounds: int, over: int) -> Array:
    """How much slower the machine gets, [rounds, steps]: from step to step, every second round in the opposite order."""
    place = np.tile(np.arange(len(STEPS)), (rounds, 1))
    place[1::2] = place[1::2, ::-1]
    return 1 + DRIFT * (np.arange(rounds)[:, None] + place / len(STEPS)) / over


def timed(kind: str, rng: Random, rounds: int, spread: float) -> Array:
    """Times in ms, [rounds, steps]: those of `TRUE_MS` with noise that leaves the medians of their ratios as they are."""
    shape = (rounds, len(STEPS))
    own = persistent(rng, shape) if kind == "steps go on" else rng.standard_normal(shape)
    ms = TRUE_MS * np.exp(spread * own)
    if kind == "outliers":
        ms *= np.where(rng.random(shape) < OUTLIERS, DISTURBED, 1.0)
    if kind == "drift":
        ms *= drifting(rounds, min(rounds, ROUNDS[-1]))
    if kind == "machine goes on":
        ms *= np.exp(SHAKEN * persistent(rng, (rounds, 1)))
    return np.asarray(ms)


NOISES = ("log-normal", "outliers", "drift", "machine goes on", "steps go on")


def stopped(ms: Array, mixes: Array) -> Array:
    """The rounds after which `profiling.latency` would stop for certainty, looking after each."""
    for rounds in range(ORDERED_ROUNDS, len(ms)):
        if largest_error(ms[:rounds], mixes) < SURE:
            return ms[:rounds]
    return ms


def step_table(ms: Array) -> StepTable:
    """The times as a run has them."""
    rows = zip(STEPS, step_times(ms), ms.T, strict=True)
    return StepTable([StepRow(*step, 1, 256, time, rounds=tuple(each)) for step, time, each in rows])


def timing_bounds(counts: RoundCounts, ms: Array) -> tuple[float, float]:
    """The 95 % interval of a speedup on documents that are certain."""
    times = step_table(ms).times("small", GAMMA, 1, 256)
    found = speedup([counts], [1.0], times) if times is not None else None
    if found is None:
        raise ValueError("no speedup")
    return dataclasses.replace(found, sampling_error=0.0).bounds((1 - CONFIDENCE) / 2)


def timings(name: str, population: Traffic, repetitions: int, rng: Random) -> list[Line]:
    """How often the interval that step times give a speedup holds the truth, and after how many rounds: on one text."""
    if name != next(iter(SETTINGS)):
        return []
    counts = dataclasses.replace(population.counts.rows(population.draw(rng, 50)), cluster=np.arange(50))
    exact = StepTable([StepRow(*step, 1, 256, ms) for step, ms in zip(STEPS, TRUE_MS, strict=True)])
    truth = speedup([counts], [1.0], exact.times("small", GAMMA, 1, 256)).value  # type: ignore[union-attr, arg-type]
    mixes, most = round_mixes(STEPS, GAMMA), MeasuredCosts().repeats
    lines = []
    for kind in NOISES:
        for rounds, spread in [*((rounds, SPREADS[-1]) for rounds in ROUNDS), *((None, spread) for spread in SPREADS)]:
            above = below = taken = 0
            for _ in range(repetitions):
                ms = timed(kind, rng, rounds or most, spread)
                ms = ms if rounds else stopped(ms, mixes)
                low, high = timing_bounds(counts, ms)
                above, below, taken = above + (low > truth), below + (high < truth), taken + len(ms)
            held = 1 - (above + below) / repetitions
            met = held >= (HELD_IN_A_ROW if kind == NOISES[-1] else HELD) - grant(repetitions)
            ends = "all of them" if rounds else "when sure"
            text = f"{kind:18}{100 * spread:6.1f} %   {ends:14}{taken / repetitions:8.1f}"
            lines.append(Line(text, (held, above / repetitions, below / repetitions), met))
    return lines


PARTS: dict[str, tuple[str, str, Callable[[str, Traffic, int, Random], list[Line]]]] = {
    "intervals": (
        "95 % intervals",
        f"{'texts':16}{'quantity':18}{'truth':>8}{'documents':>11}{'held':>13}{'too high':>13}{'too low':>13}",
        intervals,
    ),
    "gates": (
        f"verdicts on up to {MOST} documents, speedup = threshold",
        f"{'texts':16}{'verdict':20}{'speedup':>8}{'false GO':>13}{'false NO-GO':>13}",
        gate,
    ),
    "choices": (
        f"the best of {DRAFTS} drafts, all at the threshold",
        f"{'texts':16}{'tested on':20}{'speedup':>8}{'documents':>11}{'false GO':>13}",
        best_of_many,
    ),
    "step_times": (
        "95 % intervals of a speedup from uncertain step times",
        f"{'noise':18}{'spread':>8}   {'stops':14}{'rounds':>8}{'held':>13}{'too high':>13}{'too low':>13}",
        timings,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print; 1 if something is not as promised."""
    parser = argparse.ArgumentParser(description="Hold intervals and verdicts against documents whose truth is known.")
    parser.add_argument("--intervals", type=int, default=4000, help="samples for each interval")
    parser.add_argument("--gates", type=int, default=2000, help="runs of each sequential verdict")
    parser.add_argument("--choices", type=int, default=2000, help="choices of a draft, for each number of documents")
    parser.add_argument("--step-times", type=int, default=2000, help="measurements of step times")
    parser.add_argument("--members", type=int, default=400, help="documents of each length in a population")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))
    rng, failed = np.random.default_rng(options["seed"]), 0
    populations = {name: traffic(name, options["members"], rng) for name in SETTINGS}
    for part, (title, header, measured) in PARTS.items():
        print(f"{title}, {options[part]:,} samples a line\n{header}")
        for name, population in populations.items():
            for line in measured(name, population, options[part], rng):
                print(line, flush=True)
                failed += line.met is False
        print()
    print(f"{failed} not met")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
