"""Time the steps that rounds are made of on this machine, with a KV cache, over batch sizes and contexts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from alphaprof.log.schema import LATENCY_COLUMNS, arrow_schema
from alphaprof.options import MeasuredCosts
from alphaprof.profiling.batching import is_out_of_memory
from alphaprof.profiling.corpus import Ids
from alphaprof.profiling.drafts import Draft
from alphaprof.profiling.lookup import PromptLookup
from alphaprof.profiling.models import Model
from alphaprof.profiling.steppers import NotTimed, Stepper, common_mode, fitted, prefill, stepper

WARM_UP = 3
SHORT_PROMPT = 16  # tokens of the shortest prompt whose prefill is timed
PREFILL_EVERY, LEAST_PREFILLS = 4, 3  # repeats of a step for one prefill: it takes as long as many steps, and matters less


@dataclass(frozen=True)
class Job:
    """A kind of step to time, and what runs it once, in seconds."""

    model: str
    step: str
    tokens: int
    batch: int
    context: int
    mode: str
    run: Callable[[], float]


@dataclass(frozen=True)
class Timed:
    """The latency table, and what could not be timed, in words."""

    table: pa.Table
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Subjects:
    """What is timed: models, the real token ids that fill caches, and the longest round."""

    target: Model
    drafts: Sequence[Draft]
    text: Ids
    gamma: int


@torch.inference_mode()
def measure(subjects: Subjects, costs: MeasuredCosts, tick: Callable[[], None]) -> Timed:
    """Time target steps over 1..gamma+1 tokens, steps of every draft model over one and two tokens, searches and bookkeeping
    for every batch size and context, and prefills.

    The steps of one batch size and context take turns, so that a disturbance of the machine falls on all of them alike;
    their caches are freed before the next. The text is repeated or cut to each context (and to what a model's own context
    allows); `tick` is called after every repeat. What does not fit into memory beyond batch 1 is left out. Raises
    `NotTimed` for a model without a cache that can be cut back.
    """
    mode = common_mode([subjects.target, *_models(subjects)], subjects.text, costs.mode)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    left_out = []
    for batch, context in itertools.product(costs.concurrency, costs.context):
        try:
            found = _timed(_cell(subjects, batch, context, mode), costs.repeats, tick)
        except RuntimeError as error:
            if batch == 1 or not is_out_of_memory(error):
                raise
            left_out.append(f"{batch} sequences of {context} tokens do not fit into memory")
            continue
        # A model whose own context is short is timed at the same place for several contexts: the last one counts.
        rows |= {tuple(row[name] for name in ("model", "step", "tokens", "batch", "context")): row for row in found}
    if not rows:
        raise NotTimed("; ".join(left_out))
    prefills = _timed(list(_prefills(subjects, costs.context)), max(LEAST_PREFILLS, costs.repeats // PREFILL_EVERY), tick)
    table = pa.Table.from_pylist([*rows.values(), *prefills], schema=arrow_schema(LATENCY_COLUMNS))
    return Timed(table, tuple(left_out))


@torch.inference_mode()
def rehearsed(subjects: Subjects, costs: MeasuredCosts) -> float:
    """About how many seconds `measure` will take, if all cells are like its first: every step of that runs once.

    Raises `NotTimed`, likewise.
    """
    mode = common_mode([subjects.target, *_models(subjects)], subjects.text, costs.mode)
    steps = sum(job.run() for job in _cell(subjects, costs.concurrency[0], costs.context[0], mode))
    reading = sum(job.run() for job in _prefills(subjects, costs.context[:1])) * len(costs.context)
    cells = len(costs.concurrency) * len(costs.context)
    prefills = WARM_UP + max(LEAST_PREFILLS, costs.repeats // PREFILL_EVERY)
    return cells * (WARM_UP + costs.repeats) * steps + prefills * reading


def timed_repeats(costs: MeasuredCosts) -> int:
    """How often `measure` calls `tick`, if everything fits into memory."""
    cells = len(costs.concurrency) * len(costs.context)
    return cells * (WARM_UP + costs.repeats) + WARM_UP + max(LEAST_PREFILLS, costs.repeats // PREFILL_EVERY)


def _timed(jobs: Sequence[Job], repeats: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Rows of jobs that take turns."""
    times: list[list[float]] = [[] for _ in jobs]
    for repeat in range(-WARM_UP, repeats):
        for job, found in zip(jobs, times, strict=True):
            ms = 1e3 * job.run()
            found += [ms] if repeat >= 0 else []
        tick()
    return [_row(job, np.array(ms)) for job, ms in zip(jobs, times, strict=True)]


def _models(subjects: Subjects) -> list[Model]:
    return [draft for draft in subjects.drafts if not isinstance(draft, PromptLookup)]


def _cell(subjects: Subjects, batch: int, context: int, mode: str) -> list[Job]:
    """The steps at one batch size and context."""
    target, longest = subjects.target, subjects.gamma + 1
    found = stepper(target, fitted(subjects.text, target, context, longest), batch, longest, mode)
    jobs = [_job("target", "decode" if tokens == 1 else "verify", tokens, found) for tokens in range(1, longest + 1)]
    jobs.append(_settling("target", found))
    for draft in subjects.drafts:
        if isinstance(draft, PromptLookup):
            history = np.resize(subjects.text, found.context).tolist()
            jobs.append(Job(draft.name, "lookup", 1, batch, found.context, "eager", partial(_search, draft, history, batch)))
        else:
            drafting = stepper(draft, fitted(subjects.text, draft, context, longest), batch, 2, mode)
            jobs += [_job(draft.name, "draft", tokens, drafting) for tokens in (1, 2)]
            jobs.append(_settling(draft.name, drafting))
    return jobs


def _job(model: str, step: str, tokens: int, found: Stepper) -> Job:
    return Job(model, step, tokens, found.batch, found.context, found.mode, partial(found.step, tokens))


def _settling(model: str, found: Stepper) -> Job:
    """What it took to cut the cache back after the model's last step: that of the job before."""
    return Job(model, "bookkeeping", 1, found.batch, found.context, found.mode, lambda: found.settling_s)


def _search(draft: PromptLookup, history: list[int], batch: int) -> float:
    return sum(draft.search(history) for _ in range(batch))


def _prefills(subjects: Subjects, contexts: Sequence[int]) -> Iterator[Job]:
    """Prompts of some lengths, alone: a server reads them as they come."""
    for model in (subjects.target, *_models(subjects)):
        for length in sorted({min(SHORT_PROMPT, *contexts), *contexts}):
            text = fitted(subjects.text, model, length, 1)
            name = "target" if model is subjects.target else model.name
            yield Job(name, "prefill", len(text), 1, 0, "eager", partial(prefill, model, text))


def _row(job: Job, ms: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    p10, p25, median, p75, p90 = np.percentile(ms, [10, 25, 50, 75, 90])
    # For normal errors the median's standard error is 1.2533 sigma / sqrt(n), and sigma is the quartile range / 1.349;
    # quartiles keep the few repeats that another process disturbed from counting as error of the median.
    error = 1.2533 * (p75 - p25) / 1.349 / math.sqrt(len(ms)) / median if median > 0 else 0.0
    return {
        "model": job.model,
        "step": job.step,
        "tokens": job.tokens,
        "batch": job.batch,
        "context": job.context,
        "median_ms": median,
        "p10_ms": p10,
        "p90_ms": p90,
        "relative_error": error,
        "repeats": len(ms),
        "mode": job.mode,
    }
