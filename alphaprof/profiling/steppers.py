"""One kind of step of one model, over a filled KV cache, again and again: what `latency.py` times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from alphaprof.analysis.rules import GAMMA_LIMIT
from alphaprof.profiling.batching import is_out_of_memory
from alphaprof.profiling.caches import kept_logits
from alphaprof.profiling.corpus import Ids
from alphaprof.profiling.models import Model

LONGEST_STEP = GAMMA_LIMIT + 1
SHORT = 8  # tokens of context while it is tried how models can be run


class NotTimed(Exception):
    """Steps of a model cannot be timed; the message says why."""


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """What some work takes: by the wall clock, or on a GPU between two events on its own time line."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        before.record()
        work()
        behind.record()
        torch.cuda.synchronize(device)
    return float(before.elapsed_time(behind)) / 1e3


class Stepper:
    """A batch of equal texts in a model's KV cache. `step` feeds some tokens to each and takes them out again; `settling_s`:
    what taking them out took, the last time.
    """

    mode = "eager"

    def __init__(self, model: Model, text: Ids, batch: int = 1) -> None:
        ids = np.minimum(text.astype(np.int64), model.vocabulary - 1)
        self.model = model
        self.context = len(text)
        self.batch = batch
        self.next = torch.from_numpy(np.resize(ids, (batch, LONGEST_STEP))).to(model.device)
        self.settling_s = 0.0
        self.cache = self._empty()
        self._fill(torch.from_numpy(ids).expand(batch, -1).to(model.device))

    def _empty(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.network.config)

    def _fill(self, prefix: torch.Tensor) -> None:
        # The head over all of these texts could take more memory than their keys and values.
        self.model.network(input_ids=prefix, past_key_values=self.cache, use_cache=True, **kept_logits(self.model))
        # Layers with a sliding window forget what falls out of it, unless they are told that it will be needed again.
        self.cache.activate_past_recording()

    def step(self, tokens: int) -> float:
        """Seconds that the model takes for `tokens` new tokens of each text, the choice of the next ones included."""
        found = seconds(self.model.device, lambda: self._choose(tokens))
        self.settling_s = seconds(self.model.device, lambda: self._take_back(tokens))
        return found

    def _choose(self, tokens: int) -> None:
        ids = self.next[:, :tokens]
        output = self.model.network(input_ids=ids, past_key_values=self.cache, use_cache=True)
        chosen = output.logits.argmax(-1)
        if chosen.device.type == "cpu":
            chosen.tolist()

    def _take_back(self, tokens: int) -> None:
        self.cache.crop(-tokens)

    def length(self) -> int:
        """Tokens of each text that the cache holds."""
        return int(self.cache.get_seq_length())


class GraphStepper(Stepper):
    """The same as an engine runs it on a GPU: keys and values at fixed addresses, each step recorded once as a CUDA graph
    and replayed, so that the host's launches cost nothing. Raises `NotTimed` for models whose caches are not of one kind.
    """

    mode = "cuda_graph"

    def __init__(self, model: Model, text: Ids, batch: int = 1) -> None:
        super().__init__(model, text, batch)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _empty(self) -> Any:
        from transformers.cache_utils import StaticCache, StaticLayer

        cache = StaticCache(config=self.model.network.config, max_cache_len=self.context + LONGEST_STEP)
        if any(type(layer) is not StaticLayer for layer in cache.layers):
            raise NotTimed(f"{self.model.name} has layers with a window of their own")
        return cache

    def _fill(self, prefix: torch.Tensor) -> None:
        self.model.network(input_ids=prefix, past_key_values=self.cache, use_cache=True, **kept_logits(self.model))

    def _choose(self, tokens: int) -> None:
        if self.model.device.type != "cuda":
            super()._choose(tokens)
            return
        if tokens not in self._graphs:
            self._graphs[tokens] = self._recorded(tokens)
        self._graphs[tokens].replay()

    def _recorded(self, tokens: int) -> torch.cuda.CUDAGraph:
        """A step as a graph; it is run some times before, as recording asks for, and stands at the end of one step."""
        stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                super()._choose(tokens)
                self._take_back(tokens)
        torch.cuda.current_stream(self.model.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            super()._choose(tokens)
        return graph

    def _take_back(self, tokens: int) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(tokens)


def common_mode(models: Sequence[Model], text: Ids, wanted: str) -> str:
    """How all of some models can be run: as CUDA graphs where every one of them can, else eager.

    Ratios of step times are what counts: a draft without launches over a target with them would look too good.
    """
    if wanted != "auto" or any(model.device.type != "cuda" for model in models):
        return Stepper.mode
    try:
        for model in models:
            _tried(GraphStepper(model, fitted(text, model, SHORT, 2)), 2)
    except (NotTimed, RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        return Stepper.mode
    return GraphStepper.mode


def stepper(model: Model, text: Ids, batch: int, longest: int, mode: str) -> Stepper:
    """A stepper that has shown that it can take its steps back.

    Raises `NotTimed` where the model cannot; running out of memory is left to the caller.
    """
    kind = GraphStepper if mode == GraphStepper.mode else Stepper
    try:
        return _tried(kind(model, text, batch), longest)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise NotTimed(f"{model.name} ({type(model.network).__name__}) cannot take steps back: {reason[:200]}")


def _tried(found: Stepper, longest: int) -> Stepper:
    found.step(1)
    found.step(longest)
    if found.length() != found.context:
        raise ValueError("its cache does not shrink")
    return found


def fitted(text: Ids, model: Model, context: int, longest_step: int) -> Ids:
    """Some text of `context` tokens, or of as many as the model's own context leaves room for. Raises `NotTimed`."""
    room = context if model.context is None else min(context, model.context - longest_step)
    if room < 1:
        raise NotTimed(f"{model.name} has a context of {model.context} tokens, too short for steps of {longest_step}")
    return np.resize(text, room)


def prefill(model: Model, text: Ids) -> float:
    """Seconds that a model takes to read a prompt into an empty cache, the choice of the first token included."""
    from transformers import DynamicCache

    ids = torch.from_numpy(np.minimum(text.astype(np.int64), model.vocabulary - 1))[None].to(model.device)

    def read() -> None:
        cache: Any = DynamicCache(config=model.network.config)
        output = model.network(input_ids=ids, past_key_values=cache, use_cache=True, **kept_logits(model))
        chosen = output.logits[0, -1].argmax()
        if chosen.device.type == "cpu":
            chosen.item()

    return seconds(model.device, read)
