#!/usr/bin/env python3
"""Hold what `alphaprof compare` says of a draft under another target against changes that were planted in tiny models.

    python scripts/research/target_change_coverage.py [--documents 2000] [--samples 200] [--size 64] [--out FOLDER]

A random Llama of four layers is the old target, a copy with noise the draft. Each new target is the old one with a planted
change: noise in the weights, an adapter of rank 4, int8 by rounding, and noise so small that nothing should change. Every
target is profiled once on the same prompts, with text sampled at temperature 1: its `documents` are the population, whose
tokens per round and speedup are the truth. From each pair `samples` of `size` documents are drawn without replacement and
judged by the product's own functions. docs/research/coverage.md has the table.

Exit code 1 where an interval at 95% covers the truth in less than 93% or more than 98% of samples (three standard errors are
granted with fewer than 1,000 samples), where no change is kept in less than 95%, or where another verdict is wrong in more.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import LlamaForCausalLM

from alphaprof.commands.compare.target_change import change_over, deciding_bounds
from alphaprof.config.load import load_profile
from alphaprof.costs.rounds import StepTime, StepTimes
from alphaprof.profiling.profile import profile
from alphaprof.report.pairing import TextPair, paired_texts
from alphaprof.run.reader import Run, RunDraft
from tests import tiny
from tests.runs import Silent

GAMMA, CONFIDENCE, MARGIN, TOKENS, ENOUGH = 4, 0.95, 0.03, 32, 1000
RANK = 4
# Verification of n tokens and a draft step of the old target and the new one, in ms: weights of 8 bits are read faster.
TIMES = [StepTimes({n: StepTime(ms + 0.3 * n, 0.0) for n in range(1, GAMMA + 2)}, StepTime(1.0, 0.0)) for ms in (10.0, 7.0)]


def changed(
    model: LlamaForCausalLM, change: Callable[[torch.Tensor, torch.Generator], torch.Tensor], seed: int = 1
) -> LlamaForCausalLM:
    """A copy with another value of every matrix."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() == 2:
                parameter.copy_(change(parameter, generator))
    return twin


def noise(scale: float) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    """Noise of a share of each matrix's own spread."""
    return lambda weight, generator: weight + scale * weight.std() * torch.randn(weight.shape, generator=generator)


def adapter(scale: float) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    """A product of rank 4, whose entries are a share of each matrix's own spread."""

    def add(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        left, right = (torch.randn(size, RANK, generator=generator) for size in weight.shape)
        return weight + scale * weight.std() / math.sqrt(RANK) * left @ right.T

    return add


def int8(weight: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    """Rounding to 8 bits with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127  # a padding row is all zeros
    return (weight / scale).round() * scale


CHANGES = {"no change": noise(2e-5), "noise": noise(0.03), "adapter": adapter(0.05), "int8": int8}


def populations(
    folder: Path, documents: int, names: Collection[str] = tuple(CHANGES)
) -> Iterator[tuple[str, TextPair, float]]:
    """Yield each change with its paired documents, and the share of texts that differ."""
    rng, words = np.random.default_rng(0), ["once", "a", "fox", "saw", "the", "moon", "and", "sang", "to", "it"]
    rows = [{"text": f"{index} {' '.join(rng.choice(words, rng.integers(2, 9)))}"} for index in range(documents)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    old = tiny.llama(initializer_range=0.3)
    models = {
        "old": old,
        "draft": changed(old, noise(0.05), 2),
        **{name: changed(old, CHANGES[name]) for name in names},
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    tree: dict[str, Any] = {
        "target": {"model": "old", "dtype": "float32"},
        "drafts": {"small": {"kind": "model", "model": "draft"}},
        "data": [{"domain": "all", "path": "prompts.jsonl", "prompt": "{text}"}],
        "continuation": {"kind": "sampled", "temperature": 1.0, "max_new_tokens": TOKENS, "seed": 0},
        "gammas": [GAMMA],
        "rules": ["lossless"],
        "costs": {"source": "none"},
        "batch_tokens": 16384,
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    runs = {
        name: profile(
            load_profile(folder / "profile.yaml", [f"target.model={folder / name}"]), folder / f"run {name}", Silent()
        )
        for name in ("old", *names)
    }
    for name in names:
        sides = [RunDraft(runs[side], "small") for side in ("old", name)]
        (text,), *_ = paired_texts(*sides, ["lossless"])
        ids = [texts(side.run) for side in sides]
        yield name, text, float(np.mean([one != two for one, two in zip(*ids, strict=True)]))


def texts(run: Run) -> list[list[int]]:
    """The tokens of every document."""
    return [ids for shard in run.shards for ids in run.continuations(shard.index)["continuation_ids"].to_pylist()]


@dataclass(frozen=True)
class Row:
    """What samples of one planted change say. Shares are of the samples."""

    name: str
    differ: float  # share of texts that differ
    change: float  # of tokens per round, the truth
    speedup: float  # change of the speedup, the truth
    covered: float  # by the interval of the change of tokens per round
    speedup_covered: float
    keep: float
    retrain: float


def measured(name: str, text: TextPair, differ: float, samples: int, size: int, seed: int = 0) -> Row:
    """Judge `samples` of `size` documents of a population."""
    rng, counted = np.random.default_rng(seed), len(text.first.cluster)
    truth = change_over(name, [text], None, GAMMA, TIMES, CONFIDENCE)
    hits = []
    for _ in range(samples):
        chosen = np.sort(rng.choice(counted, size, replace=False))
        part = TextPair(text.domain, text.rule, text.first.rows(chosen), text.second.rows(chosen))
        found = change_over(name, [part], None, GAMMA, TIMES, CONFIDENCE)
        low, high = deciding_bounds([part], None, GAMMA, CONFIDENCE)
        pairs = ((found.change, truth.change), (found.speedup_change, truth.speedup_change))
        hits.append(
            [*(each is not None and each.low <= of.value <= each.high for each, of in pairs), low >= -MARGIN, high < -MARGIN]
        )
    return Row(name, differ, truth.change.value, truth.speedup_change.value, *np.mean(hits, axis=0).tolist())


def faults(row: Row, samples: int) -> Iterator[str]:
    """Yield the promises that a row breaks."""

    def granted(share: float) -> float:
        return 3 * math.sqrt(share * (1 - share) / samples) if samples < ENOUGH else 0.0

    floor = row.name == "no change"  # intervals have a floor where documents hardly differ, and cover more
    for covered, what in ((row.covered, "tokens per round"), (row.speedup_covered, "speedup")):
        if covered < 0.93 - granted(0.93) or (covered > 0.98 + granted(0.98) and not floor):
            yield f"{row.name}: the interval of {what} covers {covered:.1%}"
    if floor and row.keep < 0.95:
        yield f"{row.name}: kept in {row.keep:.1%}"
    if row.change < -MARGIN and row.keep > 0.05 + granted(0.05):
        yield f"{row.name}: wrongly kept in {row.keep:.1%}"
    if row.change >= -MARGIN and row.retrain > 0.05 + granted(0.05):
        yield f"{row.name}: wrongly retrained in {row.retrain:.1%}"


def main() -> int:
    """Print the table; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("--documents", 2000), ("--samples", 200), ("--size", 64)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder, broken = given.out or Path(tempfile.mkdtemp()), []
    folder.mkdir(exist_ok=True)
    print("change      texts differ  tokens/round  covered  speedup  covered   KEEP  RETRAIN")
    for name, text, differ in populations(folder, given.documents):
        row = measured(name, text, differ, given.samples, given.size)
        values = f"{row.differ:12.1%} {row.change:+13.2%} {row.covered:8.1%} {row.speedup:+8.1%} {row.speedup_covered:8.1%}"
        print(f"{row.name:<11} {values} {row.keep:6.1%} {row.retrain:8.1%}", flush=True)
        broken += faults(row, given.samples)
    print("\n".join(broken) or "every promise is kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
