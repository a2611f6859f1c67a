"""Where drafts are right: acceptance in tenths of the positions, by the target's margin and by its entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alphaprof.log.store import Run
from alphaprof.rules import GREEDY, BoundRule
from alphaprof.totals.count import columns_of
from alphaprof.totals.log_sample import AXES, shards

Array = np.ndarray[Any, Any]


def accepted_by_tenth(
    run: Run, draft: str, rules: Sequence[BoundRule], edges: Mapping[str, Array]
) -> dict[tuple[str, str], Array]:
    """By id of the rule and axis, counts [documents, bins, 2]: positions with a proposal, and the sum of beta_t over them.

    `edges`: see `certified.decile_edges`. Nothing where the run has no complete shard.
    """
    names = list(dict.fromkeys([*columns_of([rule.id for rule in rules]), *AXES.values()]))
    parts: dict[tuple[str, str], list[Array]] = {}
    for columns, shape in shards(run, draft, names):
        columns["greedy"] = shape.each(shape.policy == GREEDY)
        proposed = columns["proposed"] > 0
        documents = len(shape.document)
        document = shape.each(np.arange(documents))
        accepted = {rule.id: np.where(proposed, rule.accept(columns), 0.0) for rule in rules}
        for axis, name in AXES.items():
            size = len(edges[axis]) + 1
            cell = document * size + np.searchsorted(edges[axis], columns[name], side="right")
            for rule, accept in accepted.items():
                counts = [np.bincount(cell, values, documents * size) for values in (proposed, accept)]
                parts.setdefault((rule, axis), []).append(np.stack(counts, axis=-1).reshape(documents, size, 2))
    return {key: np.concatenate(found) for key, found in parts.items()}
