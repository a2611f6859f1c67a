"""How often `alphaprof check --baseline` fails, passes or cannot tell, on synthetic pairs of runs with a known difference.

Each run: 5 domains of 60 documents, per-document differences of alpha with a standard deviation of 0.05, margin 0.02. It
must fail in at most 1 % where nothing changed, in at most 5 % where every domain is worse by exactly the margin, and in at
least 95 % where one domain is worse by 0.05.

Then one domain in which another draft loses all of its alpha in some documents, which is more than the margin. Where all
others are identical it must pass in at most 5 %, and two standard errors more for the noise of the table, at 10, 32 and 96
documents. What gave way is shown without a criterion (decision 019): 48 documents, and others with ordinary differences.
Exits with 1 where a criterion is not met.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from alphaprof.stats.gates import Gate, judge, together
from alphaprof.stats.paired import share_difference

Array = np.ndarray[Any, Any]
DOMAINS, DOCUMENTS, SPREAD, MARGIN, CONFIDENCE = 5, 60, 0.05, 0.02, 0.95
# What changed, the differences of the domains, and the failures that are allowed: (least, most).
SETTINGS = (
    ("nothing", [0.0] * DOMAINS, (0.0, 0.01)),
    ("every domain by the margin", [-MARGIN] * DOMAINS, (0.0, 0.05)),
    ("one domain by -0.05", [-0.05] + [0.0] * (DOMAINS - 1), (0.95, 1.0)),
)
ALPHAS = (0.35, 0.45, 0.55, 0.65, 0.65, 0.75, 0.8)  # of the domains of a traffic
# What changed, the share of alpha that one domain loses, and what is asked: least and most failures, least passes.
WHOLE = (("nothing", 0.0, (0.0, 0.05, 0.8)), ("one domain loses 10 % of alpha", 0.1, (0.8, 1.0, 0.0)))
LOST = (0.0, 0.05, 0.1, 0.25)  # shares of the documents in which all of alpha is lost
SIZES = (10, 32, 48, 96)  # documents of the domain
GAVE_WAY = (48,)  # of these, those without a criterion
WRONG = 1 - CONFIDENCE  # passes that are allowed where alpha falls by more than the margin


def pair(
    rng: np.random.Generator,
    difference: float,
    documents: int,
    lost: float = 0.0,
    spread: float = SPREAD,
    alpha: float = 0.65,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Accepted and proposed positions of the same documents before and after. `lost`: the share that loses everything."""
    size = rng.integers(64, 257, documents).astype(float)
    before = np.clip(rng.normal(alpha, 0.1, documents), 0.0, 1.0)
    after = np.clip(before + difference + spread * rng.normal(0.0, 1.0, documents), 0.0, 1.0)
    after[rng.random(documents) < lost] = 0.0
    return (before * size, size), (after * size, size)


def bounds(sides: tuple[tuple[Array, Array], tuple[Array, Array]], tail: float) -> tuple[float, float]:
    """One-sided bounds of the difference."""
    found = share_difference(*sides, 1 - 2 * tail)
    return found.low, found.high


def outcomes(rng: np.random.Generator, differences: list[float], runs: int, documents: int = DOCUMENTS) -> Counter[str]:
    """How many runs end in which way."""
    found: Counter[str] = Counter()
    for _ in range(runs):
        gates = [Gate(-MARGIN, partial(bounds, pair(rng, difference, documents))) for difference in differences]
        found[together([item.outcome for item in judge(gates, CONFIDENCE)])] += 1
    return found


def halving(rng: np.random.Generator, differences: list[float], runs: int, undecided: float) -> int | None:
    """About how many documents a domain needs for half of the undecided share; None where 16 times as many do not do."""
    for factor in (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16):
        documents = round(factor * DOCUMENTS)
        if outcomes(rng, differences, max(runs // 4, 25), documents)["undecided"] <= undecided / 2 * max(runs // 4, 25):
            return documents
    return None


def losses(rng: np.random.Generator, runs: int) -> int:
    """Print how many runs of a domain fail and pass in which some documents lose all of their alpha; how many criteria are
    not met.
    """
    print(f"\n{runs:,} runs of one domain: in some documents all of alpha is lost, the others are")
    print("identical, or ordinary: other drafts", *(f"{size:5} documents" for size in SIZES), sep="  ")
    print(f"{'lost in':>9}  {'the others':25}", *["  fail    pass"] * len(SIZES), sep="  ")
    missed, allowed = 0, WRONG + 2 * math.sqrt(WRONG * (1 - WRONG) / runs)
    for (others, spread), lost in itertools.product((("identical", 0.0), ("ordinary", SPREAD)), LOST):
        cells, met = [], True
        for size in SIZES:
            gates = (Gate(-MARGIN, partial(bounds, pair(rng, 0.0, size, lost, spread))) for _ in range(runs))
            found = Counter(judge([gate], CONFIDENCE)[0].outcome for gate in gates)
            cells.append(f"{found['fail'] / runs:6.1%}  {found['pass'] / runs:6.1%}")
            met &= size in GAVE_WAY or found["pass"] / runs <= allowed
        judged = bool(lost) and not spread
        missed += judged and not met
        print(f"{lost:9.0%}  {others:25}", *cells, *([("met" if met else "NOT MET")] if judged else []), sep="  ")
    return missed


def traffic(rng: np.random.Generator, runs: int) -> int:
    """Print how often a gate over seven domains fails and passes, asked of all together and of each; how many criteria are
    not met. Documents of a domain differ around its alpha by 0.1, and before and after by 0.065.
    """
    print(
        f"\n{runs:,} runs of {len(ALPHAS)} domains, margin {MARGIN}: the whole traffic decides, and each domain that fails"
    )
    print(f"{'what changed':28} {'documents':>9} {'fail':>7} {'pass':>7} {'undecided':>10}")
    missed = 0
    for name, first, (least_fail, most_fail, least_pass) in WHOLE:
        for documents in (16, 32, 96):
            found: Counter[str] = Counter()
            for _ in range(runs):
                pairs = [
                    pair(rng, -first * alpha if place == 3 else 0.0, documents, spread=0.065, alpha=alpha)
                    for place, alpha in enumerate(ALPHAS)
                ]
                whole = tuple(tuple(map(np.concatenate, zip(*sides, strict=True))) for sides in zip(*pairs, strict=True))
                gates = [Gate(-MARGIN, partial(bounds, sides)) for sides in (whole, *pairs)]
                results = [item.outcome for item in judge(gates, CONFIDENCE)]
                found["fail" if "fail" in results else results[0]] += 1
            rates = {key: found[key] / runs for key in ("fail", "pass", "undecided")}
            judged = documents >= 32
            slack = 2 * math.sqrt(0.8 * 0.2 / runs)  # two standard errors
            met = least_fail - slack <= rates["fail"] <= most_fail and rates["pass"] >= least_pass - slack
            missed += judged and not met
            shares = f"{rates['fail']:7.2%} {rates['pass']:7.2%} {rates['undecided']:10.2%}"
            print(f"{name:28} {documents:9} {shares}", *([("met" if met else "NOT MET")] if judged else []), sep="  ")
    return missed


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a criterion is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(options.seed)
    print(
        f"{options.runs:,} runs of {DOMAINS} domains, {DOCUMENTS} documents each, margin {MARGIN}, confidence {CONFIDENCE}"
    )
    print(f"{'what changed':28} {'fail':>7} {'pass':>7} {'undecided':>10}  documents a domain that halve it")
    missed = 0
    for name, differences, (least, most) in SETTINGS:
        found = outcomes(rng, differences, options.runs)
        rates = {key: found[key] / options.runs for key in ("fail", "pass", "undecided")}
        more = halving(rng, differences, options.runs, rates["undecided"]) if rates["undecided"] else None
        met = least <= rates["fail"] <= most
        missed += not met
        shares = f"{rates['fail']:7.2%} {rates['pass']:7.2%} {rates['undecided']:10.2%}"
        print(f"{name:28} {shares}  {more or 'n/a':>6}  {'met' if met else 'NOT MET'}")
    missed += losses(rng, options.runs)
    missed += traffic(rng, options.runs)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
