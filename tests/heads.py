"""Records of heads that nobody trained: how they do is drawn, with the truth known."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml

from alphaprof.log.manifest import Shard
from alphaprof.log.schema import DOCUMENT_COLUMNS, arrow_schema, depth_names, totals_columns
from alphaprof.log.storage import LocalStorage
from alphaprof.log.training import (
    TRAINING,
    DraftVocabulary,
    PartUnits,
    TrainingProgress,
    TrainingRecord,
    TrainingRun,
    TrainingSeconds,
    TrainingSize,
    TrainingTarget,
    fraction_of,
)
from alphaprof.log.writer import RunWriter
from tests.synthetic import Domain, Recipe, latency, manifest

TARGET = "f" * 64


def digests(kind: str, number: int) -> tuple[str, ...]:
    """Digests of so many units of a part."""
    return tuple(hashlib.sha256(f"{kind} {index}".encode()).hexdigest()[:16] for index in range(number))


def write_training(folder: Path, record: TrainingRecord) -> None:
    """Writes training.json into the folder of a head."""
    LocalStorage(folder).put(TRAINING, record.to_json().encode())


def training_record(
    fraction: str = "1",
    order: int = 0,
    *,
    units: int = 80,
    target: str = TARGET,
    texts: str = "a" * 16,
    floor: float | None = 0.05,
    tests: int = 40,
) -> TrainingRecord:
    """The record of a head that was trained on a fraction of some units, nested in each order."""
    ordered = np.array(digests("train", units))[np.random.default_rng(order).permutation(units)]
    train = tuple(ordered[: round(units * fraction_of(fraction))].tolist())
    return TrainingRecord(
        alphaprof="0.1.0",
        status="complete",
        run=TrainingRun("runs/a", texts),
        target=TrainingTarget("target", target, 64, 6, 1000),
        settings={"ttt": 3, "steps": 40},
        identity="b" * 64,
        size=TrainingSize(fraction, order, len(train), len(train), 120 * len(train), 40 * len(train)),
        units=PartUnits(train, digests("stop", tests), digests("test", tests)),
        vocabulary=DraftVocabulary(500, "c" * 64, 0.95),
        floor=floor,
        progress=(TrainingProgress(40, 51.0, (1.7, 2.3, 2.8), (0.34, 0.25, 0.2), 11_040),),
        best_step=40,
        steps=40,
        seconds=TrainingSeconds(5.0 * fraction_of(fraction), 51.0, 3.0, 59.0),
        parameters=1_840_000,
        device="cpu",
    )


def drawn_totals(miss: float, name: str, units: int, tokens: int, seed: int) -> dict[str, Any]:
    """Totals of a head that misses a share of positions, of documents of `tokens` tokens that rounds emit. Units have a
    difficulty of their own, which is the same for every head; rounds are walked one by one.
    """
    generator = np.random.default_rng(int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:8], 16))
    easy = np.random.default_rng(99).normal(0, 0.3, units)
    columns: dict[str, list[float]] = {}
    for unit in range(units):
        alpha = 1 / (1 + np.exp(-(np.log((1 - miss) / miss) + easy[unit])))
        leads = np.cumprod(generator.random((tokens + 1, max(GAMMAS))) < alpha, axis=1)
        row: dict[str, float] = {"accepted": float(leads[:, 0].sum())}
        for gamma in GAMMAS:
            right, accepted, at = leads[:, :gamma].sum(1).tolist(), list[int](), 0
            while at < tokens:
                accepted.append(min(right[at], tokens - at))
                at += right[at] + 1
            count = len(accepted)
            row |= {f"rounds_{gamma}": count, f"drafted_{gamma}": float(count * gamma), f"control_{gamma}": 0.0}
            row |= dict.fromkeys(depth_names("drafted", gamma), float(count))
            for depth, column in enumerate(depth_names("accepted", gamma)):
                row[column] = float(sum(each > depth for each in accepted))
        for column, value in row.items():
            columns.setdefault(column, []).append(value)
    return columns


SIZES = {"1/8": 3, "1/4": 3, "1/2": 3, "1": 1}  # heads of each fraction


def law(e: float, a: float, b: float) -> Callable[[float], float]:
    """The miss rate by the fraction of the training units."""
    return lambda fraction: e + a * fraction**-b


GAMMAS = (1, 2, 3, 4)


def run_of_heads(
    folder: Path,
    misses: Mapping[str, float],
    *,
    tests: int = 40,
    tokens: int = 120,
    seed: int = 4,
    domains: Sequence[str] = ("chat", "code"),
    **more: Any,
) -> RunWriter:
    """A run that tested heads, by the names of its drafts: as many documents of the stop part as of the test part, each a
    unit of its own; totals and documents alone, as a copy without its log has them.
    """
    heads = {name: dict[str, Any]() for name in misses}
    recipe = Recipe(domains={name: Domain() for name in domains}, drafts={}, heads=heads, gammas=GAMMAS, **more)
    units, size = [*digests("test", tests), *digests("stop", tests)], 2 * tests
    documents = {
        "document": range(size),
        "domain": [domains[number % tests % len(domains)] for number in range(size)],
        "source": [0] * size,
        "source_row": range(size),
        "prompt_hash": [unit * 4 for unit in units],
        "prompt_tokens": [40] * size,
        "continuation_tokens": [tokens + 1] * size,
        "finish": ["length"] * size,
        "continuation": ["greedy"] * size,
        "on_policy": [True] * size,
        "max_new_tokens": [tokens + 1] * size,
    }
    rows = pd.DataFrame(documents).to_dict("records")
    shards = (Shard(0, size, size * (tokens + 1), "d" * 64),)
    run = RunWriter(folder, dataclasses.replace(manifest(recipe), status="complete", shards=shards, staged=(size,)))
    run.storage.make()
    with run.beginning():
        run.write_latency(latency(recipe))
        schema = arrow_schema(totals_columns(GAMMAS))
        for name, miss in misses.items():
            frame = pd.DataFrame(drawn_totals(miss, name, size, tokens, seed))
            zeros = dict.fromkeys(("impossible", "mismatches", "clear_mismatches", "near_ties"), 0)
            fixed = {"rule": "strict", "tokens": float(tokens), "positions": tokens + 1, "proposals": tokens + 1}
            frame = frame.assign(document=range(size), emitted=frame["accepted"], **fixed, **zeros)
            frame = frame.reindex(columns=schema.names)
            run.write_totals([pa.Table.from_pandas(frame, schema, preserve_index=False)], (0, 0), name)
        run.write_documents(pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS)), (0, 0))
        assert run.begin()
    return RunWriter.open(folder)


def write_curve(
    folder: Path,
    truth: Callable[[float], float],
    *,
    sizes: Mapping[str, int] = SIZES,
    spread: float = 0.004,
    beside: Mapping[str, float] | None = None,
    units: int = 80,
    tests: int = 40,
    **more: Any,
) -> Path:
    """A folder as `train --curve` writes it, of heads that miss as a truth says. Returns the folder."""
    generator = np.random.default_rng(3)
    misses, records = dict[str, float](), dict[str, TrainingRecord]()
    for fraction, orders in sizes.items():
        for order in range(orders):
            name = f"{fraction.replace('/', '-')}-{order}"
            misses[f"head-{name}"] = truth(fraction_of(fraction)) + generator.normal(0, spread)
            records[name] = training_record(fraction, order, units=units, tests=tests)
    run = run_of_heads(folder / "tested", misses | dict(beside or {}), tests=tests, **more)
    for name, record in records.items():
        target = dataclasses.replace(record.target, fingerprint=run.manifest.target.fingerprint)
        (folder / "heads" / name).mkdir(parents=True)
        write_training(folder / "heads" / name, dataclasses.replace(record, target=target))
    heads = [{"draft": f"head-{name}", "head": f"./heads/{name}"} for name in records]
    content = {"run": "./tested", "heads": heads, "beside": {name: {"draft": name} for name in beside or {}}}
    (folder / "curve.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder
