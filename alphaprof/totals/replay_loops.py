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
    general = blocks or kept.shape[1] > 1
    state = np.empty(gammas.max() + 1)  # [i]: probability that i drafts of the current round were accepted
    weight = np.empty(gammas.max() + 1)  # [i]: of its beginning, times the ratios of i drafts
    drafts = np.empty(gammas.max() + 1)  # [n]: expected rounds that drafted exactly n tokens
    for document in range(len(documents[0])):
        start, stop = documents[0][document], documents[1][document]
        first = 0
        for index, gamma in enumerate(gammas):
            tested, accepted = depths[1, document, first : first + gamma], depths[2, document, first : first + gamma]
            state[:] = weight[:] = 0.0
            state[0] = 1.0
            drafts[:] = 0.0
            for at in range(start + 1, stop):
                rounds[index, document] += state[0]
                drafts[min(gamma, most[at])] += state[0]
                deepest = min(gamma - 1, at - start)  # a draft is tested where its round has one left
                if general:
                    chain, ends = (state, weight, tested, accepted), (most, before_end, drafts, gamma)
                    emitted, off = _test(chain, ends, (kept[at], accept[at]), (at, deepest), blocks)
                    state[0] = 1.0 - emitted
                    control[index, document] += off
                    continue
                a = kept[at, 0]
                total = 0.0
                for i in range(deepest, -1, -1):
                    reached = _drafted(drafts, (most[at - i], before_end[at - i], gamma), i, state[i])
                    tested[i] += reached
                    accepted[i] += a * reached
                    state[i + 1] = a * reached
                    total += reached
                state[0] = 1.0 - a * total
                control[index, document] += total * (a - accept[at, 0])
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
    most, before_end, kept = positions
    rounds, chance = np.empty((len(most) * (gamma + 1), 5), dtype=np.int64), np.empty(len(most) * (gamma + 1))
    begins = np.zeros(len(most) + 1)  # probability that a round begins at a position
    columns, count = kept.shape[1], 0
    for document in range(len(documents[0])):
        start, stop = documents[0][document], documents[1][document]
        begins[start + 1] = 1.0
        for at in range(start + 1, stop):
            drafted, reached, weight = min(gamma, most[at]), begins[at], begins[at]
            longest = min(drafted, before_end[at], stop - at)
            if columns > 1:
                longest = min(longest, columns)
            for accepted in range(longest + 1):
                after = 0.0
                if accepted < longest:
                    a = kept[at + accepted, accepted if columns > 1 else 0]
                    weight = min(a * weight, HUGE)
                    after = min(reached, weight) if blocks else a * reached
                if reached > after:
                    emitted = min(accepted + 1, stop - at)
                    ended = accepted == before_end[at] and at + accepted < stop
                    rounds[count] = np.array((document, at, accepted if ended else drafted, accepted, emitted))
                    chance[count] = reached - after
                    begins[at + emitted] += reached - after
                    count += 1
                reached = after
    return rounds[:count], chance[:count]


@compiled
def _drafted(drafts: Array, lengths: tuple[int, int, int], accepted: int, chance: float) -> float:
    """Return the chance of one more draft after those that were accepted, and note what a round drafts once that is known:
    at its own end.
    """
    most, before_end, gamma = lengths
    left = before_end - accepted
    if left == 0:
        drafts[min(gamma, most)] -= chance
        drafts[before_end] += chance
    return chance if left > 0 else 0.0


@compiled
def _test(
    chain: tuple[Array, Array, Array, Array],
    ends: tuple[Array, Array, Array, int],
    chances: tuple[Array, Array],
    place: tuple[int, int],
    blocks: bool,
) -> tuple[float, float]:
    """Test a draft of each round at a position, where a_t and beta_t [depths] depend on the depth, or rounds are verified in
    blocks: how many drafts are kept, and by how many that is off the mean.

    Given the text, a block keeps at least i drafts with the probability min over j = 0..i of the product of its first j
    ratios q/p (docs/theory.md, part 6).
    """
    state, weight, tested, accepted = chain
    (kept, accept), (at, deepest) = chances, place
    most, before_end, drafts, gamma = ends
    by_depth = len(kept) > 1
    weight[0] = state[0]
    emitted = off = 0.0
    for i in range(min(deepest, len(kept) - 1) if by_depth else deepest, -1, -1):
        column = i if by_depth else 0
        a = kept[column]
        reached = _drafted(drafts, (most[at - i], before_end[at - i], gamma), i, state[i])
        weight[i + 1] = min(a * weight[i], HUGE)
        after = min(reached, weight[i + 1]) if blocks else a * reached
        tested[i] += reached
        accepted[i] += after
        state[i + 1] = after
        emitted += after
        off += (min(a, 1.0) - accept[column]) * reached
    return emitted, off


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
