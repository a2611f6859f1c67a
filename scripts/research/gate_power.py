"""How often `alphaprof check --baseline` fails, passes or cannot tell, on synthetic pairs of runs with a known difference.

The measure is tokens per round after, as a share of those before: the whole traffic decides, and each domain that is shown
to lose more than the margin of 3 % fails. Documents have 64 to 256 tokens, 4 drafts a round, an alpha that differs around
the domain's by 0.1, and before and after by 0.05, which is 9 % of their tokens per round. Both sides are drawn in the same
way, so that nothing differs on average but what is taken from the second.

Each run of 5 domains of 60 documents must fail in at most 1 % where nothing changed, fail and pass in at most 5 % each where
every domain is worse by exactly the margin, and fail in at least 95 % where one domain is worse by 0.05 of alpha.

Then one domain in which another draft loses all of its drafts in some documents, which is more than the margin. Where all
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
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from alphaprof.stats.gates import Gate, judge
from alphaprof.stats.paired import inverse_difference

Array = np.ndarray[Any, Any]
Side = tuple[Array, Array]  # rounds and tokens, [documents]
MARGIN = 0.03  # the default of the command
GAMMA, DOMAINS, DOCUMENTS, SPREAD, AROUND, CONFIDENCE = 4, 5, 60, 0.05, 0.1, 0.95
WRONG = 1 - CONFIDENCE
ALPHA = 0.65
ALPHAS = (0.35, 0.45, 0.55, ALPHA, ALPHA, 0.75, 0.8)  # of the domains of a traffic


def per_round(alpha: Any) -> Any:
    """Tokens of a round whose drafts are accepted with a probability each, up to the first that is not."""
    return sum(alpha**depth for depth in range(GAMMA + 1))


def falls_by(change: float) -> float:
    """The share of tokens per round that a change of alpha takes from a domain."""
    return float(1 - per_round(ALPHA - change) / per_round(ALPHA))


# What changed, the shares of tokens per round that domains lose, and what is allowed: least and most failures, most passes.
SETTINGS = (
    ("nothing", [0.0] * DOMAINS, (0.0, 0.01), 1.0),
    ("every domain by the margin", [MARGIN] * DOMAINS, (0.0, WRONG), WRONG),
    ("one domain by -0.05 of alpha", [falls_by(0.05)] + [0.0] * (DOMAINS - 1), (0.95, 1.0), 1.0),
)
# What changed, the share that one domain loses, and what is asked: least and most failures, least passes.
WHOLE = (
    ("nothing", 0.0, (0.0, 0.05, 0.8)),
    ("one domain: 10 % of alpha", falls_by(0.1 * ALPHA), (0.8, 1.0, 0.0)),
)
LOST = (0.0, 0.05, 0.1, 0.25)  # shares of the documents in which all drafts are lost
SIZES = (10, 32, 48, 96)  # documents of the domain
GAVE_WAY = (48,)  # of these, those without a criterion


def pair(
    rng: np.random.Generator,
    loses: float,
    documents: int,
    lost: float = 0.0,
    spread: float = SPREAD,
    alpha: float = ALPHA,
) -> tuple[Side, Side]:
    """The same documents before and after, which loses a share of its tokens per round. `lost`: the share of documents that
    lose all drafts.
    """
    tokens = rng.integers(64, 257, documents).astype(float)
    own = rng.normal(alpha, AROUND, documents) + spread / math.sqrt(2) * rng.normal(0.0, 1.0, (2, documents))
    before, after = tokens / per_round(np.clip(own, 0.0, 0.99))
    after = np.minimum(after / (1 - loses), tokens)
    gone = rng.random(documents) < lost
    after[gone] = tokens[gone]
    return (before, tokens), (after, tokens)


def bounds(sides: tuple[Side, Side], tail: float) -> tuple[float, float]:
    """One-sided bounds of the change, as a share of what there was before."""
    rounds, tokens = sides[0]
    before, found = tokens.sum() / rounds.sum(), inverse_difference(*sides, 1 - 2 * tail, GAMMA)
    return found.low / before, found.high / before


def outcome(pairs: Sequence[tuple[Side, Side]]) -> str:
    """How a check of some domains ends: the whole traffic decides, unless a domain fails."""
    whole: Any = tuple(tuple(map(np.concatenate, zip(*sides, strict=True))) for sides in zip(*pairs, strict=True))
    gates = [Gate(-MARGIN, partial(bounds, sides)) for sides in (whole, *pairs)]
    results = [item.outcome for item in judge(gates, CONFIDENCE)]
    return "fail" if "fail" in results else results[0]


def outcomes(rng: np.random.Generator, losses: Sequence[float], runs: int, documents: int = DOCUMENTS) -> Counter[str]:
    """How many runs end in which way."""
    return Counter(outcome([pair(rng, loses, documents) for loses in losses]) for _ in range(runs))


def halving(rng: np.random.Generator, losses: Sequence[float], runs: int, undecided: float) -> int | None:
    """About how many documents a domain needs for half of the undecided share; None where 16 times as many do not do."""
    for factor in (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16):
        documents = round(factor * DOCUMENTS)
        if outcomes(rng, losses, max(runs // 4, 25), documents)["undecided"] <= undecided / 2 * max(runs // 4, 25):
            return documents
    return None


def allowed(rate: float, runs: int) -> float:
    """A rate, and two standard errors."""
    return rate + 2 * math.sqrt(rate * (1 - rate) / runs)


def losses(rng: np.random.Generator, runs: int) -> int:
    """Print how many runs of a domain fail and pass in which some documents lose all of their drafts; how many criteria are
    not met.
    """
    print(f"\n{runs:,} runs of one domain: in some documents all drafts are lost, the others are")
    print("identical, or ordinary: other drafts", *(f"{size:5} documents" for size in SIZES), sep="  ")
    print(f"{'lost in':>9}  {'the others':25}", *["  fail    pass"] * len(SIZES), sep="  ")
    missed = 0
    for (others, spread), lost in itertools.product((("identical", 0.0), ("ordinary", SPREAD)), LOST):
        cells, met = [], True
        for size in SIZES:
            gates = (Gate(-MARGIN, partial(bounds, pair(rng, 0.0, size, lost, spread))) for _ in range(runs))
            found = Counter(judge([gate], CONFIDENCE)[0].outcome for gate in gates)
            cells.append(f"{found['fail'] / runs:6.1%}  {found['pass'] / runs:6.1%}")
            met &= size in GAVE_WAY or found["pass"] / runs <= allowed(WRONG, runs)
        judged = bool(lost) and not spread
        missed += judged and not met
        print(f"{lost:9.0%}  {others:25}", *cells, *([("met" if met else "NOT MET")] if judged else []), sep="  ")
    return missed


def traffic(rng: np.random.Generator, runs: int) -> int:
    """Print how often a check of seven domains fails and passes; how many criteria are not met. Documents differ before and
    after by 0.065 in alpha.
    """
    print(f"\n{runs:,} runs of {len(ALPHAS)} domains, margin {MARGIN}")
    print(f"{'what changed':28} {'documents':>9} {'fail':>7} {'pass':>7} {'undecided':>10}")
    missed = 0
    for name, first, (least_fail, most_fail, least_pass) in WHOLE:
        for documents in (16, 32, 96):
            found = Counter(
                outcome(
                    [
                        pair(rng, first if place == 3 else 0.0, documents, spread=0.065, alpha=alpha)
                        for place, alpha in enumerate(ALPHAS)
                    ]
                )
                for _ in range(runs)
            )
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
    for name, lose, (least, most), passes in SETTINGS:
        found = outcomes(rng, lose, options.runs)
        rates = {key: found[key] / options.runs for key in ("fail", "pass", "undecided")}
        more = halving(rng, lose, options.runs, rates["undecided"]) if rates["undecided"] else None
        met = least <= rates["fail"] <= most and rates["pass"] <= allowed(passes, options.runs)
        missed += not met
        shares = f"{rates['fail']:7.2%} {rates['pass']:7.2%} {rates['undecided']:10.2%}"
        print(f"{name:28} {shares}  {more or 'n/a':>6}  {'met' if met else 'NOT MET'}")
    missed += losses(rng, options.runs)
    missed += traffic(rng, options.runs)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
