#!/usr/bin/env python3
"""Print the table of docs/reference.md: tokens per round by draft, domain and number of speculative tokens K.

    python scripts/research/reference.py RUN [RUN ...] [--gammas 1 3 5 7]

Over all rounds, the target's own token counted, with 95% intervals over documents: what `alphaprof export RUN:DRAFT --to
inferencex` prints of one draft.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from alphaprof.commands.export.formats import LENGTHS
from alphaprof.report.rates import rates_at
from alphaprof.report.scope import scope_of
from alphaprof.run.reader import Run, RunDraft


def main(arguments: Sequence[str] | None = None) -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--gammas", nargs="*", type=int, default=[1, 3, 5, 7])
    options = parser.parse_args(arguments)
    for run in map(Run.open, options.runs):
        print("\n| draft | domain (documents) | " + " | ".join(f"K {gamma}" for gamma in options.gammas) + " |")
        print("|---" * (2 + len(options.gammas)) + "|")
        for side in (RunDraft(run, draft) for draft in run.manifest.drafts):
            for domain in scope_of(side, LENGTHS, None, None, None).pools:
                scope, cells = scope_of(side, LENGTHS, None, None, domain), list[str]()
                for gamma in options.gammas:
                    length = rates_at(scope, gamma).acceptance_length_all if gamma in side.gammas else None
                    cells.append(f"{length.value:.2f} [{length.low:.2f}, {length.high:.2f}]" if length else "")
                print(f"| {side.draft} | {domain} ({scope.documents}) | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
