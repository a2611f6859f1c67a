"""Rounds of speculative decoding from a position log: every round for every gamma from one teacher-forced pass.

Under strict greedy decoding with a draft whose prediction depends on the text alone, a round that starts at position t
accepts min(gamma, run of agreements from t) drafts and emits one more token, and the next round starts after them. So the
log fixes every round (proof by induction over the round: as long as proposals matched, the draft's own context equals the
text; after a mismatch nothing of the draft is used).

Two flavours. `engine`: the prefill emits the first token; a round drafts as many tokens as the draft proposes, up to gamma,
and nothing is capped at the end. `hf` follows Hugging Face's assisted generation: the first round starts at the first
token; a round drafts min(gamma, tokens left - 1); the draft stops after its own EOS; a matched EOS counts as the target's
own token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Flavour = Literal["engine", "hf"]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Trace:
    """The positions of several documents, one after another.

    `agrees` [positions]: 1 where the draft's proposal is the emitted token; `proposed` [positions]: tokens that a round
    starting there would propose at most; `start`, `stop` [documents]: where each document begins and ends; `limit`
    [documents]: its max_new_tokens (only `hf` reads it); `draft_ends` [positions]: the draft's proposal is EOS (likewise).
    """

    agrees: np.ndarray[Any, Any]
    proposed: np.ndarray[Any, Any]
    start: Ints
    stop: Ints
    limit: Ints
    draft_ends: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rounds:
    """Counts per document for one gamma.

    `rounds`, `tokens` (emitted by rounds) [documents]; for depth d = 1..gamma, [documents, gamma]: `drafted` rounds that
    drafted at least d tokens, `tested` rounds whose draft at depth d was reached before the document ended, `accepted`
    rounds whose first d drafts were all accepted.
    """

    rounds: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]
    drafted: np.ndarray[Any, Any]
    tested: np.ndarray[Any, Any]
    accepted: np.ndarray[Any, Any]


def run_lengths(agrees: np.ndarray[Any, Any], start: Ints, stop: Ints) -> Ints:
    """For each position the number of agreements from it on, up to its document's end; [positions]."""
    total = len(agrees)
    miss = np.where(agrees.astype(bool), total, np.arange(total))
    next_miss = np.minimum.accumulate(miss[::-1])[::-1]
    end = np.repeat(stop, stop - start)
    return np.asarray(np.minimum(next_miss, end) - np.arange(total), dtype=np.int64)


@dataclass(frozen=True)
class Step:
    """One round of each document that is not finished: its index, where the round starts, and what it drafted, accepted
    and emitted; all [unfinished documents].
    """

    document: Ints
    at: Ints
    drafted: Ints
    accepted: Ints
    emitted: Ints


def walk(trace: Trace, gamma: int, flavour: Flavour = "engine") -> Iterator[Step]:
    """The rounds of all documents for one gamma, side by side: the n-th step holds the n-th round of each."""
    run = run_lengths(trace.agrees, trace.start, trace.stop)
    next_end = _next_draft_end(trace) if flavour == "hf" else None
    place = trace.start + (1 if flavour == "engine" else 0)
    active = np.flatnonzero(place < trace.stop)
    while len(active):
        at, stop = place[active], trace.stop[active]
        drafted = np.minimum(gamma, trace.proposed[at])
        if next_end is not None:
            left = trace.limit[active] - (at - trace.start[active])
            ends = np.where(next_end[at] - at <= run[at], next_end[at] - at + 1, gamma)
            drafted = np.minimum(np.minimum(drafted, left - 1), ends)
        matched = np.minimum(run[at], drafted)
        emitted = np.minimum(matched + 1, stop - at)
        yield Step(active, at, drafted, emitted - 1 if flavour == "hf" else matched, emitted)
        place[active] = at + emitted
        active = active[place[active] < stop]


def replay(trace: Trace, gamma: int, flavour: Flavour = "engine") -> Rounds:
    """All rounds of all documents for one gamma, counted per document."""
    documents = len(trace.start)
    depth = np.arange(1, gamma + 1)
    rounds, tokens = np.zeros(documents), np.zeros(documents)
    drafted, tested, accepted = (np.zeros((documents, gamma)) for _ in range(3))
    for step in walk(trace, gamma, flavour):
        rounds[step.document] += 1
        tokens[step.document] += step.emitted
        drafted[step.document] += depth <= step.drafted[:, None]
        inside = trace.stop[step.document] - step.at  # what would have come after the end is neither right nor wrong
        tested[step.document] += depth <= np.minimum(np.minimum(step.drafted, step.accepted + 1), inside)[:, None]
        accepted[step.document] += depth <= step.accepted[:, None]
    return Rounds(rounds, tokens, drafted, tested, accepted)


def _next_draft_end(trace: Trace) -> Ints:
    """For each position the first one from it on where the draft proposes EOS; [positions].

    It counts up to the draft's first wrong proposal. Beyond that the draft is on a path of its own that the log does not
    hold: whether it ended there is unknown, and `drafted` of such a round may be too large. Rounds and accepted tokens do
    not depend on it.
    """
    total = len(trace.agrees)
    far = np.where(trace.draft_ends, np.arange(total), 2 * total + 256)
    return np.asarray(np.minimum.accumulate(far[::-1])[::-1], dtype=np.int64)
