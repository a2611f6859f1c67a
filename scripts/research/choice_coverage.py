#!/usr/bin/env python3
"""Hold verdicts against documents whose truth is known, where draft and gamma are chosen, lengths have long tails, or few
documents are of a bad kind.

    python scripts/research/choice_coverage.py [--choice 2000] [--tails 2000] [--kinds 2000]

A population of synthetic documents is known in full, so that the speedup of every draft and gamma is exact. Samples are
drawn from it with replacement, and the functions that make a report judge them. docs/research/coverage.md has the tables; 0
samples leave a part out. Exit code 1 if a promise is not met.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.costs.rounds import StepTime, StepTimes, Timing, time_spent
from alphaprof.costs.speedup import Mix
from alphaprof.costs.steps import StepRow, StepTable
from alphaprof.costs.timing import step_times
from alphaprof.report.notes import UNSEEN_SHARE, unseen_share
from alphaprof.report.verdict import Decision, Pair, Question, judge
from alphaprof.totals.documents import Units
from alphaprof.totals.pool import DocumentTotals
from alphaprof.totals.replay import RoundCounts, Trace, replays, run_lengths

Array = np.ndarray[Any, Any]
Random = np.random.Generator
GAMMAS, MOST = tuple(range(1, 9)), 8
DRAFT, VERIFY = 0.08, 0.02  # a draft step, and what each verified token adds, in decode steps
MEMBERS, CONFIDENCE, ERROR = 8000, 0.95, 0.05
WRONG = 0.065  # of verdicts at the threshold, at most, and two standard errors
ONE = Mix(("all",), None)


def exact_times(gammas: Sequence[int]) -> StepTimes:
    """Step times without an error, in decode steps."""
    return StepTimes({n: StepTime(1 + VERIFY * (n - 1), 0.0) for n in range(1, max(gammas) + 2)}, StepTime(DRAFT, 0.0))


@dataclass(frozen=True)
class Population:
    """Documents of some lengths [documents], with their rounds by draft and gamma."""

    size: Array
    rounds: Mapping[str, Mapping[int, RoundCounts]]

    @classmethod
    def drawn(
        cls, rng: Random, size: Array, alphas: Mapping[str, Array], gammas: Sequence[int], burst: float = 0.0
    ) -> Population:
        """Each position is accepted with its document's probability, anew or, with probability `burst`, as the last one."""
        start, rounds = np.cumsum(size) - size, {}
        for draft, alpha in alphas.items():
            anew = rng.random(int(size.sum())) >= burst
            anew[start] = True
            last = np.maximum.accumulate(np.where(anew, np.arange(len(anew)), 0))
            agrees = (rng.random(len(anew)) < np.repeat(alpha, size))[last]
            trace = Trace(run_lengths(agrees, start, start + size), np.full(len(agrees), MOST), start, start + size)
            found = replays(trace, list(gammas))
            rounds[draft] = {gamma: RoundCounts.of(each, np.arange(len(size))) for gamma, each in found.items()}
        return cls(size, rounds)

    def truths(self, times: StepTimes) -> dict[Pair, float]:
        """The speedup of every draft and gamma."""
        return {
            (draft, gamma): float(counts.tokens.sum() / time_spent(counts, times).sum())
            for draft, each in self.rounds.items()
            for gamma, counts in each.items()
        }

    def sample(self, rng: Random, documents: int) -> dict[str, dict[str, DocumentTotals]]:
        """Pools of drawn documents, by draft, then domain; each is a unit with a name of its own."""
        rows = rng.integers(0, len(self.size), documents)
        names = [f"{number:064x}" for number in rng.integers(0, 2**62, documents)]
        units, pools = Units.named([name[-16:] + name[:-16] for name in names]), {}
        for draft, each in self.rounds.items():
            columns = {"document": np.arange(documents), "tokens": next(iter(each.values())).tokens[rows]}
            for gamma, counts in each.items():
                columns |= {f"rounds_{gamma}": counts.rounds[rows], f"control_{gamma}": np.zeros(documents)}
                columns |= {
                    f"drafted_depths_{gamma}": counts.drafted[rows],
                    f"accepted_depths_{gamma}": counts.accepted[rows],
                }
            pools[draft] = {"all": DocumentTotals(columns, units, "greedy", "greedy", None)}
        return pools


def asked(threshold: float) -> Question:
    """Everything is chosen, at a threshold."""
    return Question(rule="strict", draft="auto", gamma="auto", min_speedup=threshold, confidence=CONFIDENCE, weights=None)


def timing(rng: Random, drafts: Sequence[str], rounds: int, spread: float) -> Timing:
    """Step times of rounds with log-normal noise, and those of both halves of the rounds; exact ones without a spread."""
    if not spread:
        return Timing(dict.fromkeys(drafts, exact_times(GAMMAS)), "by these step times", {})
    steps = [("target", "decode" if n == 1 else "verify", n) for n in range(1, MOST + 2)]
    true = [10 * (1 + VERIFY * (n - 1)) for n in range(1, MOST + 2)] + [10 * DRAFT] * len(drafts)
    steps += [(draft, "draft", 1) for draft in drafts]
    ms = np.array(true) * np.exp(spread * rng.standard_normal((rounds, len(steps))))
    rows = zip(steps, step_times(ms), ms.T, strict=True)
    whole = StepTable([StepRow(*step, 1, 256, time, rounds=tuple(each), redrawn=True) for step, time, each in rows])
    each = [{draft: table.times(draft, MOST, 1, 256) for draft in drafts} for table in (whole, *whole.halves)]
    halves = tuple(
        {draft: dataclasses.replace(one, half=place) for draft, one in half.items()} for place, half in enumerate(each[1:])
    )
    return Timing(each[0], "by these step times", {}, halves)


# Documents, timing rounds, their noise, and whether the three drafts are equal on average or differ by .1 each.
CHOICES = {
    "equal": (48, 12, 0.0, True),
    "differ": (48, 12, 0.0, False),
    "equal, noisy": (48, 12, 0.1, True),
    "differ, noisy": (96, 20, 0.05, False),
}


def choice(repetitions: int, rng: Random) -> Iterator[tuple[str, bool | None]]:
    """Three drafts with eight gammas, all chosen: wrong verdicts on the named pair, verdicts 10% above the threshold, and
    what is shown of the named pair over what is true.
    """
    yield (
        f"{'drafts':16}{'threshold':>14}{'GO':>8}{'false GO':>10}{'false NO-GO':>13}{'shown/true':>12}{'disagree':>10}",
        None,
    )
    size = np.clip(rng.lognormal(4.5, 0.5, MEMBERS), 12, 500).astype(int)
    base, names = rng.beta(5, 3, MEMBERS), ("a", "b", "c")
    for setting, (documents, rounds, spread, alike) in CHOICES.items():
        alphas = {
            draft: np.clip(base + rng.normal(0, 0.05, MEMBERS) * (place > 0) if alike else base - 0.1 * place, 0, 0.99)
            for place, draft in enumerate(names)
        }
        texts = Population.drawn(rng, size, alphas, GAMMAS, burst=0.3)
        truths = texts.truths(exact_times(GAMMAS))
        best = max(truths.values())
        for named, threshold in (("the best", best), ("the best / 1.1", best / 1.1)):
            found = [
                judge(texts.sample(rng, documents), timing(rng, names, rounds, spread), ONE, asked(threshold), GAMMAS)
                for _ in range(repetitions)
            ]
            go = [decision.verdict == "GO" for _, decision in found]
            wrong_no = [decision.verdict == "NO-GO" and truths[pair] >= threshold for pair, decision in found]
            at_best = [one and truths[pair] <= threshold * (1 + 1e-9) for one, (pair, _) in zip(go, found, strict=True)]
            shown = [decision.speedup.value / truths[pair] for pair, decision in found]
            apart = [bool(decision.disagreement) for _, decision in found]
            rates = (np.mean(go), np.mean(at_best), np.mean(wrong_no), np.mean(shown), np.mean(apart))
            met = None if named != "the best" else bool(rates[1] <= allowed(repetitions))
            text = f"{setting:16}{named:>14}{100 * rates[0]:7.1f}%{100 * rates[1]:9.1f}%{100 * rates[2]:12.1f}%"
            yield f"{text}{rates[3]:12.3f}{100 * rates[4]:9.1f}%", met


def allowed(repetitions: int) -> float:
    """The largest rate of wrong verdicts."""
    return WRONG + 2 * math.sqrt(ERROR * (1 - ERROR) / repetitions)


def lengths_of(name: str, rng: Random) -> tuple[Array, int]:
    """Lengths of documents, and the most tokens that one could have."""
    if name == "2% hold 40%":
        size = np.full(MEMBERS, 64)
        size[: MEMBERS // 50] = 64 * 98 * 4 // (2 * 6)
    elif name == "Pareto 1.2":
        size = np.clip(32 * (1 + rng.pareto(1.2, MEMBERS)), 32, 8192).astype(int)
    else:
        size = np.clip(rng.lognormal(math.log(128), 0.8, MEMBERS), 16, 512).astype(int)
    return size, int(size.max())


TAILS = ("2% hold 40%", "Pareto 1.2", "log-normal 0.8")
DOCUMENTS = (16, 32, 64)


def tails(repetitions: int, rng: Random) -> Iterator[tuple[str, bool | None]]:
    """One draft that is wrong more often in long documents, at the threshold: false GO, and whether the note says so."""
    yield f"{'lengths':16}" + "".join(f"{n:>7} docs: false GO, note" for n in DOCUMENTS), None
    for name in TAILS:
        size, longest = lengths_of(name, rng)
        rank = np.argsort(np.argsort(size, kind="stable")) / len(size)
        texts = Population.drawn(rng, size, {"a": np.where(rank > 0.98, 0.35, 0.75)}, (4,))
        times = exact_times((4,))
        threshold, cells, told = texts.truths(times)["a", 4], [], []
        for documents in DOCUMENTS:
            wrong = noted = 0
            for _ in range(repetitions):
                pools = texts.sample(rng, documents)
                decision = judge(pools, Timing({"a": times}, "", {}), ONE, asked(threshold), (4,))[1]
                mean = float(pools["a"]["all"]["tokens"].mean())
                wrong += decision.verdict == "GO"
                noted += unseen_share(documents, mean, longest) > UNSEEN_SHARE
            cells.append(f"{100 * wrong / repetitions:21.1f}%{100 * noted / repetitions:5.0f}%")
            told.append(noted / repetitions >= 0.9 or wrong / repetitions <= allowed(repetitions))
        yield f"{name:16}{''.join(cells)}", all(told)


KINDS = ((20, 0.12), (40, 0.06), (29, 0.08), (48, 0.05), (16, 0.10), (64, 0.04), (96, 0.025))


def kinds(repetitions: int, rng: Random) -> Iterator[tuple[str, bool | None]]:
    """A share of documents, all of one length, whose drafts are all rejected beside others whose are all accepted: false GO
    at the threshold.
    """
    yield f"{'documents':>10}{'bad':>8}{'false GO':>10}", None
    for documents, share in KINDS:
        bad = np.arange(MEMBERS) < share * MEMBERS
        texts = Population.drawn(rng, np.full(MEMBERS, 128), {"a": np.where(bad, 0.0, 1.0)}, (4,))
        times = exact_times((4,))
        threshold, ways = texts.truths(times)["a", 4], Timing({"a": times}, "", {})
        found: list[Decision] = [
            judge(texts.sample(rng, documents), ways, ONE, asked(threshold), (4,))[1] for _ in range(repetitions)
        ]
        wrong = float(np.mean([decision.verdict == "GO" for decision in found]))
        yield f"{documents:10}{share:8.1%}{wrong:10.1%}", wrong <= allowed(repetitions)


PARTS = {"choice": choice, "tails": tails, "kinds": kinds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print; 1 if something is not as promised."""
    parser = argparse.ArgumentParser(description="Hold verdicts on what was chosen against documents whose truth is known.")
    for part in PARTS:
        parser.add_argument(f"--{part}", type=int, default=2000, help="samples a line; 0: none")
    parser.add_argument("--seed", type=int, default=31)
    options, failed = vars(parser.parse_args(arguments)), 0
    for number, (part, simulated) in enumerate(PARTS.items()):
        if options[part]:
            print(f"{part}, {options[part]:,} samples a line")
            for text, met in simulated(options[part], np.random.default_rng([options["seed"], number])):
                print(f"{text}   {'' if met is None else 'met' if met else 'NOT MET'}".rstrip(), flush=True)
                failed += met is False
            print()
    print(f"{failed} not met")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
