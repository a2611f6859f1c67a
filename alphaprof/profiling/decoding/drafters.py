"""What a draft proposes while a text is decoded: a model token by token from its own KV cache, prompt lookup at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from alphaprof.profiling.decoding.caches import Cached
from alphaprof.profiling.decoding.choices import DRAFTED, Chooser
from alphaprof.profiling.models.load import Model
from alphaprof.profiling.models.processing import draw, weights_of
from alphaprof.profiling.models.prompt_lookup import PromptLookup, Reader


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens `ids` [n]; `laws` [n, V]: the distributions q that they were drawn from, None where they were not."""

    ids: torch.Tensor
    laws: torch.Tensor | None = None


class Drafter(Protocol):
    """A draft at work on one text, whose first `prompt` tokens are the prompt."""

    def start(self, ids: list[int]) -> None:
        """Take in the prompt."""

    def propose(self, ids: list[int], most: int) -> Proposal:
        """At most so many tokens behind the text so far."""

    def settle(self, accepted: int) -> None:
        """How many of the proposed tokens the text goes on with."""


class ModelDrafter:
    """A draft model with a KV cache of its own: greedy, or drawn from q where `drawn`.

    Its cache never holds the last token that it drafted. So after a round that was accepted in full its first step processes
    two tokens, the last draft and the target's own one; otherwise one.
    """

    def __init__(self, draft: Model, chooser: Chooser, width: int, device: torch.device, drawn: bool) -> None:
        self._cached = Cached(draft, width)
        self._chooser = chooser
        self._device = device  # the target's
        self._drawn = drawn
        self._vocabulary = draft.vocabulary
        self._foreign = False  # whether the text holds a token that the draft does not have
        self._prompt = self._read = self._drafted = 0

    def start(self, ids: list[int]) -> None:
        """Fill the cache with the prompt, unless there is nothing to propose behind it."""
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
                weights = weights_of(rows, self._chooser.draft_processing)
                fed = draw(weights, self._chooser.numbers(DRAFTED, place, 1))
                laws.append(weights / weights.sum(1, keepdim=True))
            else:
                fed = rows.argmax(1)
            tokens.append(fed)
        return Proposal(torch.cat(tokens).to(self._device), torch.cat(laws).to(self._device) if laws else None)

    def settle(self, accepted: int) -> None:
        """Take rejected drafts out of the cache."""
        self._cached.rewind(max(0, self._drafted - 1 - accepted))

    def _room(self, ids: list[int]) -> int:
        """Tokens that may be proposed behind a text: until the draft's context is full, and none behind a token that the
        draft does not have.
        """
        self._foreign = self._foreign or any(token >= self._vocabulary for token in ids[self._read :])
        self._read = len(ids)
        return 0 if self._foreign else self._cached.context - len(ids) + 1


class LookupDrafter:
    """Prompt lookup."""

    def __init__(self, draft: PromptLookup, device: torch.device) -> None:
        self._reader = Reader(draft)
        self._device = device

    def start(self, ids: list[int]) -> None:
        """Index the prompt."""
        self._reader.read(ids)

    def propose(self, ids: list[int], most: int) -> Proposal:
        """What followed the last tokens where they stood before."""
        return Proposal(torch.tensor(self._reader.propose(ids, most), dtype=torch.long, device=self._device))

    def settle(self, accepted: int) -> None:
        """Nothing to take back."""
