"""What the target alone says about drafts: nobody has to train one to learn whether a domain is worth it.

Thresholds depend on the target alone. So does the most that a one-hot draft can reach when the target samples, its largest
probability: p(d) <= p_(1) for every proposal d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.log.store import Run
from alphaprof.theory.bounds import certified_runs, strict_thresholds
from alphaprof.totals.count import Shape
from alphaprof.totals.log_sample import shards
from alphaprof.totals.replay import Rounds, Trace, replay

Array = np.ndarray[Any, Any]
TARGET = ("target_top_prob", "target_second_prob", "target_margin", "target_entropy")


@dataclass(frozen=True)
class TargetLog:
    """The target's columns [positions] of all complete shards in corpus order, and the number of positions of each document.

    `thresholds`: by id of the rule; that of strict follows from the two largest probabilities, so that every log has it.
    """

    columns: dict[str, Array]
    thresholds: dict[str, Array]
    lengths: Array

    @classmethod
    def of(cls, run: Run) -> TargetLog | None:
        """From the log of any draft: all hold the same. None for a run without a complete shard."""
        draft = next(iter(run.manifest.drafts))
        logged = {rule: f"threshold_{rule}" for rule in run.log_rules.certified}
        found = list(shards(run, draft, [*TARGET, *logged.values()]))
        if not found:
            return None
        columns = {name: np.concatenate([part[name] for part, _ in found]) for name in (*TARGET, *logged.values())}
        thresholds = {rule: columns.pop(name) for rule, name in logged.items()}
        if "strict" not in thresholds:
            pair = columns["target_top_prob"], columns["target_second_prob"]
            thresholds = {"strict": strict_thresholds(*pair)} | thresholds
        return cls(columns, thresholds, np.concatenate([shape.stop - shape.start for _, shape in found]))

    def part(self, chosen: Array) -> TargetLog:
        """The positions of some documents, chosen by number."""
        mask = np.zeros(len(self.lengths), dtype=bool)
        mask[chosen] = True
        rows = np.repeat(mask, self.lengths)
        columns, thresholds = (
            {name: values[rows] for name, values in part.items()} for part in (self.columns, self.thresholds)
        )
        return TargetLog(columns, thresholds, self.lengths[mask])


@dataclass(frozen=True)
class CertainRuns:
    """What is certain of any draft whose divergences all are at most `epsilon`: sums per document over positions of whether
    its token is certainly accepted and of the run of such positions from there on, [documents], and rounds that accept
    nothing else. Accepting more never needs more rounds, so that these are the most there can be.
    """

    epsilon: float
    certain: Array
    run: Array
    rounds: Rounds


def certain_runs(thresholds: Array, lengths: Array, epsilon: float, gamma: int) -> CertainRuns:
    """`CertainRuns` from thresholds [positions] of documents of `lengths`, with `gamma` drafts (flavour `engine`)."""
    stop = np.cumsum(lengths).astype(np.int64)
    shape = Shape(np.arange(len(stop)), stop - lengths, stop, lengths, np.array([]), np.array([]))
    certain = thresholds > epsilon
    run = certified_runs(thresholds, epsilon, shape.start, shape.stop)
    nowhere = np.zeros(len(run), dtype=bool)
    trace = Trace(run, np.full(len(run), gamma), shape.start, shape.stop, lengths, nowhere)
    return CertainRuns(epsilon, shape.sums(certain), shape.sums(run), replay(trace, gamma))
