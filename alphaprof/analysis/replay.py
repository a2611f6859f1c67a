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

from dataclasses import dataclass, fields
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
    drafted at least d tokens, `tested` rounds whose draft at depth d was reached, `accepted` rounds whose first d drafts
    were all accepted.
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


def replay(trace: Trace, gamma: int, flavour: Flavour = "engine") -> Rounds:
    """All rounds of all documents for one gamma, walked side by side."""
    documents = len(trace.start)
    run = run_lengths(trace.agrees, trace.start, trace.stop)
    next_end = _next_draft_end(trace) if flavour == "hf" else None
    depth = np.arange(1, gamma + 1)
    place = trace.start + (1 if flavour == "engine" else 0)
    counts = {name: np.zeros((documents, gamma)) for name in ("drafted", "tested", "accepted")}
    rounds = np.zeros(documents)
    tokens = np.maximum(trace.stop - place, 0).astype(float)
    active = np.flatnonzero(place < trace.stop)
    while len(active):
        at, stop = place[active], trace.stop[active]
        drafted = np.minimum(gamma, trace.proposed[at])
        if next_end is not None:
            left = trace.limit[active] - (at - trace.start[active])
            drafted = np.minimum(np.minimum(drafted, left - 1), next_end[at] - at + 1)
        matched = np.minimum(run[at], drafted)
        emitted = np.minimum(matched + 1, stop - at)
        accepted = emitted - 1 if flavour == "hf" else matched
        rounds[active] += 1
        counts["drafted"][active] += depth <= drafted[:, None]
        counts["tested"][active] += (depth <= drafted[:, None]) & (depth <= accepted[:, None] + 1)
        counts["accepted"][active] += depth <= accepted[:, None]
        place[active] = at + emitted
        active = active[place[active] < stop]
    return Rounds(rounds, tokens, **counts)


def _next_draft_end(trace: Trace) -> Ints:
    """For each position the first one from it on, on the emitted text, where the draft proposes EOS.

    Beyond its first wrong proposal a draft is on a path of its own that the log does not hold: whether it ended there is
    unknown, and `drafted` of such a round may be too large. Rounds and accepted tokens do not depend on it.
    """
    total = len(trace.agrees)
    far = np.where(trace.draft_ends, np.arange(total), 2 * total + 256)
    return np.asarray(np.minimum.accumulate(far[::-1])[::-1], dtype=np.int64)


def stack(parts: list[Rounds]) -> Rounds:
    """Rounds of consecutive groups of documents as one."""
    return Rounds(**{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Rounds)})
