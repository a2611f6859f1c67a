"""Prompt lookup, the matching: a place of a text is looked up by the tokens before it, the longest run of them that stood in
the text before. What followed there is the proposal.

Runners differ in which of several earlier places they take. vLLM's V1 runner, which its CPU build has, takes the leftmost,
and so does transformers, which tries lengths down to 1. vLLM's V2 runner takes the rightmost, and fills every round up to
gamma tokens: those that the place does not offer are the last token of the text (`ngram/speculator.py` of vLLM 0.32).

The rule stands here twice. `Index` takes in one text as it grows, as decoding and timing need it, and says where to copy
from. `matches` sorts all texts of a shard at once: for the million positions of a report it takes a quarter of the time. A
test compares the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from alphaprof.config.engines import ENGINES
from alphaprof.rules import MAX_NGRAM
from alphaprof.run.manifest import DraftFacts
from alphaprof.run.schema import PROPOSED_LIMIT
from alphaprof.stats.estimate import Array
from alphaprof.totals.replay import Ints

NONE = -1


class Index:
    """Where each run of `shortest` to `longest` tokens stood in a text that grows token by token: at first, or `rightmost`
    last.
    """

    def __init__(self, longest: int = MAX_NGRAM, shortest: int = 1, rightmost: bool = False) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in range(shortest, longest + 1)}
        self._rightmost = rightmost

    def add(self, tokens: list[int], end: int) -> int | None:
        """Take in the runs that end at `end`, where the text so far does, and return where the longest of them that stood in
        it before was followed by the proposal; None: none stood there before. `end` grows by one from call to call.
        """
        match = None
        for size, ends in self._ends.items():
            if size > end:
                break
            run = tuple(tokens[end - size : end])
            match = ends.get(run, match)
            if self._rightmost or run not in ends:
                ends[run] = end
        return match


def first_proposals(tokens: Ints, start: Ints, longest: int = MAX_NGRAM) -> Ints:
    """Return the first token that prompt lookup proposes for each place of several texts, [tokens]; NONE: no match."""
    proposals = np.full(len(tokens), NONE, dtype=np.int64)
    match, _ = matches(tokens, start, longest)
    known = np.flatnonzero(match != NONE)
    proposals[known] = tokens[match[known]]
    return proposals


def matches(
    tokens: Ints, start: Ints, longest: int = MAX_NGRAM, shortest: int = 1, rightmost: bool = False
) -> tuple[Ints, Ints]:
    """Where the proposal for each place of several texts is copied from, and how many tokens before it were found there,
    [tokens] each; NONE and 0: no match.

    The texts follow each other in `tokens` and begin at `start` [texts]; none is empty. A place is looked up by the tokens
    before it: the last `longest` of them, else fewer, down to `shortest`, where they first (`rightmost`: last) stood in the
    same text.
    """
    found, lengths = np.full(len(tokens), NONE, dtype=np.int64), np.zeros(len(tokens), dtype=np.int64)
    for size, places in enumerate(places_by_size(tokens, start, longest, rightmost), 1):
        if size >= shortest:
            known = places != NONE
            found[known], lengths[known] = places[known], size
    return found, lengths


def places_by_size(tokens: Ints, start: Ints, longest: int, rightmost: bool, pooled: Ints | None = None) -> Iterator[Ints]:
    """Yield for runs of 1 to `longest` tokens where the one before each place was followed in the same text, [tokens]; NONE:
    it did not stand there before.

    `pooled` [tokens]: how many tokens of the same answer stand before a token that may be copied from; negative: it may not.
    Then runs are looked up in all texts before, where they last stood.
    """
    lengths = np.diff(start, append=len(tokens))
    text = np.repeat(np.arange(len(start)), lengths)
    offset = np.arange(len(tokens)) - start[text]
    _, single = np.unique(tokens, return_inverse=True)
    wide = int(single.max(initial=0)) + 1
    # A number for each run of tokens that ends at a place; at first for the empty one, which tells texts apart.
    run = text if pooled is None else np.zeros_like(text)
    for size in range(1, longest + 1):
        ends = np.flatnonzero(offset >= size - 1)
        key = (run[ends] if size == 1 else run[ends - 1]) * wide + single[ends]
        order = np.argsort(key, kind="stable")
        ends, key = ends[order], key[order]
        fresh = np.diff(key, prepend=-1) != 0
        number, place = np.cumsum(fresh), np.arange(len(ends))
        begin = np.maximum.accumulate(np.where(fresh, place, 0))
        run = np.zeros(len(tokens), dtype=np.int64)
        run[ends] = number
        earlier = begin
        if rightmost or pooled is not None:
            offered = place if pooled is None else np.where(pooled[ends] >= size - 1, place, NONE)
            earlier = np.concatenate([[NONE], np.maximum.accumulate(offered)[:-1]])[: len(ends)]
        known = ~fresh & (earlier >= begin) & (offset[ends] < lengths[text[ends]] - 1)
        found = np.full(len(tokens), NONE, dtype=np.int64)
        found[ends[known] + 1] = ends[earlier[known]] + 1
        yield found


def offers(tokens: Ints, start: Ints, places: Ints, padded: bool) -> Array:
    """Return what a round from each place of several texts on proposes, if it proposes up to PROPOSED_LIMIT tokens:
    `draft_top`, `proposed` and `accepted_run` of the log, [3, tokens]. `places`: what `matches` found; `padded`: rounds are
    filled up with the last token.
    """
    from alphaprof.totals.replay_loops import offered

    lengths = np.diff(start, append=len(tokens))
    return np.asarray(offered(tokens, start, np.repeat(start + lengths, lengths), places, padded, PROPOSED_LIMIT))


def lookup_facts(
    longest: int, shortest: int, padded: bool, vocabulary: int | None, eos: tuple[int, ...], dtype: str, pool: str = ""
) -> DraftFacts:
    """Return what the manifest keeps of a prompt lookup draft. `pool`: where else it looks, in words."""
    from alphaprof.config.options import lookup_draft  # what validates profiles takes a while to load

    settings = lookup_draft(shortest, longest, "rightmost" if padded else "leftmost")
    way = "rightmost and filled up, as vLLM's V2 runner" if padded else "leftmost, as vLLM's V1 runner and transformers"
    # Not that of older versions, which logged proposals that end before an EOS: their runs hold another draft.
    identity = f"prompt_lookup {longest} through eos" + (f" from {shortest}" if shortest > 1 else "")
    identity += " padded" * padded + pool
    return DraftFacts(
        reference=f"prompt lookup of {shortest} to {longest} tokens{pool}, {way}",
        kind=settings.pop("kind"),
        architecture="none",
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        dtype=dtype,
        device="cpu",
        parameters=0,
        context=None,
        vocabulary=vocabulary,
        eos=eos,
        noise=0.0,
        has_distribution=False,
        has_steps=False,
        starts_matter=True,
        settings=settings,
        foreign=tuple(engine.name for engine in ENGINES) if pool else (),
    )


def joined_texts(prompts: pa.Array, sizes: Ints, continuations: Ints, lengths: Ints) -> tuple[Ints, Ints, Array]:
    """Return all tokens of several texts, each prompt with its continuation, where each text begins, and which tokens are
    those of continuations. `prompts`: lists of `sizes` [texts] tokens; `continuations`: tokens one after the other, of
    `lengths`.
    """
    continued = np.repeat(np.tile([False, True], len(sizes)), np.stack([sizes, lengths], axis=1).ravel())
    tokens = np.empty(len(continued), dtype=np.int64)
    tokens[~continued], tokens[continued] = prompts.flatten().to_numpy(), continuations
    return tokens, np.cumsum(sizes + lengths) - sizes - lengths, continued
