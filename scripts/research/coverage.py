#!/usr/bin/env python3
"""Hold intervals and verdicts against populations of synthetic documents, replayed in full, whose truth is known.

    python scripts/research/coverage.py PART [--designs NAME ...] [--samples N] [--seed 1]

Samples are drawn from a population with replacement, and the product's own functions judge them. PART is one of `intervals`
(of alpha, tokens per round and speedup), `gates` (verdicts that are asked for once, or again and again), `bad` (with a share
of bad documents), `step_times` (intervals from noisy ones), `choice` (draft and gamma, with timing rounds of several kinds),
`traffic` (domains from sources that are read to their end), `settle` (the number of documents that a report asks for),
`load` (gamma by concurrency) and `baseline` (`check --baseline` and `compare`). docs/research/coverage.md has the tables.

The first four parts promise something: exit code 1 where it is not so. With fewer than 2,000 samples three standard errors
are granted. Behind each rate of the others stand 1.96 standard errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.stats import norm, truncnorm

from alphaprof.config.options import MeasuredCosts
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import StepTime, StepTimes, Timing, free_draft, time_spent
from alphaprof.costs.speedup import Mix, Speedup, speedup
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import ORDERED_ROUNDS, SURE, autocorrelation, largest_error, round_mixes, step_times
from alphaprof.report.schedule import GammaByLoad
from alphaprof.report.speeds import speedup_interval, tokens_interval
from alphaprof.report.verdict import CrossFit, Decision, Question, decide, judge, pooled_speedup
from alphaprof.stats.estimate import Interval, pooled_share
from alphaprof.stats.gates import Gate
from alphaprof.stats.gates import judge as judge_gates
from alphaprof.stats.paired import inverse_difference
from alphaprof.totals.documents import Units
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import RoundCounts, Trace, replays, run_lengths

Array = np.ndarray[Any, Any]
Random = np.random.Generator
Pair = tuple[str, int]
MEMBERS, MOST, DRAFTS = 6000, 8, ("a", "b")
GAMMAS = tuple(range(1, MOST + 1))
DECODE_MS, DRAFT, VERIFY = 10.0, 0.02, 0.03  # a draft step, and what each verified token adds, in decode steps
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Population:
    """Documents of some lengths and domains [documents], with their rounds by draft and gamma, and accepted positions."""

    size: Array
    domain: Array
    rounds: Mapping[str, Mapping[int, RoundCounts]]
    accepted: Mapping[str, Array]

    @classmethod
    def drawn(
        cls,
        rng: Random,
        size: Array,
        alphas: Mapping[str, Array],
        *,
        domain: Array | None = None,
        burst: float = 0.4,
        gammas: Sequence[int] = GAMMAS,
    ) -> Population:
        """Each position is accepted with its document's probability, anew or, with probability `burst`, as the last one."""
        size = np.asarray(size, np.int64)
        start, rounds, accepted = np.cumsum(size) - size, {}, {}
        for draft, alpha in alphas.items():
            anew = rng.random(int(size.sum())) >= burst
            anew[start] = True
            last = np.maximum.accumulate(np.where(anew, np.arange(len(anew)), 0))
            agrees = (rng.random(len(anew)) < np.repeat(alpha, size))[last]
            trace = Trace(run_lengths(agrees, start, start + size), np.full(len(agrees), MOST), start, start + size)
            found = replays(trace, list(gammas))
            rounds[draft] = {gamma: RoundCounts.of(each, np.arange(len(size))) for gamma, each in found.items()}
            accepted[draft] = np.add.reduceat(agrees.astype(float), start)
        return cls(size, np.zeros(len(size), int) if domain is None else domain, rounds, accepted)

    def truths(self, times: StepTimes, weights: Array | None = None) -> dict[Pair, float]:
        """The speedup of every draft and gamma, where a document is drawn as often as its weight says."""
        counted = np.ones(len(self.size)) if weights is None else weights
        return {
            (draft, gamma): float(counted @ counts.tokens / (counted @ time_spent(counts, times)))
            for draft, each in self.rounds.items()
            for gamma, counts in each.items()
        }

    def independent(self, rng: Random, documents: int) -> tuple[Array, RoundCounts]:
        """Rows that are drawn, and the rounds of draft a on them, independent even where one was drawn twice."""
        rows = rng.integers(0, len(self.size), documents)
        return rows, dataclasses.replace(self.rounds["a"][GAMMA].rows(rows), cluster=np.arange(documents))

    def sample(self, rng: Random, rows: Array) -> dict[str, dict[str, DocumentTotals]]:
        """Pools of these documents, by draft, then domain; each is a unit with a name of its own."""
        names = [f"{number:016x}" + "0" * 48 for number in rng.integers(0, 2**62, len(rows))]
        units, pools = Units.named(names), {}
        for draft, each in self.rounds.items():
            pools[draft] = {}
            for domain in np.unique(self.domain[rows]):
                here = np.flatnonzero(self.domain[rows] == domain)
                mine = rows[here]
                columns = {"document": here, "tokens": self.size[mine], "prompt_tokens": np.full(len(here), 8)}
                for gamma, counts in each.items():
                    columns |= {f"rounds_{gamma}": counts.rounds[mine], f"control_{gamma}": np.zeros(len(here))}
                    columns |= {
                        f"drafted_depths_{gamma}": counts.drafted[mine],
                        f"accepted_depths_{gamma}": counts.accepted[mine],
                    }
                pools[draft][f"d{domain}"] = DocumentTotals(columns, units.take(here), "greedy", "greedy", None)
        return pools


def log_normal(rng: Random, center: float, spread: float, most: int) -> Array:
    """Lengths of documents."""
    return np.clip(rng.lognormal(center, spread, MEMBERS), 16, most).astype(int)


def pareto(rng: Random, shape: float, most: int) -> Array:
    """Lengths of documents with a long tail."""
    return np.clip(40 * (1 + rng.pareto(shape, MEMBERS)), 40, most).astype(int)


def rate(times: int, of: int) -> str:
    """A share in percent with 1.96 standard errors."""
    share = times / of if of else math.nan
    return f"{100 * share:.1f}±{196 * math.sqrt(max(share * (1 - share), 0.25 / max(of, 1)) / max(of, 1)):.1f}"


def mean(values: Sequence[float]) -> str:
    """A mean with 1.96 standard errors."""
    return f"{np.mean(values):.3f}±{1.96 * np.std(values) / math.sqrt(len(values)):.3f}" if len(values) else "n/a"


def asked(**more: Any) -> Question:
    """A question that chooses everything, but for what is given."""
    return Question(**{"rule": "strict", "min_speedup": 1.0, "confidence": CONFIDENCE, "weights": None, **more})


def going_on(rng: Random, shape: tuple[int, ...], share: float) -> Array:
    """Normal noise along the first axis that keeps a share of itself from one round to the next."""
    found = rng.standard_normal(shape)
    for place in range(1, len(found)):
        found[place] = share * found[place - 1] + math.sqrt(1 - share**2) * found[place]
    return found


def step_table(steps: Sequence[tuple[str, str, int]], ms: Array, batch: int = 1, redrawn: bool = True) -> StepTable:
    """Times of timing rounds [rounds, steps] as a run has them."""
    rows = zip(steps, step_times(ms), ms.T, strict=True)
    return StepTable([StepRow(*step, batch, 256, time, rounds=tuple(each), redrawn=redrawn) for step, time, each in rows])


# --- intervals and verdicts on one draft and gamma, and what they promise ----------------------------------------------

GAMMA, ERROR = 5, 0.05
LEVELS, EACH_LENGTH, LONGEST = 50, 400, 512  # lengths of a population, and documents of each
SIZES, JUDGED, BAND = (20, 50), 50, 0.02  # documents of an interval, where it is judged, how far coverage may be off
LONG_RUN, EVERY = 400, 5  # documents of a run that is extended until its verdict is good, and how many are added each time
ENOUGH = 2000  # samples from which on noise is no excuse
TIMES = StepTimes({n: StepTime(10 + 0.3 * (n - 1), 0.0) for n in range(1, GAMMA + 2)}, StepTime(0.5, 0.0))


class Line(str):
    """A line of rates, and whether it is as promised; None: for information."""

    rates: Sequence[float]
    met: bool | None

    def __new__(cls, words: str, rates: Mapping[str, float], met: bool | None) -> Line:
        """Write them."""
        shown = ", ".join(f"{name} {100 * rate:.2f}%" for name, rate in rates.items())
        found = super().__new__(cls, f"{words}: {shown}{'' if met is None else '; met' if met else '; NOT MET'}")
        found.rates, found.met = tuple(rates.values()), met
        return found


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
TEXTS: dict[str, tuple[Alphas, float]] = {
    "alike": (lambda _, size: np.full(len(size), 0.65), 0.0),
    "different": (documents_alphas, 0.0),
    "bursty": (documents_alphas, 0.6),
    "easier if long": (easier_with_length, 0.0),
}


def texts_of(name: str, rng: Random) -> Population:
    """The population of a kind of texts."""
    (alphas, burst), size = TEXTS[name], np.repeat(lengths(), EACH_LENGTH)
    return Population.drawn(rng, size, {"a": alphas(rng, size)}, burst=burst, gammas=(GAMMA,))


def slack(samples: int) -> float:
    """Three standard errors of a rate of 5 %."""
    return 3 * math.sqrt(ERROR * (1 - ERROR) / samples)


def grant(samples: int) -> float:
    """What a rate may be off by because there are few samples."""
    return 0.0 if samples >= ENOUGH else slack(samples)


def verdict_on(one: Speedup | None, threshold: float) -> Decision:
    """The decision on a speedup for which nothing was chosen."""
    return decide(CrossFit([], one), threshold, CONFIDENCE)


def intervals(rng: Random, name: str, samples: int) -> Iterator[Line]:
    """How often intervals hold the truth, and on which side they miss it."""
    texts = texts_of(name, rng)
    counts = texts.rounds["a"][GAMMA]
    truths = {
        "alpha": float(texts.accepted["a"].sum() / texts.size.sum()),
        "tokens per round": float(counts.tokens.sum() / counts.rounds.sum()),
        "speedup": texts.truths(TIMES)["a", GAMMA],
    }

    def found(documents: int) -> list[Any]:
        rows, counts = texts.independent(rng, documents)
        free, timed = (speedup([counts], [1.0], times) for times in (free_draft(GAMMA), TIMES))
        alpha = pooled_share(counts.cluster, texts.accepted["a"][rows], texts.size[rows].astype(float), CONFIDENCE)
        return [alpha, tokens_interval(free, GAMMA, CONFIDENCE), speedup_interval(timed, CONFIDENCE)]

    for documents in SIZES:
        drawn = [found(documents) for _ in range(samples)]
        for place, (quantity, truth) in enumerate(truths.items()):
            above = sum(one[place].low > truth for one in drawn) / samples
            below = sum(one[place].high < truth for one in drawn) / samples
            held = 1 - above - below
            most = 1.0 if name == "alike" and quantity != "alpha" else CONFIDENCE + BAND + grant(samples)
            met = CONFIDENCE - BAND - grant(samples) <= held <= most if documents == JUDGED else None
            rates = {"held": held, "too high": above, "too low": below}
            yield Line(f"{name}, {quantity} {truth:.3f}, {documents} documents", rates, met)


def asked_again(counts: RoundCounts, threshold: float) -> str:
    """The first verdict of fixed size that is not UNDECIDED, asked after every few documents."""
    for size in range(EVERY, len(counts.tokens) + 1, EVERY):
        seen = speedup([counts.rows(np.arange(size))], [1.0], TIMES)
        if (verdict := verdict_on(seen, threshold).verdict) != "UNDECIDED":
            return verdict
    return "UNDECIDED"


def gates(rng: Random, name: str, samples: int) -> Iterator[Line]:
    """False verdicts of asking once, and of asking again and again, at a speedup that is the threshold."""
    texts = texts_of(name, rng)
    threshold = texts.truths(TIMES)["a", GAMMA]
    found: dict[str, list[str]] = {"asked once": [], "asked again": []}
    for _ in range(samples):
        _, counts = texts.independent(rng, LONG_RUN)
        found["asked once"].append(verdict_on(speedup([counts], [1.0], TIMES), threshold).verdict)
        found["asked again"].append(asked_again(counts, threshold))
    for kind, verdicts in found.items():
        rates = {f"false {wrong}": verdicts.count(wrong) / samples for wrong in ("GO", "NO-GO")}
        met = max(rates.values()) <= ERROR + slack(samples) if kind == "asked once" else None
        yield Line(f"{name}, {kind}, speedup {threshold:.3f}", rates, met)


BAD_SHARES, BAD_SIZES = (0.02, 0.10, 0.25), (4, 8, 16, 32, 64)
GOOD_AND_BAD = {"1 and 0": (1.0, 0.0), "0.95 and 0.3": (0.95, 0.3)}
BAD_LENGTHS = {"one length": np.full(LEVELS, 128), "different": lengths()}


def bad(rng: Random, name: str, samples: int) -> Iterator[Line]:
    """False GO where a share of the documents is bad: whether one of them is in a sample decides everything."""
    accepted, rejected = GOOD_AND_BAD[name]
    for kind, share in itertools.product(BAD_LENGTHS, BAD_SHARES):
        size = np.repeat(BAD_LENGTHS[kind], EACH_LENGTH)
        poor = np.arange(len(size)) % EACH_LENGTH < share * EACH_LENGTH
        texts = Population.drawn(rng, size, {"a": np.where(poor, rejected, accepted)}, burst=0.0, gammas=(GAMMA,))
        truth, rates = texts.truths(TIMES)["a", GAMMA], {}
        for documents in BAD_SIZES:
            drawn = [speedup([texts.independent(rng, documents)[1]], [1.0], TIMES) for _ in range(samples)]
            rates[f"{documents} documents"] = sum(verdict_on(one, truth).verdict == "GO" for one in drawn) / samples
        promised = kind == "one length" and share > 0.05
        met = max([*rates.values()][BAD_SIZES.index(16) :]) <= ERROR + slack(samples) if promised else None
        yield Line(f"{name}, {kind}, {share:.0%} bad, speedup {truth:.3f}, false GO", rates, met)


HELD_BY_TIMES, HELD_IN_A_ROW = 0.93, 0.90  # what intervals of step times must hold at least
ROUNDS = (5, 10, 20)  # of step times, where nothing stops them earlier
SPREADS = (0.005, 0.01, 0.02)  # standard deviation of the logarithm of a step's time
OUTLIERS, DISTURBED = 0.05, 3.0  # share of steps that take three times as long
DRIFT = 0.5  # rise over all rounds, or over 20 of them
ALONE = 5  # how many times as noisy decoding is, where it is disturbed alone
SHAKEN = 0.1  # spread of what falls on the whole machine
NOISES = ("log-normal", "outliers", "decode alone", "drift", "machine goes on", "steps go on")
TIMED = [("target", "decode" if n == 1 else "verify", n) for n in range(1, GAMMA + 2)]
TIMED += [("target", "bookkeeping", 1), ("small", "draft", 1), ("small", "draft", 2), ("small", "bookkeeping", 1)]
TRUE_MS = np.array([*(10 + 0.3 * n for n in range(GAMMA + 1)), 0.1, 2.0, 2.2, 0.05])


def drifting(rounds: int, over: int) -> Array:
    """How much slower the machine gets, [rounds, steps]: from step to step, two rounds forwards and two backwards."""
    place = np.tile(np.arange(len(TIMED)), (rounds, 1))
    place[np.arange(rounds) % 4 >= 2] = place[0, ::-1]
    return 1 + DRIFT * (np.arange(rounds)[:, None] + place / len(TIMED)) / over


def disturbed(rng: Random, kind: str, rounds: int, spread: float) -> Array:
    """Times in ms, [rounds, steps]: those of `TRUE_MS` with noise that leaves the medians of their ratios as they are. The
    decode step, which comes first, is the median of three.
    """
    shape = (rounds, len(TIMED) + 2)
    own = going_on(rng, shape, 0.5 if kind == "steps go on" else 0.0)
    if kind == "decode alone":
        own[:, 3:] /= ALONE
    factor = np.exp(spread * own)
    if kind == "outliers":
        factor *= np.where(rng.random(shape) < OUTLIERS, DISTURBED, 1.0)
    ms = TRUE_MS * np.column_stack([np.median(factor[:, :3], axis=1), factor[:, 3:]])
    if kind == "drift":
        ms *= drifting(rounds, min(rounds, ROUNDS[-1]))
    if kind == "machine goes on":
        ms *= np.exp(SHAKEN * going_on(rng, (rounds, 1), 0.5))
    return np.asarray(ms)


def stopped(ms: Array, mixes: Array) -> Array:
    """The rounds after which `profiling.timing.latency` would stop for certainty, looking after each."""
    kinds = [step for _, step, _ in TIMED]
    for rounds in range(ORDERED_ROUNDS, len(ms)):
        r = autocorrelation(zip(kinds, ms[:rounds].T, strict=True))
        if largest_error(ms[:rounds], mixes, r) < SURE:
            return ms[:rounds]
    return ms


def timings(rng: Random, kind: str, samples: int) -> Iterator[Line]:
    """How often the interval that step times give a speedup holds the truth, and after how many rounds: on one text, whose
    documents are certain.
    """
    _, counts = texts_of("alike", rng).independent(rng, 50)
    exact = StepTable([StepRow(*step, 1, 256, ms) for step, ms in zip(TIMED, TRUE_MS, strict=True)])
    truth = speedup([counts], [1.0], exact.times("small", GAMMA, 1, 256)).value
    certain = {"sampling_error": 0.0, "skewness": 0.0, "unseen_slower": 0.0, "unseen_faster": 0.0}
    mixes, most = round_mixes(TIMED, GAMMA), MeasuredCosts().repeats
    for rounds, spread in [*((rounds, SPREADS[-1]) for rounds in ROUNDS), *((None, spread) for spread in SPREADS)]:
        above = below = taken = 0
        for _ in range(samples):
            ms = disturbed(rng, kind, rounds or most, spread)
            ms = ms if rounds else stopped(ms, mixes)
            found = speedup([counts], [1.0], step_table(TIMED, ms, redrawn=False).times("small", GAMMA, 1, 256))
            low, high = dataclasses.replace(found, **certain).bounds((1 - CONFIDENCE) / 2)
            above, below, taken = above + (low > truth), below + (high < truth), taken + len(ms)
        rates = {"held": 1 - (above + below) / samples, "too high": above / samples, "too low": below / samples}
        met = rates["held"] >= (HELD_IN_A_ROW if kind == NOISES[-1] else HELD_BY_TIMES) - grant(samples)
        ends = f"{rounds} rounds" if rounds else f"when sure, after {taken / samples:.1f} rounds"
        yield Line(f"{kind}, spread {spread:.1%}, {ends}", rates, met)


# --- timing rounds -----------------------------------------------------------------------------------------------------

STEPS = [("target", "decode" if n == 1 else "verify", n) for n in range(1, MOST + 2)] + [(d, "draft", 1) for d in DRAFTS]
TRUE = np.array([1 + VERIFY * (n - 1) for n in range(1, MOST + 2)] + [DRAFT] * len(DRAFTS))
VERIFICATIONS = slice(1, MOST + 1)
SLOW = {"tail": 0.2 * 0.6, "path": 0.15 * (math.exp(0.4) - 1)}  # by what verifications cost more on average than usually


def noise(rng: Random, kind: str, rounds: int, spread: float) -> Array:
    """Logarithms of what disturbs each step in each timing round, [rounds, steps]."""
    logs = spread * going_on(rng, (rounds, len(STEPS)), 0.6 if kind == "ar" else 0.0)
    if kind == "tail":  # a fifth of the verifications take 1.6 times as long, each by itself
        logs[:, VERIFICATIONS] += math.log(1.6) * (rng.random((rounds, MOST)) < 0.2)
    if kind == "path":  # in 15% of the rounds all that a draft needs is slower, and plain decoding is not
        logs[:, 1:] += 0.4 * (rng.random(rounds) < 0.15)[:, None]
    return logs


def timed(rng: Random, kind: str, rounds: int, spread: float) -> Timing:
    """Step times of some timing rounds and those of both halves; exact ones without rounds."""
    if not rounds:
        return Timing(dict.fromkeys(DRAFTS, paid(kind)), "by these step times", {})
    ms = DECODE_MS * TRUE * np.exp(noise(rng, kind, rounds, spread))
    whole = step_table(STEPS, ms)
    each = [{draft: table.times(draft, MOST, 1, 256) for draft in DRAFTS} for table in (whole, *whole.halves)]
    halves = tuple(
        {draft: dataclasses.replace(one, half=place) for draft, one in half.items()} for place, half in enumerate(each[1:])
    )
    return Timing(each[0], "by these step times", {}, halves)


def paid(kind: str) -> StepTimes:
    """What a server pays on average, in decode steps: slow rounds included."""
    slower = 1 + SLOW.get(kind, 0.0)
    target = {n: StepTime(TRUE[n - 1] * (slower if n > 1 else 1), 0.0) for n in range(1, MOST + 2)}
    return StepTimes(target, StepTime(DRAFT * (slower if kind == "path" else 1), 0.0))


# --- parts -------------------------------------------------------------------------------------------------------------

CHOICES = {  # kind of noise, timing rounds, their spread, documents
    "exact": ("iid", 0, 0.0, 24),
    "quiet": ("iid", 20, 0.02, 24),
    "noisy": ("iid", 11, 0.1, 24),
    "noisy, more documents": ("iid", 11, 0.1, 96),
    "autocorrelated": ("ar", 20, 0.05, 48),
    "slow verifications": ("tail", 20, 0.02, 48),
    "slow path": ("path", 20, 0.02, 48),
}


def choice(rng: Random, name: str, samples: int) -> Iterator[str]:
    """Two drafts, eight gammas, all chosen: what is said of the named pair, and what the same pair gets when it is asked for
    by name.
    """
    kind, rounds, spread, documents = CHOICES[name]
    base = rng.normal(0.5, 0.15, MEMBERS)
    alphas = {draft: np.clip(base + 0.03 * rng.normal(0, 1, MEMBERS), 0.01, 0.98) for draft in DRAFTS}
    texts = Population.drawn(rng, log_normal(rng, 4.6, 0.6, 512), alphas, burst=0.5)
    truths, mix = texts.truths(paid(kind)), Mix(("d0",), None, None)
    best, seen, shown, widths = max(truths.values()), Counter[str](), [], []
    thresholds = {"/1.1": best / 1.1, "/1.2": best / 1.2}
    for _ in range(samples):
        pools = texts.sample(rng, rng.integers(0, MEMBERS, documents))
        times = timed(rng, kind, rounds, spread)
        pair, auto = judge(pools, times, mix, asked(), GAMMAS)
        draft, gamma = pair
        alone = judge({draft: pools[draft]}, times, mix, asked(draft=draft, gamma=gamma), GAMMAS)[1]
        true = truths[pair]
        seen["false GO"] += auto.low > true
        seen["false NO-GO"] += auto.high < true
        for word, threshold in thresholds.items():
            seen["GO" + word] += auto.low >= threshold
            seen["contradicted" + word] += auto.low >= threshold > alone.low
        row = (pooled_speedup(pools, (draft, other), times.times, mix) for other in GAMMAS if other != gamma)
        beside = (auto.tested.beside(other, CONFIDENCE).value for other in row)
        seen["below"] += any(value > auto.speedup.value * (1 + 1e-12) for value in beside)
        shown.append(auto.speedup.value / true)
        widths.append(math.log(auto.high / max(auto.low, 1e-9)))
    go = "; ".join(
        f"at truth{word} GO {rate(seen['GO' + word], samples)}%, of these contradicted "
        f"{rate(seen['contradicted' + word], seen['GO' + word])}%"
        for word in thresholds
    )
    wrong = f"false GO {rate(seen['false GO'], samples)}%, false NO-GO {rate(seen['false NO-GO'], samples)}%"
    yield f"{name}: {wrong}; {go}; shown/true {mean(shown)}; log width {np.median(widths):.3f}; "
    yield f"  named gamma below another of its row {rate(seen['below'], samples)}%"


TRAFFICS = {  # acceptance by domain, documents of each
    "2 x 8": ((0.92, 0.15), (8, 8)),
    "2 x 32": ((0.92, 0.15), (32, 32)),
    "2 x 128": ((0.92, 0.15), (128, 128)),
    "8 + 12 + 20 + 30": ((0.45, 0.6, 0.7, 0.8), (8, 12, 20, 30)),
    "4 x 8": ((0.15, 0.5, 0.7, 0.9), (8, 8, 8, 8)),
}


def traffic(rng: Random, name: str, samples: int) -> Iterator[str]:
    """Domains of a fixed number of documents each, one gamma that is not chosen: one sample of all documents, and a stratum
    for each source.
    """
    middles, documents = TRAFFICS[name]
    domain = np.arange(MEMBERS) % len(middles)
    alpha = np.clip(np.array(middles)[domain] + 0.08 * rng.normal(0, 1, MEMBERS), 0, 0.99)
    texts = Population.drawn(rng, rng.integers(20, 501, MEMBERS), {"a": alpha}, domain=domain, burst=0.3)
    weights = (np.array(documents) / np.bincount(domain))[domain]
    times, pair = paid("iid"), ("a", 4)
    true, by_domain = texts.truths(times, weights)[pair], [np.flatnonzero(domain == k) for k in range(len(middles))]
    strata = np.repeat(np.arange(len(documents)), documents) + 1
    found: dict[str, list[tuple[float, float]]] = {"one sample": [], "a stratum a source": []}
    values = []
    for _ in range(samples):
        rows = np.concatenate([rng.choice(mine, n) for mine, n in zip(by_domain, documents, strict=True)])
        pools = texts.sample(rng, rows)
        for way, each in zip(found, (None, strata), strict=True):
            speedup = pooled_speedup(pools, pair, {"a": times}, Mix(tuple(pools["a"]), None, each))
            found[way].append(speedup.deciding(1 - CONFIDENCE))
        values.append(speedup.value)
    oracle = np.log(np.quantile(values, 0.95) / np.quantile(values, 0.05))
    yield f"{name}: true {true:.3f}, 5 to 95% of samples {oracle:.3f} wide (log)"
    for way, bounds in found.items():
        low, high = np.array(bounds).T
        width = np.median(np.log(high / low))
        wrong = f"lower wrong {rate((low > true).sum(), samples)}%, upper {rate((high < true).sum(), samples)}%"
        yield f"  {way}: {wrong}, {width:.3f} wide"


SETTLES = {"log-normal": 0, "Pareto": 1}
OFF = (1.05, 1.1, 1.2, 0.9)  # truth over threshold


def settle(rng: Random, name: str, samples: int) -> Iterator[str]:
    """Of verdicts on 16 documents that are UNDECIDED: how many a new run of as many documents as asked for settles."""
    size = log_normal(rng, 4.8, 0.7, 512) if name == "log-normal" else pareto(rng, 1.3, 2048)
    alpha = np.clip(rng.normal(0.55, 0.15, MEMBERS), 0.02, 0.98)
    other = np.clip(alpha + 0.03 * rng.normal(0, 1, MEMBERS), 0.01, 0.985)
    texts, mix, times = (
        Population.drawn(rng, size, {"a": alpha, "b": other}),
        Mix(("d0",), None, None),
        timed(rng, "iid", 0, 0),
    )
    best = max(texts.truths(paid("iid")).values())

    def judged(documents: int, threshold: float) -> Any:
        rows = rng.integers(0, MEMBERS, documents)
        return judge(texts.sample(rng, rows), times, mix, asked(min_speedup=threshold), GAMMAS)[1]

    for off in OFF:
        undecided, settled, numbers = 0, 0, list[int]()
        while undecided < samples:
            first = judged(16, best / off)
            if first.verdict == "UNDECIDED":
                undecided += 1
                if first.documents_needed is not None and first.documents_needed <= 3000:
                    numbers.append(first.documents_needed)
                    settled += judged(first.documents_needed, best / off).verdict != "UNDECIDED"
        asked_for = f"{len(numbers)} of {samples} are asked for {np.median(numbers):.0f} documents in the median"
        yield f"{name}, truth at {off:g} of the threshold: {asked_for}, which settle {rate(settled, len(numbers))}%"


LOADS = {  # documents, timing rounds, their spread
    "24, noisy": (24, 11, 0.05),
    "24, quiet": (24, 40, 0.02),
    "100, noisy": (100, 20, 0.05),
    "100, quiet": (100, 100, 0.02),
}
RISE = {1: 0.02, 4: 0.04, 16: 0.08, 64: 0.16}  # what each verified token adds by concurrency, in decode steps
STEP = {1: 0.05, 4: 0.06, 16: 0.07, 64: 0.08}  # a draft step


def load(rng: Random, name: str, samples: int) -> Iterator[str]:
    """Gamma by concurrency, chosen on all documents from the one of the decision at a concurrency of 1: how much of the best
    speedup it keeps, and its bounds.
    """
    documents, rounds, spread = LOADS[name]
    alpha = np.clip(rng.normal(0.6, 0.18, MEMBERS), 0.02, 0.98)
    texts, mix = Population.drawn(rng, pareto(rng, 1.5, 1024), {"a": alpha}, burst=0.5), Mix(("d0",), None, None)
    truths = {}
    for batch in RISE:
        target = {n: StepTime(1 + RISE[batch] * (n - 1), 0.0) for n in range(1, MOST + 2)}
        truths[batch] = texts.truths(StepTimes(target, StepTime(STEP[batch], 0.0)))
    steps = [*STEPS[: MOST + 1], ("a", "draft", 1)]
    facts = {"drafts": {"a": SimpleNamespace(hybrid=None, has_steps=True)}, "environment": {"packages": {}}}
    facts |= {"target": SimpleNamespace(device="cpu"), "profile": SimpleNamespace(costs=SimpleNamespace(source="measured"))}
    seen: dict[int, Counter[str]] = {batch: Counter() for batch in RISE}
    kept: dict[int, list[float]] = {batch: [] for batch in RISE}
    ratios: dict[int, list[float]] = {batch: [] for batch in RISE}
    for _ in range(samples):
        rows = list[StepRow]()
        for batch in RISE:
            true = np.array([1 + RISE[batch] * (n - 1) for n in range(1, MOST + 2)] + [STEP[batch]])
            ms = DECODE_MS * true * np.exp(spread * rng.standard_normal((rounds, len(steps))))
            rows += step_table(steps, ms, batch).rows
        costs = CostModel(StepTable(rows), MeasuredCosts(source="measured"), SimpleNamespace(**facts), MOST, 256.0)
        pools = texts.sample(rng, rng.integers(0, MEMBERS, documents))
        pair, decision = judge(pools, costs.timing(1), mix, asked(), GAMMAS)
        judged = Interval(decision.speedup.value, decision.low, decision.high)
        schedule = GammaByLoad("a", [pools["a"]["d0"]], mix, costs, GAMMAS, CONFIDENCE)
        for at in schedule.at_loads(1, pair[1], judged, everywhere=False):
            best = max(1.0, *truths[at.concurrency].values())
            true = truths[at.concurrency]["a", at.gamma] if at.gamma else 1.0
            kept[at.concurrency].append(true / best)
            if at.speedup is not None:
                seen[at.concurrency]["low"] += at.speedup.low > true
                seen[at.concurrency]["high"] += at.speedup.high < true
                ratios[at.concurrency].append(at.speedup.value / true)
    for batch in RISE:
        on = len(ratios[batch])
        wrong = f"lower wrong {rate(seen[batch]['low'], on)}%, upper {rate(seen[batch]['high'], on)}%"
        yield f"{name}, {batch} at a time: kept of the best {mean(kept[batch])}; {wrong}; shown/true {mean(ratios[batch])}"


BASELINES = {"users of 1 document": 1.0, "users of 4 documents": 0.25, "few documents lose all": 1.0}
CHECKED, DOMAINS, MARGIN = 4, 5, 0.03  # gamma, and the margin
EACH = (8, 24, 80)  # documents of a domain


def baseline(rng: Random, name: str, samples: int) -> Iterator[str]:
    """Five domains before and after a change of tokens per round that is the same in each, on the same documents: what
    `check --baseline` and `compare` say at a margin of 3%. As one question: all bounds with Holm's correction.
    """
    user = np.repeat(np.arange(MEMBERS), rng.geometric(BASELINES[name], MEMBERS))[:MEMBERS]
    domain, ours, shift = user * 7919 % DOMAINS, rng.normal(0, 1, (2, MEMBERS)), rng.normal(0, 1, (2, MEMBERS))

    def spread(each: Array) -> Array:  # most of it the user's
        return np.asarray(each[0] if BASELINES[name] == 1 else 0.9 * each[0][user] + 0.44 * each[1])

    size, lost = log_normal(rng, 4.8, 0.8, 1024), rng.random(MEMBERS)
    base = np.clip(np.array([0.3, 0.5, 0.6, 0.7, 0.8])[domain] + 0.12 * spread(ours), 0.02, 0.97)
    rounds = [_rounds(size, base)]
    starts = [np.unique(user[domain == place], return_index=True, return_counts=True)[1:] for place in range(DOMAINS)]
    members = [np.flatnonzero(domain == place) for place in range(DOMAINS)]
    every = np.bincount(domain, rounds[0])

    def after(change: float) -> tuple[Array, float]:
        """Rounds after a change, and how much tokens per round really change, by bisection on the shift of acceptance, or on
        the share of documents that lose all of theirs.
        """
        low, high = np.full(DOMAINS, -0.4), np.full(DOMAINS, 0.4)
        for _ in range(12):
            middle = (low + high) / 2
            alpha = np.clip(base + 0.05 * spread(shift) + middle[domain], 0.01, 0.985)
            if "lose" in name:
                alpha = np.where(lost < -middle[domain], 0.0, base)
            found = _rounds(size, alpha)
            got = every / np.bincount(domain, found) - 1
            low, high = np.where(got > change, low, middle), np.where(got > change, middle, high)
        return found, float(got.mean())

    for change in (-0.03,) if "lose" in name else (0.0, -0.03, -0.05, -0.07):
        new, got = after(change)
        for documents in EACH:
            seen = Counter[str]()
            for _ in range(samples):
                sides = [list[tuple[Array, Array]](), list[tuple[Array, Array]]()]
                for mine, (start, count) in zip(members, starts, strict=True):
                    chosen = rng.integers(len(start), size=documents)
                    chosen = chosen[: 1 + int(np.searchsorted(np.cumsum(count[chosen]), documents))]
                    rows = np.concatenate([mine[start[each] : start[each] + count[each]] for each in chosen])
                    cut = np.cumsum([0, *count[chosen]])[:-1]
                    for side, each in zip(sides, (rounds[0], new), strict=True):
                        side.append((np.add.reduceat(each[rows], cut), np.add.reduceat(size[rows].astype(float), cut)))
                whole = [tuple(map(np.concatenate, zip(*side, strict=True))) for side in sides]
                one, each = _gate(*whole), [_gate(*pair) for pair in zip(*sides, strict=True)]
                (low, high), domains = one.bounds(1 - CONFIDENCE), judge_gates(each, CONFIDENCE)
                failed = high < -MARGIN or any(result.outcome == "fail" for result in domains)
                before = judge_gates([one, *each], CONFIDENCE)
                seen["KEEP"] += low >= -MARGIN
                seen["RETRAIN"] += high < -MARGIN
                seen["FAIL"] += failed
                seen["PASS"] += not failed and low >= -MARGIN
                seen["before"] += any(result.outcome == "fail" for result in before)
            words = ", ".join(f"{word} {rate(seen[word], samples)}%" for word in ("FAIL", "PASS", "RETRAIN", "KEEP"))
            once = f"as one question FAIL {rate(seen['before'], samples)}%"
            yield f"{name}, {got:+.1%}, {DOMAINS} x {documents}: {words}; {once}"


def _rounds(size: Array, alpha: Array) -> Array:
    """Rounds of documents whose positions are accepted with a probability each."""
    rng = np.random.default_rng(7)
    return Population.drawn(rng, size, {"a": alpha}, gammas=(CHECKED,)).rounds["a"][CHECKED].rounds


def _gate(first: tuple[Array, Array], second: tuple[Array, Array]) -> Gate:
    """Tokens per round after, as a share of those before, as `check --baseline` and `compare` bound it."""

    def bounds(tail: float) -> tuple[float, float]:
        difference = inverse_difference(first, second, 1 - 2 * tail, CHECKED)
        before = float(first[1].sum() / first[0].sum())
        return difference.low / before, difference.high / before

    return Gate(-MARGIN, bounds)


Part = Callable[[Random, str, int], Iterator[str]]
PARTS: dict[str, tuple[Part, Sequence[str], int]] = {  # with its designs, and how many samples it has unless asked
    "intervals": (intervals, tuple(TEXTS), 4000),
    "gates": (gates, tuple(TEXTS), 2000),
    "bad": (bad, tuple(GOOD_AND_BAD), 600),
    "step_times": (timings, NOISES, 2000),
    "choice": (choice, tuple(CHOICES), 1000),
    "traffic": (traffic, tuple(TRAFFICS), 1000),
    "settle": (settle, tuple(SETTLES), 1000),
    "load": (load, tuple(LOADS), 1000),
    "baseline": (baseline, tuple(BASELINES), 1000),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print; 1 if something is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--designs", nargs="*")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options, failed = parser.parse_args(arguments), 0
    simulated, designs, samples = PARTS[options.part]
    for place, name in enumerate(designs):
        if not options.designs or name in options.designs:
            for line in simulated(np.random.default_rng([options.seed, place]), name, options.samples or samples):
                print(line, flush=True)
                failed += isinstance(line, Line) and line.met is False
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
