"""What prompt lookup would propose at each place of texts, all texts of a shard at once: by sorting, without a model.

The matching is that of `profiling.models.drafts`, which proposes whole runs and is built for one text that grows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
NONE = -1
LONGEST = 3  # tokens of the longest run that is looked up: the default of `max_ngram`


def first_proposals(tokens: Ints, start: Ints, longest: int = LONGEST) -> Ints:
    """The first token that prompt lookup proposes for each place of several texts, [tokens]; NONE: no match.

    The texts follow each other in `tokens` and begin at `start` [texts]; none is empty. A place is looked up by the tokens
    before it: the last `longest` of them, else fewer, where they first stood in the same text.
    """
    found = np.full(len(tokens), NONE, dtype=np.int64)
    if len(tokens) == 0:
        return found
    text = np.repeat(np.arange(len(start)), np.diff([*start, len(tokens)]))
    offset = np.arange(len(tokens)) - start[text]
    _, single = np.unique(tokens, return_inverse=True)
    wide = int(single.max()) + 1
    run = text  # a number for each run of tokens that ends at a place; at first for the empty one, which tells texts apart
    match = np.full(len(tokens), NONE, dtype=np.int64)
    for size in range(1, longest + 1):
        ends = np.flatnonzero(offset >= size - 1)
        before = run[ends] if size == 1 else run[ends - 1]
        _, first, numbers = np.unique(before * wide + single[ends], return_index=True, return_inverse=True)
        run = np.zeros(len(tokens), dtype=np.int64)
        run[ends] = numbers
        earlier = ends[first[numbers]]
        match[ends] = np.where(earlier < ends, earlier, match[ends])
    places = np.flatnonzero(offset > 0)
    known = places[match[places - 1] >= 0]
    found[known] = tokens[match[known - 1] + 1]
    return found
