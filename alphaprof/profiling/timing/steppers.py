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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.network import HeadCache, HeadNetwork
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.hub import first_line
from alphaprof.profiling.models.kinds import PromptLookup
from alphaprof.profiling.models.load import NOISE, Model, is_out_of_memory, kept_logits
from alphaprof.profiling.models.private import CACHE
from alphaprof.profiling.models.teacher_forced import recorded
from alphaprof.rules import GAMMA_LIMIT
from alphaprof.run.split import Ids

LONGEST_STEP = GAMMA_LIMIT + 1
CHUNK = 512  # bases that are read at a time while a head's cache is filled


class NotTimed(Exception):
    """Steps of a model cannot be timed; the message says why, `remedy` what helps."""

    remedy = "use your engine's step times (docs/costs.md)"


@dataclass(frozen=True)
class TimedStep:
    """A kind of step to time, and what runs it once, in seconds."""

    model: str
    step: str
    tokens: int
    batch: int
    context: int
    run: Callable[[], float]

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """What its row is about: model, step, tokens, batch size and context."""
        return self.model, self.step, self.tokens, self.batch, self.context


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return what some work takes: by the wall clock, on a GPU between two events on its own time line, and where one thread
    computes on a CPU, CPU seconds of that thread: time spent waiting for a core is left out.
    """
    if device.type != "cuda":
        clock = time.thread_time if one_thread() else time.perf_counter
        start = clock()
        work()
        return clock() - start
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        before.record()
        work()
        after.record()
        torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) / 1e3


def one_thread() -> bool:
    """Return whether one thread computes on a CPU, so that its own clock times a step."""
    return torch.get_num_threads() == 1


def on_host(ids: torch.Tensor) -> torch.Tensor:
    """Return the ids that a step chose, which on a CPU are read at once; a GPU goes on without waiting."""
    if ids.device.type == "cpu":
        ids.tolist()
    return ids


class Stepper:
    """`batch` equal texts [context] in a model's KV cache. `step` adds tokens to each and takes them back; `crop_s`: seconds
    that cutting the cache took the last time.
    """

    def __init__(self, model: Model, text: Ids, batch: int = 1) -> None:
        ids = np.minimum(text.astype(np.int64), model.vocabulary - 1)
        self.model, self.batch, self.context = model, batch, len(text)
        self.input_ids = torch.from_numpy(np.resize(ids, (batch, LONGEST_STEP))).to(model.device)
        self.crop_s = 0.0
        cache: Any = DynamicCache(config=model.network.config)
        prompt = torch.from_numpy(ids)[None].to(model.device)
        # Keys and values of one text are copied for the others: reading all would take more memory than any step, and most
        # of the time. What layers of other kinds hold is not known to be a copy a text.
        copied = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        prompt = prompt if copied else prompt.expand(batch, -1)
        model.network(input_ids=prompt, use_cache=True, **{CACHE: cache}, **kept_logits(model))
        if copied:
            cache.batch_repeat_interleave(batch)
        cache.activate_past_recording()  # else sliding windows and convolutions forget what falls out of them
        self.cache = cache
        # `crop` does not take recurrent states back.
        by_layer = [layer.recurrent_states for layer in cache.layers if hasattr(layer, "recurrent_states")]
        self._recurrent = [(state, state.clone()) for states in by_layer for state in states.values() if state is not None]

    def logits(self, tokens: int) -> torch.Tensor:
        """Return the logits [batch, tokens, vocabulary] of a step, whose tokens stay in the cache."""
        ids = self.input_ids[:, :tokens]
        logits: torch.Tensor = self.model.network(input_ids=ids, use_cache=True, **{CACHE: self.cache}).logits
        return logits

    def take_back(self, tokens: int) -> None:
        """Leave the cache as it was before a step over some tokens."""
        self.crop_s = seconds(self.model.device, lambda: self.cache.crop(-tokens))
        for state, before in self._recurrent:
            state.copy_(before)

    def step(self, tokens: int) -> float:
        """Return seconds that the model takes for `tokens` new tokens of each text, the choice of the next ones included."""
        taken = seconds(self.model.device, lambda: on_host(self.logits(tokens).argmax(-1)))
        self.take_back(tokens)
        return taken

    def timed(self, model: str, step: str, tokens: int) -> TimedStep:
        """Return the step over some tokens, as a step to time of a `model` of the run."""
        return TimedStep(model, step, tokens, self.batch, self.context, partial(self.step, tokens))

    def bookkeeping(self, model: str) -> TimedStep:
        """Return what it took to cut the cache back after the model's last step: that of the job before."""
        return TimedStep(model, "bookkeeping", 1, self.batch, self.context, lambda: self.crop_s)


def stepper(model: Model, text: Ids, batch: int, longest: int) -> Stepper:
    """Return a stepper that has shown that it takes steps over up to `longest` tokens back: a second one has the logits of
    the first. Raises `NotTimed` if the model cannot; running out of memory is left to the caller.
    """
    try:
        found, logits = Stepper(model, text, batch), list[torch.Tensor]()
        for _ in range(2):
            logits.append(found.logits(longest)[0].float())
            found.take_back(longest)
        if bool((logits[0] - logits[1]).abs().max() <= NOISE[model.dtype]):
            return found
        reason = "the next one has other logits"
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = first_line(error)[:200]
    raise NotTimed(f"{model.name} ({type(model.network).__name__}) cannot undo steps: {reason}")


def fitted(text: Ids, model: Any, context: int, longest: int) -> Ids:
    """Return some text of `context` tokens, or of as many as the model's or head's own context has room for beside a step
    over `longest`. Raises `NotTimed`.
    """
    room = context if model.context is None else min(context, model.context - longest)
    if room < 1:
        raise NotTimed(f"{model.name} has a context of {model.context} tokens, too short for steps of {longest}")
    return np.resize(text, room)


def prefills(name: str, model: Model, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
    """Return what reading prompts of some lengths, or of as many tokens as fit, takes a model: steps to time, one by one."""
    texts = [fitted(text, model, length, 1) for length in lengths]
    return [TimedStep(name, "prefill", len(each), 1, 0, partial(prefill, model, each)) for each in texts]


def prefill(model: Model, text: Ids) -> float:
    """Return seconds that a model takes to read a prompt into an empty cache, the choice of the first token included."""
    ids = torch.from_numpy(np.minimum(text.astype(np.int64), model.vocabulary - 1))[None].to(model.device)

    def read() -> None:
        cache: Any = DynamicCache(config=model.network.config)
        output = model.network(input_ids=ids, use_cache=True, **{CACHE: cache}, **kept_logits(model))
        on_host(output.logits[0, -1].argmax())

    return seconds(model.device, read)


class HeadStepper:
    """`batch` equal texts in a head's cache, all but their last `longest` bases. `ids` [bases + 1]; `features` [bases,
    features]. What a step adds to the cache lies behind those bases, where the next one writes over it.

    Of a chain of modules a later step is that of a round after one of which nothing was accepted.
    """

    def __init__(self, network: HeadNetwork, ids: torch.Tensor, features: torch.Tensor, batch: int, longest: int) -> None:
        self.network, self.batch, self.context = network, batch, len(features) - longest
        self._tokens = ids[1:].expand(batch, -1)  # [batch, bases]
        self._features = features[self.context :].repeat(batch, 1, 1)  # [batch, longest, features]
        self._cache = network.cache(ids[:1].expand(batch))
        for start in range(0, self.context, CHUNK):
            chunk = slice(start, min(start + CHUNK, self.context))
            state = self._cache.extend(self._tokens[:, chunk], features[chunk].expand(batch, -1, -1))
        if self.context and network.most != 1 and network.at_once(self._cache) is None:
            self._cache.deepen(self._drafted(state, 1), state, 2)  # the second module of a chain reads the text in it

    def first(self, tokens: int) -> float:
        """Return seconds of the first step of a round over some verified tokens of each text, its choice of a token
        included.
        """
        cache = self.cache()
        return seconds(self.network.device, lambda: self.extended(cache, tokens))

    def later(self) -> float:
        """Return seconds of the second step of a round, whose first ran over one token; of one pass, of the choice of a
        token after that one.
        """
        cache = self.cache()
        state, token = self.extended(cache, 1)
        if (rows := self.network.at_once(cache)) is not None:
            depth = min(2, rows.shape[1])
            logits = self.network.row_logits(rows[:, depth - 1])
            return seconds(
                self.network.device, lambda: self._ids(self.network.after(logits, cache.deepen(token, state, depth)))
            )
        return seconds(self.network.device, lambda: self._drafted(cache.deepen(token, state, 2), 2))

    def cache(self) -> HeadCache:
        """Return the filled cache for one step. It shares all keys and values, and counts its bases alone."""
        return copy.copy(self._cache)

    def extended(self, cache: HeadCache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states [batch, hidden] and ids [batch] that the first step drafts; of one pass it computes the logits
        of all depths.
        """
        state = cache.extend(self._tokens[:, self.context : self.context + tokens], self._features[:, :tokens])
        if (rows := self.network.at_once(cache)) is not None:
            logits = self.network.row_logits(rows.flatten(0, 1)).view(*rows.shape[:2], -1)
            return state, self._ids(self.network.after(logits[:, 0], state))
        return state, self._drafted(state, 1)

    def _drafted(self, state: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the target's ids [batch] that states [batch, hidden] draft."""
        return self._ids(self.network.logits(state, depth))

    def _ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the target's ids [batch] that logits [batch, logits] draft."""
        index = logits.argmax(1)
        return on_host(index if self.network.ids is None else self.network.ids[index])


@torch.inference_mode()
def read(target: Model, network: HeadNetwork, text: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text as ids [bases + 1], and the target's states that a head reads at its bases [bases, features], which are
    all of its tokens but the last; both on the head's device.
    """
    ids = torch.from_numpy(text.astype("int64")).clamp(max=target.vocabulary - 1)
    with recorded(target.decoder, network.layers) as states:
        target.network(input_ids=ids[None, :-1].to(target.device), use_cache=False, **kept_logits(target))
    return ids.to(network.device), torch.cat([states[count][0].to(network.device) for count in network.layers], -1)


@singledispatch
def round_steps(draft: Draft, text: Ids, batch: int, context: int, longest: int) -> list[list[TimedStep]]:
    """Return what a round costs beside the target's steps: steps to time in blocks that each run without a break, for
    `batch` sequences whose caches hold `context` tokens, taken from `text`, if a round verifies up to `longest`. Raises
    `NotTimed`. A kind of draft that is defined elsewhere registers its own steps; those of a model run over one token and
    over two, as after a round that was accepted in full.
    """
    (model,) = draft.models
    steps = stepper(model, fitted(text, model, context, longest), batch, 2)
    return [[steps.timed(draft.name, "draft", 1)], [steps.timed(draft.name, "draft", 2), steps.bookkeeping(draft.name)]]


@round_steps.register(PromptLookup)
def _(draft: PromptLookup, text: Ids, batch: int, context: int, longest: int) -> list[list[TimedStep]]:
    """Return one search of each text."""
    history = np.resize(text, context).tolist()

    def search() -> float:
        return sum(draft.search(history) for _ in range(batch))

    return [[TimedStep(draft.name, "lookup", 1, batch, context, search)]]


@round_steps.register(HeadDraft)
def _(draft: HeadDraft, text: Ids, batch: int, context: int, longest: int) -> list[list[TimedStep]]:
    """Return the first step of a round over 1 .. `longest` verified tokens, and a later one, for which a head of a single
    depth has its first over one token again.
    """
    known = len(fitted(text, draft, context, longest))
    ids, features = read(draft.target, draft.network, np.resize(text, known + longest + 1))
    steps = HeadStepper(draft.network, ids, features, batch, longest)
    firsts = {tokens: partial(steps.first, tokens) for tokens in range(1, longest + 1)}
    # Costs need a row for a later step, even if no round of a head of one depth has one.
    later = firsts[1] if draft.network.most == 1 else steps.later
    return [
        *([TimedStep(draft.name, "draft_first", tokens, batch, known, first)] for tokens, first in firsts.items()),
        [TimedStep(draft.name, "draft", 1, batch, known, later)],
    ]


@singledispatch
def prompt_steps(draft: Draft, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
    """Return what reading a prompt costs a draft, of some lengths, taken from `text`: steps to time, each alone; none if it
    reads none.
    """
    return [step for model in draft.models for step in prefills(draft.name, model, text, lengths)]


@prompt_steps.register(HeadDraft)
def _(draft: HeadDraft, text: Ids, lengths: Sequence[int]) -> list[TimedStep]:
    """Of its own layers, the first token included: the target reads the prompt anyway."""
    known = sorted({min(len(fitted(text, each, length, 1)) for each in (draft, draft.target)) for length in lengths})
    ids, features = read(draft.target, draft.network, np.resize(text, known[-1] + 1))
    steps = [HeadStepper(draft.network, ids[: length + 1], features[:length], 1, length) for length in known]
    return [
        TimedStep(draft.name, "prefill", length, 1, 0, partial(each.first, length))
        for length, each in zip(known, steps, strict=True)
    ]
