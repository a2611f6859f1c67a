#!/usr/bin/env python3
"""How often `alphaprof diagnose` says that a server differs: of servers that do as predicted, whose requests are drawn from
the run's own documents, and of servers with a fault, by rounds that were counted.

python scripts/research/diagnose_power.py RUN:DRAFT --gamma 3 [--servers 2000] [--documents 40]

`--documents`: the run that predicts is itself that many documents, drawn anew for every server from those of RUN.
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from alphaprof.commands.diagnose import VISIBLE, Served, compared, served_run, shape_of
from alphaprof.run.reader import side_of

FAULTS = {  # what each conditional is multiplied by, at depth 1 and at all others, and what more at each further depth
    "none": (1.0, 1.0, 1.0),
    "depth 1 x 0.9": (0.9, 1.0, 1.0),
    "depth 1 x 0.8": (0.8, 1.0, 1.0),
    "all x 0.95": (0.95, 0.95, 1.0),
    "all x 0.85": (0.85, 0.85, 1.0),
    "from depth 2 x 0.9": (1.0, 0.9, 1.0),
    "from depth 2 x 0.7": (1.0, 0.7, 1.0),
    "x 0.9 more at each depth": (1.0, 0.9, 0.9),
    "zero from depth 3": (1.0, 1.0, 0.0),
}


def drawn(population: Served, rounds: int, fault: tuple[float, float, float], rng: np.random.Generator) -> Served:
    """Counters after at least so many rounds of requests that are drawn from documents, as one unit."""
    mean = float(population.rounds.mean())
    order = rng.integers(len(population.rounds), size=max(8, int(3 * rounds / mean)))
    order = order[: int(np.searchsorted(np.cumsum(population.rounds[order]), rounds)) + 1]
    first, others, more = fault
    chain = [population.rounds[order].astype(np.int64)]
    for depth in range(population.gamma):
        tested, accepted = population.tested[order, depth], population.accepted[order, depth]
        factor = first if depth == 0 else others * more ** (depth - 1)
        if population.exact:  # of the rounds of a document that are left, those that it accepted, thinned
            left, accepted = np.minimum(chain[-1], tested.astype(np.int64)), accepted.astype(np.int64)
            kept = rng.hypergeometric(accepted, tested.astype(np.int64) - accepted, left)
        else:
            own = np.divide(accepted, tested, out=np.zeros(len(order)), where=tested > 0)
            kept = rng.binomial(chain[-1], np.minimum(own, 1.0))
        chain.append(rng.binomial(kept, factor))
    sums = np.array([[float(each.sum()) for each in chain]])
    return Served("drawn", sums[:, 0], sums[:, :-1], sums[:, 1:], float(sums[:, 1:].sum()), requests=len(order))


def main() -> None:
    """Print shares of servers that are said to differ, and of those that are said to do as predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--gamma", type=int, required=True)
    parser.add_argument("--servers", type=int, default=2000)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--faults", type=int, default=200, help="servers for each fault")
    asked = parser.parse_args()
    rng = np.random.default_rng(0)
    population = served_run(side_of(asked.run), asked.gamma, None)
    print(f"{len(population.rounds)} documents, {population.rounds.sum():.0f} rounds, by depth", end=" ")
    print(population.estimates()[0][:-1].round(3))
    for name, fault in FAULTS.items():
        for rounds in (500, 2000, 10000):
            differ, told, number = 0, 0, asked.servers if name == "none" else asked.faults
            for _ in range(number):
                run = population
                if asked.documents:
                    run = population.rows(rng.integers(len(population.rounds), size=asked.documents))
                    run = dataclasses.replace(run, requests=asked.documents)
                depths, _, sign, missed, *_ = compared(run, drawn(population, rounds, fault, rng))
                found = bool(shape_of(depths, sign, rounds)[0])
                differ += found
                told += not found and missed <= VISIBLE
            print(
                f"{name:26} {rounds:6} rounds: differs {differ / number:6.2%}, as predicted {told / number:6.1%}", flush=True
            )


if __name__ == "__main__":
    main()
