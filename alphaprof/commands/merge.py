"""`alphaprof merge`: parts that jobs of an array have profiled become the run that one process would have made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from alphaprof.errors import RunMismatch
from alphaprof.run.journal import STEPS, Journal
from alphaprof.run.manifest import ENGINES, LATENCY, Manifest, differences, differing
from alphaprof.run.reader import TIMED_AGAIN, Run
from alphaprof.run.writer import FREE, RunWriter
from alphaprof.totals.files import write_totals

ONE_BY_ONE = "give every part of one profile once: the runs of --part 0/N to N-1/N"
AGAIN = "profile this part again like the others"


def merge(runs: Sequence[str], out: Path | str) -> Run:
    """Write the parts of a run into the new directory `out`, in the order of a single run, with its totals. Raises
    `RunMismatch` for parts that are missing, given twice or not complete, and for those of another profile or other models,
    or that were computed otherwise.
    """
    parts = _in_order([Run.open(each) for each in runs])
    first, count = parts[0], len(parts)
    with RunWriter.opened(out, hint="choose another --out") as run:
        records = [Journal.of(part.storage) for part in parts]
        staged = sum(part.manifest.staged for part in parts)
        for step in STEPS:
            for block in range(staged):
                part = block % count
                run.copy(step, block, records[part][step][block // count], parts[part])
            if step == "prompts":
                warnings = tuple({str(each): each for part in parts for each in part.manifest.warnings}.values())
                run.begin(dataclasses.replace(first.manifest, status="running", part="0/1", shards=(), warnings=warnings))
        for name in {LATENCY, ENGINES} & first.manifest.files.keys():
            run.write(name, first.content(name, TIMED_AGAIN))
        run.finish(write_totals)
    return run


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """Return the parts by their numbers, each of which is there once and fits the first. Raises `RunMismatch`."""
    found, counts = dict[int, Run](), set[int]()
    for run in runs:
        run.require_complete()
        index, count = map(int, run.manifest.part.split("/"))
        if index in found:
            raise RunMismatch(f"{found[index].path} and {run.path} are both part {run.manifest.part}", ONE_BY_ONE)
        found[index] = run
        counts.add(count)
        if len(counts) > 1:
            raise RunMismatch(
                f"{run.path} is part {run.manifest.part}, and {runs[0].path} {runs[0].manifest.part}", ONE_BY_ONE
            )
    count = counts.pop()
    if missing := [f"{index}/{count}" for index in range(count) if index not in found]:
        raise RunMismatch(f"{len(missing)} of {count} parts are missing: {', '.join(missing[:8])}", ONE_BY_ONE)
    parts = [found[index] for index in range(count)]
    staged = sum(run.manifest.staged for run in parts)
    for index, run in enumerate(parts):
        odd = _differs(parts[0].manifest, run.manifest)
        blocks = len(range(index, staged, count))
        if run.manifest.staged != blocks:
            odd.append(f"{run.manifest.staged} shards, not {blocks}: another limit or other data")
        if odd:
            raise RunMismatch(f"{run.path} does not fit {parts[0].path}: {'; '.join(odd)}", AGAIN)
    return parts


def _differs(one: Manifest, other: Manifest) -> list[str]:
    """Return in what a part was made otherwise than the first, in words."""
    config = [key for key in one.config if key not in FREE and one.config[key] != other.config.get(key)]
    odd = [f"another profile ({', '.join(config)})"] if config else []
    if "batch_tokens" in config:  # by auto, of GPUs of other sizes
        odd = [f"batch_tokens {other.config.get('batch_tokens')}, not {one.config['batch_tokens']}: give it in the profile"]
    for name, facts in one.models.items():
        theirs = other.models.get(name)
        if theirs is None or (fields := differing(facts, theirs)):
            odd.append(f"another {name} ({'no such draft' if theirs is None else ', '.join(fields)})")
    odd += ["another tokenizer"] if one.tokenizer != other.tokenizer else []
    odd += ["rows left out of the data differ"] if (one.skipped, one.truncated) != (other.skipped, other.truncated) else []
    return odd if one.profile.execution.mixed_devices else odd + differences(one.environment, other.environment)
