#!/usr/bin/env python3
"""Hold the computed cost of a round against published or measured rounds with an EAGLE-3 head.

    python scripts/research/gpu_backtest.py ROWS.csv --configs FOLDER [--preset NAME] [--fit [--out FILE]] [--format json]

ROWS are of one of two kinds.

Throughputs (as in tests/golden/gpu/specbundle_calibration.csv): model, bench, batch, tp, steps, topk, base,
accept_length, speedup. FOLDER has config.json files: for a model `m` the longest NAME.json that its name begins with (in
small letters), and its head's, head-NAME.json; `--models FILE` is a CSV of model, target and head with other file names.

Rounds (as in tests/golden/gpu/gpu_cells.csv): gpu, target and head (files of FOLDER), batch, context, K, base_ms (a decode
step without the draft) and round_ms; optional: source, model, workload, version, mode, tp, weight (16 or awq4), kv (bits),
tau, output (tokens a sequence) and kind. Where kind is wall_group, a round's time includes that a group waits for its
slowest sequence, which is computed.

Published throughputs hold prefill, client and ramp-down as well as decoding. With f the share of such time without a draft,
speedup = tau / ((1 - f) c + f tau), tau tokens a round and c its cost in decode steps. f is fitted for each benchmark and
batch to the rows of `--requests` (default: the calibration rows), whose f other models' rows take. Chains only: rows of
trees (topk above 1) are left out, and so are models whose shape a roofline does not know. Rounds of regimes that a roofline
does not describe stand apart, below. `--fit` fits the overheads of a preset to throughputs, or those of a step, round and
draft step and the share of the peak to rounds; `--out` writes the preset for `costs: {preset: FILE}`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq, least_squares, minimize_scalar

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from alphaprof.config.hardware import ACCELERATORS, ELSEWHERE, PRESETS, preset_of
from alphaprof.config.options import RooflineCosts
from alphaprof.costs.cost_model import accuracy, roofline_rows
from alphaprof.costs.rounds import StepTimes, full_round_costs
from alphaprof.costs.shapes import ModelShape
from alphaprof.costs.steps import StepTable
from alphaprof.errors import OptionInvalid

CALIBRATION = Path(__file__).parent.parent.parent / "tests" / "golden" / "gpu"
COLUMNS = ("model", "bench", "batch", "tp", "steps", "topk", "base", "accept_length", "speedup")
CELL_COLUMNS = ("gpu", "target", "head", "batch", "context", "K", "base_ms", "round_ms")
MOST_REQUESTS = 0.9  # share of base time that is not decoding
FITTED = {"layer_us": 30.0, "expert_layer_us": 30.0, "round_ms": 0.5, "draft_ms": 0.1}  # where the fit starts
FITTED_TO_ROUNDS = {"step_ms": 0.35, "round_ms": 0.5, "draft_ms": 0.08, "compute": 0.5}
PRIOR = 0.01 / 3  # rounds are measured within 1%; constants differ by about three times what they are where the fit starts
AWQ_BYTES = 0.52  # a parameter: 4 bits, and a scale and zero point for each 128
IMPOSSIBLE = 0.95  # decode steps: a round that is published as cheaper than a decode step, but for noise
OLDEST = (0, 11)  # vLLM, that drafts inside of CUDA graphs


@dataclass(frozen=True)
class Row:
    """A published cell: `base` tokens/s without a draft, `tau` tokens a round, and the speedup of throughput or of decoding.
    `slowest`: rounds of a group's slowest sequence, as a multiple of their mean. `regime`: what no roofline describes.
    """

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
    gpu: str
    context: int
    source: str = ""
    slowest: float = 1.0
    regime: str = ""

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


def read_rows(
    path: Path, configs: Path, models: Path | None, gpu: str = "h200", context: int = 600
) -> tuple[list[Row], list[str]]:
    """Return the chains of a file, and what was left out, in words. `gpu`, `context`: of throughputs. Raises `SystemExit`
    for a file that is not one of rows, a model without configs, a GPU that is not known, and impossible numbers.
    """
    named = {}
    if models is not None:
        named = {line["model"]: (line["target"], line["head"]) for line in lines_of(models, ("model", "target", "head"))}
    lines = lines_of(path)
    cells = bool(lines) and "round_ms" in lines[0]
    lines = lines_of(path, CELL_COLUMNS if cells else COLUMNS)
    shapes: dict[tuple[str, str], tuple[ModelShape, ModelShape] | None] = {}
    left_out: list[str] = []
    rows: list[Row] = []
    for number, line in enumerate(lines, 2):
        files = (line["target"], line["head"]) if cells else named.get(line["model"]) or files_of(line["model"], configs)
        if files not in shapes:
            try:
                target, head = (json.loads((configs / name).read_text(encoding="utf-8")) for name in files)
                shape = ModelShape.from_config(target)
                shapes[files] = shape, ModelShape.of_head(head, shape)
            except (LookupError, OSError, ValueError, TypeError, AttributeError) as reason:
                shapes[files] = None
                left_out.append(f"{line.get('model') or files[0]}: {reason.args[-1]}")
        known = shapes[files]
        try:
            if known is not None and cells and line["base_ms"] and line["round_ms"]:
                rows.append(cell_row(line, *known))
            elif known is not None and not cells and line["topk"] == "1":
                counts = (int(number_in(line, name)) for name in ("batch", "tp", "steps"))
                values = (number_in(line, name) for name in ("base", "accept_length", "speedup"))
                rows.append(Row(line["model"], line["bench"], *counts, *values, *known, gpu, context))
        except ValueError as error:
            raise SystemExit(f"{path}, line {number}: {error}\nhint: correct the row, or leave it out") from None
    odd = {(row.source, row.model) for row in rows if row.tau / row.speedup < IMPOSSIBLE}
    unlike = "rounds published as cheaper than a decode step: the baseline ran otherwise; measure both alike"
    rows = [replace(row, regime=unlike) if (row.source, row.model) in odd else row for row in rows]
    if cells and (untimed := sum(not (line["base_ms"] and line["round_ms"]) for line in lines)):
        left_out.append(f"{untimed} rows without a decode step or a round")
    if not cells and (trees := sum(line["topk"] != "1" for line in lines)):
        left_out.append(f"{trees} rows of trees")
    return rows, left_out


def lines_of(path: Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a CSV, with empty cells where one ends early. Raises `SystemExit` for one without some columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, restval=""))
    except (OSError, ValueError, csv.Error) as error:
        raise SystemExit(f"cannot read {path}: {error}\nhint: name a CSV file in UTF-8") from None
    if missing := [name for name in columns if lines and name not in lines[0]]:
        raise SystemExit(f"{path} has no column {', '.join(missing)}\nhint: its columns are {', '.join(columns)}")
    return lines


def number_in(line: Mapping[str, str], name: str, usual: str = "") -> float:
    """Return the number in a cell, or the usual one if that is empty. Raises `ValueError` for none above 0."""
    text = (line.get(name) or usual).strip()
    if not 0 < (value := float(text) if re.fullmatch(r"[\d.eE+-]+", text) else 0.0) < math.inf:
        raise ValueError(f"{name} is {text!r}, and no number above 0")
    return value


def cell_row(line: Mapping[str, str], target: ModelShape, head: ModelShape) -> Row:
    """Return a measured round as a row."""
    if line["gpu"] not in ACCELERATORS:
        known = ", ".join(sorted(ACCELERATORS))
        raise SystemExit(f"the figures of {line['gpu']} are not known\nhint: choose one of {known}")
    batch, steps, base_ms = int(number_in(line, "batch")), int(number_in(line, "K")), number_in(line, "base_ms")
    tau, mode = number_in(line, "tau", "1"), line.get("mode") or "graph"
    if line.get("weight", "16") == "awq4":
        target = replace(target, weight_bytes=AWQ_BYTES, head_bytes=2.0)
    kv_bytes = number_in(line, "kv", "16") / 8
    version = re.search(r"(\d+)\.(\d+)", line.get("version") or "")
    regime = ""
    if version and (int(version[1]), int(version[2])) < OLDEST:
        regime = "vLLM before 0.11: a draft step takes 1 ms outside of CUDA graphs; measure a round"
    elif kv_bytes < 2 and ACCELERATORS[line["gpu"]].ampere:
        regime = "an fp8 cache with a draft on Ampere: attention outside of CUDA graphs; measure a round"
    elif mode != "graph":
        regime = f"{mode}: launches take their time; measure a step and a round"
    waits = line.get("kind") == "wall_group"
    if waits and not 1 <= tau <= steps + 1:
        raise ValueError(f"tau is {tau:g}, and a round of {steps} drafts emits 1 to {steps + 1} tokens")
    return Row(
        model=line.get("model") or Path(line["target"]).stem,
        bench=line.get("workload") or "",
        batch=batch,
        tp=int(number_in(line, "tp", "1")),
        steps=steps,
        base=1000 * batch / base_ms,
        tau=tau,
        speedup=tau * base_ms / number_in(line, "round_ms"),
        target=replace(target, kv_bytes=kv_bytes),
        head=head,
        gpu=line["gpu"],
        context=round(number_in(line, "context")),
        source=line.get("source") or "yours",
        slowest=slowest(tau, steps, int(number_in(line, "output")), batch) if waits else 1.0,
        regime=regime,
    )


@cache
def slowest(tau: float, steps: int, output: int, batch: int) -> float:
    """Return the expected rounds of the slowest of `batch` sequences of `output` tokens, as a multiple of the mean, if each
    draft is kept with the same probability.
    """
    kept = brentq(lambda share: sum(share**depth for depth in range(steps + 1)) - tau, 0, 1)
    emitted = np.array([0.0, *(kept**depth * (1 - kept) for depth in range(steps)), kept**steps])  # by a round
    so_far, mean, most = np.eye(1, output)[0], 0.0, 0.0  # by tokens of a sequence that is not at its end
    while (left := so_far.sum()) > 1e-9:
        mean, most = mean + left, most + 1 - (1 - left) ** batch
        so_far = np.convolve(so_far, emitted)[:output]
    return float(most / mean)


def files_of(model: str, configs: Path) -> tuple[str, str]:
    """Return the files of a model and its head: those of the longest name that the model's begins with."""
    names = [path.stem for path in configs.glob("*.json") if model.lower().startswith(path.stem)]
    if not names:
        raise SystemExit(
            f"no config for {model} in {configs}\nhint: name its files in a CSV of model,target,head: --models FILE"
        )
    name = max(names, key=len)
    return f"{name}.json", f"head-{name}.json"


def cost(row: Row, preset: str) -> float:
    """Return what a round costs in decode steps, by the product's own functions. As engines do, the head's first step runs
    over all rows of the verification before.
    """
    return float(full_round_costs(step_times(row, preset), row.steps)[-1])


def setting_of(row: Row, preset: str) -> RooflineCosts:
    """Return the costs of a row."""
    return RooflineCosts(source="roofline", accelerator=row.gpu, preset=preset, tp=row.tp)


def step_times(row: Row, preset: str) -> StepTimes:
    """Return the step times of a row's models."""
    place = ([row.batch], [row.context], [], ["head"])
    rows = roofline_rows(row.target, {"head": row.head}, setting_of(row, preset), row.steps, *place)
    return StepTable(rows).times("head", row.steps, row.batch, row.context)


def request_shares(rows: Sequence[Row], costs: Sequence[float]) -> dict[tuple[str, int], float]:
    """Fit f to each benchmark and batch: least squares of the logarithms."""
    found = {}
    for key in dict.fromkeys(row.requests for row in rows):
        mine = [(row, each) for row, each in zip(rows, costs, strict=True) if row.requests == key]

        def squares(share: float, mine: Sequence[tuple[Row, float]] = tuple(mine)) -> float:
            return sum(math.log(predicted(row, each, share) / row.speedup) ** 2 for row, each in mine)

        found[key] = float(minimize_scalar(squares, bounds=(0, MOST_REQUESTS), method="bounded").x)
    return found


def fitted(rows: Sequence[Row], preset: str) -> dict[str, float]:
    """Fit the four overheads to the speedups and base throughputs of rows, with f free, that of experts only if a row has
    them; or to rounds those of a step, a round, and, of several K and batches, of a draft step and the share of the peak.
    """
    if rows[0].source:
        start = dict(FITTED_TO_ROUNDS)
        if len({row.steps for row in rows}) == 1:
            del start["draft_ms"]
        if len({row.batch for row in rows}) == 1:
            del start["compute"]
    else:
        experts = any(row.target.experts for row in rows)
        start = {name: value for name, value in FITTED.items() if name != "expert_layer_us" or experts}

    def residuals(values: Sequence[float]) -> list[float]:
        tried = with_overheads(preset, dict(zip(start, map(float, values), strict=True)))
        costs = [cost(row, tried) for row in rows]
        shares = {} if rows[0].source else request_shares(rows, costs)
        found = []
        for row, each in zip(rows, costs, strict=True):
            share = shares.get(row.requests, 0.0)
            base = (1 - share) * 1000 * row.batch / step_times(row, tried).decode.ms
            found += [math.log(predicted(row, each, share) / row.speedup), math.log(base / row.base)]
        prior = [PRIOR * (value / start[name] - 1) for name, value in zip(start, values, strict=True)]
        return found + prior if rows[0].source else found

    most = [1.0 if name == "compute" else np.inf for name in start]
    least = [0.05 if name == "compute" else 0.0 for name in start]
    values = list(start.values())
    best = least_squares(residuals, values, bounds=(least, most), x_scale=values, diff_step=1e-2)
    return dict(zip(start, map(float, best.x), strict=True))


def with_overheads(preset: str, values: Mapping[str, float]) -> str:
    """Return the preset of an engine with other constants, whose error is not known."""
    values, efficiency = dict(values), preset_of(preset).efficiency
    if "compute" in values:
        efficiency = replace(efficiency, compute=values.pop("compute"))
    PRESETS["fitted"] = replace(preset_of(preset), factor=ELSEWHERE, batch=0, efficiency=efficiency, **values)
    return "fitted"


def fitted_preset(rows: Sequence[Row], preset: str, values: Mapping[str, float], found: Sequence[Judged]) -> dict[str, Any]:
    """Return a fitted preset as its file has it. Its factor is that of the preset it is like, or the rows' own if larger."""
    gpus = dict.fromkeys(row.gpu for row in rows)
    if len(gpus) > 1:
        raise SystemExit(f"rows of {', '.join(gpus)} make no preset\nhint: fit the rows of one GPU")
    engine, error = preset_of(preset), math.sqrt(np.mean([math.log1p(each.error) ** 2 for each in found]))
    constants = {name: round(value, 4) for name, value in values.items() if name != "compute"}
    return {
        "like": preset,
        "about": f"{len(rows)} measured rounds on {rows[0].gpu}",
        "factor": round(max(engine.factor, math.exp(1.645 * error)), 2),
        "accelerator": rows[0].gpu,
        "batch": max(row.batch for row in rows),
        "context": max(engine.context, *(row.context for row in rows)),
        **constants,
        "efficiency": {"compute": round(values["compute"], 4)} if "compute" in values else {},
    }


def predicted(row: Row, cost_: float, share: float) -> float:
    """Return the speedup of throughput that is computed for a row, a share of whose base time is not decoding."""
    return row.tau / ((1 - share) * cost_ + share * row.tau) / row.slowest


def judged(rows: Sequence[Row], preset: str, shares: Mapping[tuple[str, int], float]) -> list[Judged]:
    """Compute the speedup of every row with its benchmark's share; 0 where the benchmark has none."""
    return [
        Judged(
            row,
            predicted(row, cost(row, preset), shares.get(row.requests, 0.0)),
            accuracy(setting_of(row, preset), row.batch, row.context, row.target)[0],
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
    sets: dict[Any, list[Judged]] = {}
    for each in found:
        row = each.row
        sets.setdefault((row.source, row.gpu, row.model, row.context, row.regime, *row.requests), []).append(each)
    for rows in sets.values():
        if len({each.row.steps for each in rows}) > 1 and rows[0].row.tau > 1:  # tokens a round are known
            chosen = max(rows, key=lambda each: each.predicted)
            yield 1 - chosen.row.speedup / max(each.row.speedup for each in rows)


def groups(found: Sequence[Judged]) -> Iterator[tuple[str, list[Judged]]]:
    """Yield the rows of each source, GPU, model, batch and K, where there are several."""
    for words, of in (
        ("{}", lambda row: row.source),
        ("{}", lambda row: row.gpu),
        ("{}", lambda row: row.model),
        ("{} bytes a weight", lambda row: row.target.weight_bytes),
        ("batch {}", lambda row: row.batch),
        ("K {}", lambda row: row.steps),
    ):
        values = dict.fromkeys(of(each.row) for each in found)
        for value in (values if isinstance(next(iter(values)), str) else sorted(values)) if len(values) > 1 else ():
            yield words.format(value), [each for each in found if of(each.row) == value]


def main() -> None:
    """Print the table, or the fitted constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.csv")
    parser.add_argument("--configs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--models", type=Path, metavar="FILE", help="CSV of model,target,head: names of files in FOLDER")
    parser.add_argument("--requests", type=Path, default=CALIBRATION / "specbundle_calibration.csv", metavar="CSV")
    parser.add_argument("--accelerator", default="h200", choices=sorted(ACCELERATORS), help="of throughputs")
    parser.add_argument("--preset", "--engine", help="default: sglang-h200 for throughputs, vllm-0.11 for rounds")
    parser.add_argument("--context", type=int, default=600, help="tokens in the cache, of throughputs (default 600)")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the fitted preset, for costs: {preset: FILE.json}")
    parser.add_argument("--format", default="terminal", choices=("terminal", "json"))
    given = parser.parse_args()
    if given.out and not given.fit:
        raise SystemExit("--out has nothing to write without --fit\nhint: add --fit, or leave --out out")
    try:
        preset_of(given.preset or "none")
    except OptionInvalid as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    rows, left_out = read_rows(given.rows, given.configs, given.models, given.accelerator, given.context)
    if not any(not row.regime for row in rows):
        raise SystemExit(
            f"no row of {given.rows} can be computed: {'; '.join(left_out)}\nhint: chains of known shapes are needed"
        )
    of_rounds = bool(rows[0].source)
    preset = original = given.preset or ("vllm-0.11" if of_rounds else "sglang-h200")
    document: dict[str, Any] = {"engine": preset, "accelerator": "by row" if of_rounds else given.accelerator}
    document |= {"context": "by row" if of_rounds else given.context, "left_out": left_out}
    described = [row for row in rows if not row.regime]
    if given.fit:
        document["fitted"] = fitted(described, preset)
        preset = with_overheads(preset, document["fitted"])
    shares: dict[tuple[str, int], float] = {}
    if not of_rounds:  # their requests, on an H200
        calibration, _ = read_rows(given.requests, CALIBRATION / "configs", None, context=given.context)
        shares = request_shares(calibration, [cost(row, original) for row in calibration])
        unknown = dict.fromkeys(row.requests for row in rows if row.requests not in shares)
        left_out += [f"no request share for {bench}, batch {batch}: taken as 0" for bench, batch in unknown]
        document["request_shares"] = {f"{bench}, batch {batch}": share for (bench, batch), share in shares.items()}
    found = judged(described, preset, shares)
    tables = [("all", found), *groups(found)]
    tables += [
        (f"not in all: {regime}", judged([row for row in rows if row.regime == regime], preset, shares))
        for regime in dict.fromkeys(row.regime for row in rows if row.regime)
    ]
    document["errors"] = [summary(name, each) for name, each in tables]
    if given.out:
        written = fitted_preset(described, original, document["fitted"], found)
        given.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1) if given.format == "json" else text(document))


def text(document: Mapping[str, Any]) -> str:
    """The document as tables of text."""
    lines = [f"left out: {each}" for each in document["left_out"]]
    if fit := document.get("fitted"):
        lines.append("fitted: " + ", ".join(f"{name}={value:.4g}" for name, value in fit.items()))
    heads = ("signed_median", "median", "p90", "worst", "inside_percent", "gamma_regret_mean", "gamma_regret_worst")
    width = max(len(row["rows_of"]) for row in document["errors"])
    lines.append(f"{'errors of speedups in %':{width}}  rows  " + "  ".join(heads))
    for row in document["errors"]:
        cells = ("" if row[name] is None else str(row[name]) for name in heads)
        values = "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, heads, strict=True))
        lines.append(f"{row['rows_of']:{width}}  {row['rows']:4}  {values}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
