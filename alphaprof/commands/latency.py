"""`alphaprof latency`: step times that were measured on this machine, and the CSV that `costs.path` reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alphaprof.costs.cost_model import timed_with
from alphaprof.costs.engine_table import COLUMNS
from alphaprof.costs.timing import is_busy
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, table_of_rows
from alphaprof.run.reader import Run


@dataclass(frozen=True)
class Latency:
    """The step times of a run, and where they were measured. `waiting`: share of the timing in which the steps waited for a
    CPU; None: not known. `steps`: one row a kind of step, with the columns of a run's step times.
    """

    format: ClassVar[str] = "alphaprof-latency"
    version: ClassVar[str] = "2.0"

    target: str
    dtype: str
    device: str
    engine: str
    waiting: float | None
    steps: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, run: Run) -> Latency:
        """Return the step times of a run."""
        target, table = run.manifest.target, run.latency()
        place = (target.reference, target.precision, target.device, timed_with(run.manifest))
        return cls(*place, run.manifest.environment.get("timing_waiting"), tuple(table.to_pylist()) if table else ())

    def csv(self) -> str:
        """Return the table that a profile on another machine can name under `costs.path`."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in self.steps:
            rounds = " ".join(map(str, row["rounds_ms"]))
            writer.writerow(dict(row) | {"ms": row["median_ms"], "rounds": rounds, "waiting": self.waiting or 0.0})
        return text.getvalue()

    def blocks(self) -> Iterator[Block]:
        """Yield where steps were timed, and each step's time, also in plain decode steps."""
        yield f"{self.target} in {self.dtype} on {self.device}, {self.engine}"
        if self.waiting and is_busy(self.waiting):
            yield f"this machine is busy: the steps waited for a CPU {self.waiting:.0%} of the time"
        yield "next: write the table for costs.path with --format csv"
        decode = {(row["batch"], row["context"]): row["median_ms"] for row in self.steps if row["step"] == "decode"}
        rows = []
        for row in self.steps:
            plain = decode.get((row["batch"], row["context"]))
            times = [fmt.number(row[f"{name}_ms"], 3) for name in ("median", "p10", "p90")]
            cost = fmt.number(row["median_ms"] / plain, 3) if plain else fmt.NOTHING
            names = (row["model"], row["step"], *(str(row[name]) for name in ("tokens", "batch", "context")))
            rows.append((*names, *times, cost, str(row["repeats"])))
        headings = ("model", "step", "tokens", "batch", "context", "ms", "p10", "p90", "cost", "rounds")
        yield table_of_rows("steps", headings, rows, left=("step",))
        yield Small("ms: the median over all rounds. cost: in decode steps of the target at the same batch and context.")
