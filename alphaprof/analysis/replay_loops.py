"""The loops of `replay`, compiled: every round of every document for several gammas in one call.

A trace comes as two tuples of int64 arrays: `positions` = (run, proposed, next end of the draft) [positions], and
`documents` = (start, stop, limit) [documents]; `mode` = (hf, looked up, where in a document its first round starts).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alphaprof.compiled import compiled

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, Array, Array]
Mode = tuple[bool, bool, int]


@compiled
def most_drafted(proposed: int, left: int, mode: Mode) -> int:
    """Tokens that a round drafts at most where `left` tokens are left, before gamma and the draft's own EOS."""
    if not mode[0]:
        return proposed
    if mode[1]:
        return 0 if left == 1 else proposed
    return max(0, min(proposed, left - 1))


@compiled
def one_round(positions: Arrays, at: int, ends: tuple[int, int], gamma: int, mode: Mode) -> tuple[int, int, int]:
    """What a round that starts `at` drafts, accepts and emits; `ends`: of its document, and of the tokens it may have.

    The draft's next end may be another document's.
    """
    run, proposed, next_end = positions
    drafted = min(gamma, most_drafted(proposed[at], ends[1] - at, mode))
    if mode[0] and next_end[at] < ends[0] and next_end[at] - at <= run[at]:
        drafted = min(drafted, next_end[at] - at + 1)
    matched = min(run[at], drafted)
    emitted = min(matched + 1, ends[0] - at)
    return drafted, emitted - 1 if mode[0] else matched, emitted


@compiled
def list_rounds(positions: Arrays, documents: Arrays, gamma: int, mode: Mode) -> Array:
    """All rounds in order: document, place, drafted, accepted and emitted, [rounds, 5]."""
    found = np.empty((len(positions[0]), 5), dtype=np.int64)
    count = 0
    for document in range(len(documents[0])):
        start, stop, limit = documents[0][document], documents[1][document], documents[2][document]
        at = start + mode[2]
        while at < stop:
            drafted, accepted, emitted = one_round(positions, at, (stop, start + limit), gamma, mode)
            found[count] = np.array((document, at, drafted, accepted, emitted))
            at += emitted
            count += 1
    return found[:count]


@compiled
def count_rounds(positions: Arrays, documents: Arrays, gammas: Array, mode: Mode, found: tuple[Array, Array]) -> None:
    """Add up all rounds: `found` = rounds [gammas, documents], and drafted, tested and accepted by depth
    [3, documents, sum of gammas].
    """
    rounds, depths = found
    seen = np.empty((3, gammas.max() + 1), dtype=np.int64)  # rounds that drafted, tested, accepted exactly so many tokens
    for document in range(len(documents[0])):
        start, stop, limit = documents[0][document], documents[1][document], documents[2][document]
        first = 0
        for index, gamma in enumerate(gammas):
            seen[:] = 0
            at, count = start + mode[2], 0
            while at < stop:
                drafted, accepted, emitted = one_round(positions, at, (stop, start + limit), gamma, mode)
                seen[0, drafted] += 1
                # What would have come after the end is neither right nor wrong.
                seen[1, min(drafted, accepted + 1, stop - at)] += 1
                seen[2, accepted] += 1
                at += emitted
                count += 1
            rounds[index, document] = count
            for kind in range(3):
                at_least = 0
                for depth in range(gamma, 0, -1):
                    at_least += seen[kind, depth]
                    depths[kind, document, first + depth - 1] = at_least
            first += gamma


@compiled
def expect_rounds(
    positions: tuple[Arrays, tuple[Array, Array]],
    documents: Arrays,
    gammas: Array,
    mode: Mode,
    found: tuple[Array, Array, Array],
) -> None:
    """The same in expectation: `positions` = (those of above, (a_t, beta_t)); `found` = those of above, and the control
    variate [gammas, documents].
    """
    (_, proposed, _), (kept, accept) = positions
    rounds, depths, control = found
    state = np.empty(gammas.max() + 1)  # [i]: probability that i drafts of the current round were accepted
    drafts = np.empty(gammas.max() + 1)  # [n]: expected rounds that drafted exactly n tokens
    most = np.empty(np.max(documents[1] - documents[0]) if len(documents[0]) else 0, dtype=np.int64)
    for document in range(len(documents[0])):
        start, stop, limit = documents[0][document], documents[1][document], documents[2][document]
        for at in range(start, stop):
            most[at - start] = most_drafted(proposed[at], start + limit - at, mode)
        first = 0
        for index, gamma in enumerate(gammas):
            tested, accepted = depths[1, document, first : first + gamma], depths[2, document, first : first + gamma]
            state[:] = 0.0
            state[0] = 1.0
            drafts[:] = 0.0
            for at in range(start + mode[2], stop):
                a, place = kept[at], at - start
                counted = 0.0 if mode[0] and at + 1 == stop else a
                rounds[index, document] += state[0]
                drafts[min(gamma, most[place])] += state[0]
                total = 0.0
                for i in range(min(gamma - 1, place), -1, -1):  # a draft is tested where its round has one left
                    reached = state[i] if i < most[place - i] else 0.0
                    tested[i] += reached
                    accepted[i] += counted * reached
                    state[i + 1] = a * reached
                    total += reached
                state[0] = 1.0 - a * total
                control[index, document] += total * (a - accept[at])
            at_least = 0.0
            for depth in range(gamma, 0, -1):
                at_least += drafts[depth]
                depths[0, document, first + depth - 1] = at_least
            first += gamma
