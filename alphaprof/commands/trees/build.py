"""What static draft trees would give on the text that a run measured, by exact replay of ranks. No verdict: verification of
trees is not timed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from alphaprof.commands.trees.answer import OPTIMAL, OwnTree, StaticTree, TextTrees, TreesReport, TreeTokens
from alphaprof.costs.speedup import Mix, free_draft, spent_and_base
from alphaprof.errors import OptionInvalid, cut
from alphaprof.log.run_draft import RunDraft
from alphaprof.log.store import Run
from alphaprof.report.decision import held_out
from alphaprof.report.speeds import tokens_interval
from alphaprof.stats.estimate import Interval, by_cluster, distinct, ratio, share_interval
from alphaprof.stats.paired import inverse_difference
from alphaprof.theory.trees import Mask, RankCounts, Tree, expected_tokens, optimal_tree, rank_counts, replayed
from alphaprof.totals.documents import Documents, TextGroup, Units, observed_weights, strata_of
from alphaprof.totals.replay import RoundCounts, Rounds
from alphaprof.version import __version__

MOST_NODES, MOST_LEVELS, MOST_RANK = 1024, 64, 1024  # beyond what any engine verifies at once
Array = np.ndarray[Any, Any]
SHOWN = 8  # ranks whose shares are shown
CHOICE = 64  # largest rank of a chosen tree
NODES = (4, 8, 16, 32, 64)
NOTE = "paths: ranks from 1, the draft's top token; lists of Medusa and EAGLE count from 0"
ONE = Mix(("text",), (1.0,))  # one kind of text alone


def read_trees(paths: Sequence[Path], top: int) -> dict[str, Tree]:
    """Trees by the names of their files; by whole paths where names are the same. `top`: see `read_tree`."""
    distinct = list(dict.fromkeys(paths))
    names = [path.name for path in distinct]
    return {str(path) if names.count(path.name) > 1 else path.name: read_tree(path, top) for path in distinct}


def read_tree(path: Path, top: int) -> Tree:
    """The tree in a file; `top`: how it calls the draft's top token, 0 or 1. Raises `OptionInvalid`."""
    name = cut(str(path))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(f"cannot read the tree {name}: {error.strerror}", "correct the path after --tree") from None
    except (ValueError, RecursionError):
        raise OptionInvalid(f"{name} is not JSON", _form(top)) from None
    if not _paths(content):
        raise OptionInvalid(f"{name} is not a list of paths", _form(top))
    if len(content) > MOST_NODES or max(map(len, content)) > MOST_LEVELS or max(map(max, content)) > MOST_RANK:
        limits = f"at most {MOST_NODES} nodes, {MOST_LEVELS} levels and rank {MOST_RANK}"
        raise OptionInvalid(f"{name} holds a larger tree than any engine verifies", f"give a tree of {limits}")
    try:
        tree = Tree.from_paths(content, top)
    except ValueError as error:
        raise OptionInvalid(f"{name} is not a tree: {error}", _other(top)) from None
    if (1,) not in tree.paths:
        raise OptionInvalid(f"{name} never drafts the draft's top token", _other(top))
    return tree


def _paths(content: Any) -> bool:
    """Whether it is a list of lists of whole numbers, none of them empty."""
    return isinstance(content, list) and bool(content) and all(map(_path, content))


def _path(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(rank) is int for rank in value)


def _form(top: int) -> str:
    return f"write the paths of all nodes without the root: [[{top}], [{top + 1}], [{top}, {top}]]"


def _other(top: int) -> str:
    return f"ranks count from {top} (--top {1 - top} changes that), and each path needs the path of its parent"


@dataclass(frozen=True)
class TreeSample:
    """The documents of a run. `cluster`, `choosing`, `tested` [documents]: the independent unit of each, and the halves that
    trees are chosen and tested on; where nothing is chosen all are tested. Text that the target did not choose is in
    neither. `weights`: shares of output tokens of the domains that have other text, adding up to 1; `weights_observed`: not
    from the profile; `strata` [units]: see `strata_of`.
    """

    texts: tuple[TextGroup, ...]
    cluster: Array
    ranks: RankCounts
    choosing: Mask
    tested: Mask
    weights: dict[str, float]
    weights_observed: bool
    strata: Array

    def mix(self, domains: Collection[str]) -> Mix:
        """How some of its domains are put together: by the profile's weights, or as they were drawn."""
        if self.weights_observed:
            return Mix(tuple(domains), None, self.strata)
        return Mix.of({domain: self.weights[domain] for domain in domains})

    def domain(self, name: str, chosen: Mask) -> Array:
        """Those of the chosen documents that lie in a domain."""
        rows = np.concatenate([text.rows for text in self.texts if text.domain == name])
        return np.asarray(rows[chosen[rows]])

    def pooled(self, chosen: Mask) -> Array | None:
        """b_r of the traffic from the chosen documents, [width]: domains by their weights. None without such documents."""
        rows = {domain: self.domain(domain, chosen) for domain, weight in self.weights.items() if weight > 0}
        counted = {domain: self.weights[domain] for domain in rows if len(rows[domain])}
        parts = [weight * self.ranks.shares(rows[domain]) for domain, weight in counted.items()]
        return np.asarray(sum(parts) / sum(counted.values())) if parts else None


def tree_sample(run: Run, draft: str, width: int, chooses: bool) -> TreeSample:
    """The documents of complete shards, with ranks 1 to `width` counted. `chooses`: trees are to be chosen on one half.

    Raises as `rank_counts`.
    """
    documents = run.documents()
    grouped = Documents.of(documents)
    own = np.zeros(len(documents), dtype=bool)
    for text in grouped.groups:
        own[text.rows] = bool(text.policy)
    tested = _tested(grouped.groups, grouped.units) if chooses else own
    observed = observed_weights(documents.filter(pa.array(own)))
    weights = _given(run.manifest.config["decision"]["weights"], observed, {text.domain for text in grouped.groups})
    return TreeSample(
        grouped.groups,
        grouped.units.codes,
        rank_counts(run, draft, width),
        own & ~tested,
        tested,
        weights or observed,
        weights is None,
        strata_of(grouped, run.manifest),
    )


def _tested(groups: tuple[TextGroup, ...], units: Units) -> Mask:
    """The held-out half [documents] of the text that the target chose; no cluster lies in both halves."""
    members = {
        f"{text.domain} {text.continuation} {text.sampling}": (text.rows, units.take(text.rows).lots)
        for text in groups
        if text.policy
    }
    tested = np.zeros(len(units.codes), dtype=bool)
    for name, mask in held_out({name: found for name, (_, found) in members.items()}).items():
        tested[members[name][0]] = mask
    return tested


def _given(weights: Mapping[str, float] | None, observed: Mapping[str, float], domains: set[str]) -> dict[str, float] | None:
    """The profile's weights of the observed domains, made to add up to 1; None where they do not fit the data."""
    if weights is None or set(weights) != domains:
        return None
    total = sum(weights[domain] for domain in observed)
    return {domain: weights[domain] / total for domain in observed} if total > 0 else None


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

    def counts(self, sample: TreeSample, rows: Array) -> RoundCounts:
        """Rounds of some of its documents."""
        return RoundCounts.of(self.rounds, sample.cluster[self.rows]).rows(np.searchsorted(self.rows, rows))

    def accepted(self, rows: Array) -> Array:
        """Their rounds that accepted at least d = 1, ..., depth drafts, [depth]."""
        return np.asarray(self.rounds.accepted[np.searchsorted(self.rows, rows)].sum(0))


@dataclass(frozen=True)
class TreeGroup:
    """Documents with one number of tokens per round: rows by domain, how domains are put together, b_r [width] of all."""

    rows: Sequence[Array]
    mix: Mix
    shares: Array | None


def build_trees(side: RunDraft, request: TreeRequest | None = None) -> TreesReport:
    """What trees give one draft of a run. Raises `OptionInvalid` for a draft without ranks, and `RunUnreadable`."""
    request = request or TreeRequest()
    manifest = side.run.manifest
    confidence = manifest.config["decision"]["confidence"]
    depth = request.depth or max(side.run.gammas)
    sample = tree_sample(side.run, side.draft, request.width, bool(request.nodes))
    shapes = _shapes(sample, request, depth)
    common = _replays(side, [(shape, sample.tested) for shape in shapes])
    largest = next((item for item in reversed(common) if item.shape.kind == OPTIMAL), None)
    alone = _alone(sample, request, depth) if largest else {}
    own = dict(zip(alone, _replays(side, alone.values()), strict=True))
    domains = [domain for domain, weight in sample.weights.items() if weight > 0]
    rows = [sample.domain(domain, sample.tested) for domain in domains]
    traffic = TreeGroup(rows, sample.mix(domains), sample.pooled(sample.tested))
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


def _shapes(sample: TreeSample, request: TreeRequest, depth: int) -> tuple[StaticTree, ...]:
    """The trees for all traffic: chosen ones by size, the user's, and a chain for every depth that these have."""
    shares, shapes = sample.pooled(sample.choosing), list[StaticTree]()
    if shares is not None:
        shapes += [_shape(f"optimal {size}", OPTIMAL, optimal_tree(shares[:CHOICE], size, depth)) for size in request.nodes]
    shapes += [_shape(name, "file", tree) for name, tree in request.given.items()]
    depths = sorted({shape.depth for shape in shapes} - {0})
    return (*shapes, *(_shape(f"chain {levels}", "chain", Tree.chain(levels)) for levels in depths))


def _alone(sample: TreeSample, request: TreeRequest, depth: int) -> dict[int, tuple[StaticTree, Mask]]:
    """The best tree of the largest size for each text alone, by its index, with the documents to test it on."""
    trees = {}
    for index, text in enumerate(sample.texts):
        chosen, mask = text.rows[sample.choosing[text.rows]], np.zeros(len(sample.tested), dtype=bool)
        mask[text.rows] = sample.tested[text.rows]
        if len(chosen) and mask.any():
            tree = optimal_tree(sample.ranks.shares(chosen)[:CHOICE], max(request.nodes), depth)
            trees[index] = (_shape(f"own {max(request.nodes)}", OPTIMAL, tree), mask)
    return trees


def _shape(name: str, kind: str, tree: Tree) -> StaticTree:
    levels = np.bincount([len(path) for path in tree.paths], minlength=1)[1:]
    return StaticTree(name, kind, tree.nodes, tree.depth, tuple(levels.tolist()), tree.paths)


def _replays(side: RunDraft, asked: Collection[tuple[StaticTree, Mask]]) -> list[Replay]:
    jobs = [(Tree(shape.paths), mask) for shape, mask in asked]
    rounds = replayed(side.run, side.draft, jobs)
    return [Replay(shape, np.flatnonzero(mask), found) for (shape, mask), found in zip(asked, rounds, strict=True)]


def _tokens(item: Replay, sample: TreeSample, group: TreeGroup, confidence: float) -> TreeTokens:
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


def _text(
    text: TextGroup, sample: TreeSample, common: Sequence[Replay], own: OwnTree | None, confidence: float
) -> TextTrees:
    cluster, ranks = sample.cluster[text.rows], sample.ranks
    tested = text.rows[sample.tested[text.rows]]

    def share(positions: Array) -> Interval:
        return share_interval(ratio(*by_cluster(cluster, positions[text.rows], ranks.positions[text.rows])), confidence)

    group = TreeGroup([tested], ONE, ranks.shares(tested) if len(tested) else None)
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


def _reason(text: TextGroup, tested: Array) -> str:
    """Why a text has no rounds; empty where it has."""
    if not text.policy:
        return "the target did not choose this text, so no tree has rounds on it"
    return "" if len(tested) else "none of its documents is in the tested half: profile four or more"


def _own(item: Replay | None, common: Replay | None, sample: TreeSample, confidence: float) -> OwnTree | None:
    """A text's own tree against the one of that size for all traffic, on the documents that test it."""
    if item is None or common is None:
        return None
    rows, depth = item.rows, item.shape.depth
    tokens = _tokens(item, sample, TreeGroup([rows], ONE, sample.ranks.shares(rows)), confidence)
    same = item.shape.paths == common.shape.paths
    if tokens.tokens_per_round is None or same:
        return OwnTree(item.shape, tokens, same, None)
    sides = [spent_and_base(tree.counts(sample, rows), free_draft(tree.shape.depth)) for tree in (common, item)]
    return OwnTree(item.shape, tokens, same, inverse_difference(sides[0], sides[1], confidence, depth))
