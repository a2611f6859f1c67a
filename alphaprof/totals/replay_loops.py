"""The loops of `replay`, compiled: every round of every document for several gammas in one call; and that of
`lookup.offers`.

A trace comes as two tuples of arrays: `positions` = (run of accepted drafts, tokens drafted at most, and before the draft's
own end, [positions]; a_t and beta_t [positions, depths]), and `documents` = (start, stop) [documents]. A single column of
a_t holds at every depth; no rows of it: acceptance is a fact, and `run` tells it. `blocks`: drafts are verified in blocks,
whose a_t are ratios that may be above 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alphaprof.stats.compiled import compiled

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, Array, Array]
Positions = tuple[Array, Array, Array, Array, Array]
Documents = tuple[Array, Array]
HUGE = 1e300  # of a product of ratios, which shall stay finite


@compiled
def count_rounds(positions: Positions, documents: Documents, gammas: Array, blocks: bool, counts: Arrays) -> None:
    """Add up all rounds: `counts` = rounds [gammas, documents], drafted, tested and accepted by depth [3, documents, sum of
    gammas], and the control variate [gammas, documents].
    """
    _, most, before_end, kept, accept = positions
    rounds, depths, control = counts
    begins = np.zeros(len(most) + 1)  # probability that a round begins at a position
    drafts = np.empty(gammas.max() + 1)  # [n]: expected rounds that drafted exactly n tokens
    reached = np.empty(gammas.max() + 2)
    for document in range(len(documents[0])):
        start, stop = documents[0][document], documents[1][document]
        first = 0
        for index, gamma in enumerate(gammas):
            tested, accepted = depths[1, document, first : first + gamma], depths[2, document, first : first + gamma]
            drafts[:] = 0.0
            begins[start + 1] = 1.0
            for at in range(start + 1, stop):
                chance, begins[at] = begins[at], 0.0
                if chance == 0:
                    continue
                longest = _accepts(positions, at, stop, (gamma, blocks), reached)
                rounds[index, document] += chance
                for i in range(longest):
                    # What would have come after the end is neither right nor wrong.
                    tested[i] += chance * reached[i]
                    accepted[i] += chance * reached[i + 1]
                    begins[at + i + 1] += chance * (reached[i] - reached[i + 1])
                    if len(kept):
                        column = i if kept.shape[1] > 1 else 0
                        off = min(kept[at + i, column], 1.0) - accept[at + i, column]
                        control[index, document] += chance * reached[i] * off
                begins[min(at + longest + 1, stop)] += chance * reached[longest]
                ended = chance * reached[longest] if _ended(before_end, at, stop, longest) else 0.0
                drafts[longest] += ended
                drafts[min(gamma, most[at])] += chance - ended
            begins[stop] = 0.0
            at_least = 0.0
            for depth in range(gamma, 0, -1):
                at_least += drafts[depth]
                depths[0, document, first + depth - 1] = at_least
            first += gamma


@compiled
def list_rounds(positions: Positions, documents: Documents, gamma: int, blocks: bool) -> tuple[Array, Array]:
    """Return all rounds that may be, in order: document, place, drafted, accepted and emitted, [rounds, 5]; and the
    probability of each, [rounds].
    """
    _, most, before_end, kept, _ = positions
    size = len(most) * (gamma + 1 if len(kept) else 1)
    rounds, chance = np.empty((size, 5), dtype=np.int64), np.empty(size)
    begins, reached, count = np.zeros(len(most) + 1), np.empty(gamma + 2), 0
    for document in range(len(documents[0])):
        start, stop = documents[0][document], documents[1][document]
        begins[start + 1] = 1.0
        for at in range(start + 1, stop):
            if begins[at] == 0:
                continue
            longest = _accepts(positions, at, stop, (gamma, blocks), reached)
            for accepted in range(longest + 1):
                likely = begins[at] * (reached[accepted] - reached[accepted + 1])
                if likely > 0:
                    ended = accepted == longest and _ended(before_end, at, stop, longest)
                    drafted, emitted = longest if ended else min(gamma, most[at]), min(accepted + 1, stop - at)
                    rounds[count], chance[count] = np.array((document, at, drafted, accepted, emitted)), likely
                    begins[at + emitted] += likely
                    count += 1
    return rounds[:count], chance[:count]


@compiled
def _accepts(positions: Positions, at: int, stop: int, how: tuple[int, bool], reached: Array) -> int:
    """Return how many drafts a round that starts `at` can get accepted; `reached` [i]: the probability of i or more, up to
    one more than that.

    Given the text, a block keeps at least i drafts with the probability min over j = 0..i of the product of its first j
    ratios q/p (docs/research/theory.md).
    """
    (run, most, before_end, kept, _), (gamma, blocks) = positions, how
    by_depth = kept.shape[1] > 1
    longest: int = min(gamma, most[at], before_end[at], stop - at, kept.shape[1] if by_depth else gamma)
    reached[0] = weight = 1.0
    for i in range(longest):
        a = kept[at + i, i if by_depth else 0] if len(kept) else 1.0 * (i < run[at])
        weight = min(a * weight, HUGE)
        reached[i + 1] = min(reached[i], weight) if blocks else a * reached[i]
    reached[longest + 1] = 0.0
    return longest


@compiled
def _ended(before_end: Array, at: int, stop: int, longest: int) -> bool:
    """Return whether a round whose drafts are all accepted ends where the draft does, so that it drafts no more."""
    return longest == before_end[at] and at + longest < stop


@compiled
def offered(tokens: Array, start: Array, stop: Array, places: Array, padded: bool, limit: int) -> Array:
    """Return the first token that each place is offered (-1: none), how many, and how many of them the text goes on with,
    [3, tokens]. `start` [texts]; `stop` [tokens]: where the text of each token ends; `places` [tokens]: copied from where,
    in the same text up to the place itself, in one before up to its end; negative: nowhere.
    """
    found = np.zeros((3, len(tokens)), dtype=np.int64)
    for text in range(len(start)):
        end = stop[start[text]]
        for at in range(start[text], end):
            place, filler, accepted = places[at], tokens[at - 1], 0
            there = 0 if place < 0 else (at if place >= start[text] else stop[place]) - place
            count = limit if padded and at > start[text] else min(limit, there)
            first = tokens[place] if there > 0 else (filler if count > 0 else -1)
            while accepted < count and at + accepted < end:
                if (tokens[place + accepted] if accepted < there else filler) != tokens[at + accepted]:
                    break
                accepted += 1
            found[0, at], found[1, at], found[2, at] = first, count, accepted
    return found
