"""From the position log to ranks: how often each rank occurs, and rounds with draft trees; per document, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphaprof.errors import OptionInvalid
from alphaprof.log.store import Run
from alphaprof.theory.trees import Tree, replay_tree
from alphaprof.totals.replay import Ints, Rounds

Array = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Ranks:
    """The ranks of one shard: `ranks` [positions] of the emitted tokens in the draft's distribution, 0 where the draft
    proposes nothing; `start`, `stop` [documents of the shard]: where each document begins and ends.
    """

    ranks: Ints
    start: Ints
    stop: Ints

    def of(self, chosen: Mask) -> Ranks:
        """Some of the documents [documents of the shard], following each other without gaps."""
        lengths = self.stop - self.start
        stop = np.cumsum(lengths[chosen])
        return Ranks(self.ranks[np.repeat(chosen, lengths)], stop - lengths[chosen], stop)


@dataclass(frozen=True)
class RankCounts:
    """`counts` [documents, width]: positions whose token has rank 1, ..., width; `positions` [documents]: all of them;
    `silent` [documents]: those without a proposal.
    """

    counts: Ints
    positions: Ints
    silent: Ints

    def shares(self, rows: Array) -> Array:
        """b_r over some documents, [width]. They have positions."""
        return np.asarray(self.counts[rows].sum(0) / self.positions[rows].sum())


def rank_counts(run: Run, draft: str, width: int) -> RankCounts:
    """Ranks of every document of complete shards, in the order of `run.documents()`. Raises as `read_ranks`."""
    none = np.zeros((0, width + 2), dtype=np.int64)
    tables = [none]
    for shard in read_ranks(run, draft):
        document = np.repeat(np.arange(len(shard.start)), shard.stop - shard.start)
        place = document * (width + 2) + np.minimum(shard.ranks, width + 1)
        tables.append(np.bincount(place, minlength=len(shard.start) * (width + 2)).reshape(-1, width + 2))
    found = np.concatenate(tables)
    return RankCounts(found[:, 1 : width + 1], found.sum(1), found[:, 0])


def replayed(run: Run, draft: str, jobs: Sequence[tuple[Tree, Mask]]) -> list[Rounds]:
    """Rounds with each tree of the documents that its mask [documents of the run] names, counted per named document.

    One pass over the log; what is held are counts. Raises as `read_ranks`.
    """
    found = [Rounds.none(int(chosen.sum()), tree.depth) for tree, chosen in jobs]
    filled, first = [0] * len(jobs), 0
    for shard in read_ranks(run, draft):
        rows = slice(first, first + len(shard.start))
        for index, (tree, chosen) in enumerate(jobs):
            part = shard.of(chosen[rows])
            target = slice(filled[index], filled[index] + len(part.start))
            _put(found[index], target, replay_tree(part.ranks, part.start, part.stop, tree))
            filled[index] = target.stop
        first = rows.stop
    return found


def _put(whole: Rounds, rows: slice, part: Rounds) -> None:
    """Counts of some documents in their place among all."""
    for name in ("rounds", "tokens", "drafted", "tested", "accepted"):
        getattr(whole, name)[rows] = getattr(part, name)


def read_ranks(run: Run, draft: str) -> Iterator[Ranks]:
    """The ranks of complete shards in order. Raises `OptionInvalid` for a draft whose log has none, and `RunUnreadable`."""
    if run.manifest.drafts[draft].kind == "prompt_lookup":
        raise _without_ranks(run, draft)
    for shard in run.shards:
        length = run.continuations(shard.index, ["continuation_tokens"])["continuation_tokens"].to_numpy()
        log = run.positions(draft, shard.index, ["draft_rank_of_token", "proposed"])
        ranks = log["draft_rank_of_token"].fill_null(0).to_numpy().astype(np.int64)
        if ((log["proposed"].to_numpy() > 0) & (ranks == 0)).any():
            raise _without_ranks(run, draft)
        stop = np.cumsum(length).astype(np.int64)
        yield Ranks(ranks, stop - length, stop)


def _without_ranks(run: Run, draft: str) -> OptionInvalid:
    others = [name for name, facts in run.manifest.drafts.items() if facts.kind != "prompt_lookup" and name != draft]
    instead = f", or name another draft: {', '.join(f'{run.path}:{name}' for name in others)}" if others else ""
    return OptionInvalid(
        f"draft {draft} of {run.path} has no ranks: it proposes one chain of tokens, not a distribution",
        f"its rounds are in alphaprof report {run.path}{instead}",
    )
