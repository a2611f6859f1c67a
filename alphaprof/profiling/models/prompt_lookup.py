"""Prompt lookup: a draft without a model that proposes what followed the last tokens where they stood before.

The matching is that of vLLM and transformers: of the last `max_ngram` tokens, else of fewer, the first earlier place from
the left; what followed there is proposed, up to the end of the text so far. vLLM proposes through an EOS, which stands in
every prompt of a chat; transformers ends the proposal before it. The log holds both lengths; decoding here follows vLLM.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.log.manifest import ModelFacts
from alphaprof.log.schema import PROPOSED_LIMIT

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Proposals:
    """What lookup proposes at each position of a continuation, [positions].

    `first`: the first token (-1: no match); `proposed`: how many tokens, at most PROPOSED_LIMIT; `accepted`: how many of
    them are what the text goes on with; `before_eos`: how many of them stand before the first EOS among them. A proposal
    that ends there is the beginning of the whole one, so that min(accepted, before_eos) of its tokens are accepted.
    """

    first: Ints
    proposed: Ints
    accepted: Ints
    before_eos: Ints


@dataclass(frozen=True)
class PromptLookup:
    """A prompt lookup draft with its name in the run, for a target with these EOS ids, number of ids and dtype."""

    name: str
    max_ngram: int
    eos: tuple[int, ...]
    vocabulary: int
    dtype: str

    def proposals(self, ids: np.ndarray[Any, Any], prompt: int) -> Proposals:
        """The proposals at every position of a text that begins with `prompt` tokens of prompt."""
        tokens = ids.tolist()
        found = np.zeros((4, len(tokens) - prompt), dtype=np.int64)
        found[0] = -1
        index = _Index(self.max_ngram)
        for end in range(1, len(tokens)):
            place = index.add(tokens, end)
            if end >= prompt and place is not None:
                found[:, end - prompt] = self._at(tokens, place, end)
        return Proposals(*found)

    def _at(self, tokens: list[int], place: int, end: int) -> tuple[int, int, int, int]:
        """The fields of `Proposals` for the proposal from `place` on when the text so far ends at `end`."""
        proposal = self.proposal(tokens, place, end)
        actual = tokens[end : end + len(proposal)]
        pairs = enumerate(zip(proposal, actual, strict=False))
        accepted = next((number for number, (left, right) in pairs if left != right), len(actual))
        before_eos = next((number for number, token in enumerate(proposal) if token in self.eos), len(proposal))
        return proposal[0], len(proposal), accepted, before_eos

    def proposal(self, tokens: list[int], place: int, end: int) -> list[int]:
        """The tokens from `place` on, up to where the text so far ends, at `end`; one at least."""
        return tokens[place : min(place + PROPOSED_LIMIT, end)]

    def search(self, tokens: list[int]) -> float:
        """Seconds that one search of a text takes when it is indexed up to its last token."""
        index = _Index(self.max_ngram)
        for end in range(1, len(tokens)):
            index.add(tokens, end)
        start = time.perf_counter()
        place = index.add(tokens, len(tokens))
        if place is not None:
            self._at(tokens, place, len(tokens))
        return time.perf_counter() - start

    def facts(self) -> ModelFacts:
        """What the manifest keeps of this draft."""
        return ModelFacts(
            reference="prompt lookup",
            kind="prompt_lookup",
            architecture="none",
            # Not that of older versions, which logged proposals that end before an EOS: their runs hold another draft.
            fingerprint=hashlib.sha256(f"prompt_lookup {self.max_ngram} through eos".encode()).hexdigest(),
            dtype=self.dtype,
            device="cpu",
            parameters=0,
            context=None,
            vocabulary=self.vocabulary,
            eos=self.eos,
            noise=0.0,
        )


class Reader:
    """Prompt lookup in one text that grows, as decoding needs it."""

    def __init__(self, draft: PromptLookup) -> None:
        self.draft = draft
        self._index = _Index(draft.max_ngram)
        self._place: int | None = None
        self._read = 0

    def read(self, tokens: list[int]) -> None:
        """Take in the text so far: what was read before, and what was added to it."""
        for end in range(self._read + 1, len(tokens) + 1):
            self._place = self._index.add(tokens, end)
        self._read = len(tokens)

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """Proposes up to `most` tokens that follow `tokens`, the text so far."""
        self.read(tokens)
        return [] if self._place is None else self.draft.proposal(tokens, self._place, len(tokens))[:most]


class _Index:
    """Where each run of up to `max_ngram` tokens first stood in a text that grows token by token."""

    def __init__(self, max_ngram: int) -> None:
        self.first: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]

    def add(self, tokens: list[int], end: int) -> int | None:
        """Take in the runs that end where the text so far does, and say where the longest known one of them led to.

        `end` grows by one from call to call. None: none of them stood there before.
        """
        match = None
        for size in range(1, min(len(self.first), end) + 1):
            earlier = self.first[size - 1].setdefault(tuple(tokens[end - size : end]), end)
            if earlier < end:
                match = earlier
        return match
