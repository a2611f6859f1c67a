"""How often `alphaprof check --baseline` fails, passes or cannot tell, on synthetic pairs of runs with a known difference.

Each run: 5 domains of 60 documents, per-document differences of alpha with a standard deviation of 0.05, margin 0.02. It
must fail in at most 1 % where nothing changed, in at most 5 % where every domain is worse by exactly the margin, and in at
least 95 % where one domain is worse by 0.05. Exits with 1 where it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from alphaprof.analysis.gates import Gate, judge, together
from alphaprof.analysis.paired import share_difference

Array = np.ndarray[Any, Any]
DOMAINS, DOCUMENTS, SPREAD, MARGIN, CONFIDENCE = 5, 60, 0.05, 0.02, 0.95
# What changed, the differences of the domains, and the failures that are allowed: (least, most).
SETTINGS = (
    ("nothing", [0.0] * DOMAINS, (0.0, 0.01)),
    ("every domain by the margin", [-MARGIN] * DOMAINS, (0.0, 0.05)),
    ("one domain by -0.05", [-0.05] + [0.0] * (DOMAINS - 1), (0.95, 1.0)),
)


def pair(rng: np.random.Generator, difference: float, documents: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Accepted and proposed positions of the same documents before and after."""
    size = rng.integers(64, 257, documents).astype(float)
    before = np.clip(rng.normal(0.65, 0.1, documents), 0.0, 1.0)
    after = np.clip(before + difference + rng.normal(0.0, SPREAD, documents), 0.0, 1.0)
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
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
