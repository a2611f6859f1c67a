#!/usr/bin/env python3
"""Put what finished runs say of their target beside the figures of arXiv:2606.30265 for Qwen3-1.7B and Qwen3-4B.

    python scripts/research/reproduce_paper.py RUN [RUN ...]

Runs of profiles/paper-qwen3-1.7b.yaml and profiles/paper-qwen3-4b.yaml follow the paper's protocol as far as it is known to
us; any other run with certificates: true shows how far another target or other traffic is from it. Reads the log alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alphaprof.errors import AlphaprofError, OptionInvalid, RunMismatch
from alphaprof.render import format as fmt
from alphaprof.report.sections.target import Array, inexact_share
from alphaprof.run.reader import Run
from alphaprof.stats.estimate import Interval, by_cluster, quantile_interval, ratio, share_interval
from alphaprof.totals.documents import Documents, Units
from alphaprof.totals.log_sample import shards

CONFIDENCE = 0.95
MEAN, MEDIAN, FIFTH = "mean", "median", "5th percentile"
PROBABILITIES = {MEDIAN: 0.5, FIFTH: 0.05}
UNKNOWN = "-"
# The figures of arXiv:2606.30265 (A. Sharma, "When Is a Draft Accepted? A Theory of Acceptance in Speculative Decoding"):
# for each column of a log and each statistic over positions those of TARGETS; None: not known to us. Thresholds in nats.
TARGETS = ("Qwen3-1.7B", "Qwen3-4B")
Published = tuple[float | None, float | None]
TYPICAL: dict[str, Published] = {FIFTH: (0.375, 0.378)}  # of one pair of parameters; which one is not known to us
PUBLISHED: dict[str, dict[str, Published]] = {
    "target_top_prob": {MEAN: (0.845, 0.871), MEDIAN: (0.969, 0.988), FIFTH: (0.343, 0.391)},
    "target_top_10_prob": {FIFTH: (0.901, 0.927)},
    "threshold_strict": {MEAN: (0.438, 0.468), MEDIAN: (0.559, 0.619), FIFTH: (0.006, 0.007)},
    "threshold_additive_0p3": {FIFTH: (0.102, 0.107)},
    "threshold_multiplicative_0p1": {FIFTH: (0.279, 0.296)},
    "threshold_typical_0p09_0p3": TYPICAL,
    "threshold_typical_0p3_0p09": TYPICAL,
    "threshold_tree_2": {MEDIAN: (0.962, None), FIFTH: (0.071, None)},
    "threshold_tree_4": {MEDIAN: (1.456, None), FIFTH: (0.249, None)},
    "threshold_tree_8": {MEDIAN: (2.038, None), FIFTH: (0.531, None)},
}
NAMES = {
    "target_top_prob": "top-1 probability",
    "target_top_10_prob": "top-10 mass",
    "threshold_strict": "strict",
    "threshold_additive_0p3": "additive, epsilon 0.3",
    "threshold_multiplicative_0p1": "multiplicative, c 0.1",
    "threshold_typical_0p09_0p3": "typical, epsilon 0.09, delta 0.3",
    "threshold_typical_0p3_0p09": "typical, epsilon 0.3, delta 0.09",
    "threshold_tree_2": "tree, m 2",
    "threshold_tree_4": "tree, m 4",
    "threshold_tree_8": "tree, m 8",
}
PROTOCOL = {"text": "greedy", "documents": "500", "shortest prompt": "64 or more", "positions": "about 63,000"}
NOTES = (
    "Rows with a rule are thresholds, nats of KL(target || draft): a draft that is nearer than that is sure to be accepted.",
    "Published: arXiv:2606.30265, a sample of 500 documents. In brackets: 95 % over documents, of the run alone.",
    f"{UNKNOWN}: not known to us. {fmt.NOTHING}: the run was not profiled with the rule.",
    "Of typical one figure is published, with parameters that are not known to us: it stands beside both orders of them.",
    "Inexact: share of positions where some rule of the run accepts more tokens than were looked at: a lower bound there.",
)
Row = list[str]
Key = tuple[str, str]  # a column and a statistic of it


@dataclass(frozen=True)
class Positions:
    """The target's columns [positions] of a run; how many positions each document has, and the independent unit of each."""

    columns: dict[str, Array]
    lengths: Array
    cluster: Array

    @classmethod
    def of(cls, run: Run) -> Positions:
        """Those of PUBLISHED that the run has. From the log of any draft: all hold the same of the target."""
        held = {column.name for column in run.log_rules.columns}
        names = [name for name in PUBLISHED if name in held]
        parts: dict[str, list[Array]] = {name: [] for name in names}
        lengths = []
        for columns, shape in shards(run, next(iter(run.manifest.drafts)), names):
            lengths.append(shape.stop - shape.start)
            for name in names:
                parts[name].append(columns[name])
        cluster = Units.of(run.documents()).codes
        return cls({name: np.concatenate(found) for name, found in parts.items()}, np.concatenate(lengths), cluster)

    def estimate(self, column: str, statistic: str) -> Interval:
        """A statistic over positions, with an interval over documents."""
        values = self.columns[column]
        if statistic == MEAN:
            sums = np.add.reduceat(values.astype(np.float64), np.cumsum(self.lengths) - self.lengths)
            return share_interval(ratio(*by_cluster(self.cluster, sums, self.lengths)), CONFIDENCE)
        found = quantile_interval(values, self.lengths, self.cluster, PROBABILITIES[statistic], CONFIDENCE)
        return found if column.startswith("threshold_") else dataclasses.replace(found, high=min(1.0, found.high))


def opened(path: Path) -> Run:
    """A run that can be held against the paper. Raises `RunUnreadable`, `RunMismatch` and `OptionInvalid`."""
    run = Run.open(path)
    if run.manifest.status != "complete":
        raise RunMismatch(f"{path} is not complete", "finish it with alphaprof profile --resume first")
    if not run.log_rules.certified:
        raise OptionInvalid(
            f"{path} holds no thresholds", "profile with certificates: true, like profiles/paper-qwen3-1.7b.yaml"
        )
    if not any(f"threshold_{rule}" in PUBLISHED for rule in run.log_rules.certified):
        known = ", ".join(name.removeprefix("threshold_") for name in PUBLISHED if name.startswith("threshold_"))
        raise OptionInvalid(f"{path} holds no threshold that is published", f"profile with some of the rules {known}")
    return run


def measured(run: Run) -> dict[Key, Interval | None]:
    """The run's counterpart of every published figure; None for a rule that it was not profiled with."""
    positions = Positions.of(run)
    return {
        (column, statistic): positions.estimate(column, statistic) if column in positions.columns else None
        for column, statistics in PUBLISHED.items()
        for statistic in statistics
    }


def about(run: Run) -> dict[str, str]:
    """What was measured, to be held against PROTOCOL."""
    documents = Documents.of(run.documents())
    kinds = [fmt.text_kind(group.continuation, group.sampling) for group in documents.groups]
    return {
        "target": f"{Path(run.manifest.target.reference).name}, {run.manifest.target.dtype}",
        "text": "; ".join(dict.fromkeys(kinds)),
        "documents": fmt.documents(len(documents.table), len(np.unique(documents.units.codes))),
        "shortest prompt": fmt.count(int(documents.prompt_tokens.min())),
        "positions": fmt.count(run.manifest.positions),
        "inexact": fmt.share(inexact_share(run), 4),
    }


def table(runs: Sequence[Run]) -> list[Row]:
    """The published figures and those of runs side by side; the first row names the columns."""
    facts, found = [about(run) for run in runs], [measured(run) for run in runs]
    rows = [["", *(f"{target}, published" for target in TARGETS), *(str(run.path) for run in runs)]]
    for name in facts[0]:
        theirs = list(TARGETS) if name == "target" else [PROTOCOL.get(name, UNKNOWN)] * len(TARGETS)
        rows.append([name, *theirs, *(each[name] for each in facts)])
    for column, statistic in found[0]:
        theirs = [UNKNOWN if value is None else f"{value:.3f}" for value in PUBLISHED[column][statistic]]
        ours = [_cell(each[column, statistic]) for each in found]
        rows.append([f"{NAMES[column]}: {statistic}", *theirs, *ours])
    return [["".join(char if char.isprintable() else " " for char in cell) for cell in row] for row in rows]


def _cell(found: Interval | None) -> str:
    return fmt.interval(found, digits=3)


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code of the failure where a run cannot be read."""
    parser = argparse.ArgumentParser(description="Put runs beside the published figures of arXiv:2606.30265.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directory of a complete run with thresholds")
    options = parser.parse_args(arguments)
    try:
        rows = table([opened(path) for path in options.runs])
    except AlphaprofError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print("\n\n".join([markdown(rows), "\n".join(NOTES)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
