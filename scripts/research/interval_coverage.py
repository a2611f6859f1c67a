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
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import norm, truncnorm

from alphaprof.config.options import MeasuredCosts
from alphaprof.costs.rounds import StepTime, StepTimes, Timing, free_draft, round_costs, time_spent
from alphaprof.costs.speedup import Mix, Speedup, speedup
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import ORDERED_ROUNDS, SURE, autocorrelation, largest_error, round_mixes, step_times
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.report.verdict import CrossFit, Decision, Question, decide, judge
from alphaprof.stats.estimate import pooled_share
from alphaprof.stats.gates import Gate, holm
from alphaprof.stats.gates import judge as judge_gates
from alphaprof.totals.documents import Units
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import RoundCounts, Rounds, Trace, replay, run_lengths

Array = np.ndarray[Any, Any]
Random = np.random.Generator
GAMMA, CONFIDENCE, ERROR = 5, 0.95, 0.05
LEVELS, LONGEST = 50, 512  # lengths of documents in a pool
SIZES, JUDGED, BAND = (20, 50), 50, 0.02  # documents of an interval, where it is judged, how far coverage may be off
MOST, EVERY = 400, 5  # documents of a run that is extended until its verdict is good, and after how many each it is asked
DRAFTS, CHOICE_SIZES = 20, (40, 100)
ENOUGH = 2000  # repetitions from which on noise is no excuse
TIMES = StepTimes({n: StepTime(10 + 0.3 * (n - 1), 0.0) for n in range(1, GAMMA + 2)}, StepTime(0.5, 0.0))
CHECK_DRAFTS, CHECK_SIZES, DOMAINS = (5, 60), (32, 128), 7
BURSTINESS = 0.6
HELD_BY_TIMES, HELD_IN_A_ROW = 0.93, 0.90  # what intervals of step times must hold at least
ROUNDS = (5, 10, 20)  # of step times, where nothing stops them earlier
SPREADS = (0.005, 0.01, 0.02)  # standard deviation of the logarithm of a step's time
OUTLIERS, DISTURBED = 0.05, 3.0  # share of steps that take three times as long
DRIFT, PERSISTENCE = 0.5, 0.5  # rise over all rounds, or over 20 of them; lag-1 autocorrelation
ALONE = 5  # how many times as noisy decoding is, where it is disturbed alone
SHAKEN = 0.1  # spread of what falls on the whole machine
FASTEST_OF, CHOSEN_ROUNDS, CHOSEN_SPREAD = 8, (8, 20), 0.15  # of drafts that differ by the noise of step times alone
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

    def draw_drafts(self, rng: Random, size: int, drafts: int = DRAFTS) -> Array:
        """The same for some drafts on documents that have their lengths in common; [drafts, documents]."""
        members = len(self.positions) // LEVELS
        return np.asarray(rng.integers(0, LEVELS, size) * members + rng.integers(0, members, (drafts, size)))

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


def chosen_pools(rounds: Sequence[RoundCounts]) -> dict[str, dict[str, DocumentTotals]]:
    """Some drafts on the same documents, one domain."""
    names = [str(index) for index in range(len(rounds[0].tokens))]
    return {str(draft): {"all": as_pool(counts, names)} for draft, counts in enumerate(rounds)}


def crossed(rounds: Sequence[RoundCounts], threshold: float) -> Decision:
    """The verdict if the best of some drafts is chosen."""
    timing = Timing({str(draft): TIMES for draft in range(len(rounds))}, "", {})
    question = Question(
        rule="strict", draft="auto", gamma="auto", min_speedup=threshold, confidence=CONFIDENCE, weights={"all": 1.0}
    )
    return judge(chosen_pools(rounds), timing, Mix.of({"all": 1.0}), question, [GAMMA])[1]


def naive(rounds: Sequence[RoundCounts]) -> Speedup:
    """The best of some drafts, on the documents that it is the best on."""
    found = [one for counts in rounds if (one := speedup([counts], [1.0], TIMES)) is not None]
    return max(found, key=lambda one: one.value)


def best_of_many(name: str, population: Traffic, repetitions: int, rng: Random) -> list[Line]:
    """False GO of the best of DRAFTS drafts, none of which is above the threshold: cross-fitted, or not."""
    threshold, lines = population.truths()["speedup"], []
    for size in CHOICE_SIZES:
        wrong = fooled = 0
        for _ in range(repetitions):
            samples = [population.sample(rows) for rows in population.draw_drafts(rng, size)]
            wrong += crossed(samples, threshold).verdict == "GO"
            fooled += verdict_on(naive(samples), threshold, CONFIDENCE).verdict == "GO"
        met = wrong / repetitions <= ERROR + noise(repetitions)
        lines.append(Line(f"{name:16}{'cross-fitted':20}{threshold:8.3f}{size:11}", (wrong / repetitions,), met))
        lines.append(Line(f"{name:16}{'the same documents':20}{threshold:8.3f}{size:11}", (fooled / repetitions,), None))
    return lines


def checks(name: str, members: int, repetitions: int, rng: Random) -> Iterator[Line]:
    """How often a threshold that is the truth of all drafts passes for the one that the decision chooses, as `check` judges
    it: cross-fitted, or by the documents that chose.
    """
    texts = traffic(name, members, rng)
    threshold = texts.truths()["speedup"]
    for drafts, size in itertools.product(CHECK_DRAFTS, CHECK_SIZES):
        passed = [0, 0]
        for _ in range(repetitions):
            rounds = [texts.sample(rows) for rows in texts.draw_drafts(rng, size, drafts)]
            tested = crossed(rounds, threshold).tested
            for place, bounds in enumerate((tested.deciding if tested else None, naive(rounds).bounds)):
                if bounds is not None:
                    [result] = judge_gates([Gate(threshold, bounds)], CONFIDENCE)
                    passed[place] += result.outcome == "pass"
        for place, way in enumerate(("cross-fitted", "the same documents")):
            met = passed[place] / repetitions <= ERROR + noise(repetitions) if not place else None
            yield Line(f"{name:16}{way:20}{drafts:8}{size:11}", (passed[place] / repetitions,), met)


def several(name: str, members: int, repetitions: int, rng: Random) -> Iterator[Line]:
    """How often any of some domains, all at the threshold, has a wrong GO: each by itself, and all together (Holm)."""
    texts = traffic(name, members, rng)
    threshold = texts.truths()["speedup"]
    for size in (16, 64):
        wrong = np.zeros(3)
        for _ in range(repetitions):
            found = [speedup([texts.sample(texts.draw(rng, size))], [1.0], TIMES) for _ in range(DOMAINS)]

            def go(error: float, one: Speedup | None) -> bool:
                return verdict_on(one, threshold, 1 - error).verdict == "GO"

            each = [go(ERROR, one) for one in found]
            together = holm([partial(go, one=one) for one in found], ERROR)
            wrong += (np.mean(each), any(each), any(together))
        rates = tuple(wrong / repetitions)
        yield Line(f"{name:16}{size:10}{threshold:9.3f}", rates, rates[2] <= ERROR + noise(repetitions))


# Mean and spread of two domains' acceptance, and the lengths of their documents.
DESIGNS: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, int]]] = {
    "2.5x and 0.73x": ((0.80, 0.10), (0.03, 0.02), (0.8, LONGEST)),
    "1.85x and 1.35x": ((0.66, 0.10), (0.475, 0.10), (0.8, LONGEST)),
    "2.5x and 0.73x, heavy": ((0.80, 0.15), (0.03, 0.02), (1.2, 2048)),
}
SAMPLINGS, TRAFFIC_SIZES = ("mixture", "fixed counts"), (64, 256)
HELD, WRONG = (0.93, 0.975), 0.065


def spread_around(mean: float, spread: float) -> Alphas:
    """Acceptance of documents: normal, cut to [0.001, 0.99]."""
    low, high = (0.001 - mean) / spread, (0.99 - mean) / spread
    return lambda rng, size: np.asarray(truncnorm.ppf(rng.random(len(size)), low, high, mean, spread))


@dataclass(frozen=True)
class Sample:
    """Documents of two domains under some drafts: rounds [drafts][domains], and the stratum of each document."""

    rounds: list[list[RoundCounts]]
    strata: Array | None

    def speedup(self, draft: int, rows: Sequence[Array] | None = None) -> Speedup:
        """Of one draft, the shares of the domains being those of the documents."""
        counts = self.rounds[draft]
        if rows is not None:
            counts = [each.rows(chosen) for each, chosen in zip(counts, rows, strict=True)]
        return Mix(("a", "b"), None, self.strata).speedup(counts, TIMES)

    def with_shares_as_known(self) -> Speedup:
        """The same with the observed shares as weights: their error is left out."""
        counts = self.rounds[0]
        tokens = sum(each.tokens.sum() for each in counts)
        return speedup(counts, [each.tokens.sum() / tokens for each in counts], TIMES)


def drawn(domains: Sequence[Traffic], sampling: str, size: int, rng: Random, drafts: int = 1) -> Sample:
    """Documents of both domains, each as likely, or as many of each."""
    first = size // 2 if sampling == "fixed counts" else int(np.clip(rng.binomial(size, 0.5), 1, size - 1))
    rounds: list[list[RoundCounts]] = [[] for _ in range(drafts)]
    for domain, (count, start) in zip(domains, ((first, 0), (size - first, first)), strict=True):
        members = len(domain.positions) // LEVELS
        levels = rng.integers(0, LEVELS, count) * members
        for draft in rounds:
            rows = levels + rng.integers(0, members, count)
            draft.append(dataclasses.replace(domain.counts.rows(rows), cluster=np.arange(start, start + count)))
    return Sample(rounds, np.repeat([0, 1], [first, size - first]) if sampling == "fixed counts" else None)


def true_speedup(domains: Sequence[Traffic]) -> float:
    """Of traffic whose documents come from either domain as often."""
    tokens = sum(domain.counts.tokens.mean() for domain in domains)
    return float(tokens / sum(time_spent(domain.counts, TIMES).mean() for domain in domains))


def crossed_traffic(sample: Sample) -> CrossFit:
    """What `auto` is judged by: the better of the drafts on either half of the documents, tested on the other."""
    first = len(sample.rounds[0][0].tokens)
    size = first + len(sample.rounds[0][1].tokens)
    units = Units.named([str(place) for place in range(size)])
    rows = {"a": slice(0, first), "b": slice(first, size)}
    pools = {
        str(draft): {
            domain: dataclasses.replace(as_pool(counts, ["-"] * len(counts.tokens)), units=units.take(rows[domain]))
            for domain, counts in zip(("a", "b"), each, strict=True)
        }
        for draft, each in enumerate(sample.rounds)
    }
    timing = Timing(dict.fromkeys(pools, TIMES), "", {})
    options = [(draft, GAMMA) for draft in pools]
    return CrossFit.of(pools, timing, Mix(("a", "b"), None, sample.strata), options, True, ERROR)


def rates(found: Sequence[CrossFit], truth: float) -> tuple[float, ...]:
    """Shares of intervals that hold the truth, lie above it and below it, and of false GO and NO-GO at that threshold."""
    bounds = np.array([one.deciding((1 - CONFIDENCE) / 2) for one in found])
    above, below = float((bounds[:, 0] > truth).mean()), float((bounds[:, 1] < truth).mean())
    verdicts = [decide(one, truth, CONFIDENCE).verdict for one in found]
    return 1 - above - below, above, below, verdicts.count("GO") / len(found), verdicts.count("NO-GO") / len(found)


def whole_traffic(name: str, members: int, repetitions: int, rng: Random) -> Iterator[Line]:
    """How often intervals and verdicts on two domains are right, where their shares are those of the documents."""
    *alphas, (sigma, longest) = DESIGNS[name]
    size = np.repeat(lengths(sigma, longest), members)
    domains = [population(size, spread_around(*domain), rng) for domain in alphas]
    truth = true_speedup(domains)
    for sampling, documents in itertools.product(SAMPLINGS, TRAFFIC_SIZES):
        samples = [drawn(domains, sampling, documents, rng, drafts=2) for _ in range(repetitions)]
        ways = {
            "one ratio": [CrossFit([], sample.speedup(0)) for sample in samples],
            "cross-fitted": [crossed_traffic(sample) for sample in samples],
            "shares as known": [CrossFit([], sample.with_shares_as_known()) for sample in samples],
        }
        for way, found in ways.items():
            shown = rates(found, truth)
            slack = grant(repetitions)
            met = None if way == "shares as known" else max(shown[3:]) <= WRONG + slack and shown[0] >= HELD[0] - slack
            if way == "one ratio":
                met = met and shown[0] <= HELD[1] + slack
            yield Line(f"{name:22}{sampling:13}{documents:5}  {way:16}{truth:7.3f}", shown, met)


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


def as_pool(counts: RoundCounts, names: Sequence[str]) -> DocumentTotals:
    """Rounds of some documents as a pool of totals."""
    columns = {
        "tokens": counts.tokens,
        f"rounds_{GAMMA}": counts.rounds,
        f"drafted_depths_{GAMMA}": counts.drafted,
        f"accepted_depths_{GAMMA}": counts.accepted,
        f"control_{GAMMA}": counts.control,
    }
    return DocumentTotals(columns, Units.named(names), "greedy", "greedy", None)


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


def chosen_times(kind: str, members: int, repetitions: int, rng: Random) -> Iterator[Line]:
    """The fastest of some drafts that are equally fast, on documents that are certain: what is shown over what is true, and
    false GO with that as the threshold; judged by the rounds of step times that did not choose, and by those that did.
    """
    texts = traffic("alike", members, rng)
    counts = dataclasses.replace(texts.counts.rows(texts.draw(rng, 50)), cluster=np.arange(50))
    every, own = list(STEPS), slice(STEPS.index(("small", "draft", 1)), None)
    drafts = [f"draft {number}" for number in range(FASTEST_OF)]
    steps = every[: own.start] + [(draft, *step[1:]) for draft in drafts for step in every[own]]

    def judged(table: StepTable, draft: str) -> Speedup:
        found = speedup([counts], [1.0], table.times(draft, GAMMA, 1, 256))
        return dataclasses.replace(found, sampling_error=0.0, skewness=0.0, unseen_slower=0.0, unseen_faster=0.0)

    exact = StepTable([StepRow(*step, 1, 256, ms) for step, ms in zip(STEPS, TRUE_MS, strict=True)])
    truth = judged(exact, "small").value
    for rounds in CHOSEN_ROUNDS:
        logs, wrong = np.zeros((2, repetitions)), [0, 0]
        for repetition in range(repetitions):
            shared = timed(kind, rng, rounds, CHOSEN_SPREAD)
            each = [timed(kind, rng, rounds, CHOSEN_SPREAD)[:, own] for _ in drafts]
            ms = np.column_stack([shared[:, : own.start], *each])
            rows = zip(steps, step_times(ms), ms.T, strict=True)
            whole = StepTable([StepRow(*step, 1, 256, time, rounds=tuple(column)) for step, time, column in rows])
            for place, (choosing, testing) in enumerate((whole.halves, (whole, whole))):
                found = judged(testing, max(drafts, key=lambda draft: judged(choosing, draft).value))
                logs[place, repetition] = math.log(found.value / truth)
                wrong[place] += found.bounds(ERROR)[0] >= truth
        for place, name in enumerate(("the other rounds", "the same rounds")):
            rates = (math.expm1(logs[place].mean()), wrong[place] / repetitions)
            met = None if place else rates[1] <= ERROR + noise(repetitions)
            yield Line(f"{kind:18}{name:20}{rounds:6}", rates, met)


Part = Callable[[str, int, int, Random], Iterable[Line]]


def of_population(measured: Callable[[str, Traffic, int, Random], list[Line]]) -> Part:
    """A part whose settings are populations of documents."""
    return lambda name, members, repetitions, rng: measured(name, traffic(name, members, rng), repetitions, rng)


SHARES = "".join(f"{word:>13}" for word in ("held", "too high", "too low", "false GO", "false NO-GO"))
TRAFFIC_HEADER = f"{'domains':22}{'documents':18}  {'way':16}{'truth':>7}{SHARES}"
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
    "choices": (
        f"the best of {DRAFTS} drafts, all at the threshold",
        f"{'texts':16}{'tested on':20}{'speedup':>8}{'documents':>11}{'false GO':>13}",
        SETTINGS,
        of_population(best_of_many),
    ),
    "traffic": ("the whole traffic, observed shares", TRAFFIC_HEADER, DESIGNS, whole_traffic),
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
    "chosen": (
        f"the fastest of {FASTEST_OF} equal drafts by step times with noise of {CHOSEN_SPREAD}",
        f"{'noise':18}{'tested on':20}{'rounds':>6}{'too high by':>13}{'false GO':>13}",
        [kind for kind in NOISES if kind != "drift"],
        chosen_times,
    ),
    "checks": (
        "a threshold on the draft that was chosen among drafts at the threshold passes",
        f"{'texts':16}{'tested on':20}{'drafts':>8}{'documents':>11}{'passes':>13}",
        ["different", "bursty"],
        checks,
    ),
    "several": (
        f"false GO of {DOMAINS} domains, speedup = threshold",
        f"{'texts':16}{'documents':>10}{'truth':>9}{'one':>13}{'any':>13}{'any, Holm':>13}",
        SETTINGS,
        several,
    ),
}
SAMPLES = {
    "checks": 1000,
    "chosen": 1000,
    "intervals": 4000,
}  # of parts that take another number than 2,000


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
