#!/usr/bin/env python3
"""How far apart do runs of one benchmark lie? From a run that sampled each prompt several times (repeats.yaml).

    python scripts/research/repeats.py RUN DRAFT GAMMA [--rule one_hot] [--documents 1319]

With L tokens per round over all texts, the residual of a text is its tokens less L times its rounds. Their variance within
prompts is what a second run of the same prompts changes; that over all texts is what other prompts change too. A run of n
prompts has a standard deviation of s / (r sqrt(n)), r rounds per text. Beside it stands what independent rounds would give.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np

import alphaprof


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("draft")
    parser.add_argument("gamma", type=int)
    parser.add_argument("--rule", default="one_hot")
    parser.add_argument("--documents", type=int, default=1319)
    options = parser.parse_args(arguments)
    run = alphaprof.open(options.run)
    totals = run.totals(where=[("draft", "=", options.draft), ("rule", "=", options.rule)])
    found = totals.merge(run.documents()[["document", "prompt_hash"]], on="document")
    found["rounds"] = found[f"rounds_{options.gamma}"].astype(float)
    length = float(found["tokens"].sum() / found["rounds"].sum())
    found["residual"] = found["tokens"] - length * found["rounds"]
    prompts = found.groupby("prompt_hash")["residual"]
    repeats, rounds = prompts.size().min(), found["rounds"].mean()
    within, whole = float(prompts.var(ddof=1).mean()), float(found["residual"].var(ddof=1))
    accepted = np.array([found[f"accepted_{options.gamma}_{d}"].sum() for d in range(1, options.gamma + 1)], float)
    square = float(((2 * np.arange(1, options.gamma + 1) - 1) * accepted).sum() / found["rounds"].sum())
    alone = square - (length - 1) ** 2
    print(f"{prompts.ngroups} prompts, {repeats} texts each, {rounds:.1f} rounds a text: {length:.3f} tokens per round")
    for words, variance in (
        ("the same prompts again", within),
        ("other prompts", whole),
        ("independent rounds", alone * rounds),
    ):
        deviation = math.sqrt(variance) / rounds / math.sqrt(options.documents)
        print(
            f"{words}: standard deviation of a run of {options.documents}: {deviation:.4f} ({100 * deviation / length:.2f}%)"
        )
    print(f"variance of a text's residual over that of independent rounds: {within / alone / rounds:.2f} within prompts")


if __name__ == "__main__":
    main()
