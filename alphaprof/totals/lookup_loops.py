"""The loop of `lookup.offers`, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from alphaprof.stats.compiled import compiled

Array = np.ndarray[Any, Any]


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
            place = places[at]
            there = 0
            if place >= 0:
                there = (at if place >= start[text] else stop[place]) - place
            count = min(limit, there)
            filler = tokens[at - 1]
            first = tokens[place] if there > 0 else -1
            if padded and at > start[text]:
                count = limit
                first = first if there > 0 else filler
            accepted = 0
            while accepted < count and at + accepted < end:
                proposal = tokens[place + accepted] if accepted < there else filler
                if proposal != tokens[at + accepted]:
                    break
                accepted += 1
            found[0, at], found[1, at], found[2, at] = first, count, accepted
    return found
