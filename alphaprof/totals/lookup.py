"""Prompt lookup, the matching: a place of a text is looked up by the tokens before it, the longest run of them that stood in
the text before, where it first stood. What followed there is the proposal.

The rule stands here twice. `Index` takes in one text as it grows, as decoding and timing need it, and says where to copy
from. `first_proposals` sorts all texts of a shard at once: for the million positions of a report it takes a quarter of the
time. A test compares the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.rules import MAX_NGRAM

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
NONE = -1


class Index:
    """Where each run of up to `max_ngram` tokens first stood in a text that grows token by token."""

    def __init__(self, max_ngram: int = MAX_NGRAM) -> None:
        self.first: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]

    def add(self, tokens: list[int], end: int) -> int | None:
        """Take in the runs that end at `end`, where the text so far does, and return where the longest of them that stood in
        it before was followed by the proposal; None: none stood there before. `end` grows by one from call to call.
        """
        match = None
        for size in range(1, min(len(self.first), end) + 1):
            earlier = self.first[size - 1].setdefault(tuple(tokens[end - size : end]), end)
            if earlier < end:
                match = earlier
        return match


def first_proposals(tokens: Ints, start: Ints, longest: int = MAX_NGRAM) -> Ints:
    """Return the first token that prompt lookup proposes for each place of several texts, [tokens]; NONE: no match."""
    proposals = np.full(len(tokens), NONE, dtype=np.int64)
    match, _ = matches(tokens, start, longest)
    known = np.flatnonzero(match != NONE)
    proposals[known] = tokens[match[known]]
    return proposals


def matches(tokens: Ints, start: Ints, longest: int = MAX_NGRAM) -> tuple[Ints, Ints]:
    """Where the proposal for each place of several texts is copied from, and how many tokens before it were found there,
    [tokens] each; NONE and 0: no match.

    The texts follow each other in `tokens` and begin at `start` [texts]; none is empty. A place is looked up by the tokens
    before it: the last `longest` of them, else fewer, where they first stood in the same text.
    """
    found, lengths = np.full(len(tokens), NONE, dtype=np.int64), np.zeros(len(tokens), dtype=np.int64)
    if len(tokens) == 0:
        return found, lengths
    text = np.repeat(np.arange(len(start)), np.diff([*start, len(tokens)]))
    offset = np.arange(len(tokens)) - start[text]
    _, single = np.unique(tokens, return_inverse=True)
    wide = int(single.max()) + 1
    run = text  # a number for each run of tokens that ends at a place; at first for the empty one, which tells texts apart
    match, size_of = found.copy(), lengths.copy()  # of the run that ends at a place
    for size in range(1, longest + 1):
        ends = np.flatnonzero(offset >= size - 1)
        before = run[ends] if size == 1 else run[ends - 1]
        _, first, numbers = np.unique(before * wide + single[ends], return_index=True, return_inverse=True)
        run = np.zeros(len(tokens), dtype=np.int64)
        run[ends] = numbers
        earlier = ends[first[numbers]]
        again = earlier < ends
        match[ends[again]], size_of[ends[again]] = earlier[again], size
    places = np.flatnonzero(offset > 0)
    known = places[match[places - 1] >= 0]
    found[known], lengths[known] = match[known - 1] + 1, size_of[known - 1]
    return found, lengths


def joined_texts(prompts: pa.Array, sizes: Ints, continuations: Ints, lengths: Ints) -> tuple[Ints, Ints, Array]:
    """Return all tokens of several texts, each prompt with its continuation, where each text begins, and which tokens are
    those of continuations. `prompts`: lists of `sizes` [texts] tokens; `continuations`: tokens one after the other, of
    `lengths`.
    """
    continued = np.repeat(np.tile([False, True], len(sizes)), np.stack([sizes, lengths], axis=1).ravel())
    tokens = np.empty(len(continued), dtype=np.int64)
    tokens[~continued], tokens[continued] = prompts.flatten().to_numpy(), continuations
    return tokens, np.cumsum(sizes + lengths) - sizes - lengths, continued
