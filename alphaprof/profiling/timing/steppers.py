"""Steps of models and of drafts over a filled KV cache, again and again: what `latency.py` times."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticCache, StaticLayer

from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.network import HeadCache, HeadNetwork
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.hub import first_line
from alphaprof.profiling.models.kinds import PromptLookup
from alphaprof.profiling.models.load import Model, is_out_of_memory, kept_logits
from alphaprof.profiling.models.teacher_forced import recorded
from alphaprof.profiling.texts.corpus import Ids
from alphaprof.rules import GAMMA_LIMIT

LONGEST_STEP = GAMMA_LIMIT + 1
SHORT = 8  # tokens of context while it is tried how models can be run
CHUNK = 512  # bases that are read at a time while a cache is filled


class NotTimed(Exception):
    """Steps of a model cannot be timed; the message says why, `remedy` what helps."""

    remedy = "time a model with attention layers only, or use your engine's step times (docs/costs.md)"


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return what some work takes: by the wall clock, or on a GPU between two events on its own time line."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        before.record()
        work()
        after.record()
        torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) / 1e3


@dataclass(frozen=True)
class TimedStep:
    """A kind of step to time, and what runs it once, in seconds."""

    model: str
    step: str
    tokens: int
    batch: int
    context: int
    mode: str
    run: Callable[[], float]

    @property
    def place(self) -> tuple[str, str, int, int, int]:
        """What its row is about: model, step, tokens, batch size and context."""
        return self.model, self.step, self.tokens, self.batch, self.context


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
        self._fill(torch.from_numpy(ids)[None].to(model.device))

    def _empty(self) -> Any:
        return DynamicCache(config=self.model.network.config)

    def _fill(self, text: torch.Tensor) -> None:
        """Read the text [1, context] once, and copy its keys and values for the other texts of the batch, which are equal:
        reading all of them would take more memory than any step, and most of the time.
        """
        if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self.cache.layers):
            self._read(text, self.cache)
            self.cache.batch_repeat_interleave(self.batch)
        else:  # what other layers hold is not known to be a copy a text
            self._read(text.expand(self.batch, -1), self.cache)
        # Layers with a sliding window forget what falls out of it unless past recording is on.
        self.cache.activate_past_recording()

    def _read(self, text: torch.Tensor, cache: Any) -> None:
        self.model.network(input_ids=text, past_key_values=cache, use_cache=True, **kept_logits(self.model))

    def step(self, tokens: int) -> float:
        """Return seconds that the model takes for `tokens` new tokens of each text, the choice of the next ones included."""
        taken = seconds(self.model.device, lambda: self._choose(tokens))
        self.settling_s = seconds(self.model.device, lambda: self._take_back(tokens))
        return taken

    def timed(self, model: str, step: str, tokens: int) -> TimedStep:
        """Return the step over some tokens, as a step to time of a `model` of the run."""
        return TimedStep(model, step, tokens, self.batch, self.context, self.mode, partial(self.step, tokens))

    def settling(self, model: str) -> TimedStep:
        """Return what it took to cut the cache back after the model's last step: that of the job before."""
        return TimedStep(model, "bookkeeping", 1, self.batch, self.context, self.mode, lambda: self.settling_s)

    def _choose(self, tokens: int) -> torch.Tensor:
        """Return the step itself; the ids that it chooses [batch, tokens]."""
        ids = self.next[:, :tokens]
        output = self.model.network(input_ids=ids, past_key_values=self.cache, use_cache=True)
        chosen: torch.Tensor = output.logits.argmax(-1)
        if chosen.device.type == "cpu":
            chosen.tolist()
        return chosen

    def _take_back(self, tokens: int) -> None:
        self.cache.crop(-tokens)

    def length(self) -> int:
        """Return tokens of each text that the cache holds."""
        return int(self.cache.get_seq_length())


class GraphStepper(Stepper):
    """The same as an engine runs it on a GPU: keys and values at fixed addresses, each step recorded once as a CUDA graph
    and replayed, so that the host's launches cost nothing. Raises `NotTimed` for models whose caches are not of one kind, or
    that lie on several devices: a graph records the work of one.
    """

    mode = "cuda_graph"

    def __init__(self, model: Model, text: Ids, batch: int = 1) -> None:
        if len({weight.device for weight in model.network.parameters()}) > 1:
            raise NotTimed(f"{model.name} lies on several devices")
        super().__init__(model, text, batch)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # with the ids that each step chooses
        self._stream: torch.cuda.Stream | None = None

    def _empty(self) -> Any:
        cache = StaticCache(config=self.model.network.config, max_cache_len=self.context + LONGEST_STEP)
        if any(type(layer) is not StaticLayer for layer in cache.layers):
            raise NotTimed(f"{self.model.name} has layers with a window of their own")
        return cache

    def _fill(self, text: torch.Tensor) -> None:
        one = super()._empty()
        self._read(text, one)
        for place, layer in enumerate(one.layers):
            keys, values = (states.expand(self.batch, -1, -1, -1) for states in (layer.keys, layer.values))
            self.cache.update(keys, values, place)

    def _choose(self, tokens: int) -> torch.Tensor:
        """As of a `Stepper`; on a GPU the next step over as many tokens overwrites what is returned."""
        if self.model.device.type != "cuda":
            return super()._choose(tokens)
        if tokens not in self._graphs:
            self._graphs[tokens] = self._recorded(tokens)
        graph, chosen = self._graphs[tokens]
        graph.replay()
        return chosen

    def _recorded(self, tokens: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Record a step as a graph, with the ids that it chooses, after some runs of it, and stand at the end of one step.
        On a stream of the model's own device: torch's own belongs to that of the first graph. All graphs of a stepper share
        the memory of its longest step: none reads what another one wrote.
        """
        device = self.model.device
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):  # puts the stream back also where recording fails, which torch's own does not
            for _ in range(3):
                super()._choose(tokens)
                self._take_back(tokens)
            graph = torch.cuda.CUDAGraph()
            pool = next((other.pool() for other, _ in self._graphs.values()), None)
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                chosen = super()._choose(tokens)
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return graph, chosen

    def _take_back(self, tokens: int) -> None:
        torch._foreach_sub_([layer.cumulative_length for layer in self.cache.layers], tokens)  # one launch for all layers


def common_mode(models: Sequence[Model], text: Ids, wanted: str, say: Callable[[str], None] = lambda _: None) -> str:
    """Return how all of some models can be run: as CUDA graphs where every one of them can, else eager; `say`: why not as
    graphs. Ratios of step times are what counts: a draft without launches over a target with them would look too good.
    """
    if wanted != "auto" or any(model.device.type != "cuda" for model in models):
        return Stepper.mode
    try:
        for model in models:
            _tried(GraphStepper(model, fitted(text, model, SHORT, 2)), 2)
    except (NotTimed, RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        say(f"steps are timed as they are launched, without CUDA graphs: {first_line(error)[:200]}")
        return Stepper.mode
    return GraphStepper.mode


def stepper(model: Model, text: Ids, batch: int, longest: int, mode: str) -> Stepper:
    """Return a stepper that has shown that it can take its steps back. Raises `NotTimed` if the model cannot; running out
    of memory is left to the caller.
    """
    kind = GraphStepper if mode == GraphStepper.mode else Stepper
    try:
        return _tried(kind(model, text, batch), longest)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = first_line(error)[:200]
    raise NotTimed(f"{model.name} ({type(model.network).__name__}) cannot undo steps: {reason}")


def _tried(new: Stepper, longest: int) -> Stepper:
    new.step(1)
    new.step(longest)
    if new.length() != new.context:
        raise NotTimed(f"{new.model.name} ({type(new.model.network).__name__}) cannot undo steps")
    return new


def fitted(text: Ids, model: Any, context: int, longest_step: int) -> Ids:
    """Return some text of `context` tokens, or of as many as the model's or head's own context has room for. Raises
    `NotTimed`.
    """
    room = context if model.context is None else min(context, model.context - longest_step)
    if room < 1:
        raise NotTimed(f"{model.name} has a context of {model.context} tokens, too short for steps of {longest_step}")
    return np.resize(text, room)


def prefills(name: str, model: Model, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
    """Return what reading prompts of some lengths, or of as many tokens as fit, takes a model: steps to time, one by one."""
    texts = [fitted(text, model, length, 1) for length in lengths]
    return [TimedStep(name, "prefill", len(each), 1, 0, Stepper.mode, partial(prefill, model, each)) for each in texts]


def prefill(model: Model, text: Ids) -> float:
    """Return seconds that a model takes to read a prompt into an empty cache, the choice of the first token included."""
    ids = torch.from_numpy(np.minimum(text.astype(np.int64), model.vocabulary - 1))[None].to(model.device)

    def read() -> None:
        cache: Any = DynamicCache(config=model.network.config)
        output = model.network(input_ids=ids, past_key_values=cache, use_cache=True, **kept_logits(model))
        chosen = output.logits[0, -1].argmax()
        if chosen.device.type == "cpu":
            chosen.item()

    return seconds(model.device, read)


class HeadStepper:
    """A batch of equal texts in a head's cache, all but their last `longest` bases. `ids` [bases + 1], `features` [bases,
    features]. Each step runs in a copy of the cache, which is made before the clock starts.

    Steps are launched one by one, whatever the target's are. Of a chain of modules a later step is that of a round after one
    of which nothing was accepted.
    """

    def __init__(self, network: HeadNetwork, ids: torch.Tensor, features: torch.Tensor, batch: int, longest: int) -> None:
        self.network, self.batch, self.context = network, batch, len(features) - longest
        self._tokens = ids[1:].expand(batch, -1)
        self._next = features[self.context :].repeat(batch, 1, 1)
        self._filled = network.cache(ids[:1].expand(batch))
        for start in range(0, self.context, CHUNK):
            chunk = slice(start, min(start + CHUNK, self.context))
            self._filled.extend(self._tokens[:, chunk], features[chunk].expand(batch, -1, -1))

    def first(self, tokens: int) -> float:
        """Return seconds of the first step of a round over some verified tokens of each text, its choice of a token
        included.
        """
        cache = self._copy()
        return seconds(self.network.device, lambda: self._extended(cache, tokens))

    def later(self) -> float:
        """Return seconds of the second step of a round, whose first ran over one token; of one pass, of the choice of a
        token.
        """
        cache = self._copy()
        state, token = self._extended(cache, 1)
        if self.network.at_once(cache) is not None:
            logits = self.network.logits(state, 1)
            return seconds(self.network.device, lambda: self._ids(logits))
        return seconds(self.network.device, lambda: self._chosen(cache.deepen(token, state, 2), 2))

    def _copy(self) -> HeadCache:
        return copy.deepcopy(self._filled, {id(self.network): self.network})

    def _extended(self, cache: HeadCache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states and ids that the first step drafts; of one pass it computes the logits of all depths."""
        state = cache.extend(self._tokens[:, self.context : self.context + tokens], self._next[:, :tokens])
        if (every := self.network.at_once(cache)) is not None:
            logits = self.network.logits(every.flatten(0, 1), 1)
            return state, self._ids(logits.view(*every.shape[:2], -1)[:, 0])
        return state, self._chosen(state, 1)

    def _chosen(self, state: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the target's ids [batch] that states [batch, hidden] draft."""
        return self._ids(self.network.logits(state, depth))

    def _ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the target's ids [batch] that logits [batch, logits] draft."""
        index = logits.argmax(1)
        ids = index if self.network.ids is None else self.network.ids[index]
        if ids.device.type == "cpu":
            ids.tolist()
        return ids


@torch.inference_mode()
def read(target: Model, network: HeadNetwork, text: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text as ids [bases + 1], and the target's states that a head reads at its bases [bases, features], which are
    all of its tokens but the last; both on the head's device.
    """
    ids = torch.from_numpy(text.astype("int64")).clamp(max=target.vocabulary - 1)
    with recorded(target.decoder, network.layers) as states:
        target.network(input_ids=ids[None, :-1].to(target.device), use_cache=False, **kept_logits(target))
    features = torch.cat([states[count][0].to(network.device) for count in network.layers], -1)
    return ids.to(network.device), features


@singledispatch
def round_steps(draft: Draft, text: Ids, batch: int, context: int, longest: int, mode: str) -> list[list[TimedStep]]:
    """Return what a round costs beside the target's steps: steps to time in blocks that each run without a break, for
    `batch` sequences whose caches hold `context` tokens, taken from `text`, if a round verifies up to `longest`. Raises
    `NotTimed`. A kind of draft that is defined elsewhere registers its own steps;
    those of a model run over one token and over two, as after a round that was accepted in full.
    """
    (model,) = draft.models
    own = stepper(model, fitted(text, model, context, longest), batch, 2, mode)
    return [[own.timed(draft.name, "draft", 1)], [own.timed(draft.name, "draft", 2), own.settling(draft.name)]]


@round_steps.register(PromptLookup)
def _(draft: PromptLookup, text: Ids, batch: int, context: int, longest: int, mode: str) -> list[list[TimedStep]]:
    """Return one search of each text."""
    history = np.resize(text, context).tolist()

    def search() -> float:
        return sum(draft.search(history) for _ in range(batch))

    return [[TimedStep(draft.name, "lookup", 1, batch, context, Stepper.mode, search)]]


@round_steps.register(HeadDraft)
def _(draft: HeadDraft, text: Ids, batch: int, context: int, longest: int, mode: str) -> list[list[TimedStep]]:
    """Return the first step of a round over 1 .. `longest` verified tokens, and a later one, for which a head of a single
    depth has its first over one token again.
    """
    known = len(fitted(text, draft, context, longest))
    ids, features = read(draft.target, draft.network, np.resize(text, known + longest + 1))
    steps = HeadStepper(draft.network, ids, features, batch, longest)
    place = (batch, steps.context, Stepper.mode)
    firsts = [
        [TimedStep(draft.name, "draft_first", tokens, *place, partial(steps.first, tokens))]
        for tokens in range(1, longest + 1)
    ]
    # Costs need a row for a later step, even if no round of a head of one depth has one.
    later = partial(steps.first, 1) if draft.network.most == 1 else steps.later
    return [*firsts, [TimedStep(draft.name, "draft", 1, *place, later)]]


@singledispatch
def prompt_steps(draft: Draft, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
    """Return what reading a prompt costs a draft, of some lengths, taken from `text`: steps to time, each alone; none if it
    reads none.
    """
    return [step for model in draft.models for step in prefills(draft.name, model, text, lengths)]


@prompt_steps.register(HeadDraft)
def _(draft: HeadDraft, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
    """Of its own layers, the first token included: the target reads the prompt anyway."""
    known = [min(len(fitted(text, each, length, 1)) for each in (draft, draft.target)) for length in lengths]
    ids, features = read(draft.target, draft.network, np.resize(text, max(known) + 1))
    steppers = {length: HeadStepper(draft.network, ids[: length + 1], features[:length], 1, length) for length in known}
    return [
        TimedStep(draft.name, "prefill", length, 1, 0, Stepper.mode, partial(each.first, length))
        for length, each in steppers.items()
    ]
