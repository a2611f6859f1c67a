"""What drafts propose while a text is decoded, from caches of their own, and how tokens are chosen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from alphaprof.errors import ModelUnloadable
from alphaprof.profiling.heads.draft import HeadDraft
from alphaprof.profiling.heads.network import HeadCache
from alphaprof.profiling.models.draft import Draft
from alphaprof.profiling.models.kinds import PromptLookup
from alphaprof.profiling.models.load import Model, kept_logits
from alphaprof.profiling.models.private import CACHE, RELEASE
from alphaprof.profiling.models.processing import PLAIN, Processing, draw, uniforms, weights_of
from alphaprof.profiling.models.teacher_forced import recorded

OWN, DRAFTED, KEPT = range(3)  # streams of random numbers: the target's own tokens, the draft's, whether a draft is kept


class Cached:
    """A model, and keys and values of the first `length` tokens of one text.

    `width`: logits from this id on are ignored (see `scorer.scored_width`). `reads`: hidden states to keep in `states`, as
    `teacher_forced.recorded` names them: [tokens, hidden] of the tokens that were added last. Neither mask nor positions are
    passed: without padding a model derives both from its cache, and a mask is looked at before it is used: a GPU would wait.
    """

    def __init__(self, model: Model, width: int, reads: Sequence[int] = ()) -> None:
        self.model, self.width, self.device = model, width, model.device
        self.reads = reads
        self.states: dict[int, torch.Tensor] = {}
        self.context = model.context or sys.maxsize
        self.length = 0
        self._largest = model.vocabulary - 1
        self._cache: Any = _empty_cache(model.network.config)
        self._rewinds = False
        self._last = kept_logits(model)

    def prefill(self, ids: list[int], rewinds: bool) -> torch.Tensor:
        """Return logits [1, width] after the first tokens of the text. `rewinds`: whether tokens will be taken back. Raises
        `ModelUnloadable` where the model's cache cannot do that, or does not hold the tokens at all.
        """
        rows = self.last(self.tensor(ids))
        # A layer that is not initialised keeps its state elsewhere.
        if _tokens_in(self._cache) != len(ids) or (
            rewinds and not (self._cache.is_croppable and self._cache.is_initialized)
        ):
            raise ModelUnloadable(
                f"{self.model.name} ({type(self.model.network).__name__}) cannot remove tokens from its cache",
                "use a model with attention layers only: recurrent states cannot be rolled back",
            )
        if rewinds:
            # Sliding windows forget what falls out of them unless past recording is on. It is turned on after
            # the prefill, so that they need not keep all of it.
            self._cache.activate_past_recording()
        self._rewinds = rewinds
        return rows

    def last(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [1, width] after the last of `ids` [tokens], which are added to the text."""
        return self._forward(ids, **self._last)[-1:]

    def each(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [tokens, width] after each of `ids` [tokens], which are added to the text. Ids that the model does
        not have are fed as its last one: what follows them means nothing.
        """
        return self._forward(ids.clamp(max=self._largest))

    def rewind(self, count: int) -> None:
        """Take the last tokens back: once a round, even if there are none, since sliding windows are trimmed in it."""
        self.length -= count
        if self._rewinds:
            self._cache.crop(-count)

    def tensor(self, ids: list[int]) -> torch.Tensor:
        """Return token ids [tokens] on the model's device."""
        return torch.tensor(ids, device=self.device)

    def _forward(self, ids: torch.Tensor, **how: Any) -> torch.Tensor:
        recording: Any = recorded(self.model.decoder, self.reads) if self.reads else nullcontext({})
        with recording as states:
            output = self.model.network(input_ids=ids[None], use_cache=True, **{CACHE: self._cache}, **how)
        self.states = {count: values[0] for count, values in states.items()}
        self.length += len(ids)
        logits: torch.Tensor = output.logits[0, :, : self.width]
        return logits.to(self.device)  # a model that is spread over devices may end on another one


def _empty_cache(config: Any) -> Any:
    # In transformers 5.17 a sliding window that may be rewound returns keys and values that its mask does not cover, once
    # several forwards follow each other without a rewind. Before 5.23 layers keep the whole text: the mask is the window.
    cache: Any = DynamicCache(config=config)
    if RELEASE < (5, 23):
        cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def _tokens_in(cache: Any) -> int:
    try:
        return int(cache.get_seq_length())
    except ValueError:  # it has no layer that could tell
        return 0


@dataclass(frozen=True)
class Choice:
    """How the target chooses the tokens of a text: greedily where `processing` is None, else drawn with this seed.

    `draft_processing`: what the draft's logits go through when it draws (see `Processing.for_draft`). `width`: ids
    from this one on have no probability (see `scorer.scored_width`); None: all that the target has.
    """

    processing: Processing | None = None
    seed: int = 0
    draft_processing: str = "same"
    width: int | None = None


GREEDILY = Choice()


class Chooser:
    """Chooses the tokens of one text of at most `places` tokens.

    Every place of a text has a random number of its own in each stream, so a draft that is drawn again after a rejection
    is drawn by the same number: nothing was decided by it the first time, because what follows a rejected draft is not
    looked at. The target's own stream is that of `continuations.generate`: plain decoding repeats its texts.
    """

    def __init__(
        self, choice: Choice, prompt: np.ndarray[Any, Any], source_row: int, places: int, device: torch.device
    ) -> None:
        self.processing = choice.processing or PLAIN
        self.draft_processing = self.processing.for_draft(choice.draft_processing)
        self._is_drawn = choice.processing is not None
        if self._is_drawn:
            streams = [uniforms(choice.seed, prompt, source_row, places, stream) for stream in (OWN, DRAFTED, KEPT)]
            self._numbers = torch.from_numpy(np.stack(streams)).to(device)

    def numbers(self, stream: int, at: int, count: int) -> torch.Tensor:
        """Random numbers [count] in [0, 1) of the places from `at` on; greedy text has none."""
        return self._numbers[stream, at : at + count]

    def own(self, rows: torch.Tensor, at: int) -> torch.Tensor:
        """Return the target's own tokens [n] at the places from `at` on, from its logits [n, V] there."""
        if not self._is_drawn:
            return rows.argmax(1)  # the first index of the maximum
        return draw(weights_of(rows, self.processing), self.numbers(OWN, at, len(rows)))

    def drafted(self, rows: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token [1] that the draft draws at a place, from its logits [1, V] there, and the law [1, V] of it."""
        weights = weights_of(rows, self.draft_processing)
        return draw(weights, self.numbers(DRAFTED, at, 1)), weights / weights.sum(1, keepdim=True)


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens `ids` [n]; `laws` [n, V]: the distributions q that they were drawn from, None if they were not."""

    ids: torch.Tensor
    laws: torch.Tensor | None = None


class Drafter(Protocol):
    """A draft at work on one text, whose first `prompt` tokens are the prompt. `reads`: hidden states of the target that it
    needs, as `teacher_forced.recorded` names them.
    """

    @property
    def reads(self) -> tuple[int, ...]:
        """The hidden states of the target that `observe` is given."""

    def start(self, ids: list[int]) -> None:
        """Take in the prompt."""

    def observe(self, states: dict[int, torch.Tensor]) -> None:
        """Take in the states [tokens, hidden] of `reads` of the tokens that the target has read since: of the prompt; then,
        after each round, of the token before its drafts and of those that were accepted.
        """

    def propose(self, ids: list[int], most: int) -> Proposal:
        """Propose up to `most` tokens that follow `ids`, the text so far."""

    def settle(self, accepted: int) -> None:
        """How many of the proposed tokens the text goes on with."""


class ModelDrafter:
    """A draft model with a KV cache of its own: greedy, or drawn from q where `drawn`.

    Its cache never holds the last token that it drafted. So after a round that was accepted in full its first step processes
    two tokens, the last draft and the target's own one; otherwise one.
    """

    reads = ()

    def __init__(self, draft: Model, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> None:
        self._cached = Cached(draft, width)
        self._chooser, self._drawn = chooser, drawn
        self._device = device  # the target's
        self._vocabulary = draft.vocabulary
        self._foreign = False  # whether the text holds a token that the draft does not have
        self._prompt = self._read = self._drafted = 0

    def start(self, ids: list[int]) -> None:
        """Fill the cache with the prompt, unless there is nothing to propose after it."""
        self._prompt = len(ids)
        if self._room(ids) > 1:
            self._cached.prefill(ids, rewinds=True)

    def propose(self, ids: list[int], most: int) -> Proposal:
        """As many tokens as there is room for; without waiting for the device in between."""
        self._drafted = max(0, min(most, self._room(ids)))
        if self._drafted == 0:
            return Proposal(torch.empty(0, dtype=torch.long, device=self._device))
        fed = self._cached.tensor(ids[self._cached.length :])
        tokens, laws = [], []
        for place in range(len(ids) - self._prompt, len(ids) - self._prompt + self._drafted):
            rows = self._cached.last(fed)
            if self._drawn:
                fed, law = self._chooser.drafted(rows, place)
                laws.append(law)
            else:
                fed = rows.argmax(1)
            tokens.append(fed)
        return Proposal(torch.cat(tokens).to(self._device), torch.cat(laws).to(self._device) if laws else None)

    def observe(self, states: dict[int, torch.Tensor]) -> None:
        """Nothing to take in."""

    def settle(self, accepted: int) -> None:
        """Take rejected drafts out of the cache."""
        self._cached.rewind(max(0, self._drafted - 1 - accepted))

    def _room(self, ids: list[int]) -> int:
        """Return tokens that may be proposed after a text: until the draft's context is full, and none after a foreign
        token.
        """
        self._foreign = self._foreign or any(token >= self._vocabulary for token in ids[self._read :])
        self._read = len(ids)
        return 0 if self._foreign else self._cached.context - len(ids) + 1


class LookupDrafter:
    """Prompt lookup at work on one text that grows."""

    reads = ()

    def __init__(self, draft: PromptLookup, device: torch.device) -> None:
        self._draft, self._device = draft, device
        self._index = draft.index
        self._place: int | None = None
        self._read = 0

    def start(self, ids: list[int]) -> None:
        """Index what was added to the text."""
        for end in range(self._read + 1, len(ids) + 1):
            self._place = self._index.add(ids, end)
        self._read = len(ids)

    def propose(self, ids: list[int], most: int) -> Proposal:
        """Return what followed the last tokens where they stood before."""
        self.start(ids)
        tokens = self._draft.proposal(ids, self._place, len(ids), most)
        return Proposal(torch.tensor(tokens, dtype=torch.long, device=self._device))

    def observe(self, states: dict[int, torch.Tensor]) -> None:
        """Nothing to take in."""

    def settle(self, accepted: int) -> None:
        """Nothing to take back."""


class HeadDrafter:
    """A head at work: greedy, or drawn from q where `drawn`. Its first step of a round reads all tokens that were verified
    since, with the target's own states; what it drafts from its own states is dropped after the round.
    """

    def __init__(self, draft: HeadDraft, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> None:
        self.reads = draft.network.layers
        self._network = draft.network
        self._cache: HeadCache  # once the text begins
        self._chooser, self._drawn, self._device = chooser, drawn, device
        self._depths, self._context, self._width = draft.depths, draft.context, width
        known = draft.network.ids
        self._ids = None if known is None else known[known < width]
        self._pending: list[torch.Tensor] = []
        self._prompt = self._read = 0

    def start(self, ids: list[int]) -> None:
        """Nothing before the target has read the prompt."""
        self._prompt = len(ids)
        self._cache = self._network.cache(torch.tensor(ids[:1], device=self._network.device))

    def observe(self, states: dict[int, torch.Tensor]) -> None:
        """Keep the features [tokens, features] until they are needed."""
        self._pending.append(torch.cat([states[count].to(self._network.device) for count in self.reads], -1))

    def propose(self, ids: list[int], most: int) -> Proposal:
        """As many tokens as there is room for; without waiting for the device in between."""
        room = most if self._context is None else self._context - len(ids) + 2
        count = max(0, min(most, self._depths, room))
        if count == 0:
            return Proposal(torch.empty(0, dtype=torch.long, device=self._device))
        features = torch.cat(self._pending)[None]
        self._pending.clear()
        fed = torch.tensor([ids[self._read + 1 : self._read + 1 + features.shape[1]]], device=self._network.device)
        self._read += features.shape[1]
        state, every = self._cache.extend(fed, features), self._network.at_once(self._cache)
        made = None if every is None else self._network.row_logits(every[0, :count])
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for depth in range(1, count + 1):
            if depth > 1:
                state = self._cache.deepen(tokens[-1], state, depth)
            network = self._network
            rows = network.logits(state, depth) if made is None else network.after(made[depth - 1 : depth], state)
            rows = rows[:, : self._width if self._ids is None else len(self._ids)]
            tokens.append(self._chosen(rows, len(ids) - self._prompt + depth - 1, laws))
        return Proposal(torch.cat(tokens).to(self._device), torch.cat(laws).to(self._device) if laws else None)

    def _chosen(self, rows: torch.Tensor, place: int, laws: list[torch.Tensor]) -> torch.Tensor:
        """Return the token [1] that logits [1, logits] draft at a place; where it is drawn, its law [1, width] joins
        `laws`.
        """
        if not self._drawn:
            index = rows.argmax(1)  # the first index of the maximum
            return index if self._ids is None else self._ids[index]
        index, law = self._chooser.drafted(rows, place)
        if self._ids is None:
            laws.append(law)
            return index
        laws.append(law.new_zeros((1, self._width)).index_copy_(1, self._ids, law))
        return self._ids[index]

    def settle(self, accepted: int) -> None:
        """Nothing to take back: what was drafted is dropped when the next round begins."""


@singledispatch
def drafter_of(draft: Draft, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> Drafter:
    """Return a draft at work on one text. Only the first `width` ids carry probability; `device`: where proposals go;
    `drawn`: drafts are drawn from q if it has one. A kind of draft that is defined elsewhere registers its own drafter;
    without one it is a model.
    """
    (model,) = draft.models
    return ModelDrafter(model, chooser, width, device, drawn)


@drafter_of.register(PromptLookup)
def _(draft: PromptLookup, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> Drafter:
    return LookupDrafter(draft, device)


@drafter_of.register(HeadDraft)
def _(draft: HeadDraft, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> Drafter:
    return HeadDrafter(draft, chooser, width, device, drawn)
