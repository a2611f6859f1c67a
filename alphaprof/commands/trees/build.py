"""What static draft trees would give on the text that a run measured, by exact replay of ranks. No verdict: verification of
trees is not timed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alphaprof.commands.trees.model import OwnTree, StaticTree, TextTrees, TreesReport, TreeTokens
from alphaprof.commands.trees.sample import Sample, sample_of
from alphaprof.costs.speedup import Mix, free_draft, spent_and_base
from alphaprof.log.run_draft import Side
from alphaprof.report.speeds import tokens_interval
from alphaprof.report.verdict import Question
from alphaprof.stats.estimate import Interval, by_cluster, distinct, ratio, share_interval
from alphaprof.stats.paired import inverse_difference
from alphaprof.theory.ranks import Mask, replayed
from alphaprof.theory.trees import Tree, expected_tokens, optimal_tree
from alphaprof.totals.replay import RoundCounts, Rounds
from alphaprof.totals.texts import Text
from alphaprof.version import __version__

Array = np.ndarray[Any, Any]
SHOWN = 8  # ranks whose shares are told
CHOICE = 64  # largest rank of a chosen tree
NODES = (4, 8, 16, 32, 64)
OPTIMAL = "optimal"
NOTE = "paths: ranks from 1, the draft's top token; lists of Medusa and EAGLE count from 0"
ONE = Mix(("text",), (1.0,))  # one kind of text alone


@dataclass(frozen=True)
class TreeRequest:
    """`nodes`: sizes of the trees that are chosen, ascending; empty: none. `depth`: most levels of those; None: the largest
    gamma of the run. `given`: the user's trees by name.
    """

    nodes: tuple[int, ...] = NODES
    depth: int | None = None
    given: Mapping[str, Tree] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """The largest rank that matters."""
        return max([SHOWN, min(CHOICE, max(self.nodes, default=0)), *(tree.width for tree in self.given.values())])


def request_of(nodes: Sequence[int] | None, depth: int | None, given: Mapping[str, Tree]) -> TreeRequest:
    """What the command line asks for: None is the default, and a size of 0 no tree."""
    sizes = NODES if nodes is None else tuple(sorted(set(nodes) - {0}))
    return TreeRequest(sizes, depth, given)


@dataclass(frozen=True)
class Replay:
    """A tree with its rounds on some documents: `rows` of the documents table, ascending."""

    shape: StaticTree
    rows: Array
    rounds: Rounds

    def counts(self, sample: Sample, rows: Array) -> RoundCounts:
        """Rounds of some of its documents."""
        return RoundCounts.of(self.rounds, sample.cluster[self.rows]).rows(np.searchsorted(self.rows, rows))

    def accepted(self, rows: Array) -> Array:
        """Their rounds that accepted at least d = 1, ..., depth drafts, [depth]."""
        return np.asarray(self.rounds.accepted[np.searchsorted(self.rows, rows)].sum(0))


@dataclass(frozen=True)
class Group:
    """Documents with one number of tokens per round: rows by domain, how domains are put together, b_r [width] of all."""

    rows: Sequence[Array]
    mix: Mix
    shares: Array | None


def build_trees(side: Side, request: TreeRequest | None = None) -> TreesReport:
    """What trees give one draft of a run. Raises `OptionInvalid` for a draft without ranks, and `RunUnreadable`."""
    request = request or TreeRequest()
    manifest = side.run.manifest
    confidence = Question.of(manifest.config).confidence
    depth = request.depth or max(side.run.gammas)
    sample = sample_of(side.run, side.draft, request.width, bool(request.nodes))
    shapes = _shapes(sample, request, depth)
    common = _replays(side, [(shape, sample.tested) for shape in shapes])
    largest = next((item for item in reversed(common) if item.shape.kind == OPTIMAL), None)
    alone = _alone(sample, request, depth) if largest else {}
    own = dict(zip(alone, _replays(side, alone.values()), strict=True))
    domains = [domain for domain, weight in sample.weights.items() if weight > 0]
    rows = [sample.domain(domain, sample.tested) for domain in domains]
    traffic = Group(rows, sample.mix(domains), sample.pooled(sample.tested))
    return TreesReport(
        alphaprof=__version__,
        run=str(side.run.path),
        draft=side.draft,
        complete=manifest.status == "complete",
        confidence=confidence,
        held_out=bool(request.nodes),
        chosen_on=int(sample.choosing.sum()),
        tested_on=int(sample.tested.sum()),
        weights=sample.weights,
        weights_observed=sample.weights_observed,
        note=NOTE,
        trees=shapes,
        traffic=tuple(_tokens(item, sample, traffic, confidence) for item in common),
        texts=tuple(
            _text(text, sample, common, _own(own.get(index), largest, sample, confidence), confidence)
            for index, text in enumerate(sample.texts)
        ),
    )


def _shapes(sample: Sample, request: TreeRequest, depth: int) -> tuple[StaticTree, ...]:
    """The trees for all traffic: chosen ones by size, the user's, and a chain for every depth that these have."""
    shares, found = sample.pooled(sample.choosing), list[StaticTree]()
    if shares is not None:
        found += [_shape(f"optimal {size}", OPTIMAL, optimal_tree(shares[:CHOICE], size, depth)) for size in request.nodes]
    found += [_shape(name, "file", tree) for name, tree in request.given.items()]
    depths = sorted({shape.depth for shape in found} - {0})
    return (*found, *(_shape(f"chain {levels}", "chain", Tree.chain(levels)) for levels in depths))


def _alone(sample: Sample, request: TreeRequest, depth: int) -> dict[int, tuple[StaticTree, Mask]]:
    """The best tree of the largest size for each text alone, by its index, with the documents to test it on."""
    found = {}
    for index, text in enumerate(sample.texts):
        chosen, mask = text.rows[sample.choosing[text.rows]], np.zeros(len(sample.tested), dtype=bool)
        mask[text.rows] = sample.tested[text.rows]
        if len(chosen) and mask.any():
            tree = optimal_tree(sample.ranks.shares(chosen)[:CHOICE], max(request.nodes), depth)
            found[index] = (_shape(f"own {max(request.nodes)}", OPTIMAL, tree), mask)
    return found


def _shape(name: str, kind: str, tree: Tree) -> StaticTree:
    levels = np.bincount([len(path) for path in tree.paths], minlength=1)[1:]
    return StaticTree(name, kind, tree.nodes, tree.depth, tuple(levels.tolist()), tree.paths)


def _replays(side: Side, asked: Collection[tuple[StaticTree, Mask]]) -> list[Replay]:
    jobs = [(Tree(shape.paths), mask) for shape, mask in asked]
    rounds = replayed(side.run, side.draft, jobs)
    return [Replay(shape, np.flatnonzero(mask), found) for (shape, mask), found in zip(asked, rounds, strict=True)]


def _tokens(item: Replay, sample: Sample, group: Group, confidence: float) -> TreeTokens:
    """Rounds with one tree on a group of documents."""
    shape = item.shape
    counts = [item.counts(sample, rows) for rows in group.rows]
    rounds = int(sum(found.rounds.sum() for found in counts))
    free = group.mix.speedup(counts, free_draft(shape.depth))
    if free is None or group.shares is None:
        return TreeTokens(shape.name, rounds, None, None, None, (None,) * shape.depth)
    promised = expected_tokens(Tree(shape.paths), group.shares)
    scale = [1.0] * len(counts)
    if group.mix.weights is not None:
        scale = [weight / each.tokens.sum() for weight, each in zip(group.mix.weights, counts, strict=True)]
    ready = sum(factor * found.drafted[:, :1].sum() for factor, found in zip(scale, counts, strict=True))
    accepted = sum(factor * item.accepted(rows) for factor, rows in zip(scale, group.rows, strict=True))
    return TreeTokens(
        tree=shape.name,
        rounds=rounds,
        tokens_per_round=tokens_interval(free, shape.depth, confidence),
        iid_tokens_per_round=promised,
        iid_error=promised / free.value - 1,
        marginal=tuple(float(count / ready) if ready else None for count in np.asarray(accepted)),
    )


def _text(text: Text, sample: Sample, common: Sequence[Replay], own: OwnTree | None, confidence: float) -> TextTrees:
    cluster, ranks = sample.cluster[text.rows], sample.ranks
    tested = text.rows[sample.tested[text.rows]]

    def share(positions: Array) -> Interval:
        found = share_interval(ratio(*by_cluster(cluster, positions[text.rows], ranks.positions[text.rows])), confidence)
        return Interval(found.value, found.low, found.high)

    group = Group([tested], ONE, ranks.shares(tested) if len(tested) else None)
    return TextTrees(
        domain=text.domain,
        continuation=text.continuation,
        sampling=text.sampling,
        on_policy=bool(text.policy),
        documents=len(text.rows),
        clusters=distinct(cluster),
        positions=int(ranks.positions[text.rows].sum()),
        ranks=tuple(share(ranks.counts[:, rank]) for rank in range(SHOWN)),
        beyond=share(ranks.positions - ranks.silent - ranks.counts[:, :SHOWN].sum(1)),
        silent=share(ranks.silent),
        tested_documents=len(tested),
        tested_clusters=distinct(sample.cluster[tested]),
        trees=tuple(_tokens(item, sample, group, confidence) for item in common) if len(tested) else (),
        own=own,
        reason=_reason(text, tested),
    )


def _reason(text: Text, tested: Array) -> str:
    """Why a text has no rounds; empty where it has."""
    if not text.policy:
        return "the target did not choose this text, so that no tree has rounds on it"
    return "" if len(tested) else "none of its documents is in the tested half: profile four or more"


def _own(item: Replay | None, common: Replay | None, sample: Sample, confidence: float) -> OwnTree | None:
    """A text's own tree against the one of that size for all traffic, on the documents that test it."""
    if item is None or common is None:
        return None
    rows, depth = item.rows, item.shape.depth
    tokens = _tokens(item, sample, Group([rows], ONE, sample.ranks.shares(rows)), confidence)
    same = item.shape.paths == common.shape.paths
    if tokens.tokens_per_round is None or same:
        return OwnTree(item.shape, tokens, same, None)
    sides = [spent_and_base(found.counts(sample, rows), free_draft(found.shape.depth)) for found in (common, item)]
    found = inverse_difference(sides[0], sides[1], confidence, depth)
    return OwnTree(item.shape, tokens, same, Interval(found.value, found.low, found.high))
