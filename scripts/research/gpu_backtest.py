#!/usr/bin/env python3
"""Hold the computed cost of a round against published throughputs with and without an EAGLE-3 head.

    python scripts/research/gpu_backtest.py ROWS.csv --configs FOLDER [--engine NAME] [--fit] [--format json]

ROWS has a row for each published cell: model, bench, batch, tp, steps, topk, draft_tokens, accept_length, speedup (as in
tests/golden/gpu/). FOLDER has config.json files: for a model `m` the longest NAME.json that its name begins with (in small
letters), and its head's, head-NAME.json; `--models FILE` is a CSV of model, target and head with other file names.

Published throughputs hold prefill, client and ramp-down as well as decoding. With f the share of such time without a draft,
speedup = tau / ((1 - f) c + f tau), tau tokens a round and c its cost in decode steps. f is fitted for each benchmark and
batch to the rows of `--requests` (default: the calibration rows), whose f other models' rows take. Chains only:
rows of trees (topk above 1) are left out, and so are models whose shape a roofline does not know. `--fit` fits the four
overheads to ROWS, to base throughputs (column base) as well, with f free, and prints them as fields of `Engine`
(alphaprof/costs/roofline.py).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from alphaprof.config.hardware import ACCELERATORS, ENGINES
from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import accuracy, roofline_rows
from alphaprof.costs.rounds import StepTimes, full_round_costs
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import StepTable

CALIBRATION = Path(__file__).parent.parent.parent / "tests" / "golden" / "gpu"
COLUMNS = ("model", "bench", "batch", "tp", "steps", "topk", "base", "accept_length", "speedup")
MOST_REQUESTS = 0.9  # share of base time that is not decoding
FITTED = {"layer_us": 30.0, "expert_layer_us": 30.0, "round_ms": 0.5, "draft_ms": 0.1}  # where the fit starts


@dataclass(frozen=True)
class Row:
    """A published cell: `base` tokens/s without a draft, `tau` tokens a round, and the speedup of throughput."""

    model: str
    bench: str
    batch: int
    tp: int
    steps: int
    base: float
    tau: float
    speedup: float
    target: ModelShape
    head: ModelShape

    @property
    def requests(self) -> tuple[str, int]:
        """What rows share that have the same share of time outside decoding."""
        return self.bench, self.batch


@dataclass(frozen=True)
class Judged:
    """A row with the speedup that is computed for it, and the factor within which it should lie."""

    row: Row
    predicted: float
    factor: float

    @property
    def error(self) -> float:
        """Computed / published - 1."""
        return self.predicted / self.row.speedup - 1

    @property
    def inside(self) -> bool:
        """Whether the published speedup lies in the stated 90 % interval."""
        return abs(math.log1p(self.error)) <= math.log(self.factor)


def read_rows(path: Path, configs: Path, models: Path | None) -> tuple[list[Row], list[str]]:
    """Return the chains of a file, and what was left out, in words. Raises `SystemExit` for a model without configs."""
    named = {}
    if models is not None:
        with models.open(newline="", encoding="utf-8") as file:
            named = {line["model"]: (line["target"], line["head"]) for line in csv.DictReader(file)}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise SystemExit(f"cannot read {path}: {error.strerror}\nhint: name a CSV of published rows") from None
    if missing := [name for name in COLUMNS if lines and name not in lines[0]]:
        raise SystemExit(f"{path} has no column {', '.join(missing)}\nhint: its columns are {', '.join(COLUMNS)}")
    shapes: dict[str, tuple[ModelShape, ModelShape] | None] = {}
    left_out: list[str] = []
    for model in dict.fromkeys(line["model"] for line in lines):
        try:
            target, head = (
                json.loads((configs / name).read_text()) for name in named.get(model) or files_of(model, configs)
            )
            shape = ModelShape.from_config(target)
            shapes[model] = shape, ModelShape.of_head(head, shape)
        except KeyError as reason:
            shapes[model] = None
            left_out.append(f"{model}: {reason.args[0]}")
    trees = sum(line["topk"] != "1" for line in lines)
    left_out += [f"{trees} rows of trees"] if trees else []
    rows = [
        Row(
            *(line[name] for name in ("model", "bench")),
            *(int(line[name]) for name in ("batch", "tp", "steps")),
            *(float(line[name]) for name in ("base", "accept_length", "speedup")),
            *known,
        )
        for line in lines
        if line["topk"] == "1" and (known := shapes[line["model"]])
    ]
    return rows, left_out


def files_of(model: str, configs: Path) -> tuple[str, str]:
    """Return the files of a model and its head: those of the longest name that the model's begins with."""
    names = [path.stem for path in configs.glob("*.json") if model.lower().startswith(path.stem)]
    if not names:
        raise SystemExit(
            f"no config for {model} in {configs}\nhint: name its files in a CSV of model,target,head: --models FILE"
        )
    name = max(names, key=len)
    return f"{name}.json", f"head-{name}.json"


def cost(row: Row, setting: RooflineCosts, context: int) -> float:
    """Return what a round costs in decode steps, by the product's own functions. As SGLang does, the head's first step runs
    over all rows of the verification before.
    """
    return float(full_round_costs(step_times(row, setting, context), row.steps)[-1])


def step_times(row: Row, setting: RooflineCosts, context: int) -> StepTimes:
    """Return the step times of a row's models."""
    setting = setting.model_copy(update={"tp": row.tp})
    rows = roofline_rows(row.target, {"head": row.head}, setting, row.steps, [row.batch], [context], [], ["head"])
    return StepTable(rows).times("head", row.steps, row.batch, context)


def with_requests(tau: float, cost_: float, share: float) -> float:
    """Return the speedup of throughput if a share of the base time is not decoding."""
    return tau / ((1 - share) * cost_ + share * tau)


def request_shares(rows: Sequence[Row], costs: Sequence[float]) -> dict[tuple[str, int], float]:
    """Fit f to each benchmark and batch: least squares of the logarithms."""
    found = {}
    for key in dict.fromkeys(row.requests for row in rows):
        mine = [(row, each) for row, each in zip(rows, costs, strict=True) if row.requests == key]

        def squares(share: float, mine: Sequence[tuple[Row, float]] = tuple(mine)) -> float:
            return sum(math.log(with_requests(row.tau, each, share) / row.speedup) ** 2 for row, each in mine)

        found[key] = float(minimize_scalar(squares, bounds=(0, MOST_REQUESTS), method="bounded").x)
    return found


def fitted(rows: Sequence[Row], setting: RooflineCosts, context: int) -> dict[str, float]:
    """Fit the four overheads to the speedups and base throughputs of rows, with f free; that of experts only if a row has
    them.
    """
    names = [name for name in FITTED if name != "expert_layer_us" or any(row.target.experts for row in rows)]

    def residuals(values: Sequence[float]) -> list[float]:
        tried = with_overheads(setting, dict(zip(names, map(float, values), strict=True)))
        costs = [cost(row, tried, context) for row in rows]
        shares = request_shares(rows, costs)
        found = []
        for row, each in zip(rows, costs, strict=True):
            share = shares[row.requests]
            base = (1 - share) * 1000 * row.batch / step_times(row, tried, context).decode.ms
            found += [math.log(with_requests(row.tau, each, share) / row.speedup), math.log(base / row.base)]
        return found

    start = [FITTED[name] for name in names]
    best = least_squares(residuals, start, bounds=(0, np.inf), x_scale=start, diff_step=1e-2)
    return dict(zip(names, map(float, best.x), strict=True))


def with_overheads(setting: RooflineCosts, values: Mapping[str, float]) -> RooflineCosts:
    """Return the setting with an engine of other overheads, whose error is what the engine's is elsewhere."""
    engine = ENGINES[setting.preset]
    factor = engine.factor if engine.accelerator is None else engine.factor**2
    ENGINES["fitted"] = replace(engine, factor=factor, accelerator=None, **values)
    return setting.model_copy(update={"preset": "fitted"})


def judged(
    rows: Sequence[Row], setting: RooflineCosts, context: int, shares: Mapping[tuple[str, int], float]
) -> list[Judged]:
    """Compute the speedup of every row with its benchmark's share; 0 where the benchmark has none."""
    return [
        Judged(
            row,
            with_requests(row.tau, cost(row, setting, context), shares.get(row.requests, 0.0)),
            accuracy(setting, row.batch, context)[0],
        )
        for row in rows
    ]


def summary(name: str, found: Sequence[Judged]) -> dict[str, Any]:
    """Errors of some rows in percent, the share inside the stated interval, and what a wrong choice of steps loses."""
    errors = np.array([100 * each.error for each in found])
    sizes, lost = np.abs(errors), list(regrets(found))
    return {
        "rows_of": name,
        "rows": len(found),
        "signed_median": round(float(np.median(errors)), 1),
        "median": round(float(np.median(sizes)), 1),
        "p90": round(float(np.quantile(sizes, 0.9)), 1),
        "worst": round(float(sizes.max()), 1),
        "inside_percent": round(100 * float(np.mean([each.inside for each in found])), 1),
        "gamma_regret_mean": round(100 * float(np.mean(lost)), 2) if lost else None,
        "gamma_regret_worst": round(100 * max(lost), 2) if lost else None,
    }


def regrets(found: Sequence[Judged]) -> Iterable[float]:
    """Yield the share of the best published speedup that the computed choice of steps loses, for each set of steps."""
    sets: dict[tuple[str, str, int], list[Judged]] = {}
    for each in found:
        sets.setdefault((each.row.model, *each.row.requests), []).append(each)
    for rows in sets.values():
        if len({each.row.steps for each in rows}) > 1:
            chosen = max(rows, key=lambda each: each.predicted)
            yield 1 - chosen.row.speedup / max(each.row.speedup for each in rows)


def main() -> None:
    """Print the table, or the fitted overheads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.csv")
    parser.add_argument("--configs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--models", type=Path, metavar="FILE", help="CSV of model,target,head: names of files in FOLDER")
    parser.add_argument("--requests", type=Path, default=CALIBRATION / "specbundle_calibration.csv", metavar="CSV")
    parser.add_argument("--accelerator", default="h200", choices=sorted(ACCELERATORS))
    parser.add_argument("--engine", default="sglang-h200", choices=sorted(ENGINES))
    parser.add_argument("--context", type=int, default=600, help="tokens in the cache (default 600)")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--format", default="terminal", choices=("terminal", "json"))
    given = parser.parse_args()
    rows, left_out = read_rows(given.rows, given.configs, given.models)
    if not rows:
        raise SystemExit(
            f"no row of {given.rows} can be computed: {'; '.join(left_out)}\nhint: chains of known shapes are needed"
        )
    setting = RooflineCosts(source="roofline", accelerator=given.accelerator, preset=given.engine)
    document: dict[str, Any] = {"engine": given.engine, "accelerator": given.accelerator, "context": given.context}
    document["left_out"] = left_out
    if given.fit:
        document["fitted"] = fitted(rows, setting, given.context)
        setting = with_overheads(setting, document["fitted"])
    calibration, _ = read_rows(given.requests, CALIBRATION / "configs", None)
    usual = RooflineCosts(source="roofline", accelerator="h200", preset=given.engine)  # where these throughputs come from
    shares = request_shares(calibration, [cost(row, usual, given.context) for row in calibration])
    unknown = dict.fromkeys(row.requests for row in rows if row.requests not in shares)
    document["left_out"] += [f"no request share for {bench}, batch {batch}: taken as 0" for bench, batch in unknown]
    found = judged(rows, setting, given.context, shares)
    groups = {f"{model}, {steps} steps, batch {batch}": [] for model, steps, batch in sorted({key(each) for each in found})}
    for each in found:
        model, steps, batch = key(each)
        groups[f"{model}, {steps} steps, batch {batch}"].append(each)
    models = dict.fromkeys(each.row.model for each in found)
    tables = [summary("all", found)]
    tables += [summary(model, [each for each in found if each.row.model == model]) for model in models]
    tables += [summary(name, rows_of) for name, rows_of in groups.items()]
    document |= {
        "request_shares": {f"{bench}, batch {batch}": share for (bench, batch), share in shares.items()},
        "errors": tables,
    }
    print(json.dumps(document, indent=1) if given.format == "json" else text(document))


def key(each: Judged) -> tuple[str, int, int]:
    """What a row of the table is about: model, steps and batch."""
    return each.row.model, each.row.steps, each.row.batch


def text(document: Mapping[str, Any]) -> str:
    """The document as tables of text."""
    lines = [f"left out: {each}" for each in document["left_out"]]
    if fit := document.get("fitted"):
        lines.append("fitted: " + ", ".join(f"{name}={value:.4g}" for name, value in fit.items()))
    heads = ("signed_median", "median", "p90", "worst", "inside_percent", "gamma_regret_mean", "gamma_regret_worst")
    width = max(len(row["rows_of"]) for row in document["errors"])
    lines.append(f"{'errors of speedups in %, with requests':{width}}  rows  " + "  ".join(heads))
    for row in document["errors"]:
        cells = ("" if row[name] is None else str(row[name]) for name in heads)
        values = "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, heads, strict=True))
        lines.append(f"{row['rows_of']:{width}}  {row['rows']:4}  {values}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
