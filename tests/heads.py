"""Records of heads that nobody trained: how they do is drawn, with the truth known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from alphaprof.log.place import LocalPlace
from alphaprof.log.split import STOP, TEST
from alphaprof.log.store import Run
from alphaprof.log.training import (
    TESTS,
    TRAINING,
    DraftVocabulary,
    HeadTests,
    PartUnits,
    TestedText,
    TrainingBytes,
    TrainingProgress,
    TrainingRecord,
    TrainingRun,
    TrainingSeconds,
    TrainingSize,
    TrainingTarget,
    fraction_of,
    tests_content,
    texts_digest,
)
from tests.synthetic import Domain, Recipe, write_run

TARGET = "f" * 64


def digests(kind: str, number: int) -> tuple[str, ...]:
    """Digests of so many units of a part."""
    return tuple(hashlib.sha256(f"{kind} {index}".encode()).hexdigest()[:16] for index in range(number))


def write_training(folder: Path, record: TrainingRecord) -> None:
    """Writes training.json into the folder of a head."""
    LocalPlace(folder).put(TRAINING, record.to_json().encode())


def write_tests(path: Path, tests: HeadTests) -> None:
    """Writes a file of tests."""
    LocalPlace(path.parent).put(path.name, tests_content(tests).to_pybytes())


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
        uncertainty=None,
        progress=(TrainingProgress(40, 51.0, (1.7, 2.3, 2.8), (0.34, 0.25, 0.2), 11_040),),
        best_step=40,
        steps=40,
        seconds=TrainingSeconds(5.0 * fraction_of(fraction), 51.0, 3.0, 59.0),
        bytes=TrainingBytes(20_000_000, 900_000_000),
        parameters=1_840_000,
        device="cpu",
        test=TestedText(2 * tests, 2 * tests * 120),
    )


def head_tests(
    miss: float,
    *,
    seed: int = 0,
    units: int = 40,
    tokens: int = 120,
    depths: int = 5,
    domains: Sequence[str] = ("text",),
    target: str = TARGET,
    texts: str = "a" * 16,
) -> HeadTests:
    """Tests of a head that misses a share of positions, in runs of right ones that are independent of each other. Units have
    a difficulty of their own, which is the same for every head.
    """
    generator, easy = np.random.default_rng(seed), np.random.default_rng(99).normal(0, 0.3, 2 * units)
    columns: dict[str, list[object]] = {name: [] for name in ("agree", "starts", "rounds", "accepted")}
    for unit in range(2 * units):
        alpha = 1 / (1 + np.exp(-(np.log((1 - miss) / miss) + easy[unit])))
        right = generator.random((tokens, depths)) < alpha
        agree = right.sum(0).astype(float)
        starts = np.full(depths, float(tokens))
        rounds, accepted = [], np.zeros(depths)
        for gamma in range(1, depths + 1):
            at = count = 0
            while at < tokens:
                run = int(np.argmin(np.append(right[at, :gamma], False)))
                if gamma == depths:
                    accepted[:run] += 1
                at += min(run + 1, tokens - at)
                count += 1
            rounds.append(float(count))
        for name, value in (("agree", agree), ("starts", starts), ("rounds", rounds), ("accepted", accepted)):
            columns[name].append(value)
    names = [domains[unit % len(domains)] for unit in range(units)] * 2
    return HeadTests(
        target=target,
        texts=texts,
        head="",
        unit=np.array([*digests("test", units), *digests("stop", units)], dtype=object),
        part=np.array([TEST] * units + [STOP] * units, dtype=object),
        domain=np.array(names, dtype=object),
        text=np.array(["greedy"] * (2 * units), dtype=object),
        rule=np.array(["strict"] * (2 * units), dtype=object),
        tokens=np.full(2 * units, tokens),
        outside=np.full(2 * units, tokens // 20),
        **{name: np.array(values) for name, values in columns.items()},
    )


SIZES = {"1/8": 3, "1/4": 3, "1/2": 3, "1": 1}  # heads of each fraction


def law(e: float, a: float, b: float) -> Callable[[float], float]:
    """The miss rate by the fraction of the training units."""
    return lambda fraction: e + a * fraction**-b


def curve_run(folder: Path, **more: Any) -> Run:
    """A run with a draft head, whose steps were timed."""
    domains = {"chat": Domain(documents=6, alpha=0.5), "code": Domain(documents=6)}
    return write_run(folder, Recipe(domains=domains, drafts={}, heads={"old": {}}, **more))


def write_curve(
    folder: Path,
    run: Run,
    truth: Callable[[float], float],
    *,
    sizes: Mapping[str, int] = SIZES,
    spread: float = 0.004,
    beside: Mapping[str, float] | None = None,
    units: int = 80,
    tests: int = 40,
    domains: Sequence[str] = ("chat", "code"),
) -> Path:
    """A folder as `train --curve` writes it, of heads that miss as a truth says. Returns the folder."""
    generator = np.random.default_rng(3)
    known = {"target": run.manifest.target.fingerprint, "texts": texts_digest(run.manifest)}
    heads = []
    for fraction, orders in sizes.items():
        for order in range(orders):
            name = f"{fraction.replace('/', '-')}-{order}" if orders > 1 else fraction.replace("/", "-") + "-0"
            miss = truth(fraction_of(fraction)) + generator.normal(0, spread)
            write_head(
                folder / "heads" / name, training_record(fraction, order, units=units, tests=tests, **known), miss, domains
            )
            heads.append({"head": f"./heads/{name}"})
    for name, miss in (beside or {}).items():
        write_head(folder / "heads" / name, training_record(units=units, tests=tests, **known), miss, domains)
    others = {name: {"head": f"./heads/{name}"} for name in beside or {}}
    content = {"run": str(run.path), "heads": heads, "beside": others}
    (folder / "curve.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder


def write_head(folder: Path, record: TrainingRecord, miss: float, domains: Sequence[str] = ("chat", "code")) -> None:
    """A head without weights, with its records."""
    folder.mkdir(parents=True)
    known = {"target": record.target.fingerprint, "texts": record.run.digest}
    seed = int(hashlib.sha256(folder.name.encode()).hexdigest()[:8], 16)
    write_training(folder, record)
    write_tests(folder / TESTS, head_tests(miss, seed=seed, units=len(record.units.test), domains=domains, **known))
