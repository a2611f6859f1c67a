#!/usr/bin/env python3
"""Hold intervals and verdicts against documents whose truth is known, and errors of step times against known times.

    python scripts/research/interval_coverage.py [--intervals 4000] [--gates 2000] [--members 400] [--seed 0]

Each kind of text is a pool of synthetic documents of 50 lengths (`members` of each), replayed by `totals.replay`. The pool
*is* the population: a sample is drawn from it with replacement, and its alpha, tokens per round and speedup are the truth,
exactly. Everything that is held against them is computed by the product's own functions. docs/research/coverage.md has the
tables, with what each part promises; 0 samples leave a part out.

Exit code 1 where a promise is not met. With fewer than 2,000 repetitions three standard errors are granted throughout.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm, truncnorm

from alphaprof.config.options import MeasuredCosts
from alphaprof.costs.rounds import StepTime, StepTimes, free_draft, round_costs
from alphaprof.costs.speedup import Speedup, speedup
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import ORDERED_ROUNDS, SURE, autocorrelation, largest_error, round_mixes, step_times
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.report.verdict import CrossFit, Decision, decide
from alphaprof.stats.estimate import pooled_share
from alphaprof.totals.replay import RoundCounts, Rounds, Trace, replay, run_lengths

Array = np.ndarray[Any, Any]
Random = np.random.Generator
GAMMA, CONFIDENCE, ERROR = 5, 0.95, 0.05
LEVELS, LONGEST = 50, 512  # lengths of documents in a pool
SIZES, JUDGED, BAND = (20, 50), 50, 0.02  # documents of an interval, where it is judged, how far coverage may be off
MOST, EVERY = 400, 5  # documents of a run that is extended until its verdict is good, and after how many each it is asked
ENOUGH = 2000  # repetitions from which on noise is no excuse
TIMES = StepTimes({n: StepTime(10 + 0.3 * (n - 1), 0.0) for n in range(1, GAMMA + 2)}, StepTime(0.5, 0.0))
BURSTINESS = 0.6
HELD_BY_TIMES, HELD_IN_A_ROW = 0.93, 0.90  # what intervals of step times must hold at least
ROUNDS = (5, 10, 20)  # of step times, where nothing stops them earlier
SPREADS = (0.005, 0.01, 0.02)  # standard deviation of the logarithm of a step's time
OUTLIERS, DISTURBED = 0.05, 3.0  # share of steps that take three times as long
DRIFT, PERSISTENCE = 0.5, 0.5  # rise over all rounds, or over 20 of them; lag-1 autocorrelation
ALONE = 5  # how many times as noisy decoding is, where it is disturbed alone
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


def lengths(sigma: float = 0.8, longest: int = LONGEST) -> Array:
    """LEVELS lengths, log-normal with median 128: the longest documents are thirty times as long as the shortest."""
    drawn = 128 * np.exp(sigma * norm.ppf((np.arange(LEVELS) + 0.5) / LEVELS))
    return np.asarray(np.clip(drawn, 16, longest).astype(np.int64))


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
    return replay(Trace(run_lengths(agrees, start, stop), np.full(len(agrees), int(size.max())), start, stop), GAMMA)


def traffic(name: str, members: int, rng: Random) -> Traffic:
    """The population of a setting."""
    alphas, burstiness = SETTINGS[name]
    return population(np.repeat(lengths(), members), alphas, rng, burstiness)


def population(size: Array, alphas: Alphas, rng: Random, burstiness: float = 0.0) -> Traffic:
    """Documents of the given sizes."""
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
        pooled_share(counts.cluster, population.accepted[rows], population.positions[rows], CONFIDENCE),
        tokens_interval(free, GAMMA, CONFIDENCE),
        speedup_interval(timed, CONFIDENCE),
    ]


def verdict_on(one: Speedup | None, threshold: float, confidence: float) -> Decision:
    """The decision on a speedup for which nothing was chosen."""
    return decide(CrossFit([], one), threshold, confidence)


def intervals(name: str, population: Traffic, repetitions: int, rng: Random) -> list[Line]:
    """How often intervals hold the truth, and on which side they miss it."""
    truths, lines = population.truths(), []
    for size in SIZES:
        drawn = [found_intervals(population, population.draw(rng, size)) for _ in range(repetitions)]
        for place, (quantity, truth) in enumerate(truths.items()):
            above = sum(one[place].low > truth for one in drawn) / repetitions
            below = sum(one[place].high < truth for one in drawn) / repetitions
            held = 1 - above - below
            most = 1.0 if name == "alike" and quantity != "alpha" else CONFIDENCE + BAND + grant(repetitions)
            met = CONFIDENCE - BAND - grant(repetitions) <= held <= most if size == JUDGED else None
            text = f"{name:16}{quantity:18}{truth:8.3f}{size:11}"
            lines.append(Line(text, (held, above, below), met))
    return lines


def asked_again(counts: RoundCounts, threshold: float) -> str:
    """The first verdict of fixed size that is not UNDECIDED, asked after every few documents."""
    for size in range(EVERY, len(counts.tokens) + 1, EVERY):
        seen = speedup([counts.rows(np.arange(size))], [1.0], TIMES)
        if (verdict := verdict_on(seen, threshold, CONFIDENCE).verdict) != "UNDECIDED":
            return verdict
    return "UNDECIDED"


def gate(name: str, population: Traffic, repetitions: int, rng: Random) -> list[Line]:
    """False verdicts of asking once, and of asking again and again, at a speedup that is the threshold."""
    threshold = population.truths()["speedup"]
    once, again = [], []
    for _ in range(repetitions):
        counts = population.sample(population.draw(rng, MOST))
        once.append(verdict_on(speedup([counts], [1.0], TIMES), threshold, CONFIDENCE).verdict)
        again.append(asked_again(counts, threshold))
    lines = []
    for kind, verdicts in (("asked once", once), ("asked again", again)):
        rates = tuple(verdicts.count(wrong) / repetitions for wrong in ("GO", "NO-GO"))
        met = max(rates) <= ERROR + noise(repetitions) if kind == "asked once" else None
        lines.append(Line(f"{name:16}{kind:20}{threshold:8.3f}", rates, met))
    return lines


BAD_SHARES, BAD_SIZES = (0.02, 0.10, 0.25), (4, 8, 16, 32, 64)
GOOD_AND_BAD = {"1 and 0": (1.0, 0.0), "0.95 and 0.3": (0.95, 0.3)}
BAD_LENGTHS = {"one length": np.full(LEVELS, 128), "different": lengths()}


def bad_documents(name: str, members: int, repetitions: int, rng: Random) -> Iterator[Line]:
    """False GO and NO-GO where a share of the documents is bad: whether one of them is in a sample decides everything."""
    good, bad = GOOD_AND_BAD[name]
    for kind, part in itertools.product(BAD_LENGTHS, BAD_SHARES):
        size = np.repeat(BAD_LENGTHS[kind], members)
        poor = np.arange(len(size)) % members < part * members
        texts = population(size, lambda _, size, poor=poor: np.where(poor, bad, good), rng)
        truth = texts.truths()["speedup"]
        shown = []
        for documents in BAD_SIZES:
            found = [speedup([texts.sample(texts.draw(rng, documents))], [1.0], TIMES) for _ in range(repetitions)]
            verdicts = [verdict_on(one, truth, CONFIDENCE).verdict for one in found]
            shown.append(verdicts.count("GO") / repetitions)
        promised = kind == "one length" and part > 0.05
        met = max(shown[BAD_SIZES.index(16) :]) <= ERROR + noise(repetitions) if promised else None
        yield Line(f"{name:16}{kind:13}{part:7.0%}{truth:8.3f}", tuple(shown), met)


def persistent(rng: Random, shape: tuple[int, ...]) -> Array:
    """Normal noise along the first axis that keeps half of itself from one round to the next."""
    noise = rng.standard_normal(shape)
    for place in range(1, len(noise)):
        noise[place] = PERSISTENCE * noise[place - 1] + math.sqrt(1 - PERSISTENCE**2) * noise[place]
    return noise


def drifting(rounds: int, over: int) -> Array:
    """How much slower the machine gets, [rounds, steps]: from step to step, two rounds forwards and two backwards."""
    place = np.tile(np.arange(len(STEPS)), (rounds, 1))
    place[np.arange(rounds) % 4 >= 2] = place[0, ::-1]
    return 1 + DRIFT * (np.arange(rounds)[:, None] + place / len(STEPS)) / over


def timed(kind: str, rng: Random, rounds: int, spread: float) -> Array:
    """Times in ms, [rounds, steps]: those of `TRUE_MS` with noise that leaves the medians of their ratios as they are. The
    decode step, which comes first, is the median of three.
    """
    shape = (rounds, len(STEPS) + 2)
    own = persistent(rng, shape) if kind == "steps go on" else rng.standard_normal(shape)
    if kind == "decode alone":
        own[:, 3:] /= ALONE
    factor = np.exp(spread * own)
    if kind == "outliers":
        factor *= np.where(rng.random(shape) < OUTLIERS, DISTURBED, 1.0)
    ms = TRUE_MS * np.column_stack([np.median(factor[:, :3], axis=1), factor[:, 3:]])
    if kind == "drift":
        ms *= drifting(rounds, min(rounds, ROUNDS[-1]))
    if kind == "machine goes on":
        ms *= np.exp(SHAKEN * persistent(rng, (rounds, 1)))
    return np.asarray(ms)


NOISES = ("log-normal", "outliers", "decode alone", "drift", "machine goes on", "steps go on")


def stopped(ms: Array, mixes: Array) -> Array:
    """The rounds after which `profiling.timing.latency` would stop for certainty, looking after each."""
    kinds = [step for _, step, _ in STEPS]
    for rounds in range(ORDERED_ROUNDS, len(ms)):
        r = autocorrelation(zip(kinds, ms[:rounds].T, strict=True))
        if largest_error(ms[:rounds], mixes, r) < SURE:
            return ms[:rounds]
    return ms


def step_table(ms: Array) -> StepTable:
    """The times as a run has them."""
    rows = zip(STEPS, step_times(ms), ms.T, strict=True)
    return StepTable([StepRow(*step, 1, 256, time, rounds=tuple(each)) for step, time, each in rows])


def timing_bounds(counts: RoundCounts, ms: Array) -> tuple[float, float]:
    """The 95 % interval of a speedup on documents that are certain."""
    times = step_table(ms).times("small", GAMMA, 1, 256)
    found = speedup([counts], [1.0], times)
    certain = {"sampling_error": 0.0, "skewness": 0.0, "unseen_slower": 0.0, "unseen_faster": 0.0}
    return dataclasses.replace(found, **certain).bounds((1 - CONFIDENCE) / 2)


def timings(kind: str, members: int, repetitions: int, rng: Random) -> Iterator[Line]:
    """How often the interval that step times give a speedup holds the truth, and after how many rounds: on one text."""
    texts = traffic("alike", members, rng)
    counts = dataclasses.replace(texts.counts.rows(texts.draw(rng, 50)), cluster=np.arange(50))
    exact = StepTable([StepRow(*step, 1, 256, ms) for step, ms in zip(STEPS, TRUE_MS, strict=True)])
    truth = speedup([counts], [1.0], exact.times("small", GAMMA, 1, 256)).value
    mixes, most = round_mixes(STEPS, GAMMA), MeasuredCosts().repeats
    for rounds, spread in [*((rounds, SPREADS[-1]) for rounds in ROUNDS), *((None, spread) for spread in SPREADS)]:
        above = below = taken = 0
        for _ in range(repetitions):
            ms = timed(kind, rng, rounds or most, spread)
            ms = ms if rounds else stopped(ms, mixes)
            low, high = timing_bounds(counts, ms)
            above, below, taken = above + (low > truth), below + (high < truth), taken + len(ms)
        held = 1 - (above + below) / repetitions
        met = held >= (HELD_IN_A_ROW if kind == NOISES[-1] else HELD_BY_TIMES) - grant(repetitions)
        ends = "all of them" if rounds else "when sure"
        text = f"{kind:18}{100 * spread:6.1f} %   {ends:14}{taken / repetitions:8.1f}"
        yield Line(text, (held, above / repetitions, below / repetitions), met)


Part = Callable[[str, int, int, Random], Iterable[Line]]


def of_population(measured: Callable[[str, Traffic, int, Random], list[Line]]) -> Part:
    """A part whose settings are populations of documents."""
    return lambda name, members, repetitions, rng: measured(name, traffic(name, members, rng), repetitions, rng)


# Title, header, settings and function of each part, by the option that says how many samples it takes.
PARTS: dict[str, tuple[str, str, Iterable[str], Part]] = {
    "intervals": (
        "95 % intervals",
        f"{'texts':16}{'quantity':18}{'truth':>8}{'documents':>11}{'held':>13}{'too high':>13}{'too low':>13}",
        SETTINGS,
        of_population(intervals),
    ),
    "gates": (
        f"verdicts on {MOST} documents, or on fewer if it is asked every {EVERY}, speedup = threshold",
        f"{'texts':16}{'verdict':20}{'speedup':>8}{'false GO':>13}{'false NO-GO':>13}",
        SETTINGS,
        of_population(gate),
    ),
    "bad": (
        "false GO with a share of bad documents, speedup = threshold",
        f"{'accepted':16}{'lengths':13}{'bad':>7}{'speedup':>8}" + "".join(f"{size:11} n" for size in BAD_SIZES),
        GOOD_AND_BAD,
        bad_documents,
    ),
    "step_times": (
        "95 % intervals of a speedup from uncertain step times",
        f"{'noise':18}{'spread':>8}   {'stops':14}{'rounds':>8}{'held':>13}{'too high':>13}{'too low':>13}",
        NOISES,
        timings,
    ),
}
SAMPLES = {"intervals": 4000}  # of parts that take another number than 2,000


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print; 1 if something is not as promised."""
    parser = argparse.ArgumentParser(description="Hold intervals and verdicts against documents whose truth is known.")
    for part, (title, *_) in PARTS.items():
        parser.add_argument(
            f"--{part}",
            type=int,
            default=SAMPLES.get(part, 2000),
            help=f"samples a line of: {title}; 0: none".replace("%", "%%"),
        )
    parser.add_argument("--members", type=int, default=400, help="documents of each length in a population")
    parser.add_argument("--seed", type=int, default=0)
    options, failed = vars(parser.parse_args(arguments)), 0
    for number, (part, (title, header, settings, measured)) in enumerate(PARTS.items()):
        if not options[part]:
            continue
        rng = np.random.default_rng([options["seed"], number])  # a part is the same with others and alone
        print(f"{title}, {options[part]:,} samples a line\n{header}")
        for name in settings:
            for line in measured(name, options["members"], options[part], rng):
                print(line, flush=True)
                failed += line.met is False
        print()
    print(f"{failed} not met")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
