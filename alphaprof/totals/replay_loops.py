"""The loops of `replay`, compiled: every round of every document for several gammas in one call; and that of
`lookup.offers`.

A trace comes as two tuples of int64 arrays: `positions` = (run, tokens drafted at most, next end of the draft) [positions],
and `documents` = (start, stop) [documents]. `ends`: drafts end, before that position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alphaprof.stats.compiled import compiled

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, Array, Array]
Documents = tuple[Array, Array]
HUGE = 1e300  # of a product of ratios, which shall stay finite


@compiled
def one_round(positions: Arrays, at: int, stop: int, gamma: int, ends: bool) -> tuple[int, int, int]:
    """Return what a round that starts `at` drafts, accepts and emits in a document that ends at `stop`. The draft's next end
    may be another document's.
    """
    run, most, next_end = positions
    drafted = min(gamma, most[at])
    if ends and next_end[at] < stop and next_end[at] - at <= run[at]:
        drafted = min(drafted, next_end[at] - at)
    matched = min(run[at], drafted)
    return drafted, matched, min(matched + 1, stop - at)


@compiled
def list_rounds(positions: Arrays, documents: Documents, gamma: int, ends: bool) -> Array:
    """Return all rounds in order: document, place, drafted, accepted and emitted, [rounds, 5]."""
    rounds = np.empty((len(positions[0]), 5), dtype=np.int64)
    count = 0
    for document in range(len(documents[0])):
        start, stop = documents[0][document], documents[1][document]
        at = start + 1
        while at < stop:
            drafted, accepted, emitted = one_round(positions, at, stop, gamma, ends)
            rounds[count] = np.array((document, at, drafted, accepted, emitted))
            at += emitted
            count += 1
    return rounds[:count]


@compiled
def count_rounds(positions: Arrays, documents: Documents, gammas: Array, ends: bool, counts: tuple[Array, Array]) -> None:
    """Add up all rounds: `counts` = rounds [gammas, documents], and drafted, tested and accepted by depth
    [3, documents, sum of gammas].
    """
    rounds, depths = counts
    seen = np.empty((3, gammas.max() + 1), dtype=np.int64)  # [:, n]: rounds that drafted, tested, accepted exactly n tokens
    for document in range(len(documents[0])):
        start, stop = documents[0][document], documents[1][document]
        first = 0
        for index, gamma in enumerate(gammas):
            seen[:] = 0
            at, count = start + 1, 0
            while at < stop:
                drafted, accepted, emitted = one_round(positions, at, stop, gamma, ends)
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
    positions: tuple[Array, Array, Array, Array], documents: Documents, gammas: Array, blocks: bool, counts: Arrays
) -> None:
    """The same in expectation: `positions` = (tokens drafted at most, and before the draft's own end [positions], a_t and
    beta_t [positions, depths]), where a single column holds for every depth; `blocks`: drafts are verified in blocks, whose
    a_t are ratios that may be above 1; `counts` = those of above, and the control variate [gammas, documents].
    """
    most, before_end, kept, accept = positions
    rounds, depths, control = counts
    by_depth = kept.shape[1] > 1
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
                longest = _accepts((most, before_end, kept), at, stop, (gamma, blocks), reached)
                rounds[index, document] += chance
                for i in range(longest):
                    place, column = at + i, i if by_depth else 0
                    tested[i] += chance * reached[i]
                    accepted[i] += chance * reached[i + 1]
                    begins[place + 1] += chance * (reached[i] - reached[i + 1])
                    control[index, document] += chance * reached[i] * (min(kept[place, column], 1.0) - accept[place, column])
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
def list_chances(
    positions: tuple[Array, Array, Array], documents: Documents, gamma: int, blocks: bool
) -> tuple[Array, Array]:
    """Return what `list_rounds` does of all rounds that may be, [rounds, 5], and the probability of each, [rounds].
    `positions`, `blocks`: those of `expect_rounds`, without beta_t.
    """
    most, before_end, _ = positions
    rounds, chance = np.empty((len(most) * (gamma + 1), 5), dtype=np.int64), np.empty(len(most) * (gamma + 1))
    begins, reached, count = np.zeros(len(most) + 1), np.empty(gamma + 2), 0
    for document in range(len(documents[0])):
        start, stop = documents[0][document], documents[1][document]
        begins[start + 1] = 1.0
        for at in range(start + 1, stop):
            longest = _accepts(positions, at, stop, (gamma, blocks), reached)
            for accepted in range(longest + 1):
                chance[count] = begins[at] * (reached[accepted] - reached[accepted + 1])
                if chance[count] > 0:
                    ended = accepted == longest and _ended(before_end, at, stop, longest)
                    drafted, emitted = longest if ended else min(gamma, most[at]), min(accepted + 1, stop - at)
                    rounds[count] = np.array((document, at, drafted, accepted, emitted))
                    begins[at + emitted] += chance[count]
                    count += 1
    return rounds[:count], chance[:count]


@compiled
def _accepts(positions: tuple[Array, Array, Array], at: int, stop: int, how: tuple[int, bool], reached: Array) -> int:
    """Return how many drafts a round that starts `at` can get accepted; `reached` [i]: the probability of i or more, up to
    one more than that.

    Given the text, a block keeps at least i drafts with the probability min over j = 0..i of the product of its first j
    ratios q/p (docs/theory.md, part 6).
    """
    (most, before_end, kept), (gamma, blocks) = positions, how
    by_depth = kept.shape[1] > 1
    longest: int = min(gamma, most[at], before_end[at], stop - at, kept.shape[1] if by_depth else gamma)
    reached[0] = weight = 1.0
    for i in range(longest):
        a = kept[at + i, i if by_depth else 0]
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
                proposal = tokens[place + accepted] if accepted < there else filler
                if proposal != tokens[at + accepted]:
                    break
                accepted += 1
            found[0, at], found[1, at], found[2, at] = first, count, accepted
    return found
