"""Draft trees: replay against real decoding of toy models, best trees against all trees, draws against every outcome."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaprof.theory.trees import (
    NodePath,
    Tree,
    expected_tokens,
    optimal_tree,
    path_lengths,
    replay_tree,
    tree_by_heap,
    tree_by_program,
)
from alphaprof.totals.replay import Rounds, Trace, replay, run_lengths
from tests.loops import each
from tests.reference import accepted_lengths

Array = np.ndarray[Any, Any]
READY = 256  # `proposed` of a draft that is always ready
OPTIMISERS = (tree_by_heap, tree_by_program, optimal_tree)


def bounds(lengths: list[int]) -> tuple[Array, Array]:
    """Where documents begin and end that follow each other."""
    stop = np.cumsum(lengths)
    return stop - np.array(lengths), stop


def random_paths(rng: np.random.Generator, nodes: int, width: int) -> set[NodePath]:
    """The paths of a random tree, which may leave ranks out; grown from random nodes, the newest one more often."""
    paths: list[NodePath] = [()]
    while len(set(paths)) <= nodes:
        parent = paths[-1] if rng.random() < 0.4 else paths[int(rng.integers(len(paths)))]
        paths.append((*parent, int(rng.integers(1, width + 1))))
    return set(paths) - {()}


# Trees.


def test_a_full_tree_by_hand() -> None:
    tree = Tree.full(2, 2)
    assert tree.paths == ((1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2))
    assert (tree.nodes, tree.depth, tree.width) == (6, 2, 2)
    assert Tree.full(3, 4).nodes == 3 + 9 + 27 + 81


def test_a_tree_without_nodes_is_plain_decoding() -> None:
    tree = Tree.from_paths([])
    assert tree == Tree.chain(0) == Tree.full(3, 0)
    assert (tree.nodes, tree.depth, tree.width) == (0, 0, 0)
    found = replay_tree(np.array([1, 1, 1, 1]), *bounds([4]), tree)
    assert (found.rounds.tolist(), found.tokens.tolist(), accepted_lengths(found).tolist()) == ([3], [3], [[3]])
    assert expected_tokens(tree, np.array([0.5])) == 1


# Replay.


def test_rounds_of_a_tree_by_hand() -> None:
    """1 2 leaves the tree at 2; 2 1 reaches a leaf and 3 is the target's own; 1 and the end."""
    tree = Tree.from_paths([(1,), (2,), (1, 1), (2, 1)])
    ranks, (start, stop) = np.array([9, 1, 2, 2, 1, 3, 1]), bounds([7])
    assert path_lengths(ranks, stop, tree).tolist() == [0, 1, 1, 2, 1, 0, 1]
    found = replay_tree(ranks, start, stop, tree)
    assert found.rounds.tolist() == [3]
    assert found.tokens.tolist() == [6]
    assert found.accepted.tolist() == [[3, 1]]
    assert found.drafted.tolist() == [[3, 3]]
    assert accepted_lengths(found).tolist() == [[0, 2, 1]]


def test_rounds_of_a_heads_tree_by_hand() -> None:
    """The second draft of the round at 1 has rank 2 as such, and as a first one rank 1: the path is 1, then 2."""
    tree = Tree.from_paths([(1,), (1, 2)])
    ranks, (start, stop) = np.array([[1, 1], [1, 1], [1, 2], [1, 1], [1, 1]]), bounds([5])
    assert path_lengths(ranks, stop, tree).tolist() == [1, 2, 1, 1, 1]
    assert accepted_lengths(replay_tree(ranks, start, stop, tree)).tolist() == [[0, 1, 1]]
    with pytest.raises(ValueError, match="3 levels, but ranks are known for 2"):
        path_lengths(ranks, stop, Tree.chain(3))


@each("seed", range(20))
def test_rounds_of_a_heads_tree_are_those_of_a_walk_down_the_tree(seed: int) -> None:
    """Node by node, with the rank that the token has at the node's level."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 12)
    ranks = rng.integers(0, 4, (int(lengths.sum()), 3))
    ranks[:, 0] = np.maximum(ranks[:, 0], rng.random(len(ranks)) < 0.9)
    tree = Tree.from_paths([(1,), (2,), (1, 1), (1, 2), (2, 1), (1, 2, 1), (1, 2, 2), (2, 1, 3), (2, 1, 1), (2, 1, 2)])
    rounds, accepted, first = [], np.zeros((len(lengths), 3)), 0
    for number, length in enumerate(lengths):
        at, count = 1, 0
        while at < length:
            path: tuple[int, ...] = ()
            while len(path) < 3 and at + len(path) < length:
                node = (*path, int(ranks[first + at + len(path), len(path)]))
                if node not in tree.paths:
                    break
                path = node
            accepted[number, : len(path)] += 1
            at, count = at + len(path) + 1, count + 1
        rounds.append(count)
        first += length
    found = replay_tree(ranks, *bounds(lengths.tolist()), tree)
    assert found.rounds.tolist() == rounds
    assert found.accepted.tolist() == accepted.tolist()


@dataclass(frozen=True)
class Toy:
    """A target and a draft that know the position and the last token: `own` [positions, V] the target's choice, `order`
    [positions, V, V] the draft's tokens from its top one on, `silent` [positions, V] where it proposes nothing.
    """

    own: Array
    order: Array
    silent: Array

    @classmethod
    def draw(cls, rng: np.random.Generator, size: int, vocabulary: int) -> Toy:
        """Random ones; the draft is good on some stretches and bad on others."""
        logits = rng.normal(size=(size, vocabulary, vocabulary))
        hard = (np.arange(size) // rng.integers(1, 8)) % 2
        noise = np.where(hard, 2.0, 0.3)[:, None, None] * rng.normal(size=logits.shape)
        silent = rng.random((size, vocabulary)) < rng.choice([0.0, 0.15])
        return cls(logits.argmax(-1), (-logits - noise).argsort(-1), silent)

    def text(self) -> list[int]:
        """What the target writes by itself."""
        written = [0]  # the prompt
        for own in self.own:
            written.append(int(own[written[-1]]))
        return written[1:]

    def ranks(self) -> list[int]:
        """Of the text's tokens in the draft's order, from one teacher-forced pass; 0 where it is silent."""
        found, last = [], 0
        for place, token in enumerate(self.text()):
            rank = self.order[place, last].tolist().index(token) + 1
            found.append(0 if self.silent[place, last] else rank)
            last = token
        return found

    def drafted(self, text: list[int], paths: set[NodePath]) -> dict[NodePath, list[int]]:
        """The texts that the nodes of a tree stand for: each draft asked in the context of its own branch."""
        written: dict[NodePath, list[int]] = {(): text}
        for path in sorted(paths, key=len):
            before = written.get(path[:-1])
            if before is None or len(before) == len(self.own) or self.silent[len(before), before[-1]]:
                continue
            if path[-1] <= self.order.shape[-1]:
                written[path] = [*before, int(self.order[len(before), before[-1], path[-1] - 1])]
        return written

    def decode(self, paths: set[NodePath]) -> list[tuple[int, int]]:
        """Tree decoding as an engine does it: (accepted, emitted) of each round."""
        text, found = self.text()[:1], list[tuple[int, int]]()
        while len(text) < len(self.own):
            written, node = self.drafted(text, paths), NodePath()
            while len(after := written[node]) < len(self.own):
                own = int(self.own[len(after), after[-1]])
                verified = [path for path in written if path and path[:-1] == node and written[path][-1] == own]
                if not verified:
                    after = [*after, own]
                    break
                (node,) = verified
            found.append((len(node), len(after) - len(text)))
            text = after
        assert text == self.text()
        return found


def test_replay_equals_real_tree_decoding_of_toy_models() -> None:
    """Hundreds of documents, each decoded token by token with a random tree, off-path drafts included."""
    compared, accepted_at_all, seen = 0, 0, set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sizes = [1, 2, *rng.integers(1, 30, 3).tolist()]
        toys = [Toy.draw(rng, size, int(rng.integers(2, 7))) for size in rng.permutation(sizes)]
        ranks = np.array([rank for toy in toys for rank in toy.ranks()])
        start, stop = bounds([len(toy.own) for toy in toys])
        for nodes in (1, 4, 9, 25):
            paths = random_paths(rng, nodes, int(rng.integers(2, 6)))
            tree = Tree.from_paths(paths)
            found = replay_tree(ranks, start, stop, tree)
            lengths = accepted_lengths(found)
            for index, toy in enumerate(toys):
                rounds = toy.decode(paths)
                counted = Counter(accepted for accepted, _ in rounds)
                assert found.rounds[index] == len(rounds)
                assert found.tokens[index] == sum(emitted for _, emitted in rounds) == len(toy.own) - 1
                assert lengths[index].tolist() == [counted[length] for length in range(tree.depth + 1)]
                compared += 1
                accepted_at_all += sum(accepted for accepted, _ in rounds)
                seen |= set(counted)
    assert compared == 1200
    assert accepted_at_all > 1000
    assert seen >= {0, 1, 2, 3, 4}


def assert_equal(found: Rounds, expected: Rounds) -> None:
    """The same counts, exactly."""
    for item in fields(Rounds):
        assert getattr(found, item.name).tolist() == getattr(expected, item.name).tolist(), item.name


documents = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=6)


@given(documents, st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_a_full_tree_is_replay_of_ranks_within_its_width(given_documents: list[list[int]], width: int, depth: int) -> None:
    """Every count, for width 1 of the chain."""
    ranks = np.array(list(itertools.chain(*given_documents)))
    start, stop = bounds([len(document) for document in given_documents])
    run = run_lengths((ranks >= 1) & (ranks <= width), start, stop)
    plain = Trace(run, np.where(ranks >= 1, READY, 0), start, stop)
    assert_equal(replay_tree(ranks, start, stop, Tree.full(width, depth)), replay(plain, depth))
    if width == 1:
        assert Tree.chain(depth) == Tree.full(1, depth)


# The model.


def random_shares(rng: np.random.Generator, ranks: int) -> Array:
    """Positive, below 1 in sum."""
    return rng.dirichlet(np.full(ranks + 1, rng.choice([0.3, 1.0, 3.0])))[:-1]


def test_expected_tokens_is_the_mean_over_every_sequence_of_independent_ranks() -> None:
    """Rank 0 standing for all that is not among the shares."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        shares = random_shares(rng, 3)
        tree = Tree.from_paths(random_paths(rng, 8, 3))
        size = min(tree.depth, 6)
        tree = Tree(tuple(path for path in tree.paths if len(path) <= size))
        every = np.array(list(itertools.product(range(4), repeat=size)))
        chances = np.append(1 - shares.sum(), shares)[every].prod(1)
        lengths = path_lengths(every.ravel(), np.arange(size, every.size + 1, size), tree)[::size]
        assert expected_tokens(tree, shares) == pytest.approx(float(chances @ (lengths + 1)), abs=1e-12)


# The best tree.


@cache
def every_tree(most: int, width: int) -> list[frozenset[NodePath]]:
    """All trees of at most so many nodes and so large ranks."""
    found, newest = {frozenset[NodePath]()}, {frozenset[NodePath]()}
    for _ in range(most):
        newest = {
            tree | {(*parent, rank)}
            for tree in newest
            for parent in [(), *tree]
            for rank in range(1, width + 1)
            if (*parent, rank) not in tree
        }
        found |= newest
    return list(found)


def gapless(tree: frozenset[NodePath]) -> bool:
    """Whether each child has all siblings of smaller rank."""
    return all(path[-1] == 1 or (*path[:-1], path[-1] - 1) in tree for path in tree)


def value(tree: frozenset[NodePath], shares: Array) -> float:
    """Expected tokens, written out."""
    return 1.0 + sum(float(np.prod([shares[rank - 1] for rank in path])) for path in tree)


def best_value(trees: list[frozenset[NodePath]], shares: Array, nodes: int, depth: int | None) -> float:
    """The most tokens that any of the trees within the limits gives."""
    deepest = nodes if depth is None else depth
    return max(value(tree, shares) for tree in trees if len(tree) <= nodes and all(len(path) <= deepest for path in tree))


def assert_within(tree: Tree, width: int, nodes: int, depth: int | None) -> None:
    """As large as was asked for, or full, and no rank left out."""
    capacity = math.inf if depth is None else Tree.full(width, depth).nodes
    assert tree.nodes == min(nodes, capacity)
    assert tree.depth <= (nodes if depth is None else depth)
    assert gapless(frozenset(tree.paths))


LIMITS = [(nodes, depth) for nodes in range(6) for depth in (None, 0, 1, 2, 3)]


@each("ranks", [1, 2, 3])
def test_the_best_of_all_trees_is_found_where_shares_fall(ranks: int) -> None:
    """By the heap and by the program, among trees that may leave ranks out."""
    rng = np.random.default_rng(ranks)
    for _ in range(6):
        shares = np.sort(random_shares(rng, ranks))[::-1]
        for nodes, depth in LIMITS:
            best = best_value(every_tree(5, ranks), shares, nodes, depth)
            for build in OPTIMISERS:
                tree = build(shares, nodes, depth)
                assert_within(tree, ranks, nodes, depth)
                assert expected_tokens(tree, shares) == pytest.approx(best, abs=1e-12)


@each("ranks", [2, 3])
def test_the_best_of_all_trees_without_gaps_is_found_for_any_shares(ranks: int) -> None:
    """By the program, which the choice between the two takes where shares rise."""
    rng = np.random.default_rng(10 + ranks)
    trees = [tree for tree in every_tree(5, ranks) if gapless(tree)]
    for _ in range(10):
        shares = random_shares(rng, ranks)
        for nodes, depth in LIMITS:
            best = best_value(trees, shares, nodes, depth)
            for build in (tree_by_program, optimal_tree):
                tree = build(shares, nodes, depth)
                assert_within(tree, ranks, nodes, depth)
                assert expected_tokens(tree, shares) == pytest.approx(best, abs=1e-12)


# Several draws from the draft.


Law = list[Fraction]


TREES = {"chain": Tree.chain(5), "full": Tree.full(2, 3), "best": optimal_tree(np.array([0.55, 0.15, 0.1]), 20)}


def tokens_per_round(ranks: Array, tree: Tree) -> tuple[float, float]:
    """Of documents [documents, positions] by replay, and its standard error over documents."""
    stop = np.arange(1, len(ranks) + 1) * ranks.shape[1]
    found = replay_tree(ranks.ravel(), stop - ranks.shape[1], stop, tree)
    ratio = float(found.tokens.sum() / found.rounds.sum())
    off = found.tokens - ratio * found.rounds
    return ratio, math.sqrt(len(off) * float(off.var(ddof=1))) / float(found.rounds.sum())


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_replay_of_independent_ranks_agrees_with_the_model_within_its_error(tree: Tree) -> None:
    ranks = np.random.default_rng(4).choice(5, size=(40, 8000), p=[0.1, 0.55, 0.15, 0.1, 0.1])
    found, error = tokens_per_round(ranks, tree)
    assert error < 0.005
    shares = np.array([(ranks == rank).mean() for rank in (1, 2, 3)])
    assert abs(found - expected_tokens(tree, shares)) < 4 * error


@pytest.mark.parametrize("depth", [None, 1, 2, 4])
def test_heap_and_program_agree_on_large_trees(depth: int | None) -> None:
    rng = np.random.default_rng(6)
    for ranks, nodes in itertools.product((1, 2, 5, 9), (7, 30, 64)):
        shares = np.sort(random_shares(rng, ranks))[::-1]
        heap, program = (build(shares, nodes, depth) for build in (tree_by_heap, tree_by_program))
        assert expected_tokens(heap, shares) == pytest.approx(expected_tokens(program, shares), abs=1e-12)
        assert heap.nodes == program.nodes
