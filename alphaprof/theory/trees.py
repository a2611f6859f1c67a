"""Draft trees: their rounds from a log of ranks, and the best tree of a size."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from alphaprof.errors import OptionInvalid
from alphaprof.run.reader import Run
from alphaprof.run.schema import deeper_names
from alphaprof.stats.estimate import Array
from alphaprof.totals.replay import Ints, Rounds, Trace, replay

NodePath = tuple[int, ...]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Tree:
    """A static draft tree: the paths of its nodes without the root, shallow ones first, then by rank.

    Made by `chain`, `full` and `from_paths`, which keep that order and leave no node without its parent.
    """

    paths: tuple[NodePath, ...]

    @classmethod
    def chain(cls, gamma: int) -> Tree:
        """Return the draft's top token, gamma times: no tree at all."""
        return cls.full(1, gamma)

    @classmethod
    def full(cls, width: int, depth: int) -> Tree:
        """Return the `width` top tokens beneath every node above `depth`."""
        ranks = range(1, width + 1)
        return cls(tuple(path for length in range(1, depth + 1) for path in itertools.product(ranks, repeat=length)))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], top: int = 1) -> Tree:
        """Return a tree from the paths of its nodes, in any order. `top`: how they call the draft's top token; Medusa's and
        EAGLE's lists call it 0. ValueError for a path that is empty, double, impossible or parentless; TypeError for 1.5.
        """
        nodes: dict[NodePath, NodePath] = {}
        for given in map(tuple, paths):
            path = tuple(operator.index(rank) - top + 1 for rank in given)
            if not path or min(path) < 1:
                raise ValueError(f"path {given} is not a node: ranks count from {top} (see `top`), and the root is left out")
            if path in nodes:
                raise ValueError(f"path {given} appears twice")
            nodes[path] = given
        for path, given in nodes.items():
            if len(path) > 1 and path[:-1] not in nodes:
                raise ValueError(f"path {given} needs its parent {given[:-1]}, which the tree lacks")
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @property
    def nodes(self) -> int:
        """How many tokens are drafted."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """How many drafts a round can accept at most."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def width(self) -> int:
        """The largest rank in the tree."""
        return max((path[-1] for path in self.paths), default=0)

    @cached_property
    def children(self) -> Ints:
        """The child of each node at each rank 0..width + 1, [nodes + 1, width + 2]. The root is 0 and node n the n-th of
        `paths`; 0 if there is no child.
        """
        number = {path: index for index, path in enumerate(((), *self.paths))}
        table = np.zeros((self.nodes + 1, self.width + 2), dtype=np.int64)
        for path in self.paths:
            table[number[path[:-1]], path[-1]] = number[path]
        return table


def path_lengths(ranks: Array, stop: Ints, tree: Tree) -> Ints:
    """For each position how many drafts a round that starts there would get accepted, [positions].

    `ranks` [positions]: rank of the emitted token in the draft's distribution; below 1, or NaN, where the draft proposes
    nothing. Of a head [positions, depths]: as draft 1, 2, ... of a round; ValueError for a tree of more levels. `stop`
    [documents]: where each document ends.
    """
    depths = ranks.shape[1] if ranks.ndim > 1 else 1
    if 1 < depths < tree.depth:
        raise ValueError(f"the tree has {tree.depth} levels, but ranks are known for {depths}")
    labels = np.zeros((len(ranks) + tree.depth, depths), dtype=np.int64)
    labels[: len(ranks)] = np.where(ranks >= 1, np.minimum(ranks, tree.width + 1), 0).reshape(len(ranks), depths)
    lengths = np.zeros(len(ranks), dtype=np.int64)
    going, node = np.arange(len(ranks)), np.zeros(len(ranks), dtype=np.int64)
    for level in range(tree.depth):
        node = tree.children[node, labels[going + level, min(level, depths - 1)]]
        going, node = going[node > 0], node[node > 0]
        lengths[going] += 1
    ends = np.full(len(ranks) + 1, len(ranks))
    ends[stop] = stop
    next_end = np.minimum.accumulate(ends[:0:-1])[::-1]
    return np.asarray(np.minimum(lengths, next_end - np.arange(len(ranks))))


def replay_tree(ranks: Array, start: Ints, stop: Ints, tree: Tree) -> Rounds:
    """Return all rounds of all documents with one tree, counted per document and depth of the tree.

    `ranks`, `stop` as in `path_lengths`, `start` [documents]: where each document begins.
    """
    lengths = path_lengths(ranks, stop, tree)
    proposed = np.where((ranks if ranks.ndim == 1 else ranks[:, 0]) >= 1, tree.depth, 0)
    return replay(Trace(lengths, proposed, start, stop), tree.depth)


def expected_tokens(tree: Tree, shares: Array) -> float:
    """Return tokens per verification if ranks were independent with shares b_r [R]: the sum over nodes, root included, of
    the product of b on the path (positional acceptance of Sequoia, Chen et al. 2024, arXiv:2402.12374).
    """
    return 1 + math.fsum(math.prod(float(shares[rank - 1]) for rank in path) for path in tree.paths)


def optimal_tree(shares: Array, nodes: int, depth: int | None = None) -> Tree:
    """Return the tree of at most `nodes` nodes and `depth` levels that `expected_tokens` likes best, for any shares b_r [R].

    Beside a child of rank r it has all of smaller rank: engines take the top tokens, and draws come in order. It has fewer
    nodes than asked for where more would add nothing.
    """
    rising = (np.diff(shares) > 0).any()
    return (tree_by_program if rising else tree_by_heap)(shares, nodes, depth)


def tree_by_heap(shares: Array, nodes: int, depth: int | None = None) -> Tree:
    """`optimal_tree` for b_1 >= b_2 >= ..., the nodes with the largest products of b, since none beats its parent or
    the sibling before it.
    """
    paths: list[NodePath] = []
    heap: list[tuple[float, NodePath, float]] = [(-float(shares[0]), (1,), 1.0)]  # negative product, path, parent's product
    while heap and len(paths) < nodes:
        negative, path, parent = heapq.heappop(heap)
        if negative == 0 or (depth is not None and len(path) > depth):
            continue
        paths.append(path)
        heapq.heappush(heap, (negative * float(shares[0]), (*path, 1), -negative))
        if (rank := path[-1]) < len(shares):
            heapq.heappush(heap, (-parent * float(shares[rank]), (*path[:-1], rank + 1), parent))
    return Tree.from_paths(paths)


def tree_by_program(shares: Array, nodes: int, depth: int | None = None) -> Tree:
    """`optimal_tree` for any b, by Sequoia's dynamic program (arXiv:2402.12374) in O(levels R nodes^2).

    T(n) = 1 + F(n - 1, 1) is the best value of a subtree of n nodes, its root included; F(n, r), of n nodes as children of
    rank r and more beneath one node, is 0 (none) or the maximum over j of b_r T(j) + F(n - j, r + 1), j >= 1 nodes being in
    the subtree of child r. One table T for each number of levels beneath the root, until one more level changes nothing.
    """
    below = np.arange(nodes + 1)[:, None] - np.arange(nodes + 1)  # n - j
    subtree = np.minimum(np.arange(nodes + 1), 1).astype(np.float64)  # T of j nodes, without a level beneath
    splits = [np.zeros((0, nodes + 1), dtype=np.int64)]  # by number of levels: the j of each rank, [R, n]
    for _ in range(nodes if depth is None else min(depth, nodes)):
        rest, split = np.zeros(nodes + 1), np.zeros((len(shares), nodes + 1), dtype=np.int64)
        for index in reversed(range(len(shares))):
            value = np.where(below >= 0, shares[index] * subtree + rest[below], -np.inf)
            value[:, 0] = 0.0
            split[index], rest = value.argmax(1), value.max(1)
        grown = np.append(0.0, 1 + rest[:-1])
        splits.append(split)
        if (grown == subtree).all():
            break
        subtree = grown
    return Tree.from_paths(_unfold(splits, nodes))


def _unfold(splits: list[Array], nodes: int) -> list[NodePath]:
    """Return the paths of the tree that the program chose, from its tables of splits; that of no levels is empty."""
    paths: list[NodePath] = []
    open_nodes: list[tuple[NodePath, int]] = [((), nodes)]  # nodes with children to come, and how many nodes go beneath
    while open_nodes:
        parent, left = open_nodes.pop()
        for rank, row in enumerate(splits[-1 - len(parent)], 1):
            if (taken := int(row[left])) == 0:
                break
            paths.append((*parent, rank))
            open_nodes.append(((*parent, rank), taken - 1))
            left -= taken
    return paths


@dataclass(frozen=True)
class Ranks:
    """The ranks of one shard: `ranks` [positions] of the emitted tokens in the draft's distribution, 0 if the draft
    proposes nothing; of a head [positions, depths]; `start`, `stop` [documents of the shard]: where each document begins and
    ends.
    """

    ranks: Ints
    start: Ints
    stop: Ints

    def of(self, chosen: Mask) -> Ranks:
        """Return some of the documents [documents of the shard], following each other without gaps."""
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
    """Return ranks of every document of complete shards, in the order of `run.documents()`: a head's, of first drafts.
    Raises as `read_ranks`.
    """
    tables = [np.zeros((0, width + 2), dtype=np.int64)]
    for shard in read_ranks(run, draft):
        document = np.repeat(np.arange(len(shard.start)), shard.stop - shard.start)
        ranks = shard.ranks if shard.ranks.ndim == 1 else shard.ranks[:, 0]
        place = document * (width + 2) + np.minimum(ranks, width + 1)
        tables.append(np.bincount(place, minlength=len(shard.start) * (width + 2)).reshape(-1, width + 2))
    counts = np.concatenate(tables)
    return RankCounts(counts[:, 1 : width + 1], counts.sum(1), counts[:, 0])


def replayed(run: Run, draft: str, jobs: Sequence[tuple[Tree, Mask]]) -> list[Rounds]:
    """Return rounds with each tree of the documents that its mask [documents of the run] names, counted per named document,
    in one pass over the log. Raises as `read_ranks`.
    """
    parts, first = [[Rounds.none(0, tree.depth)] for tree, _ in jobs], 0
    for shard in read_ranks(run, draft):
        for counted, (tree, chosen) in zip(parts, jobs, strict=True):
            some = shard.of(chosen[first : first + len(shard.start)])
            counted.append(replay_tree(some.ranks, some.start, some.stop, tree))
        first += len(shard.start)
    return [Rounds(*map(np.concatenate, zip(*(vars(part).values() for part in each), strict=True))) for each in parts]


def read_ranks(run: Run, draft: str) -> Iterator[Ranks]:
    """Yield the ranks of complete shards in order. Raises `OptionInvalid` for a draft whose log has none, and
    `RunUnreadable`.
    """
    run.require_positions()
    facts = run.manifest.drafts[draft]
    if not facts.has_distribution:
        raise _without_ranks(run, draft)
    if facts.by_depth and not facts.ranks_by_depth:
        raise OptionInvalid(
            f"the log of draft {draft} of {run.path} has no ranks by depth, which trees of a head need",
            f"profile again with drafts.{draft}.ranks_by_depth: true; --reuse-continuations keeps the text",
        )
    deeper = deeper_names("draft_rank_of_token", facts.depths)
    for shard in run.shards:
        length = run.continuations(shard.index, ["continuation_tokens"])["continuation_tokens"].to_numpy()
        log = run.positions(draft, shard.index, ["draft_rank_of_token", "proposed", *deeper])
        ranks = log["draft_rank_of_token"].fill_null(0).to_numpy().astype(np.int64)
        if ((log["proposed"].to_numpy() > 0) & (ranks == 0)).any():
            raise _without_ranks(run, draft)
        stop = np.cumsum(length).astype(np.int64)
        if facts.by_depth:
            ranks = np.stack([ranks, *(log[name].fill_null(0).to_numpy().astype(np.int64) for name in deeper)], 1)
        yield Ranks(ranks, stop - length, stop)


def _without_ranks(run: Run, draft: str) -> OptionInvalid:
    others = [name for name, facts in run.manifest.drafts.items() if facts.has_distribution and name != draft]
    instead = f", or name another draft: {', '.join(f'{run.path}:{name}' for name in others)}" if others else ""
    return OptionInvalid(
        f"draft {draft} of {run.path} has no ranks: it proposes one chain of tokens, not a distribution",
        f"see its rounds in alphaprof report {shlex.quote(str(run.path))}{instead}",
    )
