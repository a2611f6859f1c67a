"""`alphaprof latency`: step times that were measured on this machine, and the CSV of `costs.path`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from alphaprof.costs.cost_model import MEASURED, timed_with
from alphaprof.costs.engine_table import COLUMNS
from alphaprof.costs.steps import TARGET
from alphaprof.costs.timing import GO_ROUNDS, autocorrelation, is_busy, reach
from alphaprof.render import format as fmt
from alphaprof.render.blocks import Block, Small, Table, table_by_columns
from alphaprof.run.reader import Run

Rows = Sequence[Mapping[str, Any]]
TIMES = {"ms": "median", "p10": "p10", "p90": "p90"}  # headings of what stands in a run's step times


@dataclass(frozen=True)
class Latency:
    """Step times and where they were measured."""

    format: ClassVar[str] = "alphaprof-latency"
    version: ClassVar[str] = "1.0"

    alphaprof: str
    target: str
    drafts: dict[str, str]  # models by name of the draft
    dtype: str
    device: str
    threads: int | None  # of torch; None: the device is not a CPU
    engine: str
    waiting: float | None  # share of the timing in which the steps waited for a CPU; None: not known
    steps: tuple[Mapping[str, Any], ...]  # one a kind of step: the columns of a run's step times

    @classmethod
    def of(cls, run: Run) -> Latency:
        """Return the step times of a run."""
        manifest, table = run.manifest, run.latency()
        environment, target, source = manifest.environment, manifest.target, manifest.profile.costs.source
        return cls(
            alphaprof=manifest.alphaprof,
            target=target.reference,
            drafts={name: facts.reference for name, facts in manifest.drafts.items()},
            dtype=target.precision,
            device=target.device,
            threads=environment["torch_threads"] if target.device == "cpu" and source == MEASURED else None,
            engine=timed_with(manifest),
            waiting=environment.get("timing_waiting"),
            steps=tuple(table.to_pylist()) if table is not None else (),
        )

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
        """Yield what drafting and verifying cost, a table for every batch size and context, and one of prefills."""
        yield from _cost_lines(self)
        yield ""
        threads = f", {fmt.many(self.threads, 'thread')}" if self.threads else ""
        yield f"{self.target} in {self.dtype} on {self.device}{threads}, {self.engine}"
        yield ""
        steps = [row for row in self.steps if row["step"] != "prefill"]
        for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in steps if row["model"] == TARGET):
            # A draft whose own context is shorter was timed at what fits into it.
            mine = [row for row in steps if row["batch"] == batch and row["context"] <= context]
            mine = list({(row["model"], row["step"], row["tokens"]): row for row in mine}.values())
            yield _step_table(f"batch {batch}, context {fmt.count(context)} ({mine[0]['mode']})", mine)
        if prefills := [row for row in self.steps if row["step"] == "prefill"]:
            yield _step_table("prefill of one prompt into an empty cache", prefills)
        yield Small("cost: in plain decode steps of the target at the same batch and context; the median over all rounds.")
        yield Small("±: half the 95% interval of the cost. p10, p90: percentiles of the times over all rounds.")
        yield Small("draft, 2 tokens: its first step after a round accepted in full. bookkeeping: rejected tokens removed.")
        if any(row["step"] == "draft_first" for row in steps):
            yield Small("draft_first: a head's first step of a round, over the tokens that the target has just verified.")


def _cost_lines(latency: Latency) -> Iterator[str]:
    """Yield what a step of every draft and verification cost, at the smallest batch and context, and what to do with it."""
    decode = next(row for row in latency.steps if row["model"] == TARGET and row["step"] == "decode")
    first = [row for row in latency.steps if all(row[name] == decode[name] for name in ("batch", "context"))]
    yield (
        f"a decode step of the target takes {fmt.number(decode['median_ms'])} ms at batch {decode['batch']}, context "
        f"{fmt.count(decode['context'])}"
    )
    steps = [row for row in first if row["model"] != TARGET and row["step"] == "draft" and row["tokens"] == 1]
    verify = max((row for row in first if row["step"] == "verify"), key=itemgetter("tokens"), default=None)
    r = _autocorrelation(first)
    costs = [(f"a token drafted by {fmt.short(row['model'])}", row) for row in steps]
    if verify is not None:
        costs.append((f"verifying {verify['tokens']} tokens", verify))
    for name, row in costs:
        cost = f"{fmt.number(row['median_ms'] / decode['median_ms'])} ± {_cost_error(row, decode, r)} of that"
        yield f"{name} costs {cost} ({fmt.number(row['median_ms'])} ms)"
    if decode["repeats"] < GO_ROUNDS:
        yield f"too few for a GO: {fmt.many(decode['repeats'], 'round')} of {GO_ROUNDS}; raise costs.budget"
    if latency.waiting and is_busy(latency.waiting):
        yield f"this machine is busy: the steps waited for a CPU {latency.waiting:.0%} of the time"
    yield "next: write the table for costs.path with --format csv, or give these costs to alphaprof predict"


def _step_table(title: str, steps: Rows) -> Table:
    decode, r = next((row for row in steps if row["step"] == "decode"), None), _autocorrelation(steps)
    rows = []
    for row in steps:
        context = f" (at {fmt.count(row['context'])} tokens)" if row["context"] != steps[0]["context"] else ""
        cells = {"step": row["step"] + context, "tokens": str(row["tokens"])}
        cells |= {name: fmt.number(row[f"{column}_ms"], 3) for name, column in TIMES.items()}
        cells["cost"] = fmt.number(row["median_ms"] / decode["median_ms"], 3) if decode else fmt.NOTHING
        rows.append((row["model"], cells | {"±": _cost_error(row, decode, r), "rounds": str(row["repeats"])}))
    return table_by_columns(title, rows, named="model", left=("step",))


def _autocorrelation(rows: Rows) -> float:
    return autocorrelation((row["step"], row["rounds_ms"]) for row in rows if row["step"] != "prefill")


def _cost_error(row: Mapping[str, Any], decode: Mapping[str, Any] | None, r: float) -> str:
    """Return how far the 95% interval of a step's cost goes, as a share of it."""
    if decode is None or row is decode or not row["median_ms"]:
        return fmt.NOTHING
    rounds = min(len(row["rounds_ms"]), len(decode["rounds_ms"]))
    costs = np.array(row["rounds_ms"][:rounds]) / np.array(decode["rounds_ms"][:rounds])
    error = reach(costs / (row["median_ms"] / decode["median_ms"]) - 1, r)
    return fmt.number(100 * error, 1, "%") if error < 1 else ">100%"
