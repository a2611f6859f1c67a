"""Time the steps that rounds are made of on this machine, with a KV cache, over batch sizes and contexts."""

from __future__ import annotations

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
from alphaprof.profiling.steppers import Stepper, fitted, prefill, stepper

WARM_UP = 3
SHORT_PROMPT = 16  # tokens of the shortest prompt whose prefill is timed
PREFILL_EVERY = 4  # repeats between two prefills: they take as long as many steps, and matter less


@dataclass(frozen=True)
class Job:
    """A kind of step to time, what runs it once, in seconds, and how often it is run: in every `every`-th repeat."""

    model: str
    step: str
    tokens: int
    batch: int
    context: int
    mode: str
    run: Callable[[], float]
    every: int = 1


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
    """Time target steps over 1..gamma+1 tokens, steps of every draft model over one and two tokens, searches, prefills and
    bookkeeping, for every batch size and context.

    Repeats are interleaved over all steps, so that a disturbance of the machine falls on all of them alike. The text is
    repeated or cut to each context (and to what a model's own context allows); `tick` is called after every repeat of all
    steps. What does not fit into memory beyond batch 1 is left out. Raises `NotTimed` for a model without a cache that can
    be cut back.
    """
    jobs, left_out = _jobs(subjects, costs)
    times: list[list[float]] = [[] for _ in jobs]
    for repeat in range(-WARM_UP, costs.repeats):
        for job, found in zip(jobs, times, strict=True):
            if repeat < 0 and job.every > 1 and repeat > -WARM_UP:
                continue
            if repeat < 0:
                job.run()
            elif repeat % job.every == 0:
                found.append(1e3 * job.run())
        tick()
    rows = [_row(job, np.array(ms)) for job, ms in zip(jobs, times, strict=True)]
    return Timed(pa.Table.from_pylist(rows, schema=arrow_schema(LATENCY_COLUMNS)), tuple(left_out))


def timed_repeats(costs: MeasuredCosts) -> int:
    """How often `measure` calls `tick`."""
    return WARM_UP + costs.repeats


def _jobs(subjects: Subjects, costs: MeasuredCosts) -> tuple[list[Job], list[str]]:
    """Everything that is timed, and what is not for want of memory."""
    jobs: list[Job] = []
    left_out = []
    for batch in costs.concurrency:
        for context in costs.context:
            try:
                jobs += _cell(subjects, batch, context, costs.mode)
            except RuntimeError as error:
                if batch == 1 or not is_out_of_memory(error):
                    raise
                left_out.append(f"{batch} sequences of {context} tokens do not fit into memory")
    jobs += _prefills(subjects, costs.context)
    # A model whose own context is short is timed at the same place for several contexts: once is enough.
    return list({(job.model, job.step, job.tokens, job.batch, job.context): job for job in jobs}.values()), left_out


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
    for model in (subjects.target, *(draft for draft in subjects.drafts if not isinstance(draft, PromptLookup))):
        for length in sorted({min(SHORT_PROMPT, *contexts), *contexts}):
            text = fitted(subjects.text, model, length, 1)
            name = "target" if model is subjects.target else model.name
            yield Job(name, "prefill", len(text), 1, 0, "eager", partial(prefill, model, text), PREFILL_EVERY)


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
