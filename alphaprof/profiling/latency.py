"""Time decode, verification and draft steps on this machine, at batch 1 with a KV cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from alphaprof.config import CostOptions
from alphaprof.log.schema import LATENCY_COLUMNS, arrow_schema
from alphaprof.options import GAMMA_LIMIT
from alphaprof.profiling.batching import is_out_of_memory
from alphaprof.profiling.corpus import Ids
from alphaprof.profiling.drafts import Draft
from alphaprof.profiling.lookup import PromptLookup
from alphaprof.profiling.models import Model

WARM_UP = 3
LONGEST_STEP = GAMMA_LIMIT + 1


class NotTimed(Exception):
    """Steps of a model cannot be timed; the message says why."""


class Stepper:
    """One model with a filled KV cache; `step` feeds some tokens and takes them out of the cache again."""

    def __init__(self, model: Model, text: Ids) -> None:
        from transformers import DynamicCache

        self.model = model
        ids = np.minimum(text.astype(np.int64), model.vocabulary - 1)
        prefix = torch.from_numpy(ids)[None].to(model.device)
        self.context = len(text)
        self.next = torch.from_numpy(np.resize(ids, LONGEST_STEP))[None].to(model.device)
        self.cache: Any = DynamicCache(config=model.network.config)
        model.network(input_ids=prefix, past_key_values=self.cache, use_cache=True)
        # Layers with a sliding window forget what falls out of it, unless they are told that it will be needed again.
        self.cache.activate_past_recording()

    def step(self, tokens: int) -> float:
        """Seconds that the model takes for `tokens` new tokens, the choice of the next token included."""
        ids = self.next[:, :tokens]
        _synchronise(self.model.device)
        start = time.perf_counter()
        output = self.model.network(input_ids=ids, past_key_values=self.cache, use_cache=True)
        output.logits[0].argmax(-1).tolist()  # reading the choice waits for the device
        seconds = time.perf_counter() - start
        self.cache.crop(-tokens)
        return seconds


@dataclass(frozen=True)
class Job:
    """A kind of step to time: the model or draft it belongs to, its name and size, and what runs it once, in seconds."""

    model: str
    step: str
    tokens: int
    context: int
    run: Callable[[], float]


@torch.inference_mode()
def measure(
    target: Model, drafts: Sequence[Draft], text: Ids, gammas: Sequence[int], costs: CostOptions, tick: Callable[[], None]
) -> pa.Table:
    """The latency table: target at n = 1..gamma_max+1 tokens, one step of every draft model, one search of every lookup.

    Repeats are interleaved over all steps, so that a disturbance of the machine falls on all of them alike. `text` are
    real token ids that fill the cache, repeated or cut to `costs.context` (and to what a model's context allows); `tick`
    is called after every repeat of all steps. Raises `NotTimed` for a model without a cache that can be cut back.
    """
    jobs = _jobs(target, drafts, text, max(gammas), costs.context)
    times: list[list[float]] = [[] for _ in jobs]
    for repeat in range(-WARM_UP, costs.repeats):
        for index, job in enumerate(jobs):
            seconds = job.run()
            if repeat >= 0:
                times[index].append(1e3 * seconds)
        tick()
    rows = [_row(job, np.array(ms)) for job, ms in zip(jobs, times, strict=True)]
    return pa.Table.from_pylist(rows, schema=arrow_schema(LATENCY_COLUMNS))


def _jobs(target: Model, drafts: Sequence[Draft], text: Ids, gamma: int, context: int) -> list[Job]:
    """Everything that is timed."""
    stepper = _stepper(target, _fitted(text, target, context, gamma + 1))
    steps = [(tokens, "decode" if tokens == 1 else "verify") for tokens in range(1, gamma + 2)]
    jobs = [Job("target", step, tokens, stepper.context, partial(stepper.step, tokens)) for tokens, step in steps]
    for draft in drafts:
        if isinstance(draft, PromptLookup):
            history = np.resize(text, stepper.context).tolist()
            jobs.append(Job(draft.name, "lookup", 1, stepper.context, partial(draft.search, history)))
        else:
            stepping = _stepper(draft, _fitted(text, draft, context, gamma + 1))
            jobs.append(Job(draft.name, "draft", 1, stepping.context, partial(stepping.step, 1)))
    return jobs


def _stepper(model: Model, text: Ids) -> Stepper:
    """A stepper that has shown that it can take its step back."""
    try:
        stepper = Stepper(model, text)
        stepper.step(1)
        if stepper.cache.get_seq_length() == stepper.context:
            return stepper
        reason = "its cache does not shrink"
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise NotTimed(f"{model.name} ({type(model.network).__name__}) cannot take steps back: {reason[:200]}")


def timed_repeats(costs: CostOptions) -> int:
    """How often `measure` calls `tick`."""
    return WARM_UP + costs.repeats


def _fitted(text: Ids, model: Model, context: int, longest_step: int) -> Ids:
    room = context if model.context is None else min(context, model.context - longest_step)
    if room < 1:
        raise NotTimed(f"{model.name} has a context of {model.context} tokens, too short for steps of {longest_step}")
    return np.resize(text, room)


def _row(job: Job, ms: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    p10, p25, median, p75, p90 = np.percentile(ms, [10, 25, 50, 75, 90])
    # For normal errors the median's standard error is 1.2533 sigma / sqrt(n), and sigma is the quartile range / 1.349;
    # quartiles keep the few repeats that another process disturbed from counting as error of the median.
    error = 1.2533 * (p75 - p25) / 1.349 / math.sqrt(len(ms)) / median
    return {
        "model": job.model,
        "step": job.step,
        "tokens": job.tokens,
        "batch": 1,
        "context": job.context,
        "median_ms": median,
        "p10_ms": p10,
        "p90_ms": p90,
        "relative_error": error,
        "repeats": len(ms),
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
