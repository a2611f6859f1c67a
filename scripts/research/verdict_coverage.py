#!/usr/bin/env python3
"""Hold verdicts against traffic whose truth is known: populations of synthetic documents, replayed in full.

    python scripts/research/verdict_coverage.py PART [--designs NAME ...] [--samples 1000] [--seed 1]

Samples are drawn from a population with replacement, and the product's own functions judge them. PART is one of `choice`
(draft and gamma, with timing rounds of several kinds), `traffic` (domains from sources that are read to their end),
`settle` (the number of documents that a report asks for), `load` (gamma by concurrency) and `gate` (`check --baseline` and
`compare`). docs/research/coverage.md has the tables; behind each rate stand 1.96 standard errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from alphaprof.config.options import MeasuredCosts
from alphaprof.costs.cost_model import CostModel
from alphaprof.costs.rounds import StepTime, StepTimes, Timing, time_spent
from alphaprof.costs.speedup import Mix
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import step_times
from alphaprof.report.schedule import GammaByLoad
from alphaprof.report.verdict import Question, judge, pooled_speedup
from alphaprof.stats.estimate import Interval
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
    """Documents of some lengths and domains [documents], with their rounds by draft and gamma."""

    size: Array
    domain: Array
    rounds: Mapping[str, Mapping[int, RoundCounts]]

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
        start, rounds = np.cumsum(size) - size, {}
        for draft, alpha in alphas.items():
            anew = rng.random(int(size.sum())) >= burst
            anew[start] = True
            last = np.maximum.accumulate(np.where(anew, np.arange(len(anew)), 0))
            agrees = (rng.random(len(anew)) < np.repeat(alpha, size))[last]
            trace = Trace(run_lengths(agrees, start, start + size), np.full(len(agrees), MOST), start, start + size)
            found = replays(trace, list(gammas))
            rounds[draft] = {gamma: RoundCounts.of(each, np.arange(len(size))) for gamma, each in found.items()}
        return cls(size, np.zeros(len(size), int) if domain is None else domain, rounds)

    def truths(self, times: StepTimes, weights: Array | None = None) -> dict[Pair, float]:
        """The speedup of every draft and gamma, where a document is drawn as often as its weight says."""
        counted = np.ones(len(self.size)) if weights is None else weights
        return {
            (draft, gamma): float(counted @ counts.tokens / (counted @ time_spent(counts, times)))
            for draft, each in self.rounds.items()
            for gamma, counts in each.items()
        }

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


# --- timing rounds -----------------------------------------------------------------------------------------------------

STEPS = [("target", "decode" if n == 1 else "verify", n) for n in range(1, MOST + 2)] + [(d, "draft", 1) for d in DRAFTS]
TRUE = np.array([1 + VERIFY * (n - 1) for n in range(1, MOST + 2)] + [DRAFT] * len(DRAFTS))
VERIFICATIONS = slice(1, MOST + 1)
SLOW = {"tail": 0.2 * 0.6, "path": 0.15 * (math.exp(0.4) - 1)}  # by what verifications cost more on average than usually


def noise(rng: Random, kind: str, rounds: int, spread: float) -> Array:
    """Logarithms of what disturbs each step in each timing round, [rounds, steps]."""
    own = rng.standard_normal((rounds, len(STEPS)))
    if kind == "ar":
        for turn in range(1, rounds):
            own[turn] = 0.6 * own[turn - 1] + 0.8 * own[turn]
    logs = spread * own
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
    rows = zip(STEPS, step_times(ms), ms.T, strict=True)
    whole = StepTable([StepRow(*step, 1, 256, time, rounds=tuple(each), redrawn=True) for step, time, each in rows])
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
            each = zip(steps, step_times(ms), ms.T, strict=True)
            rows += [StepRow(*step, batch, 256, time, rounds=tuple(turns), redrawn=True) for step, time, turns in each]
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


GATES = {"users of 1 document": 1.0, "users of 4 documents": 0.25, "few documents lose all": 1.0}
GAMMA, DOMAINS, MARGIN = 4, 5, 0.03
EACH = (8, 24, 80)  # documents of a domain


def gate(rng: Random, name: str, samples: int) -> Iterator[str]:
    """Five domains before and after a change of tokens per round that is the same in each, on the same documents: what
    `check --baseline` and `compare` say at a margin of 3%. As one question: all bounds with Holm's correction.
    """
    user = np.repeat(np.arange(MEMBERS), rng.geometric(GATES[name], MEMBERS))[:MEMBERS]
    domain, ours, shift = user * 7919 % DOMAINS, rng.normal(0, 1, (2, MEMBERS)), rng.normal(0, 1, (2, MEMBERS))

    def spread(each: Array) -> Array:  # most of it the user's
        return np.asarray(each[0] if GATES[name] == 1 else 0.9 * each[0][user] + 0.44 * each[1])

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
    return Population.drawn(rng, size, {"a": alpha}, gammas=(GAMMA,)).rounds["a"][GAMMA].rounds


def _gate(first: tuple[Array, Array], second: tuple[Array, Array]) -> Gate:
    """Tokens per round after, as a share of those before, as `check --baseline` and `compare` bound it."""

    def bounds(tail: float) -> tuple[float, float]:
        difference = inverse_difference(first, second, 1 - 2 * tail, GAMMA)
        before = float(first[1].sum() / first[0].sum())
        return difference.low / before, difference.high / before

    return Gate(-MARGIN, bounds)


PARTS = {
    "choice": (choice, CHOICES),
    "traffic": (traffic, TRAFFICS),
    "settle": (settle, SETTLES),
    "load": (load, LOADS),
    "gate": (gate, GATES),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--designs", nargs="*")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    simulated, designs = PARTS[options.part]
    for place, name in enumerate(designs):
        if not options.designs or name in options.designs:
            for line in simulated(np.random.default_rng([options.seed, place]), name, options.samples):
                print(line, flush=True)


if __name__ == "__main__":
    main()
